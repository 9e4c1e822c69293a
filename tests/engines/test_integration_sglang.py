"""SGLang's own attention layer, KV pools, registries and DSA top-k, of 0.5.23, on the plugin: prompts, chunks, decodes
and mixed batches in its pools of every type, against float64; what the plugin refuses when it is constructed.

What has nothing of attention is a stub (`engine_files`).
"""

import importlib.metadata
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.emulated import emulation
from tests.support.engine_files import Engine, attention, compare, engine_files, entry_points
from tests.support.gpu import repeated, without_values
from tests.support.untouched import watch_sglang

VERSION = "0.5.23"
FILES = ("sglang/kernels/ops/attention/dsv4/topk.py",) + tuple(
    f"sglang/srt/{name}.py"
    for name in """
    environ plugins/__init__ plugins/hook_registry arg_groups/choices layers/radix_attention
    layers/attention/attention_registry layers/attention/base_attn_backend layers/attention/graph_utils
    layers/attention/dsa/dsa_topk_backend layers/quantization/fp4_kv_cache_quant_method
    mem_cache/base_swa_memory_pool mem_cache/layout/paged_view mem_cache/memory_pool mem_cache/swa_memory_pool
    model_executor/forward_batch_info
    """.split()
)
E4M3 = torch.float8_e4m3fn


def no(*_: Any, **__: Any) -> bool:
    return False


@dataclass
class Server:
    """What SGLang's runtime keeps for a process."""

    backend: Any = None
    device: torch.device = torch.device("cpu")
    parallel: Any = field(default_factory=lambda: SimpleNamespace(attn_cp_size=1, dcp_enabled=False))
    spec: Any = field(default_factory=lambda: SimpleNamespace(speculative_eagle_topk=1))


def stubs(server: Server) -> dict[str, dict[str, Any]]:
    platform = SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False)
    utils = {f"is_{name}": no for name in ("cpu", "cuda", "gfx95_supported", "hip", "musa", "npu", "xpu")}
    saver = SimpleNamespace(create=lambda **_: SimpleNamespace(region=lambda *_, **__: nullcontext()))
    graph = dict.fromkeys(("is_in_breakable_cuda_graph", "is_in_full_prefill_graph", "is_in_prefill_graph_scope"), no)
    return {
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda function: function},
        "sglang.srt.utils": utils | {"cpu_has_amx_support": no, "ceil_align": lambda x, to: -(-x // to) * to},
        "sglang.srt.utils.common": utils,
        "sglang.srt.platforms": {"current_platform": SimpleNamespace(is_cuda_alike=no)},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: server.parallel,
            "get_spec": lambda: server.spec,
            "get_platform": lambda: platform,
        },
        "sglang.srt.utils.torch_memory_saver_adapter": {"TorchMemorySaverAdapter": saver},
        "sglang.srt.mem_cache.utils": {"maybe_init_custom_mem_pool": lambda **_: (False, None, None)},
        "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": no},
        "sglang.srt.model_executor.runner": {"get_is_capture_mode": no},
        "sglang.srt.model_executor.forward_context": {"get_attn_backend": lambda: server.backend},
        "sglang.srt.model_executor.runner_utils.prefill_graph": graph,
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph": graph
        | {"eager_on_graph": lambda function: function},
    }


@contextmanager
def loaded(files, modules, pools):
    """Install the engine with these files and stubs, import its pools, and let it load the plugins."""
    engine = Engine("sglang", engine_files("sglang", VERSION, files), files, modules)
    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        with nullcontext() if find_spec("triton") else Engine("triton", Path(), (), {}).installed():
            for pool in pools:
                importlib.import_module(f"sglang.srt.mem_cache.{pool}")
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        patch.delenv("SGLANG_PLUGINS", raising=False)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        yield patch


@pytest.fixture(scope="module")
def engine():
    """Return the engine with the plugins, which its own loader has loaded."""
    server = Server()
    with loaded(FILES, stubs(server), ("memory_pool", "swa_memory_pool")) as patch:
        watch_sglang(patch)
        yield server


@pytest.fixture
def server(engine, device):
    """Return the engine with its model on a device."""
    engine.device = device
    return engine


