"""`sparse_paged_attention` on a GPU: beside the reference, with equal bits in every run, graphs for other indices."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import forms
from bench.cases.attention import AttentionCase
from tests.support.gpu import CUDA, as_expected, captured, feature, same

BASE = AttentionCase(
    "", q_lens=(1,) * 4, kv_lens=(2000, 1, 0, 300), heads_q=8, heads_kv=2, page_size=64, layout="NHD", causal=False,
    function="decode", sink=1.0, data="peaks",
)  # fmt: skip
CASES = {
    "plain": BASE,
    "one request": replace(BASE, q_lens=(1,), kv_lens=(60_000,), heads_q=64, heads_kv=8),
    "many": replace(BASE, q_lens=(1,) * 300, kv_lens=tuple(range(0, 900, 3))),
    "few keys": replace(BASE, q_lens=(1,) * 70, kv_lens=(1, 0, 3, 64, 2) * 14, sink=0.0),
    "tokens": replace(BASE, q_lens=(4,) * 4, page_size=3, heads_q=6),
    "rows of 16": replace(BASE, q_lens=(1,) * 4, heads_q=32, page_size=1),
    "many rows": replace(BASE, q_lens=(16,) * 4, heads_q=10, heads_kv=1, kv_lens=(900, 129, 0, 128)),
    "head_dim 128": replace(BASE, head_dim_qk=128, head_dim_vo=128, layout="HND", cache="stacked"),
    "head_dim 128, 16 rows": replace(BASE, head_dim_qk=128, head_dim_vo=128, heads_q=24, strided_q=True),
    "head_dim 256": replace(BASE, head_dim_qk=256, head_dim_vo=256),
    "head_dim 80, fp16": replace(BASE, head_dim_qk=80, head_dim_vo=80, dtype="fp16", page_size=5),
    "e4m3": replace(BASE, kv_dtype="fp8", head_dim_qk=128, head_dim_vo=128, device=("scale", "out"), out_scale=0.5),
    "e4m3, 16 rows": replace(BASE, kv_dtype="fp8", q_lens=(3,) * 4, heads_q=10),
    "e4m3 queries": replace(BASE, dtype="fp8", out_dtype="bf16", head_dim_qk=128, head_dim_vo=128),
    "cap, e4m3 output": replace(BASE, soft_cap=9.0, out_dtype="fp8"),
    "invariant": replace(BASE, invariant=True, kv_lens=(9000, 1, 0, 300)),
}


def arguments(case, seed=0):
    """Return the arguments of a call on the GPU, and the reference's out and LSE."""
    p = forms.apply(cases.make_call(case, CUDA, seed), ("slots",), seed)
    tree = cases.decode_arguments(case, p)
    names = "kv_cache", "kv_layout", "sinks", "bmm1_scale", "bmm2_scale", "logits_soft_cap", "out", "lse", "return_lse"
    given = {name: tree[name] for name in names} | {"q": tree["query"], "batch_invariant": case.invariant}
    given |= {"indices": p.requests.page_table[:, 0].contiguous(), "counts": p.requests.kv_lens}
    return given, cases.expected(case, p)


def run(given):
    """Return copies of the results, into outputs that hold NaN before."""
    for name in ("out", "lse"):
        given[name].view(torch.uint8).fill_(0x7F) if given[name].element_size() == 1 else given[name].fill_(math.nan)
    return [t.clone() for t in wrappers.sparse_paged_attention(**given)]


@feature("decode with keys that each token chooses")
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference_with_equal_bits(name):
    case = replace(CASES[name], name=name)
    given, want = arguments(case)
    first = run(given)
    as_expected(case, first, want)
    same(run(given), first, name)


@feature("decode with keys that each token chooses")
def test_a_graph_serves_other_indices_and_counts():
    first, _ = arguments(replace(BASE, name="first", kv_lens=(2000, 1900, 7, 0)))
    other, want = arguments(replace(BASE, name="other", kv_lens=(7, 1900, 2000, 0)), 1)  # a cache of as many pages
    wrappers.sparse_paged_attention(**first)
    graph, result = captured(wrappers.sparse_paged_attention, first)
    for name in ("q", "indices", "counts", "sinks"):
        first[name].copy_(other[name])
    for into, source in zip(first["kv_cache"], other["kv_cache"], strict=True):
        into.copy_(source)
    graph.replay()
    as_expected(replace(BASE, name="replayed"), result, want)


@feature("decode with batch-invariant bits")
def test_bits_of_a_row_do_not_depend_on_the_others():
    given, _ = arguments(replace(CASES["invariant"], name="invariant"))
    whole = run(given)
    alone = given | {name: given[name][:1] for name in ("q", "indices", "counts", "out", "lse")}
    same(run(alone), [t[:1] for t in whole])
