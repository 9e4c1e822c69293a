"""MMAs of a tile of 128 rows with one softmax warpgroup: with head_dim 256, one O takes half of tensor memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline, tmem, umma
from ..kv import source
from ..prepare import dequantises
from ..schedule import work
from . import skip
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
    q, i = q_descriptors(spec, s, at.tile), at.item
    # S = Q @ K^T of the tile's first two blocks, one in each slot; release K, and Q after the tile's last Q @ K^T
    for n in cutlass.range(cutlass.min(w.n_block_max - w.n_block_min, SLOTS), unroll=1):
        item = i + Uint32(n)
        wait_operand(spec, s.k_pipe, item)
        with cute.arch.elect_one():
            gemm_qk(spec, s, base, Int32(item % SLOTS), q[0], item)
            umma.commit(pipeline.empty_barrier(s.k_pipe, item))
        if n == w.n_block_max - w.n_block_min - 1:
            with cute.arch.elect_one():
                umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    # Per block, wait for V and P, issue P @ V, release V; then wait for K of the block after next, issue Q @ K^T into
    # the slot that this block leaves, release K. So Q @ K^T is a block ahead: while softmax works on a block, P @ V of
    # the block before it and Q @ K^T of the block behind it run. MMAs take 1,024 cycles for 64 keys, softmax about half
    # of that: MMAs bind.
    #
    # Q @ K^T of a block is issued in front of P @ V of the block before it, so that s_full says nothing about O.
    # o_full does, for every block, and correction waits for each of them.
    for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
        is_first = Int32(1) if n_block == w.n_block_max - 1 else Int32(0)
        slot, use = Int32(i % SLOTS), Int32(i // SLOTS)
        # O += P @ V, all parts of P but the last, then the last
        wait_operand(spec, s.v_pipe, i)
        if is_first != 0:
            if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
                zero_tail(spec, s, w, i)
            pipeline.mbarrier_wait(s.o_empty, at.tile - 1)
        pipeline.mbarrier_wait(s.p_full_o_rescaled + slot, use)
        tmem.fence_after_thread_sync()
        kept, tmem_columns = Int32(1), columns(base, slot, 0)
        if const_expr(spec.logits.skip):
            if is_first == 0:
                kept -= skip.is_skipped(s, 0, i)
        with cute.arch.elect_one():
            if kept != 0:
                gemm_pv(spec, s, tmem_columns, i, range(p_early_splits(spec)), is_first)
        pipeline.mbarrier_wait(s.p_last_split + slot, use)
        tmem.fence_after_thread_sync()
        with cute.arch.elect_one():
            if kept != 0:
                gemm_pv(spec, s, tmem_columns, i, range(p_early_splits(spec), p_splits(spec)), is_first)
            umma.commit(s.o_full)
            umma.commit(pipeline.empty_barrier(s.v_pipe, i))
        # S = Q @ K^T of the block after next
        if n_block >= w.n_block_min + SLOTS:
            wait_operand(spec, s.k_pipe, i + SLOTS)
            with cute.arch.elect_one():
                gemm_qk(spec, s, base, Int32((i + SLOTS) % SLOTS), q[0], i + SLOTS)
                umma.commit(pipeline.empty_barrier(s.k_pipe, i + SLOTS))
            if n_block == w.n_block_min + SLOTS:
                with cute.arch.elect_one():
                    umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
        i += 1
    return i
