"""Launches that layers keep of themselves: which step repeats them, what is bound anew, and what is forgotten.

Kernels are emulated on the CPU, so results count. test_integration_vllm.py has the same of vLLM's layers.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode_wrapper import decode_of
from tests.host.test_signatures import same
from tests.support.emulated import PLAIN, emulation, inputs_of
from wrappers import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from wrappers.attention import op
from wrappers.attention.bound import LayerLaunch, StepTensors
from wrappers.host import machine
from wrappers.own.registry import call_of

FUNCTIONS = {"context": trtllm_batch_context_with_kv_cache, "decode": trtllm_batch_decode_with_kv_cache}
INPUTS = {"context": inputs_of, "decode": lambda *given, **changes: decode_of(*given or (PLAIN,), **changes)}
TENSORS = ("bmm1_scale", "bmm2_scale", "sinks", "kv_cache_sf")


class Layer:
    """A layer with a cache, as an engine's plugin calls it."""

    def __init__(self, name, inputs):
        self.function, self.inputs, self.launch = FUNCTIONS[name], inputs, LayerLaunch()

    def step(self, asked=(), **changes):
        """The output of a step; `asked` names options among the changes."""
        given = self.inputs | changes
        step = StepTensors(*(given[n] for n in ("query", "block_tables", "seq_lens", "cum_seq_lens_q", "out")))
        cache = given["kv_cache"] if isinstance(given["kv_cache"], tuple) else (given["kv_cache"],)
        tensors = *cache, *(given.get(n) if isinstance(given.get(n), torch.Tensor) else None for n in TENSORS)
        return self.launch.serve(
            step, (*asked, given.get("max_q_len")), tensors, lambda: call_of(self.function, **given)
        )

    def fresh(self, **changes):
        """The same of a machine that has served no call."""
        with emulation():
            return op.serve(call_of(self.function, **self.inputs | changes))


@pytest.fixture(params=FUNCTIONS)
def layer(request):
    return Layer(request.param, INPUTS[request.param](out=None, lse=None, return_lse=False))


def warm(layer, times=2, **changes):
    for _ in range(times):
        layer.step(**changes)


def test_the_third_step_repeats_the_launch(launches, looked_up, layer):
    counts = []
    for seed in range(4):
        q = torch.randn(layer.inputs["query"].shape, generator=torch.Generator().manual_seed(seed))
        q = q.to(layer.inputs["query"].dtype)
        looked_up.clear()
        got = layer.step(query=q)
        counts.append(len(looked_up))
        assert same(got, layer.fresh(query=q))
    assert counts == [1, 2, 0, 0], "the second step binds the launch, too"


def test_a_step_may_change_its_tensors(launches, looked_up, layer):
    warm(layer)
    looked_up.clear()
    given = {n: layer.inputs[n] for n in ("block_tables", "seq_lens", "cum_seq_lens_q")}
    given = {n: None if t is None else t.clone() for n, t in given.items()}
    given["seq_lens"] -= 1
    out = torch.full_like(layer.inputs["query"], torch.nan)
    assert layer.step(**given, out=out) is out and not looked_up
    assert same(out, layer.fresh(**given))


def test_other_shapes_are_looked_up(launches, looked_up, layer):
    """A batch of another size, and then the first one again."""
    warm(layer)
    other = replace(PLAIN, q_lens=(3, 4, 2), kv_lens=(20, 31, 2))
    more = INPUTS["context" if "batch_size" in layer.inputs else "decode"](other, out=None, lse=None, return_lse=False)
    more |= {"kv_cache": layer.inputs["kv_cache"], "block_tables": more["block_tables"].clamp(max=3)}
    assert same(layer.step(**more), layer.fresh(**more))
    looked_up.clear()
    assert same(layer.step(), layer.fresh()) and looked_up


def test_another_table_of_the_same_batch_is_looked_up(launches, looked_up, layer):
    """Its width is part of the plan."""
    warm(layer)
    table = torch.nn.functional.pad(layer.inputs["block_tables"], (0, 3))
    looked_up.clear()
    assert same(layer.step(block_tables=table), layer.fresh(block_tables=table)) and looked_up


