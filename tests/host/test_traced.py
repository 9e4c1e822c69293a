"""Calls that something traces, and calls on tensors without memory, go through the torch operators: what is recorded is
one operator, results are the same, and nothing that such a call made is kept for later ones."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from tests.host.test_plans import CONTEXT, DECODE, EQUAL, PLAIN, Recorder, decode_inputs, looks, tokens_apart
from tests.support.host_work import Seen
from wrappers.host import machine, plain

OPERATORS = (torch.ops.cute_kernels.attention.default, torch.ops.cute_kernels.top_k_rows.default)
FRESH = {"out": None, "lse": None}
ONE = {"lse": None, "return_lse": False}
FP32 = torch.tensor([0.3])
XQA = replace(PLAIN, function="xqa", q_lens=(1, 1), layout="NHD", lse=False)
DRAFTS = replace(XQA, q_lens=(2, 2), drafts=True)


def xqa(case):
    return wrappers.xqa, cases.xqa_arguments(case, cases.make_call(case))


def top_k(function, **changes):
    return getattr(wrappers, function), topk_cases.make_inputs(replace(topk_cases.PLAIN[function], **changes))


def context(case=PLAIN, **changes):
    return CONTEXT, cases.make_inputs(case) | changes


def quantize():
    return wrappers.nvfp4_quantize, {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(0))}


def dequantize():
    function, inputs = quantize()
    return wrappers.nvfp4_dequantize, dict(zip(("data", "scales"), function(**inputs)))


def merge_masked():
    def merged(v, s, **others):
        wrappers.merge_state_in_place(v, s, **others)
        return v, s

    draw = torch.Generator().manual_seed(5)
    v, v_other = (torch.randn(3, 2, 16, generator=draw) for _ in range(2))
    s, s_other = (torch.randn(3, 2, generator=draw) for _ in range(2))
    mask = torch.tensor([True, False, True])
    return merged, {"v": v, "s": s, "v_other": v_other, "s_other": s_other, "mask": mask}


CALLS = {  # name -> (public function, its arguments), made anew
    "context": lambda: context(out=None, **ONE),
    "context, outputs given": context,
    "context, unsigned lengths": lambda: context(
        replace(PLAIN, cache="stacked", layout="NHD", uint32_lens=True), **FRESH, return_lse=True
    ),
    "context, scales of tensors": lambda: context(bmm1_scale=FP32, bmm2_scale=FP32, **FRESH),
    "context, nvfp4 out": lambda: context(out=None, out_dtype="nvfp4", o_sf_scale=1.0, **ONE),
    "decode": lambda: (DECODE, decode_inputs(PLAIN) | FRESH),
    "decode, equal": lambda: (DECODE, tokens_apart(EQUAL, 2) | {"out": None} | ONE),
    "decode, e4m3": lambda: (DECODE, decode_inputs(replace(PLAIN, kv_dtype="fp8")) | FRESH),
    "decode, nvfp4": lambda: (DECODE, decode_inputs(replace(PLAIN, kv_dtype="nvfp4")) | FRESH),
    "decode, drafts": lambda: (
        DECODE,
        tokens_apart(EQUAL, 2) | FRESH | {"mask": torch.full((2, 2, 2), 3).to(torch.uint16)},
    ),
    "decode, log2": lambda: (DECODE, decode_inputs(PLAIN) | FRESH | {"bmm1_scale_log2": FP32, "o_scale": 2.0}),
    "xqa": lambda: xqa(XQA),
    "xqa, nvfp4": lambda: xqa(replace(XQA, kv_dtype="nvfp4")),
    "xqa, drafts": lambda: xqa(DRAFTS),
    "xqa, ragged": lambda: xqa(replace(DRAFTS, q_lens=(2, 3))),
    **{name: lambda name=name: top_k(name) for name in topk_cases.FUNCTIONS},
    "top_k, sorted": lambda: top_k(topk_cases.TOP_K, sorted=True),
    "page table, new": lambda: top_k(topk_cases.PAGE_TABLE, given=False),
}
# Torch operations where something traces them, or, of merging, where torch.func transforms it.
HELPERS = {"quantize": quantize, "dequantize": dequantize, "merge, masked": merge_masked}
PACKED = "context, nvfp4 out"  # no kernel; its scales are allocated by torch, plainly where fakes leave their mode
SOME = ("context", "decode, equal", "xqa, drafts", "top_k")
WRITTEN = ("out", "lse", "output", "indices", "out_raw_indices")


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def results(function, inputs):
    """The tensors that a call returned or wrote."""
    returned = function(**inputs)
    if isinstance(returned, wrappers.FP4Tensor):
        returned = returned.data  # scales have rows of no token
    flat, _ = tree_flatten([returned, [inputs.get(name) for name in WRITTEN]])
    return [t for t in flat if is_tensor(t)]


def of_tensors(function, inputs):
    """(what calls the function, the tensors that this takes)."""
    flat, form = tree_flatten(inputs)
    places = [i for i, value in enumerate(flat) if is_tensor(value)]

    def call(*tensors):
        given = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return results(function, tree_unflatten(given, form))

    return call, [flat[i] for i in places]


def bits(tensors):
    return [(t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).tolist()) for t in tensors]


def forms(tensors):
    return [(t.dtype, tuple(t.shape), t.stride()) for t in tensors]


def operators(graph):
    """Ours that a graph calls, as they are or as torch functionalises them."""
    called = [(node.target, node.args) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) < 50, "the inside of the reference"
    return [t for t, args in called if t in OPERATORS or args and args[0] in OPERATORS]


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def blank(inputs, device=None):
    """Of the same forms, of no values."""
    return tree_map(
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) if is_tensor(t) else t, inputs
    )


def fakes_inside(function, inputs):
    with FakeTensorMode():
        return results(function, blank(inputs))


def fakes_outside(function, inputs):
    mode = FakeTensorMode()
    return results(function, tree_map(lambda t: mode.from_tensor(t) if is_tensor(t) else t, inputs))


def fake_query_inside(function, inputs):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        first = next(iter(inputs))
        return results(function, inputs | {first: mode.from_tensor(inputs[first])})


def plain_inside(function, inputs):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return results(function, inputs)


def traced(how=lambda call: call, **options):
    def trace(function, inputs):
        call, tensors = of_tensors(function, inputs)
        graph = make_fx(how(call), **options)(*tensors)
        assert len(operators(graph)) == 1
        return graph(*tensors)

    return trace


def functionalized(function, inputs):
    call, tensors = of_tensors(function, inputs)
    return torch.func.functionalize(call)(*tensors)


def watched(function, inputs):
    with Seen() as seen:
        found = results(function, inputs)
    assert sum(operator in OPERATORS for operator, _, _ in seen.calls) == 1 and len(seen.calls) < 50
    return found


def of_a_subclass(function, inputs):
    found = results(function, tree_map(lambda t: t.as_subclass(Own) if is_tensor(t) else t, inputs))
    return [t.as_subclass(torch.Tensor) for t in found]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inside(context):
    def call(function, inputs):
        with context():
            return results(function, inputs)

    return call


RECORDED = {
    "real": traced(),
    "fake": traced(tracing_mode="fake"),
    "symbolic": traced(tracing_mode="symbolic"),
    "before dispatch": traced(pre_dispatch=True),
    "functional": traced(torch.func.functionalize),
}
COMPUTED = {
    "functionalize": functionalized,
    "a dispatch mode": watched,
    "a subclass": of_a_subclass,
    "a function mode": inside(Passing),
    "inference mode": inside(torch.inference_mode),
    "a default device": inside(lambda: torch.device("meta")),
    "bf16 by default": inside(lambda: default_dtype(torch.bfloat16)),
    "fp64 by default": inside(lambda: default_dtype(torch.float64)),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
}
FAKES = {"made inside": fakes_inside, "used outside": fakes_outside, "a fake query": fake_query_inside}


@pytest.mark.slow
@pytest.mark.parametrize("how,name", [(h, n) for h in RECORDED for n in (CALLS if h == "symbolic" else SOME)])
def test_one_operator_is_recorded(how, name):
    assert bits(RECORDED[how](*CALLS[name]())) == bits(results(*CALLS[name]()))


@pytest.mark.parametrize("name", [*CALLS, *HELPERS])
@pytest.mark.parametrize("how", COMPUTED)
def test_results_are_the_same_under(how, name):
    make = (CALLS | HELPERS)[name]
    if name in CALLS or how != "a dispatch mode":
        assert bits(COMPUTED[how](*make())) == bits(results(*make()))


@pytest.mark.parametrize("how,name", [(h, n) for h in FAKES for n in CALLS if (h, n) != ("used outside", PACKED)])
def test_fake_tensors(how, name):
    function, inputs = CALLS[name]()
    found = FAKES[how](function, inputs)
    assert forms(found) == forms(results(*CALLS[name]()))
    given = {id(t) for t in tree_flatten(inputs)[0]}
    assert all(isinstance(t, FakeTensor) for t in found if id(t) not in given)


BAD = [
    ("context", {"out_dtype": "nvfp5", "o_sf_scale": 1.0}), ("context, outputs given", {"out_dtype": torch.float16}),
    ("context", {"return_lse": 1}), ("context", {"return_lse": "yes"}), ("context", {"causal": 1}),
    ("context", {"bmm1_scale": "1"}), ("context", {"logits_soft_cap": FP32}), ("context", {"o_sf_scale": 1.0}),
    ("context", {"lse": torch.zeros(42, 4, dtype=torch.float64)}), ("decode", {"enable_pdl": 0}),
    ("decode", {"skip_softmax_threshold_scale_factor": -1.0}), ("xqa", {"batch_invariant": None}),
    *(("top_k", {"tie_break": bad}) for bad in ("1", 1.5, True, None, 5)),
    *(("top_k", {"k": bad}) for bad in (True, 7.0, 0, 51)), ("top_k_page_table_transform", {"page_size": 0}),
    ("top_k_page_table_transform", {"page_size": True}), ("top_k_per_row_decode", {"next_n": True}),
]  # fmt: skip


@pytest.mark.parametrize("name,change", BAD)
@pytest.mark.parametrize("how", ["real", "symbolic", "made inside"])
def test_what_calls_refuse_is_refused(how, name, change):
    """In the same words, by the call that something traces, not by one that its graph makes later."""
    function, inputs = CALLS[name]()
    with pytest.raises((TypeError, ValueError)) as want:
        function(**inputs | change)
    if how == "made inside":
        call, tensors = fakes_inside, (function, inputs | change)
    else:
        call, tensors = of_tensors(function, inputs | change)
        call = make_fx(call, tracing_mode=how)
    with pytest.raises((TypeError, ValueError)) as found:
        call(*tensors)
    said = [str(error.value).split(", must")[0] for error in (found, want)]
    assert found.type is want.type and (said[0] == said[1] or "logits_soft_cap" in change)


@pytest.mark.parametrize("name", [*CALLS, *HELPERS])
def test_meta_tensors(name):
    """Checked as any others are; nothing is computed."""
    make = (CALLS | HELPERS)[name]
    function, inputs = make()
    found = results(function, blank(inputs, "meta"))
    assert forms(found) == forms(results(*make())) and all(t.is_meta for t in found)
    if name == "context":
        with pytest.raises(ValueError, match="block_tables: shape"):
            function(**blank(inputs | {"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "meta"))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("how", [*RECORDED, *COMPUTED, *FAKES, "plain inside"])
def test_later_launches_are_given_nothing_of_it(how, name):
    """On a machine with kernels: what a first call under something makes is not what later calls get, not even in
    views that are kept by the identity of the index tensors."""
    function, inputs = CALLS[name]()
    under = RECORDED | COMPUTED | FAKES | {"plain inside": plain_inside}
    with machine.override(Recorder()) as fresh:
        results(function, inputs)
    with machine.override(Recorder()) as here:
        under[how](function, inputs)
        assert not here.launches and not here.plans or how not in FAKES and how != "plain inside"
        here.launches.clear()
        results(function, inputs)
        ((op, spec, launch),) = here.launches
    (want,) = fresh.launches
    assert (op, spec) == want[:2]
    given = [t for t in launch.values() if is_tensor(t)]
    assert all(t.__class__ is torch.Tensor and not torch._is_functional_tensor(t) for t in given)
    apart = ("counter_base", "counters", "o_partial")
    assert {n: looks(n, v) for n, v in launch.items() if n not in apart} == {
        n: looks(n, v) for n, v in want[2].items() if n not in apart
    }


def test_functionalize_writes_to_what_was_given():
    function, inputs = CALLS["context, outputs given"]()
    functionalized(function, inputs)
    assert bits([inputs["out"], inputs["lse"]]) == bits(results(*CALLS["context, outputs given"]())[-2:])


@pytest.mark.parametrize("name", SOME)
def test_vmap_says_that_it_knows_no_rule(name):
    function, inputs = CALLS[name]()
    call, tensors = of_tensors(function, inputs)
    with machine.override(Recorder()) as here, pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(call)(*(torch.stack([t, t]) for t in tensors))
    assert not here.launches and not here.plans


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_export(name):
    call, tensors = of_tensors(*CALLS[name]())
    program = torch.export.export(Module(call), tuple(tensors))
    assert len(operators(program.graph_module)) == 1
    assert bits(program.module()(*tensors)) == bits(results(*CALLS[name]()))


FLAGS = [("context", "causal"), ("decode", "enable_pdl"), ("top_k", "sorted")]


@pytest.mark.slow
@pytest.mark.parametrize("name,flag", FLAGS)
@pytest.mark.parametrize("how", ["compile", "make_fx"])
def test_flags_that_compare_symbolic_sizes(how, name, flag):
    """The operator takes the flag's value, which the sizes decide."""
    function, inputs = CALLS[name]()
    first, *_ = inputs
    call, tensors = of_tensors(lambda **given: function(**given | {flag: given[first].shape[0] > 2}), inputs)
    torch.compiler.reset()
    if how == "compile":
        found = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)(*tensors)
    else:
        graph = make_fx(call, tracing_mode="symbolic")(*tensors)
        (node,) = (node for node in graph.graph.nodes if node.target in OPERATORS)
        names = [argument.name for argument in node.target._schema.arguments]
        assert (dict(zip(names, node.args)) | node.kwargs)[flag] is True
        found = graph(*tensors)
    want = results(function, CALLS[name]()[1] | {flag: True})
    assert inputs[first].shape[0] > 2 and bits(found) == bits(want)


