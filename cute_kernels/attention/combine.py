"""Merge of the parts of tiles (`schedule`, spec.split). A launch of its own, as many CTAs.

A CTA merges the tiles that begin among its units; a warp a row. A part holds normalised O and LSE; the sink enters
here, once, and so do the factors on the output.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import epilogue, geometry, schedule, softmax

THREADS = 256
AHEAD = 4  # parts that a warp loads at once


@cute.kernel
def kernel(spec: cutlass.Constexpr, a):
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    units = schedule.units(spec, a)
    begin, end = schedule.share(units, cta, ctas), schedule.share(units, cta + 1, ctas)
    unit, start, before = begin, Int32(0), Int32(0)
    if a.chunk == 0:
        unit = cutlass.max(begin, end - 1)  # of the tiles that begin here only the last has parts elsewhere
    w, start, before, tile = schedule.find(spec, a, unit, unit + 1, start, before)
    cute.arch.griddepcontrol_wait()  # the lengths are older than the forward kernel, which waited for them
    while unit < end:
        first, each = tile[0], tile[1]
        last = Int32(first + each)
        if first >= begin:
            if a.chunk > 0 and each > 1:
                merge(spec, a, w, (first, each, Int32(-1)))
            elif a.chunk == 0 and last > end:
                merge(spec, a, w, (first, schedule.holder(last - 1, units, ctas) - cta + 1, cta))
        unit = last
        if unit < end:
            w, start, before, tile = schedule.find(spec, a, unit, unit + 1, start, before)


@cute.jit
def slot_of(part: Int32, parts):
    """Slot of a part of a tile: parts = (its first unit, how many parts it has, the CTA that has its begin, or -1)."""
    first, _, cta = parts
    slot = first + part
    if cta >= 0:
        slot = schedule.slot(cta + part, part)
    return slot


@cute.jit
def merge(spec: cutlass.Constexpr, a, w: schedule.Work, parts):
    """parts: of `slot_of`."""
    fold = geometry.fold(spec, a)
    rows = geometry.tile_rows(w.q_len, fold)
    m = geometry.tile_m(spec, rows)
    rows = cutlass.min(rows - w.m_block * m, m)
    factor = softmax.factor(a.out_factor, a.out_scale)
    for row in cutlass.range(cute.arch.warp_idx(), rows, THREADS // 32, unroll=1):
        acc, top, total = gather(spec, a, row, parts)
        token = w.q_start + geometry.token_of(w.m_block * m + row, fold, True)
        head = geometry.head_of(w.m_block * m + row, w.head, fold, True)
        inverse, lse = softmax.close(top, total, epilogue.sink_of(a, head))
        acc.store(acc.load() * (inverse * factor))
        epilogue.store_piece(a, token, head, cute.arch.lane_idx(), acc)
        if a.lse.shape[0] > 0 and cute.arch.lane_idx() == 0:
            a.lse[token, head] = lse


@cute.jit
def gather(spec: cutlass.Constexpr, a, row: Int32, parts):
    """One warp: (this lane's columns of the sum of O x 2^(LSE - top), top, sum of 2^(LSE - top)) over the parts, in
    the order of keys. 32 parts at a time: a lane has the LSE of one, all have a share of each O."""
    dim = const_expr(spec.head_dim_vo)
    per, count = const_expr(dim // 32), parts[1]
    acc, pieces = cute.make_rmem_tensor(per, Float32), cute.make_rmem_tensor((per, AHEAD), Float32)
    acc.fill(0.0)
    base, top, total = Int32(0), -Float32.inf, Float32(0.0)
    while base < count:
        lse = -Float32.inf
        if base + cute.arch.lane_idx() < count:
            lse = a.part[slot_of(base + cute.arch.lane_idx(), parts), row, dim]
        peak = cute.arch.fmax(top, cute.arch.warp_reduction_max(lse))
        if peak != -Float32.inf:
            old, mine = cute.math.exp2(top - peak, fastmath=True), cute.math.exp2(lse - peak, fastmath=True)
            total = total * old + cute.arch.warp_reduction_sum(mine)
            acc.store(acc.load() * old)
            for j in cutlass.range(0, cutlass.min(count - base, 32), AHEAD, unroll=1):
                for e in cutlass.range_constexpr(AHEAD):
                    at = slot_of(cutlass.min(base + j + e, count - 1), parts)
                    source = cute.local_tile(a.part[at, row, None], (per,), (cute.arch.lane_idx(),))
                    cute.autovec_copy(source, pieces[None, e])
                for e in cutlass.range_constexpr(AHEAD):
                    factor = cute.arch.shuffle_sync(mine, (j + e) % 32)
                    if factor > 0.0 and base + j + e < count:
                        acc.store(acc.load() + pieces[None, e].load() * factor)
        top = peak
        base += 32
    return acc, top, total
