"""The benchmark of whole engines, with workers that are functions: loads, agreement, rows, and the report."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import engine, engine_worker, readme, results
from bench.cases.engine import CASES, CHECKED, MODELS, EngineCase
from bench.results import Environment

ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")
BF16, NVFP4 = "engine-vllm-tiny-llama-bf16", "engine-vllm-tiny-llama-nvfp4"
VLLM = [p for p in engine_worker.BACKENDS["vllm"] if p != "own-fp8"]


def answer(tokens, shift=0.0):
    return {"tokens": list(tokens), "logprobs": [-0.5 * t - shift for t in tokens]}


def result(speed, answers=((1, 2, 3),), shift=0.0):
    """Return the result of a worker. The slowest and the fastest pass differ by 10 %."""
    figures = {"tokens_per_s": speed, "seconds": 1.0, "computed": 9, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0,
               "tpot_p50_ms": 3.0, "tpot_p99_ms": 4.0}  # fmt: skip
    return {
        "answers": [answer(tokens, shift) for tokens in answers], "warm": figures | {"tokens_per_s": speed / 2},
        "passes": [figures | {"tokens_per_s": speed * s} for s in (0.95, 1.0, 1.05)], "median": figures,
        "cache_tokens": 100, "started_s": 5.0,
    }  # fmt: skip


def measured(found, name=BF16, rounds=1):
    asked = []

    def run(case, provider, passes):
        asked.append(provider)
        assert case == name and passes == 3
        return found.get(provider)

    rows, figures = engine.measure(name, engine.PROVIDERS, ENV, 3, rounds, run)
    return asked, {r.provider: r for r in rows}, {r.provider: r for r in figures}


def test_rows_have_times_per_token_and_the_best_of_the_engine():
    speeds = {"ours": 1000.0, "vllm-flash-attn": 800.0, "vllm-triton": 500.0}
    asked, rows, figures = measured({p: result(s) for p, s in speeds.items()})
    assert asked == VLLM, "no process for another engine, or for a provider of NVFP4 cases"
    assert {p: r.time_us for p, r in rows.items()} == {
        "ours": 1000.0, "vllm-flash-attn": 1250.0, "vllm-triton": 2000.0, "vllm-best": 1250.0
    }  # fmt: skip
    assert rows["vllm-best"].ratio_to_ours == 1.25 and rows.keys() - {"vllm-best"} == figures.keys()
    ours = figures["ours"]
    assert ours.noise == pytest.approx(0.1) and ours.passes == 3 and ours.cold_tokens_per_s == 500.0
    assert ours.reference == "vllm-flash-attn" and ours.difference == 0.0 and ours.common == 1.0


def test_an_nvfp4_cache_is_compared_with_our_own_fp8_cache():
    asked, rows, figures = measured({"ours": result(1300.0), "own-fp8": result(1000.0)}, NVFP4)
    assert "own-fp8" in asked and rows["own-fp8"].ratio_to_ours == pytest.approx(1.3) and "vllm-best" not in rows
    assert figures["ours"].reference == "own-fp8"


def test_sglang_has_providers_of_its_own():
    name = BF16.replace("vllm", "sglang")
    asked, rows, figures = measured({"ours": result(1000.0), "sglang-triton": result(900.0)}, name)
    assert asked == [*engine_worker.BACKENDS["sglang"]] and rows["sglang-best"].time_us == rows["sglang-triton"].time_us
    assert figures["ours"].reference == "sglang-triton"


def test_the_order_of_processes_turns():
    asked, _, figures = measured({p: result(100.0) for p in engine.PROVIDERS}, rounds=2)
    assert asked == VLLM + VLLM[::-1] and figures["ours"].passes == 6


def test_no_row_for_wrong_answers(capsys):
    """The reference's tokens, with other log probabilities."""
    found = {"ours": result(1000.0, shift=0.11), "vllm-flash-attn": result(800.0)}
    _, rows, figures = measured(found)
    assert "ours" not in rows and "ours" not in figures and "vllm-flash-attn" in rows
    assert (
        "no row: ours: log probabilities differ from vllm-flash-attn's by 0.110, at most 0.100"
        in capsys.readouterr().out
    )


def test_the_engines_own_noise_widens_the_limit():
    found = {
        "ours": result(1000.0, shift=0.29),
        "vllm-flash-attn": result(800.0),
        "vllm-triton": result(1.0, shift=0.2),
    }
    assert "ours" in measured(found)[1]
    found["ours"] = result(1000.0, shift=0.31)
    assert "ours" not in measured(found)[1]


def test_agreement_ends_where_the_answers_part():
    a, b = [answer((1, 2, 3, 4))], [answer((1, 2, 5, 4), shift=0.25)]
    same = engine.agreement(a, b)
    assert same.common == 0.75  # the token at which they part counts
    assert same.difference == pytest.approx((0.25 + 0.25 + 1.25) / 3)


