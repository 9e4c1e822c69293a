"""This package's writers and readers of the caches of latent attention (MLA) and of its indexer, in vLLM.

    VLLM_PLUGINS=cute_kernels_mla vllm serve MODEL

`replace` replaces the operators of `vllm._custom_ops` by the functions of `wrappers` of the same names, so the engine's
own MLA backends, and its sparse indexer, call them. A call that a function does not support, such as
`concat_and_cache_mla` with `skip_scale`, with rows of fp32 or with a cache of e5m2, goes to vLLM's operator: a function
refuses before anything is written.

Written for vLLM 0.33. Tested on the CPU reference against vLLM's own files; not run inside a server.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm import _custom_ops as ops

from ..host.checks import UnknownName
from ..vllm import latent, latent_gather

FUNCTIONS = (
    latent.concat_and_cache_mla,
    latent.concat_and_cache_mla_rope_fused,
    latent.concat_mla_q,
    latent.indexer_k_quant_and_cache,
    latent_gather.cp_gather_and_upconvert_fp8_kv_cache,
    latent_gather.cp_gather_and_upconvert_nvfp4_kv_cache,
    latent_gather.cp_gather_cache,
    latent_gather.cp_gather_indexer_k_quant_cache,
    latent_gather.gather_and_maybe_dequant_cache,
)
REFUSALS = NotImplementedError, TypeError, UnknownName  # of modes, of dtypes, and of names


def instead_of(theirs: Callable[..., None], ours: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `ours`, or `theirs` if ours does not support the call."""

    @wraps(ours)
    def call(*args: Any, **named: Any) -> None:
        try:
            ours(*args, **named)
        except REFUSALS:
            theirs(*args, **named)

    return call


def replace() -> None:
    """Replace vLLM's operators; may be called again."""
    for function in FUNCTIONS:
        theirs = getattr(ops, function.__name__)
        if getattr(theirs, "__wrapped__", None) is not function:
            setattr(ops, function.__name__, instead_of(theirs, function))
