"""vLLM's attention backend CUSTOM, over the context function.

    VLLM_PLUGINS=cute_kernels vllm serve MODEL --attention-backend CUSTOM

The plugin `cute_kernels` (`plugins.vllm`) tells vLLM the name of `VllmBackend` if VLLM_PLUGINS names it. The backend
reads caches of 16 bits, e4m3 (with a scale for all, or for each token and head), int8 (with the latter), e5m2 and
NVFP4 in place, in vLLM's
layouts with dense blocks, and supports sliding windows, soft caps, sinks and ALiBi. It plans nothing and reads no value
from the device: the metadata are the engine's own tensors, and a CUDA graph that was captured for one batch holds for
every other (`AttentionCGSupport.ALWAYS`). If no kernel supports a configuration, `VllmBackend.validate_configuration`
gives the reason, and vLLM refuses the backend at start.

Written for vLLM 0.33, which has run it on an H200, offline and as an HTTP server. Tests run it against vLLM's own files
on the CPU reference.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..attention.bound import StepTensors
from ..attention.call import AttentionCall
from ..flashinfer.trtllm import context_call
from ..fp4 import FP4Tensor
from ..host import machine
from ..own.append_qkv import KVCacheTarget, append_qkv
from .held import HeldCache
from .support import ARCHS, E4M3, E5M2, HEAD_SIZES, PAGE_SIZES, query_dtype, refusal

BY_TOKEN = {"fp8_per_token_head": E4M3, "int8_per_token_head": torch.int8}  # with scales in the cache
QUANTISED = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "nvfp4": torch.uint8, **BY_TOKEN}
SCALE_BYTES = 4  # of a scale per token and head
SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}  # "auto": the model's


@dataclass
class VllmMetadata(AttentionMetadata):
    """A batch of R requests, as `CommonAttentionMetadata` has it: device tensors, and bounds."""

    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 (R + 1,)
    seq_lens: torch.Tensor  # int32 (R,)
    block_table: torch.Tensor  # int32 (R, blocks)
    slot_mapping: torch.Tensor  # int64 (tokens,), negative: not stored


class VllmMetadataBuilder(AttentionMetadataBuilder[VllmMetadata]):
    """Passes the engine's tensors on. Batches may mix prompts and decodes in any order."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> VllmMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(f"causal: {common.causal}, must be True")
        return VllmMetadata(
            common.max_query_len, common.max_seq_len, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip

    def update_block_table(
        self, metadata: VllmMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> VllmMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: VllmMetadata) -> None:
        """Do nothing: the metadata are the tensors that the next step writes."""


class VllmBackend(AttentionBackend):
    """The configurations that the kernels support, in vLLM's terms."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *SIXTEEN_BITS, *QUANTISED]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["VllmImpl"]:
        return VllmImpl

    @staticmethod
    def get_builder_cls() -> type[VllmMetadataBuilder]:
        return VllmMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the supported block sizes; vLLM splits larger blocks into these."""
        return [*PAGE_SIZES]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [*HEAD_SIZES]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in ARCHS

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts with dense blocks, which NVFP4 needs. Those with a head's rows together come first."""
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with the slots of an NVFP4 cache, or of one with a scale per token and head; other specs are
        returned unchanged.

        A block of NVFP4 has one slot per head for K and one for V, each of head_size / 2 bytes of codes and head_size /
        16 of scale factors. With a scale per token and head, a slot has K, V, and 4 bytes for each one's scale.
        `VllmImpl.caches` says how the bytes of a block are used.
        """
        if spec.state_content_bytes is not None:
            return spec
        if spec.kv_quant_mode.name.lower() in BY_TOKEN:
            return replace(spec, state_content_bytes=2 * (spec.head_size + SCALE_BYTES))
        if not spec.kv_quant_mode.is_nvfp4:
            return spec
        slot = spec.head_size // 2 + spec.head_size // 16
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=slot)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        """Return the reason of `explain` if no kernel of the architecture takes these types, else None."""
        arch = ARCHS.get((device_capability.major, device_capability.minor))
        if arch is None or head_size not in HEAD_SIZES:
            return None  # other methods refuse these
        cache = (QUANTISED | SIXTEEN_BITS).get(kv_cache_dtype, dtype)
        return refusal(arch, head_size, dtype, cache, by_token=kv_cache_dtype in BY_TOKEN)


class VllmImpl(AttentionImpl[VllmMetadata]):
    """Attention of one layer. NotImplementedError: attention of encoders, other caches."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: {attn_type}, must be {AttentionType.DECODER}")
        if kv_cache_dtype not in VllmBackend.supported_kv_cache_dtypes:
            allowed = ", ".join(VllmBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: {kv_cache_dtype!r}, must be one of {allowed}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        capability = current_platform.get_device_capability()
        arch = None if capability is None else ARCHS.get((capability.major, capability.minor))
        self._cache_dtype = QUANTISED.get(kv_cache_dtype)
        sixteen = torch.bfloat16
        cache_dtype = self._cache_dtype or sixteen
        self._by_token = by_token = kv_cache_dtype in BY_TOKEN
        self.supports_quant_query_input = query_dtype(sixteen, cache_dtype, arch) is E4M3 and not by_token
        self._fp4_output = (
            arch is not None and refusal(arch, head_size, sixteen, cache_dtype, "nvfp4", by_token) is None
        )
        self._window_left = -1 if sliding_window is None else sliding_window - 1  # keys before the token itself
        self._soft_cap = logits_soft_cap or None
        self._loaded_sinks = self.sinks = sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._out_factor: Any = None  # see `_factor`: `output_scale`, what else it depends on, and the factor
        self._cache = HeldCache(self, type(self).caches)
        self._launch = self._cache.launch

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks to fp32, as kernels take them; weights that are loaded again go to the same memory."""
        loaded = self._loaded_sinks
        if loaded is None or loaded.dtype == torch.float32:
            return
        if self.sinks is None or self.sinks is loaded:
            self.sinks = loaded.detach().float()
        else:
            self.sinks.copy_(loaded)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether `forward` writes quantised output: e4m3 with one static scale, or NVFP4 if a kernel does."""
        return bool(quant_key == kFp8StaticTensorSym or (quant_key == kNvfp4Dynamic and self._fp4_output))

    def caches(self, kv_cache: torch.Tensor) -> tuple[Any, Any]:
        """Return (K, V), and (K's scale factors, V's), or None for a cache without factors.

        All are views (blocks, heads, tokens, elements).

        kv_cache: (blocks, slots, tokens, elements), any strides. An element holds K and V of a head, one after the
        other. The bytes of a block with factors are all K codes, all V codes, K's factors, V's factors, each with heads
        outermost.
        """
        if self._cache_dtype is not torch.uint8 and not self._by_token:
            cache = kv_cache if self._cache_dtype is None else kv_cache.view(self._cache_dtype)
            return cache.split(self.head_size, dim=3), None
        blocks, _, size, _ = kv_cache.shape
        block = kv_cache.shape[1:].numel()
        if sum((n - 1) * stride for n, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:])) != block - 1:
            raise NotImplementedError(f"kv_cache: strides {kv_cache.stride()}, blocks with scale factors must be dense")
        tokens = self.num_kv_heads * size
        codes, sf = (tokens * self.head_size // per for per in (2, 16))
        if self._by_token:
            codes, sf = tokens * self.head_size, tokens * SCALE_BYTES
        rows = kv_cache.as_strided((blocks, block), (kv_cache.stride(0), 1)).split([codes] * 2 + [sf] * 2, dim=1)
        k, v, k_sf, v_sf = (part.view(blocks, self.num_kv_heads, size, -1) for part in rows)
        if self._by_token:
            scales = (part.view(torch.float32).squeeze(-1) for part in (k_sf, v_sf))
            return (k.view(self._cache_dtype), v.view(self._cache_dtype)), tuple(scales)
        return (k, v), (k_sf.view(E4M3), v_sf.view(E4M3))

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store key and value (tokens, KV heads, head_size) at their slots, quantised if the cache is, in one launch.

        Tokens behind those of slot_mapping are ignored, and those of negative slots are not stored.
        """
        caches, sf = self._cache.of(kv_cache)
        if self._cache_dtype is None or self._by_token:
            target = KVCacheTarget(caches, "HND", sf)
        else:
            target = KVCacheTarget(caches, "HND", sf, layer._k_scale_float, layer._v_scale_float)
        append_qkv(None, key, value, target, slot_mapping)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
        kv_cache: torch.Tensor, attn_metadata: VllmMetadata | None, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write attention to output and return it.

        query, output: (tokens, heads, head_size). Rows of padding are undefined. output_scale: fp32, one element on the
        device: attention is divided by it, and output is e4m3. output_block_scale: e4m3 (tokens, heads * head_size /
        16), both rounded up, in the 128x4 swizzle, written: attention is multiplied by output_scale, and output is
        NVFP4, uint8 (tokens, heads, head_size / 2).
        """
        if output_block_scale is not None and output_scale is None:
            raise ValueError("output_scale: None, must be a tensor if output_block_scale is given")
        if attn_metadata is None:  # vLLM is profiling its memory
            return output.fill_(0)
        m, (caches, sf) = attn_metadata, self._cache.of(kv_cache)
        scale, out_scale = self.scale, 1.0
        if self._cache_dtype is not None and not self._by_token:
            scale, out_scale = scale * layer._k_scale_float, layer._v_scale_float
            if query.dtype == E4M3:
                scale *= layer._q_scale_float
        out: Any = output
        out_factor: Any = out_scale
        if output_scale is not None:
            out_factor = self._factor(out_scale, output_scale, output_block_scale is not None)
        if output_block_scale is not None:
            out = FP4Tensor(output, output_block_scale, 0, query.shape)
        o_sf_scale = None if output_block_scale is None else 1.0

        def call() -> AttentionCall:
            return context_call(
                query, caches, m.block_table, m.seq_lens, m.max_query_len, scale, out_factor, m.seq_lens.shape[0],
                m.query_start_loc, self._window_left, out, o_sf_scale=o_sf_scale, sinks=self.sinks, kv_cache_sf=sf,
                logits_soft_cap=self._soft_cap, alibi_slopes=self.slopes,
            )  # fmt: skip

        asked = scale, out_scale, o_sf_scale, output.dtype, m.max_query_len
        tensors = self.sinks, self.slopes, None if output_scale is None else out_factor
        step = StepTensors(query, m.block_table, m.seq_lens, m.query_start_loc, out)
        self._launch.serve(step, asked, tensors, call)
        return output

    def _factor(self, out_scale: float, output_scale: torch.Tensor, multiply: bool) -> torch.Tensor:
        """Return V's scale over that of the output, or times it, on the device: the host does not wait for it.

        The result is kept, and not computed again if the value of output_scale changes in place: other backends of
        vLLM read it once, too. In a capture it is part of the graph, and is not kept.
        """
        kept, asked = self._out_factor, (out_scale, multiply, output_scale.data_ptr())
        if kept is not None and kept[0] is output_scale and kept[1] == asked:
            return kept[2]  # type: ignore[no-any-return]
        scale = output_scale.reshape(1).float()
        factor = out_scale * scale if multiply else out_scale / scale
        if machine.current.may_keep(factor.device):
            self._out_factor = output_scale, asked, factor
        return factor
