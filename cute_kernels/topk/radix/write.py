"""Settle which keys at the boundary get in, and write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device.warp import prefix_sum
from .. import emit, rows, scope, select
from . import LIST
from .passes import OWNER, STEP, drop, groups, index_of, piece, share


@cute.jit
def settle(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary, ties):
    """Of the keys at the boundary, leave those in s.bits that get in. The first output position of this CTA. Ends with
    `scope.arrive`: no CTA of the row may end before the others have read its shared memory. boundary: of `narrow`,
    ties: of `mark`."""
    _, _, here, need = boundary
    position = scope.before(spec, s.counts, 1)
    if need < here:
        if here <= LIST:
            choose(spec, a, s, boundary)
            cute.arch.barrier()
            if const_expr(spec.cluster > 1):
                if cute.arch.lane_idx() == 0:
                    position += s.counts[2]
        else:
            earlier, mine = ties
            skipped = Int32(0)  # of the row, before the first that gets in
            if a.last_ties != 0:
                skipped = here - need
            taken = rows.clamp(earlier - skipped, 0, need)
            skip = rows.clamp(skipped - earlier, 0, mine)
            cut(spec, s, x, skip, rows.clamp(need - taken, 0, mine - skip))
            cute.arch.barrier()
            if cute.arch.lane_idx() == 0:
                position += taken
    position = cute.arch.warp_redux_sync(position, "add")
    scope.arrive(spec)
    return position


@cute.jit
def choose(spec: cutlass.Constexpr, a, s, boundary):
    """Clear the bits of those keys at the boundary, the row's s.list, that are not among the `need` largest, and count
    the others in CTAs before this one: s.counts[2]. A barrier follows.

    They are counted in LIST fine bins; those of the bin that holds the last one needed are ranked, by a warp a key."""
    least, greatest, here, need = boundary
    warp, lane, warps = cute.arch.warp_idx(), cute.arch.lane_idx(), const_expr(spec.threads // 32)
    shift = select.split(least, greatest, LIST)
    for i in cutlass.range(cute.arch.thread_idx()[0], here, spec.threads, unroll=1):
        if const_expr(spec.cluster > 1):
            s.pool[i] = scope.united(spec, s.list, i)
        select.add(s.fine, fine_bin(s.pool[i], least, shift), 1)
    cute.arch.barrier()
    last, count, left = locate(s, need)
    for base in cutlass.range(0, here, spec.threads, unroll=1):
        i, inside, asks, name = base + lane * warps + warp, Int32(0), Int32(0), Uint32(0)
        if i < here:
            b, name = fine_bin(s.pool[i], least, shift), Uint32(s.pool[i] & 0xFFFFFFFF)
            if (b > last) | ((b == last) & (left == count)):
                inside = Int32(1)
            elif b == last:
                asks = Int32(1)
        asking = Uint32(cute.arch.vote_ballot_sync(asks == 1))
        while asking != 0:
            asker = 31 - Int32(cute.arch.clz(asking))
            asking = asking ^ (Uint32(1) << Uint32(asker))
            key, larger = s.pool[base + asker * warps + warp], Int32(0)
            for j in cutlass.range(lane, here, 32, unroll=1):
                if s.pool[j] > key:
                    larger += 1
            if (cute.arch.warp_redux_sync(larger, "add") < need) & (lane == asker):
                inside = Int32(1)
        if a.last_ties == 0:
            name = ~name
        owner, place = Int32(name >> OWNER), Int32(name & ((1 << OWNER) - 1))
        if (i < here) & (owner == scope.rank(spec)) & (inside == 0):
            drop(s.bits, place)
        if const_expr(spec.cluster > 1):
            ahead = cute.arch.vote_ballot_sync((i < here) & (owner < scope.rank(spec)) & (inside == 1))
            if lane == 0:
                select.add(s.counts, 2, cute.arch.popc(ahead))


def fine_bin(entry, least, shift):
    """The fine bin of a key at the boundary."""
    return Int32((Uint32(entry >> 32) - least) >> shift)


@cute.jit
def locate(s, need: Int32):
    """In which of the fine bins the need-th largest key lies: (bin, keys in it, keys needed of it)."""
    per = const_expr(LIST // 32)
    first = LIST - (cute.arch.lane_idx() + 1) * per
    counts, mine = cute.make_rmem_tensor(per, Uint32), Int32(0)
    cute.autovec_copy(cute.make_tensor(s.fine.iterator + first, counts.layout), counts)
    for e in cutlass.range_constexpr(per):
        mine += Int32(counts[e])
    above = prefix_sum(mine) - mine
    b, here, left = Int32(0), Int32(0), Int32(0)
    for e in cutlass.range_constexpr(per):
        count = Int32(counts[per - 1 - e])
        if (above < need) & (need <= above + count):
            b, here, left = first + per - 1 - e, count, need - above
        above += count
    b = cute.arch.warp_redux_sync(b, "add")
    return b, cute.arch.warp_redux_sync(here, "add"), cute.arch.warp_redux_sync(left, "add")


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
def place_of(spec: cutlass.Constexpr, s, pieces):
    """(set bits before this thread's pieces, all set bits). Holds a barrier."""
    first, last, parts = pieces
    mine = Int32(0)
    for p in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(piece(s.bits, p, parts)[0]))
    return select.rank_in(spec, mine, s.scratch)


@cute.jit
def stage(spec: cutlass.Constexpr, s, x: rows.Slice, pieces, slot: Int32, places: cutlass.Constexpr = False):
    """s.staged[slot ...] = the indices of this thread's set bits, or s.ties[slot ...] = their places, those that fit. A
    barrier follows."""
    first, last, parts = pieces
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
    """Write the places in s.bits as outputs from `position` on."""
    pieces, room = share(spec, x), const_expr(cute.size(s.staged))
    at, count = place_of(spec, s, pieces)
    for begin in cutlass.range(0, count, room, unroll=1):
        stage(spec, s, x, pieces, at - begin)
        cute.arch.barrier()
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, room))
        cute.arch.barrier()
    scope.wait(spec)
