"""A call that merges states, and its checks. Every message names an argument of the caller's function."""

from typing import Any, NamedTuple

import torch

from ..host.checks import check_apart, check_device, check_memory, check_one_of, check_shape, check_strided
from ..host.plain import refuse_grad, traced
from ..host.schema import GivenTensor, MaybeTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
STATES, PAIR, IN_PLACE = "merge_states", "merge_state", "merge_state_in_place"
NAMES: dict[str, dict[str, str]] = {  # the caller's names of fields that have another name there
    STATES: {}, PAIR: {"v": "v_a", "s": "s_a", "v_other": "v_b", "s_other": "s_b"}, IN_PLACE: {},
}  # fmt: skip


class MergeCall(NamedTuple):
    """A call of one of the functions.

    STATES: v (n, states, heads, head_dim) and s (n, states, heads). PAIR, IN_PLACE: v, v_other (n, heads, head_dim) and
    s, s_other (n, heads). IN_PLACE writes v and s, of the rows of the mask.
    """

    function: str
    v: GivenTensor
    s: GivenTensor
    v_other: MaybeTensor = None
    s_other: MaybeTensor = None
    mask: MaybeTensor = None  # (n,)


def validate(call: MergeCall) -> None:
    """Raise on the first argument that does not fit."""
    function, v, s, v_other, s_other, mask = call
    names = {field: NAMES[function].get(field, field) for field in MergeCall._fields}
    if function == STATES:
        _state(names["v"], v, names["s"], s, 4)
        return
    _state(names["v"], v, names["s"], s, 3)
    _state(names["v_other"], v_other, names["s_other"], s_other, 3)
    _alike(names["v_other"], v_other, names["v"], v)
    if mask is not None:
        check_strided("mask", mask, 1)
        check_memory("mask", mask, v)
        check_one_of("mask: dtype", mask.dtype, (torch.bool, torch.uint8))
        check_shape("mask", mask, (v.shape[0],), "rows of v")
        check_device("mask", mask, v.device, "that of v")
    if function == IN_PLACE and not traced(v):
        check_apart({"v": v, "s": s}, {"v_other": v_other, "s_other": s_other, "mask": mask})


def _state(v_name: str, v: Any, s_name: str, s: Any, ndim: int) -> None:
    """Check a state: V (..., heads, head_dim) of `ndim` dimensions, and S (..., heads)."""
    check_strided(v_name, v, ndim)
    check_one_of(f"{v_name}: dtype", v.dtype, FLOATS)
    check_strided(s_name, s, ndim - 1)
    check_memory(s_name, s, v)
    check_one_of(f"{s_name}: dtype", s.dtype, (torch.float32,))
    check_shape(s_name, s, tuple(v.shape[:-1]), f"that of {v_name} without head_dim")
    check_device(s_name, s, v.device, f"that of {v_name}")
    refuse_grad({v_name: v, s_name: s})


def _alike(name: str, v: Any, first_name: str, first: torch.Tensor) -> None:
    """Check that V of the second state looks like that of the first one."""
    check_memory(name, v, first)
    check_shape(name, v, tuple(first.shape), f"that of {first_name}")
    if v.dtype != first.dtype:
        raise TypeError(f"{name}: dtype {v.dtype}, must be that of {first_name}, {first.dtype}")
    check_device(name, v, first.device, f"that of {first_name}")
