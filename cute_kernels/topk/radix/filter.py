"""Slices longer than shared memory holds: they are streamed, and only candidates are kept, in index order.

A candidate's key is at least `floor`, at first the key of a rank in a sample of the row that leaves more than k, so
that one pass over the row suffices. Where candidates would not fit, all but the CTA's k best give way, and their
boundary is the floor from there on. Where the sample misled, and fewer than k keys of the row reach the floor, the pass
is done again from floor 0: no result depends on the sample."""

from dataclasses import replace

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


def unroll(spec):
    """Vectors of a thread in a chunk."""
    return CHUNK // 32 // lanes(spec)


def held(spec, x: rows.Slice, kept):
    """The slice of what is kept."""
    return replace(x, shift=Int32(0), count=kept, vectors=(kept + lanes(spec) - 1) // lanes(spec))


@cute.jit
def gather(spec: cutlass.Constexpr, a, s, x: rows.Slice):
    """Fill shared memory with candidates: (how many, bin of the row's k-th key, keys in that bin, needed of them)."""
    floor = sample(spec, a, s, x)
    kept, found, here, need, everything = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while everything < a.k:
        kept = screen(spec, a, s, x, floor)
        passes.prepare(spec, s)
        passes.count(spec, s, held(spec, x, kept))
        found, here, need, everything = select.search(spec, s, a.k)
        floor = Uint32(0)
        if everything < a.k:
            scope.again(spec)
    return kept, found, here, need


@cute.jit
def sample(spec: cutlass.Constexpr, a, s, x: rows.Slice):
    """A key that more than k keys of the row are likely to reach: of a sample, lines at equal distances, the one of a
    rank five standard deviations beyond that expected of the k-th. 0 where the sample is too small. All CTAs of the row
    look at the same sample. After `passes.prepare`."""
    alone = const_expr(replace(spec, cluster=1))
    x = rows.cut(alone, a, x.row, x.start, x.n, Int32(0))
    vectors = const_expr(max(SAMPLE * (1 + (spec.cluster > 1)) // lanes(spec), spec.threads))
    words = cute.make_rmem_tensor((rows.WORDS, vectors // spec.threads), Uint32)
    for i in cutlass.range_constexpr(vectors // spec.threads):
        line, v = (cute.arch.thread_idx()[0] + i * spec.threads) // LINE, cute.arch.thread_idx()[0] % LINE
        first = Int32(Float32(x.vectors) * (Float32(line) * Float32(LINE / vectors)))
        rows.fetch(spec, x, first // LINE * LINE + v, words[None, i])
    for i in cutlass.range_constexpr(vectors // spec.threads):
        passes.bump(spec, s, words[None, i])
    size = const_expr(vectors * lanes(spec))
    mean = Float32(a.k) / Float32(x.n) * Float32(size)
    rank = Int32(mean + 5.0 * cute.math.sqrt(mean)) + 5
    floor = Uint32(0)
    if rank < size:
        floor, _ = keys.span(select.search(alone, s, rank)[0], spec.dtype)
    cute.arch.barrier()
    return floor


@cute.jit
def screen(spec: cutlass.Constexpr, a, s, x: rows.Slice, floor: Uint32):
    """Keep the keys of the slice that are at least `floor`: how many. Ends with a barrier."""
    words = cute.make_rmem_tensor((rows.WORDS, unroll(spec)), Uint32)
    warps = const_expr(spec.threads // 32)
    base, kept, turn, part, until = Int32(0), Int32(0), Int32(0), Int32(0), Int32(warps)
    cute.arch.barrier()
    while base < x.vectors:
        read(spec, x, base, words)
        rows.prefetch(x, base + spec.threads * unroll(spec), Int32(spec.threads * unroll(spec)))
        count = Int32(0)
        if floor > keys.FILLER >> BITS[spec.dtype]:
            count = take(spec, s, x, words, (base, kept, turn), (floor, part, until), False)
        else:
            count = take(spec, s, x, words, (base, kept, turn), (floor, part, until), True)
        turn ^= 1
        if kept + count > spec.capacity:
            until = part + 1  # the rest of the chunk comes a warp at a time, which fits beside k
            if kept > a.k:
                floor = squeeze(spec, a, s, x, kept)
                kept = a.k
        else:
            kept += count
            part = until
            if until < warps:
                until += 1
            else:
                part, until = Int32(0), Int32(warps)
                base += spec.threads * unroll(spec)
    cute.arch.barrier()
    fill(spec, s, kept)
    cute.arch.barrier()
    return kept


def vector(spec, base, u):
    """This thread's vector u of the chunk: a warp has 32 * unroll neighbours."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return base + warp * (32 * unroll(spec)) + u * 32 + cute.arch.lane_idx()


@cute.jit
def read(spec: cutlass.Constexpr, x: rows.Slice, base: Int32, words: cute.Tensor):
    """This thread's vectors of a chunk."""
    end = (base + spec.threads * unroll(spec)) * lanes(spec)
    if (base >= x.shift) & (end <= x.count + x.shift):  # a chunk without filler
        for u in cutlass.range_constexpr(unroll(spec)):
            cute.autovec_copy(x.words[None, vector(spec, base, u)], words[None, u])
    else:
        for u in cutlass.range_constexpr(unroll(spec)):
            rows.fetch(spec, x, vector(spec, base, u), words[None, u])


@cute.jit
def take(spec: cutlass.Constexpr, s, x: rows.Slice, words: cute.Tensor, where, what, filler: cutlass.Constexpr):
    """Count the candidates of a chunk, and append them to those kept if all fit. Holds a barrier. where = (first
    vector, candidates kept before, parity of the call). what = (floor, warps that look at their vectors: first, behind
    the last). filler: its key is no less than the floor."""
    (base, kept, turn), (floor, part, until) = where, what
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    active = (warp >= part) & (warp < until)
    flip, most = keys.flip(floor), const_expr((1 << FIELD) - 1)
    mine, whole = (cute.make_rmem_tensor(unroll(spec) // 2, Int32) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(words)):
        if const_expr(BITS[spec.dtype] == 32):
            words[i] = words[i] * keys.turn(floor) + flip  # the same as ^ flip, on another pipe
        else:
            words[i] = words[i] ^ (flip | (flip >> 16))
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
    scratch = cute.make_tensor(s.scratch.iterator + turn * 32, cute.make_layout(32))
    earlier, count = select.before(chosen, scratch, spec.threads // 32)
    if kept + count <= spec.capacity:
        earlier += kept
        for u in cutlass.range_constexpr(unroll(spec)):
            place = earlier + ((mine[u // 2] >> (u % 2 * FIELD)) & most)
            index = x.low - x.shift + vector(spec, base, u) * lanes(spec)
            for e in cutlass.range_constexpr(lanes(spec)):
                if active & candidate(spec, x, words, (base, u, e), floor, filler):
                    put(spec, s, place, passes.key_of(spec, words[None, u], e) ^ flip, index + e)
                    place += 1
            earlier += (whole[u // 2] >> (u % 2 * FIELD)) & most
    return count


def candidate(spec, x, words, where, floor, filler):
    """Whether key e of this thread's vector u of the chunk is one."""
    base, u, e = where
    result = passes.key_of(spec, words[None, u], e) >= floor
    if filler:
        j = vector(spec, base, u) * lanes(spec) + e - x.shift
        result = result & (j >= 0) & (j < x.count)
    return result


@cute.jit
def put(spec: cutlass.Constexpr, s, place: Int32, word: Uint32, index: Int32):
    if const_expr(BITS[spec.dtype] == 32):
        passes.flat(spec, s)[place] = word
    else:
        passes.flat(spec, s)[place] = (word >> 16).to(cutlass.Uint16)
    s.index[place] = index


@cute.jit
def fill(spec: cutlass.Constexpr, s, kept: Int32):
    """The group that the last candidate is in ends with filler. A barrier follows."""
    behind = (kept + GROUP - 1) // GROUP * GROUP
    for place in cutlass.range(kept + cute.arch.thread_idx()[0], behind, spec.threads, unroll=1):
        put(spec, s, place, Uint32(keys.FILLER), Int32(-(1 << 30)))


@cute.jit
def squeeze(spec: cutlass.Constexpr, a, s, x: rows.Slice, kept: Int32):
    """Keep the k best of more than k candidates. A floor for what comes behind them; ends with a barrier."""
    alone = const_expr(replace(spec, cluster=1))
    s = replace(s, pool=s.list)
    cute.arch.barrier()
    fill(spec, s, kept)
    cute.arch.barrier()
    passes.prepare(spec, s)
    y = held(spec, x, kept)
    passes.count(spec, s, y)
    found, here, need, _ = select.search(alone, s, a.k)
    boundary, found = passes.narrow(alone, s, y, found, here, need)
    passes.mark(alone, a, s, y, boundary, found)
    write.settle(alone, a, s, y, boundary)
    pieces = passes.share(spec, y)
    at, _ = write.place_of(spec, s, pieces)
    room = const_expr(cute.size(s.ties))
    for begin in cutlass.range(0, a.k, room, unroll=1):
        write.stage(spec, s, y, pieces, at - begin, True)
        cute.arch.barrier()
        move(spec, s, begin, cutlass.min(a.k - begin, room))
    least, greatest, _, _ = boundary
    if (least == greatest) & (a.last_ties == 0):
        least += 1
    if const_expr(BITS[spec.dtype] == 16):
        least = least & Uint32(0xFFFF0000)  # `take` compares keys whose low halves are 0
    return least


@cute.jit
def move(spec: cutlass.Constexpr, s, begin: Int32, count: Int32):
    """Places `begin` and on get what is at the places in s.ties, none of which is lower. Ends with a barrier."""
    for i in cutlass.range(0, count, spec.threads, unroll=1):
        slot = i + cute.arch.thread_idx()[0]
        word, index = Uint32(0), Int32(0)
        if slot < count:
            word, index = passes.load(spec, s, Int32(s.ties[slot])), s.index[s.ties[slot]]
        cute.arch.barrier()
        if slot < count:
            put(spec, s, begin + slot, word, index)
    cute.arch.barrier()
