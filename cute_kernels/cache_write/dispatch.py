"""Choose the kernel that serves a request to write rows. Plain Python: it runs where no DSL is installed."""

from itertools import product

from .. import families
from .. import shipped as policy
from . import rows
from .request import CacheWriteRequest
from .spec import CacheWriteSpec

KERNELS = {"cache_write.rows": rows}  # op -> its package, with `supports`


def explain(request: CacheWriteRequest, arch: str) -> tuple[tuple[str, CacheWriteSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    spec = CacheWriteSpec(request.dtype, request.cache, request.transform, request.gather, request.scales)
    return families.explain(KERNELS, spec, request, arch)


def select(request: CacheWriteRequest, arch: str) -> tuple[str, CacheWriteSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel writes these rows")


def shipped(arch: str) -> list[tuple[str, CacheWriteSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once. Other kernels compile on demand."""
    found = []
    for row in policy.CACHE_WRITE:
        for dtype, cache, kind in product(row.dtypes, row.caches, row.kinds):
            scales = kind if kind == "token" else ""
            spec = CacheWriteSpec(dtype, cache, kind != "append", kind == "gather", scales)
            found += [(row.op, spec)] if arch in row.archs else []
    return found
