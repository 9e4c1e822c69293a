"""The host's work in planned calls, in plan and in scales stays small: counts of functions and torch operators, each
with a bound that planning again, one step of planning or one copy exceeds. `python -m bench` measures the times."""

from functools import partial

import pytest
import torch

import wrappers
from bench import append, merging
from bench.cases import topk as topk_cases
from tests.attention.test_decode_wrapper import decode_of, xqa_inputs
from tests.attention.test_low_precision import OF_HEADS
from tests.support import good_calls, rope_calls
from tests.support.emulated import PLAIN, inputs_of
from tests.support.host_work import Work, count_functions, host_work, operators_of
from tests.support.prefill_batches import HKV, HQ, WORKSPACE, Case, D
from wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    bind,
    flash_attn_func,
    flash_attn_with_kvcache,
    merge_state_in_place,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa,
)
from wrappers.attention import call, op
from wrappers.flash_attn import append as flash_attn_append
from wrappers.flashinfer import values
from wrappers.topk import op as topk_op

# ---- the counts themselves


def test_a_copy_adds_an_operator():
    x = torch.ones(4)
    assert host_work(lambda: x).operators == 0
    assert host_work(x.clone).operators == 1
    assert host_work(lambda: x.clone().clone()).operators == 2
    assert host_work(lambda: torch.empty_like(x)[1:]).operators == 2  # an allocation and a view


# ---- planned calls


def context(**changes):
    inputs = inputs_of(**changes)
    return lambda: trtllm_batch_context_with_kv_cache(**inputs)


def decode():
    inputs = decode_of(PLAIN)
    return lambda: trtllm_batch_decode_with_kv_cache(**inputs)


def mla(name):
    """With and without views of the query and the output."""
    inputs = good_calls.mla(name)
    return lambda: getattr(wrappers, name)(**inputs)


def xqa_call():
    inputs, _ = xqa_inputs()
    return lambda: xqa(**inputs)


def paged_run():
    case = Case()
    wrapper, cache = case.paged(causal=True), tuple(case.cache)
    return lambda: wrapper.run(case.q, cache)


def ragged_run():
    case = Case()
    wrapper = case.ragged(causal=True)
    return lambda: wrapper.run(case.q, case.k, case.v)


def decode_run():
    case = Case(q_lens=(1, 1), kv_lens=(4, 8))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, case.layout)
    wrapper.plan(case.page_indptr, case.indices, case.last, HQ, HKV, D, case.page)
    return lambda: wrapper.run(case.q, tuple(case.cache))


def bound():
    inputs = inputs_of(out=None, lse=None)
    launch = bind(trtllm_batch_context_with_kv_cache, **inputs)
    return lambda: launch.run(inputs["query"])


def bound_top_k():
    inputs = topk_cases.make_inputs(topk_cases.PLAIN[topk_cases.TOP_K])
    launch = bind(wrappers.top_k, **inputs)
    return lambda: launch.run(inputs["input"])


def bound_append():
    """Rows, slots and positions that are given at each run; the views of 64-bit indices as words, and of factors."""
    return append.bound_by_slots(append.make("append-normrope-fp8-n64-h32x8-d128-p16", "cpu", 0))


def equal_rows(*rows):
    """Queries, keys and values of two requests of one length each, for FlashAttention's functions."""
    return [torch.ones(2, n, HKV * (2 if i == 0 else 1), 64).half() for i, n in enumerate(rows)]


def flash(queries, **options):
    q, k, v = equal_rows(queries, 256, 256)
    return lambda: flash_attn_func(q, k, v, causal=True, **options)


def flash_cached(**given):
    q, k, v = equal_rows(200, 256, 256)
    return lambda: flash_attn_with_kvcache(q, k, v, causal=True, **given)


INT = torch.tensor([7, 250]).int()


def decode_step(rotary, **given):
    """One new key of each of two requests with pages, appended and seen."""
    q, k, v = equal_rows(1, 1, 1)
    cache, table = [torch.ones(8, 16, HKV, 64).half() for _ in range(2)], torch.tensor([[0, 1], [2, 3]]).int()
    if rotary:
        given |= dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(32, 32).half())
    given |= {"cache_seqlens": torch.tensor([7, 20]).int(), "block_table": table}
    return lambda: flash_attn_with_kvcache(q, *cache, k, v, **given)


STEPS = {  # an append and attention: views of q, k, v and of the table; the lengths, the output, its view; Q rotated
    "append": (partial(decode_step, False), Work(83, 9)),
    "append and rotary": (partial(decode_step, True), Work(86, 10)),
}


def top_k(function):
    inputs, public = topk_cases.make_inputs(topk_cases.PLAIN[function]), getattr(wrappers, function)
    return lambda: public(**inputs)