def test_what_is_asked_counts(launches, layer):
    warm(layer, asked=(0.25,))
    got = layer.step(asked=(0.5,), bmm1_scale=0.5)
    assert same(got, layer.fresh(bmm1_scale=0.5)) and not same(got, layer.fresh())


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("argument", TENSORS[:3])
def test_values_of_tensors_are_read_at_each_step(launches, layer, argument, on_host, monkeypatch):
    monkeypatch.setattr(type(machine.current), "is_host", lambda _, t: on_host)
    given = torch.ones(4 if argument == "sinks" else 1)
    warm(layer, **{argument: given})
    given *= 3
    assert same(layer.step(**{argument: given}), layer.fresh(**{argument: given}))


@pytest.mark.parametrize("how", ["set_", "data"])
@pytest.mark.parametrize("argument", [*TENSORS[:3], "kv_cache"])
def test_tensors_that_get_other_memory(launches, layer, argument, how):
    """A launch has views of scales and of caches, which would stay at the old memory."""
    if argument == "kv_cache":
        cache = layer.inputs["kv_cache"]
        given = cache[0] if isinstance(cache, tuple) else cache
    else:
        given = torch.rand(4) if argument == "sinks" else torch.tensor([[0.25]])
        layer.inputs = layer.inputs | {argument: given}
    warm(layer, 3)
    before, other = layer.step(), (given.nan_to_num().float() * 3 + 1).to(given.dtype)
    if how == "set_":
        given.set_(other)
    else:
        given.data = other
    got = layer.step()
    assert not same(got, before) and same(got, layer.fresh())


def test_a_cache_in_the_place_of_another(launches, layer):
    warm(layer)
    cache = layer.inputs["kv_cache"]
    other = tuple(t.nan_to_num() * 2 for t in cache) if isinstance(cache, tuple) else cache.nan_to_num() * 2
    assert same(layer.step(kv_cache=other), layer.fresh(kv_cache=other))


def test_a_cache_is_free_once_its_launch_is_forgotten(launches):
    layer = Layer("decode", INPUTS["decode"](out=None, lse=None, return_lse=False))
    cache = layer.inputs.pop("kv_cache")
    cache = tuple(t.clone() for t in cache) if isinstance(cache, tuple) else cache.clone()
    warm(layer, 3, kv_cache=cache)
    assert layer.launch._launch is not None
    gone = weakref.ref((cache[0] if isinstance(cache, tuple) else cache).untyped_storage())
    launches.clear()
    layer.launch.forget()
    del cache
    gc.collect()
    assert gone() is None


def test_a_query_and_outputs_are_not_kept(launches, layer):
    q = layer.inputs.pop("query").clone()
    out = torch.empty_like(q)
    warm(layer, 3, query=q, out=out)
    launches.clear()
    gone = weakref.ref(q.untyped_storage()), weakref.ref(out.untyped_storage())
    del q, out
    gc.collect()
    assert [found() for found in gone] == [None, None]


def test_nothing_is_kept_of_a_capture(launches, layer, monkeypatch):
    monkeypatch.setattr(type(machine.current), "may_keep", lambda *_: False)
    warm(layer, 3)
    assert layer.launch._launch is None and layer.launch._asked is None


def test_a_call_that_cannot_be_bound_is_tried_once(launches, looked_up, layer):
    layer.inputs = layer.inputs | {"out_dtype": torch.float8_e4m3fn}
    warm(layer)
    looked_up.clear()
    warm(layer, 3)
    assert len(looked_up) == 3


def test_queries_that_require_grad_are_refused(launches, layer):
    warm(layer, 3)
    with pytest.raises(RuntimeError, match="^query: requires grad"):
        layer.step(query=layer.inputs["query"].clone().requires_grad_())


def test_an_output_that_overlaps_is_refused(launches, layer):
    warm(layer, 3)
    with pytest.raises(ValueError, match="^out: "):
        layer.step(out=layer.inputs["query"])
