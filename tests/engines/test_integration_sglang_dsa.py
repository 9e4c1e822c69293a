"""SGLang's own backend of sparse latent attention (DSA), its indexer's selection and its pools, of 0.5.23, with the
plugin's functions: prompts, chunks, decodes, mixed batches, drafts and graphs, against float64; what is refused."""

import importlib.metadata
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wrappers
from tests.engines import test_integration_sglang as sglang
from tests.support.emulated import emulation
from tests.support.engine_files import Engine, attention, compare, engine_files, entry_points
from tests.support.gpu import repeated

FILES = sglang.FILES + tuple(
    f"sglang/srt/{name}.py"
    for name in """
    layers/attention/dsa_backend layers/attention/dsa/dsa_backend_kpool layers/attention/dsa/dsa_backend_mtp_precompute
    layers/attention/dsa/dsa_indexer layers/attention/dsa/dsa_indexer_metadata layers/attention/kv_shard_hooks
    layers/attention/dsa/dsa_metadata_manager layers/attention/dsa/paged_mqa_logits_backend layers/attention/dsa/utils
    mem_cache/index_key_cache model_executor/forward_batch_deepseek_mha_mixin
    """.split()
) + ("sglang/kernels/ops/attention/dsa/paged_mqa_logits.py",)  # fmt: skip
E4M3, no = sglang.E4M3, sglang.no
LATENT, ROPE, TOP_K, INDEX_HEADS, DRAFTS, PAGE, PAGES, CONTEXT = 512, 64, 16, 32, 3, 64, 12, 192
DENSE = 12  # keys of prompts up to which SGLang attends to all of them, per head
SCALE = 192**-0.5


def gathered(pool: Any, buf: torch.Tensor, page_indices: Any, seq_len_tensor: Any, seq_len_sum: int, max_seq_len: int):
    """What SGLang's Triton kernel gathers of the indexer's keys."""
    k, scale = torch.zeros(seq_len_sum, 128, dtype=torch.uint8), torch.zeros(seq_len_sum, 4, dtype=torch.uint8)
    k, scale = k.to(buf.device), scale.to(buf.device)
    starts = torch.nn.functional.pad(seq_len_tensor.cumsum(0), (1, 0))
    wrappers.cp_gather_indexer_k_quant_cache(buf.view(-1, PAGE, 132), k, scale, page_indices, starts)
    return k, scale


def expanded(extend_seq_lens: torch.Tensor, seq_lens: torch.Tensor, total_len: int, max_q_len: int) -> torch.Tensor:
    """What SGLang's Triton kernel makes of the lengths of drafts: those of each token."""
    steps = torch.arange(1 - max_q_len, 1, device=seq_lens.device)
    return (seq_lens[:, None] + steps).flatten().int()


