"""vLLM's own layer of latent attention (MLA), of 0.33.0, on the plugin: prompts, chunks of a context, decodes and drafts
in one batch, over caches of 16 bits and of e4m3, against float64; and what is refused."""

import pytest

from tests.support import vllm_latent
from tests.support.vllm_latent import DenseModel


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
    model = DenseModel(server, heads, kv_cache_dtype)
    model.step({0: 40, 1: 5})  # prompts, the first in two chunks
    model.step({1: 1, 0: 17, 2: 30})  # a decode, a chunk, a prompt
    model.step({0: 1, 1: 1, 2: 1})
    model.step({0: 1, 1: 1, 2: 1}, padding=2)  # as a CUDA graph of 5 requests is filled


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts(drafts, server):
    model, n = DenseModel(server, 16, "auto", drafts=drafts), drafts + 1
    model.step({0: 20, 1: 9, 2: 30})
    metadata = model.step({0: n, 1: n, 2: n})
    assert metadata.num_decode_tokens == 3 * n and not metadata.num_prefills
    model.step({0: 1, 1: n, 2: 1})
    model.step({0: n, 2: n}, padding=1, width=n)
