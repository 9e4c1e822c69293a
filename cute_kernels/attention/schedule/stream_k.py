"""Stream-K: the unit of work is a KV block of a tile. CTA c gets the units [c, c + 1) / CTAs of all there are, in the
order of tiles, and so parts of tiles, at most one whose begin and one whose end another CTA has; `combine` merges them.
With blocks_per_split a unit is that many blocks, and each is a part of its own: where a request's parts end, and so its
bits, do not depend on the rest of the batch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import warp
from ...device.divisor import Divisor, divide
from .. import geometry, mask, pdl
from . import work
from .work import SplitInfo, WorkTileInfo

MAX_UNITS = (1 << 31) - 1  # of a launch: CTAs count them in 32 bits


class StreamKSequence(NamedTuple):
    """each: units of a tile."""

    q_start: Int32
    q_len: Int32
    kv_len: Int32
    num_tiles: Int32
    units_per_tile: Int32


class SequenceWindow(NamedTuple):
    """32 neighbouring requests, a lane has one: number of the first one, units of all before that, units of these up to
    the lane's own, with it, and its own."""

    first_batch_idx: Int32
    units_before: Int32
    units_upto: Int32
    own: StreamKSequence


class UnitCoord(NamedTuple):
    """Where a unit is. valid: 0 past the last unit; number: of the request; index: the unit's, in the request."""

    is_valid: Int32
    batch_idx: Int32
    index: Int32
    sequence: StreamKSequence


class CtaUnits(NamedTuple):
    """Units of a CTA, [begin, end) of `total`."""

    begin: Int32
    end: Int32
    total: Int32


def first_unit(total, c, ctas):
    """Of CTA c of `ctas`: equal shares, the first ones have the rest."""
    units_per_cta = divide(total, ctas)
    return units_per_cta * c + cutlass.min(c, total - units_per_cta * ctas)


def cta_of_unit(unit, total, ctas):
    """The CTA that has a unit: the inverse of `first_unit`."""
    units_per_cta = divide(total, ctas)
    rest = total - units_per_cta * ctas
    in_larger, in_smaller = (
        divide(unit, units_per_cta + 1),
        divide(cutlass.max(unit - rest, 0), cutlass.max(units_per_cta, 1)),
    )
    return cutlass.max(in_larger, in_smaller)


def split_slot(cta, behind, ctas):
    """Where a CTA of `ctas` puts its part of a tile that begins `behind` units, or CTAs, before it. Parts of a tile are
    neighbours, but for the first one."""
    return cta + ctas * cutlass.max(1 - behind, 0)


def slot_of(a, w: WorkTileInfo, split_idx):
    """Slot of a part of a tile."""
    shared = 1 - cutlass.min(a.schedule.blocks_per_split, 1)
    return split_slot(w.split.first + split_idx, split_idx, shared * cute.arch.grid_dim()[0])


def blocks_per_tile(spec, seqlen):
    """KV blocks that any tile of a request visits, but at least one."""
    lo, hi = mask.kv_range(spec, 0, seqlen.q_len - 1, seqlen)
    return cutlass.max(hi - lo, 1)


def units_of_blocks(blocks, blocks_per_split):
    """Units of so many blocks, where each is `blocks_per_split` of them."""
    return divide(blocks + blocks_per_split - 1, blocks_per_split)


def tiles_of_rows(spec, rows):
    """Tiles of so many rows: one that is lower than the highest is alone."""
    most = spec.tile.m_choices[-1]
    return (rows + most - 1) // most


@cute.jit
def load_sequence(spec: cutlass.Constexpr, a, b: Int32):
    """`StreamKSequence` number b; all zeros past the last one."""
    q_start, q_len, kv_len, num_tiles, units_per_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if b < geometry.batch_size(a):
        q_start, q_len = geometry.sequence_queries(a, b)
        kv_len = geometry.sequence_keys(a, b)
        rows = geometry.num_rows(q_len, geometry.pack_factor(spec, a, q_len))
        num_tiles = tiles_of_rows(spec, rows) * a.kv.k.shape[1]
        units_per_tile, split = (
            blocks_per_tile(spec, mask.seqlen_info(spec, a, q_len, kv_len)),
            a.schedule.blocks_per_split,
        )
        if split > 0:
            units_per_tile = units_of_blocks(units_per_tile, split)
    return StreamKSequence(q_start, q_len, kv_len, num_tiles, units_per_tile)


@cute.jit
def load_window(spec: cutlass.Constexpr, a, first_batch_idx: Int32, units_before: Int32):
    """One warp: `SequenceWindow` from `first_batch_idx` on, that have so many units `units_before` them."""
    own = load_sequence(spec, a, first_batch_idx + cute.arch.lane_idx())
    return SequenceWindow(first_batch_idx, units_before, warp.prefix_sum(own.num_tiles * own.units_per_tile), own)


