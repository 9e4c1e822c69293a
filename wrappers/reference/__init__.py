"""Every public function in plain torch, fp32 inside: it serves calls without a kernel, and is the tests' oracle."""

from .cache_write import write_rows
from .dense import LOG2E, HeadTerms, attention
from .gather_rows import gather_rows
from .indexer import indexer_logits, indexer_windows
from .latent import latent_values, read_latent, write_latent
from .masks import LeftBound, TokenMask, left_bound
from .merge_states import merge_state, merge_states
from .paged import formed_lse, gather, paged_attention, store
from .topk import gather_bits, order_keys, sort_rows, top_k_rows

__all__ = [
    "LOG2E", "HeadTerms", "LeftBound", "TokenMask", "attention", "formed_lse", "gather", "gather_bits", "gather_rows",
    "indexer_logits", "indexer_windows", "latent_values", "left_bound", "merge_state", "merge_states", "order_keys",
    "paged_attention", "read_latent", "store", "sort_rows",
    "top_k_rows", "write_latent", "write_rows",
]  # fmt: skip
