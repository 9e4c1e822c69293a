"""SGLang's own attention layer, MLA pool and choice of a method per batch, of 0.5.23, on the plugin: prompts per head
and latent, chunks, decodes, mixed batches and drafts in pools of every type, against float64; what is refused."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines import test_integration_sglang as sglang
from tests.support.emulated import emulation
from tests.support.engine_files import attention, compare
from tests.support.gpu import repeated, without_values
from tests.support.untouched import watch_sglang_mla

FILES = sglang.FILES + tuple(
    f"sglang/srt/{name}.py"
    for name in """
    model_executor/forward_batch_deepseek_mha_mixin models/deepseek_common/attention_backend_handler
    models/deepseek_common/attention_forward_methods/forward_methods
    """.split()
)
E4M3, no = sglang.E4M3, sglang.no
HEADS, SLOTS, CONTEXT, LATENT, ROPE, SIZES = 3, 384, 96, 512, 64, (192, 128)
FETCHED = 40  # SGLang fetches prefixes of so many tokens


def stubs(server: sglang.Server) -> dict[str, dict[str, Any]]:
    found, parts = sglang.stubs(server), {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["fa3"], "_is_hip": False}
    graphs = "sglang.srt.model_executor.runner_backend_utils."
    found |= {
        f"{graphs}tc_piecewise_cuda_graph": {"is_in_tc_piecewise_cuda_graph": lambda: server.graph},
        "sglang.srt.models.deepseek_common.utils": parts,
        "sglang.srt.layers.cp.utils": {"is_cp_active": no},
    }
    found["sglang.srt.runtime_context"]["get_exec"] = lambda: SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=server.deterministic)
    )
    return found


@pytest.fixture(scope="module")
def engine():
    """Return the engine with the plugins, which its own loader has loaded."""
    server: Any = sglang.Server()
    server.graph = server.deterministic = False
    with sglang.loaded(FILES, stubs(server), ("memory_pool",)) as patch:
        watch_sglang_mla(patch)
        yield server


@pytest.fixture
def server(engine, device, monkeypatch):
    """Return the engine with its model on a device."""
    engine.device = device
    return engine


@dataclass
class Case:
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    rope: int = ROPE
    scale: float | None = None
    apart: bool = True  # queries and keys come in two parts
    ints: torch.dtype = torch.int64


CASES = {
    "bf16": Case(),
    "fp16, pages of 1, joined": Case(torch.float16, torch.float16, 1, apart=False, ints=torch.int32),
    "e4m3": Case(E4M3, page_size=64),
    "e4m3, scale": Case(E4M3, scale=0.25, apart=False),
    "bf16, not rotated": Case(page_size=32, rope=0),
}


class Model(sglang.Model):
    """A model runner of two layers, each with latent attention and attention per head, and requests, of which the test
    keeps rows of keys."""

    def __init__(self, server: Any, case: Case, **changes: Any) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        torch.manual_seed(0)
        self.server, self.case, device = server, case, server.device
        scale = (SIZES[1] + case.rope) ** -0.5
        self.width = LATENT + case.rope
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS, self.width, scale, 1, i, v_head_dim=LATENT) for i in range(2)
        )
        self.by_head = torch.nn.ModuleList(
            RadixAttention(HEADS, SIZES[1] + case.rope, scale, HEADS, i, v_head_dim=SIZES[1]) for i in range(2)
        )
        for layer in (*self.layers, *self.by_head):
            layer.k_scale_float = case.scale
        self.pool = MLATokenToKVPool(
            SLOTS, case.page_size, case.kv_dtype, LATENT, case.rope, 2, device.type, enable_memory_saver=False
        )
        for buffer in self.pool.kv_buffer:
            buffer.view(torch.uint8).fill_(255)  # NaN
        self.req_to_token = torch.zeros(8, CONTEXT, dtype=torch.int32, device=device)
        config = dict(context_len=CONTEXT, is_encoder_decoder=False, kv_lora_rank=LATENT, qk_rope_head_dim=case.rope,
            hf_config=SimpleNamespace())  # fmt: skip
        runner = dict(
            model=torch.nn.ModuleList([*self.layers, *self.by_head]), dtype=case.dtype, kv_cache_dtype=case.kv_dtype,
            device=device.type, page_size=case.page_size, use_mla_backend=True, is_draft_worker=False,
            spec_algorithm=SimpleNamespace(is_speculative=no),
            model_config=SimpleNamespace(**config | changes.pop("config", {})),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token), token_to_kv_pool=self.pool,
        )  # fmt: skip
        self.backend = server.backend = ATTENTION_BACKENDS["cute_kernels"](SimpleNamespace(**runner | changes))
        self.free = torch.randperm(SLOTS // case.page_size).add(1).tolist()
        self.slots: dict[int, list[int]] = {}
        self.kept: dict[tuple[int, int], torch.Tensor] = {}  # layer, request -> rows of keys
        self.case.pools = False  # type: ignore[attr-defined]

    def batch(self, mode: str, counts: dict[int, int], padding: int = 0) -> Any:
        batch = super().batch(mode, counts, padding)
        if mode in ("EXTEND", "MIXED"):
            batch.seq_lens_cpu = batch.seq_lens.cpu()
        return batch

    def method(self, batch: Any) -> str:
        """Return the name of the method that SGLang's model would call."""
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        attn = SimpleNamespace(
            attn_mqa=self.layers[0], chunked_prefix_cache_threshold=FETCHED, disable_chunked_prefix_cache=False
        )
        return AttentionBackendRegistry.get_handler("cute_kernels")(attn, batch).name

    def inputs(self, tokens: int) -> list[list[torch.Tensor]]:
        """Return latent queries and rows of keys for each layer."""
        shapes = (tokens, HEADS, self.width), (tokens, 1, self.width)
        return [[torch.randn(shape).to(self.case.dtype) for shape in shapes] for _ in self.layers]

    def forward(self, batch: Any, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        outputs = []
        for layer, (q, k) in zip(self.layers, inputs, strict=True):
            if self.case.apart:
                rope = {"q_rope": q[..., LATENT:], "k_rope": k[..., LATENT:]}
                outputs.append(layer(q[..., :LATENT], k[..., :LATENT], k[..., :LATENT], batch, **rope))
            else:
                outputs.append(layer(q.flatten(1), k, k[..., :LATENT], batch))
        return outputs

    def rows(self, layer: int, request: int, new: torch.Tensor) -> torch.Tensor:
        """All rows of a request as the pool holds them, float64."""
        kept = self.kept.get((layer, request), new[:0])
        self.kept[layer, request] = kept = torch.cat([kept, new])
        return self.stored(kept, self.case.scale)

    def check(self, counts: dict[int, int], inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> None:
        for number, ((q, k), out) in enumerate(zip(inputs, outputs, strict=True)):
            assert out.dtype == self.case.dtype and out.shape == (len(q), HEADS * LATENT)
            start = 0
            for request, count in counts.items():
                mine, start = slice(start, start + count), start + count
                rows = self.rows(number, request, k[mine])
                want = attention(q[mine], rows, rows[..., :LATENT], self.layers[number].scaling)
                compare(out[mine].unflatten(1, (HEADS, LATENT)), want, self.case.dtype, None)

    def step(self, mode: str, counts: dict[int, int]) -> str:
        batch = self.batch(mode, counts)
        self.backend.init_forward_metadata(batch)
        method = self.method(batch)
        if method == "MLA":
            self.run(batch, counts)
        else:
            self.run_by_head(batch, counts, method == "MHA_ONE_SHOT")
        return method

    def run_by_head(self, batch: Any, counts: dict[int, int], fetched: bool) -> None:
        """Runs layers as SGLang's model does: it writes rows, and computes keys and values per head of the new ones or
        of all."""
        inputs, scale = self.inputs(len(batch.out_cache_loc)), self.case.scale or 1.0
        if fetched:
            batch.mha_one_shot = True
            batch.set_attn_attend_prefix_cache(False)
        up = torch.randn(LATENT, HEADS, 2 * SIZES[1]) / LATENT**0.5
        for number, (layer, (_, k)) in enumerate(zip(self.by_head, inputs, strict=True)):
            assert scale == 1.0
            self.pool.kv_buffer[number][batch.out_cache_loc] = (
                k.to(self.case.kv_dtype).view(self.pool.store_dtype).to(self.server.device)
            )
            q = torch.randn(len(k), HEADS, SIZES[1] + self.case.rope).to(self.case.dtype)
            keys, wants, start = [], [], 0
            for request, count in counts.items():
                mine, start = slice(start, start + count), start + count
                rows = self.rows(number, request, k[mine])
                rows = rows if fetched else rows[-count:]
                both = torch.einsum("tl,lhd->thd", rows[:, 0, :LATENT], up.double()).to(self.case.dtype)
                rope = rows[..., LATENT:].expand(-1, HEADS, -1).to(self.case.dtype)
                keys.append((torch.cat([both[..., : SIZES[1]], rope], -1), both[..., SIZES[1] :]))
                wants.append(attention(q[mine], keys[-1][0].double(), keys[-1][1].double(), layer.scaling))
            k_heads, v_heads = (torch.cat(parts).to(self.server.device) for parts in zip(*keys))
            out = layer(q.to(self.server.device), k_heads, v_heads, batch, save_kv_cache=False)
            compare(out.view(-1, HEADS, SIZES[1]), torch.cat(wants), self.case.dtype, None)


@pytest.mark.parametrize("name", CASES)
def test_prompts_chunks_decodes_and_mixed_batches(name, server):
    model = Model(server, CASES[name])
    methods = [
        model.step("EXTEND", {3: 20, 0: 25}),
        model.step("MIXED", {3: 17, 1: 9, 0: 1}),  # fetches a prefix of 45 tokens
        model.step("DECODE", {0: 1, 3: 1, 1: 1}),
        model.step("EXTEND", {1: 3, 2: 2}),  # a chunk, and a prefix that the radix cache holds
        model.step("DECODE", {2: 1, 1: 1}),
        model.step("TARGET_VERIFY", {1: 4, 3: 4}),
    ]
    by_head = ["MLA"] * 2 if model.case.scale else ["MHA", "MHA_ONE_SHOT"]
    assert methods == by_head + ["MLA"] * 4


@pytest.mark.parametrize("name", ["bf16", "e4m3, scale"])
def test_a_layer_repeats_its_launch(name, server):
    """With new metadata at each step; a pool with other memory is bound anew. Kernels are emulated."""
    server.device = torch.device("cpu")
    with emulation():
        model = Model(server, CASES[name])
        model.step("EXTEND", {0: 20, 1: 5})
        for bound in (False, True, True):
            model.step("DECODE", {0: 1, 1: 1})
            held = [launch for _, _, launch in model.backend._layers.values()]
            assert len(held) == 2 and all((launch._launch is not None) == bound for launch in held)
        model.pool.kv_buffer[0].set_(model.pool.kv_buffer[0].clone())
        for bound in (False, True):
            model.step("DECODE", {0: 1, 1: 1})
            assert (model.backend._layers[0][2]._launch is not None) == bound


def test_a_bound_launch_serves_no_longer_requests(server):
    """Both batches have eight tokens. A request of four has 12 rows; one of seven has 21, of another kernel."""
    server.device = torch.device("cpu")
    with emulation() as fake:
        model = Model(server, CASES["e4m3, scale"])
        model.step("EXTEND", {0: 20, 1: 5})
        for counts, rows in (*[({0: 4, 1: 4}, 16)] * 3, ({0: 7, 1: 1}, 64)):
            model.step("EXTEND", counts)
            assert fake.launches[-1].o_partial.shape[1] == rows  # of a tile


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode, tokens", [("DECODE", 1), ("TARGET_VERIFY", 3)])
def test_a_graph_holds_for_other_lengths(name, mode, tokens, server):
    """SGLang writes other requests into the captured batch, and then replays the graph."""
    model = Model(server, CASES[name])
    model.step("EXTEND", {0: 30, 1: 4, 2: 17})
    backend = model.backend
    graph = model.batch(mode, {0: tokens, 1: tokens}, padding=2)
    backend.init_forward_metadata_out_graph(graph, in_capture=True)
    static = model.placed(model.inputs(len(graph.out_cache_loc)))

    def step() -> list[torch.Tensor]:
        backend.init_forward_metadata_in_graph(graph)
        return model.forward(graph, static)

    replay = repeated(server.device, step)
    for number, (requests, padding) in enumerate((((0, 1), 2), ((2, 1, 0), 1), ((1,), 3))):
        counts = dict.fromkeys(requests, tokens)
        batch = model.batch(mode, counts, padding) if number else graph
        for tensor in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(graph, tensor).copy_(getattr(batch, tensor))
        inputs = model.inputs(len(graph.out_cache_loc))
        for given, new in zip(static, inputs, strict=True):
            for to, of in zip(given, new, strict=True):
                to.copy_(of)
        model.check(counts, inputs, replay())


def test_nothing_of_the_device_is_read(server, monkeypatch):
    model = Model(server, CASES["e4m3"])
    batch = model.batch("DECODE", {0: 1, 1: 1})

    def work(where):
        for key, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                setattr(batch, key, value.to(where))
        model.pool.kv_buffer = [t.to(where) for t in model.pool.kv_buffer]
        model.backend.req_to_token = model.req_to_token.to(where)
        model.backend.init_forward_metadata(batch)
        for out in model.forward(batch, [[t.to(where) for t in given] for given in model.inputs(2)]):
            assert out.shape == (2, HEADS * LATENT)

    without_values(server.device, work)


def test_methods(server, monkeypatch):
    """Graphs of prompts and deterministic inference have one method; long prefixes are not fetched."""
    model = Model(server, CASES["bf16"])
    model.step("EXTEND", {0: 60})
    batch = model.batch("EXTEND", {0: 1, 1: 8})
    assert model.method(batch) == "MHA_ONE_SHOT"
    with monkeypatch.context() as patch:
        patch.setattr(type(batch), "get_max_chunk_capacity", lambda self: 60)
        assert model.method(batch) == "MLA"
    with monkeypatch.context() as patch:
        patch.setattr("wrappers.integrations.sglang_mla.is_cp_active", lambda batch: True)
        assert model.method(batch) == "MLA"
    for switch in ("graph", "deterministic"):
        with monkeypatch.context() as patch:
            patch.setattr(server, switch, True)
            assert model.method(batch) == "MLA"
    assert model.method(batch) == "MHA_ONE_SHOT"
    model.backend.init_forward_metadata(batch)
    q = torch.zeros(9, HEADS * SIZES[0]).bfloat16()
    for mode in ((True, False), (False, True)):
        batch.mha_return_lse, batch.attn_attend_prefix_cache = mode
        message = "^MHA_CHUNKED_KV: not supported, must be MHA, MHA_ONE_SHOT or MLA"
        with pytest.raises(NotImplementedError, match=message):
            model.by_head[0](q, q, q[:, : HEADS * SIZES[1]], batch, save_kv_cache=False)


def test_what_is_registered(server):
    """Queries come in parts, unless SGLang scales joined ones."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as parts

    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("cute_kernels") == 1
    parts[:] = ["fa3"]
    Model(server, Case(), config={"hf_config": SimpleNamespace(llama_4_scaling={})})
    assert parts == ["fa3"]
    for _ in range(2):
        Model(server, Case())
    assert parts == ["fa3", "cute_kernels"]


def test_rows_that_the_pool_writes_itself(server):
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from wrappers.integrations.sglang_mla import is_plain

    written = []

    class Own(MLATokenToKVPool):
        def set_mla_kv_buffer(self, layer: Any, where: Any, k: Any, rope: Any) -> None:
            written.append(layer.layer_id)
            self.kv_buffer[layer.layer_id][where.loc] = torch.cat([k, rope], -1)

    model = Model(server, Case())
    model.pool.__class__ = Own
    model.backend._plain = is_plain(model.pool)
    model.step("EXTEND", {0: 3})
    model.step("EXTEND", {0: 3})
    assert written == [0, 1] and not model.backend._plain
    with pytest.raises(NotImplementedError, match=r"Own with k_scale other than 1 in layers \[0, 1, 0, 1\]"):
        Model(server, Case(E4M3, scale=0.5), token_to_kv_pool=model.pool)


REFUSED = {
    "a draft model": {"is_draft_worker": True},
    "kv_cache_dtype torch.float8_e5m2": {"kv_cache_dtype": torch.float8_e5m2},
    "rows of 256 \\+ 32 columns": {"config": {"kv_lora_rank": 256, "qk_rope_head_dim": 32}},
    "sparse attention .set SGLANG_PLUGINS=cute_kernels_dsa, and another backend.": {
        "token_to_kv_pool": SimpleNamespace(use_dsa=True)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_are_refused(name, server):
    changes = {key: dict(value) if key == "config" else value for key, value in REFUSED[name].items()}
    with pytest.raises(NotImplementedError, match=f"attention backend cute_kernels: {name}: not supported"):
        Model(server, Case(), **changes)


def test_options_that_are_refused(server):
    model = Model(server, Case())
    batch = model.batch("DECODE", {0: 1})
    model.backend.init_forward_metadata(batch)
    ((q, k), _) = model.inputs(1)
    for options in ({"sinks": torch.zeros(HEADS)}, {"topk_indices": torch.zeros(1, 8).int()}):
        with pytest.raises(NotImplementedError, match=f"^{[*options][0]}: given, must be None"):
            model.layers[0](q, k, k[..., :LATENT], batch, **options)


def test_what_no_kernel_does_is_refused(server, monkeypatch):
    from sglang.srt.layers.radix_attention import RadixAttention

    from wrappers.host import machine

    with pytest.raises(NotImplementedError, match="a soft cap or a window: not supported"):
        layer = RadixAttention(HEADS, 576, 1.0, 1, 0, v_head_dim=LATENT, sliding_window_size=8)
        Model(server, Case(), model=torch.nn.ModuleList([layer]))
    with pytest.raises(NotImplementedError, match="dtype torch.float16 with kv_cache_dtype torch.float8_e4m3fn"):
        Model(server, Case(E4M3, torch.float16))
    monkeypatch.setattr(machine.current, "device_info", lambda device: ("sm_90a", 132))
    Model(server, Case(E4M3))
    layer = RadixAttention(HEADS, 320, 1.0, HEADS, 0, v_head_dim=320)
    with pytest.raises(NotImplementedError, match="sm_90a: .*attention.sm90"):
        Model(server, Case(), model=torch.nn.ModuleList([layer]))
    monkeypatch.setattr(machine.current, "device_info", lambda device: ("sm_100a", 148))
    with pytest.raises(NotImplementedError, match="sm_100a: .*attention.sm90: arch sm_100a"):
        Model(server, Case())
