"""The stream-K scheduler: the unit of work is a KV block of a tile, and each CTA gets the same number of units.

All units, in the order of tiles, are cut into contiguous shares, one per CTA, which differ by at most one unit; CTA c
gets the c-th share. It may begin in the middle of one tile and end in the middle of another; such a tile is split among
CTAs, and `combine` merges its splits. Behind the blocks of a tile come its `end_units`, which have no keys: they stand
for the time that the end of a tile takes, so that a CTA with many short tiles gets fewer blocks. With blocks_per_split
(batch-invariant decode), a unit is that many blocks and each unit is a split of its own: where the splits of a sequence
end, and so its bits, do not depend on the rest of the batch.

If all tiles have equally many units, and the host found that nearly all CTAs can take equally many whole tiles
(`ScheduleArgs.whole_tiles`), these CTAs do, and the others get nothing: no tile is split.

Everything is found from the lengths by one warp, 32 sequences at a time (`SequenceWindow`). To follow the code, in
decode and sm90: `schedule_warp` -> `first_work` -> `find` (unit -> tile and split) for the CTA's first tile, then
`schedule_warp` -> `produce_next` -> `find` for each of the others. In sm100, `schedule.schedule_and_load_q` calls
`begin`, then `produce_next` for every tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import warp
from ...device.divisor import Divisor, divide
from .. import geometry, mask, pdl
from ..barriers import NamedBarrier
from ..geometry import Sequence
from . import policy, work
from .work import SplitInfo, WorkTileInfo

MAX_UNITS = (1 << 31) - 1  # per launch: CTAs count units in 32 bits


class StreamKSequence(NamedTuple):
    """A sequence as the scheduler sees it: its `geometry.Sequence`, its tiles, and units per tile. With
    `ScheduleArgs.m_tiles`, each sequence comes as often as that, with the tiles of one m_block each; the last time with
    those of all further ones."""

    sequence: Sequence
    num_tiles: Int32
    units_per_tile: Int32


class SequenceWindow(NamedTuple):
    """32 consecutive sequences, one per lane: batch_idx of the first, units of all sequences before it, units of the
    window up to and including the lane's own, and the lane's own."""

    first_batch_idx: Int32
    units_before: Int32
    units_upto: Int32
    own: StreamKSequence


class UnitCoord(NamedTuple):
    """A unit's place: its sequence and its index in the sequence. is_valid: 0 past the last unit."""

    is_valid: Int32
    batch_idx: Int32
    index: Int32
    sequence: StreamKSequence


class CtaUnits(NamedTuple):
    """The units [begin, end) of a CTA, of `total` in the launch. ctas: CTAs that have units; None: all."""

    begin: Int32
    end: Int32
    total: Int32
    ctas: Any = None


def first_unit(total, c, ctas):
    """Return the first unit of CTA c: equal shares; the first CTAs get one unit of the remainder each."""
    units_per_cta = divide(total, ctas)
    return units_per_cta * c + cutlass.min(c, total - units_per_cta * ctas)


def share_of(c, total, ctas):
    """Return the units [begin, end) of CTA c, in that order: none if it is not one of `ctas`."""
    return tuple(first_unit(total, cutlass.min(n, ctas), ctas) for n in (c, c + 1))


def cta_of_unit(unit, total, ctas):
    """Return the CTA that has a unit, the inverse of `first_unit`."""
    units_per_cta = divide(total, ctas)
    rest = total - units_per_cta * ctas
    in_larger = divide(unit, units_per_cta + 1)
    in_smaller = divide(cutlass.max(unit - rest, 0), cutlass.max(units_per_cta, 1))
    return cutlass.max(in_larger, in_smaller)


def split_slot(cta, distance, ctas):
    """Return the slot in o_partial of a CTA's split. distance: by how many units, or CTAs, the tile begins before
    this split; 0 for the first split. Except for the first, the splits of a tile have neighbouring slots."""
    return cta + ctas * cutlass.max(1 - distance, 0)


def slot_of(spec, a, w: WorkTileInfo, split_idx):
    """Return the slot of the tile's split `split_idx`."""
    shared = 1 - cutlass.min(a.schedule.blocks_per_split, 1)
    return work.own(spec, split_slot(w.split.first + split_idx, split_idx, shared * work.workers(spec)))


