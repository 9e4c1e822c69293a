"""Passes over the keys that a CTA holds in shared memory: fill it, count bins, mark what lies above a boundary.

Places: the floats of shared memory in order, those of the slice from `shift` on; what vectors hold around the slice is
filler, the lowest key.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ...device import copy
from .. import keys, rows, scope, select
from ..spec import BITS
from . import GROUP, LIST

UNROLL = 4  # vectors that a thread has in flight
STEP = GROUP // 32  # words of marks that a warp makes at once
OWNER = 20  # bits of a place, below its CTA


class Boundary(NamedTuple):
    """The keys least .. greatest, of which some get in: all larger ones do, no smaller one."""

    min_key: Uint32
    max_key: Uint32
    bin_count: Int32  # keys of the row at the boundary
    k_left: Int32  # how many of them get in
    bin: Int32  # of s.local, that they are in


class BitPieces(NamedTuple):
    """Pieces [first, end) of s.bits, one thread's. 1 << parts pieces make a word: bytes where a warp has few words."""

    first: Int32
    end: Int32
    parts: Int32


def lanes(spec):
    """Keys of a vector."""
    return rows.WORDS * keys.per_word(spec)


def groups(spec, x):
    """GROUPs of places that hold the slice."""
    return (x.vectors * lanes(spec) + GROUP - 1) // GROUP


@cute.jit
def prepare(spec: cutlass.Constexpr, s):
    """Clear s.local, s.pool and s.counts. Ends with a CTA barrier."""
    select.clear(spec, s.local)
    tid, pool, counts = cute.arch.thread_idx()[0], s.pool, s.counts  # alone: see `stage` of write.py
    for i in cutlass.range(tid, LIST, spec.threads, unroll=1):
        pool[i] = Uint64(0)
    if tid < 4:
        counts[tid] = Int32(0)
    cute.arch.barrier()


@cute.jit
def load_slice(spec: cutlass.Constexpr, s, x: rows.RowSlice):
    """Copy the slice to shared memory and count the bins of its keys into s.local. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // lanes(spec))
    words = cute.make_rmem_tensor((rows.WORDS, UNROLL), Uint32)
    for base in cutlass.range(tid, vectors, spec.threads * UNROLL, unroll=1):
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < vectors:
                rows.fetch(spec, x, v, words[None, u])
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < vectors:
                copy.vector(words[None, u], s.keys[None, v])
                count_vector(spec, s, words[None, u])
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * lanes(spec))


@cute.jit
def count(spec: cutlass.Constexpr, s, x: rows.RowSlice):
    """Count the bins of the keys in shared memory into s.local. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // lanes(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        copy.vector(s.keys[None, v], words)
        count_vector(spec, s, words)
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * lanes(spec))


def count_vector(spec, s, words):
    """Count the bins of a vector's keys into s.local."""
    for w in range(rows.WORDS):
        for b in keys.bins_of(words[w], spec.dtype):
            select.add(s.local, b, 1)


