"""Tensors of an engine that a call of an adapter must leave as they are: all that its arguments hold, byte by byte.

An adapter may write its outputs, and rows of a cache at the slots that it was given. `watched` wraps a method of an
adapter, so that each call of every test is compared with copies of the memory before it. Only memory of the host is
compared: on a GPU, a copy would wait.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.bad_values import BITS, recast
from tests.support.layouts import Memory, laid_out, strides_of
from wrappers import FP4Tensor

Written = Callable[[dict[str, Any]], Iterable[torch.Tensor]]


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the host's tensors that an object of an engine or of an adapter holds, at any depth, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
        return
    if isinstance(value, dict):
        parts: Iterable[Any] = list(value.values())
    elif isinstance(value, FP4Tensor):
        parts = value.data, value.scale
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif isinstance(value, (torch.nn.Module, SimpleNamespace)) or is_dataclass(value) or _of_an_engine(value):
        parts = list(getattr(value, "__dict__", {}).values())
    else:
        return
    for part in parts:
        yield from tensors_in(part, seen)


def _of_an_engine(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] in ("vllm", "sglang") or kind.__module__.startswith("wrappers.integ")


def watched(patch: Any, owner: Any, name: str, written: Written = lambda given: ()) -> None:
    """Let each call of a function compare the memory that its arguments hold with what it was.

    patch: pytest's monkeypatch. owner: the class or module that has the function. written: its arguments by name, after
    the call -> the tensors that the call may write, as views of the memory.
    """
    real = getattr(owner, name)
    names = signature(real)

    @wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        given = names.bind(*args, **options)
        with _disable_current_modes():  # a mode of torch that counts operators counts those of the call alone
            memory = Memory.of(list(tensors_in(given.arguments)), False)
            before = memory.copy()
        result = real(*args, **options)
        with _disable_current_modes():
            outputs = [t for t in written(given.arguments) if t.device.type == "cpu"]
            memory.own.update(Memory.of(outputs).own)
            changed = memory.changed(before, True)
        assert not changed, f"{name} writes to a tensor that it was given to read"
        return result

    patch.setattr(owner, name, call)


def rows_at(caches: Iterable[torch.Tensor], slots: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rows of pages (pages, heads, tokens, ...) at slots; negative ones have none."""
    slots = slots.tolist() if slots.device.type == "cpu" else []
    for cache in caches:
        for slot in slots:
            if slot >= 0:
                yield cache[slot // cache.shape[2], :, slot % cache.shape[2]]


# ---- adapters


def watch_vllm(patch: Any) -> None:
    """Watch vLLM's adapter. `patch` must be undone before the engine is."""
    from wrappers.integrations import vllm

    def stored(given: dict[str, Any]) -> Iterator[torch.Tensor]:
        caches, sf = given["self"].caches(given["kv_cache"])
        return rows_at((*caches, *(sf or ())), given["slot_mapping"])

    def outputs(given: dict[str, Any]) -> list[torch.Tensor]:
        found = given["output"], given.get("output_block_scale")
        return [t for t in found if t is not None]

    watched(patch, vllm.VllmMetadataBuilder, "build")
    watched(patch, vllm.VllmImpl, "do_kv_cache_update", stored)
    watched(patch, vllm.VllmImpl, "forward", outputs)


def watch_sglang(patch: Any) -> None:
    """Watch SGLang's adapter. `patch` must be undone before the engine is."""
    from wrappers.integrations import sglang

    def stored(given: dict[str, Any]) -> Iterator[torch.Tensor]:
        backend, layer, batch = given["self"], given["layer"], given["forward_batch"]
        windowed = backend._windows is not None and backend._windows.layers_mapping[layer.layer_id][1]
        slots = backend.forward_metadata.window_loc if windowed else batch.out_cache_loc
        caches, _ = backend._held(layer, backend.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        return rows_at((cache.transpose(1, 2) for cache in caches), slots)

    watched(patch, sglang.SglangBackend, "_metadata")
    for name in ("forward_decode", "forward_extend"):
        watched(patch, sglang.SglangBackend, name, stored)


def watch_sglang_mla(patch: Any) -> None:
    """Watch SGLang's adapter of latent attention. `patch` must be undone before the engine is."""
    from wrappers.integrations import sglang_mla

    def stored(given: dict[str, Any]) -> Iterable[torch.Tensor]:
        backend, layer = given["self"], given["layer"]
        rows = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return rows_at([rows[:, None].transpose(1, 2)], given["forward_batch"].out_cache_loc)

    for name in ("forward_decode", "forward_extend"):
        watched(patch, sglang_mla.SglangMlaBackend, name, stored)


def watch_transformers(patch: Any) -> None:
    """Watch the function that transformers calls for each layer."""
    from wrappers.integrations import transformers

    def stored(given: dict[str, Any]) -> Iterator[torch.Tensor]:
        cache = given["paged_cache"]
        target = cache._pools[int(given["module"].layer_idx)]
        return rows_at((t.transpose(1, 2) for t in (*target.kv, *(target.sf or ()))), cache._rows)

    watched(patch, transformers, "paged_attention", stored)


# ---- other memory for an object that an adapter holds

WAYS = ("set_", "data", "another stride", "another stride at the same address")


def _apart(t: torch.Tensor) -> tuple[int, ...]:
    names = "columns apart", "rows apart by one", "first dimension apart"
    return strides_of(t)[names[min(t.ndim, len(names)) - 1]]


@torch.no_grad()
def prepared(t: torch.Tensor, way: str) -> None:
    """Give a tensor the memory that it has before it gets another in a way."""
    if way.endswith("address"):  # with room behind it
        t.data = laid_out(t, t.stride())
        t.untyped_storage().resize_(2 * t.untyped_storage().nbytes())


@torch.no_grad()
def moved(t: torch.Tensor, way: str) -> None:
    """Give a tensor other memory with equal values, and poison the memory that it had. way: one of WAYS."""
    old = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    new = laid_out(t, _apart(t) if "stride" in way else t.stride())
    poison = recast(old, BITS[t.element_size()])
    poison.fill_(-1 % 256 if t.element_size() == 1 else -1)  # NaN in each type
    if way == "set_":
        t.set_(new.untyped_storage(), 0, new.shape, new.stride())
    elif way.endswith("address"):
        there = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, new.stride())
        recast(there, BITS[t.element_size()]).copy_(recast(new, BITS[t.element_size()]))
        t.data = there
    else:
        t.data = new
