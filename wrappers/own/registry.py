"""The public functions: one row each, with the function that makes its call. `explain` and `bind` read them here."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from ..attention.bound import Reshaping
from ..attention.call import AttentionCall
from ..cache_write import quantize as nvfp4
from ..deep_gemm import api as deep_gemm
from ..flash_attn import api as flash_attn
from ..flash_mla import api as flash_mla
from ..flashinfer import (
    cascade,
    dsa_indexer,
    dsa_sparse_attention,
    engines,
    latent,
    latent_nvfp4,
    mla,
    page,
    quantization,
    ragged_deepseek,
    rope,
    rope_quantize,
    single_decode,
    topk,
    trtllm,
    xqa,
)
from ..flashinfer import single_prefill as single
from ..host.checks import listed
from ..indexer import selection
from ..vllm import latent as vllm_latent
from ..vllm import latent_gather as vllm_gather
from ..vllm import topk as vllm_topk
from . import append_latent, append_qkv, gather_latent, select, sparse_paged_attention

ATTENTION, TOP_K, CACHE_WRITE, MERGING = "attention", "top-k", "cache writing", "merging"  # families
LATENT, LATENT_READ = "latent caches", "gathers of latent caches"  # likewise
QUANTIZATION, INDEXER, NO_KERNEL = "NVFP4", "logits of an indexer", ""  # likewise; torch operations of no family
PREFILL, DECODE, FLASH_ATTENTION, SELECTION, CACHES = "prefill", "decode", "flash-attention", "top-k", "caches"
SPARSE = "sparse"  # likewise
FAMILY_OF = {  # page of the reference -> the family of its functions
    PREFILL: ATTENTION, DECODE: ATTENTION, FLASH_ATTENTION: ATTENTION, SELECTION: TOP_K, CACHES: CACHE_WRITE,
    SPARSE: INDEXER,
}  # fmt: skip


class PublicFunction(NamedTuple):
    """A public function, and the way to its call.

    make: takes arguments of the function by their names, all that the call depends on, and returns the call unchecked:
    an `AttentionCall`, a `CachedCall`, a `TopKCall`, a `MergeCall`, a `LatentCall`, a `GatherCall`, a `LogitsCall`, or
    a `CacheWriteCall` with what else is served or returned. None: the function has no kernel. page: where
    `tools.reference` documents it. reshaping: how its queries and results differ from those of the call, None if they
    do not. output: its argument that receives
    the result, if one must be given. kernels: the family of its kernels, None for that of the page. binds: whether
    `bind` takes it, because arguments stay from call to call. The room of its module is the library that has the
    signature.
    """

    function: Callable[..., Any]
    make: Callable[..., Any] | None
    page: str
    reshaping: Reshaping | None = None
    output: str | None = None
    kernels: str | None = None
    binds: bool = True

    @property
    def family(self) -> str:
        return FAMILY_OF[self.page] if self.kernels is None else self.kernels

    @property
    def name(self) -> str:
        return self.function.__name__


def _rotation(function: Callable[..., Any], make: Callable[..., Any], **fixed: Any) -> PublicFunction:
    """Return the row of a function of RoPE. fixed: arguments of `make` that the function does not have."""
    return PublicFunction(function, partial(make, **fixed) if fixed else make, CACHES, binds=False)


def _merge(function: Callable[..., Any], make: Callable[..., Any]) -> PublicFunction:
    return PublicFunction(function, make, CACHES, kernels=MERGING, binds=False)


def _latent(function: Callable[..., Any], make: Callable[..., Any]) -> PublicFunction:
    return PublicFunction(function, make, CACHES, kernels=LATENT, binds=False)


def _gather(function: Callable[..., Any], make: Callable[..., Any]) -> PublicFunction:
    return PublicFunction(function, make, CACHES, kernels=LATENT_READ, binds=False)


def _logits(function: Callable[..., Any], make: Callable[..., Any]) -> PublicFunction:
    return PublicFunction(function, make, SPARSE, binds=False)


def _quantization(function: Callable[..., Any], make: Callable[..., Any]) -> PublicFunction:
    return PublicFunction(function, make, CACHES, kernels=QUANTIZATION, binds=False)


def _in_torch(function: Callable[..., Any]) -> PublicFunction:
    """Return the row of a function without a kernel."""
    return PublicFunction(function, None, CACHES, kernels=NO_KERNEL, binds=False)


def _return_lse_call(args: Any, kwargs: Any) -> AttentionCall:
    """Return the call of `single_prefill_with_kv_cache_return_lse`."""
    return made_by(single.single_prefill_with_kv_cache, *args, **kwargs | {"return_lse": True})


_SHAPED = Reshaping(flash_attn.bound_rows, flash_attn.shaped)
FUNCTIONS: tuple[PublicFunction, ...] = (
    PublicFunction(trtllm.trtllm_batch_context_with_kv_cache, trtllm.context_call, PREFILL),
    PublicFunction(trtllm.trtllm_batch_decode_with_kv_cache, trtllm.decode_call, DECODE),
    PublicFunction(
        xqa.xqa, xqa.xqa_call, DECODE, Reshaping(xqa.bound_rows, xqa.shaped), output="output"
    ),
    PublicFunction(engines.xqa_batch_decode_with_kv_cache, engines.xqa_batch_call, DECODE),
    PublicFunction(engines.trtllm_fmha_v2_prefill, engines.fmha_call, PREFILL),
    PublicFunction(
        ragged_deepseek.trtllm_ragged_attention_deepseek, ragged_deepseek.ragged_deepseek_call, PREFILL
    ),
    PublicFunction(single.single_prefill_with_kv_cache, single.single_prefill_call, PREFILL),
    PublicFunction(single.single_prefill_with_kv_cache_return_lse, _return_lse_call, PREFILL),
    PublicFunction(
        single_decode.single_decode_with_kv_cache, single_decode.single_decode_call, DECODE,
        Reshaping(single_decode.bound_rows, single_decode.shaped),
    ),
    PublicFunction(flash_attn.flash_attn_varlen_func, flash_attn.varlen_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(flash_attn.flash_attn_with_kvcache, flash_attn.kvcache_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(flash_attn.flash_attn_func, flash_attn.func_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(
        mla.trtllm_batch_decode_with_kv_cache_mla, mla.mla_decode_call, DECODE,
        Reshaping(mla.bound_rows, mla.shaped),
    ),
    PublicFunction(
        mla.xqa_batch_decode_with_kv_cache_mla, mla.xqa_mla_call, DECODE, Reshaping(mla.bound_rows, mla.shaped)
    ),
    PublicFunction(
        flash_mla.flash_mla_with_kvcache, flash_mla.decode_call, DECODE,
        Reshaping(flash_mla.bound_rows, flash_mla.shaped),
    ),
    PublicFunction(
        flash_mla.flash_mla_sparse_fwd, flash_mla.sparse_call, PREFILL,
        Reshaping(flash_mla.bound_tokens, flash_mla.with_max),
    ),
    PublicFunction(dsa_sparse_attention.dsa_sparse_attention, dsa_sparse_attention.flat_call, PREFILL, binds=False),
    PublicFunction(
        dsa_sparse_attention.dsa_sparse_attention_varlen, dsa_sparse_attention.varlen_call, PREFILL, binds=False
    ),
    PublicFunction(sparse_paged_attention.sparse_paged_attention, sparse_paged_attention.sparse_paged_call, DECODE),
    PublicFunction(flash_mla.get_mla_metadata, None, DECODE, kernels=NO_KERNEL, binds=False),
    PublicFunction(dsa_indexer.dsa_indexer_topk, dsa_indexer.topk_call, SPARSE, binds=False),
    PublicFunction(dsa_indexer.dsa_indexer_topk_workspace_size, None, SPARSE, kernels=NO_KERNEL, binds=False),
    PublicFunction(deep_gemm.get_paged_mqa_logits_metadata, None, SPARSE, kernels=NO_KERNEL, binds=False),
    PublicFunction(topk.top_k, topk.top_k_call, SELECTION),
    PublicFunction(topk.top_k_page_table_transform, topk.page_table_call, SELECTION),
    PublicFunction(topk.top_k_ragged_transform, topk.ragged_call, SELECTION),
    PublicFunction(vllm_topk.top_k_per_row_prefill, vllm_topk.row_prefill_call, SELECTION),
    PublicFunction(vllm_topk.top_k_per_row_decode, vllm_topk.row_decode_call, SELECTION),
    PublicFunction(vllm_topk.persistent_topk, vllm_topk.persistent_call, SELECTION),
    PublicFunction(vllm_topk.cooperative_topk, vllm_topk.persistent_call, SELECTION),
    PublicFunction(append_qkv.append_qkv, append_qkv.append_call, CACHES),
    PublicFunction(page.append_paged_kv_cache, page.append_paged_call, CACHES),
    PublicFunction(page.nvfp4_quantize_append_paged_kv_cache, page.nvfp4_append_call, CACHES),
    PublicFunction(
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, page.nvfp4_slots_call, CACHES
    ),
    _in_torch(page.get_batch_indices_positions),
    _in_torch(page.get_seq_lens),
    _rotation(rope.apply_rope, rope.requests_call),
    _rotation(rope.apply_rope_inplace, rope.requests_call, inplace=True),
    _rotation(rope.apply_rope_pos_ids, rope.positions_call),
    _rotation(rope.apply_rope_pos_ids_inplace, rope.positions_call, inplace=True),
    _rotation(rope.apply_llama31_rope, rope.llama31_requests_call),
    _rotation(rope.apply_llama31_rope_inplace, rope.llama31_requests_call, inplace=True),
    _rotation(rope.apply_llama31_rope_pos_ids, rope.llama31_positions_call),
    _rotation(rope.apply_llama31_rope_pos_ids_inplace, rope.llama31_positions_call, inplace=True),
    _rotation(rope.apply_rope_with_cos_sin_cache, rope.table_call),
    _rotation(rope.apply_rope_with_cos_sin_cache_inplace, rope.table_call, inplace=True),
    _rotation(rope_quantize.rope_quantize_fp8, rope_quantize.quantize_call),
    _latent(rope_quantize.mla_rope_quantize_fp8, rope_quantize.mla_quantize_call),
    _rotation(rope_quantize.rope_quantize_fp8_append_paged_kv_cache, rope_quantize.quantize_append_call),
    _quantization(nvfp4.nvfp4_quantize, nvfp4.quantize_call),
    _quantization(nvfp4.nvfp4_dequantize, nvfp4.dequantize_call),
    _merge(cascade.merge_state, cascade.pair_call),
    _merge(cascade.merge_state_in_place, cascade.in_place_call),
    _merge(cascade.merge_states, cascade.states_call),
    _latent(append_latent.append_latent, append_latent.append_latent_call),
    _latent(latent.append_paged_mla_kv_cache, latent.append_call),
    PublicFunction(
        latent_nvfp4.nvfp4_quantize_append_paged_mla_kv_cache, latent_nvfp4.nvfp4_append_call, CACHES, binds=False
    ),
    _latent(latent.concat_mla_k, latent.concat_k_call),
    _latent(vllm_latent.concat_and_cache_mla, vllm_latent.concat_call),
    _latent(vllm_latent.concat_and_cache_mla_rope_fused, vllm_latent.fused_call),
    _latent(vllm_latent.concat_mla_q, vllm_latent.concat_q_call),
    _latent(vllm_latent.indexer_k_quant_and_cache, vllm_latent.index_cache_call),
    _gather(gather_latent.gather_latent, gather_latent.gather_call),
    _gather(vllm_gather.gather_and_maybe_dequant_cache, vllm_gather.dequant_call),
    _gather(vllm_gather.cp_gather_cache, vllm_gather.copy_call),
    _gather(vllm_gather.cp_gather_and_upconvert_fp8_kv_cache, vllm_gather.upconvert_call),
    _gather(vllm_gather.cp_gather_and_upconvert_nvfp4_kv_cache, vllm_gather.upconvert_nvfp4_call),
    _gather(vllm_gather.cp_gather_indexer_k_quant_cache, vllm_gather.index_gather_call),
    _logits(select.select_slots, select.slots_call),
    _logits(select.select_rows, select.rows_call),
    _logits(deep_gemm.fp8_mqa_logits, deep_gemm.ragged_call),
    _logits(deep_gemm.fp8_fp4_mqa_logits, deep_gemm.fp4_ragged_call),
    _logits(deep_gemm.fp8_paged_mqa_logits, deep_gemm.paged_call),
    _logits(deep_gemm.fp8_fp4_paged_mqa_logits, deep_gemm.fp4_paged_call),
    _in_torch(quantization.packbits),
    _in_torch(quantization.segment_packbits),
)  # fmt: skip


def row_of(function: Any, asker: str = "", binds: bool = False) -> PublicFunction:
    """Return the row of a public function. Raises TypeError for another one.

    asker: the function that needs a call; one that has no kernel raises NotImplementedError. binds: whether the call is
    kept; a function of which no argument stays from call to call raises NotImplementedError, too.
    """
    row = next((row for row in FUNCTIONS if row.function is function), None)
    if row is None:
        names = listed(row.name for row in FUNCTIONS)
        raise TypeError(f"function: {getattr(function, '__name__', repr(function))}, must be one of {names}")
    if asker and (row.make is None or binds and not row.binds):
        why = "it has torch operations and no kernel" if row.make is None else "it keeps no tensor from call to call"
        served = listed(row.name for row in FUNCTIONS if row.make is not None and (row.binds or not binds))
        raise NotImplementedError(f"function: {row.name}, not supported by {asker}: {why}; must be one of {served}")
    return row


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, with those that have their default value."""
    try:
        given = signature(function).bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # raises Python's own error: its body does not begin
        raise
    given.apply_defaults()
    return given.arguments


def made_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the call that a public function makes of these arguments, unchecked. Nothing is launched or written."""
    make, given = row_of(function, "explain and bind").make, arguments_of(function, *args, **kwargs)
    assert make is not None
    taken = signature(make).parameters.values()  # the function lacks those that only other functions give
    return make(**{p.name: given[p.name] for p in taken if p.name in given or p.kind is not p.KEYWORD_ONLY})


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the call of a public function, of its family's type: see `made_by`.

    That of flash_attn_with_kvcache is its attention, before new keys are appended. That of a selection is its logits
    or, if it computes none, the selection itself. That of a function that writes the parts of rows in two launches is
    the first one.
    """
    made = made_by(function, *args, **kwargs)
    if isinstance(made, flash_attn.CachedCall):
        return made.attention
    if isinstance(made, selection.SelectionCall):
        return selection.first_call(made)
    while type(made) is tuple:
        made = made[0]
    return made
