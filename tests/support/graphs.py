"""Functional graphs that torch.compile makes of a step: their capture, and what a GPU would refuse in them."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

_aten = torch.ops.aten
SEARCHES = {_aten.searchsorted.Tensor: 0, _aten.bucketize.Tensor: 1}  # operator -> position of what is searched


def keeping(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Return a backend of torch.compile that runs graphs as they are, and appends each to a list."""

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return nop(graph, inputs)

    return aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)


def written_inputs(graph: fx.GraphModule) -> list[str]:
    """Return the inputs that a graph writes to. With one, torch captures no CUDA graph."""
    copies = [node.args[0] for node in graph.graph.nodes if node.target is _aten.copy_.default]
    return [node.name for node in copies if isinstance(node, fx.Node) and node.op == "placeholder"]


def searched(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of the tensors in which a graph searches."""
    nodes = [node for node in graph.graph.nodes if node.target in SEARCHES]
    return [node.args[SEARCHES[node.target]] for node in nodes]


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of another one. On a GPU, Inductor of torch 2.11 refuses to search a view, or
    ignores its offset."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return isinstance(node.target, torch._ops.OpOverload) and any(
        argument.alias_info is not None for argument in node.target._schema.arguments
    )
