"""The benchmarks of whole engines and of servers, with functions and a small HTTP server in the place of the engines:
wrong answers and failed loads get no row."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import engine, engine_backends, engine_error, engine_profile, engine_worker, server
from bench.cases import engine as cases
from bench.cases.engine import CASES, CHECKED, MODELS, SERVERS, EngineCase
from bench.engine_error import Reference
from bench.results import Environment

ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")
LOAD = "engine-vllm-tiny-llama-bf16"


@pytest.mark.parametrize("name", CASES)
def test_loads_fit_their_cache_and_their_model(name):
    case = CASES[name]
    lengths, config = case.lengths(0), case.config
    assert len(lengths) == case.requests and case.longest <= config["max_position_embeddings"]
    if case.cached:  # else the engine may admit requests one after another
        assert sum(n + case.outputs + 16 for n in lengths) <= case.capacity, "the timed passes find all prompts"
    assert case.preempts == name.endswith("-preempted")
    assert case.token_bytes * case.longest <= case.memory and case.requests in case.graph_sizes
    assert max(CHECKED) < case.longest and case.model in MODELS


def answer(tokens, shift=0.0):
    return {"tokens": list(tokens), "logprobs": [-0.5 * t - shift for t in tokens]}


def result(speed, shift=0.0):
    """Return the result of a worker. The slowest and the fastest pass differ by 10 %."""
    figures = {"tokens_per_s": speed, "seconds": 1.0, "computed": 9, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0,
               "tpot_p50_ms": 3.0, "tpot_p99_ms": 4.0}  # fmt: skip
    return {
        "answers": [answer((1, 2, 3), shift)], "warm": figures | {"tokens_per_s": speed / 2},
        "passes": [figures | {"tokens_per_s": speed * s} for s in (0.95, 1.0, 1.05)], "median": figures,
        "cache_tokens": 100, "started_s": 5.0, "repeats": {"again": 1, "alone": 0},
    }  # fmt: skip


def measured(**found):
    rows, figures = engine.measure(LOAD, (), ENV, 3, 1, lambda case, name, passes: found.get(name))
    return {r.provider: r.time_us for r in rows}, {r.provider: r for r in figures}


@pytest.mark.parametrize("name, providers", [
    ("engine-vllm-tiny-llama-bf16", "ours vllm-flash-attn vllm-flashinfer vllm-triton"),
    ("engine-vllm-tiny-llama-nvfp4", "ours own-fp8"),
    ("engine-vllm-tiny-llama-bf16-invariant", "vllm-flash-attn"),
    ("engine-vllm-tiny-v3-fp8", "ours vllm-flashmla vllm-triton-mla"),
    ("engine-vllm-tiny-dsv32-bf16", "ours ours-shared vllm-flashmla-sparse vllm-flash-attn-mla-sparse"),
    ("engine-vllm-tiny-dsv32-kv352", "ours own-kv656 vllm-flash-attn-mla-sparse"),
    ("engine-vllm-tiny-dsv32-kv656-preempted", "ours"),
    ("engine-vllm-dsv32-b64-c16k-kv656-x2", "ours ours-packed vllm-flashmla-sparse vllm-flash-attn-mla-sparse"),
    ("engine-sglang-tiny-v3-bf16", "ours sglang-fa3 sglang-flashinfer sglang-triton sglang-flashmla"),
    ("engine-sglang-tiny-dsv32-kv656", "ours ours-shared sglang-dsa"),
])  # fmt: skip
def test_backends_of_a_case(name, providers):
    """64 heads per GPU share no keys."""
    case = CASES[name]
    found = {p for p in engine_backends.BACKENDS[case.engine] if engine_backends.has_backend(case, p)}
    assert found == set(providers.split())
    assert engine_backends.cache_of(case, "vllm-flash-attn-mla-sparse").kv == "bf16"


def test_providers_of_a_case(capsys):
    """A provider that does not run a case is named, and an unknown one is refused."""
    name = "engine-vllm-tiny-v3-bf16"
    assert engine.chosen(name, ()) == ("ours", "vllm-flashmla", "vllm-flash-attn-mla", "vllm-triton-mla")
    assert capsys.readouterr().out == ""
    assert engine.chosen(name, ("ours", "ours-shared")) == ("ours",)
    assert capsys.readouterr().out == f"  {name} is not run by ours-shared\n"
    with pytest.raises(SystemExit, match="no provider is named theirs"):
        engine.chosen(name, ("theirs",))


def test_rows_of_an_engine(capsys):
    """In the second run ours has the reference's tokens with other log probabilities."""
    others = {"vllm-flash-attn": result(800.0), "vllm-triton": result(500.0)}
    times, figures = measured(ours=result(1000.0), **others)
    assert times == {"ours": 1000.0, "vllm-flash-attn": 1250.0, "vllm-triton": 2000.0, "vllm-best": 1250.0}
    assert "ours" not in measured(ours=result(1000.0, shift=0.11), **others)[0]
    printed = capsys.readouterr().out
    assert "no row: ours: log probabilities differ from vllm-flash-attn's by 0.110" in printed
    assert "of 1 answers, equal: 1 again, 0 alone" in printed
    ours = figures["ours"]
    assert (ours.reference, ours.difference, ours.common) == ("vllm-flash-attn", 0.0, 1.0)
    assert ours.noise == pytest.approx(0.1) and ours.cold_tokens_per_s == 500.0
    parted = engine.agreement([answer((1, 2, 3, 4))], [answer((1, 2, 5, 4), shift=0.25)])
    assert parted.common == 0.75 and parted.difference == pytest.approx((0.25 + 0.25 + 1.25) / 3)


