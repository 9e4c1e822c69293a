"""Kernels of top-k, in torch: they check what their callers promise, then run the reference."""

from typing import Any

from cute_kernels.topk import dispatch, radix
from cute_kernels.topk.args import DECODE, FULL, SortArgs, TopKArgs
from tests.support.fake_machine import promised
from wrappers import reference


def emulate(op: str, spec: Any, launches: list[Any]) -> Any:
    """Return a kernel of `spec` for any device; the arguments of each launch are appended to `launches`."""
    if op == dispatch.SORT:
        return _sort(spec, launches)

    def kernel(*flat: Any) -> None:
        a = TopKArgs(*flat)
        promised(a.enable_pdl == 1 and a.k >= 1 and a.last_ties in (0, 1) and 1 <= a.page_size <= 1 << 30)
        rows, width = a.scores.shape
        promised(rows > 0)
        for name in ("starts", "row_to_batch", "table_starts", "offsets"):
            promised(len(getattr(a, name)) in (0, rows))
        promised(len(a.lengths) == {FULL: 0, DECODE: rows // a.next_n}.get(a.window, rows))
        for name in ("out", "raw", "values", "indices"):
            promised(getattr(a, name).shape in ((0, a.k), (rows, a.k)))
            promised(len(getattr(a, name)) < 2 or getattr(a, name).stride(0) >= a.k)
        promised(sum(map(len, (a.out, a.raw, a.indices))) and len(a.values) == len(a.indices))
        promised(not len(a.table) or len(a.row_to_batch) or len(a.table) >= rows // a.next_n)
        promised(a.k <= radix.max_k(spec) if spec.stream else spec.capacity * spec.cluster >= width)
        launches.append(a)
        reference.top_k_rows(*flat)

    return kernel


def _sort(spec: Any, launches: list[Any]) -> Any:
    """Return a kernel that sorts; `spec` is appended to `launches` at each launch."""

    def kernel(*flat: Any) -> None:
        a = SortArgs(*flat)
        promised(a.values.shape == a.indices.shape and len(a.values) > 0 and a.values.shape[1] <= spec.capacity)
        promised(a.values.is_contiguous() and a.indices.is_contiguous() and a.enable_pdl == 1)
        launches.append(spec)
        reference.sort_rows(*flat)

    return kernel
