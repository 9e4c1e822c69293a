"""MMAs of a tile of 256 rows: two halves of 128 rows, with a softmax warpgroup each (FlashAttention 4: q_stage = 2)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline, tmem, umma
from ..schedule import work
from . import skip
from .mma_utils import (
    FirstDescriptors,
    MmaState,
    columns,
    fence_before_mma,
    first_descriptors,
    gemm_pv,
    gemm_qk,
    k_descriptors,
    q_descriptors,
    q_descriptors_of_first_block,
    v_descriptors,
    wait_operand,
    zero_tail,
    zeroes_tail,
)
from .precision import p_early_splits, p_splits
from .roles import SLOTS

OFFSET = umma.offset_descriptor_here  # 8 instructions less than with `offset_descriptor`


class BlockState(NamedTuple):
    """The KV block at hand. v: its item of V. k: the next block's item of K. phase: of softmax's barriers. is_first: 1
    for the tile's first block."""

    v: pipeline.PipelineState
    k: pipeline.PipelineState
    phase: Int32
    is_first: Int32


@cute.jit
def mma_block(
    spec: cutlass.Constexpr, s, base: Int32, first: FirstDescriptors, at: BlockState, has_next: cutlass.Constexpr
):
    """Issue O += P @ V of a KV block and, with `has_next`, S = Q @ K^T of the next one. One warp."""
    # Wait for V and the next K; per half, wait for P, issue P @ V and at once Q @ K^T of the next block. So the softmax
    # of a half runs under the MMAs of the other half. MMAs of a half are in order: s_full of a block also says that O
    # of the block before is complete, on which correction relies. Softmax announces P in two parts, so that P @ V
    # begins while the last part is computed.
    #
    # wait for V of this block and K of the next, with one fence behind both
    pipeline.consumer_wait(s.v.pipe, at.v)
    if const_expr(has_next):
        pipeline.consumer_wait(s.k.pipe, at.k)
    fence_before_mma(spec)
    v = v_descriptors(spec, s, first, at.v, OFFSET)
    k = k_descriptors(spec, s, first, at.k, OFFSET)
    for half in cutlass.range_constexpr(SLOTS):
        tmem_columns = columns(base, half, half)
        # O += P @ V, all parts of P but the last
        pipeline.mbarrier_wait(s.p_full_o_rescaled + half, at.phase)
        tmem.fence_after_thread_sync()
        kept = Int32(1)
        if const_expr(spec.logits.skip):
            if at.is_first == 0:
                kept -= skip.is_skipped(s, half, at.phase)
        if kept != 0:
            gemm_pv(spec, tmem_columns, v, range(p_early_splits(spec)), at.is_first)
        # O += P @ V, the last part
        pipeline.mbarrier_wait(s.p_last_split + half, at.phase)
        tmem.fence_after_thread_sync()
        if kept != 0:
            gemm_pv(spec, tmem_columns, v, range(p_early_splits(spec), p_splits(spec)), at.is_first)
        # S = Q @ K^T of the next block, or, behind the tile's last, O is complete
        if const_expr(has_next):
            gemm_qk(spec, s, base, half, q_descriptors(spec, first, half, OFFSET), k)
        else:
            umma.commit(s.o_full + half)
    # release the stages of V and K
    umma.commit(pipeline.empty_barrier(s.v.pipe, at.v))
    if const_expr(has_next):
        umma.commit(pipeline.empty_barrier(s.k.pipe, at.k))


@cute.jit
def mma_tile(spec: cutlass.Constexpr, a, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """Issue the MMAs of tile `w`. One warp. Return the item of the pipelines of K and V after it."""
    # S = Q @ K^T of the tile's first block, both halves
    first, k = first_descriptors(spec, s, at.tile), pipeline.state_of(s.k.pipe, at.item)
    wait_operand(spec, s.k.pipe, k)
    for half in cutlass.range_constexpr(SLOTS):
        q = q_descriptors_of_first_block(spec, s, at.tile, half)
        gemm_qk(spec, s, base, half, q, k_descriptors(spec, s, first, k, OFFSET))
    umma.commit(pipeline.empty_barrier(s.k.pipe, k))
    # zeros into V behind the request's last key, while S is computed
    if const_expr(zeroes_tail(spec)):
        wait_operand(spec, s.v.pipe, k)
        zero_tail(spec, a, s, w, k)
    # O += P @ V of every block, and S of all others. The last block has code of its own: so the loop has no branches,
    # and ptxas needs no election in it. The state of K becomes that of V. The warp issues 157 SASS instructions per two
    # KV blocks in 16 bits and 101 in e4m3.
    block = BlockState(k, pipeline.next_item(s.k.pipe, k), Int32(at.iteration) & 1, Int32(1))
    for _ in cutlass.range(w.n_block_max - w.n_block_min - 1, unroll=1):
        mma_block(spec, s, base, first, block, True)
        block = BlockState(block.k, pipeline.next_item(s.k.pipe, block.k), block.phase ^ 1, Int32(0))
    # release Q
    umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    mma_block(spec, s, base, first, block, False)
    return at.item + Uint32(w.n_block_max - w.n_block_min)
