"""SGLang's attention backend `cute_kernels` for models with dense latent attention (MLA): DeepSeek V3, Kimi K2.

    python -m sglang.launch_server --model-path MODEL --attention-backend cute_kernels --page-size 64

`plugins.sglang` registers it beside `sglang`, and SGLang's own model code calls it. Decodes, drafts to verify, chunks
and mixed batches attend to the rows of the pool as they lie, in 16 bits or in e4m3 with the layer's scale, with any
page size and number of heads. Prompts without a prefix, and those for which SGLang fetches the whole prefix
(MHA_ONE_SHOT), attend to keys and values per head. One launch writes the rows of new tokens. Graphs are as in `sglang`.

NotImplementedError at construction: what `sglang` refuses; sparse attention, which has a plugin of its own
(`plugins.sglang_dsa`); rows of other sizes than 512 and 64 or 0 columns; and every configuration that no kernel of the
GPU supports.

Written for SGLang 0.5.23, which has run it offline on an H200, with a tiny model. Tested on the CPU reference against
SGLang's own files; not run inside a server.
"""

from typing import Any

import torch
from sglang.srt.layers.cp.utils import is_cp_active
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.runtime_context import get_exec

from ..attention.bound import StepTensors
from ..attention.call import AttentionCall
from ..flash_attn.api import flash_attn_varlen_func
from ..host.plain import traced
from ..own.append_latent import LatentCache, append_latent
from ..own.explanation import explain
from .latent_support import COLUMNS, ROTATED, latent_call, latent_refusal
from .sglang import SglangBackend, attention_layers, layer_refusals, number, raise_if_any, server_refusals
from .support import E4M3, reason_of

NAME = "cute_kernels"  # by which `plugins.sglang` registers the backend


