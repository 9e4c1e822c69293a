"""Launches that are kept: `bind`, and the runs of the classes. Kernels are emulated on the CPU, so results count."""

import contextlib
import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import wrappers
from tests.attention.test_decode_wrapper import decode_of, xqa_inputs
from tests.host.test_signatures import same
from tests.support.emulated import PLAIN, emulation, inputs_of
from tests.support.fake_machine import FakeMachine
from tests.support.good_calls import BOUND
from tests.support.good_calls import inputs_of as inputs_of_function
from tests.support.prefill_batches import HKV, HQ, WORKSPACE, Case, D
from wrappers import BatchDecodeWithPagedKVCacheWrapper as Decode
from wrappers import (
    bind,
    reference,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from wrappers.host import machine
from wrappers.own.registry import CACHE_WRITE, TOP_K, row_of

CONTEXT, DECODE = trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
CALLS = {
    "context": lambda: (CONTEXT, inputs_of(out=None, lse=None)),
    "decode": lambda: (DECODE, decode_of(PLAIN, out=None, lse=None)),
    "sinks": lambda: (CONTEXT, inputs_of(out=None, lse=None, sinks=torch.ones(4))),
}


def equal(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", CALLS)
def test_other_queries(launches, looked_up, name):
    function, inputs = CALLS[name]()
    layer = bind(function, **inputs)
    assert not launches and len(looked_up) == 1
    for seed in range(3):
        q = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(seed)).to(inputs["query"].dtype)
        got = layer.run(q)
        assert len(looked_up) == 1
        assert equal(got, function(**inputs | {"query": q}))
        looked_up.clear()
        looked_up.append(None)


@pytest.mark.parametrize("name", CALLS)
def test_outputs_that_are_given_are_filled(launches, name):
    function, inputs = CALLS[name]()
    layer, want = bind(function, **inputs), function(**inputs)
    o, lse = want
    out, of_lse = torch.full_like(o, torch.nan), torch.full_like(lse, torch.nan)
    got = layer.run(inputs["query"], out, of_lse)
    assert got[0] is out and got[1] is of_lse and equal(got, want)


def test_values_that_change_in_place(launches):
    """Lengths, page ids and the cache are read at each launch."""
    function, inputs = CALLS["decode"]()
    layer = bind(function, **inputs)
    first = layer.run(inputs["query"])
    inputs["seq_lens"] -= 1
    second = layer.run(inputs["query"])
    assert equal(second, function(**inputs)) and not equal(first, second)


def test_another_number_of_tokens_is_served_as_by_the_function(launches):
    function, inputs = CALLS["context"]()
    layer, q = bind(function, **inputs), torch.cat([inputs["query"]] * 2)
    assert equal(layer.run(q), function(**inputs | {"query": q}))


def test_what_does_not_fit_is_refused_by_name(launches):
    function, inputs = CALLS["context"]()
    layer, q = bind(function, **inputs), inputs["query"]
    with pytest.raises(ValueError, match=r"^query: shape .* must have 3 dimensions"):
        layer.run(q[0])
    with pytest.raises(TypeError, match="^query: dtype torch.float32"):
        layer.run(q.float())
    with pytest.raises(TypeError, match="^kv_cache: with query torch.float16, dtype torch.bfloat16"):
        layer.run(q.half())
    with pytest.raises(ValueError, match="^out: shape"):
        layer.run(q, torch.empty(1, 2, 3, dtype=q.dtype))
    with pytest.raises(ValueError, match="^out: shape .* overlaps the memory of query"):
        layer.run(q, q)
    with pytest.raises(ValueError, match="^lse: shape"):
        layer.run(q, None, torch.empty(3, 4))
    with pytest.raises(RuntimeError, match="^query: requires grad"):
        layer.run(q.clone().requires_grad_())
    assert not launches
    with pytest.raises(ValueError, match="^batch_size"):
        bind(function, **inputs | {"batch_size": 9})
    with pytest.raises(TypeError, match="^function: len, must be one of trtllm_batch_context_with_kv_cache"):
        bind(len, q)


def test_another_type_of_output(launches):
    """The call's plan has one type of output; a given tensor of another one gets its own plan."""
    function, inputs = CALLS["context"]()
    layer, out = bind(function, **inputs | {"return_lse": False}), torch.empty(42, 4, 64, dtype=torch.float16)
    assert layer.run(inputs["query"], out) is out
    assert equal(out, function(**inputs | {"return_lse": False, "out_dtype": torch.float16}))


def test_the_reference_runs_without_a_kernel():
    function, inputs = CALLS["context"]()
    assert equal(bind(function, **inputs).run(inputs["query"]), function(**inputs))


def test_nothing_is_kept_of_a_capture(launches, here, looked_up):
    function, inputs = CALLS["context"]()
    here.capturing = True
    layer = bind(function, **inputs)
    here.capturing = False
    layer.run(inputs["query"])
    assert len(looked_up) == 2


@pytest.mark.parametrize("name", CALLS)
def test_a_bound_call_may_be_copied_and_sent(foreign, launches, looked_up, name):
    """A copy binds at its first run, and not again."""
    function, inputs = CALLS[name]()
    layer = bind(function, **inputs)
    want = layer.run(inputs["query"])
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        looked_up.clear()
        assert equal(other.run(inputs["query"]), want) and len(looked_up) == 1
        assert equal(other.run(inputs["query"]), want) and len(looked_up) == 1


def test_a_copy_binds_at_its_first_run_of_the_shape_that_was_bound(launches, looked_up, here):
    """Another number of tokens, a capture and a bad query do not take the copy's launch away."""
    function, inputs = CALLS["context"]()
    q, layer = inputs["query"], bind(function, **inputs)
    want, other = layer.run(q), copy.copy(layer)
    other.run(q[:2])
    with pytest.raises((TypeError, ValueError), match="^query: "):
        other.run("query")
    here.capturing = True
    assert equal(other.run(q), want)
    here.capturing = False
    assert other._launch is None and equal(other.run(q), want) and other._launch is not None
    looked_up.clear()
    assert equal(other.run(q), want) and not looked_up
    with pytest.raises(TypeError, match="^query: str, must be a torch.Tensor"):
        other.run("query")


def test_a_bound_top_k_may_be_copied_and_sent(foreign):
    scores = torch.randn(3, 50)
    with machine.override(FakeMachine(lambda op, spec: reference.top_k_rows)):
        layer = bind(wrappers.top_k, scores, 5)
        want = layer.run(scores)
        for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert equal(other.run(scores[:2]), tuple(t[:2] for t in want)) and other._plan is None
            with pytest.raises(TypeError, match="^input: str, must be a torch.Tensor"):
                other.run("scores")
            assert equal(other.run(scores), want) and other._plan is not None and equal(other.run(scores), want)
        with pytest.raises(RuntimeError, match="^input: requires grad"):
            layer.run(scores.clone().requires_grad_())


def test_top_k():
    scores = torch.randn(3, 50)
    layer = bind(wrappers.top_k, scores, 5)
    other = torch.randn(3, 50)
    assert equal(layer.run(other), wrappers.top_k(other, 5))
    lengths, indices = torch.tensor([50, 20, 3]).int(), torch.empty(3, 5, dtype=torch.int32)
    layer = bind(wrappers.persistent_topk, scores, lengths, indices, None, 5, 50)
    assert layer.run(other) is None
    want = torch.empty_like(indices)
    wrappers.persistent_topk(other, lengths, want, None, 5, 50)
    assert equal(indices, want)
    assert layer.run(scores, want) is None and not equal(indices, want)
    with pytest.raises(TypeError, match="^logits: dtype"):
        layer.run(other.double())


# ---- every public function


def bound_case(name):
    """Arguments of a function, those of a run of its bound call, and the arguments that a run replaces."""
    inputs, row = inputs_of_function(name), row_of(getattr(wrappers, name))
    if row.family == CACHE_WRITE:
        names = [inputs.get("q"), *(t for n, t in inputs.items() if n in ("k", "v", "append_key", "append_value"))]
        return inputs, names, {}
    if name == "flash_attn_with_kvcache":
        inputs = {n: value for n, value in inputs.items() if n not in ("k", "v", "cu_seqlens_k_new")}
    first = next(iter(inputs))
    if name == "trtllm_fmha_v2_prefill":
        return inputs, [inputs["qkv"][0] * 2], {"qkv": (inputs["qkv"][0] * 2, inputs["qkv"][1])}
    scale = inputs[first] * 2 if inputs[first].dtype.itemsize > 1 else inputs[first]
    return inputs, [scale], {first: scale}


@pytest.fixture
def selecting():
    """A machine with top-k kernels that compute in torch."""
    with machine.override(FakeMachine(lambda op, spec: reference.top_k_rows)) as here:
        yield here


def copied(inputs):
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, inputs)


