"""Online softmax on a (rows, cols) register view. A row's columns are spread over `LANES` neighbouring lanes.

m is the running maximum of raw scores, l this lane's share of the running sum of exp2((s - m) * scale_log2).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..device import warp

LANES = 4  # of a Hopper accumulator row
LOG2_E = 1.4426950408889634
LAZY = 8.0  # log2 units
CHAINS = 4


@dataclass(frozen=True)
class State:
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741
    shift: cute.Tensor  # m * scale_log2, 0 where m is -inf
    rescale: cute.Tensor  # factor that the last `maxima` owes to O


def make(rows):
    return State(*(cute.make_rmem_tensor(rows, Float32) for _ in range(4)))


def reset(st: State):
    st.m.fill(-Float32.inf)
    st.l.fill(0.0)


@cute.jit
def factor(constant: Float32, tensor: cute.Tensor):
    """constant times the one-element device tensor, if there is one."""
    if tensor.shape[0] > 0:
        constant *= tensor[0]
    return constant


@cute.jit
def cap_scores(s: cute.Tensor, scale_log2: Float32, cap: Float32):
    """Soft cap in place: s becomes tanh(s * scale / cap), to be scaled by `capped_scale`. 1 - 2 / (1 + e^2y) keeps fp32
    accuracy (tanh.approx has 2^-11, times cap)."""
    # exp(2 y) = exp2(s * 2 scale_log2 / cap). A division would be a call, made ahead of time where there is no cap too.
    y2 = scale_log2 * 2.0 * cute.arch.rcp_approx(cap)
    for i in cutlass.range_constexpr(cute.size(s)):
        e = cute.math.exp2(s[i] * y2, fastmath=True)
        s[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + e)


def capped_scale(cap):
    """What turns a score after `cap_scores` into log2 units."""
    return cap * LOG2_E


def reduce(row, op):
    """Reduction of a register row in CHAINS independent chains, so that latency does not add up."""
    n, chains = cute.size(row), min(CHAINS, cute.size(row))
    part = [row[i] for i in range(chains)]
    for i in range(chains, n):
        part[i % chains] = op(part[i % chains], row[i])
    while len(part) > 1:
        part = [op(part[i], part[i + 1]) for i in range(0, len(part), 2)]
    return part[0]


@cute.jit
def maxima(st: State, s: cute.Tensor, scale_log2: Float32):
    """Bring m up to date with a block of scores; l is scaled to it, O is owed st.rescale.

    m follows the row's maximum only when that has grown by a factor of 2^LAZY: until then P exceeds 1 by less than that
    factor, which costs no accuracy in floating point, and O needs no rescaling. A row decides for itself, so its result
    does not depend on its neighbours.
    """
    top = [cute.arch.fmax(st.m[r], reduce(s[r, None], cute.arch.fmax)) for r in range(cute.size(st.m))]
    for r in cutlass.range_constexpr(cute.size(st.m)):
        m = cute.arch.warp_reduction_max(top[r], threads_in_group=LANES)
        old = st.m[r]
        grown = (m - old) * scale_log2 > LAZY  # false where neither is finite
        m = m if grown else old
        st.shift[r] = Float32(0.0) if m == -Float32.inf else m * scale_log2  # no key so far: exp2(-inf) = 0
        st.rescale[r] = cute.math.exp2(old * scale_log2 - st.shift[r], fastmath=True) if grown else Float32(1.0)
        st.l[r] = st.l[r] * st.rescale[r]
        st.m[r] = m


@cute.jit
def exponentials(st: State, s: cute.Tensor, scale_log2: Float32, r: cutlass.Constexpr):
    """Row r of s <- exp2((s - m) * scale_log2), summed into l."""
    p = cute.math.exp2(s[r, None].load() * scale_log2 - st.shift[r], fastmath=True)
    s[r, None].store(p)
    st.l[r] += reduce(s[r, None], lambda x, y: x + y)


@cute.jit
def rescale(st: State, o: cute.Tensor):
    """Pay st.rescale to O, in warps where a row owes it."""
    owed = st.rescale[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(st.m)):
        owed = owed or st.rescale[r] != 1.0
    if cute.arch.vote_any_sync(owed):
        for r in cutlass.range_constexpr(cute.size(st.m)):
            o[r, None].store(o[r, None].load() * st.rescale[r])


@cute.jit
def keep_up(st: State, s: cute.Tensor, o: cute.Tensor, scale_log2: cute.Tensor):
    """`maxima` and `rescale` in one, where rows have scales of their own and lie across the quads of a warp: as long as
    no lane finds a row grown, nothing is exchanged."""
    top = [cute.arch.fmax(st.m[r], reduce(s[r, None], cute.arch.fmax)) for r in range(cute.size(st.m))]
    grown = (top[0] - st.m[0]) * scale_log2[0] > LAZY
    for r in cutlass.range_constexpr(1, cute.size(st.m)):
        grown = grown or (top[r] - st.m[r]) * scale_log2[r] > LAZY
    if cute.arch.vote_any_sync(grown):
        for r in cutlass.range_constexpr(cute.size(st.m)):
            m, old = warp.across_quads(top[r], cute.arch.fmax), st.m[r]
            m = m if (m - old) * scale_log2[r] > LAZY else old
            st.shift[r] = Float32(0.0) if m == -Float32.inf else m * scale_log2[r]
            owed = Float32(1.0) if m == old else cute.math.exp2(old * scale_log2[r] - st.shift[r], fastmath=True)
            st.l[r] = st.l[r] * owed
            st.m[r] = m
            o[r, None].store(o[r, None].load() * owed)


@cute.jit
def close(top: Float32, total: Float32, sink: Float32):
    """(factor that normalises, log2 of the sum of exp) of a row whose sum over keys is total * 2^top, with its sink
    (natural units, -inf for none).

    A row that has neither gives (0, -inf). Both terms are taken relative to the larger, so a sink of any size is safe.
    """
    other = sink * LOG2_E
    peak = cute.arch.fmax(top, other)
    inverse, lse = Float32(0.0), -Float32.inf
    if peak != -Float32.inf:
        keys = cute.math.exp2(top - peak, fastmath=True)
        total = total * keys + cute.math.exp2(other - peak, fastmath=True)
        inverse = keys * cute.arch.rcp_approx(total)
        lse = peak + cute.math.log2(total, fastmath=True)
    return inverse, lse


@cute.jit
def finish(st: State, r: cutlass.Constexpr, scale_log2: Float32, sink: Float32):
    """`close` of row r over its keys."""
    return close(st.m[r] * scale_log2, cute.arch.warp_reduction_sum(st.l[r], threads_in_group=LANES), sink)
