"""Tile scheduler: which (request, head, m_block) a CTA works on, computed on the device from the lengths.

Tile t of a launch belongs to the request whose tiles cover t. A CTA starts with the tile of its own index and draws
later ones from a counter, so that CTAs end together whatever the lengths; which CTA computes a tile never changes its
result. The launch's last ticket resets the counter: nothing is planned, and no state passes from launch to launch.

With spec.split the unit of work is not a tile but a KV block of a tile: CTA c gets the blocks [c, c + 1) / CTAs of all
there are, in the order of tiles, and so parts of tiles, at most one whose begin and one whose end another CTA has. With
args.chunk a unit is that many blocks, and each is a part of its own: where a request's parts end, and so its bits, do
not depend on the rest of the batch.

Within a request (`order`): KV heads go in sections whose K and V fit the L2 cache together; in a section the last,
under a causal mask the longest, m_block comes first, and all heads of a section work on it before the next.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device import pipe, warp
from . import geometry, mask

L2_BYTES = 16 << 20  # of K and V at work at a time; Hopper's L2 is 50 MB in two halves


class Work(NamedTuple):
    """A tile, and what every role needs to know of its request. KV blocks: [lo, hi) have a key that a row of the tile
    sees (none where hi <= lo), [full_lo, full_hi) need no mask. slot: where the part of a tile goes, whole ones
    have -1; parts: of the tile; base: the CTA, or with args.chunk the slot, of the first."""

    valid: Int32
    m_block: Int32
    head: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    batch: Int32
    lo: Int32
    hi: Int32
    full_lo: Int32
    full_hi: Int32
    slot: Int32
    parts: Int32
    base: Int32


FIELDS = len(Work._fields)


def stages(spec):
    """Tiles that are published and not released: one of them is worked on, one loaded, and decoding's stay longer."""
    return 4 if spec.split else 2


def order(index, m_blocks, heads, section):
    """index-th tile of a request -> (m_block, head)."""
    part = index // (m_blocks * section)
    rest = index - part * m_blocks * section
    width = cutlass.min(section, heads - part * section)
    return m_blocks - 1 - rest // width, part * section + rest % width


