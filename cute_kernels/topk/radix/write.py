"""Settle which keys at the boundary get in, and write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .. import emit, rows, scope, select
from . import LIST
from .passes import OWNER, STEP, groups, index_of


@cute.jit
def settle(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary):
    """Add those keys at the boundary that get in to s.bits. The first output position of this CTA, but for s.counts[2],
    which is complete after the next `meet`. Ends with a barrier. boundary = (keys of the row at it, keys needed of
    them); after `mark`."""
    here, need = boundary
    scope.publish(spec, s.counts, s.table)
    position = scope.before(spec, s.table, 0, scope.rank(spec))
    if need < here:
        first, mine = scope.before(spec, s.table, 1, scope.rank(spec)), s.counts[1]
        if here <= LIST:
            if const_expr(spec.cluster > 1):
                scope.pool(spec, s.list, s.table, s.pool)
            choose(spec, a, s, (first, mine), here, need)
        else:
            skipped = Int32(0)  # of the row, before the first that gets in
            if a.last_ties != 0:
                skipped = here - need
            taken = rows.clamp(first - skipped, 0, need)
            skip = rows.clamp(skipped - first, 0, mine)
            cut(spec, s, x, skip, rows.clamp(need - taken, 0, mine - skip))
            position += taken
        cute.arch.barrier()
        if const_expr(spec.cluster > 1):
            if cute.arch.warp_idx() == 0:
                scope.tell(spec, s.counts, 2, s.counts[3])
    return position


@cute.jit
def choose(spec: cutlass.Constexpr, a, s, own, count: Int32, need: Int32):
    """Set the bits of those of this CTA's keys in s.pool, own = (first, how many), that are among the `need` largest of
    all `count`, and count them in a cluster: s.counts[3]. A warp a key; a barrier follows."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first, mine = own
    chosen = Int32(0)
    for i in cutlass.range(warp, mine, spec.threads // 32, unroll=1):
        key, larger = s.pool[first + i], Int32(0)
        for j in cutlass.range(lane, count, 32, unroll=1):
            if s.pool[j] > key:
                larger += 1
        if cute.arch.warp_redux_sync(larger, "add") < need:
            chosen += 1
            if lane == 0:
                place = Int32(Uint32(key & 0xFFFFFFFF))
                if a.last_ties == 0:
                    place = ~place
                at = place & ((1 << OWNER) - 1)
                cute.arch.atomic_or(s.bits.iterator + (at >> 5), Uint32(1) << (at & 31), sem="relaxed", scope="cta")
    if const_expr(spec.cluster > 1):
        if (lane == 0) & (chosen > 0):
            select.add(s.counts, 3, chosen)


@cute.jit
def cut(spec: cutlass.Constexpr, s, x: rows.Slice, skip: Int32, take: Int32):
    """Set the bits of this CTA's ties number skip to skip + take. A barrier follows."""
    words = groups(spec, x) * STEP
    per = (words + spec.threads - 1) // spec.threads
    first = cutlass.min(cute.arch.thread_idx()[0] * per, words)
    last = cutlass.min(first + per, words)
    mine = Int32(0)
    for w in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(s.ties[w]))
    tie, _ = select.rank_in(spec, mine, s.scratch)
    for w in cutlass.range(first, last, unroll=1):
        left, chosen = s.ties[w], s.bits[w]
        while left != 0:
            if (tie >= skip) & (tie < skip + take):
                chosen = chosen | (left & (~left + 1))
            tie += 1
            left = left & (left - 1)
        s.bits[w] = chosen


@cute.jit
def share(spec: cutlass.Constexpr, x: rows.Slice):
    """(first, behind the last) of this thread's pieces of s.bits, which are words, or bytes where they are few, and
    log2 of the pieces of a word."""
    words = groups(spec, x) * STEP
    parts = Int32(2) if words * 2 <= spec.threads else Int32(0)
    pieces = words << parts
    per = (pieces + spec.threads - 1) // spec.threads
    first = cutlass.min(cute.arch.thread_idx()[0] * per, pieces)
    return first, cutlass.min(first + per, pieces), parts


def piece(bits, p, parts):
    """(bits of a piece, place of the lowest)."""
    low = (p & ((1 << parts) - 1)) << 3
    return (bits[p >> parts] >> low) & (Uint32(0xFFFFFFFF) >> (12 * parts)), ((p >> parts) << 5) + low


@cute.jit
def place_of(spec: cutlass.Constexpr, s, part):
    """(set bits before this thread's pieces, all set bits). Holds a barrier."""
    first, last, parts = part
    mine = Int32(0)
    for p in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(piece(s.bits, p, parts)[0]))
    return select.rank_in(spec, mine, s.scratch)


@cute.jit
def stage(spec: cutlass.Constexpr, s, x: rows.Slice, part, slot: Int32, places: cutlass.Constexpr = False):
    """s.staged[slot ...] = the indices of this thread's set bits, or s.ties[slot ...] = their places, those that fit. A
    barrier follows."""
    first, last, parts = part
    room = const_expr(cute.size(s.ties) if places else cute.size(s.staged))
    for p in cutlass.range(first, last, unroll=1):
        left, base = piece(s.bits, p, parts)
        while left != 0:
            place = base + 31 - Int32(cute.arch.clz(left & (~left + 1)))
            if (slot >= 0) & (slot < room):
                if const_expr(places):
                    s.ties[slot] = Uint32(place)
                else:
                    s.staged[slot] = index_of(spec, s, x, place)
            slot += 1
            left = left & (left - 1)


@cute.jit
def expand(spec: cutlass.Constexpr, a, s, x: rows.Slice, position: Int32):
    """Write the places in s.bits as outputs from `position` + s.counts[2] on."""
    part, room = share(spec, x), const_expr(cute.size(s.staged))
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_arrive()
    at, count = place_of(spec, s, part)
    for begin in cutlass.range(0, count, room, unroll=1):
        stage(spec, s, x, part, at - begin)
        cute.arch.barrier()
        if const_expr(spec.cluster > 1):
            if begin == 0:
                cute.arch.cluster_wait()
                position += s.counts[2]
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, room))
        cute.arch.barrier()
    if const_expr(spec.cluster > 1):
        if count == 0:
            cute.arch.cluster_wait()
