"""Run vLLM 0.33's own layers of latent attention on the plugin. The test keeps a copy of the rows in their caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wrappers
from bench.cases.mla import values as stored_values
from tests.support.engine_files import Engine, engine_files, entry_points
from tests.support.vllm_stubs import DeviceCapability, Platform, stubs

VERSION = "0.33.0"
FILES = tuple(
    f"vllm/{name}.py"
    for name in """
    _custom_ops envs scalar_type plugins/__init__ utils/math_utils utils/torch_utils v1/kv_cache_interface
    v1/kv_cache_layout v1/kv_cache_spec_registry v1/attention/backend v1/attention/selector v1/attention/backends/utils
    v1/attention/backends/registry v1/attention/backends/mla/prefill/base model_executor/layers/attention/__init__
    model_executor/layers/attention/attention
    model_executor/layers/attention/mla_attention models/deepseek_v32/attention v1/worker/workspace
    """.split()
)
BLOCK, BLOCKS, COLUMNS = 16, 40, 8
NOPE, ROPE, V, LATENT, TOP_K, INDEX_HEADS, INDEX_DIM = 128, 64, 128, 512, 24, 32, 128
RECORDS = {"auto": "", "fp8": "e4m3", "fp8_ds_mla": "656", "nvfp4_ds_mla": "352"}


class Linear(torch.nn.Module):
    """A projection without parallelism or quantisation."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns) * columns**-0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Operator(torch.nn.Module):
    """vLLM's CustomOp, without its registry."""

    @staticmethod
    def register(name: str, **others: Any) -> Any:
        return lambda cls: cls


def refusals(**asked: Any) -> list[str]:
    """Return the reasons for which CUSTOM refuses a configuration on Hopper."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(**asked)
    return AttentionBackendEnum.CUSTOM.get_class().validate_configuration(
        device_capability=DeviceCapability(9, 0), **config._asdict()
    )


class Server:
    """The state that a model runner of vLLM keeps."""

    def __init__(self) -> None:
        self.platform, self.config, self.context = Platform(), None, None

    @property
    def device(self) -> torch.device:
        return self.platform.device


def latent_stubs(server: Server) -> dict[str, dict[str, Any]]:
    """Stubs of `vllm_stubs`, and of what latent attention imports beside."""

    class Selected(torch.nn.Module):
        """The prefill backend that vLLM chose, of which ours takes the dimensions."""

        def __init__(self, vllm_config: Any, **dims: Any) -> None:
            super().__init__()
            self.dims, self.config = dims, vllm_config
            vars(self).update(dims)

        def clone(self) -> Any:
            return self

    found = stubs(server)
    quantised = found["vllm.model_executor.layers.quantization.utils.quant_utils"]
    quantised |= {"get_and_maybe_dequant_weights": lambda layer, out_dtype: layer.weight.to(out_dtype)}
    found["vllm.config"] |= {
        "CUDAGraphMode": SimpleNamespace(FULL="full", NONE="none"), "VllmConfig": object,
        "get_layers_from_vllm_config": lambda config, of, names: {
            name: config.compilation_config.static_forward_context[name] for name in names
        },
    }  # fmt: skip
    found["vllm.distributed.parallel_state"] |= {"get_dcp_group": lambda: SimpleNamespace(world_size=1)}
    return found | {
        "vllm._aiter_ops": {
            "rocm_aiter_ops": SimpleNamespace(is_fp8bmm_enabled=lambda: False, is_fp4bmm_enabled=lambda: False)
        },
        "vllm.model_executor.custom_op": {"CustomOp": Operator},
        "vllm.model_executor.utils": {"replace_parameter": setattr},
        "vllm.model_executor.layers.quantization.input_quant_fp8": {"QuantFP8": type("QuantFP8", (Operator,), {
            "__init__": lambda self, **_: torch.nn.Module.__init__(self), "forward_native": None, "forward_cuda": None,
            "forward_hip": None, "use_aiter": False,
        })},
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": type("AttentionLayerBase", (), {})},
        "vllm.model_executor.models.deepseek_v2": {
            "DeepSeekV2FusedQkvAProjLinear": type("DeepSeekV2FusedQkvAProjLinear", (), {})
        },
        "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: 0},
        "vllm.v1.attention.backends.mla.index_group": {
            "HiSparseMLAIndexGroup": type("HiSparseMLAIndexGroup", (), {}),
            "SparseMLAIndexGroupBuilder": type("SparseMLAIndexGroupBuilder", (), {}),
        },
        "vllm.v1.attention.backends.mla.prefill": {
            "MLAPrefillBackend": Selected, "get_mla_prefill_backend": lambda config: Selected
        },
        "vllm.v1.attention.ops.pcp": {
            "maybe_gather_mla_latent_cache_inputs": lambda kv_c, k_pe, slots, *_, **__: (kv_c, k_pe, slots)
        },
        "vllm.v1.attention.ops.merge_attn_states": {"merge_attn_states": merge_attn_states},
        "vllm.v1.worker.ubatching": {"dbo_current_ubatch_id": lambda: 0},
        "vllm.utils.deep_gemm": {"has_deep_gemm": lambda: True},
    }  # fmt: skip


def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None) -> None:
    """Emulate vLLM's operator: merge partial results (T, heads, D) with an LSE (heads, T)."""
    both = torch.logaddexp(prefix_lse, suffix_lse)
    shares = [(lse - both).exp().nan_to_num(0.0).T[..., None] for lse in (prefix_lse, suffix_lse)]
    output.copy_(sum(s * t.float() for s, t in zip(shares, (prefix_output, suffix_output))))
    if output_lse is not None:
        output_lse.copy_(both)


