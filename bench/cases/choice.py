"""Choose kernels by the function that is called instead of by shapes, so that small cases reach every kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cute_kernels.attention.request import KernelRequest
from wrappers.attention import plan

SPLIT = ("trtllm_batch_decode_with_kv_cache", "xqa", "BatchDecodeWithPagedKVCacheWrapper")
WHOLE = ("trtllm_batch_context_with_kv_cache", "BatchPrefill", "BatchAttention", "single_prefill_with_kv_cache")


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

    plan.request_of = chosen
    try:
        yield
    finally:
        plan.request_of = request_of
