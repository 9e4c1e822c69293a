"""FlashInfer's sparse attention of prompts: FlashMLA's results in its form, and documents in one batch."""

import math

import pytest
import torch

import wrappers
from tests.support.emulated import emulation
from tests.support.good_calls import inputs_of

NAME, VARLEN = "dsa_sparse_attention", "dsa_sparse_attention_varlen"
NOBODY = -(1 << 31), (1 << 31) - 1  # positions of no key


def logits_and_values(given, token, keys):
    """Logits (H, keys) and values of these rows, in float64."""
    q, kv = (torch.cat((given[a], given[b]), -1).double() for a, b in (("q_latent", "q_rope"), ("kv_latent", "k_rope")))
    return q[token] @ kv[keys].T * 576**-0.5, kv[keys, :512]


@pytest.mark.parametrize("kernels", [False, True])
def test_results_are_those_of_flash_mla(kernels):
    """Keys may be columns of one tensor or two tensors."""
    given, lens = inputs_of(NAME), torch.tensor([16, 0, 3, 9, 16]).int()
    q, kv = torch.cat((given["q_latent"], given["q_rope"]), 2), torch.cat((given["kv_latent"], given["k_rope"]), 1)
    want, _, lse = wrappers.flash_mla_sparse_fwd(q, kv[:, None], given["indices"][:, None], 576**-0.5, topk_length=lens)
    parts = {"q_latent": q[..., :512], "q_rope": q[..., 512:], "kv_latent": kv[:, :512], "k_rope": kv[:, 512:]}
    for same in ({}, parts):
        change = same | {"topk_length": lens, "return_lse": True}
        if kernels:
            with emulation():
                out, found = wrappers.dsa_sparse_attention(**given | change)
            torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        else:
            out, found = wrappers.dsa_sparse_attention(**given | change)
            assert torch.equal(out, want)
        torch.testing.assert_close(found, torch.where(lse == math.inf, -math.inf, lse))
    assert torch.equal(wrappers.dsa_sparse_attention(**given | {"topk_length": lens}), want)


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    """Positions count from the beginning of a document; the one of no key, and a token of no document, see nothing."""
    given = inputs_of(VARLEN) | {"causal": causal}
    q_starts, k_starts = [0, 3, 3, 4], [0, 11, 20, 40]
    given |= {"cu_seqlens_q": torch.tensor(q_starts).int(), "cu_seqlens_k": torch.tensor(k_starts).int()}
    given["gather_kv_indices"][:, :2] = torch.tensor(NOBODY)
    out, lse = wrappers.dsa_sparse_attention_varlen(**given, return_lse=True)
    for token, document in enumerate((0, 0, 0, 2)):
        begin, end = k_starts[document : document + 2]
        seen = end - begin - (q_starts[document + 1] - 1 - token) * causal
        keys = [begin + x for x in given["gather_kv_indices"][token].tolist() if 0 <= x < seen]
        assert 0 < len(keys) < 14
        logits, values = logits_and_values(given, token, keys)
        torch.testing.assert_close(lse[token], logits.logsumexp(1).float())
        torch.testing.assert_close(out[token].double(), logits.softmax(1) @ values, rtol=1e-2, atol=1e-2)
    assert not out[4].any() and bool((lse[4] == -math.inf).all())


@pytest.mark.parametrize("ends", [[0], [0, 5], [5, 0], [*NOBODY], [NOBODY[1], NOBODY[0]], [3, 900]])
def test_any_numbers_may_end_a_document(ends):
    """Rows that do not exist are never read."""
    given, ends = inputs_of(VARLEN), torch.tensor(ends).int()
    for q_ends in (ends, torch.tensor([0, 5]).int()[: len(ends)]):
        out = wrappers.dsa_sparse_attention_varlen(**given | {"cu_seqlens_q": q_ends, "cu_seqlens_k": ends})
        assert out.isfinite().all()


@pytest.mark.parametrize("name", [NAME, VARLEN])
def test_passes_of_the_backward_are_a_hint(name):
    given, function = inputs_of(name), getattr(wrappers, name)
    assert torch.equal(function(**given, key_passes=3), function(**given))
    for bad, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=f"key_passes: {bad}, must be"):
            function(**given, key_passes=bad)


REFUSED = [
    ({"q_latent": torch.zeros(5, 8).bfloat16()}, ValueError, r"q_latent: shape \(5, 8\), must have 3 dimensions"),
    ({"q_rope": torch.zeros(5, 8, 32).bfloat16()}, ValueError, "q_rope: shape"),
    ({"kv_latent": torch.zeros(40, 1, 512).bfloat16()}, ValueError, "kv_latent: shape .* must have 2 dimensions"),
    ({"k_rope": torch.zeros(39, 64).bfloat16()}, ValueError, "k_rope: shape"),
    ({"indices": torch.zeros(4, 16).int()}, ValueError, r"indices: shape \(4, 16\), must be \(5, 16\)"),
    ({"indices": torch.zeros(5, 16).long()}, TypeError, "indices: dtype torch.int64"),
    ({"indices": torch.zeros(5, 16, device="meta").int()}, ValueError, "^indices: device meta, must be that of q"),
    ({"topk_length": torch.zeros(4).int()}, ValueError, r"topk_length: shape \(4,\), must be \(5,\)"),
    ({"dkv_acc": torch.zeros(40, 576)}, NotImplementedError, "dkv_acc: Tensor, not supported, must be None"),
    ({"dkv_dst_map": torch.zeros(40).int()}, NotImplementedError, "dkv_dst_map: Tensor, not supported"),
    ({"backend": "trtllm"}, ValueError, "backend: 'trtllm', must be 'cake'"),
]  # fmt: skip
REFUSED_DOCUMENTS = [
    ({"gather_kv_indices": torch.zeros(4, 16).int()}, ValueError, r"gather_kv_indices: shape \(4, 16\), must be"),
    ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, "cu_seqlens_q: 0 entries, must be one more"),
    ({"cu_seqlens_k": torch.zeros(5).int()}, ValueError, r"cu_seqlens_k: shape \(5,\), must be \(3,\)"),
    ({"cu_seqlens_k": torch.zeros(3).long()}, TypeError, "cu_seqlens_k: dtype torch.int64"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: -1"),
    ({"causal": 1}, TypeError, "causal: 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [(NAME, *row) for row in REFUSED] + [(VARLEN, *row) for row in REFUSED_DOCUMENTS],
)
def test_refusals(name, change, error, message):
    with pytest.raises(error, match=message):
        getattr(wrappers, name)(**inputs_of(name) | change)
