"""How the CTAs that share a row put their parts together: one CTA, or a cluster through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import dsmem
from ..device.warp import prefix_sum
from .keys import BINS


@cute.jit
def meet(spec: cutlass.Constexpr):
    """All threads of the row have arrived, and see each other's shared memory."""
    if const_expr(spec.cluster == 1):
        cute.arch.barrier()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def totals(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor):
    """total[b] = the sum of local[b] over the CTAs of the row, both (BINS,). Begins and ends with `meet`."""
    meet(spec)
    if const_expr(spec.cluster > 1):
        rank, tid = cute.arch.block_idx_in_cluster(), cute.arch.thread_idx()[0]
        share = const_expr(BINS // spec.cluster)
        for i in cutlass.range(tid, share, spec.threads, unroll=1):
            b = rank * share + i
            count = Uint32(0)
            for c in cutlass.range_constexpr(spec.cluster):
                count += dsmem.load(dsmem.address(local, c), b)
            for c in cutlass.range_constexpr(spec.cluster):
                dsmem.store(dsmem.address(total, c), b, count)
        meet(spec)


@cute.jit
def sums(spec: cutlass.Constexpr, counter: cute.Tensor, rank: Int32):
    """(sum of the counter over the CTAs of the row before this one, and over all, of CTA `lane`'s own, before that
    CTA). counter (1,); after a `meet`."""
    lane, own = cute.arch.lane_idx(), Int32(0)
    if const_expr(spec.cluster == 1):
        if lane == 0:
            own = Int32(counter[0])
    elif lane < spec.cluster:
        own = Int32(dsmem.load(dsmem.address(counter, lane), 0))
    inclusive = prefix_sum(own)
    earlier = inclusive - own
    return cute.arch.shuffle_sync(earlier, rank), cute.arch.shuffle_sync(inclusive, 31), own, earlier


@cute.jit
def pool(spec: cutlass.Constexpr, lists: cute.Tensor, own: Int32, earlier: Int32, into: cute.Tensor):
    """into = the lists of all CTAs of the row, one behind the other: (2, LIST) each, `own` entries of CTA `lane`, behind
    `earlier`. A barrier follows."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    for c in cutlass.range(warp, spec.cluster, spec.threads // 32, unroll=1):
        length, first = cute.arch.shuffle_sync(own, c), cute.arch.shuffle_sync(earlier, c)
        source = dsmem.address(lists, c)
        for i in cutlass.range(lane, length, 32, unroll=1):
            into[0, first + i] = dsmem.load(source, 2 * i)
            into[1, first + i] = dsmem.load(source, 2 * i + 1)
