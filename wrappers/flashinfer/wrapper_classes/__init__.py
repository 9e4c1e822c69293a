"""FlashInfer's classes for batches, with plan and run.

- paged: `BatchPrefillWithPagedKVCacheWrapper`, `BatchAttentionWithAttentionSinkWrapper`
- ranges: `BatchPrefillWithCausalBidirectionalRangesWrapper`
- ragged: `BatchPrefillWithRaggedKVCacheWrapper`
- decode: `BatchDecodeWithPagedKVCacheWrapper`, `fast_decode_plan`
- batch: the common base of the classes: buffers, the copy of index tensors, and the checks of run against plan
"""

from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from .paged import BatchAttentionWithAttentionSinkWrapper, BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .ranges import BatchPrefillWithCausalBidirectionalRangesWrapper

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper", "fast_decode_plan",
]  # fmt: skip
