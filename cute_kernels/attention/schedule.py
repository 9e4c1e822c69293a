"""Tile scheduler: which (request, head, m_block) a CTA works on, computed on the device from the lengths.

Tile t of a launch belongs to the request whose tiles cover t; CTAs take tiles in rounds, every other round in reverse, so
that the descending lengths of causal tiles even out. Nothing is planned, counted or carried between launches.

Within a request (`order`): KV heads go in sections whose K and V fit the L2 cache together; in a section the last, under
a causal mask the longest, m_block comes first, and all heads of a section work on it before the next.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device import warp
from . import geometry

L2_BYTES = 32 << 20  # of K and V at work at a time; Hopper's L2 is 50 MB in two halves


@dataclass(frozen=True)
class Work:
    """A tile, and what every role needs to know of its request."""

    valid: Int32
    m_block: Int32
    head: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    batch: Int32


FIELDS = 7


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


def turn(i, cta, ctas):
    """The tile that `cta` takes in its i-th round."""
    return i * ctas + cta + i % 2 * (ctas - 1 - 2 * cta)


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
    return Work(valid, m_block, head, q_start, q_len, kv_len, start + owner), start, before


def tell(w: Work, slot: cute.Tensor):
    """Write a Work to shared memory (one lane, before it arrives on the barrier that publishes it)."""
    for i, value in enumerate((w.valid, w.m_block, w.head, w.q_start, w.q_len, w.kv_len, w.batch)):
        slot[i] = value


def hear(slot: cute.Tensor) -> Work:
    return Work(*(slot[i] for i in range(FIELDS)))