def test_a_worker_that_fails_says_why(monkeypatch, capsys):
    monkeypatch.setattr(engine, "sys", SimpleNamespace(executable=sys.executable))
    assert engine.worker("no-case", "ours", 1) is None
    assert "no row: ours: KeyError: 'no-case'" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_loads_fit_their_cache_and_their_model(name):
    case = CASES[name]
    lengths, config = case.lengths(0), case.config
    assert len(lengths) == case.requests and case.longest <= config["max_position_embeddings"]
    if case.cached:  # else the engine may admit requests one after another
        needed = case.token_bytes * sum(n + case.outputs + 16 for n in lengths)
        assert needed <= case.memory * case.gpus, "the timed passes find all prompts"
    assert case.token_bytes * case.longest <= case.memory and case.requests in case.graph_sizes
    assert max(CHECKED) < case.longest and case.model in MODELS


def test_prompts_follow_their_seed():
    case = EngineCase("x", "llama8b", 5, 100, spread=1.0)
    lengths = case.lengths(0)
    assert lengths == case.lengths(0) != case.lengths(1) and len(set(lengths)) > 1
    first = case.prompts(2, lengths)
    assert first == case.prompts(2, lengths) != case.prompts(3, lengths)
    assert [len(p) for p in first] == lengths and min(map(min, first)) >= 100


@pytest.mark.parametrize("model", MODELS)
def test_weights_depend_on_names_alone(model, tmp_path):
    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_local_experts": 4}
    config = EngineCase("x", model, 1, 8, layers=1).config
    (tmp_path / "config.json").write_text(json.dumps(config | {k: v for k, v in small.items() if k in config}))
    found, again = (dict(engine_worker.checkpoint(str(tmp_path))) for _ in range(2))
    assert found.keys() == again.keys() and all(torch.equal(found[name], again[name]) for name in found)
    assert ("lm_head.weight" in found) == (not config["tie_word_embeddings"])
    q = found["model.layers.0.self_attn.q_proj.weight"].float()
    assert abs(q.std().item() * 16 / 1.5 - 1) < 0.05
    norm = found["model.norm.weight"] + (1.0 if "gemma" in model else 0.0)
    assert (norm.abs() == 1.0).all() and ((norm < 0).any() == config["tie_word_embeddings"])


def test_bytes_of_a_token():
    case = CASES["engine-vllm-llama8b-b64-c8k-bf16"]
    sizes = [replace(case, kv=kv).token_bytes for kv in ("bf16", "fp8", "nvfp4")]
    assert sizes == [131072, 65536, 36864]  # 32 layers, 8 heads of 128, K and V


class Echo:
    """An engine that answers with the first token of each prompt."""

    cache_tokens = 7

    def __init__(self):
        self.asked = []

    def generate(self, prompts, outputs, logprobs):
        self.asked.append((prompts, outputs, logprobs))
        scores = [-0.25] * outputs if logprobs else []
        return [engine_worker.EngineAnswer([p[0]] * outputs, scores, 0.5, 0.01 * (outputs - 1), 30) for p in prompts]


@pytest.mark.parametrize("cached", [True, False])
def test_what_a_worker_observes(cached):
    case, echo = EngineCase("x", "llama8b", 5, 40, outputs=3, cached=cached), Echo()
    found = engine_worker.observe(echo, case, 2)
    check, warm, *passes = echo.asked
    assert [len(p) for p in check[0]] == [*CHECKED] and check[2] and not warm[2]
    assert [a["tokens"][0] for a in found["answers"]] == [p[0] for p in check[0]]
    assert found["answers"][0]["logprobs"][0] == -0.25 and found["cache_tokens"] == 7
    assert len(passes) == 2 and (passes[0] == passes[1] == warm) == cached
    assert cached or passes[0][0] != passes[1][0] != warm[0], "each pass has other prompts"
    assert found["median"]["ttft_p50_ms"] == 500.0 and found["median"]["tpot_p99_ms"] == pytest.approx(10.0)
    assert found["median"]["computed"] == 5 * (40 - 30)
    assert found["median"]["tokens_per_s"] > 0 and len(found["passes"]) == 2


def test_unknown_providers_are_refused():
    with pytest.raises(SystemExit, match="no provider is named theirs; there are: ours, "):
        engine.measure(BF16, ("ours", "theirs"), ENV, run=lambda *_: pytest.fail("a process"))


def test_rows_are_read_back_and_reported(tmp_path):
    _, _, figures = measured({"ours": result(1000.0), "vllm-flash-attn": result(800.0)})
    results.append(tmp_path / "some-gpu.csv", figures.values())
    found = results.read_engines(tmp_path)
    assert found["some-gpu"] == [replace(r, noise=pytest.approx(r.noise, rel=1e-3)) for r in figures.values()]
    text = readme.measured_engines(found)
    assert "| `vllm-tiny-llama-bf16` | vllm-flash-attn | 800 | 0.800 | 400 | 1 (2) | 3.00 (4.00) | 100 |  |" in text
    assert readme.measured_engines({}) == "Not measured yet."
