"""The public signatures of top-k. The package's docstring says what all of them promise."""

from typing import Any

import torch

from ..checks import check_flag, check_integer, check_strided
from ..scalars import integer
from .checks import DECODING, PAGE_TABLE, PERSISTENT, PREFILL, RAGGED, TOP_K, TopKCall, TopKTieBreak, each_row
from .op import serve

_Tensor = torch.Tensor  # a module global: saves an attribute look-up, 20 ns


def _refuse_other_than(kind: type, **given: Any) -> None:
    """Raise on the first argument that is not a bool, or not an int."""
    for name, value in given.items():
        if kind is bool:
            check_flag(name, value)
        else:
            check_integer(name, value)


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
        page_size: a power of two up to 2^30. With 1, entries are copied unchanged; otherwise a negative entry gives -1.
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
    if deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        _refuse_other_than(bool, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    if page_table_row_starts is None and page_size == 1:
        page_table_row_starts = row_starts
    return serve(
        TopKCall(
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
    )[0]


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
    if deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        _refuse_other_than(bool, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    return serve(
        TopKCall(
            function=RAGGED, scores=input, k=k, starts=row_starts, lengths=lengths, offsets=offsets, tie_break=tie_break
        )
    )[0]


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
    if sorted.__class__ is not bool or deterministic.__class__ is not bool or dsa_graph_safe.__class__ is not bool:
        _refuse_other_than(bool, sorted=sorted, deterministic=deterministic, dsa_graph_safe=dsa_graph_safe)
    return serve(TopKCall(function=TOP_K, scores=input, k=k, tie_break=tie_break, sorted=sorted))[1:]


def top_k_per_row_prefill(
    logits: torch.Tensor, row_starts: torch.Tensor, row_ends: torch.Tensor, indices: torch.Tensor, num_rows: int,
    stride0: int, stride1: int, top_k: int,
) -> None:  # fmt: skip
    """Write the indices of the top_k largest logits of each row's window, relative to its start, ascending, then -1.

    Args (FlagGems, vLLM):
        logits: (num_rows, V) fp32, fp16 or bf16, with strides (stride0, stride1); never modified. Copied first unless
            stride1 is 1.
        row_starts, row_ends: int32 (num_rows,): the window [start, end). The start is clamped to the row, then the end;
            the window is empty if end <= start.
        indices: int32 (num_rows, top_k), any row stride that keeps rows apart. top_k may exceed V.

    Raises as `top_k_page_table_transform` does.

    >>> scores, starts, ends = torch.tensor([[0.9, 0.1, 0.3, 0.7]]), torch.tensor([1]).int(), torch.tensor([4]).int()
    >>> indices = torch.empty(1, 2, dtype=torch.int32)
    >>> top_k_per_row_prefill(scores, starts, ends, indices, 1, 4, 1, 2)
    >>> indices
    tensor([[1, 2]], dtype=torch.int32)
    """
    layout = (num_rows, stride0, stride1)
    if num_rows.__class__ is not int or stride0.__class__ is not int or stride1.__class__ is not int:
        num_rows, stride0, stride1 = layout = integer(num_rows), integer(stride0), integer(stride1)
        _refuse_other_than(int, num_rows=num_rows, stride0=stride0, stride1=stride1)
    serve(
        TopKCall(
            function=PREFILL, scores=logits, k=top_k, starts=row_starts, lengths=row_ends, raw=indices, layout=layout
        )
    )


def top_k_per_row_decode(
    logits: torch.Tensor, next_n: int, seq_lens: torch.Tensor, indices: torch.Tensor, num_rows: int, stride0: int,
    stride1: int, top_k: int,
) -> None:  # fmt: skip
    """Write the indices of the top_k largest logits of each row's window, with next_n rows per request.

    Row r's window is [0, end) with end = seq_lens[r // next_n] - next_n + r % next_n + 1, clamped to the row. The other
    arguments, and errors, are as in `top_k_per_row_prefill`.

    Args (vLLM):
        seq_lens: int32 (num_rows / next_n,), or the end of each row itself: (num_rows / next_n, next_n) or
            (num_rows, 1).

    >>> scores, indices = torch.tensor([[0.1, 0.3, 0.7, 0.9]] * 2), torch.empty(2, 2, dtype=torch.int32)
    >>> top_k_per_row_decode(scores, 2, torch.tensor([4]).int(), indices, 2, 4, 1, 2)
    >>> indices  # of 3 scores, and of 4
    tensor([[1, 2],
            [2, 3]], dtype=torch.int32)
    """
    if (seq_lens.__class__ is _Tensor or isinstance(seq_lens, _Tensor)) and seq_lens.dim() == 2:
        seq_lens, next_n = each_row(seq_lens, next_n, logits), 1
    layout = (num_rows, stride0, stride1)
    if num_rows.__class__ is not int or stride0.__class__ is not int or stride1.__class__ is not int:
        num_rows, stride0, stride1 = layout = integer(num_rows), integer(stride0), integer(stride1)
        _refuse_other_than(int, num_rows=num_rows, stride0=stride0, stride1=stride1)
    serve(
        TopKCall(function=DECODING, scores=logits, k=top_k, lengths=seq_lens, raw=indices, next_n=next_n, layout=layout)
    )


def persistent_topk(
    logits: torch.Tensor, lengths: torch.Tensor, output: torch.Tensor, workspace: torch.Tensor | None, k: int,
    max_seq_len: int,
) -> None:  # fmt: skip
    """Write the indices of the k largest of the first lengths[i] logits of each row i to output, ascending, then -1.

    The signature is vLLM's; its indexer calls this operator by default. Raises as `top_k_per_row_prefill` does.

    Args:
        logits, output (R, k): as in `top_k_per_row_prefill`. Any k from 1.
        lengths: int32 (R,), or R elements in two dimensions, clamped to the row.

    Hints: workspace; max_seq_len, an upper bound of lengths.

    >>> scores, output = torch.tensor([[0.9, 0.1, 0.3, 0.7]] * 2), torch.empty(2, 2, dtype=torch.int32)
    >>> persistent_topk(scores, torch.tensor([[3], [4]]).int(), output, None, 2, 4)
    >>> output
    tensor([[0, 2],
            [0, 3]], dtype=torch.int32)
    """
    if max_seq_len.__class__ is not int or max_seq_len < 0:
        check_integer("max_seq_len", integer(max_seq_len), 0)
    if workspace is not None:
        check_strided("workspace", workspace)
    if (lengths.__class__ is _Tensor or isinstance(lengths, _Tensor)) and lengths.dim() == 2:
        lengths = check_strided("lengths", lengths).contiguous().view(-1)
    serve(TopKCall(function=PERSISTENT, scores=logits, k=k, lengths=lengths, raw=output))


def cooperative_topk(
    logits: torch.Tensor, lengths: torch.Tensor, output: torch.Tensor, workspace: torch.Tensor | None, k: int,
    max_seq_len: int,
) -> None:  # fmt: skip
    """Do what `persistent_topk` does, under the name that vLLM calls if a batch has few rows; any number of rows here.

    The arguments are as in `persistent_topk`.

    >>> output = torch.empty(1, 2, dtype=torch.int32)
    >>> cooperative_topk(torch.tensor([[0.9, 0.1, 0.7]]), torch.tensor([3]).int(), output, None, 2, 3)
    >>> output
    tensor([[0, 2]], dtype=torch.int32)
    """
    persistent_topk(logits, lengths, output, workspace, k, max_seq_len)
