"""Collectives of a warp and of a CTA, and conversions, that the DSL lacks."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, Uint32, const_expr


@cute.jit
def prefix_sum(x: Int32):
    """Return the inclusive sum of x over lanes 0..lane."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(5):
        y = cute.arch.shuffle_sync_up(x, 1 << i)
        if lane >= (1 << i):
            x += y
    return x


@cute.jit
def sum_before_warp(value: Int32, scratch: cute.Tensor, warps: cutlass.Constexpr):
    """Return (sum over the warps before this one, sum over all warps) of `value`, which must be equal in all lanes
    of a warp.

    All threads of the CTA call it: it contains a CTA barrier. scratch: (warps,) at least."""
    own, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    if lane == 0:
        scratch[own] = value
    cute.arch.barrier()
    mine, earlier = Int32(0), Int32(0)
    if lane < warps:
        mine = scratch[lane]
    if lane < own:
        earlier = mine
    return cute.arch.warp_redux_sync(earlier, "add"), cute.arch.warp_redux_sync(mine, "add")


def shuffle_record(record, lane):
    """Return the record that a lane has: a NamedTuple of Int32, of None, and of such records."""
    if record is None:
        return None
    if isinstance(record, tuple):
        return type(record)(*(shuffle_record(x, lane) for x in record))
    return cute.arch.shuffle_sync(record, lane)


def reduce_across_quads(x, op):
    """Reduce x by `op` over the 8 lanes with the same position in their quads."""
    for i in (4, 8, 16):
        x = op(x, cute.arch.shuffle_sync_bfly(x, i))
    return x


def select(condition, x, y):
    """Return x if condition, else y, in the integer type of x, or in fp32. Each side is traced once; the DSL's
    conditional traces both twice."""
    kind = type(x) if isinstance(x, (Int32, Int64)) else Float32
    return kind(cutlass.select_(condition, kind(x).ir_value(), kind(y).ir_value()))


def fma(x, y, z):
    """Return x * y + z in fp32, rounded once. ptxas does not fuse a product and a sum by itself: see
    `build.OPTIONS`."""
    return cute.math.fma(Float32(x), Float32(y), Float32(z))


@cute.jit
def add_scaled(total: cute.Tensor, values: cute.Tensor, factor: Float32):
    """Add values * factor to `total`, both in registers."""
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] = fma(values[i], factor, total[i])


def pack_16bit(dtype, low, high):
    """Convert two fp32 values to bf16 or fp16 and return them as one word."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    text = f"cvt.rn.{name}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[Float32(high), Float32(low)])


@cute.jit
def convert16(src: cute.Tensor, dst: cute.Tensor):
    """Convert fp32 registers to bf16 or fp16, two at a time (the DSL's vector conversion emits one at a time for
    some shapes)."""
    words = cute.recast_tensor(dst, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pack_16bit(dst.element_type, src[2 * i], src[2 * i + 1])


@cute.jit
def quad_transpose(w: cute.Tensor, at: cutlass.Constexpr):
    """Transpose w[at:at+4] of the 4 lanes of a quad, a 4 x 4 matrix, in place: two butterfly steps, 4 shuffles."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(2):
        bit = 1 << step
        upper = (lane & bit) != 0
        for i in cutlass.range_constexpr(4):
            if const_expr(i & bit == 0):
                lo, hi = w[at + i], w[at + i + bit]
                got = cute.arch.shuffle_sync_bfly(lo if upper else hi, bit)
                w[at + i] = got if upper else lo
                w[at + i + bit] = hi if upper else got


def minmax_u16x2(op, x, y):
    """Return the min or max (`op`) of the unsigned 16-bit halves of two words."""
    text = f"{{ .reg .b32 t; mov.b32 t, {{$r1}}; {op}.u16x2 {{$w0}}, {{$r0}}, t; }}"  # takes no immediate
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, y])


def bits(x):
    """Return the bits of an fp32 value as an Int32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def from_bits(x):
    """Return the fp32 value with the bits of an Int32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def shift_right_wide(low, high, count):
    """Return the lower word of two, shifted right by count % 32 bits."""
    text = "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[low, high, Uint32(count)])


def shift_left(x, count):
    """Return a word shifted left by `count` bits; `count` may exceed 31 (PTX `shl` clamps it)."""
    text = "shl.b32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[Uint32(x), Uint32(count)])


def opaque(x):
    """Return an Int32 that the compiler cannot trace back to x, so it does not keep derived values in registers
    across a loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


@cute.jit
def barrier_red_and(barrier_id, threads: cutlass.Constexpr, agrees):
    """Wait at a named barrier (PTX `barrier.red.and`) and return 1 if `agrees` (a bool) holds for all its threads,
    else 0."""
    text = "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.aligned.pred q, {$r1}, {$r2}, p; "
    text += "selp.s32 {$w0}, 1, 0, q; }"
    given = [Int32(1) if agrees else Int32(0), Int32(barrier_id), Int32(threads)]
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=given)


def ldmatrix_x4(address):
    """Load four 8 x 8 matrices of 16-bit elements.

    Lane l gives the address of row l % 8 of matrix l // 8 in shared memory. It gets a word of each matrix: columns 2
    (l % 4) and 2 (l % 4) + 1 of row l // 4."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address])


def ldmatrix_x4_trans(address):
    """Load four 8 x 8 matrices of 16-bit elements, transposed.

    Lane l gives the address of row l % 8 of matrix l // 8 in shared memory. It gets a word of each matrix: rows 2
    (l % 4) and 2 (l % 4) + 1 of column l // 4."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address])


def stmatrix_x4(address, words):
    """Store four 8 x 8 matrices of 16-bit elements, not transposed.

    Lane l gives the address of row l % 8 of matrix l // 8 in shared memory. It holds a word of each matrix:
    columns 2 (l % 4) and 2 (l % 4) + 1 of row l // 4."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words])


@cute.jit
def convert8(src: cute.Tensor, dst: cute.Tensor):
    """Convert fp32 registers to e4m3 bytes in dst, saturated."""
    pairs = cute.recast_tensor(dst, Uint16)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = cute.arch.inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint16],
            read_only_args=[src[2 * i + 1], src[2 * i]],
        )


def pack_e4m3(values):
    """Convert four fp32 values to a word of e4m3, saturated.

    For main loops: ptxas converts directly into the halves of the word, without the PRMT that `convert8` needs to
    combine them."""
    text = "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
    text += "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; mov.b32 {$w0}, {lo, hi}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=list(values))
