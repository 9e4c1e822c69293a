"""From accumulators of WGMMA, whose rows lie in quads, to rows of O."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import warp, wgmma
from .. import epilogue, geometry, logits, softmax
from ..schedule.work import Work
from .roles import fp8

LANES = 4  # that have columns of a row of an accumulator


class Scales(NamedTuple):
    """score: of raw scores to log2 units. reduced: of what the softmax reduces, scores or capped ones. out: on the
    output."""

    score: Float32
    reduced: Float32
    out: Float32


def scales_of(r, scales: Scales):
    """(score, reduced) of each row."""
    return ([scales.score] * 2, [scales.reduced] * 2) if r.scales is None else r.scales


FP8_SPAN = softmax.Span(1.75, 7.0)  # e4m3 ends at 448 = 2^8.8, what is smaller by 2^17 than the maximum is lost; a
# whole power of two, so that P of a key that outweighs all others is exact


def span(spec):
    """Where P lies."""
    return FP8_SPAN if fp8(spec) else softmax.SPAN


def fours(spec):
    """Whether a lane has, of every 16 columns of O, 4 q + 0, 2, 1, 3, q its place in the quad, instead of 2 q, 2 q + 1,
    8 + 2 q, 9 + 2 q: rows of a transposed V lie in `prepare.order`."""
    return fp8(spec)


@cute.jit
def store_fours(a, token: Int32, head: Int32, values: cute.Tensor, keep):
    """One row of O, of which this lane has `fours`."""
    lane, out = cute.arch.lane_idx() % LANES, a.out.o[token, head, None]
    piece = cute.make_rmem_tensor(4, out.element_type)
    for g in cutlass.range_constexpr(cute.size(values) // 4):
        ordered = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            ordered[i] = values[4 * g + (0, 2, 1, 3)[i]]
        warp.convert16(ordered, piece)
        if keep:
            cute.autovec_copy(piece, cute.local_tile(out, (4,), (LANES * g + lane,)))


@cute.jit
def store_quad_row(a, token: Int32, head: Int32, values: cute.Tensor, keep):
    """One row of O: `values` (D / 4,) are this lane's 2-element pieces of every 8-column group of the row.

    A quad transposes them so that each lane holds whole 16-byte groups, and stores 64 contiguous bytes at a time.
    """
    lane = cute.arch.lane_idx() % 4
    out = a.out.o[token, head, None]
    groups = const_expr(cute.size(values) // 2)
    words = cute.make_rmem_tensor(groups, Int32)
    warp.convert16(values, cute.recast_tensor(words, out.element_type))
    for k in cutlass.range_constexpr(0, groups, 4):
        warp.quad_transpose(words, k)
    if keep:
        for k in cutlass.range_constexpr(0, groups, 4):
            piece = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                piece[i] = words[k + i]
            cute.autovec_copy(cute.recast_tensor(piece, out.element_type), cute.local_tile(out, (8,), (k + lane,)))


@cute.jit
def zero_quad_row(spec: cutlass.Constexpr, a, token: Int32, head: Int32, keep):
    """One row of O, of zeros."""
    out, piece = a.out.o[token, head, None], cute.make_rmem_tensor(4, Int32)
    piece.fill(0)
    if keep:
        for k in cutlass.range_constexpr(0, spec.head_dim_vo // 8, 4):
            target = cute.local_tile(out, (8,), (k + cute.arch.lane_idx() % LANES,))
            cute.autovec_copy(cute.recast_tensor(piece, out.element_type), target)


@cute.jit
def store(spec: cutlass.Constexpr, a, r, w: Work, scales: Scales, empty: cutlass.Constexpr):
    """Normalise and write this thread's rows of O and LSE that belong to the request; `empty`: no row sees a key."""
    per_token = geometry.rows_per_token(spec, a)
    o = wgmma.rows_cols(r.o)
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        row = w.m_block * spec.tile.m + r.cols[k, 0][0]
        token = geometry.token_of(row, per_token, spec.pack_gqa)
        keep = token < w.q_len
        head = geometry.head_of(row, w.head, per_token, spec.pack_gqa)
        sink = epilogue.sink_of(a, head)
        lse = sink * logits.LOG2_E
        if const_expr(empty):
            zero_quad_row(spec, a, w.q_start + token, head, keep)
        else:
            values = cute.make_rmem_tensor(cute.size(o, mode=[1]), Float32)
            normal = softmax.row_normalizer(r.st, k, scales_of(r, scales)[1][k], sink, LANES, span(spec))
            lse = normal.lse
            factor = normal.factor * scales.out
            if const_expr(r.scales is not None):
                factor *= softmax.factor_of(a.out.out_scale, head)
            values.store(o[k, None].load() * factor)
            if const_expr(fours(spec)):
                store_fours(a, w.q_start + token, head, values, keep)
            else:
                store_quad_row(a, w.q_start + token, head, values, keep)
        epilogue.store_lse(a, w.q_start + token, head, lse, keep and cute.arch.lane_idx() % LANES == 0)
