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
    tid = cute.arch.thread_idx()[0]
    for i in cutlass.range(tid, LIST, spec.threads, unroll=1):
        s.pool[i] = Uint64(0)
    if tid < 4:
        s.counts[tid] = Int32(0)
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
    for w in range(rows.WORDS):
        for b in keys.bins_of(words[w], spec.dtype):
            select.add(s.local, b, 1)


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
    """Split the bin found until what is left of it can be told apart: the boundary (its least, greatest key, keys of
    the row at it, keys needed of them), and the bin of s.local that it is."""
    least, greatest = keys.span(found, spec.dtype)
    select.claim(spec, s, found, here, need)
    while (here > LIST) & (here > need) & (greatest > least):
        shift = select.split(least, greatest)
        scope.again(spec)
        select.clear(spec, s.local)
        cute.arch.barrier()
        tally(spec, s, x, least, greatest, shift)
        found, here, need, _ = select.search(spec, s, need)
        select.claim(spec, s, found, here, need)
        least += Uint32(found) << shift
        greatest = least + cutlass.min(greatest - least, (Uint32(1) << shift) - 1)
    return (least, greatest, here, need), found


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
def share(spec: cutlass.Constexpr, x: rows.Slice):
    """(first, behind the last) of this thread's pieces of s.bits, in its warp's part, and log2 of the pieces of a word:
    pieces are words, or bytes where a warp has few."""
    per = part(spec, x)
    parts = Int32(2) if per <= 2 else Int32(0)
    total, count = (groups(spec, x) * STEP) << parts, (per * STEP) << parts
    each = (count + 31) // 32
    begin = cute.arch.warp_idx() * count
    first = begin + cute.arch.lane_idx() * each
    return first, cutlass.min(cutlass.min(first + each, begin + count), total), parts


def part(spec, x):
    """Groups of a warp, which are neighbours; the last warps have less."""
    return (groups(spec, x) + spec.threads // 32 - 1) // (spec.threads // 32)


def piece(bits, p, parts):
    """(bits of a piece, place of the lowest)."""
    low = (p & ((1 << parts) - 1)) << 3
    return (bits[p >> parts] >> low) & (Uint32(0xFFFFFFFF) >> (12 * parts)), ((p >> parts) << 5) + low


@cute.jit
def mark(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary, found: Int32):
    """Set the bits s.bits of the places whose key is at the boundary, or above it. Those at it come into
    s.list, if not all of them are needed; where the row has more than LIST into s.ties, as bits, instead. How many
    each CTA of the row has is then in s.table. Ends with `meet`. boundary, found: `narrow`'s."""
    least, greatest, here, need = boundary
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    sign, flip = keys.turn(least), keys.flip(least)
    per, hits = part(spec, x), Uint32(0)
    first = warp * per
    last = cutlass.min(first + per, groups(spec, x))
    masks = cute.make_rmem_tensor(STEP, Uint32)
    for group in cutlass.range(first, last, unroll=1):
        nearest = greatest - least + 1
        for u in cutlass.range_constexpr(STEP):
            # x * sign + flip is the key, x ^ flip; what lies below the boundary wraps
            above = load(spec, s, group * GROUP + u * 32 + lane) * sign + (flip - least)
            masks[u] = Uint32(cute.arch.vote_ballot_sync(above <= Uint32(0xFFFFFFFF) - least))
            nearest = cutlass.min(nearest, above)
        if lane == 0:
            store(s.bits, group, masks)
        hits = hits << 1
        if nearest <= greatest - least:
            hits = hits | 1
        if (need < here) & (here > LIST):
            mark_ties(spec, s, x, group, flip, least, greatest)
    ties = scope.ask(spec, s.local, found)
    if (need < here) & (here <= LIST):
        cute.arch.sync_warp()
        while hits != 0:
            group = last - 1 - (31 - Int32(cute.arch.clz(hits)))
            hits = hits ^ (Uint32(1) << Uint32(last - 1 - group))
            note(spec, a, s, x, group, (flip, least, greatest))
    scope.answer(spec, ties, s.table)
    scope.meet(spec)


@cute.jit
def mark_ties(spec: cutlass.Constexpr, s, x: rows.Slice, group: Int32, flip: Uint32, least: Uint32, greatest: Uint32):
    """Bits of a group's places whose key is at the boundary, apart from those above it."""
    masks, over = (cute.make_rmem_tensor(STEP, Uint32) for _ in range(2))
    for u in cutlass.range_constexpr(STEP):
        place = group * GROUP + u * 32 + cute.arch.lane_idx()
        key = load(spec, s, place) ^ flip
        tie = (key >= least) & (key <= greatest) & real(spec, s, x, place)
        masks[u] = Uint32(cute.arch.vote_ballot_sync(tie))
        over[u] = Uint32(cute.arch.vote_ballot_sync(key > greatest))
    if cute.arch.lane_idx() == 0:
        store(s.ties, group, masks)
        store(s.bits, group, over)


@cute.jit
def note(spec: cutlass.Constexpr, a, s, x: rows.Slice, group: Int32, boundary):
    """List this lane's places of a group whose key is at the boundary, as 64 bits: larger ones get in first. Filler is
    no longer marked."""
    flip, least, greatest = boundary
    some, start = Uint32(0), group * GROUP + cute.arch.lane_idx()
    for u in cutlass.range_constexpr(STEP):
        key = load(spec, s, start + u * 32) ^ flip
        if (key >= least) & (key <= greatest):
            some = some | Uint32(1 << u)
    while some != 0:
        place = start + 32 * (31 - Int32(cute.arch.clz(some)))
        some = some ^ (Uint32(1) << Uint32((place - start) >> 5))
        if real(spec, s, x, place):
            name = Uint32(scope.rank(spec) << OWNER) | Uint32(place)
            if a.last_ties == 0:
                name = ~name
            entry = (Uint64(keys.order(load(spec, s, place))) << 32) | Uint64(name)
            s.list[select.add(s.counts, 0, 1)] = entry
        else:
            drop(s.bits, place)


def drop(bits, place):
    """Clear a bit."""
    mask = ~(Uint32(1) << Uint32(place & 31))
    cute.arch.atomic_and(bits.iterator + (place >> 5), mask, sem="relaxed", scope="cta")


def store(bits, group, masks):
    """Words of a group."""
    cute.autovec_copy(masks, cute.make_tensor(bits.iterator + group * STEP, cute.make_layout(STEP)))
