"""vLLM's own attention layer, cache views and indexer, of 0.33.0, on the plugin: prompts, chunks, decodes and drafts in
one batch, in its caches of every type and layout, against float64; what the plugin refuses, in vLLM's words.

What has nothing of attention is a stub (`engine_files`, `vllm_stubs`).
"""

import gc
import importlib.metadata
import weakref
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.bad_values import REFUSALS
from tests.support.emulated import emulation
from tests.support.engine_files import Engine, attention, compare, engine_files, entry_points
from tests.support.gpu import repeated, without_values
from tests.support.untouched import WAYS, moved, prepared, watch_vllm
from tests.support.vllm_stubs import E4M3, DeviceCapability, Platform, reshape_and_cache_flash, stubs
from wrappers import fp4

VERSION = "0.33.0"
FILES = tuple(
    f"vllm/{name}.py"
    for name in """
    _custom_ops envs scalar_type plugins/__init__ utils/math_utils utils/torch_utils v1/kv_cache_interface
    v1/kv_cache_layout v1/kv_cache_spec_registry v1/attention/backend v1/attention/selector
    v1/attention/backends/registry model_executor/layers/attention/attention model_executor/layers/indexer_topk
    """.split()
)


@dataclass
class Server:
    """The state that a model runner of vLLM keeps."""

    platform: Platform = field(default_factory=Platform)
    config: Any = None
    context: Any = None

    @property
    def device(self) -> torch.device:
        return self.platform.device


@pytest.fixture(scope="module")
def engine():
    """The engine, which has loaded the plugins with its own loader."""
    server = Server()
    engine = Engine("vllm", engine_files("vllm", VERSION, FILES), FILES, stubs(server))
    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        patch.setenv("VLLM_PLUGINS", "cute_kernels")
        from vllm import plugins

        plugins.load_general_plugins()
        watch_vllm(patch)
        yield server


@pytest.fixture
def server(engine, device):
    """Return the engine with its model on a device."""
    engine.platform.device = device
    return engine


@dataclass
class Case:
    kv_cache_dtype: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    head_size: int = 64
    layout: str = "LBHNC"
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    scales: tuple[float, float] = (1.0, 1.0)  # of K and V
    capability: tuple[int, int] = (9, 0)


HEADS, KV_HEADS, BLOCKS, COLUMNS = 8, 2, 24, 6
SLOPES = [2.0 ** -(i + 1) for i in range(HEADS)]
CASES = {
    "auto": Case(),
    "float16, window and sinks, token-major": Case("float16", torch.float16, 128, "LBNHC", window=9, sinks=True),
    "bfloat16, layers in a block, soft cap": Case("bfloat16", layout="BLNHC", soft_cap=2.0, block_size=32),
    "fp8, scales": Case("fp8", layout="BLHNC", scales=(0.5, 0.25), sinks=True),
    "ALiBi": Case(alibi=True),
    "fp8_e5m2": Case("fp8_e5m2", layout="LBNHC", window=5),
    "fp8 on B200": Case("fp8_e4m3", head_size=128, scales=(0.5, 0.25), capability=(10, 0)),
    "a scale per token and head": Case("fp8_per_token_head", sinks=True),
    "a scale per token and head, window": Case("fp8_per_token_head", layout="BLNHC", head_size=128, window=9),
    "int8, a scale per token and head": Case("int8_per_token_head", layout="LBNHC", head_size=128),
    "nvfp4": Case("nvfp4", head_size=128, scales=(0.02, 0.03)),
    "nvfp4, sinks and window": Case("nvfp4", layout="BLNHC", sinks=True, window=11, block_size=8),
}  # fmt: skip


