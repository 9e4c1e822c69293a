"""Sort the selected elements of each row in place: descending keys, equal ones by ascending index. Host part and device
entry.

A CTA sorts a row. An element's number says how far its key lies below the greatest of the row, then its position, which
rises with its index: numbers differ, and lower ones come first. A bucket of n elements is split into PARTS * n bins of
equal width, all buckets at once: counted by atomics, placed by a prefix sum. Bins are the buckets of the next split.
When none holds more than FEW elements, each of these counts those of its bucket that come before it.

The largest of normal scores need one split. Each one multiplies the distance of two elements that stay in a crowded
bucket by at least PARTS * (FEW + 1) = 26, so that numbers of 44 bits need at most 10.

Shared memory: bins, then, over them, the elements by bucket; indices by position; words of scratch.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64, const_expr

from ... import abi
from .. import keys, select
from ..spec import BITS
from . import EACH, FEW, PARTS, SortArgs

COUNT = 16  # bits of a number of elements of a row
SMALL = 4  # bits of a number of elements of a bucket that is not crowded


def fake_args(spec) -> dict[str, Any]:
    return SortArgs(
        values=abi.tensor(abi.DTYPES[spec.dtype], (None, None), align=BITS[spec.dtype] // 8),
        indices=abi.tensor(cutlass.Int64, (None, None), align=8),
        enable_pdl=Int32(0),
    )._asdict()


@dataclass(frozen=True)
class Shared:
    bins: cute.Tensor  # (PARTS * capacity,) uint32: counts, then packed (first element, count)
    entries: cute.Tensor  # (capacity,) uint64, over the bins: packed (number, place in its bucket, count of that)
    index: cute.Tensor  # (capacity,) int32
    scratch: cute.Tensor  # (64,) int32


@dataclass(frozen=True)
class Elements:
    """Those of a thread, at positions tid, tid + threads, ..."""

    below: cute.Tensor  # (EACH,) uint32: how far its key lies below the greatest of the row
    fraction: cute.Tensor  # (EACH,) uint64, in units of 2^-64: where in the range of its bucket it lies
    bucket: cute.Tensor  # (EACH,) uint32: packed (first element, count)
    place: cute.Tensor  # (EACH,) uint32: in its bucket, in any order


def allocate(spec) -> Shared:
    smem = cutlass.utils.SmemAllocator()
    bins = smem.allocate_tensor(Uint32, cute.make_layout(PARTS * spec.capacity), 16)
    return Shared(
        bins=bins,
        entries=cute.make_tensor(cute.recast_ptr(bins.iterator, dtype=Uint64), cute.make_layout(spec.capacity)),
        index=smem.allocate_tensor(Int32, cute.make_layout(spec.capacity), 16),
        scratch=smem.allocate_tensor(Int32, cute.make_layout(64), 16),
    )


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = SortArgs(*flat)
    kernel(spec, a).launch(
        grid=[a.values.shape[0], 1, 1],
        block=[spec.threads, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        preferred_smem_carveout=100,
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: SortArgs):
    s, row, k = allocate(spec), cute.arch.block_idx()[0], a.values.shape[1]
    clear(spec, s)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    x = Elements(*(cute.make_rmem_tensor(EACH, kind) for kind in (Uint32, Uint64, Uint32, Uint32)))
    greatest = load(spec, s, a, row, x)
    crowded = Int32(1)
    while crowded > 0:
        crowded = split(spec, s, x, k)
        if crowded > 0:
            clear(spec, s)
            cute.arch.barrier()
    for e in cutlass.range_constexpr(EACH):
        if position(spec, e) < k:
            entry = number_of(spec, x.below[e], position(spec, e)) << (2 * SMALL)
            entry = entry | Uint64(x.place[e] << SMALL | x.bucket[e] & (1 << SMALL) - 1)
            s.entries[(x.bucket[e] >> COUNT) + x.place[e]] = entry
    cute.arch.barrier()
    store(spec, s, a, row, greatest)


def position(spec, e):
    """The position of this thread's element e."""
    return cute.arch.thread_idx()[0] + e * spec.threads


def bits_of_position(spec):
    return spec.capacity.bit_length() - 1


def number_of(spec, below, at):
    """An element's number, of how far its key lies below the greatest, and its position."""
    return Uint64(below) << bits_of_position(spec) | Uint64(at)


