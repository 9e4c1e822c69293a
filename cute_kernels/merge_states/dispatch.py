"""Choose the kernel that serves a request to merge states. Plain Python: it runs where no DSL is installed."""

from itertools import product

from .. import families
from .. import shipped as policy
from . import rows
from .request import MergeRequest
from .spec import MergeSpec

KERNELS = {"merge_states.rows": rows}  # op -> its package, with `supports`


def explain(request: MergeRequest, arch: str) -> tuple[tuple[str, MergeSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    spec = MergeSpec(request.dtype, request.pair)
    return families.explain(KERNELS, spec, request, arch)


def select(request: MergeRequest, arch: str) -> tuple[str, MergeSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel merges these states")


def shipped(arch: str) -> list[tuple[str, MergeSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once."""
    rows = [row for row in policy.MERGE_STATES if arch in row.archs]
    return [(r.op, MergeSpec(dtype, kind == "pair")) for r in rows for dtype, kind in product(r.dtypes, r.kinds)]
