"""Memory in common, against the addresses of every element."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from tests.support.bad_values import Kernels
from wrappers.attention import plan
from wrappers.host import launch, machine, overlap


def addresses(t):
    """Of every byte."""
    places = {t.data_ptr()}
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = {p + i * stride * t.element_size() for p in places for i in range(size)}
    return {p + byte for p in places for byte in range(t.element_size())}


@st.composite
def views(draw):
    """A view of 400 bytes, of elements of 1 to 4."""
    dtype = draw(st.sampled_from((torch.uint8, torch.int16, torch.int32)))
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    return dtype, shape, strides, draw(st.integers(0, 20))


@pytest.mark.slow
@settings(max_examples=500)
@given(views(), views())
def test_every_pair_of_views(first, second):
    memory = torch.zeros(1024, dtype=torch.uint8)
    a, b = (memory.view(dtype).as_strided(shape, strides, at) for dtype, shape, strides, at in (first, second))
    assert overlap.overlap(a, b) == bool(addresses(a) & addresses(b))
    if not overlap.folded(a):
        assert len(addresses(a)) == a.numel() * a.element_size()


def test_columns_of_one_buffer_are_apart():
    """Queries, keys, values and the output as slices of one matrix; pages of K and V in one pool."""
    fused = torch.zeros(8192, 4, 8, 128, dtype=torch.bfloat16)
    parts = fused.unbind(1)
    assert not any(overlap.overlap(a, b) for a in parts for b in parts if a is not b)
    assert overlap.overlap(parts[0], fused[5:6]) and not overlap.overlap(fused[:4000], fused[4000:])
    assert overlap.overlap(fused[:4001], fused[4000:]) and not any(map(overlap.folded, (fused, *parts)))


def test_what_is_folded():
    t = torch.zeros(4, 6)
    assert overlap.folded(t[:, :1].expand(4, 6)) and overlap.folded(t.as_strided((3, 6), (4, 1)))
    assert not any(overlap.folded(x) for x in (t, t.T, t[:, ::2], t[:1].expand(1, 6), t[:0].expand(0, 6), t[0, 0]))


# ---- the public functions


def attention_arguments(function):
    inplace = function == "xqa"  # which multiplies two scales into new memory
    case = replace(
        cases.EDGE["plain"], q_lens=(3, 3), kv_lens=(19, 33), function=function, drafts=function != "context",
        layout="NHD", dtype="fp16", device=("out",) if inplace else ("scale", "out"), lse=not inplace,
    )  # fmt: skip
    return cases.FUNCTIONS[function][1](case, cases.make_call(case))


def top_k_arguments(function):
    case = replace(topk_cases.PLAIN[function], lengths="full", batch_map=True, starts=True, page_size=2)
    inputs = topk_cases.make_inputs(case)
    if inputs.get("row_starts") is not None:
        inputs["row_starts"].zero_()  # windows that fit their rows
    return inputs


ATTENTION = {"context": ("out", "lse"), "decode": ("out", "lse"), "xqa": ("output",)}
TOPK = {function: outputs for function, outputs in topk_cases.OUTPUTS.items() if outputs}


def tensors_of(arguments):
    """Name -> tensors, of those that calls read or write."""
    hints = ("workspace_buffer", "cum_seq_lens_kv")
    found = {name: v if isinstance(v, tuple) else (v,) for name, v in arguments.items() if name not in hints}
    return {name: v for name, v in found.items() if isinstance(v[0], torch.Tensor)}


def moved(t, memory, at):
    """The tensor's values, `at` bytes from the start of `memory`."""
    steps = t.contiguous().stride()
    found = torch.empty(0, dtype=t.dtype).set_(memory, at // t.element_size(), t.shape, steps)
    return found.copy_(t) if t.dtype != torch.uint16 else found


def test_cases_have_every_tensor():
    names = {f"{f}.{name}" for f in ATTENTION for name in tensors_of(attention_arguments(f))}
    assert {"context.sinks", "context.lse", "decode.mask", "xqa.mask", "xqa.seq_lens", "decode.bmm1_scale"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True, "checked"])
