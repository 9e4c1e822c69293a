"""The benchmark of whole engines, with workers that are functions: loads, agreement, rows, and the report."""

import pytest

from bench import engine, engine_worker
from bench.cases.engine import CASES, CHECKED, MODELS
from bench.results import Environment

ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")
BF16 = "engine-vllm-tiny-llama-bf16"
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


def test_no_row_for_wrong_answers(capsys):
    """The reference's tokens, with other log probabilities."""
    found = {"ours": result(1000.0, shift=0.11), "vllm-flash-attn": result(800.0)}
    _, rows, figures = measured(found)
    assert "ours" not in rows and "ours" not in figures and "vllm-flash-attn" in rows
    assert (
        "no row: ours: log probabilities differ from vllm-flash-attn's by 0.110, at most 0.100"
        in capsys.readouterr().out
    )


def test_agreement_ends_where_the_answers_part():
    a, b = [answer((1, 2, 3, 4))], [answer((1, 2, 5, 4), shift=0.25)]
    same = engine.agreement(a, b)
    assert same.common == 0.75  # the token at which they part counts
    assert same.difference == pytest.approx((0.25 + 0.25 + 1.25) / 3)


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