def key_of(spec, words, e):
    """Float e of a vector."""
    return keys.extract(words[e // keys.per_word(spec)], e % keys.per_word(spec), BITS[spec.dtype])


@cute.jit
def count_range(spec: cutlass.Constexpr, s, x: rows.RowSlice, min_key: Uint32, max_key: Uint32, shift: Int32):
    """Count the keys least .. greatest into s.local, in bins of 2^shift keys. The caller needs a barrier."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // lanes(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        copy.vector(s.keys[None, v], words)
        for e in cutlass.range_constexpr(lanes(spec)):
            key = keys.to_key(key_of(spec, words, e))
            if (key >= min_key) & (key <= max_key):
                select.add(s.local, Int32((key - min_key) >> shift), 1)
    lowest = const_expr(keys.FILLER >> BITS[spec.dtype])  # key of the filler
    if (tid == 0) & (min_key <= lowest) & (lowest <= max_key):
        select.add(s.local, Int32((Uint32(lowest) - min_key) >> shift), x.count - vectors * lanes(spec))


@cute.jit
def refine(spec: cutlass.Constexpr, s, x: rows.RowSlice, found: select.BinSearchResult) -> Boundary:
    """Split the bin found until it holds LIST keys of the row at most, or as many as are needed, or equal keys only."""
    b, bin_count, k_left, _ = found
    min_key, max_key = keys.range_of(b, spec.dtype)
    select.count_above(spec, s, b, bin_count, k_left)
    while (bin_count > LIST) & (bin_count > k_left) & (max_key > min_key):
        shift = select.bin_shift(min_key, max_key)
        scope.release_bins(spec)
        select.clear(spec, s.local)
        cute.arch.barrier()
        count_range(spec, s, x, min_key, max_key, shift)
        b, bin_count, k_left, _ = select.search(spec, s, k_left)
        select.count_above(spec, s, b, bin_count, k_left)
        min_key += Uint32(b) << shift
        max_key = min_key + cutlass.min(max_key - min_key, (Uint32(1) << shift) - 1)
    return Boundary(min_key, max_key, bin_count, k_left, b)


def flat(spec, s):
    """The bit patterns in shared memory, by place."""
    pointer = cute.recast_ptr(s.keys.iterator, dtype=keys.TYPES[BITS[spec.dtype]])
    return cute.make_tensor(pointer, cute.make_layout(cute.size(s.keys) * keys.per_word(spec)))


@cute.jit
def load(spec: cutlass.Constexpr, s, place: Int32):
    """The float at a place, left-aligned."""
    word = flat(spec, s)[place].to(Uint32)
    return word if const_expr(BITS[spec.dtype] == 32) else word << 16


def index_of(spec, s, x, place):
    """The index in the window of the key at a place."""
    if spec.stream:
        return s.index[place]
    return x.low - x.shift + place


def real(spec, s, x, place):
    """Whether a place holds a key of the slice, not filler."""
    index = index_of(spec, s, x, place)
    return (index >= x.low) & (index < x.end)


@cute.jit
def share(spec: cutlass.Constexpr, x: rows.RowSlice) -> BitPieces:
    """This thread's pieces of s.bits, inside its warp's part."""
    per = part(spec, x)
    parts = Int32(2) if per <= 2 else Int32(0)
    total, count = (groups(spec, x) * STEP) << parts, (per * STEP) << parts
    each = (count + 31) // 32
    begin = cute.arch.warp_idx() * count
    first = begin + cute.arch.lane_idx() * each
    return BitPieces(first, cutlass.min(cutlass.min(first + each, begin + count), total), parts)


def part(spec, x):
    """Groups of a warp, which are neighbours; the last warps have fewer."""
    return (groups(spec, x) + spec.threads // 32 - 1) // (spec.threads // 32)


def piece(bits, p, parts):
    """(bits of piece p of a thread's pieces, place of the lowest bit)."""
    low = (p & ((1 << parts) - 1)) << 3
    return (bits[p >> parts] >> low) & (Uint32(0xFFFFFFFF) >> (12 * parts)), ((p >> parts) << 5) + low


@cute.jit
def mark(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, boundary: Boundary):
    """Set the bits s.bits of the places whose key is at the boundary or above it.

    Where not all keys at the boundary get in, they are recorded, too: in s.list where the row has at most LIST of them,
    else as bits in s.ties, no longer in s.bits. s.table then tells how many each CTA has. Ends with
    `scope.cluster_barrier`."""
    min_key, max_key, bin_count, k_left, b = boundary
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    sign, mask = keys.sign_multiplier(min_key), keys.xor_mask(min_key)
    per, hits = part(spec, x), Uint32(0)
    first = warp * per
    last = cutlass.min(first + per, groups(spec, x))
    masks = cute.make_rmem_tensor(STEP, Uint32)
    for group in cutlass.range(first, last, unroll=1):
        nearest = max_key - min_key + 1
        for u in cutlass.range_constexpr(STEP):
            # x * sign + mask is the key, x ^ mask; keys below the boundary wrap around
            above = load(spec, s, group * GROUP + u * 32 + lane) * sign + (mask - min_key)
            masks[u] = Uint32(cute.arch.vote_ballot_sync(above <= Uint32(0xFFFFFFFF) - min_key))
            nearest = cutlass.min(nearest, above)
        if lane == 0:
            store(s.bits, group, masks)
        hits = hits << 1
        if nearest <= max_key - min_key:
            hits = hits | 1
        if (k_left < bin_count) & (bin_count > LIST):
            mark_ties(spec, s, x, group, boundary)
    ties = scope.gather_counts(spec, s.local, b)
    if (k_left < bin_count) & (bin_count <= LIST):
        cute.arch.sync_warp()
        while hits != 0:
            group = last - 1 - (31 - Int32(cute.arch.clz(hits)))
            hits = hits ^ (Uint32(1) << Uint32(last - 1 - group))
            list_ties(spec, a, s, x, group, boundary)
    scope.store_counts(spec, ties, s.table)
    scope.cluster_barrier(spec)


@cute.jit
def mark_ties(spec: cutlass.Constexpr, s, x: rows.RowSlice, group: Int32, boundary: Boundary):
    """Set the bits of a group's places: s.ties where the key is at the boundary, s.bits where it is above."""
    min_key, max_key, mask = boundary.min_key, boundary.max_key, keys.xor_mask(boundary.min_key)
    masks, over = (cute.make_rmem_tensor(STEP, Uint32) for _ in range(2))
    for u in cutlass.range_constexpr(STEP):
        place = group * GROUP + u * 32 + cute.arch.lane_idx()
        key = load(spec, s, place) ^ mask
        tie = (key >= min_key) & (key <= max_key) & real(spec, s, x, place)
        masks[u] = Uint32(cute.arch.vote_ballot_sync(tie))
        over[u] = Uint32(cute.arch.vote_ballot_sync(key > max_key))
    if cute.arch.lane_idx() == 0:
        store(s.ties, group, masks)
        store(s.bits, group, over)


@cute.jit
def list_ties(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, group: Int32, boundary: Boundary):
    """Append this lane's keys of a group at the boundary to s.list, with CTA and place, as 64 bits: larger entries get
    in first. Clears the bits of filler."""
    min_key, max_key, mask = boundary.min_key, boundary.max_key, keys.xor_mask(boundary.min_key)
    some, start, listed = Uint32(0), group * GROUP + cute.arch.lane_idx(), s.list
    for u in cutlass.range_constexpr(STEP):
        key = load(spec, s, start + u * 32) ^ mask
        if (key >= min_key) & (key <= max_key):
            some = some | Uint32(1 << u)
    while some != 0:
        place = start + 32 * (31 - Int32(cute.arch.clz(some)))
        some = some ^ (Uint32(1) << Uint32((place - start) >> 5))
        if real(spec, s, x, place):
            name = Uint32(scope.rank(spec) << OWNER) | Uint32(place)
            if a.last_ties == 0:
                name = ~name
            entry = (Uint64(keys.to_key(load(spec, s, place))) << 32) | Uint64(name)
            listed[select.add(s.counts, 0, 1)] = entry
        else:
            drop(s.bits, place)


def drop(bits, place):
    """Clear the bit of a place, atomically."""
    mask = ~(Uint32(1) << Uint32(place & 31))
    cute.arch.atomic_and(bits.iterator + (place >> 5), mask, sem="relaxed", scope="cta")


def store(bits, group, masks):
    """Store the words of a group."""
    copy.vector(masks, cute.make_tensor(bits.iterator + group * STEP, cute.make_layout(STEP)))
