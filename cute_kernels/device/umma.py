"""`tcgen05.mma` of one CTA: descriptors as integers, issue, commit (PTX ISA, TensorCore 5th Generation).

Operands lie in shared memory in blocks of columns, with rows of at most 128 bytes under TMA's swizzle of that width
(`layout.smem_layout`); A may lie in tensor memory instead. D (m, n) is fp32, with row r in lane r of tensor memory.

    b = umma.make_descriptor(umma.k_major(128), address)
    umma.mma("f16", d, a, b, umma.instruction_descriptor("f16", "bf16", 128, 128), keep=0)   # D = A B over STEP bytes
    umma.commit(mbarrier)   # arrive when D is complete
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

STEP = 32  # bytes along k of each row of A and B that one MMA multiplies
FORMATS = {"f16": {"fp16": 0, "bf16": 1}, "f8f6f4": {"e4m3": 0}}  # kind -> type -> code
SWIZZLES = {128: 2, 64: 4, 32: 6}  # bytes of a row -> code
GROUP = 8  # rows after which a swizzle repeats


def descriptor(leading: int, stride: int, width: int) -> int:
    """Return the shared-memory descriptor of an operand at address 0 with rows of `width` bytes.

    leading, stride: in bytes. K-major: stride is the distance between groups of eight rows; leading is not read.
    MN-major: leading is the distance between blocks of columns, stride that between groups of eight k."""
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[width] << 61


def k_major(width: int) -> int:
    """Return the descriptor of a K-major operand: neighbours in a row are neighbours along k."""
    return descriptor(16, GROUP * width, width)


def mn_major(width: int, rows: int) -> int:
    """Return the descriptor of an MN-major operand of `rows` k: neighbours in a row are neighbours along m or n."""
    return descriptor(rows * width, GROUP * width, width)


def instruction_descriptor(kind: str, dtype: str, m: int, n: int, b_major: str = "k") -> int:
    """Return the instruction descriptor of D (m, n) in fp32, with A and B of one dtype.

    A is K-major. b_major: "k" or "mn"."""
    code = FORMATS[kind][dtype]
    return 1 << 4 | code << 7 | code << 10 | (b_major == "mn") << 16 | n // 8 << 17 | m // 16 << 24


def make_descriptor(base: int, address):
    """Return the descriptor `base` for an operand at a shared-memory address."""
    text = f"{{ .reg .b32 a; bfe.u32 a, {{$r0}}, 4, 14; cvt.u64.u32 {{$w0}}, a; add.s64 {{$w0}}, {{$w0}}, {base}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int64], read_only_args=[address])


def offset_descriptor(descriptor, offset: int):
    """Return the descriptor of the operand `offset` bytes behind."""
    return descriptor + Int64(offset >> 4)


def offset_descriptor_here(descriptor, offset: int):
    """Return what `offset_descriptor` returns, added at this place, because NVVM does not move inline PTX.

    ptxas makes the sum one instruction if the MMA that reads it comes next. It takes two instructions for a sum that
    several blocks of code share, or that is constant in a loop and computed in it again."""
    text = f"add.s64 {{$w0}}, {{$r0}}, {offset >> 4};"
    return cute.arch.inline_ptx(text, write_only_types=[Int64], read_only_args=[descriptor])


def stage_descriptor(descriptor, stage, size: int):
    """Return the descriptor of the operand `stage` stages of `size` bytes behind, by one multiply-add."""
    return descriptor + Int64(Uint32(stage) * Uint32(size >> 4))


def descriptor_low(base: int, address):
    """Return the low word of the descriptor `base` for an operand at a shared-memory address."""
    return Int32(base & 0xFFFFFFFF) + ((address & 0x3FFFF) >> 4)


def of_low(low, base: int):
    """Return the descriptor with this low word and the high word of `base`."""
    text = f"mov.b64 {{$w0}}, {{{{$r0}}, {base >> 32:#x}}};"
    return cute.arch.inline_ptx(text, read_only_args=[low], write_only_types=[Int64])


def mma(kind: str, d, a, b, instruction: int, keep):
    """Issue D (+)= A B over STEP bytes of k. One warp calls it.

    d: address in tensor memory. a: an Int64 descriptor, or an Int32 address in tensor memory. b: an Int64 descriptor.
    keep: accumulate to D if not 0, else overwrite it.

    Each MMA has an election of its own, which elects the same thread every time. ptxas drops it, because the
    instruction is issued once per warp. It keeps one that has several instructions behind it."""
    operand = "[{$r1}]" if isinstance(a, Int32) else "{$r1}"
    text = f"{{ .reg .pred p; setp.ne.b32 p, {{$r4}}, 0; tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], {operand}, "
    text += "{$r2}, {$r3}, p; }"
    with cute.arch.elect_one():
        cute.arch.inline_ptx(text, read_only_args=[d, a, b, Uint32(instruction), Int32(keep)])


def commit(barrier):
    """Arrive at an mbarrier when all MMAs that this warp has issued are complete. One warp calls it."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
    with cute.arch.elect_one():
        cute.arch.inline_ptx(text, read_only_args=[barrier.toint()])
