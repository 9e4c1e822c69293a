"""Launch a kernel on arrays: from PTX alone, or from PTX and the host function that the CuTe DSL compiled with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import host
from .call import Global, KernelLaunch, TensorMap
from .parse import alone, entries, parse
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


@dataclass(frozen=True)
class TiledArray:
    """An argument of `launch` that becomes a tensor map of an array (numpy, or a torch tensor on the CPU).

    box: extents of a copy, in the order of the array's shape. swizzle: bytes of the span, 0, 32, 64 or 128. fill: the
    value of elements outside the array, "zero" or "nan". format: a key of call.FORMATS; by default that of the array's
    type, and bytes for 8-bit floats."""

    array: Any
    box: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    format: str = ""


@cache
def program(ptx: str) -> Program:
    """Return the translated kernel of a PTX text; its runs share it."""
    return Program(ptx)


def launch(
    ptx: str, args: Sequence[Any], grid: Shape = 1, block: Shape | None = None, cluster: Shape = 1, shared: int = 0,
    entry: str = "", beyond: tuple[str, ...] = (),
) -> KernelLaunch:  # fmt: skip
    """Return the launch of a kernel of which there is no host function.

    args: a value per PTX parameter. An array (numpy, or a torch tensor on the CPU) becomes the address of its first
    element, None the address 0, a TiledArray a tensor map. A number takes the type of the parameter; a numpy scalar or
    bytes must have its size. grid, block, cluster: a number or up to three. block: needed if the PTX has no .reqntid.
    shared: dynamic shared memory in bytes per CTA. entry: the kernel's name, needed if the PTX has several. beyond:
    keys of call.BEYOND."""
    text = alone(ptx, entry or only_entry(ptx))
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
    threads = None if block is None else dim3(block, "block")
    return KernelLaunch(text, params, *shapes, shared, threads, memory, beyond=beyond)


def only_entry(ptx: str) -> str:
    """Return the name of the kernel of a PTX text that has one."""
    names = list(entries(ptx))
    if len(names) != 1:
        raise ValueError(f"entry: must be one of the kernels of the PTX, {', '.join(names) or 'which has none'}")
    return names[0]


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
    if isinstance(value, TiledArray):
        return tensor_map(value, memory, owners, name)
    if isinstance(value, (bytes, np.generic)):
        data = value if isinstance(value, bytes) else value.tobytes()
    elif isinstance(value, np.ndarray) or value is None:
        if size != 8:
            raise ValueError(f"an array, must be a number of {size} B")
        address = 0 if value is None else host.register(value, memory, owners, name)
        data = address.to_bytes(8, "little")
    elif not isinstance(value, (bool, int, float)):
        raise TypeError(f"{type(value).__name__}, must be an array, a TiledArray, a number, bytes or None")
    elif kind.startswith("f") or (isinstance(value, float) and kind in ("b32", "b64")):
        data = np.array(value, f"f{size}").tobytes()
    elif isinstance(value, float):
        raise ValueError(f"the float {value}, must be an integer, bytes or a numpy scalar of {size} B")
    else:
        data = int(value).to_bytes(size, "little", signed=value < 0)
    if len(data) != size:
        raise ValueError(f"{len(data)} B, must be {size} B")
    return data


def tensor_map(value: TiledArray, memory: Global, owners: dict[tuple[int, int], int], name: str) -> TensorMap:
    """Return the tensor map of an array, which is added to `memory`."""
    array = as_numpy(value.array)
    known = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
    kind = known.get(str(value.array.dtype).removeprefix("torch."), f"u{8 * array.itemsize}")
    if array.strides[-1:] != (array.itemsize,):
        raise ValueError(f"strides {array.strides} B, the last must be {array.itemsize} B")
    address = host.register(array, memory, owners, name)
    dims, strides, box = array.shape[::-1], array.strides[-2::-1], tuple(value.box[::-1])
    return TensorMap(address, dims, strides, box, value.format or kind, value.swizzle, value.fill)


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
