"""The benchmark of low precision and skip-softmax on the CPU: cases, checks, the rule, rows, tables and plot."""

import math
from dataclasses import replace

import pytest
import torch

from bench import harness, precision, skipping, sparsity, workload
from bench.cases import precision as cases
from bench.cases.attention import reference_of
from tests.test_bench import setup_of
from wrappers import fp4, trtllm_batch_context_with_kv_cache
from wrappers.own.registry import call_of

pytestmark = pytest.mark.slow

SETUP = setup_of("ours")
TOP = harness.Ceilings(700.0, 4000.0, 1300.0)


@pytest.fixture(autouse=True)
def one_set_of_inputs(monkeypatch):
    monkeypatch.setattr(harness, "L2_BYTES", 0)  # else a tiny case has hundreds


def tiny(case, n=70, batch=2):
    return replace(case, q_lens=(n,) * batch, kv_lens=(n,) * batch, heads_q=4, heads_kv=2)


TINY_SKIP = replace(tiny(cases.SKIP, 520, 1), heads_q=2, heads_kv=1)


def test_headline_names_are_those_of_the_targets():
    """What is held against bars by name."""
    shape = "b2-s8192-h32x8-d128-p64"
    wanted = {f"prefill-{kind}-{shape}" for kind in ("fp8-causal", "fp8-full", "kvfp8-causal", "kvnvfp4-causal")}
    wanted |= {f"prefill-skip{share}-causal-b1-s32768-h32x8-d128-p64" for share in (0, 75)}
    assert wanted <= {*precision.CASES}
    assert {*cases.WIDER} == {*cases.KINDS} == {cases.kind_of(name) for name in cases.PRECISION}
    for name, case in precision.CASES.items():
        heads = f"h{case.heads_q}x{case.heads_kv}-d{case.head_dim_qk}-p{case.page_size}"
        assert name == case.name and name.endswith(f"-b{case.batch}-s{max(case.kv_lens)}-{heads}")
        assert ("-causal-" in name) == case.causal and case.q_lens == case.kv_lens


TYPES = {  # kind -> of query, cache, output
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16),
    "fp8out": (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e4m3fn),
    "kvfp8": (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16),
    "kvnvfp4": (torch.bfloat16, torch.uint8, torch.bfloat16),
    "fp8kvnvfp4": (torch.float8_e4m3fn, torch.uint8, torch.bfloat16),
    "kvfp8outnvfp4": (torch.bfloat16, torch.float8_e4m3fn, "nvfp4"),
}


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_case_is_measured_beside_wider_types(kind):
    """The reference as `ours`: right in every type, and slow."""
    case = tiny(next(c for name, c in cases.PRECISION.items() if cases.kind_of(name) == kind))
    inputs = cases.make_inputs(case)
    assert (inputs["query"].dtype, inputs["kv_cache"][0].dtype, inputs["out"].dtype) == TYPES[kind]
    found = precision.measure(case, TOP, SETUP)
    assert [r.provider for r in found] == ["ours", *cases.WIDER[kind], "floor"]
    assert found[-1].tflops == (1300 if kind in ("fp8", "fp8out") else 700)
    flops = workload.shape_of(inputs).flops
    assert found[0].tflops == pytest.approx(flops / 2e9)
    assert found[-1].timing.median == pytest.approx(flops / found[-1].tflops / 1e6)


@pytest.mark.parametrize("kind", ["fp8", "fp8out", "kvfp8outnvfp4", "kvnvfp4"])
def test_wrong_outputs_of_every_type_are_refused(kind):
    case = tiny(next(c for name, c in cases.PRECISION.items() if cases.kind_of(name) == kind), 600, 1)
    inputs = cases.make_inputs(case)
    o, _ = reference_of({k: v for k, v in inputs.items() if k not in ("out", "o_sf_scale")})

    def stored(o):
        if case.out_dtype != "nvfp4":
            return o.to(inputs["out"].dtype)
        out = fp4.empty(tuple(o.shape), o.device)
        fp4.store(o, out, cases.O_SF_SCALE)
        return out

    assert workload.check(inputs, stored(o)) is None
    for wrong in (o.roll(1, 1), o * 2, torch.zeros_like(o)):
        assert workload.check(inputs, stored(wrong)).startswith("off by")
    if kind == "fp8":
        assert workload.check(inputs, stored(o + 0.06)) and workload.check(inputs, stored(o + 0.01)) is None
    if case.out_dtype != "nvfp4":
        o[300, 1, 5] = math.nan
        assert workload.check(inputs, stored(o)) == "not finite"


