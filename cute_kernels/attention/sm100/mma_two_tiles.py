"""MMAs of a tile of two halves, a group each, whose softmax runs under the MMAs of the other."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline, tmem, umma
from ..kv import source
from ..prepare import dequantises
from ..schedule import work
from . import skip
from .mma_utils import (
    MmaState,
    columns,
    fence_before_mma,
    gemm_pv,
    gemm_qk,
    p_early_splits,
    p_splits,
    q_descriptors,
    wait_operand,
    zero_tail,
)
from .roles import SLOTS, is_static, pingpong_groups


@cute.jit
def begin_tile(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, at: MmaState, rows):
    """Q K^T of a tile's first block, of both halves. rows: of `q_descriptors`."""
    wait_operand(spec, s.k_pipe, at.item)
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(SLOTS):
            gemm_qk(spec, s, base, half, rows[half], at.item)
        umma.commit(pipeline.empty_barrier(s.k_pipe, at.item))
        if w.n_block_max - w.n_block_min == 1:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))


@cute.jit
def mma_one_n_block(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, left: Int32, at: MmaState, rows):
    """P V of the block at hand, and Q K^T of the next one of the tile, of both halves. left: blocks of the tile from
    here on. rows: of `q_descriptors`."""
    i, first = at.item, Int32(1) if left == w.n_block_max - w.n_block_min else Int32(0)
    pipeline.consumer_wait(s.v_pipe, i)
    if left > 1:
        pipeline.consumer_wait(s.k_pipe, i + 1)
    fence_before_mma(spec)
    if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
        if first != 0:
            zero_tail(spec, s, w, i)
    for half in cutlass.range_constexpr(SLOTS):
        where = columns(base, half, half)
        if first != 0:
            pipeline.mbarrier_wait(s.o_empty + half, at.tile - 1)
        pipeline.mbarrier_wait(s.p_full_o_rescaled + half, at.iteration)
        tmem.fence_after_thread_sync()
        kept = Int32(1)
        if const_expr(spec.logits.skip):
            if first == 0:
                kept -= skip.is_skipped(s, half, at.iteration)
        with cute.arch.elect_one():
            if kept != 0:
                gemm_pv(spec, s, where, i, range(p_early_splits(spec)), first)
        pipeline.mbarrier_wait(s.p_last_split + half, at.iteration)
        tmem.fence_after_thread_sync()
        with cute.arch.elect_one():
            if kept != 0:
                gemm_pv(spec, s, where, i, range(p_early_splits(spec), p_splits(spec)), first)
            if left > 1:
                gemm_qk(spec, s, base, half, rows[half], i + 1)
            else:
                umma.commit(s.o_full + half)
    with cute.arch.elect_one():
        umma.commit(pipeline.empty_barrier(s.v_pipe, i))
        if left > 1:
            umma.commit(pipeline.empty_barrier(s.k_pipe, i + 1))
        if left == 2:
            umma.commit(pipeline.empty_barrier(s.q_pipe, at.tile))


@cute.jit
def mma_tile(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, at: MmaState):
    """The MMAs of a tile. Returns the items of the pipes then."""
    rows = q_descriptors(spec, s, at.tile)
    begin_tile(spec, s, base, w, at, rows)
    i, turn, left = at.item, at.iteration & 1, w.n_block_max - w.n_block_min
    while left > 0:
        here = MmaState(i, i if const_expr(is_static(pingpong_groups(spec, w), 1)) else turn, at.tile)
        mma_one_n_block(spec, s, base, w, left, here, rows)
        i += 1
        turn ^= 1
        left -= 1
    return i
