"""FlashInfer's indexer in bf16, on the CPU: against a loop over tokens, ties, segments, and bad arguments."""

import math

import pytest
import torch

import wrappers
from tests.support.emulated import emulation
from tests.support.good_calls import inputs_of
from wrappers.indexer import selection

NAME = "dsa_indexer_topk"
HOSTILE = -(1 << 31), (1 << 31) - 1


def seen_by(given, token):
    """The segment of a token, and how many of its keys the token sees."""
    q_ends, k_ends = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    for segment, (begin, end) in enumerate(zip(q_ends, q_ends[1:], strict=False)):
        if begin <= token < end:
            keys, ratio = k_ends[segment + 1] - k_ends[segment], given.get("ratio", 1)
            offset = 0 if ratio > 1 else keys - (end - begin)
            if given.get("q_causal_offsets") is not None:
                offset = given["q_causal_offsets"][segment].item()
            return segment, min(max((offset + token - begin + 1) // ratio, 0), keys)
    return 0, 0


def by_loop(given, count):
    """Indices and scores in float64: of equal scores, the last keys."""
    q, k, w = (given[name].double() for name in ("q", "k", "w"))
    indices = torch.full((len(q), count), -1).int()
    scores = torch.full((len(q), count), -math.inf).double()
    for token in range(len(q)):
        segment, seen = seen_by(given, token)
        keys = k[int(given["cu_seqlens_k"][segment]) :][:seen]
        found = ((q[token] @ keys.T * given["softmax_scale"]).clamp(min=0) * w[token][:, None]).sum(0)
        last_first = found.flip(0).sort(descending=True, stable=True).indices[:count]
        best = (seen - 1 - last_first).sort().values
        indices[token, : len(best)], scores[token, : len(best)] = best.int(), found[best]
    return indices, scores


CHANGES = {
    "tail": {},
    "few keys": {"top_k": 40},
    "offsets": {"q_causal_offsets": torch.tensor([-2, 19])},
    "far offsets": {"q_causal_offsets": torch.tensor([-(1 << 40), 1 << 40])},
    "farthest offsets": {"q_causal_offsets": torch.tensor([-(1 << 63), (1 << 63) - 1])},
    "compressed": {"ratio": 3, "q_causal_offsets": torch.tensor([20, 70])},
    "compressed, no offsets": {"ratio": 2},
    "bound": {"max_seqlen_k": 29},
    "one head": {"q": torch.ones(5, 1, 128).bfloat16(), "w": -torch.ones(5, 1)},
    "a token outside": {"cu_seqlens_q": torch.tensor([1, 2, 4]).int()},
    "no keys": {"cu_seqlens_k": torch.zeros(3).int()},
    "ties": {"k": torch.zeros(40, 128).bfloat16()},
    "rows of a wider tensor": {"k": torch.randn(40, 176).bfloat16()[:, :128]},
}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_against_a_loop(change, kernels, monkeypatch):
    """In one pass, and token by token."""
    given = inputs_of(NAME) | CHANGES[change]
    want, exact = by_loop(given, given["top_k"])
    for scratch in (1 << 20, 0):
        monkeypatch.setattr(wrappers.flashinfer.dsa_indexer, "SCRATCH", scratch)
        if kernels:
            with emulation():
                indices, scores = wrappers.dsa_indexer_topk(**given)
        else:
            indices, scores = wrappers.dsa_indexer_topk(**given)
        assert torch.equal(indices, want)
        torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)


def test_outputs_that_are_given():
    given = inputs_of(NAME)
    wide = torch.zeros(5, 20).int(), torch.zeros(5, 20)
    indices, scores = (t[:, :16] for t in wide)
    found = wrappers.dsa_indexer_topk(**given, indices=indices, scores=scores)
    assert found[0].data_ptr() == indices.data_ptr() and found[1].data_ptr() == scores.data_ptr()
    assert not any(t[:, 16:].any() for t in wide)
    assert all(map(torch.equal, found, wrappers.dsa_indexer_topk(**given)))


@pytest.mark.parametrize("kernels", [False, True])
def test_no_keys_at_all(kernels):
    given = inputs_of(NAME)
    given |= {"k": given["k"][:0], "indices": torch.full((5, 16), 7).int(), "scores": torch.full((5, 16), 7.0)}
    with emulation() if kernels else torch.no_grad():
        indices, scores = wrappers.dsa_indexer_topk(**given)
    assert bool((indices == -1).all()) and bool((scores == -math.inf).all())


@pytest.mark.parametrize("ends", [[0], [0, 5], [5, 0], [*HOSTILE], [HOSTILE[1], HOSTILE[0]], [3, 900]])
def test_any_numbers_may_end_a_segment(ends):
    """Keys that do not exist are neither read nor chosen."""
    given, ends = inputs_of(NAME), torch.tensor(ends).int()
    for q_ends in (ends, torch.tensor([0, 5]).int()[: len(ends)]):
        indices, scores = wrappers.dsa_indexer_topk(**given | {"cu_seqlens_q": q_ends, "cu_seqlens_k": ends})
        assert bool(((indices >= -1) & (indices < 40)).all()) and not bool(scores.isnan().any())


def test_no_workspace():
    assert wrappers.dsa_indexer_topk_workspace_size(1 << 20, 1 << 20, 4, top_k=4096) == 0 < selection.SCRATCH
    sizes = {"num_queries": 5, "num_keys": 40, "num_segments": 2}
    for bad in ({"num_keys": -1}, {"top_k": 0}, {"ratio": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}: .*must be at least"):
            wrappers.dsa_indexer_topk_workspace_size(**sizes | bad)
    for bad in ({"num_queries": 1.5}, {"num_segments": "2"}, {"device": 1.5}):
        with pytest.raises(TypeError, match=f"{next(iter(bad))}: .*must be"):
            wrappers.dsa_indexer_topk_workspace_size(**sizes | bad)


def test_no_workspace_in_the_signature_of_0_7_2():
    """Its positions are top_k and device."""
    size, cpu = wrappers.dsa_indexer_topk_workspace_size, torch.device("cpu")
    assert size() == size(128) == size(128, cpu) == size(top_k=128, device=cpu) == size(128, device=cpu) == 0
    for bad, error, message in ((0, ValueError, "top_k: 0"), (1.5, TypeError, "top_k: 1.5")):
        with pytest.raises(error, match=f"{message}, must be"):
            size(bad)
    with pytest.raises(TypeError, match="device: 1.5, must be"):
        size(128, 1.5)


REFUSED = [
    ({"q": torch.zeros(5, 8, 128)}, TypeError, "q: dtype torch.float32"),
    ({"k": torch.zeros(40, 64).bfloat16()}, ValueError, r"k: shape \(40, 64\), must be \(40, 128\)"),
    ({"w": torch.zeros(5, 8).bfloat16()}, TypeError, "w: dtype torch.bfloat16"),
    ({"cu_seqlens_q": torch.zeros(3).long()}, TypeError, "cu_seqlens_q: dtype torch.int64"),
    ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, "cu_seqlens_q: 0 entries, must be one more"),
    ({"cu_seqlens_k": torch.zeros(4).int()}, ValueError, r"cu_seqlens_k: shape \(4,\), must be \(3,\)"),
    ({"q_causal_offsets": torch.zeros(2).int()}, TypeError, "q_causal_offsets: dtype torch.int32"),
    ({"q_causal_offsets": torch.zeros(3).long()}, ValueError, r"q_causal_offsets: shape \(3,\), must be \(2,\)"),
    ({"top_k": 0}, ValueError, "top_k: 0, must be at least 1"),
    ({"ratio": 0}, ValueError, "ratio: 0, must be at least 1"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale: 0.0, must be positive"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: -1, must be at least 0"),
    ({"indices": torch.zeros(5, 15).int()}, ValueError, r"indices: shape \(5, 15\), must be \(5, 16\)"),
    ({"scores": torch.zeros(5, 16).half()}, TypeError, "scores: dtype torch.float16"),
    ({"workspace_buffer": 7}, TypeError, "workspace_buffer: int, must be a torch.Tensor"),
    ({"backend": "auto"}, ValueError, "backend: 'auto', must be 'cake'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        wrappers.dsa_indexer_topk(**inputs_of(NAME) | change)
