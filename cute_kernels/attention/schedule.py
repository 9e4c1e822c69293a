"""Tile scheduler: which (request, head, m_block) a CTA works on, computed on the device from the lengths.

Tile t of a launch belongs to the request whose tiles cover t. A CTA starts with the tile of its own index and draws
later ones from a counter, so that CTAs end together whatever the lengths; which CTA computes a tile never changes its
result. The launch's last ticket resets the counter: nothing is planned, and no state passes from launch to launch.

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
    sees (none where hi <= lo), [full_lo, full_hi) need no mask."""

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


FIELDS = len(Work._fields)
STAGES = 2  # tiles that are known ahead


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
def find(spec: cutlass.Constexpr, a, tile: Int32, start: Int32, before: Int32):
    """One warp: (Work of `tile`, start', before'), searching 32 requests at a time from request `start`, whose first
    tile is `before`. The returned pair starts the next search, for a later tile."""
    lane = cute.arch.lane_idx()
    batch = a.kv_lens.shape[0]
    kv_heads = a.k.shape[1]
    group = a.q.shape[1] // kv_heads
    heads = kv_heads if cutlass.const_expr(spec.pack_gqa) else a.q.shape[1]
    fold = group if cutlass.const_expr(spec.pack_gqa) else 1
    q_start, q_len, tiles, upto = Int32(0), Int32(0), Int32(0), Int32(0)
    searching = start < batch
    while searching:
        b = start + lane
        q_start, q_len, tiles = Int32(0), Int32(0), Int32(0)
        if b < batch:
            q_start = a.cu_seqlens_q[b]
            q_len = a.cu_seqlens_q[b + 1] - q_start
            tiles = (geometry.tile_rows(q_len, fold) + spec.tile.m - 1) // spec.tile.m * heads
        upto = warp.prefix_sum(tiles)
        total = cute.arch.shuffle_sync(upto, 31)
        searching = tile >= before + total
        if searching:
            before += total
            start += 32
            searching = start < batch
    index = tile - before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= index))
    valid = Int32(0)
    if start < batch and owner < 32:
        valid = Int32(1)
    index -= cute.arch.shuffle_sync(upto - tiles, owner)
    q_start, q_len = cute.arch.shuffle_sync(q_start, owner), cute.arch.shuffle_sync(q_len, owner)
    kv_len, m_block, head = Int32(0), Int32(0), Int32(0)
    if valid != 0:
        kv_len = a.kv_lens[start + owner]
        m_blocks = (geometry.tile_rows(q_len, fold) + spec.tile.m - 1) // spec.tile.m
        row_bytes = (spec.head_dim_qk + spec.head_dim_vo) * 2
        section = section_heads(kv_len, row_bytes, kv_heads, group // fold)
        m_block, head = order(index, m_blocks, heads, section)
    n = mask.Lengths(q_len, kv_len, a.window_left)
    first, last = geometry.tile_tokens(m_block, spec.tile.m, q_len, fold)
    blocks = (*mask.kv_range(spec, first, last, n), *mask.full_range(spec, first, last, n))
    return Work(valid, m_block, head, q_start, q_len, kv_len, start + owner, *blocks), start, before


@cute.jit
def publish(spec: cutlass.Constexpr, a, s, t: Int32, start: Int32, before: Int32):
    """One warp: draw and find the CTA's t-th tile and write it to the work pipe. Returns `find`'s (start', before')."""
    tile = draw(a, t)
    w, start, before = find(spec, a, tile, start, before)
    pipe.wait_empty(s.work_pipe, t)
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(w):
            s.work[i, pipe.slot(s.work_pipe, t)] = value
        if w.valid == 0 and t > 0 and a.ticket >= 0 and tile == cute.arch.grid_dim()[0] + before - 1:
            a.tickets[a.ticket] = 0  # the last ticket of the launch (past the end, `before` counts all tiles)
        cute.arch.mbarrier_arrive(pipe.full(s.work_pipe, t))
    cute.arch.sync_warp()
    return start, before


@cute.jit
def hear(s, t: Int32):
    """One warp: Work of the CTA's t-th tile."""
    pipe.wait_full(s.work_pipe, t)
    slot = pipe.slot(s.work_pipe, t)
    w = Work(*(cute.arch.make_warp_uniform(s.work[i, slot]) for i in range(FIELDS)))
    pipe.release(s.work_pipe, t)
    return w
