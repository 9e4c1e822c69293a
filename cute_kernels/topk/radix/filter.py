"""Slices longer than shared memory: they are streamed, and only candidates are kept, in index order.

A candidate is a key of at least `floor`. The first floor comes from a sample of the row and leaves more than k
keys, so one pass over the row suffices. If the candidates do not fit, only the CTA's k best are kept, and their
boundary is the floor from there on. Among equal keys at that boundary, the k best are those that `last_ties` selects;
if it is 0 and all keys at the boundary are equal, the floor also excludes the equal keys that come later (`compact`).
If the sample misled, and fewer than k keys of the row reach the floor, the pass is repeated with floor 0: no result
depends on the sample."""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device.warp import prefix_sum, sum_before_warp
from .. import keys, rows, scope, select
from ..spec import BITS
from . import CHUNK, GROUP, passes, write
from .passes import keys_per_vector

SAMPLE = 4096  # keys
COUNT_BITS = 16  # bits of a warp's count of candidates in one vector per thread; two counts make a word
LINE = 8  # vectors of 128 contiguous bytes in a sample; single sectors took 28 K cycles per row, lines 4.7 K


class FilterResult(NamedTuple):
    """The result of `gather_candidates`. count: candidates in this CTA's shared memory."""

    count: Int32
    found: select.BinSearchResult  # the bin of the row's k-th key


class Chunk(NamedTuple):
    """A step of `filter_pass`."""

    base: Int32  # first vector of the chunk
    kept: Int32  # candidates kept before
    parity: Int32  # alternates between steps: a step writes scratch that no thread still reads from the step before
    first: Int32  # warps [first, end) examine their vectors
    end: Int32


def vectors_per_thread(spec):
    """Return the number of vectors per thread in a chunk."""
    return CHUNK // 32 // keys_per_vector(spec)