@cute.jit
def locate(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow):
    """One warp: (UnitCoord, the SequenceWindow among which it is). seen: some, where the search begins."""
    batch_size = geometry.batch_size(a)
    units_behind = window.units_before + cute.arch.shuffle_sync(window.units_upto, 31)
    while unit < window.units_before or (unit >= units_behind and window.first_batch_idx + 32 < batch_size):
        first_batch_idx, units_before = Int32(0), Int32(0)  # anew, where the unit lies further back
        if unit >= window.units_before:
            first_batch_idx, units_before = window.first_batch_idx + 32, units_behind
        window = load_window(spec, a, first_batch_idx, units_before)
        units_behind = window.units_before + cute.arch.shuffle_sync(window.units_upto, 31)
    index = unit - window.units_before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(window.units_upto <= index))
    index -= cute.arch.shuffle_sync(window.units_upto - window.own.num_tiles * window.own.units_per_tile, owner)
    own = StreamKSequence(*(cute.arch.shuffle_sync(x, owner) for x in window.own))
    is_valid = Int32(1) if owner < 32 and window.first_batch_idx + owner < batch_size else Int32(0)
    return UnitCoord(
        is_valid, window.first_batch_idx + owner, index, own._replace(units_per_tile=cutlass.max(own.units_per_tile, 1))
    ), window


@cute.jit
def total_units(spec: cutlass.Constexpr, a, window: SequenceWindow):
    """One warp: all units of the launch, 0 where it has no room for them: offsets that fall make requests overlap, and
    so more tiles than rows could have. seen: the first requests."""
    count, room = Int64(window.own.num_tiles) * window.own.units_per_tile, Int64(MAX_UNITS)
    for b in cutlass.range(cute.arch.lane_idx() + 32, geometry.batch_size(a), 32, unroll=2):
        more = load_sequence(spec, a, b)
        count += Int64(more.num_tiles) * more.units_per_tile
    count = cutlass.min(count, Int64(1) << 40)  # its upper part, of 32 lanes, fits 32 bits
    upper = cute.arch.warp_redux_sync(Int32(count >> 16), "add")
    total = (Int64(upper) << 16) + cute.arch.warp_redux_sync(Int32(count & 0xFFFF), "add")
    if a.schedule.blocks_per_split > 0:  # each is a part with a slot
        room = Int64(a.schedule.o_partial.shape[0])
    return Int32(total) if total <= room else Int32(0)


@cute.jit
def cta_share(spec: cutlass.Constexpr, a, window: SequenceWindow):
    """One warp: the CtaUnits of this CTA. seen: the first requests."""
    total, c, ctas = total_units(spec, a, window), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return CtaUnits(first_unit(total, c, ctas), first_unit(total, c + 1, ctas), total)


@cute.jit
def tile_begin(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow):
    """One warp: (first unit of the tile that has `unit`, the SequenceWindow that it is of)."""
    found, window = locate(spec, a, unit, window)
    units_per_tile = found.sequence.units_per_tile
    return unit - (found.index - divide(found.index, units_per_tile) * units_per_tile), window


@cute.jit
def find(spec: cutlass.Constexpr, a, unit: Int32, window: SequenceWindow, cta_units: CtaUnits, pack_factor: Divisor):
    """One warp: (WorkTileInfo that begins with `unit`, the SequenceWindow that it is of, the unit behind). per_token:
    rows."""
    found, window = locate(spec, a, unit, window)
    q_start, q_len, kv_len, _, units_per_tile = found.sequence
    split, rows = a.schedule.blocks_per_split, geometry.num_rows(q_len, pack_factor)
    m, m_blocks = geometry.tile_m(spec, rows), tiles_of_rows(spec, rows)
    tile = divide(found.index, units_per_tile)
    m_block, head, offset = Int32(0), tile, found.index - tile * units_per_tile
    if m_blocks > 1:
        head = divide(tile, m_blocks)
        m_block = tile - head * m_blocks
    seqlen = mask.seqlen_info(spec, a, q_len, kv_len)
    first, last = geometry.tile_tokens(m_block, m, q_len, pack_factor)
    lo, hi = mask.kv_range(spec, first, last, seqlen)
    slot, taken, count, base = Int32(-1), Int32(1), units_per_tile, unit - offset
    ctas = cute.arch.grid_dim()[0]
    if split == 0:
        taken = cutlass.min(units_per_tile - offset, cta_units.end - unit)
        if taken < units_per_tile:  # lane 0 looks where the tile begins, lane 1 where it ends
            end = cta_of_unit(unit - offset + cute.arch.lane_idx() % 2 * (units_per_tile - 1), cta_units.total, ctas)
            base = cute.arch.shuffle_sync(end, 0)
            count = cute.arch.shuffle_sync(end, 1) - base + 1
    per = cutlass.max(split, 1)
    begins = mask.kv_range(spec, 0, q_len - 1, seqlen)[0] + offset * per
    lo, hi = cutlass.max(lo, begins), cutlass.min(hi, begins + taken * per)
    if taken < units_per_tile:
        slot = unit if split > 0 else split_slot(cute.arch.block_idx()[0], offset, ctas)
    blocks = (lo, hi, *mask.full_range(spec, first, last, seqlen), SplitInfo(slot, count, base))
    w = WorkTileInfo(found.is_valid, m_block, head, q_start, q_len, kv_len, found.batch_idx, *blocks)
    if const_expr(spec.tile.per_tile_pack_gqa):
        w = w._replace(pack_factor=pack_factor.value, pack_magic=Int32(pack_factor.magic))
    return w, window, unit + taken


