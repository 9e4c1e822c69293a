"""How the CTAs that share a row put their parts together: one CTA, or a cluster through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import dsmem
from .spec import BINS, PULLED


def rank(spec):
    """Of this CTA among those of the row."""
    return cute.arch.block_idx_in_cluster() if spec.cluster > 1 else Int32(0)


@cute.jit
def meet(spec: cutlass.Constexpr):
    """All threads of the row have arrived, and see each other's shared memory."""
    if const_expr(spec.cluster == 1):
        cute.arch.barrier()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def merge(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor):
    """From here on `bins` gives the sums of local (BINS,) over the CTAs of the row. Begins with `meet`; `local` may not
    be changed before another one where a cluster has at most PULLED CTAs, and total (BINS,) is left alone there."""
    meet(spec)
    if const_expr(spec.cluster > PULLED):
        tid = cute.arch.thread_idx()[0]
        share = const_expr(BINS // spec.cluster)
        for i in cutlass.range(tid, share, spec.threads, unroll=1):
            b = rank(spec) * share + i
            count = Uint32(0)
            for c in cutlass.range(spec.cluster, unroll=4):
                count += dsmem.load(dsmem.address(local, c), b)
            for c in cutlass.range(spec.cluster, unroll=4):
                dsmem.store(dsmem.address(total, c), b, count)
        meet(spec)


@cute.jit
def again(spec: cutlass.Constexpr):
    """`local` may be changed after `merge` and `bins`."""
    if const_expr(1 < spec.cluster <= PULLED):
        meet(spec)


@cute.jit
def bins(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor, first: Int32, into: cute.Tensor):
    """into = the merged bins from `first` on, a multiple of their number."""
    count = const_expr(min(cute.size(into), 4))
    part = cute.make_rmem_tensor(count, Uint32)
    for i in cutlass.range_constexpr(cute.size(into) // count):
        at = first + i * count
        for c in cutlass.range_constexpr(spec.cluster if 1 < spec.cluster <= PULLED else 1):
            if const_expr(spec.cluster == 1):
                cute.autovec_copy(cute.make_tensor(local.iterator + at, part.layout), part)
            elif const_expr(spec.cluster > PULLED):
                cute.autovec_copy(cute.make_tensor(total.iterator + at, part.layout), part)
            else:
                dsmem.load_vector(dsmem.address(local, c), at, part)
            for e in cutlass.range_constexpr(count):
                into[i * count + e] = part[e] if const_expr(c == 0) else into[i * count + e] + part[e]


@cute.jit
def publish(spec: cutlass.Constexpr, counts: cute.Tensor, table: cute.Tensor):
    """table[c] = counts (2,) of CTA c, in every CTA of the row; (cluster, 2). Ends with `meet`."""
    if const_expr(spec.cluster > 1):
        cute.arch.barrier()
        tid = cute.arch.thread_idx()[0]
        if tid < spec.cluster:
            for i in cutlass.range_constexpr(2):
                dsmem.store(dsmem.address(table, tid), 2 * rank(spec) + i, counts[i])
    meet(spec)


@cute.jit
def before(spec: cutlass.Constexpr, table: cute.Tensor, i: cutlass.Constexpr, c: Int32):
    """The sum of table[..., i] over the CTAs before `c`."""
    mine = Int32(0)
    if const_expr(spec.cluster > 1):
        if cute.arch.lane_idx() < c:
            mine = Int32(table[cute.arch.lane_idx(), i])
        mine = cute.arch.warp_redux_sync(mine, "add")
    return mine


@cute.jit
def tell(spec: cutlass.Constexpr, counts: cute.Tensor, i: cutlass.Constexpr, amount: Int32):
    """counts[i] += amount in the CTAs of the row behind this one, by the lanes of one warp. They see it after
    `meet`."""
    lane = cute.arch.lane_idx()
    if (lane > rank(spec)) & (lane < spec.cluster):
        dsmem.add(dsmem.address(counts, lane), i, amount)


@cute.jit
def pool(spec: cutlass.Constexpr, lists: cute.Tensor, table: cute.Tensor, into: cute.Tensor):
    """into = the lists of all CTAs of the row, (LIST,) of 64 bits each, table[c, 1] entries of CTA c, one behind the
    other. Ends with a barrier."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    words = cute.make_tensor(cute.recast_ptr(into.iterator, dtype=Uint32), cute.make_layout(2 * cute.size(into)))
    for c in cutlass.range(warp, spec.cluster, spec.threads // 32, unroll=1):
        first = before(spec, table, 1, c)
        source = dsmem.address(lists, c)
        for i in cutlass.range(lane, Int32(2 * table[c, 1]), 32, unroll=1):
            words[2 * first + i] = dsmem.load(source, i)
    cute.arch.barrier()
