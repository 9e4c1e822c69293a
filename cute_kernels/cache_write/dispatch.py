"""Choose the kernel that serves a request to write rows. Plain Python: it runs where no DSL is installed."""

from itertools import product

from . import rows
from .request import CacheWriteRequest
from .spec import CacheWriteSpec

KERNELS = {"cache_write.rows": rows}  # op -> its package, with `supports`
SHIPPED_CACHES = ("e4m3", "nvfp4")  # besides the rows' own type; others compile on demand


def explain(request: CacheWriteRequest, arch: str) -> tuple[tuple[str, CacheWriteSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    spec = CacheWriteSpec(request.dtype, request.cache, request.transform, request.gather)
    found = []
    for op, module in KERNELS.items():
        reason = None if arch in module.ARCHS else f"architecture {arch}: needs {' or '.join(module.ARCHS)}"
        found.append((op, spec, reason or module.supports(spec) or module.refuses(request)))
    return tuple(found)


def select(request: CacheWriteRequest, arch: str) -> tuple[str, CacheWriteSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    found = explain(request, arch)
    for op, spec, reason in found:
        if reason is None:
            return op, spec
    raise NotImplementedError("no kernel writes these rows: " + "; ".join(f"{op}: {why}" for op, _, why in found))


def shipped(arch: str) -> list[tuple[str, CacheWriteSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once."""
    found = [CacheWriteSpec("uint8", "uint8")]
    for dtype, transform in product(("bf16", "fp16"), (False, True)):
        found += [CacheWriteSpec(dtype, cache, transform) for cache in (dtype, *SHIPPED_CACHES)]
    found += [CacheWriteSpec(dtype, dtype, True, True) for dtype in ("bf16", "fp16")]
    return [(op, spec) for op, module in KERNELS.items() for spec in found if arch in module.ARCHS]
