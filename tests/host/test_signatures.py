"""Signatures: calls by position, hints, and what arguments may be."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.support.good_calls import PLAIN, inputs_of
from wrappers import trtllm_batch_context_with_kv_cache as context
from wrappers import trtllm_batch_decode_with_kv_cache as decode
from wrappers import xqa
from wrappers.own import registry

FUNCTIONS = [row.name for row in registry.FUNCTIONS]
FUNCTIONS.remove("single_prefill_with_kv_cache_return_lse")  # it has no positions of its own


def results(function, args, kwargs):
    """What a call returned and wrote."""
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    returned = getattr(wrappers, function)(*args, **kwargs)
    found = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    tensors = (torch.tensor([t]) if isinstance(t, int) else t for t in (*found, *given))
    return [t.clone() for t in tensors if t is not None]


def same(a, b):
    """Equal bits."""
    a_bits, b_bits = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bits, b_bits)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_call_through_every_position(function):
    """The positions, which are upstream's, are on record (test_promises.py)."""
    parameters = inspect.signature(getattr(wrappers, function)).parameters
    names = [name for name, p in parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    inputs = inputs_of(function)
    want = results(function, (), {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()})
    args = [inputs.pop(name, parameters[name].default) for name in names]
    got = results(function, args, inputs)
    assert len(got) == len(want) and all(any(same(a, b) for b in want) for a in got)


# ---- hints, and what is refused but for its default

BUFFER = torch.zeros(8, dtype=torch.int32)
HINTS = [
    (context, {"multi_ctas_kv_counter_buffer": BUFFER}), (context, {"backend": "trtllm-gen"}),
    (context, {"backend": "cake"}), (decode, {"multi_ctas_kv_counter_buffer": BUFFER}), (decode, {"backend": "cake"}),
    (decode, {"enable_block_sparse_attention": False, "cp_world": 1, "cp_rank": 0}),
    (decode, {"bf16q_fp8kv_transform_mode": "k_only"}), (decode, {"bf16q_fp8kv_transform_mode": "separate_kv"}),
    (decode, {"request_order": BUFFER, "request_order_plan": object()}),
]  # fmt: skip


@pytest.mark.parametrize("function, hint", HINTS, ids=lambda x: "-".join(x) if isinstance(x, dict) else x.__name__)
def test_hints_change_nothing(function, hint):
    want = results(function.__name__, (), inputs_of(function.__name__))
    got = results(function.__name__, (), inputs_of(function.__name__) | hint)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not BUFFER.any()


REFUSED = [
    (context, {"backend": "fa3"}, KeyError, "backend: 'fa3', must be one of auto, xqa, trtllm-gen, cake"),
    (decode, {"enable_block_sparse_attention": True}, NotImplementedError,
     "enable_block_sparse_attention: True, must be False"),
    (decode, {"enable_block_sparse_attention": "no"}, TypeError, "enable_block_sparse_attention: 'no', must be True"),
    (decode, {"cp_world": 2}, NotImplementedError, "cp_world: 2, must be 1"),
    (decode, {"cp_rank": 1}, NotImplementedError, "cp_rank: 1, must be 0"),
    (decode, {"causal_seqlens_kv_global": BUFFER}, NotImplementedError,
     "causal_seqlens_kv_global: Tensor, must be None"),
    (decode, {"bf16q_fp8kv_transform_mode": "both"}, ValueError,
     "bf16q_fp8kv_transform_mode: 'both', must be one of None, k_only, separate_kv"),
]  # fmt: skip


@pytest.mark.parametrize("function, change, error, message", REFUSED)
def test_what_would_change_results_is_refused(launches, function, change, error, message):
    """With a plan of the good call, too."""
    inputs = inputs_of(function.__name__)
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            function(**inputs | change)
        assert not launches
        function(**inputs)
        launches.clear()


# ---- numbers

ONE = {"window_left": np.int64(3), "bmm1_scale": np.float32(0.25), "bmm2_scale": np.float16(0.5)}
NUMBERS = [
    (context, {**ONE, "max_q_len": np.int32(2), "batch_size": np.int64(2), "logits_soft_cap": np.float32(4)}),
    (decode, {**ONE, "max_q_len": np.int64(2), "logits_soft_cap": np.float32(4),
              "skip_softmax_threshold_scale_factor": np.float32(0.5)}),
    (decode, {"max_q_len": None, "cum_seq_lens_q": None, "q_len_per_req": np.int64(2), "o_scale": np.float32(2)}),
    (xqa, {"num_kv_heads": np.int64(2), "page_size": np.int32(16), "sliding_win_size": np.int64(3),
           "q_seq_len": np.uint8(1), "q_scale": np.float32(0.25), "kv_scale": np.float16(0.5),
           "rcp_out_scale": np.float32(1)}),
]  # fmt: skip


@pytest.mark.parametrize("function, numbers", NUMBERS, ids=lambda x: "" if isinstance(x, dict) else x.__name__)
def test_numbers_of_numpy(launched, function, numbers):
    """As Python's own, without a launch and with one, whose arguments are Python's."""
    inputs = inputs_of(function.__name__)
    if "q_len_per_req" in numbers:
        inputs = cases.as_decode(cases.make_inputs(replace(PLAIN, q_lens=(2, 2))))
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in numbers.items()}
    want = results(function.__name__, (), inputs | plain)
    for _ in range(2):  # a new plan, perhaps, then the same one
        got = results(function.__name__, (), inputs | numbers)
        assert all(map(same, got, want)) and len(got) == len(want)
    if launched is not None:
        assert len(launched) == 3
        assert not any(isinstance(value, np.generic) for launch in launched for value in vars(launch).values())


