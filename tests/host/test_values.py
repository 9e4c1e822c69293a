"""Values of lengths, offsets, page ids and scales: what the reference refuses, what CUTE_KERNELS_CHECK=1 makes calls on
CUDA refuse, and what is clamped otherwise.
"""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from wrappers.attention import plan, values
from wrappers.host import checks, launch

CONTEXT, DECODE = (cases.FUNCTIONS[name][0] for name in ("context", "decode"))
CASE = replace(cases.EDGE["plain"], q_lens=(2, 3), kv_lens=(19, 33), spare_pages=1)  # 4 columns: 2 and 3 used
PAGES, SPAN = 6, 4 * 16  # of the pool; keys that a row of the table holds


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def table(row, column, page):
    found = cases.make_inputs(CASE)["block_tables"]
    found[row, column] = page
    return {"block_tables": found}


BAD = {
    "length < 0": ({"seq_lens": ints(19, -1)}, f"seq_lens: -1 of request 1, must be in [0, {SPAN}]: 4 columns of"),
    "length": ({"seq_lens": ints(SPAN + 1, 9)}, f"seq_lens: {SPAN + 1} of request 0, must be in [0, {SPAN}]"),
    "far length": ({"seq_lens": ints(9, 1 << 30)}, "seq_lens: 1073741824 of request 1"),
    "unsigned": ({"seq_lens": torch.tensor([9, 1 << 31], dtype=torch.uint32)}, "seq_lens: 2147483648 of request 1"),
    "start < 0": ({"cum_seq_lens_q": ints(-1, 2, 5)}, "cum_seq_lens_q[0]: -1 of request 0, must be in [0, 5]"),
    "falling": ({"cum_seq_lens_q": ints(0, 4, 3)}, "cum_seq_lens_q[2]: 3 of request 1, must be in [4, 5]"),
    "beyond": ({"cum_seq_lens_q": ints(0, 2, 6)}, "cum_seq_lens_q[2]: 6 of request 1, must be in [2, 5]"),
    "page": (table(0, 1, PAGES), f"block_tables: {PAGES} in column 1 of request 0 (K), must be in [0, {PAGES})"),
    "page < 0": (table(1, 2, -1), f"block_tables: -1 in column 2 of request 1 (K), must be in [0, {PAGES})"),
    "scale": ({"bmm1_scale": torch.tensor([math.nan])}, "bmm1_scale: nan, must be"),
    "out_scale": ({"bmm2_scale": torch.tensor(-math.inf)}, "bmm2_scale: -inf, must be finite"),
}  # fmt: skip
GOOD = {
    "shorter than its queries": {"seq_lens": ints(1, 0)},
    "rows of nobody": {"cum_seq_lens_q": ints(1, 3, 4)},
    "no rows, any pages": table(0, 0, 99) | {"cum_seq_lens_q": ints(0, 0, 5)},
    "before the window": table(1, 0, 99) | {"window_left": 3},
    "after the last key": table(0, 2, -5),
    "whole table": {"seq_lens": ints(9, 33)},
}  # fmt: skip


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(plan, "checking", lambda: True)


def inputs_of(change=None, **more):
    return cases.make_inputs(CASE) | (change or {}) | more


@pytest.mark.parametrize("name", BAD)
def test_the_reference_refuses(name):
    change, message = BAD[name]
    inputs = inputs_of(change)
    with pytest.raises(ValueError) as caught:
        CONTEXT(**inputs)
    assert str(caught.value).startswith(message) and inputs["out"].isnan().all() and inputs["lse"].isnan().all()


@pytest.mark.parametrize("name", GOOD)
def test_what_no_key_or_row_needs_may_be_anything(name):
    CONTEXT(**inputs_of(GOOD[name]))


@pytest.mark.parametrize("name", BAD)
def test_calls_on_cuda_refuse_where_they_are_asked_to(checked, launches, name):
    change, message = BAD[name]
    for known in (False, True):
        if known:
            CONTEXT(**inputs_of())
        count, inputs = len(launches), inputs_of(change)
        with pytest.raises(ValueError) as caught:
            CONTEXT(**inputs)
        assert str(caught.value).startswith(message) and len(launches) == count and inputs["out"].isnan().all()


def test_calls_on_cuda_read_no_value_otherwise(launches, monkeypatch):
    monkeypatch.setattr(values, "check", None)
    for _ in range(2):
        CONTEXT(**inputs_of())
    assert len(launches) == 2


def test_an_empty_call_is_checked(checked, launches):
    inputs = cases.make_inputs(replace(CASE, q_lens=(0, 0)))
    for _ in range(2):
        with pytest.raises(ValueError, match="^seq_lens: -1 of request 1"):
            CONTEXT(**inputs | {"seq_lens": ints(9, -1)})
        CONTEXT(**inputs)
    assert not launches


def test_a_capture_is_not_checked(checked, here):
    """Its graph is replayed with other values, and reading these would break it."""
    here.capturing = True
    here.of = lambda op, spec: lambda *flat: here.launches.append(flat)
    CONTEXT(**inputs_of(BAD["length"][0]))
    assert len(here.launches) == 1


