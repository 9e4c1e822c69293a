"""vLLM's backend of dense latent attention (MLA: DeepSeek V3, Kimi K2), on the functions of latent attention and of
prefill.

`vllm_select` chooses it for `--attention-backend CUSTOM`. Requests of a step with at most `SHORT` query tokens, which
are decodes, drafts, short prompts and the ends of others, attend to the cache in the absorbed form, in one launch.
Longer prompts are expanded to keys and values per head, which takes a third of the operations per token: vLLM's common
code does so for the prompt and for each chunk of the context before it, and `LatentPrefill` computes the attention of
each.

Caches have 16 bits, or e4m3 with one scale under queries of 16 bits. Written for vLLM 0.33. Tests run it against vLLM's
own files on the CPU reference.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from cute_kernels.attention.spec import LSE_NATURAL, LSE_OF_KEYS

from ..attention.bound import StepTensors
from ..attention.call import AttentionCall
from ..attention.views import columns_and_rope
from ..flash_attn.api import flash_attn_varlen_func
from ..flash_mla.api import NAME
from ..host.plain import traced
from .held import HeldCache
from .latent_support import COLUMNS
from .support import E4M3, SIXTEEN_BITS
from .vllm_caches import LatentCaches, LatentLayer, check_layer

# The most query tokens with which a request attends to the latent rows. To expand a context of L keys takes
# 2 L x 512 x 256 operations per head. The absorbed form takes 2 x 768 more for each pair of a query token and a key,
# and neither copies nor merges. So, by operations alone, expansion pays from 171 tokens on over a long context, and
# from 341 on without a context; copies raise the first number.
SHORT = 256


class LatentPrefill(MLAPrefillBackend):
    """Attention of prompts with keys and values per head."""

    @staticmethod
    def get_name() -> str:
        return "CUTE_KERNELS"

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_softmax_lse: bool,
        out: torch.Tensor | None = None, output_scale: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the attention of new tokens among each other, and its LSE (heads, T) if that is asked for."""
        if out is not None or output_scale is not None:
            raise NotImplementedError("out, output_scale: given, must be None")
        m: Any = self._prefill_metadata
        found = flash_attn_varlen_func(
            q, k, v, m.query_start_loc, m.query_start_loc, m.max_query_len, m.max_query_len,
            softmax_scale=self.scale, causal=True, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
        return (found[0], found[1]) if return_softmax_lse else found

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of new tokens to a chunk of the context, all of which they see, and its LSE."""
        if out is not None:
            raise NotImplementedError("out: given, must be None")
        found = flash_attn_varlen_func(
            q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len,
            softmax_scale=self.scale, causal=False, return_softmax_lse=True,
        )  # fmt: skip
        return found[0], found[1]


@dataclass
class VllmLatentDecodeMetadata(MLACommonDecodeMetadata):
    """Decodes of requests. query_start_loc: int32 (R + 1,). max_query_len: no request has more tokens."""

    query_start_loc: torch.Tensor
    max_query_len: int


class VllmLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Passes the engine's tensors of decodes on, and lets prompts have `LatentPrefill`."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = SHORT
    _prefill_backend: Any  # vLLM's, and then ours

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, VllmLatentMetadata)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        theirs = self._prefill_backend
        self._prefill_backend = LatentPrefill(
            theirs.num_heads, theirs.scale, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim,
            theirs.v_head_dim, vllm_config,
        )  # fmt: skip

    def _build_decode(
        self, block_table_tensor: torch.Tensor, seq_lens_device: torch.Tensor, max_seq_len: int,
        query_start_loc_cpu: torch.Tensor, query_start_loc_device: torch.Tensor, num_decode_tokens: int,
        max_query_len: int, dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> VllmLatentDecodeMetadata:  # fmt: skip
        return VllmLatentDecodeMetadata(
            block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, query_start_loc_device, max_query_len
        )

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Do nothing: the metadata are the tensors that the next step writes."""


class VllmLatentMetadata(MLACommonMetadata[VllmLatentDecodeMetadata]):
    """A batch: decodes first, then prompts."""


class VllmLatentBackend(LatentCaches, MLACommonBackend):
    """The configurations that the kernels support, in vLLM's terms."""

    RECORDS: ClassVar[dict[str, str]] = {"fp8": "e4m3", "fp8_e4m3": "e4m3"}
    SPARSE = False
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *SIXTEEN_BITS, *RECORDS]

    @staticmethod
    def get_impl_cls() -> type["VllmLatentImpl"]:
        return VllmLatentImpl

    @staticmethod
    def get_builder_cls() -> type[VllmLatentMetadataBuilder]:
        return VllmLatentMetadataBuilder


class VllmLatentImpl(LatentLayer, MLACommonImpl[VllmLatentMetadata]):
    """Dense latent attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla: Any,
    ) -> None:  # fmt: skip
        """mla: the dimensions and the projection of the layer."""
        check_layer(
            VllmLatentBackend.supported_kv_cache_dtypes, kv_cache_dtype, mla["kv_lora_rank"], alibi_slopes=alibi_slopes,
            sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self.record = VllmLatentBackend.RECORDS.get(kv_cache_dtype, "")
        self._cache = HeldCache(self, type(self).caches)

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and k_rope of an `AttentionCall`. kv_cache: (blocks, tokens, 576)."""
        own = kv_cache.unsqueeze(1)
        return columns_and_rope(own.view(E4M3) if self.record else own, COLUMNS)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention of decodes, (T, heads, 512), and its LSE (T, heads) if their keys are distributed.

        q: (T, heads, 576), or its first 512 columns and the others as two tensors.
        """
        latent, rope = q if isinstance(q, tuple) else columns_and_rope(q, COLUMNS)
        m, (k, k_rope) = attn_metadata.decode, self._cache.of(layer.kv_cache)
        scale, out_scale, return_lse = self.scale, 1.0, self.need_to_return_lse_for_decode
        if self.record:
            out_scale = layer._k_scale_float
            scale *= out_scale
        step = StepTensors(latent, m.block_table, m.seq_lens, m.query_start_loc, rope=rope)

        def call() -> AttentionCall:
            return AttentionCall(
                NAME, latent, k, k, step.requests(not traced(latent)), m.max_query_len, scale, out_scale, causal=True,
                return_lse=return_lse, shares_v=True, lse_form=LSE_NATURAL | LSE_OF_KEYS, out_dtype=latent.dtype,
                record=self.record, q_rope=rope, k_rope=k_rope,
            )  # fmt: skip

        asked = scale, out_scale, return_lse, m.max_query_len
        found = self._cache.launch.serve(step, asked, (), call)
        return found if return_lse else (found, None)
