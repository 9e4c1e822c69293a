"""`explain`: what it says of a call is what the call does, which it does not make."""

import inspect
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import wrappers
from bench.cases import topk as topk_cases
from cute_kernels import archs, catalog, manifest
from cute_kernels.topk import dispatch as topk_dispatch
from tests.host.test_signatures import same
from tests.support.fake_machine import FakeMachine
from tests.support.good_calls import DSA, LOGITS, MLA, NAMES, SEGMENTS, SELECT, SPARSE_FWD, XQA_MLA, inputs_of
from tests.support.layout_calls import NVFP4_LATENT, RAGGED_MLA
from wrappers import explain
from wrappers.host import machine
from wrappers.own.registry import ATTENTION, FUNCTIONS, LATENT_READ, QUANTIZATION, TOP_K, row_of

WRITES = [row.name for row in FUNCTIONS if row.make is not None and row.family not in (ATTENTION, TOP_K)]
HOPPER = {NAMES[0], "trtllm_fmha_v2_prefill", *MLA, XQA_MLA, SPARSE_FWD, *DSA, *LOGITS, *SELECT, SEGMENTS}
TWO_KERNELS = {NVFP4_LATENT, *SELECT, SEGMENTS}  # the first one is explained
REFUSE_GRAD = [name for name in NAMES if row_of(getattr(wrappers, name)).family not in (LATENT_READ, QUANTIZATION)]


def cases_of(name):
    """Good calls of a function, of several kernels."""
    inputs = inputs_of(name)
    yield inputs
    if name in WRITES:
        return
    if name in topk_cases.FUNCTIONS:
        plain = topk_cases.PLAIN[name]
        for dtype, rows, width in (("bf16", 3, 300_000), ("fp32", 600, 20_000), ("fp32", 6, 70_000)):
            change = {"dtype": dtype, "rows": rows, "width": width}
            yield topk_cases.make_inputs(replace(plain, data="constant", **change))
    elif name == "xqa":
        yield inputs | {"sliding_win_size": 3}
    elif name in ("xqa_batch_decode_with_kv_cache", RAGGED_MLA):
        yield inputs | {"window_left": 3}
    elif name.startswith("flash_attn"):
        yield inputs | {"softcap": 4.0}
    elif name in (*MLA, XQA_MLA):
        yield inputs | ({"causal": False} if "causal" in inputs else {"sinks": torch.ones(4)})
    elif name.endswith("topk"):
        yield inputs | {"logits": torch.zeros(3, 300_000)}
    elif name == SPARSE_FWD:
        yield inputs | {"d_v": 512}
    elif name in DSA:
        yield inputs | {"return_lse": True}
    elif name in (*SELECT, SEGMENTS):
        yield inputs | {"top_k": 3}
        yield inputs | {"top_k": 2048}  # as many keys as a token can have, or more: no logits
    elif name in LOGITS:
        yield inputs | {"clean_logits": False}
    else:
        yield inputs | {"logits_soft_cap_scale" if name == "trtllm_fmha_v2_prefill" else "logits_soft_cap": 4.0}


def changed(name, change):
    """A good call, the first tensor of which is another."""
    inputs = inputs_of(name)
    names = [n for n in inspect.signature(getattr(wrappers, name)).parameters if n != "positions" and n in inputs]
    first = "k" if name == "append_qkv" else (names or [*inputs])[0]
    if isinstance(inputs[first], tuple):
        return inputs | {first: (change(inputs[first][0]), *inputs[first][1:])}
    return inputs | {first: change(inputs[first])}


