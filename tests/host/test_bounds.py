"""All that is kept between calls has a bound: here calls of every public function drive it past that, and each later
call, of whatever function, gives what it gives as the first call of a process."""

from typing import NamedTuple

import pytest
import torch

import wrappers
from tests.support.bad_values import Kernels, one_thread  # noqa: F401
from tests.support.layout_calls import CALLS, FUNCTION, UNSERVED
from tests.support.layouts import CPU, outcome, placed, values_of
from wrappers.attention import call as attention_call
from wrappers.attention.bound import LayerLaunch, StepTensors
from wrappers.flashinfer.trtllm import decode_call
from wrappers.host import machine, overlap, runtime, scratch


class Spec(NamedTuple):
    number: int


SERVED = [names for names in CALLS if names not in UNSERVED]
TINY = {  # owner and name of a bound -> its value here
    (machine.HostMachine, "max_plans"): 3, (scratch, "MAX_STREAMS"): 2, (attention_call, "MOST_KEPT"): 2,
    (attention_call, "MOST_NUMBERS"): 3,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    for (owner, name), value in TINY.items():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(attention_call, "_numbers", {})
    monkeypatch.setattr(attention_call, "_kept", ())


def made(here, names):
    """What a call of a function gives on a machine, with arguments that are made anew."""
    with machine.override(here):
        return outcome(FUNCTION[names[0]], CALLS[names](), CPU)


@pytest.fixture(scope="module")
def firsts():
    """What each call gives as the first one of a process."""
    return {names: made(Kernels(), names) for names in SERVED}


def within_bounds(here):
    sizes = [len(kept) for kept in (here.plans, here.offsets, here.constants, attention_call._numbers)]
    assert max(sizes) <= 3 and len(attention_call._kept) <= 2
    assert len(here.split_scratch) <= 2 and len(here.captures) <= 2


@pytest.mark.parametrize("capturing", [False, True])
def test_calls_past_every_bound(firsts, tiny, capturing):
    """On streams in turn, and in captures of them."""
    here = Kernels()
    for turn, order in enumerate((SERVED, SERVED[::-1], SERVED[::2])):
        for number, names in enumerate(order):
            here.stream, here.capture = (number + turn) % 5, turn
            here.capturing = capturing and turn > 0
            assert made(here, names) == firsts[names], names
            within_bounds(here)
    assert here.plans and here.split_scratch and here.captures or not capturing


def test_a_number_of_shapes_is_not_given_again(monkeypatch, tiny):
    """The plan of a call outlives it, and would serve a call of shapes that do not fit each other."""
    monkeypatch.setattr(attention_call, "MOST_NUMBERS", 1)
    name = "trtllm_batch_context_with_kv_cache"
    good, short = (CALLS[name, "scales"]() for _ in range(2))
    short["block_tables"] = short["block_tables"][:1]
    with machine.override(Kernels()):
        for _ in range(3):
            FUNCTION[name](**good)
            with pytest.raises(ValueError, match="block_tables: shape"):
                FUNCTION[name](**short)


def test_counters_past_their_number(firsts, tiny, monkeypatch):
    """Streams and captures take them for good. Without one, tiles go to CTAs in turn, and splits have new ones."""
    monkeypatch.setattr(Kernels, "max_counters", 20)
    here = Kernels()
    for number, names in enumerate(SERVED * 3):
        here.stream, here.capture = number, number // 3
        here.capturing = number >= len(SERVED) and number % 2 == 0
        assert made(here, names) == firsts[names], names
    (pool,) = here.counter_pools.values()
    assert pool.used == [20] and list(pool.of_stream.values()).count(-1) > 1


BINDABLE = [  # the scale factors of NVFP4 outputs have rows that nothing writes
    (function, call) for function, call in SERVED if call != "nvfp4 out" and function in (
        "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache", "flash_attn_varlen_func", "top_k",
        "append_qkv")
]  # fmt: skip


def test_launches_that_are_kept_outlive_what_their_machine_forgets(tiny):
    """Those of `bind`, and of a layer, whose shapes get another number."""
    here, given = Kernels(), {names: placed(CALLS[names](), CPU) for names in BINDABLE}
    runs = {}
    with machine.override(here):
        for names, arguments in given.items():
            layer = wrappers.bind(FUNCTION[names[0]], **arguments)
            first = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
            runs[names] = layer, first
        for names in SERVED:
            made(here, names)
        for names, (layer, first) in runs.items():
            rows = [given[names][n] for n in ("q", "k", "v")] if names[0] == "append_qkv" else [first]
            if names[1] == "latent" and names[0].startswith("flash_attn"):  # q and qv
                rows = [tuple(given[names][n] for n in ("q", "qv", "q_v") if n in given[names])]
            found = values_of(layer.run(*rows))
            assert found == values_of(FUNCTION[names[0]](**given[names])), names


def test_a_layer_after_other_calls(tiny):
    given = placed(CALLS["trtllm_batch_decode_with_kv_cache", "plain"](), CPU)
    q, kv, table, lens, starts = (
        given[n] for n in ("query", "kv_cache", "block_tables", "seq_lens", "cum_seq_lens_q")
    )  # fmt: skip
    layer, here = LayerLaunch(), Kernels()

    def call():
        return decode_call(q, kv, table, lens, 0.125, 1.0, max_q_len=2, cum_seq_lens_q=starts, out_dtype=q.dtype)

    def step():
        return layer.serve(StepTensors(q, table, lens, starts), (2,), kv, call)

    with machine.override(here):
        want = [step().clone() for _ in range(3)][0]
        assert layer._launch is not None
        for names in SERVED:
            made(here, names)
        lens[0] -= 1
        q.mul_(0.5)
        changed = step()
        assert not torch.equal(changed, want)
        layer.forget()
        assert torch.equal(changed, step())


def test_more_specs_than_are_remembered_by_identity(monkeypatch):
    """A spec that is freed may give its address to another."""
    monkeypatch.setattr(runtime, "HOT_LIMIT", 3)
    for name in ("_HOT", "_KERNELS"):
        monkeypatch.setattr(runtime, name, {})
    monkeypatch.setattr(runtime, "_obtain", lambda op, spec, arch: f"{op} {spec}")
    for number in [*range(10)] * 4:
        spec = Spec(number)  # equal to one of an earlier turn, at the address of another
        assert runtime.kernel("op", spec, "sm_90a") == f"op {spec}"
        assert len(runtime._HOT) <= 3
        del spec


def test_more_layouts_than_overlap_remembers():
    rows = torch.zeros(4, 64)
    for width in range(overlap._span.cache_info().maxsize + 1):
        overlap._span(torch.Size((2, 3)), (width + 3, 1), 4)
    parts = rows[:, :8], rows[:, 8:16], rows[:, 4:12]
    assert [overlap.overlap(parts[0], part) for part in parts] == [True, False, True]
