"""The top-k functions on CPU tensors, which run the reference, against a brute force that ranks each element."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases import topk as cases
from bench.cases.topk import DECODE, PAGE_TABLE, PREFILL, RAGGED, TOP_K, TopKCase
from wrappers import TopKTieBreak, reference, top_k, top_k_per_row_prefill, top_k_ragged_transform


def matches(case, seed=0):
    inputs = cases.make_inputs(case, seed=seed)
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    cases.same(cases.call(case.function, inputs), cases.brute(case.function, inputs), case)
    for name, t in before.items():
        if name not in cases.OUTPUTS[case.function]:
            bits = torch.int16 if t.element_size() == 2 else torch.int32
            assert torch.equal(t.view(bits), inputs[name].view(bits)), f"{name} was written"


@st.composite
def any_case(draw):
    function = draw(st.sampled_from(cases.FUNCTIONS))
    per_row = function in (PREFILL, DECODE)
    width = draw(st.integers(1 if function == TOP_K else 0, 40))
    next_n = draw(st.integers(1, 3)) if function == DECODE else 1
    return TopKCase(
        function,
        dtype=draw(st.sampled_from(tuple(cases.DTYPES))),
        rows=draw(st.integers(0, 4)) * next_n,
        width=width,
        k=draw(st.integers(1, width if function == TOP_K else 48)),
        data=draw(st.sampled_from(tuple(cases.DATA))),
        lengths=draw(st.sampled_from(("full", "mixed", "wild"))),
        starts=draw(st.booleans()),
        pad=draw(st.sampled_from((0, 1, 13))),
        shift=draw(st.integers(0, 3)),
        stride=draw(st.sampled_from((1, 2, 3))) if per_row else 1,
        page_size=draw(st.sampled_from((1, 1, 2, 16))),
        width_table=draw(st.sampled_from((0, 0, 1, 9))),
        batch_map=draw(st.booleans()),
        next_n=next_n,
        tie_break=draw(st.sampled_from(tuple(TopKTieBreak))),
        sorted=draw(st.booleans()),
        given=draw(st.booleans()),
        pad_out=draw(st.sampled_from((0, 0, 1, 5))),
        each_row=draw(st.booleans()),
    )


@settings(max_examples=400)
@given(any_case(), st.integers(0, 2**20))
def test_any_call(case, seed):
    matches(case, seed)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("function", cases.FUNCTIONS)
def test_data(function, data, dtype):
    matches(TopKCase(function, dtype, rows=4, width=300, k=64, data=data, lengths="mixed", next_n=2, sorted=True))


def test_order_of_special_values():
    """fp32, from the largest: two NaN payloads, inf, finite, denormal, zeros, ..., the negative NaN."""

    def nan(bits):
        return struct.unpack("f", struct.pack("I", bits))[0]

    ordered = [nan(0x7FFFFFFF), nan(0x7FC00000), math.inf, 65520.0, 65504.0, 1e-45, 0.0, -0.0, -1e-45, -1.0, -math.inf]
    row = torch.tensor([*ordered, nan(0xFFC00000)]).flip(0)[None]
    for k in range(1, 13):
        values, indices = top_k(row, k, sorted=True)
        assert indices.tolist() == [list(range(11, 11 - k, -1))]
        assert torch.equal(values.view(torch.int32), row.view(torch.int32).flip(1)[:, :k])


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=30))
def test_keys_order_bit_patterns(patterns):
    for dtype in (torch.float16, torch.bfloat16):
        row = torch.tensor(patterns, dtype=torch.int16).view(dtype)
        keys, want = reference.order_keys(row).tolist(), cases.score_keys(row)
        assert sorted(range(len(row)), key=keys.__getitem__) == sorted(range(len(row)), key=want.__getitem__)
        assert [a == b for a in keys for b in keys] == [a == b for a in want for b in want]


def test_ties_at_the_boundary():
    row = torch.tensor([[2.0, 1.0, 3.0, 1.0, 1.0, 0.0, 1.0]])
    for tie_break, want in ((0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [0, 2, 4, 6])):
        assert top_k(row, 4, tie_break=tie_break)[1].tolist() == [want]
    values, indices = top_k(row, 4, sorted=True, tie_break=TopKTieBreak.LARGE)
    assert indices.tolist() == [[2, 0, 4, 6]] and values.tolist() == [[3.0, 2.0, 1.0, 1.0]]


def test_a_short_window_is_not_ranked():
    scores = torch.tensor([[math.nan, 5.0, math.inf, 9.0]])
    for length, want in ((4, [7, 8, 9, 10]), (3, [7, 8, 9, -1]), (0, [-1] * 4), (-5, [-1] * 4), (99, [7, 8, 9, 10])):
        lengths, offsets = torch.tensor([length], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
        assert top_k_ragged_transform(scores, offsets, lengths, 4).tolist() == [want]


def test_k_equal_to_the_row_is_in_index_order():
    values, indices = top_k(torch.tensor([[1.0, 3.0, 2.0]]), 3)
    assert indices.tolist() == [[0, 1, 2]] and values.tolist() == [[1.0, 3.0, 2.0]]


def test_logits_outside_the_window_never_matter():
    logits = torch.arange(12.0).reshape(2, 6)
    garbage = logits.clone()
    garbage[0, :2], garbage[0, 5:], garbage[1, 1:] = math.nan, math.inf, math.nan
    starts, ends = (torch.tensor(v, dtype=torch.int32) for v in ([2, 0], [5, 1]))
    for tensor in (logits, garbage):
        indices = torch.full((2, 2), cases.POISON, dtype=torch.int32)
        assert top_k_per_row_prefill(tensor, starts, ends, indices, 2, 6, 1, 2) is None
        assert indices.tolist() == [[1, 2], [0, -1]]


def test_constant_row_of_a_million():
    case = TopKCase(TOP_K, rows=1, width=1_000_000, k=2048, data="constant")
    for tie_break, first in ((TopKTieBreak.SMALL, 0), (TopKTieBreak.LARGE, 1_000_000 - 2048)):
        inputs = cases.make_inputs(case) | {"tie_break": tie_break}
        assert torch.equal(cases.call(TOP_K, inputs)["indices"][0], torch.arange(first, first + 2048))


def test_random_values_agree_with_torch():
    scores = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    values, indices = top_k(scores, 100, sorted=True)
    want = scores.topk(100)
    assert torch.equal(values, want.values) and torch.equal(indices, want.indices)


def test_offsets_and_page_entries_wrap_at_32_bits():
    scores = torch.zeros(1, 2)
    lengths, offsets = (torch.tensor([v], dtype=torch.int32) for v in (2, cases.INT_MAX))
    assert top_k_ragged_transform(scores, offsets, lengths, 2).tolist() == [[cases.INT_MAX, cases.INT_MIN]]


@pytest.mark.parametrize("function", [PAGE_TABLE, RAGGED, PREFILL, DECODE])
def test_rows_and_scores_may_be_missing(function):
    for rows, width in ((0, 5), (2, 0), (0, 0)):
        matches(TopKCase(function, rows=rows, width=width, k=3, lengths="mixed", starts=True, batch_map=True))
