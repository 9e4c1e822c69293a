"""Functions that the integrations of engines share: what they ask of the kernels."""

from typing import Any

import torch

from cute_kernels import archs
from cute_kernels.attention import dispatch
from cute_kernels.attention.spec import HEAD_DIM_UNIT, padded

from ..own.explanation import explain

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_PADDED = tuple(sorted({dim for op in dispatch.OPS.values() for dim in op.HEAD_DIMS}))  # that kernels compute with
HEAD_SIZES = [dim for dim in range(HEAD_DIM_UNIT, _PADDED[-1] + 1, HEAD_DIM_UNIT) if padded(dim, _PADDED)]
PAGE_SIZES = [8, 16, 32, 64, 128, 256]  # fetched by TMA
ARCHS = {arch.capability: arch.name for arch in archs.TABLE}
SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}  # names of caches, beside "auto", the model's
E4M3_QUERIES = archs.having(archs.TCGEN05)


def query_dtype(dtype: torch.dtype, cache: torch.dtype, arch: str | None) -> torch.dtype:
    """Return the dtype of a model's queries for a cache's dtype.

    e4m3 for e4m3 caches on architectures with MMAs that take both (tcgen05); for 16-bit queries a warpgroup would have
    to convert the cache.
    """
    return E4M3 if cache is E4M3 and arch in E4M3_QUERIES else dtype


def refusal(
    arch: str, head_size: int, dtype: torch.dtype, cache: torch.dtype, out: torch.dtype | str | None = None,
    by_token: bool = False,
) -> str | None:  # fmt: skip
    """Return why the context function has no kernel for these dtypes, or None if it has one.

    dtype: the model's. out: of the output, the model's if it is None. by_token: the cache has a scale per token and
    head.

    cache: the cache's dtype, which may differ from the model's; torch.uint8 is NVFP4. The reason is that of `explain`
    for a small call.
    """
    query = dtype if by_token else query_dtype(dtype, cache, arch)
    q, kv, sf = torch.zeros(1, 1, head_size, device="cpu").to(query), _page(head_size, cache), None
    if cache is torch.uint8:
        kv, sf = _page(head_size // 2, cache), _page(head_size // 16, E4M3)
    if by_token:
        sf = _page(1, torch.float32)[..., 0]
    table, one, starts = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([[0]], [1], [0, 1]))
    given: dict[str, Any] = {"out_dtype": dtype if out is None else out, "kv_cache_sf": sf, "arch": arch}
    given["o_sf_scale"] = 1.0 if out == "nvfp4" else None
    try:
        found = explain(q, kv, None, table, one, 1, 1, 1.0, 1.0, 1, starts, None, **given)
    except (TypeError, ValueError) as error:
        return str(error)
    return reason_of(arch, found)


def reason_of(arch: str, *found: Any) -> str | None:
    """Return why no kernel of an architecture serves the calls that were explained, or None if all are served."""
    refused = [f"{op}: {why}" for answer in found if not answer.runs for op, why in answer.refused]
    return f"{arch}: {'; '.join(refused)}" if refused else None


def _page(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 2, 1, PAGE_SIZES[0], size, device="cpu").to(dtype)
