"""Which kernel and spec serve a request. Plain Python: runs where no DSL is installed."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from . import sm90
from .spec import DTYPES, FEW_ROWS, KV_DTYPES, AttentionSpec, KVSpec, MaskSpec

KERNELS = {"attention.sm90": sm90}  # op -> the package that states what it supports
PACK_ROWS = 64  # a request with at most this many query tokens a KV head's group packs heads into rows


@dataclass(frozen=True)
class Request:
    """What a call asks for, in static terms. `rows`: upper bound of query tokens of one request.
    split: share the keys of a request among CTAs. kv_dtype: "" for the query's, "e4m3", "nvfp4"."""

    dtype: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    group: int
    causal: bool = True
    window: bool = False
    soft_cap: bool = False
    rows: int = 1 << 30
    split: bool = False
    kv_dtype: str = ""


def candidate(request: Request, module) -> AttentionSpec:
    """The shipped spec that serves `request` with the least that it did not ask for."""
    pack = request.split or request.group > 1 and request.rows <= PACK_ROWS
    mask = MaskSpec(request.causal, request.window or request.soft_cap or pack)
    dims = (request.head_dim_qk, request.head_dim_vo)
    kv, cap = KVSpec("paged", request.kv_dtype), request.soft_cap and not request.split
    wide = request.split and request.rows * request.group > FEW_ROWS and dims[0] in module.WIDE_DIMS
    spec = AttentionSpec(request.dtype, *dims, mask, kv, cap, pack, request.split, wide)
    tile = module.tile_for(spec)
    return replace(spec, tile=tile) if tile else spec


@cache
def explain(request: Request, arch: str) -> tuple[tuple[str, AttentionSpec, str | None], ...]:
    """Every kernel of the operator: (op, the spec it would run, None or why it refuses)."""
    rows = []
    for op, module in KERNELS.items():
        spec = candidate(request, module)
        reason = None if arch in module.ARCHS else f"architecture {arch}: needs {' or '.join(module.ARCHS)}"
        if request.page_size not in module.PAGE_SIZES:
            reason = reason or f"page_size {request.page_size}: the kernel reads pages of {module.PAGE_SIZES} rows"
        rows.append((op, spec, reason or module.supports(spec)))
    return tuple(rows)


def select(request: Request, arch: str) -> tuple[str, AttentionSpec]:
    """(op, spec) of the kernel that serves the request; NotImplementedError names what every kernel refused."""
    rows = explain(request, arch)
    for op, spec, reason in rows:
        if reason is None:
            return op, spec
    raise NotImplementedError("no attention kernel: " + "; ".join(f"{op}: {reason}" for op, _, reason in rows))


def shipped(arch: str) -> list[tuple[str, AttentionSpec]]:
    """All (op, spec) that a bundle of `arch` holds: the image of `candidate` over all requests, each once."""
    found: dict[tuple[str, AttentionSpec], None] = {}
    for (op, module), dtype in product(KERNELS.items(), DTYPES):
        if arch not in module.ARCHS:
            continue
        bools = (False, True)
        every = product(module.TILES, (1, 1 << 30), bools, bools, bools, bools, ("", *KV_DTYPES))
        for dims, rows, causal, window, cap, split, kv in every:
            page = module.PAGE_SIZES[0]
            spec = candidate(Request(dtype, dims[0], dims[1], page, 2, causal, window, cap, rows, split, kv), module)
            if module.supports(spec) is None and (causal or not split):  # decoding is causal
                found[op, spec] = None
    return list(found)
