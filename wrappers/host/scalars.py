"""Convert numbers of other libraries, above all numpy's, to Python's, and check scales.

Public functions call these only for arguments that are not already an int or float. A value that is not a number is
returned unchanged, and the checks refuse it by name.
"""

import operator
from math import inf
from numbers import Real
from typing import Any

import torch

from . import machine
from .checks import FP32_LEAST, FP32_MOST, check_last_stride, check_number, check_one_of, check_strided
from .plain import traced

OR_TENSOR = " or a float32 tensor of one element"


def integer(value: Any) -> Any:
    """Return an integer of any library as an int. Bools, tensors and symbols of a trace are returned unchanged."""
    if isinstance(value, (int, torch.Tensor, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def real(value: Any) -> Any:
    """Return a real number of any library as a float. None, bools and symbols of a trace are returned unchanged."""
    if value is None or value.__class__ is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    number: Any = value
    try:
        return float(number)
    except OverflowError:  # an int that no float holds: the checks refuse an infinity
        return inf if number > 0 else -inf


def split_scale(name: str, value: Any) -> tuple[Any, torch.Tensor | None]:
    """Return (number, tensor), the product of which is a scale; the tensor is None if the scale is a number.

    A float32 tensor of one element in host memory is a number: it is read here, which the device does not notice, and a
    value that is not finite raises ValueError. If something traces the call, the value is not known yet: the tensor
    stays, without dimensions, so that torch multiplies it with tensors of any device, and the operator of the traced
    call asks again. The checks find anything else that is wrong with the value.
    """
    if not isinstance(value, torch.Tensor):
        return real(value), None
    if not on_host(value) or value.dtype != torch.float32 or value.layout is not torch.strided or value.is_nested:
        return 1.0, value
    if traced(value):
        return 1.0, value.reshape(())
    number = value.item()
    check_number(name, number, OR_TENSOR)
    return number, None


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a scale is one number in host memory, which may be combined with data of any device."""
    return tensor.numel() == 1 and machine.current.is_host(tensor)


def scale_of(
    name: str, value: Any, device: torch.device | None, owner: str = "the query's", positive: bool = False
) -> tuple[Any, torch.Tensor | None]:
    """Return `split_scale` of a number or of a tensor of one element, after a check of both."""
    number, tensor = split_scale(name, value)
    if tensor is not None and on_host(tensor):
        device = None
    check_scale(name, number, tensor, device, owner=owner, positive=positive)
    return number, tensor


def dequantisation_scale(
    name: str, value: Any, rows: Any, owner: str, inverse: bool, per_head: bool = False
) -> tuple[float, torch.Tensor | None]:
    """Return a dequantisation scale of `rows` as a number and None, or as 1.0 and a tensor. inverse: a number is passed
    as its reciprocal. per_head: the tensor may have one element per head; `cache_write.checks` knows how many."""
    if value.__class__ is float and FP32_LEAST <= value <= FP32_MOST:
        return 1.0 / value if inverse else value, None
    if per_head and isinstance(value, torch.Tensor) and value.numel() > 1:
        return 1.0, value
    device = rows.device if isinstance(rows, torch.Tensor) else None
    number, tensor = scale_of(name, value, device, f"that of {owner}", positive=True)
    if tensor is not None:
        return 1.0, tensor.reshape(1)
    return 1.0 / number if inverse else float(number), None


def check_scale(
    name: str, value: Any, tensor: torch.Tensor | None, device: torch.device | None, heads: int = 1,
    owner: str = "the query's", positive: bool = False,
) -> None:  # fmt: skip
    """Check a finite number and, unless it is None, a float32 tensor of one element or of one per head.

    device: where the tensor must be; None for anywhere. owner: the tensor that has this device, for the message.
    positive: whether the number must be positive.
    """
    check_number(name, value, OR_TENSOR, positive)
    if tensor is None:
        return
    check_strided(name, tensor)
    check_one_of(f"{name}: dtype", tensor.dtype, (torch.float32,))
    if tensor.numel() != 1 and tuple(tensor.shape) != (heads,):
        one = "one element" if heads == 1 else f"one element, or be ({heads},), one per query head"
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must have {one}")
    if tensor.numel() != 1:
        check_last_stride(name, tensor)
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: device {tensor.device}, must be {owner}, {device}")


def product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Return the product of two tensors of scales, of one element or of one per head; None is 1."""
    if a is None or b is None:
        return b if a is None else a
    return (a if a.ndim < 2 else a.reshape(-1)) * (b if b.ndim < 2 else b.reshape(-1))


def number(name: str, value: Any, positive: bool = False) -> float:
    """Return a number as a float, after a check; for an argument that may be None, too."""
    value = real(value)
    check_number(name, value, " or None", positive)
    return float(value)


def times(
    name: str, value: Any, device: torch.device, scale: Any, tensor: Any, heads: Any, of: int
) -> tuple[Any, torch.Tensor | None]:
    """Return (scale, tensor), the product of which is a scale, multiplied by another scale.

    value: the other scale: a number, or an fp32 tensor of one element or of (heads[of],). tensor: None, or of one
    element or (heads[0],). Reads no value of a device.
    """
    if value.__class__ is float and FP32_LEAST <= value <= FP32_MOST:
        return scale * value, tensor
    number, given = split_scale(name, value)
    if given is None:
        check_number(name, number, " or a float32 tensor of one element, or of one per head")
        return scale * float(number), tensor
    check_strided(name, given)
    check_one_of(f"{name}: dtype", given.dtype, (torch.float32,))
    if given.device != device and not on_host(given):
        raise ValueError(f"{name}: device {given.device}, must be the query's, {device}")
    if given.numel() != 1:
        given = _of_heads(name, given, heads, of)
    return scale, product(tensor, given)


def _of_heads(name: str, value: torch.Tensor, heads: Any, of: int) -> torch.Tensor:
    """Return a scale per query head, (heads[0],), from one per each of heads[of]: repeated for the heads of a group."""
    shape, all_heads, own = tuple(value.shape), heads[0], heads[of]
    if shape != (own,):
        per_head = f"({own},), one per {'KV' if of else 'query'} head"
        raise ValueError(f"{name}: shape {shape}, must have one element, or be {per_head}")
    if not own or all_heads % own:
        raise ValueError(f"q: {all_heads} heads, must be a multiple of k, v's {own}")
    return (value[:, None].expand(-1, all_heads // own).reshape(-1) if own < all_heads else value).contiguous()