def flag_of(name):
    """The flag by which a function returns its LSE, None if it has none."""
    flags = {"return_lse", "return_softmax_lse"} & inspect.signature(getattr(wrappers, name)).parameters.keys()
    return max(flags, default=None)


@pytest.mark.parametrize("machine_of", ["launches", "reference"])
@pytest.mark.parametrize("name, lse", [(n, lse) for n in BOUND for lse in (False, True) if not lse or flag_of(n)])
def test_every_function_can_be_bound(request, name, machine_of, lse):
    """A run returns and writes what the function does."""
    if machine_of == "launches":
        request.getfixturevalue("selecting" if row_of(getattr(wrappers, name)).family == TOP_K else "launches")
    function, (inputs, run, changed) = getattr(wrappers, name), bound_case(name)
    inputs |= {flag_of(name): True} if lse else {}
    inputs = {n: value for n, value in inputs.items() if n not in ("out", "lse")}
    twice = copied(inputs)
    layer = bind(function, **inputs)
    for _ in range(2):
        got, want = layer.run(*run), function(**twice | changed)
        assert (got is None) == (want is None)
        assert all(map(same, tree_leaves(got), tree_leaves(want)) if got is not None else ())
    written = [n for n in inputs if n not in changed]
    pairs = zip(tree_leaves([inputs[n] for n in written]), tree_leaves([twice[n] for n in written]), strict=True)
    assert all(same(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def equal_rows(**options):
    """A call of flash_attn_func."""
    q, k, v = (torch.randn(2, n, heads, 64).half() for n, heads in ((3, 4), (9, 2), (9, 2)))
    return q, bind(wrappers.flash_attn_func, q, k, v, **options), lambda q, **g: wrappers.flash_attn_func(q, k, v, **g)


def test_results_of_another_shape(launches, foreign):
    q, layer, function = equal_rows(return_lse=True)
    for bound_call in (layer, copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        out = torch.full_like(q, torch.nan)
        got = bound_call.run(q, out)
        assert got[0] is out and equal(got, function(q, return_lse=True)) and bound_call._launch is not None
    with pytest.raises(ValueError, match=r"^q: shape \(2, 2, 4, 64\), must begin with \(2, 3\)"):
        layer.run(q[:, :2])
    with pytest.raises(ValueError, match="^q: shape .* must have 4 dimensions"):
        layer.run(q[0])
    with pytest.raises(ValueError, match="^out: shape"):
        layer.run(q, q[:1])
    with pytest.raises(TypeError, match="^lse: Tensor, must be None"):
        layer.run(q, None, torch.zeros(6, 4))


def test_xqa_writes_the_output_of_the_call_or_of_the_run(launches):
    inputs, _ = xqa_inputs()
    layer, other = bind(wrappers.xqa, **inputs), torch.full_like(inputs["output"], torch.nan)
    assert layer.run(inputs["q"]) is None and layer.run(inputs["q"], other) is None
    assert equal(other, inputs["output"]) and not other.isnan().any()
    with pytest.raises(ValueError, match="^q: 1 requests, must be"):
        layer.run(inputs["q"][:1], other[:1])


def test_what_has_two_launches_is_not_bound():
    q, k = torch.zeros(2, 1, 4, 64).half(), torch.zeros(2, 1, 2, 64).half()
    cache, lens = torch.zeros(2, 8, 2, 64).half(), torch.zeros(2, dtype=torch.int32)
    function = wrappers.flash_attn_with_kvcache
    with pytest.raises(NotImplementedError, match="^k: Tensor, not supported by bind, must be None"):
        bind(function, q, cache, cache, k, k, cache_seqlens=lens)
    with pytest.raises(NotImplementedError, match="^cache_leftpad: given, not supported by bind, must be None"):
        bind(function, q, cache, cache, cache_seqlens=lens, cache_leftpad=lens)


# ---- runs of the classes


def paged(case, **options):
    wrapper = case.paged(causal=True, **options)
    return lambda q=case.q, cache=tuple(case.cache), **given: wrapper.run(q, cache, **given)


def ragged(case, **options):
    wrapper = case.ragged(causal=True, **options)
    return lambda q=case.q, cache=(case.k, case.v), **given: wrapper.run(q, *cache, **given)


@pytest.fixture
def case():
    return Case(dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", [paged, ragged])
def test_runs_of_other_layers(here, looked_up, case, kind):
    """Each layer has a cache, an output and a query of its own; only the first run looks for a plan."""
    run = kind(case)
    first = run()
    assert len(looked_up) == 1
    rows = case.cache if kind is paged else (case.k, case.v)
    cache, q = tuple(2 * t.nan_to_num() for t in rows), -case.q
    out = torch.full_like(first, torch.nan)
    assert run(q, cache, out=out) is out and len(looked_up) == 1
    assert equal(out, kind(case)(q, cache)) and not equal(out, first)


@pytest.mark.parametrize("kind", [paged, ragged])
def test_other_arguments_are_not_those_of_the_last_run(here, case, kind):
    run = kind(case)
    for options in ({}, {"return_lse": True}, {"sinks": torch.ones(HQ)}, {"k_scale": 2.0}, {}, {"enable_pdl": False}):
        assert equal(run(**options), kind(case)(**options)), options
        assert equal(run(**options), kind(case)(**options)), options


@pytest.mark.parametrize("kind", [paged, ragged])
def test_scales_in_tensors_are_read_at_each_run(case, kind):
    run, scale, others = kind(case), torch.ones(1), torch.ones(HKV)
    with emulation("sm_100a"):  # kernels there take one scale per head
        for value in (1.0, 3.0):
            scale.fill_(value)
            others.fill_(value)
            assert equal(run(k_scale=scale, v_scale=scale), kind(case)(k_scale=value, v_scale=value))
            want = kind(case)(q_scale=value, k_scale=torch.full((HKV,), value))
            assert equal(run(q_scale=scale, k_scale=others), want)


@pytest.mark.parametrize("kind", [paged, ragged])
def test_runs_refuse_what_their_plan_does_not_fit(here, case, kind):
    run, rows = kind(case), case.cache if kind is paged else (case.k, case.v)
    run()
    for bad in (case.q[1:], case.q[:, :1]):
        with pytest.raises(ValueError, match="^q: "):
            run(bad)
    with pytest.raises(ValueError, match=r"^q\.dtype: torch.float16, must be plan's q_data_type"):
        run(case.q.half())
    with pytest.raises(ValueError, match="must be plan's"):
        run(case.q, tuple(t[..., :-8] for t in rows))
    assert equal(run(), kind(case)())


@pytest.mark.parametrize("kind", [paged, ragged])
def test_a_query_and_keys_are_not_kept(here, case, kind):
    """Those of a prefill batch may take gigabytes."""
    run = kind(case)
    rows = tuple(t.clone() for t in (case.cache if kind is paged else (case.k, case.v)))
    q, out = case.q.clone(), torch.empty_like(run())
    for _ in range(2):
        run(q, rows, out=out)
    gone = [weakref.ref(t.untyped_storage()) for t in (q, out, *rows)]
    here.launches.clear()
    del q, out, rows
    gc.collect()
    assert [found() for found in gone] == [None] * 4


@pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])
def test_every_other_argument_of_run_is_compared(here, case, kind, monkeypatch):
    """An argument that is left out would have the value of the last run."""
    wrapper = Decode(WORKSPACE, case.layout) if kind == "decode" else getattr(case, kind)(causal=True)
    if kind == "decode":
        wrapper.plan(case.page_indptr, case.indices, case.last, HQ, HKV, D, case.page)
    seen = []
    monkeypatch.setattr(wrapper, "_repeat", lambda q, kv, out, lse, others: seen.append(others))
    cache = (case.k, case.v) if kind == "ragged" else (tuple(case.cache),)
    own = {"q", "paged_kv_cache", "k", "v", "out", "lse"}
    for name in inspect.signature(wrapper.run).parameters.keys() - own:
        mark = object()
        with contextlib.suppress(Exception):  # no argument may be an object
            wrapper.run(case.q, *cache, **{name: mark})
        assert any(value is mark for value in seen[-1]), name


def test_sinks_that_require_grad_later_are_refused(here, case):
    run, sinks = paged(case), torch.ones(HQ)
    run(sinks=sinks)
    run(sinks=sinks)
    sinks.requires_grad_()
    with pytest.raises(RuntimeError, match="^sinks: requires grad"):
        run(sinks=sinks)


def test_a_new_plan_forgets_the_last_run(here, case):
    wrapper, other = case.paged(causal=True), Case(dtype=torch.bfloat16, q_lens=(2, 1), kv_lens=(4, 8), seed=1)
    wrapper.run(case.q, tuple(case.cache))
    wrapper.plan(*other.index, HQ, HKV, D, other.page, causal=True, **other.options)
    assert equal(wrapper.run(other.q, tuple(other.cache)), other.paged(causal=True).run(other.q, tuple(other.cache)))
