"""Launches that functions keep for the layers of a model: what is found again, what is not, and what is forgotten.

Kernels are emulated on the CPU, so results count.
"""

import gc
import inspect
import weakref
from dataclasses import replace

import pytest
import torch

from tests.emulated import PLAIN, emulation, inputs_of
from tests.test_decode_wrapper import decode_of
from wrappers import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from wrappers.attention import layers
from wrappers.host import machine

CONTEXT, DECODE = trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
FUNCTIONS = {"context": CONTEXT, "decode": DECODE}
INPUTS = {"context": inputs_of, "decode": lambda **given: decode_of(PLAIN, **given)}
# arguments that a step may change without another launch, and hints that have no meaning here
STEP = {"query", "kv_cache", "block_tables", "seq_lens", "cum_seq_lens_q", "max_q_len", "batch_size", "out", "lse"}
HINTS = {
    "workspace_buffer", "max_kv_len", "max_seq_len", "cum_seq_lens_kv", "multi_ctas_kv_counter_buffer",
    "request_order", "request_order_plan",
}  # fmt: skip
SF = torch.zeros(1)
CHANGES = {  # other values of all other arguments, good and bad ones
    "bmm1_scale": [0.5, 1, True, torch.tensor(2.0)], "bmm2_scale": [0.5, 2, torch.tensor(3.0)],
    "window_left": [0, 3, 2.5],
    "out_dtype": [torch.float16, "nvfp4"], "o_sf_scale": [1.0], "o_sf_vec_size": [16], "kv_layout": ["NHD", "x"],
    "enable_pdl": [False, 1], "sinks": [torch.ones(4), [torch.ones(4)], [torch.ones(4)] * 2], "kv_cache_sf": [SF],
    "skip_softmax_threshold_scale_factor": [0.0, -1.0], "uses_shared_paged_kv_idx": [False, 1], "causal": [False, 1],
    "return_lse": [False, 1], "use_fp16_softmax": [True, False], "uses_spcompress": [True], "backend": ["xqa", "x"],
    "logits_soft_cap": [3.0, -1.0], "kv_block_scales": [SF], "v_scales_interleaved": [True, 1],
    "alibi_slopes": [torch.ones(4), SF],
    "q_len_per_req": [2, "x"],
    "o_scale": [2.0, 0.0], "mask": [SF], "bmm1_scale_log2": [torch.ones(1), 1.0], "batch_invariant": [True, 1],
    "enable_block_sparse_attention": [True], "cp_world": [2], "cp_rank": [1], "causal_seqlens_kv_global": [SF],
    "bf16q_fp8kv_transform_mode": ["k_only", "x"],
}  # fmt: skip


def outcome(function, inputs):
    """The results of a call, or its error."""
    try:
        found = function(**inputs)
    except Exception as error:
        return type(error), str(error)
    found = found if isinstance(found, tuple) else (found,)
    return [t.data if hasattr(t, "original_shape") else t.clone() for t in found]


def equal(a, b):
    if isinstance(a, tuple) or isinstance(b, tuple):
        return a == b
    same = (x.shape == y.shape and torch.allclose(x, y, 0, 0, equal_nan=True) for x, y in zip(a, b))
    return len(a) == len(b) and all(same)


def fresh(function, inputs):
    """The outcome of a call on a machine that has made none."""
    with emulation():
        return outcome(function, inputs)


