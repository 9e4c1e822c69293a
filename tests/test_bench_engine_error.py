"""Errors of engines against fp32, with a small model and answers that transformers itself gives."""

from dataclasses import replace

import pytest

from bench import engine_error
from bench.cases import engine as cases
from bench.cases.engine import CHECKED, EngineCase
from bench.engine_error import Reference
from bench.results import Environment

ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CASE = EngineCase("small", "small", 1, 8, layers=1)


@pytest.fixture(params=["llama8b", "gemma2-9b"])
def case(request, monkeypatch):
    monkeypatch.setitem(cases.MODELS, "small", cases.MODELS[request.param] | SMALL | {"head_dim": 16})
    monkeypatch.setattr(engine_error, "CASES", {"small": CASE})
    return CASE


def test_every_token_counts(case, capsys):
    """One provider answers as the reference does, the other errs by 0.25 at one token of each answer."""
    model, prompts = Reference(case), case.prompts(1, list(CHECKED))
    tokens = [[7, 11, 300], [5, 2, 9, 4]] * 4
    answers = [{"tokens": t, "logprobs": model.logprobs(p, t)} for p, t in zip(prompts, tokens)]
    wrong = [a | {"logprobs": [a["logprobs"][0] + 0.25, *a["logprobs"][1:]]} for a in answers]
    found = {"ours": {"answers": answers}, "vllm-triton": {"answers": wrong}, "vllm-flash-attn": None}
    rows = engine_error.measure("small", tuple(found), ENV, lambda name, provider, passes: found[provider])
    ours, triton = rows
    assert (ours.provider, triton.provider) == ("ours", "vllm-triton") and ours.tokens == 28 and ours.distinct == 7
    assert ours.largest < 1e-4 and triton.largest == pytest.approx(0.25, abs=1e-4)
    assert triton.mean == pytest.approx(0.25 * 8 / 28, abs=1e-4)
    assert "28 tokens, 7 distinct" in capsys.readouterr().out
    shuffled = replace(case, layers=2)
    assert Reference(shuffled).logprobs(prompts[0], tokens[0]) != answers[0]["logprobs"], "layers count"
