"""FlashInfer's classes for batches, with plan and run.

- paged: `BatchPrefillWithPagedKVCacheWrapper`, `BatchAttentionWithAttentionSinkWrapper`
- ranges: `BatchPrefillWithCausalBidirectionalRangesWrapper`
- ragged: `BatchPrefillWithRaggedKVCacheWrapper`
- mla: `BatchMLAPagedAttentionWrapper`, `MLAPlanMetadata`
- decode: `BatchDecodeWithPagedKVCacheWrapper`, `fast_decode_plan`
- batch: the common base of the classes: buffers, the copy of index tensors, and the checks of run against plan
"""

from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from .mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from .paged import BatchAttentionWithAttentionSinkWrapper, BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .ranges import BatchPrefillWithCausalBidirectionalRangesWrapper

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper", "MLAPlanMetadata", "fast_decode_plan",
]  # fmt: skip
