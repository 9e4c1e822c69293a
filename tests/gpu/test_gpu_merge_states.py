"""Merged states on a Hopper GPU: every value against float64, the same bits at every run, all other memory unchanged.

Kernels come from a bundle where one is built (`make cubins`), else they are compiled as they are met, seconds each.
"""

from itertools import product

import pytest
import torch

from bench.cases import merge_states as cases
from bench.cases.cache_write import copied
from bench.cases.merge_states import IN_PLACE, PAIR, STATES, MergeCase
from cute_kernels.merge_states import dispatch
from tests.sim.workloads.merge_states import merge_cases, merge_features
from tests.support.gpu import CUDA, feature
from wrappers import merge_state_in_place, merge_states
from wrappers.merge import plan

INF, NAN = float("inf"), float("nan")
DTYPES = [pytest.param(name, marks=feature(f"merge V {name}")) for name in cases.DTYPES]
FUNCTIONS = [
    pytest.param(STATES, marks=feature("merge states of one tensor")),
    pytest.param(PAIR, marks=feature("merge states of two tensors")),
    pytest.param(IN_PLACE, marks=feature("merge states in place")),
]
SIMULATED = {
    f"{spec.name}, {scenario.name}": scenario
    for _, spec in dispatch.shipped("sm_90a")
    for scenario in merge_cases(spec)
} | {scenario.name: scenario for scenario in merge_features()}


def exactly(v, s):
    """V and S of states (N, S, H, D) in float64."""
    v, s = v.double(), s.double()
    largest = s.amax(1, keepdim=True)
    weights = torch.exp2(s - largest.where(largest != -INF, 0.0))
    total = weights.sum(1)
    wide = v.where((s != -INF)[..., None], 0.0)
    out = (wide * weights[..., None]).sum(1) / total.where(total != 0, 1.0)[..., None]
    return out, largest[:, 0] + total.log2()


def expected(inputs):
    """The result of a call with these arguments, in float64."""
    v, s, *other = inputs.values()
    if not other:
        return exactly(v, s)
    out, lse = exactly(torch.stack([v, other[0]], 1), torch.stack([s, other[1]], 1))
    if len(other) > 2:
        kept = other[2] == 0
        out[kept], lse[kept] = v[kept].double(), s[kept].double()
    return out, lse


def poisoned(like):
    return torch.full(like.shape, NAN, dtype=like.dtype, device=like.device)


def matches(case, monkeypatch, seed=0):
    """Run a case twice, on equal memory."""
    monkeypatch.setattr(plan, "_empty_like", poisoned)
    inputs = cases.make_inputs(case, "cpu", seed)
    first, second = copied(inputs, CUDA), copied(inputs, CUDA)
    want, outside = expected(inputs), [cases.outside(t) for t in first.values()]
    got, again = cases.run(case, first), cases.run(case, second)
    for a, b in zip(got, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert cases.difference(case, [t.cpu() for t in got], want) <= 1, (case, seed)
    assert all(map(torch.equal, outside, (cases.outside(t) for t in first.values()))), (case, seed)


@pytest.mark.parametrize("name", SIMULATED)
def test_cases_of_the_simulator(name, monkeypatch):
    for case in SIMULATED[name].calls:
        for seed in range(3):
            matches(case, monkeypatch, seed)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dims_and_layouts(dtype, function, monkeypatch):
    dims = (1, 2, 5, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 192, 256, 257, 320, 512, 576, 1025, 4096)
    for number, (dim, layout) in enumerate(product(dims, ("packed", "strided", "columns"))):
        case = MergeCase(
            function, dtype, (1, 7, 65)[number % 3], 1 + number % 9, (1, 3, 8, 32)[number % 4], dim, layout,
            number % 5 if number % 2 else 0, data=("normal", "special")[number // 2 % 2],
        )  # fmt: skip
        matches(case, monkeypatch, number)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_states_and_tokens(dtype, function, monkeypatch):
    for states, tokens in product((1, 2, 3, 4, 5, 8, 17, 64) if function == STATES else (2,), (1, 63, 1030)):
        matches(MergeCase(function, dtype, tokens, states, 4, 128, scale=(3.0, 200.0)[tokens % 2]), monkeypatch, states)


@feature("merge with a mask of tokens")
@pytest.mark.parametrize("mask", ["bool", "uint8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_merged_stay(dtype, mask, monkeypatch):
    for number, (dim, layout) in enumerate(product((128, 40, 33), ("packed", "strided", "columns"))):
        case = MergeCase(IN_PLACE, dtype, 100, heads=5, dim=dim, layout=layout, mask=mask, data="special")
        matches(case, monkeypatch, number)


def test_in_place_into_one_buffer():
    """States side by side, and long rows, of which lanes read S in several rounds."""
    both, sums = torch.randn(3000, 2, 8, 1200, device=CUDA), torch.randn(3000, 2, 8, device=CUDA)
    want = exactly(both, sums)
    merge_state_in_place(both[:, 0], sums[:, 0], both[:, 1], sums[:, 1])
    torch.testing.assert_close((both[:, 0].double(), sums[:, 0].double()), want, rtol=1e-5, atol=1e-5)
    rows, s = torch.randn(501, 8, 64, device=CUDA), torch.randn(501, 8, device=CUDA)
    with pytest.raises(ValueError, match="overlaps the memory of v_other"):
        merge_state_in_place(rows[:-1], s[:-1], rows[1:], s[1:].clone())


@feature("merge with CUDA graph replay")
@pytest.mark.parametrize("function", [STATES, PAIR, IN_PLACE])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_graphs(dtype, function):
    """A captured call reads new states when it is replayed."""
    case = MergeCase(function, dtype, 33, 5, 8, 128)
    first, other = cases.make_inputs(case), cases.make_inputs(case, seed=1)
    given = copied(first, CUDA)
    cases.run(case, copied(first, CUDA))  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cases.run(case, given)
    for name, t in other.items():
        given[name].copy_(t)
    graph.replay()
    assert cases.difference(case, [t.cpu() for t in got], expected(other)) <= 1


def test_a_chain_of_launches():
    """Each launch reads what the one before has just written."""
    v, s = torch.randn(50, 257, 8, 128).double(), 3 * torch.randn(50, 257, 8).double()
    states = [(a.float().to(CUDA), b.float().to(CUDA)) for a, b in zip(v, s)]
    merged = states[0][0].clone(), states[0][1].clone()
    for state in states[1:]:
        merge_state_in_place(*merged, *state)
    want = exactly(v.transpose(0, 1), s.transpose(0, 1))
    torch.testing.assert_close([t.cpu().double() for t in merged], [*want], rtol=1e-4, atol=1e-4)


def test_far_offsets():
    """States more than 2^32 bytes apart."""
    v = torch.empty(2, 1 << 20, 16, 128, dtype=torch.bfloat16, device=CUDA)
    v[0], v[1] = 1.0, 3.0
    s = torch.zeros(2, 1 << 20, 16, device=CUDA)
    out, lse = merge_states(v.transpose(0, 1), s.transpose(0, 1))
    assert out.eq(2.0).all() and lse.eq(1.0).all()
    both = v.view(-1, 16, 128)
    merge_state_in_place(both[: 1 << 20], s[0], both[1 << 20 :], s[1])
    assert both[: 1 << 20].eq(2.0).all() and both[1 << 20 :].eq(3.0).all()