class Stub:
    """An engine that answers with the sum of all tokens as the next one. alone: a number that is added to the sum if
    there is one request. rounding: an error of the log probabilities, which grows with each pass."""

    cache_tokens = 100

    def __init__(self, alone=0, rounding=0.0):
        self.alone, self.rounding, self.passes = alone, rounding, 0

    def generate(self, prompts, outputs, logprobs):
        self.passes += 1
        found = []
        for prompt in prompts:
            tokens = list(prompt)
            while len(tokens) < len(prompt) + outputs:
                tokens.append((sum(tokens) + self.alone * (len(prompts) == 1)) % 1000)
            drift = self.passes * self.rounding
            found.append(engine_worker.EngineAnswer(tokens[len(prompt) :], [drift] * outputs, 0.0, 0.0, 0))
        return found

    def preempted(self):
        return 5


SMALL = EngineCase("small", "llama8b", 2, 8)
KINDS = ("again", "alone", "mixed", "resumed")


@pytest.mark.parametrize("stub, equal", [
    (Stub(), (2, 2, 2, 2)), (Stub(alone=1), (2, 0, 2, 2)), (Stub(rounding=0.1), (0, 0, 0, 0)),
])  # fmt: skip
def test_answers_that_come_again(stub, equal):
    prompts = [[3, 5], [7]]
    answers = stub.generate(prompts, SMALL.checked_outputs, True)
    assert engine_worker.repeats(stub, SMALL, prompts, answers) == dict(zip(KINDS, equal))


def test_a_worker_counts_preemptions():
    """A worker without timed passes has no figures of them."""
    name = "engine-vllm-tiny-dsv32-kv656-preempted"
    found = engine_worker.observe(Stub(), CASES[name], 0, engine_worker.Turns())
    assert found.keys() == {"answers", "cache_tokens", "preempted", "repeats"} and found["preempted"] == 5
    assert len(found["answers"]) == 32 and found["repeats"] == dict.fromkeys(KINDS, 32)
    assert engine.repeated(found).endswith(
        "of 32 answers, equal: 32 again, 32 alone, 32 mixed, 32 resumed, after 5 preemptions"
    )
    assert "preempted" not in engine_worker.observe(Stub(), SMALL, 1, engine_worker.Turns())


WORKER = """
import os, sys, time
from pathlib import Path
from bench.engine_worker import MARK, TURNS, Turns

name, log, turns = sys.argv[2], Path(sys.argv[1]), Turns(os.environ[TURNS])
if name == "broken":
    sys.exit(1)
time.sleep(0.3 * (name == "late"))
with log.open("a") as file:
    print("started", name, file=file, flush=True)
    turns.await_others(name)
    for i in range(3):
        with turns.turn():
            print("begin", name, i, file=file, flush=True)
            time.sleep(0.05)
            print("end", name, i, file=file, flush=True)
print(MARK + "{}")
"""


