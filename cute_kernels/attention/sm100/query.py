"""The warp that loads Q: by TMA, or, for packed rows, which are (token, head) pairs and form no TMA box, by cp.async.

With split KV this warp also schedules (`schedule`). Over dequantised caches there is no such warp: the warp of V loads
Q, and the prepare warps gather packed rows (`prepare`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import layout, pipeline
from ...dtypes import BITS
from .. import geometry, load
from ..prepare import Share
from ..schedule import work
from .roles import ROWS, tile_q_stage

PIECE = 16  # bytes that a lane copies at a time


@cute.jit
def gather_q(spec: cutlass.Constexpr, plan, s, w: work.WorkTileInfo, q: Int32, share: Share):
    """Copy packed rows of Q of a tile to item q of the pipeline: the share of one warp. Rows past the
    request's last are copies of that one; columns past head_dim_qk are zeros. A warp alone copies only the halves that
    the tile has."""
    count = spec.tile.m // share.count if const_expr(share.count > 1) else tile_q_stage(spec, w) * ROWS
    a, m, size = plan.args, spec.tile.m, const_expr(spec.padded_qk * BITS[spec.q] // 8)
    stored = const_expr(spec.head_dim_qk * BITS[spec.q] // 8)
    width, pieces = const_expr(layout.width(size)), const_expr(size // PIECE)
    last = geometry.num_rows(w.sequence.q_len, w.pack_factor) - 1
    into = s.raw_q.iterator.toint() + pipeline.stage(s.q_pipe, q) * (m * size)
    for i in cutlass.range(cute.arch.lane_idx(), count * pieces, 32, unroll=4):
        row, byte = share.number * (m // share.count) + i // pieces, i % pieces * PIECE
        q_row = cutlass.min(w.m_block * m + row, last)
        token = w.sequence.q_start + geometry.token_of(q_row, geometry.pack_divisor(w))
        head = geometry.head_of(q_row, w.head_idx, geometry.pack_divisor(w))
        source = a.query.q[token, head, None].iterator.toint() + byte
        target = into + byte // width * (m * width) + layout.swizzle(width, row, byte % width)
        text = f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {PIECE}"
        if const_expr(stored == size):
            cute.arch.inline_ptx(f"{text};", read_only_args=[target, source])
        else:
            written = Int32(PIECE) if byte < stored else Int32(0)
            cute.arch.inline_ptx(f"{text}, {{$r2}};", read_only_args=[target, source, written])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def load_q_tile(spec: cutlass.Constexpr, plan, s, w: work.WorkTileInfo, q: Int32):
    """Load Q of a tile to item q of the pipeline. One warp."""
    if w.pack_factor > 1:
        pipeline.producer_acquire(s.q_pipe, q)
        gather_q(spec, plan, s, w, q, Share(Int32(0), 1))
        pipeline.mbarrier_arrive(pipeline.full_barrier(s.q_pipe, q))
    else:
        load.fetch_q(spec, plan, s, w, q)


@cute.jit
def load_q(spec: cutlass.Constexpr, plan, s):
    """Load Q of all tiles of the CTA. One warp."""

    # Per tile that has keys, wait for a free stage of Q and fill it: by a TMA box, and its bytes complete the stage's
    # barrier, or, if rows are packed, by cp.async of 16 bytes per lane, a proxy fence and an arrival. The mma warp
    # releases the stage when the tile's last Q @ K^T is done. A gather takes a few thousand cycles per tile (4,096
    # copies of 16 bytes for 256 rows of head_dim 128, 128 per lane), hidden by the tile before if Q has a second stage.
    def load_tile(w, _, q):
        if w.n_block_max > w.n_block_min:
            load_q_tile(spec, plan, s, w, q)
            q += 1
        return q

    work.for_each_tile(spec, s, load_tile, Int32(0), carries_tile=True)