@pytest.mark.parametrize("function,output", [(f, o) for table in (ATTENTION, TOPK) for f in table for o in table[f]])
def test_outputs_are_apart_from_every_tensor(monkeypatch, function, output, known):
    """On the CPU, and on a machine with kernels; where that has a plan, of the first input and the outputs, and of all
    where CUTE_KERNELS_CHECK is 1."""
    if known == "checked":
        monkeypatch.setattr(plan if function in ATTENTION else launch, "checking", lambda: True)
    make = attention_arguments if function in ATTENTION else top_k_arguments
    public = cases.FUNCTIONS[function][0] if function in ATTENTION else getattr(wrappers, function)
    large = ("query", "q", "input", "logits", "out", "output", "lse", "out_raw_indices")
    seen = 0
    for name, tensors in tensors_of(make(function)).items():
        if name == output or known is True and name not in large:
            continue
        if known is False and name.endswith("_scale"):  # one element in host memory: a number, read before the launch
            continue
        for which, t in enumerate(tensors):
            arguments = make(function)
            with machine.override(Kernels() if known else machine.HostMachine()):
                if known:
                    public(**make(function))
                start = torch.zeros(1 << 20, dtype=torch.uint8)
                memory = start.untyped_storage()
                arguments[output] = moved(arguments[output], memory, 1024)
                over = moved(t, memory, 1024 + arguments[output].nbytes - arguments[output].element_size() & -16)
                before = start[:4096].clone()
                given = list(tensors)
                given[which] = over
                arguments[name] = tuple(given) if isinstance(arguments[name], tuple) else over
                with pytest.raises(ValueError, match="overlaps the memory of") as caught:
                    public(**arguments)
                assert output in str(caught.value) and name in str(caught.value)
                assert torch.equal(start[:4096], before)
                apart = moved(t, memory, 1 << 19)  # of one allocation, as an arena gives them
                given[which] = apart
                arguments[name] = tuple(given) if isinstance(arguments[name], tuple) else apart
                public(**arguments)
                seen += 1
    assert seen >= (1 if known is True else 2)


@pytest.mark.parametrize("host", [machine.HostMachine, lambda: Kernels()], ids=["cpu", "kernels"])
def test_a_folded_output_is_refused(host):
    for function, outputs in ATTENTION.items():
        for output in outputs:
            with machine.override(host()):
                for _ in range(2):  # without a plan, and with one
                    arguments = attention_arguments(function)
                    arguments[output] = arguments[output][:1].clone().expand(arguments[output].shape)
                    with pytest.raises(
                        ValueError, match=rf"^{output}: strides .* must (not overlap each other|be contiguous)"
                    ):
                        cases.FUNCTIONS[function][0](**arguments)
                    cases.FUNCTIONS[function][0](**attention_arguments(function))


@pytest.mark.parametrize("host", [machine.HostMachine, lambda: Kernels()], ids=["cpu", "kernels"])
def test_slices_of_one_buffer_are_served(host):
    """The output beside queries, keys and values in a row."""
    inputs = cases.make_inputs(replace(cases.EDGE["plain"], heads_q=2, heads_kv=2))
    fused = torch.zeros(42, 2, 2, 64).bfloat16()
    fused[:, 0] = inputs["query"]
    want, _ = wrappers.trtllm_batch_context_with_kv_cache(**inputs | {"out": None, "lse": None})
    with machine.override(host()):
        for _ in range(2):
            got, _ = wrappers.trtllm_batch_context_with_kv_cache(
                **inputs | {"query": fused[:, 0], "out": fused[:, 1], "lse": None}
            )
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_parts_of_an_fp4_output_are_apart():
    case = replace(cases.EDGE["plain"], q_lens=(2, 3), kv_lens=(19, 33))
    memory = torch.zeros(128 * 16 + 5 * 4 * 32, dtype=torch.uint8)
    for at, good in ((128 * 16, True), (128 * 16 - 1, False), (0, False)):
        data = memory[at : at + 640].view(5, 4, 32)
        out = wrappers.FP4Tensor(data, memory[:2048].view(128, 16).view(torch.float8_e4m3fn))
        inputs = cases.make_inputs(case) | {"out": out, "o_sf_scale": 3.0}
        if good:
            wrappers.trtllm_batch_context_with_kv_cache(**inputs)
            continue
        with pytest.raises(ValueError, match="^out.scale: .* overlaps the memory of out.data"):
            wrappers.trtllm_batch_context_with_kv_cache(**inputs)


