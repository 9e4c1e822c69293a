"""`bench.latent_accuracy` on the CPU: our functions take the place of the peers', too."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import wrappers
from bench import accuracy, harness, indexer, latent_accuracy, mla, readme, results
from bench.cases.mla import MlaCase
from bench.latent_accuracy import LatentAccuracyCase

ENV = results.Environment("2026-01-02T03:04:05+00:00", "abc123", "some-gpu", "580.1", "2.13.0")
SETUP = harness.Setup(latent_accuracy.PROVIDERS, device="cpu")
BF16, E4M3 = 2.0**-8, 2.0**-4  # half a unit in the last place, relative
SMALL = {
    "mla": LatentAccuracyCase("accuracy-mla-tiny", MlaCase(lens=(70, 70), heads=4), 4.0),
    "dsa": LatentAccuracyCase("accuracy-dsa-tiny", MlaCase(lens=(70, 70), heads=4, chosen=30, record="656")),
    "prompt": LatentAccuracyCase(
        "accuracy-dsa-prefill-tiny", MlaCase("sparse_fwd", lens=(200,), heads=16, rows=5, chosen=30, alike=50)
    ),
    "logits of a prompt": LatentAccuracyCase("accuracy-indexer-prefill", "indexer-prefill-t5-s70-h4"),
    "logits of decode": LatentAccuracyCase("accuracy-indexer-decode", "indexer-decode-b2-s128-h4"),
}


@pytest.fixture
def peers(monkeypatch):
    """Put our functions in the place of vLLM's copies of FlashMLA and DeepGEMM."""
    names = "vllm", "vllm.third_party", "vllm.third_party.flashmla", "vllm.third_party.deep_gemm"
    found = {name: ModuleType(name) for name in (*names, "vllm.third_party.flashmla.flash_mla_interface")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(found[parent], own, module)
    for name in ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(found["vllm.third_party.flashmla.flash_mla_interface"], name, getattr(wrappers, name))
    for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"):
        setattr(found["vllm.third_party.deep_gemm"], name, getattr(wrappers, name))
    found["vllm.third_party.deep_gemm"].get_num_sms = lambda: 1


@pytest.mark.parametrize("name", SMALL)
def test_errors_against_fp64_and_counts_of_equal_bits(monkeypatch, peers, name):
    monkeypatch.setattr(accuracy, "REPEATS", 3)
    case = SMALL[name]
    rows, runs = latent_accuracy.measure(case, SETUP, ENV)
    peer = ["deep-gemm"] if isinstance(case.call, str) else ["flashmla"]
    assert [r.provider for r in rows] == ["rounded", "ours", *peer, *["own-shared"] * (name == "prompt")]
    assert 0 <= rows[0].rms_error <= rows[1].rms_error < (1e-6 if isinstance(case.call, str) else BF16)
    assert all(r.rms_error == pytest.approx(rows[1].rms_error) for r in rows[1:])
    assert all((r.format_error is None) == (name != "dsa") for r in rows)
    counts = latent_accuracy.determinism(case, runs, SETUP, ENV)
    kinds = {"runs", "batch", "batch, batch_invariant"} if name in ("mla", "dsa") else {"runs"}
    assert {r.kind for r in counts} == kinds and all(r.equal == r.count > 0 for r in counts)


def test_storing_in_656_bytes_costs_what_e4m3_does():
    rows, _ = latent_accuracy.measure(SMALL["dsa"], replace(SETUP, providers=("ours",)), ENV)
    assert E4M3 / 10 < rows[1].format_error < E4M3 and rows[1].rms_error < BF16


def test_an_error_of_a_cache_is_one_of_the_result(monkeypatch):
    """A kernel that does not read the rows that the reference reads has a large error."""
    case, setup = SMALL["mla"], replace(SETUP, providers=("ours",))
    right = mla.ours
    monkeypatch.setattr(mla, "ours", lambda call, i: right(call, i._replace(cache=i.cache.flip(0))))
    rows, _ = latent_accuracy.measure(case, setup, ENV)
    assert rows[1].rms_error > 0.1


def test_errors_of_logits_are_relative_to_the_sums_of_their_magnitudes(monkeypatch):
    i = indexer.make("indexer-prefill-t5-s70-h4", "cpu", 0)
    products = i.q[4, 0].double()[:, None] * i.keys.double()
    want = (products.abs().sum(-1) * i.weights[4].double().abs()[:, None]).sum(0) * i.scales
    torch.testing.assert_close(indexer.wanted(i, 4, torch.float64, magnitudes=True), want)
    logits = [[indexer.wanted(i, t, torch.float64, magnitudes) for t in range(5)] for magnitudes in (False, True)]
    right, mass = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in logits)
    monkeypatch.setitem(indexer.PROVIDERS, "ours", lambda i: 1.5 * right)
    rows, _ = latent_accuracy.measure(SMALL["logits of a prompt"], replace(SETUP, providers=("ours",)), ENV)
    assert rows[1].max_error == pytest.approx(0.5 * float((right / mass).nan_to_num(0.0).abs().max()))


def test_all_cases_have_a_table_of_their_form():
    figures = {"provider": "ours", "max_error": 0.01, "rms_error": 0.001, "format_error": None, "digest": ""}
    rows = [ENV.make(results.AccuracyRow, case=name, **figures) for name in latent_accuracy.CASES]
    text = "\n".join(readme.accuracy("some-gpu", rows))
    assert all(text.count(f"| `{name}` | 0.1 (1) |  |") == 1 for name in latent_accuracy.CASES)
    assert all(text.count(f"{words}. some-gpu") == 1 for words in readme.LATENT.values())