@dataclass
class Case:
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    page_size: int = 16
    windows: tuple[int, int] = (-1, -1)  # keys before the token itself, of each layer
    pools: bool = False  # a pool of its own for layers with a window
    logit_cap: float = 0.0
    sinks: bool = False
    scales: tuple[float | None, float | None] = (None, None)  # of K and V
    hnd: bool = False
    ints: torch.dtype = torch.int64  # of lengths, slots and requests


HEADS, KV_HEADS, SLOTS, CONTEXT = 8, 2, 384, 96
CASES = {
    "bf16": Case(),
    "fp16, head-major pool, soft cap": Case(
        torch.float16, torch.float16, 128, hnd=True, logit_cap=2.0, ints=torch.int32
    ),
    "sinks, windows in a pool of their own": Case(windows=(-1, 8), pools=True, sinks=True),
    "windows in one pool, pages of 1": Case(windows=(8, -1), page_size=1, ints=torch.int32),
    "e4m3, scales, windows in a pool of their own": Case(
        E4M3, windows=(5, -1), pools=True, sinks=True, scales=(0.5, 0.25), page_size=32, ints=torch.int32,
    ),
    "e5m2": Case(torch.float8_e5m2, head_dim=128),
}  # fmt: skip


class Model:
    """A model runner of two attention layers, and requests whose keys and values the test keeps too."""

    def __init__(self, server: Server, case: Case, monkeypatch: Any, **changes: Any) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        torch.manual_seed(0)
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", str(case.hnd).lower())
        self.server, self.case, device = server, case, server.device
        self.layers = torch.nn.ModuleList(
            RadixAttention(
                HEADS, case.head_dim, case.head_dim**-0.5, KV_HEADS, i, logit_cap=case.logit_cap,
                sliding_window_size=window,
            )
            for i, window in enumerate(case.windows)
        )  # fmt: skip
        for layer in self.layers:
            layer.k_scale_float, layer.v_scale_float = case.scales
            layer.k_scale, layer.v_scale = (None if s is None else torch.tensor(s, device=device) for s in case.scales)
        pool = dict(page_size=case.page_size, dtype=case.kv_dtype, head_num=KV_HEADS, head_dim=case.head_dim,
            device=device.type, enable_memory_saver=False)  # fmt: skip
        if case.pools:
            windowed = [i for i, window in enumerate(case.windows) if window >= 0]
            full = [i for i in range(2) if i not in windowed]
            self.pool = SWAKVPool(SLOTS, SLOTS // 2, swa_attention_layer_ids=windowed, full_attention_layer_ids=full,
                **pool)  # fmt: skip
            self.to_window = torch.full((SLOTS + case.page_size + 1,), -1, device=device)  # a page gets one with use
            self.free_windowed = torch.randperm(SLOTS // 2 // case.page_size).add(1).tolist()
            self.pool.register_mapping(self.to_window)
            parts = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        else:
            self.pool = MHATokenToKVPool(SLOTS, layer_num=2, **pool)
            parts = [self.pool]
        for part in parts:
            for buffer in part.k_buffer + part.v_buffer:
                buffer.view(torch.uint8).fill_(255)  # NaN
        self.req_to_token = torch.zeros(8, CONTEXT, dtype=torch.int32, device=device)
        runner = dict(
            model=self.layers, dtype=case.dtype, kv_cache_dtype=case.kv_dtype, device=device.type,
            page_size=case.page_size, use_mla_backend=False, is_draft_worker=False,
            spec_algorithm=SimpleNamespace(is_speculative=no),
            model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token), token_to_kv_pool=self.pool,
        )  # fmt: skip
        self.backend = server.backend = ATTENTION_BACKENDS["cute_kernels"](SimpleNamespace(**runner | changes))
        self.free = torch.randperm(SLOTS // case.page_size).add(1).tolist()  # page 0 takes what is padded
        self.slots: dict[int, list[int]] = {}
        self.kept: dict[tuple[int, int], list[torch.Tensor]] = {}  # layer, request -> K and V

    def batch(self, mode: str, counts: dict[int, int], padding: int = 0) -> Any:
        """A ForwardBatch that has so many tokens of each request, and `padding` requests of a CUDA graph."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        size, new, prefixes = self.case.page_size, [], [len(self.slots.get(r, [])) for r in counts]
        on_device = partial(torch.tensor, device=self.server.device, dtype=self.case.ints)
        for request, count in counts.items():
            mine = self.slots.setdefault(request, [])
            for _ in range(count):
                if len(mine) % size == 0:
                    page = self.free.pop()
                    mine.append(page * size)
                    if self.case.pools:
                        self.to_window[page * size :][:size] = self.free_windowed.pop() * size + torch.arange(size)
                else:
                    mine.append(mine[-1] + 1)
                new.append(mine[-1])
            self.req_to_token[request, : len(mine)] = torch.tensor(mine)
        lens = [len(self.slots[r]) for r in counts] + [1] * padding
        padded = [0] * (padding * max(counts.values()))
        if self.case.pools:
            self.to_window[0] = 0
        batch = ForwardBatch(
            forward_mode=ForwardMode[mode], batch_size=len(lens), input_ids=on_device([0] * len(new + padded)),
            req_pool_indices=on_device([*counts] + [7] * padding), seq_lens=on_device(lens),
            out_cache_loc=on_device(new + padded), seq_lens_sum=sum(lens),
        )  # fmt: skip
        if mode == "TARGET_VERIFY":  # lengths do not count the drafts yet
            batch.spec_info = SimpleNamespace(ragged_verify_layout=None)
            batch.seq_lens = on_device(prefixes + [1] * padding)
        elif mode != "DECODE":
            batch.extend_seq_lens_cpu = [*counts.values()]
            batch.extend_seq_lens = on_device(batch.extend_seq_lens_cpu)
            batch.extend_prefix_lens_cpu = prefixes
        return batch

    def inputs(self, tokens: int) -> list[list[torch.Tensor]]:
        """Of each layer: new queries, keys and values, and sinks where it has any."""
        sizes = [heads * self.case.head_dim for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return [
            [torch.randn(tokens, size).to(self.case.dtype) for size in sizes]
            + [torch.randn(HEADS).bfloat16()] * self.case.sinks
            for _ in self.layers
        ]

    def placed(self, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Copies, since pools divide K and V by their scales in place."""
        return [[t.to(self.server.device, copy=True) for t in given] for given in inputs]

    def forward(self, batch: Any, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [
            layer(*given[:3], batch, **dict(zip(["sinks"], given[3:])))
            for layer, given in zip(self.layers, inputs, strict=True)
        ]

    def check(self, counts: dict[int, int], inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> None:
        """Compares each request with float64."""
        for number, (layer, given, out) in enumerate(zip(self.layers, inputs, outputs, strict=True)):
            q, k, v, sinks = given if self.case.sinks else [*given, None]
            assert out.dtype == self.case.dtype and out.shape == q.shape
            start, query_dtype = 0, self.backend._query_dtype
            window = None if self.case.windows[number] < 0 else self.case.windows[number] + 1
            for request, count in counts.items():
                mine = slice(start, start + count)
                start += count
                kept = self.kept.setdefault((number, request), [torch.empty(0, KV_HEADS, self.case.head_dim)] * 2)
                kept[:] = [torch.cat([old, t[mine].unflatten(1, (KV_HEADS, -1))]) for old, t in zip(kept, (k, v))]
                keys, values = (self.stored(t, scale) for t, scale in zip(kept, self.case.scales))
                cap = self.case.logit_cap or None
                query = q[mine].to(query_dtype).unflatten(1, (HEADS, -1))
                want = attention(query, keys, values, layer.scaling, window, cap, sinks)
                compare(out[mine].unflatten(1, (HEADS, -1)), want, query_dtype, cap)

    def run(self, batch: Any, counts: dict[int, int]) -> None:
        """Runs both layers with new queries, keys and values, and compares each request with float64."""
        inputs = self.inputs(len(batch.out_cache_loc))
        self.check(counts, inputs, self.forward(batch, self.placed(inputs)))

    def stored(self, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Keys or values as the pool holds them, float64."""
        if self.case.kv_dtype.itemsize == 2:
            return rows.double()
        scaled = rows.to(self.case.dtype) if scale is None else rows.to(self.case.dtype).div(scale)
        return scaled.to(self.case.kv_dtype).double() * (scale or 1.0)

    def step(self, mode: str, counts: dict[int, int]) -> None:
        batch = self.batch(mode, counts)
        self.backend.init_forward_metadata(batch)
        self.run(batch, counts)


@pytest.mark.parametrize("name", CASES)
def test_prompts_chunks_decodes_and_mixed_batches(name, server, monkeypatch):
    model, called = Model(server, CASES[name], monkeypatch), []
    from wrappers.integrations import sglang as plugin

    for function in ("context", "decode"):
        full = f"{function}_call"
        real = getattr(plugin, full)
        monkeypatch.setattr(plugin, full, lambda *a, of=function, call=real, **k: called.append(of) or call(*a, **k))
    model.step("EXTEND", {3: 20, 0: 5})
    model.step("MIXED", {3: 17, 1: 9, 0: 1})
    model.step("DECODE", {0: 1, 3: 1, 1: 1})
    model.step("EXTEND", {1: 3, 2: 2})
    model.step("DECODE", {2: 1, 1: 1})
    model.step("TARGET_VERIFY", {1: 4, 3: 4})
    assert called == (["context"] * 4 + ["decode"] * 2) + (["context"] * 2 + ["decode"] * 2 + ["context"] * 2)


@pytest.mark.parametrize("name", ["bf16", "e5m2"])
def test_a_layer_repeats_its_launch(name, server, monkeypatch):
    """With new metadata at each step; pools with other memory are bound anew. Kernels are emulated."""
    with emulation():
        model = Model(server, CASES[name], monkeypatch)
        model.step("EXTEND", {0: 20, 1: 5})
        for bound in (False, True, True, True):
            model.step("DECODE", {0: 1, 1: 1})
            held = [launch for _, _, launch in model.backend._layers.values()]
            assert len(held) == 2 and all((launch._launch is not None) == bound for launch in held)
        for buffers in (model.pool.k_buffer, model.pool.v_buffer):
            buffers[0].set_(buffers[0].clone())
        for bound in (False, True):
            model.step("DECODE", {0: 1, 1: 1})
            assert (model.backend._layers[0][2]._launch is not None) == bound
        assert model.backend._layers[0][2] is not held[0] and model.backend._layers[1][2] is held[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode, tokens", [("DECODE", 1), ("TARGET_VERIFY", 3)])
def test_a_graph_holds_for_other_lengths(name, mode, tokens, server, monkeypatch):
    """SGLang writes other requests into the captured batch, and then replays the graph."""
    model = Model(server, CASES[name], monkeypatch)
    model.step("EXTEND", {0: 30, 1: 4, 2: 17})
    backend = model.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * tokens)
    graph = model.batch(mode, {0: tokens, 1: tokens}, padding=2)
    backend.init_forward_metadata_out_graph(graph, in_capture=True)
    static = model.placed(model.inputs(len(graph.out_cache_loc)))

    def step() -> list[torch.Tensor]:
        backend.init_forward_metadata_in_graph(graph)
        return model.forward(graph, static)

    replay = repeated(server.device, step)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    for number, (requests, padding) in enumerate((((0, 1), 2), ((2, 1, 0), 1), ((1,), 3))):
        counts = dict.fromkeys(requests, tokens)
        batch = model.batch(mode, counts, padding) if number else graph
        for tensor in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(graph, tensor).copy_(getattr(batch, tensor))
        backend.init_forward_metadata_out_graph(graph)
        inputs = model.inputs(len(graph.out_cache_loc))
        for given, new in zip(static, inputs, strict=True):
            for to, of in zip(given, new, strict=True):
                to.copy_(of)
        model.check(counts, inputs, replay())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode, counts", [
    ("DECODE", {0: 1, 1: 1}), ("EXTEND", {0: 20, 1: 2}), ("TARGET_VERIFY", {0: 4, 1: 4}),
])  # fmt: skip
def test_nothing_of_the_device_is_read(name, mode, counts, server, monkeypatch):
    """Whatever reads a value fails. Nor is a tensor made of numbers of the host."""
    model = Model(server, CASES[name], monkeypatch)
    batch = model.batch(mode, counts)
    monkeypatch.setattr(torch, "tensor", lambda *given, **options: pytest.fail("numbers go to the device"))

    def work(where):
        for key, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                setattr(batch, key, value.to(where))
        for part in (model.pool.full_kv_pool, model.pool.swa_kv_pool) if model.case.pools else (model.pool,):
            part.k_buffer, part.v_buffer = ([t.to(where) for t in ts] for ts in (part.k_buffer, part.v_buffer))
        if model.case.pools:
            model.pool.register_mapping(model.to_window.to(where))
        model.backend.req_to_token = model.req_to_token.to(where)
        sizes = [heads * model.case.head_dim for heads in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (torch.empty(sum(counts.values()), n, dtype=model.case.dtype, device=where) for n in sizes)
        model.backend.init_forward_metadata(batch)
        for layer in model.layers:
            assert layer(q, k, v, batch).shape == q.shape

    without_values(server.device, work)


def test_queries_of_blackwell(server, monkeypatch):
    """e4m3 over an e4m3 pool, which MMAs there take as it is; and what no kernel does is refused."""
    from wrappers.host import machine

    with monkeypatch.context() as patch:
        patch.setattr(machine.current, "device_info", lambda device: ("sm_100a", 148))
        assert Model(server, Case(), monkeypatch).backend._query_dtype is torch.bfloat16
        model = Model(server, Case(E4M3), monkeypatch)
    assert model.backend._query_dtype is E4M3
    model.step("EXTEND", {0: 20, 1: 3})
    model.step("DECODE", {0: 1, 1: 1})
    monkeypatch.setattr(machine.current, "device_info", lambda device: ("sm_80", 148))
    with pytest.raises(NotImplementedError, match="sm_80: .*attention.sm100: arch sm_80"):
        Model(server, Case(head_dim=256), monkeypatch)


REFUSED = {
    "a draft model": {"is_draft_worker": True},
    "an encoder": {"model_config": SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=True)},
    "kv_cache_dtype torch.uint8": {"kv_cache_dtype": torch.uint8},
    "dtype torch.float32": {"dtype": torch.float32, "kv_cache_dtype": torch.float32},
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_are_refused(name, server, monkeypatch):
    with pytest.raises(NotImplementedError, match=f"attention backend cute_kernels: {name}: not supported"):
        Model(server, Case(), monkeypatch, **REFUSED[name])


@pytest.mark.parametrize("breadth", [None, 4])
def test_trees_of_drafts_are_refused(breadth, server, monkeypatch):
    monkeypatch.setattr(server, "spec", SimpleNamespace(speculative_eagle_topk=breadth))
    with pytest.raises(NotImplementedError, match="trees of drafts: not supported"):
        Model(server, Case(), monkeypatch, spec_algorithm=SimpleNamespace(is_speculative=lambda: True))


def test_context_parallelism_is_refused(server, monkeypatch):
    monkeypatch.setattr(server, "parallel", SimpleNamespace(attn_cp_size=2, dcp_enabled=False))
    with pytest.raises(NotImplementedError, match="context parallelism: not supported"):
        Model(server, Case(), monkeypatch)


@pytest.mark.parametrize("options, message", [
    ({"head_dim": 72}, "head_dim 72, 72 of V"),
    ({"v_head_dim": 128}, "head_dim 64, 128 of V"),
    ({"is_cross_attention": True}, "cross attention"),
    ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode 'ALIBI'"),
    ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "logit_capping_method 'sigmoid'"),
    ({"attn_type": "ENCODER_ONLY"}, "AttentionType.ENCODER_ONLY"),
])  # fmt: skip
def test_layers_that_are_refused(options, message, server, monkeypatch):
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    if "attn_type" in options:
        options = {"attn_type": AttentionType[options["attn_type"]]}
    sizes = {"num_heads": HEADS, "head_dim": 64, "scaling": 0.125, "num_kv_heads": KV_HEADS, "layer_id": 0}
    layer = RadixAttention(**sizes | options)
    with pytest.raises(NotImplementedError, match=f"attention backend cute_kernels: {message}: not supported"):
        Model(server, Case(), monkeypatch, model=torch.nn.ModuleList([layer]))


def test_batches_that_are_refused(server, monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model = Model(server, Case(), monkeypatch)
    batch = model.batch("EXTEND", {0: 4})
    with pytest.raises(NotImplementedError, match="forward_mode: .*EXTEND.*, must be DECODE or TARGET_VERIFY"):
        model.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    model.backend.init_forward_metadata(batch)
    q, k = torch.zeros(4, HEADS * 64).bfloat16(), torch.zeros(4, KV_HEADS * 64).bfloat16()
    with pytest.raises(NotImplementedError, match="return_lse: given, must be None"):
        model.layers[0](q, k, k, batch, return_lse=True)
    batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    with pytest.raises(NotImplementedError, match="forward_mode: .*DRAFT_EXTEND_V2.*, must be DECODE, EXTEND"):
        model.backend.init_forward_metadata(batch)
    batch.forward_mode, batch.spec_info = ForwardMode.TARGET_VERIFY, SimpleNamespace(ragged_verify_layout=object())
    with pytest.raises(NotImplementedError, match="ragged_verify_layout: given, must be None"):
        model.backend.init_forward_metadata(batch)


def test_the_backend_may_be_asked_for(server):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    assert ATTENTION_BACKEND_CHOICES.count("cute_kernels") == 1


def test_in_the_place_of_trtllm_mha(server, monkeypatch):
    """Only where the user names the plugin."""
    from sglang.srt.layers.attention import attention_registry

    from wrappers.integrations import plugins

    known = dict(attention_registry.ATTENTION_BACKENDS)
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", known)
    plugins.sglang_trtllm_mha()
    assert known["trtllm_mha"] is not known["cute_kernels"]
    monkeypatch.setenv("SGLANG_PLUGINS", "cute_kernels_trtllm_mha")
    plugins.sglang_trtllm_mha()
    assert known["trtllm_mha"] is known["cute_kernels"]


@pytest.fixture
def dsa(server, monkeypatch):
    """DSA's top-k backend and DeepSeek-V4's kernels, hooked by the plugin that the user named."""
    from sglang.kernels.ops.attention.dsv4 import topk as kernels
    from sglang.srt.layers.attention.dsa import dsa_topk_backend
    from sglang.srt.plugins.hook_registry import HookRegistry

    from wrappers.integrations import plugins

    for owner in (dsa_topk_backend.DSATopKBackend, kernels):
        for name in ("topk_func", "topk_transform", "topk_transform_paged", "topk_transform_paged_v2"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    HookRegistry.reset()
    plugins.sglang_topk()
    assert not HookRegistry._hooks  # the user named nothing
    monkeypatch.setenv("SGLANG_PLUGINS", "cute_kernels,cute_kernels_topk")
    plugins.sglang_topk()
    HookRegistry.apply_hooks()
    yield SimpleNamespace(topk=dsa_topk_backend, kernels=kernels)
    HookRegistry.reset()


def chosen(scores: torch.Tensor, start: int, length: int, k: int) -> list[int]:
    """Indices of the k largest of a window, from its start, ascending."""
    best = sorted(range(length), key=lambda i: -float(scores[start + i]))[:k]
    return sorted(best)


def filled(found: list[int], k: int) -> list[int]:
    return found + [-1] * (k - len(found))


def scores_of(rows: int, device: torch.device, width: int = 300) -> torch.Tensor:
    return torch.randn(rows, width + 20, generator=torch.Generator().manual_seed(0)).to(device)[:, :width]


def shuffled(count: int, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1)).view(shape).int().to(device)


@pytest.mark.parametrize("backend", ["SGL_KERNEL", "FLASHINFER", "TORCH"])
@pytest.mark.parametrize("wide", [True, False])
def test_decode_of_dsa(backend, wide, dsa, device):
    """Slots by the table of single slots, or of pages where there is no other."""
    scores, lens, k, size = scores_of(3, device), torch.tensor([300, 20, 1], device=device), 32, 64
    pages = shuffled(15, device, 3, 5)
    slots = (pages[..., None] * size + torch.arange(size, device=device)).flatten(1).int()
    metadata = SimpleNamespace(page_table_1=slots if wide else None, real_page_table=pages, page_size=size)
    found = dsa.topk.DSATopKBackend[backend].topk_transform(
        logits=scores, lengths=lens.int(), topk=k, topk_transform_method=dsa.topk.TopkTransformMethod.PAGED,
        attn_metadata=metadata, cu_seqlens_q_topk=torch.arange(4, device=device).int(), topk_indices_offset=None,
        row_starts=None, batch_idx_list=None, force_unfused_topk=False,
    )  # fmt: skip
    want = [filled([int(slots[r, i]) for i in chosen(scores[r], 0, n, k)], k) for r, n in enumerate(lens.tolist())]
    assert found.tolist() == want


def test_prefill_of_dsa(dsa, device):
    """Rows of two requests whose keys lie behind one another: slots by a table, flattened keys, the bare indices."""
    scores, k, table = scores_of(3, device), 24, shuffled(600, device, 2, 300)
    on_device = partial(torch.tensor, device=device)
    starts, lens, offsets = on_device([0, 0, 100]).int(), on_device([80, 81, 60]).int(), on_device([0, 0, 100])
    metadata = SimpleNamespace(page_table_1=table, cu_seqlens_k=on_device([0, 100, 200]).int())
    methods, backend = dsa.topk.TopkTransformMethod, dsa.topk.DSATopKBackend.SGL_KERNEL
    given = dict(logits=scores, lengths=lens, topk=k, attn_metadata=metadata, row_starts=starts,
        cu_seqlens_q_topk=on_device([0, 2, 3]).int(), topk_indices_offset=offsets)  # fmt: skip
    best = [chosen(scores[r], int(starts[r]), int(lens[r]), k) for r in range(3)]
    found = backend.topk_transform(topk_transform_method=methods.PAGED, **given)
    assert found.tolist() == [filled([int(table[r // 2, i]) for i in best[r]], k) for r in range(3)]
    found = backend.topk_transform(topk_transform_method=methods.RAGGED, **given)
    assert found.tolist() == [filled([int(offsets[r]) + i for i in best[r]], k) for r in range(3)]
    found = backend.topk_transform(topk_transform_method=methods.PAGED, force_unfused_topk=True, **given)
    assert found.tolist() == [filled(row, k) for row in best]
    with pytest.raises(ValueError, match="topk_indices_offset: None, required if topk_transform_method is RAGGED"):
        backend.topk_transform(topk_transform_method=methods.RAGGED, **given | {"topk_indices_offset": None})


def test_indexer_of_deepseek_v4(dsa, device):
    scores, lens, k, size = scores_of(2, device), torch.tensor([300, 9], device=device).int(), 16, 64
    pages, plan = shuffled(10, device, 2, 5), torch.zeros(3, 2, dtype=torch.int32, device=device)
    best = [chosen(scores[r], 0, int(n), k) for r, n in enumerate(lens)]
    want = [filled([int(pages[r, i // size]) * size + i % size for i in row], k) for r, row in enumerate(best)]
    out, raw = torch.zeros(2, 2, k, dtype=torch.int32, device=device)
    dsa.kernels.topk_transform_paged(scores, lens, pages, out, size, raw)
    assert out.tolist() == want and raw.tolist() == [filled(row, k) for row in best]
    out.zero_()
    dsa.kernels.topk_transform_paged_v2(scores, lens, pages, out, size, plan)
    assert out.tolist() == want
    dsa.kernels.topk_transform_paged_v2(scores, lens, None, out, size, plan)
    assert out.tolist() == raw.tolist()
    with pytest.raises(ValueError, match="out_raw_indices: given, must be None without page_tables"):
        dsa.kernels.topk_transform_paged_v2(scores, lens, None, out, size, plan, raw)
