"""Dequantise NVFP4: blocks of 16 codes, with a scale factor per block, to fp32.

Blocks lie one after another in memory. A lane handles `VECTORS` vectors of 4 elements, which are 16 bytes of the
values: neighbouring lanes store neighbouring vectors, so that each store of a warp fills whole sectors. The factor of a
block is loaded by its 4 lanes at once. Loads are bytes, because codes may begin at any address.

| phase | reads | waits for | writes / signals |
| --- | --- | --- | --- |
| entry | the launch's arguments | `griddepcontrol.wait`: the kernel that made the codes | `launch_dependents` |
| loads | codes, factors, the scale of a tensor | | registers |
| values | | the loads | fp32 values |
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint16, Uint32

from ...device import copy, memory, nvfp4, warp
from ..args import CacheWriteArgs
from ..spec import SF_VEC_SIZE
from ..store import reciprocal
from . import THREADS

ELEMENTS = 4  # of a vector
VECTORS = 4  # per thread
PER_BLOCK = SF_VEC_SIZE // ELEMENTS  # vectors
USUAL = 2.0**64  # scales from 1 / USUAL to USUAL are divided by without a slow path


def grid(a):
    """Return the number of CTAs."""
    each = THREADS * VECTORS
    return (Int64(a.sf.shape[0]) * PER_BLOCK + each - 1) // each


def sf_value(byte):
    """Return the value of an e4m3 scale factor in the low byte of a Uint16."""
    text = "{ .reg .b32 pair; .reg .b16 lo, hi; cvt.rn.f16x2.e4m3x2 pair, {$r0}; mov.b32 {lo, hi}, pair; "
    text += "cvt.f32.f16 {$w0}, lo; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[byte])


def quotient(x, by, inverse):
    """Return x / by, correctly rounded, for each product x of a code and a factor and each usual `by`. inverse: 1 / by,
    correctly rounded. The signs of the remainder are such that -0 stays -0."""
    q = x * inverse
    return warp.fma(-warp.fma(q, by, -x), inverse, q)


def any_quotient(x, by):
    """Return x / by, correctly rounded."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, by])


@cute.jit
def divide(values: cute.Tensor, by: Float32, inverse: Float32):
    """Divide values by the global scale, which may be any number."""
    if by >= Float32(1 / USUAL) and by <= Float32(USUAL):
        for e in cutlass.range_constexpr(ELEMENTS):
            values[e] = quotient(values[e], by, inverse)
    else:
        for e in cutlass.range_constexpr(ELEMENTS):
            values[e] = any_quotient(values[e], by)


@cute.kernel
def kernel(a: CacheWriteArgs):
    vectors, by = Int64(a.sf.shape[0]) * PER_BLOCK, a.k_scale
    first = Int64(cute.arch.block_idx()[0]) * (THREADS * VECTORS) + cute.arch.thread_idx()[0]
    codes, factors, target = a.codes.iterator.toint(), a.sf.iterator.toint(), a.values.iterator.toint()
    held, sf = cute.make_rmem_tensor((2, VECTORS), Uint8), cute.make_rmem_tensor(VECTORS, Uint8)
    values = cute.make_rmem_tensor(ELEMENTS, Float32)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    for i in cutlass.range_constexpr(VECTORS):
        vector = first + i * THREADS
        if vector < vectors:
            for half in cutlass.range_constexpr(2):
                held[half, i] = memory.view(codes + 2 * vector, Uint8, 2, 1)[half]
            sf[i] = memory.view(factors + vector // PER_BLOCK, Uint8, 1, 1)[0]
    if a.k_scale_ptr.shape[0] > 0:
        by = a.k_scale_ptr[0]
    inverse = reciprocal(by)
    for i in cutlass.range_constexpr(VECTORS):
        vector = first + i * THREADS
        if vector < vectors:
            factor = sf_value(sf[i].to(Uint16))
            for e in cutlass.range_constexpr(ELEMENTS):
                values[e] = nvfp4.code_value(held[e // 2, i].to(Uint32), e % 2) * factor
            divide(values, by, inverse)
            copy.vector(values, memory.view(target + 16 * vector, Float32, ELEMENTS, 16))
