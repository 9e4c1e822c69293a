"""FlashInfer's functions of top-k. The docstring of `wrappers.topk` says what all of them promise."""

from typing import Any

import torch

from ..topk.checks import PAGE_TABLE, RAGGED, TOP_K, TopKCall, TopKTieBreak, refuse_other_than
from ..topk.op import serve


def top_k_page_table_transform(
    input: torch.Tensor, src_page_table: torch.Tensor, lengths: torch.Tensor, k: int,
    row_to_batch: torch.Tensor | None = None, deterministic: bool = True, tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False, row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None, *, page_size: int = 1, out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the page-table entries of the k largest scores of each row, ascending by position, then -1.

    out[i, j] = src_page_table[b, p + x // page_size] * page_size + x % page_size, x being the j-th selected index of
    row i, b = row_to_batch[i] and p = page_table_row_starts[i].

    Args, upstream's order (FlashInfer):
        input: (R, L) fp32, fp16 or bf16, any row stride that keeps rows apart, any address. Row i's window has
            lengths[i] elements from row_starts[i] on, and x counts from there.
        src_page_table: int32 (B, M), any row stride. lengths: int32 (R,). k: at least 1; may exceed L.
        row_to_batch: int32 (R,), the row of the table; None: i, which requires B >= R.
        row_starts: int32 (R,); None: 0. page_table_row_starts: int32 (R,); None: row_starts. With page_size > 1 it is
            required if row_starts is given.
        page_size: up to 2^30. With 1, entries are copied unchanged; otherwise a negative entry gives -1.
        out, out_raw_indices: int32 (R, k), any row stride that keeps rows apart. out_raw_indices is filled with x.
        tie_break: `TopKTieBreak`, which of equal scores are selected. deterministic, dsa_graph_safe: True or False;
            they change nothing, because every call is deterministic and can be captured.

    An entry is also -1 if b or the column lies outside the table. Returns out, int32 (R, k).

    Raises before any launch: ValueError for a shape, stride, device or range; NotImplementedError if no kernel serves
    the call; TypeError for a dtype.

    >>> scores, table = torch.tensor([[0.1, 0.9, 0.3, 0.7]]), torch.tensor([[40, 41, 42, 43]]).int()
    >>> top_k_page_table_transform(scores, table, torch.tensor([4]).int(), 2)
    tensor([[41, 43]], dtype=torch.int32)
    """
    return serve(page_table_call(
        input, src_page_table, lengths, k, row_to_batch, deterministic, tie_break, dsa_graph_safe, row_starts,
        page_table_row_starts, page_size, out, out_raw_indices,
    ))[0]  # fmt: skip


def page_table_call(
    input: Any, src_page_table: Any, lengths: Any, k: Any, row_to_batch: Any, deterministic: Any, tie_break: Any,
    dsa_graph_safe: Any, row_starts: Any, page_table_row_starts: Any, page_size: Any, out: Any, out_raw_indices: Any,
) -> TopKCall:  # fmt: skip
    """Return the call of `top_k_page_table_transform`."""
    if deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        refuse_other_than(bool, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    if page_table_row_starts is None and page_size == 1:
        page_table_row_starts = row_starts
    return TopKCall(
        function=PAGE_TABLE,
        scores=input,
        k=k,
        starts=row_starts,
        lengths=lengths,
        out=out,
        raw=out_raw_indices,
        table=src_page_table,
        row_to_batch=row_to_batch,
        table_starts=page_table_row_starts,
        page_size=page_size,
        tie_break=tie_break,
    )


def top_k_ragged_transform(
    input: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, k: int, deterministic: bool = True,
    tie_break: int = TopKTieBreak.NONE, dsa_graph_safe: bool = False, row_starts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return offsets[i] + x for the indices x of the k largest scores of each row i, ascending, then -1.

    No offset is added to -1.

    offsets: int32 (R,), any values (sums wrap at 32 bits). The other arguments are as in `top_k_page_table_transform`.
    Returns int32 (R, k). The function raises as that one does. FlashInfer's signature.

    >>> scores = torch.tensor([[0.1, 0.9, 0.3, 0.7]])
    >>> top_k_ragged_transform(scores, torch.tensor([100]).int(), torch.tensor([3]).int(), 2)  # of 3 scores
    tensor([[101, 102]], dtype=torch.int32)
    """
    return serve(ragged_call(input, offsets, lengths, k, deterministic, tie_break, dsa_graph_safe, row_starts))[0]


def ragged_call(
    input: Any, offsets: Any, lengths: Any, k: Any, deterministic: Any, tie_break: Any, dsa_graph_safe: Any,
    row_starts: Any,
) -> TopKCall:  # fmt: skip
    """Return the call of `top_k_ragged_transform`."""
    if deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        refuse_other_than(bool, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    return TopKCall(
        function=RAGGED, scores=input, k=k, starts=row_starts, lengths=lengths, offsets=offsets, tie_break=tie_break
    )


def top_k(
    input: torch.Tensor, k: int, sorted: bool = False, deterministic: bool = True, tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (values, indices) of the k largest scores of each row, both (R, k): the scores' dtype, and int64.

    input: (R, V), as in `top_k_page_table_transform`; k <= V. The order is by ascending index; with sorted=True by
    descending value, then ascending index. The function raises as that one does. FlashInfer's signature.

    >>> top_k(torch.tensor([[0.1, 0.7, 0.3, 0.9]]), 2)
    (tensor([[0.7000, 0.9000]]), tensor([[1, 3]]))
    """
    return serve(top_k_call(input, k, sorted, deterministic, tie_break, dsa_graph_safe))[1:]


def top_k_call(input: Any, k: Any, sorted: Any, deterministic: Any, tie_break: Any, dsa_graph_safe: Any) -> TopKCall:
    """Return the call of `top_k`."""
    if sorted.__class__ is not bool or deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        refuse_other_than(bool, sorted=sorted, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    return TopKCall(function=TOP_K, scores=input, k=k, tie_break=tie_break, sorted=sorted)
