"""Public functions on torch tensors: signatures, validation, the reference, and the way to compiled kernels.

No function has a backward. In grad mode, queries, caches, sinks and scores that require grad are refused with a
RuntimeError; other arguments are treated as constants. Under torch.no_grad() and inference_mode() all of them may be
parameters.
"""

from .cache_write.quantize import nvfp4_dequantize, nvfp4_quantize
from .cache_write.rotation import RotaryEmbedding
from .deep_gemm.api import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)
from .flash_attn.api import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .flash_mla.api import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from .flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from .flashinfer.dsa_indexer import dsa_indexer_topk, dsa_indexer_topk_workspace_size
from .flashinfer.dsa_sparse_attention import dsa_sparse_attention, dsa_sparse_attention_varlen
from .flashinfer.engines import trtllm_fmha_v2_prefill, xqa_batch_decode_with_kv_cache
from .flashinfer.latent import append_paged_mla_kv_cache, concat_mla_k
from .flashinfer.latent_nvfp4 import nvfp4_quantize_append_paged_mla_kv_cache
from .flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from .flashinfer.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from .flashinfer.quantization import packbits, segment_packbits
from .flashinfer.ragged_deepseek import trtllm_ragged_attention_deepseek
from .flashinfer.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from .flashinfer.rope_quantize import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from .flashinfer.single_decode import single_decode_with_kv_cache
from .flashinfer.single_prefill import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .flashinfer.topk import top_k, top_k_page_table_transform, top_k_ragged_transform
from .flashinfer.trtllm import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from .flashinfer.wrapper_classes import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    MLAPlanMetadata,
    fast_decode_plan,
)
from .flashinfer.xqa import xqa
from .fp4 import FP4Tensor
from .host import runtime as runtime  # docs/promises.md names `wrappers.runtime.KernelNotFound`
from .own.append_latent import IndexerRows, LatentCache, LatentNorm, LatentOutputs, LatentQuery, append_latent
from .own.append_qkv import BlockTable, KVCacheTarget, PageLists, QueryOutput, RMSNorm, append_qkv
from .own.binding import bind
from .own.explanation import Explanation, explain
from .own.gather_latent import gather_latent
from .own.select import select_rows, select_slots
from .own.sparse_paged_attention import sparse_paged_attention
from .topk.checks import TopKTieBreak
from .vllm.latent import (
    concat_and_cache_mla,
    concat_and_cache_mla_rope_fused,
    concat_mla_q,
    indexer_k_quant_and_cache,
)
from .vllm.latent_gather import (
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_and_upconvert_nvfp4_kv_cache,
    cp_gather_cache,
    cp_gather_indexer_k_quant_cache,
    gather_and_maybe_dequant_cache,
)
from .vllm.topk import cooperative_topk, persistent_topk, top_k_per_row_decode, top_k_per_row_prefill

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper", "BlockTable", "Explanation", "FP4Tensor", "IndexerRows", "KVCacheTarget",
    "LatentCache", "LatentNorm", "LatentOutputs", "LatentQuery", "MLAPlanMetadata", "PageLists", "QueryOutput",
    "RMSNorm", "RotaryEmbedding", "TopKTieBreak", "append_latent", "append_paged_kv_cache", "append_paged_mla_kv_cache",
    "append_qkv", "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace", "bind",
    "concat_and_cache_mla", "concat_and_cache_mla_rope_fused", "concat_mla_k", "concat_mla_q", "cooperative_topk",
    "cp_gather_and_upconvert_fp8_kv_cache", "cp_gather_and_upconvert_nvfp4_kv_cache", "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache", "dsa_indexer_topk", "dsa_indexer_topk_workspace_size", "dsa_sparse_attention",
    "dsa_sparse_attention_varlen", "explain", "fast_decode_plan", "flash_attn_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits", "fp8_mqa_logits", "fp8_paged_mqa_logits", "gather_and_maybe_dequant_cache",
    "gather_latent", "get_batch_indices_positions", "get_mla_metadata", "get_paged_mqa_logits_metadata", "get_seq_lens",
    "indexer_k_quant_and_cache", "merge_state", "merge_state_in_place", "merge_states", "mla_rope_quantize_fp8",
    "nvfp4_dequantize", "nvfp4_quantize", "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "nvfp4_quantize_append_paged_mla_kv_cache", "packbits",
    "persistent_topk", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache", "segment_packbits",
    "select_rows", "select_slots", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse", "sparse_paged_attention", "top_k", "top_k_page_table_transform",
    "top_k_per_row_decode", "top_k_per_row_prefill", "top_k_ragged_transform", "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla", "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek", "xqa", "xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla",
]  # fmt: skip
