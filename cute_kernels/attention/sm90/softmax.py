"""Softmax of one KV block, on a warpgroup's fragments: acc_s -> masked scores, row_max, row_sum and the operand P.

Exponentials usually do not wait for the block's maxima. `speculate_p` computes P as if the running maximum of each row
did not change, which is nearly always right, because that maximum may lag behind (`update_max`, with a rescale
threshold as in FlashAttention-4). `validate_p` then finds warps in which P left the range of its type and computes
their P again. Blocks in which the maxima usually grow are computed with the maxima first: those on the diagonal and,
with an 8-bit P, the first ones of a tile (`precision.exact_max_blocks`).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import wgmma
from ...device.warp import fma
from .. import geometry, logits
from .. import softmax as online
from ..mask import ScoreCols, ScoreRows
from . import precision, promotion
from .epilogue import LANES, scales_of
from .groups import o_part
from .state import Sm90Fragments, Sm90TileState
from .tile_table import exact_max_blocks


def rows_of(tile: Sm90TileState):
    r = tile.r
    return ScoreRows(r.tokens, tile.w.sequence.q_start, tile.seqlen, scales_of(r).score, r.slopes, r.words, r.offsets)


def row_max_scaled(r: Sm90Fragments, scale, row):
    """Return row_max of a row in log2 units, for scores without the row's offset. scale: of the row's scores."""
    shift = r.st.row_max_scaled[row]
    return shift if r.offsets is None else fma(-r.offsets[row], scale, shift)


@cute.jit
def init_rows(spec: cutlass.Constexpr, a, tile: Sm90TileState, capped: cutlass.Constexpr):
    """Begin a tile: O = 0, row_max = -inf, row_sum = 0; the token, the scales and the ALiBi slope of each of this
    thread's rows."""
    r, pack_factor = tile.r, geometry.pack_divisor(tile.w)
    online.reset(r.st, online.NO_KEY_MAX)
    r.acc_o.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = tile.w.m_block * spec.tile.m + r.cols[k, 0][0]
        r.tokens[k] = geometry.token_of(row, pack_factor)
        if const_expr(precision.scales_rows(spec)):
            head = geometry.head_of(row, tile.w.head_idx, pack_factor)
            r.scales.score[k] = r.call_scales.score * online.head_scale(a.logits.softmax_scale_ptr, head)
            if const_expr(precision.of(spec).scales_q_rows):
                r.scales.score[k] *= r.q_row_scales[k]
            if const_expr(spec.logits.soft_cap):
                r.scales.reduced[k] = r.call_scales.reduced if const_expr(capped) else r.scales.score[k]
        if const_expr(spec.logits.alibi):
            head = geometry.head_of(row, tile.w.head_idx, pack_factor)
            r.slopes[k] = logits.slope_of(a, head, scales_of(r).score[k])


@cute.jit
def transform_scores(spec: cutlass.Constexpr, a, tile: Sm90TileState, n_block: Int32, flags: cutlass.Constexpr):
    """Apply bias, soft cap and mask to the scores of a block in acc_s. Return them as a (rows, cols) view."""
    r = tile.r
    scores, lane_col = wgmma.rows_cols(r.acc_s), r.cols[0, 0][1]
    at = [8 * (c // 2) + c % 2 for c in range(spec.tile.s_columns // LANES)]
    first = n_block * spec.tile.n + lane_col
    if const_expr(spec.tile.s_parts > 1):
        first += o_part(spec) * spec.tile.s_columns
    cols = ScoreCols(first, at, lane_col, LANES)
    logits.transform(spec, a, scores, rows_of(tile), cols, flags.capped, flags.masked)
    return scores


@cute.jit
def mask_and_update_max(spec: cutlass.Constexpr, a, tile: Sm90TileState, n_block: Int32, flags: cutlass.Constexpr):
    """Apply bias, soft cap and mask to a block in acc_s, then bring row_max up to date with it."""
    scores, r = transform_scores(spec, a, tile, n_block, flags), tile.r
    exact_max = const_expr(exact_max_blocks(spec) > 0)
    online.update_max(r.st, scores, scales_of(r).reduced, LANES, tile.rescale_params, exact_max, r.offsets, r.limits)


@cute.jit
def compute_p(tile: Sm90TileState, row: cutlass.Constexpr):
    """Replace a row of acc_s by its exponentials and add them to row_sum."""
    r = tile.r
    scale = scales_of(r).reduced[row]
    online.exp_and_sum(r.st, wgmma.rows_cols(r.acc_s), scale, row_max_scaled(r, scale, row), row)


@cute.jit
def convert_p(spec: cutlass.Constexpr, r: Sm90Fragments, row: cutlass.Constexpr):
    """Convert a row of acc_s to the type of P, into the A operand r.p."""
    store_p(spec, r, pack_p(spec, wgmma.rows_cols(r.acc_s)[row, None]), row)


def pack_p(spec, values):
    """Return the values of a row in the type of P, as words."""
    return precision.of(spec).pack_p([values[i] for i in range(cute.size(values))])


def store_p(spec, r, words, row):
    """Store the words of a row into r.p."""
    into = cute.recast_tensor(r.p, Uint32)
    for i, word in enumerate(words):
        into[precision.p_word(spec, row, i)] = word


class SpeculativeP(NamedTuple):
    """P of some columns of a row, valid if the row's maximum stays as it is.

    words: P as `pack_p` returns it. sum_chains: partial sums of the exponentials (`reduce_chains`). overflow: see
    `precision.add_overflow`.
    """

    words: list
    sum_chains: list
    overflow: Any


def speculate_p(spec, tile, row, cols, before=None) -> SpeculativeP:
    """Compute P of `cols` of a row without changing acc_s, row_max or row_sum. before: result for the columns in front,
    which the sums continue."""
    r = tile.r
    scores, scale = wgmma.rows_cols(r.acc_s)[row, None], scales_of(r).reduced[row]
    values, shift = cute.make_rmem_tensor(len(cols), Float32), row_max_scaled(r, scale, row)
    for i, col in enumerate(cols):
        values[i] = online.exp2_scaled(scores[col], scale, shift)
    words = pack_p(spec, values)
    sum_chains = online.reduce_chains(values, online.add, before and before.sum_chains)
    overflow = precision.add_overflow(spec, before.overflow if before else Uint32(0), words)
    return SpeculativeP(words, sum_chains, overflow)


@cute.jit
def validate_p(spec: cutlass.Constexpr, tile: Sm90TileState, row_sums, overflow):
    """Accept the speculative P of both rows, or compute it again.

    A warp in which P of some row may be out of range updates row_max, computes P of its rows again and rescales O; no
    P V may be in flight. Otherwise `row_sums` are added to row_sum.
    """
    r = tile.r
    if cute.arch.vote_any_sync(precision.exceeds_range(spec, row_sums, overflow)):
        scores, to_log2 = wgmma.rows_cols(r.acc_s), scales_of(r).reduced
        online.update_max(r.st, scores, to_log2, LANES, tile.rescale_params, False, r.offsets)
        for row in cutlass.range_constexpr(cute.size(r.tokens)):
            compute_p(tile, row)
            convert_p(spec, r, row)
        rescale_o(spec, r)
    else:
        for row in cutlass.range_constexpr(cute.size(r.tokens)):
            r.st.row_sum[row] += row_sums[row]


@cute.jit
def rescale_o(spec: cutlass.Constexpr, r: Sm90Fragments):
    """Multiply O by the scale that the last update of row_max left. No P V may be in flight."""
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    promotion.rescale(r.promoted, r.st.acc_scale)