def warm(function, inputs, times=3):
    for _ in range(times):
        function(**inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_third_call_of_a_layer_repeats_its_launch(launches, looked_up, name):
    function, inputs = FUNCTIONS[name], INPUTS[name](out=None, lse=None)
    counts = []
    for seed in range(4):
        q = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(seed)).to(inputs["query"].dtype)
        looked_up.clear()
        got = outcome(function, inputs | {"query": q})
        counts.append(len(looked_up))
        assert equal(got, fresh(function, inputs | {"query": q}))
    assert counts == [1, 2, 0, 0], "the second call binds the launch, too"
    assert len(machine.current.layers) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_may_change_its_tensors(launches, looked_up, name):
    function, inputs = FUNCTIONS[name], INPUTS[name](out=None, lse=None)
    warm(function, inputs)
    looked_up.clear()
    step = dict(inputs)
    for key in ("block_tables", "seq_lens", "cum_seq_lens_q"):
        step[key] = None if step[key] is None else step[key].clone()
    step["seq_lens"] -= 1
    o = torch.full_like(inputs["query"], torch.nan)
    step |= {"out": o, "lse": torch.full(o.shape[:2], torch.nan)}
    got = outcome(function, step)
    assert not looked_up and got[0].data_ptr() != o.data_ptr()
    assert torch.equal(o, got[0]) and equal(got, fresh(function, step))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_separate_tables_of_k_and_v(launches, looked_up, name):
    inputs = INPUTS[name]() | {"uses_shared_paged_kv_idx": False}
    inputs["block_tables"] = inputs["block_tables"][:, None].repeat(1, 2, 1)
    first = outcome(FUNCTIONS[name], inputs)
    assert not isinstance(first, tuple)
    for call in range(2, 5):
        looked_up.clear()
        assert equal(outcome(FUNCTIONS[name], inputs | {"block_tables": inputs["block_tables"].clone()}), first)
        assert bool(looked_up) == (call == 2), f"call {call}"
    shared = inputs | {"uses_shared_paged_kv_idx": True}
    assert outcome(FUNCTIONS[name], shared)[0] is ValueError


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_batch_is_looked_up(launches, name):
    function = FUNCTIONS[name]
    inputs, other = INPUTS[name](out=None, lse=None), replace(PLAIN, q_lens=(3, 4, 2), kv_lens=(20, 31, 2))
    warm(function, inputs)
    more = inputs_of(other, out=None, lse=None) if name == "context" else decode_of(other, out=None, lse=None)
    more["kv_cache"] = inputs["kv_cache"]
    more["block_tables"] = more["block_tables"].clamp(max=3)
    assert equal(outcome(function, more), fresh(function, more))
    if name == "context":
        for bad in ({"batch_size": 9}, {"max_q_len": True}, {"batch_size": True}, {"max_q_len": 99}):
            assert equal(outcome(function, inputs | bad), fresh(function, inputs | bad)), bad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_named_here(name):
    assert inspect.signature(FUNCTIONS[name]).parameters.keys() <= STEP | HINTS | CHANGES.keys()


