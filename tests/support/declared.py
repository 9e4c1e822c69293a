"""What compiled code checks of the arguments of a launch, on any device: each against its declaration.

The declarations are the fake arguments with which a kernel is compiled (`fake_args` of its `forward`), so that no list
of arguments is repeated here. `test_declared.py` compares these checks with those of a compiled kernel.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

INT32 = range(-(1 << 31), 1 << 31)
UNSIGNED = {torch.uint32: torch.int32, torch.bool: torch.uint8, torch.int8: torch.uint8}  # integers of a size are alike


class DeclaredTensor(NamedTuple):
    """A tensor argument.

    shape: the extent of each mode, None for any. strides: 1 for a last mode that must be contiguous, or what must
    divide the stride. align: of the first element, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    strides: tuple[int, ...]
    last_stride_one: bool
    align: int


class DeclaredNumber(NamedTuple):
    """A number among the arguments. integer: whether it is an int32 and not a float32."""

    name: str
    integer: bool


@cache
def declared(op: str, spec: Any) -> tuple[DeclaredTensor | DeclaredNumber, ...]:
    """Return the declarations of the arguments of a kernel, in launch order."""
    given = import_module(f"cute_kernels.{op}.forward").fake_args(spec)
    return tuple(_declaration(name, fake) for name, fake in given.items())


def _declaration(name: str, fake: Any) -> DeclaredTensor | DeclaredNumber:
    import cutlass

    from cute_kernels import abi, dtypes

    if isinstance(fake, (cutlass.Int32, cutlass.Float32)):
        return DeclaredNumber(name, isinstance(fake, cutlass.Int32))
    torch_names = {abi.DTYPES[kind]: getattr(torch, known) for kind, known in dtypes.TORCH.items()}
    extents = tuple(extent if isinstance(extent, int) else None for extent in fake.shape)
    strides = tuple(stride if isinstance(stride, int) else stride.divisibility for stride in fake.stride)
    kind = torch_names[fake.element_type]
    return DeclaredTensor(name, kind, extents, strides, isinstance(fake.stride[-1], int), fake._assumed_align)


def check_launch(op: str, spec: Any, flat: Sequence[Any]) -> None:
    """Raise what compiled code raises for arguments that do not fit their declarations: TypeError or ValueError."""
    arguments = declared(op, spec)
    if len(flat) != len(arguments):
        raise TypeError(f"{len(flat)} arguments of {op}, must be {len(arguments)}")
    for argument, value in zip(arguments, flat):
        if isinstance(argument, DeclaredNumber):
            _check_number(argument, value)
        else:
            _check_tensor(argument, value)


def _check_number(argument: DeclaredNumber, value: Any) -> None:
    if not isinstance(value, int if argument.integer else (int, float)):
        raise TypeError(f"argument {argument.name} of the kernel: {value!r}")
    if argument.integer and value not in INT32:
        raise ValueError(f"argument {argument.name} of the kernel: {value}, out of bounds")


def _check_tensor(argument: DeclaredTensor, t: Any) -> None:
    """A stride of a mode of size 1 addresses nothing, and may have any value."""
    name, kind, extents, divisors, last_stride_one, align = argument
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"argument {name} of the kernel: {type(t).__name__}")
    shape, strides = t.shape, t.stride()
    if UNSIGNED.get(t.dtype, t.dtype) != kind or len(shape) != len(extents) or t.device.type != "cpu":
        raise ValueError(f"argument {name} of the kernel: {t.dtype} of shape {tuple(shape)} on {t.device}")
    for mode, (size, extent, stride, divisor) in enumerate(zip(shape, extents, strides, divisors)):
        if extent is not None and size != extent or size > INT32[-1]:
            raise ValueError(f"argument {name} of the kernel: shape {tuple(shape)}")
        last = last_stride_one and mode == len(shape) - 1
        if size != 1 and (stride != 1 if last else stride % divisor):
            raise ValueError(f"argument {name} of the kernel: strides {strides}")
    if t.data_ptr() % align:
        raise ValueError(f"argument {name} of the kernel: address {t.data_ptr():#x}, not a multiple of {align}")
