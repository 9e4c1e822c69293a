"""The producer roles: load_k and load_v (`load_kv`, `tile.load_warps` warps each), and load_scales.

A role is one loop over the CTA's tiles (`work.for_each_tile`), with an inner loop over the KV blocks of a tile, highest
block first. How a block reaches shared memory is the source's (`kv`).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device import copy, pipeline
from . import geometry, mask_blocks, pdl
from .barriers import NamedBarrier
from .kv import pages, rings, scales, source
from .kv.pages import KVBlock, LoadTarget
from .schedule import tiles, work
from .schedule.work import WorkTileInfo


class Items(NamedTuple):
    """The next items of a role: kv, its number in the pipelines of K and V, and q, in those of Q."""

    kv: Int32
    q: Int32


class PrologueWork(NamedTuple):
    """The first KV block of a CTA as found before the previous kernel has ended; it may turn out wrong. n_block: -1 if
    there is none."""

    batch_idx: Int32
    n_block: Int32
    kv_len: Int32


@cute.jit
def fetch_q(spec: cutlass.Constexpr, plan, s, w: WorkTileInfo, q: Int32):
    """Load the Q rows of a tile without PackGQA as item q of q_pipe. Called by one warp. Rows past the sequence are
    those of the next sequence, or zero."""
    b = plan.q.boxes[0]
    pipeline.producer_acquire_tx(s.q_pipe, q, plan.q.bytes)
    g = cute.domain_offset((w.sequence.q_start + w.m_block * spec.tile.m, 0), b.gmem[None, None, w.head_idx])
    qs, qg = copy.partition(b, s.raw_q, g)
    stage = cute.arch.make_warp_uniform(pipeline.stage(s.q_pipe, q))
    for d in cutlass.range_constexpr(cute.size(qs, mode=[2])):
        cute.copy_atom_call(b.atom, qg[None, 0, d], qs[None, 0, d, stage], tma_bar_ptr=s.q_pipe.full + stage)


@cute.jit
def load_or_reserve_q(spec: cutlass.Constexpr, plan, s, w: WorkTileInfo, q: Int32):
    """Load the Q rows of a tile or, with PackGQA, only acquire their stage: the mma warps gather them. Where V
    lies in K, the warps that compute scores do. Called by one warp."""
    if const_expr(spec.kv.shares_v):
        pipeline.producer_acquire_tx(s.q_pipe, q, Int32(0))
    elif w.pack_factor > 1:
        pipeline.producer_acquire_tx(s.q_pipe, q, Int32(0))
    else:
        fetch_q(spec, plan, s, w, q)


@cute.jit
def prologue_prefetch(spec: cutlass.Constexpr, a, s, page_ids, which: cutlass.Constexpr, loader: Int32):
    """Wait for the previous kernel, then look up the pages of the CTA's expected first block. Called by one warp.
    Return the `PrologueWork`."""
    cute.arch.barrier(barrier_id=NamedBarrier.PROLOGUE, number_of_threads=pdl.prologue_threads(spec))
    prologue = PrologueWork(*(cute.arch.make_warp_uniform(s.prologue_work[i]) for i in range(3)))
    cute.arch.griddepcontrol_wait()
    if prologue.n_block >= 0:
        sequence_pages, zero = pages.of_sequence(a, prologue.batch_idx, which), Int32(0)
        source(spec).prefetch_pages(
            spec, page_ids, sequence_pages, KVBlock(loader, zero, prologue.n_block, zero, prologue.kv_len)
        )
    return prologue


@cute.jit
def reserve_q(spec: cutlass.Constexpr, plan, s):
    """Run the load role where the mma warps load K and V: only acquire the stages of Q. Called by one warp."""

    def reserve(w, _, q):
        if w.n_block_max > w.n_block_min:
            load_or_reserve_q(spec, plan, s, w, q)
            q += 1
        return q

    work.for_each_tile(spec, s, reserve, Int32(0))


def block_at(spec, a, w, at: KVBlock):
    """Replace at.n_block, a position of the tile, by the KV block that the tile visits there, and set the next one."""
    n_block, below = (mask_blocks.n_block_at(spec, a, w, position) for position in (at.n_block, at.n_block - 1))
    return at._replace(n_block=n_block, next_n_block=below)


# The load_k and load_v roles: one iteration per tile, an inner one per KV block, highest block first.
#   waits for   work_pipe (the tile), then per block a free stage of k.pipe or v.pipe
#   loads       the block by TMA or cp.async (`source(spec).fill`); page ids are looked up one block ahead
#   releases    work_pipe as soon as the tile is read; the load itself signals the full barrier of the stage
# In kernels without a schedule warp, loader 0 of one role is the tile scheduler too (`produces_tiles`): it produces the
# next tile after the first (highest) block of this one, while the blocks are on their way. Loader 0 of one role may
# also load Q (`loads_q`), before the tile's first block. With a PDL prologue, the page ids of the CTA's first block are
# there already if it is the expected one.
@cute.jit
def load_kv(
    spec: cutlass.Constexpr,
    plan,
    s,
    which: cutlass.Constexpr,
    loader: Int32,
    produces_tiles: cutlass.Constexpr = False,
    loads_q: cutlass.Constexpr = False,
):
    """Load this warp's share of K or V for every tile of the CTA. which: `pages.K` or `pages.V`. loader: index of the
    warp among those that fill a stage together."""
    a, into, share = plan.args, rings.load_target(plan, s, which), work.own(spec, loader)
    page_ids, prologue = source(spec).page_id_cache(spec, into.op), PrologueWork(Int32(0), Int32(-1), Int32(0))
    if const_expr(pdl.has_prologue(spec)):
        prologue = prologue_prefetch(spec, a, s, page_ids, which, loader)
    if const_expr(produces_tiles):
        if loader == 0:
            tiles.begin(spec, a, s.scheduler)
            tiles.produce_next(spec, a, s, Int32(0))

    def load_tile(w, t, items):
        i, q = items
        head, o_tile = geometry.kv_head_of(spec, a, w), work.o_tile(w) if const_expr(which == pages.V) else 0
        sequence_pages = pages.of_sequence(a, w.batch_idx, which, w.sequence.extra)
        # Q
        if const_expr(loads_q):
            if loader == 0 and w.n_block_max > w.n_block_min:
                load_or_reserve_q(spec, plan, s, w, q)
                q += 1
        # page ids of the first block, unless the prologue has them
        first = block_at(spec, a, w, KVBlock(share, i, w.n_block_max - 1, head, w.sequence.kv_len, o_tile))
        if w.n_block_max > w.n_block_min:
            if const_expr(not pdl.has_prologue(spec)):
                source(spec).prefetch_pages(spec, page_ids, sequence_pages, first)
            elif (
                t > 0
                or w.batch_idx != prologue.batch_idx
                or first.n_block != prologue.n_block
                or w.sequence.kv_len != prologue.kv_len
            ):
                source(spec).prefetch_pages(spec, page_ids, sequence_pages, first)
        # K or V, and page ids of the next block
        for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            at = block_at(spec, a, w, KVBlock(share, i, position, head, w.sequence.kv_len, o_tile))
            if const_expr(spec.tile.reverses_odd_blocks):
                at = at._replace(odd=(w.n_block_max - 1 - position) % 2 != 0)
            if const_expr(spec.tile.pieces == 1):
                source(spec).fill(spec, into, page_ids, sequence_pages, at)
            else:
                source(spec).fill_pieces(spec, into, page_ids, sequence_pages, at)
            i += 1
            # produce the next tile after the first (highest) block; a tile without blocks does so below
            if const_expr(produces_tiles):
                if loader == 0 and position == w.n_block_max - 1:
                    tiles.produce_next(spec, a, s, t + 1)
        if const_expr(produces_tiles):
            if loader == 0 and w.n_block_max <= w.n_block_min:
                tiles.produce_next(spec, a, s, t + 1)
        return Items(i, q)

    work.for_each_tile(spec, s, load_tile, Items(Int32(0), Int32(0)))


# The load_scales role (caches with scale factors): one iteration per tile, an inner one per KV block.
#   waits for   work_pipe (the tile), then a free stage of both pipelines
#   loads       the scale factors of the block with cp.async, into the stage that `load_kv` fills with its rows
#   releases    work_pipe as soon as the tile is read; each lane's cp.async signals the full barrier of the stage
# The pages are looked up before the wait for a free stage, which hides the latency. K comes first, as in the mainloop.
@cute.jit
def load_scales(spec: cutlass.Constexpr, plan, s):
    """Load the scale factors of K and V for every tile of the CTA. Called by one warp."""

    def load_tile(w, _, i):
        return scales_of_blocks(spec, plan.args, s, w, i)

    work.for_each_tile(spec, s, load_tile, Int32(0))


@cute.jit
def scales_of_blocks(spec: cutlass.Constexpr, a, s, w: WorkTileInfo, i: Int32):
    """Load the scale factors of the blocks of `w`, the first of which is item i. Return the next item."""
    head = geometry.kv_head_of(spec, a, w)
    k, v = (pages.of_sequence(a, w.batch_idx, which) for which in (pages.K, pages.V))
    for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
        n_block = mask_blocks.n_block_at(spec, a, w, position)
        # pages
        k_found = scales.find(spec, a.kv.k.shape[2], k, n_block, w.sequence.kv_len, Int32(0))
        mixed = Int32(0) if const_expr(a.kv.v_scales_interleaved is None) else a.kv.v_scales_interleaved
        v_found = scales.find(spec, a.kv.v.shape[2], v, n_block, w.sequence.kv_len, mixed)
        # scale factors of K, then of V
        at = KVBlock(Int32(0), i, n_block, head, w.sequence.kv_len)
        scales.fill(spec, LoadTarget(a.kv.k_scales, s.k.scales, s.k.pipes), k_found, at)
        at, into = at._replace(o_tile=work.o_tile(w)), LoadTarget(a.kv.v_scales, s.v.scales, s.v.pipes)
        scales.fill(spec, into, v_found, at, mixed)
        i += 1
    return i
