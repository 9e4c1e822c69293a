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
    ({0: 1, 3: 1, 1: 3, 2: 9}, 0, 1, True),  # and so it is here, but they come before the prompt
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


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_results_are_those_of_the_cache(kv_cache_dtype, server, monkeypatch):
    """The conversion of these rows is exact, so the reference has the same bits. Rows that are not copied are NaN."""
    from wrappers.integrations import vllm_staging

    def spoiled(*given):
        memory.fill_(torch.nan)
        copied.append(given)
        return stage(*given)

    heads = 64 if server.device.type == "cuda" else 4  # the reference takes as long as there are heads
    monkeypatch.setattr(vllm_staging, "LEAST_HEADS", heads)
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


@pytest.fixture
def model(engine, monkeypatch):
    engine.platform.device = torch.device("cpu")
    monkeypatch.setenv(NAME, "1")
    return SparseModel(engine, 64, "fp8_ds_mla")


def decisions(model, common):
    """Return whether the attention and the indexer stage a batch."""
    built = model.build(common)
    return built[model.name].staged is not None, built[model.cache.prefix].slot_table is not None


def test_both_builders_decide_alike(model):
    for counts, padding, width, staged in STEPS:
        assert decisions(model, model.common(counts, padding, width)) == (staged, staged), counts


def test_pages_of_the_workspace(model):
    """A request has whole pages, in the order of the batch, and a request without tokens none."""
    model.common({0: 33, 1: 16})
    built = model.build(model.common({1: 17, 2: 19, 0: 1}, padding=1))
    staged, named = built[model.name].staged, built[model.cache.prefix].slot_table
    assert staged.size == BLOCK and staged.starts.tolist() == [BLOCK * n for n in (0, 3, 5, 8, 8)]
    assert staged.table.dtype == torch.int32 and staged.table.shape == (4, COLUMNS)
    assert staged.table[:, :3].tolist() == [[0, 1, 2], [3, 4, 5], [5, 6, 7], [8, 9, 10]]
    owners = built[model.cache.prefix].groups.owner
    assert owners[:7].tolist() == [0] * 3 + [1] * 3 + [2] and torch.equal(named, staged.table[owners])


