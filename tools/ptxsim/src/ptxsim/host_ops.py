"""The operations of a host function, as far as their results depend on its arguments."""

import math
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .call import FORMATS, TensorMap
from .faults import NotModelled
from .host_ir import (
    Dynamic,
    Layout,
    Op,
    View,
    bits_of,
    element_of,
    flat,
    form_of,
    merge,
    open_numbers,
    parse_tree,
    size_of,
    wrap,
)

TMA_FORMATS = {  # names of the IR: keys of FORMATS
    "U8": "u8",
    "U16": "u16",
    "U32": "u32",
    "S32": "u32",
    "U64": "u64",
    "S64": "u64",
    "F16_RN": "f16",
    "BF16_RN": "bf16",
    "F32_RN": "f32",
    "TF32_RN": "tf32",
    "U4": "16u4_align8",
}


def _fill(op: Op, args: list[Any]) -> Any:
    """Evaluate make_shape and its kin: the open numbers of the operands fill those of the result, in order."""
    leaves = iter([leaf for type_, value in zip(op.operand_types, args) for _, leaf in open_numbers(type_, value)])

    def fill(form: Any) -> Any:
        if isinstance(form, tuple):
            return tuple(fill(part) for part in form)
        return next(leaves) if isinstance(form, Dynamic) else form

    return fill(form_of(op.result_types[0]))


def _ordered(shape: Any, order: Any = None) -> Layout:
    """Return compact strides, the mode with the lowest order fastest; by default the first."""
    extents = flat(shape)
    orders = flat(order) if order is not None else list(range(len(extents)))
    strides, step = [0] * len(extents), 1
    for index in sorted(range(len(extents)), key=orders.__getitem__):
        strides[index] = step
        step *= extents[index]
    ready = iter(strides)

    def build_like(tree: Any) -> Any:
        return tuple(build_like(part) for part in tree) if isinstance(tree, tuple) else next(ready)

    return Layout(shape, build_like(shape))


def _make_layout(op: Op, args: list[Any]) -> Layout:
    """Evaluate make_layout and make_ordered_layout. In a compact layout, a static extent of 1 has the type's stride
    0."""
    form: Layout = form_of(op.result_types[0])
    if op.name == "cute.make_identity_layout":
        return Layout(args[0], form.stride)
    if op.name == "cute.make_layout" and len(args) == 2:
        return Layout(args[0], args[1])
    made = _ordered(*args)
    return Layout(made.shape, merge(form.stride, made.stride, lenient=True))


