"""Calls on tensors that are not plain go through the torch operators: they are recorded, and nothing is launched."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from tests.test_plans import CONTEXT, DECODE, EQUAL, PLAIN, Recorder, tokens_apart
from wrappers import machine

OPERATORS = {"attention": torch.ops.cute_kernels.attention, "top_k": torch.ops.cute_kernels.top_k_rows}


def call(name):
    """(query or scores, a function of them that calls a public function and returns what it wrote)."""
    if name == "top_k":
        inputs = topk_cases.make_inputs(topk_cases.PLAIN[topk_cases.TOP_K])
        return inputs.pop("input"), lambda scores: wrappers.top_k(scores, **inputs)[0]
    if name == "decode":
        inputs, function = tokens_apart(EQUAL, 2), DECODE
    else:
        inputs, function = cases.make_inputs(PLAIN), CONTEXT
    inputs |= {"out": None, "lse": None, "return_lse": False}
    return inputs.pop("query"), lambda query: function(query, **inputs)


NAMES = ("context", "decode", "top_k")


@pytest.mark.parametrize("name", NAMES)
def test_proxies_are_recorded(name):
    """Twice: views that are kept from one call to the next are not part of another graph."""
    tensor, function = call(name)
    want = function(tensor)
    for _ in range(2):
        graph = make_fx(function)(tensor)
        targets = [node.target for node in graph.graph.nodes]
        operator = OPERATORS["top_k" if name == "top_k" else "attention"]
        assert operator.default in targets and torch.equal(graph(tensor), want)


@pytest.mark.parametrize("transform", [torch.func.functionalize, torch.vmap])
@pytest.mark.parametrize("name", NAMES)
def test_transforms_say_that_they_know_no_rule(name, transform):
    """Wrapped tensors have no memory of their own: nothing may be launched on them."""
    tensor, function = call(name)
    given = tensor if transform is torch.func.functionalize else torch.stack([tensor, tensor])
    with machine.override(Recorder()) as here, pytest.raises((RuntimeError, NotImplementedError)):
        transform(function)(given)
    assert not here.launches and not here.plans


@pytest.mark.parametrize("name", ["context", "decode"])
def test_fake_tensors(name):
    tensor, function = call(name)
    with machine.override(Recorder()) as here, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = function(mode.from_tensor(tensor))
        assert out.shape == tensor.shape and isinstance(out, torch._subclasses.FakeTensor)
        assert not here.launches and not here.plans


def test_parameters_are_plain():
    tensor, function = call("context")
    with machine.override(Recorder()) as here:
        function(torch.nn.Parameter(tensor, requires_grad=False))
        assert len(here.launches) == 1


def test_a_graph_that_captures_index_tensors_keeps_none():
    """The operator keeps no view of the temporaries that a graph gives to it."""
    from wrappers.attention import problem

    before = problem._last
    tensor, function = call("context")
    make_fx(function)(tensor)
    assert problem._last is before