def blocks_per_tile(spec, seqlen):
    """Return the number of KV blocks in the union of the ranges that the tiles of a sequence visit, at least one.

    Every tile of the sequence gets units for all of these blocks, so that tiles have equally many units. Under a causal
    mask or a window, a tile may have units that are empty for it (`find` cuts their range of blocks).
    """
    lo, hi = mask.kv_range(spec, 0, seqlen.q_len - 1, seqlen)
    return cutlass.max(hi - lo, 1)


def end_units(spec, a):
    """Return the units of a tile that have no keys, behind those of its blocks. Units of blocks_per_split blocks are
    splits, and tiles of these have no others."""
    if spec.tile.end_blocks == 0:
        return 0
    return spec.tile.end_blocks * (1 - cutlass.min(a.schedule.blocks_per_split, 1))


def units_of_blocks(blocks, blocks_per_split):
    """Return the number of units of `blocks_per_split` blocks that cover `blocks`."""
    return divide(blocks + blocks_per_split - 1, blocks_per_split)


def tiles_of_rows(spec, rows):
    """Return the number of tiles of `rows` rows. A tile smaller than the largest choice is the only one."""
    most = spec.tile.m_choices[-1]
    return (rows + most - 1) // most


def number_of_sequences(a):
    """Return the number of sequences as the scheduler sees them."""
    batch = geometry.batch_size(a)
    return batch if a.schedule.m_tiles is None else batch * a.schedule.m_tiles


def first_m_block(a, b):
    """Return the first m_block of the scheduler's sequence b."""
    return Int32(0) if a.schedule.m_tiles is None else divide(b, geometry.batch_size(a))


@cute.jit
def m_blocks_of(a, tiles: Int32, first: Int32):
    """Return the m_blocks of a scheduler's sequence, of `tiles` of the sequence, from its first one on."""
    if const_expr(a.schedule.m_tiles is not None):
        tiles = cutlass.max(tiles - first, 0)
        if first < a.schedule.m_tiles - 1:
            tiles = cutlass.min(tiles, 1)
    return tiles


@cute.jit
def load_sequence(spec: cutlass.Constexpr, a, b: Int32):
    """Return sequence b; all zeros past the last one."""
    sequence, num_tiles, units_per_tile = geometry.no_sequence(spec), Int32(0), Int32(0)
    if b < number_of_sequences(a):
        first = first_m_block(a, b)
        own = b if const_expr(a.schedule.m_tiles is None) else b - first * geometry.batch_size(a)
        sequence = geometry.load_sequence(a, own)
        rows = geometry.num_rows(sequence.q_len, geometry.pack_factor(spec, a, sequence.q_len))
        num_tiles = m_blocks_of(a, tiles_of_rows(spec, rows), first) * a.kv.k.shape[1]
        if const_expr(spec.tile.o_tiles > 1):
            num_tiles *= spec.tile.o_tiles
        units_per_tile = blocks_per_tile(spec, mask.seqlen_info(spec, a, sequence))
        if a.schedule.blocks_per_split > 0:
            units_per_tile = units_of_blocks(units_per_tile, a.schedule.blocks_per_split)
        units_per_tile += end_units(spec, a)
    return StreamKSequence(sequence, num_tiles, units_per_tile)


@cute.jit
def load_window(spec: cutlass.Constexpr, a, first_batch_idx: Int32, units_before: Int32):
    """Return the window that begins with `first_batch_idx`; the sequences before it have `units_before` units. Called
    by one warp."""
    own = load_sequence(spec, a, first_batch_idx + cute.arch.lane_idx())
    return SequenceWindow(first_batch_idx, units_before, warp.prefix_sum(own.num_tiles * own.units_per_tile), own)


@cute.jit
def locate(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow):
    """Find the sequence of a unit. Called by one warp. window: where the search begins. Return (`UnitCoord`, the
    window that holds the sequence)."""
    batch_size = number_of_sequences(a)
    # move the window until it holds the unit
    units_behind = window.units_before + cute.arch.shuffle_sync(window.units_upto, 31)
    while unit < window.units_before or (unit >= units_behind and window.first_batch_idx + 32 < batch_size):
        first_batch_idx, units_before = Int32(0), Int32(0)  # from the start, if the unit comes before the window
        if unit >= window.units_before:
            first_batch_idx, units_before = window.first_batch_idx + 32, units_behind
        window = load_window(spec, a, first_batch_idx, units_before)
        units_behind = window.units_before + cute.arch.shuffle_sync(window.units_upto, 31)
    # the lane that has the unit
    index = unit - window.units_before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(window.units_upto <= index))
    index -= cute.arch.shuffle_sync(window.units_upto - window.own.num_tiles * window.own.units_per_tile, owner)
    own = warp.shuffle_record(window.own, owner)
    is_valid = Int32(1) if owner < 32 and window.first_batch_idx + owner < batch_size else Int32(0)
    return UnitCoord(
        is_valid, window.first_batch_idx + owner, index, own._replace(units_per_tile=cutlass.max(own.units_per_tile, 1))
    ), window


