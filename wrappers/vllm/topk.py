"""vLLM's operators of top-k. The docstring of `wrappers.topk` says what all of them promise."""

from typing import Any

import torch

from ..host.checks import check_integer, check_strided
from ..host.scalars import integer
from ..topk.checks import DECODING, PERSISTENT, PREFILL, TopKCall, each_row, refuse_other_than
from ..topk.op import serve

_Tensor = torch.Tensor  # a module global: saves an attribute look-up, 20 ns


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
    serve(row_prefill_call(logits, row_starts, row_ends, indices, num_rows, stride0, stride1, top_k))


def row_prefill_call(
    logits: Any, row_starts: Any, row_ends: Any, indices: Any, num_rows: Any, stride0: Any, stride1: Any, top_k: Any,
) -> TopKCall:  # fmt: skip
    """Return the call of `top_k_per_row_prefill`."""
    layout = (num_rows, stride0, stride1)
    if num_rows.__class__ is not int or stride0.__class__ is not int or stride1.__class__ is not int:
        num_rows, stride0, stride1 = layout = integer(num_rows), integer(stride0), integer(stride1)
        refuse_other_than(int, num_rows=num_rows, stride0=stride0, stride1=stride1)
    return TopKCall(
        function=PREFILL, scores=logits, k=top_k, starts=row_starts, lengths=row_ends, raw=indices, layout=layout
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
    serve(row_decode_call(logits, next_n, seq_lens, indices, num_rows, stride0, stride1, top_k))


def row_decode_call(
    logits: Any, next_n: Any, seq_lens: Any, indices: Any, num_rows: Any, stride0: Any, stride1: Any, top_k: Any,
) -> TopKCall:  # fmt: skip
    """Return the call of `top_k_per_row_decode`."""
    if (seq_lens.__class__ is _Tensor or isinstance(seq_lens, _Tensor)) and seq_lens.dim() == 2:
        seq_lens, next_n = each_row(seq_lens, next_n, logits), 1
    layout = (num_rows, stride0, stride1)
    if num_rows.__class__ is not int or stride0.__class__ is not int or stride1.__class__ is not int:
        num_rows, stride0, stride1 = layout = integer(num_rows), integer(stride0), integer(stride1)
        refuse_other_than(int, num_rows=num_rows, stride0=stride0, stride1=stride1)
    return TopKCall(
        function=DECODING, scores=logits, k=top_k, lengths=seq_lens, raw=indices, next_n=next_n, layout=layout
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
    serve(persistent_call(logits, lengths, output, workspace, k, max_seq_len))


def persistent_call(logits: Any, lengths: Any, output: Any, workspace: Any, k: Any, max_seq_len: Any) -> TopKCall:
    """Return the call of `persistent_topk`."""
    if max_seq_len.__class__ is not int or max_seq_len < 0:
        check_integer("max_seq_len", integer(max_seq_len), 0)
    if workspace is not None:
        check_strided("workspace", workspace)
    if (lengths.__class__ is _Tensor or isinstance(lengths, _Tensor)) and lengths.dim() == 2:
        lengths = check_strided("lengths", lengths).contiguous().view(-1)
    return TopKCall(function=PERSISTENT, scores=logits, k=k, lengths=lengths, raw=output)


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
    serve(persistent_call(logits, lengths, output, workspace, k, max_seq_len))
