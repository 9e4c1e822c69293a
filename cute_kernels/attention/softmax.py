"""Online softmax on a register view (rows, cols) of scores. The columns of a row are spread over several lanes.

row_max is the running maximum of raw scores; row_sum is this lane's share of the running sum of
exp2((s - row_max) * softmax_scale_log2). As in FlashAttention-4, O is rescaled only when a row's maximum has grown by
more than a threshold.

Prefill on sm90: `update_max`, `exp_and_sum`, `rescale`. Decode: `update_max_and_rescale`, `exp_and_sum`. At the end of
a tile: `normalizer`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device.warp import fma, reduce_across_quads, select
from . import skip_rule
from .logits import LOG2_E

CHAINS = 4  # independent chains of a reduction in registers


RESCALE_THRESHOLD = 8.0  # by how much, in log2 units, a row's maximum may grow before row_max follows
LARGEST = float.fromhex("0x1.fffffep127")  # fp32
NO_KEY_MAX = -1e30  # row_max_scaled of a row without keys: exp2(-inf - NO_KEY_MAX) = 0, and any key gives infinity


class RescaleParams(NamedTuple):
    """The range of the exponentials, in log2 units. rescale_threshold: by how much a row's maximum may grow before
    row_max follows. max_offset: a key as large as row_max gives 2^max_offset."""

    rescale_threshold: Float32
    max_offset: Float32


@dataclass(frozen=True)
class SoftmaxState:
    """Per row, in registers."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    row_max_scaled: cute.Tensor  # row_max * softmax_scale_log2 - max_offset, or NO_KEY_MAX
    acc_scale: cute.Tensor  # factor from the last `update_max` by which O must be rescaled


class RowNormalizer(NamedTuple):
    """inv_row_sum: 1 / (sum of exponentials), 0 for a row without keys. lse: log2 of that sum, including the sink."""

    inv_row_sum: Float32
    lse: Float32


def make(rows):
    """Allocate the state of `rows` rows."""
    return SoftmaxState(*(cute.make_rmem_tensor(rows, Float32) for _ in range(4)))


def reset(st: SoftmaxState, row_max_scaled: float):
    """Reset the state to rows without keys. row_max_scaled: must be NO_KEY_MAX for `update_max`."""
    st.row_max.fill(-Float32.inf)
    st.row_sum.fill(0.0)
    st.row_max_scaled.fill(row_max_scaled)


def exp2_scaled(score, softmax_scale_log2, row_max_scaled):
    """Return 2^(score * softmax_scale_log2 - row_max_scaled)."""
    return cute.math.exp2(fma(score, softmax_scale_log2, -row_max_scaled), fastmath=True)


@cute.jit
def device_scale(constant: Float32, tensor: cute.Tensor):
    """Return `constant`, multiplied by the one-element device tensor if it is not empty."""
    if tensor.shape[0] > 0:
        constant *= tensor[0]
    return constant


@cute.jit
def head_scale(tensor: cute.Tensor, head: Int32):
    """Return the scale of `head`; the tensor holds one per head, one for all, or none (1.0)."""
    factor = Float32(1.0)
    if tensor.shape[0] > 0:
        factor = tensor[cutlass.min(head, tensor.shape[0] - 1)]
    return factor


def reduce(row, op):
    """Reduce a register row in CHAINS independent chains, so that latencies do not add up."""
    return join_chains(reduce_chains(row, op), op)


def reduce_chains(row, op, before=None):
    """Return the chains of a row. before: the chains of its columns so far; the row's size must then be a multiple of
    CHAINS."""
    n, chains = cute.size(row), list(before or [row[i] for i in range(min(CHAINS, cute.size(row)))])
    for i in range(0 if before else len(chains), n):
        chains[i % len(chains)] = op(chains[i % len(chains)], row[i])
    return chains


