"""vLLM's backend of sparse latent attention (DeepSeek V3.2, GLM-5): a token attends to keys that the indexer chose.

`vllm_select` chooses it for `--attention-backend CUSTOM`. One call per layer serves prompts and decodes together, in
the absorbed form, from the rows of the cache as they are stored: in 16 bits, in e4m3 with one scale, or packed
(`fp8_ds_mla`, `nvfp4_ds_mla`). There is no padding of heads and no plan.

`vllm_indexer` chooses the keys. It writes slots of the cache where vLLM's indexer writes positions in the request, so
that nothing is converted between the two.

With CUTE_KERNELS_SHARE_KEYS=1, neighbouring tokens of batches with prompts read the union of their keys once
(`latent_support.of_prompts`). Unless CUTE_KERNELS_STAGE_KEYS is 0, layers with at least 64 heads attend to a copy of
packed rows in 16 bits in such batches (`vllm_staging`).

With VLLM_BATCH_INVARIANT=1, one CTA computes all keys of a token, in the order of their positions, in every batch. A
prompt, a chunk of one, a decode and a draft token have the same kernel, so that a token has the same bits in all of
them, and no token shares keys with others. This may be slower. A kernel of vLLM that a projection has for few tokens
alone is not used either (`vllm_invariant`).

Written for vLLM 0.33. Tests run it against vLLM's own files on the CPU reference.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from cute_kernels.attention.spec import LSE_NATURAL, LSE_OF_KEYS

from ..attention import op
from ..attention.bound import StepTensors
from ..attention.call import AttentionCall
from ..attention.views import columns_and_rope
from ..flash_mla.api import SPARSE_NAME
from ..host.plain import traced
from . import vllm_indexer, vllm_staging
from .held import HeldCache
from .latent_support import COLUMNS, can_share_keys
from .support import E4M3, SIXTEEN_BITS
from .vllm_batches import has_prompts, token_lens, uniform_rows
from .vllm_caches import LatentCaches, LatentLayer, check_layer


@dataclass
class VllmSparseMetadata(AttentionMetadata):
    """A batch of T tokens. All of them are decode tokens to vLLM's layer, which then calls `forward_mqa` for all.

    lens: int32 (T / n,), the keys of n tokens in turn, at least. block_table: the pages of the requests. shares:
    neighbouring tokens are to share the keys that they have chosen. staged: the pages of the requests if the rows
    of prompts are copied to a workspace, else None. A batch that a CUDA graph captures neither shares nor stages keys.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    lens: torch.Tensor
    shares: bool = False
    staged: vllm_staging.StagedPages | None = None
    num_prefills: int = 0
    prefill: None = None
    decode: None = None