@contextmanager
def running() -> Iterator[Server]:
    """The engine, which has loaded the plugins with its own loader."""
    import importlib.metadata

    server = Server()
    engine = Engine("vllm", engine_files("vllm", VERSION, FILES), FILES, latent_stubs(server))
    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        patch.setenv("VLLM_PLUGINS", "cute_kernels,cute_kernels_mla")
        if not torch.cuda.is_available():
            patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # vLLM's workspace calls it
        from vllm import plugins

        plugins.load_general_plugins()
        yield server


def config_of(dtype: torch.dtype, kv_cache_dtype: str) -> Any:
    """The parts of a VllmConfig that latent attention reads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    text = SimpleNamespace(
        index_n_heads=INDEX_HEADS, index_topk=TOP_K, q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=V,
    )  # fmt: skip
    model = SimpleNamespace(
        dtype=dtype, is_mm_prefix_lm=False, rswa_window=None, hf_text_config=text, max_model_len=BLOCK * COLUMNS,
        get_num_attention_heads=lambda parallel: 0, get_head_size=lambda: LATENT + ROPE,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=kv_cache_dtype, block_size=BLOCK, user_specified_block_size=True, enable_prefix_caching=True,
            kv_cache_dtype_skip_layers=[],
        ),
        attention_config=SimpleNamespace(
            backend=AttentionBackendEnum.CUSTOM, backend_per_kind={}, use_non_causal=False, hisparse_config=None,
            use_prefill_query_quantization=False, mla_prefill_backend=None, sparse_mla_force_mqa=False,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1, pcp_shard_decode_requests=False,
            cp_kv_cache_interleave_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=128),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kernel_config=SimpleNamespace(enable_jit_warmup=False, sparse_indexer_topk_backend="auto"),
        kv_transfer_config=None, speculative_config=None,
    )  # fmt: skip


class IndexerCache(torch.nn.Module):
    """The cache of an indexer, as vLLM's model has it."""

    def __init__(self, prefix: str, device: torch.device) -> None:
        super().__init__()
        self.prefix, self.head_dim = prefix, INDEX_DIM + 4
        self.kv_cache = torch.full((BLOCKS, BLOCK, INDEX_DIM + 4), 0xFF, dtype=torch.uint8, device=device)

    def get_attn_backend(self) -> Any:
        return "vLLM's"


def indexer_of(**fields: Any) -> Any:
    """Return an indexer of vLLM's class for DeepSeek V3.2, without its projections."""
    from vllm.models.deepseek_v32.attention import DeepseekV32Indexer

    found = DeepseekV32Indexer.__new__(DeepseekV32Indexer)
    torch.nn.Module.__init__(found)
    vars(found).update(fields)
    return found