def config_of(case: Case) -> Any:
    """The parts of a VllmConfig that attention reads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = SimpleNamespace(dtype=case.dtype, is_mm_prefix_lm=False, rswa_window=None)
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=case.kv_cache_dtype, block_size=case.block_size, user_specified_block_size=True,
            sliding_window=None, kv_cache_dtype_skip_layers=[], skip_page_size_padded=None, enable_prefix_caching=True,
        ),
        attention_config=SimpleNamespace(
            backend=AttentionBackendEnum.CUSTOM, backend_per_kind={}, use_non_causal=False
        ),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kernel_config=SimpleNamespace(sparse_indexer_topk_backend="auto"),
        kv_transfer_config=None, speculative_config=None,
    )  # fmt: skip


def layer_of(server: Server, case: Case, name: str = "layers.0.attn", **options: Any) -> Any:
    """An attention layer as vLLM's models make it, first of a model or not."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention import selector

    if name == "layers.0.attn":
        server.config = config_of(case)
        server.platform.capability = DeviceCapability(*case.capability)
        selector._cached_get_attn_backend.cache_clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        options = {"logits_soft_cap": case.soft_cap, "per_layer_sliding_window": case.window} | options
        if case.alibi:
            options["alibi_slopes"] = SLOPES
        if case.sinks:
            options["sinks"] = torch.nn.Parameter(torch.randn(HEADS).to(server.device), requires_grad=False)
        options |= {"cache_config": server.config.cache_config, "prefix": name}
        with server.device:
            return Attention(HEADS, case.head_size, case.head_size**-0.5, KV_HEADS, **options)
    finally:
        torch.set_default_dtype(default)


