"""The benchmark of errors against fp64 and of equal bits, on the CPU: cases, the right output, rows and tables."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch

from bench import __main__ as command
from bench import accuracy, harness, results, trust
from bench.accuracy import CASES, AccuracyCase
from bench.cases import precision
from bench.cases.precision import BF16
from bench.results import AccuracyRow, DeterminismRow
from bench.workload import tokens
from tests.emulated import emulation
from wrappers.attention import plan

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


def test_data_are_the_same_values_in_every_type():
    for form in accuracy.FORMS:
        inputs = {
            types: precision.make_inputs(AccuracyCase(form, types, "normal", 70).attention(), "cpu")
            for types in accuracy.TYPES
        }
        k = tokens(inputs["bf16"], 0, 70)[0].float()
        for types, own in inputs.items():
            apart = (tokens(own, 0, 70)[0].float() - k).abs().max()
            assert apart < 1.0 and (types in ("bf16", "fp16")) == bool(apart < 2**-6), types
        assert torch.equal(inputs["kve4m3"]["query"], inputs["bf16"]["query"])


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


def test_sixteen_bits_have_no_error_of_storing():
    rows, _ = accuracy.measure(AccuracyCase("decode", "fp16", "normal", 100), SETUP, ENV)
    assert {r.format_error for r in rows} == {None} and rows[1].rms_error < 5e-4


def test_an_error_is_measured():
    right = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    assert accuracy.relative(torch.tensor([0.3, 0.0, 0.0, 0.0]), right) == pytest.approx((0.1, 0.05))


def test_providers_without_a_row(monkeypatch, capsys):
    """One peer refuses and the other returns infinity. Peers have rows in 16 bits only."""

    def refuses(case, inputs):
        raise ValueError("head_dim")

    def infinite(case, inputs):
        return lambda: torch.full((5, 8, 128), math.inf)

    monkeypatch.setattr(
        accuracy, "PROVIDERS", {"ours": accuracy.ours, "flash-attn-4": refuses, "cudnn": infinite}
    )  # fmt: skip
    setup = replace(SETUP, providers=tuple(accuracy.PROVIDERS))
    rows, _ = accuracy.measure(AccuracyCase("prefill", "bf16", "normal", 40), setup, ENV)
    assert [r.provider for r in rows] == ["rounded", "ours"]
    said = capsys.readouterr().out
    assert "no row: flash-attn-4: ValueError: head_dim" in said and "no row: cudnn: not finite" in said
    accuracy.measure(AccuracyCase("prefill", "kvnvfp4", "normal", 40), setup, ENV)
    assert capsys.readouterr().out == ""


def test_a_peer_without_a_mask_has_its_own_right_output(monkeypatch):
    """A stand-in for cuDNN that sees all keys has the error of rounding."""

    def whole(case, inputs):
        return lambda: accuracy.attention64(inputs, causal=False).bfloat16()

    monkeypatch.setattr(accuracy, "PROVIDERS", {"cudnn": whole})
    rows, _ = accuracy.measure(
        AccuracyCase("prefill", "bf16", "sharp", 30), replace(SETUP, providers=("cudnn",)), ENV
    )  # fmt: skip
    assert rows[1].provider == "cudnn" and rows[1].rms_error < 3e-3


def test_bits_that_change_are_counted():
    outputs = iter([1.0, 1.0, 2.0, 1.0])
    assert accuracy.repeated(lambda: torch.tensor([next(outputs)]), 3) == 2


def test_a_request_alone_is_the_same_request():
    case = AccuracyCase("decode", "bf16", "normal", 200)
    batch = replace(case.attention(BF16), q_lens=(1,) * 3, kv_lens=(200, 70, 130))
    inputs = precision.make_inputs(batch, "cpu")
    right = accuracy.attention64(inputs)
    for b, n in enumerate(batch.kv_lens):
        alone = accuracy.only(inputs, b, 1)
        assert alone["block_tables"].shape == (1, -(-n // accuracy.PAGE)) and alone["max_kv_len"] == n
        torch.testing.assert_close(accuracy.attention64(alone), right[b : b + 1], rtol=0, atol=0)


def test_the_command_appends_rows(monkeypatch, tmp_path, capsys):
    name = "accuracy-decode-bf16-normal-s1024"
    monkeypatch.setattr(command, "environment", lambda: ENV)
    monkeypatch.setattr(accuracy, "CASES", {name: AccuracyCase("decode", "bf16", "normal", 64)})
    monkeypatch.setattr(harness, "Setup", lambda providers: replace(SETUP, providers=providers))
    args = ["accuracy", "--providers", "ours", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench", *args])
    command.main()
    rows = results.read(tmp_path / "accuracy" / "some-gpu.csv", AccuracyRow)
    counts = results.read(tmp_path / "determinism" / "some-gpu.csv", DeterminismRow)
    assert len(rows) == 2 and len(rows[1].digest) == 16 and [r.kind for r in counts][0] == "runs"
    assert "ours runs 3/3" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["bench", "accuracy", "--cases", "no"])
    with pytest.raises(SystemExit, match="no case begins with 'no'"):
        command.main()


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


@pytest.mark.by_shape
def test_prefill_has_the_kernels_of_whole_prompts(monkeypatch):
    """Both forms make the same call; only the choice of the kernel differs, and neither finds the other's plan."""
    asked = []

    def select(request, arch):
        asked.append(request.split_kv)
        return real(request, arch)

    with emulation() as fake:
        real = plan.dispatch.select
        monkeypatch.setattr(plan.dispatch, "select", select)
        monkeypatch.setattr(accuracy.machine, "HostMachine", lambda: own)
        own = copy(fake)
        own.plans = {}
        for form in ("extend", "prefill", "extend", "prefill"):
            case = AccuracyCase(form, "bf16", "normal", 80)
            accuracy.ours(case, precision.make_inputs(case.attention(), "cpu"))()
    assert asked == ["auto", "never"]
