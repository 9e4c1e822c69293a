"""Load role: one warp that finds tiles, announces them, and feeds Q, K and V by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipe
from .. import geometry, kv, schedule
from . import tile as tiles


@cute.jit
def announce(spec: cutlass.Constexpr, plan, s, w: schedule.Work, t: Int32):
    """Publish tile t's Work on the Q pipe, with its Q rows (unless math warps gather them) if it sees any key."""
    pipe.wait_empty(s.q_pipe, t)
    blocks = tiles.blocks(spec, w, plan.args)
    fetch = (blocks.hi > blocks.lo) and const_expr(not spec.pack_gqa)
    if cute.arch.lane_idx() == 0:
        schedule.tell(w, s.work)
        cute.arch.mbarrier_arrive_and_expect_tx(pipe.full(s.q_pipe, t), plan.q.bytes if fetch else 0)
    cute.arch.sync_warp()
    if const_expr(not spec.pack_gqa):
        if fetch:
            start = w.q_start + w.m_block * spec.tile.m
            g = cute.domain_offset((start, 0), plan.q.gmem[None, None, w.head])
            qs, qg = copy.boxes(plan.q, s.q, g, spec.tile.m)
            for d in cutlass.range_constexpr(cute.size(qs, mode=[2])):
                cute.copy(plan.q.atom, qg[None, 0, d], qs[None, 0, d, 0], tma_bar_ptr=pipe.full(s.q_pipe, t))


@cute.jit
def load(spec: cutlass.Constexpr, plan, s):
    """K of block j - 1 is requested before V of block j: the order in which math consumes them."""
    a = plan.args
    fetch = kv.SOURCE[spec.kv.source]
    group = a.q.shape[1] // a.k.shape[1]
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    start, before, n, t = Int32(0), Int32(0), Int32(0), Int32(0)
    more = Int32(1)
    while more != 0:
        w, start, before = schedule.find(spec, a, schedule.turn(t, cta, ctas), start, before)
        more = w.valid
        b = tiles.blocks(spec, w, a)
        if w.valid != 0 and b.hi > b.lo:
            head = geometry.kv_head_of(w.head, group, spec.pack_gqa)
            k_pages, v_pages = a.page_table[w.batch, 0, None], a.page_table[w.batch, 1, None]
            fetch(spec, plan.k, s.k, s.k_pipe, k_pages, (n, b.hi - 1, head, w.kv_len))
            announce(spec, plan, s, w, t)
            for j in cutlass.range(b.hi - 1, b.lo, -1, unroll=1):
                fetch(spec, plan.k, s.k, s.k_pipe, k_pages, (n + 1, j - 1, head, w.kv_len))
                fetch(spec, plan.v, s.v, s.v_pipe, v_pages, (n, j, head, w.kv_len))
                n += 1
            fetch(spec, plan.v, s.v, s.v_pipe, v_pages, (n, b.lo, head, w.kv_len))
            n += 1
        else:
            announce(spec, plan, s, w, t)
        t += 1
