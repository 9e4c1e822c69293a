"""vLLM's own layer of DeepSeek V3.2, of 0.33.0, on the plugin: the indexer and sparse attention over caches of all
types, prompts, chunks, decodes and drafts in one batch, against float64; and what is refused."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.support import vllm_latent
from tests.support.emulated import emulation
from tests.support.host_work import torch_kernels
from tests.support.vllm_latent import LATENT, ROPE, TOP_K, SparseModel, config_of, refusals, rows_of
from tests.support.vllm_stubs import DeviceCapability
from wrappers.attention.plan import WHOLE

UNUSED = ("weights", "quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len", "total_seq_lens",
          "topk_indices_buffer")  # fmt: skip  # of a call that is refused before


@pytest.fixture(scope="module")
def engine():
    with vllm_latent.running() as server:
        yield server


@pytest.fixture
def server(engine, device):
    engine.platform.device = device
    return engine


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("heads", [8, 16])
def test_prompts_chunks_decodes_and_drafts(heads, kv_cache_dtype, server):
    model = SparseModel(server, heads, kv_cache_dtype)
    model.step({0: 40, 1: 5})  # prompts, the first in two chunks
    model.step({1: 1, 0: 17, 2: 30})  # a decode, a chunk, a prompt
    model.step({0: 1, 1: 1, 2: 1})
    model.step({0: 2, 1: 2, 2: 2})  # drafts, as many of each
    model.step({0: 4, 1: 4, 2: 4})
    model.step({2: 3, 0: 1, 1: 2})
    model.step({0: 1, 1: 1, 2: 1}, padding=2)  # as a CUDA graph of 5 requests is filled
    model.step({0: 2, 2: 2}, padding=2, width=2)
    model.step({0: 2, 1: 1}, padding=1, width=3)  # two tokens a request in the mean, and not of each
    model.step({0: 8, 3: 16, 2: 8})  # groups of 8 tokens, all of them full
    model.step({3: 8, 0: 16}, padding=1, width=8)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_metadata_of_decodes_hold_for_other_lengths(rows, server):
    """As a CUDA graph has them: the engine writes other lengths, tables and slots into the same tensors."""
    model = SparseModel(server, 16, "fp8_ds_mla")
    model.step({0: 40, 1: 3, 2: 9})
    captured = {0: rows, 1: rows}
    graph = model.common(captured, padding=1, width=rows)
    graph.max_seq_len = model.server.config.model_config.max_model_len
    metadata = {name: b.build_for_cudagraph_capture(graph) for name, b in model.builders.items()}
    for counts, padding in ((captured, 1), ({1: rows, 2: rows, 0: rows}, 0), ({2: rows}, 2)):
        step = graph if counts is captured else model.common(counts, padding, rows)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(graph, name).copy_(getattr(step, name))
        for name, builder in model.builders.items():
            builder.update_draft_decode_metadata(metadata[name])
        model.enter(graph, metadata)
        inputs = model.inputs(3 * rows)
        output = model.forward(graph, {name: t.to(model.device) for name, t in inputs.items()})
        model.check(counts, inputs, output)
        assert (model.indexer.topk_indices_buffer[len(counts) * rows : 3 * rows] == -1).all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_launches_of_a_layer(kv_cache_dtype, engine):
    """On emulated kernels: a decode writes rows and keys, computes logits, selects and attends; the third in a row
    repeats the launch of its attention, also with other requests, and a mixed batch has as many launches."""
    engine.platform.device = torch.device("cpu")
    with emulation() as fake:
        model = SparseModel(engine, 8, kv_cache_dtype)
        model.step({0: 40, 1: 29, 2: 30})
        for counts in ({0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1, 2: 1}, {0: 3, 2: 1}):
            fake.launches.clear()
            model.step(counts)
            assert len(fake.launches) == 5
            if counts == {1: 1, 2: 1}:
                assert model.layer.impl._cache.launch._launch is not None


@pytest.mark.parametrize("heads, kv_cache_dtype, shares", [
    (8, "auto", True), (16, "fp8_ds_mla", True), (32, "fp8", True), (8, "nvfp4_ds_mla", False),
    (12, "fp8_ds_mla", False),
])  # fmt: skip
def test_neighbouring_tokens_of_prompts_share_their_keys(heads, kv_cache_dtype, shares, engine, monkeypatch):
    """On emulated kernels. Decodes, drafts, and batches in which most tokens are those of decodes never do. A batch of
    as many tokens as the one before, which is bound, may differ from it in this alone."""
    monkeypatch.setenv("CUTE_KERNELS_SHARE_KEYS", "1")
    engine.platform.device = torch.device("cpu")
    with emulation() as fake:
        model = SparseModel(engine, heads, kv_cache_dtype)
        for counts, padding, shared in (
            ({0: 20}, 0, shares), ({1: 20}, 0, shares), ({0: 20}, 0, shares), ({0: 10, 1: 8, 2: 2}, 0, False),
            ({3: 9, 1: 7}, 0, shares), ({3: 9, 1: 7}, 1, False), ({3: 8, 1: 8}, 0, False), ({0: 1, 1: 1}, 0, False),
        ):  # fmt: skip
            model.step(counts, padding=padding, width=8)
            assert hasattr(fake.launches[-1], "union_slots") == shared, counts


def test_keys_are_shared_only_if_the_user_asks_for_it(monkeypatch):
    from wrappers.integrations.latent_support import can_share_keys

    for value, shares in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("CUTE_KERNELS_SHARE_KEYS", value)
        assert can_share_keys(16, "656") == shares
    monkeypatch.setenv("CUTE_KERNELS_SHARE_KEYS", "yes")
    with pytest.raises(ValueError, match="^CUTE_KERNELS_SHARE_KEYS: 'yes', must be 0 or 1"):
        can_share_keys(16, "656")


def test_graphs_hold_no_tokens_that_share_keys(engine, monkeypatch):
    """vLLM captures decodes, of which each request has as many tokens, and no more than drafts allow."""
    monkeypatch.setenv("CUTE_KERNELS_SHARE_KEYS", "1")
    engine.platform.device = torch.device("cpu")
    model = SparseModel(engine, 16, "fp8_ds_mla")
    for width in range(1, 9):
        graph = model.common({0: width, 1: width})
        assert not model.builders[model.name].build_for_cudagraph_capture(graph).shares


@pytest.mark.parametrize("counts, copied", [
    ({0: 1, 1: 1}, []), ({0: 4, 1: 4}, []), ({0: 8, 1: 16}, []), ({0: 8, 1: 3}, ["index_select"] * 3)
])  # fmt: skip
def test_torch_kernels_of_a_selection(counts, copied, engine, quiet):
    """Beside the logits and the top-k: copies of queries and weights into groups, and of slots out of them, only where
    a group has rows without a token."""
    from wrappers.integrations.vllm_indexer import select_keys

    engine.platform.device = torch.device("cpu")
    model = SparseModel(engine, 8, "fp8_ds_mla")
    model.common({0: 40, 1: 29})
    common = model.common(counts)
    metadata, inputs = model.build(common)[model.cache.prefix], model.inputs(common.num_actual_tokens)
    given = metadata, model.cache.kv_cache, inputs["index_q"], inputs["index_weights"]
    out = model.indexer.topk_indices_buffer[: common.num_actual_tokens]
    select_keys(*given, out)
    before = quiet.count
    assert torch_kernels(lambda: select_keys(*given, out)) == copied
    assert quiet.count - before == 2 * 2  # two calls


def test_bits_of_a_token_in_all_batches(engine, monkeypatch):
    """On emulated kernels: one CTA computes a token, and the launch names the keys that the token sees."""
    engine.platform.device = torch.device("cpu")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with emulation() as fake:  # no token shares the keys of others
        model, specs = SparseModel(engine, 8, "fp8_ds_mla"), set()
        for counts in ({0: 40, 1: 29}, {0: 1, 1: 1}, {0: 2, 1: 2}, {0: 5, 1: 1}):
            model.step(counts)
            launch = fake.launches[-1]
            assert launch.blocks_per_split == WHOLE
            seen = [model.lens[request] - n + 1 + i for request, n in counts.items() for i in range(n)]
            assert launch.kv_lens.tolist() == seen
            specs.add(fake.specs[-1])
        (spec,) = specs
        assert spec.kv.source == "slots" and not spec.kv.union


class Projection(torch.nn.Module):
    """Chooses its kernel as vLLM's does for the dimensions of DeepSeek V3."""

    def __init__(self):
        super().__init__()
        self._use_min_latency_gemm = True


