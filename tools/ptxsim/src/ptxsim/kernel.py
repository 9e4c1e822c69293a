"""Launch a kernel on arrays: from PTX alone, or from PTX and the host function that the CuTe DSL compiled with it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import host
from .call import Global, KernelLaunch, TensorMap
from .parse import parse
from .program import Program
from .runner import RunResult, run

Shape = int | tuple[int, ...]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of the CuTe DSL. ptx: text; host: the host function's MLIR, which computes tensor maps, grid and
    parameters; shared: dynamic bytes per CTA."""

    ptx: str
    host: str
    shared: int

    def calls(self, args: Sequence[Any]) -> list[KernelLaunch]:
        """Return the launches of `args`, the arguments of the host function without its stream: numpy arrays or
        torch tensors, and numbers."""
        return host.evaluate(self.host, self.ptx, [as_numpy(value) for value in args], self.shared)

    def run(self, *args: Any, **how: Any) -> RunResult:
        """Execute the launches of `args`, one after the other; arrays hold the results. how: arguments of
        `runner.run`, and `before` of each launch."""
        return run_all(self.calls(args), **how)


def run_all(calls: Sequence[KernelLaunch], **how: Any) -> RunResult:
    """Execute launches one after the other. how: arguments of `runner.run`, where `program` is that of the first
    launch, and `before` of each `KernelLaunch`."""
    total, before = RunResult(), how.pop("before", None)
    for call in calls:
        call.before = before or call.before
        result = run(call, **{"program": program(call.ptx)} | how)
        how.pop("program", None)
        total.add(result)
    return total


@cache
def program(ptx: str) -> Program:
    """Return the translated kernel of a PTX text; its runs share it."""
    return Program(ptx)


def launch(
    ptx: str,
    args: Sequence[Any],
    grid: Shape = 1,
    block: Shape | None = None,
    cluster: Shape = 1,
    shared: int = 0,
    entry: str = "",
) -> KernelLaunch:
    """Return the launch of a kernel of which there is no host function.

    args: a value per PTX parameter. An array (numpy, or a torch tensor on the CPU) becomes the address of its first
    element, None the address 0. A number takes the type of the parameter; a numpy scalar or bytes must have its size;
    `memory` of the launch resolves the array of a TensorMap, so pass those in a `KernelLaunch`. grid, block, cluster:
    a number or up to three. block: needed if the PTX has no .reqntid. shared: dynamic shared memory in bytes per CTA.
    entry: the kernel's name, needed if the PTX has several."""
    text = host.alone(ptx, entry or only_entry(ptx))
    kernel, memory = parse(text), Global()
    if len(args) != len(kernel.params):
        raise ValueError(f"{len(args)} arguments: kernel {kernel.name} takes {', '.join(kernel.params) or 'none'}")
    params: list[bytes | TensorMap] = []
    owners: dict[tuple[int, int], int] = {}
    for number, (value, (name, (_, size, _))) in enumerate(zip(args, kernel.params.items())):
        try:
            params.append(packed(as_numpy(value), kernel.types[name], size, memory, owners, f"argument {number}"))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"argument {number}, .{kernel.types[name]} {name}: {error}") from None
    shapes = dim3(grid, "grid"), dim3(cluster, "cluster")
    return KernelLaunch(text, params, *shapes, shared, None if block is None else dim3(block, "block"), memory)


def only_entry(ptx: str) -> str:
    """Return the name of the kernel of a PTX text that has one."""
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(names) != 1:
        raise ValueError(f"entry: must be one of the kernels of the PTX, {', '.join(names) or 'which has none'}")
    return str(names[0])


def dim3(shape: Shape, name: str) -> tuple[int, int, int]:
    """Return a number or a tuple as three extents."""
    numbers = (shape,) if isinstance(shape, int) else tuple(shape)
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise ValueError(f"{name}: {shape}, must be one to three positive numbers")
    return (*numbers, 1, 1)[0], (*numbers, 1, 1)[1], (*numbers, 1, 1)[2]


def packed(
    value: Any, kind: str, size: int, memory: Global, owners: dict[tuple[int, int], int], name: str
) -> bytes | TensorMap:
    """Return an argument as the bytes of a parameter of PTX type `kind`; an array is added to `memory`."""
    if isinstance(value, TensorMap):
        return value
    if isinstance(value, (bytes, np.generic)):
        data = value if isinstance(value, bytes) else value.tobytes()
    elif isinstance(value, np.ndarray) or value is None:
        if size != 8:
            raise ValueError(f"an array, must be a number of {size} B")
        address = 0 if value is None else host.register(value, memory, owners, name)
        data = address.to_bytes(8, "little")
    elif kind.startswith("f"):
        data = np.array(value, f"f{size}").tobytes()
    elif isinstance(value, float):
        if size not in (4, 8):
            raise ValueError(f"the float {value}, must be bytes or a numpy scalar of {size} B")
        data = np.array(value, f"f{size}").tobytes()
    elif isinstance(value, (bool, int)):
        data = int(value).to_bytes(size, "little", signed=value < 0)
    else:
        raise TypeError(f"{type(value).__name__}, must be an array, a number, bytes, a TensorMap or None")
    if len(data) != size:
        raise ValueError(f"{len(data)} B, must be {size} B")
    return data


def as_numpy(value: Any) -> Any:
    """Return a view of a torch tensor's memory, its elements as float32 or as integers of their width; other values
    unchanged."""
    if not hasattr(value, "untyped_storage"):
        return value
    import torch

    flat = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()  # type: ignore[arg-type]
    size = value.element_size()
    strides = [stride * size for stride in value.stride()]
    dtype = np.dtype(np.float32 if value.dtype == torch.float32 else f"u{size}")
    return np.ndarray(tuple(value.shape), dtype, flat, value.storage_offset() * size, strides)
