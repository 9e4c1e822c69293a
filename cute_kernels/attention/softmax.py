"""Online softmax on a (rows, cols) register view. A row's columns are spread over lanes: how many, and which, is the
caller's (`lanes`, `across`).

m is the running maximum of raw scores, l this lane's share of the running sum of exp2((s - m) * scale_log2).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device.warp import fma
from .logits import LOG2_E

CHAINS = 4


LAZY = 8.0  # by how much, in log2 units, a row's maximum may have grown before the running one follows
NO_KEY = -1e30  # shift of a row without keys: exp2(-inf - NO_KEY) = 0, and any key gives infinity


class RescaleParams(NamedTuple):
    """Where exponentials lie, in log2 units. lazy: by how much a row's maximum may have grown before the running one
    follows. raised: a key as large as the running maximum gives 2^raised."""

    lazy: Float32
    raised: Float32


@dataclass(frozen=True)
class SoftmaxState:
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741
    shift: cute.Tensor  # m * scale_log2 less what P is raised by, or NO_KEY
    rescale: cute.Tensor  # factor that the last `update_max` owes to O


class RowNormalizer(NamedTuple):
    """factor: 1 / (sum of exponentials), 0 for a row without keys. lse: log2 of that sum, sink included."""

    factor: Float32
    lse: Float32


def make(rows):
    return SoftmaxState(*(cute.make_rmem_tensor(rows, Float32) for _ in range(4)))


def reset(st: SoftmaxState, shift: float):
    """No key so far. shift: of such a row, NO_KEY for `update_max`."""
    st.m.fill(-Float32.inf)
    st.l.fill(0.0)
    st.shift.fill(shift)


def power(score, scale_log2, shift):
    """2^(score * scale_log2 - shift)."""
    return cute.math.exp2(fma(score, scale_log2, -shift), fastmath=True)


@cute.jit
def device_factor(constant: Float32, tensor: cute.Tensor):
    """constant times the one-element device tensor, if there is one."""
    if tensor.shape[0] > 0:
        constant *= tensor[0]
    return constant


@cute.jit
def factor_of(tensor: cute.Tensor, head: Int32):
    """What a device tensor of a factor a head, of one for all or of none says of a head."""
    factor = Float32(1.0)
    if tensor.shape[0] > 0:
        factor = tensor[cutlass.min(head, tensor.shape[0] - 1)]
    return factor


def reduce(row, op):
    """Reduction of a register row in CHAINS independent chains, so that latency does not add up."""
    return joined(chained(row, op), op)


def chained(row, op, before=None):
    """The chains of a row, or, behind those `before`, of more of its columns, a multiple of CHAINS."""
    n, part = cute.size(row), list(before or [row[i] for i in range(min(CHAINS, cute.size(row)))])
    for i in range(0 if before else len(part), n):
        part[i % len(part)] = op(part[i % len(part)], row[i])
    return part


def joined(part, op):
    """One value of all chains."""
    while len(part) > 1:
        part = [op(part[i], part[i + 1]) for i in range(0, len(part), 2)]
    return part[0]


def add(x, y):
    return x + y


def row_max(st: SoftmaxState, s: cute.Tensor):
    """This lane's part of the maximum of each row, with the one so far."""
    return [cute.arch.fmax(st.m[r], reduce(s[r, None], cute.arch.fmax)) for r in range(cute.size(st.m))]


@cute.jit
def update_max(
    st: SoftmaxState,
    s: cute.Tensor,
    scale_log2: Any,
    lanes: cutlass.Constexpr,
    span: RescaleParams,
    follow: cutlass.Constexpr,
):
    """Bring m up to date with a block of scores; l is scaled to it, O is owed st.rescale. scale_log2: of each row.
    lanes: neighbours that have columns of a row.

    m follows the row's maximum only when that has grown by span.lazy, or, told to `follow`, whenever that has grown:
    until then P exceeds 2^span.raised by less than that factor, which costs no accuracy in floating point, and O needs
    no rescaling. A row decides for itself, so its result does not depend on its neighbours.
    """
    top = row_max(st, s)
    for r in cutlass.range_constexpr(cute.size(st.m)):
        m = cute.arch.warp_reduction_max(top[r], threads_in_group=lanes)
        old, shift = st.m[r], st.shift[r]
        scale = scale_log2[r]
        grown = m > old if const_expr(follow) else (m - old) * scale > span.lazy  # false where neither is finite
        st.shift[r] = fma(m, scale, -span.raised) if grown else shift
        st.rescale[r] = cute.math.exp2(shift - st.shift[r], fastmath=True) if grown else Float32(1.0)
        st.l[r] = st.l[r] * st.rescale[r]
        st.m[r] = m if grown else old


@cute.jit
def update_max_and_rescale(
    st: SoftmaxState,
    s: cute.Tensor,
    o: cute.Tensor,
    scale_log2: cute.Tensor,
    across: cutlass.Constexpr,
    multiply: cutlass.Constexpr,
):
    """`update_max` and `rescale` in one, where rows have scales of their own: as long as no lane finds a row grown,
    nothing is exchanged. across(x, op): reduces over the lanes that have columns of a row. multiply(row, x): in
    place."""
    top = row_max(st, s)
    grown = (top[0] - st.m[0]) * scale_log2[0] > LAZY
    for r in cutlass.range_constexpr(1, cute.size(st.m)):
        grown = grown or (top[r] - st.m[r]) * scale_log2[r] > LAZY
    if cute.arch.vote_any_sync(grown):
        for r in cutlass.range_constexpr(cute.size(st.m)):
            m, old = across(top[r], cute.arch.fmax), st.m[r]
            m = m if (m - old) * scale_log2[r] > LAZY else old
            st.shift[r] = Float32(0.0) if m == -Float32.inf else m * scale_log2[r]
            owed = Float32(1.0) if m == old else power(old, scale_log2[r], st.shift[r])
            st.l[r] = st.l[r] * owed
            st.m[r] = m
            multiply(o[r, None], owed)


@cute.jit
def exp_and_sum(st: SoftmaxState, s: cute.Tensor, scale_log2: Float32, r: cutlass.Constexpr):
    """Row r of s <- exp2((s - m) * scale_log2), summed into l."""
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        s[r, c] = power(s[r, c], scale_log2, st.shift[r])
    st.l[r] += reduce(s[r, None], add)


@cute.jit
def rescale(st: SoftmaxState, o: cute.Tensor):
    """Pay st.rescale to O, in warps where a row owes it."""
    owed = st.rescale[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(st.m)):
        owed = owed or st.rescale[r] != 1.0
    if cute.arch.vote_any_sync(owed):
        for r in cutlass.range_constexpr(cute.size(st.m)):
            o[r, None].store(o[r, None].load() * st.rescale[r])


@cute.jit
def skippable(
    st: SoftmaxState,
    s: cute.Tensor,
    scale_log2: cute.Tensor,
    r: cutlass.Constexpr,
    least: Float32,
    across: cutlass.Constexpr,
):
    """Skip-softmax: whether row r finds all these scores below its maximum so far by 2^least. The vote among rows is
    the role's."""
    top = across(reduce(s[r, None], cute.arch.fmax), cute.arch.fmax)
    return top == -Float32.inf or (top - st.m[r]) * scale_log2[r] < least


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
    top = -Float32.inf if st.m[r] == -Float32.inf else st.shift[r]
    return normalizer(top, cute.arch.warp_reduction_sum(st.l[r], threads_in_group=lanes), sink)
