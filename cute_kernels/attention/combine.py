"""The combine step of split KV: O of a tile from the O and LSE of its splits (`schedule.stream_k`).

There is no second kernel: whoever finishes the last split of a tile merges it, found by a counter (`count_split`). In
decode that is each mma warp, for its own rows (`is_last`, then `merge`: one row at a time, possibly many splits); in
prefill the CTA (`splits`, then `merge_rows`: several rows at a time). A split holds normalised O and LSE; the sink and
the output's scale enter here, once. Splits are always added in the order of keys, so that the result does not depend on
who adds them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device import copy
from ..device.warp import add_scaled, fma
from . import epilogue, geometry, softmax
from .schedule import stream_k
from .schedule.work import WorkTileInfo
from .spec import SF_VEC_SIZE

MIN_COLUMNS = 2  # of a row per lane
SPLIT_GROUP = 8  # splits of which a warp loads all or none


def columns_per_lane(dim):
    """Return the columns of a row that a lane adds up, a power of two: with some head dims, the last lanes have
    none."""
    return max(MIN_COLUMNS, 1 << (-(-dim // 32) - 1).bit_length())


@cute.jit
def count_split(a, own: Int32, count: Int32):
    """Count a split as stored; return 1 if it is the last of `count`, else 0. own: the launch's counter to use.

    Called by one thread, to which the stored split must be visible. If it is the last, all splits are visible to this
    thread, and to threads that meet it at a barrier. The last one resets the counter.
    """
    own += a.schedule.counter_base
    counters, last = a.schedule.counters, Int32(0)
    counter = counters.iterator + own
    if cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="acq_rel", scope="gpu") == count - 1:
        counters[own] = 0
        last = Int32(1)
    return last


@cute.jit
def is_last(a, own: Int32, count: Int32):
    """Count this warp's rows of a split as stored; return whether the split is the last. Called by one warp. own: a
    counter shared with the warps of other CTAs that have the same rows."""
    last = Int32(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        last = count_split(a, own, count)
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(last, 0) != 0


# Decode's combine loop, one warp: one iteration per row of the warp.
#   waits for   nothing: `is_last` has found that all splits of these rows are stored
#   computes    the sum over the splits of O * 2^(LSE - maximum), and the sum of 2^(LSE - maximum) (`add_splits`)
#   stores      the normalised and scaled row, and its LSE, sink included
# A whole warp works on one row, because there are few rows and possibly many splits. It loads a multiple of SPLIT_GROUP
# splits at once, as many as registers hold.
@cute.jit
def merge(
    spec: cutlass.Constexpr, a, w: WorkTileInfo, pack_factor, rows: Int32, row_of: cutlass.Constexpr, warp: Int32
):
    """Merge the splits of a tile for this warp's rows. Called by one warp; all splits must be stored.

    row_of(spec, warp, i): the warp's i-th row, ascending (`decode.layout.row_of_warp`); those below `rows` exist.
    """
    m = geometry.tile_m(spec, geometry.num_rows(w.sequence.q_len, pack_factor))
    scale = epilogue.output_scale(a)
    per = const_expr(columns_per_lane(spec.tile_vo))
    sf_lanes = const_expr(tuple(m for m in (1, 2, 4) if m * per < SF_VEC_SIZE))
    lane, lanes = cute.arch.lane_idx(), const_expr(spec.tile_vo // per)
    i, row = Int32(1), row_of(spec, warp, Int32(0))
    while row < rows:
        # sum over the splits
        acc, row_max, row_sum = add_splits(spec, a, w, row)
        # normalise, scale and store
        token = w.sequence.q_start + geometry.token_of(w.m_block * m + row, pack_factor)
        head = geometry.head_of(w.m_block * m + row, w.head_idx, pack_factor)
        normal = softmax.normalizer(row_max, row_sum, epilogue.sink_of(a, head))
        acc.store(acc.load() * (normal.inv_row_sum * scale))
        piece = epilogue.first_piece(spec, w, per) + lane
        epilogue.store_piece(
            spec, a, token, head, piece, acc, sf_lanes, True if const_expr(lanes == 32) else lane < lanes
        )
        epilogue.store_lse(a, token, head, normal.lse, epilogue.stores_lse(spec, w, lane == 0))
        i, row = i + 1, row_of(spec, warp, i)


@cute.jit
def add_splits(spec: cutlass.Constexpr, a, w: WorkTileInfo, row: Int32):
    """Return (this lane's columns of the sum of O * 2^(LSE - top), top, the sum of 2^(LSE - top)) over the splits of a
    row, where top is the largest LSE. Called by one warp.

    The loop takes as many splits at a time as registers hold: a lane has the LSE of one split and a share of the
    columns of each O, which is loaded together with the LSEs.
    """
    dim, count, lane = const_expr(spec.tile_vo), w.split.num_splits, cute.arch.lane_idx()
    per = const_expr(columns_per_lane(dim))
    step = const_expr(min(32, max(1, spec.tile.combine_columns // per // SPLIT_GROUP) * SPLIT_GROUP))
    acc = cute.make_rmem_tensor(per, Float32)
    acc.fill(0.0)
    base, row_max, row_sum = Int32(0), -Float32.inf, Float32(0.0)
    while base < count:
        # load LSE and O of `step` splits
        lse, pieces = -Float32.inf, cute.make_rmem_tensor((per, step), Float32)
        if lane < step and base + lane < count:
            lse = a.schedule.o_partial[stream_k.slot_of(spec, a, w, base + lane), row, dim]
        for j in cutlass.range_constexpr(0, step, SPLIT_GROUP):
            if base + j < count:
                load_splits(spec, a, w, row, base + j, cute.domain_offset((0, j), pieces))
        # rescale, then add
        new_max = cute.arch.fmax(row_max, cute.arch.warp_reduction_max(lse))
        known = Float32(0.0) if new_max == -Float32.inf else new_max
        old, mine = (cute.math.exp2(x - known, fastmath=True) for x in (row_max, lse))
        row_sum = fma(row_sum, old, cute.arch.warp_reduction_sum(mine))
        acc.store(acc.load() * old)
        for j in cutlass.range_constexpr(0, step, SPLIT_GROUP):
            if base + j < count:
                for e in cutlass.range_constexpr(SPLIT_GROUP):
                    factor = cute.arch.shuffle_sync(mine, j + e)
                    if factor > 0.0:  # a split without a key may hold NaN, and 0 * NaN is NaN
                        add_scaled(acc, pieces[None, j + e], factor)
        row_max = new_max
        base += step
    return acc, row_max, row_sum


@cute.jit
def load_splits(spec: cutlass.Constexpr, a, w: WorkTileInfo, row: Int32, first: Int32, pieces: cute.Tensor):
    """Load this lane's columns of a row of SPLIT_GROUP splits. Past the tile's last split, that one is loaded again:
    branches instead would make quantised kernels spill."""
    dim, o_partial = const_expr(spec.tile_vo), a.schedule.o_partial
    size = const_expr(spec.tile.m * (dim + 4))  # floats per slot: a constant, for short addresses
    per = const_expr(columns_per_lane(dim))
    own_lane = cute.arch.lane_idx()
    if const_expr(dim < 32 * per):  # lanes without columns load those of the last one
        own_lane = cutlass.min(own_lane, dim // per - 1)
    lane = (per,), (own_lane,)
    begin = cute.local_tile(o_partial[w.split.first + first, row, None], *lane)
    near = cute.make_tensor(begin.iterator, cute.make_layout((SPLIT_GROUP, *lane[0]), stride=(size, 1)))
    for e in cutlass.range_constexpr(SPLIT_GROUP):
        if const_expr(e == 0):
            own = o_partial[stream_k.slot_of(spec, a, w, first), row, None]
            copy.vector(cute.local_tile(own, *lane), pieces[None, e])
        else:
            copy.vector(near[cutlass.min(e, w.split.num_splits - 1 - first), None], pieces[None, e])


# Prefill's combine loop, one warp: `rows_per_warp` rows together, one iteration per 32 / rows_per_warp splits.
#   waits for   nothing: `splits.merge` has found that all splits of the tile are stored
#   computes    per iteration the new maximum of LSE, rescales O and the sum, then adds the splits in the order of keys
#   stores      the normalised and scaled rows, and their LSE, sink included
# A lane has the LSE of one row of one split. O of one split is loaded at a time: two would not fit the registers.
@cute.jit
def merge_rows(
    spec: cutlass.Constexpr, a, w: WorkTileInfo, first: Int32, rows: Int32, rows_per_warp: cutlass.Constexpr
):
    """Merge the splits of a tile for `rows_per_warp` rows from `first` on; the tile has `rows` rows. Called by one
    warp."""
    dim, lane, count = const_expr(spec.tile_vo), cute.arch.lane_idx(), w.split.num_splits
    splits_at_once = const_expr(32 // rows_per_warp)
    per = const_expr(dim // 32)
    acc = cute.make_rmem_tensor((per, rows_per_warp), Float32)
    pieces = cute.make_rmem_tensor((per, rows_per_warp), Float32)
    acc.fill(0.0)
    row = cutlass.min(first + lane // splits_at_once, rows - 1)
    base, row_max, row_sum = Int32(0), -Float32.inf, Float32(0.0)
    while base < count:
        # LSE and its new maximum
        split_idx, lse = base + lane % splits_at_once, -Float32.inf
        if split_idx < count:
            lse = a.schedule.o_partial[stream_k.slot_of(spec, a, w, split_idx), row, dim]
        new_max = cute.arch.fmax(row_max, cute.arch.warp_reduction_max(lse, threads_in_group=splits_at_once))
        known = Float32(0.0) if new_max == -Float32.inf else new_max
        old, mine = (cute.math.exp2(x - known, fastmath=True) for x in (row_max, lse))
        row_sum = fma(row_sum, old, cute.arch.warp_reduction_sum(mine, threads_in_group=splits_at_once))
        # rescale O
        for i in cutlass.range_constexpr(rows_per_warp):
            acc[None, i].store(acc[None, i].load() * cute.arch.shuffle_sync(old, splits_at_once * i))
        # O += O of the split * 2^(LSE - max); the loads of two splits would need more registers than there are
        for j in cutlass.range(splits_at_once, unroll=1):
            slot = stream_k.slot_of(spec, a, w, cutlass.min(base + j, count - 1))
            for i in cutlass.range_constexpr(rows_per_warp):
                source = a.schedule.o_partial[slot, cutlass.min(first + i, rows - 1), None]
                copy.vector(cute.local_tile(source, (per,), (lane,)), pieces[None, i])
            for i in cutlass.range_constexpr(rows_per_warp):
                factor = cute.arch.shuffle_sync(mine, splits_at_once * i + j)
                for e in cutlass.range_constexpr(per):  # a split without a key may hold NaN, and 0 * NaN is NaN
                    acc[e, i] = fma(pieces[e, i], factor, acc[e, i]) if factor > 0.0 else acc[e, i]
        row_max = new_max
        base += splits_at_once
    # normalise, scale and store
    scale, m = epilogue.output_scale(a), spec.tile.m
    for i in cutlass.range_constexpr(rows_per_warp):
        row = w.m_block * m + first + i
        token = geometry.token_of(row, geometry.pack_divisor(w))
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        if first + i < rows:
            sums = [cute.arch.shuffle_sync(x, splits_at_once * i) for x in (row_max, row_sum)]
            normal = softmax.normalizer(*sums, epilogue.sink_of(a, head))
            values = cute.make_rmem_tensor(per, Float32)
            values.store(acc[None, i].load() * (normal.inv_row_sum * scale))
            piece = epilogue.first_piece(spec, w, per) + lane
            epilogue.store_piece(spec, a, w.sequence.q_start + token, head, piece, values, ())
            epilogue.store_lse(a, w.sequence.q_start + token, head, normal.lse, epilogue.stores_lse(spec, w, lane == 0))
