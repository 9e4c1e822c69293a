"""MMAs of a 128-row tile with two softmax warpgroups: they alternate over the tile's KV blocks (ping-pong)."""

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
    """The MMAs of a tile. Returns the items of the pipes then."""
    rows, left = q_descriptors(spec, s, at.tile), w.n_block_max - w.n_block_min
    # S = Q @ K^T of the first iteration: a block for group 0, and one for group 1 if the tile has two
    has_one_block = left == 1
    wait_operand(spec, s.k_pipe, at.item)
    with cute.arch.elect_one():
        gemm_qk(spec, s, base, 0, rows[0], at.item)
        umma.commit(pipeline.empty_barrier(s.k_pipe, at.item))
        if has_one_block:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    if left > 1:
        has_two_blocks = left == SLOTS
        wait_operand(spec, s.k_pipe, at.item + 1)
        with cute.arch.elect_one():
            gemm_qk(spec, s, base, 1, rows[0], at.item + 1)
            umma.commit(pipeline.empty_barrier(s.k_pipe, at.item + 1))
            if has_two_blocks:
                umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
    else:
        with cute.arch.elect_one():
            umma.commit(s.s_full + 1)
    if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
        wait_operand(spec, s.v_pipe, at.item)
        zero_tail(spec, s, w, at.item)
    i, iteration, is_first = at.item, at.iteration, Int32(1)
    while left > 0:
        for group in cutlass.range_constexpr(SLOTS):
            if is_first != 0:
                pipeline.mbarrier_wait(s.o_empty + group, at.tile - 1)
            if left > group:
                # O += P @ V
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
                pipeline.mbarrier_wait(s.p_full_o_rescaled + group, iteration)
                pipeline.mbarrier_wait(s.p_last_split + group, iteration)
            if left > SLOTS + group:
                # S = Q @ K^T of the group's next block
                is_last = left == SLOTS + group + 1
                wait_operand(spec, s.k_pipe, i + (SLOTS + group))
                with cute.arch.elect_one():
                    gemm_qk(spec, s, base, group, rows[0], i + (SLOTS + group))
                    umma.commit(pipeline.empty_barrier(s.k_pipe, i + (SLOTS + group)))
                    if is_last:
                        umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))
            else:
                with cute.arch.elect_one():
                    if left > SLOTS:
                        umma.commit(s.s_full + group)
                    else:
                        umma.commit(s.o_full + group)
        i += SLOTS
        iteration += 1
        is_first = Int32(0)
        left -= SLOTS
    return at.item + Uint32(w.n_block_max - w.n_block_min)
