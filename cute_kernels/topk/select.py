"""Selection by histograms: count keys in bins, find the bin that holds the boundary, and split it until few are
left."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device.warp import prefix_sum
from . import scope
from .spec import BINS


class BinSearchResult(NamedTuple):
    """What `search` returns. The first three mean nothing where the row has fewer keys than were asked for."""

    bin: Int32  # that the need-th largest key of the row is in
    bin_count: Int32  # keys of the row in that bin
    k_left: Int32  # how many of them are among the `k_left` largest keys of the row
    total: Int32  # keys of the row in all bins


@cute.jit
def clear(spec: cutlass.Constexpr, bins: cute.Tensor):
    """Set all BINS bins to 0. The caller needs a barrier."""
    for b in cutlass.range(cute.arch.thread_idx()[0], BINS, spec.threads, unroll=1):
        bins[b] = Uint32(0)


@cute.jit
def add(bins: cute.Tensor, b, amount):
    """Add `amount` to bins[b] atomically; returns the value before."""
    return cute.arch.atomic_add(bins.iterator + b, bins.element_type(amount), sem="relaxed", scope="cta")


@cute.jit
def sum_before_warp(value: Int32, scratch: cute.Tensor, warps: cutlass.Constexpr):
    """(sum over the warps before this one, sum over all warps) of `value`, which is equal in all lanes of a warp.

    All threads of the CTA call it: it contains a CTA barrier. scratch: (warps,) at least."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    if lane == 0:
        scratch[warp] = value
    cute.arch.barrier()
    mine, earlier = Int32(0), Int32(0)
    if lane < warps:
        mine = scratch[lane]
    if lane < warp:
        earlier = mine
    return cute.arch.warp_redux_sync(earlier, "add"), cute.arch.warp_redux_sync(mine, "add")


@cute.jit
def cta_prefix_sum(spec: cutlass.Constexpr, mine: Int32, scratch: cute.Tensor):
    """(sum over the threads before this one, sum over all threads) of `mine`. Contains a CTA barrier."""
    inside = prefix_sum(mine)
    earlier, everything = sum_before_warp(cute.arch.shuffle_sync(inside, 31), scratch, spec.threads // 32)
    return earlier + inside - mine, everything


@cute.jit
def search(spec: cutlass.Constexpr, s, k_left: Int32) -> BinSearchResult:
    """Find the bin of the need-th largest key of the row, need >= 1, in the CTAs' histograms s.local.

    Starts with `scope.cluster_barrier`."""
    per = const_expr(BINS // spec.threads)
    scope.merge_histograms(spec, s.local, s.total)
    first = BINS - (cute.arch.thread_idx()[0] + 1) * per
    counts, mine = cute.make_rmem_tensor(per, Uint32), Int32(0)
    scope.load_bins(spec, s.local, s.total, first, counts)
    for e in cutlass.range_constexpr(per):
        mine += Int32(counts[e])
    above, everything = cta_prefix_sum(spec, mine, s.scratch)
    out = s.found  # alone: a branch that stores to `s` carries all that it holds
    if (above < k_left) & (k_left <= above + mine):
        b, bin_count, left = Int32(0), Int32(0), Int32(0)
        for e in cutlass.range_constexpr(per):
            if above < k_left:
                b, bin_count, left = first + per - 1 - e, Int32(counts[per - 1 - e]), k_left - above
            above += Int32(counts[per - 1 - e])
        out[0], out[1], out[2] = b, bin_count, left
    cute.arch.barrier()
    return BinSearchResult(s.found[0], s.found[1], s.found[2], everything)


@cute.jit
def count_above(spec: cutlass.Constexpr, s, found: Int32, bin_count: Int32, k_left: Int32):
    """Add this CTA's keys in the bins that get in whole (after `search` gave found, here, need) to s.counts[1]."""
    if const_expr(spec.cluster > 1):
        per = const_expr(BINS // spec.threads)
        first = cute.arch.thread_idx()[0] * per
        lowest, higher = found if k_left == bin_count else found + 1, Int32(0)
        own = cute.make_rmem_tensor(per, Uint32)
        cute.autovec_copy(cute.make_tensor(s.local.iterator + first, own.layout), own)
        for e in cutlass.range_constexpr(per):
            if first + e >= lowest:
                higher += Int32(own[e])
        higher = cute.arch.warp_redux_sync(higher, "add")
        if (cute.arch.lane_idx() == 0) & (higher > 0):
            add(s.counts, 1, higher)


@cute.jit
def bin_shift(min_key: Uint32, max_key: Uint32):
    """log2 of the width of bins that divide the keys least .. greatest, least < greatest, into at most BINS."""
    return cutlass.max(32 - Int32(cute.arch.clz(max_key - min_key)) - (BINS.bit_length() - 1), 0)
