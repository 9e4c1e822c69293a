"""The families of functions that are drawn. Each has `draw`, `build` and `smaller`."""

from types import ModuleType
from typing import NamedTuple

from . import attention, attention_draw, cache_write, merging, small, topk


class Family(NamedTuple):
    """Modules of a family. draws: has `draw`. builds: has `build` and `smaller`. weight: its share of calls."""

    draws: ModuleType
    builds: ModuleType
    weight: int


FAMILIES = {
    "decode": Family(attention_draw, attention, 30),
    "prefill": Family(attention_draw, attention, 26),
    "layers": Family(attention_draw, attention, 8),
    "topk": Family(topk, topk, 14),
    "cache": Family(cache_write, cache_write, 14),
    "merge": Family(merging, merging, 4),
    "small": Family(small, small, 4),
}