def test_parameters_are_plain():
    function, inputs = CALLS["context"]()
    with machine.override(Recorder()) as here:
        function(**inputs | {"query": torch.nn.Parameter(inputs["query"], requires_grad=False)})
        assert len(here.launches) == 1


def test_a_marked_fake_is_no_plain_tensor():
    """Of a module's parameters, made fake: they are instances of Parameter still."""
    function, inputs = CALLS["context"]()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query = torch.nn.Parameter(mode.from_tensor(inputs["query"]), requires_grad=False)
    assert isinstance(query, torch.nn.Parameter) and type(query) is FakeTensor
    with machine.override(Recorder()) as here:
        assert plain.traced(query) and not plain.traced(torch.nn.Parameter(inputs["query"], requires_grad=False))
        (found,) = results(
            function, tree_map(lambda t: mode.from_tensor(t) if is_tensor(t) else t, inputs) | {"query": query}
        )
        assert isinstance(found, FakeTensor) and not here.launches


class Compiled(Recorder):
    """Whose kernels read no fake, as compiled ones."""

    def recorded(self, op, spec):
        def kernel(*flat):
            if any(isinstance(value, FakeTensor) for value in flat):
                raise RuntimeError("no memory")

        return kernel


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["context, outputs given", "xqa", *topk_cases.FUNCTIONS])
def test_fakes_beside_a_plain_first_tensor_are_refused(name, known):
    function, inputs = CALLS[name]()
    unread = ("workspace_buffer", "cum_seq_lens_kv", "semaphores")
    fields = [f for f, v in inputs.items() if f not in unread and is_tensor(v[0] if isinstance(v, tuple) else v)]
    with machine.override(Compiled() if known else machine.HostMachine()):
        if known:
            function(**inputs)
        for field in fields[1:]:
            fake = tree_map(FakeTensorMode().from_tensor, inputs[field])
            with pytest.raises(TypeError, match=rf"^{field}.*: a FakeTensor, must have memory"):
                function(**inputs | {field: fake})


def test_a_graph_that_captures_index_tensors_keeps_none():
    """The operator keeps no view of the temporaries that a graph gives to it."""
    from wrappers.attention import call

    function, inputs = CALLS["context"]()
    before = call._kept
    make_fx(lambda query: function(**inputs | {"query": query}))(inputs["query"])
    assert call._kept is before
