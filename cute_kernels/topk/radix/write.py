"""Decide which keys at the boundary are selected, and write the selected elements in index order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ...device.clamp import clamp
from .. import emit, rows, scope, select
from . import TIE_LIST
from .passes import GROUP_WORDS, POS_BITS, BitPieces, Boundary, clear_bit, groups, index_of, piece, thread_pieces

COMPARES = 8  # keys at the boundary that a thread compares with its own in one step


@cute.jit
def resolve_ties(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, boundary: Boundary):
    """Leave in s.bits only those keys at the boundary that are selected. Follows `passes.mark`; ends with a CTA
    barrier.

    Return the number of ties that lower CTAs take and that their s.counts[1] do not include."""
    bin_count, k_left = boundary.bin_count, boundary.k_left
    taken = Int32(0)
    if k_left < bin_count:
        if bin_count <= TIE_LIST:
            # few ties: rank them by comparing all pairs
            if const_expr(spec.cluster > 1):
                scope.gather_lists(spec, s.list, s.table, s.pool)
                cute.arch.barrier()
            rank_listed_ties(spec, a, s, bin_count, k_left)
        else:
            # equal ties: take them in index order, across the CTAs
            earlier, mine = scope.sum_before_cta(spec, s.table, scope.rank(spec)), bin_count
            if const_expr(spec.cluster > 1):
                mine = s.table[scope.rank(spec)]
            skipped = Int32(0)  # ties of the row before the first selected one
            if a.last_ties != 0:
                skipped = bin_count - k_left
            taken = clamp(earlier - skipped, 0, k_left)
            skip = clamp(skipped - earlier, 0, mine)
            take_ties(spec, s, x, skip, clamp(k_left - taken, 0, mine - skip))
        cute.arch.barrier()
    return taken


def threads_per_tie(spec):
    """Return the number of threads that rank a key at the boundary."""
    return 4 if spec.cluster == 1 else 8


@cute.jit
def rank_listed_ties(spec: cutlass.Constexpr, a, s, bin_count: Int32, k_left: Int32):
    """Rank this CTA's keys at the boundary, s.list, among those of the row, s.pool.

    Count those among the `k_left` largest in s.counts[1]; clear the bits of the others. The caller needs a
    barrier."""
    tid, mine = cute.arch.thread_idx()[0], s.counts[0]
    # Rank each tie of this CTA by comparing it with all ties of the row; 4 or 8 threads share a tie.
    # Reads: s.list, its own ties, and s.pool, those of the row.
    # Waits for: nothing; both are complete since the last barrier.
    # Writes: s.bits and s.counts[1], atomically.
    # Order: each CTA ranks only its own ties, which makes a row's 190 ties 8 or 16 times cheaper in clusters of 8 or 16
    #   CTAs. Up to about 100 ties, comparing all pairs is faster than fine bins, which are a chain of 1,250 cycles for
    #   a list of any length.
    for base in cutlass.range(0, mine, spec.threads // threads_per_tie(spec), unroll=1):
        i, key, larger, behind = base + tid // threads_per_tie(spec), Uint64(0), Int32(0), Int32(0)
        if i < mine:
            key, behind = s.list[i], bin_count
        for first in cutlass.range(tid % threads_per_tie(spec), behind, threads_per_tie(spec) * COMPARES, unroll=1):
            # entries behind the last one are zeros
            others = [s.pool[first + j * threads_per_tie(spec)] for j in range(COMPARES)]
            for j in cutlass.range_constexpr(COMPARES):
                if others[j] > key:
                    larger += 1
        # sum over the threads of the tie
        for step in cutlass.range_constexpr(threads_per_tie(spec).bit_length() - 1):
            larger += cute.arch.shuffle_sync_bfly(larger, 1 << step)
        # keep it, or clear its bit
        if (tid % threads_per_tie(spec) == 0) & (i < mine):
            if larger < k_left:
                select.add(s.counts, 1, 1)
            else:
                name = Uint32(key & 0xFFFFFFFF)
                if a.last_ties == 0:
                    name = ~name
                clear_bit(s.bits, Int32(name & ((1 << POS_BITS) - 1)))


@cute.jit
def take_ties(spec: cutlass.Constexpr, s, x: rows.RowSlice, skip: Int32, take: Int32):
    """Set the bits of this CTA's ties number skip .. skip + take - 1, in index order. The caller needs a barrier."""
    words = groups(spec, x) * GROUP_WORDS
    per = (words + spec.threads - 1) // spec.threads
    first = cutlass.min(cute.arch.thread_idx()[0] * per, words)
    last = cutlass.min(first + per, words)
    # number the ties: count those of this thread's words, then a prefix sum
    mine = Int32(0)
    for w in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(s.ties[w]))
    tie, _ = select.cta_prefix_sum(spec, mine, s.scratch)
    # set the bits of the ties in [skip, skip + take)
    bits = s.bits  # by itself: see `stage_indices`
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
    """Return (number of set bits before this thread's pieces, number of all set bits). Contains a CTA barrier."""
    first, last, parts = pieces
    mine = Int32(0)
    for p in cutlass.range(first, last, unroll=1):
        mine += Int32(cute.arch.popc(piece(s.bits, p, parts)[0]))
    return select.cta_prefix_sum(spec, mine, s.scratch)


