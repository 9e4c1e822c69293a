"""How the CTAs that share a row put their parts together: one CTA, or a cluster through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ..device import dsmem
from .spec import BINS, PULLED


def rank(spec):
    """Of this CTA among those of the row."""
    return cute.arch.block_idx_in_cluster() if spec.cluster > 1 else Int32(0)


@cute.jit
def arrive(spec: cutlass.Constexpr):
    """The first half of `meet`; where a CTA is alone nothing."""
    if const_expr(spec.cluster > 1):
        dsmem.release()
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def wait(spec: cutlass.Constexpr):
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_wait()


@cute.jit
def meet(spec: cutlass.Constexpr):
    """All threads of the row have arrived, and see what the others wrote to the shared memory of their own CTAs."""
    if const_expr(spec.cluster == 1):
        cute.arch.barrier()
    arrive(spec)
    wait(spec)


@cute.jit
def merge(spec: cutlass.Constexpr, local: cute.Tensor, total: cute.Tensor):
    """From here on `bins` gives the sums of local (BINS,) over the CTAs of the row. Begins with `meet`. In clusters of
    more than PULLED CTAs each adds up its share of them, total (BINS / cluster,)."""
    meet(spec)
    if const_expr(spec.cluster > PULLED):
        share = const_expr(BINS // spec.cluster)
        for i in cutlass.range(cute.arch.thread_idx()[0], share, spec.threads, unroll=1):
            count = Uint32(0)
            for c in cutlass.range(spec.cluster, unroll=4):
                count += dsmem.load(dsmem.address(local, c), rank(spec) * share + i)
            total[i] = count
        meet(spec)


@cute.jit
def again(spec: cutlass.Constexpr):
    """The bins may be changed after a search."""
    if const_expr(1 < spec.cluster <= PULLED):
        meet(spec)
    else:
        cute.arch.barrier()


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
                share = const_expr(BINS // spec.cluster)
                dsmem.load_vector(dsmem.address(total, at // share), at % share, part)
            else:
                dsmem.load_vector(dsmem.address(local, c), at, part)
            for e in cutlass.range_constexpr(count):
                into[i * count + e] = part[e] if const_expr(c == 0) else into[i * count + e] + part[e]


@cute.jit
def ask(spec: cutlass.Constexpr, counts: cute.Tensor, i: Int32):
    """counts[i] of CTA `lane` of the row. Only warp 0 asks: where all do, they wait for each other."""
    count, lane = Uint32(0), cute.arch.lane_idx()
    if const_expr(spec.cluster > 1):
        if (cute.arch.warp_idx() == 0) & (lane < spec.cluster):
            count = Uint32(dsmem.load(dsmem.address(counts, lane), i))
    return Int32(count)


@cute.jit
def answer(spec: cutlass.Constexpr, asked: Int32, table: cute.Tensor):
    """table[c] = what `ask` got from CTA c. A barrier follows."""
    if const_expr(spec.cluster > 1):
        if cute.arch.thread_idx()[0] < spec.cluster:
            table[cute.arch.thread_idx()[0]] = asked


@cute.jit
def before(spec: cutlass.Constexpr, table: cute.Tensor, c: Int32):
    """The sum of a table over the CTAs before `c`; where a CTA is alone 0."""
    mine = Int32(0)
    if const_expr(spec.cluster > 1):
        if cute.arch.lane_idx() < c:
            mine = table[cute.arch.lane_idx()]
        mine = cute.arch.warp_redux_sync(mine, "add")
    return mine


@cute.jit
def collect(spec: cutlass.Constexpr, lists: cute.Tensor, table: cute.Tensor, pool: cute.Tensor):
    """pool = the lists of all CTAs of the row, 64 bits an entry, one behind the other, table[c] of CTA c. A warp a
    list; a barrier follows."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for c in cutlass.range(warp, spec.cluster, spec.threads // 32, unroll=1):
        first, source = before(spec, table, c), dsmem.address(lists, c)
        for i in cutlass.range(cute.arch.lane_idx(), table[c], 32, unroll=1):
            pool[first + i] = dsmem.load(source, i, Uint64)