def test_a_projection_has_one_kernel_where_bits_must_not_depend_on_the_batch(engine, monkeypatch):
    from vllm.model_executor.models import deepseek_v2

    monkeypatch.setattr(deepseek_v2, "DeepSeekV2FusedQkvAProjLinear", Projection)
    engine.platform.device = torch.device("cpu")
    SparseModel(engine, 8, "fp8_ds_mla")
    assert Projection()._use_min_latency_gemm
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    SparseModel(engine, 8, "fp8_ds_mla")
    assert not Projection()._use_min_latency_gemm


def test_tokens_that_pad_a_mixed_batch_have_no_keys(server):
    model = SparseModel(server, 8, "auto")
    model.step({0: 5, 1: 9}, padding=2, width=3)
    assert (model.indexer.topk_indices_buffer[14:20] == -1).all()
    model.step({0: 16, 1: 8}, padding=1, width=8)
    assert (model.indexer.topk_indices_buffer[24:32] == -1).all()


def test_a_run_without_metadata_measures_the_memory(server):
    model = SparseModel(server, 8, "auto")
    common = model.common({0: 3})
    model.enter(common, None)
    inputs = model.inputs(3)
    common.slot_mapping.fill_(-1)
    assert not model.forward(common, {name: t.to(model.device) for name, t in inputs.items()}).any()
    assert (model.indexer.topk_indices_buffer == -7).all()