# ---- the rule of skip-softmax


def direct(q, k, scale, threshold, rows, keys):
    """The rule, tile by tile and block by block, causal, with as many keys as rows: ids of the blocks left out."""
    n, found = len(q), set()
    for tile in range(-(-n // rows)):
        own = range(tile * rows, min(n, tile * rows + rows))
        top = dict.fromkeys(own, -math.inf)
        for block in reversed(range(-(-n // keys))):
            now = {
                i: max([scale * float(q[i] @ k[j]) for j in range(block * keys, min(n, block * keys + keys)) if j <= i],
                       default=-math.inf)
                for i in own
            }  # fmt: skip
            if max(now.values()) == -math.inf:
                continue
            if all(now[i] == -math.inf or math.exp(min(50, now[i] - top[i])) < threshold for i in own):
                found.add((block, tile))
            else:
                top = {i: max(top[i], now[i]) for i in own}
    return found


def test_the_rule_is_that_of_a_direct_computation(monkeypatch):
    monkeypatch.setattr(sparsity, "CHUNK", 7)
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(45, 8, generator=gen) for _ in range(2))
    maxima = sparsity.block_maxima(q, k, 2.0, rows=4, keys=8)
    assert maxima.shape == (6, 12, 4) and bool((maxima[:, -1, 1:] == -math.inf).all())
    seen = (maxima > -math.inf).any(-1)
    for threshold in (1e-30, 0.01, 0.2, 2.0):
        got = sparsity.left_out(maxima, threshold)
        want = direct(q, k, 2.0, threshold, 4, 8)
        assert set(map(tuple, got.nonzero().tolist())) == want
        assert sparsity.share(maxima, threshold) == pytest.approx(len(want) / int(seen.sum()))
    assert sparsity.share(maxima, 1e-30) == 0 == sparsity.share(maxima, 0.0)
    factor = sparsity.factor_of(0.1, maxima, 45)
    assert sparsity.share(maxima, factor / 45) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("causal", [True, False])
def test_the_share_is_that_of_attention_that_skips(causal):
    inputs = cases.concentrated(replace(TINY_SKIP, causal=causal), "cpu", "heavy-tailed")
    for factor in (1.0, 30.0, 1000.0):
        p = call_of(trtllm_batch_context_with_kv_cache, **inputs, **{precision.FACTOR: factor})
        want = skipping.attend(p, sparsity.KEYS, 0).sparsity
        assert sparsity.share(sparsity.maxima_of(inputs), factor / 520) == pytest.approx(want)
    assert 0.2 < want < 0.3


def attention(inputs, rows=64, keys=128):
    """Attention by the rule, of one request."""
    factor, n = inputs[precision.FACTOR], len(inputs["query"])
    k, v = (t.float() for t in workload.tokens(inputs, 0, n))
    group, scale = inputs["query"].shape[1] // k.shape[1], inputs["bmm1_scale"]
    for h in range(inputs["query"].shape[1]):
        q = inputs["query"][:, h].float()
        gone = sparsity.left_out(sparsity.block_maxima(q, k[:, h // group], scale, True, rows, keys), factor / n)
        hidden = gone.T.repeat_interleave(rows, 0)[:n].repeat_interleave(keys, 1)[:, :n]
        logits = (scale * q @ k[:, h // group].T).masked_fill(hidden | ~torch.ones(n, n).tril().bool(), -math.inf)
        inputs["out"][:, h] = (logits.softmax(-1) @ v[:, h // group]).to(inputs["out"].dtype)
    return inputs["out"]


@pytest.mark.parametrize("rows, keys", [(64, 128), (32, 48)])
def test_what_the_rule_leaves_out_is_allowed_and_nothing_else(rows, keys):
    """In tiles of any size. Without the threshold the same output is wrong."""
    dense = cases.concentrated(TINY_SKIP, "cpu", "heavy-tailed")
    inputs = precision.own_output(dense, **{precision.FACTOR: 300.0})
    out = attention(inputs, rows, keys).clone()
    assert workload.check(inputs, out) is None and workload.check(dense, out).startswith("off by")
    strong = attention(inputs | {precision.FACTOR: 519.0}, rows, keys)
    assert workload.check(precision.own_output(dense, **{precision.FACTOR: 1.0}), strong).startswith("off by")
