"""Online softmax on a (rows, cols) register view. A row's columns are spread over lanes: how many, and which, is the
caller's (`lanes`, `across`).

m is the running maximum of raw scores, l this lane's share of the running sum of exp2((s - m) * softmax_scale_log2).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device.warp import fma, reduce_across_quads
from .logits import LOG2_E

CHAINS = 4


RESCALE_THRESHOLD = 8.0  # by how much, in log2 units, a row's maximum may have grown before the running one follows
NO_KEY_MAX = -1e30  # shift of a row without keys: exp2(-inf - NO_KEY) = 0, and any key gives infinity


class RescaleParams(NamedTuple):
    """Where exponentials lie, in log2 units. lazy: by how much a row's maximum may have grown before the running one
    follows. raised: a key as large as the running maximum gives 2^raised."""

    rescale_threshold: Float32
    max_offset: Float32


@dataclass(frozen=True)
class SoftmaxState:
    row_max: cute.Tensor
    row_sum: cute.Tensor  # noqa: E741
    row_max_scaled: cute.Tensor  # m * softmax_scale_log2 less what P is raised by, or NO_KEY
    acc_scale: cute.Tensor  # factor that the last `update_max` owes to O


class RowNormalizer(NamedTuple):
    """factor: 1 / (sum of exponentials), 0 for a row without keys. lse: log2 of that sum, sink included."""

    inv_row_sum: Float32
    lse: Float32


def make(rows):
    return SoftmaxState(*(cute.make_rmem_tensor(rows, Float32) for _ in range(4)))


def reset(st: SoftmaxState, row_max_scaled: float):
    """No key so far. shift: of such a row, NO_KEY for `update_max`."""
    st.row_max.fill(-Float32.inf)
    st.row_sum.fill(0.0)
    st.row_max_scaled.fill(row_max_scaled)


def exp2_scaled(score, softmax_scale_log2, row_max_scaled):
    """2^(score * softmax_scale_log2 - shift)."""
    return cute.math.exp2(fma(score, softmax_scale_log2, -row_max_scaled), fastmath=True)


@cute.jit
def device_scale(constant: Float32, tensor: cute.Tensor):
    """constant times the one-element device tensor, if there is one."""
    if tensor.shape[0] > 0:
        constant *= tensor[0]
    return constant


@cute.jit
def head_scale(tensor: cute.Tensor, head: Int32):
    """What a device tensor of a factor a head, of one for all or of none says of a head."""
    factor = Float32(1.0)
    if tensor.shape[0] > 0:
        factor = tensor[cutlass.min(head, tensor.shape[0] - 1)]
    return factor


def reduce(row, op):
    """Reduction of a register row in CHAINS independent chains, so that latency does not add up."""
    return join_chains(reduce_chains(row, op), op)


def reduce_chains(row, op, before=None):
    """The chains of a row, or, behind those `before`, of more of its columns, a multiple of CHAINS."""
    n, part = cute.size(row), list(before or [row[i] for i in range(min(CHAINS, cute.size(row)))])
    for i in range(0 if before else len(part), n):
        part[i % len(part)] = op(part[i % len(part)], row[i])
    return part


def join_chains(part, op):
    """One value of all chains."""
    while len(part) > 1:
        part = [op(part[i], part[i + 1]) for i in range(0, len(part), 2)]
    return part[0]


def add(x, y):
    return x + y


def lane_row_max(st: SoftmaxState, s: cute.Tensor):
    """This lane's part of the maximum of each row, with the one so far."""
    return [cute.arch.fmax(st.row_max[r], reduce(s[r, None], cute.arch.fmax)) for r in range(cute.size(st.row_max))]


