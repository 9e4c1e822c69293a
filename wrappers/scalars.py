"""Numbers of other libraries, numpy's above all, as Python's own.

Public functions ask here only of arguments that are no int or float already. What is no number stays as it is: checks
refuse it by name.
"""

import operator
from numbers import Real
from typing import Any

import torch


def integer(value: Any) -> Any:
    """An int of a number that is one. Bools, tensors and symbols of a trace stay."""
    if isinstance(value, (int, torch.Tensor, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def real(value: Any) -> Any:
    """A float of a real number. None, bools and symbols of a trace stay."""
    if value is None or value.__class__ is float:
        return value
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def factor(value: Any) -> tuple[Any, torch.Tensor | None]:
    """(number, tensor) whose product a scale is; the tensor is None where the scale is a number."""
    return (1.0, value) if isinstance(value, torch.Tensor) else (real(value), None)
