"""Merge of the parts of a tile (`schedule`, spec.split), by the CTA that finishes the last of them.

A warp merges a row. A part holds normalised O and LSE; the sink enters here, once, and so do the factors on the output.
Parts are added in the order of keys, whoever adds them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import epilogue, geometry, schedule, softmax

AHEAD = 8  # parts that a warp loads at once


@cute.jit
def is_last(a, w: schedule.Work, flag: cute.Tensor, tid: Int32, barrier: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Whether the part that these threads have written is the last of its tile; then they see all of them."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    if tid == 0:
        counter = a.tickets.iterator + a.ticket + w.base
        cute.arch.fence_acq_rel_gpu()
        done = cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        flag[0] = Int32(0)
        if done == w.parts - 1:
            cute.arch.fence_acq_rel_gpu()
            a.tickets[a.ticket + w.base] = 0
            flag[0] = Int32(1)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    return flag[0] != 0


@cute.jit
def slot_of(a, w: schedule.Work, part: Int32):
    """Slot of a part of a tile."""
    slot = w.base + part
    if a.chunk == 0:
        slot = schedule.slot(slot, part)
    return slot


@cute.jit
def merge(spec: cutlass.Constexpr, a, w: schedule.Work, fold, warp: Int32, warps: cutlass.Constexpr):
    """One warp of `warps`: its rows of a tile whose parts are there."""
    rows = geometry.tile_rows(w.q_len, fold)
    m = geometry.tile_m(spec, rows)
    rows = cutlass.min(rows - w.m_block * m, m)
    factor = softmax.factor(a.out_factor, a.out_scale)
    for row in cutlass.range(warp, rows, warps, unroll=1):
        acc, top, total = gather(spec, a, w, row)
        token = w.q_start + geometry.token_of(w.m_block * m + row, fold, True)
        head = geometry.head_of(w.m_block * m + row, w.head, fold, True)
        inverse, lse = softmax.close(top, total, epilogue.sink_of(a, head))
        acc.store(acc.load() * (inverse * factor))
        epilogue.store_piece(a, token, head, cute.arch.lane_idx(), acc)
        if a.lse.shape[0] > 0 and cute.arch.lane_idx() == 0:
            a.lse[token, head] = lse


@cute.jit
def gather(spec: cutlass.Constexpr, a, w: schedule.Work, row: Int32):
    """One warp: (this lane's columns of the sum of O x 2^(LSE - top), top, sum of 2^(LSE - top)) over the parts.
    32 parts at a time: a lane has the LSE of one, all have a share of each O."""
    dim = const_expr(spec.head_dim_vo)
    per = const_expr(dim // 32)
    acc, pieces = cute.make_rmem_tensor(per, Float32), cute.make_rmem_tensor((per, AHEAD), Float32)
    acc.fill(0.0)
    base, top, total = Int32(0), -Float32.inf, Float32(0.0)
    while base < w.parts:
        lse = -Float32.inf
        if base + cute.arch.lane_idx() < w.parts:
            lse = a.part[slot_of(a, w, base + cute.arch.lane_idx()), row, dim]
        peak = cute.arch.fmax(top, cute.arch.warp_reduction_max(lse))
        if peak != -Float32.inf:
            old, mine = cute.math.exp2(top - peak, fastmath=True), cute.math.exp2(lse - peak, fastmath=True)
            total = total * old + cute.arch.warp_reduction_sum(mine)
            acc.store(acc.load() * old)
            for j in cutlass.range(0, cutlass.min(w.parts - base, 32), AHEAD, unroll=1):
                for e in cutlass.range_constexpr(AHEAD):
                    at = slot_of(a, w, cutlass.min(base + j + e, w.parts - 1))
                    source = cute.local_tile(a.part[at, row, None], (per,), (cute.arch.lane_idx(),))
                    cute.autovec_copy(source, pieces[None, e])
                for e in cutlass.range_constexpr(AHEAD):
                    factor = cute.arch.shuffle_sync(mine, (j + e) % 32)
                    if factor > 0.0 and base + j + e < w.parts:
                        acc.store(acc.load() + pieces[None, e].load() * factor)
        top = peak
        base += 32
    return acc, top, total
