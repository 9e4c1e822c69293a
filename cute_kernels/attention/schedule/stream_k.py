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
from ...device.divisor import factor_of
from .. import geometry, mask
from . import work
from .work import Split, Work

MOST_UNITS = (1 << 31) - 1  # of a launch: CTAs count them in 32 bits


class RequestTiles(NamedTuple):
    """Zeros past the last request."""

    q_start: Int32
    q_len: Int32
    tiles: Int32
    each: Int32  # units of a tile


class Search(NamedTuple):
    """Where a search for a later unit may begin: a request, and the units of the requests before it."""

    request: Int32
    before: Int32


class Found(NamedTuple):
    """The request that a unit belongs to. valid: 0 past the last unit. index: the unit's, in the request."""

    valid: Int32
    request: Int32
    index: Int32
    q_start: Int32
    q_len: Int32
    each: Int32


class Share(NamedTuple):
    """Units of a CTA, [begin, end) of `total`."""

    begin: Int32
    end: Int32
    total: Int32


class Units(NamedTuple):
    """tile: first unit of the tile; end: the unit behind the work."""

    tile: Int32
    end: Int32


def first_unit(total, c, ctas):
    """Of CTA c of `ctas`: equal shares, the first ones have the rest."""
    return total // ctas * c + cutlass.min(c, total % ctas)


def cta_of_unit(unit, total, ctas):
    """The CTA that has a unit: the inverse of `first_unit`."""
    each, rest = total // ctas, total % ctas
    return cutlass.max(unit // (each + 1), (unit - rest) // cutlass.max(each, 1))


def split_slot(cta, behind):
    """Where a CTA puts its part of a tile that begins `behind` units, or CTAs, before it."""
    return 2 * cta + cutlass.max(1 - behind, 0)


@cute.jit
def slot_of(a, w: Work, part: Int32):
    """Slot of a part of a tile."""
    slot = w.split.first + part
    if a.schedule.blocks_per_split == 0:
        slot = split_slot(slot, part)
    return slot


def units_per_tile(spec, n, blocks_per_split):
    """Units of a tile of a request: KV blocks that any of its tiles visits, but at least one; `blocks_per_split`
    blocks each, where that is not 0."""
    lo, hi = mask.kv_range(spec, 0, n.q_len - 1, n)
    per = cutlass.max(blocks_per_split, 1)
    return (cutlass.max(hi - lo, 1) + per - 1) // per


@cute.jit
def request_tiles(spec: cutlass.Constexpr, a, b: Int32):
    """RequestTiles of a request."""
    q_start, q_len, tiles, each = Int32(0), Int32(0), Int32(0), Int32(0)
    if b < geometry.batch(a):
        q_start, q_len = geometry.request_queries(a, b)
        per_token = geometry.rows_per_token(spec, a, q_len)
        rows = geometry.tile_rows(q_len, per_token)
        m = geometry.tile_m(spec, rows)
        tiles = (rows + m - 1) // m * a.kv.k.shape[1]
        n = mask.lengths(spec, a, q_len, geometry.request_keys(a, b))
        each = units_per_tile(spec, n, a.schedule.blocks_per_split)
    return RequestTiles(q_start, q_len, tiles, each)


@cute.jit
def locate(spec: cutlass.Constexpr, a, unit: Int32, search: Search):
    """One warp: (Found, the next Search), 32 requests at a time from search.request on."""
    lane, batch = cute.arch.lane_idx(), geometry.batch(a)
    start, before = search.request, search.before
    q_start, q_len, tiles, each, upto = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    searching = start < batch
    while searching:
        q_start, q_len, tiles, each = request_tiles(spec, a, start + lane)
        upto = warp.prefix_sum(tiles * each)
        total = cute.arch.shuffle_sync(upto, 31)
        searching = unit >= before + total
        if searching:
            before += total
            start += 32
            searching = start < batch
    index = unit - before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= index))
    valid = Int32(0)
    if owner < 32 and start + owner < batch:
        valid = Int32(1)
    index -= cute.arch.shuffle_sync(upto - tiles * each, owner)
    q_start, q_len = cute.arch.shuffle_sync(q_start, owner), cute.arch.shuffle_sync(q_len, owner)
    each = cute.arch.shuffle_sync(each, owner)
    return Found(valid, start + owner, index, q_start, q_len, each), Search(start, before)


@cute.jit
def total_units(spec: cutlass.Constexpr, a):
    """One warp: all units of the launch, 0 where it has no room for them: offsets that fall make requests overlap, and
    so more tiles than rows could have."""
    count, room = Int64(0), Int64(MOST_UNITS)
    for b in cutlass.range(cute.arch.lane_idx(), geometry.batch(a), 32, unroll=2):
        _, _, tiles, each = request_tiles(spec, a, b)
        count += Int64(tiles) * each
    count = cutlass.min(count, Int64(1) << 40)  # its upper part, of 32 lanes, fits 32 bits
    upper = cute.arch.warp_redux_sync(Int32(count >> 16), "add")
    total = (Int64(upper) << 16) + cute.arch.warp_redux_sync(Int32(count & 0xFFFF), "add")
    if a.schedule.blocks_per_split > 0:  # each is a part with a slot
        room = Int64(a.schedule.o_partial.shape[0])
    return Int32(total) if total <= room else Int32(0)