@pytest.mark.parametrize("name", ["k", "q_scale"])
def test_tensors_that_the_indexer_does_not_read_are_refused(name, server):
    from vllm.models.deepseek_v32 import attention

    model = SparseModel(server, 8, "auto")
    common = model.common({0: 3})
    model.enter(common, model.build(common))
    given = "hidden", model.cache.prefix, model.cache.kv_cache, "q"
    keys = {"k": None, "q_scale": None} | {name: torch.ones(3)}
    with pytest.raises(NotImplementedError, match="^k, q_scale: given, must be None"):
        attention.sparse_attn_indexer(*given, **keys, **dict.fromkeys(UNUSED))
    assert (model.indexer.topk_indices_buffer == -7).all()


def test_batches_that_are_not_causal_are_refused(server):
    model = SparseModel(server, 8, "auto")
    common = model.common({0: 3})
    common.causal = False
    with pytest.raises(NotImplementedError, match="^causal: False, must be True"):
        model.builders[model.name].build(0, common)


@pytest.mark.parametrize("other", ["table", "size"])
def test_caches_with_other_pages_are_refused(other, server):
    """Slots of the indexer's cache would name other rows."""
    model = SparseModel(server, 8, "auto")
    common, inputs = model.common({0: 3}), model.inputs(3)
    metadata = model.build(common)
    if other == "table":
        metadata[model.name].block_table = metadata[model.name].block_table.clone()
    else:
        model.cache.kv_cache = model.cache.kv_cache.view(-1, 32, model.cache.head_dim)
    model.enter(common, metadata)
    message = "kv_cache: blocks of 16 tokens, must have the blocks of layers.0.indexer.k_cache in the same block table"
    with pytest.raises(NotImplementedError, match=message):
        model.forward(common, {name: t.to(model.device) for name, t in inputs.items()})


