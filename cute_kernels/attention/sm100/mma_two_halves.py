"""MMAs of a tile of 256 rows: two halves of 128 rows, with a softmax warpgroup each (FlashAttention 4: q_stage = 2)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline, tmem, umma
from ..schedule import work
from . import skip
from .mma_utils import (
    MmaState,
    columns,
    fence_before_mma,
    gemm_pv,
    gemm_qk,
    k_descriptors,
    q_descriptors,
    v_descriptors,
    wait_operand,
    zero_tail,
    zeroes_tail,
)
from .precision import p_early_splits, p_splits
from .roles import SLOTS, is_static, pingpong_groups


@cute.jit
def mma_tile(spec: cutlass.Constexpr, a, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """Issue the MMAs of tile `w`. One warp. Return the item of the pipelines of K and V after it."""
    q = q_descriptors(spec, s, at.tile)
    # S = Q @ K^T of the tile's first block, both halves
    wait_operand(spec, s.k_pipe, at.item)
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(SLOTS):
            gemm_qk(spec, s, base, half, q[half], k_descriptors(spec, s, at.item))
        umma.commit(pipeline.empty_barrier(s.k_pipe, at.item))
        if w.n_block_max - w.n_block_min == 1:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    # Per block, wait for V and the next K; per half, wait for P, issue P @ V and at once Q @ K^T of the next block. So
    # the softmax of a half runs under the MMAs of the other half. MMAs of a half are in order: s_full of a block also
    # says that O of the block before is complete, on which correction relies. Softmax announces P in two parts, so that
    # P @ V begins while the last part is computed.
    #
    # Four choices save instructions (SASS, of the warp, per two KV blocks). Every group of MMAs has an election of its
    # own: inside one for all, nothing is uniform to the compiler (73 R2UR, 274 instead of 239). The descriptors of K
    # and V are made in front of the elections, where the MMAs of both halves find them: 14 less than in each election.
    # `left` counts the tile's blocks from here on: 10 less than with a block's number. `iteration` is a parity: 2 less
    # than a number. A `while` in place of the loop is unrolled in some kernels, which takes 387 for four blocks.
    i, iteration = at.item, at.iteration & 1
    for left in cutlass.range(w.n_block_max - w.n_block_min, 0, -1, unroll=1):
        is_first = Int32(1) if left == w.n_block_max - w.n_block_min else Int32(0)
        # phase of softmax's barriers: iterations so far, which are the items of K and V if all tiles have two halves
        phase = i if const_expr(is_static(pingpong_groups(spec, w), 1)) else iteration
        # wait for V of this block and K of the next, with one fence behind both
        pipeline.consumer_wait(s.v_pipe, i)
        if left > 1:
            pipeline.consumer_wait(s.k_pipe, i + 1)
        fence_before_mma(spec)
        if const_expr(zeroes_tail(spec)):
            if is_first != 0:
                zero_tail(spec, a, s, w, i)
        v, k = v_descriptors(spec, s, i), k_descriptors(spec, s, i + 1)
        for half in cutlass.range_constexpr(SLOTS):
            tmem_columns = columns(base, half, half)
            # O += P @ V, all parts of P but the last
            if is_first != 0:
                pipeline.mbarrier_wait(s.o_empty + half, at.tile - 1)
            pipeline.mbarrier_wait(s.p_full_o_rescaled + half, phase)
            tmem.fence_after_thread_sync()
            kept = Int32(1)
            if const_expr(spec.logits.skip):
                if is_first == 0:
                    kept -= skip.is_skipped(s, half, phase)
            with cute.arch.elect_one():
                if kept != 0:
                    gemm_pv(spec, tmem_columns, v, range(p_early_splits(spec)), is_first)
            # O += P @ V, the last part
            pipeline.mbarrier_wait(s.p_last_split + half, phase)
            tmem.fence_after_thread_sync()
            with cute.arch.elect_one():
                if kept != 0:
                    gemm_pv(spec, tmem_columns, v, range(p_early_splits(spec), p_splits(spec)), is_first)
                # S = Q @ K^T of the next block, or, behind the tile's last, O is complete
                if left > 1:
                    gemm_qk(spec, s, base, half, q[half], k)
                else:
                    umma.commit(s.o_full + half)
                # release the stages of V and K, and that of Q after the tile's last Q @ K^T
                if const_expr(half == SLOTS - 1):
                    umma.commit(pipeline.empty_barrier(s.v_pipe, i))
                    if left > 1:
                        umma.commit(pipeline.empty_barrier(s.k_pipe, i + 1))
                    if left == 2:
                        umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
        i += 1
        iteration ^= 1
    return i