def test_requests_before_the_first_prompt_have_pages_of_the_cache(model):
    model.common({0: 33, 1: 16, 2: 2})
    common = model.common({1: 1, 2: 4, 0: 30, 3: 1})
    built = model.build(common)
    staged, named = built[model.name].staged, built[model.cache.prefix].slot_table
    assert (staged.packed, staged.packed_tokens) == (2, 5) and staged.starts.tolist() == [0, 4 * BLOCK, 5 * BLOCK]
    assert torch.equal(staged.table[:2], common.block_table_tensor[:2])
    assert staged.table[2:, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(named, staged.table[built[model.cache.prefix].groups.owner])


@pytest.mark.parametrize("known", [True, False])
def test_batches_larger_than_the_workspace_are_not_staged(known, model, monkeypatch):
    """Where the engine has no lengths on the host, each request may have those of the longest."""
    from wrappers.integrations import vllm_staging

    common = model.common({0: 33, 1: 16})
    if not known:
        common.seq_lens_cpu_upper_bound = None
    pages = 3 + 1 if known else 3 + 3
    for rows in (pages * BLOCK, pages * BLOCK - 1):
        monkeypatch.setattr(vllm_staging, "ROWS", rows)
        assert decisions(model, common) == (rows == pages * BLOCK,) * 2


def test_few_tokens_of_long_contexts_are_not_staged(model, monkeypatch):
    """To convert their rows would take longer than it saves."""
    from wrappers.integrations import vllm_staging

    model.common({0: 33, 1: 16})
    common = model.common({0: 17, 1: 9})  # of 50 and 25 keys: 96 rows of whole pages
    for rows, staged in ((4, True), (3, False)):
        monkeypatch.setattr(vllm_staging, "ROWS_PER_TOKEN", rows)
        assert decisions(model, common) == (staged, staged)
    common = model.common({1: 1, 0: 9})  # a decode of 26 keys, which counts neither as rows nor as a token, and 59 keys
    for rows, staged in ((8, True), (7, False)):
        monkeypatch.setattr(vllm_staging, "ROWS_PER_TOKEN", rows)
        assert decisions(model, common) == (staged, staged)


def test_the_decision_reads_nothing_of_the_device(model):
    from wrappers.integrations import vllm_staging

    common = model.common({0: 33, 1: 16})
    fields = "query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"
    far = common.replace(**{name: getattr(common, name).to("meta") for name in fields})
    found = vllm_staging.staged_pages(far, BLOCK)
    assert found.table.device.type == found.starts.device.type == "meta"


def test_graphs_hold_no_staged_batches(model):
    """vLLM captures decodes, of which each request has as many tokens, and no more than drafts allow."""
    for width in range(1, 9):
        graph = model.common({0: width, 1: width})
        built = [builder.build_for_cudagraph_capture(graph) for builder in model.builders.values()]
        assert built[0].staged is None and built[1].slot_table is None


def test_launches_of_a_layer(engine, monkeypatch):
    """On emulated kernels: a batch with prompts has one launch more, which copies rows, and its attention reads 16
    bits. The launch that decodes repeat is kept."""
    monkeypatch.setenv(NAME, "1")
    engine.platform.device = torch.device("cpu")
    with emulation() as fake:
        model, launches = SparseModel(engine, 64, "fp8_ds_mla"), []
        decode = {0: 1, 1: 1}
        for counts, copies in (({0: 40, 1: 5}, 1), (decode, 0), (decode, 0), ({2: 30}, 1), (decode, 0)):
            fake.launches.clear()
            model.step(counts)
            assert len(fake.launches) == 5 + copies
            assert fake.launches[-1].k.dtype == (torch.bfloat16 if copies else torch.uint8)
            launches.append(model.layer.impl._cache.launch._launch)
        assert launches[2] is not None and launches[2:] == launches[2:3] * 3


@pytest.mark.parametrize("heads, kv_cache_dtype, value, staged", [
    (64, "fp8_ds_mla", "1", True), (128, "nvfp4_ds_mla", "1", True), (64, "fp8_ds_mla", "0", False),
    (64, "fp8_ds_mla", "", True), (32, "fp8_ds_mla", "1", False), (64, "auto", "1", False), (64, "fp8", "1", False),
])  # fmt: skip
def test_layers_with_a_workspace(heads, kv_cache_dtype, value, staged, engine, monkeypatch):
    """vLLM measures its memory after it has made the layers."""
    from vllm.v1.worker import workspace

    from wrappers.integrations import vllm_staging

    monkeypatch.setenv(NAME, value)
    engine.platform.device = torch.device("cpu")
    model = SparseModel(engine, heads, kv_cache_dtype)
    (held,) = workspace.current_workspace_manager()._current_workspaces
    assert (held is not None) == staged
    if staged:
        assert vllm_staging.WORKSPACE - 2 * 576 < held.nbytes <= vllm_staging.WORKSPACE == 1 << 28
        workspace.lock_workspace()
    assert decisions(model, model.common({0: 40})) == (staged, staged)
    if staged:
        assert vllm_staging.workspace(torch.bfloat16).data_ptr() == held.data_ptr()


def test_bits_that_must_not_depend_on_the_batch_are_not_staged(engine, monkeypatch):
    monkeypatch.setenv(NAME, "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    engine.platform.device = torch.device("cpu")
    model = SparseModel(engine, 64, "fp8_ds_mla")
    assert decisions(model, model.common({0: 40})) == (False, False)


def test_other_values_of_the_variable_are_refused(engine, monkeypatch):
    from wrappers.integrations.vllm_staging import can_stage

    engine.config = config_of(torch.bfloat16, "fp8_ds_mla")
    monkeypatch.setenv(NAME, "yes")
    with pytest.raises(ValueError, match=f"^{NAME}: 'yes', must be 0 or 1"):
        can_stage(16, "")


@pytest.mark.parametrize("change, message", [
    ("layers", r"kv_cache_dtype_skip_layers: \['3'\], must be empty with CUTE_KERNELS_STAGE_KEYS=1"),
    ("drafts", "index_share_for_mtp_iteration: True, must be False with CUTE_KERNELS_STAGE_KEYS=1"),
])  # fmt: skip
def test_models_whose_slots_others_read(change, message, engine, monkeypatch):
    from wrappers.integrations.vllm_staging import can_stage

    engine.config = config = config_of(torch.bfloat16, "fp8_ds_mla")
    config.speculative_config = SimpleNamespace(num_speculative_tokens=1, draft_model_config=SimpleNamespace())
    monkeypatch.setenv(NAME, "1")
    assert can_stage(64, "656")
    if change == "layers":
        config.cache_config.kv_cache_dtype_skip_layers = ["3"]
    else:
        config.speculative_config.draft_model_config.hf_config = SimpleNamespace(index_share_for_mtp_iteration=True)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        can_stage(64, "656")
    assert not can_stage(16, "656")
    monkeypatch.delenv(NAME)
    assert not can_stage(64, "656")


def test_a_cache_with_other_pages_is_refused(model):
    from wrappers.integrations import vllm_staging

    staged = model.build(model.common({0: 40}))[model.name].staged
    with pytest.raises(NotImplementedError, match="kv_cache: blocks of 32 tokens, must have 16"):
        other = model.layer.kv_cache.view(-1, 32, 656)
        vllm_staging.stage(other, "656", torch.zeros(1, COLUMNS).int(), staged, torch.bfloat16)
