"""Top-k of the rows of a score matrix: a `TopKCall` (`checks`) -> a plan and its launch (`plan`).

The signatures are in `flashinfer.topk` and `vllm.topk`.

Under torch.compile the launch goes through a torch operator (`op`). CPU tensors run the reference, CUDA tensors a
compiled kernel.

All functions promise the following:

- The selection is exact by the order of the scores' bit patterns at their own width: +NaN > +inf > ... > +0 > -0 > ...
  > -inf > -NaN. If scores at the boundary are equal, the lowest indices are selected, or the highest with
  `TopKTieBreak.LARGE`.
- Indices are returned in ascending order. A window of n <= k elements is returned whole, 0 .. n - 1 and then -1; its
  scores are not read.
- Window bounds may have any value: starts are clamped to [0, L], lengths to [0, L - start].
- Results are bitwise equal in every run, stream and batch, so `deterministic=False` and `dsa_graph_safe` are accepted
  and change nothing. Calls can be captured in a CUDA graph and replayed with other values in the tensors.

Host time: if the dtypes, shapes, strides and k of a call were seen before, the call is one dict lookup and the compiled
call, which itself checks rank, dtype, device and strides. Nothing here synchronises or reads device values.

Errors are raised before any launch and before anything is written: ValueError for a rank, shape, stride, device or
range; TypeError for a dtype or type; NotImplementedError if no kernel serves the call: on CUDA, k above 15872 with L
above 737280 (fp32) or 1474560 (16 bits), which is more than a cluster can hold.
"""
