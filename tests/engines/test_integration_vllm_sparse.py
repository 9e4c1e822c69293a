"""vLLM's own layer of DeepSeek V3.2, of 0.33.0, on the plugin: the indexer and sparse attention over caches of all
types, prompts, chunks, decodes and drafts in one batch, against float64; and what is refused."""

import pytest

from tests.support import vllm_latent
from tests.support.vllm_latent import SparseModel


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
