"""Write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device.warp import prefix_sum
from .. import emit, keys, rows, scope, select
from ..spec import BITS
from .passes import classify, hold, key_of, lanes, span

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
    for step in cutlass.range((last - first + 31) // 32, unroll=1):
        v = first + step * 32 + lane
        ups, ties = Int32(0), Int32(0)
        if v < last:
            hold(spec, s, x, v, words)
            ups, ties = classify(spec, x, v, words, (least, greatest))
        at = above + rows.clamp(equal - skip, 0, take)
        above += cute.arch.shuffle_sync(prefix_sum(cute.arch.popc(ups)), 31)
        if cute.arch.vote_any_sync(ties != 0):
            mine = cute.arch.popc(ties)
            sums = prefix_sum(mine)
            ups = ups | chosen(spec, ties, equal + sums - mine, skip, take)
            equal += cute.arch.shuffle_sync(sums, 31)
        mine = cute.arch.popc(ups)
        at += prefix_sum(mine) - mine
        for e in cutlass.range_constexpr(lanes(spec)):
            if ups & (1 << e) != 0:
                index = x.low + v * lanes(spec) + e - x.shift
                if count <= STAGED:
                    s.staged[at] = index
                else:
                    emit.place(spec, a, x.row, position + at, index, key_of(spec, words, e))
                at += 1
    if count <= STAGED:
        cute.arch.barrier()
        for i in cutlass.range(cute.arch.thread_idx()[0], count, spec.threads, unroll=1):
            index = s.staged[i]
            key = Uint32(0)
            if a.values.shape[0] > 0:
                key = key_at(spec, a, x, index)
            emit.place(spec, a, x.row, position + i, index, key)


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
def key_at(spec: cutlass.Constexpr, a, x: rows.Slice, index: Int32):
    """The key of element `index` of the window."""
    bits = const_expr(BITS[spec.dtype])
    word = keys.raw(a.scores, bits)[x.row, x.start + index].to(Uint32)
    return keys.part(keys.encode(word, bits), 0, bits)


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
