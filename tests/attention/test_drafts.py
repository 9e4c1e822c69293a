"""Masks of drafts in decoding: each row against attention on the keys that its mask leaves, and xqa's against those."""

from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode_wrapper import PLAIN, decode_of
from wrappers import trtllm_batch_decode_with_kv_cache, xqa


def tree(q_len, seed=0):
    """(q_len, q_len) bool: a draft sees itself and some of the others."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(q_len, q_len, generator=gen) < 0.4) | torch.eye(q_len, dtype=torch.bool)


def packed(masks):
    """uint16 (sum of rows, W) of masks (q_len, q_len); the bits behind q_len are set, as garbage."""
    most = max(len(m) for m in masks)
    width = (most + 31) // 32 * 32
    rows = torch.cat([torch.nn.functional.pad(m, (0, width - len(m)), value=True) for m in masks])
    words = (rows.unflatten(1, (-1, 16)).int() << torch.arange(16, dtype=torch.int32)).sum(-1)
    return words.to(torch.uint16)


@pytest.mark.parametrize("q_len", [1, 5, 33, 64])
@pytest.mark.parametrize("form", ["equal", "ragged", "causal"])
def test_masks_of_drafts(launched, q_len, form):
    """Each row against attention on the keys that its mask leaves."""
    q_lens = (q_len, q_len, 0, 3) if form == "ragged" else (q_len, q_len)
    lens = (q_len + 20, q_len, 7, 90)[: len(q_lens)]
    masks = [torch.ones(n, n).bool().tril() if form == "causal" else tree(n, b) for b, n in enumerate(q_lens)]
    case = replace(PLAIN, q_lens=q_lens, kv_lens=lens)
    inputs = decode_of(case, mask=packed(masks))
    if form != "ragged":
        inputs |= {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len}
        inputs["mask"] = inputs["mask"].unflatten(0, (2, q_len))
    o, lse = trtllm_batch_decode_with_kv_cache(**inputs)
    if form == "causal":
        want = trtllm_batch_decode_with_kv_cache(**decode_of(case))
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    expected = draft_rows(inputs, case, masks)
    torch.testing.assert_close(o.double(), expected, rtol=1e-2, atol=1e-2)


def draft_rows(inputs, case, masks):
    """O of every token in fp64, from the keys that it sees."""
    k_pool, v_pool = inputs["kv_cache"]
    out, at = [], 0
    for b, (q_len, length) in enumerate(zip(case.q_lens, case.kv_lens)):
        ids = inputs["block_tables"][b, : -(-length // case.page_size)].long()
        k, v = (t[ids].transpose(1, 2).flatten(0, 1)[:length].double() for t in (k_pool, v_pool))
        k, v = (t.repeat_interleave(case.heads_q // case.heads_kv, 1) for t in (k, v))
        for row in range(q_len):
            keep = torch.cat([torch.ones(length - q_len).bool(), masks[b][row]])
            logits = torch.einsum("hd,nhd->hn", inputs["query"][at].double(), k[keep]) * inputs["bmm1_scale"]
            p = torch.cat([logits, inputs["sinks"][:, None].double()], 1).softmax(1)[:, :-1]
            out.append(torch.einsum("hn,nhd->hd", p, v[keep]))
            at += 1
    return torch.stack(out)


@pytest.mark.slow
def test_drafts_and_other_lengths_under_compile():
    torch.compiler.reset()
    compiled = torch.compile(trtllm_batch_decode_with_kv_cache, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, q_len in ((3, 5), (2, 33), (4, 2)):
        case = replace(PLAIN, q_lens=(q_len,) * batch, kv_lens=(q_len + 20,) * batch)
        mask = packed([tree(q_len, b) for b in range(batch)]).unflatten(0, (batch, q_len))
        given = {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len, "mask": mask}
        want = trtllm_batch_decode_with_kv_cache(**decode_of(case, **given))
        assert all(map(torch.equal, compiled(**decode_of(case, **given)), want))


@pytest.mark.parametrize("ragged", [False, True])
def test_xqa_drafts(launched, ragged):
    """As the decode function does it, with implicit 1 / sqrt(D)."""
    q_lens = (5, 0, 2) if ragged else (5, 5, 5)
    case = replace(PLAIN, q_lens=q_lens, kv_lens=(40, 9, 5), dtype="fp16", layout="NHD")
    inputs = decode_of(case, mask=packed([tree(n, b) for b, n in enumerate(q_lens)]))
    want, _ = trtllm_batch_decode_with_kv_cache(**inputs)
    want, q, mask = want.clone(), inputs["query"], inputs["mask"]
    extra = {"q_cu_seq_lens": inputs["cum_seq_lens_q"]}
    if not ragged:
        q, mask, extra = q.unflatten(0, (3, 1, 5)), mask.unflatten(0, (3, 5)), {}
    for dtype in (torch.float16, torch.float8_e4m3fn):
        out = torch.zeros(q.shape, dtype=dtype)
        xqa(q, *inputs["kv_cache"], inputs["block_tables"], inputs["seq_lens"][:, None], out, None, None, 2, 16,
            sinks=inputs["sinks"].view(2, -1), q_seq_len=5, mask=mask, rcp_out_scale=0.5, **extra)  # fmt: skip
        if dtype == torch.float16:
            torch.testing.assert_close(out.view(want.shape), want, rtol=1e-3, atol=1e-3)
        else:
            torch.testing.assert_close(out.view(want.shape).float(), want.float() / 2, rtol=0.07, atol=1e-2)
