"""Checks of a call that writes rows. Every message names an argument of the caller's function."""

from typing import Any

import torch

from ..checks import check_apart, check_last_stride, check_one_of, check_operand, check_shape, check_strided
from ..fp4 import BLOCK, SCALE_TYPES
from ..plain import refuse_grad, traced
from .call import SLOTS, CacheWriteCall

OFFSETS = (torch.int32, torch.int64)
WIDE = (torch.float16, torch.bfloat16)
STORED = (*WIDE, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)  # dtypes of a cache
APPEND, NVFP4_APPEND = "append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache"
NVFP4_SLOTS = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
_APPENDED = {
    "k": "append_key", "v": "append_value", "k_cache": "paged_kv_cache (K)", "v_cache": "paged_kv_cache (V)",
    "k_sf": "kv_cache_sf (K)", "v_sf": "kv_cache_sf (V)", "page_table": "kv_indices", "slots": "slot_mapping",
    "k_scale_ptr": "k_scale", "v_scale_ptr": "v_scale",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = dict.fromkeys((APPEND, NVFP4_APPEND, NVFP4_SLOTS), _APPENDED)
OUTPUTS = ("k_cache", "v_cache", "k_sf", "v_sf")
INPUTS = ("k", "v", "slots", "batch_indices", "positions", "page_table", "kv_indptr", "kv_last_page_len")


def name_of(call: CacheWriteCall, field: str) -> str:
    """Return the caller's name of a field."""
    return NAMES[call.function].get(field, field)


def block_scaled(call: CacheWriteCall) -> bool:
    """Return whether rows are quantised to NVFP4."""
    return call.k_sf is not None


def validate(call: CacheWriteCall) -> None:
    """Raise on the first argument that does not fit, before anything is written."""
    rows(call)
    caches(call)
    places(call)
    outputs = {name_of(call, field): getattr(call, field) for field in OUTPUTS}
    inputs = {name_of(call, field): getattr(call, field) for field in INPUTS}
    given = {name: t for name, t in outputs.items() if t is not None}
    refuse_grad({name: t for name, t in (inputs | given).items() if t is not None})
    if not any(map(traced, given.values())):
        check_apart(given, inputs)


def rows(call: CacheWriteCall) -> None:
    """Check the rows to write."""
    allowed = WIDE if block_scaled(call) else STORED
    for field in ("k", "v"):
        name, t = name_of(call, field), getattr(call, field)
        check_one_of(f"{name}: dtype", check_strided(name, t, 3).dtype, allowed)
        check_last_stride(name, t)
        if block_scaled(call) and t.dtype != call.k.dtype:
            raise TypeError(f"{name}: dtype {t.dtype}, must be that of {name_of(call, 'k')}, {call.k.dtype}")
        if block_scaled(call) and t.shape[2] % BLOCK:
            raise ValueError(f"{name}: shape {tuple(t.shape)}, the last dimension must be a multiple of {BLOCK}")


def _same_device(call: CacheWriteCall, name: str, t: torch.Tensor) -> None:
    if t.device != call.k.device:
        raise ValueError(f"{name}: device {t.device}, must be that of {name_of(call, 'k')}, {call.k.device}")


def _pair(call: CacheWriteCall, fields: tuple[str, str], dtypes: Any) -> None:
    """Check dtypes and devices of both caches or of both tensors of scale factors, and that they fit each other."""
    first, second = (getattr(call, field) for field in fields)
    for field in fields:
        name, t = name_of(call, field), getattr(call, field)
        check_one_of(f"{name}: dtype", check_strided(name, t, 4).dtype, dtypes)
        check_last_stride(name, t)
        _same_device(call, name, t)
    pair = name_of(call, fields[0]).removesuffix(" (K)")
    if first.dtype != second.dtype and dtypes is not SCALE_TYPES:
        raise TypeError(f"{pair}: K is {first.dtype} and V {second.dtype}, must be the same")
    if first.shape[1:3] != second.shape[1:3]:
        shapes = [(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (first, second)]
        raise ValueError(f"{pair}: K {shapes[0]} and V {shapes[1]} may differ in the first and last dimension only")


def caches(call: CacheWriteCall) -> None:
    """Check the caches, and that the rows fit them."""
    _pair(call, ("k_cache", "v_cache"), (torch.uint8,) if block_scaled(call) else STORED)
    if block_scaled(call):
        _pair(call, ("k_sf", "v_sf"), SCALE_TYPES)
    packed = 2 if block_scaled(call) else 1
    for side in ("k", "v"):
        name, t = name_of(call, side), getattr(call, side)
        cache_name, cache = name_of(call, f"{side}_cache"), getattr(call, f"{side}_cache")
        tokens = t.shape[0] if call.places == SLOTS else call.k.shape[0]  # SLOTS: `places` compares
        check_shape(
            name, t, (tokens, cache.shape[1], cache.shape[3] * packed), f"rows, heads and head_dim of {cache_name}"
        )
        _same_device(call, name, t)
        if block_scaled(call):
            sf_name, sf = name_of(call, f"{side}_sf"), getattr(call, f"{side}_sf")
            shape = (*cache.shape[:3], cache.shape[3] * 2 // BLOCK)
            check_shape(sf_name, sf, shape, f"pages, Hkv and P of {cache_name}, and one factor for {BLOCK} values")
        elif t.dtype != call.k_cache.dtype and not {t.dtype, call.k_cache.dtype} <= {*SCALE_TYPES}:
            wanted = f"must be that of {cache_name.removesuffix(f' ({side.upper()})')}, {call.k_cache.dtype}"
            raise TypeError(f"{name}: dtype {t.dtype}, {wanted}; convert it before the call")


def places(call: CacheWriteCall) -> None:
    """Check the tensors that say where rows go."""
    k = name_of(call, "k")
    lists = ("batch_indices", "positions", "page_table", "kv_indptr", "kv_last_page_len")
    for field in ("slots",) if call.places == SLOTS else lists:
        check_operand(name_of(call, field), getattr(call, field), 1, OFFSETS, call.k.device, f"that of {k}")
    if call.places == SLOTS:
        slots = call.slots.shape[0]
        for field in ("k", "v"):
            if getattr(call, field).shape[0] < slots:
                name, count = name_of(call, field), getattr(call, field).shape[0]
                raise ValueError(f"{name}: {count} rows, must be at least the {slots} of {name_of(call, 'slots')}")
        return
    tokens = call.k.shape[0]
    check_shape("batch_indices", call.batch_indices, (tokens,), f"rows of {k}")
    check_shape("positions", call.positions, (tokens,), f"rows of {k}")
    if not call.kv_indptr.shape[0]:
        raise ValueError("kv_indptr: shape (0,), must have at least 1 element")
    batch = call.kv_indptr.shape[0] - 1
    check_shape("kv_last_page_len", call.kv_last_page_len, (batch,), "requests, one less than kv_indptr")


def reason(call: CacheWriteCall) -> Exception | None:
    """Return what is wrong with a call, or None."""
    try:
        validate(call)
    except Exception as error:
        return error
    return None
