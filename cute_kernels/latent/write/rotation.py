"""Rotary embedding of the pairs of a row, with a table of fp32 or of the rows' type."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr

from ...cache_write import places
from ...device import memory, warp
from ..args import INTERLEAVED


class RowTurn(NamedTuple):
    """How the row of a token is rotated. exists: whether its position is one of the table, so that it is written.
    turns: whether there is a table."""

    position: Int32
    exists: cutlass.Boolean
    turns: cutlass.Boolean


def interleaved(a):
    """Return whether pairs are neighbours, not halves."""
    return (a.rope & INTERLEAVED) != 0


@cute.jit
def turn_of(a, at: places.TokenPosition, requested: places.IndexWords) -> RowTurn:
    """Return how a token's row is rotated. at: its position in its request, which serves if none was requested."""
    rows = cutlass.max(a.rope_table.shape[0], a.rope_rows.shape[0])
    position, exists = Int32(0), cutlass.Boolean(True)
    if rows > 0:
        position = at.position
        if a.rope_positions.shape[0] > 0:
            position = places.clamped(requested, places.wide(a, "rope_positions"))
        exists = position >= 0 and position < rows
    return RowTurn(position if exists else Int32(0), exists, rows > 0)


@cute.jit
def narrow_value(spec: cutlass.Constexpr, address: Int64):
    """Load one number of the rows' type as fp32."""
    low, _ = memory.widen(spec.dtype, memory.view(address, Uint16, 1, 2)[0].to(Uint32))
    return low


@cute.jit
def cosine_and_sine(spec: cutlass.Constexpr, a, turn: RowTurn, pair: Int32, rotated: Int32):
    """Return the cosine and the sine of a pair. rotated: values of the table's rows."""
    cos, sin = Float32(1.0), Float32(0.0)
    if turn.turns:
        if a.rope_table.shape[0] > 0:
            cos, sin = a.rope_table[turn.position, pair], a.rope_table[turn.position, pair + (rotated >> 1)]
        else:
            address = a.rope_rows.iterator.toint() + 2 * (Int64(turn.position) * a.rope_rows.stride[0] + pair)
            cos, sin = narrow_value(spec, address), narrow_value(spec, address + rotated)
    return cos, sin


def turned(first, second, cos, sin):
    """Return a pair, rotated."""
    return warp.fma(-second, sin, first * cos), warp.fma(first, sin, second * cos)


@cute.jit
def turn_values(
    spec: cutlass.Constexpr, a, turn: RowTurn, values: cute.Tensor, first: Int32, rotated: Int32, mask: Uint32
):
    """Rotate a lane's values of a row: neighbours, of which the first is number `first` of the rotated part. mask: the
    lanes that call it, all that share a row; a lane without rotated values has a first outside [0, rotated).

    The values of a lane, a power of two, divide half of the rotated part, another power of two."""
    count, half = const_expr(cute.size(values)), rotated >> 1
    inside = first >= 0 and first < rotated
    if turn.turns:
        if interleaved(a):
            for e in cutlass.range_constexpr(0, count, 2):
                if inside:
                    cos, sin = cosine_and_sine(spec, a, turn, (first + e) >> 1, rotated)
                    values[e], values[e + 1] = turned(values[e], values[e + 1], cos, sin)
        else:
            apart = cutlass.max(half // count, 1)  # lanes between the values of a pair
            for e in cutlass.range_constexpr(count):
                own = values[e]
                other = cute.arch.shuffle_sync(own, cute.arch.lane_idx() ^ apart, mask)
                if inside:
                    pair = first + e if first < half else first + e - half
                    cos, sin = cosine_and_sine(spec, a, turn, pair, rotated)
                    values[e] = warp.fma(other, sin if first >= half else -sin, own * cos)
