"""The rule of skip-softmax in plain torch (bench/skipping.py), which simulated kernels, and a GPU's, must follow."""

import math
from dataclasses import replace

import pytest
import torch

from bench import skipping
from bench.cases import attention as cases
from bench.cases import forms
from bench.cases.attention import AttentionCase
from bench.cases.planted import STEP_SCALE
from cute_kernels import catalog
from tests.conftest import ARCH
from tests.sim.workloads import CASES, FEATURES
from tests.sim.workloads.common import distance
from wrappers import reference

LEVELS = AttentionCase(
    "levels", q_lens=(3, 70), kv_lens=(61, 600), heads_q=2, heads_kv=2, data="levels", scale=STEP_SCALE, skip=100.0
)
SHIPPED = [spec for op, spec in catalog.shipped(ARCH) if op == "attention.sm90" and spec.logits.skip]
SIMULATED = [case for spec in SHIPPED for scenario in CASES["attention"](spec) for case in scenario.calls]
SIMULATED += [c for s in FEATURES["attention"]() for c in s.calls if c.skip and c.function == "context"]


def by_hand(p, keys):
    """(lse (T, H), blocks, skipped) of causal attention without a group, sinks, a cap or a window: rows one by one."""
    lse, blocks, skipped = torch.full(p.q.shape[:2], -math.inf), 0, 0
    starts = p.requests.cu_seqlens_q.tolist()
    for b, n in enumerate(p.requests.kv_lens.tolist()):
        m = starts[b + 1] - starts[b]
        k = reference.gather(p.k, p.requests.page_table[b, 0], n).double()
        least = math.log(p.skip / n)
        for h, first in ((h, first) for h in range(p.q.shape[1]) for first in range(0, m, 64)):
            rows = range(first, min(first + 64, m))
            kept = {row: [] for row in rows}
            for start in range((n - 1) // keys * keys, -1, -keys):
                found = {}
                for row in rows:
                    end = min(start + keys, row + n - m + 1)
                    if end > start:
                        found[row] = k[start:end, h] @ p.q[starts[b] + row, h].double() * p.scale
                if found:
                    blocks += 1
                    below = [kept[row] and s.max() - torch.cat(kept[row]).max() < least for row, s in found.items()]
                    skipped += all(below)
                    for row, s in found.items() if not all(below) else ():
                        kept[row].append(s)
            for row in rows:
                lse[starts[b] + row, h] = torch.cat(kept[row]).logsumexp(0) / math.log(2)
    return lse, blocks, skipped


@pytest.mark.parametrize("case", [LEVELS, replace(LEVELS, skip=1e9), replace(LEVELS, skip=10.0)], ids=str)
def test_rule(case):
    p = cases.make_call(case)
    found, (lse, blocks, skipped) = skipping.attend(p, 128, 0), by_hand(p, 128)
    assert (found.blocks, found.skipped) == (blocks, skipped) and (skipped > 0) == (case.skip > 10)
    assert found.sparsity == skipped / blocks
    torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"window_left": 90, "sink": 1.0, "heads_q": 4},
        {"causal": False, "soft_cap": 5.0, "heads_q": 6, "device": ("scale", "out")},
        {"q_lens": (70, 9), "kv_lens": (20, 400), "out_scale": 2.0},
    ],
    ids=str,
)
def test_a_tiny_factor_leaves_out_nothing(change, packed):
    p = cases.make_call(replace(LEVELS, skip=1e-30, **change))
    found, (o, lse) = skipping.attend(p, 80, 64 if packed else 0), reference.paged_attention(p)
    assert found.skipped == 0 and found.margin > 50
    torch.testing.assert_close(found.out, o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


D192 = {"head_dim_qk": 192, "head_dim_vo": 128}
TYPES = {  # of Q, of K and V -> keys of a block of the kernel
    ("bf16", ""): 128,
    ("fp8", ""): 128,
    ("bf16", "fp8"): 80,
    ("fp16", "e5m2"): 80,
    ("bf16", "nvfp4"): 80,
    ("fp8", "nvfp4"): 80,
}


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_all_types_are_read_in_blocks_of_their_kernel(types, monkeypatch):
    dtype, kv_dtype = types
    case = replace(LEVELS, dtype=dtype, kv_dtype=kv_dtype, interleaved=types == ("bf16", "nvfp4"), skip=1e-30, **D192)
    seen, attend = [], skipping.attend
    monkeypatch.setattr(skipping, "attend", lambda *args, **more: seen.append((*args[1:], more)) or attend(*args))
    p = cases.make_call(replace(case, heads_q=4, q_lens=(3, 60)))
    found, (o, lse) = skipping.of_kernel(p), reference.paged_attention(p)
    tile = 2, 3 if types == ("fp8", "") else 1
    assert seen == [(TYPES[types], {"together": 64, "tile": tile})] and found.skipped == 0
    torch.testing.assert_close(found.out, o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


def test_a_group_votes_by_its_rows():
    """128 rows agree more rarely than both their halves of 64."""
    p = cases.make_call(replace(LEVELS, q_lens=(256, 130)))
    few, many = (skipping.attend(p, 128, 0, together) for together in (64, 128))
    assert 0 < many.sparsity < few.sparsity


@pytest.mark.parametrize("kv_dtype", ["", "fp8"])
@pytest.mark.parametrize("form", ["csr", "ragged"])
def test_requests_of_all_forms(form, kv_dtype):
    table = cases.make_call(replace(LEVELS, kv_dtype=kv_dtype))
    p = forms.apply(table, (form,))
    found, want = skipping.attend(p, 128, 0), skipping.attend(table, 128, 0)
    assert 0 < want.skipped == found.skipped and torch.equal(found.out, want.out)
    found, (o, lse) = skipping.attend(p._replace(skip=1e-30), 128, 0), reference.paged_attention(p)
    torch.testing.assert_close(found.out, o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in SIMULATED if case.skip > 1], ids=str)
def test_simulated_cases_see_a_vote_that_is_wrong(case):
    """Some blocks are left out and others are not, and without skipping the results would be others."""
    p = cases.make_call(case)
    found, (o, lse) = skipping.of_kernel(p), reference.paged_attention(p)
    assert 0.03 < found.sparsity < 0.9 and found.margin > 0.01
    assert distance(found.out, o, case.tolerance, case.atol()) > 1
    assert distance(found.lse, lse, cases.LSE_TOLERANCE) > 1


@pytest.mark.parametrize("blocks", [123, 139])
def test_blocks_are_kept_without_a_vote(blocks):
    """The first block is kept, then 40 by votes, then 82 without, which makes 123 blocks. Then votes decide."""
    case = replace(LEVELS, q_lens=(70,), kv_lens=(blocks * 128,), heads_q=1, heads_kv=1, data="levels-late")
    p = cases.make_call(replace(case, scale=STEP_SCALE / 2, skip=7300.0))
    every, some, none = (skipping.attend(p, 128, 0, tile=tile) for tile in (None, (2, 1), (2, blocks)))
    assert every.blocks == some.blocks == 2 * blocks and none.skipped == every.skipped > 20
    assert some.skipped == 0 if blocks == 123 else 0 < some.skipped < every.skipped


def test_votes_that_rounding_decides_are_no_expectation():
    p = cases.make_call(LEVELS)
    found = skipping.of_kernel(p)
    with pytest.raises(ValueError, match="rounding may decide"):
        skipping.expected(p._replace(skip=LEVELS.skip * 2**found.margin))
        skipping.expected(p._replace(skip=LEVELS.skip * 2**-found.margin))
