"""The families of functions that are drawn. Each has `draw`, `build` and `smaller`."""

from types import ModuleType
from typing import NamedTuple

from . import attention, attention_draw, cache_write, chosen, indexer, latent, latent_read, merging, mla, small, topk


class FuzzFamily(NamedTuple):
    """Modules of a family. draws: has `draw`. builds: has `build` and `smaller`. weight: its share of calls."""

    draws: ModuleType
    builds: ModuleType
    weight: int


FAMILIES = {
    "decode": FuzzFamily(attention_draw, attention, 30),
    "prefill": FuzzFamily(attention_draw, attention, 26),
    "layers": FuzzFamily(attention_draw, attention, 8),
    "chosen": FuzzFamily(chosen, attention, 6),
    "topk": FuzzFamily(topk, topk, 14),
    "cache": FuzzFamily(cache_write, cache_write, 14),
    "latent": FuzzFamily(latent, latent, 8),
    "gather": FuzzFamily(latent_read, latent_read, 4),
    "mla": FuzzFamily(mla, mla, 6),
    "indexer": FuzzFamily(indexer, indexer, 4),
    "merge": FuzzFamily(merging, merging, 4),
    "small": FuzzFamily(small, small, 4),
}
