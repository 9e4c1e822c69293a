"""Rows of an indexer: its keys, and the heads of its queries. Eight lanes share a row of 128 values, 16 each.

`write_rows`, `write_key` and `write_query` do here what the functions of these names in `forward` do for the latent."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...cache_write import places, store
from ...device import memory, warp
from ...device.divisor import divide
from . import INDEX_LANES, VALUES, WARP, factors, rotation

DIM = INDEX_LANES * VALUES
ROWS = WARP // INDEX_LANES  # of a warp


class IndexRow(NamedTuple):
    """The row of a group of lanes. own: 0 for the key of the token, h + 1 for head h of its query. mask: the lanes."""

    lane: Int32
    token: Int32
    own: Int32
    mask: Uint32


@cute.jit
def load(spec: cutlass.Constexpr, address: Int64, lane: Int32, values: cute.Tensor):
    """Load a lane's values of a row."""
    words = cute.make_rmem_tensor(4, Uint32)
    for half in cutlass.range_constexpr(2):
        memory.load(address + 2 * (lane * VALUES + 8 * half), words, Int32(8), 2)
        memory.unpack(spec.dtype, words, cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8)))


@cute.jit
def row_sum(x: Float32, mask: Uint32):
    """Return the sum over the lanes of a row."""
    for i in cutlass.range_constexpr(INDEX_LANES.bit_length() - 1):
        x += cute.arch.shuffle_sync_bfly(x, 1 << i, mask)
    return x


@cute.jit
def normalise(spec: cutlass.Constexpr, a, row: IndexRow, values: cute.Tensor):
    """Apply the layer norm or, without a bias, the RMS norm."""
    centred, total = a.bias.shape[0] > 0, Float32(0.0)
    if centred:
        for e in cutlass.range_constexpr(VALUES):
            total += values[e]
        mean = row_sum(total, row.mask) * (1.0 / DIM)
        for e in cutlass.range_constexpr(VALUES):
            values[e] = values[e] - mean
    total = Float32(0.0)
    for e in cutlass.range_constexpr(VALUES):
        total = warp.fma(values[e], values[e], total)
    inverse = cute.math.rsqrt(row_sum(total, row.mask) * (1.0 / DIM) + a.norm_eps, fastmath=True)
    weights, bias = (cute.make_rmem_tensor(VALUES, Float32) for _ in range(2))
    load(spec, a.weight.iterator.toint(), row.lane, weights)
    bias.fill(0.0)
    if centred:
        load(spec, a.bias.iterator.toint(), row.lane, bias)
    for e in cutlass.range_constexpr(VALUES):
        values[e] = warp.fma(values[e] * inverse, weights[e], bias[e])


@cute.jit
def write_rows(spec: cutlass.Constexpr, a, first: Int32, step: Int32):
    """Write the rows of every `step`-th warp, from one on."""
    tokens, each = cutlass.max(a.kv.shape[0], a.q.shape[0]), 1 + a.q.shape[1]
    lane, group = cute.arch.lane_idx() % INDEX_LANES, cute.arch.lane_idx() // INDEX_LANES
    mask = Uint32((1 << INDEX_LANES) - 1) << Uint32(group * INDEX_LANES)
    rows, row = tokens * each, first * ROWS + group
    while row < rows:
        token = divide(row, each)
        at = IndexRow(lane, token, row - token * each, mask)
        if at.own == 0:
            write_key(spec, a, at)
        else:
            write_query(spec, a, at)
        row += step * ROWS


@cute.jit
def write_key(spec: cutlass.Constexpr, a, row: IndexRow):
    """Write an indexer's key of a token to its place in the cache, if it has one."""
    lane, form = row.lane, const_expr(spec.form)
    values = cute.make_rmem_tensor(VALUES, Float32)
    slot, turned = places.request_slot(a, row.token), places.request_rope_position(a, row.token)
    if row.token < a.kv.shape[0]:
        load(spec, memory.row_of(a.kv, row.token), lane, values)
        position = places.position_of(a, row.token)
        turn = rotation.turn_of(a, position, turned)
        pool = places.PagePool(a.cache.shape[0], a.cache.shape[1])
        place = places.place_of(a, pool, row.token, position, slot)
        if a.weight.shape[0] > 0:
            normalise(spec, a, row, values)
        rotated = cutlass.max(cutlass.max(a.rope_table.shape[1], a.rope_rows.shape[1]), 2)
        rotation.turn_values(spec, a, turn, values, Int32(lane * VALUES), rotated, row.mask)
        scale = factors.scale_of(spec, a, factors.largest(values, INDEX_LANES, row.mask))
        out = factors.e4m3_words(spec, a, values, scale)
        if turn.exists and place.page >= 0:
            page = a.cache.iterator.toint() + Int64(place.page) * a.cache.stride[0]
            address = page + Int64(place.row) * form.row + lane * VALUES
            memory.store(address, out, Int32(VALUES), 1)
            if lane == 0:
                behind = page + Int64(a.cache.shape[1]) * form.row + Int64(place.row) * form.factor_row
                factors.store_factor(spec, behind, scale)


@cute.jit
def write_query(spec: cutlass.Constexpr, a, row: IndexRow):
    """Rotate and quantise a head of a token's query, and fold its scale into the weight of the head."""
    lane, head = row.lane, row.own - 1
    values = cute.make_rmem_tensor(VALUES, Float32)
    turned = places.request_rope_position(a, row.token)
    load(spec, memory.row_of(a.q, row.token, head), lane, values)
    turn = rotation.turn_of(a, places.position_of(a, row.token), turned)
    rotated = cutlass.max(cutlass.max(a.rope_table.shape[1], a.rope_rows.shape[1]), 2)
    rotation.turn_values(spec, a, turn, values, Int32(lane * VALUES), rotated, row.mask)
    top = cute.arch.fmax(factors.largest(values, INDEX_LANES, row.mask), Float32(factors.LEAST_QUERY))
    scale = factors.power_above(store.divided(top, Float32(factors.E4M3_MOST)))
    if turn.exists:
        out = factors.times_power(values, scale)
        memory.store(memory.row_of(a.q_fp8, row.token, head) + lane * VALUES, out, Int32(VALUES), 1)
        if lane == 0:
            if row.token < a.weights_out.shape[0]:
                a.weights_out[row.token, head] = a.weights[row.token, head] * scale * a.weight_scale
