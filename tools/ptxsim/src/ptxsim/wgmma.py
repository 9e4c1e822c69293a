"""Warpgroup matrix multiply (sm_90a): forms of wgmma, and the queue of groups of each warpgroup.

Between wgmma.mma_async and the wait_group that covers it, the accumulator registers hold a NaN pattern, the
operand tiles may not be written, and registers written since the last wgmma.fence may not be used. Sums of tiles
that nothing has written are undefined (undefined.py)."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import tensorcore
from .call import elements
from .faults import Fault
from .forms import WARPGROUP, PtxOp, form, refuse
from .layout import accumulator, fragment, matrix, swizzle
from .machine import MachineState, Threads
from .numbers import count_nonzero, decode
from .parse import PtxInstruction, vector

WGMMA = "Asynchronous Warpgroup Level Matrix Instructions"
SPANS = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62-63 of a matrix descriptor
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4, "s8": 1, "u8": 1}
UNREADABLE = np.uint32(0x7FC00BAD)
F32 = np.float32


@dataclass
class PendingWgmma:
    """A pending mma_async."""

    rows: tuple[int, ...]  # accumulator rows of the register file
    words: np.ndarray  # words of shared memory that it reads
    run: Any


@dataclass
class WgmmaQueue:
    """The wgmma operations that a warpgroup has issued."""

    open: list[PendingWgmma] = field(default_factory=list)
    groups: list[list[PendingWgmma]] = field(default_factory=list)
    sums: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)  # pending accumulators (64, n)
    undefined: dict[tuple[int, ...], tuple[list[str], str]] = field(default_factory=dict)  # undefined: names, why


def pipes(t: Threads) -> list[tuple[int, WgmmaQueue]]:
    """Return (first thread, WgmmaQueue) of every warpgroup."""
    return [(first, t.machine.state.wgmma.setdefault(first, WgmmaQueue())) for first in t.index[::128].tolist()]


@dataclass(frozen=True)
class WgmmaDescriptor:
    """A matrix descriptor of sm_90 (PTX ISA, Matrix Descriptor Format)."""

    start: int
    leading: int
    stride: int
    span: int


@lru_cache(4096)
def elements_of(d: WgmmaDescriptor, slot: int, shape: tuple[int, int, int, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the elements in shared.bytes, in units of the element size, (rows, k), and their words,
    ascending. slot: the start of the CTA's bytes."""
    rows, row_bytes, size, major = shape
    linear = d.start + matrix(rows, row_bytes, size, major, d.span, d.leading, d.stride)
    index = (slot + swizzle(linear, d.span)) // size
    return index, np.unique(index * size >> 2)


def descriptor(t: Threads, x: PtxInstruction, bits: int) -> WgmmaDescriptor:
    part = lambda low, count: bits >> low & (1 << count) - 1  # noqa: E731
    if part(49, 3):
        raise refuse(x, f"descriptor base offset {part(49, 3)}")
    return WgmmaDescriptor(part(0, 14) << 4, part(16, 14) << 4, part(32, 14) << 4, SPANS[part(62, 2)])


