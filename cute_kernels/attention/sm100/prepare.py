"""The prepare warpgroup, over quantised caches: it converts K, V and Q to fp16 for the MMAs.

Two warps convert K, two V; all four first convert Q of the tile. Q of fp16 stays as it is loaded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from .. import mask_blocks, prepare
from ..kv.rings import operand_smem
from ..load import Items
from ..prepare import Share
from ..schedule import work
from . import precision
from .query import gather_q
from .roles import WARPS


@cute.jit
def prepare_kv(spec: cutlass.Constexpr, plan, s, which: cutlass.Constexpr, share: Int32):
    """Prepare Q, and K or V (`which`, of kv.pages), of all tiles of the CTA: a warp's share of each."""
    # Per tile, wait for Q, convert the warp's quarter and announce it (q_ready_pipe). Then per block, wait for the raw
    # stage and for a free operand stage, dequantise the warp's half of the block's keys, fence (MMAs read through
    # another proxy), release the raw stage and announce the operand. Q comes first, because no Q @ K^T of the tile can
    # begin without it. The mma warp releases the operand stages.
    #
    # A fifth warpgroup has 48 registers per thread and leaves softmax 160: with 128 keys per block softmax then spills
    # 72 to 128 bytes, with 96 none.
    x = operand_smem(s, which)

    def prepare_tile(w, _, items):
        i, q = items
        # Q of the tile
        if w.n_block_max > w.n_block_min:
            prepare_q(spec, plan, s, w, q, Share(share + which * (WARPS // 2), WARPS))
            q += 1
        for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            # wait for the raw stage and a free operand stage
            pipeline.consumer_wait(x.raw_pipe, i)
            pipeline.producer_acquire(x.pipe, i)
            # dequantise
            valid = w.sequence.kv_len - mask_blocks.n_block_at(spec, plan.args, w, position) * spec.tile.n
            prepare.dequantise_stage(spec, plan.args, s, which, Share(share, WARPS // 2), i, valid)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            # release the raw stage, announce the operand
            pipeline.consumer_release(x.raw_pipe, i)
            pipeline.mbarrier_arrive(pipeline.full_barrier(x.pipe, i))
            i += 1
        return Items(i, q)

    work.for_each_tile(spec, s, prepare_tile, Items(Int32(0), Int32(0)), carries_tile=True)


@cute.jit
def prepare_q(spec: cutlass.Constexpr, plan, s, w: work.WorkTileInfo, q: Int32, share: Share):
    """Convert Q of a tile, item q of its pipeline: the rows of one of `WARPS` warps. Packed rows are gathered first."""
    pipeline.consumer_wait(s.q_pipe, q)
    if w.pack_factor > 1:
        gather_q(spec, plan, s, w, q, share)
    stage = pipeline.stage(s.q_pipe, q)
    if const_expr(precision.of(spec).scales_q_rows):
        prepare.q_to_fp16(spec, s, stage, pipeline.stage(s.q_ready_pipe, q), share)
    elif const_expr(precision.of(spec).converts_q):
        prepare.widen_q(spec, s, stage, share)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    pipeline.mbarrier_arrive(pipeline.full_barrier(s.q_ready_pipe, q))