def join_chains(chains, op):
    """Reduce the chains to one value."""
    while len(chains) > 1:
        chains = [op(chains[i], chains[i + 1]) for i in range(0, len(chains), 2)]
    return chains[0]


def add(x, y):
    return x + y


def lane_row_max(st: SoftmaxState, s: cute.Tensor, offsets: Any = None):
    """Return, per row, the maximum of row_max and this lane's scores, to which `offsets` are added."""
    found = [reduce(s[r, None], cute.arch.fmax) for r in range(cute.size(st.row_max))]
    if offsets is not None:
        found = [top + offsets[r] for r, top in enumerate(found)]
    return [cute.arch.fmax(st.row_max[r], top) for r, top in enumerate(found)]


@cute.jit
def update_max(
    st: SoftmaxState,
    s: cute.Tensor,
    softmax_scale_log2: Any,
    lanes: cutlass.Constexpr,
    rescale_params: RescaleParams,
    exact_max: cutlass.Constexpr,
    offsets: Any = None,
    limits: Any = None,
):
    """Update row_max with a block of scores, rescale row_sum, and set acc_scale, by which `rescale` multiplies O.

    softmax_scale_log2: per row. lanes: number of neighbouring lanes that share a row. offsets: per row, numbers to add
    to the lane's scores; None adds nothing. row_max follows the row's maximum only when that has grown by more than
    rescale_threshold, or than the row's own one of `limits`, or, with `exact_max`, whenever it has grown. Until then P
    exceeds 2^max_offset by less than that factor, which costs no accuracy in floating point, and O needs no rescaling.
    Each row decides for itself, so that its result does not depend on its neighbours.
    """
    top = lane_row_max(st, s, offsets)
    for r in cutlass.range_constexpr(cute.size(st.row_max)):
        m = cute.arch.warp_reduction_max(top[r], threads_in_group=lanes)
        old, shift = st.row_max[r], st.row_max_scaled[r]
        scale = softmax_scale_log2[r]
        # false if neither is finite
        limit = rescale_params.rescale_threshold if const_expr(limits is None) else limits[r]
        grown = m > old if const_expr(exact_max) else (m - old) * scale > limit
        st.row_max_scaled[r] = fma(m, scale, -rescale_params.max_offset) if grown else shift
        st.acc_scale[r] = cute.math.exp2(shift - st.row_max_scaled[r], fastmath=True) if grown else Float32(1.0)
        st.row_sum[r] = st.row_sum[r] * st.acc_scale[r]
        st.row_max[r] = m if grown else old


@cute.jit
def update_max_and_rescale(
    st: SoftmaxState,
    s: cute.Tensor,
    o: cute.Tensor,
    softmax_scale_log2: cute.Tensor,
    elementwise: cutlass.Constexpr,
):
    """Do `update_max` and `rescale` in one, on scores S^T: a row's columns are spread over the 8 quads of the warp.

    No data is exchanged until some lane finds that the maximum of a row has grown by more than RESCALE_THRESHOLD.
    softmax_scale_log2: per row. elementwise: multiply O one register at a time, see `decode.fragments.fill`.
    """
    # has the maximum of some row of the warp grown?
    top = lane_row_max(st, s)
    grown = (top[0] - st.row_max[0]) * softmax_scale_log2[0] > RESCALE_THRESHOLD
    for r in cutlass.range_constexpr(1, cute.size(st.row_max)):
        grown = grown or (top[r] - st.row_max[r]) * softmax_scale_log2[r] > RESCALE_THRESHOLD
    # then update row_max, and rescale row_sum and O
    if cute.arch.vote_any_sync(grown):
        for r in cutlass.range_constexpr(cute.size(st.row_max)):
            m, old = reduce_across_quads(top[r], cute.arch.fmax), st.row_max[r]
            m = m if (m - old) * softmax_scale_log2[r] > RESCALE_THRESHOLD else old
            st.row_max_scaled[r] = Float32(0.0) if m == -Float32.inf else m * softmax_scale_log2[r]
            acc_scale = Float32(1.0) if m == old else exp2_scaled(old, softmax_scale_log2[r], st.row_max_scaled[r])
            st.row_sum[r] = st.row_sum[r] * acc_scale
            st.row_max[r] = m
            if const_expr(elementwise):
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    o[r, c] = o[r, c] * acc_scale
            else:
                o[r, None].store(o[r, None].load() * acc_scale)


