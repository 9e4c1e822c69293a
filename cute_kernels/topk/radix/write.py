"""Write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device.warp import prefix_sum
from .. import emit, rows, scope, select
from .passes import classify, hold, lanes, span

STAGED = (
    4096  # indices that a CTA stages in shared memory, so that threads write neighbours; more are written one by one
)


@cute.jit
def write(spec: cutlass.Constexpr, a, s, x: rows.Slice, boundary):
    """Write this CTA's share of the row. boundary = (CTA, prefix, its lowest bit, keys needed at it)."""
    rank, prefix, low, need = boundary
    least, greatest = span(prefix, low.to(Uint32))
    warps, lane = const_expr(spec.threads // 32), cute.arch.lane_idx()
    part = (x.vectors + warps - 1) // warps
    first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * part
    last = cutlass.min(first + part, x.vectors)
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    above, equal = Int32(0), Int32(0)
    for v in cutlass.range(first + lane, last, 32, unroll=1):
        hold(spec, s, x, v, words)
        ups, ties = classify(spec, x, v, words, (least, greatest))
        above += cute.arch.popc(ups)
        equal += cute.arch.popc(ties)
    above = cute.arch.shuffle_sync(prefix_sum(above), 31)
    equal = cute.arch.shuffle_sync(prefix_sum(equal), 31)
    above, above_all = select.before(above, s.scratch, warps)
    cute.arch.barrier()
    equal, equal_all = select.before(equal, s.scratch, warps)
    scope.publish(spec, s.counts, above_all, equal_all)
    position, skip, take = share(spec, a, s, rank, need)
    count = above_all + take
    for begin in cutlass.range(0, count, STAGED, unroll=1):
        stage(spec, s, x, (first, last, above, equal), (least, greatest, skip, take), begin)
        cute.arch.barrier()
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, STAGED))
        cute.arch.barrier()


@cute.jit
def stage(spec: cutlass.Constexpr, s, x: rows.Slice, part, boundary, begin: Int32):
    """The indices of those of this CTA's selected keys that come at `begin` to `begin + STAGED` among them."""
    first, last, above, equal = part
    least, greatest, skip, take = boundary
    lane = cute.arch.lane_idx()
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    at = above + rows.clamp(equal - skip, 0, take) - begin  # of this warp's first selected key
    for step in cutlass.range((last - first + 31) // 32, unroll=1):
        v = first + step * 32 + lane
        ups, ties = Int32(0), Int32(0)
        if v < last:
            hold(spec, s, x, v, words)
            ups, ties = classify(spec, x, v, words, (least, greatest))
        if cute.arch.vote_any_sync(ties != 0):
            mine = cute.arch.popc(ties)
            sums = prefix_sum(mine)
            ups = ups | chosen(spec, ties, equal + sums - mine, skip, take)
            equal += cute.arch.shuffle_sync(sums, 31)
        if cute.arch.vote_any_sync(ups != 0):
            mine = cute.arch.popc(ups)
            sums = prefix_sum(mine)
            place = at + sums - mine
            index = x.low + v * lanes(spec) - x.shift
            for e in cutlass.range_constexpr(lanes(spec)):
                if ups & (1 << e) != 0:
                    if place >= 0 and place < STAGED:
                        s.staged[place] = index + e
                    place += 1
            at += cute.arch.shuffle_sync(sums, 31)


@cute.jit
def chosen(spec: cutlass.Constexpr, ties: Int32, rank: Int32, skip: Int32, take: Int32):
    """Those of the boundary keys `ties` of a vector that get in; rank: of the first one among the CTA's."""
    result = Int32(0)
    for e in cutlass.range_constexpr(lanes(spec)):
        if ties & (1 << e) != 0:
            if rank >= skip and rank < skip + take:
                result = result | (1 << e)
            rank += 1
    return result


@cute.jit
def share(spec: cutlass.Constexpr, a, s, rank: Int32, need: Int32):
    """(first output position of this CTA, boundary keys of it that do not get in before those that do, how many do)."""
    position, before, everything = Int32(0), Int32(0), Int32(0)
    for c in cutlass.range_constexpr(spec.cluster):
        everything += s.counts[c, 1]
        if c < rank:
            position += s.counts[c, 0]
            before += s.counts[c, 1]
    skipped = Int32(0)  # boundary keys of the row that come before the first that gets in
    if a.last_ties != 0:
        skipped = everything - need
    taken = rows.clamp(before - skipped, 0, need)
    mine = s.counts[rank, 1]
    skip = rows.clamp(skipped - before, 0, mine)
    return position + taken, skip, rows.clamp(need - taken, 0, mine - skip)
