"""Checks of a call that writes rows of latent attention. Every message names an argument of the caller's function."""

from typing import Any

import torch

from cute_kernels.records import INDEX, RECORDS, ROWS

from ..host.checks import (
    check_apart,
    check_operand,
    check_shape,
    check_strided,
    listed,
)
from ..host.plain import refuse_grad, traced
from ..host.scalars import check_scale, on_host
from .call import PAGES, SLOTS, LatentCall

OFFSETS = (torch.int32, torch.int64)
WIDE = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
BYTES = (torch.uint8, torch.int8, E4M3)  # dtypes of a cache of bytes
INDEX_ROTATED = (16, 32, 64, 128)  # values of an indexer's rows that may be rotated: half of them a power of two
LATENT, INDEXER, INDEXER_THERE = "append_latent", "append_latent, index", "append_latent, index at places"
CONCAT, FUSED = "concat_and_cache_mla", "concat_and_cache_mla_rope_fused"
CONCAT_Q, INDEX_CACHE = "concat_mla_q", "indexer_k_quant_and_cache"
CONCAT_K, MLA_APPEND = "concat_mla_k", "append_paged_mla_kv_cache"
MLA_ROPE, MLA_ROPE_PAGED = "mla_rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"
_PLACES = {
    "slots": "places", "page_table": "places.block_table", "kv_indices": "places.kv_indices",
    "kv_indptr": "places.kv_indptr", "batch_indices": "places.batch_indices", "positions": "places.positions",
    "cu_seqlens": "places.cu_seqlens_q", "kv_lens": "places.seq_lens", "rope_positions": "rope.positions",
    "rope_table": "rope.cos_sin_cache", "interleaved": "rope.interleaved",
}  # fmt: skip
_MLA_PARTS = {
    "kv": "k_nope", "pe": "k_rope", "q": "q_nope", "q_pe": "q_rope", "q_out": "q_rope_out",
    "rope_table": "cos_sin_cache", "rope_positions": "pos_ids", "scale": "quant_scale_kv", "q_scale": "quant_scale_q",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    LATENT: _PLACES | {
        "kv": "latent", "pe": "rotated", "cache": "cache.cache", "record": "cache.record",
        "pe_cache": "cache.rotated", "scale": "cache.scale",
        "scale_ptr": "cache.scale", "weight": "norm.weight", "norm_eps": "norm.eps", "norm_offset": "norm.offset",
        "q": "query.nope", "q_pe": "query.rotated", "q_out": "query.out", "q_scale": "query.scale",
        "q_scale_ptr": "query.scale", "pe_out": "rotated_out",
    },
    INDEXER: _PLACES | {
        "rope_positions": "index.rope.positions", "rope_table": "index.rope.cos_sin_cache",
        "kv": "index.k", "cache": "index.cache", "slots": "index.places", "weight": "index.weight",
        "bias": "index.bias", "norm_eps": "index.eps", "q": "index.q", "q_pe": "index.q", "q_out": "index.q_out",
        "weights": "index.weights", "weights_out": "index.weights_out", "weight_scale": "index.weight_scale",
    },
    CONCAT: {"kv": "kv_c", "pe": "k_pe", "cache": "kv_cache", "slots": "slot_mapping", "scale_ptr": "scale"},
    FUSED: {
        "kv": "kv_c", "pe": "k_pe", "cache": "kv_cache", "slots": "slot_mapping", "scale": "kv_cache_scale",
        "scale_ptr": "kv_cache_scale", "rope_table": "cos_sin_cache", "rope_positions": "positions", "q_out": "q_pe",
        "pe_out": "k_pe",
    },
    CONCAT_Q: {"q": "ql_nope"},
    INDEX_CACHE: {"kv": "k", "cache": "kv_cache", "slots": "slot_mapping"},
    MLA_APPEND: {"kv": "append_ckv", "pe": "append_kpe", "cache": "ckv_cache", "pe_cache": "kpe_cache"},
    CONCAT_K: {"q": "k_nope", "q_pe": "k_rope", "q_out": "k"},
    MLA_ROPE: _MLA_PARTS | {"cache": "k_nope_out", "pe_cache": "k_rope_out"},
    MLA_ROPE_PAGED: _MLA_PARTS | {"cache": "paged_kv_cache (ckv)", "pe_cache": "paged_kv_cache (kpe)"},
}  # fmt: skip
NAMES[INDEXER_THERE] = NAMES[INDEXER] | {"slots": "places"}
OUTPUTS = ("cache", "pe_cache", "q_out", "pe_out", "weights_out")
INPUTS = (
    "kv", "pe", "slots", "batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "kv_last_page_len",
    "cu_seqlens", "kv_lens", "weight", "rope_table", "rope_positions", "q_pe", "q", "scale_ptr", "q_scale_ptr", "bias",
    "weights",
)  # fmt: skip