def rows(function, kind):
    """Rows that are written to a cache of K and V apart, as a decode step has them."""
    inputs = append.make(f"{kind}-n64-h32x8-d128-p16", "cpu", 0)
    return lambda: function(inputs)


def rotation(name):
    """Rows of one packed tensor that a RoPE function rotates."""
    inputs = rope_calls.good_call(name)
    return lambda: getattr(wrappers, name)(**inputs)


def merge(name):
    """States of a decode step."""
    inputs = merging.make(name, "cpu", 0)
    return lambda: merging.ours(inputs)


def merge_in_place():
    given = merging.make("merge-state-n64-h32-d128", "cpu", 0).given
    state, other = (given["v_a"], given["s_a"]), (given["v_b"], given["s_b"])
    return lambda: merge_state_in_place(*state, *other)


# name -> a function that makes the call, and the bound of its work: today's operators, two functions more than today's
PLANNED = {
    "context": (context, Work(29, 0)),
    "context that allocates": (partial(context, out=None, lse=None), Work(24, 2)),
    "decode": (decode, Work(34, 0)),
    "xqa": (xqa_call, Work(29, 4)),
    # views of the query, of the cache and of V, the outputs, and their views
    "flash_mla_with_kvcache": (partial(mla, "flash_mla_with_kvcache"), Work(33, 9)),
    "trtllm_batch_decode_with_kv_cache_mla": (partial(mla, "trtllm_batch_decode_with_kv_cache_mla"), Work(47, 6)),
    # views of q, k and v, the output, and its view; nothing that describes the batch
    "flash_attn_func": (partial(flash, 200), Work(44, 7)),
    "flash_attn_func, one row": (partial(flash, 1), Work(44, 7)),
    "flash_attn_with_kvcache": (flash_cached, Work(50, 7)),
    "flash_attn_with_kvcache, a length": (partial(flash_cached, cache_seqlens=9), Work(52, 7)),
    "flash_attn_with_kvcache, lengths": (partial(flash_cached, cache_seqlens=INT), Work(54, 7)),
    # and 4 for the table of the entries, which are known to the device alone: a view, two of arithmetic, a view
    "flash_attn_with_kvcache, entries": (
        partial(flash_cached, cache_seqlens=INT, cache_batch_idx=INT * 0),
        Work(65, 11),
    ),
    "top_k_page_table_transform": (partial(top_k, topk_cases.PAGE_TABLE), Work(11, 0)),
    "top_k_ragged_transform": (partial(top_k, topk_cases.RAGGED), Work(11, 1)),
    "top_k": (partial(top_k, topk_cases.TOP_K), Work(11, 2)),
    "top_k_per_row_prefill": (partial(top_k, topk_cases.PREFILL), Work(11, 0)),
    "top_k_per_row_decode": (partial(top_k, topk_cases.DECODE), Work(11, 0)),
    "append_paged_kv_cache": (partial(rows, append.by_lists, "append-bf16"), Work(10, 0)),
    "append_paged_kv_cache, nvfp4 slots": (partial(rows, append.nvfp4_by_slots, "append-nvfp4"), Work(14, 6)),
    "append_qkv": (partial(rows, append.by_slots, "append-normrope-fp8"), Work(19, 4)),
    "apply_rope": (partial(rotation, "apply_rope"), Work(41, 5)),
    "apply_rope_pos_ids_inplace": (partial(rotation, "apply_rope_pos_ids_inplace"), Work(38, 3)),
    "rope_quantize_fp8": (partial(rotation, "rope_quantize_fp8"), Work(90, 8)),
    "merge_states": (partial(merge, "merge-states-n64-s4-h32-d128"), Work(7, 2)),
    "merge_state": (partial(merge, "merge-state-n64-h32-d128"), Work(7, 2)),
    "merge_state_in_place": (merge_in_place, Work(7, 0)),
}


