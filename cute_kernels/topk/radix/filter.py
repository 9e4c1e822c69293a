"""Slices longer than shared memory holds: they are streamed, and only candidates are kept, in index order.

A candidate's key is at least `floor`, at first the key of a rank in a sample of the row that leaves more than k, so
that one pass over the row suffices. Where candidates would not fit, all but the CTA's k best give way, and their
boundary is the floor from there on. Where the sample misled, and fewer than k keys of the row reach the floor, the pass
is done again from floor 0: no result depends on the sample."""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device.warp import prefix_sum
from .. import keys, rows, scope, select
from ..spec import BITS
from . import CHUNK, GROUP, passes, write
from .passes import lanes

SAMPLE = 4096  # keys
FIELD = 16  # bits of a count of a warp's candidates in one vector a thread; two make a word
LINE = 8  # vectors of a sample that are neighbours, 128 bytes: single sectors cost memory as much time


class FilterResult(NamedTuple):
    """What `gather` returns. count: candidates in this CTA's shared memory."""

    count: Int32
    found: select.BinSearchResult  # where the row's k-th key lies


class Chunk(NamedTuple):
    """A step of `filter_pass`."""

    base: Int32  # first vector of the chunk
    kept: Int32  # candidates kept before
    parity: Int32  # alternates, so that a step need not wait for the reads of the one before
    first: Int32  # warps [first, end) look at their vectors
    end: Int32


def unroll(spec):
    """Vectors of a thread in a chunk."""
    return CHUNK // 32 // lanes(spec)


