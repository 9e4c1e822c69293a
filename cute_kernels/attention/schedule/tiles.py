"""Persistent tiles: a CTA starts with the tile of its own index and draws later ones from a counter, so that CTAs end
together whatever the lengths; which CTA computes a tile never changes its result. The launch's last draw resets the
counter: no state passes from launch to launch.

Order of the tiles of a launch: requests with more keys come first, by `level`, so that the last tiles are short ones;
at one level, as they come. Tiles of packed rows, which mostly wait for memory, are spread evenly among the others,
which mostly multiply (`spread`).

Within a request (`lpt_order`): KV heads go in sections whose K and V fit the L2 cache together; in a section the last,
under a causal mask the longest, m_block comes first, and all heads of a section work on it before the next. The last
section has as many heads, whatever fits, as make WAVES rounds of the CTAs in the whole launch: the longest tile of
fewer would end after all others.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from ...device import warp
from ...device.divisor import Divisor, factor_of
from .. import geometry, mask
from . import work
from .work import WorkTileInfo

SHORT = 2048  # keys
WAVES = 2
WHOLE = 1 << 31  # the `share` of a kind that has all tiles


class TileSequence(NamedTuple):
    """kind: 1 where its rows are packed. Without tiles, and past the last request, its level is -1."""

    q_start: Int32
    q_len: Int32
    kv_len: Int32
    kind: Int32
    level: Int32
    tiles: Int32


class SearchCursor(NamedTuple):
    """Where a search for a later tile of a kind may begin: at a request, among those of a level; `before` tiles of the
    kind are in front. lower: the highest level below that one that was passed, -1: none."""

    level: Int32
    request: Int32
    before: Int32
    lower: Int32


class SchedulerSmem(NamedTuple):
    """Shared memory of the warp that publishes, which has no registers for it. launch: (3,): tiles, the `share` of
    packed ones, and what makes a `Divisor` of the query heads of a KV head. searches: (4, 2), where one for a tile of a
    kind goes on."""

    launch: cute.Tensor
    searches: cute.Tensor


def allocate(smem) -> SchedulerSmem:
    launch, fields = cute.make_layout(3), cute.make_layout((len(SearchCursor._fields), 2))
    return SchedulerSmem(smem.allocate_tensor(Int32, launch, 16), smem.allocate_tensor(Int32, fields, 16))


def whole_sections(heads, section, ctas, tiles):
    """Sections in front of the last one, which has the heads' share of WAVES rounds of the launch's tiles."""
    last = (WAVES * ctas * heads + tiles - 1) // tiles
    return cutlass.max(0, heads - last) // section


def lpt_order(index, m_blocks, heads, section, whole):
    """index-th tile of a request -> (m_block, head). whole: sections of so many heads in front of the last one."""
    part = cutlass.min(index // (m_blocks * section), whole)
    rest = index - part * m_blocks * section
    before = cutlass.min(1, whole - part)  # 0: the last one
    width = before * section + (1 - before) * (heads - whole * section)
    return m_blocks - 1 - rest // width, part * section + rest % width


def l2_section(kv_len, row_bytes, kv_heads, heads_per_kv, l2_bytes):
    """Heads of a section: as many KV heads as fit l2_bytes, times the heads that share each."""
    fit = cutlass.max(1, l2_bytes // cutlass.max(1, kv_len * row_bytes))
    return cutlass.min(fit, kv_heads) * heads_per_kv


def share(part, total):
    """part / total of a launch's tiles, 0 < part < total, in units of 1 / WHOLE, rounded up."""
    return Uint32((Uint64(part) * Uint64(WHOLE) + Uint64(total - 1)) // Uint64(total))


def spread(tile, part):
    """How many of the first `tile` tiles are of the kind whose `share` is `part`: of all, as many as there are."""
    return Int32(Uint64(Uint32(tile)) * Uint64(part) >> Uint64(31))


@cute.jit
def level_of(kv_len: Int32):
    """One for each power of two, higher for more keys. Short requests, which do not decide when a launch ends, have one
    together: a search looks at all requests once for each level."""
    return warp.bits(Float32(cutlass.max(kv_len, SHORT))) >> 23


@cute.jit
def request_of(spec: cutlass.Constexpr, a, b: Int32):
    """Request b."""
    q_start, q_len, kv_len, kind, level, count = Int32(0), Int32(0), Int32(0), Int32(0), Int32(-1), Int32(0)
    if b < geometry.batch(a):
        q_start, q_len = geometry.request_queries(a, b)
        kv_len = geometry.request_keys(a, b)
        per_token = geometry.rows_per_token(spec, a, q_len)
        kind = cutlass.min(per_token - 1, 1)
        rows = geometry.tile_rows(q_len, per_token)
        m = geometry.tile_m(spec, rows)
        count = (rows + m - 1) // m * geometry.tile_heads(a, kind)
        if count > 0:
            level = level_of(kv_len)
    return TileSequence(q_start, q_len, kv_len, kind, level, count)


@cute.jit
def keep(order: SchedulerSmem, kind, search: SearchCursor):
    """One warp: where the next search for a tile of a kind begins."""
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(search):
            order.searches[i, kind] = value
    cute.arch.sync_warp()


@cute.jit
def begin(spec: cutlass.Constexpr, a, order: SchedulerSmem):
    """One warp: looks at all requests."""
    count, packed, top, top_packed = Int32(0), Int32(0), Int32(-1), Int32(-1)
    for b in cutlass.range(cute.arch.lane_idx(), geometry.batch(a), 32, unroll=1):
        one = request_of(spec, a, b)
        count += one.tiles
        if one.kind != 0:
            packed += one.tiles
            top_packed = cutlass.max(top_packed, one.level)
        else:
            top = cutlass.max(top, one.level)
    count, packed = cute.arch.warp_redux_sync(count, "add"), cute.arch.warp_redux_sync(packed, "add")
    top, top_packed = cute.arch.warp_redux_sync(top, "max"), cute.arch.warp_redux_sync(top_packed, "max")
    part = Uint32(0)
    if packed == count:
        part = Uint32(WHOLE)
    elif packed > 0:
        part = share(packed, count)
    if cute.arch.lane_idx() == 0:
        order.launch[0], order.launch[1], order.launch[2] = count, part.to(Int32), factor_of(geometry.group(a))
    for kind, level in enumerate((top, top_packed)):
        keep(order, kind, SearchCursor(level, Int32(0), Int32(0), Int32(-1)))


@cute.jit
def locate(spec: cutlass.Constexpr, a, kind: Int32, index: Int32, search: SearchCursor):
    """One warp: (the Request of a kind's tile `index`; its number, that of none where lengths have changed since
    `begin`; the tile's index in it; the next SearchCursor), 32 requests at a time."""
    lane, batch = cute.arch.lane_idx(), geometry.batch(a)
    level, first, before, lower = search
    one, mine, upto, searching = TileSequence(*(Int32(0),) * 6), Int32(0), Int32(0), True
    while searching:
        one = request_of(spec, a, first + lane)
        mine = Int32(0)
        if one.kind == kind:
            if one.level == level:
                mine = one.tiles
            elif one.level < level:
                lower = cutlass.max(lower, one.level)
        upto = warp.prefix_sum(mine)
        passed = cute.arch.shuffle_sync(upto, 31)
        searching = index >= before + passed
        if searching:
            before += passed
            first += 32
            if first >= batch:
                level, first, lower = cute.arch.warp_redux_sync(lower, "max"), Int32(0), Int32(-1)
                searching = level >= 0
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= index - before))
    within = index - before - cute.arch.shuffle_sync(upto - mine, owner)
    found = TileSequence(*(cute.arch.shuffle_sync(x, owner) for x in one))
    number = first + owner if owner < 32 else batch
    return found, number, within, SearchCursor(level, first, before, cute.arch.warp_redux_sync(lower, "max"))