def test_a_layer_of_another_backend_keeps_vllms_indexer(server, monkeypatch):
    from vllm.models.deepseek_v32 import attention

    from wrappers.integrations import vllm_indexer

    model, theirs = SparseModel(server, 8, "auto"), MagicMock(__module__="vllm")
    monkeypatch.setattr(attention, "sparse_attn_indexer", theirs)
    vllm_indexer.install()
    vllm_indexer.install()  # of the next layer
    model.step({0: 30})
    assert not theirs.called
    other = vllm_latent.IndexerCache("draft.k_cache", server.device)
    server.config.compilation_config.static_forward_context[other.prefix] = other
    given = "hidden", other.prefix, *map(str, range(13))
    assert attention.sparse_attn_indexer(*given, topk_backend="auto") is theirs.return_value
    theirs.assert_called_once_with(*given, topk_backend="auto")


def test_a_draft_model_may_share_the_buffer_of_its_target(server):
    model, other = SparseModel(server, 8, "auto"), torch.full((128, TOP_K), -7, dtype=torch.int32)
    model.indexer.topk_indices_buffer = model.layer.topk_indices_buffer = other.to(model.device)
    model.step({0: 30, 1: 2})
    assert (model.layer.topk_indices_buffer[:32] != -7).all()


@pytest.mark.parametrize("capability, ours", [((9, 0), True), ((10, 0), False)])
def test_rows_in_nvfp4_are_written_without_instructions_of_blackwell(capability, ours, server, monkeypatch):
    from vllm.models.deepseek_v32 import attention

    from wrappers.integrations import vllm_indexer

    rows, rotated = torch.randn(3, LATENT).bfloat16(), torch.randn(3, ROPE).bfloat16()

    def theirs(q_c, **named):
        named["kv_c_out"][:], named["k_pe_out"][:] = rows.to(server.device), rotated.to(server.device)
        seen.append(named)
        return "q"

    seen, cache = [], torch.zeros(2, 16, 352, dtype=torch.uint8, device=server.device)
    monkeypatch.setattr(attention, "fused_norm_rope", theirs)
    vllm_indexer.install()
    server.platform.capability = DeviceCapability(*capability)
    out = {"kv_c_out": torch.empty_like(rows), "k_pe_out": torch.empty_like(rotated)}
    out = {name: t.to(server.device) for name, t in out.items()}
    given = {
        "mla_kv_cache": cache, "mla_kv_cache_dtype": "nvfp4_ds_mla", "mla_k_scale": torch.ones(1, device=server.device),
        "slot_mapping": torch.tensor([18, 3], device=server.device),
    }  # fmt: skip
    try:
        assert attention.fused_norm_rope("q_c", **given, **out) == "q"
        others = given | {"mla_kv_cache": None}
        attention.fused_norm_rope("q_c", **others, **out)
    finally:
        server.platform.capability = DeviceCapability(9, 0)
    assert (seen[0]["mla_kv_cache"] is None) == ours and seen[1]["mla_kv_cache_dtype"] == "nvfp4_ds_mla"
    assert cache.any() == ours
    if ours:
        found = rows_of("352", cache, [0, 1], 32)
        error = (found[[18, 3]] - torch.cat([rows, rotated], 1)[:2].double()).abs()
        assert error.max() < 0.8 and error.mean() < 0.1


def test_models_with_custom_start_without_deep_gemm(server, monkeypatch):
    from vllm import utils
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from wrappers.integrations import plugins

    monkeypatch.setattr(utils.deep_gemm, "has_deep_gemm", lambda: False)
    monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: False)
    plugins.vllm()
    server.config = config_of(torch.bfloat16, "auto")
    assert sparse_attn_indexer.has_deep_gemm()
    server.config.attention_config.backend = AttentionBackendEnum.FLASHMLA_SPARSE
    assert not sparse_attn_indexer.has_deep_gemm()


