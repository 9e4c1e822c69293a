"""Index tensors that hold anything, on a Hopper GPU: no guard around a tensor changes, no launch fails or hangs, rows
of one request are what the reference says, and the next call finds everything as it was."""

from dataclasses import replace

import pytest
import torch

from bench.cases import hostile, topk
from bench.cases.attention import LSE_TOLERANCE, AttentionCase
from bench.cases.topk import TopKCase
from tests.support import gpu
from tests.support.gpu import CUDA

SEEDS = range(3)
OUTPUTS = ("out", "lse", "output")
BASE = AttentionCase(
    "hostile", q_lens=(3, 0, 130, 17), kv_lens=(1400, 9, 400, 0), heads_q=8, heads_kv=2, spare_pages=0, sink=True,
    separate_tables=True,
)  # fmt: skip
D128, D256 = {"head_dim_qk": 128, "head_dim_vo": 128}, {"head_dim_qk": 256, "head_dim_vo": 256}
FEW = {"q_lens": (3, 0, 5, 7)}
DECODE = replace(BASE, function="decode", q_lens=(1, 0, 2, 3), kv_lens=(9000, 9, 400, 30))
WIDE = {"q_lens": (3, 0, 5, 40)}
ROWS, FIVE = {"page_size": 1}, {"page_size": 5}
TABLE: tuple[str, ...] = ()
CSR, RAGGED, MASK = ("csr",), ("ragged",), ("csr", "mask")
CALLS: dict[str, tuple[AttentionCase, tuple[str, ...]]] = {  # case, forms
    "prefill": (BASE, TABLE),
    "prefill full": (replace(BASE, causal=False), TABLE),
    "prefill general": (replace(BASE, window_left=100, soft_cap=9.0), TABLE),
    "prefill packed": (replace(BASE, **FEW), TABLE),
    "prefill d128": (replace(BASE, page_size=64, **D128), TABLE),
    "prefill d128 packed": (replace(BASE, page_size=8, **D128, **FEW), TABLE),
    "prefill d192": (replace(BASE, head_dim_qk=192, head_dim_vo=128), TABLE),
    "prefill d256": (replace(BASE, **D256), TABLE),
    "prefill rows": (replace(BASE, **ROWS), TABLE),
    "prefill packed rows": (replace(BASE, **ROWS, **FEW), TABLE),
    "prefill csr": (BASE, CSR),
    "prefill csr rows": (replace(BASE, **ROWS), CSR),
    "prefill csr by 5 d128": (replace(BASE, **FIVE, **D128), CSR),
    "prefill csr by 300 general": (replace(BASE, page_size=300, window_left=100, soft_cap=9.0), CSR),
    "prefill csr by 5 packed d128": (replace(BASE, **FIVE, **D128, **FEW), CSR),
    "prefill csr alibi": (replace(BASE, **FIVE), ("csr", "alibi")),
    "prefill ragged": (BASE, RAGGED),
    "prefill ragged packed d128": (replace(BASE, **D128, **FEW), RAGGED),
    "prefill ragged d256": (replace(BASE, **D256), RAGGED),
    "prefill mask": (BASE, MASK),
    "prefill mask d128 packed": (replace(BASE, **D128, **FEW), MASK),
    "prefill mask rows window": (replace(BASE, **ROWS, window_left=100), MASK),
    "prefill mask ragged": (BASE, ("ragged", "mask")),
    "prefill ranges": (BASE, ("csr", "ranges")),
    "prefill prefix": (BASE, ("csr", "prefix")),
    "decode": (DECODE, TABLE),
    "decode d128": (replace(DECODE, page_size=64, **D128), TABLE),
    "decode d256": (replace(DECODE, window_left=300, **D256), TABLE),
    "decode 16 rows": (replace(DECODE, **WIDE), TABLE),
    "decode drafts": (replace(DECODE, drafts=True, **WIDE), TABLE),
    "decode invariant": (replace(DECODE, invariant=True, **WIDE), TABLE),
    "decode e4m3": (replace(DECODE, kv_dtype="fp8", **D128), TABLE),
    "decode nvfp4": (replace(DECODE, kv_dtype="nvfp4", **D128), TABLE),
    "decode nvfp4 d64": (replace(DECODE, kv_dtype="nvfp4", interleaved=True, **WIDE), TABLE),
    "decode nvfp4 invariant": (replace(DECODE, kv_dtype="nvfp4", invariant=True, **D128), TABLE),
    "decode rows": (replace(DECODE, **ROWS), TABLE),
    "decode csr": (DECODE, CSR),
    "decode csr by 5 d128": (replace(DECODE, **FIVE, **D128), CSR),
    "decode csr by 5 e4m3": (replace(DECODE, **FIVE, kv_dtype="fp8", **D128), CSR),
    "decode csr by 5 nvfp4": (replace(DECODE, **FIVE, kv_dtype="nvfp4", **D128), CSR),
    "decode ragged": (DECODE, RAGGED),
    "xqa": (
        replace(
            DECODE, function="xqa", layout="NHD", lse=False, separate_tables=False, kv_dtype="fp8", drafts=True
        ),
        TABLE,
    ),
}  # fmt: skip


