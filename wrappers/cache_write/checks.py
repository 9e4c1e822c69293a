"""Checks of a call that writes rows. Every message names an argument of the caller's function."""

from typing import Any

import torch

from cute_kernels.cache_write.args import ANGLES
from cute_kernels.cache_write.rows import MAX_TRANSFORMED, ROTATED

from ..fp4 import BLOCK, SCALE_TYPES
from ..host.checks import (
    check_apart,
    check_device,
    check_last_stride,
    check_number,
    check_one_of,
    check_operand,
    check_shape,
    check_strided,
    swapped,
)
from ..host.plain import refuse_grad, traced
from ..host.scalars import check_scale, on_host
from .call import PAGES, ROWS, SLOTS, CacheWriteCall, QueryTransform

OFFSETS = (torch.int32, torch.int64)
WIDE = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = (*FP8, torch.int8)  # that rows are quantised to
SINGLE = (*BYTES, torch.uint8)  # of one byte
STORED = (*WIDE, *SINGLE)  # dtypes of a cache
APPEND, NVFP4_APPEND = "append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache"
NVFP4_SLOTS = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
NVFP4_MLA, KPE = "nvfp4_quantize_append_paged_mla_kv_cache", ", rotated part"  # and what its second call adds
QKV = "append_qkv"
_APPENDED = {
    "k": "append_key", "v": "append_value", "k_cache": "paged_kv_cache (K)", "v_cache": "paged_kv_cache (V)",
    "k_sf": "kv_cache_sf (K)", "v_sf": "kv_cache_sf (V)", "slots": "slot_mapping",
    "k_scale_ptr": "k_scale", "v_scale_ptr": "v_scale",
}  # fmt: skip
_QKV = {
    "k_cache": "cache.kv (K)", "v_cache": "cache.kv (V)", "k_sf": "cache.sf (K)", "v_sf": "cache.sf (V)",
    "slots": "places", "page_table": "places.block_table", "kv_indices": "places.kv_indices",
    "kv_indptr": "places.kv_indptr",
    "batch_indices": "places.batch_indices", "positions": "places.positions", "cu_seqlens": "places.cu_seqlens_q",
    "kv_lens": "places.seq_lens", "k_scale": "cache.k_scale", "v_scale": "cache.v_scale",
    "k_scale_ptr": "cache.k_scale", "v_scale_ptr": "cache.v_scale", "q_out": "out.out", "q_scale": "out.scale",
    "q_scale_ptr": "out.scale", "rope_positions": "rope.positions", "q_weight": "norm.q_weight",
    "k_weight": "norm.k_weight", "norm_eps": "norm.eps", "norm_offset": "norm.offset",
    "rope_table": "rope.cos_sin_cache", "v_sf_interleaved": "cache.v_sf_interleaved", "kv_layout": "cache.layout",
}  # fmt: skip
ROPE, ROPE_CACHED = "apply_rope", "apply_rope_with_cos_sin_cache"  # and all that differ from these in a suffix
ROPE_FP8, ROPE_FP8_PAGED = "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"
ROPE_FP8_MLA = ROPE_FP8_PAGED + ", MLA"
KVCACHE = "flash_attn_with_kvcache"
_KVCACHE = {
    "page_table": "block_table", "cu_seqlens": "cu_seqlens_k_new", "kv_lens": "cache_seqlens", "q_out": "q",
    "rope_cos": "rotary_cos", "rope_sin": "rotary_sin",
}  # fmt: skip
NOPE = ", not rotated"  # a second call of the functions that quantise
_ROPE = {
    "v": "k", "k_cache": "k", "v_cache": "k", "q_out": "q", "rope_positions": "pos_ids", "cu_seqlens": "indptr",
    "kv_lens": "offsets",
}  # fmt: skip
_ROPE_CACHED = {
    "q": "query", "q_out": "query", **dict.fromkeys(("k", "v", "k_cache", "v_cache"), "key"),
    "rope_positions": "positions", "rope_table": "cos_sin_cache",
}  # fmt: skip
_SCALES = {"k_scale": "quant_scale_kv", "v_scale": "quant_scale_kv", "q_scale": "quant_scale_q"}
_ANGLES = {"rope_positions": "pos_ids", "rope_table": "cos_sin_cache"}

_LATENT_PARTS = {"v": "k_nope", "v_cache": "paged_kv_cache (ckv)", "k_cache": "paged_kv_cache (kpe)"}


def _scale_names(name: str) -> dict[str, str]:
    """Return the names of a function with one scale."""
    return dict.fromkeys(("k_scale", "k_scale_ptr", "v_scale", "v_scale_ptr"), name)


