"""Evaluate the host function of a kernel, as the DSL's clean MLIR states it: arguments in, launches out.

The types of this IR hold every static number. An operation with a static result is therefore read from its type;
an implementation is needed only if a result depends on an argument. An operation without an implementation gives
a value that raises NotModelled when it is used."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from .call import Global, KernelLaunch, TensorMap
from .faults import NotModelled
from .host_ir import (
    Atom,
    Dynamic,
    Layout,
    Op,
    Unknown,
    View,
    bits_of,
    element_of,
    flat,
    form_of,
    host_function,
    is_static,
    merge,
    open_numbers,
    type_list,
    wrap,
)
from .host_ops import MANY, ONE, tensor_map
from .parse import alone, parse_head


@dataclass
class Frame:
    """The state of an evaluation: its inputs, the values so far, the launches found."""

    ptx: str
    shared: Mapping[str, int] | int
    values: dict[str, Any] = field(default_factory=dict)
    memory: Global = field(default_factory=Global)
    calls: list[KernelLaunch] = field(default_factory=list)


def evaluate(mlir: str, ptx: str, args: Sequence[Any], shared: Mapping[str, int] | int) -> list[KernelLaunch]:
    """Return the launches of the host function, in order. They share one memory.

    args: numpy arrays for tensors (views of any strides) and pointers, numbers for scalars; no stream. An array
    may hold any type of the right width. Arrays are registered by their owning buffer, once. shared: dynamic
    shared memory in bytes, for every kernel or by kernel name."""
    parameters, body = host_function(mlir)
    frame = Frame(ptx, shared)
    wanted = [(name, type_) for name, type_ in parameters if type_ != "!cuda.stream"]
    if len(wanted) != len(args):
        raise ValueError(f"{len(args)} arguments: the host function takes {[type_ for _, type_ in wanted]}")
    owners: dict[tuple[int, int], int] = {}
    for index, ((name, type_), value) in enumerate(zip(wanted, args)):
        try:
            frame.values[name] = _argument(type_, value, frame.memory, owners, f"argument {index}")
        except ValueError as error:
            raise ValueError(f"argument {index}, {type_}: {error}") from None
    _run(frame, body)
    if not frame.calls:
        raise ValueError("the host function launches nothing with these arguments")
    return frame.calls


# Arguments


def _argument(type_: str, value: Any, memory: Global, owners: dict[tuple[int, int], int], name: str) -> Any:
    """Return the value of a parameter of the host function, and register the buffer of an array."""
    if type_.startswith(("!cute.memref<", "!cute.ptr<")):
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{type(value).__name__}: must be a numpy array")
        address = register(value, memory, owners, name)
        found = re.search(r"align<(\d+)>", type_)
        align = int(found[1]) if found else max(bits_of(element_of(type_)) // 8, 1)
        if address % align:
            raise ValueError(
                f"the first element lies at a multiple of {address & -address} B: must be one of {align} B"
            )
        return address if type_.startswith("!cute.ptr<") else View(address, _array_layout(type_, value))
    if not isinstance(value, (bool, int, float, np.generic)):
        raise ValueError(f"{type(value).__name__}: must be a number")
    if re.fullmatch(r"i\d+", type_):
        bits = bits_of(type_)
        whole = int(value)
        if whole != value or not -(1 << bits - 1) <= whole < 1 << bits:
            raise ValueError(f"{value}: must be a whole number of {bits} bits")
        return wrap(whole, type_)
    if re.fullmatch(r"b?f\d+", type_):
        return float(value)
    raise NotModelled(f"{name}: no argument of type {type_}")


def register(array: np.ndarray, memory: Global, owners: dict[tuple[int, int], int], name: str) -> int:
    """Return the address of the first element of `array`; its owning buffer is added to `memory` unless it is there."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = owner.__array_interface__["data"][0]
    key = start, owner.nbytes
    if key not in owners or not owner.size:
        owners[key] = memory.add(owner if owner.flags.c_contiguous else owner.T, name)
    return owners[key] + array.__array_interface__["data"][0] - start


