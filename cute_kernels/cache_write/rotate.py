"""RMS norm and rotary embedding of a row that a group of lanes holds in registers.

Lane l of a group of n lanes holds vectors l and l + n of 8 elements: values (8, 2). If the rotated part is 16 n
elements long, as it is if head_dim is a power of two and all of it is rotated, the two elements of a pair in halves are
in one lane, and no lane needs a value of another one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..device import copy, memory, warp
from .args import ANGLES, INTERLEAVED

HALF = 8  # elements of a vector
TWO_PI = 6.283185307179586


def approximate(function, x):
    text = f"{function}.approx.f32 {{$w0}}, {{$r0}};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x])


def nearest(x):
    """Return x, rounded to an integer."""
    return cute.arch.inline_ptx("cvt.rni.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def angle(position, high, low):
    """Return position * (high + low) turns in radians, in [-pi, pi], as fp32.

    The product has 48 bits: whole turns are dropped from it without an error. From position 2^24 on, its lower half has
    whole turns too."""
    product = position * high
    rest = warp.fma(position, low, warp.fma(position, high, -product))
    turns = (product - nearest(product)) + rest
    return (turns - nearest(turns)) * Float32(TWO_PI)


def group_mask(lanes):
    """Return the lanes of this thread's group, as bits."""
    return (Uint32(0xFFFFFFFF) >> Uint32(32 - lanes)) << Uint32(cute.arch.lane_idx() & (32 - lanes))


@cute.jit
def load_narrow(spec: cutlass.Constexpr, table: cute.Tensor, position: Int32, first: Int32, found: cute.Tensor):
    """Load 4 elements of 16 bits of a row of a table as fp32."""
    words = cute.make_rmem_tensor(2, Uint32)
    address = table.iterator.toint() + 2 * (Int64(position) * table.stride[0] + first)
    copy.vector(memory.view(address, Uint32, 2, 8), words)
    for i in cutlass.range_constexpr(2):
        found[2 * i], found[2 * i + 1] = memory.widen(spec.dtype, words[i])


@cute.jit
def load_pairs(spec: cutlass.Constexpr, a, position: Int32, first: Int32, x: cute.Tensor, y: cute.Tensor):
    """Load cosines x and sines y of 4 pairs at a position, or the two parts of their angles.

    Two tables of 16 bits, as FlashAttention's callers have them, are read as they are: made one table of fp32, they
    would take launches at each call, or a copy that is kept and may be older than they are."""
    table = a.rope_table
    address = table.iterator.toint() + (Int64(position) * table.stride[0] + first) * 4
    if const_expr(a.rope_cos is None):
        copy.vector(memory.view(address, Float32, 4, 16), x)
        copy.vector(memory.view(address + (table.shape[1] >> 1) * 4, Float32, 4, 16), y)
    elif a.rope_cos.shape[0] > 0:
        load_narrow(spec, a.rope_cos, position, first, x)
        load_narrow(spec, a.rope_sin, position, first, y)
    else:
        copy.vector(memory.view(address, Float32, 4, 16), x)
        copy.vector(memory.view(address + (table.shape[1] >> 1) * 4, Float32, 4, 16), y)


@cute.jit
def load_rotation(spec: cutlass.Constexpr, a, g, position: Int32, cos: cute.Tensor, sin: cute.Tensor):
    """Load what `rotate` needs at a position, cos and sin (8, 2). The position must be a row of the table, unless the
    table holds angles."""
    if whole_halves(a, g):
        load_shared(spec, a, g, position, cos, sin)
    else:
        load_signed(spec, a, g, position, cos, sin)


@cute.jit
def whole_halves(a, g):
    """Return whether each lane has both elements of its pairs: all of the row is rotated, in halves."""
    return (a.rope & INTERLEAVED) == 0 and a.rope_table.shape[1] == 2 * HALF * g.lanes


@cute.jit
def load_shared(spec: cutlass.Constexpr, a, g, position: Int32, cos: cute.Tensor, sin: cute.Tensor):
    """Load the cosines and sines [:, 0] of a lane's pairs. Nothing waits for them before `rotate`."""
    row = Int32(0) if (a.rope & ANGLES) != 0 else position
    for part in cutlass.range_constexpr(2):
        x = cute.make_tensor(cos.iterator + 4 * part, cute.make_layout(4))
        y = cute.make_tensor(sin.iterator + 4 * part, cute.make_layout(4))
        load_pairs(spec, a, row, g.lane * HALF + 4 * part, x, y)
    if (a.rope & ANGLES) != 0:
        for e in cutlass.range_constexpr(HALF):
            radians = angle(Float32(position), cos[e], sin[e])
            cos[e], sin[e] = approximate("cos", radians), approximate("sin", radians)


