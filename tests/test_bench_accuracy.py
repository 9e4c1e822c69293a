"""The benchmark of errors against fp64 and of equal bits, on the CPU: cases, the right output, rows and tables."""

import math

import pytest
import torch

from bench import accuracy, harness, results, trust
from bench.accuracy import CASES, AccuracyCase
from bench.cases import precision
from bench.results import AccuracyRow, DeterminismRow
from bench.workload import tokens

ENV = results.Environment("2026-01-02T03:04:05+00:00", "abc123def", "some-gpu", "580.1", "2.11")
SETUP = harness.Setup(("ours",), device="cpu")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(accuracy, "FORMS", {"prefill": (5,), "extend": (5,), "decode": (1, 1)})
    monkeypatch.setattr(accuracy, "REPEATS", 3)


def test_cases_cover_types_and_lengths():
    for form in ("prefill", "extend", "decode"):
        for types in ("bf16", "fp16", "kve4m3", "kve5m2", "kvnvfp4", "qe4m3", "qe4m3kvnvfp4"):
            for keys in (1024, 32768, 262144):
                assert f"accuracy-{form}-{types}-normal-s{keys}" in CASES
            assert f"accuracy-{form}-{types}-sharp-s32768" in CASES
    assert set(trust.TYPES) == set(accuracy.TYPES)


def by_loops(inputs, request, row, m):
    """Return fp64 attention (Hq, D) of one row."""
    n = int(inputs["seq_lens"][request])
    k, v = (t.float().double() for t in tokens(inputs, request, n))
    q = inputs["query"].float().double()[request * m + row]
    found = []
    for head, vector in enumerate(q):
        own = head // (len(q) // k.shape[1])
        logits = [inputs["bmm1_scale"] * float(vector @ k[j, own]) for j in range(n - m + row + 1)]
        top = max(logits)
        weights = torch.tensor([math.exp(x - top) for x in logits], dtype=torch.float64)
        found.append((weights @ v[: len(logits), own]) / weights.sum())
    return torch.stack(found)


@pytest.mark.parametrize("types", ["bf16", "kve5m2", "qe4m3kvnvfp4"])
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_the_right_output(monkeypatch, form, types):
    """In chunks of few rows, against loops."""
    inputs = precision.make_inputs(AccuracyCase(form, types, "sharp", 90).attention(), "cpu")
    whole = accuracy.attention64(inputs)
    monkeypatch.setattr(accuracy, "LOGITS", 2 * 90 * 8)
    torch.testing.assert_close(accuracy.attention64(inputs), whole, rtol=1e-13, atol=1e-13)
    m = len(whole) // len(inputs["seq_lens"])
    for request, row in ((0, 0), (len(inputs["seq_lens"]) - 1, m - 1)):
        want = by_loops(inputs, request, row, m)
        torch.testing.assert_close(whole[request * m + row], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["prefill", "extend", "decode"])
def test_rows_of_a_case(form):
    case = AccuracyCase(form, "kve4m3", "normal", 300)
    rows, runs = accuracy.measure(case, SETUP, ENV)
    assert [r.provider for r in rows] == ["rounded", "ours"] and set(runs) == {"ours"}
    rounded, ours = rows
    assert 0 < rounded.rms_error <= ours.rms_error < 3e-3 < ours.format_error < 0.1 and ours.max_error < 0.05
    counts = accuracy.determinism(case, runs, SETUP, ENV)
    kinds = ["runs", "batch"] + ["batch, batch_invariant"] * (form == "decode")
    assert [(r.kind, r.equal, r.count) for r in counts] == [(k, 3 if k == "runs" else 6, 3 if k == "runs" else 6)
                                                           for k in kinds]  # fmt: skip


def test_tables():
    case = "accuracy-decode-kve4m3-sharp-s32768"
    make = dict(case=case, max_error=0.0123, rms_error=0.00171, format_error=0.071, digest="0")
    old = ENV.make(AccuracyRow, provider="ours", **make | {"rms_error": 0.5})
    rows = [old, *(ENV.make(AccuracyRow, provider=provider, **make) for provider in ("rounded", "ours"))]
    text = "\n\n".join(trust.accuracy("some-gpu", rows))
    assert "| bf16; e4m3 | sharp | 32,768 | 0.17 (1.2) | 0.17 (1.2) |  |  | 7.1 |" in text and "50 (" not in text
    assert text.startswith("Decode. some-gpu, 2026-01-02T03:04:05+00:00, commit abc123def, driver 580.1")
    counts = [ENV.make(DeterminismRow, case=c, provider="ours", kind="runs", equal=19.0, count=20.0)
              for c in (case, case.replace("sharp", "normal"))]  # fmt: skip
    assert "| ours | decode: runs | 38 of 40 |" in trust.determinism("some-gpu", counts)[1]
