"""Choose the kernel that serves a request for a latent cache. Plain Python: it runs where no DSL is installed."""

from itertools import product

from .. import families
from .. import shipped as policy
from . import write
from .request import LatentRequest
from .spec import LatentSpec

KERNELS = {"latent.write": write}  # op -> its package, with `supports`


def explain(request: LatentRequest, arch: str) -> tuple[tuple[str, LatentSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    return families.explain(KERNELS, LatentSpec(request.dtype, request.record, request.joined), request, arch)


def select(request: LatentRequest, arch: str) -> tuple[str, LatentSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel writes these rows")


def shipped(arch: str) -> list[tuple[str, LatentSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once. Other kernels compile on demand."""
    rows = [row for row in policy.LATENT if arch in row.archs]
    found = []
    for row in rows:
        for dtype, kind in product(row.dtypes, row.kinds):
            record = kind.removesuffix(" joined")
            found.append((row.op, LatentSpec(dtype, record, record != kind)))
    return found