def decoded(codes: torch.Tensor, factors: torch.Tensor, scale: float) -> torch.Tensor:
    """NVFP4, float64: codes (..., D / 2), of two values a byte, the first in the low half; factors (..., D / 16)."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat([grid, -grid])
    values = torch.stack([grid[(codes & 15).long()], grid[(codes >> 4).long()]], -1).flatten(-2)
    return values * factors.view(E4M3).double().repeat_interleave(16, -1) * scale


class Model:
    """Two attention layers, their cache, and requests whose keys and values the test keeps too."""

    def __init__(self, server: Server, case: Case) -> None:
        from vllm.v1 import kv_cache_interface as kv

        torch.manual_seed(0)
        self.server, self.case = server, case
        self.layers = {name: layer_of(server, case, name) for name in ("layers.0.attn", "layers.1.attn")}
        self.backend = next(iter(self.layers.values())).get_attn_backend()
        layout = kv.KVCacheLayout[case.layout]
        assert layout in self.backend.supported_kv_cache_layouts()
        for layer in self.layers.values():
            self.spec = self.backend.customize_spec(layer.get_kv_cache_spec(server.config))
            layer.process_weights_after_loading(case.dtype)
            layer._k_scale_float, layer._v_scale_float = case.scales
            layer._k_scale.fill_(case.scales[0])
            layer._v_scale.fill_(case.scales[1])
            layer._q_scale_float = 0.125
            layer._q_scale.fill_(0.125)
        names, page = list(self.layers), self.spec.page_size_bytes
        raw = torch.full((len(names) * BLOCKS * page,), -1, dtype=torch.int8, device=server.device)  # NaN in all types
        strides = kv.compute_layout_strides(self.spec, BLOCKS, len(names), layout)
        place = kv.KVCacheTensor(len(raw), names, strides[0], strides[1])
        for layer, view in zip(
            self.layers.values(), kv.create_kv_cache_views(raw, self.spec, BLOCKS, layout, place), strict=True
        ):
            layer.kv_cache = view
        self.builder = self.backend.get_builder_cls()(self.spec, names, server.config, server.device)
        self.free = torch.randperm(BLOCKS - 1).add(1).tolist()  # block 0 is nobody's
        self.blocks: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self.kept: dict[tuple[str, int], list[torch.Tensor]] = {}  # layer, request -> K and V

    def common(self, counts: dict[int, int], padding: int = 0) -> Any:
        """CommonAttentionMetadata of a step that has so many tokens of each request, and `padding` of none."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        size, slots = self.spec.block_size, []
        for request, count in counts.items():
            known = self.lens.get(request, 0)
            mine = self.blocks.setdefault(request, [])
            while len(mine) * size < known + count:
                mine.append(self.free.pop())
            slots += [mine[i // size] * size + i % size for i in range(known, known + count)]
            self.lens[request] = known + count
        table = torch.zeros(len(counts) + padding, COLUMNS * 16 // size, dtype=torch.int32)
        for row, request in enumerate(counts):
            table[row, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        queries = [*counts.values()] + [0] * padding
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        lens, device = torch.tensor([self.lens[r] for r in counts] + [0] * padding).int(), self.server.device
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device, copy=True), query_start_loc_cpu=starts, seq_lens=lens.to(device),
            num_reqs=len(queries), num_actual_tokens=len(slots) + padding, max_query_len=max(queries),
            max_seq_len=COLUMNS * 16, block_table_tensor=table.to(device),
            slot_mapping=torch.tensor(slots + [-1] * padding, device=device),
        )  # fmt: skip

    def inputs(self, tokens: int) -> dict[str, list[torch.Tensor]]:
        """Of each layer: new queries, keys and values."""
        sizes = [heads * self.case.head_size for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return {name: [torch.randn(tokens, size).to(self.case.dtype) for size in sizes] for name in self.layers}

    def placed(self, inputs: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        return {name: [t.to(self.server.device, copy=True) for t in given] for name, given in inputs.items()}

    def enter(self, common: Any, metadata: Any) -> None:
        """Sets vLLM's forward context of a step."""
        slots = dict.fromkeys(self.layers, common.slot_mapping)
        layers = self.server.config.compilation_config.static_forward_context
        self.server.context = SimpleNamespace(attn_metadata=metadata, no_compile_layers=layers, slot_mapping=slots)

    def forward(self, inputs: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: layer(*inputs[name]) for name, layer in self.layers.items()}

    def check(
        self, counts: dict[int, int], inputs: dict[str, list[torch.Tensor]], outputs: dict[str, torch.Tensor]
    ) -> None:
        """Compares each request with float64."""
        for name, layer in self.layers.items():
            (q, k, v), out, sinks = inputs[name], outputs[name], layer.impl.sinks
            assert out.dtype == self.case.dtype and out.shape == q.shape
            start, query_dtype = 0, self.case.dtype if layer.query_quant is None else E4M3
            for request, count in counts.items():
                mine = slice(start, start + count)
                start += count
                new = [t[mine].unflatten(1, (KV_HEADS, -1)) for t in (k, v)]
                keys, values = self.stored(name, request, new)
                slopes = torch.tensor(SLOPES) if self.case.alibi else None
                options = self.case.window, self.case.soft_cap, None if sinks is None else sinks.cpu(), slopes
                query = q[mine] if layer.query_quant is None else (q[mine] / 0.125).to(E4M3).double() * 0.125
                want = attention(query.unflatten(1, (HEADS, -1)), keys, values, layer.impl.scale, *options)
                compare(out[mine].unflatten(1, (HEADS, -1)), want, query_dtype, self.case.soft_cap)

    def run(self, common: Any, counts: dict[int, int], metadata: Any) -> None:
        """Runs both layers with new queries, keys and values, and compares each request with float64."""
        self.enter(common, metadata)
        inputs = self.inputs(len(common.slot_mapping))
        self.check(counts, inputs, self.forward(self.placed(inputs)))

    def stored(self, name: str, request: int, new: list[torch.Tensor]) -> list[torch.Tensor]:
        """K and V of a request, float64, as the cache holds them."""
        kept = self.kept.setdefault((name, request), [torch.empty(0, KV_HEADS, self.case.head_size)] * 2)
        kept[:] = [torch.cat([old, t]) for old, t in zip(kept, new)]
        kind, scales, whole = self.case.kv_cache_dtype, self.case.scales, self.case.kv_cache_dtype.startswith("int8")
        if kind == "nvfp4":
            return self.from_bytes(name, request, kept)
        if kind.startswith(("fp8", "int8")):
            dtype = torch.float8_e5m2 if kind.endswith("e5m2") else E4M3
            rows = [t.to(self.case.dtype).float() for t in kept]
            if kind.endswith("per_token_head"):
                scales = [t.abs().amax(-1, keepdim=True) / (127 if whole else 448) for t in rows]
            return [((t / s).round() if whole else (t / s).to(dtype)).double() * s for t, s in zip(rows, scales)]
        return [t.double() for t in kept]

    def from_bytes(self, name: str, request: int, kept: list[torch.Tensor]) -> list[torch.Tensor]:
        """K and V of a request in NVFP4, read byte by byte; near what was given."""
        size, dim, found = self.spec.block_size, self.case.head_size, []
        cache, rows = self.layers[name].kv_cache, KV_HEADS * size
        codes, factors = rows * dim // 2, rows * dim // 16
        for side, (given, scale) in enumerate(zip(kept, self.case.scales)):
            parts = []
            for block in self.blocks[request]:
                flat = cache[block].as_strided((2 * (codes + factors),), (1,)).cpu()
                data = flat[side * codes :][:codes].view(KV_HEADS, size, -1)
                scaled = flat[2 * codes + side * factors :][:factors].view(KV_HEADS, size, -1)
                parts.append(decoded(data, scaled, scale).transpose(0, 1))
            values = torch.cat(parts)[: len(given)]
            error = (values - given).abs().unflatten(-1, (-1, 16)).amax(-1)
            assert (error <= given.abs().unflatten(-1, (-1, 16)).amax(-1) / 5).all()
            found.append(values)
        return found

    def step(self, counts: dict[int, int], padding: int = 0) -> Any:
        common = self.common(counts, padding)
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        self.run(common, counts, dict.fromkeys(self.layers, metadata))
        return metadata


@pytest.mark.parametrize("name", CASES)
def test_prompts_chunks_decodes_and_drafts(name, server):
    model = Model(server, CASES[name])
    model.step({0: 20, 1: 5})  # prompts, the first in two chunks
    model.step({1: 1, 0: 17, 2: 9})  # a decode, a chunk, a prompt
    model.step({0: 1, 1: 1, 2: 1})
    model.step({2: 3, 0: 1, 1: 2})  # drafts
    model.step({0: 1, 1: 1, 2: 1}, padding=2)  # as a CUDA graph of 5 requests is filled


REPLAYED = {  # requests and padding: of the capture, then of each replay, of as many tokens
    "decode": (({0: 1, 1: 1}, 2), ({1: 1, 0: 1, 2: 1}, 1), ({2: 1, 3: 1, 1: 1, 0: 1}, 0), ({0: 2, 3: 1}, 1)),
    "context": (({0: 20, 1: 3}, 2), ({1: 1, 0: 18, 2: 5}, 1), ({2: 1, 3: 20, 1: 3, 0: 1}, 0), ({0: 12, 3: 12}, 1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("function", REPLAYED)
def test_metadata_hold_for_other_lengths(function, name, server):
    """As a CUDA graph has them: the engine writes other lengths, tables and slots into the same tensors."""
    model, (captured, *replays) = Model(server, CASES[name]), REPLAYED[function]
    model.step({0: 40, 1: 3})
    graph = model.common(*captured)
    support = type(model.builder).get_cudagraph_support(server.config, model.spec)
    assert support is type(support).ALWAYS
    metadata = model.builder.build_for_cudagraph_capture(graph)
    model.enter(graph, metadata)
    static = model.placed(model.inputs(len(graph.slot_mapping)))
    replay = repeated(server.device, lambda: model.forward(static))
    for number, (counts, padding) in enumerate((captured, *replays)):
        step = model.common(counts, padding) if number else graph
        rows = len(step.seq_lens)
        for to, of in (("query_start_loc", "query_start_loc"), ("seq_lens", "seq_lens")):
            getattr(graph, to)[: len(getattr(step, of))] = getattr(step, of)
        graph.query_start_loc[rows + 1 :], graph.seq_lens[rows:] = step.query_start_loc[-1], 0
        graph.block_table_tensor[:rows] = step.block_table_tensor
        graph.slot_mapping[:] = step.slot_mapping
        model.builder.update_draft_decode_metadata(metadata)
        inputs = model.inputs(len(graph.slot_mapping))
        for layer, given in inputs.items():
            for to, of in zip(static[layer], given, strict=True):
                to.copy_(of)
        model.check(counts, inputs, replay())
    other = model.builder.update_block_table(metadata, graph.block_table_tensor.clone(), graph.slot_mapping.clone())
    assert other.block_table is not metadata.block_table and other.seq_lens is metadata.seq_lens


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("longest", [1, 20])
def test_nothing_of_the_device_is_read(name, longest, server, monkeypatch):
    """Whatever reads a value fails. Nor is a tensor made of numbers of the host."""
    model = Model(server, CASES[name])
    common = model.common({0: longest, 1: 1}, padding=1)
    layer = model.layers["layers.0.attn"]
    monkeypatch.setattr(torch, "tensor", lambda *given, **options: pytest.fail("numbers go to the device"))

    def work(where):
        for field_name, value in vars(common).items():
            if isinstance(value, torch.Tensor) and not field_name.endswith("_cpu"):
                setattr(common, field_name, value.to(where))
        layer.to(where)
        held = layer.kv_cache
        cache = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=where)
        for given in ("sinks", "slopes"):
            if getattr(layer.impl, given) is not None:
                setattr(layer.impl, given, getattr(layer.impl, given).to(where))
        dim = model.case.head_size
        q, k, v = (
            torch.empty(len(common.slot_mapping), n, dim, dtype=model.case.dtype, device=where)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        layer.impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
        metadata = model.builder.build(0, common)
        out = layer.impl.forward(layer, q, k, v, cache, metadata, torch.empty_like(q))
        assert out.shape == q.shape

    with torch.no_grad():
        without_values(server.device, work)


@pytest.mark.parametrize("name", ["auto", "fp8, scales", "nvfp4, sinks and window"])
def test_a_layer_repeats_its_launch_and_frees_its_cache(name, server):
    """With new metadata at each step. Kernels are emulated."""
    with emulation() as here:
        model = Model(server, CASES[name])
        layers, launches = [*model.layers.values()], [layer.impl._launch for layer in model.layers.values()]
        for counts, bound in [({0: 20, 1: 5}, False), ({0: 1, 1: 1}, False), *[({0: 1, 1: 1}, True)] * 3]:
            model.step(counts)
            assert all((launch._launch is not None) == bound for launch in launches)
        gone = [weakref.ref(layer.kv_cache.untyped_storage()) for layer in layers]
        here.launches.clear()
        for layer in layers:
            layer.kv_cache = torch.empty(0)
        gc.collect()
        assert [storage() for storage in gone] == [None, None] and launches[0]._kv is None


def rows_to_write(model: Model) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Keys and values of 5 tokens, views of one tensor, with values that saturate and a NaN; and 4 slots."""
    qkv = torch.randn(5, HEADS + 2 * KV_HEADS, model.case.head_size).to(model.case.dtype) * 300
    qkv[2, HEADS, 3], slots = float("nan"), torch.tensor([5, -1, 40, 77], device=model.server.device)
    return list(qkv.to(model.server.device).split([HEADS, KV_HEADS, KV_HEADS], 1)[1:]), slots


@pytest.mark.parametrize("name", [name for name in CASES if "nvfp4" not in name and "token" not in name])
def test_the_bytes_are_those_of_vllms_operator(name, server):
    found, want = (Model(server, CASES[name]).layers["layers.0.attn"] for _ in range(2))
    rows, slots = rows_to_write(Model(server, CASES[name]))
    found._k_scale_float, found._v_scale_float = scales = 0.37, 3.1
    with torch.inference_mode():
        found.impl.do_kv_cache_update(found, *rows, found.kv_cache, slots)
    caches = [t.transpose(1, 2) for t in want.impl.caches(want.kv_cache)[0]]
    reshape_and_cache_flash(*rows, *caches, slots, CASES[name].kv_cache_dtype, *scales)
    found, want = (layer.kv_cache.contiguous().view(torch.uint8) for layer in (found, want))
    assert torch.equal(found, want) and (found != 255).any()


def test_memory_is_measured_without_metadata(server):
    model = Model(server, CASES["auto"])
    server.context = SimpleNamespace(
        attn_metadata=None, slot_mapping={},
        no_compile_layers=server.config.compilation_config.static_forward_context,
    )  # fmt: skip
    q, k = (torch.randn(3, n * 64, dtype=torch.bfloat16, device=server.device) for n in (HEADS, KV_HEADS))
    assert not model.layers["layers.0.attn"](q, k, k).any()


def test_sinks_that_are_loaded_again(server):
    """Go to the memory that a captured graph reads."""
    impl = Model(server, CASES["fp8, scales"]).layers["layers.0.attn"].impl
    before, loaded = impl.sinks, impl._loaded_sinks
    assert before.dtype == torch.float32 and loaded.dtype == torch.bfloat16
    loaded.fill_(3.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.sinks is before and (before == 3.0).all()


REFUSED = {
    "head size": (Case(head_size=72), {}, "head_size not supported"),
    "model in fp32": (Case(dtype=torch.float32), {}, "dtype not supported"),
    "fp16 cache of a bf16 model": (Case("float16"), {}, "kv_cache: with query torch.bfloat16, dtype torch.float16"),
    "int4 cache": (Case("int4_per_token_head"), {}, "kv_cache_dtype not supported"),
    "block size": (Case(block_size=4), {}, "block_size not supported"),
    "Ampere": (Case(capability=(8, 0)), {}, "compute capability not supported"),
    "encoder": (Case(), {"attn_type": "encoder"}, "attention type encoder not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_vllm_chooses_the_backend(name, server):
    case, options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"CUSTOM.* is not valid for this configuration. Reason: .*{reason}"):
        layer_of(server, case, **options)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "nvfp4"])
def test_blackwell(dtype, server):
    """Has kernels of what Hopper has."""
    for capability, size in product(((10, 0), (10, 3)), (64, 256)):
        assert layer_of(server, Case(dtype, head_size=size, capability=capability)).impl.head_size == size


def one_step(server, name):
    """Return a model that has run a step, and a function that runs a layer with another output."""
    model = Model(server, CASES[name])
    model.step({0: 20, 1: 5})
    common = model.common({0: 1, 1: 3})
    metadata = model.builder.build(common_prefix_len=0, common_attn_metadata=common)
    layer, impl = model.layers["layers.0.attn"], model.layers["layers.0.attn"].impl
    given = [t.unflatten(1, (-1, model.case.head_size)) for t in model.placed(model.inputs(4))["layers.0.attn"]]
    impl.do_kv_cache_update(layer, *given[1:], layer.kv_cache, common.slot_mapping)

    def run(dtype, width=model.case.head_size, **options):
        out = torch.zeros(*given[0].shape[:2], width, dtype=dtype, device=server.device)
        assert impl.forward(layer, *given, layer.kv_cache, metadata, out, **options) is out
        return out

    return model, impl, run


@pytest.mark.parametrize("name", ["auto", "fp8, scales", "nvfp4"])
def test_output_of_8_bits(name, server):
    """With one static scale; the quotient of the scales is computed once for a scale."""
    model, impl, run = one_step(server, name)
    want = run(model.case.dtype).double()
    for scale in (0.05, 0.5, 0.5):
        scale = torch.tensor(scale, device=server.device)
        for _ in range(2):
            got = run(E4M3, output_scale=scale).double() * scale.double()
            assert ((got - want).abs() <= want.abs() / 14 + scale.double() * 2**-9).all() and got.abs().max() > 0
            assert impl._out_factor[0] is scale
    assert impl.fused_output_quant_supported("StaticTensor") and not impl.fused_output_quant_supported("Dynamic64")


@pytest.mark.parametrize("name", ["auto", "fp8, scales"])
def test_output_of_nvfp4(name, server):
    """In the swizzle of its scale factors; the scale multiplies."""
    model, impl, run = one_step(server, name)
    want, size = run(model.case.dtype).double(), model.case.head_size
    assert impl.fused_output_quant_supported("nvfp4")
    for scale in (3.0, 300.0):
        sf = torch.zeros(128, fp4.round_up(HEADS * size // 16, 4), dtype=E4M3, device=server.device)
        given = torch.tensor(scale, device=server.device)
        data = run(torch.uint8, size // 2, output_scale=given, output_block_scale=sf)
        got = fp4.load(fp4.FP4Tensor(data, sf, 0, want.shape), scale).double()
        top = want.unflatten(2, (-1, 16)).abs().amax(3, keepdim=True)  # steps are at most a third of it, and rounded
        assert ((got - want).unflatten(2, (-1, 16)).abs() <= top / 5 + 2**-9 / scale).all() and got.abs().max() > 0
    with pytest.raises(ValueError, match="output_scale: None, must be a tensor if output_block_scale is given"):
        run(torch.uint8, size // 2, output_block_scale=sf)


def test_pages_of_nvfp4_with_gaps_are_refused(server):
    layer = Model(server, CASES["nvfp4"]).layers["layers.0.attn"]
    with pytest.raises(NotImplementedError, match="kv_cache: strides .*, blocks with scale factors must be dense"):
        layer.impl.caches(layer.kv_cache[:, :, ::2])


def test_masks_that_are_not_causal_are_refused(server):
    model = Model(server, CASES["auto"])
    common = model.common({0: 3})
    common.causal = False
    with pytest.raises(NotImplementedError, match="causal: False, must be True"):
        model.builder.build(0, common)


HELD = {  # what the plugin holds, and what gets other memory between two steps -> a case that has it, and the tensor
    "kv_cache": ("fp8, scales", lambda layer: layer.kv_cache),
    "sinks": ("fp8, scales", lambda layer: layer.impl.sinks),
    "alibi_slopes": ("ALiBi", lambda layer: layer.impl.slopes),
}


@pytest.fixture
def on_host(engine):
    """The engine on the CPU, where kernels are emulated."""
    engine.platform.device = torch.device("cpu")
    return engine


def bound_model(on_host, held, way):
    """Return a model whose layers repeat their launches."""
    name, of = HELD[held]
    model = Model(on_host, CASES[name])
    for layer in model.layers.values():
        prepared(of(layer), way)
    for counts in ({0: 20, 1: 5}, *[{0: 1, 1: 1}] * 3):
        model.step(counts)
    assert all(layer.impl._launch._launch is not None for layer in model.layers.values())
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", HELD)
def test_other_memory(held, way, on_host):
    """The next results are right, or a refusal names what does not fit."""
    of = HELD[held][1]
    with emulation():
        model = bound_model(on_host, held, way)
        for layer in model.layers.values():
            moved(of(layer), way)
            if held == "sinks":
                of(layer).add_(1.0)
        for _ in range(3):
            try:
                model.step({0: 1, 1: 1})
            except REFUSALS as error:
                assert "stride" in way and held in str(error)
                return


def test_another_device(on_host):
    """Of which the layer's cache is, and nothing else."""
    model = Model(on_host, CASES["auto"])
    model.step({0: 20, 1: 5})
    for layer in model.layers.values():
        layer.kv_cache = layer.kv_cache.to("meta")
    with pytest.raises(ValueError, match=r"^cache.kv \(K\): device meta, must be that of k, cpu"):
        model.step({0: 1, 1: 1})


@pytest.mark.parametrize("held", ["_k_scale_float", "_v_scale_float"])
def test_other_scales(held, on_host):
    """Which vLLM keeps as numbers: those of the step that a launch was bound in are not repeated."""
    with emulation():
        model, impl, run = one_step(on_host, "fp8, scales")
        before = [run(torch.bfloat16) for _ in range(3)][-1]
        assert impl._launch._launch is not None
        layer = model.layers["layers.0.attn"]
        setattr(layer, held, 2 * getattr(layer, held))
        found = run(torch.bfloat16)
        impl._launch.forget()
        assert torch.equal(found, run(torch.bfloat16)) and not torch.equal(found, before)


@pytest.mark.parametrize("way", ["set_", "data"])
def test_an_output_scale_in_other_memory(way, on_host):
    _, _, run = one_step(on_host, "auto")
    scale = torch.tensor([0.05])
    first = run(E4M3, output_scale=scale).float()
    moved(scale, way)
    scale.fill_(0.1)
    assert torch.allclose(run(E4M3, output_scale=scale).float(), first / 2, rtol=0.1, atol=2**-8)
