"""What the integrations of engines ask of the kernels."""

from typing import Any

import torch

from ..attention.trtllm import trtllm_batch_decode_with_kv_cache
from ..explanation import explain

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEAD_SIZES = [64, 128, 256]
PAGE_SIZES = [8, 16, 32, 64, 128, 256]  # fetched by TMA
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
DECODE_ROWS = 64  # query tokens times heads of a group: in batches of more, the context function is used


def decode_tokens(heads: int, kv_heads: int) -> int:
    """The most query tokens of a request in batches for the decode function."""
    return max(1, DECODE_ROWS * kv_heads // heads)


def query_dtype(dtype: torch.dtype, cache: torch.dtype, arch: str | None) -> torch.dtype:
    """Of the queries of a model: e4m3 over e4m3 caches on Blackwell, whose MMAs take both; to 16-bit ones a warpgroup
    would convert the cache."""
    return E4M3 if cache is E4M3 and arch in ("sm_100a", "sm_103a") else dtype


def refusal(arch: str, head_size: int, dtype: torch.dtype, cache: torch.dtype) -> str | None:
    """None, or why one of the two functions has no kernel of a model's dtype, over caches of another or the same;
    torch.uint8 is NVFP4. What `explain` says of a small call."""
    query = query_dtype(dtype, cache, arch)
    q, kv, factors = torch.zeros(1, 1, head_size, device="cpu").to(query), _page(head_size, cache), None
    if cache is torch.uint8:
        kv, factors = _page(head_size // 2, cache), _page(head_size // 16, E4M3)
    table, one, starts = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([[0]], [1], [0, 1]))
    given: dict[str, Any] = {"out_dtype": dtype, "kv_cache_sf": factors, "arch": arch}
    try:
        asked = {
            "context": explain(q, kv, None, table, one, 1, 1, 1.0, 1.0, 1, starts, None, **given),
            "decode": explain(q, kv, None, table, one, 1, function=trtllm_batch_decode_with_kv_cache, **given),
        }
    except (TypeError, ValueError) as error:
        return str(error)
    for name, found in asked.items():
        if found.runs is None:
            return f"{name} on {arch}: {'; '.join(f'{op}: {why}' for op, why in found.refused)}"
    return None


def _page(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 2, 1, PAGE_SIZES[0], size, device="cpu").to(dtype)
