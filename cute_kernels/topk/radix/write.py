"""Decide which keys at the boundary get in, and write what was selected, in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ...device.clamp import clamp
from .. import emit, rows, scope, select
from . import LIST
from .passes import OWNER, STEP, BitPieces, Boundary, drop, groups, index_of, piece, share

LOOKS = 8  # keys at the boundary that a thread compares with one, at once


@cute.jit
def resolve_ties(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, boundary: Boundary):
    """Of the keys at the boundary, leave in s.bits those that get in. After `passes.mark`; ends with a CTA barrier.

    Returns the number of keys at the boundary taken by lower CTAs that are not already in their s.counts[1]."""
    bin_count, k_left = boundary.bin_count, boundary.k_left
    taken = Int32(0)
    if k_left < bin_count:
        if bin_count <= LIST:
            if const_expr(spec.cluster > 1):
                scope.gather_lists(spec, s.list, s.table, s.pool)
                cute.arch.barrier()
            choose(spec, a, s, bin_count, k_left)
        else:
            earlier, mine = scope.sum_before_cta(spec, s.table, scope.rank(spec)), bin_count
            if const_expr(spec.cluster > 1):
                mine = s.table[scope.rank(spec)]
            skipped = Int32(0)  # of the row, before the first that gets in
            if a.last_ties != 0:
                skipped = bin_count - k_left
            taken = clamp(earlier - skipped, 0, k_left)
            skip = clamp(skipped - earlier, 0, mine)
            take_ties(spec, s, x, skip, clamp(k_left - taken, 0, mine - skip))
        cute.arch.barrier()
    return taken


def rankers(spec):
    """Threads that rank a key at the boundary."""
    return 4 if spec.cluster == 1 else 8


@cute.jit
def choose(spec: cutlass.Constexpr, a, s, bin_count: Int32, k_left: Int32):
    """Count in s.counts[1] those of this CTA's keys at the boundary, s.list, that are among the `k_left` largest of the
    row's, s.pool; clear the bits of the others. A few threads rank a key. The caller needs a barrier."""
    tid, mine = cute.arch.thread_idx()[0], s.counts[0]
    for base in cutlass.range(0, mine, spec.threads // rankers(spec), unroll=1):
        i, key, larger, behind = base + tid // rankers(spec), Uint64(0), Int32(0), Int32(0)
        if i < mine:
            key, behind = s.list[i], bin_count
        for first in cutlass.range(tid % rankers(spec), behind, rankers(spec) * LOOKS, unroll=1):
            others = [s.pool[first + j * rankers(spec)] for j in range(LOOKS)]  # behind the last one are zeros
            for j in cutlass.range_constexpr(LOOKS):
                if others[j] > key:
                    larger += 1
        for step in cutlass.range_constexpr(rankers(spec).bit_length() - 1):
            larger += cute.arch.shuffle_sync_bfly(larger, 1 << step)
        if (tid % rankers(spec) == 0) & (i < mine):
            if larger < k_left:
                select.add(s.counts, 1, 1)
            else:
                name = Uint32(key & 0xFFFFFFFF)
                if a.last_ties == 0:
                    name = ~name
                drop(s.bits, Int32(name & ((1 << OWNER) - 1)))


@cute.jit
def take_ties(spec: cutlass.Constexpr, s, x: rows.RowSlice, skip: Int32, take: Int32):
    """Set the bits of this CTA's ties number skip .. skip + take - 1, in index order. The caller needs a barrier."""
    words = groups(spec, x) * STEP
    per = (words + spec.threads - 1) // spec.threads
    first = cutlass.min(cute.arch.thread_idx()[0] * per, words)
    last = cutlass.min(first + per, words)
    mine = Int32(0)
    for w in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(s.ties[w]))
    tie, _ = select.cta_prefix_sum(spec, mine, s.scratch)
    bits = s.bits  # alone: see `stage`
    for w in cutlass.range(first, last, unroll=1):
        left, chosen = s.ties[w], bits[w]
        while left != 0:
            if (tie >= skip) & (tie < skip + take):
                chosen = chosen | (left & (~left + 1))
            tie += 1
            left = left & (left - 1)
        bits[w] = chosen


@cute.jit
def rank_bits(spec: cutlass.Constexpr, s, pieces: BitPieces):
    """(number of set bits before this thread's pieces, number of all set bits). Contains a CTA barrier."""
    first, last, parts = pieces
    mine = Int32(0)
    for p in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(piece(s.bits, p, parts)[0]))
    return select.cta_prefix_sum(spec, mine, s.scratch)


@cute.jit
def stage(
    spec: cutlass.Constexpr, s, x: rows.RowSlice, pieces: BitPieces, slot: Int32, places: cutlass.Constexpr = False
):
    """Write the indices of this thread's set bits to s.staged[slot ...], or (places) their places to s.ties[slot ...].

    Slots outside the tensor are skipped. The caller needs a barrier."""
    first, last, parts = pieces
    into = s.ties if const_expr(places) else s.staged  # alone: a loop that stores to `s` carries all that it holds
    room = const_expr(cute.size(into))
    for p in cutlass.range(first, last, unroll=1):
        left, base = piece(s.bits, p, parts)
        while left != 0:
            place = base + 31 - Int32(cute.arch.clz(left & (~left + 1)))
            if (slot >= 0) & (slot < room):
                if const_expr(places):
                    into[slot] = Uint32(place)
                else:
                    into[slot] = index_of(spec, s, x, place)
            slot += 1
            left = left & (left - 1)


@cute.jit
def expand(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, taken: Int32):
    """Write the keys in s.bits as outputs, behind those of lower CTAs: their s.counts[1] and `taken`.

    taken: of `resolve_ties`. No CTA of the row ends before the others have read its counts."""
    pieces, room = share(spec, x), const_expr(cute.size(s.staged))
    scope.arrive(spec)
    at, count = rank_bits(spec, s, pieces)
    scope.wait(spec)
    chosen = scope.gather_counts(spec, s.counts, Int32(1))
    stage(spec, s, x, pieces, at)
    scope.store_counts(spec, chosen, s.table)
    scope.arrive(spec)
    cute.arch.barrier()
    position = scope.sum_before_cta(spec, s.table, scope.rank(spec)) + taken
    emit.place(spec, a, s, x, position, cutlass.min(count, room))
    for begin in cutlass.range(room, count, room, unroll=1):
        cute.arch.barrier()
        stage(spec, s, x, pieces, at - begin)
        cute.arch.barrier()
        emit.place(spec, a, s, x, position + begin, cutlass.min(count - begin, room))
    scope.wait(spec)
