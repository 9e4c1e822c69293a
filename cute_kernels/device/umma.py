"""tcgen05.mma of one CTA: descriptors as integers, issue, commit (PTX ISA, TensorCore 5th Generation).

Operands lie in shared memory in rows of at most 128 bytes under TMA's swizzle of as many (`layout.smem_layout`), a
block of such columns behind another; A may lie in tensor memory. D (m, n) is fp32, row r in lane r of tensor memory.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

STEP = 32  # bytes of each row of A and B that one MMA multiplies
FORMATS = {"f16": {"fp16": 0, "bf16": 1}, "f8f6f4": {"e4m3": 0}}  # kind -> type -> code
SWIZZLES = {128: 2, 64: 4, 32: 6}  # bytes of a row -> code
GROUP = 8  # rows after which a swizzle repeats


def descriptor(leading: int, stride: int, width: int) -> int:
    """Of an operand at shared memory address 0, rows of `width` bytes. Bytes: K-major, stride from eight rows to the
    next eight (leading is not read); MN-major, leading from a block of columns to the next, stride from eight k to
    the next eight."""
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[width] << 61


def k_major(width: int) -> int:
    """Descriptor of an operand whose rows have neighbours along k."""
    return descriptor(16, GROUP * width, width)


def mn_major(width: int, rows: int) -> int:
    """Descriptor of an operand of `rows` k whose rows have neighbours along m or n."""
    return descriptor(rows * width, GROUP * width, width)


def instruction_descriptor(kind: str, dtype: str, m: int, n: int, b_major: str = "k") -> int:
    """Instruction descriptor: D (m, n) in fp32 of A and B of one type. A is K-major, b_major: "k" or "mn"."""
    code = FORMATS[kind][dtype]
    return 1 << 4 | code << 7 | code << 10 | (b_major == "mn") << 16 | n // 8 << 17 | m // 16 << 24


def make_descriptor(base: int, address):
    """The descriptor `base` of an operand that lies at a shared memory address."""
    return Int64(base) + Int64((address & 0x3FFFF) >> 4)


def offset_descriptor(descriptor, offset: int):
    """That of the operand that lies `offset` bytes behind."""
    return descriptor + Int64(offset >> 4)


class DescriptorLow(NamedTuple):
    """The descriptor `base` of an operand that moves: in its low word alone, half the instructions of 64 bits. low: of
    `low`. base: static."""

    low: Int32
    base: int


def descriptor_low(base: int, address):
    """The low word of the descriptor `base` of an operand that lies at a shared memory address."""
    return Int32(base & 0xFFFFFFFF) + ((address & 0x3FFFF) >> 4)


def mma(kind: str, d, a, b: DescriptorLow, instruction: int, keep):
    """One thread: D (+)= A B, of STEP bytes of k. d: tensor memory address. a: Int64 descriptor, or Int32 address in
    tensor memory. keep: whether D is added to."""
    operand = "[{$r1}]" if isinstance(a, Int32) else "{$r1}"
    text = f"{{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, {{$r4}}, 0; mov.b64 b, {{{{$r2}}, {b.base >> 32:#x}}}; "
    text += f"tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], {operand}, b, {{$r3}}, p; }}"
    cute.arch.inline_ptx(text, read_only_args=[d, a, b.low, Uint32(instruction), Int32(keep)])


def commit(barrier):
    """One thread: an arrival at an mbarrier when all of its MMAs so far are done."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
    cute.arch.inline_ptx(text, read_only_args=[barrier.toint()])