@cute.jit
def first_work(spec: cutlass.Constexpr, a, s, pack_factor: Divisor):
    """One warp: write what the CTA begins with. Returns (the SequenceWindow that it is of, the CTA's CtaUnits, the unit
    behind). In kernels that guess, and of at most 32 requests, it is found while the launch before still runs, and
    found anew only where another look at the requests, when that launch has ended, says that they have changed. A loop,
    so that the code that finds it is there once."""
    hints, few, last = pdl.uncached_args(spec, a), geometry.batch_size(a) <= 32, const_expr(int(pdl.has_prologue(spec)))
    zero = Int32(0)
    batch_idx, keys = zero, zero
    window, cta_units, unit = (
        SequenceWindow(zero, zero, zero, StreamKSequence(*[zero] * 5)),
        CtaUnits(zero, zero, zero),
        zero,
    )
    for attempt in cutlass.range(last + 1, unroll=1):
        now, first = load_window(spec, hints, zero, zero), zero - 1
        changed = now.own.q_start != window.own.q_start or now.own.q_len != window.own.q_len
        changed = cute.arch.vote_any_sync(changed or now.own.kv_len != window.own.kv_len)
        if (few and attempt < last) or (attempt == last and (not few or changed or last == 0)):
            cta_units = cta_share(spec, hints, now)
            w, window, unit = find(spec, hints, cta_units.begin, now, cta_units, pack_factor)
            more = Int32(1) if cta_units.begin < cta_units.end else Int32(0)
            work.producer_write(s, zero, w._replace(is_valid=w.is_valid * more))
            if w.is_valid * more != 0 and a.kv.kv_starts.shape[0] == 0:  # rows of a table, whose room bounds any guess
                first = w.n_block_max - 1
            batch_idx, keys = w.batch_idx, w.kv_len
        if const_expr(last > 0):
            if attempt < last:
                if cute.arch.lane_idx() == 0:
                    s.prologue_work[0], s.prologue_work[1], s.prologue_work[2] = batch_idx, first, keys
                cute.arch.barrier_arrive(barrier_id=pdl.PROLOGUE_BARRIER, number_of_threads=pdl.prologue_threads(spec))
                cute.arch.griddepcontrol_wait()
    return window, cta_units, unit


class SchedulerState(NamedTuple):
    """Where a CTA's warp that publishes is. more: whether what it published last was work. unit, end: of the share, to
    publish yet. passed, left: the first unit that was passed over, and how many. seen: requests, where a search
    begins."""

    more: Int32
    unit: Int32
    skipped_begin: Int32
    end: Int32
    skipped_count: Int32
    window: SequenceWindow


@cute.jit
def begin(spec: cutlass.Constexpr, a):
    """One warp: (the CtaUnits of this CTA, its first SchedulerState)."""
    none = Int32(0)
    window = load_window(spec, a, none, none)
    cta_units = cta_share(spec, a, window)
    return cta_units, SchedulerState(Int32(1), cta_units.begin, none, cta_units.end, none, window)


@cute.jit
def advance(spec: cutlass.Constexpr, a, t: Int32, state: SchedulerState):
    """One warp: the SchedulerState behind the CTA's t-th work. Both shared tiles come first, the tail of the first and
    the head of the last, so that their merges overlap with the whole tiles between."""
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
    """One warp: publish the CTA's t-th work, or that there is no more. per_token: rows. Returns the next
    SchedulerState."""
    more, end = Int32(1) if state.unit < state.end else Int32(0), state.end
    w, window, unit = find(
        spec, a, state.unit, state.window, CtaUnits(cta_units.begin, end, cta_units.total), pack_factor
    )
    work.produce(s, t, w._replace(is_valid=w.is_valid * more))
    return advance(spec, a, t, SchedulerState(more, unit, state.skipped_begin, end, state.skipped_count, window))


@cute.jit
def schedule_warp(spec: cutlass.Constexpr, a, s):
    """One warp: publish the CTA's work, and that there is no more."""
    pack_factor, none = Divisor(geometry.qhead_per_kvhead(a)), Int32(0)
    window, cta_units, unit = first_work(spec, a, s, pack_factor)
    work.producer_commit(s, none)
    more = Int32(1) if cta_units.begin < cta_units.end else none
    state, t = advance(spec, a, none, SchedulerState(more, unit, none, cta_units.end, none, window)), Int32(1)
    while state.more != 0:
        state = produce_next(spec, a, s, t, cta_units, state, pack_factor)
        t += 1
