"""Passes over the keys that a CTA holds in shared memory: fill it, count bins, mark the keys above a boundary.

Positions number the floats in shared memory. Element j of a slice is at position j + shift. The positions around
it, up to whole groups, hold filler, the lowest key."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ...device import copy
from .. import keys, rows, scope, select
from ..spec import BITS
from . import GROUP, TIE_LIST

UNROLL = 4  # vectors that a thread has in flight; 2 and 8 were slower
GROUP_WORDS = GROUP // 32  # words of bits per group
POS_BITS = 20  # bits of a position in an entry of s.list; the rank of its CTA lies above them


class Boundary(NamedTuple):
    """The keys min_key .. max_key, some of which are selected. All larger keys are selected, and no smaller one."""

    min_key: Uint32
    max_key: Uint32
    bin_count: Int32  # keys of the row at the boundary
    k_left: Int32  # how many of them get in
    bin: Int32  # their bin in s.local


class BitPieces(NamedTuple):
    """Pieces [first, end) of s.bits that one thread owns. 1 << parts pieces make a word: bytes if a warp has few
    words."""

    first: Int32
    end: Int32
    parts: Int32


def keys_per_vector(spec):
    """Return the number of keys per vector."""
    return rows.WORDS * keys.per_word(spec)


def groups(spec, x):
    """Return the number of GROUPs of positions that hold the slice."""
    return (x.vectors * keys_per_vector(spec) + GROUP - 1) // GROUP


@cute.jit
def reset(spec: cutlass.Constexpr, s):
    """Clear s.local, s.pool and s.counts. Ends with a CTA barrier."""
    select.clear(spec, s.local)
    tid, pool, counts = cute.arch.thread_idx()[0], s.pool, s.counts  # by themselves: see write.stage_indices
    for i in cutlass.range(tid, TIE_LIST, spec.threads, unroll=1):
        pool[i] = Uint64(0)
    if tid < 4:
        counts[tid] = Int32(0)
    cute.arch.barrier()


@cute.jit
def load_slice(spec: cutlass.Constexpr, s, x: rows.RowSlice):
    """Copy the slice to shared memory, and count the bins of its keys in s.local. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // keys_per_vector(spec))
    words = cute.make_rmem_tensor((rows.WORDS, UNROLL), Uint32)
    # The only pass over the slice in global memory: keep them in shared memory and count their bins on the way.
    # Reads: UNROLL vectors of the slice per thread, all in flight before the first is used.
    # Waits for: its loads only; the barrier comes with `search`.
    # Writes: each vector to s.keys; its keys to the bins of s.local, by shared-memory atomics.
    # Order: counting hides behind the loads. Read and count take 9.8 K cycles for 65536 fp32 keys in two CTAs, where
    #   the copy rate allows 8.2 K. For bf16 the atomics are the bound (bank conflicts, about 4 cycles per warp).
    for base in cutlass.range(tid, vectors, spec.threads * UNROLL, unroll=1):
        # load
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < vectors:
                rows.fetch(spec, x, v, words[None, u])
        # keep and count
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < vectors:
                copy.vector(words[None, u], s.keys[None, v])
                count_vector(spec, s, words[None, u])
    # take the filler out of bin 0, where it was counted
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * keys_per_vector(spec))


@cute.jit
def count(spec: cutlass.Constexpr, s, x: rows.RowSlice):
    """Count the bins of the keys in shared memory in s.local. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // keys_per_vector(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        copy.vector(s.keys[None, v], words)
        count_vector(spec, s, words)
    # take the filler out of bin 0, where it was counted
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * keys_per_vector(spec))


def count_vector(spec, s, words):
    """Count the bins of a vector's keys in s.local."""
    for w in range(rows.WORDS):
        for b in keys.bins_of(words[w], spec.dtype):
            select.add(s.local, b, 1)


