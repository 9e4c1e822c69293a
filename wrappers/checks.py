"""Checks of one argument, generic: each message names the argument, its value and what is allowed.

CUTE_KERNELS_CHECK  1 checks every call as one without a plan, and reads its lengths, offsets, page ids and scales
                    before the launch, which waits for the device; a captured launch is not checked, since its graph
                    is replayed with other values. Default 0: values are read on the CPU only, and clamped by kernels.
"""

import os
from functools import cache
from typing import Any, NoReturn

import torch
from torch._subclasses import FakeTensor

from . import overlap

INF = float("inf")
INTEGERS = int, torch.SymInt
NUMBERS = int, float, torch.SymInt, torch.SymFloat


class UnknownName(KeyError, ValueError):
    """An unknown enum string; callers of FlashInfer catch KeyError, everyone else ValueError."""

    __str__ = ValueError.__str__


def listed(values: Any) -> str:
    return ", ".join(str(v) for v in values)


@cache
def checking() -> bool:
    """Whether values on a device are to be checked: CUTE_KERNELS_CHECK, read once a process."""
    found = os.environ.get("CUTE_KERNELS_CHECK") or "0"
    if found not in ("0", "1"):
        raise ValueError(f"CUTE_KERNELS_CHECK: {found!r}, must be 0 or 1")
    return found == "1"


def check_strided(name: str, value: Any, ndim: int | None = None) -> torch.Tensor:
    """A strided tensor, of so many dimensions."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}, must be a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise ValueError(f"{name}: layout {kind}, must be torch.strided")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, must have {ndim} dimensions")
    return value


def check_memory(name: str, value: Any, first: torch.Tensor) -> None:
    """Not fake where the first tensor, which decides who serves a call, is not."""
    if isinstance(value, FakeTensor) and not isinstance(first, FakeTensor):
        raise TypeError(f"{name}: a FakeTensor, must have memory, as the first tensor of the call does")


def refuse_flag(name: str, value: Any, or_none: str = "") -> NoReturn:
    raise TypeError(f"{name}: {value!r}, must be True{',' if or_none else ' or'} False{or_none}")


def check_flag(name: str, value: Any) -> None:
    if value is not True and value is not False:
        refuse_flag(name, value)


def check_optional_flag(name: str, value: Any) -> None:
    if value is not None and value is not True and value is not False:
        refuse_flag(name, value, " or None")


def check_number(name: str, value: Any, or_else: str = "", positive: bool = False) -> None:
    """A finite float or int, or one that torch.compile traces. or_else: what else it may be."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: {value!r}, must be a float{or_else}")
    if not (0 if positive else -INF) < value < INF:
        raise ValueError(f"{name}: {value}, must be {'positive and ' if positive else ''}finite")


def check_one_of(what: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise TypeError(f"{what} {value}, must be one of {listed(allowed)}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, must be {shape} ({why})")


def check_last_stride(name: str, t: torch.Tensor) -> None:
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"{name}: stride {t.stride()}, the last must be 1")


def check_operand(
    name: str, value: Any, ndim: int, dtypes: Any, device: torch.device | None, whose: str = "the query's"
) -> torch.Tensor:
    """A strided tensor of so many dimensions, whose last stride is 1, of one of the dtypes, on another's device."""
    check_strided(name, value, ndim)
    if device is not None and value.device != device:
        raise ValueError(f"{name}: device {value.device}, must be {whose}, {device}")
    check_one_of(f"{name}: dtype", value.dtype, dtypes)
    check_last_stride(name, value)
    return value


def check_integer(name: str, value: Any, least: int | None = None) -> Any:
    """The value, an int, or one that torch.compile traces."""
    if value.__class__ is not int and (isinstance(value, bool) or not isinstance(value, INTEGERS)):
        raise TypeError(f"{name}: {value!r}, must be an int")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, must be at least {least}")
    return value


def check_apart(outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor | None]) -> None:
    """No output has two elements at one address, or memory in common with an input or another output."""
    others = dict(inputs)
    for name, out in outputs.items():
        if overlap.folded(out):
            form = f"strides {out.stride()} of shape {tuple(out.shape)}"
            raise ValueError(f"{name}: {form}, elements must not overlap each other")
        for other, t in others.items():
            if t is not None and overlap.overlap(out, t):
                raise ValueError(f"{name}: shape {tuple(out.shape)} overlaps the memory of {other}, must be apart")
        others[name] = out