@pytest.mark.parametrize("argument", CHANGES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_value_of_an_option_counts(launches, name, argument):
    """A call with another option has the result, or the error, that it has on a machine without launches."""
    function = FUNCTIONS[name]
    if argument not in inspect.signature(function).parameters:
        return
    inputs = INPUTS[name](out=None, lse=None)
    warm(function, inputs)
    for value in CHANGES[argument]:
        changed = inputs | {argument: value}
        assert equal(outcome(function, changed), fresh(function, changed)), value
        assert equal(outcome(function, inputs), fresh(function, inputs))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scales_that_are_equal_floats_are_one_option(launches, looked_up, name):
    function, inputs = FUNCTIONS[name], INPUTS[name](out=None, lse=None)
    warm(function, inputs | {"bmm1_scale": float("0.25")})
    looked_up.clear()
    function(**inputs | {"bmm1_scale": float("0.25")})
    assert not looked_up
    function(**inputs | {"bmm1_scale": 0.5})
    assert looked_up


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("argument", ["bmm1_scale", "bmm2_scale", "sinks"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_tensors_are_read_at_each_call(launches, here, name, argument, on_host, monkeypatch):
    monkeypatch.setattr(type(machine.current), "is_host", lambda _, t: on_host)
    function, given = FUNCTIONS[name], torch.ones(4 if argument == "sinks" else 1)
    inputs = INPUTS[name](out=None, lse=None) | {argument: given}
    warm(function, inputs)
    given *= 3
    assert equal(outcome(function, inputs), fresh(function, inputs))
    if argument == "sinks" and name == "decode":
        held = [given]
        warm(function, inputs | {"sinks": held})
        held[0] = given * 2
        assert equal(outcome(function, inputs | {"sinks": held}), fresh(function, inputs | {"sinks": held}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_caches_that_change(launches, name):
    """Another tensor in the place of a freed one, and a tensor that was given other memory."""
    function, inputs = FUNCTIONS[name], INPUTS[name](out=None, lse=None)
    warm(function, inputs)
    cache = inputs["kv_cache"]
    pools = cache if isinstance(cache, tuple) else (cache,)
    for t in pools:
        t.set_((t.nan_to_num() * 2).clone())
    assert equal(outcome(function, inputs), fresh(function, inputs))
    both = tuple(t.clone() for t in (pools if len(pools) == 2 else pools[0].unbind(1)))
    for _ in range(4):  # a new tuple at each call
        pair = inputs | {"kv_cache": tuple(both)}
        assert equal(outcome(function, pair), fresh(function, pair))
        swapped = inputs | {"kv_cache": (both[0], both[1] * 2)}
        assert equal(outcome(function, swapped), fresh(function, swapped))


@pytest.mark.parametrize("how", ["set_", "data"])
@pytest.mark.parametrize("argument", ["bmm1_scale", "bmm2_scale", "sinks", "kv_cache_sf"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_get_other_memory(launches, name, argument, how):
    """A launch has views of scales and of factors, which would stay at the old memory."""
    case = replace(PLAIN, kv_dtype="nvfp4", cache="stacked") if argument == "kv_cache_sf" else PLAIN
    inputs = inputs_of(case) if name == "context" else decode_of(case)
    factors = inputs.pop("kv_block_scales" if name == "context" else "kv_cache_sf")
    inputs |= {"out": None, "lse": None, "kv_cache_sf": factors}
    if argument != "kv_cache_sf":
        inputs[argument] = torch.rand(4) if argument == "sinks" else torch.tensor([[0.25]])
    warm(FUNCTIONS[name], inputs)
    before, given = outcome(FUNCTIONS[name], inputs), inputs[argument]
    other = (given.view(torch.uint8) ^ 8).view(given.dtype)
    if how == "set_":
        given.set_(other)
    else:
        given.data = other
    got = outcome(FUNCTIONS[name], inputs)
    assert not equal(got, before) and equal(got, fresh(FUNCTIONS[name], inputs))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_caches_that_get_another_layout(launches, name):
    """At the same address: rows and heads of pages are swapped."""
    inputs = (inputs_of if name == "context" else decode_of)(replace(PLAIN, cache="tuple"), out=None, lse=None)
    warm(FUNCTIONS[name], inputs)
    for t in inputs["kv_cache"]:
        pages, heads, rows, dim = t.shape
        t.data = t.data.view(pages, rows, heads, dim).transpose(1, 2)
    assert equal(outcome(FUNCTIONS[name], inputs), fresh(FUNCTIONS[name], inputs))


@pytest.mark.parametrize("stacked", [True, False])
def test_what_is_kept_of_a_cache_is_forgotten_with_it(launches, stacked):
    inputs = INPUTS["decode"](out=None, lse=None)
    cache = inputs.pop("kv_cache")
    pools = cache if isinstance(cache, tuple) else tuple(cache.unbind(1))
    cache = torch.stack(pools, 1) if stacked else tuple(t.clone() for t in pools)
    warm(DECODE, inputs | {"kv_cache": cache})
    assert len(machine.current.layers) == 1
    launches.clear()
    storage = weakref.ref((cache if stacked else cache[0]).untyped_storage())
    del cache, pools
    gc.collect()
    assert machine.current.layers == {} and storage() is None


def test_a_query_and_outputs_are_not_kept(launches):
    inputs = INPUTS["decode"](lse=None)
    q, out = inputs.pop("query").clone(), inputs.pop("out").clone()
    warm(DECODE, inputs | {"query": q, "out": out})
    launches.clear()
    gone = weakref.ref(q), weakref.ref(out)
    del q, out
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_nothing_is_kept_of_a_capture(launches, here, monkeypatch):
    inputs = INPUTS["decode"](out=None, lse=None)
    monkeypatch.setattr(type(machine.current), "may_keep", lambda *_: False)
    warm(DECODE, inputs)
    assert machine.current.layers == {}


def test_a_call_that_cannot_be_bound_is_tried_once(launches, looked_up):
    inputs = INPUTS["decode"](out=None, lse=None, out_dtype=torch.float8_e4m3fn)
    warm(DECODE, inputs)
    looked_up.clear()
    warm(DECODE, inputs)
    assert len(looked_up) == 3


def test_queries_that_require_grad_are_refused(launches):
    inputs = INPUTS["decode"](out=None, lse=None)
    warm(DECODE, inputs)
    with pytest.raises(RuntimeError, match="^query: requires grad"):
        DECODE(**inputs | {"query": inputs["query"].clone().requires_grad_()})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_cache_is_refused_as_ever(launches, name):
    function, inputs = FUNCTIONS[name], INPUTS[name](out=None, lse=None)
    warm(function, inputs)
    for bad in ((), (inputs["kv_cache"],), [inputs["kv_cache"]], None, 3, "kv_cache"):
        found = outcome(function, inputs | {"kv_cache": bad})
        assert issubclass(found[0], (TypeError, ValueError)) and found[1].startswith("kv_cache")


def test_many_caches(launches, monkeypatch):
    monkeypatch.setattr(layers, "MOST_LAYERS", 3)
    inputs = INPUTS["decode"](out=None, lse=None)
    held = []
    for _ in range(5):
        cache = inputs["kv_cache"]
        held.append(tuple(t.clone() for t in cache) if isinstance(cache, tuple) else cache.clone())
        warm(DECODE, inputs | {"kv_cache": held[-1]})
        assert len(machine.current.layers) <= 3