def key_of(spec, words, e):
    """Return float e of a vector, left-aligned."""
    return keys.extract(words[e // keys.per_word(spec)], e % keys.per_word(spec), BITS[spec.dtype])


@cute.jit
def count_range(spec: cutlass.Constexpr, s, x: rows.RowSlice, min_key: Uint32, max_key: Uint32, shift: Int32):
    """Count the keys min_key .. max_key in s.local, in bins of 2^shift keys. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // keys_per_vector(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        copy.vector(s.keys[None, v], words)
        for e in cutlass.range_constexpr(keys_per_vector(spec)):
            key = keys.to_key(key_of(spec, words, e))
            if (key >= min_key) & (key <= max_key):
                select.add(s.local, Int32((key - min_key) >> shift), 1)
    # take the filler out of its bin
    lowest = const_expr(keys.FILLER >> BITS[spec.dtype])  # key of the filler
    if (tid == 0) & (min_key <= lowest) & (lowest <= max_key):
        select.add(s.local, Int32((Uint32(lowest) - min_key) >> shift), x.count - vectors * keys_per_vector(spec))


@cute.jit
def refine(spec: cutlass.Constexpr, s, x: rows.RowSlice, found: select.BinSearchResult) -> Boundary:
    """Split the bin found, and return the boundary.

    Its bin holds at most TIE_LIST keys of the row, or only keys that are all selected, or only equal keys."""
    b, bin_count, k_left, _ = found
    min_key, max_key = keys.range_of(b, spec.dtype)
    select.count_above(spec, s, b, bin_count, k_left)
    # Split the boundary's bin until its keys can be ranked one by one (at most TIE_LIST), or are all selected, or are
    # equal.
    # Reads: the keys in shared memory.
    # Waits for: all CTAs of the row to have read the old bins (`release_bins`) and counted the new ones (`search`).
    # Writes: s.local; in s.counts[1] this CTA's keys that are now known to be selected.
    # Order: the first histogram spends its bins where floats are, so for normal data the bin already holds a few dozen
    #   keys, and this loop does not run.
    while (bin_count > TIE_LIST) & (bin_count > k_left) & (max_key > min_key):
        # clear the bins
        shift = select.bin_shift(min_key, max_key)
        scope.release_bins(spec)
        select.clear(spec, s.local)
        cute.arch.barrier()
        # count the keys of the bin in narrower bins, and find the boundary among them
        count_range(spec, s, x, min_key, max_key, shift)
        b, bin_count, k_left, _ = select.search(spec, s, k_left)
        select.count_above(spec, s, b, bin_count, k_left)
        min_key += Uint32(b) << shift
        max_key = min_key + cutlass.min(max_key - min_key, (Uint32(1) << shift) - 1)
    return Boundary(min_key, max_key, bin_count, k_left, b)


def flat_keys(spec, s):
    """Return the bit patterns in shared memory, by position."""
    pointer = cute.recast_ptr(s.keys.iterator, dtype=keys.TYPES[BITS[spec.dtype]])
    return cute.make_tensor(pointer, cute.make_layout(cute.size(s.keys) * keys.per_word(spec)))


@cute.jit
def load_float(spec: cutlass.Constexpr, s, pos: Int32):
    """Load the float at a position, left-aligned."""
    word = flat_keys(spec, s)[pos].to(Uint32)
    return word if const_expr(BITS[spec.dtype] == 32) else word << 16


def index_of(spec, s, x, pos):
    """Return the index in the window of the key at a position."""
    if spec.stream:
        return s.index[pos]
    return x.low - x.shift + pos


def in_slice(spec, s, x, pos):
    """Return whether a position holds a key of the slice, not filler."""
    index = index_of(spec, s, x, pos)
    return (index >= x.low) & (index < x.end)


@cute.jit
def thread_pieces(spec: cutlass.Constexpr, x: rows.RowSlice) -> BitPieces:
    """Return this thread's pieces of s.bits, which lie in its warp's groups."""
    per = groups_per_warp(spec, x)
    parts = Int32(2) if per <= 2 else Int32(0)
    total, count = (groups(spec, x) * GROUP_WORDS) << parts, (per * GROUP_WORDS) << parts
    each = (count + 31) // 32
    begin = cute.arch.warp_idx() * count
    first = begin + cute.arch.lane_idx() * each
    return BitPieces(first, cutlass.min(cutlass.min(first + each, begin + count), total), parts)


def groups_per_warp(spec, x):
    """Return the number of groups per warp. They are neighbours; the last warps have fewer."""
    return (groups(spec, x) + spec.threads // 32 - 1) // (spec.threads // 32)


def piece(bits, p, parts):
    """Return (bits of piece p, position of its lowest bit)."""
    low = (p & ((1 << parts) - 1)) << 3
    return (bits[p >> parts] >> low) & (Uint32(0xFFFFFFFF) >> (12 * parts)), ((p >> parts) << 5) + low


@cute.jit
def mark(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, boundary: Boundary):
    """Set the bits in s.bits of the positions with a key at the boundary or above it.

    If not all keys at the boundary are selected, record them too: in s.list if the row has at most TIE_LIST of
    them, else as bits in s.ties, and then not in s.bits. s.table then holds the number of ties of each CTA. Ends
    with `scope.cluster_barrier`."""
    min_key, max_key, bin_count, k_left, b = boundary
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    sign, mask = keys.sign_multiplier(min_key), keys.xor_mask(min_key)
    per, hits = groups_per_warp(spec, x), Uint32(0)
    first = warp * per
    last = cutlass.min(first + per, groups(spec, x))
    masks = cute.make_rmem_tensor(GROUP_WORDS, Uint32)
    # Make a bit per key, set at the boundary and above. A warp marks its groups in order.
    # Reads: s.keys, written before the CTA barrier that ended `search`.
    # Waits for: nothing; no other CTA writes this shared memory.
    # Writes: s.bits; in `hits`, a bit per group, whether this lane saw a key at the boundary (a tie).
    # Order: only groups with a hit are examined again, after the loop, so it has no branch per key. A walk over all
    #   marked keys instead took 2 K cycles. The multiply-add gives key - min_key in one instruction, and the minimum of
    #   these differences tells whether one is a tie. More than TIE_LIST ties cannot be listed: `mark_ties` makes bits
    #   of them here.
    for group in cutlass.range(first, last, unroll=1):
        # bits of keys >= min_key
        nearest = max_key - min_key + 1
        for u in cutlass.range_constexpr(GROUP_WORDS):
            # x * sign + mask is the key, x ^ mask; for keys below the boundary the difference wraps around
            above = load_float(spec, s, group * GROUP + u * 32 + lane) * sign + (mask - min_key)
            masks[u] = Uint32(cute.arch.vote_ballot_sync(above <= Uint32(0xFFFFFFFF) - min_key))
            nearest = cutlass.min(nearest, above)
        if lane == 0:
            store_group(s.bits, group, masks)
        # did this lane see a tie?
        hits = hits << 1
        if nearest <= max_key - min_key:
            hits = hits | 1
        if (k_left < bin_count) & (bin_count > TIE_LIST):
            mark_ties(spec, s, x, group, boundary)
    # list the ties of the groups with hits
    ties = scope.gather_counts(spec, s.local, b)
    if (k_left < bin_count) & (bin_count <= TIE_LIST):
        cute.arch.sync_warp()
        while hits != 0:
            group = last - 1 - (31 - Int32(cute.arch.clz(hits)))
            hits = hits ^ (Uint32(1) << Uint32(last - 1 - group))
            list_ties(spec, a, s, x, group, boundary)
    # publish the number of ties of each CTA, and wait until all lists are complete
    scope.store_counts(spec, ties, s.table)
    scope.cluster_barrier(spec)


@cute.jit
def mark_ties(spec: cutlass.Constexpr, s, x: rows.RowSlice, group: Int32, boundary: Boundary):
    """Set the bits of a group's positions: in s.ties for keys at the boundary, in s.bits for keys above it."""
    min_key, max_key, mask = boundary.min_key, boundary.max_key, keys.xor_mask(boundary.min_key)
    masks, over = (cute.make_rmem_tensor(GROUP_WORDS, Uint32) for _ in range(2))
    for u in cutlass.range_constexpr(GROUP_WORDS):
        pos = group * GROUP + u * 32 + cute.arch.lane_idx()
        key = load_float(spec, s, pos) ^ mask
        tie = (key >= min_key) & (key <= max_key) & in_slice(spec, s, x, pos)
        masks[u] = Uint32(cute.arch.vote_ballot_sync(tie))
        over[u] = Uint32(cute.arch.vote_ballot_sync(key > max_key))
    if cute.arch.lane_idx() == 0:
        store_group(s.ties, group, masks)
        store_group(s.bits, group, over)


@cute.jit
def list_ties(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, group: Int32, boundary: Boundary):
    """Append this lane's keys at the boundary in a group to s.list, and clear the bits of filler.

    An entry has 64 bits: key, then CTA and position (inverted if lower indices win). Larger entries are selected
    first."""
    min_key, max_key, mask = boundary.min_key, boundary.max_key, keys.xor_mask(boundary.min_key)
    some, start, listed = Uint32(0), group * GROUP + cute.arch.lane_idx(), s.list
    for u in cutlass.range_constexpr(GROUP_WORDS):
        key = load_float(spec, s, start + u * 32) ^ mask
        if (key >= min_key) & (key <= max_key):
            some = some | Uint32(1 << u)
    while some != 0:
        pos = start + 32 * (31 - Int32(cute.arch.clz(some)))
        some = some ^ (Uint32(1) << Uint32((pos - start) >> 5))
        if in_slice(spec, s, x, pos):
            name = Uint32(scope.rank(spec) << POS_BITS) | Uint32(pos)
            if a.last_ties == 0:
                name = ~name
            entry = (Uint64(keys.to_key(load_float(spec, s, pos))) << 32) | Uint64(name)
            listed[select.add(s.counts, 0, 1)] = entry
        else:
            clear_bit(s.bits, pos)


def clear_bit(bits, pos):
    """Clear the bit of a position, atomically."""
    mask = ~(Uint32(1) << Uint32(pos & 31))
    cute.arch.atomic_and(bits.iterator + (pos >> 5), mask, sem="relaxed", scope="cta")


def store_group(bits, group, masks):
    """Store the words of a group."""
    copy.vector(masks, cute.make_tensor(bits.iterator + group * GROUP_WORDS, cute.make_layout(GROUP_WORDS)))
