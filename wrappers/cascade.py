"""Merge partial attention, as FlashInfer's `cascade` does.

Plain torch operations on CPU and CUDA, computed in fp32. Nothing waits for the device, and all functions can be
captured.

A state is the output V of attention over some keys, with its base-2 log-sum-exp S: the two results of
`return_lse=True`. The state of no keys has S = -inf. It does not change a merge, whatever its V holds; merging only
such states gives V = 0 and S = -inf. NaN in S is propagated.

    out_a, lse_a = trtllm_batch_context_with_kv_cache(..., return_lse=True)  # keys of a shared prefix
    out_b, lse_b = trtllm_batch_context_with_kv_cache(..., return_lse=True)  # the other keys
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)  # all keys

All functions raise before anything is written: TypeError for a type or dtype, ValueError for a shape, stride or device,
RuntimeError for a tensor that requires grad, in grad mode.
"""

from typing import Any

import torch

from .checks import check_apart, check_one_of, check_shape, check_strided
from .plain import refuse_grad, traced

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _state(v_name: str, v: Any, s_name: str, s: Any, ndim: int = 3) -> None:
    """Check a state: V (..., heads, head_dim) and S (..., heads)."""
    check_strided(v_name, v, ndim)
    check_one_of(f"{v_name}: dtype", v.dtype, FLOATS)
    check_strided(s_name, s, ndim - 1)
    check_one_of(f"{s_name}: dtype", s.dtype, (torch.float32,))
    check_shape(s_name, s, tuple(v.shape[:-1]), f"that of {v_name} without head_dim")
    if s.device != v.device:
        raise ValueError(f"{s_name}: device {s.device}, must be that of {v_name}, {v.device}")
    refuse_grad({v_name: v, s_name: s})


def _alike(name: str, v: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    check_shape(name, v, tuple(first.shape), f"that of {first_name}")
    if v.dtype != first.dtype:
        raise TypeError(f"{name}: dtype {v.dtype}, must be that of {first_name}, {first.dtype}")
    if v.device != first.device:
        raise ValueError(f"{name}: device {v.device}, must be that of {first_name}, {first.device}")


def _merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states (N, S, H, D), (N, S, H), at least one of each, into fp32 (N, H, D), (N, H)."""
    most = s.amax(1, keepdim=True)
    weights = torch.exp2(s - torch.where(most == -torch.inf, 0.0, most))
    total = weights.sum(1)
    v = torch.where((s == -torch.inf).unsqueeze(-1), 0.0, v.float())
    merged = (v * weights.unsqueeze(-1)).sum(1) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged, most.squeeze(1) + total.log2()


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
    _state("v_a", v_a, "s_a", s_a)
    _state("v_b", v_b, "s_b", s_b)
    _alike("v_b", v_b, "v_a", v_a)
    v, s = _merge(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    return v.to(v_a.dtype), s


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Write `merge_state(v, s, v_other, s_other)` to v and s. The elements of v, and of s, may not overlap each other.

    mask: bool or uint8 (n,), the rows to merge; the others keep their bytes. None: all rows. Raises as `merge_state`
    does, before anything is written. FlashInfer's function.

    >>> v, s = torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)  # of no keys
    >>> merge_state_in_place(v, s, torch.ones(1, 1, 2), torch.zeros(1, 1))
    >>> v, s
    (tensor([[[1., 1.]]]), tensor([[0.]]))
    """
    _state("v", v, "s", s)
    _state("v_other", v_other, "s_other", s_other)
    _alike("v_other", v_other, "v", v)
    if mask is not None:
        check_strided("mask", mask, 1)
        check_one_of("mask: dtype", mask.dtype, (torch.bool, torch.uint8))
        check_shape("mask", mask, (v.shape[0],), "rows of v")
        if mask.device != v.device:
            raise ValueError(f"mask: device {mask.device}, must be that of v, {v.device}")
    if not traced(v):
        check_apart({"v": v, "s": s}, {})
    new_v, new_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        kept = mask == 0
        new_v, new_s = torch.where(kept[:, None, None], v, new_v), torch.where(kept[:, None], s, new_s)
    v.copy_(new_v)
    s.copy_(new_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of the keys of all states together, as new tensors.

    The result is v (n, heads, head_dim) of v's dtype and s fp32 (n, heads).

    v: fp16, bf16 or fp32 (n, states, heads, head_dim). s: fp32 (n, states, heads), base 2. Any strides. Zero states
    give the state of no keys. Raises TypeError for a dtype, ValueError for a shape or device. FlashInfer's function.

    >>> merge_states(torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1), torch.zeros(1, 3, 1))[0]
    tensor([[[3.]]])
    """
    _state("v", v, "s", s, 4)
    if not v.shape[1]:
        return v.sum(1), s.sum(1) - torch.inf
    merged, lse = _merge(v, s)
    return merged.to(v.dtype), lse
