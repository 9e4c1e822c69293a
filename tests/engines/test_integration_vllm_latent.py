"""vLLM's own layer of latent attention (MLA), of 0.33.0, on the plugin: prompts, chunks of a context, decodes and
drafts in one batch, over caches of 16 bits and of e4m3, against float64; and what is refused."""

import pytest
import torch

from tests.support import vllm_latent
from tests.support.emulated import emulation
from tests.support.vllm_latent import BLOCK, LATENT, DenseModel, config_of, refusals


@pytest.fixture(scope="module")
def engine():
    with vllm_latent.running() as server:
        yield server


@pytest.fixture
def server(engine, device):
    engine.platform.device = device
    return engine


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("heads", [8, 16])
def test_prompts_chunks_and_decodes(heads, kv_cache_dtype, server):
    """All prompts are expanded: these are too short otherwise."""
    model = DenseModel(server, heads, kv_cache_dtype)
    model.builder.reorder_batch_threshold = 1
    model.step({0: 40, 1: 5})  # prompts, the first in two chunks
    model.step({1: 1, 0: 17, 2: 30})  # a decode, a chunk, a prompt
    model.step({0: 1, 1: 1, 2: 1})
    model.step({0: 1, 1: 1, 2: 1}, padding=2)  # as a CUDA graph of 5 requests is filled


def test_the_end_of_a_prompt_attends_to_the_latent_rows(server):
    """Behind a context or not, and whatever else the batch has. The engine sorts its requests."""
    model = DenseModel(server, 16, "auto")
    assert model.builder.reorder_batch_threshold == 256
    model.builder.reorder_batch_threshold = 40
    assert model.step({0: 40, 1: 30}).num_prefills == 0
    metadata = model.step({0: 39, 2: 1, 1: 41})
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert model.step({0: 1, 1: 40, 2: 7}).num_prefills == 0


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts(drafts, server):
    model, n = DenseModel(server, 16, "auto", drafts=drafts), drafts + 1
    model.step({0: 20, 1: 9, 2: 30})
    metadata = model.step({0: n, 1: n, 2: n})
    assert metadata.num_decode_tokens == 3 * n and not metadata.num_prefills
    model.step({0: 1, 1: n, 2: 1})
    model.step({0: n, 2: n}, padding=1, width=n)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_launches_of_a_layer(kv_cache_dtype, engine):
    """On emulated kernels: a decode writes its rows and attends, and the third in a row repeats the launch."""
    engine.platform.device = torch.device("cpu")
    with emulation() as fake:
        model = DenseModel(engine, 8, kv_cache_dtype)
        model.step({0: 40, 1: 29, 2: 30})
        for counts in ({0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1, 2: 1}):
            fake.launches.clear()
            model.step(counts)
            assert len(fake.launches) == 2
        assert model.layer.impl._cache.launch._launch is not None


def test_a_bound_launch_serves_no_longer_requests(engine):
    """Both batches have four tokens. A request of two has 16 rows; one of three has 24, which another kernel serves."""
    engine.platform.device = torch.device("cpu")
    with emulation() as fake:
        model = DenseModel(engine, 8, "fp8", drafts=3)
        model.step({0: 40, 1: 29})
        for counts, rows in (*[({0: 2, 1: 2}, 16)] * 3, ({0: 3, 1: 1}, 64)):
            model.step(counts)
            assert fake.launches[-1].o_partial.shape[1] == rows  # of a tile


def test_a_context_in_several_chunks(server):
    """The workspace holds 32 rows of the context, so that a request goes on in the next chunk."""
    model = DenseModel(server, 8, "auto")
    model.builder.chunked_prefill_workspace_size, model.builder.reorder_batch_threshold = 2 * BLOCK, 1
    model.step({0: 70, 1: 20, 2: 5})
    metadata = model.step({0: 9, 1: 30, 3: 7, 2: 4})
    chunks = metadata.prefill.chunked_context.chunks
    assert len(chunks) > 2 and any(chunk.is_continuation for chunk in chunks)