@cute.jit
def update_max(
    st: SoftmaxState,
    s: cute.Tensor,
    softmax_scale_log2: Any,
    lanes: cutlass.Constexpr,
    rescale_params: RescaleParams,
    exact_max: cutlass.Constexpr,
):
    """Bring m up to date with a block of scores; l is scaled to it, O is owed st.acc_scale. softmax_scale_log2: of each
    row. lanes: neighbours that have columns of a row.

    m follows the row's maximum only when that has grown by span.rescale_threshold, or, told to `exact_max`, whenever
    that has grown: until then P exceeds 2^span.max_offset by less than that factor, which costs no accuracy in floating
    point, and O needs no rescaling. A row decides for itself, so its result does not depend on its neighbours.
    """
    top = lane_row_max(st, s)
    for r in cutlass.range_constexpr(cute.size(st.row_max)):
        m = cute.arch.warp_reduction_max(top[r], threads_in_group=lanes)
        old, shift = st.row_max[r], st.row_max_scaled[r]
        scale = softmax_scale_log2[r]
        grown = (
            m > old if const_expr(exact_max) else (m - old) * scale > rescale_params.rescale_threshold
        )  # false where neither is finite
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

    As long as no lane finds that a row has grown, nothing is exchanged. softmax_scale_log2: per row. elementwise:
    multiply O one register at a time, see `decode.operands.fill`.
    """
    top = lane_row_max(st, s)
    grown = (top[0] - st.row_max[0]) * softmax_scale_log2[0] > RESCALE_THRESHOLD
    for r in cutlass.range_constexpr(1, cute.size(st.row_max)):
        grown = grown or (top[r] - st.row_max[r]) * softmax_scale_log2[r] > RESCALE_THRESHOLD
    if cute.arch.vote_any_sync(grown):
        for r in cutlass.range_constexpr(cute.size(st.row_max)):
            m, old = reduce_across_quads(top[r], cute.arch.fmax), st.row_max[r]
            m = m if (m - old) * softmax_scale_log2[r] > RESCALE_THRESHOLD else old
            st.row_max_scaled[r] = Float32(0.0) if m == -Float32.inf else m * softmax_scale_log2[r]
            owed = Float32(1.0) if m == old else exp2_scaled(old, softmax_scale_log2[r], st.row_max_scaled[r])
            st.row_sum[r] = st.row_sum[r] * owed
            st.row_max[r] = m
            if const_expr(elementwise):
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    o[r, c] = o[r, c] * owed
            else:
                o[r, None].store(o[r, None].load() * owed)


@cute.jit
def exp_and_sum(st: SoftmaxState, s: cute.Tensor, softmax_scale_log2: Float32, r: cutlass.Constexpr):
    """Row r of s <- exp2((s - m) * softmax_scale_log2), summed into l."""
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        s[r, c] = exp2_scaled(s[r, c], softmax_scale_log2, st.row_max_scaled[r])
    st.row_sum[r] += reduce(s[r, None], add)


@cute.jit
def rescale(st: SoftmaxState, o: cute.Tensor):
    """Pay st.acc_scale to O, in warps where a row owes it."""
    owed = st.acc_scale[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(st.row_max)):
        owed = owed or st.acc_scale[r] != 1.0
    if cute.arch.vote_any_sync(owed):
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
    return top == -Float32.inf or (top - st.row_max[r]) * softmax_scale_log2[r] < log2_threshold


@cute.jit
def normalizer(top: Float32, total: Float32, sink: Float32):
    """`RowNormalizer` of a row whose sum over keys is total * 2^top, with its sink (natural units, -inf for none).

    A row that has neither gives (0, -inf). Both terms are taken relative to the larger, so a sink of any size is safe.
    """
    other = sink * LOG2_E
    peak = cute.arch.fmax(top, other)
    inverse, lse = Float32(0.0), -Float32.inf
    if peak != -Float32.inf:
        keys = cute.math.exp2(top - peak, fastmath=True)
        total = fma(total, keys, cute.math.exp2(other - peak, fastmath=True))
        inverse = keys * cute.arch.rcp_approx(total)
        lse = peak + cute.math.log2(total, fastmath=True)
    return RowNormalizer(inverse, lse)


@cute.jit
def row_normalizer(
    st: SoftmaxState,
    r: cutlass.Constexpr,
    sink: Float32,
    lanes: cutlass.Constexpr,
):
    """`normalizer` of row r over its keys."""
    top = -Float32.inf if st.row_max[r] == -Float32.inf else st.row_max_scaled[r]
    return normalizer(top, cute.arch.warp_reduction_sum(st.row_sum[r], threads_in_group=lanes), sink)