@cute.jit
def cta_share(spec: cutlass.Constexpr, a):
    """One warp: the Share of this CTA."""
    total, c, ctas = total_units(spec, a), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return Share(first_unit(total, c, ctas), first_unit(total, c + 1, ctas), total)


@cute.jit
def find(spec: cutlass.Constexpr, a, unit: Int32, search: Search, share: Share):
    """One warp: (Work that begins with `unit`, the next Search, Units)."""
    found, search = locate(spec, a, unit, search)
    per_token = geometry.rows_per_token(spec, a, found.q_len)
    each, split = found.each, a.schedule.blocks_per_split
    kv_len, m_block, head, offset = Int32(0), Int32(0), Int32(0), Int32(0)
    rows = geometry.tile_rows(found.q_len, per_token)
    m = geometry.tile_m(spec, rows)
    if found.valid != 0:
        kv_len = geometry.request_keys(a, found.request)
        m_blocks = (rows + m - 1) // m
        tile = found.index // each
        offset = found.index - tile * each
        m_block, head = tile % m_blocks, tile // m_blocks
    n = mask.lengths(spec, a, found.q_len, kv_len)
    first, last = geometry.tile_tokens(m_block, m, found.q_len, per_token)
    lo, hi = mask.kv_range(spec, first, last, n)
    slot, taken, count, base = Int32(-1), Int32(1), each, unit - offset
    ctas = cute.arch.grid_dim()[0]
    if split == 0:
        taken = cutlass.min(each - offset, share.end - unit)
        base = cta_of_unit(unit - offset, share.total, ctas)
        count = cta_of_unit(unit - offset + each - 1, share.total, ctas) - base + 1
    per = cutlass.max(split, 1)
    begins = mask.kv_range(spec, 0, found.q_len - 1, n)[0] + offset * per
    lo, hi = cutlass.max(lo, begins), cutlass.min(hi, begins + taken * per)
    if taken < each:
        slot = unit if split > 0 else split_slot(cute.arch.block_idx()[0], offset)
    blocks = (lo, hi, *mask.full_range(spec, first, last, n), Split(slot, count, base))
    w = Work(found.valid, m_block, head, found.q_start, found.q_len, kv_len, found.request, *blocks)
    if const_expr(spec.tile.knows_rows):
        w = w._replace(per_token=per_token, factor=factor_of(per_token))
    return w, search, Units(unit - offset, unit + taken)


@cute.jit
def publish(spec: cutlass.Constexpr, a, s, t: Int32, unit: Int32, search: Search, share: Share):
    """One warp: find the work that begins with `unit` and publish it as the CTA's t-th; none at share.end. Returns
    (the next Search, the unit behind)."""
    w, search, units = find(spec, a, unit, search, share)
    valid = w.valid
    if unit >= share.end:
        valid = Int32(0)
    work.publish(s, t, Work(valid, *w[1:]))
    return search, units.end


class Round(NamedTuple):
    """Where a CTA's warp that publishes is. more: whether what it published last was work. unit, end: of the share, to
    publish yet. passed, left: the first unit that was passed over, and how many."""

    more: Int32
    unit: Int32
    passed: Int32
    end: Int32
    left: Int32
    search: Search


@cute.jit
def begin(spec: cutlass.Constexpr, a):
    """One warp: (the Share of this CTA, its first Round)."""
    share, none = cta_share(spec, a), Int32(0)
    return share, Round(Int32(1), share.begin, none, share.end, none, Search(none, none))


@cute.jit
def publish_next(spec: cutlass.Constexpr, a, s, t: Int32, share: Share, at: Round):
    """One warp: publish the CTA's t-th work, or that there is no more. Both shared tiles come first, the tail of the
    first and the head of the last, so that their merges overlap with the whole tiles between. Returns the next Round.
    """
    _, unit, passed, end, left, search = at
    more = Int32(1) if unit < end else Int32(0)
    search, unit = publish(spec, a, s, t, unit, search, Share(share.begin, end, share.total))
    if t == 0 and a.schedule.blocks_per_split == 0 and unit < end:
        _, search, units = find(spec, a, end - 1, search, Share(share.begin, end, share.total))
        passed, left = unit, cutlass.max(units.tile - unit, 0)
        unit += left
    if unit >= end and left > 0:
        unit, end = passed, passed + left
        search, left = Search(Int32(0), Int32(0)), Int32(0)
    return Round(more, unit, passed, end, left, search)


@cute.jit
def schedule_warp(spec: cutlass.Constexpr, a, s):
    """One warp: publish the CTA's work, and that there is no more."""
    share, at = begin(spec, a)
    t = Int32(0)
    while at.more != 0:
        at = publish_next(spec, a, s, t, share, at)
        t += 1
