"""SGLang's sparse latent attention (DSA: DeepSeek V3.2, GLM-5) on this package: attention, indexer, top-k, cache.

    SGLANG_PLUGINS=cute_kernels_dsa python -m sglang.launch_server --model-path MODEL --kv-cache-dtype fp8_e4m3

SGLang's backend `dsa` keeps its metadata, graphs and drafts. `replace` replaces what it calls, whatever
`--dsa-prefill-backend`, `--dsa-decode-backend` and `--dsa-topk-backend` say, so that neither FlashMLA nor DeepGEMM is
needed for attention and indexer:

- Attention reads the rows of the pool as they lie: 16 bits, packed records of 656 bytes, or e4m3 (`tilelang`). Prompts
  do so, too, so that nothing is dequantised; heads are never padded. With CUTE_KERNELS_SHARE_KEYS=1,
  neighbouring tokens of prompts read the union of their keys once (`latent_support.of_prompts`).
- The indexer's logits, and the top-k (`sglang_topk`). Decodes and drafts to verify choose their slots in one call.
- Prompts that are dense, because they are short, attend to keys and values per head.
- One launch quantises and writes the rows of new tokens.

NotImplementedError at construction: other backends than `BACKENDS` for prefill or decode; pooled index keys
(`index_kpool`), HiSparse, sharded KV, context parallelism; rows of other sizes than 512 and 64 columns; and every
configuration that no kernel of the GPU supports.

Written for SGLang 0.5.23, which has run it offline on an H200, with a tiny model. Tested on the CPU reference against
SGLang's own files; not run inside a server.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_kpool
from sglang.srt.layers.attention.kv_shard_hooks import get_kv_shard_pool
from sglang.srt.mem_cache.layout.paged_view import paged_view
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_parallel

from ..attention.call import slot_sequences
from ..attention.op import serve
from ..attention.views import columns_and_rope, counts_of
from ..deep_gemm.api import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from ..flash_attn.api import flash_attn_varlen_func
from ..host import machine
from ..host.plain import traced
from ..own.append_latent import LatentCache, append_latent
from ..own.select import select_slots
from . import sglang_topk
from .latent_support import COLUMNS, PACKED, ROTATED, can_share_keys, latent_call, latent_refusal, of_prompts
from .support import E4M3

DSA = "sglang.srt.layers.attention.dsa"
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
BACKENDS = ("flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3", "tilelang")
PARTS = "fa3"  # SGLang's name for the path that gives queries in two parts, and slots of the pool to prompts, too
SINKS = "flashmla_sparse"  # the one path to which it gives sinks


def construct(original: Callable[..., None], self: Any, model_runner: Any, *args: Any, **named: Any) -> None:
    """Construct SGLang's backend, after a check, with the one path that is replaced."""
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:  # SGLang logs an error and goes on
        raise RuntimeError(f"SGLang has not hooked {', '.join(missing)}; its log says why")
    check(model_runner)
    original(self, model_runner, *args, **named)
    sinks = getattr(model_runner.model_config.hf_config, "learnable_sink", False)
    self.dsa_prefill_impl = self.dsa_decode_impl = SINKS if sinks else PARTS
    self.enable_auto_select_prefill_impl = False