def kept_slice(spec, x: rows.RowSlice, kept):
    """Return the candidates kept, as a slice."""
    return replace(x, shift=Int32(0), count=kept, vectors=(kept + keys_per_vector(spec) - 1) // keys_per_vector(spec))


@cute.jit
def gather_candidates(spec: cutlass.Constexpr, a, s, x: rows.RowSlice) -> FilterResult:
    """Fill shared memory with candidates, and find the bin of the row's k-th key."""
    floor = sample(spec, a, s, x)
    kept, b, bin_count, k_left, total = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    # one pass if at least k keys of the row reach the sampled floor, else a second one from floor 0
    while total < a.k:
        kept = filter_pass(spec, a, s, x, floor)
        passes.reset(spec, s)
        passes.count(spec, s, kept_slice(spec, x, kept))
        b, bin_count, k_left, total = select.search(spec, s, a.k)
        floor = Uint32(0)
        if total < a.k:
            scope.release_bins(spec)
    return FilterResult(kept, select.BinSearchResult(b, bin_count, k_left, total))


@cute.jit
def sample(spec: cutlass.Constexpr, a, s, x: rows.RowSlice):
    """Return the floor, a key that more than k keys of the row are likely to reach, or 0 if the sample is too small.

    The sample consists of lines at equal distances, the same for all CTAs of the row. In it, the row's k-th key
    has an expected rank; the floor is the least key of the bin that holds the rank five standard deviations
    beyond. Follows `passes.reset`; ends with a CTA barrier."""
    alone = const_expr(replace(spec, cluster=1))
    x = rows.slice_of(alone, a, x.row, rows.RowWindow(x.start, x.n), Int32(0))
    vectors = const_expr(max(SAMPLE * (1 + (spec.cluster > 1)) // keys_per_vector(spec), spec.threads))
    words = cute.make_rmem_tensor((rows.WORDS, vectors // spec.threads), Uint32)
    # read the sample
    for i in cutlass.range_constexpr(vectors // spec.threads):
        line, v = (cute.arch.thread_idx()[0] + i * spec.threads) // LINE, cute.arch.thread_idx()[0] % LINE
        first = Int32(Float32(x.vectors) * (Float32(line) * Float32(LINE / vectors)))
        rows.fetch(spec, x, first // LINE * LINE + v, words[None, i])
    # count its bins
    for i in cutlass.range_constexpr(vectors // spec.threads):
        passes.count_vector(spec, s, words[None, i])
    # rank in the sample: that of the k-th key, plus five standard deviations of its (Poisson) count
    size = const_expr(vectors * keys_per_vector(spec))
    mean = Float32(a.k) / Float32(x.n) * Float32(size)
    rank = Int32(mean + 5.0 * cute.math.sqrt(mean)) + 5
    floor = Uint32(0)
    if rank < size:
        floor, _ = keys.range_of(select.search(alone, s, rank).bin, spec.dtype)
    cute.arch.barrier()
    return floor


@cute.jit
def filter_pass(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, floor: Uint32):
    """Keep the keys of the slice that are at least `floor`, and return their number. Ends with a CTA barrier."""
    words = cute.make_rmem_tensor((rows.WORDS, vectors_per_thread(spec)), Uint32)
    warps = const_expr(spec.threads // 32)
    base, kept, parity, first, end = Int32(0), Int32(0), Int32(0), Int32(0), Int32(warps)
    cute.arch.barrier()
    # Stream the slice in chunks of CHUNK keys per warp, and keep the candidates in index order.
    # Reads: the scores, a chunk per step; the next chunk is prefetched into L2 (358 instead of 378 us on long rows).
    # Waits for: its loads, and one CTA barrier per step, in the prefix sum of `append_candidates`; scratch alternates,
    #   so one is enough.
    # Writes: s.keys and s.index, behind the `kept` candidates.
    # Order: candidates are counted before they are stored, because their positions depend on all threads before. A
    #   chunk that does not fit is read again warp by warp, and more than k candidates are compacted to k; the
    #   sampled floor makes this rare.
    while base < x.vectors:
        # load this chunk, prefetch the next one
        load_chunk(spec, x, base, words)
        rows.prefetch(x, base + spec.threads * vectors_per_thread(spec), Int32(spec.threads * vectors_per_thread(spec)))
        # count the candidates, and append them if they fit
        count = Int32(0)
        if floor > keys.FILLER >> BITS[spec.dtype]:
            count = append_candidates(spec, s, x, words, Chunk(base, kept, parity, first, end), floor, False)
        else:
            count = append_candidates(spec, s, x, words, Chunk(base, kept, parity, first, end), floor, True)
        parity ^= 1
        if kept + count > spec.capacity:
            # they do not fit: repeat the step for one warp, at most CHUNK keys, with k <= capacity - CHUNK kept at most
            end = first + 1
            if kept > a.k:
                floor = compact(spec, a, s, x, kept)
                kept = a.k
        else:
            # go on: to the next warp of this chunk, or to the next chunk
            kept += count
            first = end
            if end < warps:
                end += 1
            else:
                first, end = Int32(0), Int32(warps)
                base += spec.threads * vectors_per_thread(spec)
    cute.arch.barrier()
    pad_last_group(spec, s, kept)
    cute.arch.barrier()
    return kept


def vector(spec, base, u):
    """Return the number of this thread's vector u of the chunk at `base`; a warp has 32 * vectors_per_thread
    neighbours."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return base + warp * (32 * vectors_per_thread(spec)) + u * 32 + cute.arch.lane_idx()


@cute.jit
def load_chunk(spec: cutlass.Constexpr, x: rows.RowSlice, base: Int32, words: cute.Tensor):
    """Load this thread's vectors of the chunk at `base`."""
    end = (base + spec.threads * vectors_per_thread(spec)) * keys_per_vector(spec)
    if (base >= x.shift) & (end <= x.count + x.shift):  # a chunk without filler
        for u in cutlass.range_constexpr(vectors_per_thread(spec)):
            cute.autovec_copy(x.words[None, vector(spec, base, u)], words[None, u])
    else:
        for u in cutlass.range_constexpr(vectors_per_thread(spec)):
            rows.fetch(spec, x, vector(spec, base, u), words[None, u])


@cute.jit
def append_candidates(
    spec: cutlass.Constexpr,
    s,
    x: rows.RowSlice,
    words: cute.Tensor,
    chunk: Chunk,
    floor: Uint32,
    filler: cutlass.Constexpr,
):
    """Count the candidates of a chunk, append them to those kept if all fit, and return their number. Contains a CTA
    barrier.

    filler: the key of filler may reach the floor, so positions outside the slice are excluded one by one."""
    base, kept = chunk.base, chunk.kept
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    active = (warp >= chunk.first) & (warp < chunk.end)
    # flip the bits of all words so that floats with the floor's sign become keys
    mask, most = keys.xor_mask(floor), const_expr((1 << COUNT_BITS) - 1)
    mine, whole = (cute.make_rmem_tensor(vectors_per_thread(spec) // 2, Int32) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(words)):
        if const_expr(BITS[spec.dtype] == 32):
            words[i] = words[i] * keys.sign_multiplier(floor) + mask  # the same as ^ mask, on another pipe
        else:
            words[i] = words[i] ^ (mask | (mask >> 16))
    # count per thread, two vectors in a word; prefix sums over the warp, then over the CTA
    chosen = Int32(0)
    for h in cutlass.range_constexpr(vectors_per_thread(spec) // 2):
        count = Int32(0)
        for u in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(keys_per_vector(spec)):
                if active & candidate(spec, x, words, (base, 2 * h + u, e), floor, filler):
                    count += 1 << (u * COUNT_BITS)
        sums = prefix_sum(count)
        whole[h], mine[h] = cute.arch.shuffle_sync(sums, 31), sums - count
        chosen += (whole[h] & most) + (whole[h] >> COUNT_BITS)
    scratch = cute.make_tensor(s.scratch.iterator + chunk.parity * 32, cute.make_layout(32))
    earlier, count = sum_before_warp(chosen, scratch, spec.threads // 32)
    # append in index order: vector by vector, lane by lane
    if kept + count <= spec.capacity:
        earlier += kept
        for u in cutlass.range_constexpr(vectors_per_thread(spec)):
            pos = earlier + ((mine[u // 2] >> (u % 2 * COUNT_BITS)) & most)
            index = x.low - x.shift + vector(spec, base, u) * keys_per_vector(spec)
            for e in cutlass.range_constexpr(keys_per_vector(spec)):
                if active & candidate(spec, x, words, (base, u, e), floor, filler):
                    store_candidate(spec, s, pos, passes.key_of(spec, words[None, u], e) ^ mask, index + e)
                    pos += 1
            earlier += (whole[u // 2] >> (u % 2 * COUNT_BITS)) & most
    return count


def candidate(spec, x, words, where, floor, filler):
    """Return whether key e of this thread's vector u of the chunk at `base` is a candidate. where: (base, u, e)."""
    base, u, e = where
    result = passes.key_of(spec, words[None, u], e) >= floor
    if filler:
        j = vector(spec, base, u) * keys_per_vector(spec) + e - x.shift
        result = result & (j >= 0) & (j < x.count)
    return result


@cute.jit
def store_candidate(spec: cutlass.Constexpr, s, pos: Int32, word: Uint32, index: Int32):
    """Store a candidate, a left-aligned float, and its index in the window."""
    if const_expr(BITS[spec.dtype] == 32):
        passes.flat_keys(spec, s)[pos] = word
    else:
        passes.flat_keys(spec, s)[pos] = (word >> 16).to(cutlass.Uint16)
    s.index[pos] = index


@cute.jit
def pad_last_group(spec: cutlass.Constexpr, s, kept: Int32):
    """Store filler from `kept` to the end of its group. The caller needs a barrier."""
    behind = (kept + GROUP - 1) // GROUP * GROUP
    for pos in cutlass.range(kept + cute.arch.thread_idx()[0], behind, spec.threads, unroll=1):
        store_candidate(spec, s, pos, Uint32(keys.FILLER), Int32(-(1 << 30)))


@cute.jit
def compact(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, kept: Int32):
    """Keep the k best of more than k candidates, and return the floor for later keys. Ends with a CTA barrier."""
    alone = const_expr(replace(spec, cluster=1))
    s = replace(s, pool=s.list)
    cute.arch.barrier()
    pad_last_group(spec, s, kept)
    cute.arch.barrier()
    passes.reset(spec, s)
    # select the k best of this CTA's candidates, by the passes of a CTA alone
    y = kept_slice(spec, x, kept)
    passes.count(spec, s, y)
    boundary = passes.refine(alone, s, y, select.search(alone, s, a.k))
    passes.mark(alone, a, s, y, boundary)
    write.resolve_ties(alone, a, s, y, boundary)
    # move them to the front, in index order
    pieces = passes.thread_pieces(spec, y)
    at, _ = write.rank_bits(spec, s, pieces)
    room = const_expr(cute.size(s.ties))
    for begin in cutlass.range(0, a.k, room, unroll=1):
        write.stage_indices(spec, s, y, pieces, at - begin, True)
        cute.arch.barrier()
        move_candidates(spec, s, begin, cutlass.min(a.k - begin, room))
    # the floor: if all keys at the boundary are equal and lower indices win, later equal keys lose
    min_key = boundary.min_key
    if (min_key == boundary.max_key) & (a.last_ties == 0):
        min_key += 1
    if const_expr(BITS[spec.dtype] == 16):
        min_key = min_key & Uint32(0xFFFF0000)  # `append_candidates` compares keys with a low half of 0
    return min_key


@cute.jit
def move_candidates(spec: cutlass.Constexpr, s, begin: Int32, count: Int32):
    """Move the candidates at positions s.ties[0 .. count - 1] to positions `begin` and on. No position is below its
    target.

    Ends with a CTA barrier."""
    for i in cutlass.range(0, count, spec.threads, unroll=1):
        slot = i + cute.arch.thread_idx()[0]
        # all threads read before any writes: a target may be the source of another thread
        word, index = Uint32(0), Int32(0)
        if slot < count:
            word, index = passes.load_float(spec, s, Int32(s.ties[slot])), s.index[s.ties[slot]]
        cute.arch.barrier()
        if slot < count:
            store_candidate(spec, s, begin + slot, word, index)
    cute.arch.barrier()
