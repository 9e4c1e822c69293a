"""vLLM's backend of dense latent attention (MLA: DeepSeek V3, Kimi K2), on the functions of latent attention and of
prefill.

`vllm_select` chooses it for `--attention-backend CUSTOM`. Decodes, of one or several tokens of a request, attend to the
cache in the absorbed form, in one launch. Prompts are expanded to keys and values per head, which takes a third of
the operations: vLLM's common code does so for the prompt and for each chunk of the context before it, and
`LatentPrefill` computes the attention of each.

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
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from cute_kernels.attention.spec import LSE_NATURAL, LSE_OF_KEYS

from ..attention.bound import StepTensors
from ..attention.call import AttentionCall
from ..attention.views import columns_and_rope
from ..flash_attn.api import flash_attn_varlen_func
from ..flash_mla.api import NAME, flash_mla_with_kvcache
from ..host.plain import traced
from ..own.explanation import explain
from ..vllm.latent import concat_and_cache_mla
from .held import HeldCache
from .support import ARCHS, E4M3

SIXTEEN_BITS, QUANTISED = ("auto", "bfloat16", "float16"), ("fp8", "fp8_e4m3")
LATENT, ROPE, BLOCK = 512, 64, 64


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
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, VllmLatentMetadata, supports_dcp_with_varlen=True
        )
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


class VllmLatentBackend(MLACommonBackend):
    """The configurations that the kernels support, in vLLM's terms."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*SIXTEEN_BITS, *QUANTISED]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["VllmLatentImpl"]:
        return VllmLatentImpl

    @staticmethod
    def get_builder_cls() -> type[VllmLatentMetadataBuilder]:
        return VllmLatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size % BLOCK == 0 else BLOCK

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in ARCHS

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        """Return the reason of `explain` if no kernel of the architecture takes these types, else None."""
        arch = ARCHS.get((device_capability.major, device_capability.minor))
        if arch is None or head_size != LATENT + ROPE:
            return None  # other methods refuse these
        if kv_cache_dtype in ("bfloat16", "float16") and getattr(torch, kv_cache_dtype) is not dtype:
            return f"kv_cache_dtype: {kv_cache_dtype}, must be that of the model, {dtype}"
        q, cache = (torch.zeros(1, 1, heads, head_size, dtype=dtype, device="cpu") for heads in (16, 1))
        table, one = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([[0]], [1]))
        quantised = kv_cache_dtype in QUANTISED
        try:
            found = explain(
                q, cache.to(E4M3) if quantised else cache, table, one, LATENT, is_fp8_kvcache=quantised,
                function=flash_mla_with_kvcache, arch=arch,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            return str(error)
        return None if found.runs else f"{arch}: {'; '.join(f'{op}: {why}' for op, why in found.refused)}"


class VllmLatentImpl(MLACommonImpl[VllmLatentMetadata]):
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
        given = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise NotImplementedError(f"{name}: {value}, must be None")
        if kv_cache_dtype not in VllmLatentBackend.supported_kv_cache_dtypes:
            allowed = ", ".join(VllmLatentBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: {kv_cache_dtype!r}, must be one of {allowed}")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self._quantised = kv_cache_dtype in QUANTISED
        self._cache = HeldCache(self, type(self).caches)

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and k_rope of an `AttentionCall`. kv_cache: (blocks, tokens, 576)."""
        own = kv_cache.unsqueeze(1)
        return columns_and_rope(own.view(E4M3) if self._quantised else own, LATENT)

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
        kv_cache_dtype: str, k_scale: torch.Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Store rows at their slots. skip_scale: the scale is 1."""
        if kv_cache.numel():
            concat_and_cache_mla(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale
            )

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention of decodes, (T, heads, 512), and its LSE (T, heads) if their keys are distributed.

        q: (T, heads, 576), or its first 512 columns and the others as two tensors.
        """
        latent, rope = q if isinstance(q, tuple) else columns_and_rope(q, LATENT)
        m, (k, k_rope) = attn_metadata.decode, self._cache.of(layer.kv_cache)
        scale, out_scale, return_lse = self.scale, 1.0, self.need_to_return_lse_for_decode
        if self._quantised:
            out_scale = layer._k_scale_float
            scale *= out_scale
        step = StepTensors(latent, m.block_table, m.seq_lens, m.query_start_loc, rope=rope)

        def call() -> AttentionCall:
            return AttentionCall(
                NAME, latent, k, k, step.requests(not traced(latent)), m.max_query_len, scale, out_scale, causal=True,
                return_lse=return_lse, shares_v=True, lse_form=LSE_NATURAL | LSE_OF_KEYS, out_dtype=latent.dtype,
                record="e4m3" if self._quantised else "", q_rope=rope, k_rope=k_rope,
            )  # fmt: skip

        asked = scale, out_scale, return_lse, m.max_query_len
        found = self._cache.launch.serve(step, asked, (), call)
        return found if return_lse else (found, None)
