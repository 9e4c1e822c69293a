"""torch-facing public functions: signatures, validation, the reference, and the way to compiled kernels.

Nothing here has a backward. In grad mode, queries, caches, sinks and scores that require grad are refused with a
RuntimeError; other arguments are taken as constants. Under torch.no_grad() and inference_mode() they may be parameters.
"""

from .attention.trtllm import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from .attention.xqa import xqa
from .explanation import Explanation, explain
from .fp4 import FP4Tensor, nvfp4_dequantize, nvfp4_quantize
from .prefill import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits
from .topk import (
    TopKTieBreak,
    top_k,
    top_k_page_table_transform,
    top_k_per_row_decode,
    top_k_per_row_prefill,
    top_k_ragged_transform,
)

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "Explanation",
    "FP4Tensor",
    "TopKTieBreak",
    "explain",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "packbits",
    "segment_packbits",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "top_k",
    "top_k_page_table_transform",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "top_k_ragged_transform",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa",
]