def _part_names(part: str, paged: bool) -> dict[str, str]:
    """Return the names of a function that quantises, in a call of the parts "rope" or "nope"."""
    k, caches = f"k_{part}", dict.fromkeys(("k_cache", "v_cache"), f"k_{part}_out")
    if paged:
        caches = {"k_cache": "paged_kv_cache (K)", "v_cache": "paged_kv_cache (V)"}
    v = "v" if paged and part == "rope" else k
    return {**_SCALES, **_ANGLES, **caches, "k": k, "v": v, "q": f"q_{part}", "q_out": f"q_{part}_out"}


NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys((APPEND, NVFP4_APPEND, NVFP4_SLOTS), _APPENDED),
    NVFP4_MLA: {"k": "append_ckv", "k_cache": "ckv_cache", "k_sf": "ckv_sf_cache", **_scale_names("ckv_scale")},
    NVFP4_MLA + KPE: {"k": "append_kpe", "k_cache": "kpe_cache", **_scale_names("kpe_scale")},
    QKV: _QKV,
    KVCACHE: _KVCACHE,
    ROPE: _ROPE,
    ROPE_CACHED: _ROPE_CACHED,
    ROPE_FP8: _part_names("rope", False),
    ROPE_FP8 + NOPE: _part_names("nope", False),
    ROPE_FP8_PAGED: _part_names("rope", True),
    ROPE_FP8_PAGED + NOPE: _part_names("nope", True),
    ROPE_FP8_MLA: _part_names("rope", True) | _LATENT_PARTS,
    ROPE_FP8_MLA + NOPE: _part_names("nope", True) | dict.fromkeys(("k_cache", "v_cache"), "paged_kv_cache (ckv)"),
}
OUTPUTS = ("k_cache", "v_cache", "k_sf", "v_sf")
LISTS = (
    "batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "kv_last_page_len", "cu_seqlens", "kv_lens",
)  # fmt: skip
LAST_PAGES = (APPEND, NVFP4_APPEND, NVFP4_MLA, NVFP4_MLA + KPE)  # take kv_last_page_len
INPUTS = ("k", "v", "slots", *LISTS, "k_scale_ptr", "v_scale_ptr")


def name_of(call: CacheWriteCall, field: str) -> str:
    """Return the caller's name of a field."""
    return NAMES[call.function].get(field, field)


def block_scaled(call: CacheWriteCall) -> bool:
    """Return whether rows are quantised to NVFP4."""
    return call.k_sf is not None and not by_token(call)


def by_token(call: CacheWriteCall) -> bool:
    """Return whether each row has a scale of its own, which the call stores."""
    return of_rows(call.k_sf, call.k_cache)


def of_rows(sf: Any, cache: Any) -> bool:
    """Return whether the scale factors beside a cache are of rows. A cache of uint8 has them of blocks."""
    return getattr(sf, "dtype", None) is torch.float32 and getattr(cache, "dtype", None) is not torch.uint8


def converts(call: CacheWriteCall) -> bool:
    """Return whether rows may have another type than the cache: in all functions but `append_paged_kv_cache`, unless
    they have one byte and are only copied."""
    if call.function in (QKV, KVCACHE) and call.transform is None and not block_scaled(call):
        return getattr(call.k, "dtype", None) not in SINGLE
    return call.function != APPEND


def validate(call: CacheWriteCall) -> None:
    """Raise on the first argument that does not fit, before anything is written."""
    rows(call)
    caches(call)
    places(call)
    if call.transform is not None:
        transforms(call, call.transform)
    for side in ("k", "v") if converts(call) else ():
        name, tensor = name_of(call, f"{side}_scale"), getattr(call, f"{side}_scale_ptr")
        device = None if tensor is not None and on_host(tensor) else call.k.device
        owner = f"that of {name_of(call, 'k')}"
        check_scale(name, getattr(call, f"{side}_scale"), tensor, device, call.k.shape[1], owner, True)
    outputs, inputs = outputs_of(call), inputs_of(call)
    refuse_grad(inputs)
    refuse_grad(outputs)
    if not any(map(traced, outputs.values())):
        check_apart(outputs, inputs)


def outputs_of(call: CacheWriteCall) -> dict[str, torch.Tensor]:
    """Return the tensors that a call writes, by the caller's names."""
    found = {name_of(call, field): getattr(call, field) for field in fields_of(call, OUTPUTS)}
    if (t := call.transform) is not None:
        found |= {name_of(call, "q_out"): t.q_out, "kv_lens_out": t.kv_lens_out}
    return {name: t for name, t in found.items() if t is not None}