def stubs(server: Any) -> dict[str, dict[str, Any]]:
    found = sglang.stubs(server)
    graphs, ops = "sglang.srt.model_executor.runner_backend_utils", "sglang.kernels.ops"
    switches = dict.fromkeys(("is_in_breakable_cuda_graph", "is_in_tc_piecewise_cuda_graph"), no)
    found["sglang.srt.utils"] |= {"get_device_sm": lambda: 90, "is_blackwell": no, "get_bool_env_var": no}
    found["sglang.srt.utils.common"] |= {"ceil_div": lambda x, y: -(-x // y)}
    found["sglang.srt.runtime_context"] |= {
        "get_exec": lambda: server.exec,
        "get_schedule": lambda: SimpleNamespace(enable_mixed_chunk=True, mem_fraction_static=None),
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
    }
    found["sglang.srt.model_executor.forward_context"]["get_token_to_kv_pool"] = lambda: server.pool
    return found | {
        f"{graphs}.tc_piecewise_cuda_graph": switches,
        f"{graphs}.breakable_cuda_graph.context": switches,
        f"{ops}.kvcache": {"dsa_index_k_cache": SimpleNamespace(GetKAndS=SimpleNamespace(execute=gathered))},
        f"{ops}.attention.dsa": {"deepgemm_paged_mqa_logits_split": lambda *a, **k: server.split(*a, **k)},
        f"{ops}.attention.utils": {"concat_mla_absorb_q_general": lambda *parts: torch.cat(parts, -1)},
        f"{ops}.attention.pad": {"seqlens_expand_triton": expanded},
        f"{ops}.attention.flash_mla_sm120": {"_validate_flashinfer_sparse_mla_backend": no},
        "sglang.srt.configs.model_config": {
            "is_deepseek_dsa": lambda config: True,
            "get_dsa_index_topk": lambda config: TOP_K,
            "get_dsa_index_kpool": lambda config: config.index_kpool,
        },
        "sglang.srt.layers.attention.mqa_logits_utils": {
            "MQA_LOGITS_BYTES_PER_ELEM": 4,
            "mqa_logits_should_chunk": lambda num_cols, **_: (server.chunked, 4 * 7 * num_cols),
        },
        "sglang.srt.layers.cp.utils": {"is_cp_active": no},
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_: lambda function: function},
    }


@pytest.fixture(scope="module")
def engine():
    """Return the engine with its functions hooked by the plugin that the user named."""
    server: Any = sglang.Server()
    server.chunked = False
    engine = Engine("sglang", engine_files("sglang", sglang.VERSION, FILES), FILES, stubs(server))
    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        with ExitStack() as absent, pytest.MonkeyPatch.context() as plain:
            plain.setattr(torch, "compile", lambda function=None, **_: function or (lambda function: function))
            for name in ("triton", "einops"):
                if not find_spec(name):
                    absent.enter_context(Engine(name, Path(), (), {}).installed())
            from sglang.srt.layers.attention import dsa_backend  # noqa: F401
            from sglang.srt.layers.attention.dsa import dsa_indexer  # noqa: F401
            from sglang.srt.mem_cache import memory_pool  # noqa: F401
        from sglang.kernels.ops.attention.dsa.paged_mqa_logits import deepgemm_paged_mqa_logits_split

        server.split = deepgemm_paged_mqa_logits_split
        patch.setenv("SGLANG_PLUGINS", "cute_kernels_dsa")
        patch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", str(DENSE))
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
            patch.setattr(torch.cuda, "current_device", lambda: 0)
        with pytest.MonkeyPatch.context() as plugins:
            plugins.setattr(importlib.metadata, "entry_points", entry_points)
            from sglang.srt.plugins import load_plugins

            load_plugins()
        yield server


@pytest.fixture
def server(engine, device):
    """Return the engine with its model on a device, without drafts."""
    engine.device, engine.chunked = device, False
    engine.spec = SimpleNamespace(speculative_eagle_topk=1, speculative_num_draft_tokens=None)
    engine.parallel = SimpleNamespace(
        attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, dcp_enabled=False, pp_size=1
    )
    engine.exec = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        features=SimpleNamespace(enable_memory_saver=False),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
        kernel=SimpleNamespace(
            dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="flashmla_kv", dsa_triton_union=0,
            dsa_topk_backend="sgl-kernel",
        ),
    )  # fmt: skip
    return engine


@dataclass
class Case:
    kv_dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    sinks: bool = False
    first: int = 0  # keys that are always chosen
    deterministic: bool = False
    heads: int = 5

    page_size = PAGE
    pools = False
    ints = torch.int64
    dtype = torch.bfloat16


CASES = {
    "bf16": Case(deterministic=True),
    "656": Case(E4M3, True),
    "e4m3": Case(E4M3),
    "sinks": Case(sinks=True),
    "656, first keys": Case(E4M3, True, first=2),
}


