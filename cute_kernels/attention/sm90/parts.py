"""Parts of tiles whose keys CTAs share (`schedule.stream_k`): what a CTA found on its keys, and the merge of a tile by
the CTA that finishes its last part.

A CTA has parts of two tiles at most. They are merged behind its last tile: with the loops of a merge among those of
tiles, the compiler keeps descriptors of MMAs in no uniform registers, which costs 70 of 730 instructions a block.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import warp, wgmma
from .. import combine, epilogue, geometry, quant, softmax
from ..schedule import stream_k, work
from ..schedule.work import Work
from .groups import GROUP_BARRIER
from .roles import WARPS, roles
from .store import LANES

MOST = 2  # parts of a CTA
PIECE = 2  # columns that a lane has side by side
ROWS, PARTS = 16, 2  # that a warp merges at a time: a lane has the LSE of one row of one part


class Board(NamedTuple):
    """Shared memory. tiles: (words, MOST) of the `Work` of each part; last: (MOST,), whether it was its tile's last."""

    tiles: cute.Tensor
    last: cute.Tensor


def allocate(spec, smem):
    """The `Board`; None in other kernels."""
    if not work.parts(spec):
        return None
    tiles = smem.allocate_tensor(Int32, cute.make_layout((work.fields(spec), MOST)))
    return Board(tiles, smem.allocate_tensor(Int32, cute.make_layout(MOST)))


def thread(spec):
    return cute.arch.thread_idx()[0] - roles(spec).first_thread("math")


@cute.jit
def store(spec: cutlass.Constexpr, a, s, r, w: Work, number: Int32, empty: cutlass.Constexpr):
    """This thread's rows of O, normalised, and LSE, of the keys of the CTA's part `number`; `empty`: of none."""
    o, lane = wgmma.rows_cols(r.o), cute.arch.lane_idx() % LANES
    left = geometry.tile_rows(w.q_len, geometry.divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        factor, lse = Float32(0.0), -Float32.inf
        if const_expr(not empty):
            normal = softmax.row_normalizer(r.st, k, -Float32.inf, LANES)
            factor, lse = normal.factor * quant.format_of(spec).unit, normal.lse
        row, piece = r.cols[k, 0][0], cute.make_rmem_tensor(PIECE, Float32)
        if row < left:
            target = a.schedule.o_partial[w.split.slot, row, None]
            for i in cutlass.range_constexpr(spec.head_dim_vo // (LANES * PIECE)):
                for e in cutlass.range_constexpr(PIECE):
                    piece[e] = Float32(0.0) if const_expr(empty) else o[k, PIECE * i + e] * factor
                cute.autovec_copy(piece, cute.local_tile(target, (PIECE,), (LANES * i + lane,)))
            if lane == 0:
                target[spec.head_dim_vo] = lse
    if thread(spec) == 0:
        for i, word in enumerate(work.flatten(w)):
            s.parts.tiles[i, cutlass.min(number, MOST - 1)] = word  # more only where lengths change during a launch


def part_of(spec, s, i):
    """Work of a part."""
    return work.of_words(spec, [s.parts.tiles[k, i] for k in range(work.fields(spec))])


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, count: Int32):
    """Merge those tiles of the CTA's parts, of which there are `count`, that no other CTA has still to add to."""
    threads, tid = const_expr(32 * WARPS), thread(spec)
    number = cute.arch.make_warp_uniform(tid // 32)
    cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=threads)
    count = cutlass.min(count, MOST)
    if tid < count:
        split = part_of(spec, s, tid).split
        combine.count_part(a, split.first, split.count, s.parts.last, tid)
    cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=threads)
    for i in cutlass.range(count, unroll=1):
        if s.parts.last[i] != 0:
            w = part_of(spec, s, i)
            rows = geometry.tile_rows(w.q_len, geometry.divisor(w)) - w.m_block * spec.tile.m
            for first in cutlass.range(ROWS * number, cutlass.min(rows, spec.tile.m), ROWS * WARPS, unroll=1):
                merge_rows(spec, a, w, first, rows)


@cute.jit
def merge_rows(spec: cutlass.Constexpr, a, w: Work, first: Int32, rows: Int32):
    """One warp: ROWS rows of a tile that has `rows`, from `first` on. Parts are added in the order of keys."""
    dim, lane, count = const_expr(spec.head_dim_vo), cute.arch.lane_idx(), w.split.count
    per = const_expr(dim // 32)
    acc, pieces = cute.make_rmem_tensor((per, ROWS), Float32), cute.make_rmem_tensor((per, ROWS), Float32)
    acc.fill(0.0)
    row, base, top, total = cutlass.min(first + lane // PARTS, rows - 1), Int32(0), -Float32.inf, Float32(0.0)
    while base < count:
        part, lse = base + lane % PARTS, -Float32.inf
        if part < count:
            lse = a.schedule.o_partial[stream_k.slot_of(a, w, part), row, dim]
        peak = cute.arch.fmax(top, cute.arch.warp_reduction_max(lse, threads_in_group=PARTS))
        known = Float32(0.0) if peak == -Float32.inf else peak
        old, mine = (cute.math.exp2(x - known, fastmath=True) for x in (top, lse))
        total = warp.fma(total, old, cute.arch.warp_reduction_sum(mine, threads_in_group=PARTS))
        for i in cutlass.range_constexpr(ROWS):
            acc[None, i].store(acc[None, i].load() * cute.arch.shuffle_sync(old, PARTS * i))
        for j in cutlass.range(PARTS, unroll=1):  # the loads of two parts would need more registers than there are
            slot = stream_k.slot_of(a, w, cutlass.min(base + j, count - 1))
            for i in cutlass.range_constexpr(ROWS):
                source = a.schedule.o_partial[slot, cutlass.min(first + i, rows - 1), None]
                cute.autovec_copy(cute.local_tile(source, (per,), (lane,)), pieces[None, i])
            for i in cutlass.range_constexpr(ROWS):
                factor = cute.arch.shuffle_sync(mine, PARTS * i + j)
                for e in cutlass.range_constexpr(per):  # a part without a key may hold 0 x NaN
                    acc[e, i] = warp.fma(pieces[e, i], factor, acc[e, i]) if factor > 0.0 else acc[e, i]
        top = peak
        base += PARTS
    scale, m = epilogue.scale_of(a), spec.tile.m
    for i in cutlass.range_constexpr(ROWS):
        own = w.m_block * m + first + i
        token = geometry.token_of(own, geometry.divisor(w))
        head = geometry.head_of(own, w.head, geometry.divisor(w))
        if first + i < rows:
            each = [cute.arch.shuffle_sync(x, PARTS * i) for x in (top, total)]
            normal = softmax.normalizer(*each, epilogue.sink_of(a, head))
            values = cute.make_rmem_tensor(per, Float32)
            values.store(acc[None, i].load() * (normal.factor * scale))
            epilogue.store_piece(spec, a, w.q_start + token, head, lane, values, ())
            epilogue.store_lse(a, w.q_start + token, head, normal.lse, lane == 0)