@cute.jit
def stage_indices(
    spec: cutlass.Constexpr,
    s,
    x: rows.RowSlice,
    pieces: BitPieces,
    slot: Int32,
    as_positions: cutlass.Constexpr = False,
):
    """Write the indices of this thread's set bits to s.staged[slot ...], or (as_positions) their positions to
    s.ties[slot ...].

    Slots outside the tensor are skipped. The caller needs a barrier."""
    first, last, parts = pieces
    # by itself: a loop that stores to a field of `s` would carry all of `s`
    into = s.ties if const_expr(as_positions) else s.staged
    room = const_expr(cute.size(into))
    for p in cutlass.range(first, last, unroll=1):
        left, base = piece(s.bits, p, parts)
        while left != 0:
            pos = base + 31 - Int32(cute.arch.clz(left & (~left + 1)))
            if (slot >= 0) & (slot < room):
                if const_expr(as_positions):
                    into[slot] = Uint32(pos)
                else:
                    into[slot] = index_of(spec, s, x, pos)
            slot += 1
            left = left & (left - 1)


@cute.jit
def write_selected(spec: cutlass.Constexpr, a, s, x: rows.RowSlice, taken: Int32):
    """Write the elements of the bits in s.bits as outputs, behind those of lower CTAs: their s.counts[1], and
    `taken`.

    taken: from `resolve_ties`. No CTA of the row exits before the others have read its counts."""
    # The position of an element is the number of set bits before it: in lower CTAs, then in lower threads of this one.
    # Reads: s.bits; s.counts[1] of all CTAs.
    # Waits for: all CTAs to have final counts (first `wait`), and to have read this CTA's counts before it exits
    #   (second).
    # Writes: s.staged, which lies over s.keys, then the outputs.
    # Order: each arrival is early and its wait late, so a prefix sum and the output hide the latency of the barrier.
    #   Indices are staged in shared memory so that a loop for each output has coalesced writes and an absent output
    #   costs a branch.
    pieces, room = thread_pieces(spec, x), const_expr(cute.size(s.staged))
    scope.arrive(spec)
    at, count = rank_bits(spec, s, pieces)
    scope.wait(spec)
    # read the other CTAs' counts while the indices are staged
    chosen = scope.gather_counts(spec, s.counts, Int32(1))
    stage_indices(spec, s, x, pieces, at)
    scope.store_counts(spec, chosen, s.table)
    scope.arrive(spec)
    cute.arch.barrier()
    # write the outputs
    position = scope.sum_before_cta(spec, s.table, scope.rank(spec)) + taken
    emit.write_outputs(spec, a, s, x, position, cutlass.min(count, room))
    # more selected keys than s.staged has room for: in rounds
    for begin in cutlass.range(room, count, room, unroll=1):
        cute.arch.barrier()
        stage_indices(spec, s, x, pieces, at - begin)
        cute.arch.barrier()
        emit.write_outputs(spec, a, s, x, position + begin, cutlass.min(count - begin, room))
    scope.wait(spec)
