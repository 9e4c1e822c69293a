"""Choose the kernel and the spec that serve a top-k request. Plain Python: it runs where no DSL is installed."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from .. import archs, families
from .. import shipped as policy
from . import radix, sort
from .request import TopKKernelRequest
from .spec import BITS, SMEM_PER_CTA, SortSpec, TopKSpec

KERNELS = {"topk.radix": radix}  # op -> its package, with `supports`
SORT = "topk.sort"  # the op that sorts the selected elements
MIN_KEYS_PER_CTA = 4096  # a CTA of a cluster pays off from this many keys on
ARCH = archs.NAMES[0]  # the architecture of a request that names none


def specs(dtype: str, arch: str = ARCH) -> tuple[TopKSpec, ...]:
    """Return all specs of a dtype."""
    keys = 32 // BITS[dtype]  # in the space of one fp32
    most = archs.of(arch).smem_per_cta
    if most < SMEM_PER_CTA:
        ends = 1, archs.of(arch).max_cluster
        held = (fitted(TopKSpec(dtype, c, 512, 46080 * keys), most) for c in ends)
        return (*held, *(fitted(TopKSpec(dtype, c, 512, 16384, True), most) for c in ends))
    small = TopKSpec(dtype, 1, 256, 8192 * keys)
    middle = tuple(TopKSpec(dtype, c, 512, 16384 * keys) for c in (1, 16))  # between them `large` is as fast
    large = tuple(TopKSpec(dtype, c, 512, 46080 * keys) for c in radix.CLUSTERS)
    streams = tuple(TopKSpec(dtype, c, 512, 6144, True) for c in (1, 2, 4, 8, 16))
    wide = tuple(TopKSpec(dtype, c, 512, 16384, True) for c in (1, 16))  # for a k above the capacity of `streams`
    return (small, *middle, *large, *streams, *wide)


def fitted(spec: Any, smem: int) -> Any:
    """Return the spec with the largest capacity, at most its own, that fits in `smem` bytes of shared memory."""
    package, capacity = (sort, "items") if isinstance(spec, SortSpec) else (radix, "capacity")
    step = 1 if isinstance(spec, SortSpec) else 1024
    while package.smem_bytes(spec) > smem:
        spec = replace(spec, **{capacity: getattr(spec, capacity) - step})
    return spec


def resident_rows(spec: TopKSpec, sms: int, arch: str = ARCH) -> int:
    """Return how many rows the GPU processes at a time. A cluster lies within one GPC; some GPCs have fewer SMs, then
    a cluster waits for its turn. If clusters hold their rows, an SM counts as room for one CTA: where two CTAs share an
    SM, fewer CTAs with longer slices are faster."""
    row = archs.of(arch)
    resident = radix.ctas_per_sm(spec, row.smem_per_sm)
    if spec.cluster == 1:
        return sms * resident
    if not spec.stream:
        resident = 1
    full, rest = divmod(sms, row.sms_per_gpc)
    return full * (row.sms_per_gpc * resident // spec.cluster) + rest * resident // spec.cluster


@lru_cache(4096)  # bounded: lengths and rows vary without limit
def candidate(request: TopKKernelRequest, arch: str = ARCH) -> TopKSpec | None:
    """Return the spec for a request, or None if there is none.

    A row is held whole if possible: by the largest cluster that gives each CTA MIN_KEYS_PER_CTA keys, if all rows
    then run at once with one CTA per SM; else by one CTA, if an SM has room for several such CTAs. Longer rows,
    and large numbers of rows, are streamed. bench/notes/topk-radix.md has the measurements."""
    every, rows, length = specs(request.dtype, arch), request.rows, request.length
    smem = archs.of(arch).smem_per_sm

    def widest(choice: list[TopKSpec]) -> TopKSpec | None:
        fit = [
            p
            for p in choice
            if p.cluster == 1 or p.cluster * MIN_KEYS_PER_CTA <= length and p.cluster * rows <= request.sms
        ]
        fit = [p for p in fit if rows <= resident_rows(p, request.sms, arch)]
        return max(fit, key=lambda p: (p.cluster, -p.capacity), default=None)

    held = sorted((p for p in every if not p.stream and p.cluster * p.capacity >= length), key=lambda p: p.capacity)
    streams = [p for p in every if p.stream and request.k <= radix.max_k(p)]
    shared = [p for p in held if p.cluster == 1 and radix.ctas_per_sm(p, smem) > 1]
    return (
        widest(held)
        or next(iter(shared), None)
        or widest(streams)
        or min(streams, key=lambda p: (p.cluster, p.capacity), default=None)
        or min(held, key=lambda p: p.cluster, default=None)
    )


def explain(request: TopKKernelRequest, arch: str) -> tuple[tuple[str, TopKSpec | None, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    rows: list[tuple[str, TopKSpec | None, str | None]] = []
    for op, module in KERNELS.items():
        if arch not in module.ARCHS:
            rows.append((op, None, f"architecture {arch}: needs {' or '.join(module.ARCHS)}"))
            continue
        spec = candidate(request, arch)
        rows.append((op, spec, module.supports(spec) if spec else too_large(request, arch)))
    return tuple(rows)


def too_large(request: TopKKernelRequest, arch: str = ARCH) -> str:
    """Return why no spec serves a request: its k is too large to stream, and its rows are too long to be held."""
    every = specs(request.dtype, arch)
    most = max(radix.max_k(p) for p in every if p.stream)
    longest = max(p.cluster * p.capacity for p in every if not p.stream)
    return (
        f"k {request.k} of rows of {request.length} {request.dtype} elements: k must be at most {most}, or the "
        f"rows at most {longest} elements"
    )


def select(request: TopKKernelRequest, arch: str) -> tuple[str, TopKSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no top-k kernel")


def sort_specs(dtype: str, arch: str = ARCH) -> tuple[SortSpec, ...]:
    """Return all specs that sort rows of a dtype, the smallest first."""
    most = archs.of(arch).smem_per_cta
    if most < SMEM_PER_CTA:
        return (fitted(SortSpec(dtype, 1024, 16), most),)
    return SortSpec(dtype, 512, 4), SortSpec(dtype, 1024, 16)


def sort_spec(request: TopKKernelRequest, arch: str = ARCH) -> SortSpec | None:
    """Return the SORT spec for k selected values and their indices, or None if k is above the capacity of a CTA."""
    return next((spec for spec in sort_specs(request.dtype, arch) if request.k <= spec.capacity), None)


def shipped(arch: str) -> list[tuple[str, TopKSpec | SortSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once: some request uses every spec."""
    found: list[tuple[str, TopKSpec | SortSpec]] = []
    for row in (row for row in policy.TOPK if arch in row.archs):
        plans = sort_specs if row.op == SORT else specs
        found += [(row.op, spec) for dtype in row.dtypes for spec in plans(dtype, arch)]
    return found
