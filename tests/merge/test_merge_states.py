"""Merged states against float64 in the simulator; launches, plans and refusals of `merge_state` and its like, on a
machine whose kernels compute in torch; dispatch. `test_cascade.py` compares them with attention over all keys."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench.cases import merge_states as cases
from bench.cases.merge_states import IN_PLACE, PAIR, STATES, MergeCase
from cute_kernels.merge_states import dispatch, rows
from cute_kernels.merge_states.request import MergeRequest
from cute_kernels.merge_states.spec import MergeSpec
from tests.conftest import ARCH
from tests.sim.workloads import simulated
from tests.support.emulated import emulation
from wrappers import merge_state, merge_state_in_place, merge_states
from wrappers.host import machine
from wrappers.merge import plan

INF, NAN = float("inf"), float("nan")
FUNCTIONS = (STATES, PAIR, IN_PLACE)


def oracle(v, s):
    """V and S of states (N, S, H, D), row by row in float64."""
    n, _, heads, dim = v.shape
    out, lse = torch.zeros(n, heads, dim).double(), torch.full((n, heads), -INF).double()
    for token in range(n):
        for head in range(heads):
            keys = s[token, :, head].double()
            counted = keys != -INF
            if not counted.any():
                continue
            largest = keys[counted].max() if not keys.isnan().any() else torch.tensor(NAN).double()
            weights = 2.0 ** (keys[counted] - largest)
            total = weights.sum()
            out[token, head] = (v[token, counted, head].double() * weights[:, None]).sum(0) / total
            lse[token, head] = largest + total.log2()
    return out, lse


def expected(case, inputs):
    """The result of a case, of rows outside the mask too."""
    given = [t.clone() for t in inputs.values()]
    if case.function == STATES:
        return oracle(*given)
    out, lse = oracle(torch.stack([given[0], given[2]], 1), torch.stack([given[1], given[3]], 1))
    if case.mask:
        kept = given[4] == 0
        out[kept], lse[kept] = given[0][kept].double(), given[1][kept].double()
    return out, lse


def poisoned(like):
    return torch.full(like.shape, NAN, dtype=like.dtype, device=like.device)


CASES = [
    MergeCase(dtype=dtype, states=states, dim=dim, tokens=tokens, layout=layout, data=data, shift=shift)
    for dtype, states, dim, tokens, layout, data, shift in (
        ("bf16", 1, 1, 1, "packed", "normal", 0),
        ("bf16", 2, 128, 17, "packed", "normal", 0),
        ("bf16", 7, 45, 6, "packed", "special", 0),
        ("fp16", 5, 72, 6, "strided", "special", 0),
        ("fp16", 3, 64, 5, "columns", "special", 0),
        ("fp16", 2, 64, 5, "packed", "normal", 3),
        ("fp32", 4, 128, 6, "packed", "special", 0),
        ("fp32", 3, 7, 9, "packed", "special", 1),
        ("fp32", 2, 321, 2, "strided", "normal", 0),
    )
]


@pytest.mark.kernels
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.dtype}-s{c.states}-d{c.dim}-{c.layout}-{c.data}-{c.shift}")
def test_in_the_simulator(function, case, monkeypatch):
    monkeypatch.setattr(plan, "_empty_like", poisoned)
    for mask in ("", "bool", "uint8") if function == IN_PLACE else ("",):
        case = replace(case, function=function, mask=mask)
        inputs = cases.make_inputs(case)
        want, before = expected(case, inputs), [cases.outside(t) for t in inputs.values()]
        kept = {name: t.clone() for name, t in inputs.items()}
        with simulated(ARCH, []) as here:
            got = cases.run(case, inputs)
            assert len(here.plans) >= 1
        assert got[0].dtype == cases.DTYPES[case.dtype] and got[1].dtype == torch.float32
        assert cases.difference(case, got, want) <= 1
        assert all(map(torch.equal, before, (cases.outside(t) for t in inputs.values())))
        for name in inputs.keys() - ({"v", "s"} if function == IN_PLACE else set()):
            torch.testing.assert_close(inputs[name], kept[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", ["packed", "strided", "columns"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_launches(function, layout, dtype):
    """One per call, of the caller's own tensors unless the elements of a row lie apart; one plan."""
    case = MergeCase(
        function, dtype, dim=40, layout=layout, data="special", mask="bool" if function == IN_PLACE else ""
    )
    with emulation() as here:
        for count in (1, 2):
            inputs = cases.make_inputs(case)
            want, addresses = expected(case, inputs), {t.data_ptr() for t in inputs.values()}
            assert cases.difference(case, cases.run(case, inputs), want) <= 1
            assert len(here.launches) == count
        assert {*here.specs} == {MergeSpec(dtype, function != STATES)}
        assert len(here.plans) == 1
        launch = here.launches[-1]
        assert launch["lanes_log2"] == {"fp32": 3}.get(dtype, 2) and launch["enable_pdl"] == 1
        assert (launch["v"].data_ptr() in addresses) == (layout != "columns") and launch["s"].data_ptr() in addresses
        assert (launch["v_out"] is launch["v"]) == (function == IN_PLACE)