def section_heads(kv_len, row_bytes, kv_heads, fold):
    """Heads of a section: as many KV heads as fit L2_BYTES, times the query heads (`fold`) that share each."""
    fit = cutlass.max(1, L2_BYTES // cutlass.max(1, kv_len * row_bytes))
    return cutlass.min(fit, kv_heads) * fold


def share(units, c, ctas):
    """First of the units of CTA c of `ctas`: equal shares, the first ones have the rest."""
    return units // ctas * c + cutlass.min(c, units % ctas)


def holder(unit, units, ctas):
    """The CTA that has a unit: the inverse of `share`."""
    each, rest = units // ctas, units % ctas
    return cutlass.max(unit // (each + 1), (unit - rest) // cutlass.max(each, 1))


def slot(cta, behind):
    """Where a CTA puts its part of a tile that begins `behind` units, or CTAs, before it."""
    return 2 * cta + cutlass.max(1 - behind, 0)


def weight(spec, n, chunk):
    """Units of a tile of a request: KV blocks that any of its tiles visits, but at least one, where tiles are split;
    `chunk` blocks each, where that is not 0."""
    if not spec.split:
        return Int32(1)
    lo, hi = mask.kv_range(spec, 0, n.q_len - 1, n)
    per = cutlass.max(chunk, 1)
    return (cutlass.max(hi - lo, 1) + per - 1) // per


def lengths(spec, a, q_len, kv_len):
    return mask.Lengths(q_len, kv_len, a.window_left, cutlass.min(a.drafts.shape[0], 1) if spec.split else 0)


def tile_heads(spec, a):
    """Heads that tiles are counted by."""
    return a.k.shape[1] if spec.pack_gqa else a.q.shape[1]


@cute.jit
def look(spec: cutlass.Constexpr, a, b: Int32):
    """(first query token, query tokens, tiles, units of a tile) of a request, zeros past the last."""
    q_start, q_len, tiles, each = Int32(0), Int32(0), Int32(0), Int32(0)
    if b < a.kv_lens.shape[0]:
        q_start = a.cu_seqlens_q[b]
        q_len = a.cu_seqlens_q[b + 1] - q_start
        rows = geometry.tile_rows(q_len, geometry.fold(spec, a))
        m = geometry.tile_m(spec, rows)
        tiles = (rows + m - 1) // m * tile_heads(spec, a)
        each = weight(spec, lengths(spec, a, q_len, a.kv_lens[b] if cutlass.const_expr(spec.split) else 0), a.chunk)
    return q_start, q_len, tiles, each


@cute.jit
def units(spec: cutlass.Constexpr, a):
    """One warp: all units of the launch."""
    count = Int32(0)
    for b in cutlass.range(cute.arch.lane_idx(), a.kv_lens.shape[0], 32, unroll=4):
        _, _, tiles, each = look(spec, a, b)
        count += tiles * each
    return cute.arch.warp_redux_sync(count, "add")


@cute.jit
def begin(spec: cutlass.Constexpr, a):
    """One warp: (first unit of this CTA, (behind its last, units of all)), where tiles are split."""
    count, c, ctas = units(spec, a), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return share(count, c, ctas), (share(count, c + 1, ctas), count)


@cute.jit
def draw(a, t: Int32):
    """One warp: the t-th tile of this CTA. The first is its index, later ones come from the launch's counter, which
    hands out exactly as many tickets as the launch has tiles, or in rounds where it has no counter."""
    ctas = cute.arch.grid_dim()[0]
    tile = t * ctas + cute.arch.block_idx()[0]
    if t > 0 and a.ticket >= 0:
        got = Int32(0)
        if cute.arch.lane_idx() == 0:
            got = cute.arch.atomic_add((a.tickets.iterator + a.ticket).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        tile = ctas + cute.arch.shuffle_sync(got, 0)
    return tile


@cute.jit
def find(spec: cutlass.Constexpr, a, unit: Int32, start: Int32, before: Int32, limits):
    """One warp: (Work that begins with `unit`, start', before', (first unit of its tile, unit behind the work)),
    searching 32 requests at a time from request `start`, whose first unit is `before`. The returned pair starts the
    next search, for a later unit. Where tiles are split, limits is the second item of `begin`."""
    lane = cute.arch.lane_idx()
    batch = a.kv_lens.shape[0]
    fold = geometry.fold(spec, a)
    heads = tile_heads(spec, a)
    q_start, q_len, tiles, each, upto = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    searching = start < batch
    while searching:
        q_start, q_len, tiles, each = look(spec, a, start + lane)
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
    if start < batch and owner < 32:
        valid = Int32(1)
    index -= cute.arch.shuffle_sync(upto - tiles * each, owner)
    q_start, q_len = cute.arch.shuffle_sync(q_start, owner), cute.arch.shuffle_sync(q_len, owner)
    each = cute.arch.shuffle_sync(each, owner)
    kv_len, m_block, head, offset = Int32(0), Int32(0), Int32(0), Int32(0)
    rows = geometry.tile_rows(q_len, fold)
    m = geometry.tile_m(spec, rows)
    if valid != 0:
        kv_len = a.kv_lens[start + owner]
        m_blocks = (rows + m - 1) // m
        if cutlass.const_expr(spec.split):
            tile = index // each
            offset = index - tile * each
            m_block, head = tile % m_blocks, tile // m_blocks
        else:
            row_bytes = (spec.head_dim_qk + spec.head_dim_vo) * 2
            section = section_heads(kv_len, row_bytes, a.k.shape[1], a.q.shape[1] // a.k.shape[1] // fold)
            m_block, head = order(index, m_blocks, heads, section)
    n = lengths(spec, a, q_len, kv_len)
    first, last = geometry.tile_tokens(m_block, m, q_len, fold)
    lo, hi = mask.kv_range(spec, first, last, n)
    part, taken, parts, base = Int32(-1), Int32(1), Int32(1), unit - offset
    if cutlass.const_expr(spec.split):
        (end, count), ctas = limits, cute.arch.grid_dim()[0]
        parts = each
        if a.chunk == 0:
            taken = cutlass.min(each - offset, end - unit)
            base = holder(unit - offset, count, ctas)
            parts = holder(unit - offset + each - 1, count, ctas) - base + 1
        per = cutlass.max(a.chunk, 1)
        begins = mask.kv_range(spec, 0, q_len - 1, n)[0] + offset * per
        lo, hi = cutlass.max(lo, begins), cutlass.min(hi, begins + taken * per)
        if taken < each:
            part = unit if a.chunk > 0 else slot(cute.arch.block_idx()[0], offset)
    blocks = (lo, hi, *mask.full_range(spec, first, last, n), part, parts, base)
    work = Work(valid, m_block, head, q_start, q_len, kv_len, start + owner, *blocks)
    return work, start, before, (unit - offset, unit + taken)


@cute.jit
def publish(spec: cutlass.Constexpr, a, s, t: Int32, start: Int32, before: Int32, unit: Int32, limits):
    """One warp: draw and find the CTA's t-th tile and write it to the work pipe. Returns `find`'s (start', before') and
    the CTA's next unit; unit, limits: of `begin`."""
    tile = unit
    if cutlass.const_expr(not spec.split):
        tile = draw(a, t)
    w, start, before, (_, behind) = find(spec, a, tile, start, before, limits)
    valid = w.valid
    if cutlass.const_expr(spec.split):
        if unit >= limits[0]:
            valid = Int32(0)
        unit = behind
    pipe.wait_empty(s.work_pipe, t)
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate((valid, *w[1:])):
            s.work[i, pipe.slot(s.work_pipe, t)] = value
        if cutlass.const_expr(not spec.split):
            if w.valid == 0 and t > 0 and a.ticket >= 0 and tile == cute.arch.grid_dim()[0] + before - 1:
                a.tickets[a.ticket] = 0  # the last ticket of the launch (past the end, `before` counts all tiles)
        cute.arch.mbarrier_arrive(pipe.full(s.work_pipe, t))
    cute.arch.sync_warp()
    return start, before, unit


def read(s, t: Int32):
    """One warp: Work of the CTA's t-th tile, until it is released."""
    pipe.wait_full(s.work_pipe, t)
    slot = pipe.slot(s.work_pipe, t)
    return Work(*(cute.arch.make_warp_uniform(s.work[i, slot]) for i in range(FIELDS)))


def hear(s, t: Int32):
    """One warp: Work of the CTA's t-th tile, which it will not read again."""
    w = read(s, t)
    pipe.release(s.work_pipe, t)
    return w
