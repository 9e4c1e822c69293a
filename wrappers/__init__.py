"""torch-facing public functions: signatures, validation, the reference, and the way to compiled kernels."""

from .fp4 import FP4Tensor, nvfp4_dequantize, nvfp4_quantize
from .prefill import Explanation, explain, trtllm_batch_context_with_kv_cache

__all__ = [
    "Explanation",
    "FP4Tensor",
    "explain",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "trtllm_batch_context_with_kv_cache",
]
