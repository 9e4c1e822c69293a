"""The sum of O over the warps that share query rows, at the end of a tile, and the output.

Each warp has O, row_max and row_sum for its own keys. In each of `layout.reduction_passes`, every warp stores a part of
its O to shared memory (`store`); then each thread adds up PIECE columns of a row over the warps, rescaled to the common
maximum, and writes them to the output, or to scratch if the tile is split (`merge`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import copy, pipeline, warp
from .. import epilogue, geometry, quant, softmax
from .layout import columns_at_once, first_column, row_of_pass, rows_at_once, rows_of_pass, sf_lanes
from .roles import roles

PIECE = 4  # columns per thread


@dataclass(frozen=True)
class ReduceSmem:
    """Shared memory of the reduction."""

    o: cute.Tensor  # (warp, row of a pass, piece, PIECE): piece i at i ^ (row / 2), against bank conflicts
    stats: cute.Tensor  # (warp, row, 2): row_max in log2 units and row_sum
    ready: pipeline.Pipeline  # one stage, which all warps fill and release


class RowStats(NamedTuple):
    """The softmax statistics of a row: maximum in log2 units, sum of all exponentials / 2^row_max."""

    row_max: Float32
    row_sum: Float32


def allocate(spec, smem):
    """Allocate the `ReduceSmem`."""
    t = spec.tile

    def row_major(*shape):
        return cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))

    pieces = 8 * columns_at_once(spec) // PIECE
    return ReduceSmem(
        smem.allocate_tensor(Float32, row_major(t.warps, rows_at_once(spec), pieces, PIECE), 16),
        smem.allocate_tensor(Float32, row_major(t.warps, t.rows_per_warp, 2), 8),
        pipeline.make(smem, 1, t.warps, t.warps),
    )


@cute.jit
def store(spec: cutlass.Constexpr, s, r, tile, turn: Int32, reduction_pass: cutlass.Constexpr):
    """Store this warp's O of one pass and, in the first pass of its rows, row_max and row_sum to s.merge.
    turn: item of s.merge.ready. reduction_pass: of `layout.reduction_passes`."""
    own, (low, number) = tile.warp_idx, reduction_pass  # first row of the warp, first column of the lane
    g, t, count = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4, const_expr(columns_at_once(spec) // PIECE)
    # until all warps have read the pass before
    pipeline.producer_acquire(s.merge.ready, turn)
    if spec.tile.rows_per_warp * tile.row_group < tile.rows_left:
        for k in cutlass.range_constexpr(low // 4, (low + rows_at_once(spec)) // 4):
            row = (k // 2 * 8 - low) + 2 * t + k % 2
            if const_expr(number == 0):
                # row_max and row_sum
                row_sum = warp.reduce_across_quads(r.st.row_sum[k], softmax.add)
                row_max = r.st.row_max[k] * r.to_log2[k]
                s.merge.stats[own, low + row, 0] = row_max
                s.merge.stats[own, low + row, 1] = row_sum
            # O
            for i in cutlass.range_constexpr(count):
                piece = cute.make_rmem_tensor(PIECE, Float32)
                for e in cutlass.range_constexpr(PIECE):
                    piece[e] = r.acc_o[2 * (number + PIECE * i + e) + k % 2, k // 2]
                copy.vector(piece, s.merge.o[own, row, (g * count + i) ^ (t + (k // 2 * 4 - low // 2)), None])
    cute.arch.sync_warp()
    pipeline.producer_commit(s.merge.ready, turn)


@cute.jit
def combine_warps(spec: cutlass.Constexpr, s, tile, row: Uint32, piece: Uint32, total: cute.Tensor):
    """Set total to the sum of O * 2^(row_max - top) over the warps that share `row`, where top is the maximum over
    these warps. Return the row's `RowStats`."""
    each = const_expr(spec.tile.rows_per_warp)
    first, inside = Int32(row // each) * tile.key_shares, row % each  # first warp of the row; the row within a warp
    acc_o = cute.make_rmem_tensor(PIECE, Float32)
    top, row_sum, stored = -Float32.inf, Float32(0.0), inside % rows_at_once(spec)
    total.fill(0.0)
    # the maximum over the warps
    for c in cutlass.range(tile.key_shares, unroll=4):
        top = cute.arch.fmax(top, s.merge.stats[first + c, inside, 0])
    base = Float32(0.0) if top == -Float32.inf else top
    # rescale and add
    for c in cutlass.range(tile.key_shares, unroll=4):
        scale = cute.math.exp2(s.merge.stats[first + c, inside, 0] - base, fastmath=True)
        row_sum = warp.fma(scale, s.merge.stats[first + c, inside, 1], row_sum)
        copy.vector(s.merge.o[first + c, stored, piece ^ (stored // 2), None], acc_o)
        warp.add_scaled(total, acc_o, scale)
    return RowStats(top, row_sum)


@cute.jit
def store_output(spec: cutlass.Constexpr, a, r, tile, row: Int32, column: Int32, total: cute.Tensor, stats: RowStats):
    """Normalise PIECE columns of a row, from `column` * PIECE on, and store them to the output, or to scratch if the
    tile is split; the first piece of a row also stores its LSE."""
    at, dequant_scale = tile.first_row + row, Float32(quant.kv_format(spec).dequant_scale)
    keep = True if const_expr(spec.padded_vo == spec.tile_vo) else column < spec.tile_vo // PIECE
    if tile.w.split.slot >= 0:
        normal = softmax.normalizer(stats.row_max, stats.row_sum, -Float32.inf)
        total.store(total.load() * (normal.inv_row_sum * dequant_scale))
        if keep:
            epilogue.store_partial(spec, a, tile.w.split.slot, row, column, total, normal.lse)
    else:
        token = geometry.token_of(at, r.pack_factor)
        head = geometry.head_of(at, tile.w.head_idx, r.pack_factor)
        normal = softmax.normalizer(stats.row_max, stats.row_sum, epilogue.sink_of(a, head))
        total.store(total.load() * (normal.inv_row_sum * dequant_scale * epilogue.output_scale(a)))
        piece = epilogue.first_piece(spec, tile.w, PIECE) + column
        epilogue.store_piece(spec, a, tile.w.sequence.q_start + token, head, piece, total, sf_lanes(spec), keep)
        mine = epilogue.stores_lse(spec, tile.w, column == 0)
        epilogue.store_lse(a, tile.w.sequence.q_start + token, head, normal.lse, mine)


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, r, tile, turn: Int32, reduction_pass: cutlass.Constexpr):
    """Add up and store the output of one pass, once all warps have stored their O of it. turn, reduction_pass: as in
    `store`."""
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    count = const_expr(columns_at_once(spec) // PIECE)  # pieces per lane
    pieces, (low, number) = const_expr(8 * count), reduction_pass  # pieces per row
    # until all warps have stored
    pipeline.consumer_wait(s.merge.ready, turn)
    rows = rows_of_pass(spec, low, tile.rows_left)
    for index in cutlass.range(tid, pieces * rows, 32 * spec.tile.warps, unroll=1):
        which = Uint32(index)  # unsigned: divisions are shifts
        row, piece = row_of_pass(spec, low, which // pieces), which % pieces
        total = cute.make_rmem_tensor(PIECE, Float32)
        stats = combine_warps(spec, s, tile, row, piece, total)
        column = first_column(spec, number + PIECE * (piece % count), piece // count)
        store_output(spec, a, r, tile, Int32(row), Int32(column // PIECE), total, stats)
    cute.arch.sync_warp()
    pipeline.consumer_release(s.merge.ready, turn)
