"""Rows of prompts that vLLM's own layer of DeepSeek V3.2, of 0.33.0, attends to in a workspace: the results, which
batches are staged, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import vllm_latent
from tests.support.emulated import emulation
from tests.support.vllm_latent import BLOCK, COLUMNS, SparseModel, config_of

NAME = "CUTE_KERNELS_STAGE_KEYS"
STEPS = (  # tokens of the requests of a step, requests that pad it, their tokens, and whether it is staged
    ({0: 40, 1: 5}, 0, 1, True),
    ({1: 1, 0: 17, 2: 30}, 0, 1, True),  # a decode, a chunk, a prompt
    ({0: 1, 1: 1, 2: 1}, 0, 1, False),
    ({0: 4, 1: 4, 2: 4}, 0, 1, False),  # drafts
    ({0: 10, 1: 8, 2: 2}, 0, 1, False),  # most requests have few tokens
    ({3: 16, 2: 8}, 0, 1, True),  # whole groups
    ({3: 16, 2: 16}, 1, 8, True),
    ({0: 1, 3: 1}, 1, 1, False),
)


@pytest.fixture(scope="module")
def engine():
    with vllm_latent.running() as server:
        yield server


@pytest.fixture
def server(engine, device, monkeypatch):
    engine.platform.device = device
    monkeypatch.setenv(NAME, "1")
    return engine


def results(model):
    """Return the outputs of the tokens of all steps. Their values do not depend on the model."""
    found = []
    for i, (counts, padding, width, _) in enumerate(STEPS):
        torch.manual_seed(2 + i)
        found.append(model.step(counts, padding, width)[: sum(counts.values())])
    return found


@pytest.mark.parametrize("heads, kv_cache_dtype", [(64, "fp8_ds_mla"), (128, "fp8_ds_mla"), (64, "nvfp4_ds_mla")])
def test_results_are_those_of_the_cache(heads, kv_cache_dtype, server, monkeypatch):
    """The conversion of these rows is exact, so the reference has the same bits. Rows that are not copied are NaN."""
    from wrappers.integrations import vllm_staging

    def spoiled(*given):
        memory.fill_(torch.nan)
        copied.append(given)
        return stage(*given)

    torch.manual_seed(1)
    model, copied = SparseModel(server, heads, kv_cache_dtype), []
    memory, stage = vllm_staging.workspace(torch.bfloat16)[: 64 * BLOCK], vllm_staging.stage
    monkeypatch.setattr(vllm_staging, "workspace", lambda dtype: memory)
    monkeypatch.setattr(vllm_staging, "ROWS", len(memory))
    monkeypatch.setattr(vllm_staging, "stage", spoiled)
    staged = results(model)
    assert len(copied) == sum(step[3] for step in STEPS)
    monkeypatch.setenv(NAME, "0")
    torch.manual_seed(1)
    plain = results(SparseModel(server, heads, kv_cache_dtype))
    assert len(copied) == sum(step[3] for step in STEPS)
    for found, want in zip(staged, plain, strict=True):
        if server.device.type == "cpu":
            assert torch.equal(found, want)
        else:
            torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
