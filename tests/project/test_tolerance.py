"""What the GPU tests hold a result to (`tests.support.gpu`), tried on the CPU: the reference passes, small wrongs do
not."""

from dataclasses import replace

import pytest

from bench.cases.attention import AttentionCase
from tests.support import gpu

CASE = AttentionCase("", q_lens=(3, 0, 5), kv_lens=(400, 7, 5), window_left=320, heads_q=2, sink=True)
CASES = {
    "context": CASE,
    "full": replace(CASE, causal=False),
    "decode": replace(CASE, function="decode"),
    "drafts": replace(CASE, function="decode", drafts=True, q_lens=(2, 2, 2), kv_dtype="nvfp4", interleaved=True),
    "e4m3": replace(CASE, function="decode", out_dtype="fp8", out_scale=30.0),
    "xqa": replace(CASE, function="xqa", dtype="fp16", q_lens=(1, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_of_public_functions_pass(name):
    gpu.matches_reference(CASES[name], "cpu")


@pytest.mark.parametrize("name", ["context", "full"])
def test_keys_of_a_token_are_counted(name):
    case, want = CASES[name], []
    for q, n in zip(case.q_lens, case.kv_lens):
        for i in range(n - q, n):
            seen = [j for j in range(n) if j >= i - case.window_left and (j <= i or not case.causal)]
            want.append(len(seen))
    assert case.keys_seen().tolist() == want


def test_small_wrongs_are_noticed():
    """Of 30000 keys an output is a tenth of that of 300, and so is its rounding: no part of V may be lost."""
    case = AttentionCase("", q_lens=(1, 1), kv_lens=(30_000, 300), function="decode", heads_q=1, heads_kv=1)
    assert case.atol().flatten().tolist() == pytest.approx([0.001, 0.01])
    _, (o, lse) = gpu.call_of(case, "cpu")
    gpu.as_expected(case, (o, lse), (o, lse))
    for at, value in ((o, float("nan")), (lse, float("nan")), (lse, 0.1)):
        wrong = at.clone()
        wrong.view(-1)[-1] += value
        with pytest.raises(AssertionError):
            gpu.as_expected(case, (wrong, lse) if at is o else (o, wrong), (o, lse))
    with pytest.raises(AssertionError, match=r"outputs are off, first \[0, 0, "):
        gpu.as_expected(case, (o * 0.8, lse), (o, lse))
    other = o.clone()
    other.view(-1)[-1] += 2**-10
    with pytest.raises(AssertionError, match="which"):
        gpu.same((other, lse), (o, lse), "which")


def test_a_call_that_writes_nothing_is_noticed(monkeypatch):
    """Outputs hold NaN before each call."""
    inputs, want = gpu.call_of(CASES["decode"], "cpu")
    gpu.run("decode", inputs)
    idle = {"decode": (lambda **inputs: (inputs["out"], inputs["lse"]), None)}
    monkeypatch.setattr(gpu.cases, "FUNCTIONS", idle)
    with pytest.raises(AssertionError):
        gpu.as_expected(CASES["decode"], gpu.run("decode", inputs), want)