def test_the_lse_of_decodes_whose_keys_are_distributed(server):
    model = DenseModel(server, 16, "auto")
    model.step({0: 20, 1: 3})
    layer, common = model.layer, model.common({0: 1, 1: 1})
    metadata, q = model.builder.build(0, common), torch.randn(2, 16, 576, device=model.device).bfloat16()
    out, nothing = layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
    assert nothing is None
    layer.impl.need_to_return_lse_for_decode = True
    metadata.decode.seq_lens = torch.tensor([20, 0], device=model.device).int()
    again, lse = layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
    rows = vllm_latent.rows_of("", layer.kv_cache, model.blocks[0], 20)
    want = torch.logsumexp(q[0].cpu().double() @ rows.T * layer.scale, -1)
    torch.testing.assert_close(lse[0].cpu().double(), want, rtol=1e-3, atol=1e-3)
    assert (lse[1] == -torch.inf).all() and not again[1].any() and again.shape == out.shape


VALID = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True}
INVALID = {
    "head_size": ({"head_size": 320}, "head_size not supported"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
    "fp16 over e4m3": ({"dtype": torch.float16, "kv_cache_dtype": "fp8"}, "must be torch.bfloat16 or torch.float8"),
    "another dtype": ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: float16, must be that of the model, torch.bf"),
    "PCP": ({"use_pcp": True}, "PCP not supported"),
    "batch invariance": ({"use_batch_invariant": True}, "batch invariance not supported"),
    "trimmed drafts": ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_configurations_that_are_refused_at_start(name, server):
    asked, message = INVALID[name]
    assert not refusals(**VALID) and not refusals(**VALID | {"use_dcp": True})
    (reason,) = refusals(**VALID | asked)
    assert message in reason


@pytest.mark.parametrize("options, message", [
    ({"sliding_window": 9}, "sliding_window: 9, must be None"),
    ({"logits_soft_cap": 2.0}, "logits_soft_cap: 2.0, must be None"),
    ({"alibi_slopes": [1.0]}, r"alibi_slopes: \[1.0\], must be None"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: 'nvfp4', must be one of auto, float16"),
    ({"kv_lora_rank": 448}, "kv_lora_rank: 448, must be 512"),
])  # fmt: skip
def test_refused_by_the_layer(options, message, server):
    from wrappers.integrations.vllm_latent import VllmLatentImpl

    server.config = config_of(torch.bfloat16, "auto")
    given = {
        "num_heads": 16, "head_size": 576, "scale": 1.0, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "kv_lora_rank": LATENT, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None,
    }  # fmt: skip
    VllmLatentImpl(**given)
    with pytest.raises(NotImplementedError, match=message):
        VllmLatentImpl(**given | options)


@pytest.mark.parametrize("name, options", [
    ("run_prefill_new_tokens", {"out": torch.ones(1)}), ("run_prefill_new_tokens", {"output_scale": torch.ones(1)}),
    ("run_prefill_context_chunk", {"out": torch.ones(1)}),
])  # fmt: skip
def test_outputs_of_prompts_are_refused(name, options, server):
    function = getattr(DenseModel(server, 8, "auto").builder._prefill_backend, name)
    with pytest.raises(NotImplementedError, match="given, must be None"):
        function(*[None] * 4, **options)


def test_each_layer_gets_its_own_backend(server):
    """One name serves K and V per head, latent attention and sparse latent attention, in one model."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    server.config = config_of(torch.bfloat16, "auto")
    asked = [
        (576, {"use_mla": True}), (64, {}), (576, {"use_mla": True, "use_sparse": True}), (128, {}),
        (576, {"use_mla": True, "use_sparse": True}),
    ]  # fmt: skip
    found = [selector.get_attn_backend(size, torch.bfloat16, "auto", **more) for size, more in asked]
    names = ["VllmLatentBackend", "VllmBackend", "VllmSparseBackend", "VllmBackend", "VllmSparseBackend"]
    assert [backend.__name__ for backend in found] == names
    assert {backend.get_name() for backend in found} == {"CUSTOM"}
    with pytest.raises(ValueError, match="head_size not supported"):
        selector.get_attn_backend(320, torch.bfloat16, "auto", use_mla=True)
    assert selector.get_attn_backend(96, torch.bfloat16, "auto").full_cls_name()[1] == "VllmBackend"
