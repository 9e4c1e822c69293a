"""The launches that functions keep for the layers of a model, by their caches.

A layer calls a function at each step with the same cache and the same options. Only the query, the requests and the
outputs differ. From the third such call on, the function finds the layer's launch by its cache and repeats it. The
launch is forgotten when the cache is freed.
"""

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from ..host import machine
from .bound import BoundLaunch, bound, memory_of, tensors_of
from .call import SEPARATE, SHARED, AttentionCall, sequences_of
from .op import serve

MOST_LAYERS = 1024  # caches of which a launch is kept
SCALES = 2  # the first options: factors on the logits and on the output
_Tensor, _is_dynamo_compiling = torch.Tensor, torch.compiler.is_dynamo_compiling


class Layer(NamedTuple):
    """A layer's cache, and the launch that a function keeps for it.

    caches: weak references to its tensors. options: all arguments that a step does not change. tried: whether these
    options were seen twice. launch: set at that time if the call can be bound. kv: K and V as the launch takes them.
    tensors: those among the options. memory: of the caches and of these tensors when the launch was bound
    (`memory_of`).
    """

    caches: tuple[Any, ...]
    options: tuple[Any, ...]
    tried: bool = False
    launch: BoundLaunch | None = None
    kv: tuple[Any, ...] = ()
    tensors: Sequence[torch.Tensor] = ()
    memory: Sequence[Any] = ()


class Step(NamedTuple):
    """The tensors of a call that differ from step to step, as the caller gives them."""

    q: Any
    table: Any  # a row per request
    lens: Any
    offsets: Any  # of the queries, or None
    out: Any
    lse: Any
    shared: Any  # whether K and V have the table in common


def repeat(function: str, cache: Any, options: tuple[Any, ...], step: Step, bounds: Any) -> Any:
    """Return the result of a layer's launch with the tensors of a step, or None if the layer has none that fits.

    options: the arguments of the function that a step does not change, the scales first. bounds: the largest query
    length and the number of requests, or None if the options have them.
    """
    if _is_dynamo_compiling():
        return None
    caches = cache if cache.__class__ is tuple and cache else (cache,)
    layer = machine.current.layers.get((function, id(caches[0])))
    if layer is None or layer.launch is None or not _same(options, layer.options) or not _holds(layer, caches):
        return None
    launch, kept = layer.launch, layer.launch.call
    if bounds is not None and (bounds != (kept.max_q_len, kept.requests.batch) or not set(map(type, bounds)) == {int}):
        return None
    if not launch.fits(step.q, layer.kv, step.out):
        return None
    requests = sequences_of(step.table, step.lens, step.offsets, True, SHARED if step.shared is True else SEPARATE)
    if requests.shape_id != kept.requests.shape_id:
        return None
    return launch.launch(step.q, layer.kv, requests, step.out, step.lse)


def keep(function: str, cache: Any, options: tuple[Any, ...], call: AttentionCall) -> Any:
    """Serve a call, keep its launch if its layer has made it before, and return its result."""
    result, here = serve(call), machine.current
    if call.requests.shape_id is None or call.drafts is not None or here.device_info(call.q.device) is None:
        return result
    caches = cache if cache.__class__ is tuple and cache else (cache,)
    if not all(isinstance(t, _Tensor) for t in caches) or not here.may_keep(call.q.device):
        return result
    layers, key = here.layers, (function, id(caches[0]))
    before = layers.get(key)
    if before is not None and _same(options, before.options) and _holds(before, caches):
        if not before.tried:
            launch = None if any(map(_is_read, options)) else bound(call)
            kv = () if launch is None else (_alias(call.k), _alias(call.v))
            tensors = tensors_of(options)
            memory = memory_of((*caches, *tensors))
            layers[key] = before._replace(tried=True, launch=launch, kv=kv, tensors=tensors, memory=memory)
        return result
    if len(layers) >= MOST_LAYERS:
        layers.clear()
    held = tuple(ref(t, partial(_forget, layers, key)) for t in caches)
    layers[key] = Layer(held, options)
    return result


def _holds(layer: Layer, caches: tuple[Any, ...]) -> bool:
    """Return whether a layer's caches are these tensors, and all its tensors have the memory that they had."""
    if len(caches) != len(layer.caches):
        return False
    for t, known in zip(caches, layer.caches):
        if known() is not t:
            return False
    for t, (address, shape, strides) in zip((*caches, *layer.tensors), layer.memory):
        if t.data_ptr() != address or t.shape != shape or t.stride() != strides:
            return False
    return True


def _same(options: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether options are the same objects, or the scales, which come first, equal floats."""
    if not all(map(is_, options[SCALES:], before[SCALES:])):
        return False
    for a, b in zip(options[:SCALES], before):
        if a is not b and not (a.__class__ is b.__class__ is float and a == b):
            return False
    return True


def _forget(layers: dict[Any, Layer], key: Any, _: Any) -> None:
    layers.pop(key, None)


def _is_read(option: Any) -> bool:
    """Return whether the host reads or copies values of an option: a tensor in its memory, or tensors in a list."""
    return isinstance(option, (tuple, list)) or isinstance(option, _Tensor) and machine.current.is_host(option)


def _alias(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of another one, which may be freed: it is no view of it."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )
