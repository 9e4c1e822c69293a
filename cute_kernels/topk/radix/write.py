"""Settle which keys at the boundary get in, and write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .. import emit, rows, scope, select
from .passes import GROUP, LIST, OWNER, STEP, groups



@cute.jit
def settle(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary, rank: Int32):
    """Add those keys at the boundary that get in to s.bits. The first output position of this CTA.

    boundary = (keys of the row at it, keys needed of them); after `mark`. Ends the reading of other CTAs' memory."""
    here, need = boundary
    scope.meet(spec)
    position, first, everything, own, earlier = scope.standing(spec, s.counts, rank)
    if need < here:
        if here <= LIST:
            if const_expr(spec.cluster > 1):
                scope.pool(spec, s.list, own, earlier, s.pool)
                cute.arch.barrier()
            compare(spec, a, s, everything)
            cute.arch.barrier()
            position += choose(spec, s, everything, need, rank)
            cute.arch.barrier()
        else:
            skipped = Int32(0)  # of the row, before the first that gets in
            if a.last_ties != 0:
                skipped = everything - need
            taken = rows.clamp(first - skipped, 0, need)
            mine = s.counts[1]
            skip = rows.clamp(skipped - first, 0, mine)
            cut(spec, s, x, skip, rows.clamp(need - taken, 0, mine - skip))
            cute.arch.barrier()
            position += taken
    return position


@cute.jit
def compare(spec: cutlass.Constexpr, a, s, count: Int32):
    """s.ranks[i] = how many of the keys in s.pool come before the i-th; a barrier follows."""
    columns = const_expr(min(spec.threads, LIST))
    parts = const_expr(spec.threads // columns)
    turn = Uint32(0)  # order of places
    if a.last_ties != 0:
        turn = Uint32(0xFFFFFFFF)
    mine, other = (cute.make_rmem_tensor(2, Uint32) for _ in range(2))
    tid = cute.arch.thread_idx()[0]
    for i in cutlass.range(tid % columns, count, columns, unroll=1):
        cute.autovec_copy(s.pool[None, i], mine)
        before = Int32(0)
        for j in cutlass.range(tid // columns, count, parts, unroll=4):
            cute.autovec_copy(s.pool[None, j], other)
            if other[0] > mine[0] or (other[0] == mine[0] and (other[1] ^ turn) < (mine[1] ^ turn)):
                before += 1
        if const_expr(parts == 1):
            s.ranks[i] = before
        elif before > 0:
            select.add(s.ranks, i, before)


@cute.jit
def choose(spec: cutlass.Constexpr, s, count: Int32, need: Int32, rank: Int32):
    """Set the bits of those of the `need` first of s.pool that are this CTA's: how many are those of CTAs before it. A
    barrier follows."""
    earlier = Int32(0)
    for base in cutlass.range(0, count, 32, unroll=1):  # every warp looks at all, and sets bits for one in 32 * warps
        i = base + cute.arch.lane_idx()
        owner = spec.cluster
        if i < count and s.ranks[i] < need:
            place = s.pool[1, i]
            owner = Int32(place >> OWNER)
            at = Int32(place & ((1 << OWNER) - 1))
            if owner == rank and base // 32 % (spec.threads // 32) == cute.arch.warp_idx():
                cute.arch.atomic_or(s.bits.iterator + (at >> 5), Uint32(1) << (at & 31), sem="relaxed", scope="cta")
        if const_expr(spec.cluster > 1):
            earlier += Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(owner < rank))))
    return earlier


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
            if tie >= skip and tie < skip + take:
                chosen = chosen | (left & (~left + 1))
            tie += 1
            left = left & (left - 1)
        s.bits[w] = chosen


@cute.jit
def share(spec: cutlass.Constexpr, x: rows.Slice):
    """(first, behind the last) of this thread's pieces of s.bits, which are words, or bytes where they are few, and
    log2 of the pieces of a word."""
    words = groups(spec, x) * STEP
    parts = Int32(2) if words * 4 <= spec.threads else Int32(0)
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
    """Stage this thread's set bits, from `slot` on, those that fit: their indices in s.staged, over the keys, or their
    places in s.ties, so that threads write neighbours afterwards. A barrier follows."""
    first, last, parts = part
    room = cute.size(s.ties) if const_expr(places) else cute.size(s.staged)
    for p in cutlass.range(first, last, unroll=1):
        left, base = piece(s.bits, p, parts)
        while left != 0:
            place = base + 31 - Int32(cute.arch.clz(left & (~left + 1)))
            if slot >= 0 and slot < room:
                if const_expr(places):
                    s.ties[slot] = Uint32(place)
                elif const_expr(spec.stream):
                    s.staged[slot] = s.index[place]
                else:
                    s.staged[slot] = x.low - x.shift + place
            slot += 1
            left = left & (left - 1)


@cute.jit
def expand(spec: cutlass.Constexpr, a, s, x: rows.Slice, position: Int32):
    """Write the places in s.bits as outputs from `position` on."""
    part, room = share(spec, x), const_expr(cute.size(s.staged))
    at, count = place_of(spec, s, part)
    for begin in cutlass.range(0, count, room, unroll=1):
        stage(spec, s, x, part, at - begin)
        cute.arch.barrier()
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, room))
        cute.arch.barrier()