def untouched(inputs):
    """Copies of the tensors of a call."""
    return [t.clone() for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name, arch", [*product(NAMES, archs.NAMES)][::2])
def test_what_is_said_is_what_runs(name, arch):
    """On a machine of that architecture, and of tensors on the CPU without one."""
    ran = []
    fake = FakeMachine(lambda op, spec: lambda *args: ran.append(f"{op} {spec.name}"), arch, archs.of(arch).sms)
    for inputs in cases_of(name):
        before = untouched(inputs)
        said = explain(function=getattr(wrappers, name), arch=arch, **inputs)
        with machine.override(fake):
            assert explain(function=getattr(wrappers, name), **inputs) == said
            assert all(map(same, untouched(inputs), before)) and not fake.plans and not ran
            if said.runs is None:
                with pytest.raises(NotImplementedError, match=arch):
                    getattr(wrappers, name)(**inputs)
                assert name in HOPPER or name.startswith("single_prefill")
                assert arch != "sm_90a"
                continue
            getattr(wrappers, name)(**inputs)
            fake.plans.clear()
        launched = [r for r in ran if name in WRITES or not r.startswith("cache_write")]
        assert [said.runs] == launched[: 1 if name in TWO_KERNELS else None] and said.found
        ran.clear()


@pytest.mark.parametrize("name", REFUSE_GRAD)
def test_a_call_that_requires_grad_is_explained_as_it_is_made(name):
    inputs = changed(name, lambda t: t.clone().requires_grad_())
    with pytest.raises(RuntimeError) as expected:
        getattr(wrappers, name)(**inputs)
    with pytest.raises(RuntimeError) as error:
        explain(function=getattr(wrappers, name), **inputs)
    assert str(error.value) == str(expected.value)
    with torch.no_grad():
        assert explain(function=getattr(wrappers, name), **inputs).runs


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_runs_the_reference(name):
    said = explain(function=getattr(wrappers, name), **inputs_of(name))
    assert said.runs.startswith("reference") and said.found is None
    assert said.refused and all(why == "device cpu, must be a CUDA device" for _, why in said.refused)


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_without_kernels(name):
    said = explain(function=getattr(wrappers, name), arch="sm_80", **inputs_of(name))
    assert said.runs is None and said.found is None and "sm_80: needs sm_90a" in str(said)
    assert str(said).startswith("runs: nothing\nrefused: ")


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_refused_as_the_function_does(name):
    inputs = inputs_of(name)
    other = torch.Tensor.double if name in REFUSE_GRAD else torch.Tensor.int
    for change in (changed(name, lambda t: None), changed(name, other), {"unknown": 1}):
        with pytest.raises(TypeError) as expected:
            getattr(wrappers, name)(**inputs | change)
        for arch in (None, "sm_90a"):
            with pytest.raises(TypeError) as error:
                explain(function=getattr(wrappers, name), arch=arch, **inputs | change)
            assert str(error.value) == str(expected.value)


def test_the_context_function_is_asked_by_position():
    inputs = inputs_of(NAMES[0])
    args = [inputs.pop(name) for name in [*inspect.signature(getattr(wrappers, NAMES[0])).parameters][:13]]
    assert explain(*args, **inputs, arch="sm_90a").runs.startswith("attention.sm90 bf16_d64")


def test_reasons_that_a_caller_can_act_on_come_first():
    """Of head dims (576, 512): each kernel once, each head dim once, and the reason is not the number of rows."""
    q, k, v = (
        torch.zeros(2, heads, *rows, dim).half()
        for heads, rows, dim in ((8, (), 576), (1, (16,), 576), (1, (16,), 512))
    )
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    decode = wrappers.trtllm_batch_decode_with_kv_cache
    for dims in ((576, 512), (576, 576)):
        call = q[..., : dims[0]], (k[..., : dims[0]], (k if dims[1] == 576 else v)[..., : dims[1]])
        said = explain(*call, None, table, lens, None, function=decode, arch="sm_90a")
        assert said.runs is None and len(set(said.refused)) == len(said.refused)
        assert all(f"head_dim {dims}" in why or why.startswith(("rows", "arch")) for _, why in said.refused)
        assert [why.split()[0] for _, why in said.refused] == ["head_dim", "head_dim", "rows", "arch"]
        assert said.refused[-1][1].startswith("arch") and not said.refused[0][1].startswith("arch")
        for _, why in said.refused:
            found = re.findall(r"\(\d+, \d+\)", why.partition(":")[2])
            assert len(set(found)) == len(found), why
        with machine.override(FakeMachine(lambda op, spec: None)), pytest.raises(NotImplementedError) as error:
            decode(*call, None, table, lens, None)
        assert re.match(r"query: no attention kernel: attention.(decode|sm90): head_dim", str(error.value))


def test_arguments_of_another_function_than_the_default_are_told_so():
    inputs = inputs_of("trtllm_batch_decode_with_kv_cache")
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")
    said = r"missing \d required .* 'bmm1_scale', .*; function= names another function than this, the default"
    with pytest.raises(TypeError, match=said):
        explain(*(inputs[name] for name in names), arch="sm_90a")
    with pytest.raises(TypeError, match="^trtllm_batch_decode_with_kv_cache.. missing 3"):
        explain(*(inputs[name] for name in names[:3]), function=wrappers.trtllm_batch_decode_with_kv_cache)


def test_rows_that_no_kernel_quantises_are_quantised_by_torch():
    x = torch.zeros(1, 16)
    for rows, runs in ((x, "reference (torch)"), (x.half(), "cache_write.rows fp16_nvfp4_append")):
        assert explain(rows, function=wrappers.nvfp4_quantize, arch="sm_90a").runs == runs


def test_sms_decide_what_top_k_runs():
    inputs = topk_cases.make_inputs(topk_cases.TopKCase(topk_cases.TOP_K, rows=130, width=30_000, data="constant"))
    said = [
        explain(function=wrappers.top_k, arch="sm_90a", sms=sms, **inputs).runs for sms in (None, 132, np.int64(78))
    ]
    plans = [
        topk_dispatch.candidate(topk_dispatch.TopKKernelRequest("fp32", 130, 30_000, 7, sms)) for sms in (132, 132, 78)
    ]
    assert said == [f"topk.radix {plan.name}" for plan in plans] and said[1] != said[2]
    with pytest.raises(ValueError, match="sms: 0"):
        explain(function=wrappers.top_k, arch="sm_90a", sms=0, **inputs)


def test_what_kernels_ask_of_tensors_is_said():
    """No kernel takes the sign of scores the other way round."""
    said = explain(**inputs_of(NAMES[0]) | {"bmm1_scale": -1.0}, arch="sm_90a")
    assert said.runs is None and "bmm1_scale: -1.0" in dict(said.refused)["attention.sm90"]


# ---- where a kernel is found


@pytest.mark.parametrize("name", NAMES)
def test_where_a_kernel_is_found(monkeypatch, tmp_path, name):
    """In a bundle, or to be compiled, or nowhere, and then which command builds it."""
    inputs, function = inputs_of(name), getattr(wrappers, name)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_JIT", "1")
    said = explain(function=function, arch="sm_90a", **inputs)
    assert said.found == "to be compiled at its first call"
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    missing = explain(function=function, arch="sm_90a", **inputs)
    label = "/".join(said.runs.split())
    assert missing.runs == said.runs and f"no bundle in {tmp_path}" in missing.found
    everything, one = missing.found.splitlines()[-2:]
    assert everything.endswith("to build all kernels that are shipped: python -m cute_kernels build --arch sm_90a")
    assert one.endswith(f"to build this one: python -m cute_kernels build --arch sm_90a --only {label}")
    op, kernel = said.runs.split()
    (spec,) = (spec for other, spec in catalog.shipped("sm_90a") if (other, spec.name) == (op, kernel))
    tools = {"dsl": "0", "cuda": "0", "settings": {}}
    entry = {"op": op, "spec": manifest.to_json(spec), "key": manifest.key(op, spec, "sm_90a", tools)}
    code = {"offset": 0, "packed": 0, "size": 0, "sha256": ""}
    entry |= {"library": "a", "symbol": "none", "code": code}
    bundle = tmp_path / "sm_90a"
    bundle.mkdir()
    (bundle / "a.so").touch()
    files = [{"file": name, "sha256": manifest.digest(b"")} for name in ("a.so", "b.so")]
    manifest.write(bundle, manifest.Manifest("sm_90a", tools, {"a": files[0]}, files[1], [entry]))
    served = explain(function=function, arch="sm_90a", **inputs)
    assert served.found == f"bundle {bundle}"
    assert f"{served}\n".startswith(f"runs: {said.runs}\nfound: bundle {bundle}\n")
