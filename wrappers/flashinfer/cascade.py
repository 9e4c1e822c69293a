"""Merge partial attention, as FlashInfer's `cascade` does.

Computed in fp32, by one kernel on CUDA and by torch operations on the CPU. Nothing waits for the device, and all
functions can be captured.

A state is the output V of attention over some keys, with its base-2 log-sum-exp S: the two results of
`return_lse=True`. The state of no keys has S = -inf. It does not change a merge, whatever its V holds; merging only
such states gives V = 0 and S = -inf. NaN in S is propagated.

    out_a, lse_a = trtllm_batch_context_with_kv_cache(..., return_lse=True)  # keys of a shared prefix
    out_b, lse_b = trtllm_batch_context_with_kv_cache(..., return_lse=True)  # the other keys
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)  # all keys

All functions raise before anything is written: TypeError for a type or dtype, ValueError for a shape, stride or device,
RuntimeError for a tensor that requires grad, in grad mode, NotImplementedError for a GPU without kernels.
"""

from typing import Any

import torch

from ..merge.checks import IN_PLACE, PAIR, STATES, MergeCall
from ..merge.op import serve

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of the keys of A and B together: new tensors v (n, heads, head_dim) of v_a's dtype, and s fp32.

    v_a, v_b: fp16, bf16 or fp32 (n, heads, head_dim), both of one dtype. s_a, s_b: fp32 (n, heads), base 2. Any
    strides. Raises TypeError for a dtype, ValueError for a shape or device. FlashInfer's function.

    >>> a, b = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 5.0)  # one key each; B's has 3 times the weight
    >>> merge_state(a, torch.tensor([[0.0]]), b, torch.tensor([[3.0]]).log2())
    (tensor([[[4., 4.]]]), tensor([[2.]]))
    """
    return serve(pair_call(v_a, s_a, v_b, s_b))


def pair_call(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> MergeCall:
    """Return the call of `merge_state`."""
    return MergeCall(PAIR, v_a, s_a, v_b, s_b)


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Write `merge_state(v, s, v_other, s_other)` to v and s.

    v, s, v_other, s_other: two states, as in `merge_state`. v and s may share no memory with each other or with another
    argument, and their elements may not overlap. mask: bool or uint8 (n,), the rows to merge; the others keep their
    bytes. None: all rows. Raises as `merge_state` does, before anything is written. FlashInfer's function.

    >>> v, s = torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)  # of no keys
    >>> merge_state_in_place(v, s, torch.ones(1, 1, 2), torch.zeros(1, 1))
    >>> v, s
    (tensor([[[1., 1.]]]), tensor([[0.]]))
    """
    serve(in_place_call(v, s, v_other, s_other, mask))


def in_place_call(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> MergeCall:
    """Return the call of `merge_state_in_place`."""
    return MergeCall(IN_PLACE, v, s, v_other, s_other, mask)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of the keys of all states together, as new tensors.

    The result is v (n, heads, head_dim) of v's dtype and s fp32 (n, heads).

    v: fp16, bf16 or fp32 (n, states, heads, head_dim). s: fp32 (n, states, heads), base 2. Any strides. Zero states
    give the state of no keys. Raises TypeError for a dtype, ValueError for a shape or device. FlashInfer's function.

    >>> merge_states(torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1), torch.zeros(1, 3, 1))[0]
    tensor([[[3.]]])
    """
    return serve(states_call(v, s))


def states_call(v: Any, s: Any) -> MergeCall:
    """Return the call of `merge_states`."""
    return MergeCall(STATES, v, s)
