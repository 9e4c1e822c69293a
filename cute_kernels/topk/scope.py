"""How the CTAs that share a row put their parts together: one CTA, or a cluster through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import dsmem
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
def publish(spec: cutlass.Constexpr, counts: cute.Tensor, above: Int32, equal: Int32):
    """counts[c] = (above, equal) of CTA c, in every CTA of the row; (cluster, 2) in shared memory. Ends with `meet`."""
    rank, tid = cute.arch.block_idx_in_cluster(), cute.arch.thread_idx()[0]
    if const_expr(spec.cluster == 1):
        if tid == 0:
            counts[0, 0], counts[0, 1] = above, equal
    elif tid < spec.cluster:
        dsmem.store(dsmem.address(counts, tid), 2 * rank, above)
        dsmem.store(dsmem.address(counts, tid), 2 * rank + 1, equal)
    meet(spec)
