"""Passes over the keys that a CTA holds in shared memory: fill it, count bins, mark what lies above a boundary.

Places: the floats of shared memory in order, those of the slice from `shift` on; what vectors hold around the slice is
filler, the lowest key.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from .. import keys, rows, scope, select
from ..spec import BITS
from . import GROUP, LIST

UNROLL = 4  # vectors that a thread has in flight
STEP = GROUP // 32  # words of marks that a warp makes at once
OWNER = 20  # bits of a place, below its CTA


def lanes(spec):
    """Keys of a vector."""
    return rows.WORDS * keys.per_word(spec)


def groups(spec, x):
    """GROUPs of places that hold the slice."""
    return (x.vectors * lanes(spec) + GROUP - 1) // GROUP


@cute.jit
def prepare(spec: cutlass.Constexpr, s):
    """Nothing is counted yet. Ends with a barrier."""
    select.clear(spec, s.local)
    if cute.arch.thread_idx()[0] < 4:
        s.counts[cute.arch.thread_idx()[0]] = Int32(0)
    cute.arch.barrier()


@cute.jit
def hold(spec: cutlass.Constexpr, s, x: rows.Slice):
    """Read the slice into shared memory, and count the bins of its keys into s.local; a barrier follows."""
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
                cute.autovec_copy(words[None, u], s.keys[None, v])
                bump(spec, s, words[None, u])
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * lanes(spec))


@cute.jit
def count(spec: cutlass.Constexpr, s, x: rows.Slice):
    """Count the bins of the keys in shared memory into s.local; a barrier follows."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // lanes(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        cute.autovec_copy(s.keys[None, v], words)
        bump(spec, s, words)
    if tid == 0:
        select.add(s.local, 0, x.count - vectors * lanes(spec))


def bump(spec, s, words):
    """Count the bins of a vector's keys."""
    for e in range(lanes(spec)):
        select.add(s.local, keys.bin_of(key_of(spec, words, e), spec.dtype), 1)


