"""FlashInfer's prefill family: one request by a function, batches by classes with plan and run; and its decode class.

- single: `single_prefill_with_kv_cache` and its variant that also returns the LSE
- paged: `BatchPrefillWithPagedKVCacheWrapper`, `BatchAttentionWithAttentionSinkWrapper`
- ragged: `BatchPrefillWithRaggedKVCacheWrapper`
- decode: `BatchDecodeWithPagedKVCacheWrapper`, `fast_decode_plan`
- batch: the common base of the classes: buffers, the copy of index tensors, and the checks of run against plan
- values: functions on argument values that plan and the function share: names, types, scales, masks
"""

from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from .paged import BatchAttentionWithAttentionSinkWrapper, BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "fast_decode_plan",
    "single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse",
]  # fmt: skip