def _array_layout(type_: str, array: np.ndarray) -> Layout:
    """Return shape and strides (in elements) of `array`. Raise ValueError if it does not match the memref type."""
    want: Layout = form_of(type_).layout
    if array.itemsize * 8 != bits_of(element_of(type_)):
        raise ValueError(f"elements of {array.itemsize} B: must have {bits_of(element_of(type_))} bits")
    rank = len(want.shape) if isinstance(want.shape, tuple) else 1
    if array.ndim != rank:
        raise ValueError(f"shape {array.shape}: must have {rank} modes")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"strides {array.strides} B: must be multiples of the element's {array.itemsize} B")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    layout = Layout(array.shape, strides) if isinstance(want.shape, tuple) else Layout(array.shape[0], strides[0])
    for extent, shape in zip(array.shape, flat(want.shape)):
        if not isinstance(shape, Dynamic) and extent != shape or isinstance(shape, Dynamic) and extent % shape.divisor:
            raise ValueError(f"shape {array.shape}: must fit the type")
    for extent, stride, wanted in zip(array.shape, strides, flat(want.stride)):
        wrong = stride % wanted.divisor if isinstance(wanted, Dynamic) else stride != wanted
        if wrong and array.size and extent > 1:
            raise ValueError(f"strides {strides}: must fit the type")
    return Layout(layout.shape, merge(want.stride, layout.stride, lenient=True))


# Evaluation


def _run(frame: Frame, ops: tuple[Op, ...]) -> tuple[Any, ...]:
    """Evaluate a block and return the values it yields. Names of an inner block are local to it."""
    clusters: dict[str, tuple[int, ...]] = {}
    for op in ops:
        if op.name == "scf.yield":
            return tuple(_value(frame, name) for name in op.operands)
        if op.name == "cuda.launch_cfg.cluster_dim":
            clusters[op.operands[0]] = tuple(_value(frame, name) for name in op.operands[1:])
        elif op.name == "cuda.launch_ex":
            frame.calls.append(_launch(frame, op, clusters))
        elif op.name in ("scf.if", "scf.for"):
            (_if if op.name == "scf.if" else _for)(frame, op)
        elif op.regions and any("cuda.launch_ex" == inner.name for inner in _inner(op)):
            raise NotModelled(f"line {op.line}: a launch inside {op.name}")
        elif op.results:
            try:
                results = _results(frame, op)
            except NotModelled as error:
                results = [Unknown(str(error))] * len(op.results)
            frame.values |= dict(zip(op.results, results))
    return ()


def _inner(op: Op) -> Iterator[Op]:
    for region in op.regions:
        for inner in region:
            yield inner
            yield from _inner(inner)


def _if(frame: Frame, op: Op) -> None:
    branch = 0 if _value(frame, op.operands[0]) else 1
    if branch < len(op.regions):
        inner = Frame(frame.ptx, frame.shared, dict(frame.values), frame.memory, frame.calls)
        frame.values |= dict(zip(op.results, _run(inner, op.regions[branch])))


def _for(frame: Frame, op: Op) -> None:
    """Evaluate `%i = %first to %end step %step iter_args(%x = %start, ...)`: each iteration yields the next x."""
    index, *bounds = re.match(r" *(%\w+) = (%\w+) to (%\w+) step (%\w+)", op.text).groups()  # type: ignore[union-attr]
    carried = re.findall(r"(%\w+) = (%[\w#]+)", op.text.partition("iter_args")[2])
    values = tuple(_value(frame, start) for _, start in carried)
    for i in range(*(_value(frame, name) for name in bounds)):
        known = frame.values | {index: i} | dict(zip((name for name, _ in carried), values))
        values = _run(Frame(frame.ptx, frame.shared, known, frame.memory, frame.calls), op.regions[0])
    frame.values |= dict(zip(op.results, values))


def _value(frame: Frame, name: str, type_: str = "") -> Any:
    """Return the value of a name. If the type is static, the value is read from it."""
    if is_static(type_):
        return form_of(type_)
    value = frame.values.get(name, Unknown(f"{name} is not defined"))
    if isinstance(value, Unknown):
        raise NotModelled(value.reason)
    return value


def _results(frame: Frame, op: Op) -> list[Any]:
    """Return one value per result, checked against the types that are written."""
    if len(op.result_types) == len(op.results) and all(map(is_static, op.result_types)):
        return [form_of(type_) for type_ in op.result_types]
    if op.name in SPECIAL:
        return [SPECIAL[op.name](frame, op)]
    handler = ONE.get(op.name) or MANY.get(op.name)
    if handler is None or "mode =" in op.text and op.name != "cute.get":
        raise NotModelled(f"line {op.line}: operation {op.name} with a result that depends on arguments")
    types = op.operand_types or ("",) * len(op.operands)
    args = [_value(frame, name, type_) for name, type_ in zip(op.operands, types)]
    if handler is not tensor_map and any(isinstance(arg, str) for arg in args):
        raise NotModelled(f"line {op.line}: {op.name} of a composed layout")
    made = handler(op, args)
    results = list(made) if op.name in MANY else [made]
    if len(op.result_types) == len(results):
        try:
            return [merge(form_of(type_), value) for type_, value in zip(op.result_types, results)]
        except ValueError as error:
            raise ValueError(f"line {op.line}, {op.name}: {error}") from None
    return results