def test_a_factor_that_kernels_cannot_take(checked, launches):
    with pytest.raises(ValueError, match="^bmm1_scale: -1.0, must be positive and finite"):
        CONTEXT(**inputs_of(bmm1_scale=torch.tensor([-1.0])))
    with pytest.raises(ValueError, match="^bmm1_scale_log2: 0.0, must be positive"):
        DECODE(**cases.as_decode(inputs_of()), bmm1_scale_log2=torch.tensor([0.0]))


@pytest.mark.parametrize("function", ["decode", "xqa"])
def test_names_are_the_callers(function):
    case = replace(CASE, q_lens=(1, 1), dtype="fp16", layout="NHD", lse=False, function=function)
    call, arguments = cases.FUNCTIONS[function]
    names = {"decode": ("block_tables", "kv_cache"), "xqa": ("page_table", "k_cache, v_cache")}[function]
    inputs = arguments(case, cases.make_call(case))
    inputs[names[0]][1, 2] = PAGES
    with pytest.raises(ValueError, match=rf"^{names[0]}: {PAGES} in column 2 of request 1 \(K\), .* {names[1]}"):
        call(**inputs)
    inputs[names[0]][1, 2] = -1
    if function == "xqa":
        call(**inputs)  # a page of zeros
    else:
        with pytest.raises(ValueError, match="^block_tables: -1"):
            call(**inputs)


def test_an_empty_pool_has_no_keys():
    empty = torch.zeros(0, 2, 16, 64).bfloat16()
    CONTEXT(**inputs_of(kv_cache=(empty, empty), seq_lens=ints(0, 0)))
    with pytest.raises(ValueError, match=r"^seq_lens: 1 of request 0, must be in \[0, 0\]: kv_cache has no pages"):
        CONTEXT(**inputs_of(kv_cache=(empty, empty), seq_lens=ints(1, 0)))


def test_the_variable_is_parsed_strictly(monkeypatch):
    for text, found in ((None, False), ("1", True), ("0", False), ("", False)):
        monkeypatch.delenv("CUTE_KERNELS_CHECK", False)
        if text is not None:
            monkeypatch.setenv("CUTE_KERNELS_CHECK", text)
        checks.checking.cache_clear()
        assert checks.checking() is found
    for text in ("yes", "2", "true"):
        monkeypatch.setenv("CUTE_KERNELS_CHECK", text)
        checks.checking.cache_clear()
        with pytest.raises(ValueError, match=f"^CUTE_KERNELS_CHECK: '{text}', must be 0 or 1"):
            checks.checking()
    monkeypatch.undo()
    checks.checking.cache_clear()


TOPK_BAD = {
    topk_cases.PAGE_TABLE: {
        "lengths": (51, "lengths: 51 in entry 1, must be in [0, 50]"),
        "row_to_batch": (3, "row_to_batch: 3 in entry 1, must be in [0, 2]"),
        "row_starts": (-1, "row_starts: -1 in entry 1, must be in [0, 50]"),
    },
    topk_cases.RAGGED: {"lengths": (-1, "lengths: -1 in entry 1")},
    topk_cases.PREFILL: {
        "row_ends": (51, "row_ends: 51 in entry 1, must be in [0, 50]"),
        "row_starts": (51, "row_starts: 51 in entry 1"),
    },
    topk_cases.DECODE: {"seq_lens": (51, "seq_lens: 51 in entry 1, must be in [0, 50]")},
}  # fmt: skip


def test_windows_that_end_before_they_start_are_empty(monkeypatch):
    """Also to a check."""
    monkeypatch.setattr(launch, "checking", lambda: True)
    inputs = topk_cases.make_inputs(topk_cases.PLAIN[topk_cases.PREFILL])
    inputs["row_starts"][:], inputs["row_ends"][:] = 9, 5
    topk_cases.call(topk_cases.PREFILL, inputs)
    assert (inputs["indices"] == -1).all()


@pytest.mark.parametrize("function,name", [(f, n) for f, bad in TOPK_BAD.items() for n in bad])
def test_bounds_of_top_k_are_clamped_unless_checked(monkeypatch, function, name):
    case = replace(topk_cases.PLAIN[function], rows=4, next_n=2, lengths="full", batch_map=True)
    inputs = topk_cases.make_inputs(case)
    if name == "row_starts":
        inputs[name] = torch.zeros(4, dtype=torch.int32)
    good = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    value, message = TOPK_BAD[function][name]
    inputs[name][1] = value
    topk_cases.call(function, inputs)
    monkeypatch.setattr(launch, "checking", lambda: True)
    topk_cases.call(function, good)
    outputs = [inputs[n] for n in topk_cases.OUTPUTS[function] if inputs.get(n) is not None]
    for t in outputs:
        t.fill_(topk_cases.POISON)
    with pytest.raises(ValueError) as caught:
        getattr(wrappers, function)(**inputs)
    assert str(caught.value).startswith(message) and all((t == topk_cases.POISON).all() for t in outputs)
