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

MOST_UNITS = (1 << 31) - 1  # of a launch: CTAs count them in 32 bits


class StreamKSequence(NamedTuple):
    """each: units of a tile."""

    q_start: Int32
    q_len: Int32
    kv_len: Int32
    tiles: Int32
    each: Int32


class SequenceWindow(NamedTuple):
    """32 neighbouring requests, a lane has one: number of the first one, units of all before that, units of these up to
    the lane's own, with it, and its own."""

    first: Int32
    before: Int32
    upto: Int32
    own: StreamKSequence


class UnitCoord(NamedTuple):
    """Where a unit is. valid: 0 past the last unit; number: of the request; index: the unit's, in the request."""

    valid: Int32
    number: Int32
    index: Int32
    request: StreamKSequence


class CtaUnits(NamedTuple):
    """Units of a CTA, [begin, end) of `total`."""

    begin: Int32
    end: Int32
    total: Int32


def first_unit(total, c, ctas):
    """Of CTA c of `ctas`: equal shares, the first ones have the rest."""
    each = divide(total, ctas)
    return each * c + cutlass.min(c, total - each * ctas)


def cta_of_unit(unit, total, ctas):
    """The CTA that has a unit: the inverse of `first_unit`."""
    each = divide(total, ctas)
    rest = total - each * ctas
    early, late = divide(unit, each + 1), divide(cutlass.max(unit - rest, 0), cutlass.max(each, 1))
    return cutlass.max(early, late)


def split_slot(cta, behind, ctas):
    """Where a CTA of `ctas` puts its part of a tile that begins `behind` units, or CTAs, before it. Parts of a tile are
    neighbours, but for the first one."""
    return cta + ctas * cutlass.max(1 - behind, 0)


def slot_of(a, w: WorkTileInfo, part):
    """Slot of a part of a tile."""
    shared = 1 - cutlass.min(a.schedule.blocks_per_split, 1)
    return split_slot(w.split.first + part, part, shared * cute.arch.grid_dim()[0])


def blocks_per_tile(spec, n):
    """KV blocks that any tile of a request visits, but at least one."""
    lo, hi = mask.kv_range(spec, 0, n.q_len - 1, n)
    return cutlass.max(hi - lo, 1)


def units_of_blocks(blocks, blocks_per_split):
    """Units of so many blocks, where each is `blocks_per_split` of them."""
    return divide(blocks + blocks_per_split - 1, blocks_per_split)


def tiles_of_rows(spec, rows):
    """Tiles of so many rows: one that is lower than the highest is alone."""
    most = spec.tile.heights[-1]
    return (rows + most - 1) // most


@cute.jit
def request(spec: cutlass.Constexpr, a, b: Int32):
    """`StreamKSequence` number b; all zeros past the last one."""
    q_start, q_len, kv_len, tiles, each = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if b < geometry.batch(a):
        q_start, q_len = geometry.request_queries(a, b)
        kv_len = geometry.request_keys(a, b)
        rows = geometry.tile_rows(q_len, geometry.rows_per_token(spec, a, q_len))
        tiles = tiles_of_rows(spec, rows) * a.kv.k.shape[1]
        each, split = blocks_per_tile(spec, mask.lengths(spec, a, q_len, kv_len)), a.schedule.blocks_per_split
        if split > 0:
            each = units_of_blocks(each, split)
    return StreamKSequence(q_start, q_len, kv_len, tiles, each)


@cute.jit
def look(spec: cutlass.Constexpr, a, first: Int32, before: Int32):
    """One warp: `SequenceWindow` from `first` on, that have so many units `before` them."""
    own = request(spec, a, first + cute.arch.lane_idx())
    return SequenceWindow(first, before, warp.prefix_sum(own.tiles * own.each), own)


@cute.jit
def locate(spec: cutlass.Constexpr, a, unit: Int32, seen: SequenceWindow):
    """One warp: (UnitCoord, the SequenceWindow among which it is). seen: some, where the search begins."""
    batch = geometry.batch(a)
    behind = seen.before + cute.arch.shuffle_sync(seen.upto, 31)
    while unit < seen.before or (unit >= behind and seen.first + 32 < batch):
        first, before = Int32(0), Int32(0)  # anew, where the unit lies further back
        if unit >= seen.before:
            first, before = seen.first + 32, behind
        seen = look(spec, a, first, before)
        behind = seen.before + cute.arch.shuffle_sync(seen.upto, 31)
    index = unit - seen.before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(seen.upto <= index))
    index -= cute.arch.shuffle_sync(seen.upto - seen.own.tiles * seen.own.each, owner)
    own = StreamKSequence(*(cute.arch.shuffle_sync(x, owner) for x in seen.own))
    valid = Int32(1) if owner < 32 and seen.first + owner < batch else Int32(0)
    return UnitCoord(valid, seen.first + owner, index, own._replace(each=cutlass.max(own.each, 1))), seen