def check(runner: Any) -> None:
    """Raise on a server that asks for something that no function here supports, or no kernel of the GPU."""
    kernel, parallel, config = get_exec().kernel, get_parallel(), runner.model_config
    chosen = {"prefill": kernel.dsa_prefill_backend, "decode": kernel.dsa_decode_backend}
    rank, rotated, pooled = config.kv_lora_rank, config.qk_rope_head_dim, get_dsa_index_kpool(config.hf_config)
    asked = {
        f"dtype {runner.dtype}": runner.dtype is not torch.bfloat16,
        f"kv_cache_dtype {runner.kv_cache_dtype}": runner.kv_cache_dtype not in (torch.bfloat16, E4M3),
        f"rows of {rank} + {rotated} columns": (rank, rotated) != (COLUMNS, ROTATED),
        f"index_kpool {pooled}": pooled != 1,
        "HiSparse": runner.hisparse_coordinator is not None,
        "sharded KV": get_kv_shard_pool(runner.token_to_kv_pool) is not None,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    for phase, name in chosen.items():
        if name not in BACKENDS:
            found.append(f"--dsa-{phase}-backend {name}, must be one of {', '.join(BACKENDS)}")
    if found:
        raise NotImplementedError(f"plugin cute_kernels_dsa: {'; '.join(found)}: not supported")
    known = machine.current.device_info(torch.device(runner.device))
    record = PACKED if runner.kv_cache_dtype is E4M3 else ""
    reason = latent_refusal(known[0], runner.dtype, record, rotated, True) if known else None
    if reason:
        raise NotImplementedError(reason)


# ---- attention


def attend(
    self: Any, q: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor,
    lens: torch.Tensor | None, scale: float, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of tokens to rows of a pool, which each has chosen.

    q: (tokens, heads, 512), q_rope: (tokens, heads, 64). rows: (slots of the pool, 1, W). slots: int32 (tokens, K), -1
    for no key. lens: int32, at most so many first ones of a token are keys; SGLang may pad it to more or fewer tokens.
    """
    tokens, plain = q.shape[0], not traced(q)
    if lens is not None:
        lens = lens[:tokens] if lens.shape[0] >= tokens else None
    requests = slot_sequences(slots, counts_of(slots, lens, 1, plain), plain)
    split = "never" if self.num_splits == 1 else "auto"  # SGLang sets 1 for deterministic inference
    call = latent_call(
        q, q_rope, paged_view(rows, self.physical_page_size), requests, 1, scale, split_kv=split,
        sinks=None if sinks is None else sinks.float(),
    )  # fmt: skip
    shares = split == "auto" and can_share_keys(q.shape[1], call.record) and has_prompts(self.forward_metadata)
    return serve(call._replace(share_keys=shares))


def has_prompts(metadata: Any) -> bool:
    """Return whether neighbouring tokens of SGLang's batch are mostly of one prompt. SGLang says 1 for the longest
    request of decodes and of drafts, of which it makes graphs."""
    lens = metadata.dsa_extend_seq_lens_list
    return of_prompts(sum(lens), len(lens), metadata.max_seq_len_q)


def of_parts(
    self: Any, q_rope: torch.Tensor, kv_cache: torch.Tensor, v_head_dim: int, q_nope: torch.Tensor,
    page_table: torch.Tensor, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, sm_scale: float, logit_cap: float, page_size: int,
) -> torch.Tensor:  # fmt: skip
    """Serve the path of SGLang's backend that has queries in two parts. Its requests have one token each."""
    if logit_cap:
        raise NotImplementedError(f"logit_cap: {logit_cap}, must be 0")
    return attend(self, q_nope, q_rope, kv_cache, page_table, cache_seqlens, sm_scale)


def of_sinks(
    self: Any, q_all: torch.Tensor, kv_cache: torch.Tensor, v_head_dim: int, page_table_1: torch.Tensor,
    sm_scale: float, topk_length: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Serve the path of SGLang's backend that has sinks, for models with any."""
    q, q_rope = columns_and_rope(q_all, v_head_dim)
    assert q_rope is not None
    return attend(self, q, q_rope, kv_cache, page_table_1, topk_length, sm_scale, attn_sink)


def per_head(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, metadata: Any
) -> torch.Tensor:
    """Compute dense attention of short prompts to keys and values per head, which hold their prefixes."""
    heads, size = layer.tp_k_head_num, layer.head_dim
    return flash_attn_varlen_func(
        q.view(-1, layer.tp_q_head_num, size), k.view(-1, heads, size), v.view(-1, heads, layer.v_head_dim),
        metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seq_len_q, softmax_scale=layer.scaling, causal=True,
    )  # fmt: skip


def chosen(self: Any, topk_indices: torch.Tensor) -> torch.Tensor:
    """Return the slots that the top-k has chosen, whatever `--dsa-topk-backend` says."""
    return topk_indices


# ---- the indexer


def select(
    original: Callable[..., torch.Tensor], self: Any, forward_batch: Any, layer_id: int, q_fp8: torch.Tensor,
    weights: torch.Tensor, metadata: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the slots of the keys of decodes and drafts, int32 (tokens, k), -1 for padding.

    Models whose first or last keys are always chosen, and steps that need positions instead of slots, go through
    SGLang's function, with the logits and the top-k of this package.
    """
    if self.num_init_tokens or self.num_local_tokens or metadata.force_unfused_topk:
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    pool = get_token_to_kv_pool()
    rows, requests = sum(metadata.get_dsa_extend_len_cpu()), metadata.get_seqlens_int32().shape[0]
    each = rows // requests if requests else 1
    table, lens = metadata.get_page_table_64(), metadata.get_seqlens_expanded()[:rows]
    keys = self._get_index_k_read_buffer(pool, layer_id)
    out = q_fp8.new_empty((q_fp8.shape[0], self.index_topk), dtype=torch.int32)
    if rows < out.shape[0]:
        out[rows:].fill_(-1)
    select_slots(
        q_fp8[:rows].unflatten(0, (requests, each)), keys.view(keys.shape[0], pool.index_page_size, 1, -1),
        weights[:rows].squeeze(2), lens.view(requests, each), table[: rows : each], self.index_topk,
        out=out[:rows].view(requests, each, self.index_topk),
    )  # fmt: skip
    return out


def no_plan(self: Any, seqlens_expanded: torch.Tensor) -> None:
    """Return no plan of SGLang's top-k, which is not called."""


def sms() -> int:
    """Return the number of SMs, by which SGLang sizes a schedule that nothing reads."""
    known = machine.current.device_info(torch.device("cuda", torch.cuda.current_device()))
    return known[1] if known else 1


# ---- the cache


def write(
    original: Callable[..., None], self: Any, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
) -> None:  # fmt: skip
    """Quantise rows and write them at their slots; pools without DSA write theirs themselves.

    Factors of packed records are powers of two, which attention multiplies by exactly; SGLang does not round them.
    """
    if not self.use_dsa or cache_k_nope.dtype is not torch.bfloat16:
        return original(self, dst_buffer, loc, cache_k_nope, cache_k_rope)
    record = PACKED if self.dsa_kv_cache_store_fp8 else "e4m3" if self.dtype is E4M3 else "rows"
    append_latent(cache_k_nope.flatten(0, -2), cache_k_rope.flatten(0, -2), LatentCache(dst_buffer[None], record), loc)
    return None


HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    f"{BACKEND}.__init__": (construct, HookType.AROUND),
    f"{BACKEND}._forward_fa3": (of_parts, HookType.REPLACE),
    f"{BACKEND}._forward_flashmla_sparse": (of_sinks, HookType.REPLACE),
    f"{BACKEND}._forward_standard_mha": (per_head, HookType.REPLACE),
    f"{BACKEND}._get_fused_topk_page_table": (chosen, HookType.REPLACE),
    f"{BACKEND}._build_topk_v2_plan": (no_plan, HookType.REPLACE),
    f"{DSA}.dsa_indexer.Indexer._get_topk_paged": (select, HookType.AROUND),
    f"{DSA}.utils.resolve_num_sms": (sms, HookType.REPLACE),
    f"{DSA}.utils.resolve_paged_mqa_logits_metadata_fn": (lambda: get_paged_mqa_logits_metadata, HookType.REPLACE),
    f"{DSA}.utils.resolve_fp8_paged_mqa_logits_fn": (lambda: fp8_paged_mqa_logits, HookType.REPLACE),
    f"{DSA}.utils.resolve_fp8_mqa_logits_fn": (lambda: fp8_mqa_logits, HookType.REPLACE),
    f"{POOL}._write_mla_kv_buffer": (write, HookType.AROUND),
}


def replace() -> None:
    """Register hooks, which SGLang applies after all plugins are loaded."""
    sglang_topk.replace()
    for target, (function, kind) in HOOKS.items():
        HookRegistry.register(target, function, kind)
