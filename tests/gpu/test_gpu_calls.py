"""Calls on a Hopper GPU that only real compiled code and real captures can show: copies of planned objects, counters of
captured launches, queries without rows, NVFP4 outputs with padding."""

import copy
import ctypes
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.support.compiled import CLASSES, _planned, bits_of
from tests.support.gpu import CUDA
from wrappers import fp4
from wrappers.host import machine

BASE = replace(cases.EDGE["plain"], lse=False)


def decode_inputs(**changes: Any) -> dict[str, Any]:
    found = cases.as_decode(cases.make_inputs(replace(BASE, q_lens=(1, 1), kv_lens=(600, 5000)), CUDA))
    return found | {"cum_seq_lens_q": None, "max_q_len": None, "out": None} | changes


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of nodes of a graph that was captured with keep_graph=True."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert not ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    return count.value


@pytest.mark.parametrize("form", ["paged", "ragged", "decode"])
def test_copies_of_planned_wrappers(form):
    """Before and after a run, which keeps a launch. Each copy makes its own."""
    step, make = CLASSES[form]
    given = make(CUDA, 0, 0)
    wrapper = _planned[form, "cuda"]
    want = bits_of(step(given))
    assert wrapper._bound is not None
    for other in (copy.deepcopy(wrapper), copy.copy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert other._bound is None
        _planned[form, "cuda"] = other
        assert bits_of(step(given)) == want and bits_of(step(given)) == want
        assert other._bound is not None and other._bound[0] is not wrapper._bound[0]
    _planned[form, "cuda"] = wrapper


def test_copies_of_bound_calls():
    inputs = decode_inputs()
    scores, cache = torch.randn(4, 3000, device=CUDA), torch.zeros(6, 2, 4, 2, 32, dtype=torch.bfloat16, device=CUDA)
    rows = torch.randn(3, 2, 32, device=CUDA).bfloat16()
    slots = torch.tensor([5, 0, 23], dtype=torch.int32, device=CUDA)
    layers = (
        (wrappers.bind(wrappers.trtllm_batch_decode_with_kv_cache, **inputs), (inputs["query"],)),
        (wrappers.bind(wrappers.top_k, scores, 7), (scores,)),
        (wrappers.bind(wrappers.append_qkv, rows, rows, rows, wrappers.KVCacheTarget(cache), slots), (rows,) * 3),
    )
    for bound, arguments in layers:
        want = bits_of(bound.run(*arguments))
        for other in (copy.deepcopy(bound), copy.copy(bound), pickle.loads(pickle.dumps(bound))):
            assert bits_of(other.run(*arguments)) == want and bits_of(other.run(*arguments)) == want


def test_counters_of_5000_captured_launches():
    """Graphs take counters, launches do not: 5,000 decode launches would use up the pool. No launch adds a node."""
    inputs = decode_inputs()
    decode = wrappers.trtllm_batch_decode_with_kv_cache
    with machine.override(machine.HostMachine()) as here:
        want = decode(**inputs)
        pool = here.counter_pools[inputs["query"].device]
        used = []
        for layers in (80, 4920):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for _ in range(layers):
                    out = decode(**inputs)
            assert node_count(graph) == layers, "launches alone"
            used.append(pool.used[0])
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want)
        assert used[1] == 2 * used[0] < 5000, "as many for 4,920 launches as for 80"
        assert not pool.counters.any(), "all are zero between launches"


def test_streams_of_a_capture_have_counters_of_their_own():
    inputs, decode = decode_inputs(), wrappers.trtllm_batch_decode_with_kv_cache
    context = cases.make_inputs(BASE, CUDA) | {"out": None}
    with machine.override(machine.HostMachine()) as here:
        want, other = decode(**inputs), wrappers.trtllm_batch_context_with_kv_cache(**context)
        pool = here.counter_pools[inputs["query"].device]
        before, side, graph = pool.used[0], torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            found = [decode(**inputs)]
            with torch.cuda.stream(side):
                found += [decode(**inputs), wrappers.trtllm_batch_context_with_kv_cache(**context)]
            main.wait_stream(side)
            found.append(decode(**inputs))
        taken = {count for _, counters in here.captures.values() for count in counters}
        assert pool.used[0] - before == 2 * max(taken) + 1 and 1 in taken
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found[0], want) and torch.equal(found[1], want) and torch.equal(found[3], want)
        assert torch.equal(found[2], other)


def test_launches_of_other_kernels_share_counters_in_a_capture():
    """Of other caches and head dims, in turn, with and without programmatic launches."""
    calls = []
    for kv_dtype, dim in (("", 64), ("fp8", 64), ("", 128), ("nvfp4", 128)):
        case = replace(BASE, q_lens=(1, 1), kv_lens=(600, 5000), kv_dtype=kv_dtype, head_dim_qk=dim, head_dim_vo=dim)
        inputs = cases.as_decode(cases.make_inputs(case, CUDA)) | {"cum_seq_lens_q": None, "max_q_len": None}
        calls += [inputs | {"out": None, "enable_pdl": pdl} for pdl in (True, False)]
    decode = wrappers.trtllm_batch_decode_with_kv_cache
    with machine.override(machine.HostMachine()) as here:
        want = [decode(**call) for call in calls]
        graph, pool = torch.cuda.CUDAGraph(), here.counter_pools[CUDA]
        with torch.cuda.graph(graph):
            found = [decode(**call) for _ in range(20) for call in calls]
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(got, want[i % len(calls)]) for i, got in enumerate(found))
        assert not pool.counters.any()


def test_queries_without_rows():
    """Keys are appended; nothing else happens."""
    cache = torch.zeros(2, 2, 9, 2, 64, device=CUDA).half()
    new, lens = torch.randn(2, 3, 2, 64, device=CUDA).half(), torch.tensor([3, 4], dtype=torch.int32, device=CUDA)
    q = torch.zeros(2, 0, 4, 64, device=CUDA).half()
    out, lse = wrappers.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lens, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 0)
    for request, length in enumerate((3, 4)):
        for side in cache:
            assert torch.equal(side[request, length : length + 3], new[request])
            side[request, length : length + 3] = 0
    assert not cache.any()
    assert wrappers.flash_attn_func(q, *cache, causal=True).shape == q.shape


@pytest.mark.parametrize("function", ["decode", "context"])
def test_factors_that_pad_an_nvfp4_output_are_0(function):
    """3 heads of 80: 15 factors of a row, and one column that pads them. Memory of new tensors is not zero."""
    case = replace(BASE, q_lens=(1, 1), kv_lens=(60, 50), heads_q=3, heads_kv=3, head_dim_qk=80, head_dim_vo=80)
    inputs = cases.make_inputs(case, CUDA) | {"out": None, "out_dtype": "nvfp4", "o_sf_scale": 1.0}
    call = wrappers.trtllm_batch_context_with_kv_cache
    if function == "decode":
        inputs, call = cases.as_decode(inputs), wrappers.trtllm_batch_decode_with_kv_cache
    for _ in range(3):
        dirty = torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=CUDA)  # NaN as e4m3
        del dirty
        out = call(**inputs)
        padding = fp4.swizzled_offset(torch.arange(len(out.data)), torch.tensor(15), 16).to(CUDA)
        assert not out.scale.view(torch.uint8).flatten()[padding].any()