@cute.jit
def next_index(a, t: Int32):
    """One warp: the t-th tile of this CTA. The first is its index, later ones come from the launch's counter, which
    hands out exactly as many numbers as the launch has tiles, or in rounds where it has no counter."""
    ctas = cute.arch.grid_dim()[0]
    tile = t * ctas + cute.arch.block_idx()[0]
    if t > 0 and a.schedule.counter_base >= 0:
        got = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = (a.schedule.counters.iterator + a.schedule.counter_base).llvm_ptr
            got = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        tile = ctas + cute.arch.shuffle_sync(got, 0)
    return tile


@cute.jit
def find(spec: cutlass.Constexpr, a, tile: Int32, order: SchedulerSmem):
    """One warp: WorkTileInfo of a tile of the launch."""
    valid, m_block, head, batch, index = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    one, part = TileSequence(*(Int32(0),) * 6), order.launch[1].to(Uint32)
    if tile < order.launch[0]:
        valid, before = Int32(1), spread(tile, part)
        kind = spread(tile + 1, part) - before
        index = tile - before + kind * (2 * before - tile)
        search = SearchCursor(*(order.searches[i, kind] for i in range(len(SearchCursor._fields))))
        one, batch, index, search = locate(spec, a, kind, index, search)
        keep(order, kind, search)
        if batch >= geometry.batch(a):
            valid = Int32(0)
    per_token = geometry.rows_per_token(spec, a, one.q_len)
    rows = geometry.tile_rows(one.q_len, per_token)
    m = geometry.tile_m(spec, rows)
    if valid != 0:
        row_bytes = (spec.head_dim_qk + spec.head_dim_vo) * spec.kv.bits // 8
        heads = geometry.tile_heads(a, one.kind)
        each = geometry.group(a) + 1 - per_token  # heads that share those of K and V
        section = l2_section(one.kv_len, row_bytes, a.kv.k.shape[1], each, spec.tile.l2_bytes)
        m_blocks, whole = (rows + m - 1) // m, Int32(0)
        if section < heads:
            whole = whole_sections(heads, section, cute.arch.grid_dim()[0], order.launch[0])
        m_block, head = lpt_order(index, m_blocks, heads, section, whole)
    n = mask.lengths(spec, a, one.q_len, one.kv_len)
    factor = geometry.factor_of_rows(one.kind, order.launch[2])
    first, last = geometry.tile_tokens(m_block, m, one.q_len, Divisor(per_token, factor))
    blocks = (*mask.kv_range(spec, first, last, n), *mask.full_range(spec, first, last, n))
    w = WorkTileInfo(valid, m_block, head, one.q_start, one.q_len, one.kv_len, batch, *blocks)
    return w._replace(per_token=per_token, factor=factor)


@cute.jit
def publish(spec: cutlass.Constexpr, a, s, t: Int32):
    """One warp: find the CTA's t-th tile and publish it."""
    tile = next_index(a, t)
    w, counters = find(spec, a, tile, s.order), a.schedule.counters
    if w.valid == 0 and t > 0 and a.schedule.counter_base >= 0:
        if cute.arch.lane_idx() == 0 and tile == cute.arch.grid_dim()[0] + s.order.launch[0] - 1:
            counters[a.schedule.counter_base] = 0  # the last draw
    work.publish(s, t, w)
