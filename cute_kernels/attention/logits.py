"""What happens to a block of scores between Q K^T and the softmax: soft cap, then masks.

Both roles call `transform`; whether blocks are masked or capped is known at trace time in prefill, which has a loop for
each, and a value in decode.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import mask

LOG2_E = 1.4426950408889634


class Rows(NamedTuple):
    """The rows of a thread's view of scores (rows, cols). start: first query token of the request in the batch."""

    tokens: cute.Tensor
    start: Int32
    n: mask.Lengths


class Cols(NamedTuple):
    """The columns: keys first + at[c], at: static numbers."""

    first: Int32
    at: Any


@cute.jit
def cap(s: cute.Tensor, score_to_log2: Float32, soft_cap: Float32):
    """Soft cap in place: s becomes tanh(s * scale / cap), to be scaled by `capped_to_log2`. 1 - 2 / (1 + e^2y) keeps
    fp32 accuracy (tanh.approx has 2^-11, times cap)."""
    # exp(2 y) = exp2(s * 2 scale_log2 / cap). A division would be a call, made ahead of time where there is no cap too.
    y2 = score_to_log2 * 2.0 * cute.arch.rcp_approx(soft_cap)
    for i in cutlass.range_constexpr(cute.size(s)):
        e = cute.math.exp2(s[i] * y2, fastmath=True)
        s[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + e)


def capped_to_log2(soft_cap):
    """What turns a score after `cap` into log2 units."""
    return soft_cap * LOG2_E


@cute.jit
def hide(spec: cutlass.Constexpr, a, s: cute.Tensor, rows: Rows, cols: Cols):
    """-inf into s (rows, cols) where a row does not see a key."""
    mask.apply(spec, s, rows.tokens, cols.at, cols.first, rows.n)
    if const_expr(spec.mask.bits):
        if rows.n.drafts != 0:
            bits = cute.domain_offset((rows.start, 0), a.mask.draft_mask)
            draft = cols.first - (rows.n.kv_len - rows.n.q_len)
            mask.apply_bits(s, bits, rows.tokens, cols.at, draft, rows.n.q_len)


@cute.jit
def transform(
    spec: cutlass.Constexpr, a, s: cute.Tensor, score_to_log2: cute.Tensor, rows: Rows, cols: Cols, capped, masked
):
    """s (rows, cols): soft cap where `capped`, masks where `masked`. score_to_log2 (rows): of scores before the cap."""
    if const_expr(spec.logits.soft_cap):
        if capped:
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                cap(s[r, None], score_to_log2[r], a.logits.soft_cap)
    if masked:
        hide(spec, a, s, rows, cols)
