"""Choose the kernel that serves a request for a latent cache. Plain Python: it runs where no DSL is installed."""

from itertools import product
from typing import Any

from .. import families
from .. import shipped as policy
from . import read, write
from .request import LatentRequest, ReadRequest
from .spec import LatentSpec, ReadSpec

KERNELS = {"latent.write": write}  # op -> its package, with `supports`
READERS = {"latent.read": read}  # likewise, of requests to read


def explain(request: LatentRequest | ReadRequest, arch: str) -> tuple[families.Answer, ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    if isinstance(request, ReadRequest):
        return families.explain(READERS, ReadSpec(request.dtype, request.record), request, arch)
    return families.explain(KERNELS, LatentSpec(request.dtype, request.record, request.joined), request, arch)


def select(request: LatentRequest | ReadRequest, arch: str) -> tuple[str, Any]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel serves these rows")


def shipped(arch: str) -> list[tuple[str, Any]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once. Other kernels compile on demand."""
    rows = [row for row in policy.LATENT if arch in row.archs]
    found: list[tuple[str, Any]] = []
    for row in rows:
        for dtype, kind in product(row.dtypes, row.kinds):
            if row.op in READERS:
                found.append((row.op, ReadSpec(dtype, kind)))
                continue
            record = kind.removesuffix(" joined")
            found.append((row.op, LatentSpec(dtype, record, record != kind)))
    return found
