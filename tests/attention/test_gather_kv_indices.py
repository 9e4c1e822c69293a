"""FlashAttention 4's gather_kv_indices: keys by position in their request, beside a loop in float64."""

import math

import pytest
import torch

import wrappers
from tests.support.emulated import emulation
from wrappers import flash_attn_func, flash_attn_varlen_func

NOBODY = -(1 << 31), -1, (1 << 31) - 1  # positions of no key
STARTS, KEY_STARTS, HEADS, SCALE = (0, 3, 3, 5), (0, 11, 20, 40), 4, 0.07


def inputs():
    """Five tokens of three requests, one of which has none."""
    gen = torch.Generator().manual_seed(0)
    q, qv, k, v = (torch.randn(*shape, generator=gen).bfloat16()
                   for shape in ((5, HEADS, 64), (5, HEADS, 512), (40, 1, 64), (40, 1, 512)))  # fmt: skip
    positions = torch.randint(-3, 24, (5, 19), generator=gen).int()
    positions[:, :3] = torch.tensor(NOBODY)
    starts, key_starts = torch.tensor(STARTS).int(), torch.tensor(KEY_STARTS).int()
    return {"q": q, "k": k, "v": v, "qv": qv, "cu_seqlens_q": starts, "cu_seqlens_k": key_starts,
            "gather_kv_indices": positions, "softmax_scale": SCALE, "return_lse": True}  # fmt: skip


def by_loop(given, causal):
    """Return out (T, H, 512) and the natural LSE (T, H), in float64."""
    q, qv, k, v = (given[name].double() for name in ("q", "qv", "k", "v"))
    out, lse = torch.zeros_like(qv), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b, (first, last) in enumerate(zip(STARTS[:-1], STARTS[1:])):
        begin, end = KEY_STARTS[b : b + 2]
        for t in range(first, last):
            seen = end - begin - (last - 1 - t if causal else 0)
            keys = [begin + x for x in given["gather_kv_indices"][t].tolist() if 0 <= x < seen]
            assert 0 < len(keys) < 17
            logits = (q[t] @ k[keys, 0].T + qv[t] @ v[keys, 0].T) * SCALE
            lse[t], out[t] = logits.logsumexp(1), logits.softmax(1) @ v[keys, 0]
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_results(kernels, causal):
    given = inputs() | {"causal": causal}
    want, want_lse = by_loop(given, causal)
    with emulation() if kernels else torch.no_grad() as fake:
        out, lse = flash_attn_varlen_func(**given)
    assert lse.shape == (5, HEADS) and (not kernels or fake.specs[0].kv.source == "slots")
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_a_token_without_keys_and_the_other_name_of_qv():
    given = inputs()
    given["q_v"] = given.pop("qv")
    given["gather_kv_indices"] = torch.tensor([NOBODY] * 5).int()
    out, lse = flash_attn_varlen_func(**given)
    assert not out.any() and (lse == -math.inf).all()


def test_requests_of_one_length():
    given = inputs()
    starts = {"cu_seqlens_q": torch.tensor([0, 2, 4]).int(), "cu_seqlens_k": torch.tensor([0, 20, 40]).int()}
    rows = {name: given[name][:4] for name in ("q", "qv", "gather_kv_indices")}
    want, want_lse = flash_attn_varlen_func(**given | starts | rows, causal=True)
    batch = {name: rows[name].unflatten(0, (2, 2)) for name in rows}
    batch |= {name: given[name].unflatten(0, (2, 20)) for name in ("k", "v")}
    into = torch.zeros(2, 2, HEADS, 512).bfloat16()
    out, lse = flash_attn_func(**batch, softmax_scale=SCALE, causal=True, return_lse=True, out=into)
    assert out is into and torch.equal(out.flatten(0, 1), want) and torch.equal(lse.flatten(0, 1), want_lse)


PAGED = {"block_table": torch.zeros(3, 4).int(), "seqused_k": torch.ones(3).int(),
         "k": torch.zeros(9, 8, 1, 64).bfloat16(), "v": torch.zeros(9, 8, 1, 512).bfloat16()}  # fmt: skip
REFUSED = (
    ({"qv": None}, NotImplementedError, r"gather_kv_indices: \(5, 19\), not supported without qv"),
    ({"window_size": (3, 0)}, NotImplementedError, r"window_size: 3, not supported with gather_kv_indices"),
    ({"softcap": 5.0}, NotImplementedError, r"softcap: 5.0, not supported with gather_kv_indices"),
    ({"causal": True, "attention_chunk": 4}, NotImplementedError, r"attention_chunk: 4, not supported"),
    ({"gather_kv_indices": torch.zeros(4, 9).int()}, ValueError, r"gather_kv_indices: shape \(4, 9\), must be"),
    ({"gather_kv_indices": torch.zeros(5, 9).long()}, TypeError, r"gather_kv_indices: dtype torch.int64, must be"),
    ({"gather_kv_indices": 3}, TypeError, r"gather_kv_indices: int, must be a torch.Tensor"),
    (PAGED, NotImplementedError, r"gather_kv_indices: \(5, 19\), not supported with a page table"),
)  # fmt: skip


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_refusals(change, error, message):
    with emulation() as fake, pytest.raises(error, match=f"^{message}"):
        flash_attn_varlen_func(**inputs() | change)
    assert not fake.launches


def test_other_functions_refuse_it():
    given = inputs()
    with pytest.raises(NotImplementedError, match="^gather_kv_indices: given, not supported by bind, must be None"):
        wrappers.bind(flash_attn_varlen_func, **given)
    q, kv = torch.zeros(1, 2, 4, 64).half(), torch.zeros(1, 8, 4, 64).half()
    with pytest.raises(NotImplementedError, match="^gather_kv_indices: Tensor, not supported, must be None"):
        wrappers.flash_attn_with_kvcache(q, kv, kv, gather_kv_indices=torch.zeros(1, 2, 9).int())
    with pytest.raises(NotImplementedError, match="^qv: Tensor, not supported, must be None"):
        flash_attn_func(q, kv, kv, qv=q, gather_kv_indices=None)
    wide = torch.zeros(2, 9, 1, 64).bfloat16()[:, :7]
    batch = {"q": wide[:, :2], "qv": torch.zeros(2, 2, 1, 512).bfloat16(), "v": torch.zeros(2, 7, 1, 512).bfloat16()}
    with pytest.raises(ValueError, match=r"^q: strides .*, the first must be 2 times the second"):
        flash_attn_func(**batch, k=wide, gather_kv_indices=torch.zeros(2, 2, 9).int())