def scale(fraction, parts):
    """fraction * parts, in units of 2^-64: (integer part, fraction). parts: below 2^32."""
    low = (fraction & 0xFFFFFFFF) * parts
    high = (fraction >> 32) * parts + (low >> 32)
    return high >> 32, (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF


def word_of(b):
    """Where a bin's count lies: the vectors of 4 bins that 8 threads of `sum_before` read at once, in as many banks."""
    return b ^ (b >> 3 & 4)


@cute.jit
def clear(spec: cutlass.Constexpr, s: Shared):
    """Set all bins to 0. The caller needs a barrier."""
    zeros = cute.make_rmem_tensor(4, Uint32)
    zeros.fill(0)
    for i in cutlass.range_constexpr(PARTS * EACH // 4):
        at = (cute.arch.thread_idx()[0] + i * spec.threads) * 4
        cute.autovec_copy(zeros, cute.make_tensor(s.bins.iterator + at, zeros.layout))


@cute.jit
def load(spec: cutlass.Constexpr, s: Shared, a, row: Int32, x: Elements):
    """Read a row into x, all elements in one bucket, and its indices into s.index. Elements behind the last are copies
    of its key. Returns the greatest key; contains a CTA barrier."""
    bits, k = const_expr(BITS[spec.dtype]), a.values.shape[1]
    values, indices = keys.raw(a.values, bits)[row, None], a.indices[row, None]
    key, index = cute.make_rmem_tensor(EACH, Uint32), cute.make_rmem_tensor(EACH, Int32)
    for e in cutlass.range_constexpr(EACH):
        at = cutlass.min(position(spec, e), k - 1)
        key[e], index[e] = values[at].to(Uint32) << (32 - bits), indices[at].to(Int32)
    for e in cutlass.range_constexpr(EACH):
        key[e] = keys.order(key[e]) >> (32 - bits)
        s.index[position(spec, e)] = index[e]
    least, greatest = key[0], key[0]
    for e in cutlass.range_constexpr(1, EACH):
        least, greatest = cutlass.min(least, key[e]), cutlass.max(greatest, key[e])
    least, greatest = extremes(spec, s, least, greatest)
    leading = 32 - bits_of_position(spec) + Int32(cute.arch.clz(greatest - least))  # zeros of the highest number
    for e in cutlass.range_constexpr(EACH):
        x.below[e], x.bucket[e] = greatest - key[e], Uint32(k)
        x.fraction[e] = number_of(spec, x.below[e], position(spec, e)) << Uint64(leading)
    return greatest


@cute.jit
def extremes(spec: cutlass.Constexpr, s: Shared, least: Uint32, greatest: Uint32):
    """(least, greatest) of all threads'. Contains a CTA barrier."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    least, greatest = cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(greatest, "max")
    if lane == 0:
        s.scratch[warp], s.scratch[warp + 32] = Int32(least), Int32(greatest)
    cute.arch.barrier()
    if lane < spec.threads // 32:
        least, greatest = Uint32(s.scratch[lane]), Uint32(s.scratch[lane + 32])
    return cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(greatest, "max")


@cute.jit
def split(spec: cutlass.Constexpr, s: Shared, x: Elements, k: Int32):
    """Split every bucket. Returns 0 where none has more than FEW elements then. s.bins are 0, and a CTA barrier is
    behind that; ends with one."""
    for e in cutlass.range_constexpr(EACH):
        first, count = x.bucket[e] >> COUNT, x.bucket[e] & (1 << COUNT) - 1
        b, x.fraction[e] = scale(x.fraction[e], PARTS * Uint64(count))
        x.bucket[e] = word_of(PARTS * first + Uint32(b))
        if position(spec, e) < k:
            x.place[e] = select.add(s.bins, x.bucket[e], 1)
    cute.arch.barrier()
    crowded = sum_before(spec, s)
    cute.arch.barrier()
    for e in cutlass.range_constexpr(EACH):
        x.bucket[e] = s.bins[x.bucket[e]]
    cute.arch.barrier()
    return crowded


def own_bins(s, counts, i):
    """The bins whose counts this thread holds in counts[:, i]."""
    first = cute.arch.thread_idx()[0] * cute.size(counts) + i * 4
    return cute.make_tensor(s.bins.iterator + word_of(first), counts[None, i].layout)


@cute.jit
def sum_before(spec: cutlass.Constexpr, s: Shared):
    """Replace the count of each bin by packed (elements of the bins before it, count). Contains a CTA barrier.

    Returns how many threads have seen a count above FEW."""
    counts, mine, most = cute.make_rmem_tensor((4, EACH * PARTS // 4), Uint32), Uint32(0), Uint32(0)
    for i in cutlass.range_constexpr(counts.shape[1]):
        cute.autovec_copy(own_bins(s, counts, i), counts[None, i])
    for e in cutlass.range_constexpr(cute.size(counts)):
        mine, most = mine + counts[e], cutlass.max(most, counts[e])
    if most > FEW:
        mine += 1 << COUNT
    before, everything = select.rank_in(spec, Int32(mine), s.scratch)
    first = Uint32(before) & (1 << COUNT) - 1
    for e in cutlass.range_constexpr(cute.size(counts)):
        count = counts[e]
        counts[e] = first << COUNT | count
        first += count
    for i in cutlass.range_constexpr(counts.shape[1]):
        cute.autovec_copy(counts[None, i], own_bins(s, counts, i))
    return everything >> COUNT


@cute.jit
def store(spec: cutlass.Constexpr, s: Shared, a, row: Int32, greatest: Uint32):
    """Write the elements of s.entries, which are in order but for those of a bucket: neighbours, at most FEW."""
    bits, k = const_expr(BITS[spec.dtype]), a.values.shape[1]
    values, indices = keys.raw(a.values, bits)[row, None], a.indices[row, None]
    own, first, to = (cute.make_rmem_tensor(EACH, kind) for kind in (Uint64, Int32, Int32))
    most = Int32(0)
    for e in cutlass.range_constexpr(EACH):
        own[e], first[e], to[e] = Uint64(0), Int32(0), Int32(0)
        if position(spec, e) < k:
            own[e] = s.entries[position(spec, e)]
            first[e] = position(spec, e) - Int32(own[e] >> SMALL & (1 << SMALL) - 1)
            most = cutlass.max(most, Int32(own[e] & (1 << SMALL) - 1))
    for i in cutlass.range(most, unroll=1):
        for e in cutlass.range_constexpr(EACH):
            if first[e] + i < k:
                if s.entries[first[e] + i] < own[e]:  # no entry of a later bucket is
                    to[e] += 1
    for e in cutlass.range_constexpr(EACH):
        number = own[e] >> (2 * SMALL)
        key = (greatest - Uint32(number >> bits_of_position(spec))) << (32 - bits)
        value, index = (key ^ keys.xor_mask(key)) >> (32 - bits), s.index[Int32(number) & spec.capacity - 1]
        if position(spec, e) < k:
            values[first[e] + to[e]] = value.to(keys.TYPES[bits])
            indices[first[e] + to[e]] = Int64(index)
