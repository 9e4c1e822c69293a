"""SGLang's attention backend `cute_kernels`, over the context and the decode function.

    python -m sglang.launch_server --model-path MODEL --attention-backend cute_kernels --page-size 16

The plugin `cute_kernels` (`plugins.sglang`) registers it. The backend reads pools of 16 bits, e4m3 and e5m2 in place,
with any page size. It supports windows, with or without pools of their own, soft caps and sinks; prompts, chunks,
decodes and batches of both; and the verification of drafts that are chains (`--speculative-eagle-topk 1`). It plans
nothing and reads no value from the device: in a CUDA graph of decode or verification, the graph makes tables and
lengths. Models with latent attention (MLA) get `sglang_mla`.

NotImplementedError at construction: trees of drafts, draft models (`--speculative-draft-attention-backend` names
another backend), encoders and cross attention, FP4 pools, context parallelism, other head sizes, and every
configuration that no kernel of the GPU supports.

Written for SGLang 0.5.23, which has run it offline on an H200. Tests run it against SGLang's own files on the CPU
reference. No HTTP server has run it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec

from ..attention.bound import LayerLaunch, StepTensors, memory_of
from ..attention.call import AttentionCall
from ..flashinfer.trtllm import context_call, decode_call
from ..host import machine
from ..host.plain import traced
from ..own.append_qkv import KVCacheTarget, append_qkv
from .support import E4M3, E5M2, HEAD_SIZES, query_dtype, refusal

DECODES = (ForwardMode.DECODE, ForwardMode.IDLE)
PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass
class SglangMetadata:
    """A batch of R requests."""

    seq_lens: torch.Tensor  # int32 (R,), with the new tokens
    table: torch.Tensor  # int32 (R, pages)
    window_table: torch.Tensor | None  # the same for layers with a window, if these have a pool of their own
    window_loc: torch.Tensor | None  # (tokens,), slots of the new tokens in that pool
    cu_seq_lens_q: torch.Tensor | None = None  # int32 (R + 1,); None: one token per request
    max_q_len: int = 1
    cu_seq_lens_k: torch.Tensor | None = None  # int32 (R + 1,), sums of seq_lens, where a layer has needed them


class SglangBackend(AttentionBackend):
    """Attention of a model runner's layers."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.dtype, self.data_type = model_runner.dtype, model_runner.kv_cache_dtype
        known = machine.current.device_info(torch.device(model_runner.device))
        self._query_dtype = query_dtype(self.dtype, self.data_type, known and known[0])
        self._check(model_runner, known and known[0])
        self.page_size, self.max_context_len = model_runner.page_size, model_runner.model_config.context_len
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        self._windows = pool if isinstance(pool, SWAKVPool) else None
        self._plain = _is_plain(pool)
        self._layers: dict[int, tuple[Any, Any, LayerLaunch]] = {}  # layer -> memory of its pools, views, its launch
        self.forward_metadata: SglangMetadata | None = None

    def _check(self, runner: Any, arch: str | None) -> None:
        """Raise on a server that asks for something that no function here supports, or no kernel of the GPU."""
        cache, found, head_sizes = runner.kv_cache_dtype, server_refusals(runner), set()
        if cache not in (runner.dtype, E4M3, E5M2):
            found.append(f"kv_cache_dtype {cache}")
        for layer in attention_layers(runner):
            size, value_size = layer.head_dim, layer.v_head_dim
            if size != value_size or size not in HEAD_SIZES:
                found.append(f"head_dim {size}, {value_size} of V")
            found += layer_refusals(layer)
            head_sizes.add(size)
        raise_if_any(found)
        for size in head_sizes if arch else ():
            reason = refusal(arch, size, self.dtype, self.data_type)  # type: ignore[arg-type]
            if reason:
                raise NotImplementedError(reason)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = self._metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: a graph makes its metadata itself."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if forward_batch.forward_mode in PROMPTS:
            raise NotImplementedError(f"forward_mode: {forward_batch.forward_mode!r}, must be DECODE or TARGET_VERIFY")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.forward_metadata = self._metadata(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _metadata(self, batch: Any) -> SglangMetadata:
        """Make the metadata by device operations; the only host value read is the longest query."""
        mode = batch.forward_mode
        if mode not in (*DECODES, *PROMPTS, ForwardMode.TARGET_VERIFY):
            raise NotImplementedError(f"forward_mode: {mode!r}, must be DECODE, EXTEND, MIXED or TARGET_VERIFY")
        drafts = getattr(batch, "spec_info", None)
        if mode == ForwardMode.TARGET_VERIFY and drafts is not None and drafts.ragged_verify_layout is not None:
            raise NotImplementedError("ragged_verify_layout: given, must be None")
        # The slot of the first token of each page.
        first = self.req_to_token[:, :: self.page_size].index_select(0, batch.req_pool_indices)
        window_table = window_loc = None
        if self._windows is not None:
            window_table = self._pages(self._windows.translate_loc_from_full_to_swa(first))
            if batch.out_cache_loc is not None:
                window_loc = self._windows.translate_loc_from_full_to_swa(batch.out_cache_loc)
        found = SglangMetadata(batch.seq_lens.to(torch.int32, copy=True), self._pages(first), window_table, window_loc)
        if mode == ForwardMode.TARGET_VERIFY:  # the lengths do not count the tokens to verify yet
            found.max_q_len = tokens = batch.input_ids.shape[0] // batch.batch_size
            found.seq_lens += tokens
            starts = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=found.seq_lens.device)
            found.cu_seq_lens_q = starts * tokens
        elif mode in PROMPTS:
            ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            found.cu_seq_lens_q = torch.nn.functional.pad(ends, (1, 0))
            found.max_q_len = int(max(batch.extend_seq_lens_cpu))
        return found

    def _pages(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.div(self.page_size, rounding_mode="floor").to(torch.int32)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention of a layer and return (tokens, heads * head_dim).

        q: (tokens, heads * head_dim), or with heads as a dimension, the tokens of requests one after another. k and v:
        the same with KV heads, or None if they are already stored. sinks: (heads,), any dtype.
        """
        asked = [name for name, value in options.items() if value is not None and value is not False]
        if asked:
            raise NotImplementedError(f"{', '.join(asked)}: given, must be None")
        m = self.forward_metadata
        assert m is not None, "init_forward_metadata comes first"
        new = save_kv_cache and k is not None
        if new and not self._plain:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=m.window_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        heads, dim = layer.tp_q_head_num, layer.head_dim
        q = q.reshape(-1, heads, dim).to(self._query_dtype)
        pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        caches, launch = self._held(layer, pools)
        scale, out_scale = layer.scaling, 1.0
        if self.data_type in (E4M3, E5M2):
            scale, out_scale = scale * number(layer.k_scale_float), number(layer.v_scale_float)
        windowed = self._windows is not None and self._windows.layers_mapping[layer.layer_id][1]
        if new and self._plain:
            self._append(layer, k, v, caches, m.window_loc if windowed else forward_batch.out_cache_loc)
        table = m.window_table if windowed and m.window_table is not None else m.table
        sinks = None if sinks is None else sinks.float()

        def call() -> AttentionCall:
            given: dict[str, Any] = {
                "window_left": layer.sliding_window_size, "out_dtype": self.dtype, "kv_layout": "NHD", "sinks": sinks,
                "logits_soft_cap": layer.logit_cap or None,
            }  # fmt: skip
            if m.cu_seq_lens_q is None:
                return decode_call(q, caches, table, m.seq_lens, scale, out_scale, **given)
            requests = len(m.seq_lens), m.cu_seq_lens_q
            return context_call(q, caches, table, m.seq_lens, m.max_q_len, scale, out_scale, *requests, **given)

        values = scale, out_scale, layer.sliding_window_size, layer.logit_cap, m.max_q_len, m.cu_seq_lens_q is None
        out = launch.serve(StepTensors(q, table, m.seq_lens, m.cu_seq_lens_q), values, (sinks,), call)
        return out.view(-1, heads * dim)

    forward_extend = forward_decode  # the metadata distinguish the two

    def _held(self, layer: Any, pools: tuple[torch.Tensor, ...]) -> tuple[Any, LayerLaunch]:
        """Return a layer's caches as pages, the same views at each step, and its launch."""
        where = [(t.dtype, t.device, *place) for t, place in zip(pools, memory_of(pools))]
        known = self._layers.get(layer.layer_id)
        if known is None or known[0] != where:
            size = self.page_size, layer.tp_k_head_num, layer.head_dim
            known = where, tuple(paged_kv_view(pool, *size) for pool in pools), LayerLaunch()
            if not traced(pools[0]):
                self._layers[layer.layer_id] = known
        return known[1], known[2]

    def _append(self, layer: Any, k: Any, v: Any, caches: Any, slots: Any) -> None:
        """Store k and v at their slots, quantised if the pool is, in one launch."""
        if k.ndim != 3:
            k, v = (t.view(-1, layer.tp_k_head_num, layer.head_dim) for t in (k, v))
        if k.dtype not in (self.dtype, self.data_type):
            k, v = k.to(self.dtype), v.to(self.dtype)
        if k.dtype is self.data_type:  # the rows' bits, also if the model has quantised them
            target = KVCacheTarget(caches)
        else:
            target = KVCacheTarget(caches, "NHD", None, number(layer.k_scale_float), number(layer.v_scale_float))
        append_qkv(None, k, v, target, slots)


def number(scale: float | None) -> float:
    """Return the scale, or 1 for a checkpoint without scales."""
    return 1.0 if scale is None else scale


def _is_plain(pool: Any) -> bool:
    """Return whether rows may be written through `get_kv_buffer`; other pools write them themselves."""
    if isinstance(pool, SWAKVPool):
        if type(pool).set_kv_buffer is not SWAKVPool.set_kv_buffer:
            return False
        return _is_plain(pool.full_kv_pool) and _is_plain(pool.swa_kv_pool)
    return type(pool).set_kv_buffer is MHATokenToKVPool.set_kv_buffer and not pool.requires_physical_write_loc


def attention_layers(model_runner: Any) -> list[Any]:
    return [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]


def server_refusals(runner: Any) -> list[str]:
    """Return what a server asks for that no backend of this package supports."""
    parallel = get_parallel()
    asked = {
        "a draft model": runner.is_draft_worker,
        "trees of drafts": runner.spec_algorithm.is_speculative() and get_spec().speculative_eagle_topk != 1,
        "an encoder": runner.model_config.is_encoder_decoder,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.dcp_enabled,
        f"dtype {runner.dtype}": runner.dtype not in (torch.float16, torch.bfloat16),
    }
    return [name for name, is_asked in asked.items() if is_asked]


def layer_refusals(layer: Any) -> list[str]:
    """Return what a layer asks for that no backend of this package supports."""
    method = layer.logit_capping_method
    asked = {
        f"{layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        "cross attention": layer.is_cross_attention,
        f"logit_capping_method {method!r}": layer.logit_cap > 0 and method != "tanh",
        f"pos_encoding_mode {layer.pos_encoding_mode!r}": layer.pos_encoding_mode != "NONE",
        "xai_temperature_len": layer.xai_temperature_len > 0,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def raise_if_any(found: list[str]) -> None:
    if found:
        raise NotImplementedError(f"attention backend cute_kernels: {', '.join(dict.fromkeys(found))}: not supported")
