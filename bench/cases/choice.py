"""Choose kernels by the function that is called instead of by shapes, so that small cases reach every kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cute_kernels.attention.request import KernelRequest
from wrappers.attention import plan

SPLIT = ("trtllm_batch_decode_with_kv_cache", "xqa", "BatchDecodeWithPagedKVCacheWrapper")
WHOLE = (
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "BatchPrefill",
    "BatchAttention",
    "single_prefill_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
)
USUAL = plan.request_of  # the request of a user's call


@contextmanager
def _requests(request_of: Callable[..., KernelRequest]) -> Iterator[None]:
    """Let `request_of` make the requests of calls."""
    before, plan.request_of = plan.request_of, request_of
    try:
        yield
    finally:
        plan.request_of = before


@contextmanager
def by_shape() -> Iterator[None]:
    """Choose kernels as for users, also inside `by_function`. A machine keeps its plans: use one that has none."""
    with _requests(USUAL):
        yield


@contextmanager
def by_function() -> Iterator[None]:
    """Serve decode functions by kernels that split keys, and prefill functions by whole tiles, whatever the shapes.

    Calls that ask for a way of splitting, and functions of FlashAttention, are served as always. Plans are kept by
    function, so none of another choice is found.
    """
    request_of = plan.request_of

    def chosen(call: Any, sms: int = 132) -> KernelRequest:
        request = request_of(call, sms)
        if request.split_kv != "auto":
            return request
        way = "always" if call.signature.startswith(SPLIT) else "never" if call.signature.startswith(WHOLE) else "auto"
        return replace(request, split_kv=way)

    with _requests(chosen):
        yield
