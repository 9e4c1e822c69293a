"""Choose the kernel that computes the logits of a request. Plain Python: it runs where no DSL is installed."""

from .. import families
from .. import shipped as policy
from . import logits
from .request import IndexerRequest
from .spec import IndexerSpec

KERNELS = {"indexer.logits": logits}  # op -> its package, with `supports`


def spec_of(request: IndexerRequest) -> IndexerSpec:
    """Return the kernel for a request: heads are padded, and a tile has as many rows as pay."""
    heads = logits.padded_heads(request.heads)
    rows = logits.rows_of_tile(heads, request.rows, request.keys)
    return IndexerSpec(heads, request.dim, rows, request.out, request.keys)


def explain(request: IndexerRequest, arch: str) -> tuple[families.Answer, ...]:
    """Return a row for every kernel of the operator: (op, the spec it would run, None or its reason to refuse)."""
    return families.explain(KERNELS, spec_of(request), request, arch)


def select(request: IndexerRequest, arch: str) -> tuple[str, IndexerSpec]:
    """Return (op, spec) of the kernel that serves the request.

    Raise NotImplementedError with every kernel's reason to refuse if there is none."""
    return families.select(explain(request, arch), "no kernel computes these logits")


def shipped(arch: str) -> list[tuple[str, IndexerSpec]]:
    """Return all (op, spec) that a bundle of `arch` holds, each once. Other kernels compile on demand."""
    rows = [row for row in policy.INDEXER if arch in row.archs]
    found = [
        ("indexer.logits", spec_of(IndexerRequest(heads, dim, count, out, keys=row.keys)))
        for row in rows
        for out in row.outs
        for heads, dim in row.shapes
        for count in row.rows
    ]
    return list(dict.fromkeys(found))
