"""vLLM's sparse indexer on `select_slots`: logits and the exact top-k in one call, deterministic, in bounded memory.

It belongs to the layers of `VllmSparseBackend`, and takes nothing of DeepGEMM. vLLM's indexer writes positions in the
request into a buffer, from which its backends make slots of the cache. This one writes the slots, which
`VllmSparseImpl` attends to as they are. A layer of another backend, such as that of a draft model, keeps vLLM's
indexer, also where both share the buffer: each layer writes it before it reads it. `adopt` tells the layers apart.

Keys are read from the pages of the cache. In decode, all requests have equally many tokens, and share the loads of
their keys. Tokens of other batches are put into groups of one request each (`vllm_batches.TokenGroups`). If a layer
attends to a copy of the rows of prompts (`vllm_staging`), the slots are those of the copy.

Written for vLLM 0.33. Tests run it against vLLM's own files on the CPU reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from ..indexer.selection import SCRATCH
from ..own.select import select_slots
from ..vllm.latent import concat_and_cache_mla
from .vllm_batches import MOST_ROWS, TokenGroups, groups_of, uniform_rows
from .vllm_caches import Blocks
from .vllm_staging import staged_pages

HELD = 256  # heads of the tokens of a group: registers hold the weights of so many


@dataclass
class VllmIndexerMetadata(AttentionMetadata):
    """A batch of T tokens. rows: tokens of each request, or 0: then `groups` says of which request a token is.
    longest: no request has more keys. slot_table: int32 (G, M), the pages of a workspace with the rows of each group's
    request, to which layers attend that stage keys, or None."""

    num_actual_tokens: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    longest: int
    rows: int
    groups: TokenGroups | None
    slot_table: torch.Tensor | None = None


class VllmIndexerMetadataBuilder(AttentionMetadataBuilder[VllmIndexerMetadata]):
    """Passes the engine's tensors on, and puts the tokens of mixed batches into groups."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        heads = vllm_config.model_config.hf_text_config.index_n_heads
        self.group_size = max(1, min(MOST_ROWS, HELD // heads))
        layers = vllm_config.compilation_config.static_forward_context
        self._stages = any(layers[name].stages_keys for name in layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> VllmIndexerMetadata:
        common = common_attn_metadata
        rows = uniform_rows(common)
        groups = None if rows else groups_of(common, self.group_size)
        staged = staged_pages(common, self.kv_cache_spec.block_size) if self._stages else None
        return VllmIndexerMetadata(
            common.num_actual_tokens, common.seq_lens, common.block_table_tensor, common.slot_mapping,
            common.max_seq_len, rows, groups,
            None if staged is None or groups is None else staged.table.index_select(0, groups.owner),
        )  # fmt: skip

    def update_draft_decode_metadata(self, metadata: VllmIndexerMetadata) -> None:
        """Do nothing: the metadata are the tensors that the next step writes."""


class VllmIndexerBackend(Blocks, AttentionBackend):
    """The caches of the indexer's keys that the kernels read, in vLLM's terms."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the indexer's cache has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[VllmIndexerMetadataBuilder]:
        return VllmIndexerMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


def select_keys(
    metadata: VllmIndexerMetadata, cache: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
    stages: bool = False,
) -> None:  # fmt: skip
    """Write the slots of the keys of each token to out, int32 (T, top_k).

    cache: uint8 (blocks, tokens, 132). q: e4m3 (T, heads, 128). weights: fp32 (T, heads). stages: the layer attends to
    the workspace in batches that have rows there.
    """
    m, (tokens, top_k) = metadata, out.shape
    q, weights = q[:tokens], weights[:tokens]
    if m.rows:
        shape = tokens // m.rows, m.rows
        select_slots(
            q.unflatten(0, shape), cache, weights, m.seq_lens, m.block_table, top_k, max_context_len=m.longest,
            out=out.unflatten(0, shape),
        )  # fmt: skip
        return
    groups: Any = m.groups
    shape, named = groups.lens.shape, m.slot_table if stages else None
    if groups.tokens is None:
        select_slots(
            q.unflatten(0, shape), cache, weights, groups.lens, groups.table, top_k, max_context_len=m.longest,
            out=out.unflatten(0, shape), slot_table=named,
        )  # fmt: skip
        return
    rows = q.view(torch.uint8).index_select(0, groups.tokens).view(q.dtype)
    found = select_slots(
        rows.unflatten(0, shape), cache, weights.index_select(0, groups.tokens), groups.lens, groups.table, top_k,
        max_context_len=m.longest, slot_table=named,
    )  # fmt: skip
    torch.index_select(found.flatten(0, 1), 0, groups.rows, out=out)


# ---- the places of vLLM's indexer


def refuse_modes() -> None:
    """Raise NotImplementedError for modes of vLLM that neither the attention nor the indexer has."""
    config = get_current_vllm_config()
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(config.parallel_config, name)
        if size > 1:
            raise NotImplementedError(f"{name}: {size}, must be 1 with the attention backend CUSTOM and sparse MLA")
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        raise NotImplementedError("hisparse_config: given, must be None with the attention backend CUSTOM")
    drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    most = 0 if envs.VLLM_BATCH_INVARIANT else MOST_ROWS - 1
    if drafts > most:  # a CUDA graph of decodes would hold lengths or groups of tokens, which differ from step to step
        mode = "" if most else "VLLM_BATCH_INVARIANT, "
        allowed = f"must be at most {most} with {mode}the attention backend CUSTOM and sparse MLA"
        raise NotImplementedError(f"num_speculative_tokens: {drafts}, {allowed}")


def adopt(indexer: Any, stages: bool = False) -> None:
    """Let the cache of an indexer have our metadata, so that its keys are chosen here. Calls `install`.

    stages: its layer attends to a copy of the rows of prompts.

    Raises NotImplementedError for the indexer of another model: its layer calls functions that are not replaced.
    """
    from vllm.models.deepseek_v32.attention import DeepseekV32Indexer as Known

    if type(indexer) is not Known:
        given, known = (f"{of.__module__}.{of.__qualname__}" for of in (type(indexer), Known))
        raise NotImplementedError(f"indexer: {given}, must be {known} with the attention backend CUSTOM")
    if indexer.k_cache.head_dim != 132:
        raise NotImplementedError(f"index_head_dim: {indexer.k_cache.head_dim} bytes of a key, must be 132")
    install()
    indexer.k_cache.get_attn_backend = lambda: VllmIndexerBackend
    indexer.k_cache.stages_keys = stages


def ours(layer_name: str) -> bool:
    """Return whether the indexer's cache of this name was adopted."""
    layer = get_forward_context().no_compile_layers[layer_name]
    return layer.get_attn_backend() is VllmIndexerBackend


def check_pages(indexer: Any, block_table: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Raise NotImplementedError unless a layer's cache has the pages of its indexer's keys: it reads their slots."""
    keys = indexer.k_cache
    table = get_forward_context().attn_metadata[keys.prefix].block_table
    if table.data_ptr() != block_table.data_ptr() or keys.kv_cache.shape[1] != kv_cache.shape[1]:
        sizes = f"blocks of {kv_cache.shape[1]} tokens"
        raise NotImplementedError(f"kv_cache: {sizes}, must have the blocks of {keys.prefix} in the same block table")


def instead_of(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that takes the place of vLLM's `sparse_attn_indexer`, and calls it for layers of others."""

    def sparse_attn_indexer(
        hidden_states: torch.Tensor, k_cache_prefix: str, kv_cache: torch.Tensor, q_quant: torch.Tensor,
        q_scale: torch.Tensor | None, k: torch.Tensor | None, weights: torch.Tensor, quant_block_size: int,
        scale_fmt: str | None, topk_tokens: int, head_dim: int, max_model_len: int, total_seq_lens: int,
        topk_indices_buffer: torch.Tensor, *rest: Any, **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Choose the keys of a batch. A run without metadata, by which vLLM measures its memory, takes what a selection
        may take."""
        if not ours(k_cache_prefix):
            return theirs(
                hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt,
                topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, *rest, **named,
            )  # fmt: skip
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            hidden_states.new_empty(SCRATCH, dtype=torch.uint8)
            return topk_indices_buffer
        if k is not None or q_scale is not None:
            raise NotImplementedError("k, q_scale: given, must be None: the layer stores keys, and queries are e4m3")
        m = metadata[k_cache_prefix]
        if m.num_actual_tokens:
            stages = get_forward_context().no_compile_layers[k_cache_prefix].stages_keys
            select_keys(m, kv_cache, q_quant, weights, topk_indices_buffer[: m.num_actual_tokens], stages)
        return topk_indices_buffer

    return sparse_attn_indexer


def writing_nvfp4(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that takes the place of vLLM's `fused_norm_rope`, which writes NVFP4 rows by instructions of
    Blackwell: on other GPUs, `concat_and_cache_mla` writes them from its results."""

    def fused_norm_rope(*args: Any, **named: Any) -> torch.Tensor:
        cache, dtype = named.get("mla_kv_cache"), named.get("mla_kv_cache_dtype")
        if cache is None or dtype != "nvfp4_ds_mla" or _blackwell():
            return theirs(*args, **named)
        found = theirs(*args, **named | {"mla_kv_cache": None, "mla_kv_cache_dtype": "auto"})
        rows, rope = named["kv_c_out"], named["k_pe_out"]
        slots, scale = named["slot_mapping"], named["mla_k_scale"]
        concat_and_cache_mla(rows[: len(slots)], rope[: len(slots)], cache, slots, dtype, scale)
        return found

    return fused_norm_rope


def _blackwell() -> bool:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and capability.major >= 10


def without_deep_gemm() -> None:
    """Let models with the attention backend CUSTOM start without DeepGEMM, which vLLM's indexer needs."""
    from vllm.model_executor.layers import sparse_attn_indexer as theirs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    theirs.has_deep_gemm = lambda: get_current_vllm_config().attention_config.backend is AttentionBackendEnum.CUSTOM


def install() -> None:
    """Replace the functions that layers of DeepSeek V3.2 call; may be called again."""
    from vllm.models.deepseek_v32 import attention

    for name, make in (("sparse_attn_indexer", instead_of), ("fused_norm_rope", writing_nvfp4)):
        theirs = getattr(attention, name)
        if theirs.__module__ != __name__:
            setattr(attention, name, make(theirs))
