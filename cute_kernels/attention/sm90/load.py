"""Load role: warps that schedule the tiles of their CTA and feed them by TMA, `kv.loaders` each for K and for V."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipe
from .. import geometry, kv, schedule


@cute.jit
def fetch_q(spec: cutlass.Constexpr, plan, s, w: schedule.Work, q: Int32):
    """One warp: the Q rows of a tile, item q of the Q pipe. Rows past the request are its neighbour's, or zero."""
    b = plan.q.boxes[0]
    pipe.fill(s.q_pipe, q, plan.q.bytes)
    g = cute.domain_offset((w.q_start + w.m_block * spec.tile.m, 0), b.gmem[None, None, w.head])
    qs, qg = copy.partition(b, s.q, g)
    stage = cute.arch.make_warp_uniform(pipe.slot(s.q_pipe, q))
    for d in cutlass.range_constexpr(cute.size(qs, mode=[2])):
        cute.copy(b.atom, qg[None, 0, d], qs[None, 0, d, stage], tma_bar_ptr=s.q_pipe.full + stage)


@cute.jit
def feed(spec: cutlass.Constexpr, plan, s, op: copy.Operand, loader: Int32, keys: cutlass.Constexpr):
    """One warp: its share of K (`keys`) or V of every tile of this CTA, last block first.

    Loader 0 of K also publishes each tile while it loads the one before, unless `announce` does; loader 0 of V also
    loads Q.
    """
    a = plan.args
    smem, ring = (s.k, s.k_pipe) if keys else (s.v, s.v_pipe)
    group = a.q.shape[1] // a.k.shape[1]
    publishes = const_expr(keys and not spec.split) and loader == 0
    loads_q = const_expr(not keys and not spec.pack_gqa)
    start, before, i, t, q, more = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
    unit, limits = Int32(0), (Int32(0), Int32(0))
    if publishes:
        start, before, unit = schedule.publish(spec, a, s, t, start, before, unit, limits)
    while more != 0:
        w = schedule.hear(s, t)
        more = w.valid
        if w.valid != 0:
            head = geometry.kv_head_of(w.head, group, spec.pack_gqa)
            pages = a.page_table[w.batch, 0 if keys else 1, None]
            if const_expr(loads_q):
                if loader == 0 and w.hi > w.lo:
                    fetch_q(spec, plan, s, w, q)
                    q += 1
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                at = (loader, i, j, head, w.kv_len)
                kv.SOURCE[spec.kv.source](spec, op, smem, ring, pages, at)
                i += 1
                if publishes and j == w.hi - 1:
                    start, before, unit = schedule.publish(spec, a, s, t + 1, start, before, unit, limits)
            if publishes and w.hi <= w.lo:
                start, before, unit = schedule.publish(spec, a, s, t + 1, start, before, unit, limits)
        t += 1


@cute.jit
def announce(spec: cutlass.Constexpr, a, s):
    """One warp: publish the CTA's tiles, and that there are no more. The tile whose end another CTA has is published
    second, right behind the one whose begin another CTA has: then parts are merged while whole tiles are loaded."""
    unit, limits = schedule.begin(spec, a)
    end, count = limits[0], limits[1]
    start, before, t, more = Int32(0), Int32(0), Int32(0), Int32(1)
    passed, left = Int32(0), Int32(0)  # the first unit that was passed over, and how many
    while more != 0:
        more = Int32(1) if unit < end else Int32(0)
        start, before, unit = schedule.publish(spec, a, s, t, start, before, unit, (end, count))
        if t == 0 and a.chunk == 0 and unit < end:
            _, start, before, tile = schedule.find(spec, a, end - 1, start, before, (end, count))
            passed, left = unit, cutlass.max(tile[0] - unit, 0)
            unit += left
        if unit >= end and left > 0:
            unit, end = passed, passed + left
            start, before, left = Int32(0), Int32(0), Int32(0)
        t += 1


@cute.jit
def feed_scales(spec: cutlass.Constexpr, plan, s):
    """One warp: the scale factors of K and V of every tile, into the stages that `feed` fills."""
    a = plan.args
    i, t, more = Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = schedule.hear(s, t)
        more = w.valid
        if w.valid != 0:
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                pages = [
                    kv.find_scales(spec, a.k.shape[2], a.page_table[w.batch, k, None], (j, w.kv_len)) for k in (0, 1)
                ]
                kv.fetch_scales(spec, a.k_scales, s.k_scales, s.k_pipe, pages[0], (i, j, w.head))
                kv.fetch_scales(spec, a.v_scales, s.v_scales, s.v_pipe, pages[1], (i, j, w.head))
                i += 1
        t += 1


@cute.jit
def load(spec: cutlass.Constexpr, plan, s):
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    count = const_expr(kv.loaders(spec))
    if warp < count:
        feed(spec, plan, s, plan.k, warp, True)
    elif warp < 2 * count:
        feed(spec, plan, s, plan.v, warp - count, False)
    elif const_expr(spec.split) and warp == 2 * count:
        announce(spec, plan.args, s)
    elif const_expr(spec.kv.dtype == "nvfp4"):
        feed_scales(spec, plan, s)
