"""Settle which keys at the boundary get in, and write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .. import emit, rows, scope, select
from .passes import GROUP, LIST, OWNER, STEP, groups

STAGED = 2048  # indices that a CTA stages in shared memory, so that threads write neighbours


@cute.jit
def settle(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary, rank: Int32):
    """Add those keys at the boundary that get in to s.bits. The first output position of this CTA.

    boundary = (keys of the row at it, keys needed of them); after `mark`. Ends the reading of other CTAs' memory."""
    here, need = boundary
    scope.meet(spec)
    position, _, _, _ = scope.sums(spec, s.above, rank)
    if need < here:
        first, everything, own, earlier = scope.sums(spec, s.near, rank)
        if here <= LIST:
            if const_expr(spec.cluster > 1):
                scope.pool(spec, s.list, own, earlier, s.pool)
                cute.arch.barrier()
            choose(spec, a, s, everything, need, rank)
            cute.arch.barrier()
            position += Int32(s.earlier[0])
        else:
            skipped = Int32(0)  # of the row, before the first that gets in
            if a.last_ties != 0:
                skipped = everything - need
            taken = rows.clamp(first - skipped, 0, need)
            mine = Int32(s.near[0])
            skip = rows.clamp(skipped - first, 0, mine)
            cut(spec, s, x, skip, rows.clamp(need - taken, 0, mine - skip))
            cute.arch.barrier()
            position += taken
    return position


@cute.jit
def choose(spec: cutlass.Constexpr, a, s, count: Int32, need: Int32, rank: Int32):
    """Set the bits of those of the `need` best of s.pool that are this CTA's; s.earlier counts those of CTAs before."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    turn = Uint32(0)  # order of places
    if a.last_ties != 0:
        turn = Uint32(0xFFFFFFFF)
    earlier = Int32(0)
    for i in cutlass.range(warp, count, spec.threads // 32, unroll=1):
        key, place = s.pool[0, i], s.pool[1, i]
        better = Int32(0)
        for j in cutlass.range(lane, count, 32, unroll=1):
            other, at = s.pool[0, j], s.pool[1, j]
            if other > key or (other == key and (at ^ turn) < (place ^ turn)):
                better += 1
        if cute.arch.warp_redux_sync(better, "add") < need:
            owner = Int32(place >> OWNER)
            if owner < rank:
                earlier += 1
            elif owner == rank and lane == 0:
                at = Int32(place & ((1 << OWNER) - 1))
                cute.arch.atomic_or(s.bits.iterator + (at >> 5), Uint32(1) << (at & 31), sem="relaxed", scope="cta")
    if lane == 0 and earlier > 0:
        select.add(s.earlier, 0, earlier)


@cute.jit
def cut(spec: cutlass.Constexpr, s, x: rows.Slice, skip: Int32, take: Int32):
    """Set the bits of this CTA's ties number skip to skip + take."""
    first, last = share(spec, x)
    mine = Int32(0)
    for w in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(s.ties[w]))
    tie, _ = select.rank_in(spec, mine, s.scratch)
    for w in cutlass.range(first, last, unroll=1):
        left, chosen = s.ties[w], s.bits[w]
        while left != 0:
            lowest = left & (~left + 1)
            if tie >= skip and tie < skip + take:
                chosen = chosen | lowest
            tie += 1
            left = left ^ lowest
        s.bits[w] = chosen


def share(spec, x):
    """(first, behind the last) of the words of bits that are this thread's."""
    words = groups(spec, x) * STEP
    per = (words + spec.threads - 1) // spec.threads
    first = cutlass.min(cute.arch.thread_idx()[0] * per, words)
    return first, cutlass.min(first + per, words)


@cute.jit
def place_of(spec: cutlass.Constexpr, s, first: Int32, last: Int32):
    """(set bits before this thread's words, all set bits). Holds a barrier."""
    mine = Int32(0)
    for w in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(s.bits[w]))
    return select.rank_in(spec, mine, s.scratch)


@cute.jit
def stage(spec: cutlass.Constexpr, s, x: rows.Slice, part, slot: Int32, places: cutlass.Constexpr = False):
    """s.staged[slot ...] = the indices, or the places, of this thread's set bits, those that fit. A barrier follows.
    part = the thread's `share`."""
    first, last = part
    for w in cutlass.range(first, last, unroll=1):
        left = s.bits[w]
        while left != 0:
            lowest = left & (~left + 1)
            if slot >= 0 and slot < STAGED:
                place = w * 32 + 31 - Int32(cute.arch.clz(lowest))
                if const_expr(places):
                    s.staged[slot] = place
                elif const_expr(spec.stream):
                    s.staged[slot] = s.index[place]
                else:
                    s.staged[slot] = x.low - x.shift + place
            slot += 1
            left = left ^ lowest


@cute.jit
def expand(spec: cutlass.Constexpr, a, s, x: rows.Slice, position: Int32):
    """Write the places in s.bits as outputs from `position` on."""
    first, last = share(spec, x)
    at, count = place_of(spec, s, first, last)
    for begin in cutlass.range(0, count, STAGED, unroll=1):
        stage(spec, s, x, (first, last), at - begin)
        cute.arch.barrier()
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, STAGED))
        cute.arch.barrier()
