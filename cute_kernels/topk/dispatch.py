"""Which spec serves a top-k call. Plain Python: runs where no DSL is installed."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from . import radix
from .spec import BITS, DTYPES, TopKSpec

OP = "topk.radix"
KERNELS = {OP: radix}
LEAST = 4096  # keys that are worth a CTA of a cluster
GPC = 18  # SMs of a GPC, in one of which a cluster lies; some have fewer: then a cluster waits for its turn


@dataclass(frozen=True)
class Request:
    """What a call asks for, as far as it decides the code. length: upper bound of the keys of a row."""

    dtype: str
    rows: int
    length: int
    k: int = 1
    sms: int = 132


def plans(dtype: str) -> tuple[TopKSpec, ...]:
    """All specs of a dtype."""
    keys = 32 // BITS[dtype]  # in the place of one fp32
    small = TopKSpec(dtype, 1, 256, 8192 * keys)
    middle = tuple(TopKSpec(dtype, c, 512, 16384 * keys) for c in (1, 2, 4, 8, 16))
    large = tuple(TopKSpec(dtype, c, 512, 46080 * keys) for c in radix.CLUSTERS)
    streams = tuple(TopKSpec(dtype, c, 512, 6144, True) for c in (1, 2, 4, 8, 16))
    wide = tuple(TopKSpec(dtype, c, 512, 16384, True) for c in (1, 16))  # for k that `streams` have no room for
    return (small, *middle, *large, *streams, *wide)


def at_once(plan: TopKSpec, sms: int) -> int:
    """Rows that fit the GPU at a time."""
    resident = radix.resident(plan)
    if plan.cluster == 1:
        return sms * resident
    full, rest = divmod(sms, GPC)
    return full * (GPC * resident // plan.cluster) + rest * resident // plan.cluster


@lru_cache(4096)  # lengths and rows vary for ever
def candidate(request: Request) -> TopKSpec | None:
    """The plan for a request, None where there is none.

    A row is held whole where that can be: by the largest cluster whose CTAs get LEAST keys each, if all rows then run
    at once, a CTA an SM; else by one CTA, if an SM has room for several. Longer rows, and many of them, are streamed.
    Measured in bench/notes/topk-radix.md."""
    every, rows, length = plans(request.dtype), request.rows, request.length

    def widest(choice: list[TopKSpec]) -> TopKSpec | None:
        fit = [p for p in choice if p.cluster == 1 or p.cluster * LEAST <= length and p.cluster * rows <= request.sms]
        fit = [p for p in fit if rows <= at_once(p, request.sms)]
        return max(fit, key=lambda p: (p.cluster, -p.capacity), default=None)

    held = sorted((p for p in every if not p.stream and p.cluster * p.capacity >= length), key=lambda p: p.capacity)
    streams = [p for p in every if p.stream and request.k <= radix.room(p)]
    shared = [p for p in held if p.cluster == 1 and radix.resident(p) > 1]
    return (
        widest(held)
        or next(iter(shared), None)
        or widest(streams)
        or min(streams, key=lambda p: (p.cluster, p.capacity), default=None)
        or min(held, key=lambda p: p.cluster, default=None)
    )


def select(request: Request, arch: str) -> tuple[str, TopKSpec]:
    """(op, spec) of the kernel that serves the request; NotImplementedError names what was refused."""
    if arch not in radix.ARCHS:
        raise NotImplementedError(f"no top-k kernel: {OP}: architecture {arch}: needs one of {radix.ARCHS}")
    spec = candidate(request)
    if spec is None:
        held = max(p.cluster * p.capacity for p in plans(request.dtype) if not p.stream)
        most = max(radix.room(p) for p in plans(request.dtype) if p.stream)
        raise NotImplementedError(
            f"no top-k kernel: k {request.k} of rows of {request.length} {request.dtype} elements: at most {most}, or "
            f"rows of at most {held} elements"
        )
    return OP, spec


def shipped(arch: str) -> list[tuple[str, TopKSpec]]:
    """All (op, spec) that a bundle of `arch` holds."""
    return [(OP, plan) for dtype, op in product(DTYPES, KERNELS) if arch in radix.ARCHS for plan in plans(dtype)]
