"""MMAs of a tile of 128 rows with two softmax warpgroups (groups), which alternate over its KV blocks (ping-pong).

Each group has an S and an O of its own; correction combines the two O at the tile's end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline, tmem, umma
from ..kv import source
from ..prepare import dequantises
from ..schedule import work
from .mma_utils import (
    MmaState,
    columns,
    gemm_pv,
    gemm_qk,
    p_early_splits,
    p_splits,
    q_descriptors,
    wait_operand,
    zero_tail,
)
from .roles import SLOTS


@cute.jit
def mma_tile(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """Issue the MMAs of tile `w`. One warp. Return the item of the pipelines of K and V after it."""
    q, left = q_descriptors(spec, s, at.tile), w.n_block_max - w.n_block_min
    # S = Q @ K^T of the first iteration: the tile's first block for group 0, its second, if there is one, for group 1
    has_one_block = left == 1
    wait_operand(spec, s.k_pipe, at.item)
    with cute.arch.elect_one():
        gemm_qk(spec, s, base, 0, q[0], at.item)
        umma.commit(pipeline.empty_barrier(s.k_pipe, at.item))
        if has_one_block:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    if left > 1:
        has_two_blocks = left == SLOTS
        wait_operand(spec, s.k_pipe, at.item + 1)
        with cute.arch.elect_one():
            gemm_qk(spec, s, base, 1, q[0], at.item + 1)
            umma.commit(pipeline.empty_barrier(s.k_pipe, at.item + 1))
            if has_two_blocks:
                umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    else:
        with cute.arch.elect_one():
            umma.commit(s.s_full + 1)
    # zeros into V behind the request's last key, while S is computed
    if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
        wait_operand(spec, s.v_pipe, at.item)
        zero_tail(spec, s, w, at.item)
    # An iteration is two neighbouring blocks, one per group. For each group, wait for P, issue P @ V, release V; then
    # wait for K of its block in the next iteration, issue Q @ K^T, release K. So the softmax of a group runs under the
    # MMAs of the other group, and s_full of a block also says that the group's O of its block before is complete.
    #
    # If the last iteration has one block, the group that has none gets its signals all the same (s_full without an
    # MMA, and the waits for its P): one count of iterations then serves all roles. The warp issues 230 SASS
    # instructions per two KV blocks in 16 bits (170 in e4m3); with a count per group it issued 282.
    i, iteration, is_first = at.item, at.iteration, Int32(1)
    while left > 0:
        for group in cutlass.range_constexpr(SLOTS):
            if is_first != 0:
                pipeline.mbarrier_wait(s.o_empty + group, at.tile - 1)
            if left > group:
                # O += P @ V, all parts of P but the last, then the last
                tmem_columns = columns(base, group, group)
                wait_operand(spec, s.v_pipe, i + group)
                pipeline.mbarrier_wait(s.p_full_o_rescaled + group, iteration)
                tmem.fence_after_thread_sync()
                with cute.arch.elect_one():
                    gemm_pv(spec, s, tmem_columns, i + group, range(p_early_splits(spec)), is_first)
                pipeline.mbarrier_wait(s.p_last_split + group, iteration)
                tmem.fence_after_thread_sync()
                with cute.arch.elect_one():
                    gemm_pv(spec, s, tmem_columns, i + group, range(p_early_splits(spec), p_splits(spec)), is_first)
                    umma.commit(pipeline.empty_barrier(s.v_pipe, i + group))
            else:
                # no block for this group: consume its signals
                pipeline.mbarrier_wait(s.p_full_o_rescaled + group, iteration)
                pipeline.mbarrier_wait(s.p_last_split + group, iteration)
            if left > SLOTS + group:
                # S = Q @ K^T of the group's next block; release K, and Q after the tile's last Q @ K^T
                is_last = left == SLOTS + group + 1
                wait_operand(spec, s.k_pipe, i + (SLOTS + group))
                with cute.arch.elect_one():
                    gemm_qk(spec, s, base, group, q[0], i + (SLOTS + group))
                    umma.commit(pipeline.empty_barrier(s.k_pipe, i + (SLOTS + group)))
                    if is_last:
                        umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
            else:
                # the group has no further block in this tile
                with cute.arch.elect_one():
                    if left > SLOTS:  # group 1, if group 0 has one more block: s_full without an S, as said above
                        umma.commit(s.s_full + group)
                    else:  # the last iteration: O of the group is complete
                        umma.commit(s.o_full + group)
        i += SLOTS
        iteration += 1
        is_first = Int32(0)
        left -= SLOTS
    return at.item + Uint32(w.n_block_max - w.n_block_min)