def name_of(call: LatentCall, field: str) -> str:
    """Return the caller's name of a field: that of `NAMES`, else the field's own, which is then an argument of the
    function."""
    return NAMES[call.function].get(field, field)


def first_of(call: LatentCall) -> Any:
    """Return the tensor that decides the dtype and the device of the others."""
    return call.kv if call.kv is not None else call.q if call.q is not None else call.q_pe


def validate(call: LatentCall) -> None:
    """Raise on the first argument that does not fit, before anything is written."""
    outputs, inputs = operands(call)
    if call.index is not None:
        first, k = first_of(call), name_of(call.index, "kv")
        check_operand(k, call.index.kv, 2, (first.dtype,), first.device, f"that of {name_of(call, 'kv')}")
        check_shape(k, call.index.kv, (first.shape[0], call.index.kv.shape[1]), f"rows of {name_of(call, 'kv')}")
        more, others = operands(call.index)
        outputs, inputs = outputs | more, others | inputs
    refuse_grad({name: t for name, t in inputs.items() if t is not None})
    given = {name: t for name, t in outputs.items() if t is not None}
    refuse_grad(given)
    if not any(map(traced, given.values())):
        check_apart(given, inputs)


def operands(call: LatentCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs and the inputs of a call by their names, after a check of each, without that of the indexer's
    rows."""
    keys, queries = call.kv is not None, call.q_pe is not None
    if not keys and not queries:
        check_strided(name_of(call, "kv"), call.kv)
    if keys:
        rows(call)
        cache(call)
        places(call)
    if queries:
        query(call)
    norm(call)
    rotation(call)
    outputs = {name_of(call, field): getattr(call, field) for field in OUTPUTS if keys or field != "cache"}
    inputs = {name_of(call, field): getattr(call, field) for field in INPUTS}
    for x, out in (("pe", "pe_out"), ("q_pe", "q_out")):
        if in_place(getattr(call, x), getattr(call, out)):
            del inputs[name_of(call, x)]
    return outputs, inputs


def in_place(x: Any, out: Any) -> bool:
    """Return whether an output is the tensor itself: each row is read before it is written."""
    if x is None or out is None or out is x or traced(x) or traced(out):
        return out is not None and out is x
    return may_be_one(x, out) and x.data_ptr() == out.data_ptr()


def may_be_one(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether two tensors are one if they have one address."""
    same = x.dtype == out.dtype and x.shape == out.shape
    return same and all(a == b or size == 1 for a, b, size in zip(x.stride(), out.stride(), x.shape))


def check_dtype(name: str, t: torch.Tensor, first: torch.Tensor, owner: str) -> None:
    if t.dtype != first.dtype:
        raise TypeError(f"{name}: dtype {t.dtype}, must be that of {owner}, {first.dtype}")


def rows(call: LatentCall) -> None:
    """Check both parts of the rows."""
    kv, name, form = call.kv, name_of(call, "kv"), RECORDS[call.record]
    check_operand(name, kv, 2, WIDE, None)
    rotated = 0
    if call.pe is not None:
        part = name_of(call, "pe")
        check_operand(part, call.pe, 2, WIDE, kv.device, f"that of {name}")
        check_dtype(part, call.pe, kv, name)
        check_shape(part, call.pe, (kv.shape[0], call.pe.shape[1]), f"rows of {name}")
        rotated = call.pe.shape[1]
    latent = kv.shape[1]
    if call.record == INDEX:
        check_shape(name, kv, (kv.shape[0], form.latent), "rows, and values of a key of the indexer")
    elif form.rotated_as == "codes":
        if (latent, rotated) not in ((form.latent, 0), (form.latent - form.rotated, form.rotated)):
            allowed = f"{form.latent} and 0, or {form.latent - form.rotated} and {form.rotated}"
            raise ValueError(
                f"{name}: {latent} values, {rotated} of them rotated apart; record {call.record} has {allowed}"
            )
    elif form.latent:
        check_shape(name, kv, (kv.shape[0], form.latent), f"rows, and the latent of record {call.record}")
        if rotated not in (0, form.rotated):
            found, allowed = f"{name_of(call, 'pe')}: shape {tuple(call.pe.shape)}", f"0 or {form.rotated}"
            raise ValueError(f"{found}, must have {allowed if form.rotated else 0} columns in record {call.record}")
    if call.pe_out is not None:
        part = name_of(call, "pe_out")
        if call.pe is None or form.rotated_as == "codes":
            raise ValueError(f"{part}: given, must be None: record {call.record} has no rotated part apart")
        check_operand(part, call.pe_out, 2, (kv.dtype,), kv.device, f"that of {name}")
        check_shape(part, call.pe_out, tuple(call.pe.shape), f"that of {name_of(call, 'pe')}")


def cache(call: LatentCall) -> None:
    """Check the cache, and that the rows fit it."""
    kv, form, name = call.kv, RECORDS[call.record], name_of(call, "cache")
    dtypes = (kv.dtype,) if call.record == ROWS else BYTES
    owner = f"that of {name_of(call, 'kv')}"
    check_operand(name, call.cache, 3, dtypes, kv.device, owner)
    rotated = 0 if call.pe is None else call.pe.shape[1]
    wide = kv.shape[1] + (0 if call.pe_cache is not None else rotated)
    check_shape(
        name, call.cache, (*call.cache.shape[:2], form.token_bytes or wide), f"elements of record {call.record}"
    )
    if call.pe_cache is not None:
        part = name_of(call, "pe_cache")
        if form.vec:
            raise ValueError(f"{part}: given, must be None: record {call.record} has both parts")
        check_operand(part, call.pe_cache, 3, (*WIDE, *BYTES), kv.device, owner)
        check_dtype(part, call.pe_cache, call.cache, name)
        check_shape(part, call.pe_cache, (*call.cache.shape[:2], rotated), f"pages and rows of {name}")
    pages, size, width = call.cache.shape
    if form.planar:
        if size > 1 and call.cache.stride(1) != width or pages > 1 and call.cache.stride(0) < size * width:
            raise ValueError(
                f"{name}: strides {call.cache.stride()}, rows of a page of record {call.record} must be dense"
            )
    unit, scale = form.unit, call.cache.element_size()
    steps = [step * scale for n, step in zip((pages, size), call.cache.stride()) if n > 1]
    if any(step % unit for step in steps) or not traced(call.cache) and call.cache.data_ptr() % unit:
        raise ValueError(f"{name}: strides {call.cache.stride()}, rows must begin at multiples of {unit} bytes")
    device = None if call.scale_ptr is not None and on_host(call.scale_ptr) else kv.device
    check_scale(name_of(call, "scale"), call.scale, call.scale_ptr, device, 1, owner, True)


def places(call: LatentCall) -> None:
    """Check the tensors that say where rows go."""
    if call.places not in (SLOTS, PAGES):
        return
    kv, name = call.kv, name_of(call, "kv")
    device, owner = kv.device, f"that of {name}"
    if call.places == SLOTS:
        check_operand(name_of(call, "slots"), call.slots, 1, OFFSETS, device, owner)
        if kv.shape[0] < call.slots.shape[0]:
            slots = name_of(call, "slots")
            raise ValueError(f"{name}: {kv.shape[0]} rows, must be at least the {call.slots.shape[0]} of {slots}")
        return
    table = call.kv_indptr is None
    needed = ("page_table", "cu_seqlens", "kv_lens") if table else (
        "batch_indices", "positions", "kv_indices", "kv_indptr"
    )  # fmt: skip
    for field in (*needed, *(["kv_last_page_len"] if call.kv_last_page_len is not None else [])):
        ndim = 2 if field == "page_table" else 1
        check_operand(name_of(call, field), getattr(call, field), ndim, OFFSETS, device, owner)
    if table:
        batch = call.page_table.shape[0]
        check_shape(name_of(call, "cu_seqlens"), call.cu_seqlens, (batch + 1,), "requests, and one")
        check_shape(name_of(call, "kv_lens"), call.kv_lens, (batch,), "requests")
        return
    for field in ("batch_indices", "positions"):
        check_shape(name_of(call, field), getattr(call, field), (kv.shape[0],), f"rows of {name}")
    indptr = name_of(call, "kv_indptr")
    if not call.kv_indptr.shape[0]:
        raise ValueError(f"{indptr}: shape (0,), must have at least 1 element")
    if call.kv_last_page_len is not None:
        last, batch = name_of(call, "kv_last_page_len"), call.kv_indptr.shape[0] - 1
        check_shape(last, call.kv_last_page_len, (batch,), f"requests, one less than {indptr}")


def query(call: LatentCall) -> None:
    """Check the parts of a query, and its output."""
    first, owner = first_of(call), f"that of {name_of(call, 'kv' if call.kv is not None else 'q')}"
    pe, out, index = name_of(call, "q_pe"), name_of(call, "q_out"), call.record == INDEX
    check_operand(pe, call.q_pe, 3, WIDE, first.device, owner)
    check_dtype(pe, call.q_pe, first, owner.removeprefix("that of "))
    tokens, heads, rotated = call.q_pe.shape
    latent = 0
    if call.kv is not None and not index:
        check_shape(pe, call.q_pe, (call.kv.shape[0], heads, rotated), f"rows of {name_of(call, 'kv')}")
    if call.q is not None:
        nope = name_of(call, "q")
        check_operand(nope, call.q, 3, WIDE, first.device, owner)
        check_dtype(nope, call.q, first, owner.removeprefix("that of "))
        latent = call.q.shape[2]
        if index:
            shape = (first.shape[0], heads, first.shape[1])
            check_shape(nope, call.q, shape, f"rows and values of {name_of(call, 'kv')}, and its heads")
        else:
            check_shape(nope, call.q, (tokens, heads, latent), f"rows and heads of {pe}")
    dtypes = (E4M3,) if index else (first.dtype, E4M3)
    check_operand(out, call.q_out, 3, dtypes, first.device, owner)
    check_shape(out, call.q_out, (tokens, heads, latent + rotated), "rows, heads, and values of both parts")
    if index:
        for field in ("weights", "weights_out"):
            name = name_of(call, field)
            check_operand(name, getattr(call, field), 2, (torch.float32,), first.device, owner)
            check_shape(name, getattr(call, field), (tokens, heads), f"rows and heads of {pe}")
    device = None if call.q_scale_ptr is not None and on_host(call.q_scale_ptr) else first.device
    check_scale(name_of(call, "q_scale"), call.q_scale, call.q_scale_ptr, device, 1, owner, True)


def norm(call: LatentCall) -> None:
    """Check the weights of the norm."""
    first = first_of(call)
    for field in ("weight", "bias"):
        t, name = getattr(call, field), name_of(call, field)
        if t is None:
            continue
        if call.kv is None or field == "bias" and call.weight is None:
            raise ValueError(
                f"{name}: given, must be None without {name_of(call, 'kv' if call.kv is None else 'weight')}"
            )
        check_operand(name, t, 1, (first.dtype,), first.device, f"that of {name_of(call, 'kv')}")
        latent, rotated = call.kv.shape[1], 0 if call.pe is None else call.pe.shape[1]
        if t.shape[0] not in (latent, latent + rotated):
            other = f" or ({latent + rotated},)" if rotated else ""
            raise ValueError(f"{name}: shape {tuple(t.shape)}, must be ({latent},){other}")


def rotation(call: LatentCall) -> None:
    """Check the table of cosines and sines, and the positions."""
    table, name = call.rope_table, name_of(call, "rope_table")
    if table is None:
        return
    first = first_of(call)
    owner = f"that of {name_of(call, 'kv' if call.kv is not None else 'q')}"
    check_operand(name, table, 2, (torch.float32, first.dtype), first.device, owner)
    if not table.shape[0] or call.record == INDEX and table.shape[1] not in INDEX_ROTATED:
        allowed = f", of {listed(INDEX_ROTATED)} values" if call.record == INDEX else ""
        raise ValueError(f"{name}: shape {tuple(table.shape)}, must have rows{allowed}")
    if table.shape[1] % 2:
        raise ValueError(f"{name}: shape {tuple(table.shape)}, must have as many sines as cosines")
    for field in ("pe", "q_pe") if call.record != INDEX else ():
        t = getattr(call, field)
        if t is not None and t.shape[-1] != table.shape[1]:
            shape = f"shape {tuple(t.shape)}, must have the {table.shape[1]} columns of {name}"
            raise ValueError(f"{name_of(call, field)}: {shape}, {tuple(table.shape)}")
    positions = name_of(call, "rope_positions")
    if call.rope_positions is not None:
        check_operand(positions, call.rope_positions, 1, OFFSETS, first.device, owner)
        check_shape(positions, call.rope_positions, (first.shape[0],), "tokens")
    elif call.places == SLOTS:
        raise ValueError(f"{positions}: None, required with {name}, unless places are pages of requests")
