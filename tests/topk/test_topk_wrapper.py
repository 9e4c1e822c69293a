"""The top-k functions around the kernel: validation, the path to a launch, torch.compile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wrappers
from bench.cases import topk as cases
from bench.cases.topk import PAGE_TABLE, PER_ROW, PLAIN, RAGGED, TOP_K, TopKCase
from cute_kernels.topk import dispatch
from cute_kernels.topk.args import DECODE, ENDS, FULL, LENGTHS
from cute_kernels.topk.spec import SortSpec, TopKSpec
from tests.support.emulated_topk import emulate
from tests.support.fake_machine import FakeMachine
from tests.topk.test_topk_reference import any_case
from wrappers import TopKTieBreak, top_k, top_k_page_table_transform
from wrappers.host import machine


def inputs_of(case, **changes):
    return cases.make_inputs(case) | changes


def check(case, inputs):
    cases.same(cases.call(case.function, inputs), cases.brute(case.function, inputs), case)


# ---- validation

BAD = cases.refusals()


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_written(launched, name):
    """With a plan of the good call and without."""
    function, change, error, message = BAD[name]
    for count in range(2):
        inputs = inputs_of(PLAIN[function], **change)
        with pytest.raises(error, match=f"^{message}"):
            getattr(wrappers, function)(**inputs)
        for output in cases.OUTPUTS[function]:
            assert output in change or (inputs[output] == cases.POISON).all()
        assert launched is None or len(launched) == count
        cases.call(function, inputs_of(PLAIN[function]))


# ---- the path to a launch, with a kernel that computes in torch what TopKArgs say


@pytest.fixture
def here():
    """A machine whose kernels compute in torch; its `launches` are those of this test's calls."""

    def kernel(op, spec):
        assert isinstance(spec, SortSpec if op == dispatch.SORT else TopKSpec)
        return emulate(op, spec, fake.sorted if op == dispatch.SORT else fake.launches)

    fake = FakeMachine(kernel)
    fake.launches, fake.sorted = [], []
    with machine.override(fake):
        yield fake


@pytest.fixture
def launches(here):
    return here.launches


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(any_case(), st.integers(0, 2**20))
def test_launch_of_any_call(launches, case, seed):
    launches.clear()
    inputs = cases.make_inputs(case, seed=seed)
    for _ in range(2):  # a new plan, perhaps, then the same one
        check(case, inputs)
    assert len(launches) == (2 if case.rows else 0)


def test_arguments_of_every_function(launches):
    """The scores where they are, in the window their function has, and only what it asks for."""
    facts = {
        PAGE_TABLE: (LENGTHS, {"lengths", "out", "raw", "table"}),
        RAGGED: (LENGTHS, {"lengths", "out", "offsets"}),
        TOP_K: (FULL, {"values", "indices"}),
        cases.PREFILL: (ENDS, {"starts", "lengths", "raw"}),
        cases.DECODE: (DECODE, {"lengths", "raw"}),
    }
    for function, (window, present) in facts.items():
        inputs = inputs_of(replace(PLAIN[function], shift=1, pad=3))
        check(PLAIN[function], inputs)
        a = launches[-1]
        scores = inputs["logits" if function in PER_ROW else "input"]
        assert a.scores.data_ptr() == scores.data_ptr() and a.scores.stride() == (53, 1)
        assert a.window == window and {f for f in a._fields[1:11] if len(getattr(a, f))} == present
        assert (a.k, a.page_size, a.last_ties, a.next_n) == (7, 1, 0, 3 if function == cases.DECODE else 1)


def test_sorted_results_are_sorted_in_place_by_a_second_launch(here):
    """The smallest kernel that has room for a row; beyond the largest one, torch."""
    for k, kernels in ((1, ["fp32_t512i4"]), (2048, ["fp32_t512i4"]), (2049, ["fp32_t1024i16"]), (16_385, [])):
        here.launches.clear(), here.sorted.clear()
        scores = cases.make_scores(
            TopKCase(TOP_K, rows=2, width=20_000, data="special"), torch.Generator().manual_seed(k)
        )
        values, indices = top_k(scores, k, sorted=True)
        assert [spec.name for spec in here.sorted] == kernels
        assert here.launches[0].values is values and here.launches[0].indices is indices
        want = cases.brute(TOP_K, {"input": scores, "k": k, "sorted": True})
        cases.same({"values": values, "indices": indices}, want)
    top_k(scores, 7), top_k(scores[:0], 7, sorted=True)
    assert not here.sorted


def test_arguments_of_a_page_table(launches):
    case = TopKCase(PAGE_TABLE, rows=6, page_size=16, starts=True, batch_map=True, tie_break=TopKTieBreak.LARGE)
    inputs = inputs_of(case)
    result = top_k_page_table_transform(**inputs)
    a = launches[0]
    assert a.page_size == 16 and a.last_ties == 1 and result is a.out is inputs["out"]
    assert a.raw is inputs["out_raw_indices"] and a.row_to_batch is inputs["row_to_batch"]
    assert a.starts is inputs["row_starts"] and a.table_starts is inputs["page_table_row_starts"]
    inputs |= {"page_size": 1, "page_table_row_starts": None}
    top_k_page_table_transform(**inputs)
    assert launches[1].table_starts is inputs["row_starts"]


