"""Checks of a call that merges states. Every message names an argument of the caller's function."""

from typing import Any

import torch

from ..host.checks import check_apart, check_device, check_memory, check_one_of, check_shape, check_strided
from ..host.plain import refuse_grad, traced

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_state(v_name: str, v: Any, s_name: str, s: Any, ndim: int = 3) -> None:
    """Check a state: V (..., heads, head_dim) and S (..., heads)."""
    check_strided(v_name, v, ndim)
    check_one_of(f"{v_name}: dtype", v.dtype, FLOATS)
    check_strided(s_name, s, ndim - 1)
    check_memory(s_name, s, v)
    check_one_of(f"{s_name}: dtype", s.dtype, (torch.float32,))
    check_shape(s_name, s, tuple(v.shape[:-1]), f"that of {v_name} without head_dim")
    check_device(s_name, s, v.device, f"that of {v_name}")
    refuse_grad({v_name: v, s_name: s})


def check_alike(name: str, v: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    check_memory(name, v, first)
    check_shape(name, v, tuple(first.shape), f"that of {first_name}")
    if v.dtype != first.dtype:
        raise TypeError(f"{name}: dtype {v.dtype}, must be that of {first_name}, {first.dtype}")
    check_device(name, v, first.device, f"that of {first_name}")


def validate_states(v: Any, s: Any) -> None:
    """Check the arguments of `merge_states`."""
    check_state("v", v, "s", s, 4)


def validate_pair(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> None:
    """Check the arguments of `merge_state`."""
    check_state("v_a", v_a, "s_a", s_a)
    check_state("v_b", v_b, "s_b", s_b)
    check_alike("v_b", v_b, "v_a", v_a)


def validate_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
    """Check the arguments of `merge_state_in_place`."""
    check_state("v", v, "s", s)
    check_state("v_other", v_other, "s_other", s_other)
    check_alike("v_other", v_other, "v", v)
    if mask is not None:
        check_strided("mask", mask, 1)
        check_memory("mask", mask, v)
        check_one_of("mask: dtype", mask.dtype, (torch.bool, torch.uint8))
        check_shape("mask", mask, (v.shape[0],), "rows of v")
        check_device("mask", mask, v.device, "that of v")
    if not traced(v):
        check_apart({"v": v, "s": s}, {"v_other": v_other, "s_other": s_other, "mask": mask})
