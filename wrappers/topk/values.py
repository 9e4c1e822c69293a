"""Check the values that a top-k call reads: bounds of windows and rows of the page table.

They may have any value, since all functions clamp them. If CUTE_KERNELS_CHECK is 1, values outside their row are
refused, on CUDA and on the CPU.
"""

import torch

from cute_kernels.topk.args import ABSOLUTE, DECODE, ENDS

from .checks import NAMES, WINDOWS, TopKCall


def check(call: TopKCall) -> None:
    """Raise ValueError for the first value of a valid call that lies outside its row or its table.

    The message names the argument, the row, the value and what is allowed. Waits for the device.
    """
    names, (rows, width), window = NAMES[call.function], call.scores.shape, WINDOWS[call.function]
    start = torch.zeros(rows, dtype=torch.int64)
    if call.starts is not None:
        start = call.starts.cpu().long()
        _within(names["starts"], start, torch.zeros_like(start), torch.full_like(start, width), "elements of a row")
    if call.lengths is not None:
        name, n = names.get("lengths", "lengths"), call.lengths.cpu().long()
        if window in (DECODE, ENDS, ABSOLUTE):
            _within(name, n, torch.zeros_like(n), torch.full_like(n, width), "elements of a row")
        else:
            _within(name, n, torch.zeros_like(n), width - start, "elements of a row from its start")
    if call.row_to_batch is not None:
        rows_of = call.row_to_batch.cpu().long()
        most = torch.full_like(rows_of, call.table.shape[0] - 1)
        _within("row_to_batch", rows_of, torch.zeros_like(rows_of), most, f"rows of {names['table']}")


def _within(name: str, values: torch.Tensor, least: torch.Tensor, most: torch.Tensor, why: str) -> None:
    bad = ((values < least) | (values > most)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"{name}: {values[i]} in entry {i}, must be in [{least[i]}, {most[i]}]: {why}")