@cute.jit
def total_units(spec: cutlass.Constexpr, a, window: SequenceWindow):
    """Return (the number of units of the launch, the most units of a tile). Called by one warp. window: the first
    sequences.

    Both are 0 if there is no room for the units: decreasing offsets make sequences overlap, and so more tiles than the
    rows could have. The most units of a tile are found only in kernels with `prefers_whole_tiles`.
    """
    count, room = Int64(window.own.num_tiles) * window.own.units_per_tile, Int64(MAX_UNITS)
    most = window.own.units_per_tile
    for b in cutlass.range(cute.arch.lane_idx() + 32, number_of_sequences(a), 32, unroll=2):
        more = load_sequence(spec, a, b)
        count += Int64(more.num_tiles) * more.units_per_tile
        if const_expr(policy.prefers_whole_tiles(spec)):
            most = cutlass.max(most, more.units_per_tile)
    count = cutlass.min(count, Int64(1) << 40)  # the sum of the upper parts of 32 lanes fits in 32 bits
    upper = cute.arch.warp_redux_sync(Int32(count >> 16), "add")
    total = (Int64(upper) << 16) + cute.arch.warp_redux_sync(Int32(count & 0xFFFF), "add")
    if a.schedule.blocks_per_split > 0 and not spec.kv.shares_v:  # each unit is a split with a slot, or else a tile
        room = Int64(a.schedule.o_partial.shape[0] // spec.tile.cluster)
    if const_expr(policy.prefers_whole_tiles(spec)):
        most = cute.arch.warp_redux_sync(most, "max")
    return (Int32(total), most) if total <= room else (Int32(0), Int32(0))


@cute.jit
def cta_share(spec: cutlass.Constexpr, a, window: SequenceWindow):
    """Return (the units of this CTA, the window where the search for them begins). Called by one warp. window: the
    first sequences.

    A share that begins among the `end_units` of a tile begins with the next tile instead: the CTA before it has the
    rest of that tile.
    """
    (total, most), c, ctas = total_units(spec, a, window), work.worker(spec), work.workers(spec)
    if const_expr(policy.prefers_whole_tiles(spec)):
        whole = a.schedule.whole_ctas
        if Int64(whole * a.schedule.whole_tiles) * most == total:  # all tiles are equal
            ctas = cutlass.max(whole, 1)
    begin, end = share_of(c, total, ctas)
    if const_expr(spec.tile.end_blocks > 0):
        found, window = locate(spec, a, begin, window)
        left = rest_of_tile(found)
        if left <= end_units(spec, a):
            begin += left
    return CtaUnits(begin, end, total, ctas if const_expr(policy.prefers_whole_tiles(spec)) else None), window


def rest_of_tile(found: UnitCoord):
    """Return the number of units of the tile of a unit, from that unit on."""
    units_per_tile = found.sequence.units_per_tile
    return units_per_tile - (found.index - divide(found.index, units_per_tile) * units_per_tile)


@cute.jit
def tile_begin(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow):
    """Return (the first unit of the tile of `unit`, the window of its sequence). Called by one warp."""
    found, window = locate(spec, a, unit, window)
    units_per_tile = found.sequence.units_per_tile
    return unit - (found.index - divide(found.index, units_per_tile) * units_per_tile), window


@cute.jit
def find(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow, cta_units: CtaUnits, pack_factor: Divisor):
    """Find the tile, or the CTA's split of a tile, that begins with `unit`. Called by one warp.

    window: where the search begins. pack_factor: rows per token. Return (`WorkTileInfo`, the window of its sequence,
    the unit after it).
    """
    found, window = locate(spec, a, unit, window)
    sequence, _, units_per_tile = found.sequence
    q_len = sequence.q_len
    blocks_per_split, rows = a.schedule.blocks_per_split, geometry.num_rows(q_len, pack_factor)
    m, first_block, batch_idx = geometry.tile_m(spec, rows), first_m_block(a, found.batch_idx), found.batch_idx
    m_blocks = m_blocks_of(a, tiles_of_rows(spec, rows), first_block)
    if const_expr(a.schedule.m_tiles is not None):
        batch_idx -= first_block * geometry.batch_size(a)
    # unit of the sequence -> (o_tile, m_block, head, unit of the tile)
    tile, o_tile = divide(found.index, units_per_tile), None
    offset = found.index - tile * units_per_tile
    if const_expr(spec.tile.o_tiles > 1):
        o_tile, tile = tile % spec.tile.o_tiles, tile // spec.tile.o_tiles
    m_block, head = Int32(0), tile
    if m_blocks > 1:
        head = divide(tile, m_blocks)
        m_block = tile - head * m_blocks
    if const_expr(spec.tile.alternates_m_blocks):
        # the first tile, the last one, the second one, ...: under a causal mask, later tiles have more keys
        half = m_block // 2
        m_block = half + m_block % 2 * (m_blocks - 1 - 2 * half)
    if const_expr(a.schedule.m_tiles is not None):
        m_block += first_block
    seqlen = mask.seqlen_info(spec, a, sequence)
    first, last = geometry.tile_tokens(m_block, m, q_len, pack_factor)
    lo, hi = mask.kv_range(spec, first, last, seqlen)
    # how many of the tile's units this CTA takes; if not all: number of splits and the first one
    key_units = units_per_tile - end_units(spec, a)
    slot, taken, count, base = Int32(-1), Int32(1), key_units, unit - offset
    ctas = work.workers(spec)
    if blocks_per_split == 0:
        taken = cutlass.min(key_units - offset, cta_units.end - unit)
        if taken < key_units:  # lane 0: the CTA of the tile's first unit, lane 1: of its last with keys
            end_unit = unit - offset + cute.arch.lane_idx() % 2 * (key_units - 1)
            shares = ctas if const_expr(cta_units.ctas is None) else cta_units.ctas
            end_cta = cta_of_unit(end_unit, cta_units.total, shares)
            base = cute.arch.shuffle_sync(end_cta, 0)
            count = cute.arch.shuffle_sync(end_cta, 1) - base + 1
    # the KV blocks of the taken units
    per = cutlass.max(blocks_per_split, 1)
    begins = mask.kv_range(spec, 0, q_len - 1, seqlen)[0] + offset * per
    lo, hi = cutlass.max(lo, begins), cutlass.min(hi, begins + taken * per)
    if taken < key_units:
        slot = work.own(spec, unit if blocks_per_split > 0 else split_slot(work.worker(spec), offset, ctas))
    blocks = (lo, hi, *mask.full_range(spec, first, last, seqlen), SplitInfo(slot, count, base))
    w = WorkTileInfo(found.is_valid, work.own(spec, m_block), head, sequence, batch_idx, *blocks)
    w = w._replace(o_tile=o_tile)
    if const_expr(spec.tile.per_tile_pack_gqa):
        w = w._replace(pack_factor=pack_factor.value, pack_magic=Int32(pack_factor.magic))
    next_unit = unit + taken
    if const_expr(spec.tile.end_blocks > 0):
        if offset + taken == key_units:
            next_unit += end_units(spec, a)
    return w, window, next_unit


@cute.jit
def first_work(spec: cutlass.Constexpr, a, s, pack_factor: Divisor):
    """Find the CTA's first tile and write it to work_pipe. Called by one warp.

    Return (the window of its sequence, the CTA's `CtaUnits`, the unit after it). In kernels with a PDL prologue, and
    for at most 32 sequences, the tile is found while the previous kernel still runs; it is found again only if the
    sequences have changed when that kernel has ended. This is a loop so that the code of the search exists once.
    """
    # hints: with PDL, values that may still change; few: one window has all sequences; last: the last attempt
    hints, few, last = pdl.uncached_args(spec, a), number_of_sequences(a) <= 32, const_expr(int(pdl.has_prologue(spec)))
    zero = Int32(0)
    batch_idx, keys = zero, zero
    window = SequenceWindow(zero, zero, zero, StreamKSequence(geometry.no_sequence(spec), zero, zero))
    cta_units, unit = CtaUnits(zero, zero, zero, zero if policy.prefers_whole_tiles(spec) else None), zero
    # attempt 0: before the previous kernel has ended; attempt 1: after that
    for attempt in cutlass.range(last + 1, unroll=1):
        now, first = load_window(spec, hints, zero, zero), zero - 1
        changed = cute.arch.vote_any_sync(geometry.differs(now.own.sequence, window.own.sequence))
        if (few and attempt < last) or (attempt == last and (not few or changed or last == 0)):
            cta_units, now = cta_share(spec, hints, now)
            w, window, unit = find(spec, hints, cta_units.begin, now, cta_units, pack_factor)
            more = Int32(1) if cta_units.begin < cta_units.end else Int32(0)
            work.producer_write(s, zero, w._replace(is_valid=w.is_valid * more))
            if w.is_valid * more != 0 and a.kv.kv_starts.shape[0] == 0:  # the table's width bounds a stale length
                first = w.n_block_max - 1
            batch_idx, keys = w.batch_idx, w.sequence.kv_len
        if const_expr(last > 0):
            if attempt < last:
                # hand the first block to the load warps, then wait for the previous kernel
                if cute.arch.lane_idx() == 0:
                    s.prologue_work[0], s.prologue_work[1], s.prologue_work[2] = batch_idx, first, keys
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.PROLOGUE, number_of_threads=pdl.prologue_threads(spec))
                cute.arch.griddepcontrol_wait()
    return window, cta_units, unit


