"""Parts of tiles whose keys CTAs share (`schedule.stream_k`): what a CTA found on its keys, and the merge of a tile by
the CTA that finishes its last part.

A CTA has parts of two tiles at most. They are merged behind its last tile: with the loops of a merge among those of
tiles, the compiler keeps descriptors of MMAs in no uniform registers, which costs 70 of 730 instructions a block.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import wgmma
from .. import combine, geometry, quant, softmax
from ..schedule import work
from ..schedule.work import Work
from .groups import GROUP_BARRIER
from .roles import WARPS, roles
from .store import LANES

MOST = 2  # parts of a CTA
PIECE = 2  # columns that a lane has side by side


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
            step, end = const_expr(combine.ROWS), cutlass.min(rows, spec.tile.m)
            for first in cutlass.range(step * number, end, step * WARPS, unroll=1):
                combine.merge_rows(spec, a, w, first, rows)