class Batches:
    """Requests, their blocks, and CommonAttentionMetadata of steps."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.free = device, torch.randperm(BLOCKS - 1).add(1).tolist()  # block 0 is nobody's
        self.blocks: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    def common(self, counts: dict[int, int], padding: int = 0, width: int = 1) -> Any:
        """A step with so many tokens of each request, in this order, and `padding` requests of a graph without any, of
        which each has `width` tokens."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        slots = []
        for request, count in counts.items():
            known, mine = self.lens.get(request, 0), self.blocks.setdefault(request, [])
            while len(mine) * BLOCK < known + count:
                mine.append(self.free.pop())
            slots += [mine[i // BLOCK] * BLOCK + i % BLOCK for i in range(known, known + count)]
            self.lens[request] = known + count
        table = torch.full((len(counts) + padding, COLUMNS), 1 << 30, dtype=torch.int32)
        for row, request in enumerate(counts):
            table[row, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        queries = [*counts.values()] + [0] * padding
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        lens = torch.tensor([self.lens[r] for r in counts] + [0] * padding).int()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device, copy=True), query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device), seq_lens_cpu_upper_bound=lens, num_reqs=len(queries),
            num_actual_tokens=len(slots) + padding * width, max_query_len=max(queries), max_seq_len=int(lens.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots + [-1] * padding * width, device=self.device),
        )  # fmt: skip


def rows_of(record: str, cache: torch.Tensor, blocks: list[int], count: int, scale: float = 1.0) -> torch.Tensor:
    """Return the first rows of a request, float64, as a cache (blocks, tokens, elements) holds them."""
    pages = cache[blocks].cpu()
    if record == "e4m3":
        return pages.view(torch.float8_e4m3fn).flatten(0, 1)[:count].double() * scale
    return stored_values(record, pages).flatten(0, 1)[:count].double()


def index_keys(cache: torch.Tensor, blocks: list[int], count: int) -> torch.Tensor:
    """Return the keys of an indexer, float64, from pages with codes before scales."""
    flat = cache[blocks].cpu().flatten(1)
    codes = flat[:, : BLOCK * INDEX_DIM].reshape(-1, INDEX_DIM).contiguous().view(torch.float8_e4m3fn).double()
    scales = flat[:, BLOCK * INDEX_DIM :].contiguous().view(torch.float32).reshape(-1, 1).double()
    return (codes * scales)[:count]