VALID = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla", "block_size": 64, "use_mla": True,
         "use_sparse": True}  # fmt: skip
INVALID = {
    "head_size": ({"head_size": 512}, "head_size not supported"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
    "another dtype": ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: float16, must be that of the model, torch.bf"),
    "fp16 over packed rows": ({"dtype": torch.float16}, "must be torch.bfloat16"),
    "block_size": ({"block_size": 24}, "block_size not supported"),
    "sinks": ({"has_sink": True}, "attention sinks not supported"),
    "DCP": ({"use_dcp": True}, "DCP not supported"),
    "PCP": ({"use_pcp": True}, "PCP not supported"),
    "trimmed drafts": ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_configurations_that_are_refused_at_start(name, server):
    asked, message = INVALID[name]
    assert not refusals(**VALID) and not refusals(**VALID | {"use_batch_invariant": True})
    (reason,) = refusals(**VALID | asked)
    assert message in reason


@pytest.mark.parametrize("options, message", [
    ({"sliding_window": 9}, "sliding_window: 9, must be None"),
    ({"logits_soft_cap": 2.0}, "logits_soft_cap: 2.0, must be None"),
    ({"alibi_slopes": [1.0]}, r"alibi_slopes: \[1.0\], must be None"),
    ({"attn_type": "encoder_only"}, "attn_type: encoder_only, must be "),
    ({"kv_sharing_target_layer_name": "layers.0.attn"}, "kv_sharing_target_layer_name: layers.0.attn, must be None"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: 'nvfp4', must be one of auto, float16, bfloat16"),
    ({"kv_lora_rank": 448}, "kv_lora_rank: 448, must be 512"),
    ({"indexer": SimpleNamespace(head_dim=68)}, "index_head_dim: 68 bytes of a key, must be"),
    ({"indexer": torch.nn.Linear(1, 1)}, "indexer: torch.nn.modules.linear.Linear, must be vllm.models.deepseek_v32.a"),
])  # fmt: skip
def test_refused_by_the_layer(options, message, server):
    from wrappers.integrations.vllm_latent_sparse import VllmSparseImpl

    if isinstance(options.get("indexer"), SimpleNamespace):  # of a cache
        options = {"indexer": vllm_latent.indexer_of(k_cache=options["indexer"])}
    server.config = config_of(torch.bfloat16, "auto")
    given = {
        "num_heads": 16, "head_size": 576, "scale": 1.0, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "kv_lora_rank": LATENT,
    }  # fmt: skip
    VllmSparseImpl(**given)
    with pytest.raises(NotImplementedError, match=message):
        VllmSparseImpl(**given | options)


@pytest.mark.parametrize("place, name, value", [
    ("parallel_config", "decode_context_parallel_size", 2), ("parallel_config", "prefill_context_parallel_size", 2),
    ("attention_config", "hisparse_config", "given"), ("speculative_config", "num_speculative_tokens", 8),
])  # fmt: skip
def test_modes_that_are_refused(place, name, value, server):
    from wrappers.integrations import vllm_indexer

    server.config = config_of(torch.bfloat16, "auto")
    server.config.speculative_config = SimpleNamespace(num_speculative_tokens=7)
    vllm_indexer.refuse_modes()
    setattr(getattr(server.config, place), name, value)
    with pytest.raises(NotImplementedError, match=f"{name}: {value}, must be"):
        vllm_indexer.refuse_modes()


def test_drafts_are_refused_where_bits_must_not_depend_on_the_batch(server, monkeypatch):
    from wrappers.integrations import vllm_indexer

    server.config = config_of(torch.bfloat16, "auto")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm_indexer.refuse_modes()
    server.config.speculative_config = SimpleNamespace(num_speculative_tokens=1)
    message = "num_speculative_tokens: 1, must be at most 0 with VLLM_BATCH_INVARIANT, the attention backend CUSTOM"
    with pytest.raises(NotImplementedError, match=message):
        vllm_indexer.refuse_modes()
