"""Chunked attention: a token sees the keys of its own chunk of positions, up to its own position."""

import pytest
import torch

from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from tests.support.flash_attn_batches import Batch
from wrappers import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

MEMORY = ROOT / "build" / "simulated"


def call(batch, chunk, form):
    if form == "ragged":
        options = {"cu_seqlens_k": batch.k_starts}
        return flash_attn_varlen_func(
            batch.q, batch.k, batch.v, batch.q_starts, max_seqlen_q=batch.max_q, causal=True, attention_chunk=chunk,
            **options,
        )  # fmt: skip
    options = {"cu_seqlens_q": batch.q_starts, "max_seqlen_q": batch.max_q, "block_table": batch.table}
    return flash_attn_with_kvcache(
        batch.q, *batch.paged, cache_seqlens=batch.lens, causal=True, attention_chunk=chunk, **options
    )


@pytest.mark.parametrize("form", ["ragged", "paged"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 1 << 20])
def test_a_token_sees_its_own_chunk(chunk, form):
    batch = Batch(q_lens=(3, 0, 1, 20, 5), kv_lens=(9, 4, 17, 20, 2))
    got = call(batch, chunk, form).double()
    torch.testing.assert_close(got, batch.want(causal=True, chunk=chunk)[0], rtol=2e-3, atol=2e-3)


def test_zero_is_off():
    q = torch.randn(2, 9, 4, 64).half()
    assert torch.equal(flash_attn_func(q, q, q, causal=True, attention_chunk=0), flash_attn_func(q, q, q, causal=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attention_chunk": 16, "causal": False}, NotImplementedError, "attention_chunk: 16, not supported without a"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk: -1, must be"),
        ({"attention_chunk": 2.0}, TypeError, "attention_chunk: 2.0, must be"),
        ({"attention_chunk": True}, TypeError, "attention_chunk: True, must be"),
    ],
)
def test_refusals(change, error, message):
    q = torch.randn(2, 9, 4, 64).half()
    with pytest.raises(error, match=f"^{message}"):
        flash_attn_func(q, q, q, **{"causal": True} | change)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_kernels_serve_it(arch):
    q = torch.zeros(2, 300, 8, 128).bfloat16()
    for rows in (1, 300):
        options = {"causal": True, "attention_chunk": 64, "function": flash_attn_func, "arch": arch}
        assert "c_" in explain(q[:, :rows], q, q, **options).runs


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "chunk", "form"),
    [((150, 3), (333, 61), 100, "ragged"), ((1, 5), (700, 83), 96, "paged")],
    ids=["prefill", "decode"],
)
def test_kernels_in_the_simulator(q_lens, kv_lens, chunk, form):
    batch = Batch(q_lens, kv_lens, page=16, dtype=torch.bfloat16, heads=(2, 1))
    with simulated(ARCH, [], 2, memory=MEMORY):
        got = call(batch, chunk, form)
    assert distance(got, batch.want(causal=True, chunk=chunk)[0].float(), 2e-2) <= 1
