"""Which spec serves a top-k call. Plain Python: runs where no DSL is installed."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from . import radix
from .spec import BITS, DTYPES, TopKSpec

OP = "topk.radix"
KERNELS = {OP: radix}
LEAST = 2048  # keys that are worth a CTA of a cluster


@dataclass(frozen=True)
class Request:
    """What a call asks for, as far as it decides the code. length: upper bound of the keys of a row."""

    dtype: str
    rows: int
    length: int
    sms: int = 132


def plans(dtype: str) -> tuple[TopKSpec, ...]:
    """All specs of a dtype, those with more CTAs a row later."""
    size = BITS[dtype] // 8
    small = TopKSpec(dtype, 1, 512, 32768 // size)
    middle = TopKSpec(dtype, 1, 512, 65536 // size)
    clusters = tuple(TopKSpec(dtype, c, 512, 65536 // size) for c in radix.CLUSTERS[1:])
    most = 1024 if dtype == "fp32" else 512  # with 8 keys a vector, the 64 registers of 1024 threads spill
    large = tuple(TopKSpec(dtype, c, most, 184320 // size) for c in radix.CLUSTERS)
    return (small, middle, *clusters, *large, TopKSpec(dtype, 16, most, 0))


@lru_cache(4096)  # lengths and rows vary for ever
def candidate(request: Request) -> TopKSpec:
    """The plan that fills the GPU with the fewest CTAs a row, or the smallest that holds the row."""
    fitting = [plan for plan in plans(request.dtype) if plan.capacity * plan.cluster >= request.length]
    if not fitting:
        return plans(request.dtype)[-1]
    wanted = max(1, min(request.sms // max(request.rows, 1), request.length // LEAST))
    wide = [plan for plan in fitting if plan.cluster <= wanted]
    return (
        max(wide, key=lambda plan: (plan.cluster, -plan.capacity))
        if wide
        else min(fitting, key=lambda plan: (plan.cluster * plan.capacity, plan.cluster))
    )


def select(request: Request, arch: str) -> tuple[str, TopKSpec]:
    """(op, spec) of the kernel that serves the request; NotImplementedError names what was refused."""
    spec = candidate(request)
    reason = radix.supports(spec) if arch in radix.ARCHS else f"architecture {arch}: needs one of {radix.ARCHS}"
    if reason:
        raise NotImplementedError(f"no top-k kernel: {OP}: {reason}")
    return OP, spec


def shipped(arch: str) -> list[tuple[str, TopKSpec]]:
    """All (op, spec) that a bundle of `arch` holds."""
    return [(OP, plan) for dtype, op in product(DTYPES, KERNELS) if arch in radix.ARCHS for plan in plans(dtype)]
