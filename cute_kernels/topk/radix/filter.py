"""Slices longer than shared memory holds: they are streamed, and only candidates are kept, in index order.

A candidate's key is at least `floor`, at first the key of a rank in a sample of the row that leaves more than k, so that
one pass over the row suffices. Where candidates would not fit, all but the CTA's k best give way, and their boundary is
the floor from there on. Where the sample misled, and fewer than k of the row are left, the pass is done again from floor
0: no result depends on the sample.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device.warp import prefix_sum
from .. import keys, rows, scope, select
from ..spec import BITS
from . import passes, write
from .passes import lanes

SAMPLE = 4096  # keys


def unroll(spec):
    """Vectors of a thread in a chunk: 16 keys. Their counts share a word."""
    return 16 // lanes(spec)


def chunk(spec):
    """Keys that are looked at between two barriers."""
    return spec.threads * 16


def held(spec, x: rows.Slice, kept):
    """The slice of what is kept."""
    return replace(x, shift=Int32(0), count=kept, vectors=(kept + lanes(spec) - 1) // lanes(spec))


@cute.jit
def gather(spec: cutlass.Constexpr, a, s, x: rows.Slice):
    """Fill shared memory with candidates: (how many, bin of the row's k-th, keys in that bin, needed of them)."""
    floor = sample(spec, a, s, x)
    kept, found, here, need, everything = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while everything < a.k:
        kept = screen(spec, a, s, x, floor)
        passes.prepare(spec, s)
        passes.count(spec, s, held(spec, x, kept))
        scope.totals(spec, s.local, s.total)
        found, here, need, everything = select.search(spec, s.total, a.k, s.scratch, s.found)
        floor = Uint32(0)
    return kept, found, here, need


@cute.jit
def sample(spec: cutlass.Constexpr, a, s, x: rows.Slice):
    """A key that more than k keys of the row are likely to reach: of a sample, vectors at equal distances, a rank five standard
    deviations beyond the one expected of the k-th. 0 where the sample is too small."""
    passes.prepare(spec, s)
    words = cute.make_rmem_tensor((rows.WORDS, max(SAMPLE // lanes(spec) // spec.threads, 1)), Uint32)
    vectors = const_expr(max(SAMPLE // lanes(spec), spec.threads))
    for i in cutlass.range_constexpr(vectors // spec.threads):
        at = Float32(cute.arch.thread_idx()[0] + i * spec.threads) * Float32(1.0 / vectors)
        rows.fetch(spec, x, Int32(Float32(x.vectors) * at), words[None, i])
    for i in cutlass.range_constexpr(cute.size(words) // rows.WORDS):
        for e in cutlass.range_constexpr(lanes(spec)):
            select.add(s.local, keys.bin_of(passes.key_of(spec, words[None, i], e), spec.dtype), 1)
    scope.totals(spec, s.local, s.total)
    size = const_expr(spec.cluster * vectors * lanes(spec))
    mean = Float32(a.k) / Float32(x.n) * Float32(size)
    rank = Int32(mean + 5.0 * cute.math.sqrt(mean)) + 5
    floor = Uint32(0)
    if rank < size:
        floor, _ = keys.span(select.search(spec, s.total, rank, s.scratch, s.found)[0], spec.dtype)
    return floor


@cute.jit
def screen(spec: cutlass.Constexpr, a, s, x: rows.Slice, floor: Uint32):
    """Keep the candidates of the slice: how many. Ends with a barrier."""
    now, later = (cute.make_rmem_tensor((rows.WORDS, unroll(spec)), Uint32) for _ in range(2))
    step = const_expr(spec.threads * unroll(spec))
    base, kept, turn = Int32(0), Int32(0), Int32(0)
    cute.arch.barrier()
    read(spec, x, base, now)
    while base < x.vectors:
        read(spec, x, base + step, later)
        count = Int32(0)
        if floor > keys.FILLER >> BITS[spec.dtype]:
            count = take(spec, s, x, now, (base, kept, turn), floor, False)
        else:
            count = take(spec, s, x, now, (base, kept, turn), floor, True)
        turn ^= 1
        if kept + count > spec.capacity:
            floor = squeeze(spec, a, s, x, kept)
            kept = a.k
        else:
            kept += count
            base += step
            for i in cutlass.range_constexpr(cute.size(now)):
                now[i] = later[i]
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
    if base >= x.shift and end <= x.count + x.shift:  # a chunk without filler
        for u in cutlass.range_constexpr(unroll(spec)):
            cute.autovec_copy(x.words[None, vector(spec, base, u)], words[None, u])
    else:
        for u in cutlass.range_constexpr(unroll(spec)):
            rows.fetch(spec, x, vector(spec, base, u), words[None, u])


@cute.jit
def take(spec: cutlass.Constexpr, s, x: rows.Slice, words, where, floor: Uint32, filler: cutlass.Constexpr):
    """Count the candidates of a chunk, and append them to those kept if all fit. filler: it is no less than `floor`.
    where = (first vector, candidates kept before, parity of the chunk). Holds a barrier."""
    base, kept, turn = where
    field = const_expr(32 // unroll(spec))
    flip, most = keys.flip(floor), const_expr((1 << field) - 1)
    mine = Int32(0)  # a count a vector
    for u in cutlass.range_constexpr(unroll(spec)):
        for e in cutlass.range_constexpr(lanes(spec)):
            if candidate(spec, x, words, (base, u, e), flip, floor, filler):
                mine += 1 << (u * field)
    sums = prefix_sum(mine)
    whole, mine = cute.arch.shuffle_sync(sums, 31), sums - mine
    warp = Int32(0)
    for u in cutlass.range_constexpr(unroll(spec)):
        warp += (whole >> (u * field)) & most
    scratch = cute.make_tensor(s.scratch.iterator + turn * 32, cute.make_layout(32))
    earlier, count = select.before(warp, scratch, spec.threads // 32)
    if kept + count <= spec.capacity:
        earlier += kept
        for u in cutlass.range_constexpr(unroll(spec)):
            place = earlier + ((mine >> (u * field)) & most)
            index = x.low - x.shift + vector(spec, base, u) * lanes(spec)
            for e in cutlass.range_constexpr(lanes(spec)):
                if candidate(spec, x, words, (base, u, e), flip, floor, filler):
                    put(spec, s, place, passes.key_of(spec, words[None, u], e), index + e)
                    place += 1
            earlier += (whole >> (u * field)) & most
    return count


def candidate(spec, x, words, where, flip, floor, filler):
    """Whether key e of vector u is one."""
    base, u, e = where
    result = (passes.key_of(spec, words[None, u], e) ^ flip) >= floor
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
    behind = (kept + passes.GROUP - 1) // passes.GROUP * passes.GROUP
    for place in cutlass.range(kept + cute.arch.thread_idx()[0], behind, spec.threads, unroll=1):
        put(spec, s, place, Uint32(keys.FILLER), Int32(0))


@cute.jit
def squeeze(spec: cutlass.Constexpr, a, s, x: rows.Slice, kept: Int32):
    """Keep the k best of more than k candidates. A floor for what comes behind them; ends with a barrier."""
    alone = const_expr(replace(spec, cluster=1))
    s = replace(s, total=s.local, pool=s.list)
    cute.arch.barrier()
    fill(spec, s, kept)
    passes.prepare(spec, s)
    y = held(spec, x, kept)
    passes.count(spec, s, y)
    cute.arch.barrier()
    found, here, need, _ = select.search(alone, s.local, a.k, s.scratch, s.found)
    least, greatest, here, need = passes.narrow(alone, s, y, found, here, need)
    passes.mark(alone, s, y, (least, greatest, here, need), Int32(0))
    write.settle(alone, a, s, y, (here, need), Int32(0))
    part = write.share(spec, y)
    at, _ = write.place_of(spec, s, part)
    room = const_expr(cute.size(s.ties))
    for begin in cutlass.range(0, a.k, room, unroll=1):
        write.stage(spec, s, y, part, at - begin, True)
        cute.arch.barrier()
        count = cutlass.min(a.k - begin, room)
        for i in cutlass.range(0, count, spec.threads, unroll=1):
            slot = i + cute.arch.thread_idx()[0]
            word, index = Uint32(0), Int32(0)
            if slot < count:
                word, index = passes.load(spec, s, Int32(s.ties[slot])), s.index[s.ties[slot]]
            cute.arch.barrier()
            if slot < count:
                put(spec, s, begin + slot, word, index)
        cute.arch.barrier()
    if least == greatest and a.last_ties == 0:
        least += 1
    return least
