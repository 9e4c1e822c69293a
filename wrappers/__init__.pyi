# fmt: off
# ruff: noqa
"""The types of the public names. `python -m tools.stubs` writes this file; see there."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from .cache_write.quantize import (nvfp4_dequantize, nvfp4_quantize)
from .cache_write.rotation import (RotaryEmbedding)
from .deep_gemm.api import (fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits, fp8_mqa_logits, fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata)
from .flash_mla.api import (flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata)
from .flashinfer.cascade import (merge_state, merge_state_in_place, merge_states)
from .flashinfer.dsa_indexer import (dsa_indexer_topk, dsa_indexer_topk_workspace_size)
from .flashinfer.dsa_sparse_attention import (dsa_sparse_attention, dsa_sparse_attention_varlen)
from .flashinfer.engines import (trtllm_fmha_v2_prefill, xqa_batch_decode_with_kv_cache)
from .flashinfer.latent import (append_paged_mla_kv_cache, concat_mla_k)
from .flashinfer.latent_nvfp4 import (nvfp4_quantize_append_paged_mla_kv_cache)
from .flashinfer.mla import (trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla)
from .flashinfer.page import (append_paged_kv_cache, get_batch_indices_positions, get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache, nvfp4_quantize_append_paged_kv_cache_with_slot_mapping)
from .flashinfer.quantization import (packbits, segment_packbits)
from .flashinfer.rope import (apply_llama31_rope, apply_llama31_rope_inplace, apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace, apply_rope, apply_rope_inplace, apply_rope_pos_ids, apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace)
from .flashinfer.rope_quantize import (mla_rope_quantize_fp8, rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache)
from .flashinfer.single_prefill import (single_prefill_with_kv_cache_return_lse)
from .flashinfer.topk import (top_k, top_k_page_table_transform, top_k_ragged_transform)
from .flashinfer.wrapper_classes import (MLAPlanMetadata, fast_decode_plan,
    BatchAttentionWithAttentionSinkWrapper as _BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithPagedKVCacheWrapper as _BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper as _BatchMLAPagedAttentionWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper as _BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper as _BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper as _BatchPrefillWithRaggedKVCacheWrapper)
from .flashinfer.xqa import (xqa)
from .fp4 import (FP4Tensor)
from .host import (runtime as runtime)
from .own.append_latent import (IndexerRows, LatentCache, LatentNorm, LatentOutputs, LatentQuery, append_latent)
from .own.append_qkv import (BlockTable, KVCacheTarget, PageLists, QueryOutput, RMSNorm, append_qkv)
from .own.binding import (bind)
from .own.explanation import (Explanation, explain)
from .own.gather_latent import (gather_latent)
from .own.select import (select_rows, select_slots)
from .topk.checks import (TopKTieBreak)
from .vllm.latent import (concat_and_cache_mla, concat_and_cache_mla_rope_fused, concat_mla_q,
    indexer_k_quant_and_cache)
from .vllm.latent_gather import (cp_gather_and_upconvert_fp8_kv_cache, cp_gather_and_upconvert_nvfp4_kv_cache,
    cp_gather_cache, cp_gather_indexer_k_quant_cache, gather_and_maybe_dequant_cache)
from .vllm.topk import (cooperative_topk, persistent_topk, top_k_per_row_decode, top_k_per_row_prefill)

__all__ = ["BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "BlockTable", "Explanation",
    "FP4Tensor", "IndexerRows", "KVCacheTarget", "LatentCache", "LatentNorm", "LatentOutputs", "LatentQuery",
    "MLAPlanMetadata", "PageLists", "QueryOutput", "RMSNorm", "RotaryEmbedding", "TopKTieBreak", "append_latent",
    "append_paged_kv_cache", "append_paged_mla_kv_cache", "append_qkv", "apply_llama31_rope",
    "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids", "apply_llama31_rope_pos_ids_inplace", "apply_rope",
    "apply_rope_inplace", "apply_rope_pos_ids", "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace", "bind", "concat_and_cache_mla", "concat_and_cache_mla_rope_fused",
    "concat_mla_k", "concat_mla_q", "cooperative_topk", "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_and_upconvert_nvfp4_kv_cache", "cp_gather_cache", "cp_gather_indexer_k_quant_cache", "dsa_indexer_topk",
    "dsa_indexer_topk_workspace_size", "dsa_sparse_attention", "dsa_sparse_attention_varlen", "explain",
    "fast_decode_plan", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "fp8_mqa_logits",
    "fp8_paged_mqa_logits", "gather_and_maybe_dequant_cache", "gather_latent", "get_batch_indices_positions",
    "get_mla_metadata", "get_paged_mqa_logits_metadata", "get_seq_lens", "indexer_k_quant_and_cache", "merge_state",
    "merge_state_in_place", "merge_states", "mla_rope_quantize_fp8", "nvfp4_dequantize", "nvfp4_quantize",
    "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache", "packbits", "persistent_topk", "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache", "segment_packbits", "select_rows", "select_slots",
    "single_decode_with_kv_cache", "single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse",
    "sparse_paged_attention", "top_k", "top_k_page_table_transform", "top_k_per_row_decode", "top_k_per_row_prefill",
    "top_k_ragged_transform", "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla", "trtllm_fmha_v2_prefill", "trtllm_ragged_attention_deepseek", "xqa",
    "xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla"]

class BatchAttentionWithAttentionSinkWrapper(_BatchAttentionWithAttentionSinkWrapper):
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[False]=False) -> torch.Tensor: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None, return_lse: bool=False) -> Any: ...
    @overload  # type: ignore[override]
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None=None, sm_scale: float | None=None, *, return_lse: Literal[False]=False,
        **kwargs: Any) -> torch.Tensor: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None=None, sm_scale: float | None=None, *, return_lse: Literal[True],
        **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None=None, sm_scale: float | None=None, *, return_lse: bool=False,
        **kwargs: Any) -> Any: ...

class BatchDecodeWithPagedKVCacheWrapper(_BatchDecodeWithPagedKVCacheWrapper):
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str='NONE', q_scale: float | torch.Tensor | None=None,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, return_lse: Literal[False]=False) -> torch.Tensor: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str='NONE', q_scale: float | torch.Tensor | None=None,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str='NONE', q_scale: float | torch.Tensor | None=None,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, return_lse: bool=False) -> Any: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: Literal[False]=False, enable_pdl: bool | None=None, window_left: int | None=None,
        sinks: torch.Tensor | None=None, q_len_per_req: int | None=None,
        skip_softmax_threshold_scale_factor: float | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        v_scales_interleaved: bool=False) -> torch.Tensor: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: Literal[True], enable_pdl: bool | None=None, window_left: int | None=None,
        sinks: torch.Tensor | None=None, q_len_per_req: int | None=None,
        skip_softmax_threshold_scale_factor: float | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        v_scales_interleaved: bool=False) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: bool=False, enable_pdl: bool | None=None, window_left: int | None=None,
        sinks: torch.Tensor | None=None, q_len_per_req: int | None=None,
        skip_softmax_threshold_scale_factor: float | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        v_scales_interleaved: bool=False) -> Any: ...

class BatchMLAPagedAttentionWrapper(_BatchMLAPagedAttentionWrapper):
    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None,
        kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: Literal[False]=False, profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None,
        page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, *,
        query: Any=None, kv_cache: Any=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None,
        kpe_scale: float | None=None) -> torch.Tensor: ...
    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None,
        kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *,
        return_lse: Literal[True], profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None,
        page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None,
        query: Any=None, kv_cache: Any=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None,
        kpe_scale: float | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q_nope: torch.Tensor | None, q_pe: torch.Tensor | None, ckv_cache: torch.Tensor | None,
        kpe_cache: torch.Tensor | None, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: Literal[True],
        profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None,
        page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, *,
        query: Any=None, kv_cache: Any=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None,
        kpe_scale: float | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None,
        kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: bool=False, profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None,
        page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, *,
        query: Any=None, kv_cache: Any=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None,
        kpe_scale: float | None=None) -> Any: ...

class BatchPrefillWithCausalBidirectionalRangesWrapper(_BatchPrefillWithCausalBidirectionalRangesWrapper):
    @overload  # type: ignore[override]
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: Literal[False]=False, enable_pdl: bool | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, *,
        sinks: torch.Tensor | None=None) -> torch.Tensor: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *,
        return_lse: Literal[True], enable_pdl: bool | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        sinks: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor, causal_window_left: int, range_window_left: int,
        q_scale: float | torch.Tensor | None, k_scale: float | torch.Tensor | None,
        v_scale: float | torch.Tensor | None, out: torch.Tensor | None, lse: torch.Tensor | None,
        return_lse: Literal[True], enable_pdl: bool | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, *,
        sinks: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        return_lse: bool=False, enable_pdl: bool | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, *,
        sinks: torch.Tensor | None=None) -> Any: ...

class BatchPrefillWithPagedKVCacheWrapper(_BatchPrefillWithPagedKVCacheWrapper):
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[False]=False) -> torch.Tensor: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool=False, pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None, return_lse: bool=False) -> Any: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None,
        return_lse: Literal[False]=False, *, q_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, window_left: int | None=None,
        sinks: torch.Tensor | None=None, kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None,
        uses_spcompress: bool | None=None, sm_scale: float | None=None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, v_scales_interleaved: bool=False,
        bidirectional_ranges: torch.Tensor | None=None, range_window_left: int=-1,
        prefix_lens: torch.Tensor | None=None) -> torch.Tensor: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, *,
        return_lse: Literal[True], q_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, window_left: int | None=None,
        sinks: torch.Tensor | None=None, kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None,
        uses_spcompress: bool | None=None, sm_scale: float | None=None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, v_scales_interleaved: bool=False,
        bidirectional_ranges: torch.Tensor | None=None, range_window_left: int=-1,
        prefix_lens: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None, return_lse: Literal[True], *,
        q_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None,
        uses_spcompress: bool | None=None, sm_scale: float | None=None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, v_scales_interleaved: bool=False,
        bidirectional_ranges: torch.Tensor | None=None, range_window_left: int=-1,
        prefix_lens: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, return_lse: bool=False, *,
        q_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None,
        enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
        skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None,
        uses_spcompress: bool | None=None, sm_scale: float | None=None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, v_scales_interleaved: bool=False,
        bidirectional_ranges: torch.Tensor | None=None, range_window_left: int=-1,
        prefix_lens: torch.Tensor | None=None) -> Any: ...

class BatchPrefillWithRaggedKVCacheWrapper(_BatchPrefillWithRaggedKVCacheWrapper):
    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False,
        pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[False]=False) -> torch.Tensor: ...
    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False,
        pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None,
        return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False,
        pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False, window_left: int=-1,
        logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
        rope_theta: float | None=None, *, use_fp16_qk_reduction: bool | None=None, return_lse: bool=False) -> Any: ...
    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: Literal[False]=False,
        scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None, bidirectional_ranges: torch.Tensor | None=None,
        range_window_left: int=-1, prefix_lens: torch.Tensor | None=None) -> torch.Tensor: ...
    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None, bidirectional_ranges: torch.Tensor | None=None,
        range_window_left: int=-1, prefix_lens: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: Literal[True],
        scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None, bidirectional_ranges: torch.Tensor | None=None,
        range_window_left: int=-1, prefix_lens: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool=False,
        scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, *,
        q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
        v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None,
        lse: torch.Tensor | None=None, enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None, bidirectional_ranges: torch.Tensor | None=None,
        range_window_left: int=-1, prefix_lens: torch.Tensor | None=None) -> Any: ...

@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: Literal[False]=False,
    return_lse: Literal[False]=False, attention_chunk: int=0, **others: Any) -> torch.Tensor: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: Literal[True],
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: Literal[True], return_lse: bool=False,
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: bool=False,
    attention_chunk: int=0, **others: Any) -> Any: ...

@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    max_seqlen_k: int | torch.Tensor | None=None, *, seqused_k: torch.Tensor | None=None,
    block_table: torch.Tensor | None=None, page_table: torch.Tensor | None=None, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: Literal[False]=False,
    return_lse: Literal[False]=False, attention_chunk: int=0, **others: Any) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    max_seqlen_k: int | torch.Tensor | None=None, *, seqused_k: torch.Tensor | None=None,
    block_table: torch.Tensor | None=None, page_table: torch.Tensor | None=None, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: Literal[True],
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    max_seqlen_k: int | torch.Tensor | None=None, *, seqused_k: torch.Tensor | None=None,
    block_table: torch.Tensor | None=None, page_table: torch.Tensor | None=None, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: Literal[True], return_lse: bool=False,
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    max_seqlen_k: int | torch.Tensor | None=None, *, seqused_k: torch.Tensor | None=None,
    block_table: torch.Tensor | None=None, page_table: torch.Tensor | None=None, softmax_scale: float | None=None,
    causal: bool=False, window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0,
    s_aux: torch.Tensor | None=None, sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None,
    q_descale: torch.Tensor | None=None, k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None,
    num_splits: int=0, out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: bool=False,
    attention_chunk: int=0, **others: Any) -> Any: ...

@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None=None,
    v: torch.Tensor | None=None, *, cache_seqlens: int | torch.Tensor | None=None,
    cache_batch_idx: torch.Tensor | None=None, block_table: torch.Tensor | None=None,
    page_table: torch.Tensor | None=None, cu_seqlens_q: torch.Tensor | None=None,
    cu_seqlens_k_new: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    cache_leftpad: torch.Tensor | None=None, softmax_scale: float | None=None, causal: bool=False,
    window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0, s_aux: torch.Tensor | None=None,
    sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None, q_descale: torch.Tensor | None=None,
    k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None, num_splits: int=0,
    out: torch.Tensor | None=None, return_softmax_lse: Literal[False]=False, return_lse: Literal[False]=False,
    rotary_cos: torch.Tensor | None=None, rotary_sin: torch.Tensor | None=None, rotary_interleaved: bool=True,
    attention_chunk: int=0, **others: Any) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None=None,
    v: torch.Tensor | None=None, *, cache_seqlens: int | torch.Tensor | None=None,
    cache_batch_idx: torch.Tensor | None=None, block_table: torch.Tensor | None=None,
    page_table: torch.Tensor | None=None, cu_seqlens_q: torch.Tensor | None=None,
    cu_seqlens_k_new: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    cache_leftpad: torch.Tensor | None=None, softmax_scale: float | None=None, causal: bool=False,
    window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0, s_aux: torch.Tensor | None=None,
    sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None, q_descale: torch.Tensor | None=None,
    k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None, num_splits: int=0,
    out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: Literal[True],
    rotary_cos: torch.Tensor | None=None, rotary_sin: torch.Tensor | None=None, rotary_interleaved: bool=True,
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None=None,
    v: torch.Tensor | None=None, *, cache_seqlens: int | torch.Tensor | None=None,
    cache_batch_idx: torch.Tensor | None=None, block_table: torch.Tensor | None=None,
    page_table: torch.Tensor | None=None, cu_seqlens_q: torch.Tensor | None=None,
    cu_seqlens_k_new: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    cache_leftpad: torch.Tensor | None=None, softmax_scale: float | None=None, causal: bool=False,
    window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0, s_aux: torch.Tensor | None=None,
    sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None, q_descale: torch.Tensor | None=None,
    k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None, num_splits: int=0,
    out: torch.Tensor | None=None, return_softmax_lse: Literal[True], return_lse: bool=False,
    rotary_cos: torch.Tensor | None=None, rotary_sin: torch.Tensor | None=None, rotary_interleaved: bool=True,
    attention_chunk: int=0, **others: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None=None,
    v: torch.Tensor | None=None, *, cache_seqlens: int | torch.Tensor | None=None,
    cache_batch_idx: torch.Tensor | None=None, block_table: torch.Tensor | None=None,
    page_table: torch.Tensor | None=None, cu_seqlens_q: torch.Tensor | None=None,
    cu_seqlens_k_new: torch.Tensor | None=None, max_seqlen_q: int | torch.Tensor | None=None,
    cache_leftpad: torch.Tensor | None=None, softmax_scale: float | None=None, causal: bool=False,
    window_size: Sequence[int | None] | None=(-1, -1), softcap: float | None=0.0, s_aux: torch.Tensor | None=None,
    sinks: torch.Tensor | None=None, learnable_sink: torch.Tensor | None=None, q_descale: torch.Tensor | None=None,
    k_descale: torch.Tensor | None=None, v_descale: torch.Tensor | None=None, num_splits: int=0,
    out: torch.Tensor | None=None, return_softmax_lse: bool=False, return_lse: bool=False,
    rotary_cos: torch.Tensor | None=None, rotary_sin: torch.Tensor | None=None, rotary_interleaved: bool=True,
    attention_chunk: int=0, **others: Any) -> Any: ...

@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str='NHD',
    pos_encoding_mode: str='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None,
    k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
    logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, return_lse: Literal[False]=False, *,
    o_dtype: torch.dtype | str | None=None) -> torch.Tensor: ...
@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str='NHD',
    pos_encoding_mode: str='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None,
    k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
    logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, *, return_lse: Literal[True],
    o_dtype: torch.dtype | str | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str,
    pos_encoding_mode: str, use_tensor_cores: bool, q_scale: float | torch.Tensor | None,
    k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None, window_left: int,
    logits_soft_cap: float | None, sm_scale: float | None, rope_scale: float | None, rope_theta: float | None,
    return_lse: Literal[True], *, o_dtype: torch.dtype | str | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str='NHD',
    pos_encoding_mode: str='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None,
    k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1,
    logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, return_lse: bool=False, *, o_dtype: torch.dtype | str | None=None) -> Any: ...

@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False,
    kv_layout: str='NHD', pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
    sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, return_lse: Literal[False]=False, backend: str='auto', *,
    use_fp16_qk_reduction: bool | None=None, o_dtype: torch.dtype | str | None=None,
    q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
    v_scale: float | torch.Tensor | None=None, scale_q: float | torch.Tensor | None=None,
    scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None) -> torch.Tensor: ...
@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False,
    kv_layout: str='NHD', pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
    sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, *, return_lse: Literal[True], backend: str='auto',
    use_fp16_qk_reduction: bool | None=None, o_dtype: torch.dtype | str | None=None,
    q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
    v_scale: float | torch.Tensor | None=None, scale_q: float | torch.Tensor | None=None,
    scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None, causal: bool, kv_layout: str, pos_encoding_mode: str,
    allow_fp16_qk_reduction: bool, sm_scale: float | None, window_left: int, logits_soft_cap: float | None,
    rope_scale: float | None, rope_theta: float | None, return_lse: Literal[True], backend: str='auto', *,
    use_fp16_qk_reduction: bool | None=None, o_dtype: torch.dtype | str | None=None,
    q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
    v_scale: float | torch.Tensor | None=None, scale_q: float | torch.Tensor | None=None,
    scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False,
    kv_layout: str='NHD', pos_encoding_mode: str='NONE', allow_fp16_qk_reduction: bool=False,
    sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None,
    rope_theta: float | None=None, return_lse: bool=False, backend: str='auto', *,
    use_fp16_qk_reduction: bool | None=None, o_dtype: torch.dtype | str | None=None,
    q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None,
    v_scale: float | torch.Tensor | None=None, scale_q: float | torch.Tensor | None=None,
    scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None=None) -> Any: ...

@overload
def sparse_paged_attention(q: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor, counts: torch.Tensor | None=None, *, bmm1_scale: float | torch.Tensor | None=None,
    bmm2_scale: float | torch.Tensor=1.0, kv_layout: str='NHD', logits_soft_cap: float | None=None,
    sinks: torch.Tensor | None=None, out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None,
    o_sf_scale: float | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False,
    batch_invariant: bool=False, enable_pdl: bool | None=None) -> torch.Tensor: ...
@overload
def sparse_paged_attention(q: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor, counts: torch.Tensor | None=None, *, bmm1_scale: float | torch.Tensor | None=None,
    bmm2_scale: float | torch.Tensor=1.0, kv_layout: str='NHD', logits_soft_cap: float | None=None,
    sinks: torch.Tensor | None=None, out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None,
    o_sf_scale: float | None=None, lse: torch.Tensor | None=None, return_lse: Literal[True],
    batch_invariant: bool=False, enable_pdl: bool | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_paged_attention(q: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor, counts: torch.Tensor | None=None, *, bmm1_scale: float | torch.Tensor | None=None,
    bmm2_scale: float | torch.Tensor=1.0, kv_layout: str='NHD', logits_soft_cap: float | None=None,
    sinks: torch.Tensor | None=None, out: torch.Tensor | FP4Tensor | None=None,
    out_dtype: torch.dtype | str | None=None, o_sf_scale: float | None=None, lse: torch.Tensor | None=None,
    return_lse: bool=False, batch_invariant: bool=False, enable_pdl: bool | None=None) -> Any: ...

@overload
def trtllm_batch_context_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int | None=-1,
    out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, kv_layout: str='HND', enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, uses_shared_paged_kv_idx: bool=True, causal: bool=True,
    lse: torch.Tensor | None=None, return_lse: Literal[False]=False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None=None, use_fp16_softmax: bool | None=None,
    uses_spcompress: bool | None=None, backend: str='auto', *, logits_soft_cap: float | None=None,
    kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, v_scales_interleaved: bool=False,
    alibi_slopes: torch.Tensor | None=None) -> torch.Tensor: ...
@overload
def trtllm_batch_context_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int | None=-1,
    out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, kv_layout: str='HND', enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, uses_shared_paged_kv_idx: bool=True, causal: bool=True,
    lse: torch.Tensor | None=None, *, return_lse: Literal[True], multi_ctas_kv_counter_buffer: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, backend: str='auto',
    logits_soft_cap: float | None=None, kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    v_scales_interleaved: bool=False, alibi_slopes: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_context_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int | None,
    out: torch.Tensor | None, out_dtype: torch.dtype | None, o_sf_scale: float | None, o_sf_vec_size: int | None,
    kv_layout: str, enable_pdl: bool | None, sinks: torch.Tensor | None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    skip_softmax_threshold_scale_factor: float | None, uses_shared_paged_kv_idx: bool, causal: bool,
    lse: torch.Tensor | None, return_lse: Literal[True], multi_ctas_kv_counter_buffer: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, backend: str='auto', *,
    logits_soft_cap: float | None=None, kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    v_scales_interleaved: bool=False, alibi_slopes: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_context_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int | None=-1,
    out: torch.Tensor | FP4Tensor | None=None, out_dtype: torch.dtype | str | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, kv_layout: str='HND', enable_pdl: bool | None=None, sinks: torch.Tensor | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, uses_shared_paged_kv_idx: bool=True, causal: bool=True,
    lse: torch.Tensor | None=None, return_lse: bool=False, multi_ctas_kv_counter_buffer: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, backend: str='auto', *,
    logits_soft_cap: float | None=None, kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None,
    v_scales_interleaved: bool=False, alibi_slopes: torch.Tensor | None=None) -> Any: ...

@overload
def trtllm_batch_decode_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, window_left: int | None=-1,
    out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, sinks: torch.Tensor | Sequence[torch.Tensor] | None=None, kv_layout: str='HND',
    enable_pdl: bool | None=None, backend: str='auto', q_len_per_req: int | None=1, o_scale: float | None=1.0,
    mask: torch.Tensor | None=None, max_q_len: int | None=None, cum_seq_lens_q: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, uses_shared_paged_kv_idx: bool=True,
    lse: torch.Tensor | None=None, return_lse: Literal[False]=False, bmm1_scale_log2: torch.Tensor | None=None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None=None, enable_block_sparse_attention: bool=False, cp_world: int=1,
    cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, bf16q_fp8kv_transform_mode: str | None=None,
    request_order: torch.Tensor | None=None, request_order_plan: Any=None, *, logits_soft_cap: float | None=None,
    v_scales_interleaved: bool=False, batch_invariant: bool=False) -> torch.Tensor: ...
@overload
def trtllm_batch_decode_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, window_left: int | None=-1,
    out: torch.Tensor | None=None, out_dtype: torch.dtype | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, sinks: torch.Tensor | Sequence[torch.Tensor] | None=None, kv_layout: str='HND',
    enable_pdl: bool | None=None, backend: str='auto', q_len_per_req: int | None=1, o_scale: float | None=1.0,
    mask: torch.Tensor | None=None, max_q_len: int | None=None, cum_seq_lens_q: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, uses_shared_paged_kv_idx: bool=True,
    lse: torch.Tensor | None=None, *, return_lse: Literal[True], bmm1_scale_log2: torch.Tensor | None=None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None=None, enable_block_sparse_attention: bool=False, cp_world: int=1,
    cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, bf16q_fp8kv_transform_mode: str | None=None,
    request_order: torch.Tensor | None=None, request_order_plan: Any=None, logits_soft_cap: float | None=None,
    v_scales_interleaved: bool=False, batch_invariant: bool=False) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_decode_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, window_left: int | None,
    out: torch.Tensor | None, out_dtype: torch.dtype | None, o_sf_scale: float | None, o_sf_vec_size: int | None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None, kv_layout: str, enable_pdl: bool | None, backend: str,
    q_len_per_req: int | None, o_scale: float | None, mask: torch.Tensor | None, max_q_len: int | None,
    cum_seq_lens_q: torch.Tensor | None, skip_softmax_threshold_scale_factor: float | None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, uses_shared_paged_kv_idx: bool,
    lse: torch.Tensor | None, return_lse: Literal[True], bmm1_scale_log2: torch.Tensor | None=None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None=None, enable_block_sparse_attention: bool=False, cp_world: int=1,
    cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, bf16q_fp8kv_transform_mode: str | None=None,
    request_order: torch.Tensor | None=None, request_order_plan: Any=None, *, logits_soft_cap: float | None=None,
    v_scales_interleaved: bool=False, batch_invariant: bool=False) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_decode_with_kv_cache(query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, window_left: int | None=-1,
    out: torch.Tensor | FP4Tensor | None=None, out_dtype: torch.dtype | str | None=None, o_sf_scale: float | None=None,
    o_sf_vec_size: int | None=None, sinks: torch.Tensor | Sequence[torch.Tensor] | None=None, kv_layout: str='HND',
    enable_pdl: bool | None=None, backend: str='auto', q_len_per_req: int | None=1, o_scale: float | None=1.0,
    mask: torch.Tensor | None=None, max_q_len: int | None=None, cum_seq_lens_q: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, uses_shared_paged_kv_idx: bool=True,
    lse: torch.Tensor | None=None, return_lse: bool=False, bmm1_scale_log2: torch.Tensor | None=None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None=None, enable_block_sparse_attention: bool=False, cp_world: int=1,
    cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, bf16q_fp8kv_transform_mode: str | None=None,
    request_order: torch.Tensor | None=None, request_order_plan: Any=None, *, logits_soft_cap: float | None=None,
    v_scales_interleaved: bool=False, batch_invariant: bool=False) -> Any: ...

@overload
def trtllm_ragged_attention_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    workspace_buffer: torch.Tensor | None, seq_lens: torch.Tensor | None, max_q_len: int, max_kv_len: int | None,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int,
    window_left: int | None, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None,
    is_causal: bool, return_lse: Literal[False], attention_sinks: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, out: torch.Tensor | None=None,
    lse: torch.Tensor | None=None,
    sage_attn_sfs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]=(None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int]=(0, 0, 0, 0), backend: str='trtllm-gen',
    q_seq_lens_cpu: torch.Tensor | None=None, kv_seq_lens_cpu: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None,
    skip_all_rows_active_check: bool=True) -> torch.Tensor: ...
@overload
def trtllm_ragged_attention_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    workspace_buffer: torch.Tensor | None, seq_lens: torch.Tensor | None, max_q_len: int, max_kv_len: int | None,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int,
    window_left: int | None, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None,
    is_causal: bool, *, return_lse: Literal[True], attention_sinks: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, out: torch.Tensor | None=None,
    lse: torch.Tensor | None=None,
    sage_attn_sfs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]=(None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int]=(0, 0, 0, 0), backend: str='trtllm-gen',
    q_seq_lens_cpu: torch.Tensor | None=None, kv_seq_lens_cpu: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None,
    skip_all_rows_active_check: bool=True) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_ragged_attention_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    workspace_buffer: torch.Tensor | None, seq_lens: torch.Tensor | None, max_q_len: int, max_kv_len: int | None,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int,
    window_left: int | None, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None,
    is_causal: bool, return_lse: Literal[True], attention_sinks: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, out: torch.Tensor | None=None,
    lse: torch.Tensor | None=None,
    sage_attn_sfs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]=(None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int]=(0, 0, 0, 0), backend: str='trtllm-gen',
    q_seq_lens_cpu: torch.Tensor | None=None, kv_seq_lens_cpu: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None,
    skip_all_rows_active_check: bool=True) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_ragged_attention_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    workspace_buffer: torch.Tensor | None, seq_lens: torch.Tensor | None, max_q_len: int, max_kv_len: int | None,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int,
    window_left: int | None, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None,
    is_causal: bool, return_lse: bool, attention_sinks: torch.Tensor | None=None,
    skip_softmax_threshold_scale_factor: float | None=None, out: torch.Tensor | FP4Tensor | None=None,
    lse: torch.Tensor | None=None,
    sage_attn_sfs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]=(None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int]=(0, 0, 0, 0), backend: str='trtllm-gen',
    q_seq_lens_cpu: torch.Tensor | None=None, kv_seq_lens_cpu: torch.Tensor | None=None,
    use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None,
    skip_all_rows_active_check: bool=True) -> Any: ...