def test_calls_that_differ_share_no_plan():
    base = MergeCase(dim=48)
    changes = ({}, {"tokens": 6}, {"states": 4}, {"heads": 2}, {"dim": 40}, {"dtype": "fp16"}, {"dtype": "fp32"})
    with emulation() as here:
        for function in FUNCTIONS:
            for change in (*changes, {"mask": "bool"}, {"mask": "uint8"}):
                for seed in range(2):
                    case = replace(base, function=function, **change)
                    inputs = cases.make_inputs(case, seed=seed)
                    want = expected(case, inputs) if function == IN_PLACE or not case.mask else None
                    got = cases.run(case, inputs)
                    assert want is None or cases.difference(case, got, want) <= 1, case
        assert {spec.name for spec in here.specs} == {spec.name for _, spec in dispatch.shipped(ARCH)}


def test_states_in_one_buffer_are_merged_in_place_by_the_kernel():
    """Two states side by side, which share no byte though they overlap as ranges."""
    both, sums = torch.randn(5, 2, 3, 16), torch.randn(5, 2, 3)
    want = oracle(both, sums)
    with emulation() as here:
        merge_state_in_place(both[:, 0], sums[:, 0], both[:, 1], sums[:, 1])
        assert here.launches[0]["v_out"].data_ptr() == both.data_ptr()
    torch.testing.assert_close((both[:, 0].double(), sums[:, 0].double()), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", ["cpu", "planned", "known"])
@pytest.mark.parametrize("shared", ["v_other", "same v_other", "s_other", "mask", "v"])
def test_memory_that_an_output_shares_is_refused(shared, place):
    """As in all functions that write to given tensors; nothing is written."""
    v, s, other = torch.randn(6, 2, 8), torch.randn(6, 2), (torch.randn(5, 2, 8), torch.randn(5, 2))
    given = {"v": v[:5], "s": s[:5], "v_other": other[0], "s_other": other[1], "mask": torch.ones(5).byte()}
    change = {
        "v_other": {"v_other": v[1:]}, "same v_other": {"v_other": v[:5]}, "s_other": {"s_other": s[1:]},
        "mask": {"mask": s.view(torch.uint8).flatten()[:5]}, "v": {"s": v.flatten()[:10].view(5, 2)},
    }[shared]  # fmt: skip
    before = v.clone(), s.clone()
    with emulation() if place != "cpu" else contextlib.nullcontext():
        if place == "known":
            merge_state_in_place(*(t.clone() for t in given.values()))
        named = {"v": "s: .* overlaps the memory of v"}.get(
            shared, "(v|s): .* overlaps the memory of " + shared.split()[-1]
        )
        with pytest.raises(ValueError, match=f"^{named}"):
            merge_state_in_place(**given | change)
    assert torch.equal(v, before[0]) and torch.equal(s, before[1])


@pytest.mark.parametrize("auto", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(auto, dtype):
    v, s = torch.randn(2, 5, 3, 16).to(dtype), torch.randn(2, 5, 3)
    calls = (
        lambda: merge_state(v[0], s[0], v[1], s[1]),
        lambda: merge_states(v.transpose(0, 1), s.transpose(0, 1)),
        lambda: (a := (v[0].clone(), s[0].clone()), merge_state_in_place(*a, v[1], s[1]))[0],
    )
    for call in calls:
        want = call()
        with torch.autocast("cpu", auto):
            got = call()
        assert all(map(torch.equal, got, want)) and got[0].dtype == dtype


def test_what_has_no_elements_launches_nothing():
    with emulation() as here:
        for shape in ((0, 2, 3, 8), (4, 0, 3, 8), (4, 2, 0, 8), (4, 2, 3, 0)):
            v, s = merge_states(torch.ones(shape), torch.ones(shape[:-1]))
            assert v.shape == (shape[0], *shape[2:]) and not v.any()
            assert s.eq(-INF if shape[1] == 0 else 2).all()  # two equal states of one key each, and of 2 ** 1
            if shape[1]:
                state = v, s
                assert merge_state(*state, *state)[1].eq(3).all()
                merge_state_in_place(*state, v.clone(), s.clone())
        assert not here.launches and not here.plans


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tensor_that_requires_grad_is_refused_by_a_known_plan(function):
    case = MergeCase(function)
    with emulation() as here:
        cases.run(case, cases.make_inputs(case))
        for name in cases.make_inputs(case):
            inputs = cases.make_inputs(case)
            inputs[name].requires_grad_()
            with pytest.raises(RuntimeError, match=f"{name}: requires grad"):
                cases.run(case, inputs)
        assert len(here.launches) == 1
        with torch.no_grad():
            cases.run(case, inputs)
        assert len(here.launches) == 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_without_memory(function):
    inputs = cases.make_inputs(MergeCase(function, mask="bool"))
    real = cases.run(MergeCase(function), {name: t.clone() for name, t in inputs.items()})
    with FakeTensorMode() as mode:
        fake = cases.run(MergeCase(function), {name: mode.from_tensor(t) for name, t in inputs.items()})
    meta = cases.run(MergeCase(function), {name: t.to("meta") for name, t in inputs.items()})
    for found in (fake, meta):
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in real]
    with emulation() as known:  # with the plan of the call
        cases.run(MergeCase(function), {name: t.clone() for name, t in inputs.items()})
    for here in (machine.HostMachine(), known):
        for name in list(inputs)[1:]:
            with machine.override(here), pytest.raises(TypeError, match=f"{name}: a FakeTensor, must have memory"):
                cases.run(MergeCase(function), inputs | {name: FakeTensorMode().from_tensor(inputs[name])})


def test_dispatch():
    with pytest.raises(NotImplementedError, match=r"n \* heads 2147483648: must be at most 2147483520"):
        dispatch.select(MergeRequest("bf16", False, 1 << 31), "sm_90a")
    with pytest.raises(NotImplementedError, match="architecture sm_80: needs sm_90a"):
        dispatch.select(MergeRequest("bf16"), "sm_80")
    assert dispatch.select(MergeRequest("fp32", True), "sm_103a") == ("merge_states.rows", MergeSpec("fp32", True))
    assert rows.supports(MergeSpec("e4m3")).startswith("dtype e4m3") and dispatch.shipped("sm_80") == []
    assert len({spec.name for _, spec in dispatch.shipped("sm_90a")}) == 6
    assert [rows.lanes(dim, 8) for dim in (1, 16, 17, 33, 64, 128, 256, 512, 4096)] == [1, 1, 2, 4, 4, 8, 16, 32, 32]


def test_every_lane_has_a_vector_in_the_first_round():
    for dim in range(1, 2000):
        for per in (4, 8):
            lanes, vectors = rows.lanes(dim, per), -(-dim // per)
            assert lanes <= vectors and (lanes == rows.MAX_LANES or rows.VECTORS * lanes >= vectors)
