"""MMAs of a tile of one half, whose KV blocks two groups have in turn: a round is two neighbours, of each group one.
Where the last round has one block, the group that has none gets its signals all the same.

Q K^T is a round ahead: P V of a group's block stands in front of Q K^T of its next.
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
def begin_block(spec: cutlass.Constexpr, s, base: Int32, group: cutlass.Constexpr, at: MmaState, rows, last):
    """Q K^T of a group's block. rows: of `q_descriptors`. last: whether it is the tile's."""
    wait_operand(spec, s.k_pipe, at.item)
    with cute.arch.elect_one():
        gemm_qk(spec, s, base, group, rows[0], at.item)
        umma.commit(pipeline.empty_barrier(s.k_pipe, at.item))
        if last:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))


@cute.jit
def mma_one_n_block(spec: cutlass.Constexpr, s, base: Int32, group: cutlass.Constexpr, at: MmaState, first: Int32):
    """P V of a group's block. first: 1 where O begins."""
    where = columns(base, group, group)
    wait_operand(spec, s.v_pipe, at.item)
    pipeline.mbarrier_wait(s.p_full_o_rescaled + group, at.iteration)
    tmem.fence_after_thread_sync()
    with cute.arch.elect_one():
        gemm_pv(spec, s, where, at.item, range(p_early_splits(spec)), first)
    pipeline.mbarrier_wait(s.p_last_split + group, at.iteration)
    tmem.fence_after_thread_sync()
    with cute.arch.elect_one():
        gemm_pv(spec, s, where, at.item, range(p_early_splits(spec), p_splits(spec)), first)
        umma.commit(pipeline.empty_barrier(s.v_pipe, at.item))


@cute.jit
def begin_tile(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, at: MmaState, rows):
    """Q K^T of a tile's first round."""
    left = w.n_block_max - w.n_block_min
    begin_block(spec, s, base, 0, at, rows, left == 1)
    if left > 1:
        begin_block(spec, s, base, 1, at._replace(item=at.item + 1), rows, left == SLOTS)
    else:
        with cute.arch.elect_one():
            umma.commit(s.s_full + 1)
    if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
        wait_operand(spec, s.v_pipe, at.item)
        zero_tail(spec, s, w, at.item)


@cute.jit
def mma_iteration(spec: cutlass.Constexpr, s, base: Int32, at: MmaState, rows, left: Int32, first: Int32):
    """P V of a round, and Q K^T of the next one of the tile. left: blocks of the tile from here on. first: 1 where O
    begins."""
    for group in cutlass.range_constexpr(SLOTS):
        if first != 0:
            pipeline.mbarrier_wait(s.o_empty + group, at.tile - 1)
        if left > group:
            mma_one_n_block(spec, s, base, group, at._replace(item=at.item + group), first)
        else:
            pipeline.mbarrier_wait(s.p_full_o_rescaled + group, at.iteration)
            pipeline.mbarrier_wait(s.p_last_split + group, at.iteration)
        if left > SLOTS + group:
            after = at._replace(item=at.item + (SLOTS + group))
            begin_block(spec, s, base, group, after, rows, left == SLOTS + group + 1)
        else:
            with cute.arch.elect_one():
                if left > SLOTS:
                    umma.commit(s.s_full + group)
                else:
                    umma.commit(s.o_full + group)


@cute.jit
def mma_tile(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """The MMAs of a tile. Returns the items of the pipes then."""
    rows = q_descriptors(spec, s, at.tile)
    begin_tile(spec, s, base, w, at, rows)
    i, turn, first, left = at.item, at.iteration, Int32(1), w.n_block_max - w.n_block_min
    while left > 0:
        mma_iteration(spec, s, base, MmaState(i, turn, at.tile), rows, left, first)
        i += SLOTS
        turn += 1
        first = Int32(0)
        left -= SLOTS
    return at.item + Uint32(w.n_block_max - w.n_block_min)