@cute.jit
def exp_and_sum(
    st: SoftmaxState, s: cute.Tensor, softmax_scale_log2: Float32, row_max_scaled: Float32, r: cutlass.Constexpr
):
    """Replace row r of s by exp2(s * softmax_scale_log2 - row_max_scaled) and add it to row_sum."""
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        s[r, c] = exp2_scaled(s[r, c], softmax_scale_log2, row_max_scaled)
    st.row_sum[r] += reduce(s[r, None], add)


@cute.jit
def rescale(st: SoftmaxState, o: cute.Tensor):
    """Multiply O by acc_scale, in warps in which some row's acc_scale is not 1."""
    needed = st.acc_scale[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(st.row_max)):
        needed = needed or st.acc_scale[r] != 1.0
    if cute.arch.vote_any_sync(needed):
        for r in cutlass.range_constexpr(cute.size(st.row_max)):
            o[r, None].store(o[r, None].load() * st.acc_scale[r])


@cute.jit
def row_can_skip(
    st: SoftmaxState,
    s: cute.Tensor,
    softmax_scale_log2: cute.Tensor,
    r: cutlass.Constexpr,
    log2_threshold: Float32,
):
    """Skip-softmax: return whether all scores of row r of S^T are below its running maximum by 2^log2_threshold. The
    vote among rows is the role's."""
    top = reduce_across_quads(reduce(s[r, None], cute.arch.fmax), cute.arch.fmax)
    return skip_rule.is_negligible(top, st.row_max[r], softmax_scale_log2[r], log2_threshold)


@cute.jit
def normalizer(top: Float32, total: Float32, sink: Float32):
    """Return the `RowNormalizer` of a row: the sum over its keys is total * 2^top. sink: natural units, -inf for none.

    A row with neither keys nor a sink gives (0, -inf), and one with a sink of +inf (0, inf). A row of which all scores
    are NaN has no maximum, but its sum is NaN: it gives (NaN, NaN). Both terms are taken relative to the larger one, so
    that a sink of any size is safe.
    """
    in_log2 = Float32(sink * LOG2_E)
    other = select(in_log2 > LARGEST, LARGEST, in_log2)
    peak = cute.arch.fmax(top, other)
    inverse, lse = Float32(0.0), -Float32.inf
    if peak != -Float32.inf or total != 0.0:
        keys = cute.math.exp2(top - peak, fastmath=True)
        total = fma(total, keys, cute.math.exp2(other - peak, fastmath=True))
        inverse = keys * cute.arch.rcp_approx(total)
        lse = cute.arch.fmax(peak, in_log2) + cute.math.log2(total, fastmath=True)
    return RowNormalizer(inverse, lse)


@cute.jit
def row_normalizer(
    st: SoftmaxState,
    r: cutlass.Constexpr,
    sink: Float32,
    lanes: cutlass.Constexpr,
):
    """Return the `normalizer` of row r. lanes: number of neighbouring lanes that share a row."""
    return normalizer(*row_sum_of(st, r, lanes), sink)


@cute.jit
def row_sum_of(st: SoftmaxState, r: cutlass.Constexpr, lanes: cutlass.Constexpr):
    """Return (top, total) of row r: the sum over its keys is total * 2^top. lanes: as in `row_normalizer`."""
    top = -Float32.inf if st.row_max[r] == -Float32.inf else st.row_max_scaled[r]
    return top, cute.arch.warp_reduction_sum(st.row_sum[r], threads_in_group=lanes)