BOUND = {  # calls that keep their launch
    "paged run": (paged_run, Work(14, 3)),
    "ragged run": (ragged_run, Work(16, 3)),
    "decode run": (decode_run, Work(14, 3)),
    "context": (bound, Work(10, 2)),
    "top_k": (bound_top_k, Work(6, 2)),
    "append_qkv": (bound_append, Work(8, 4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_work_of_a_step(quiet, monkeypatch, name):
    """Two launches, see also test_flash_attn_rotary.py; a step that checks its call again exceeds the bound."""
    make, bound = STEPS[name]
    step = make()
    work = host_work(step)
    assert work.within(bound), work
    monkeypatch.setattr(flash_attn_append, "was_checked", lambda *_: False)
    assert exceeds(step, bound, "functions")


@pytest.mark.parametrize("name", PLANNED)
def test_work_of_a_planned_call(quiet, name):
    make, bound = PLANNED[name]
    work = host_work(make())
    assert work.within(bound), work


@pytest.mark.parametrize("name", BOUND)
def test_work_of_a_bound_launch(quiet, name):
    make, bound = BOUND[name]
    work = host_work(make())
    assert work.within(bound), work


@pytest.mark.parametrize("name", PLANNED)
def test_the_path_of_a_plain_call_is_counted(quiet, monkeypatch, name):
    for module in (op, topk_op):
        monkeypatch.setattr(module, "trace", lambda _: pytest.fail("the traced path"))
    host_work(PLANNED[name][0]())
    assert len(quiet.plans) == 1


def exceeds(call, bound, *counts):
    """Whether a call exceeds its bound, in each of these counts."""
    work = host_work(call)
    return all(getattr(work, count) > getattr(bound, count) for count in counts)


@pytest.mark.parametrize("name", PLANNED)
def test_planning_again_exceeds_the_bound(quiet, monkeypatch, name):
    make, bound = PLANNED[name]
    monkeypatch.setattr(quiet, "keep", lambda key, plan: None)
    makes_tensors = name != "merge_states"  # its plan does in another thread
    assert exceeds(make(), bound, "functions", *["operators"] * makes_tensors)


# ---- layers with tables of their own


@pytest.fixture
def made(monkeypatch):
    """The batches that calls describe anew."""
    found, new = [], call.new_sequences
    monkeypatch.setattr(call, "_kept", ())
    monkeypatch.setattr(call, "new_sequences", lambda *given: found.append(new(*given)) or found[-1])
    return found


def layer(inputs):
    """A call with a page table of its own and the lengths and offsets of its model."""
    own = inputs | {"block_tables": inputs["block_tables"].clone()}
    return lambda: trtllm_batch_context_with_kv_cache(**own)


@pytest.mark.parametrize("tables", [1, 2, 4, call.MOST_KEPT])
def test_layers_that_alternate_describe_each_table_once(quiet, made, tables):
    inputs = inputs_of()
    layers = [layer(inputs) for _ in range(tables)]
    for run in layers:
        run()
    assert len(made) == tables
    one = count_functions(layers[-1])  # the table of the call before
    assert one <= PLANNED["context"][1].functions
    for _ in range(3):
        assert [count_functions(run) for run in layers] == [one] * tables
    assert not operators_of(lambda: [run() for run in layers]) and len(made) == tables


def test_the_table_that_was_used_longest_ago_is_dropped(quiet, made):
    inputs = inputs_of()
    layers = [layer(inputs) for _ in range(call.MOST_KEPT + 1)]
    for run in (*layers[:-1], layers[0], layers[-1]):  # the last one takes the place of the second one
        run()
    assert len(made) == len(layers) == len(call._kept) + 1
    for run in (layers[0], *layers[2:]):
        run()
    assert len(made) == len(layers)
    layers[1]()
    assert len(made) == len(layers) + 1


def test_a_table_that_was_changed_in_place_is_described_anew_and_kept_once(quiet, made):
    inputs = inputs_of()
    tables = [inputs["block_tables"].clone() for _ in range(3)]
    for table in tables:
        trtllm_batch_context_with_kv_cache(**inputs | {"block_tables": table})
    tables[1].set_(tables[1].clone())
    for _ in range(2):
        trtllm_batch_context_with_kv_cache(**inputs | {"block_tables": tables[1]})
    assert len(made) == 4 and len(call._kept) == 3
    assert call._kept[0][0] is tables[1] and call._kept[0][-1][-1].page_table.data_ptr() == tables[1].data_ptr()


# ---- plan of the classes

PLAN = Work(31, 1)


def planning():
    case = Case()
    wrapper = case.paged()
    return lambda: wrapper.plan(*case.index, HQ, HKV, D, 4, causal=True)


def test_work_of_plan():
    work = host_work(planning())
    assert work.within(PLAN), work


# ---- scales: numbers are multiplied on the host; tensors of heads need a few operators

SCALES = {
    "numbers": ((1.0, 2.0, 3.0), Work(6, 0)),
    "tensors of heads": (tuple(OF_HEADS.values()), Work(24, 9)),
}


def scaling(scales):
    return lambda: values.combine_scales(0.5, *scales, WORKSPACE.device, (HQ, HKV))


@pytest.mark.parametrize("name", SCALES)
def test_work_of_scales(name):
    scales, bound = SCALES[name]
    work = host_work(scaling(scales))
    assert work.within(bound), work
    assert scaling((1.0, 2.0, 3.0))() == (1.0, None, 3.0, None)
