"""The warp that issues all MMAs, where there is one group: O of head_dim 256 takes half of tensor memory.

Q K^T is a block ahead: while a block's softmax is computed, P V of the one before and Q K^T of the one behind it are.
S of blocks lies in the two slots in turn; P V of a block stands in front of Q K^T of the next in its slot.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline, tmem, umma
from ..kv import source
from ..prepare import dequantises
from ..schedule import work
from . import skip
from .mma_utils import columns, gemm_pv, gemm_qk, p_early_splits, p_splits, q_descriptors, wait_operand, zero_tail
from .roles import SLOTS


@cute.jit
def mma(spec: cutlass.Constexpr, plan, s):
    """One warp: the MMAs of all tiles."""
    base, t, i, q = s.tmem_ptr[0], Int32(0), Uint32(0), Int32(0)
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        if w.n_block_max > w.n_block_min:
            rows = q_descriptors(spec, s, q)
            pipeline.consumer_wait(s.q_ready_pipe if const_expr(dequantises(spec)) else s.q_pipe, q)
            for n in cutlass.range(cutlass.min(w.n_block_max - w.n_block_min, SLOTS), unroll=1):
                begin(spec, s, base, rows, i + Uint32(n))
                if n == w.n_block_max - w.n_block_min - 1:
                    with cute.arch.elect_one():
                        umma.commit(pipeline.empty_barrier(s.q_pipe, q))
            for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
                mma_one_n_block(spec, s, base, w, n_block, q, i)
                if n_block >= w.n_block_min + SLOTS:
                    begin(spec, s, base, rows, i + SLOTS)
                    if n_block == w.n_block_min + SLOTS:
                        with cute.arch.elect_one():
                            umma.commit(pipeline.empty_barrier(s.q_pipe, q))
                i += 1
            q += 1
        t += 1
        w = work.consume(spec, s, t)


@cute.jit
def begin(spec: cutlass.Constexpr, s, base: Int32, rows, i: Uint32):
    """Q K^T of block i of the pipe. rows: of `q_descriptors`."""
    wait_operand(spec, s.k_pipe, i)
    with cute.arch.elect_one():
        gemm_qk(spec, s, base, Int32(i % SLOTS), rows[0], i)
        umma.commit(pipeline.empty_barrier(s.k_pipe, i))


@cute.jit
def mma_one_n_block(spec: cutlass.Constexpr, s, base: Int32, w: work.WorkTileInfo, n_block: Int32, q: Int32, i: Uint32):
    """P V of block j, item i of the pipes. q: tiles with keys before."""
    first = Int32(1) if n_block == w.n_block_max - 1 else Int32(0)
    slot, turn = Int32(i % SLOTS), Int32(i // SLOTS)
    wait_operand(spec, s.v_pipe, i)
    if first != 0:
        if const_expr(source(spec).PARTIAL_TAIL and not dequantises(spec)):
            zero_tail(spec, s, w, i)
        pipeline.mbarrier_wait(s.o_empty, q - 1)
    pipeline.mbarrier_wait(s.p_full_o_rescaled + slot, turn)
    tmem.fence_after_thread_sync()
    kept, at = Int32(1), columns(base, slot, 0)
    if const_expr(spec.logits.skip):
        if first == 0:
            kept -= skip.is_skipped(s, 0, i)
    with cute.arch.elect_one():
        if kept != 0:
            gemm_pv(spec, s, at, i, range(p_early_splits(spec)), first)
    pipeline.mbarrier_wait(s.p_last_split + slot, turn)
    tmem.fence_after_thread_sync()
    with cute.arch.elect_one():
        if kept != 0:
            gemm_pv(spec, s, at, i, range(p_early_splits(spec), p_splits(spec)), first)
        umma.commit(s.o_full)
        umma.commit(pipeline.empty_barrier(s.v_pipe, i))
