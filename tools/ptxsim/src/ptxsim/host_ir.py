"""The text of the DSL's clean MLIR: operations, types, and the values that types describe.

Values: int and float; nested tuples of int for shapes, strides and coordinates; Layout; View (memref and
coordinate tensor); Atom; a pointer is its address; a divisor of fast division is the divisor."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .faults import NotModelled

# If an operation has one type list without an arrow, the list types the operands of these, the result of all others.
OPERAND_TYPED = re.compile(
    r"cute\.(get_\w+|ceil_div|slice|\w+_divide|append_to_rank|prepend_to_rank)|cuda\.launch_cfg.*"
)


OPAQUE = ("composed_layout", "swizzle")  # only ever read as text
STATIC = (*OPAQUE, "layout", "shape", "stride", "int_tuple", "coord", "tile")  # types that may state a value completely


@dataclass(frozen=True)
class Dynamic:
    """A number that a type leaves open: its size in bytes as a kernel parameter, and a divisor of its value."""

    size: int = 4
    divisor: int = 1


@dataclass(frozen=True)
class Layout:
    shape: Any
    stride: Any


@dataclass(frozen=True)
class View:
    start: Any  # byte address, or the coordinates of a coordinate tensor
    layout: Layout


@dataclass(frozen=True)
class Atom:
    """An MMA or copy atom: (type, value) of each field that it holds at run time."""

    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Unknown:
    """The value of an operation that is not implemented."""

    reason: str


@dataclass(frozen=True)
class Op:
    line: int  # in the MLIR
    name: str
    text: str  # between the name and the types
    results: tuple[str, ...]
    operands: tuple[str, ...]
    operand_types: tuple[str, ...]  # empty if not written
    result_types: tuple[str, ...]
    regions: tuple[tuple["Op", ...], ...] = ()


def split(text: str, separator: str = ",") -> list[str]:
    """Split `text` at each `separator` outside quotes and brackets."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
        elif char in "([{<":
            depth += 1
        elif char in ")]}" or char == ">" and text[i - 1] != "-":
            depth -= 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def type_list(text: str) -> tuple[str, ...]:
    inner = split(text[1:], ")") if text.startswith("(") else []
    return tuple(split(text[1:-1] if text == "()" or inner and len(inner[0]) == len(text) - 2 else text))


@lru_cache(64)
def host_function(mlir: str) -> tuple[tuple[tuple[str, str], ...], tuple[Op, ...]]:
    """Return (name, type) of the parameters, and the body, of the one function that launches kernels."""
    aliases = dict(re.findall(r"^(!\w+) = (.*)$", mlir, re.MULTILINE))

    def expand(line: str) -> str:
        while (longer := re.sub(r"!\w+(?![\w.])", lambda found: aliases.get(found[0], found[0]), line)) != line:
            line = longer
        return line

    lines = mlir.splitlines()
    found = []
    for start, line in enumerate(lines):
        if line.lstrip().startswith("func.func"):
            indent = line[: len(line) - len(line.lstrip())]
            end = next(i for i in range(start, len(lines)) if lines[i] == indent + "}")
            if any("cuda.launch_ex" in inner for inner in lines[start:end]):
                found.append((start, end))
    if len(found) != 1:
        raise NotModelled(f"{len(found)} host functions that launch a kernel, must be one")
    start, end = found[0]
    arguments = split(expand(lines[start])[lines[start].index("(") + 1 :], ")")[0]
    parameters = [re.match(r"(%\w+): (.*)", re.sub(r" \{.*?\}$", "", part)) for part in split(arguments)]
    numbered = [(i + 1, expand(lines[i])) for i in range(start + 1, end)]
    return tuple((p[1], p[2]) for p in parameters if p), _parse(numbered)


def _parse(lines: list[tuple[int, str]]) -> tuple[Op, ...]:
    """Parse operations; a region lies between a line that ends with a brace and the closing brace below it."""
    ops: list[Op] = []
    i = 0
    while i < len(lines):
        number, line = lines[i]
        indent = len(line) - len(line.lstrip())
        regions = []
        i += 1
        while lines[i - 1][1].endswith("{"):
            close = next(
                k for k in range(i, len(lines)) if lines[k][1][:indent].isspace() and lines[k][1][indent] == "}"
            )
            regions.append(_parse(lines[i:close]))
            i = close + 1
        if line.strip():
            ops.append(_operation(number, line.strip().removesuffix("{").strip(), tuple(regions)))
    return tuple(ops)