class SchedulerState(NamedTuple):
    """State of the schedule warp. more: whether the last tile it produced was valid. unit, end: units of the CTA still
    to produce. skipped_begin, skipped_count: the units of the whole tiles between the CTA's first and its last tile,
    deferred until both of these, which may be splits, are produced (`advance`). window: where the next search
    begins."""

    more: Int32
    unit: Int32
    skipped_begin: Int32
    end: Int32
    skipped_count: Int32
    window: SequenceWindow


@cute.jit
def begin(spec: cutlass.Constexpr, a):
    """Return (the units of this CTA, its first `SchedulerState`). Called by one warp."""
    none = Int32(0)
    window = load_window(spec, a, none, none)
    cta_units, window = cta_share(spec, a, window)
    return cta_units, SchedulerState(Int32(1), cta_units.begin, none, cta_units.end, none, window)


@cute.jit
def advance(spec: cutlass.Constexpr, a, t: Int32, state: SchedulerState):
    """Return the state after the CTA's t-th tile. Called by one warp. Both split tiles come first, the tail of the
    CTA's first tile and the head of its last, so that their merges overlap with the whole tiles between."""
    more, unit, skipped_begin, end, skipped_count, window = state
    if t == 0 and a.schedule.blocks_per_split == 0 and unit < end:
        last, window = tile_begin(spec, a, end - 1, window)
        skipped_begin, skipped_count = unit, cutlass.max(last - unit, 0)
        unit += skipped_count
    if unit >= end and skipped_count > 0:
        unit, end = skipped_begin, skipped_begin + skipped_count
        skipped_count = Int32(0)
    return SchedulerState(more, unit, skipped_begin, end, skipped_count, window)


