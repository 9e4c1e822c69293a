"""The CTAs that share a row: one, or a cluster in which CTAs read each other's shared memory (DSMEM).

If a CTA has the row alone, each function here costs a CTA barrier at most. Histograms are summed in two ways. In
clusters of up to MAX_PULL_CLUSTER CTAs, each thread sums the bins of all CTAs when it reads them (`load_bins`).
In larger clusters, each CTA first sums its share of the bins (`merge_histograms`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ..device import dsmem
from .spec import BINS, MAX_PULL_CLUSTER


def rank(spec):
    """Return the rank of this CTA among the CTAs of its row."""
    return cute.arch.block_idx_in_cluster() if spec.cluster > 1 else Int32(0)


@cute.jit
def arrive(spec: cutlass.Constexpr):
    """Arrive at the cluster barrier (its first half): this thread's writes to its CTA's shared memory are visible to
    the threads that return from `wait`."""
    if const_expr(spec.cluster > 1):
        dsmem.fence_release()
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def wait(spec: cutlass.Constexpr):
    """Wait until all threads of the row have arrived (the second half of the cluster barrier)."""
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_wait()


@cute.jit
def cluster_barrier(spec: cutlass.Constexpr):
    """Wait for all threads of the row; each then sees the writes of the others to their CTAs' shared memory."""
    if const_expr(spec.cluster == 1):
        cute.arch.barrier()
    arrive(spec)
    wait(spec)


@cute.jit
def merge_histograms(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor):
    """Make the sums of all CTAs' histograms, local (BINS,), readable through `load_bins`.

    Starts with `cluster_barrier`. In clusters of more than MAX_PULL_CLUSTER CTAs, each CTA writes its share of
    the sums to total (BINS / cluster,)."""
    cluster_barrier(spec)
    if const_expr(spec.cluster > MAX_PULL_CLUSTER):
        # Sum this CTA's share of the bins over all CTAs; the second barrier publishes the sums.
        share = const_expr(BINS // spec.cluster)
        for i in cutlass.range(cute.arch.thread_idx()[0], share, spec.threads, unroll=1):
            count = Uint32(0)
            for c in cutlass.range(spec.cluster, unroll=4):
                count += dsmem.load(dsmem.address(local, c), rank(spec) * share + i)
            total[i] = count
        cluster_barrier(spec)


@cute.jit
def release_bins(spec: cutlass.Constexpr):
    """Wait until all CTAs have read the bins (after `select.search`), so that histograms may be overwritten."""
    if const_expr(1 < spec.cluster <= MAX_PULL_CLUSTER):
        cluster_barrier(spec)
    else:
        cute.arch.barrier()


@cute.jit
def load_bins(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor, first: Int32, into: cute.Tensor):
    """Load the merged bins [first, first + size(into)) into registers. first: a multiple of size(into)."""
    count = const_expr(min(cute.size(into), 4))
    part = cute.make_rmem_tensor(count, Uint32)
    for i in cutlass.range_constexpr(cute.size(into) // count):
        at = first + i * count
        for c in cutlass.range_constexpr(spec.cluster if 1 < spec.cluster <= MAX_PULL_CLUSTER else 1):
            if const_expr(spec.cluster == 1):
                cute.autovec_copy(cute.make_tensor(local.iterator + at, part.layout), part)
            elif const_expr(spec.cluster > MAX_PULL_CLUSTER):
                share = const_expr(BINS // spec.cluster)
                dsmem.load_vector(dsmem.address(total, at // share), at % share, part)
            else:
                dsmem.load_vector(dsmem.address(local, c), at, part)
            for e in cutlass.range_constexpr(count):
                into[i * count + e] = part[e] if const_expr(c == 0) else into[i * count + e] + part[e]


@cute.jit
def gather_counts(spec: cutlass.Constexpr, counts: cute.Tensor, i: Int32):
    """Read counts[i] of every CTA of the row: lane c of warp 0 returns that of CTA c, all other threads 0.

    Only one warp reads: with 16 warps of 16 CTAs reading, a load took 3,000 cycles."""
    count, lane = Uint32(0), cute.arch.lane_idx()
    if const_expr(spec.cluster > 1):
        if (cute.arch.warp_idx() == 0) & (lane < spec.cluster):
            count = Uint32(dsmem.load(dsmem.address(counts, lane), i))
    return Int32(count)


@cute.jit
def store_counts(spec: cutlass.Constexpr, count: Int32, table: cute.Tensor):
    """Store the result of `gather_counts`: table[c] for CTA c. The caller needs a barrier before it reads the table."""
    if const_expr(spec.cluster > 1):
        if cute.arch.thread_idx()[0] < spec.cluster:
            table[cute.arch.thread_idx()[0]] = count


@cute.jit
def sum_before_cta(spec: cutlass.Constexpr, table: cute.Tensor, c: Int32):
    """Return the sum of table[0 .. c - 1], or 0 if a CTA has the row alone. All lanes of a warp call it."""
    mine = Int32(0)
    if const_expr(spec.cluster > 1):
        if cute.arch.lane_idx() < c:
            mine = table[cute.arch.lane_idx()]
        mine = cute.arch.warp_redux_sync(mine, "add")
    return mine


@cute.jit
def gather_lists(spec: cutlass.Constexpr, lists: cute.Tensor, table: cute.Tensor, pool: cute.Tensor):
    """Copy the lists of all CTAs of the row into `pool`, in rank order.

    table[c]: entries of 64 bits of CTA c. One warp copies a list. The caller needs a barrier before it reads the
    pool."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for c in cutlass.range(warp, spec.cluster, spec.threads // 32, unroll=1):
        first, source = sum_before_cta(spec, table, c), dsmem.address(lists, c)
        for i in cutlass.range(cute.arch.lane_idx(), table[c], 32, unroll=1):
            pool[first + i] = dsmem.load(source, i, Uint64)
