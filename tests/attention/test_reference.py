"""The reference against torch's own attention, and against a per-row softmax in float64."""

import math
from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from tests.support.flash_attn_batches import oracle
from wrappers import fp4, reference

LOG2E = math.log2(math.e)


def random_qkv(m, n, heads_q, heads_kv, dim, dim_vo=None, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = (m, heads_q, dim), (n, heads_kv, dim), (n, heads_kv, dim_vo or dim)
    return [torch.randn(*shape, generator=gen) for shape in shapes]


def visible(i, m, n, causal, window_left):
    """Keys that row i of m keeps among n."""
    p = i + n - m
    return [j for j in range(n) if (not causal or j <= p) and (window_left < 0 or j >= p - window_left)]


def brute(q, k, v, scale, causal, window_left=-1, soft_cap=0.0, sinks=None):
    """Return o and lse, of base 2, of float64."""
    o, lse = oracle(q, k, v, causal, (window_left, -1), soft_cap, scale, sinks)
    return o.float(), lse.T.float() * LOG2E


def close(got, want, tolerance=2e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 5])
@pytest.mark.parametrize("m,n,heads", [(7, 7, (4, 4)), (33, 80, (6, 2)), (1, 64, (8, 1))])
def test_equals_torch(m, n, heads, causal, window_left):
    q, k, v = random_qkv(m, n, *heads, 32)
    keep = torch.tensor([[j in visible(i, m, n, causal, window_left) for j in range(n)] for i in range(m)])
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=keep, scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)
    got, _ = reference.attention(q, k, v, scale=0.2, mask=reference.TokenMask(causal, reference.LeftBound(window_left)))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_large_logits_of_either_sign():
    q, k, v = random_qkv(4, 6, 2, 2, 8)
    for scale in (6e4, -6e4):
        close(reference.attention(q, k, v, scale=scale), brute(q, k, v, scale, True), 1e-4)
    k[:] = -q[0, 0] * 1e4  # every logit of row 0, head 0 far below any finite sentinel
    o, lse = reference.attention(q, k, v, scale=1.0, mask=reference.TokenMask(False))
    assert lse[0, 0] < -1e4 and torch.allclose(o[0, 0], v[:, 0].mean(0), atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_are_not_kept_never_matter(bad):
    q, k, v = random_qkv(3, 8, 2, 1, 4)
    want = reference.attention(q, k, v, scale=1.0, mask=reference.TokenMask(left=reference.LeftBound(2)))
    k[7], v[7] = bad, bad  # kept by the last row only
    k[:3], v[:3] = bad, bad  # before every window
    o, lse = reference.attention(q, k, v, scale=1.0, mask=reference.TokenMask(left=reference.LeftBound(2)))
    assert torch.equal(o[:2], want[0][:2]) and torch.equal(lse[:2], want[1][:2])
    assert not o[2].isfinite().any()


def test_a_bad_query_row_stays_in_its_row_and_head():
    q, k, v = random_qkv(3, 8, 2, 1, 4)
    q[1, 0] = float("nan")
    o, lse = reference.attention(q, k, v, scale=1.0)
    bad = torch.tensor([[False, False], [True, False], [False, False]])
    assert torch.equal(lse.isnan(), bad) and torch.equal(o.isnan().all(-1), bad)


def test_infinite_values_reach_the_output_with_their_sign():
    q, k, v = random_qkv(2, 4, 1, 1, 3)
    v[1, 0, 0], v[2, 0, 1], v[0, 0, 2], v[1, 0, 2] = math.inf, -math.inf, math.inf, -math.inf
    o, _ = reference.attention(q, k, v, scale=1.0, mask=reference.TokenMask(False))
    assert (o[:, 0, 0] == math.inf).all() and (o[:, 0, 1] == -math.inf).all() and o[:, 0, 2].isnan().all()


def test_sink_limits():
    q, k, v = random_qkv(5, 9, 2, 2, 8)
    plain = reference.attention(q, k, v, scale=0.3)
    none = reference.attention(q, k, v, scale=0.3, of_heads=reference.HeadTerms(torch.full((2,), -math.inf)))
    close(none, plain, 1e-6)
    o, lse = reference.attention(q, k, v, scale=0.3, of_heads=reference.HeadTerms(torch.full((2,), 200.0)))
    assert (o.abs() < 1e-20).all() and torch.allclose(lse, torch.tensor(200 * LOG2E))


def brute_paged(inputs, case):
    """The case token by token out of the caches, in float64."""
    k, v = inputs["kv_cache"] if isinstance(inputs["kv_cache"], tuple) else (0, 0)
    if case.cache != "tuple":
        k, v = inputs["kv_cache"][:, 0], inputs["kv_cache"][:, -1]
    tables = inputs["block_tables"]
    outs = []
    starts = inputs["cum_seq_lens_q"].tolist()
    for b, n in enumerate(case.kv_lens):
        sequence = []
        for which, cache in enumerate((k, v)):
            row = tables[b, which] if case.separate_tables else tables[b]
            dim = cache.shape[-1]
            tokens = torch.empty(n, case.heads_kv, dim)
            for t in range(n):
                page = cache[int(row[t // case.page_size])]
                tokens[t] = page[:, t % case.page_size] if case.layout == "HND" else page[t % case.page_size]
            sequence.append(tokens)
        q = inputs["query"][starts[b] : starts[b + 1]]
        outs.append(
            brute(q, *sequence, inputs["bmm1_scale"], case.causal, case.window_left, case.soft_cap, inputs["sinks"])
        )
    return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))


@pytest.mark.parametrize("name", cases.EDGE)
def test_paged_cases(name):
    case = cases.EDGE[name]
    inputs = cases.make_inputs(case)
    got = cases.reference_of(inputs)
    close(got, brute_paged(inputs, case), 5e-5)


@pytest.mark.parametrize("cache,layout", [("tuple", "HND"), ("tuple", "NHD"), ("stacked", "HND"), ("shared", "NHD")])
def test_nvfp4_cache_is_attention_on_dequantised_values(cache, layout):
    case = replace(cases.EDGE["plain"], kv_dtype="nvfp4", cache=cache, layout=layout)
    inputs = cases.make_inputs(case)
    got = cases.reference_of(inputs)
    data, scales = inputs.pop("kv_cache"), inputs.pop("kv_block_scales")
    if isinstance(data, torch.Tensor):
        wide = fp4.nvfp4_dequantize(data, scales).bfloat16()
    else:
        wide = tuple(fp4.nvfp4_dequantize(d, s).bfloat16() for d, s in zip(data, scales, strict=True))
    close(got, brute_paged(inputs | {"kv_cache": wide}, case), 2e-2)  # bf16 rounds code * scale
