"""The merge of a tile by all CTAs that have splits of it (`combine` says what a split holds, and how splits are added).

With 512 columns of O, one CTA would read the splits of a tile for long. So each of them waits until all splits of the
tile are stored, then merges a stripe of it: its own, which has the number that it got when it counted its split. No CTA
must wait, as others may not run at all while it does: one that has waited long gives up, and the CTA that stores the
last split then merges the whole tile. Who merges a stripe makes no difference to its bits.

A split lies in memory as blocks of 8 rows and 16 columns. A warp stores or loads 16 bytes a lane, and so 512 contiguous
bytes at a time; rows as a whole would be written by pieces of 32 bytes, which took 6 us for 64 rows.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device import copy
from ..device.warp import add_scaled
from . import epilogue, geometry, softmax
from .barriers import NamedBarrier
from .schedule import stream_k, work
from .schedule.work import WorkTileInfo
from .splits import MAX_SPLITS_PER_CTA, SplitSmem, work_of_split

ROWS, COLUMNS, PIECE = 8, 16, 4  # of a block; columns of a lane
POLLS = 64  # loads of a counter before a CTA gives up
GAVE_UP = 1 << 16  # what a CTA that gives up adds to the counter of stored splits
AT_ONCE, FEW_SPLITS = 16, 4  # pieces that a lane loads at a time: of one block, or of several if there are few splits
STORED, LEFT = range(2)  # the counters of `SplitCounters`


class SplitCounters(NamedTuple):
    """The first of a tile's counters: of splits that are stored, and of CTAs that do not read that one any more."""

    first: Int32

    def at(self, a, which):
        """Return the pointer to a counter."""
        return a.schedule.counters.iterator + (a.schedule.counter_base + self.first + which)

    def add(self, a, which, value, sem):
        """Add to a counter, and return its value before. Called by one thread."""
        return cute.arch.atomic_add(self.at(a, which).llvm_ptr, Int32(value), sem=sem, scope="gpu")


def counters_of(spec, w: WorkTileInfo):
    """Return the counters of a tile."""
    return SplitCounters(spec.tile.counters_per_split * work.own(spec, w.split.first))


def blocks_of(spec, a, slot):
    """Return O of a split: (columns, row, block of columns, block of rows)."""
    count = spec.head_dim_vo // COLUMNS
    shape = COLUMNS, ROWS, count, spec.tile.m // ROWS
    each = cute.make_layout(shape, stride=(1, COLUMNS, ROWS * COLUMNS, ROWS * COLUMNS * count))
    return cute.make_tensor(a.schedule.o_partial[slot, 0, None].iterator, each)


def lses_of(spec, a, slot):
    """Return the LSEs of the rows of a split, which lie behind O."""
    behind = a.schedule.o_partial[slot, 0, None].iterator + spec.tile.m * spec.head_dim_vo
    return cute.make_tensor(behind, cute.make_layout(spec.tile.m))


