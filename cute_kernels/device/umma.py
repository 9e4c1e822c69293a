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
    return Int64(base) + Int64((address & 0x3FFFF) >> 4)


def offset_descriptor(descriptor, offset: int):
    """Return the descriptor of the operand `offset` bytes behind."""
    return descriptor + Int64(offset >> 4)


def descriptor_low(base: int, address):
    """Return the low word of the descriptor `base` for an operand at a shared-memory address."""
    return Int32(base & 0xFFFFFFFF) + ((address & 0x3FFFF) >> 4)


def of_low(low, base: int):
    """Return the descriptor with this low word and the high word of `base`. Additions to the low word take half the
    instructions of 64-bit additions."""
    text = f"mov.b64 {{$w0}}, {{{{$r0}}, {base >> 32:#x}}};"
    return cute.arch.inline_ptx(text, read_only_args=[low], write_only_types=[Int64])


def mma(kind: str, d, a, b, instruction: int, keep):
    """Issue D (+)= A B over STEP bytes of k. One thread calls it.

    d: address in tensor memory. a: an Int64 descriptor, or an Int32 address in tensor memory. b: an Int64 descriptor.
    keep: accumulate to D if not 0, else overwrite it."""
    operand = "[{$r1}]" if isinstance(a, Int32) else "{$r1}"
    text = f"{{ .reg .pred p; setp.ne.b32 p, {{$r4}}, 0; tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], {operand}, "
    text += "{$r2}, {$r3}, p; }"
    cute.arch.inline_ptx(text, read_only_args=[d, a, b, Uint32(instruction), Int32(keep)])


def commit(barrier):
    """Arrive at an mbarrier when all MMAs that this thread has issued are complete. One thread calls it."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
    cute.arch.inline_ptx(text, read_only_args=[barrier.toint()])
