"""Q of a tile: a box of TMA, or, where rows are (token, head) pairs, which none holds, copied row by row; and what it
becomes where the MMAs multiply another type.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import layout, pipeline
from ...device.divisor import Divisor
from .. import geometry, load
from ..schedule import stream_k, work
from ..spec import BITS
from .roles import ROWS, tile_q_stage

PIECE = 16  # bytes that a lane copies at a time


@cute.jit
def gather(spec: cutlass.Constexpr, plan, s, w: work.WorkTileInfo, q: Int32, share: Int32, shares: cutlass.Constexpr):
    """One of `shares` warps: its packed Q rows of a tile, item q of the pipe; past the request's last, that one. A warp
    alone leaves out a half that the tile has not."""
    count = spec.tile.m // shares if const_expr(shares > 1) else tile_q_stage(spec, w) * ROWS
    a, m, size = plan.args, spec.tile.m, const_expr(spec.head_dim_qk * BITS[spec.q] // 8)
    width, pieces = const_expr(layout.width(size)), const_expr(size // PIECE)
    last = geometry.num_rows(w.q_len, w.pack_factor) - 1
    into = s.raw_q.iterator.toint() + pipeline.stage(s.q_pipe, q) * (m * size)
    for i in cutlass.range(cute.arch.lane_idx(), count * pieces, 32, unroll=4):
        row, byte = share * (m // shares) + i // pieces, i % pieces * PIECE
        known = cutlass.min(w.m_block * m + row, last)
        token = w.q_start + geometry.token_of(known, geometry.pack_divisor(w))
        head = geometry.head_of(known, w.head_idx, geometry.pack_divisor(w))
        source = a.query.q[token, head, None].iterator.toint() + byte
        target = into + byte // width * (m * width) + layout.swizzle(width, row, byte % width)
        text = f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {PIECE};"
        cute.arch.inline_ptx(text, read_only_args=[target, source])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def load_tile(spec: cutlass.Constexpr, plan, s, w: work.WorkTileInfo, q: Int32):
    """One warp: Q of a tile, item q of the pipe."""
    if w.pack_factor > 1:
        pipeline.producer_acquire(s.q_pipe, q)
        gather(spec, plan, s, w, q, 0, 1)
        pipeline.mbarrier_arrive(pipeline.full_barrier(s.q_pipe, q))
    else:
        load.fetch_q(spec, plan, s, w, q)


@cute.jit
def load_q(spec: cutlass.Constexpr, plan, s):
    """One warp: Q of all tiles."""
    t, q = Int32(0), Int32(0)
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        if w.n_block_max > w.n_block_min:
            load_tile(spec, plan, s, w, q)
            q += 1
        t += 1
        w = work.consume(spec, s, t)


@cute.jit
def schedule_and_load_q(spec: cutlass.Constexpr, plan, s):
    """One warp, where CTAs share keys: publishes each work in front of Q of the one before."""
    a, t, q = plan.args, Int32(0), Int32(0)
    pack_factor = Divisor(geometry.qhead_per_kvhead(a))
    cta_units, state = stream_k.begin(spec, a)
    state = stream_k.produce_next(spec, a, s, t, cta_units, state, pack_factor)
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        state = stream_k.produce_next(spec, a, s, t + 1, cta_units, state, pack_factor)
        if w.n_block_max > w.n_block_min:
            load_tile(spec, plan, s, w, q)
            q += 1
        t += 1
        w = work.consume(spec, s, t)