@form(r"wgmma\.(fence|commit_group)\.sync\.aligned", WGMMA, level=WARPGROUP)
def fence_or_commit(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        for first, pipe in pipes(t):
            if f[1] == "fence":
                t.machine.touched[first : first + 128] = False
            else:
                pipe.groups.append(pipe.open)
                pipe.open = []

    return PtxOp(run, (), (), effect=True, registers=True)


@form(r"wgmma\.wait_group\.sync\.aligned", WGMMA, level=WARPGROUP, waits=True)
def wait(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    keep = int(x.args[0], 0)

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        for first, pipe in pipes(t):
            warps = np.arange(first // 32, first // 32 + 4)
            while len(pipe.groups) > keep:
                for one in pipe.groups.pop(0):
                    if one.run:
                        one.run()
                    m.shared.end_read(warps, one.words)
            busy = {one.rows for group in [*pipe.groups, pipe.open] for one in group}
            for rows in [rows for rows in pipe.sums if rows not in busy]:
                total = pipe.sums.pop(rows)
                row, column = accumulator(total.shape[1])
                m.W[list(rows), first : first + 128] = total[row, column].view(np.uint32)
                names, why = pipe.undefined.pop(rows, ([], ""))
                for warp in warps.tolist() if why else ():
                    m.undefined.setdefault(warp, {}).update(dict.fromkeys(names, why))

    return PtxOp(run, (), (), effect=True, registers=True)


@form(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16|s32)\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)"
    r"\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)(\.satfinite)?",
    WGMMA,
    level=WARPGROUP,
)
def multiply(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    n, k, kind = int(f[1]), int(f[2]), f[4]
    if f[3] != "f32" or kind in ("s8", "u8"):
        raise refuse(x, f"{f[3]} += {kind} {f[5]}")
    in_registers = x.args[1].startswith("{")
    numbers = [int(text, 0) for text in x.args[4:]]
    sign = numbers[0] * numbers[1] if len(numbers) > 1 else 1
    turned = (numbers[2:] if not in_registers else [0, *numbers[2:]]) or [0, 0]
    major = ["mn" if bit else "k" for bit in (*turned, 0, 0)[:2]]
    names = tuple(vector(x.args[0]))
    sources = vector(x.args[1])

    def run(t: Threads, x: PtxInstruction, *values: Any) -> None:
        m = t.machine
        rows = m.program.registers.rows(names)
        b, enable = values[-2], values[-1]
        m.count("wgmma")
        for j, (first, pipe) in enumerate(pipes(t)):
            part = slice(128 * j, 128 * j + 128)
            if count_nonzero(m.touched[first : first + 128]):
                raise Fault(f"{t.say(x)}: no wgmma.fence since the registers it uses were written")
            check_uniform(t, x, b[part], enable[part], *([] if in_registers else [values[0][part]]))
            tile_a: Any
            if in_registers:
                tile_a = fragment_values(np.array([value[part] for value in values[:4]]), k, kind)
            else:
                tile_a = WgmmaOperandTile(m, first, descriptor(t, x, int(values[0][part][0])), (64, k, kind, major[0]))
            tile_b = WgmmaOperandTile(m, first, descriptor(t, x, int(b[part][0])), (n, k, f[5], major[1]))
            issue(t, x, pipe, first, Product(rows, tile_a, tile_b, bool(enable[part][0]), F32(sign), kind))

    ins = [*((name, "b32" if in_registers else "b64") for name in sources), (x.args[2], "b64"), (x.args[3], "pred")]
    return PtxOp(run, (), tuple(ins), effect=True, registers=True)


def check_uniform(t: Threads, x: PtxInstruction, *operands: np.ndarray) -> None:
    for operand in operands:
        if count_nonzero(operand != operand[0]):
            raise Fault(f"{t.say(x)}: a descriptor or scale-d differs inside the warpgroup")


class WgmmaOperandTile:
    """An operand in shared memory."""

    def __init__(self, m: MachineState, thread: int, place: WgmmaDescriptor, shape: tuple[int, int, str, str]):
        rows, k, self.kind, major = shape
        self.size = BYTES[self.kind]
        self.bytes = m.shared.bytes
        slot = thread // m.per_cta * m.shared.stride
        self.index, self.words = elements_of(place, slot, (rows, k * self.size, self.size, major))
        low, high = int(self.words[0]) * 4, int(self.words[-1] + 1) * 4
        self.outside = low < slot + 1024 or high > slot + 1024 + m.shared.size

    def values(self) -> np.ndarray:
        return decode(elements(self.bytes, np.dtype(f"u{self.size}"))[self.index], self.kind)


def fragment_values(registers: np.ndarray, k: int, kind: str) -> np.ndarray:
    """Return the 64 x k values of A fragments (4, 128)."""
    size = BYTES[kind]
    row, column = fragment(size)
    out = np.empty((64, k), F32)
    parts = np.ascontiguousarray(registers)[..., None].view(f"u{size}")
    for i in range(4 // size):
        out[row, column + i] = decode(np.ascontiguousarray(parts[..., i]), kind)
    return out


class Product(NamedTuple):
    """The operands of a wgmma. rows: of registers that hold the sums; keep: whether the product is added to them."""

    rows: Any
    a: Any
    b: Any
    keep: bool
    sign: Any
    kind: Any


def issue(t: Threads, x: PtxInstruction, pipe: WgmmaQueue, first: int, what: Product) -> None:
    rows, a, b, keep, sign, kind = what
    m = t.machine
    tiles = [tile for tile in (a, b) if isinstance(tile, WgmmaOperandTile)]
    if any(tile.outside for tile in tiles):
        raise Fault(f"{t.say(x)}: an operand lies outside the CTA's {m.shared.size} B of shared memory")
    words = tiles[0].words if len(tiles) == 1 else np.concatenate([tile.words for tile in tiles])
    warps = np.arange(first // 32, first // 32 + 4)
    why = m.shared.begin_read(warps, words, t.say(x), blank=True)
    if why or pipe.undefined or m.undefined:
        taint(m, pipe, warps, (rows, vector(x.args[0])), (why, keep))
    n = 2 * len(rows)
    at = list(rows)
    if rows not in pipe.sums:
        if any(set(rows) & set(other) for other in pipe.sums):
            raise Fault(f"{t.say(x)}: accumulators overlap those of an mma under way")
        total = np.empty((64, n), F32)
        total[accumulator(n)] = m.W[at, first : first + 128].view(F32)
        pipe.sums[rows] = total
        m.W[at, first : first + 128] = UNREADABLE

    def run() -> None:
        left, right = a.values() if isinstance(a, WgmmaOperandTile) else a, b.values()
        left = left if sign == 1 else left * sign
        total = pipe.sums[rows]
        if not keep:
            total[:] = 0
        if m.settings.exact or BYTES[b.kind] == 1:
            total[:] = tensorcore.multiply(left, right, total, (kind, b.kind))
        else:
            total += tensorcore.product(left, right)

    if m.settings.mode == "eager":
        run()
    pipe.open.append(PendingWgmma(rows, words, None if m.settings.mode == "eager" else run))


def taint(
    m: MachineState, pipe: WgmmaQueue, warps: np.ndarray, sums: tuple[tuple[int, ...], list[str]], how: Any
) -> None:
    """Track undefined sums: they are undefined if the operands are, or if the product is added to undefined sums.

    sums: rows and names of the accumulators; how: (reason why the operands are undefined or "", whether it adds)."""
    (rows, names), (why, keep) = sums, how
    before = pipe.undefined.pop(rows, (names, ""))[1]
    for warp in warps.tolist():
        for name in names:
            before = m.undefined.get(warp, {}).pop(name, "") or before
    if why or keep and before:
        pipe.undefined[rows] = names, why or before