@cute.jit
def merge(spec: cutlass.Constexpr, a, smem: SplitSmem, count: Int32, tid: Int32, warps: cutlass.Constexpr):
    """Merge stripes of the tiles of the CTA's `count` splits. Called by `warps` warps, after `splits.barrier`. Splits
    are added in the order of keys."""
    count, number = cutlass.min(count, MAX_SPLITS_PER_CTA), cute.arch.make_warp_uniform(tid // 32)
    if tid < count:
        counters = counters_of(spec, work_of_split(spec, smem, tid))
        smem.last[tid] = counters.add(a, STORED, 1, "acq_rel")
    cute.arch.sync_warp()
    for i in cutlass.range(count, unroll=1):
        w = work_of_split(spec, smem, i)
        counters, total, left = counters_of(spec, w), w.split.num_splits, Int32(0)
        if tid == 0:
            smem.last[i] = await_splits(a, counters, smem.last[i], total)
            left = counters.add(a, LEFT, 1, "release")
        cute.arch.barrier(barrier_id=NamedBarrier.SPLITS_COUNTED, number_of_threads=32 * warps)
        stripe = cute.arch.make_warp_uniform(smem.last[i])
        if stripe >= 0:
            if total <= FEW_SPLITS:
                merge_stripe(spec, a, w, stripe, number, warps, const_expr(AT_ONCE // FEW_SPLITS))
            else:
                merge_stripe(spec, a, w, stripe, number, warps, 1)
        if tid == 0 and left == total - 1:
            cute.arch.fence_acq_rel_gpu()  # behind what the other CTAs have read
            for which in cutlass.range_constexpr(2):
                a.schedule.counters[a.schedule.counter_base + counters.first + which] = 0


@cute.jit
def await_splits(a, counters: SplitCounters, before: Int32, total: Int32):
    """Wait for a while until `total` splits are stored, and return the number of the stripe that this CTA is to merge:
    `total` for all of them, -1 for none. before: the counter of stored splits when the CTA counted its own. Called by
    one thread, to which the splits are then visible, and to threads that meet it at a barrier."""
    text, address = "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", counters.at(a, STORED).toint()
    stripe = before % GAVE_UP
    found, tries = before + 1, Int32(0)
    while found % GAVE_UP < total and tries < POLLS:
        found = cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address])
        tries += 1
    if stripe == total - 1:
        if before >= GAVE_UP:  # some CTA has given up
            stripe = total
    elif found % GAVE_UP < total:
        if counters.add(a, STORED, GAVE_UP, "acq_rel") % GAVE_UP < total:
            stripe = Int32(-1)
    return stripe


@cute.jit
def merge_stripe(
    spec: cutlass.Constexpr, a, w: WorkTileInfo, stripe: Int32, number: Int32, warps: cutlass.Constexpr,
    at_once: cutlass.Constexpr,
):  # fmt: skip
    """Merge the stripe of a tile, or all of them if it is the number of splits. number: of the warp. at_once: blocks
    that a warp merges at a time. There is a stripe for each split, and each warp has equally many blocks of it."""
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    rows, total = cutlass.min(left, spec.tile.m), w.split.num_splits
    across = const_expr(spec.head_dim_vo // COLUMNS // at_once)
    units = cutlass.max((rows + ROWS - 1) // ROWS, 0) * across
    size = ((units + warps - 1) // warps + total - 1) // total * warps
    begin, end = stripe * size, cutlass.min(stripe * size + size, units)
    if stripe == total:
        begin, end = Int32(0), units
    for unit in cutlass.range(begin + number, end, warps, unroll=1):
        merge_blocks(spec, a, w, rows, unit // across, unit % across * at_once, at_once)


# One warp, which merges blocks of 8 rows.
#   waits for   nothing: all splits of the tile are stored
#   computes    per iteration the new maximum of the LSEs, rescales O and the sum, then adds the splits in the order of
#               keys. A lane has a row, and four of its columns of each block, and loads `AT_ONCE` pieces at a time
#   stores      the normalised and scaled columns and, with the first ones, the LSE, sink included
@cute.jit
def merge_blocks(
    spec: cutlass.Constexpr, a, w: WorkTileInfo, rows: Int32, group: Int32, first: Int32, at_once: cutlass.Constexpr
):
    """Merge the splits of a tile in `at_once` blocks from `first` on, all of the same rows, the group-th 8 of a tile of
    `rows` rows."""
    lane, count, some = cute.arch.lane_idx(), w.split.num_splits, const_expr(AT_ONCE // at_once)
    own, quarter = lane // (COLUMNS // PIECE), lane % (COLUMNS // PIECE)
    row = ROWS * group + own
    held = cutlass.min(own, rows - 1 - ROWS * group)  # of the row that this lane loads: a split has no others
    acc, pieces = (cute.make_rmem_tensor((PIECE, n), Float32) for n in (at_once, AT_ONCE))
    lses = cute.make_rmem_tensor(some, Float32)
    acc.fill(0.0)
    base, row_max, row_sum = Int32(0), -Float32.inf, Float32(0.0)
    while base < count:
        for j in cutlass.range_constexpr(some):  # past the last split, that one is loaded again
            slot = stream_k.slot_of(spec, a, w, cutlass.min(base + j, count - 1))
            lses[j] = lses_of(spec, a, slot)[ROWS * group + held]
            for i in cutlass.range_constexpr(at_once):
                source = blocks_of(spec, a, slot)[None, held, first + i, group]
                copy.vector(cute.local_tile(source, (PIECE,), (quarter,)), pieces[None, some * i + j])
        new_max = row_max
        for j in cutlass.range_constexpr(some):
            if base + j >= count:
                lses[j] = -Float32.inf
            new_max = cute.arch.fmax(new_max, lses[j])
        known = Float32(0.0) if new_max == -Float32.inf else new_max
        old = cute.math.exp2(row_max - known, fastmath=True)
        row_sum = row_sum * old
        for i in cutlass.range_constexpr(at_once):
            acc[None, i].store(acc[None, i].load() * old)
        for j in cutlass.range_constexpr(some):
            factor = cute.math.exp2(lses[j] - known, fastmath=True)
            row_sum = row_sum + factor
            if factor > 0.0:  # a split without a key may hold NaN, and 0 * NaN is NaN
                for i in cutlass.range_constexpr(at_once):
                    add_scaled(acc[None, i], pieces[None, some * i + j], factor)
        row_max = new_max
        base += some
    if row < rows:
        for i in cutlass.range_constexpr(at_once):
            store_piece(spec, a, w, row, (first + i) * (COLUMNS // PIECE) + quarter, acc[None, i], row_max, row_sum)


@cute.jit
def store_piece(
    spec: cutlass.Constexpr, a, w: WorkTileInfo, row: Int32, piece: Int32, values: cute.Tensor, top: Float32,
    total: Float32,
):  # fmt: skip
    """Normalise, scale and store this lane's piece of a merged row. top, total: as in `combine.add_splits`."""
    at, pack = w.m_block * spec.tile.m + row, geometry.pack_divisor(w)
    token, head = w.sequence.q_start + geometry.token_of(at, pack), geometry.head_of(at, w.head_idx, pack)
    normal = softmax.normalizer(top, total, epilogue.sink_of(a, head))
    scaled = cute.make_rmem_tensor(PIECE, Float32)
    scaled.store(values.load() * (normal.inv_row_sum * epilogue.output_scale(a)))
    epilogue.store_piece(spec, a, token, head, epilogue.first_piece(spec, w, PIECE) + piece, scaled, ())
    lse = epilogue.lse_of(a, normal.lse, top, total)
    epilogue.store_lse(a, token, head, lse, epilogue.stores_lse(spec, w, piece == 0))