class VllmSparseMetadataBuilder(AttentionMetadataBuilder[VllmSparseMetadata]):
    """Passes the engine's tensors on. Batches may mix prompts and decodes in any order."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._stages = any(layers[name].impl.stages_keys for name in layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> VllmSparseMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(f"causal: {common.causal}, must be True")
        rows = uniform_rows(common)
        whole = rows > 1 and not envs.VLLM_BATCH_INVARIANT  # tokens may visit blocks in which they have no key
        lens = common.seq_lens if rows == 1 or whole else token_lens(common)
        return VllmSparseMetadata(
            common.num_actual_tokens, common.num_reqs, common.num_actual_tokens, common.query_start_loc,
            common.seq_lens, common.block_table_tensor, common.slot_mapping, lens,
            has_prompts(common) and not envs.VLLM_BATCH_INVARIANT,
            vllm_staging.staged_pages(common, self.kv_cache_spec.block_size) if self._stages else None,
        )  # fmt: skip

    def update_draft_decode_metadata(self, metadata: VllmSparseMetadata) -> None:
        """Do nothing: the metadata are the tensors that the next step writes."""


class VllmSparseBackend(LatentCaches, AttentionBackend):
    """The configurations that the kernels support, in vLLM's terms."""

    RECORDS: ClassVar[dict[str, str]] = {
        "fp8_ds_mla": "656", "nvfp4_ds_mla": "352", "fp8": "e4m3", "fp8_e4m3": "e4m3",
    }  # fmt: skip
    SPARSE = True
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *SIXTEEN_BITS, *RECORDS]

    @staticmethod
    def get_impl_cls() -> type["VllmSparseImpl"]:
        return VllmSparseImpl

    @staticmethod
    def get_builder_cls() -> type[VllmSparseMetadataBuilder]:
        return VllmSparseMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: `VllmSparseImpl` and the indexer compute the bits of a token from its own keys alone."""
        return True


class VllmSparseImpl(LatentLayer, MLAAttentionImpl[VllmSparseMetadata]):
    """Sparse latent attention of one layer."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_pcp = False
    supports_quant_query_input = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any = None, index_group_builder: Any = None, **mla: Any,
    ) -> None:  # fmt: skip
        """index_group_builder: vLLM's, for backends that convert positions once for several layers; not used. mla: the
        dimensions and the projection of the layer."""
        check_layer(
            VllmSparseBackend.supported_kv_cache_dtypes, kv_cache_dtype, mla["kv_lora_rank"], alibi_slopes=alibi_slopes,
            sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )  # fmt: skip
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: {attn_type}, must be {AttentionType.DECODER}")
        vllm_indexer.refuse_modes()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = COLUMNS
        self.record = VllmSparseBackend.RECORDS.get(kv_cache_dtype, "")
        self._can_share_keys = can_share_keys(num_heads, self.record)
        self.stages_keys = vllm_staging.can_stage(num_heads, self.record)
        if self.stages_keys:
            vllm_staging.workspace(get_current_vllm_config().model_config.dtype)  # vLLM then counts its memory
        self._indexer, self._buffer = indexer, topk_indices_buffer
        if indexer is not None:
            vllm_indexer.adopt(indexer, self.stages_keys)
        self._split_kv = "auto"
        if envs.VLLM_BATCH_INVARIANT:
            from .vllm_invariant import keep_one_kernel

            self._split_kv = "never"
            keep_one_kernel()
        self._cache = HeldCache(self, type(self).caches)

    @property
    def topk_indices_buffer(self) -> Any:
        """The slots of all tokens. The indexer has it, since vLLM lets a draft model share that of its target."""
        return self._buffer if self._indexer is None else self._indexer.topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        self._indexer, self._buffer = None, buffer

    def record_logical_topk_ready(self) -> None:
        """Do nothing: vLLM's backends wait here for indices that they share."""

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and k_rope of an `AttentionCall`. kv_cache: (blocks, tokens, elements of a row)."""
        own = kv_cache.unsqueeze(1)
        if self.record and self.record != "e4m3":
            return own.view(torch.uint8), None
        return columns_and_rope(own.view(E4M3) if self.record else own, COLUMNS)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: VllmSparseMetadata, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention of all tokens, (T, heads, 512), and None in the place of an LSE.

        q: the two parts of the queries, (T, heads, 512) and (T, heads, 64), any strides.
        """
        (latent, rope), m = q, attn_metadata
        if self._indexer is not None:
            vllm_indexer.check_pages(self._indexer, m.block_table, layer.kv_cache)
        slots = self.topk_indices_buffer[: latent.shape[0]]
        step = StepTensors(latent, slots, m.lens, rope=rope, form="slots")
        if m.staged is not None and self.stages_keys:
            return self._attend_staged(step, m, m.staged, layer.kv_cache), None
        scale, out_scale, shares = self.scale, 1.0, m.shares and self._can_share_keys
        if self.record == "e4m3":
            out_scale = layer._k_scale_float
            scale *= out_scale
        keys = self._cache.of(layer.kv_cache)

        def call() -> AttentionCall:
            return self._call(step, keys, self.record, scale, out_scale, share_keys=shares)

        return self._cache.launch.serve(step, (scale, out_scale, shares), (), call), None

    def _call(
        self, step: StepTensors, keys: Any, record: str, scale: float, out_scale: float = 1.0, **options: Any
    ) -> AttentionCall:
        """Return a call over K and k_rope (`keys`), which hold rows of `record`. options: other fields of the call."""
        (k, k_rope), q = keys, step.q
        return AttentionCall(
            SPARSE_NAME, q, k, k, step.requests(not traced(q)), 1, scale, out_scale, causal=False, shares_v=True,
            lse_form=LSE_NATURAL | LSE_OF_KEYS, out_dtype=q.dtype, record=record, q_rope=step.rope, k_rope=k_rope,
            split_kv=self._split_kv, **options,
        )  # fmt: skip

    def _attend_staged(
        self, step: StepTensors, m: VllmSparseMetadata, staged: vllm_staging.StagedPages, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of all tokens: of decodes over the cache, and of prompts over a copy of their rows."""
        rows = vllm_staging.stage(kv_cache, self.record, m.block_table, staged, step.q.dtype)
        out, n = step.q.new_empty(step.q.shape), staged.packed_tokens
        parts = [(slice(n, None), columns_and_rope(rows.unsqueeze(1), COLUMNS), "")]
        if n:
            parts.append((slice(n), self._cache.of(kv_cache), self.record))
        for at, keys, record in parts:
            part = StepTensors(step.q[at], step.table[at], step.lens[at], rope=step.rope[at], form="slots")
            op.serve(self._call(part, keys, record, self.scale, out=out[at]))
        return out