class Tokens:
    """Queries with a device that has an index: SGLang asks for it, also on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.device = tensor, tensor.shape, torch.device(tensor.device.type, 0)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.tensor[key]


class Model(sglang.Model):
    """A model runner of one layer and its indexer, and requests, of which the test keeps the indexer's keys."""

    def __init__(self, server: Any, case: Case, **changes: Any) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
        from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        torch.manual_seed(0)
        self.server, self.case, device = server, case, server.device
        server.exec.deterministic.enable_deterministic_inference = case.deterministic
        if case.kv_dtype is E4M3 and not case.packed:
            server.exec.kernel.dsa_prefill_backend = server.exec.kernel.dsa_decode_backend = "tilelang"
            server.exec.kernel.dsa_topk_backend = "torch"  # which SGLang refuses in its first step
        self.layer = RadixAttention(case.heads, LATENT + ROPE, SCALE, 1, 0, v_head_dim=LATENT)
        self.by_head = RadixAttention(case.heads, 192, SCALE, case.heads, 0, v_head_dim=128)
        self.sinks = torch.randn(case.heads).to(device) if case.sinks else None
        server.pool = self.pool = DSATokenToKVPool(
            PAGES * PAGE, PAGE, LATENT, case.kv_dtype, ROPE, 1, device.type, 128, False, 656 if case.packed else 576
        )
        self.pool.kv_buffer[0].view(torch.uint8).fill_(255)  # NaN
        self.pool.get_index_k_with_scale_buffer(0).fill_(255)
        self.req_to_token = torch.zeros(8, CONTEXT, dtype=torch.int32, device=device)
        hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_kpool=1, learnable_sink=case.sinks)
        config = dict(context_len=CONTEXT, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=128,
            num_attention_heads=case.heads, hf_config=hf_config)  # fmt: skip
        runner = dict(
            dtype=torch.bfloat16, kv_cache_dtype=case.kv_dtype, device=device.type, page_size=PAGE,
            is_draft_worker=False, hisparse_coordinator=None, max_running_requests=8,
            model_config=SimpleNamespace(**config | changes.pop("config", {})),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, size=8), token_to_kv_pool=self.pool,
        )  # fmt: skip
        self.backend = server.backend = ATTENTION_BACKENDS["dsa"](SimpleNamespace(**runner | changes))
        self.indexer = object.__new__(Indexer)
        vars(self.indexer).update(
            num_init_tokens=case.first, num_local_tokens=0, index_topk=TOP_K, n_heads=INDEX_HEADS, sm_count=132,
            logits_with_pp_recv=False, paged_mqa_logits_backend=DSAPagedMQALogitsBackend.DEEPGEMM,
        )  # fmt: skip
        self.free = torch.randperm(PAGES - 1).add(1).tolist()
        self.slots: dict[int, list[int]] = {}

    def batch(self, mode: str, counts: dict[int, int], padding: int = 0) -> Any:
        batch = super().batch(mode, counts, padding)
        batch.seq_lens_cpu, batch.extend_num_tokens = batch.seq_lens.cpu(), sum(counts.values())
        return batch

    def inputs(self, tokens: int) -> list[list[torch.Tensor]]:
        """Queries and a row of keys of the layer; queries, weights and a key of its indexer."""
        draw = partial(torch.randn, dtype=torch.bfloat16)
        q, k = draw(tokens, self.case.heads, LATENT + ROPE), draw(tokens, 1, LATENT + ROPE)
        codes, weights = draw(tokens, INDEX_HEADS, 128).to(E4M3), torch.rand(tokens, INDEX_HEADS, 1)
        return [[q, k, codes, weights, draw(tokens, 128)]]

    def forward(self, batch: Any, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Writes keys, chooses, and attends, as SGLang's model does."""
        ((q, k, codes, weights, key),) = inputs
        pages = self.pool.get_index_k_with_scale_buffer(0).view(-1, PAGE, 132)
        wrappers.indexer_k_quant_and_cache(key, pages, batch.out_cache_loc, 128, "")
        metadata = self.backend.get_indexer_metadata(0, batch)
        if batch.forward_mode.is_extend_without_speculative():
            slots = self.indexer._get_topk_ragged(False, batch, 0, Tokens(codes), weights, metadata)
        else:
            slots = self.indexer._get_topk_paged(batch, 0, codes, weights, metadata)
        rope = {"q_rope": q[..., LATENT:], "k_rope": k[..., LATENT:], "topk_indices": slots}
        if self.sinks is not None:
            rope["attn_sink"] = self.sinks
        return [self.layer(q[..., :LATENT].contiguous(), k[..., :LATENT], k[..., :LATENT], batch, **rope), slots]

    def check(self, counts: dict[int, int], inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> None:
        """Compares slots and outputs with those of float64."""
        ((q, k, codes, weights, _),), (out, chosen) = inputs, (t.cpu() for t in outputs)
        assert out.dtype is torch.bfloat16 and chosen.dtype is torch.int32
        self.check_rows(k, counts)
        rows, keys = self.rows().double(), self.keys().double()
        token = 0
        for request, count in counts.items():
            for place in range(count):
                mine = self.slots[request][: len(self.slots[request]) - count + place + 1]
                scores = torch.relu(codes[token].double() @ keys[mine].T).mul(weights[token].double()).sum(0)
                scores[: self.case.first] = torch.inf
                best = [mine[i] for i in scores.topk(min(TOP_K, len(mine))).indices.sort().values]
                assert chosen[token].tolist() == best + [-1] * (TOP_K - len(best))
                mine = rows[best][:, None]
                sinks = None if self.sinks is None else self.sinks.cpu()
                want = attention(q[token][None], mine, mine[..., :LATENT], SCALE, sinks=sinks)
                compare(out.view(-1, self.case.heads, LATENT)[token][None], want, torch.bfloat16, None)
                token += 1

    def rows(self) -> torch.Tensor:
        """The rows of the pool."""
        held = self.pool.get_key_buffer(0).cpu()[:, 0]
        if not self.case.packed:
            return held.float()
        codes, factors = held[:, :512].float(), held[:, 512:528].contiguous().view(torch.float32)
        return torch.cat(
            [codes * factors.repeat_interleave(128, 1), held[:, 528:].contiguous().view(torch.bfloat16)], 1
        )

    def keys(self) -> torch.Tensor:
        """The keys of the indexer."""
        pages = self.pool.get_index_k_with_scale_buffer(0).cpu()
        codes = pages[:, : PAGE * 128].reshape(-1, 128).view(E4M3).float()
        return codes * pages[:, PAGE * 128 :].contiguous().view(torch.float32).reshape(-1, 1)

    def check_rows(self, k: torch.Tensor, counts: dict[int, int]) -> None:
        """Compares the new rows of the pool with those that were given."""
        new = [slot for request, count in counts.items() for slot in self.slots[request][-count:]]
        wanted = k[: len(new), 0].float()
        error = (self.rows()[new] - wanted).abs()
        assert (error <= (0.0 if self.case.kv_dtype is torch.bfloat16 else wanted.abs() / 16 + 2**-9)).all()

    def step(self, mode: str, counts: dict[int, int]) -> bool:
        """Runs a batch, and returns whether SGLang attends to it per head."""
        batch = self.batch(mode, counts)
        self.backend.init_forward_metadata(batch)
        if self.backend.use_mha:
            self.run_by_head(batch, counts)
        else:
            self.run(batch, counts)
        return self.backend.use_mha

    def run_by_head(self, batch: Any, counts: dict[int, int]) -> None:
        ((_, k, _, _, key),) = self.placed(self.inputs(len(batch.out_cache_loc)))
        pages = self.pool.get_index_k_with_scale_buffer(0).view(-1, PAGE, 132)
        wrappers.indexer_k_quant_and_cache(key, pages, batch.out_cache_loc, 128, "")
        self.pool.set_mla_kv_buffer(self.by_head, batch.out_cache_loc, k[..., :LATENT], k[..., LATENT:])
        self.check_rows(k.cpu(), counts)
        lens = batch.seq_lens.tolist()
        q = torch.randn(len(k), self.case.heads, 192).bfloat16()
        k, v = (torch.randn(sum(lens), self.case.heads, size).bfloat16() for size in (192, 128))
        out = self.by_head(*(t.to(self.server.device) for t in (q, k, v)), batch, save_kv_cache=False)
        parts = [t.split(sizes) for t, sizes in ((q, [*counts.values()]), (k, lens), (v, lens))]
        want = torch.cat([attention(q, k.double(), v.double(), SCALE) for q, k, v in zip(*parts, strict=True)])
        compare(out.view(-1, self.case.heads, 128), want, torch.bfloat16, None)


@pytest.mark.parametrize("name, chunked", [*((name, False) for name in CASES), ("bf16", True)])
def test_prompts_chunks_decodes_and_mixed_batches(name, chunked, server):
    """chunked: logits of prompts do not fit SGLang's memory at once."""
    model, server.chunked = Model(server, CASES[name]), chunked
    by_head = [
        model.step("EXTEND", {0: 7, 4: 5}),
        model.step("EXTEND", {3: 70, 0: 9}),
        model.step("MIXED", {3: 17, 1: 9, 0: 1}),
        model.step("DECODE", {0: 1, 3: 1, 1: 1}),
        model.step("EXTEND", {1: 3, 2: 2, 3: 4}),
        model.step("EXTEND", {4: 2}),
        model.step("DECODE", {2: 1, 1: 1}),
    ]
    dense = name != "e4m3"  # of which SGLang dequantises nothing
    assert by_head == [dense, False, False, False, False, dense, False]


@pytest.mark.parametrize("case, shares", [
    (Case(heads=16), True), (Case(E4M3, True, heads=8), True), (Case(E4M3, heads=32), True),
    (Case(sinks=True, heads=24), True), (Case(heads=16, deterministic=True), False), (Case(E4M3, True, heads=5), False),
])  # fmt: skip
def test_neighbouring_tokens_of_prompts_share_their_keys(case, shares, engine, server, monkeypatch):
    """On emulated kernels. Decodes, drafts, and batches of short requests never do."""
    monkeypatch.setenv("CUTE_KERNELS_SHARE_KEYS", "1")
    engine.device, engine.spec.speculative_num_draft_tokens = torch.device("cpu"), 16
    steps = [
        ("EXTEND", {3: 70, 0: 30}, shares), ("MIXED", {3: 19, 1: 13, 0: 1}, shares),
        ("MIXED", {3: 20, 0: 1, 1: 1}, False), ("EXTEND", {1: 8, 3: 8}, False), ("DECODE", {3: 1, 0: 1}, False),
        ("TARGET_VERIFY", {3: 16, 0: 16}, False),
    ]  # fmt: skip
    with emulation() as fake:
        model = Model(server, case)
        for mode, counts, shared in steps:
            fake.launches.clear()
            assert not model.step(mode, counts)
            assert [hasattr(launch, "union_slots") for launch in fake.launches if hasattr(launch, "o")] == [shared]


@pytest.mark.parametrize("name", CASES)
def test_drafts(name, server):
    """The tokens of a request, which share its keys, and those of the next decode."""
    server.spec.speculative_num_draft_tokens = DRAFTS
    model = Model(server, CASES[name])
    model.step("EXTEND", {3: 70, 0: 30})
    model.step("TARGET_VERIFY", {3: DRAFTS, 0: DRAFTS})
    model.step("DECODE", {0: 1, 3: 1})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode, tokens", [("DECODE", 1), ("TARGET_VERIFY", DRAFTS)])
def test_a_graph_holds_for_other_lengths(name, mode, tokens, server):
    """SGLang prepares its metadata for other requests, and then replays the graph."""
    server.spec.speculative_num_draft_tokens = DRAFTS if mode == "TARGET_VERIFY" else None
    model = Model(server, CASES[name])
    model.step("EXTEND", {0: 30, 1: 4, 2: 90})
    backend = model.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)
    graph = model.batch(mode, {0: tokens, 1: tokens}, padding=2)
    for in_capture in (True, False):  # SGLang prepares metadata again before the first replay
        backend.init_forward_metadata_out_graph(graph, in_capture=in_capture)
    static = model.placed(model.inputs(len(graph.out_cache_loc)))
    replay = repeated(server.device, lambda: model.forward(graph, static))
    for number, (requests, padding) in enumerate((((0, 1), 2), ((2, 1, 0), 1), ((1,), 3))):
        counts = dict.fromkeys(requests, tokens)
        batch = model.batch(mode, counts, padding) if number else graph
        for tensor in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(graph, tensor).copy_(getattr(batch, tensor))
        backend.init_forward_metadata_out_graph(graph)
        inputs = model.inputs(len(graph.out_cache_loc))
        for to, of in zip(static[0], inputs[0], strict=True):
            to.copy_(of)
        model.check(counts, inputs, replay())


def test_rows_of_padding(server):
    """SGLang adds such rows to queries, or to lengths, for other ranks."""
    model = Model(server, CASES["656"])
    model.step("EXTEND", {0: 30})
    batch = model.batch("DECODE", {0: 1})
    model.backend.init_forward_metadata(batch)
    inputs = model.inputs(3)
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, 2))
    out, slots = model.forward(batch, model.placed(inputs))
    model.check({0: 1}, inputs, [out, slots])
    assert slots[1:].eq(-1).all() and not out.view(3, -1)[1:].any()
    found = model.backend._forward_fa3(
        q_rope=inputs[0][0][:1, :, LATENT:].to(server.device), kv_cache=model.pool.get_key_buffer(0), v_head_dim=LATENT,
        q_nope=inputs[0][0][:1, :, :LATENT].to(server.device), page_table=slots[:1],
        cache_seqlens=torch.tensor([TOP_K, 0], dtype=torch.int32, device=server.device), cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=1, sm_scale=SCALE, logit_cap=0.0, page_size=1,
    )  # fmt: skip
    assert torch.equal(found.flatten(), out.view(3, -1)[0])