def test_strided_logits_are_copied_and_left_alone(launches):
    for stride, pad in ((2, 0), (3, 5)):
        case = TopKCase(cases.PREFILL, stride=stride, pad=pad, lengths="mixed")
        inputs = inputs_of(case)
        before = inputs["logits"].clone()
        check(case, inputs)
        assert launches[-1].scores.stride() == (50, 1) and torch.equal(inputs["logits"], before)
    transposed = inputs_of(TopKCase(cases.PREFILL))
    transposed |= {"logits": transposed["logits"].T.contiguous().T, "stride0": 1, "stride1": 3}
    check(TopKCase(cases.PREFILL), transposed)


def test_the_forms_of_vllm(launches):
    """Lengths of two dimensions hold the end of each row; indices are columns of a wider buffer, written in place."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=gen)
    wide = torch.full((9, 20), cases.POISON, dtype=torch.int32)
    ends = torch.tensor([50, 0, 7, 31, -3, 99], dtype=torch.int32)
    column, strided = ends[:, None], torch.stack([ends, ends], 1)[:, :1]
    for next_n, lens in ((1, column), (1, strided), (3, ends.view(2, 3)), (2, ends.view(3, 2)), (2, column)):
        wide.fill_(cases.POISON)
        indices = wide[1:7, 5:12]
        wrappers.top_k_per_row_decode(logits, next_n, lens, indices, 6, 50, 1, 7)
        want = cases.brute(cases.DECODE, {"logits": logits, "next_n": 1, "seq_lens": ends, "top_k": 7})
        cases.same({"indices": indices}, want)
        a = launches[-1]
        assert (a.next_n, a.lengths.shape) == (1, (6,)) and a.raw is indices and a.scores is logits
        indices.fill_(cases.POISON)
        assert (wide == cases.POISON).all()
    inputs = inputs_of(replace(PLAIN[cases.PREFILL], pad_out=9))
    check(PLAIN[cases.PREFILL], inputs)
    assert launches[-1].raw is inputs["indices"] and inputs["indices"].stride() == (16, 1)


def test_numbers_of_numpy(launches):
    """A launch takes Python's alone."""
    for function, change in (
        (PAGE_TABLE, {"k": np.int64(7), "page_size": np.uint8(4)}),
        (RAGGED, {"k": np.int32(7), "tie_break": np.int64(2)}),
        (TOP_K, {"k": np.uint16(7)}),
        (cases.PREFILL, {"top_k": np.int64(7), "num_rows": np.int64(3), "stride0": np.int32(50)}),
        (cases.DECODE, {"top_k": np.int64(7), "next_n": np.int64(3)}),
    ):
        inputs = inputs_of(PLAIN[function])
        plain = {name: value.item() for name, value in change.items()}
        want = cases.brute(function, inputs | plain)
        for _ in range(2):  # a new plan, then the same one
            cases.same(cases.call(function, inputs | change), want)


@pytest.mark.parametrize("function", [PAGE_TABLE, RAGGED, TOP_K])
def test_hints_do_not_change_a_bit(launches, function):
    inputs = inputs_of(replace(PLAIN[function], data="relu"))
    want = cases.call(function, inputs)
    for hint in ({"deterministic": False}, {"dsa_graph_safe": True}, {"tie_break": TopKTieBreak.SMALL}):
        cases.same(cases.call(function, inputs | hint), want)


@pytest.mark.parametrize("function", cases.FUNCTIONS)
def test_values_share_a_plan_and_shapes_do_not(here, function):
    for case in (PLAIN[function], replace(PLAIN[function], data="relu"), replace(PLAIN[function], lengths="wild")):
        check(case, inputs_of(case))
    assert len(here.plans) == 1
    changes = [{"width": 51}, {"k": 8}, {"rows": 6}, {"pad": 1}, {"dtype": "bf16"}]
    changes += [{"tie_break": TopKTieBreak.LARGE}] if function not in PER_ROW else []
    changes += [{"sorted": True}] if function == TOP_K else []
    changes += [{"page_size": 2}, {"batch_map": True}, {"starts": True}, {"given": False}] * (function == PAGE_TABLE)
    for change in changes:
        for _ in range(2):
            case = replace(PLAIN[function], **change)
            check(case, inputs_of(case))
    assert len(here.plans) == 1 + len(changes)


def test_allocated_outputs(launches):
    i = inputs_of(replace(PLAIN[PAGE_TABLE], given=False))
    out = top_k_page_table_transform(**i)
    assert out.shape == (3, 7) and out.dtype == torch.int32 and out is not top_k_page_table_transform(**i)
    raw = torch.full((3, 7), cases.POISON, dtype=torch.int32)
    assert torch.equal(top_k_page_table_transform(**i, out_raw_indices=raw), out)
    assert torch.equal(raw, cases.brute(PAGE_TABLE, i | {"out_raw_indices": raw})["out_raw_indices"])
    for dtype in cases.DTYPES.values():
        values, indices = top_k(torch.randn(2, 9).to(dtype), 4)
        assert values.dtype == dtype and indices.dtype == torch.int64


def test_other_architectures_say_so(here):
    here.known = "sm_80", 108
    for function in cases.FUNCTIONS:
        with pytest.raises(NotImplementedError, match="^(input|logits): no top-k kernel: .*architecture sm_80"):
            cases.call(function, inputs_of(PLAIN[function]))


def test_k_that_no_kernel_has_room_for_is_named(launches):
    scores = torch.zeros(1, 737_281)
    with pytest.raises(NotImplementedError, match="^k: no top-k kernel: .* k 15873 of rows of 737281 fp32"):
        top_k(scores, 15_873)
    assert not launches
    top_k(scores[:, 1:], 15_873), top_k(scores, 15_872)
    assert len(launches) == 2