class SparseModel(Batches):
    """A layer of DeepSeek V3.2, of vLLM's own class, from its rotated queries and keys on."""

    def __init__(self, server: Server, heads: int, kv_cache_dtype: str, dtype: torch.dtype = torch.bfloat16) -> None:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.models.deepseek_v32.attention import DeepseekV32Attention
        from vllm.v1.attention import selector
        from vllm.v1.worker import workspace

        super().__init__(server.device)
        torch.manual_seed(0)
        selector._cached_get_attn_backend.cache_clear()
        workspace.init_workspace_manager(server.device)
        server.config = config_of(dtype, kv_cache_dtype)
        self.server, self.heads, self.dtype, self.kind = server, heads, dtype, kv_cache_dtype
        self.record, name = RECORDS[kv_cache_dtype], "layers.0.attn"
        self.layer = layer = DeepseekV32Attention.__new__(DeepseekV32Attention)
        with torch.device(server.device):
            buffer = torch.full((128, TOP_K), -7, dtype=torch.int32)
            cache = IndexerCache("layers.0.indexer.k_cache", server.device)
            self.indexer = indexer_of(
                k_cache=cache, topk_indices_buffer=buffer, quant_block_size=INDEX_DIM, scale_fmt="ue8m0",
                topk_tokens=TOP_K, head_dim=INDEX_DIM, max_model_len=BLOCK * COLUMNS, max_total_seq_len=0,
                indexer_op=SimpleNamespace(topk_backend="auto"),
            )  # fmt: skip
            default = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                MLAAttention.__init__(
                    layer, heads, (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, None, LATENT,
                    Linear(LATENT, heads * (NOPE + V)), cache_config=server.config.cache_config, prefix=name,
                    use_sparse=True, indexer=self.indexer, topk_indices_buffer=buffer,
                )  # fmt: skip
            finally:
                torch.set_default_dtype(default)
            layer.process_weights_after_loading(dtype)
            spec = layer.get_kv_cache_spec(server.config)
            width = spec.state_content_bytes or (LATENT + ROPE) * (1 if self.record else dtype.itemsize)
            raw = torch.full((BLOCKS, 1, BLOCK, width), 0xFF, dtype=torch.uint8)
        layer.bind_kv_cache(raw if self.record else raw.view(dtype))
        vars(layer).update(
            skip_topk=False, num_local_heads=heads, topk_indices_buffer=buffer, _dense_mha_metadata_layer_name="",
            _fp8_query=False, _fp8_kv_needs_view=self.record == "e4m3",
        )  # fmt: skip
        layer._modules.pop("indexer", None)
        vars(layer)["indexer"] = self.indexer
        layer._k_scale_float = 0.5 if self.record == "e4m3" else 1.0
        layer._k_scale.fill_(layer._k_scale_float)
        self.name, self.cache = name, cache
        server.config.compilation_config.static_forward_context[cache.prefix] = cache
        self.builders = {
            each: backend.get_builder_cls()(spec, [each], server.config, server.device)
            for each, backend in ((name, layer.get_attn_backend()), (cache.prefix, cache.get_attn_backend()))
        }

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """What the layer has when it calls its indexer, on the CPU."""

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(tokens, *shape).to(self.dtype)

        return {
            "q_nope": draw(self.heads, NOPE), "q_pe": draw(self.heads, ROPE), "kv_c": draw(LATENT), "k_pe": draw(ROPE),
            "index_q": torch.randn(tokens, INDEX_HEADS, INDEX_DIM).to(torch.float8_e4m3fn),
            "index_weights": torch.randn(tokens, INDEX_HEADS), "index_k": draw(INDEX_DIM),
        }  # fmt: skip

    def enter(self, common: Any, metadata: Any) -> None:
        """Set vLLM's forward context of a step."""
        layers = self.server.config.compilation_config.static_forward_context
        slots = dict.fromkeys(self.builders, common.slot_mapping)
        self.server.context = SimpleNamespace(
            attn_metadata=metadata, no_compile_layers=layers, slot_mapping=slots, cudagraph_runtime_mode="none"
        )

    def forward(self, common: Any, i: dict[str, torch.Tensor]) -> torch.Tensor:
        """Write the rows of a step, and run vLLM's own code from the indexer to the projection of values."""
        layer, slots = self.layer, common.slot_mapping
        wrappers.indexer_k_quant_and_cache(i["index_k"], self.cache.kv_cache, slots, INDEX_DIM, "ue8m0")
        layer.update_kv_cache(i["kv_c"], i["k_pe"].unsqueeze(1), layer.kv_cache, slots, None, self.kind, layer._k_scale)
        output = torch.full((len(i["q_pe"]), self.heads * V), float("nan"), dtype=self.dtype, device=self.device)
        latent = torch.bmm(i["q_nope"].transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        layer._sparse_indexer_and_attn(
            None, i["q_pe"], i["q_nope"], i["q_pe"], i["index_q"], None, i["index_weights"], i["kv_c"], i["k_pe"],
            latent, i["q_pe"], output,
        )  # fmt: skip
        return output

    def build(self, common: Any) -> dict[str, Any]:
        return {name: builder.build(0, common) for name, builder in self.builders.items()}

    def step(self, counts: dict[int, int], padding: int = 0, width: int = 1) -> torch.Tensor:
        """Run a step, and compare each request with float64. Return the output of its tokens."""
        common = self.common(counts, padding, width)
        self.enter(common, self.build(common))
        inputs = self.inputs(common.num_actual_tokens)
        output = self.forward(common, {name: t.to(self.device) for name, t in inputs.items()})
        self.check(counts, inputs, output)
        return output

    def check(self, counts: dict[int, int], i: dict[str, torch.Tensor], output: torch.Tensor) -> None:
        start, layer = 0, self.layer
        for request, count in counts.items():
            length, mine = self.lens[request], slice(start, start + count)
            start += count
            rows = rows_of(self.record, layer.kv_cache, self.blocks[request], length, layer._k_scale_float)
            keys = index_keys(self.cache.kv_cache, self.blocks[request], length)
            scores = (i["index_q"][mine].double() @ keys.T).clamp(min=0).mul(i["index_weights"][mine, :, None]).sum(1)
            latent = torch.einsum("thn,hnl->thl", i["q_nope"][mine].double(), layer.W_UK_T.cpu().double())
            query = torch.cat([latent, i["q_pe"][mine].double()], -1)
            for t in range(count):
                seen = length - count + t + 1
                chosen = scores[t, :seen].topk(min(TOP_K, seen)).indices
                logits = query[t] @ rows[chosen].T * layer.scale
                found = torch.softmax(logits, -1) @ rows[chosen, :LATENT]
                want = torch.einsum("hl,hlv->hv", found, layer.W_UV.cpu().double()).flatten()
                torch.testing.assert_close(output[mine][t].cpu().double(), want, rtol=0.02, atol=0.02)


class DenseModel(Batches):
    """A layer of latent attention, of vLLM's own class, from its rotated queries and keys on."""

    def __init__(
        self, server: Server, heads: int, kv_cache_dtype: str, dtype: torch.dtype = torch.bfloat16, drafts: int = 0
    ) -> None:
        """drafts: tokens that speculation proposes."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.v1.attention import selector

        super().__init__(server.device)
        torch.manual_seed(0)
        selector._cached_get_attn_backend.cache_clear()
        server.config = config_of(dtype, kv_cache_dtype)
        if drafts:
            server.config.speculative_config = SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False, method="ngram",
                enable_adaptive_verification=False,
            )  # fmt: skip
        self.server, self.heads, self.dtype = server, heads, dtype
        self.record, self.name = RECORDS[kv_cache_dtype], "layers.0.attn"
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(server.device):
                self.layer = layer = MLAAttention(
                    heads, (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, None, LATENT, Linear(LATENT, heads * (NOPE + V)),
                    cache_config=server.config.cache_config, prefix=self.name,
                )  # fmt: skip
        finally:
            torch.set_default_dtype(default)
        layer.process_weights_after_loading(dtype)
        width = (LATENT + ROPE) * (1 if self.record else dtype.itemsize)
        raw = torch.full((BLOCKS, 1, BLOCK, width), 0xFF, dtype=torch.uint8, device=server.device)
        layer.bind_kv_cache(raw if self.record else raw.view(dtype))
        layer._k_scale_float = 0.5 if self.record else 1.0
        layer._k_scale.fill_(layer._k_scale_float)
        spec, self.backend = layer.get_kv_cache_spec(server.config), layer.get_attn_backend()
        self.builder = self.backend.get_builder_cls()(spec, [self.name], server.config, server.device)

    def step(self, counts: dict[int, int], padding: int = 0, width: int = 1) -> Any:
        """Run a step, and compare each request with float64. Return its metadata."""
        common = self.common(counts, padding, width)
        metadata = self.builder.build(0, common)
        layers = self.server.config.compilation_config.static_forward_context
        self.server.context = SimpleNamespace(
            attn_metadata={self.name: metadata}, no_compile_layers=layers, slot_mapping={self.name: common.slot_mapping}
        )
        tokens = common.num_actual_tokens
        q, kv_c, k_pe = (
            torch.randn(tokens, *shape).to(self.dtype) for shape in ((self.heads, NOPE + ROPE), (LATENT,), (1, ROPE))
        )
        given = [t.to(self.device) for t in (q, kv_c, k_pe)]
        output = self.layer(*given, output_shape=torch.Size((tokens, self.heads * V)))
        start, layer = 0, self.layer
        for request, count in counts.items():
            length, mine = self.lens[request], slice(start, start + count)
            start += count
            rows = rows_of(self.record, layer.kv_cache, self.blocks[request], length, layer._k_scale_float)
            latent = torch.einsum("thn,hnl->thl", q[mine, :, :NOPE].double(), layer.W_UK_T.cpu().double())
            logits = torch.cat([latent, q[mine, :, NOPE:].double()], -1) @ rows.T * layer.scale
            seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            shares = torch.softmax(logits.masked_fill(~seen[:, None], -torch.inf), -1)
            want = torch.einsum("thl,hlv->thv", shares @ rows[:, :LATENT], layer.W_UV.cpu().double()).flatten(1)
            # The new tokens of a prompt are not read from the cache, and so not rounded as its rows are.
            limit = 0.1 if self.record and count > 1 else 0.03
            torch.testing.assert_close(output[mine].cpu().double(), want, rtol=limit, atol=limit)
        return metadata