def _dynamic_shared(frame: Frame, kernel: str) -> int:
    size = frame.shared if isinstance(frame.shared, int) else frame.shared.get(kernel)
    if size is None:
        raise ValueError(f"shared memory of kernel {kernel}: not among {frame.shared}")
    return size


SPECIAL: dict[str, Callable[[Frame, Op], Any]] = {
    "cuda.launch_cfg.create": lambda frame, op: op,
    "cute.kernel_smem_size": lambda frame, op: _dynamic_shared(frame, op.text.split("@")[-1]),
    "cute.make_atom": lambda frame, op: Atom(
        tuple((type_, _value(frame, name)) for name, type_ in zip(op.operands, op.operand_types))
    ),
}


# Launches


def _launch(frame: Frame, op: Op, clusters: Mapping[str, tuple[int, ...]]) -> KernelLaunch:
    """Return a launch. Only the cluster attribute matters: programmatic and cooperative launch change no value."""
    kernel, config = re.match(r" *@\w+::@(\w+)<(%\w+)>", op.text).groups()  # type: ignore[union-attr]
    create: Op = _value(frame, config)
    dims: dict[str, Any] = {}
    for name in ("gridDim", "blockDim"):
        names = re.search(rf"{name} = \(([^)]*)\)", create.text)[1].split(", ")  # type: ignore[index]
        dims[name] = tuple(int(_value(frame, dim)) for dim in names)
    operands = zip(op.operands[1:], type_list(op.operand_types[1]), strict=True)
    params = [packed for name, type_ in operands if (packed := _pack(frame, name, type_)) is not None]
    text = alone(frame.ptx, kernel)
    wanted = _sizes(text)
    found = [(128, 64) if isinstance(p, TensorMap) else (len(p[0]), p[1]) for p in params]
    if found != wanted:
        raise ValueError(f"parameters of kernel {kernel}: packed (bytes, alignment) {found}, the PTX has {wanted}")
    values = [p if isinstance(p, TensorMap) else p[0] for p in params]
    cluster: Any = clusters.get(config, (1, 1, 1))
    return KernelLaunch(
        text, values, dims["gridDim"], cluster, _dynamic_shared(frame, kernel), dims["blockDim"], frame.memory
    )


@lru_cache(64)
def _sizes(ptx: str) -> list[tuple[int, int]]:
    """Return (bytes, alignment) of the parameters of the only kernel of a PTX text."""
    return [(size, align) for _, size, align in parse_head(ptx).params.values()]


def _pack(frame: Frame, name: str, type_: str) -> tuple[bytes, int] | TensorMap | None:
    """Return a kernel parameter as (bytes, alignment), its parts naturally aligned; None if all of it is static."""
    if is_static(type_):
        return None
    value = _value(frame, name)
    if isinstance(value, TensorMap):
        return value
    data, align = b"", 1
    for part in _parts(type_, value):
        align = max(align, len(part))
        data += bytes(-len(data) % len(part)) + part
    return (data + bytes(-len(data) % align), align) if data else None


def _parts(type_: str, value: Any) -> list[bytes]:
    """Return the machine values of a parameter, each aligned to its size."""
    if isinstance(value, Atom):
        return [part for inner in value.fields for part in _parts(*inner)]
    if found := re.fullmatch(r"vector<(\d+)x(\w+)>", type_):
        return [b"".join(_parts(found[2], value) * int(found[1]))]
    if found := re.fullmatch(r"(b?f)(\d+)", type_):
        dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64}[type_]
        return [np.asarray(value, dtype).tobytes()]
    if found := re.match(r"!cute\.ptr<\w+, (\w+)", type_):
        return [value.to_bytes(8 if found[1] in ("gmem", "generic") else 4, "little")]
    if type_ == "!cute.fast_divmod_divisor<32>":  # quotient: ((x - high(x * factor) >> first) + high) >> second
        shift = (value - 1).bit_length()
        factor = (((1 << shift) - value << 32) // value + 1) % (1 << 32)
        return [
            value.to_bytes(4, "little"),
            factor.to_bytes(4, "little"),
            bytes([min(shift, 1)]),
            bytes([max(shift - 1, 0)]),
        ]
    if re.fullmatch(r"i\d+|index|!cute\.i\d+(<.*>)?", type_) or form_of(type_) is not None:
        leaves = open_numbers("i64", value) if type_ == "index" else open_numbers(type_, value)
        return [(number % (1 << 8 * size)).to_bytes(size, "little") for size, number in leaves]
    raise NotModelled(f"a kernel parameter of type {type_}")
