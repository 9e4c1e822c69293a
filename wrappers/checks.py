"""Checks of one argument, generic: each message names the argument, its value and what is allowed."""

from typing import Any

import torch


class UnknownName(KeyError, ValueError):
    """An unknown enum string; callers of FlashInfer catch KeyError, everyone else ValueError."""

    __str__ = ValueError.__str__


def listed(values: Any) -> str:
    return ", ".join(str(v) for v in values)


def check_one_of(what: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise TypeError(f"{what} {value}, must be one of {listed(allowed)}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, must be {shape} ({why})")


def check_last_stride(name: str, t: torch.Tensor) -> None:
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"{name}: stride {t.stride()}, the last must be 1")


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r}, must be an int")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, must be at least {least}")
    return value
