"""Generic checks of one argument. Each message names the argument, its value and what is allowed.

CUTE_KERNELS_CHECK=1 checks every call as if it had no plan, and reads its lengths, offsets, page ids and scales before
the launch, which waits for the device. Captured launches are not checked, since their graph is replayed with other
values. With 0, the default, values are read on the CPU only, and kernels clamp them.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from torch._subclasses import FakeTensor

from . import overlap

INF = float("inf")
FP32_LEAST, FP32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers; kernels flush smaller ones
FLAGS = bool, torch.SymBool  # the second: a comparison of sizes that torch.compile traces
INTEGERS = int, torch.SymInt
NUMBERS = int, float, torch.SymInt, torch.SymFloat


class UnknownName(KeyError, ValueError):
    """An unknown enum string. Callers of FlashInfer catch KeyError, all others ValueError."""

    __str__ = ValueError.__str__


class MixedDtypes(TypeError, RuntimeError):
    """Dtypes that must be one and are not. Callers of FlashInfer catch RuntimeError, all others TypeError."""


class PlannedDtypes(TypeError, ValueError):
    """Dtypes of a plan that do not go together. Callers of FlashInfer catch ValueError, all others TypeError."""


def listed(values: Any) -> str:
    return ", ".join(str(v) for v in values)


@cache
def checking() -> bool:
    """Return whether values on a device are checked: CUTE_KERNELS_CHECK, read once per process."""
    found = os.environ.get("CUTE_KERNELS_CHECK") or "0"
    if found not in ("0", "1"):
        raise ValueError(f"CUTE_KERNELS_CHECK: {found!r}, must be 0 or 1")
    return found == "1"


def raise_reason(validate: Callable[..., Any], *given: Any) -> None:
    """Raise the error that names the argument for which a call failed, if `validate` finds one."""
    try:
        validate(*given)
    except Exception as why:
        raise why from None


def check_device(name: str, t: torch.Tensor, device: torch.device, owner: str) -> None:
    """Check where a tensor is. owner: the tensor that has this device, for the message."""
    if t.device != device:
        raise ValueError(f"{name}: device {t.device}, must be {owner}, {device}")


def check_strided(name: str, value: Any, ndim: int | None = None) -> torch.Tensor:
    """Return the value, which must be a strided tensor, of `ndim` dimensions unless that is None."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}, must be a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise ValueError(f"{name}: layout {kind}, must be torch.strided")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, must have {ndim} dimensions")
    return value


def check_memory(name: str, value: Any, first: torch.Tensor) -> None:
    """Check that the value is not a FakeTensor, unless the first tensor, which decides where a call runs, is one."""
    if isinstance(value, FakeTensor) and not isinstance(first, FakeTensor):
        raise TypeError(f"{name}: a FakeTensor, must have memory, since the first tensor of the call has")


def refuse_flag(name: str, value: Any, or_none: str = "") -> NoReturn:
    raise TypeError(f"{name}: {value!r}, must be True{',' if or_none else ' or'} False{or_none}")


def check_flag(name: str, value: Any) -> None:
    if value is not True and value is not False and not isinstance(value, FLAGS):
        refuse_flag(name, value)


def check_optional_flag(name: str, value: Any) -> None:
    if value is not None and value is not True and value is not False and not isinstance(value, FLAGS):
        refuse_flag(name, value, " or None")


def check_number(name: str, value: Any, or_else: str = "", positive: bool = False) -> None:
    """Check for a float or int, or one that torch.compile traces, that float32 holds as a normal number or as 0.

    Kernels take numbers in float32. or_else: the alternatives, for the message. positive: whether 0 and negative
    numbers are refused.
    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: {value!r}, must be a float{or_else}")
    if not FP32_LEAST <= value <= FP32_MOST:
        check_in_fp32(name, value, positive)


def check_in_fp32(name: str, value: Any, positive: bool = False, where: str = "") -> None:
    """Check that float32 holds a number as a normal one or as 0. where: what the message says behind the value."""
    if not (FP32_LEAST <= value <= FP32_MOST or not positive and (value == 0 or -FP32_MOST <= value <= -FP32_LEAST)):
        sign = "positive and " if positive else ""
        raise ValueError(f"{name}: {value}{where}, must be {sign}finite in float32{too_small(value, positive)}")


def too_small(value: Any, positive: bool = True) -> str:
    """Return what the message on a refused number adds if the number is too small for float32."""
    if not 0 < abs(value) < FP32_LEAST:
        return ""
    return f", at least {FP32_LEAST:.3g}" if positive else f", 0 or at least {FP32_LEAST:.3g} in magnitude"


def check_one_of(what: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise TypeError(f"{what} {value}, must be {'one of ' if len(allowed) > 1 else ''}{listed(allowed)}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], why: str, hint: str = "") -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, must be {shape} ({why}){hint}")


def swapped(fits: bool, heads: int, rows: int, layout: str) -> str:
    """Return what a message on the heads of a cache adds if its heads seem to be the rows of a page.

    fits: whether the call would be right if the cache had `rows` heads. heads, rows: those of the cache as it was
    given. layout: the caller's name of the layout.
    """
    likely = fits and heads != rows > 1
    return f"; heads and rows look swapped ({heads} and {rows}): check {layout}" if likely else ""


def check_last_stride(name: str, t: torch.Tensor) -> None:
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"{name}: strides {t.stride()}, the last must be 1")


def check_operand(
    name: str, value: Any, ndim: int, dtypes: Any, device: torch.device | None, owner: str = "the query's"
) -> torch.Tensor:
    """Return the value: a strided tensor of `ndim` dimensions and one of the dtypes, on a given device, last stride 1.

    device: None for any. owner: the tensor that has this device, for the message.
    """
    check_strided(name, value, ndim)
    if device is not None and value.device != device:  # not `check_device`: planned calls come here
        raise ValueError(f"{name}: device {value.device}, must be {owner}, {device}")
    check_one_of(f"{name}: dtype", value.dtype, dtypes)
    check_last_stride(name, value)
    return value


def check_integer(name: str, value: Any, least: int | None = None) -> Any:
    """Return the value: an int, or one that torch.compile traces, of at least `least` unless that is None."""
    if value.__class__ is not int and (isinstance(value, bool) or not isinstance(value, INTEGERS)):
        raise TypeError(f"{name}: {value!r}, must be an int")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, must be at least {least}")
    return value


def check_apart(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Check that no output has two elements at one address, nor memory in common with an input or another output."""
    others: dict[str, torch.Tensor | None] = dict(inputs)
    for name, out in outputs.items():
        if overlap.folded(out):
            layout = f"strides {out.stride()} of shape {tuple(out.shape)}"
            raise ValueError(f"{name}: {layout}, elements must not overlap each other")
        for other, t in others.items():
            if t is not None and overlap.overlap(out, t):
                raise ValueError(
                    f"{name}: shape {tuple(out.shape)}, overlaps the memory of {other}, must not overlap it"
                )
        others[name] = out