def key_of(spec, words, e):
    """Float e of a vector."""
    return keys.part(words[e // keys.per_word(spec)], e % keys.per_word(spec), BITS[spec.dtype])


@cute.jit
def tally(spec: cutlass.Constexpr, s, x: rows.Slice, least: Uint32, greatest: Uint32, shift: Int32):
    """Count the keys from least to greatest into s.local, bins of 2^shift keys; a barrier follows."""
    tid = cute.arch.thread_idx()[0]
    vectors = groups(spec, x) * (GROUP // lanes(spec))
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for v in cutlass.range(tid, vectors, spec.threads, unroll=1):
        cute.autovec_copy(s.keys[None, v], words)
        for e in cutlass.range_constexpr(lanes(spec)):
            key = keys.order(key_of(spec, words, e))
            if (key >= least) & (key <= greatest):
                select.add(s.local, Int32((key - least) >> shift), 1)
    lowest = const_expr(keys.FILLER >> BITS[spec.dtype])  # key of the filler
    if (tid == 0) & (least <= lowest) & (lowest <= greatest):
        select.add(s.local, Int32((Uint32(lowest) - least) >> shift), x.count - vectors * lanes(spec))


@cute.jit
def narrow(spec: cutlass.Constexpr, s, x: rows.Slice, found: Int32, here: Int32, need: Int32):
    """Split the bin found until what is left of it can be told apart: (least, greatest key, keys, keys needed)."""
    least, greatest = keys.span(found, spec.dtype)
    while (here > LIST) & (here > need) & (greatest > least):
        shift = select.split(least, greatest)
        scope.again(spec)
        select.clear(spec, s.local)
        cute.arch.barrier()
        tally(spec, s, x, least, greatest, shift)
        found, here, need, _ = select.search(spec, s, need)
        least += Uint32(found) << shift
        greatest = least + cutlass.min(greatest - least, (Uint32(1) << shift) - 1)
    return least, greatest, here, need


def flat(spec, s):
    """The floats in shared memory, by place."""
    pointer = cute.recast_ptr(s.keys.iterator, dtype=keys.TYPES[BITS[spec.dtype]])
    return cute.make_tensor(pointer, cute.make_layout(cute.size(s.keys) * keys.per_word(spec)))


@cute.jit
def load(spec: cutlass.Constexpr, s, place: Int32):
    """The float at a place."""
    word = flat(spec, s)[place].to(Uint32)
    return word if const_expr(BITS[spec.dtype] == 32) else word << 16


def index_of(spec, s, x, place):
    """The index in the window of what is at a place."""
    if spec.stream:
        return s.index[place]
    return x.low - x.shift + place


def real(spec, s, x, place):
    """Whether there is no filler at a place."""
    index = index_of(spec, s, x, place)
    return (index >= x.low) & (index < x.end)


@cute.jit
def mark(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary):
    """Set the bits s.bits of the places whose key lies above the boundary. Of those at it: their count, s.counts[1],
    and their list, s.list, or where the row has more of them than LIST, bits, s.ties. A barrier follows. boundary =
    (least, greatest, keys of the row at it, keys needed of them)."""
    least, greatest, here, need = boundary
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    sign, flip = keys.turn(least), keys.flip(least)
    over = greatest if need < here else least - 1
    turn = Uint32(scope.rank(spec) << OWNER)  # what makes of places, by xor, the lower word of a list's entries
    if a.last_ties == 0:
        turn = ~turn
    masks = cute.make_rmem_tensor(STEP, Uint32)
    for group in cutlass.range(warp, groups(spec, x), spec.threads // 32, unroll=1):
        nearest = load(spec, s, group * GROUP + lane) ^ flip  # above `least`
        nearest -= least
        for u in cutlass.range_constexpr(STEP):
            key = load(spec, s, group * GROUP + u * 32 + lane) * sign + flip  # `^ flip` makes seven kernels spill
            masks[u] = Uint32(cute.arch.vote_ballot_sync(key > over))
            nearest = cutlass.min(nearest, key - least)
        if lane == 0:
            store(s.bits, group, masks)
        if need < here:
            if here > LIST:
                mark_ties(spec, s, x, group, flip, least, over)
            elif nearest <= over - least:
                note(spec, s, x, group, (flip, least, over), turn)


@cute.jit
def mark_ties(spec: cutlass.Constexpr, s, x: rows.Slice, group: Int32, flip: Uint32, least: Uint32, over: Uint32):
    """Bits, and the count, of a group's places whose key is at the boundary."""
    masks, near = cute.make_rmem_tensor(STEP, Uint32), Int32(0)
    for u in cutlass.range_constexpr(STEP):
        place = group * GROUP + u * 32 + cute.arch.lane_idx()
        key = load(spec, s, place) ^ flip
        tie = (key >= least) & (key <= over) & real(spec, s, x, place)
        masks[u] = Uint32(cute.arch.vote_ballot_sync(tie))
        near += Int32(cute.arch.popc(masks[u]))
    if cute.arch.lane_idx() == 0:
        store(s.ties, group, masks)
        select.add(s.counts, 1, near)


@cute.jit
def note(spec: cutlass.Constexpr, s, x: rows.Slice, group: Int32, boundary, turn: Uint32):
    """List this lane's places of a group whose key is at the boundary, as 64 bits: larger ones get in first."""
    flip, least, over = boundary
    hits, first = Uint32(0), group * GROUP + cute.arch.lane_idx()
    for u in cutlass.range_constexpr(STEP):
        key = load(spec, s, first + u * 32) ^ flip
        if (key >= least) & (key <= over) & real(spec, s, x, first + u * 32):
            hits = hits | Uint32(1 << u)
    while hits != 0:
        place = first + 32 * (31 - Int32(cute.arch.clz(hits)))
        hits = hits ^ (Uint32(1) << Uint32((place - first) >> 5))
        key = keys.order(load(spec, s, place))
        s.list[select.add(s.counts, 1, 1)] = (Uint64(key) << 32) | Uint64(Uint32(place) ^ turn)


def store(bits, group, masks):
    """Words of a group."""
    cute.autovec_copy(masks, cute.make_tensor(bits.iterator + group * STEP, cute.make_layout(STEP)))
