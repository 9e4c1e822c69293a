"""Choose the kernel that serves a request to write rows. Plain Python: it runs where no DSL is installed."""

from itertools import product

from .. import families
from . import rows
from .request import CacheWriteRequest
from .spec import CacheWriteSpec

KERNELS = {"cache_write.rows": rows}  # op -> its package, with `supports`
SHIPPED_CACHES = ("e4m3", "nvfp4")  # besides the rows' own type; others compile on demand


def explain(request: CacheWriteRequest, arch: str) -> tuple[tuple[str, CacheWriteSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    spec = CacheWriteSpec(request.dtype, request.cache, request.transform, request.gather)
    return families.explain(KERNELS, spec, request, arch)


def select(request: CacheWriteRequest, arch: str) -> tuple[str, CacheWriteSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel writes these rows")


def shipped(arch: str) -> list[tuple[str, CacheWriteSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once."""
    found = [CacheWriteSpec("uint8", "uint8"), CacheWriteSpec("nvfp4", "fp32")]
    for dtype, transform in product(("bf16", "fp16"), (False, True)):
        found += [CacheWriteSpec(dtype, cache, transform) for cache in (dtype, *SHIPPED_CACHES)]
    found += [CacheWriteSpec(dtype, dtype, True, True) for dtype in ("bf16", "fp16")]
    return [(op, spec) for op, module in KERNELS.items() for spec in found if arch in module.ARCHS]
