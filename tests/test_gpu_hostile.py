"""Index tensors that hold anything, on a Hopper GPU: no guard around a tensor changes, no launch fails or hangs, rows
of one request are what the reference says, and the next call finds everything as it was."""

from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import hostile, topk
from bench.cases.attention import LSE_TOLERANCE, AttentionCase
from bench.cases.topk import TopKCase
from tests import gpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device"
)

CUDA = torch.device("cuda", 0)
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
CALLS = {
    "prefill": BASE,
    "prefill full": replace(BASE, causal=False),
    "prefill general": replace(BASE, window_left=100, soft_cap=9.0),
    "prefill packed": replace(BASE, **FEW),
    "prefill d128": replace(BASE, page_size=64, **D128),
    "prefill d128 packed": replace(BASE, page_size=8, **D128, **FEW),
    "prefill d192": replace(BASE, head_dim_qk=192, head_dim_vo=128),
    "prefill d256": replace(BASE, **D256),
    "decode": DECODE,
    "decode d128": replace(DECODE, page_size=64, **D128),
    "decode d256": replace(DECODE, window_left=300, **D256),
    "decode 16 rows": replace(DECODE, **WIDE),
    "decode drafts": replace(DECODE, drafts=True, **WIDE),
    "decode invariant": replace(DECODE, invariant=True, **WIDE),
    "decode e4m3": replace(DECODE, kv_dtype="fp8", **D128),
    "decode nvfp4": replace(DECODE, kv_dtype="nvfp4", **D128),
    "decode nvfp4 d64": replace(DECODE, kv_dtype="nvfp4", interleaved=True, **WIDE),
    "decode nvfp4 invariant": replace(DECODE, kv_dtype="nvfp4", invariant=True, **D128),
    "xqa": replace(DECODE, function="xqa", layout="NHD", lse=False, separate_tables=False, kv_dtype="fp8", drafts=True),
}


@pytest.mark.parametrize("kind", hostile.KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_attention(name, kind):
    case = CALLS[name]
    plain = hostile.arguments(case, cases.make_problem(case, CUDA))
    before = gpu.run(case.function, plain)
    for seed in SEEDS:
        p = hostile.spoilt(case, cases.make_problem(case, CUDA, seed), kind, seed)
        o, lse, owners = hostile.expected(p)
        with hostile.guarded(hostile.arguments(case, p), OUTPUTS) as inputs:
            got, got_lse = gpu.run(case.function, inputs)
        own = owners == 1
        gpu.close((got[own], None), (o[own], None), case.tolerance, case.tolerance, (kind, seed))
        assert got[owners == 0].isnan().all(), (kind, seed, "rows of no request")
        if got_lse is not None:
            torch.testing.assert_close(got_lse[own], lse[own], rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    gpu.same(gpu.run(case.function, plain), before, "the call behind")


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
