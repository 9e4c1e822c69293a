"""Nothing has a backward: what requires grad is refused in grad mode, in the same words on the CPU, where kernels serve
and under torch.compile, and works where nobody asks for gradients."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import wrappers
from tests.host.test_plans import Recorder
from tests.host.test_traced import CALLS, bits, of_tensors, results
from wrappers.host import machine

REFUSED = [  # call, argument, what the message calls it
    ("context", "query", "query"),
    ("context", "kv_cache", r"kv_cache \(K\)"),
    ("context", "sinks", "sinks"),
    ("context, unsigned lengths", "kv_cache", r"kv_cache \(K\)"),
    ("decode, equal", "query", "query"),
    ("decode, drafts", "sinks", "sinks"),
    ("xqa", "q", "q"),
    ("xqa", "v_cache", "v_cache"),
    ("xqa, drafts", "sinks", "sinks"),
    ("top_k", "input", "input"),
    ("top_k_ragged_transform", "input", "input"),
    ("top_k_page_table_transform", "input", "input"),
    ("top_k_per_row_prefill", "logits", "logits"),
    ("top_k_per_row_decode", "logits", "logits"),
]
CONSTANT = [("context, scales of tensors", "bmm1_scale"), ("context, scales of tensors", "bmm2_scale")]
CONSTANT += [("context, outputs given", "out"), ("context, outputs given", "lse"), ("decode, log2", "bmm1_scale_log2")]


def learnt(value):
    """The same as parameters, where it has gradients."""

    def parameter(t):
        able = isinstance(t, torch.Tensor) and t.is_floating_point() and t.element_size() > 1
        return torch.nn.Parameter(t.clone(memory_format=torch.preserve_format)) if able else t

    return tree_map(parameter, value)


def with_parameter(name, argument):
    function, inputs = CALLS[name]()
    return function, inputs | {argument: learnt(inputs[argument])}


@pytest.mark.parametrize("name,argument,called", REFUSED)
def test_refused_on_every_machine(name, argument, called):
    function, inputs = with_parameter(name, argument)
    message = f"^{called}: requires grad, and this function has no backward: call it under torch.no_grad"
    with pytest.raises(RuntimeError, match=message):
        function(**inputs)
    with machine.override(Recorder()) as here, pytest.raises(RuntimeError, match=message):
        function(**inputs)
    assert not here.launches
    function, inputs = CALLS[name]()
    function(**inputs)  # in grad mode, too


@pytest.mark.slow
@pytest.mark.parametrize("name,argument,called", [REFUSED[0], REFUSED[6], REFUSED[9]])
def test_refused_by_compiled_calls(name, argument, called):
    """With fullgraph=True the sentence is in Dynamo's own error, which is a RuntimeError too."""
    torch.compiler.reset()
    function, inputs = with_parameter(name, argument)
    with pytest.raises(RuntimeError, match=f"'{called}: requires grad, and"):
        torch.compile(function, fullgraph=True, backend="eager")(**inputs)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=f"^{called}: requires grad, and"):
        torch.compile(function, backend="eager")(**inputs)


@pytest.mark.parametrize("name", ["context", "top_k"])
def test_refused_by_the_operators(name):
    """A graph that was made of other tensors calls them alone."""
    call, tensors = of_tensors(*CALLS[name]())
    traced = make_fx(call)(*tensors)
    with pytest.raises(RuntimeError, match="requires grad, and this function has no backward"):
        traced(torch.nn.Parameter(tensors[0]), *tensors[1:])
    with torch.no_grad():
        assert bits(traced(torch.nn.Parameter(tensors[0]), *tensors[1:])) == bits(call(*tensors))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_work_without_gradients(mode, name):
    function, inputs = CALLS[name]()
    want = bits(results(*CALLS[name]()))
    with mode():
        assert bits(results(function, learnt(inputs))) == want
    with machine.override(Recorder()) as here, mode():
        if name != "context, nvfp4 out":  # has no kernel
            results(function, learnt(inputs))
            assert len(here.launches) == (2 if name == "top_k, sorted" else 1)


@pytest.mark.parametrize("name,argument", CONSTANT)
def test_other_arguments_are_constants(name, argument):
    function, inputs = with_parameter(name, argument)
    found = results(function, inputs)
    assert bits(found) == bits(results(*CALLS[name]()))
    assert all(t.grad_fn is None for t in found)


def test_nvfp4_helpers_are_constants():
    x = torch.randn(2, 32, requires_grad=True)
    data, scales = wrappers.nvfp4_quantize(x)
    y = wrappers.nvfp4_dequantize(data, scales)
    assert not scales.requires_grad and not y.requires_grad


@pytest.mark.parametrize("name", ["context", "decode, equal", "xqa", "top_k"])
def test_serving_asks_no_tensor(name, monkeypatch):
    """Host time: outside grad mode, nobody looks at whether something requires grad."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "requires_grad", property(lambda t: bool(asked.append(t))))
    with machine.override(Recorder()):
        function, inputs = CALLS[name]()
        with torch.no_grad():
            function(**inputs)
        assert not asked
        for _ in range(3):  # the second call binds the launch of the layer
            asked.clear()
            function(**inputs)
        assert 1 <= len(asked) <= 4