def _tile_to_shape(op: Op, args: list[Any]) -> Layout:
    """Return copies of a block that fill a shape, in an order; the block must have no holes."""
    block, shape, order = args
    modes = block.shape if isinstance(block.shape, tuple) else (block.shape,)
    strides = block.stride if isinstance(block.stride, tuple) else (block.stride,)
    reach = sum((n - 1) * d for n, d in zip(flat(block.shape), flat(block.stride))) + 1
    if reach != math.prod(n for n, d in zip(flat(block.shape), flat(block.stride)) if d):
        raise NotModelled(f"line {op.line}: {op.name} of the block {block}")
    pad = (1,) * (len(shape) - len(modes))
    rest = tuple(-(-extent // size_of(mode)) for extent, mode in zip(shape, modes + pad))
    copies = _ordered(rest, order)
    zipped = Layout(
        tuple(zip(modes + pad, rest)),
        tuple(zip(strides + (0,) * len(pad), (stride * reach for stride in copies.stride))),
    )
    form: Layout = form_of(op.result_types[0])
    return Layout(zipped.shape, merge(form.stride, zipped.stride, lenient=True))


def _ceil_div(op: Op, args: list[Any]) -> Any:
    shape, tile = args
    if not isinstance(shape, tuple):
        return -(-shape // size_of(tile))
    tiles = tile if isinstance(tile, tuple) else (tile,)
    return tuple(-(-size_of(n) // size_of(tiles[i])) if i < len(tiles) else n for i, n in enumerate(shape))


def _divide(op: Op, args: list[Any]) -> Any:
    """Evaluate zipped_divide, tiled_divide and logical_divide of flat modes by tiles of stride 1."""
    source, tile = args
    layout = source.layout if isinstance(source, View) else source
    tiles = tile if isinstance(tile, tuple) else (tile,)
    shapes, strides = (x if isinstance(x, tuple) else (x,) for x in (layout.shape, layout.stride))
    whole = all(
        not isinstance(shapes[i], tuple) and isinstance(t.shape, int) and (t.stride == 1 or t.shape == 1)
        for i, t in enumerate(tiles)
    )
    if not whole:
        raise NotModelled(f"line {op.line}: {op.name} of {layout} by {tile}")
    inner = [(t.shape, d) for t, d in zip(tiles, strides)]
    outer = [(-(-n // t.shape), t.shape * d) for t, n, d in zip(tiles, shapes, strides)]
    beyond = list(zip(shapes, strides))[len(tiles) :]

    def arrange(k: int) -> Any:
        a, b, c = (tuple(pair[k] for pair in part) for part in (inner, outer, beyond))
        forms = {"zipped": (a, b + c), "tiled": (a, *b, *c), "logical": tuple(zip(a, b)) + c}
        return forms[op.name.removeprefix("cute.").removesuffix("_divide")]

    divided = Layout(arrange(0), arrange(1))
    return View(source.start, divided) if isinstance(source, View) else divided


def _kept(tree: Any, coord: Any) -> Any:
    """Return the modes at the underscores of a coordinate."""
    if not isinstance(coord, tuple):
        return (tree,) if coord is None else ()
    return tuple(mode for part, c in zip(tree, coord) for mode in _kept(part, c))


def _index(shape: Any, stride: Any, coord: Any) -> int:
    """Return the offset of a coordinate in elements. An underscore counts 0; a number in a nested mode runs through
    its first mode fastest."""
    if coord is None:
        return 0
    if isinstance(coord, tuple):
        return sum(_index(*parts) for parts in zip(shape, stride, coord))
    total = 0
    for n, d in zip(flat(shape)[:-1], flat(stride)[:-1]):
        total, coord = total + coord % n * d, coord // n
    return total + coord * flat(stride)[-1]


def _slice(op: Op, args: list[Any]) -> Any:
    source, coord = args
    if not isinstance(source, (View, Layout)):
        return _kept(source, coord)
    layout = source.layout if isinstance(source, View) else source
    made = Layout(_kept(layout.shape, coord), _kept(layout.stride, coord))
    if isinstance(source, Layout):
        return made
    if not isinstance(source.start, int):
        raise NotModelled(f"line {op.line}: {op.name} of a coordinate tensor")
    bits = bits_of(element_of(op.operand_types[0]))
    return View(source.start + _index(layout.shape, layout.stride, coord) * bits // 8, made)


def _select(op: Op, args: list[Any]) -> Any:
    """Evaluate select<[modes]> and get <{mode = [path]}>."""
    numbers = [int(n) for n in re.findall(r"\d+", re.search(r"\[([\d, ]*)\]", op.text)[1])]  # type: ignore[index]

    def pick(tree: Any) -> Any:
        if op.name == "cute.select":
            return tuple(tree[n] for n in numbers)
        for n in numbers:
            tree = tree[n]
        return tree

    return Layout(pick(args[0].shape), pick(args[0].stride)) if isinstance(args[0], Layout) else pick(args[0])


def _tuple(function: Callable[[int, int], int]) -> Callable[[Op, list[Any]], Any]:
    def apply(a: Any, b: Any) -> Any:
        return tuple(map(apply, a, b)) if isinstance(a, tuple) else function(a, b)

    return lambda op, args: apply(*args)


def _divided(a: int, b: int) -> int:
    """Divide, rounding toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shape(op: Op, args: list[Any]) -> Any:
    layout = args[0].layout if isinstance(args[0], View) else args[0]
    return layout.stride if op.name == "cute.get_stride" else layout.shape


def _constant(op: Op, args: list[Any]) -> Any:
    text, type_ = op.text.strip(), (op.result_types or ("i1",))[0]
    if text in ("true", "false"):
        return int(text == "true")
    if text.startswith("dense"):  # of a vector: its element
        return float(text[6:-1]) if "." in text else int({"true": "1", "false": "0"}.get(text[6:-1], text[6:-1]))
    if text.startswith("0x") and "f" in type_:  # bits of a number without a decimal form
        return struct.unpack(
            {16: "<e", 32: "<f", 64: "<d"}[bits_of(type_)], int(text, 16).to_bytes(bits_of(type_) // 8, "little")
        )[0]
    return float(text) if "f" in type_ else int(text)


def _compare(op: Op, args: list[Any]) -> int:
    kind = op.text.split(",")[0].strip()
    a, b = args
    if kind.startswith("u"):
        a, b = (x % (1 << 64) for x in args)
    kind = kind[-2:]
    return int({"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[kind])


def _integer(function: Callable[..., int]) -> Callable[[Op, list[Any]], int]:
    return lambda op, args: wrap(function(*args), op.result_types[0])


def _natural(function: Callable[..., int]) -> Callable[[Op, list[Any]], int]:
    """Evaluate an operation on unsigned integers, which have the type of the result."""

    def evaluate(op: Op, args: list[Any]) -> int:
        bits = bits_of(op.result_types[0])
        return wrap(function(*(x % (1 << bits) for x in args)), op.result_types[0])

    return evaluate


def _unsigned(op: Op, args: list[Any]) -> int:
    return wrap(args[0] % (1 << bits_of(op.operand_types[0])), op.result_types[0])


def tensor_map(op: Op, args: list[Any]) -> tuple[TensorMap, View]:
    """Return the descriptor and the coordinate tensor of make_non_exec_tiled_tma_*(view, shared layout, map of the
    CTA)."""
    view, result = args[0], op.result_types[0]
    kind = re.search(r"tma_format = (\w+)", result)
    if kind is None or kind[1] not in TMA_FORMATS:
        raise NotModelled(f"line {op.line}: TMA format {kind and kind[1]}, there are {', '.join(TMA_FORMATS)}")
    format_ = TMA_FORMATS[kind[1]]
    bits = int(FORMATS[format_] * 8)
    ratio = bits // bits_of(element_of(op.operand_types[0]))  # elements of the view per element of the descriptor
    gbasis: Layout = parse_tree(re.search(r'tma_gbasis = <"([^"]*)"', result)[1])  # type: ignore[index]
    boxes, bases = (x if isinstance(x, tuple) else (x,) for x in (gbasis.shape, gbasis.stride))
    dims, strides = zip(*(_dimension(view.layout, flat(basis), ratio) for basis in bases))
    if strides[0] != 1 or any(stride * bits % 8 for stride in strides[1:]):
        raise ValueError(
            f"line {op.line}: a tensor map of strides {strides}: the first must be 1, the others whole bytes"
        )
    box = [size_of(size) for size in boxes]
    multicast = int((re.search(r"num_multicast = (\d+)", op.text) or ("", "1"))[1])
    for i in reversed(range(len(box))):  # each CTA loads its part of the box
        box[i], multicast = -(-box[i] // multicast), -(-multicast // box[i])
    swizzle = re.search(r"S<(\d),(\d),(\d)>", op.operand_types[1])
    if swizzle and (swizzle[2] != "4" or swizzle[3] != "3"):
        raise NotModelled(f"line {op.line}: a TMA copy with swizzle {swizzle[0]}")
    span = 16 << int(swizzle[1]) if swizzle and swizzle[1] != "0" else 0
    outer = tuple(stride * bits // 8 for stride in strides[1:])
    form: View = form_of(op.result_types[1])
    made = TensorMap(view.start, dims, outer, tuple(box), format_, span)
    return made, View(form.start, Layout(view.layout.shape, form.layout.stride))


def _dimension(layout: Layout, paths: list[str], ratio: int) -> tuple[int, int]:
    """Return extent and stride of a tensor map's dimension over the modes at `paths`: 1@0@2 is mode 2, in it mode 0.

    Both are in units of `ratio` elements. Several modes become one, with the greatest stride that reaches all."""
    extent, step = 1, 0
    for path in paths:
        n, d = layout.shape, layout.stride
        for mode in reversed([int(part) for part in str(path).split("@")[1:]]):
            n, d = n[mode], d[mode]
        if ratio > 1 and d:
            n, d = (n // -(-ratio // d), 1) if d < ratio else (n, -(-d // ratio))
        common = math.gcd(step, d)
        extent = (extent - 1) * (step // common) + (n - 1) * (d // common) + 1 if common else n
        step = common
    return extent, step


def _float(function: Callable[..., float]) -> Callable[[Op, list[Any]], float]:
    """Return a float operation that rounds to single precision if the type is f32."""
    return lambda op, args: float(np.float32(function(*args))) if op.result_types[0] == "f32" else function(*args)


# Operations with one result, and with several. `op` is the operation as written, `args` are the values of its operands.
ONE: dict[str, Callable[[Op, list[Any]], Any]] = {
    "cute.get_iter": lambda op, args: args[0].start,
    "cute.get_layout": lambda op, args: args[0].layout,
    "cute.make_view": lambda op, args: View(args[0], args[1]),
    "cute.add_offset": lambda op, args: args[0] + args[1] * bits_of(element_of(op.operand_types[0])) // 8,
    "cute.size": lambda op, args: size_of(args[0].layout if isinstance(args[0], View) else args[0]),
    "cute.ceil_div": _ceil_div,
    "cute.slice": _slice,
    "cute.tile_to_shape": _tile_to_shape,
    "cute.tuple_add": _tuple(operator.add),
    "cute.tuple_sub": _tuple(operator.sub),
    "cute.tuple_mul": _tuple(operator.mul),
    "cute.tuple_div": _tuple(_divided),
    "cute.tuple_mod": _tuple(lambda a, b: a - b * _divided(a, b)),
    "arith.constant": _constant,
    "arith.cmpi": _compare,
    "arith.select": lambda op, args: args[1] if args[0] else args[2],
    "arith.extui": _unsigned,
    "arith.index_castui": _unsigned,
} | dict.fromkeys(("cute.get_shape", "cute.get_stride"), _shape)
ONE |= dict.fromkeys(("cute.make_shape", "cute.make_stride", "cute.make_int_tuple", "cute.make_coord"), _fill)
ONE |= dict.fromkeys(("cute.make_layout", "cute.make_ordered_layout", "cute.make_identity_layout"), _make_layout)
ONE |= dict.fromkeys(("cute.zipped_divide", "cute.tiled_divide", "cute.logical_divide"), _divide)
ONE |= dict.fromkeys(("cute.select", "cute.get"), _select)
SAME = (  # the value passes through
    "cute.to_int_tuple", "cute.assume", "cute.inttoptr", "cute.ptrtoint", "cute.recast_iter", "cute.make_tiled_mma",
    "cute.make_tiled_copy", "cute.fast_divmod.create_divisor", "cute.fast_divmod.get_divisor", "cuda.cast",
)  # fmt: skip
ONE |= dict.fromkeys(SAME, lambda op, args: args[0])
INTEGER: dict[str, Callable[..., int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": _divided,
    "remsi": lambda a, b: a - b * _divided(a, b),
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b),
    "minsi": min,
    "maxsi": max,
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
    "shli": operator.lshift,
    "shrsi": operator.rshift,
    "extsi": int,
    "trunci": int,
    "index_cast": int,
}
UNSIGNED: dict[str, Callable[..., int]] = {
    "divui": operator.floordiv,
    "remui": operator.mod,
    "minui": min,
    "maxui": max,
    "shrui": operator.rshift,
}
FLOAT: dict[str, Callable[..., float]] = {
    "addf": operator.add,
    "subf": operator.sub,
    "mulf": operator.mul,
    "divf": operator.truediv,
    "negf": operator.neg,
    "extf": float,
    "truncf": float,
    "sitofp": float,
}
ONE |= {f"arith.{name}": _integer(function) for name, function in INTEGER.items()}
ONE |= {f"arith.{name}": _natural(function) for name, function in UNSIGNED.items()}
ONE |= {f"arith.{name}": _float(function) for name, function in FLOAT.items()}
MANY: dict[str, Callable[[Op, list[Any]], Sequence[Any]]] = {
    "cute.get_leaves": lambda op, args: flat(args[0]),
    "cute.get_scalars": lambda op, args: flat(args[0]),
} | {f"cute_nvgpu.atom.make_non_exec_tiled_tma_{kind}": tensor_map for kind in ("load", "store", "reduce")}
