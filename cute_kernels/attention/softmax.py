"""Online softmax on a (rows, cols) register view. A row's columns are spread over `LANES` neighbouring lanes.

m is the running maximum of raw scores, l this lane's share of the running sum of exp2((s - m) * scale_log2).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

LANES = 4  # of a Hopper accumulator row
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class State:
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741
    rescale: cute.Tensor  # factor that the last `step` owes to O


def make(rows):
    return State(*(cute.make_rmem_tensor(rows, Float32) for _ in range(3)))


def reset(st: State):
    st.m.fill(-Float32.inf)
    st.l.fill(0.0)


@cute.jit
def score(spec: cutlass.Constexpr, s: cute.Tensor, scale_log2: Float32, cap: Float32):
    """Soft cap in place: s becomes tanh(s * scale / cap), to be scaled by `score_scale`. 1 - 2 / (1 + e^2y) keeps fp32
    accuracy (tanh.approx has 2^-11, times cap)."""
    if const_expr(spec.soft_cap):
        y2 = scale_log2 * 2.0 / cap  # exp(2 y) = exp2(s * 2 scale_log2 / cap)
        for i in cutlass.range_constexpr(cute.size(s)):
            e = cute.math.exp2(s[i] * y2, fastmath=True)
            s[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + e)


def score_scale(spec, scale_log2, cap):
    """What turns a score after `score` into log2 units."""
    return cap * LOG2_E if spec.soft_cap else scale_log2


@cute.jit
def step(st: State, s: cute.Tensor, scale_log2: Float32):
    """s <- exp2((s - m') * scale_log2) with the new maximum m'; l is brought up to date, O is owed st.rescale."""
    for r in cutlass.range_constexpr(cute.size(st.m)):
        row = s[r, None].load()
        m = row.reduce(cute.ReductionOp.MAX, st.m[r], 0)
        m = cute.arch.warp_reduction_max(m, threads_in_group=LANES)
        shift = Float32(0.0) if m == -Float32.inf else m * scale_log2  # a row without keys so far: exp2(-inf) = 0
        st.rescale[r] = cute.math.exp2(st.m[r] * scale_log2 - shift, fastmath=True)
        p = cute.math.exp2(row * scale_log2 - shift, fastmath=True)
        st.l[r] = p.reduce(cute.ReductionOp.ADD, st.l[r] * st.rescale[r], 0)
        st.m[r] = m
        s[r, None].store(p)


@cute.jit
def rescale(st: State, o: cute.Tensor):
    for r in cutlass.range_constexpr(cute.size(st.m)):
        o[r, None].store(o[r, None].load() * st.rescale[r])


@cute.jit
def finish(st: State, r: cutlass.Constexpr, scale_log2: Float32, sink: Float32):
    """(1 / sum, log2 of the sum of exp) of row r over its keys and the sink (natural units, -inf for none).

    A row that has neither gives (0, -inf). Both terms are taken relative to the larger, so a sink of any size is safe.
    """
    total = cute.arch.warp_reduction_sum(st.l[r], threads_in_group=LANES)
    mine, other = st.m[r] * scale_log2, sink * LOG2_E
    top = cute.arch.fmax(mine, other)
    inverse, lse = Float32(0.0), -Float32.inf
    if top != -Float32.inf:
        keys = cute.math.exp2(mine - top, fastmath=True)
        total = total * keys + cute.math.exp2(other - top, fastmath=True)
        inverse = keys * cute.arch.rcp_approx(total)
        lse = top + cute.math.log2(total, fastmath=True)
    return inverse, lse