def test_workers_that_start_together_have_turns(tmp_path, monkeypatch):
    """No pass begins before all have started, no two run at once, and a worker that fails keeps none waiting."""
    (tmp_path / "turning.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    log, names = tmp_path / "log", ("early", "late", "broken")
    assert engine.Workers(module="turning").in_turn(str(log), names, 3) == [{}, {}, None]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert sorted(lines[:2]) == [["started", "early"], ["started", "late"]]
    for begin, end in zip(lines[2::2], lines[3::2], strict=True):
        assert (begin[0], end[0]) == ("begin", "end") and begin[1:] == end[1:]
    assert len(lines) == 2 + 2 * 2 * 3


def small_case(monkeypatch, model, **more):
    """Return a case of a small model, which is among the cases during the test."""
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4} | more
    case = EngineCase("small", "small", 1, 8, layers=1)
    monkeypatch.setitem(cases.MODELS, "small", cases.MODELS[model] | small)
    monkeypatch.setitem(CASES, "small", case)
    return case


def errors_of(case, found, providers=()):
    """Return the rows of errors and of answers of the case."""
    ((errors, answers),) = engine_error.measure(
        ["small"], providers, ENV, lambda name, provider, passes: found[provider]
    )
    return errors, answers


@pytest.mark.parametrize("model", ["llama8b", "gemma2-9b"])
def test_errors_against_fp32(monkeypatch, model):
    """One provider answers as the reference does, the other errs by 0.25 at one token of each answer."""
    case = small_case(monkeypatch, model, num_key_value_heads=2, head_dim=16)
    reference, prompts, tokens = Reference(case), case.prompts(1, list(CHECKED)), [[7, 11, 300], [5, 2, 9, 4]] * 4
    repeats = {"cache_tokens": 9, "repeats": dict(zip(KINDS, (8, 7, 6, 5)))}
    answers = [{"tokens": t, "logprobs": reference.logprobs(p, t)} for p, t in zip(prompts, tokens)]
    wrong = [a | {"logprobs": [a["logprobs"][0] + 0.25, *a["logprobs"][1:]]} for a in answers]
    found = {
        "ours": {"answers": answers} | repeats, "vllm-triton": {"answers": wrong} | repeats, "vllm-flash-attn": None
    }  # fmt: skip
    (ours, triton), (again, beside) = errors_of(case, found, tuple(found))
    assert (ours.tokens, ours.distinct) == (28, 7) and ours.largest < 1e-4
    assert triton.largest == pytest.approx(0.25, abs=1e-4) and triton.mean == pytest.approx(0.25 * 8 / 28, abs=1e-4)
    assert (again.count, again.again, again.alone, again.mixed, again.resumed, again.preempted) == (8, 8, 7, 6, 5, None)
    assert (again.reference, beside.difference) == ("vllm-triton", 0.0)
    assert again.common == 1.0 and again.difference == pytest.approx(triton.mean, abs=1e-4)
    assert Reference(replace(case, layers=2)).logprobs(prompts[0], tokens[0]) != answers[0]["logprobs"], "layers count"


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 16}  # fmt: skip


def test_the_model_in_fp32_chooses_keys(monkeypatch, tmp_path):
    """transformers' own model of DeepSeek V3.2 gives the same log probabilities. Its indexer leaves out keys."""
    v32 = pytest.importorskip("transformers.models.deepseek_v32", exc_type=ImportError)
    assert v32 is not None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case = small_case(monkeypatch, "dsv32", **LATENT, index_topk=24)
    engine_worker.write_config(case, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(dict(engine_worker.checkpoint(str(tmp_path))))
    prompt, tokens = case.prompts(1, [150])[0], [7, 11, 300]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1 - len(tokens) : -1].log_softmax(-1)
    theirs = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    ours = torch.tensor(Reference(case).logprobs(prompt, tokens))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    full = small_case(monkeypatch, "dsv32", **LATENT, index_topk=999)
    assert (torch.tensor(Reference(full).logprobs(prompt, tokens)) - ours).abs().max() > 0.01, "keys were left out"