def inputs_of(call: CacheWriteCall) -> dict[str, torch.Tensor]:
    """Return the tensors that a call reads and does not write, by the caller's names."""
    found = {name_of(call, field): getattr(call, field) for field in fields_of(call, INPUTS)}
    if (t := call.transform) is not None:
        found |= {name_of(call, field): getattr(t, field) for field in TENSORS}
        if in_place(t.q, t.q_out):
            del found[name_of(call, "q")]
        if call.places == ROWS and in_place(call.k, call.k_cache[0]):
            del found[name_of(call, "k")]
    return {name: t for name, t in found.items() if t is not None}


def fields_of(call: CacheWriteCall, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields without those of V if no rows of V are written; their names may be those of K."""
    return fields if call.v.shape[1] else tuple(field for field in fields if field[0] != "v")


def in_place(x: Any, out: Any) -> bool:
    """Return whether the output of Q or K is the tensor itself: each row is read before it is written."""
    if x is None or out is x or traced(x) or traced(out):
        return out is x
    same = x.dtype == out.dtype and x.shape == out.shape and x.data_ptr() == out.data_ptr()
    return same and all(a == b or size == 1 for a, b, size in zip(x.stride(), out.stride(), x.shape))


def rows(call: CacheWriteCall) -> None:
    """Check the rows to write."""
    for field in ("k", "v"):
        name, t = name_of(call, field), getattr(call, field)
        check_one_of(f"{name}: dtype", check_strided(name, t, 3).dtype, WIDE if converts(call) else STORED)
        check_last_stride(name, t)
        if converts(call) and t.dtype != call.k.dtype:
            raise TypeError(f"{name}: dtype {t.dtype}, must be that of {name_of(call, 'k')}, {call.k.dtype}")
        if block_scaled(call) and t.shape[2] % BLOCK:
            raise ValueError(f"{name}: shape {tuple(t.shape)}, the last dimension must be a multiple of {BLOCK}")


def _as_nhd(call: CacheWriteCall, t: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the shape of a cache as (pages, P, H, D)."""
    return (t.shape[0], *((t.shape[1], t.shape[2]) if call.nhd else (t.shape[2], t.shape[1])), t.shape[3])


def _pair(call: CacheWriteCall, fields: tuple[str, str], dtypes: Any) -> None:
    """Check dtypes and devices of both caches or of both tensors of scale factors, and that they fit each other."""
    first, second = (getattr(call, field) for field in fields)
    for field in fields:
        name, t = name_of(call, field), getattr(call, field)
        check_one_of(f"{name}: dtype", check_strided(name, t, 4).dtype, dtypes)
        check_last_stride(name, t)
        check_device(name, t, call.k.device, f"that of {name_of(call, 'k')}")
    pair = name_of(call, fields[0]).removesuffix(" (K)")
    if first.dtype != second.dtype and dtypes is not SCALE_TYPES:
        raise TypeError(f"{pair}: K is {first.dtype} and V {second.dtype}, must be the same")
    if call.v.shape[1] and first.shape[1:3] != second.shape[1:3]:
        shapes = [_as_nhd(call, t) for t in (first, second)]
        raise ValueError(f"{pair}: K {shapes[0]} and V {shapes[1]} may differ in the first and last dimension only")


def caches(call: CacheWriteCall) -> None:
    """Check the caches, and that the rows fit them."""
    stored: tuple[torch.dtype, ...] = STORED
    if converts(call):
        if not block_scaled(call) and getattr(call.k_cache, "dtype", None) == torch.uint8:
            raise ValueError(
                f"{name_of(call, 'k_sf').removesuffix(' (K)')}: None, required with a cache of dtype torch.uint8"
            )
        stored = (torch.uint8,) if block_scaled(call) else BYTES if by_token(call) else (call.k.dtype, *BYTES)
    for field in ("k_sf", "v_sf") if block_scaled(call) else ():
        check_strided(name_of(call, field), getattr(call, field), 4)
    _pair(call, ("k_cache", "v_cache"), stored)
    if block_scaled(call):
        _pair(call, ("k_sf", "v_sf"), SCALE_TYPES)
    packed = 2 if block_scaled(call) else 1
    for side in ("k", "v"):
        name, t = name_of(call, side), getattr(call, side)
        cache_name, cache = name_of(call, f"{side}_cache"), getattr(call, f"{side}_cache")
        tokens = t.shape[0] if call.places == SLOTS else call.k.shape[0]  # SLOTS: `places` compares
        _, size, heads, dim = _as_nhd(call, cache)
        hint = swapped(t.shape[1] == size, heads, size, name_of(call, "kv_layout"))
        check_shape(name, t, (tokens, heads, dim * packed), f"rows, heads and head_dim of {cache_name}", hint)
        check_device(name, t, call.k.device, f"that of {name_of(call, 'k')}")
        if block_scaled(call):
            sf_name, sf = name_of(call, f"{side}_sf"), getattr(call, f"{side}_sf")
            shape = (*cache.shape[:3], cache.shape[3] * 2 // BLOCK)
            check_shape(sf_name, sf, shape, f"pages, Hkv and P of {cache_name}, and one factor for {BLOCK} values")
        elif by_token(call):
            sf_name, sf = name_of(call, f"{side}_sf"), getattr(call, f"{side}_sf")
            check_operand(sf_name, sf, 3, (torch.float32,), call.k.device, f"that of {name_of(call, 'k')}")
            check_shape(sf_name, sf, tuple(cache.shape[:3]), f"pages, Hkv and P of {cache_name}: one scale per row")
        elif not converts(call) and t.dtype != cache.dtype and not {t.dtype, cache.dtype} <= {*SCALE_TYPES}:
            wanted = f"must be that of {cache_name.removesuffix(f' ({side.upper()})')}, {cache.dtype}"
            raise TypeError(f"{name}: dtype {t.dtype}, {wanted}; convert it before the call")
    page_size = _as_nhd(call, call.k_cache)[1]
    name = name_of(call, "v_sf_interleaved")
    if call.v_sf_interleaved and page_size % 4:
        raise ValueError(f"{name}: pages of {page_size} rows, must be a multiple of 4")


def places(call: CacheWriteCall) -> None:
    """Check the tensors that say where rows go."""
    k, owner = name_of(call, "k"), f"that of {name_of(call, 'k')}"
    if call.places == SLOTS:
        check_operand(name_of(call, "slots"), call.slots, 1, OFFSETS, call.k.device, owner)
        slots = call.slots.shape[0]
        for field in ("k", "v"):
            if getattr(call, field).shape[0] < slots:
                name, count = name_of(call, field), getattr(call, field).shape[0]
                raise ValueError(f"{name}: {count} rows, must be at least the {slots} of {name_of(call, 'slots')}")
        return
    if call.places != PAGES:
        if call.cu_seqlens is not None:
            _requests(call, owner)
        return
    table = call.function in (QKV, KVCACHE) and call.kv_indptr is None
    needed = ["batch_indices", "positions", "kv_indices", "kv_indptr"]
    if table:
        needed = ["page_table", "cu_seqlens", "kv_lens"]
    needed += ["kv_last_page_len"] if call.function in LAST_PAGES else []
    for field in needed:
        ndim = 2 if table and field == "page_table" else 1
        check_operand(name_of(call, field), getattr(call, field), ndim, OFFSETS, call.k.device, owner)
    if table:
        batch = call.page_table.shape[0]
        check_shape(name_of(call, "cu_seqlens"), call.cu_seqlens, (batch + 1,), "requests, and one")
        check_shape(name_of(call, "kv_lens"), call.kv_lens, (batch,), "requests")
        return
    tokens = call.k.shape[0]
    for field in ("batch_indices", "positions"):
        check_shape(name_of(call, field), getattr(call, field), (tokens,), f"rows of {k}")
    name = name_of(call, "kv_indptr")
    if not call.kv_indptr.shape[0]:
        raise ValueError(f"{name}: shape (0,), must have at least 1 element")
    if call.function in LAST_PAGES:
        batch = call.kv_indptr.shape[0] - 1
        check_shape("kv_last_page_len", call.kv_last_page_len, (batch,), f"requests, one less than {name}")


def _requests(call: CacheWriteCall, owner: str) -> None:
    """Check the first token of each request and its position."""
    names = [name_of(call, field) for field in ("cu_seqlens", "kv_lens")]
    for name, t in zip(names, (call.cu_seqlens, call.kv_lens)):
        check_operand(name, t, 1, OFFSETS, call.k.device, owner)
    if not call.cu_seqlens.shape[0]:
        raise ValueError(f"{names[0]}: shape (0,), must have at least 1 element")
    check_shape(names[1], call.kv_lens, (call.cu_seqlens.shape[0] - 1,), f"requests, one less than {names[0]}")


def query_dtypes(k: torch.Tensor, k_cache: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes that the output of Q may have. No kernel of 16-bit caches has an 8-bit Q."""
    cache = getattr(k_cache, "dtype", k.dtype)
    return (k.dtype,) if cache == k.dtype else (k.dtype, cache if cache in FP8 else FP8[0])


TENSORS = ("q", "rope_table", "rope_positions", "q_weight", "k_weight", "q_scale_ptr", "rope_cos", "rope_sin")


def transforms(call: CacheWriteCall, t: QueryTransform) -> None:
    """Check Q, its output, the weights of norms and the rotary embedding."""
    tokens, heads, dim = call.k.shape
    q, k = name_of(call, "q"), name_of(call, "k")
    if dim > MAX_TRANSFORMED:
        raise ValueError(f"{k}: head_dim {dim}, must be at most {MAX_TRANSFORMED}")
    device, owner = call.k.device, f"that of {k}"
    queries = 0
    if t.q is not None:
        check_operand(q, t.q, 3, WIDE, device, owner)
        if t.q.dtype != call.k.dtype:
            raise TypeError(f"{q}: dtype {t.q.dtype}, must be {owner}, {call.k.dtype}")
        queries = t.q.shape[1]
        check_shape(q, t.q, (tokens, queries, dim), f"rows and head_dim of {k}")
        name = name_of(call, "q_out")
        check_operand(name, t.q_out, 3, query_dtypes(call.k, call.k_cache), device, owner)
        check_shape(name, t.q_out, tuple(t.q.shape), f"the shape of {q}")
        check_scale(name_of(call, "q_scale"), t.q_scale, t.q_scale_ptr, device, queries, owner, True)
    for field, count in (("q_weight", queries), ("k_weight", heads)):
        weight, name = getattr(t, field), name_of(call, field)
        if weight is not None:
            check_operand(name, weight, 2 if getattr(weight, "ndim", 0) == 2 else 1, (call.k.dtype,), device, owner)
            shape = (count, dim) if weight.ndim == 2 else (dim,)
            check_shape(name, weight, shape, "head_dim, or heads and head_dim")
            if not weight.is_contiguous():
                raise ValueError(f"{name}: strides {weight.stride()}, must be contiguous")
    name = name_of(call, "norm_eps")
    check_number(name, t.norm_eps)
    if t.norm_eps < 0:
        raise ValueError(f"{name}: {t.norm_eps}, must be at least 0")
    check_number(name_of(call, "norm_offset"), t.norm_offset)
    if call.k_cache.dtype != call.k.dtype and (t.rope_cos is not None or t.kv_lens_out is not None):
        raise NotImplementedError(
            f"{name_of(call, 'rope_cos')}: given with a cache of {call.k_cache.dtype}, must be None"
        )
    if t.rope_cos is not None:
        for field in ("rope_cos", "rope_sin"):
            rotation_table(name_of(call, field), getattr(t, field), call.k, 2)
        shape = tuple(t.rope_cos.shape)
        check_shape(name_of(call, "rope_sin"), t.rope_sin, shape, f"that of {name_of(call, 'rope_cos')}")
    elif t.rope_table is not None:
        rotation_table(name_of(call, "rope_table"), t.rope_table, call.k, 1)
    else:
        return
    name = name_of(call, "rope_positions")
    if t.rope_positions is not None:
        check_operand(name, t.rope_positions, 1, OFFSETS, device, owner)
        check_shape(name, t.rope_positions, (tokens,), f"rows of {k}")
    elif call.places != PAGES and call.cu_seqlens is None:
        kind = "turns" if t.rope & ANGLES else "cosines and sines"
        raise ValueError(f"{name}: None, required to rotate by {kind}, unless places are pages of requests")


def rotation_table(name: str, table: Any, k: torch.Tensor, tables: int) -> None:
    """Check a table of cosines and sines in fp32, or one of 2 tables of the rows' dtype."""
    check_operand(name, table, 2, (torch.float32,) if tables == 1 else (k.dtype,), k.device, "that of k")
    width, dim, size = table.shape[1], k.shape[2], 16 // tables
    if width % (ROTATED // tables) or not 0 < width <= dim // tables or not table.shape[0]:
        allowed = f"(at least 1, a multiple of {ROTATED // tables} up to {'half ' * (tables - 1)}head_dim {dim})"
        raise ValueError(f"{name}: shape {tuple(table.shape)}, must be {allowed}")
    step = table.stride(0) * table.element_size() if table.shape[0] > 1 else 0
    if step % size or not traced(table) and table.data_ptr() % size:
        raise ValueError(f"{name}: strides {table.stride()}, rows must begin at multiples of {size} bytes")
