"""Selection by histograms: count keys in bins, find the bin that holds the boundary, and split it until few keys are
left in it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device.warp import prefix_sum, sum_before_warp
from . import scope
from .spec import BINS


class BinSearchResult(NamedTuple):
    """The bin of the k_left-th largest key of the row, as `search` found it.

    If the row has fewer keys than k_left, only `total` has a meaning."""

    bin: Int32  # the bin that holds the key
    bin_count: Int32  # keys of the row in that bin
    k_left: Int32  # how many of these belong to the largest keys that were asked for
    total: Int32  # keys of the row in all bins


@cute.jit
def clear(spec: cutlass.Constexpr, bins: cute.Tensor):
    """Set all BINS bins to 0. The caller needs a barrier."""
    for b in cutlass.range(cute.arch.thread_idx()[0], BINS, spec.threads, unroll=1):
        bins[b] = Uint32(0)


@cute.jit
def add(bins: cute.Tensor, b, amount):
    """Add `amount` to bins[b] atomically, and return the value before."""
    return cute.arch.atomic_add(bins.iterator + b, bins.element_type(amount), sem="relaxed", scope="cta")


@cute.jit
def cta_prefix_sum(spec: cutlass.Constexpr, mine: Int32, scratch: cute.Tensor):
    """Return (sum over the threads before this one, sum over all threads) of `mine`. Contains a CTA barrier."""
    inside = prefix_sum(mine)
    earlier, everything = sum_before_warp(cute.arch.shuffle_sync(inside, 31), scratch, spec.threads // 32)
    return earlier + inside - mine, everything


@cute.jit
def search(spec: cutlass.Constexpr, s, k_left: Int32) -> BinSearchResult:
    """Find the bin of the k_left-th largest key of the row, k_left >= 1, in the CTAs' histograms s.local.

    Starts with `scope.cluster_barrier`; ends with a CTA barrier."""
    per = const_expr(BINS // spec.threads)
    scope.merge_histograms(spec, s.local, s.total)
    # Each thread sums a run of bins; thread 0 has the highest.
    first = BINS - (cute.arch.thread_idx()[0] + 1) * per
    counts, mine = cute.make_rmem_tensor(per, Uint32), Int32(0)
    scope.load_bins(spec, s.local, s.total, first, counts)
    for e in cutlass.range_constexpr(per):
        mine += Int32(counts[e])
    # A prefix sum from the highest bin down gives the number of keys above each run.
    above, everything = cta_prefix_sum(spec, mine, s.scratch)
    # The run that the k_left-th key falls into belongs to one thread, which walks it from the top.
    out = s.found  # by itself: a branch that stores to a field of `s` would carry all of `s`
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
    """Add to s.counts[1] this CTA's keys in the bins that are selected whole.

    found, bin_count, k_left: from `search`."""
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
    """Return log2 of the width of bins that divide the keys min_key .. max_key into at most BINS. min_key < max_key."""
    return cutlass.max(32 - Int32(cute.arch.clz(max_key - min_key)) - (BINS.bit_length() - 1), 0)
