"""Persistent tiles: a CTA starts with the tile of its own index and draws later ones from a counter, so that CTAs end
together whatever the lengths; which CTA computes a tile never changes its result. Tile t of a launch belongs to the
request whose tiles cover t. The launch's last draw resets the counter: no state passes from launch to launch.

Within a request (`lpt_order`): KV heads go in sections whose K and V fit the L2 cache together; in a section the last,
under a causal mask the longest, m_block comes first, and all heads of a section work on it before the next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import geometry, mask
from . import work
from .work import RequestTiles, Search, Work


def lpt_order(index, m_blocks, heads, section):
    """index-th tile of a request -> (m_block, head)."""
    part = index // (m_blocks * section)
    rest = index - part * m_blocks * section
    width = cutlass.min(section, heads - part * section)
    return m_blocks - 1 - rest // width, part * section + rest % width


def l2_section(kv_len, row_bytes, kv_heads, heads_per_kv, l2_bytes):
    """Heads of a section: as many KV heads as fit l2_bytes, times the heads that share each."""
    fit = cutlass.max(1, l2_bytes // cutlass.max(1, kv_len * row_bytes))
    return cutlass.min(fit, kv_heads) * heads_per_kv


@cute.jit
def request_tiles(spec: cutlass.Constexpr, a, b: Int32):
    """RequestTiles of a request; a tile is one unit."""
    q_start, q_len, tiles = Int32(0), Int32(0), Int32(0)
    if b < geometry.batch(a):
        q_start, q_len = geometry.request_queries(a, b)
        rows = geometry.tile_rows(q_len, geometry.rows_per_token(spec, a))
        m = geometry.tile_m(spec, rows)
        tiles = (rows + m - 1) // m * geometry.tile_heads(spec, a)
    return RequestTiles(q_start, q_len, tiles, Int32(1))


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
def find(spec: cutlass.Constexpr, a, tile: Int32, search: Search):
    """One warp: (Work of a tile of the launch, the next Search)."""
    heads = geometry.tile_heads(spec, a)
    found, search = work.locate(spec, a, tile, search, request_tiles)
    per_token = geometry.rows_per_token(spec, a)
    kv_len, m_block, head = Int32(0), Int32(0), Int32(0)
    rows = geometry.tile_rows(found.q_len, per_token)
    m = geometry.tile_m(spec, rows)
    if found.valid != 0:
        kv_len = geometry.request_keys(a, found.request)
        m_blocks = (rows + m - 1) // m
        row_bytes = (spec.head_dim_qk + spec.head_dim_vo) * spec.kv.bits // 8
        kv_heads = a.kv.k.shape[1]
        section = l2_section(kv_len, row_bytes, kv_heads, geometry.group(a) // per_token, spec.tile.l2_bytes)
        m_block, head = lpt_order(found.index, m_blocks, heads, section)
    n = mask.lengths(spec, a, found.q_len, kv_len)
    first, last = geometry.tile_tokens(m_block, m, found.q_len, per_token)
    blocks = (*mask.kv_range(spec, first, last, n), *mask.full_range(spec, first, last, n))
    return Work(found.valid, m_block, head, found.q_start, found.q_len, kv_len, found.request, *blocks), search


@cute.jit
def publish(spec: cutlass.Constexpr, a, s, t: Int32, search: Search):
    """One warp: find the CTA's t-th tile and publish it. Returns the next Search."""
    tile = next_index(a, t)
    w, search = find(spec, a, tile, search)
    if w.valid == 0 and t > 0 and a.schedule.counter_base >= 0:
        if cute.arch.lane_idx() == 0 and tile == cute.arch.grid_dim()[0] + search.before - 1:
            a.schedule.counters[a.schedule.counter_base] = 0  # the last draw: past the end, `before` counts all tiles
    work.publish(s, t, w)
    return search