def held(spec, x: rows.RowSlice, kept):
    """The candidates kept, as a slice."""
    return replace(x, shift=Int32(0), count=kept, vectors=(kept + lanes(spec) - 1) // lanes(spec))


@cute.jit
def gather(spec: cutlass.Constexpr, a, s, x: rows.RowSlice) -> FilterResult:
    """Fill shared memory with candidates, and find the bin of the row's k-th key."""
    floor = sample(spec, a, s, x)
    kept, b, bin_count, k_left, total = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while total < a.k:
        kept = filter_pass(spec, a, s, x, floor)
        passes.prepare(spec, s)
        passes.count(spec, s, held(spec, x, kept))
        b, bin_count, k_left, total = select.search(spec, s, a.k)
        floor = Uint32(0)
        if total < a.k:
            scope.release_bins(spec)
    return FilterResult(kept, select.BinSearchResult(b, bin_count, k_left, total))


@cute.jit
def sample(spec: cutlass.Constexpr, a, s, x: rows.RowSlice):
    """A key, the floor, that more than k keys of the row are likely to reach; 0 where the sample is too small.

    The sample: lines at equal distances, the same for all CTAs of the row. The floor: the least key of the bin of its
    key whose rank lies five standard deviations beyond that expected of the row's k-th. After `passes.prepare`; ends
    with a CTA barrier."""
    alone = const_expr(replace(spec, cluster=1))
    x = rows.slice_of(alone, a, x.row, rows.RowWindow(x.start, x.n), Int32(0))
    vectors = const_expr(max(SAMPLE * (1 + (spec.cluster > 1)) // lanes(spec), spec.threads))
    words = cute.make_rmem_tensor((rows.WORDS, vectors // spec.threads), Uint32)
    for i in cutlass.range_constexpr(vectors // spec.threads):
        line, v = (cute.arch.thread_idx()[0] + i * spec.threads) // LINE, cute.arch.thread_idx()[0] % LINE
        first = Int32(Float32(x.vectors) * (Float32(line) * Float32(LINE / vectors)))
        rows.fetch(spec, x, first // LINE * LINE + v, words[None, i])
    for i in cutlass.range_constexpr(vectors // spec.threads):
        passes.count_vector(spec, s, words[None, i])
    size = const_expr(vectors * lanes(spec))
    mean = Float32(a.k) / Float32(x.n) * Float32(size)
    rank = Int32(mean + 5.0 * cute.math.sqrt(mean)) + 5
    floor = Uint32(0)
    if rank < size:
        floor, _ = keys.range_of(select.search(alone, s, rank).bin, spec.dtype)
    cute.arch.barrier()
    return floor


@cute.jit
def filter_pass(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, floor: Uint32):
    """Keep the keys of the slice that are at least `floor`. Returns how many were kept; ends with a CTA barrier."""
    words = cute.make_rmem_tensor((rows.WORDS, unroll(spec)), Uint32)
    warps = const_expr(spec.threads // 32)
    base, kept, parity, first, end = Int32(0), Int32(0), Int32(0), Int32(0), Int32(warps)
    cute.arch.barrier()
    while base < x.vectors:
        read(spec, x, base, words)
        rows.prefetch(x, base + spec.threads * unroll(spec), Int32(spec.threads * unroll(spec)))
        count = Int32(0)
        if floor > keys.FILLER >> BITS[spec.dtype]:
            count = take(spec, s, x, words, Chunk(base, kept, parity, first, end), floor, False)
        else:
            count = take(spec, s, x, words, Chunk(base, kept, parity, first, end), floor, True)
        parity ^= 1
        if kept + count > spec.capacity:
            end = first + 1  # take the rest of the chunk a warp at a time: at most CHUNK keys, so k + CHUNK <= capacity
            if kept > a.k:
                floor = compact(spec, a, s, x, kept)
                kept = a.k
        else:
            kept += count
            first = end
            if end < warps:
                end += 1
            else:
                first, end = Int32(0), Int32(warps)
                base += spec.threads * unroll(spec)
    cute.arch.barrier()
    fill(spec, s, kept)
    cute.arch.barrier()
    return kept


def vector(spec, base, u):
    """The number of this thread's vector u of the chunk at `base`: a warp has 32 * unroll neighbours."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return base + warp * (32 * unroll(spec)) + u * 32 + cute.arch.lane_idx()


@cute.jit
def read(spec: cutlass.Constexpr, x: rows.RowSlice, base: Int32, words: cute.Tensor):
    """Load this thread's vectors of the chunk at `base`."""
    end = (base + spec.threads * unroll(spec)) * lanes(spec)
    if (base >= x.shift) & (end <= x.count + x.shift):  # a chunk without filler
        for u in cutlass.range_constexpr(unroll(spec)):
            cute.autovec_copy(x.words[None, vector(spec, base, u)], words[None, u])
    else:
        for u in cutlass.range_constexpr(unroll(spec)):
            rows.fetch(spec, x, vector(spec, base, u), words[None, u])


@cute.jit
def take(
    spec: cutlass.Constexpr,
    s,
    x: rows.RowSlice,
    words: cute.Tensor,
    chunk: Chunk,
    floor: Uint32,
    filler: cutlass.Constexpr,
):
    """Count the candidates of a chunk, and append them to those kept if all fit. Contains a CTA barrier.

    filler: its key may reach the floor, so that places outside the slice are looked at one by one."""
    base, kept = chunk.base, chunk.kept
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    active = (warp >= chunk.first) & (warp < chunk.end)
    mask, most = keys.xor_mask(floor), const_expr((1 << FIELD) - 1)
    mine, whole = (cute.make_rmem_tensor(unroll(spec) // 2, Int32) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(words)):
        if const_expr(BITS[spec.dtype] == 32):
            words[i] = words[i] * keys.sign_multiplier(floor) + mask  # the same as ^ mask, on another pipe
        else:
            words[i] = words[i] ^ (mask | (mask >> 16))
    chosen = Int32(0)
    for h in cutlass.range_constexpr(unroll(spec) // 2):
        count = Int32(0)
        for u in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(lanes(spec)):
                if active & candidate(spec, x, words, (base, 2 * h + u, e), floor, filler):
                    count += 1 << (u * FIELD)
        sums = prefix_sum(count)
        whole[h], mine[h] = cute.arch.shuffle_sync(sums, 31), sums - count
        chosen += (whole[h] & most) + (whole[h] >> FIELD)
    scratch = cute.make_tensor(s.scratch.iterator + chunk.parity * 32, cute.make_layout(32))
    earlier, count = select.sum_before_warp(chosen, scratch, spec.threads // 32)
    if kept + count <= spec.capacity:
        earlier += kept
        for u in cutlass.range_constexpr(unroll(spec)):
            place = earlier + ((mine[u // 2] >> (u % 2 * FIELD)) & most)
            index = x.low - x.shift + vector(spec, base, u) * lanes(spec)
            for e in cutlass.range_constexpr(lanes(spec)):
                if active & candidate(spec, x, words, (base, u, e), floor, filler):
                    put(spec, s, place, passes.key_of(spec, words[None, u], e) ^ mask, index + e)
                    place += 1
            earlier += (whole[u // 2] >> (u % 2 * FIELD)) & most
    return count


def candidate(spec, x, words, where, floor, filler):
    """Whether key e of this thread's vector u of the chunk at `base` is a candidate. where: (base, u, e)."""
    base, u, e = where
    result = passes.key_of(spec, words[None, u], e) >= floor
    if filler:
        j = vector(spec, base, u) * lanes(spec) + e - x.shift
        result = result & (j >= 0) & (j < x.count)
    return result


@cute.jit
def put(spec: cutlass.Constexpr, s, place: Int32, word: Uint32, index: Int32):
    """Store a candidate, a left-aligned float, and its index in the window."""
    if const_expr(BITS[spec.dtype] == 32):
        passes.flat(spec, s)[place] = word
    else:
        passes.flat(spec, s)[place] = (word >> 16).to(cutlass.Uint16)
    s.index[place] = index


@cute.jit
def fill(spec: cutlass.Constexpr, s, kept: Int32):
    """Store filler from `kept` to the end of its group. The caller needs a barrier."""
    behind = (kept + GROUP - 1) // GROUP * GROUP
    for place in cutlass.range(kept + cute.arch.thread_idx()[0], behind, spec.threads, unroll=1):
        put(spec, s, place, Uint32(keys.FILLER), Int32(-(1 << 30)))


@cute.jit
def compact(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, kept: Int32):
    """Keep the k best of more than k candidates. Returns the floor of later keys; ends with a CTA barrier."""
    alone = const_expr(replace(spec, cluster=1))
    s = replace(s, pool=s.list)
    cute.arch.barrier()
    fill(spec, s, kept)
    cute.arch.barrier()
    passes.prepare(spec, s)
    y = held(spec, x, kept)
    passes.count(spec, s, y)
    boundary = passes.refine(alone, s, y, select.search(alone, s, a.k))
    passes.mark(alone, a, s, y, boundary)
    write.resolve_ties(alone, a, s, y, boundary)
    pieces = passes.share(spec, y)
    at, _ = write.rank_bits(spec, s, pieces)
    room = const_expr(cute.size(s.ties))
    for begin in cutlass.range(0, a.k, room, unroll=1):
        write.stage(spec, s, y, pieces, at - begin, True)
        cute.arch.barrier()
        move(spec, s, begin, cutlass.min(a.k - begin, room))
    min_key = boundary.min_key
    if (min_key == boundary.max_key) & (a.last_ties == 0):
        min_key += 1
    if const_expr(BITS[spec.dtype] == 16):
        min_key = min_key & Uint32(0xFFFF0000)  # `take` compares keys whose low halves are 0
    return min_key


@cute.jit
def move(spec: cutlass.Constexpr, s, begin: Int32, count: Int32):
    """Move the candidates at places s.ties[0 .. count - 1], none below its target, to places `begin` and on.

    Ends with a CTA barrier."""
    for i in cutlass.range(0, count, spec.threads, unroll=1):
        slot = i + cute.arch.thread_idx()[0]
        word, index = Uint32(0), Int32(0)
        if slot < count:
            word, index = passes.load(spec, s, Int32(s.ties[slot])), s.index[s.ties[slot]]
        cute.arch.barrier()
        if slot < count:
            put(spec, s, begin + slot, word, index)
    cute.arch.barrier()