def _operation(number: int, line: str, regions: tuple[tuple[Op, ...], ...]) -> Op:
    found = re.match(r"((?:%[\w:]+(?:, )?)+) = (.*)", line)
    names, line = (found[1].split(", "), found[2]) if found else ([], line)
    results: list[str] = []
    for name in names:  # `%3:2` stands for %3#0 and %3#1
        base, _, count = name.partition(":")
        results += [f"{base}#{k}" for k in range(int(count))] if count else [base]
    name = re.match(r"[\w.]+", line)[0]  # type: ignore[index]
    body, *types = split(line[len(name) :], " : ") or [""]
    if regions and " -> " in body:
        body, _, written = body.partition(" -> ")
        types = ["-> " + written]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    if types:
        arrow = next((a for a in ("->", " to ") if len(split("." + types[-1], a)) == 2), "")
        sides = [side.strip().lstrip(".") for side in split("." + types[-1], arrow)] if arrow else [types[-1]]
        if arrow:
            before, after = type_list(sides[0]), type_list(sides[1])
        elif OPERAND_TYPED.fullmatch(name):
            before = type_list(sides[0])
        else:
            after = type_list(sides[0])
    operands = tuple(re.findall(r"%[\w#]+", re.sub(r'"(\\.|[^"])*"', "", body)))
    return Op(number, name, body, tuple(results), operands, before, after, regions)


def parse_tree(text: str) -> Any:
    """Parse a number, `?`, `_`, `shape:stride` or a tuple of them, in () or, for a tile, in []. A basis such as 1@0
    is a str."""
    if len(sides := split(text, ":")) == 2:
        return Layout(parse_tree(sides[0]), parse_tree(sides[1]))
    if text[0] in "([":
        return tuple(parse_tree(part) for part in split(text[1:-1], "," if text[0] == "(" else ";"))
    if text[0] == "?":
        divisor = re.search(r"div=(\d+)", text)
        return Dynamic(8 if "i64" in text else 4, int(divisor[1]) if divisor else 1)
    return None if text == "_" else int(text) if re.fullmatch(r"-?\d+", text) else text


@lru_cache(4096)
def form_of(type_: str) -> Any:
    """Return the static part of a value as its type states it, with Dynamic for open numbers; None if the type
    states nothing. Types in OPAQUE stay text."""
    kind = re.match(r"!cute\.(\w+)<", type_)
    if kind is None or kind[1] not in (*STATIC, "memref", "coord_tensor"):
        return None
    if kind[1] in OPAQUE:
        return type_
    strings = re.findall(r'"([^"]*)"', type_)
    tree = parse_tree(strings[-1])
    starts = {"memref": Dynamic(8), "coord_tensor": parse_tree(strings[0])}
    return View(starts[kind[1]], tree) if kind[1] in starts else tree


def is_static(type_: str) -> bool:
    """Return whether the type alone determines the value."""
    kind = re.match(r"!cute\.(\w+)<", type_)
    return kind is not None and kind[1] in STATIC and "?" not in type_


def bits_of(type_: str) -> int:
    """Return the bits of an element type: f8E4M3FN has 8."""
    found = re.search(r"\d+", type_)
    if not found:
        raise NotModelled(f"element type {type_}")
    return int(found[0])


def element_of(type_: str) -> str:
    """Return the element type of a memref or pointer type."""
    return re.match(r"!cute\.\w+<(\w+)", type_)[1]  # type: ignore[index]


def merge(form: Any, value: Any, lenient: bool = False) -> Any:
    """Return `value` with the static numbers of `form`. Raise ValueError if they differ, unless `lenient`."""
    if isinstance(form, View):
        return View(value.start, merge(form.layout, value.layout, lenient))
    if isinstance(form, Layout):
        return Layout(merge(form.shape, value.shape, lenient), merge(form.stride, value.stride, lenient))
    if isinstance(form, tuple):
        if not isinstance(value, tuple) or len(value) != len(form):
            raise ValueError(f"computed {value}, the type says {form}")
        return tuple(merge(a, b, lenient) for a, b in zip(form, value))
    if form is None or isinstance(form, Dynamic):
        return value
    if isinstance(form, int) and form != value and not lenient:
        raise ValueError(f"computed {value}, the type says {form}")
    return form


def flat(tree: Any) -> list[Any]:
    return [leaf for part in tree for leaf in flat(part)] if isinstance(tree, tuple) else [tree]


def size_of(tree: Any) -> int:
    return math.prod(flat(tree.shape if isinstance(tree, Layout) else tree))


def wrap(value: int, type_: str) -> int:
    """Return `value` as a signed integer of the type; i1 is 0 or 1."""
    bits = 64 if type_ == "index" else bits_of(type_)
    return value & 1 if bits == 1 else (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def open_numbers(type_: str, value: Any) -> list[tuple[int, int]]:
    """Return (bytes, value) of each number that the type of an integer, tuple, layout or view leaves open."""
    form = form_of(type_)
    if form is None:
        return [(max(bits_of(type_) // 8, 1), value)]
    pairs = [(form, value)]
    if isinstance(form, View):
        pairs = [(form.start, value.start), (form.layout.shape, value.layout.shape)]
        pairs += [(form.layout.stride, value.layout.stride)]
    elif isinstance(form, Layout):
        pairs = [(form.shape, value.shape), (form.stride, value.stride)]
    leaves = [leaf for pair in pairs for leaf in zip(flat(pair[0]), flat(pair[1]), strict=True)]
    return [(leaf.size, number) for leaf, number in leaves if isinstance(leaf, Dynamic)]