def test_kernels_of_a_step(capsys):
    """A decode step has what a longer pass has more than a shorter one."""
    own = "attention_sm90__bf16_kv656v_d576x512_full_slots_m64_0"
    short = engine_profile.summed([("gemm", 10.0), ("gemm", 30.0), (own, 5.0)])
    long = engine_profile.summed([("gemm", 10.0), ("gemm", 30.0), (own, 5.0), *[(own, 8.0), ("norm", 2.0)] * 4])
    assert short == {"gemm": (2, 40.0), own: (1, 5.0)}
    decode = engine_profile.step(short, long, 4)
    assert decode == {own: (1.0, 8.0), "norm": (1.0, 2.0)}
    result = {"phases": {"prompts": short, "decode": decode}, "decode_us": 12.0}
    rows = list(engine_profile.measure(LOAD, ("ours", "vllm-triton"), ENV, lambda case, provider, steps: (
        result if provider == "ours" else None)))  # fmt: skip
    assert [(r.phase, r.kernel, r.ours, r.time_us) for r in rows] == [
        ("prompts", "gemm", 0, 40.0), ("prompts", own, 1, 5.0), ("decode", own, 1, 8.0), ("decode", "norm", 0, 2.0),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "decode: 10.0 us of kernels, 80.0% of them of ours (*)" in printed
    assert "ours: a decode step takes 12 us without the profiler" in printed
    with pytest.raises(NotImplementedError, match="only vLLM on one GPU"):
        next(engine_profile.measure("engine-vllm-tiny-llama-bf16-x2", ("ours",), ENV))


LOADED = "server-vllm-tiny-llama-nvfp4"
VLLM = '''
"""Stands for `vllm`: serve and bench serve. The mode is in the file MODE."""
import http.server, json, pathlib, sys

args, mode = sys.argv[1:], pathlib.Path(__file__).with_name("MODE").read_text()
value = lambda flag: args[args.index(flag) + 1]


class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0

    def log_message(self, *args): pass

    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b'vllm:num_requests_running{engine="0"} 0.0\\n')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Answers.asked += 1
        drift = Answers.asked if mode == "drifts" else 0
        self.send_response(200); self.end_headers()
        try:
            if body.get("stream"):
                for i in range(body["max_tokens"]):
                    self.wfile.write(b"data: {}\\n"); self.wfile.flush()
            else:
                tokens = [sum(body["prompt"]) + i + drift for i in range(body["max_tokens"])]
                self.wfile.write(json.dumps({"choices": [{"token_ids": tokens}]}).encode())
        except OSError:
            pass  # abandoned


if args[0] == "serve":
    http.server.ThreadingHTTPServer((value("--host"), int(value("--port"))), Answers).serve_forever()
else:
    figures = {f"{p}_{m}_ms": 2.0 for m in ("ttft", "tpot") for p in ("p50", "p99")}
    result = {"completed": int(value("--num-prompts")), "failed": 0, "output_throughput": 1000.0}
    pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result | figures))
'''


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["works", "drifts"])
def test_rows_of_a_server(tmp_path, monkeypatch, capsys, mode):
    """Our backend gets no row if answers change under load; others do, and it says how many did."""
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "MODE").write_text(mode)
    readings = iter([(100.0, 4000.0), (101.5, 4000.0)] * 2)
    monkeypatch.setattr(server, "COMMAND", [sys.executable, str(tmp_path / "vllm.py")])
    monkeypatch.setattr(server, "tokenizer", lambda folder, size: (folder / "tokenizer.json").write_text("{}"))
    monkeypatch.setattr(server, "memory", lambda pid: next(readings))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(server, "DRAIN", 0.0)
    for name in (
        "PYTHONPATH",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        *engine_worker.VLLM_ENVIRONMENT,
        *engine_backends.DEFAULTS,
    ):
        monkeypatch.setenv(name, "")
    rows = list(server.measure(LOADED, ("ours", "vllm-triton") if mode == "drifts" else ("ours",), ENV))
    if mode == "drifts":
        assert [(r.provider, r.changed) for r in rows] == [("vllm-triton", len(CHECKED))]
        assert f"{len(CHECKED)} of {len(CHECKED)} answers changed under load" in capsys.readouterr().out
        return
    (row,) = rows
    assert row.changed == 0 and row.completed == SERVERS[LOADED].requests and row.abandoned >= server.ABANDONING
    assert (row.host_growth_mib, row.device_growth_mib, row.tokens_per_s) == (1.5, 0.0, 1000.0)
