"""Leave out the rows before a request's first key, for `flash_attn_with_kvcache` with `cache_leftpad`.

A request may begin at any row, so its pages have one row each. Its page table is the one of the whole cache, moved by
the padding. New keys are written by the table that was not moved.
"""

from typing import Any

import torch

from ..attention.call import AttentionCall
from ..host import machine
from ..host.checks import check_operand, check_shape, check_strided, checking
from ..host.plain import traced


def padding_of(given: Any, table: Any, name: str, caches: tuple[Any, Any], batch: int) -> torch.Tensor:
    """Return cache_leftpad after a check of all but its values. table: the page table, called name, or None."""
    if table is not None:
        raise NotImplementedError(f"cache_leftpad: given with {name}, not supported, must be None with a page table")
    k, v = caches
    check_strided("k_cache", k, 4)
    check_operand("cache_leftpad", given, 1, (torch.int32,), k.device, "that of k_cache")
    check_shape("cache_leftpad", given, (batch,), "one per request of q")
    for label, t in (("k_cache", k), ("v_cache", v)):
        rows = check_strided(label, t, 4).shape[1]
        if t.shape[0] > 1 and rows > 1 and t.stride(0) != rows * t.stride(1):
            need = f"with cache_leftpad the first must be {rows} times the second"
            raise NotImplementedError(f"{label}: strides {t.stride()}, {need}")
    return given


def check_padding(call: AttentionCall, padding: torch.Tensor) -> None:
    """Raise ValueError unless each request begins within its keys before the call, and these within its rows.

    Reads values where `attention.values.check` does: on the CPU, or if CUTE_KERNELS_CHECK is 1 and nothing captures.
    """
    here, on_cpu = machine.current, machine.current.device_info(call.q.device) is None
    if call.q.is_meta or traced(call.q) or not (on_cpu or checking() and not here.is_capturing()):
        return
    rows = call.requests.page_table.shape[2]
    for request, (first, keys) in enumerate(zip(padding.tolist(), call.requests.kv_lens.tolist(), strict=True)):
        if not 0 <= keys <= rows:
            raise ValueError(f"cache_seqlens: {keys} of request {request}, must be in [0, {rows}], the rows of k_cache")
        if not 0 <= first <= keys:
            need = f"must be in [0, {keys}], cache_seqlens of that request"
            raise ValueError(f"cache_leftpad: {first} of request {request}, {need}")


def without_padding(call: AttentionCall, padding: torch.Tensor) -> AttentionCall:
    """Return a call whose requests begin behind their padding. Its pages have one row.

    Whatever the values are, a request reads no row of another one: both ends are clamped to its own rows.
    """
    requests = call.requests
    table = requests.page_table[:, 0]
    rows = table.shape[1]
    first = padding.clamp(0, rows)
    pages = table + first[:, None]
    lens = requests.kv_lens.clamp(0, rows) - first
    return call._replace(requests=requests._replace(page_table=pages[:, None].expand(-1, 2, -1), kv_lens=lens))
