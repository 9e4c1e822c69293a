"""Top-k selection of rows in plain torch, CPU or GPU: exact, with the total order and the ties of the kernels.

A GPU call synchronises: it reads the rows' bounds on the host.
"""

from typing import Any

import torch

from cute_kernels.topk.args import ABSOLUTE, DECODE, ENDS, FULL, SortArgs, TopKArgs

INTEGERS = {2: torch.int16, 4: torch.int32}  # by the size of a score in bytes


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """Return integers of the scores' own width and shape, in the order of the scores' bit patterns.

    +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN; two are equal only if their bits are.
    """
    bits = scores.view(INTEGERS[scores.element_size()])
    sign = torch.iinfo(bits.dtype).bits - 1
    return bits ^ ((bits >> sign) & torch.iinfo(bits.dtype).max)


def gather_bits(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return scores[i, index[i, j]], bit by bit: on the CPU, torch sets all bits of a bf16 NaN that it gathers."""
    return scores.view(INTEGERS[scores.element_size()]).gather(1, index).view(scores.dtype)


def windows(args: TopKArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first element, number of elements) of every row's window, int64 (R,), clamped to the row."""
    rows, width = args.scores.shape
    row = torch.arange(rows, device=args.scores.device)
    start = args.starts.long().clamp(0, width) if len(args.starts) else torch.zeros_like(row)
    if args.window == FULL:
        return start, width - start
    n = args.lengths.long()
    if args.window in (ENDS, ABSOLUTE):
        n = n - start
    elif args.window == DECODE:
        n = n[row // args.next_n] - args.next_n + row % args.next_n + 1
    return start, torch.minimum(n.clamp(min=0), width - start)


def select(args: TopKArgs) -> torch.Tensor:
    """Return indices relative to the windows' starts, int64 (R, k): ascending, then -1.

    A window of at most k elements is returned whole. If scores at the boundary are equal, the first of them are
    selected, or the last with last_ties.
    """
    index = torch.full((len(args.scores), args.k), -1, dtype=torch.int64, device=args.scores.device)
    start, count = windows(args)
    for row, (first, n) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        if n <= args.k:
            index[row, :n] = torch.arange(n, device=index.device)
            continue
        keys = order_keys(args.scores[row, first : first + n])
        if args.last_ties:
            keys = keys.flip(0)
        chosen = keys.sort(descending=True, stable=True).indices[: args.k]
        index[row] = (n - 1 - chosen if args.last_ties else chosen).sort().values
    return index


def page_entries(index: torch.Tensor, args: TopKArgs) -> torch.Tensor:
    """Return the positions that `index` (R, k) has through the page table, int64.

    -1 if the index is -1, if it lies outside the table's rows and columns, or, with more than one position per page, if
    the entry is negative.
    """
    (batches, width), size = args.table.shape, int(args.page_size)
    rows = torch.arange(len(index), device=index.device)
    batch = args.row_to_batch.long() if len(args.row_to_batch) else rows // args.next_n
    column = index // size
    if len(args.table_starts):
        column = column + args.table_starts.long()[:, None]
    inside = (index >= 0) & (column >= 0) & (column < width) & ((batch >= 0) & (batch < batches))[:, None]
    if width == 0:
        return torch.full_like(index, -1)
    entry = args.table.long()[batch.clamp(0, batches - 1)[:, None], column.clamp(0, width - 1)]
    if size > 1:
        inside &= entry >= 0
        entry = entry * size + index % size
    return entry.masked_fill(~inside, -1)


def top_k_rows(*flat: Any) -> None:
    """Do what a kernel does with the same arguments, those of `TopKArgs`; nothing for meta tensors."""
    args = TopKArgs(*flat)
    if args.scores.is_meta:
        return
    index = select(args)
    if len(args.out):
        if len(args.table):
            out = page_entries(index, args)
        elif len(args.offsets):
            out = torch.where(index < 0, -1, index + args.offsets.long()[:, None])
        elif args.window == ABSOLUTE:
            out = torch.where(index < 0, -1, index + windows(args)[0][:, None])
        else:
            out = index
        args.out.copy_(out)
    if len(args.raw):
        args.raw.copy_(index)
    if len(args.indices):
        args.indices.copy_(index)
    if len(args.values):
        args.values.copy_(gather_bits(args.scores, index))


def sort_rows(*flat: Any) -> None:
    """Sort rows in place as a kernel does with the same arguments, those of `SortArgs`: stably, the largest first."""
    args = SortArgs(*flat)
    if args.values.is_meta:
        return
    order = order_keys(args.values).sort(dim=1, descending=True, stable=True).indices
    args.values.copy_(gather_bits(args.values, order))
    args.indices.copy_(args.indices.gather(1, order))
