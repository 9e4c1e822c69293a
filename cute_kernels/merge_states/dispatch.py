"""Choose the kernel that serves a request to merge states. Plain Python: it runs where no DSL is installed."""

from itertools import product

from . import rows
from .request import MergeRequest
from .spec import BYTES, MergeSpec

KERNELS = {"merge_states.rows": rows}  # op -> its package, with `supports`


def explain(request: MergeRequest, arch: str) -> tuple[tuple[str, MergeSpec, str | None], ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    spec = MergeSpec(request.dtype, request.pair)
    found = []
    for op, module in KERNELS.items():
        reason = None if arch in module.ARCHS else f"architecture {arch}: needs {' or '.join(module.ARCHS)}"
        found.append((op, spec, reason or module.supports(spec) or module.refuses(request)))
    return tuple(found)


def select(request: MergeRequest, arch: str) -> tuple[str, MergeSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    found = explain(request, arch)
    for op, spec, reason in found:
        if reason is None:
            return op, spec
    raise NotImplementedError("no kernel merges these states: " + "; ".join(f"{op}: {why}" for op, _, why in found))


def shipped(arch: str) -> list[tuple[str, MergeSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once."""
    found = [MergeSpec(dtype, pair) for dtype, pair in product(BYTES, (False, True))]
    return [(op, spec) for op, module in KERNELS.items() for spec in found if arch in module.ARCHS]