@cute.jit
def load_signed(spec: cutlass.Constexpr, a, g, position: Int32, cos: cute.Tensor, sin: cute.Tensor):
    """Load the cosines and signed sines (8, 2) of a lane's elements; 1 and 0 for elements that are not rotated."""
    rotated = a.rope_table.shape[1]
    row = Int32(0) if (a.rope & ANGLES) != 0 else position
    x, y = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
    for half in cutlass.range_constexpr(2):
        cos[None, half].fill(1.0)
        sin[None, half].fill(0.0)
        first = (g.lane + half * g.lanes) * HALF
        if first < rotated:
            c, s = cos[None, half], sin[None, half]
            for part in cutlass.range_constexpr(2):
                # the first pair of 4 elements in halves, or of 4 pairs that are neighbours
                begin = first + 4 * part
                if (a.rope & INTERLEAVED) != 0:
                    begin = first >> 1
                elif begin >= (rotated >> 1):
                    begin -= rotated >> 1
                load_pairs(spec, a, row, begin, x, y)
                for e in cutlass.range_constexpr(4):
                    own = const_expr((4 * part + e) // 2)  # the pair of element 4 * part + e, if interleaved
                    of_x, of_y = x[e], y[e]
                    if const_expr(own != e):
                        of_x = x[own] if (a.rope & INTERLEAVED) != 0 else of_x
                        of_y = y[own] if (a.rope & INTERLEAVED) != 0 else of_y
                    c[4 * part + e], s[4 * part + e] = of_x, of_y
            if (a.rope & ANGLES) != 0:
                for e in cutlass.range_constexpr(HALF):
                    radians = angle(Float32(position), c[e], s[e])
                    c[e], s[e] = approximate("cos", radians), approximate("sin", radians)
            for e in cutlass.range_constexpr(HALF):
                first_of_pair = first < (rotated >> 1)
                if (a.rope & INTERLEAVED) != 0:
                    first_of_pair = cutlass.Boolean(e % 2 == 0)
                s[e] = -s[e] if first_of_pair else s[e]


@cute.jit
def inverse_rms(a, g, values: cute.Tensor, inv_dim: Float32):
    """Return the inverse root mean square of a row (8, 2)."""
    total, mask = Float32(0.0), group_mask(g.lanes)
    for half in cutlass.range_constexpr(2):
        for e in cutlass.range_constexpr(HALF):
            total = warp.fma(values[e, half], values[e, half], total)
    for i in cutlass.range_constexpr(5):
        if (1 << i) < g.lanes:
            total += cute.arch.shuffle_sync_bfly(total, 1 << i, mask)
    return approximate("rsqrt", warp.fma(total, inv_dim, a.norm_eps))


@cute.jit
def normalise(spec: cutlass.Constexpr, a, g, values: cute.Tensor, words: cute.Tensor, inv_dim: Float32):
    """Multiply a row (8, 2) by its inverse root mean square and by weights, in words (4, 2)."""
    inverse, weights = inverse_rms(a, g, values, inv_dim), cute.make_rmem_tensor(HALF, Float32)
    for half in cutlass.range_constexpr(2):
        memory.unpack(spec.dtype, words[None, half], weights)
        for e in cutlass.range_constexpr(HALF):
            values[e, half] = values[e, half] * inverse * (weights[e] + a.norm_offset)


def rotate_pairs(values: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor):
    """Rotate a row (8, 2) of which each lane has both elements of its pairs (`whole_halves`)."""
    for e in range(HALF):
        first, second = values[e, 0], values[e, 1]
        values[e, 0] = warp.fma(-second, sin[e], first * cos[e])
        values[e, 1] = warp.fma(first, sin[e], second * cos[e])


@cute.jit
def rotate(a, g, values: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor):
    """Rotate a row (8, 2). All lanes of the group call it."""
    if whole_halves(a, g):
        rotate_pairs(values, cos, sin)
    else:
        rotated, other = a.rope_table.shape[1], cute.make_rmem_tensor((HALF, 2), Float32)
        if (a.rope & INTERLEAVED) != 0:
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(HALF):
                    other[e, half] = values[e ^ 1, half]
        else:
            exchange(g, values, other, rotated)
        for half in cutlass.range_constexpr(2):
            if (g.lane + half * g.lanes) * HALF < rotated:  # others stay as they are, infinities too
                for e in cutlass.range_constexpr(HALF):
                    values[e, half] = warp.fma(other[e, half], sin[e, half], values[e, half] * cos[e, half])


@cute.jit
def exchange(g, values: cute.Tensor, other: cute.Tensor, rotated: Int32):
    """Write to `other` the second element of the pair, in halves, of each value."""
    apart, mask = rotated >> 4, group_mask(g.lanes)  # vectors between the elements of a pair
    base = cute.arch.lane_idx() - g.lane
    for half in cutlass.range_constexpr(2):
        vector = g.lane + half * g.lanes
        if vector < apart:
            vector += apart
        elif vector < 2 * apart:
            vector -= apart
        upper = vector >= g.lanes
        source = base + (vector - g.lanes if upper else vector)
        for e in cutlass.range_constexpr(HALF):
            low = cute.arch.shuffle_sync(values[e, 0], source, mask)
            high = cute.arch.shuffle_sync(values[e, 1], source, mask)
            other[e, half] = high if upper else low
