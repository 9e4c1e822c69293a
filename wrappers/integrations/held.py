"""The views of a layer's cache that an integration keeps from step to step."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from ..attention.bound import LayerLaunch
from ..attention.views import alias
from ..host.plain import traced


class HeldCache:
    """The views of a layer's cache, the same at each step, and the launch on them. They are freed with the engine's
    tensor.

    launch: keeps the plan and the arguments of the layer's attention.
    """

    __slots__ = ("__weakref__", "_held", "_make", "_owner", "launch")

    def __init__(self, owner: Any, make: Callable[[Any, torch.Tensor], Any]) -> None:
        """make: takes the owner, the layer's implementation, and its cache, and returns the views."""
        self._owner, self._make = ref(owner), make
        self._held: Any = None  # a weak reference to the cache, its memory, and its views
        self.launch = LayerLaunch()

    def of(self, kv_cache: torch.Tensor) -> Any:
        """Return the views of the engine's tensor."""
        held, memory = self._held, (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if held is None or held[0]() is not kv_cache or held[1] != memory:
            self.launch.forget()
            own = kv_cache if traced(kv_cache) else alias(kv_cache)
            views = self._make(self._owner(), own)
            self._held = held = ref(kv_cache, partial(_free, ref(self))), memory, views
        return held[2]


def _free(holder: Any, _: Any) -> None:
    """Drop the views of a cache that the engine has freed, and the launch on them. holder: a weak reference."""
    found = holder()
    if found is not None:
        found._held = None
        found.launch.forget()
