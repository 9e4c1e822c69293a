"""Top-k of the rows of a score matrix: signatures (`api`) -> a `TopKCall` (`checks`) -> a plan and its launch (`plan`),
by way of a torch operator (`op`) under torch.compile. Reference on the CPU, compiled kernel on CUDA.

What all functions promise. The selection is exact by the order of the scores' bit patterns at their own width: +NaN >
+inf > ... > +0 > -0 > ... > -inf > -NaN. Equal scores at the boundary: the lowest indices get in, the highest with
`TopKTieBreak.LARGE`. Indices come out in ascending order. A window of n <= k elements is taken whole, 0 .. n - 1, its
scores not read, then -1. Bounds of windows may hold anything: starts are clamped to [0, L], lengths to [0, L - start].
Results are the same bits in every run, stream and batch, so `deterministic=False` and `dsa_graph_safe` ask for nothing
that differs: both are accepted. Calls can be captured in a CUDA graph, and replayed with other values in the tensors.

Host time: a call whose static facts (dtypes, shapes, strides, k) were seen before is one dict lookup and the compiled
call, which itself checks rank, dtype, device and strides. Nothing here synchronises or reads device values. Errors are
raised before any launch and before anything is written: ValueError rank, shape, stride, device, range; TypeError dtype
or type; NotImplementedError what no kernel does: on CUDA, k above 15872 where L is above 737280 (fp32) or 1474560 (16
bits), more than a cluster can hold.
"""

from .api import (
    cooperative_topk,
    persistent_topk,
    top_k,
    top_k_page_table_transform,
    top_k_per_row_decode,
    top_k_per_row_prefill,
    top_k_ragged_transform,
)
from .checks import TopKTieBreak

__all__ = [
    "TopKTieBreak",
    "cooperative_topk",
    "persistent_topk",
    "top_k",
    "top_k_page_table_transform",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "top_k_ragged_transform",
]
