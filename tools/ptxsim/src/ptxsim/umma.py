"""The computation of a tcgen05.mma: its descriptors, operand layouts, number formats, block scales.

The sum of the products of an instruction is exact and is rounded to float32 once; hardware rounds differently."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import tensorcore
from .call import elements
from .faults import Fault, NotModelled
from .layout import matrix, swizzle
from .numbers import decode
from .shared import BASE
from .tmem import CELL, LANES, Region, TensorMemory

F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
KINDS = {  # operand formats by code (PTX ISA, tcgen05: Instruction Descriptor)
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": F8F6F4,
    "mxf8f6f4": F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
SPANS = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61-63 of a shared memory descriptor: bytes of the swizzle
SIZE = {"f16": 2, "bf16": 2, "tf32": 4}  # bytes per element; other formats take one byte or share it
PADDED = {"e2m1": 8, "e2m3": 12, "e3m2": 12}  # data bytes in each 16 of f8f6f4 kinds, which hold 16 elements
SCALES = {("mxf8f6f4", ""): 1, ("mxf4", ""): 2}  # scale factors per row, by kind and vector size
SCALES |= {("mxf8f6f4", name): 1 for name in ("scale_vec::1X", "block32")}
SCALES |= {(kind, name): 2 for kind in ("mxf4", "mxf4nvf4") for name in ("scale_vec::2X", "block32")}
SCALES |= {("mxf4nvf4", name): 4 for name in ("scale_vec::4X", "block16")}
ROW = 32  # bytes per row of an operand in one instruction
F32, U32 = np.float32, np.uint32


@dataclass(frozen=True)
class UmmaInstruction:
    """A tcgen05.mma as its kind and its instruction descriptor define it. m: rows of all CTAs of the group."""

    kind: str
    group: int
    m: int
    n: int
    formats: tuple[str, str]  # of A and B
    majors: tuple[str, str]
    sign: int
    half: bool  # float16 accumulators
    scales: int  # scale factors per row; 0 without block scaling
    scale_format: str
    scale_ids: tuple[int, int]

    @property
    def rows(self) -> int:
        """Return the rows of A and D in one CTA."""
        return self.m // self.group

    @property
    def split(self) -> bool:
        """Return whether D has Layout B: the second half of N lies in lanes 64 to 127."""
        return self.group == 2 and self.m == 128

    @property
    def columns(self) -> int:
        return self.n // 2 if self.split else self.n

    @property
    def packing(self) -> str:
        return "pairs" if self.kind.startswith("mxf4") else "padded" if self.kind.endswith("f8f6f4") else ""

    @property
    def below(self) -> int:
        """Return the lane offset that A and D may have: M = 64 uses 16 of each 32 lanes (Layout F)."""
        return 16 if self.group == 1 and self.m == 64 else 0

    def lanes(self, base: int) -> np.ndarray:
        return np.arange(64) // 16 * 32 + np.arange(64) % 16 + base if self.below else np.arange(LANES)

    def region(self, base: int, column: int, count: int) -> Region:
        cells = slice(base // CELL, LANES // CELL, 2) if self.below else slice(0, LANES // CELL)
        return cells, slice(column, column + count)


def decode_instruction(kind: str, group: int, bits: int, vector: str | None, say: object) -> UmmaInstruction:
    """Decode an instruction descriptor (PTX ISA, tcgen05: Instruction Descriptor). vector: scale vector size; None
    without block scaling."""

    def part(low: int, count: int) -> int:
        return bits >> low & ((1 << count) - 1)

    scaled = vector is not None
    if part(2, 1) or part(0, 2):
        raise NotModelled(f"{say}: sparse A is not modelled")
    if part(3, 1) or (scaled and part(31, 1)) or (not scaled and part(30, 2)):
        raise NotModelled(f"{say}: instruction descriptor {bits:#x}: saturation, K = 96 and shifts are not modelled")
    names = KINDS[kind].get(part(7, 3)), KINDS[kind].get(part(10, 3))
    accumulator = 1 if scaled else part(4, 2)
    if names[0] is None or names[1] is None or accumulator > (1 if kind in ("f16", "f8f6f4") else accumulator):
        raise Fault(f"{say}: instruction descriptor {bits:#x} has a format that kind {kind} does not know")
    if accumulator > 1 or (accumulator == 0 and kind == "tf32"):
        raise Fault(f"{say}: instruction descriptor {bits:#x}: accumulator format {accumulator} for kind {kind}")
    n, m = 8 * part(17, 6), 16 * part(24, 5)
    allowed = (128, 256) if group == 2 else (128,) if scaled else (64, 128)
    if m not in allowed or not 0 < n <= 256 or n % (8 * group):
        raise Fault(f"{say}: M = {m}, N = {n} in the instruction descriptor {bits:#x}, M must be one of {allowed}")
    majors = tuple("mn" if part(low, 1) else "k" for low in (15, 16))
    for name, major in zip(names, majors):
        if major == "mn" and name not in ("f16", "bf16", "e4m3", "e5m2"):
            raise NotModelled(f"{say}: transposed {name} is not modelled")
    count = SCALES.get((kind, vector), 0) if vector is not None else 0
    ids = (part(29, 2), part(4, 2)) if scaled else (0, 0)
    if scaled and (not count or any(one % count for one in ids)):
        raise Fault(f"{say}: scale vector size {vector!r} or scale factor ids {ids} do not fit kind {kind}")
    number = "ue8m0" if part(23, 1) else "e4m3"
    if scaled and number == "e4m3" and count != 4:
        raise Fault(f"{say}: UE4M3 scale factors go with blocks of 16")
    sign = (-1) ** (part(13, 1) + part(14, 1))
    return UmmaInstruction(
        kind, group, m, n, (names[0], names[1]), (majors[0], majors[1]), sign, accumulator == 0, count, number, ids
    )


# ------------------------------------------------------------------------------------------------ operands
@lru_cache(maxsize=4096)
def operand_layout(
    descriptor: int, rows: int, row_bytes: int, size: int, major: str, data: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the layout of an operand in shared memory: indices of its elements in units of `size`, (rows, k), and
    the words that are read.

    Both count from the start of the CTA's shared memory (PTX ISA, tcgen05: Shared memory descriptor). data: bytes
    of each 16 that hold elements."""

    def part(low: int, count: int) -> int:
        return descriptor >> low & ((1 << count) - 1)

    if part(46, 3) != 1:
        raise Fault(f"shared memory descriptor {descriptor:#018x}: bits 46-48 are {part(46, 3)}, must be 1")
    if part(49, 3) or part(52, 1) or part(61, 3) not in SPANS:
        raise NotModelled(
            f"shared memory descriptor {descriptor:#018x}: base offset, absolute leading dimension and 32-byte atoms "
            "are not modelled"
        )
    span = SPANS[part(61, 3)]
    offsets = matrix(rows, row_bytes, size, major, span, part(16, 14) << 4, part(32, 14) << 4)
    index = swizzle((part(0, 14) << 4) + offsets, span) // size
    read = index[:, np.arange(row_bytes // size) % 16 < data] if data < 16 else index
    return index, np.unique(read * size >> 2)


@dataclass
class UmmaOperandTile:
    """An operand in the shared memory of one CTA."""

    index: np.ndarray
    words: np.ndarray
    size: int

    def raw(self, memory: np.ndarray) -> np.ndarray:
        return elements(memory, np.dtype(f"u{self.size}"))[self.index]


def operand_tile(
    memory: tuple[int, int], descriptor: int, shape: tuple[int, int, int, str, int], say: object
) -> UmmaOperandTile:
    """Return the tile of a descriptor. memory: (start of the CTA's shared memory in shared.bytes, its user bytes).
    shape: the other arguments of `operand_layout`."""
    start, length = memory
    try:
        index, words = operand_layout(descriptor, *shape)
    except (Fault, NotModelled) as error:
        raise type(error)(f"{say}: {error}") from None
    if int(words[0]) * 4 < BASE or int(words[-1]) * 4 + 4 > BASE + length:
        raise Fault(f"{say}: an operand lies outside the CTA's {length} B of shared memory")
    size = shape[2]
    return UmmaOperandTile(index + start // size, words + start // 4, size)


def operand_shape(one: UmmaInstruction, which: int, rows: int) -> tuple[int, int, int, str, int]:
    """Return the arguments of `operand_layout` for A (0) or B (1)."""
    name = one.formats[which]
    data = PADDED.get(name, 16) if one.packing == "padded" else 16
    return rows, ROW, SIZE.get(name, 1), one.majors[which], data


def values(raw: np.ndarray, name: str, packing: str) -> np.ndarray:
    """Return float32 (rows, k) of the elements (rows, n) as they lie in memory (PTX ISA, tcgen05: Packing formats)."""
    if name == "tf32":
        return (raw & U32(0xFFFFE000)).view(F32)
    if packing == "pairs":
        return decode(np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1), name)
    if packing == "padded" and name in PADDED:
        bits = PADDED[name] // 2
        chunks = raw.reshape(len(raw), -1, 16)[:, :, : PADDED[name]]
        ones = np.unpackbits(chunks, axis=-1, bitorder="little").reshape(len(raw), -1, bits)
        return decode((ones << np.arange(bits, dtype=np.uint8)).sum(-1).astype(np.uint8), name)
    return decode(raw, name)


def scale_factors(tensor: TensorMemory, column: int, one: UmmaInstruction, which: int, say: object) -> np.ndarray:
    """Return the scale factors (rows, count) of A (0) or B (1) per row. They must be the same in all lane quarters.

    Row r: lane r % 32, column r / 32. Layout B keeps the factors of the second half of N in lanes 64 to 127."""
    rows = one.n if which else one.rows
    halves = 2 if which and one.split else 1
    per = rows // halves
    width = -(-per // 32)
    part = tensor.words[:, column : column + width].copy().view(np.uint8).reshape(4, 32, width, 4)
    first = one.scale_ids[which]
    part = part[..., first : first + one.scales].reshape(halves, 4 // halves, 32, width, one.scales)
    row = np.arange(per)
    copies = part[:, :, row % 32, row // 32]
    if (copies != copies[:, :1]).any():
        raise Fault(f"{say}: the scale factors of {'AB'[which]} differ between the lane quarters of tensor memory")
    return decode(copies[:, 0].reshape(rows, one.scales), one.scale_format)


def scaled(left: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return left * np.repeat(scale, left.shape[1] // scale.shape[1], 1)


def multiply(one: UmmaInstruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (lanes, columns) of D. In Layout B, A in tensor memory has 128 rows: each half of the lanes has its own
    copy."""
    if one.split:
        half = one.n // 2
        product = np.concatenate([tensorcore.product(a[:64], b[:half]), tensorcore.product(a[-64:], b[half:])])
    else:
        product = tensorcore.product(a, b)
    return -product if one.sign < 0 else product


def accumulate(one: UmmaInstruction, old: np.ndarray, product: np.ndarray, keep: bool, shift: int) -> np.ndarray:
    """Return the new words of D. A float16 accumulator takes the low half of a word; the high half is undefined and
    set to NaN."""
    if keep:
        total = decode(old.astype(np.uint16), "f16") if one.half else old.view(F32)
        product = product + total * F32(2.0**-shift)
    if one.half:
        return product.astype(np.float16).view(np.uint16).astype(U32) | U32(0xFFFF0000)
    return product.astype(F32).view(U32)