@cute.jit
def total_units(spec: cutlass.Constexpr, a, seen: SequenceWindow):
    """One warp: all units of the launch, 0 where it has no room for them: offsets that fall make requests overlap, and
    so more tiles than rows could have. seen: the first requests."""
    count, room = Int64(seen.own.tiles) * seen.own.each, Int64(MOST_UNITS)
    for b in cutlass.range(cute.arch.lane_idx() + 32, geometry.batch(a), 32, unroll=2):
        more = request(spec, a, b)
        count += Int64(more.tiles) * more.each
    count = cutlass.min(count, Int64(1) << 40)  # its upper part, of 32 lanes, fits 32 bits
    upper = cute.arch.warp_redux_sync(Int32(count >> 16), "add")
    total = (Int64(upper) << 16) + cute.arch.warp_redux_sync(Int32(count & 0xFFFF), "add")
    if a.schedule.blocks_per_split > 0:  # each is a part with a slot
        room = Int64(a.schedule.o_partial.shape[0])
    return Int32(total) if total <= room else Int32(0)


@cute.jit
def cta_share(spec: cutlass.Constexpr, a, seen: SequenceWindow):
    """One warp: the CtaUnits of this CTA. seen: the first requests."""
    total, c, ctas = total_units(spec, a, seen), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return CtaUnits(first_unit(total, c, ctas), first_unit(total, c + 1, ctas), total)


@cute.jit
def tile_begin(spec: cutlass.Constexpr, a, unit: Int32, seen: SequenceWindow):
    """One warp: (first unit of the tile that has `unit`, the SequenceWindow that it is of)."""
    found, seen = locate(spec, a, unit, seen)
    each = found.request.each
    return unit - (found.index - divide(found.index, each) * each), seen


@cute.jit
def find(spec: cutlass.Constexpr, a, unit: Int32, seen: SequenceWindow, share: CtaUnits, per_token: Divisor):
    """One warp: (WorkTileInfo that begins with `unit`, the SequenceWindow that it is of, the unit behind). per_token:
    rows."""
    found, seen = locate(spec, a, unit, seen)
    q_start, q_len, kv_len, _, each = found.request
    split, rows = a.schedule.blocks_per_split, geometry.tile_rows(q_len, per_token)
    m, m_blocks = geometry.tile_m(spec, rows), tiles_of_rows(spec, rows)
    tile = divide(found.index, each)
    m_block, head, offset = Int32(0), tile, found.index - tile * each
    if m_blocks > 1:
        head = divide(tile, m_blocks)
        m_block = tile - head * m_blocks
    n = mask.lengths(spec, a, q_len, kv_len)
    first, last = geometry.tile_tokens(m_block, m, q_len, per_token)
    lo, hi = mask.kv_range(spec, first, last, n)
    slot, taken, count, base = Int32(-1), Int32(1), each, unit - offset
    ctas = cute.arch.grid_dim()[0]
    if split == 0:
        taken = cutlass.min(each - offset, share.end - unit)
        if taken < each:  # lane 0 looks where the tile begins, lane 1 where it ends
            end = cta_of_unit(unit - offset + cute.arch.lane_idx() % 2 * (each - 1), share.total, ctas)
            base = cute.arch.shuffle_sync(end, 0)
            count = cute.arch.shuffle_sync(end, 1) - base + 1
    per = cutlass.max(split, 1)
    begins = mask.kv_range(spec, 0, q_len - 1, n)[0] + offset * per
    lo, hi = cutlass.max(lo, begins), cutlass.min(hi, begins + taken * per)
    if taken < each:
        slot = unit if split > 0 else split_slot(cute.arch.block_idx()[0], offset, ctas)
    blocks = (lo, hi, *mask.full_range(spec, first, last, n), SplitInfo(slot, count, base))
    w = WorkTileInfo(found.valid, m_block, head, q_start, q_len, kv_len, found.number, *blocks)
    if const_expr(spec.tile.knows_rows):
        w = w._replace(per_token=per_token.value, factor=Int32(per_token.magic))
    return w, seen, unit + taken