NESTED = torch.nested.nested_tensor([torch.zeros(2, 64), torch.zeros(3, 64)]).half()
JAGGED = torch.nested.nested_tensor([torch.zeros(2, 64), torch.zeros(3, 64)], layout=torch.jagged).half()
ODD = [  # what raised errors of torch's or Python's own
    (xqa, {"q": torch.zeros(3, 1, 4, 0).half(), "output": torch.zeros(3, 1, 4, 0).half()}, "q: shape .3, 1, 4, 0."),
    (xqa, {"seq_lens": torch.ones(3, 2, dtype=torch.int32)}, "seq_lens: shape .3, 2., must be .3, 1. .batch, 1."),
    (wrappers.top_k_per_row_decode, {"seq_lens": torch.ones(4, 1, dtype=torch.int32).to_sparse()}, "seq_lens: layout"),
    *((f, {name: bad}, f"{name}: layout nested") for bad in (NESTED, JAGGED)
      for f, name in ((context, "query"), (decode, "query"), (xqa, "q"), (wrappers.top_k, "input"))),
    (decode, {"bmm1_scale": "x", "bmm1_scale_log2": torch.ones(1)}, "bmm1_scale: 'x', must be a float"),
    (decode, {"bmm1_scale": torch.ones(2), "bmm1_scale_log2": torch.ones(1)}, "bmm1_scale: shape"),
]  # fmt: skip


@pytest.mark.parametrize("function, change, message", ODD)
def test_odd_arguments_are_refused_by_name(launched, function, change, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        function(**inputs_of(function.__name__) | change)


@pytest.mark.parametrize("value", [torch.tensor(4.0), torch.tensor([4.0, 5.0]), True, "4", -1.0, float("nan")], ids=str)
@pytest.mark.parametrize("name", ["logits_soft_cap", "skip_softmax_threshold_scale_factor"])
def test_amounts_are_floats(launches, name, value):
    """No tensors, which a plan could not be found by; with a plan of the same amount, too."""
    inputs = inputs_of(decode.__name__)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: .*, must be"):
            decode(**inputs | {name: value})
        decode(**inputs | {name: 4.0})
    decode(**inputs | {name: 4})
    assert len(launches) == 3


@pytest.mark.parametrize("function", [context, decode])
def test_a_window_of_none_is_off(launched, function):
    inputs = inputs_of(function.__name__)
    want = results(function.__name__, (), inputs | {"window_left": -1})
    assert torch.equal(results(function.__name__, (), inputs | {"window_left": None})[0], want[0])
