"""MMAs of a tile of 128 rows: the slots of S take its KV blocks in turn, so that Q @ K^T is two blocks ahead of P @ V.

An iteration has one block per softmax warpgroup (group). With two groups, which alternate over the blocks (ping-pong),
each has a slot and an O of its own, and correction combines the two O at the tile's end. With head_dim 256, one O takes
half of tensor memory: one group uses both slots.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline, tmem, umma
from ..schedule import work
from . import skip
from .mma_utils import (
    MmaState,
    columns,
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
from .roles import SLOTS, groups

OFFSET = umma.offset_descriptor  # 61 instructions less than with `offset_descriptor_here`


@cute.jit
def mma_tile(spec: cutlass.Constexpr, a, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """Issue the MMAs of tile `w`. One warp. Return the item of the pipelines of K and V after it."""
    first, left = first_descriptors(spec, s, at.tile), w.n_block_max - w.n_block_min
    owns_slot = const_expr(groups(spec) == SLOTS)
    # S = Q @ K^T of the tile's first two blocks, one in each slot; release K, and Q after the tile's last Q @ K^T
    for block in cutlass.range_constexpr(SLOTS):
        if left > block:
            item, is_last = at.item + block, left == block + 1
            wait_operand(spec, s.k.pipe, item)
            slot = block if const_expr(owns_slot) else Int32(item % SLOTS)
            q = q_descriptors_of_first_block(spec, s, at.tile, 0)
            gemm_qk(spec, s, base, slot, q, k_descriptors(spec, s, first, item, OFFSET))
            umma.commit(pipeline.empty_barrier(s.k.pipe, item))
            if is_last:
                umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
        elif const_expr(owns_slot):
            umma.commit(s.s_full + block)
    # zeros into V behind the request's last key, while S is computed
    if const_expr(zeroes_tail(spec)):
        wait_operand(spec, s.v.pipe, at.item)
        zero_tail(spec, a, s, w, at.item)
    # Per group, wait for V and P of its block, issue P @ V, release V; then wait for K of the block after next, issue
    # Q @ K^T into the slot that P leaves, release K. So softmax of a block runs under the MMAs of its neighbours.
    #
    # A group that owns a slot has its MMAs in order: s_full of a block also says that O of its block before is
    # complete. Else Q @ K^T of a block is in front of P @ V of the block before, and o_full says it for every block.
    # There, MMAs take 1,024 cycles for 64 keys, softmax about half of that: MMAs bind.
    #
    # If the last iteration has one block, the group that has none gets its signals all the same (s_full without an
    # MMA, and the waits for its P): one count of iterations then serves all roles. With two groups, the warp issues 167
    # SASS instructions per two KV blocks in 16 bits (146 in e4m3); a count per group took 52 more.
    i, iteration = at.item, at.iteration & 1
    while left > 0:
        is_first = Int32(1) if left == w.n_block_max - w.n_block_min else Int32(0)
        for group in cutlass.range_constexpr(groups(spec)):
            v, k = i + group, i + (SLOTS + group)
            slot, phase = (group, iteration) if const_expr(owns_slot) else (Int32(i % SLOTS), Int32(i // SLOTS))
            if left > group:
                wait_operand(spec, s.v.pipe, v)
                # O += P @ V, all parts of P but the last, then the last
                pipeline.mbarrier_wait(s.p_full_o_rescaled + slot, phase)
                tmem.fence_after_thread_sync()
                kept, tmem_columns = Int32(1), columns(base, slot, group)
                if const_expr(spec.logits.skip):
                    if is_first == 0:
                        kept -= skip.is_skipped(s, 0, i)
                v_operands = v_descriptors(spec, s, first, v, OFFSET)
                if kept != 0:
                    gemm_pv(spec, tmem_columns, v_operands, range(p_early_splits(spec)), is_first)
                pipeline.mbarrier_wait(s.p_last_split + slot, phase)
                tmem.fence_after_thread_sync()
                if kept != 0:
                    gemm_pv(spec, tmem_columns, v_operands, range(p_early_splits(spec), p_splits(spec)), is_first)
                if const_expr(not owns_slot):
                    umma.commit(s.o_full)
                umma.commit(pipeline.empty_barrier(s.v.pipe, v))
            else:
                # no block for this group: consume its signals
                pipeline.mbarrier_wait(s.p_full_o_rescaled + slot, phase)
                pipeline.mbarrier_wait(s.p_last_split + slot, phase)
            # S = Q @ K^T of the block after next
            if left > SLOTS + group:
                wait_operand(spec, s.k.pipe, k)
                q = q_descriptors(spec, first, 0, OFFSET)
                gemm_qk(spec, s, base, slot, q, k_descriptors(spec, s, first, k, OFFSET))
                umma.commit(pipeline.empty_barrier(s.k.pipe, k))
                if left == SLOTS + group + 1:
                    umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
            elif const_expr(owns_slot):
                if left > SLOTS:  # group 1, if group 0 has one more block: s_full without an S, as said above
                    umma.commit(s.s_full + group)
                else:  # the last iteration: O of the group is complete
                    umma.commit(s.o_full + group)
        i += groups(spec)
        iteration ^= 1
        left -= groups(spec)
    return at.item + Uint32(w.n_block_max - w.n_block_min)