@cute.jit
def first_work(spec: cutlass.Constexpr, a, s, per_token: Divisor):
    """One warp: write what the CTA begins with. Returns (the SequenceWindow that it is of, the CTA's CtaUnits, the unit
    behind). In kernels that guess, and of at most 32 requests, it is found while the launch before still runs, and
    found anew only where another look at the requests, when that launch has ended, says that they have changed. A loop,
    so that the code that finds it is there once."""
    hints, few, last = pdl.unsettled(spec, a), geometry.batch(a) <= 32, const_expr(int(pdl.guesses(spec)))
    zero = Int32(0)
    number, keys = zero, zero
    seen, share, unit = SequenceWindow(zero, zero, zero, StreamKSequence(*[zero] * 5)), CtaUnits(zero, zero, zero), zero
    for attempt in cutlass.range(last + 1, unroll=1):
        now, first = look(spec, hints, zero, zero), zero - 1
        changed = now.own.q_start != seen.own.q_start or now.own.q_len != seen.own.q_len
        changed = cute.arch.vote_any_sync(changed or now.own.kv_len != seen.own.kv_len)
        if (few and attempt < last) or (attempt == last and (not few or changed or last == 0)):
            share = cta_share(spec, hints, now)
            w, seen, unit = find(spec, hints, share.begin, now, share, per_token)
            more = Int32(1) if share.begin < share.end else Int32(0)
            work.write(s, zero, w._replace(valid=w.valid * more))
            if w.valid * more != 0 and a.kv.kv_starts.shape[0] == 0:  # rows of a table, whose room bounds any guess
                first = w.hi - 1
            number, keys = w.batch, w.kv_len
        if const_expr(last > 0):
            if attempt < last:
                if cute.arch.lane_idx() == 0:
                    s.guess[0], s.guess[1], s.guess[2] = number, first, keys
                cute.arch.barrier_arrive(barrier_id=pdl.BARRIER, number_of_threads=pdl.threads(spec))
                cute.arch.griddepcontrol_wait()
    return seen, share, unit


class SchedulerState(NamedTuple):
    """Where a CTA's warp that publishes is. more: whether what it published last was work. unit, end: of the share, to
    publish yet. passed, left: the first unit that was passed over, and how many. seen: requests, where a search
    begins."""

    more: Int32
    unit: Int32
    passed: Int32
    end: Int32
    left: Int32
    seen: SequenceWindow


@cute.jit
def begin(spec: cutlass.Constexpr, a):
    """One warp: (the CtaUnits of this CTA, its first SchedulerState)."""
    none = Int32(0)
    seen = look(spec, a, none, none)
    share = cta_share(spec, a, seen)
    return share, SchedulerState(Int32(1), share.begin, none, share.end, none, seen)


@cute.jit
def behind(spec: cutlass.Constexpr, a, t: Int32, at: SchedulerState):
    """One warp: the SchedulerState behind the CTA's t-th work. Both shared tiles come first, the tail of the first and
    the head of the last, so that their merges overlap with the whole tiles between."""
    more, unit, passed, end, left, seen = at
    if t == 0 and a.schedule.blocks_per_split == 0 and unit < end:
        last, seen = tile_begin(spec, a, end - 1, seen)
        passed, left = unit, cutlass.max(last - unit, 0)
        unit += left
    if unit >= end and left > 0:
        unit, end = passed, passed + left
        left = Int32(0)
    return SchedulerState(more, unit, passed, end, left, seen)


@cute.jit
def publish_next(spec: cutlass.Constexpr, a, s, t: Int32, share: CtaUnits, at: SchedulerState, per_token: Divisor):
    """One warp: publish the CTA's t-th work, or that there is no more. per_token: rows. Returns the next
    SchedulerState."""
    more, end = Int32(1) if at.unit < at.end else Int32(0), at.end
    w, seen, unit = find(spec, a, at.unit, at.seen, CtaUnits(share.begin, end, share.total), per_token)
    work.publish(s, t, w._replace(valid=w.valid * more))
    return behind(spec, a, t, SchedulerState(more, unit, at.passed, end, at.left, seen))


@cute.jit
def schedule_warp(spec: cutlass.Constexpr, a, s):
    """One warp: publish the CTA's work, and that there is no more."""
    per_token, none = Divisor(geometry.group(a)), Int32(0)
    seen, share, unit = first_work(spec, a, s, per_token)
    work.announce(s, none)
    more = Int32(1) if share.begin < share.end else none
    at, t = behind(spec, a, none, SchedulerState(more, unit, none, share.end, none, seen)), Int32(1)
    while at.more != 0:
        at = publish_next(spec, a, s, t, share, at, per_token)
        t += 1
