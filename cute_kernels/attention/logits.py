"""The steps between Q K^T and the softmax on a block of scores: ALiBi bias, soft cap, masks.

Every mainloop calls `transform`, and `transform` calls `mask.apply`, which applies the causal mask. Whether a block is
masked or capped is static in prefill, which has a loop for each case, and a value in decode.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device.warp import fma
from . import custom_mask, mask
from .mask import ScoreCols, ScoreRows

LOG2_E = 1.4426950408889634


@cute.jit
def cap(s: cute.Tensor, score_to_log2: Float32, soft_cap: Float32):
    """Apply the soft cap in place: s becomes tanh(s * scale / cap), to be scaled by `capped_to_log2`.
    1 - 2 / (1 + e^2y) keeps fp32 accuracy (tanh.approx has 2^-11, times cap)."""
    # exp(2 y) = exp2(s * 2 scale_log2 / cap). A division would be a call, which is hoisted even if there is no cap.
    y2 = score_to_log2 * 2.0 * cute.arch.rcp_approx(soft_cap)
    for i in cutlass.range_constexpr(cute.size(s)):
        e = cute.math.exp2(s[i] * y2, fastmath=True)
        s[i] = fma(Float32(-2.0), cute.arch.rcp_approx(1.0 + e), Float32(1.0))


def capped_to_log2(soft_cap):
    """Return the factor that turns a score after `cap` into log2 units."""
    return soft_cap * LOG2_E


def slope_of(a, head, score_to_log2):
    """Return ALiBi's slope of a query head, in units of raw scores."""
    return a.logits.alibi_slopes[head] * LOG2_E / score_to_log2


@cute.jit
def add_bias(s: cute.Tensor, rows: ScoreRows, cols: ScoreCols):
    """Add ALiBi's bias, slope * (key - token). If the rows have offsets, add only what differs between columns, in one
    instruction per score instead of two, and leave the bias of column `first` in the offsets."""
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        apart = Float32(cols.first - rows.tokens[r])
        if const_expr(rows.offsets is not None):
            rows.offsets[r] = rows.slopes[r] * apart
        for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
            distance = Float32(cols.at[c]) if const_expr(rows.offsets is not None) else apart + Float32(cols.at[c])
            s[r, c] = fma(rows.slopes[r], distance, s[r, c])


@cute.jit
def fetch_mask(spec: cutlass.Constexpr, rows: ScoreRows, source: Any, first: Int32, lanes: cutlass.Constexpr):
    """Load this lane's words of the custom mask, 32 keys each, per row, for the block that begins at key `first`.
    Called while the scores are computed, which hides the latency. source: what the words follow from, see
    `custom_mask`."""
    if const_expr(spec.mask.custom):
        count = const_expr(cute.size(rows.words) // cute.size(rows.tokens))  # words per row
        for i in cutlass.range_constexpr(cute.size(rows.words)):
            key = first + (cute.arch.lane_idx() % lanes + i % count * lanes) * 32
            token = rows.tokens[const_expr(i // count)]
            rows.words[i] = custom_mask.of(spec).visible_word(spec, source, token, key, rows.seqlen)


@cute.jit
def transform(spec: cutlass.Constexpr, a, s: cute.Tensor, rows: ScoreRows, cols: ScoreCols, capped, masked):
    """Transform scores s (rows, cols) in place: ALiBi bias, the soft cap if `capped`, the masks if `masked`, but always
    that of keys with slots."""
    if const_expr(spec.logits.alibi):
        add_bias(s, rows, cols)
    if const_expr(spec.logits.soft_cap):
        if capped:
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                cap(s[r, None], rows.to_log2[r], a.logits.soft_cap)
    if const_expr(spec.kv.source == "slots"):
        if const_expr(spec.kv.union):
            custom_mask.apply_chosen(s, rows.words, cols)
        else:
            custom_mask.apply_present(s, rows.words, cols)
    elif masked:
        if const_expr(not spec.mask.custom):
            # causal, window and kv_len
            mask.apply(spec, s, rows, cols)
        elif const_expr(cols.lanes == 1):  # words have all masks; the thread has one whole row
            custom_mask.apply_words(s, rows.words)
        else:
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                custom_mask.apply(s, r, rows, cols)
        if const_expr(spec.mask.tree):
            if rows.seqlen.tree != 0:
                mask.apply_tree(s, cute.domain_offset((rows.start, 0), a.mask.tree_mask), rows, cols)