def test_steps_that_need_positions(server):
    """SGLang's own function then chooses, with the logits and the top-k of the plugin."""
    model = Model(server, CASES["bf16"])
    model.step("EXTEND", {0: 70, 3: 30})
    batch = model.batch("DECODE", {3: 1, 0: 1})
    model.backend.init_forward_metadata(batch)
    (static,) = model.placed(model.inputs(2))
    _, slots = model.forward(batch, [static])
    metadata = replace(model.backend.get_indexer_metadata(0, batch), force_unfused_topk=True)
    found = model.indexer._get_topk_paged(batch, 0, static[2], static[3], metadata)
    wanted = [[model.slots[request].index(slot) for slot in own] for request, own in zip((3, 0), slots.tolist())]
    assert found.tolist() == wanted


def test_a_soft_cap_is_refused(server):
    given = dict.fromkeys(("q_rope", "kv_cache", "v_head_dim", "q_nope", "page_table", "cache_seqlens", "cu_seqlens_q",
                           "cu_seqlens_k", "max_seqlen_q", "sm_scale", "page_size"))  # fmt: skip
    with pytest.raises(NotImplementedError, match="^logit_cap: 30.0, must be 0"):
        Model(server, Case()).backend._forward_fa3(**given, logit_cap=30.0)


def test_what_is_hooked(server, monkeypatch):
    """Nothing imports DeepGEMM or FlashMLA, which are not installed here, and SGLang's top-k has no plan."""
    from sglang.srt.layers.attention.dsa import dsa_indexer, utils
    from sglang.srt.plugins.hook_registry import HookRegistry

    from wrappers.host import machine

    for name in ("fp8_mqa_logits", "fp8_paged_mqa_logits"):
        for module in (utils, dsa_indexer):
            assert getattr(module, f"resolve_{name}_fn")() is getattr(wrappers, name)
    assert utils.resolve_paged_mqa_logits_metadata_fn() is wrappers.get_paged_mqa_logits_metadata
    with monkeypatch.context() as patch:
        patch.setattr(machine.current, "device_info", lambda device: ("sm_90a", 132))
        assert dsa_indexer.resolve_num_sms() == 132
    assert Model(server, Case()).backend._build_topk_v2_plan(torch.ones(1)) is None
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {f"{utils.__name__}.resolve_num_sms"})
    with pytest.raises(RuntimeError, match=r"SGLang has not hooked \S+.dsa.utils.resolve_num_sms; its log says why"):
        Model(server, Case())