def run(case, p, inputs):
    """Copies of (o, lse or None)."""
    if p.requests.form == "table":
        return gpu.run(case.function, inputs)
    return tuple(t.clone() for t in hostile.served(p)(**inputs))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (_, in_forms) in CALLS.items() for kind in hostile.kinds(in_forms)]
)
def test_attention(name, kind):
    case, in_forms = CALLS[name]
    plain = hostile.made(case, in_forms, CUDA)
    before = run(case, plain, hostile.arguments(case, plain))
    for seed in SEEDS:
        p = hostile.spoilt(case, hostile.made(case, in_forms, CUDA, seed), kind, seed)
        o, lse, owners = hostile.expected(p)
        with hostile.guarded(hostile.arguments(case, p), OUTPUTS) as inputs:
            got, got_lse = run(case, p, inputs)
        own = owners == 1
        gpu.close((got[own], None), (o[own], None), case.tolerance, case.tolerance, (kind, seed))
        assert got[owners == 0].isnan().all(), (kind, seed, "rows of no request")
        if got_lse is not None:
            torch.testing.assert_close(got_lse[own], lse[own], rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    gpu.same(run(case, plain, hostile.arguments(case, plain)), before, "the call behind")


def any_bytes(t, gen):
    """Indices of any bytes, half of them near 0."""
    wild = torch.randint(-(1 << 31), 1 << 31, t.shape, generator=gen)
    near = torch.randint(-5, 2000, t.shape, generator=gen)
    return torch.where(torch.rand(t.shape, generator=gen) < 0.5, wild, near).to(t)


TOPK = {  # one CTA a row, a cluster, streamed
    "one CTA": {"rows": 9, "width": 3000},
    "cluster": {"rows": 6, "width": 70_000},
    "streamed": {"rows": 6, "width": 800_000},
}
INDICES = {"lengths", "row_starts", "row_ends", "seq_lens", "offsets", "src_page_table", "row_to_batch"}


@pytest.mark.parametrize("dtype", topk.DTYPES)
@pytest.mark.parametrize("rows", TOPK)
@pytest.mark.parametrize("function", [f for f in topk.FUNCTIONS if f != topk.TOP_K])
def test_topk(function, rows, dtype):
    case = TopKCase(function, dtype, k=700, next_n=3, starts=True, batch_map=True, page_size=4, pad=5, **TOPK[rows])
    for seed in SEEDS:
        gen = torch.Generator().manual_seed(seed)
        inputs = topk.make_inputs(case, CUDA, seed)
        inputs |= {name: any_bytes(inputs[name], gen) for name in INDICES & inputs.keys() if inputs[name] is not None}
        if "page_table_row_starts" in inputs:
            inputs["page_table_row_starts"] = any_bytes(inputs["page_table_row_starts"], gen)
        inputs = {name: t.contiguous() if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        if "stride0" in inputs:
            inputs["stride0"] = inputs["logits"].stride(0)
        with topk.on_reference():
            want = topk.call(function, inputs)
        with hostile.guarded(inputs, topk.OUTPUTS[function]) as given:
            got = topk.call(function, given)
        topk.same(got, want, (seed,))
