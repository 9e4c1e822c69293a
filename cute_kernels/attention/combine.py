"""Merge of the parts of tiles that several CTAs share (`schedule`, spec.split). A launch of its own, as many CTAs.

CTA i merges the tile in which the work of CTA i of the forward kernel begins, where no earlier CTA's begins inside it;
a warp a row. A part holds normalised O and LSE; the sink enters here, once, and so do the factors on the output.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import geometry, schedule, softmax

THREADS = 256
AHEAD = 4  # parts that a warp loads at once


def merges(first, unit, before):
    """Whether a CTA merges the tile whose first unit is `first`: its own work begins inside, with `unit`, and that of
    the CTA before it, with `before`, does not."""
    return (first < unit) & (before <= first)


@cute.kernel
def kernel(spec: cutlass.Constexpr, a):
    cute.arch.griddepcontrol_wait()
    i, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    units = schedule.units(spec, a)
    unit = schedule.share(units, i, ctas)
    if i > 0 and unit < units:
        w, _, _, first, each = schedule.find(spec, a, unit, unit + 1, Int32(0), Int32(0))
        if merges(first, unit, schedule.share(units, i - 1, ctas)):
            merge(spec, a, w, (i - 1, first + each, units))


@cute.jit
def merge(spec: cutlass.Constexpr, a, w: schedule.Work, parts):
    """parts = (CTA that has the tile's begin, unit behind its end, all units)."""
    fold = geometry.fold(spec, a)
    rows = cutlass.min(geometry.tile_rows(w.q_len, fold) - w.m_block * spec.tile.m, spec.tile.m)
    factor = a.out_factor
    if a.out_scale.shape[0] > 0:
        factor *= a.out_scale[0]
    for row in cutlass.range(cute.arch.warp_idx(), rows, THREADS // 32, unroll=1):
        acc, top, total = gather(spec, a, row, parts)
        token = w.q_start + geometry.token_of(w.m_block * spec.tile.m + row, fold, True)
        head = geometry.head_of(w.m_block * spec.tile.m + row, w.head, fold, True)
        sink = -Float32.inf
        if a.sink.shape[0] > 0:
            sink = a.sink[head] * softmax.LOG2_E
        peak = cute.arch.fmax(top, sink)
        inverse, lse = Float32(0.0), -Float32.inf
        if peak != -Float32.inf:
            keys = cute.math.exp2(top - peak, fastmath=True)
            total = total * keys + cute.math.exp2(sink - peak, fastmath=True)
            inverse, lse = keys / total, peak + cute.math.log2(total, fastmath=True)
        out = cute.make_rmem_tensor(cute.size(acc), a.o.element_type)
        out.store((acc.load() * (inverse * factor)).to(a.o.element_type))
        target = cute.local_tile(a.o[token, head, None], (cute.size(acc),), (cute.arch.lane_idx(),))
        cute.autovec_copy(out, target)
        if a.lse.shape[0] > 0 and cute.arch.lane_idx() == 0:
            a.lse[token, head] = lse


@cute.jit
def gather(spec: cutlass.Constexpr, a, row: Int32, parts):
    """One warp: (this lane's columns of the sum of O x 2^(LSE - top), top, sum of 2^(LSE - top)) over the parts, in
    the order of keys. 32 parts at a time: a lane has the LSE of one, all have a share of each O."""
    per = const_expr(spec.head_dim_vo // 32)
    first, end, units, ctas = parts[0], parts[1], parts[2], cute.arch.grid_dim()[0]
    acc, pieces = cute.make_rmem_tensor(per, Float32), cute.make_rmem_tensor((per, AHEAD), Float32)
    acc.fill(0.0)
    base, top, total = first, -Float32.inf, Float32(0.0)
    while base < ctas and schedule.share(units, base, ctas) < end:
        c, lse = base + cute.arch.lane_idx(), -Float32.inf
        begin, behind = schedule.share(units, c, ctas), schedule.share(units, c + 1, ctas)
        has = (c < ctas) & (begin < end) & (begin < behind)
        if has:
            lse = a.part_lse[schedule.slot(c, c - first), row]
        count = 32 - Int32(cute.arch.clz(Int32(cute.arch.vote_ballot_sync(has))))
        peak = cute.arch.fmax(top, cute.arch.warp_reduction_max(lse))
        if peak != -Float32.inf:
            old, mine = cute.math.exp2(top - peak, fastmath=True), cute.math.exp2(lse - peak, fastmath=True)
            total = total * old + cute.arch.warp_reduction_sum(mine)
            acc.store(acc.load() * old)
            for j in cutlass.range(0, count, AHEAD, unroll=1):
                for e in cutlass.range_constexpr(AHEAD):
                    at = cutlass.min(base + j + e, ctas - 1)
                    at = schedule.slot(at, at - first)
                    source = cute.local_tile(a.part_o[at, row, None], (per,), (cute.arch.lane_idx(),))
                    cute.autovec_copy(source, pieces[None, e])
                for e in cutlass.range_constexpr(AHEAD):
                    factor = cute.arch.shuffle_sync(mine, (j + e) % 32)
                    if factor > 0.0 and j + e < count:  # else nothing was written there
                        acc.store(acc.load() + pieces[None, e].load() * factor)
        top = peak
        base += 32
    return acc, top, total
