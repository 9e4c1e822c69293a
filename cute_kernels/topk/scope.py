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
def standing(spec: cutlass.Constexpr, counts: cute.Tensor, rank: Int32):
    """Of the counts (2,) of all CTAs of the row, (sum of counts[0] before this CTA, sum of counts[1] before it and over
    all; counts[1] of CTA `lane`, sum before that CTA); after a `meet`."""
    lane, first, second = cute.arch.lane_idx(), Int32(0), Int32(0)
    if lane < spec.cluster:
        if const_expr(spec.cluster == 1):
            second = Int32(counts[1])
        else:
            source = dsmem.address(counts, lane)
            first, second = Int32(dsmem.load(source, 0)), Int32(dsmem.load(source, 1))
    sums, nears = prefix_sum(first), prefix_sum(second)
    return (
        cute.arch.shuffle_sync(sums - first, rank), cute.arch.shuffle_sync(nears - second, rank),
        cute.arch.shuffle_sync(nears, 31), second, nears - second,
    )  # fmt: skip


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