class SglangMlaBackend(SglangBackend):
    """Latent attention of a model runner's layers, and attention of their prompts per head."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        pool = model_runner.token_to_kv_pool
        self._plain = is_plain(pool)
        scaled = [layer.layer_id for layer in attention_layers(model_runner) if number(layer.k_scale_float) != 1.0]
        if scaled and not self._plain:
            raise NotImplementedError(
                f"attention backend cute_kernels: {type(pool).__name__} with k_scale other than 1 in layers {scaled}: "
                "not supported"
            )
        register(model_runner)

    def _check(self, runner: Any, arch: str | None) -> None:
        pool, config = runner.token_to_kv_pool, runner.model_config
        rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
        asked = {
            "sparse attention (set SGLANG_PLUGINS=cute_kernels_dsa, and another backend)": getattr(
                pool, "use_dsa", False
            ),
            f"rows of {rank} + {rotated} columns": rank != COLUMNS or rotated not in (0, ROTATED),
            f"kv_cache_dtype {runner.kv_cache_dtype}": runner.kv_cache_dtype not in (runner.dtype, E4M3),
            f"dtype {runner.dtype} with kv_cache_dtype {E4M3}": (
                runner.kv_cache_dtype is E4M3 and runner.dtype is not torch.bfloat16
            ),
        }
        found = server_refusals(runner) + [name for name, is_asked in asked.items() if is_asked]
        by_head = set()
        for layer in attention_layers(runner):
            found += layer_refusals(layer)
            if layer.logit_cap > 0 or layer.sliding_window_size >= 0:
                found.append("a soft cap or a window")
            if layer.v_head_dim != COLUMNS:
                by_head.add((layer.head_dim, layer.v_head_dim))
        raise_if_any(found)
        for reason in [
            latent_refusal(arch, runner.dtype, "e4m3" if runner.kv_cache_dtype is E4M3 else "", rotated),
            *(_refusal_by_head(arch, runner.dtype, *sizes) for sizes in sorted(by_head)),
        ] if arch else ():  # fmt: skip
            if reason:
                raise NotImplementedError(reason)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention of a layer.

        Latent: q (tokens, heads * 512) and q_rope (tokens, heads * R), or q with the columns of both; k (tokens, 1,
        512) and k_rope (tokens, 1, R), or k with both, or None if they are already stored. Returns (tokens, heads *
        512). Per head: q, k, v (tokens, heads, ...), and returns (tokens, heads * columns of v).
        """
        asked = [
            name for name, value in (options | {"sinks": sinks}).items() if value is not None and value is not False
        ]
        if asked:
            raise NotImplementedError(f"{', '.join(asked)}: given, must be None")
        if layer.v_head_dim != COLUMNS:
            return self._by_head(q, k, v, layer, forward_batch)
        m = self.forward_metadata
        assert m is not None, "init_forward_metadata comes first"
        (pages,), launch = self._held(layer, (self.token_to_kv_pool.get_key_buffer(layer.layer_id),))
        factor = number(layer.k_scale_float) if self.data_type is E4M3 else 1.0
        if save_kv_cache and k is not None:
            k, k_rope = _parts(k, k_rope, 1)
            if self._plain:
                self._write(k, k_rope, pages, forward_batch.out_cache_loc, factor)
            else:
                self.token_to_kv_pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, k_rope)
        q, q_rope = _parts(q, q_rope, layer.tp_q_head_num)
        step = StepTensors(q, m.table, m.seq_lens, m.cu_seq_lens_q, rope=q_rope)
        longest, scale = m.max_q_len if m.cu_seq_lens_q is not None else 1, layer.scaling * factor

        def call() -> AttentionCall:
            return latent_call(q, q_rope, pages, step.requests(not traced(q)), longest, scale, factor)

        out = launch.serve(step, (scale, factor, longest), (), call)
        return out.flatten(1)

    forward_extend = forward_decode  # the metadata distinguish the two

    def _write(self, k: torch.Tensor, k_rope: Any, pages: torch.Tensor, slots: torch.Tensor, factor: float) -> None:
        """Store rows (tokens, 1, columns) at their slots, quantised if the pool is, in one launch."""
        rows = [None if t is None else t.select(1, 0).to(self.dtype) for t in (k, k_rope)]
        cache = LatentCache(pages, "e4m3", scale=factor) if self.data_type is E4M3 else LatentCache(pages)
        append_latent(rows[0], rows[1], cache, slots)

    def _by_head(self, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
        """Compute attention of prompts to keys and values per head, which hold their prefixes if any are fetched."""
        m = self.forward_metadata
        assert m is not None and m.cu_seq_lens_q is not None, "keys per head are those of prompts"
        if batch.attn_attend_prefix_cache or batch.mha_return_lse:
            raise NotImplementedError("MHA_CHUNKED_KV: not supported, must be MHA, MHA_ONE_SHOT or MLA")
        starts, longest = m.cu_seq_lens_q, m.max_q_len
        if batch.mha_one_shot:
            if m.cu_seq_lens_k is None:
                m.cu_seq_lens_k = torch.nn.functional.pad(m.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            starts = m.cu_seq_lens_k
        heads, size = layer.tp_q_head_num, layer.head_dim
        k, v = k.view(-1, layer.tp_k_head_num, size), v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
        out = flash_attn_varlen_func(
            q.view(-1, heads, size), k.to(self.dtype), v.to(self.dtype), m.cu_seq_lens_q, starts, longest,
            softmax_scale=layer.scaling, causal=True,
        )  # fmt: skip
        return out.flatten(1)


def _parts(t: torch.Tensor, rope: Any, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return queries or keys as (tokens, heads, 512), and their rotated part, None if they have none."""
    if rope is not None:
        rope = rope.view(t.shape[0], heads, -1)
        return t.view(t.shape[0], heads, COLUMNS), rope if rope.shape[2] else None
    t = t.view(t.shape[0], heads, -1)
    return t[..., :COLUMNS], t[..., COLUMNS:] if t.shape[2] > COLUMNS else None


def is_plain(pool: Any) -> bool:
    """Return whether rows may be written through `get_key_buffer`; other pools write them themselves."""
    own = getattr(type(pool), "set_mla_kv_buffer", None)
    return own is MLATokenToKVPool.set_mla_kv_buffer and not pool.requires_physical_write_loc


def _refusal_by_head(arch: str, dtype: torch.dtype, size: int, columns: int) -> str | None:
    """Return why no kernel computes attention of prompts with such heads, or None."""
    q, v = (torch.zeros(1, 1, n, dtype=dtype, device="cpu") for n in (size, columns))
    starts = torch.zeros(2, dtype=torch.int32, device="cpu")
    found = explain(q, q, v, starts, starts, 1, function=flash_attn_varlen_func, causal=True, arch=arch)
    return reason_of(arch, found)


def register(runner: Any) -> None:
    """Tell SGLang's models what to call for the backend, as they do for their own backends by name."""
    AttentionBackendRegistry.register(NAME, forward_method)
    scaled = getattr(runner.model_config.hf_config, "llama_4_scaling", None)  # of joined queries, in SGLang
    if scaled is None and NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


def forward_method(attn: Any, batch: Any) -> AttnForwardMethod:
    """Return how a layer computes a batch: per head (MHA) without a prefix or with a fetched one, else latent.

    A prefix is fetched if it is as long as SGLang's threshold and fits its buffer. In a graph of prompts, shapes may
    not depend on lengths. Rows that were divided by a scale are read by this backend alone, and so they are never
    fetched.
    """
    graph = is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph() or is_cp_active(batch)
    invariant = get_exec().deterministic.enable_deterministic_inference
    scaled = getattr(get_attn_backend(), "data_type", None) is E4M3 and number(attn.attn_mqa.k_scale_float) != 1.0
    if graph or invariant or scaled or not batch.forward_mode.is_extend_without_speculative():
        return AttnForwardMethod.MLA
    prefix = sum(batch.extend_prefix_lens_cpu or ())
    if prefix == 0:
        return AttnForwardMethod.MHA
    fits = batch.seq_lens_cpu is not None and sum(batch.seq_lens_cpu) <= batch.get_max_chunk_capacity()
    if fits and prefix >= attn.chunked_prefix_cache_threshold and not attn.disable_chunked_prefix_cache:
        return AttnForwardMethod.MHA_ONE_SHOT
    return AttnForwardMethod.MLA
