"""What happens to a block of scores between Q K^T and the softmax: bias, soft cap, then masks.

Both roles call `transform`; whether blocks are masked or capped is known at trace time in prefill, which has a loop for
each, and a value in decode.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.warp import fma
from . import mask

LOG2_E = 1.4426950408889634


class ScoreRows(NamedTuple):
    """The rows of a thread's view of scores (rows, cols). start: first query token of the request in the batch. slopes:
    of ALiBi, in units of raw scores. words: of the custom mask, of each row (`fetch_mask`)."""

    tokens: cute.Tensor
    start: Int32
    seqlen: mask.SeqlenInfo
    slopes: Any = None
    words: Any = None


@dataclass(frozen=True)
class ScoreCols:
    """The columns: keys first + at[c], at: static numbers. own: what of `first` is the thread's own offset; lanes:
    neighbours that have columns of a row."""

    first: Int32
    at: cutlass.Constexpr
    own: Int32 = 0  # type: ignore[assignment]
    lanes: cutlass.Constexpr = 1


@cute.jit
def cap(s: cute.Tensor, score_to_log2: Float32, soft_cap: Float32):
    """Soft cap in place: s becomes tanh(s * scale / cap), to be scaled by `capped_to_log2`. 1 - 2 / (1 + e^2y) keeps
    fp32 accuracy (tanh.approx has 2^-11, times cap)."""
    # exp(2 y) = exp2(s * 2 scale_log2 / cap). A division would be a call, made ahead of time where there is no cap too.
    y2 = score_to_log2 * 2.0 * cute.arch.rcp_approx(soft_cap)
    for i in cutlass.range_constexpr(cute.size(s)):
        e = cute.math.exp2(s[i] * y2, fastmath=True)
        s[i] = fma(Float32(-2.0), cute.arch.rcp_approx(1.0 + e), Float32(1.0))


def capped_to_log2(soft_cap):
    """What turns a score after `cap` into log2 units."""
    return soft_cap * LOG2_E


def slope_of(a, head, score_to_log2):
    """ALiBi's slope of a query head, in units of raw scores."""
    return a.logits.alibi_slopes[head] * LOG2_E / score_to_log2


@cute.jit
def add_bias(s: cute.Tensor, rows: ScoreRows, cols: ScoreCols):
    """ALiBi: slope times (key - token)."""
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        apart = Float32(cols.first - rows.tokens[r])
        for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
            s[r, c] = fma(rows.slopes[r], apart + Float32(cols.at[c]), s[r, c])


@cute.jit
def fetch_mask(spec: cutlass.Constexpr, a, rows: ScoreRows, mask_start: Int32, first: Int32, lanes: cutlass.Constexpr):
    """This lane's words of the custom mask, of 32 keys of the block that begins at key `first`, of each row. Called
    while the scores are computed, which hides the latency. mask_start: byte where the request's mask begins."""
    if const_expr(spec.mask.custom):
        count = const_expr(cute.size(rows.words) // cute.size(rows.tokens))  # of a row
        for i in cutlass.range_constexpr(cute.size(rows.words)):
            key = first + (cute.arch.lane_idx() % lanes + i % count * lanes) * 32
            bit = Int64(rows.tokens[const_expr(i // count)]) * rows.seqlen.kv_len + key
            rows.words[i] = mask.custom_word(a.mask.custom_mask, mask_start, bit)


@cute.jit
def transform(
    spec: cutlass.Constexpr,
    a,
    s: cute.Tensor,
    score_to_log2: cute.Tensor,
    rows: ScoreRows,
    cols: ScoreCols,
    capped,
    masked,
):
    """s (rows, cols): bias, soft cap where `capped`, masks where `masked`. score_to_log2 (rows): of scores before the
    cap."""
    if const_expr(spec.logits.alibi):
        add_bias(s, rows, cols)
    if const_expr(spec.logits.soft_cap):
        if capped:
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                cap(s[r, None], score_to_log2[r], a.logits.soft_cap)
    if masked:
        # causal, window and kv_len
        mask.apply(spec, s, rows.tokens, cols.at, cols.first, rows.seqlen)
        if const_expr(spec.mask.custom):
            if const_expr(cols.lanes == 1):  # one row, a lane's own
                mask.apply_words(s, rows.words)
            else:
                for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                    mask.apply_custom(s, r, rows.words[r], cols.at, cols.own, cols.lanes)
        if const_expr(spec.mask.tree):
            if rows.seqlen.tree != 0:
                bits = cute.domain_offset((rows.start, 0), a.mask.tree_mask)
                draft = cols.first - (rows.seqlen.kv_len - rows.seqlen.q_len)
                mask.apply_tree(s, bits, rows.tokens, cols.at, draft, rows.seqlen.q_len)
