"""vLLM's own sparse indexer, of 0.33.0, on the plugin's top-k: its stage of decode and its function of prefill."""

import pytest
import torch

from tests.engines.test_integration_vllm import Case, config_of, engine, server

__all__ = ["engine", "server"]  # fixtures


@pytest.fixture
def indexer(server, monkeypatch):
    """The top-k stage of vLLM's indexer, with the plugin named, and its per-row functions."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import indexer_topk

    from wrappers.integrations import plugins

    for owner, name in ((ops, "top_k_per_row_prefill"), (ops, "top_k_per_row_decode"), (
        indexer_topk.SparseIndexerTopk, "forward")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    before = indexer_topk.SparseIndexerTopk.forward
    plugins.vllm_topk()
    assert indexer_topk.SparseIndexerTopk.forward is before  # VLLM_PLUGINS does not name it
    monkeypatch.setenv("VLLM_PLUGINS", "cute_kernels, cute_kernels_topk")
    plugins.vllm_topk()
    server.config = config_of(Case())
    return indexer_topk, ops


def chosen(logits: torch.Tensor, start: int, end: int, k: int) -> list[int]:
    """Indices of the k largest from `start` on, ascending, then -1."""
    best = sorted(range(start, max(start, end)), key=lambda i: -float(logits[i]))[:k]
    return sorted(i - start for i in best) + [-1] * (k - len(best))


@pytest.mark.parametrize("backend", ["auto", "per_row"])
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (6, 1)])
def test_decode_of_the_indexer(shape, backend, indexer, device):
    """seq_lens one a request, with 2 rows each; the end of each row, in either form."""
    stage = indexer[0].SparseIndexerTopk(backend)
    logits = torch.randn(6, 640, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([17, 599, 600]) if shape == (3, 1) else torch.tensor([16, 17, 1, 2, 599, 600])
    buffer = torch.full((8, 80), 7, dtype=torch.int32, device=device)
    stage(logits.to(device)[:, :600], ends.int().view(shape).to(device), 2, buffer[:6, :64], 64, 600)
    rows = [e for end in ends.tolist() for e in (end - 1, end)] if shape == (3, 1) else ends.tolist()
    assert buffer[:6, :64].tolist() == [chosen(row, 0, end, 64) for row, end in zip(logits, rows)]
    assert (buffer[6:] == 7).all() and (buffer[:, 64:] == 7).all()


def test_prefill_of_the_indexer(indexer, device):
    ops = indexer[1]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(device)
    starts, ends = torch.tensor([[0, 10, 20, 40], [300, 30, 21, 40]], dtype=torch.int32, device=device)
    buffer = torch.zeros(4, 50, dtype=torch.int32, device=device)
    ops.top_k_per_row_prefill(logits, starts, ends, buffer[:, :32], 4, *logits.stride(), 32)
    bounds = zip(logits, starts.tolist(), ends.tolist())
    assert buffer[:, :32].tolist() == [chosen(row, start, end, 32) for row, start, end in bounds]