REFUSED = {
    "dtype torch.float16": {"dtype": torch.float16},
    "rows of 512 \\+ 0 columns": {"config": {"qk_rope_head_dim": 0}},
    "index_kpool 4": {"config": {"hf_config": SimpleNamespace(index_kpool=4)}},
    "HiSparse": {"hisparse_coordinator": object()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_are_refused(name, server):
    changes = {key: dict(value) if key == "config" else value for key, value in REFUSED[name].items()}
    with pytest.raises(NotImplementedError, match=f"plugin cute_kernels_dsa: {name}: not supported"):
        Model(server, Case(), **changes)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_backends_that_are_refused(phase, server, monkeypatch):
    from wrappers.host import machine

    setattr(server.exec.kernel, f"dsa_{phase}_backend", "trtllm")
    with pytest.raises(NotImplementedError, match=f"--dsa-{phase}-backend trtllm, must be one of flashmla_sparse, "):
        Model(server, Case())
    setattr(server.exec.kernel, f"dsa_{phase}_backend", "fa3")
    server.parallel.attn_cp_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism: not supported"):
        Model(server, Case())
    server.parallel.attn_cp_size = 1
    monkeypatch.setattr(machine.current, "device_info", lambda device: ("sm_100a", 148))
    with pytest.raises(NotImplementedError, match="sm_100a: .*indexer.logits: architecture sm_100a"):
        Model(server, Case())