IMPORTED = {  # tokens of one buffer: the query's, the output's
    "above": (slice(6), slice(1, 7)), "below": (slice(1, 7), slice(6)), "strided": (slice(0, 12, 2), slice(10, 16)),
    "below strides": (slice(10, 16), slice(0, 12, 2)),
}  # fmt: skip


@pytest.mark.parametrize("where", IMPORTED)
def test_imported_memory_is_compared_by_addresses(where):
    """DLPack gives a tensor a storage of its own."""
    inputs, public = attention_arguments("context"), wrappers.trtllm_batch_context_with_kv_cache
    (heads, dim), (at_q, at_out) = inputs["query"].shape[1:], IMPORTED[where]
    memory, lse = torch.zeros(40, heads, dim).half(), torch.zeros(40, heads)
    good = inputs | {"query": memory[at_q], "out": memory[20:26], "lse": lse[:6]}
    over = torch.from_dlpack(memory.view(torch.float32).flatten()[: 6 * heads]).view(6, heads)  # rows 0 to 0.2
    refused = [
        ({"out": torch.from_dlpack(memory[at_out])}, "^out: .* overlaps the memory of query"),
        ({"out": torch.from_dlpack(memory[at_out]), "lse": over}, "^(out|lse): .* overlaps the memory of"),
        ({"query": memory[:6], "lse": over}, "^lse: .* overlaps the memory of query"),
        ({"query": memory[20:26], "out": memory[:6], "lse": over}, "^lse: .* overlaps the memory of out"),
    ]
    with machine.override(Kernels()):
        for _ in range(2):  # without a plan, and with one
            for change, message in refused:
                with pytest.raises(ValueError, match=message):
                    public(**good | change)
            public(**good)
            public(**good | {"out": torch.from_dlpack(memory[20:26])})


@pytest.mark.parametrize("name,output", [("kv_cache", "out"), ("sinks", "lse"), ("seq_lens", "lse")])
def test_a_known_call_may_write_to_what_it_only_reads(monkeypatch, name, output):
    """As docs/environment.md says: of other inputs than the query, outputs are told apart at a call's first form, or
    where CUTE_KERNELS_CHECK is 1."""
    public, inputs = wrappers.trtllm_batch_context_with_kv_cache, attention_arguments("context")
    memory = torch.zeros(1 << 20, dtype=torch.uint8).untyped_storage()
    first = tensors_of(inputs)[name][0]
    over = moved(first, memory, 0)
    given = {name: (over, *inputs[name][1:]) if name == "kv_cache" else over, output: moved(inputs[output], memory, 0)}
    for checked in (False, True):
        monkeypatch.setattr(plan, "checking", lambda checked=checked: checked)
        with machine.override(Kernels()):
            with pytest.raises(ValueError, match=f"^{output}: .* overlaps the memory of {name}"):
                public(**inputs | given)
            public(**inputs)
            if checked:
                with pytest.raises(ValueError, match=f"^{output}: .* overlaps the memory of {name}"):
                    public(**inputs | given)
            else:
                public(**inputs | given)
