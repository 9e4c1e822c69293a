"""Small problems for the kernels of this project, run in the simulator and compared with the reference."""

from collections.abc import Callable
from typing import Any

from .attention import attention_cases, run_attention, structures
from .attention_features import attention_features
from .cache_write import cache_write_cases, cache_write_features, cache_write_structures, run_cache_write
from .common import SMS, Outcome, distance, simulated
from .indexer import logits_cases, logits_features, logits_structures, run_logits
from .latent import latent_cases, latent_features, latent_structures, run_latent
from .merge_states import merge_cases, merge_features, merge_structures, run_merge
from .topk import run_topk, topk_cases, topk_features, topk_structures

__all__ = ["CASES", "FEATURES", "RUN", "SMS", "STRUCTURES", "Outcome", "distance", "simulated"]

# By operator family: small problems of a shipped kernel; problems that reach every feature, run through the public
# function by the kernel that dispatch chooses; the function that runs either; one kernel per structure.
CASES: dict[str, Callable[..., list[Any]]] = {
    "attention": attention_cases,
    "topk": topk_cases,
    "cache_write": cache_write_cases,
    "latent": latent_cases,
    "merge_states": merge_cases,
    "indexer": logits_cases,
}
FEATURES: dict[str, Callable[[], list[Any]]] = {
    "attention": attention_features,
    "topk": topk_features,
    "cache_write": cache_write_features,
    "latent": latent_features,
    "merge_states": merge_features,
    "indexer": logits_features,
}
RUN: dict[str, Callable[..., Outcome]] = {
    "attention": run_attention,
    "topk": run_topk,
    "cache_write": run_cache_write,
    "latent": run_latent,
    "merge_states": run_merge,
    "indexer": run_logits,
}
STRUCTURES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "attention": structures,
    "topk": topk_structures,
    "cache_write": cache_write_structures,
    "latent": latent_structures,
    "merge_states": merge_structures,
    "indexer": logits_structures,
}
