"""Load role: warps that find the tiles of their CTA and feed them by TMA, `kv.LOADERS` each for K and for V."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipe
from .. import geometry, kv, schedule
from . import tile as tiles


@cute.jit
def announce(spec: cutlass.Constexpr, plan, s, w: schedule.Work, t: Int32):
    """One warp: publish tile t's Work on the Q pipe, with its Q rows (unless math warps gather them) if it sees any key."""
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
def feed(spec: cutlass.Constexpr, plan, s, op: copy.Operand, loader: Int32, keys: cutlass.Constexpr):
    """One warp: its share of K (`keys`) or V of every tile of this CTA, last block first. Loader 0 of K announces."""
    a = plan.args
    smem, ring = (s.k, s.k_pipe) if keys else (s.v, s.v_pipe)
    group = a.q.shape[1] // a.k.shape[1]
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    start, before, i, t, more = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
    while more != 0:
        w, start, before = schedule.find(spec, a, schedule.turn(t, cta, ctas), start, before)
        more = w.valid
        b = tiles.blocks(spec, w, a)
        head = geometry.kv_head_of(w.head, group, spec.pack_gqa)
        pages = a.page_table[w.batch, 0 if keys else 1, None]
        owes = const_expr(keys) and loader == 0
        if w.valid != 0:
            for j in cutlass.range(b.hi - 1, b.lo - 1, -1, unroll=1):
                kv.SOURCE[spec.kv.source](spec, op, smem, ring, pages, (loader, i, j, head, w.kv_len))
                i += 1
                if owes and j == b.hi - 1:
                    announce(spec, plan, s, w, t)
        if owes and (w.valid == 0 or b.hi <= b.lo):
            announce(spec, plan, s, w, t)
        t += 1


@cute.jit
def load(spec: cutlass.Constexpr, plan, s):
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < kv.LOADERS:
        feed(spec, plan, s, plan.k, warp, True)
    elif warp < 2 * kv.LOADERS:
        feed(spec, plan, s, plan.v, warp - kv.LOADERS, False)