@cute.jit
def produce_next(
    spec: cutlass.Constexpr, a, s, t: Int32, cta_units: CtaUnits, state: SchedulerState, pack_factor: Divisor
):
    """Produce the CTA's t-th tile, or an invalid one if there is no more. Called by one warp. pack_factor: rows per
    token. Return the next `SchedulerState`."""
    more, end = Int32(1) if state.unit < state.end else Int32(0), state.end
    w, window, unit = find(spec, a, state.unit, state.window, cta_units._replace(end=end), pack_factor)
    work.produce(s, t, w._replace(is_valid=w.is_valid * more))
    return advance(spec, a, t, SchedulerState(more, unit, state.skipped_begin, end, state.skipped_count, window))


# The schedule warp: one iteration per tile or split of this CTA.
#   waits for   a free stage of work_pipe (4 stages)
#   computes    which tile, and which of its KV blocks, the next units of this CTA belong to
#   signals     work_pipe; an invalid tile after the last one ends the loops of the other roles
# With a PDL prologue, the first tile is found before the previous kernel has ended, and signalled after that
# (`first_work`). Split tiles come before the whole ones, so that their merges overlap with these (`advance`).
@cute.jit
def schedule_warp(spec: cutlass.Constexpr, a, s):
    """Produce all tiles of this CTA, then an invalid one. Called by one warp."""
    pack_factor, none = geometry.group_divisor(a), Int32(0)
    window, cta_units, unit = first_work(spec, a, s, pack_factor)
    work.producer_commit(s, none)
    more = Int32(1) if cta_units.begin < cta_units.end else none
    state, t = advance(spec, a, none, SchedulerState(more, unit, none, cta_units.end, none, window)), Int32(1)
    while state.more != 0:
        state = produce_next(spec, a, s, t, cta_units, state, pack_factor)
        t += 1
