"""The benchmark of vLLM's HTTP server, with a small server in its place that speaks the same protocol."""

import signal
import sys

import pytest

from bench import engine_worker, server
from bench.cases.engine import CHECKED, SERVERS
from bench.results import Environment

pytestmark = pytest.mark.slow

ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")
CASE = "server-vllm-tiny-llama-nvfp4"
VLLM = '''
"""Stands for `vllm`: serve and bench serve. The mode is in the file MODE."""
import http.server, json, pathlib, sys, time

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
        assert body["model"] == "bench" and body["temperature"] == 0.0
        Answers.asked += 1
        drift = Answers.asked if mode == "drifts" else 0
        status = 500 if mode == "refuses" and body.get("stream") else 200
        self.send_response(status); self.end_headers()
        try:
            if body.get("stream"):
                for i in range(2 if mode == "hangs up" else body["max_tokens"]):
                    self.wfile.write(b"data: {}\\n"); self.wfile.flush()
            else:
                tokens = [sum(body["prompt"]) + i + drift for i in range(body["max_tokens"])]
                self.wfile.write(json.dumps({"choices": [{"token_ids": tokens}]}).encode())
        except OSError:
            pass  # abandoned


if args[0] == "serve":
    folder = pathlib.Path(args[1])
    assert (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    assert value("--kv-cache-dtype") == "nvfp4" and "--no-enable-prefix-caching" in args
    if mode == "dies":
        sys.exit("RuntimeError: no kernel")
    http.server.ThreadingHTTPServer((value("--host"), int(value("--port"))), Answers).serve_forever()
else:
    failed = 1 if mode == "fails" else 0
    figures = {f"{p}_{m}_ms": 2.0 for m in ("ttft", "tpot") for p in ("p50", "p99")}
    result = {"completed": int(value("--num-prompts")) - failed, "failed": failed, "output_throughput": 1000.0}
    time.sleep(0.2)
    pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result | figures))
'''


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """Return a function that chooses how the server behaves."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setattr(server, "COMMAND", [sys.executable, str(tmp_path / "vllm.py")])
    monkeypatch.setattr(server, "tokenizer", lambda folder, size: (folder / "tokenizer.json").write_text("{}"))
    readings = iter([(100.0, 4000.0), (101.5, 4000.0)])
    monkeypatch.setattr(server, "memory", lambda pid: next(readings))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(server, "DRAIN", 0.0)
    for name in ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING", *engine_worker.VLLM_ENVIRONMENT):
        monkeypatch.setenv(name, "")
    return (tmp_path / "MODE").write_text


def test_a_row_has_the_second_load(vllm):
    vllm("works")
    before = signal.getsignal(signal.SIGTERM)
    (row,) = server.measure(CASE, ("ours",), ENV)
    assert signal.getsignal(signal.SIGTERM) is before
    assert row.completed == SERVERS[CASE].requests and row.abandoned >= server.ABANDONING
    assert (row.host_mib, row.host_growth_mib, row.device_growth_mib) == (100.0, 1.5, 0.0)
    assert row.tokens_per_s == 1000.0 and row.ttft_p99_ms == 2.0


@pytest.mark.parametrize(
    "mode, said",
    [
        ("fails", "1 of 100 requests failed"),
        ("hangs up", "the answer ended: b''"),
        ("refuses", "status 500"),
        ("drifts", f"{len(CHECKED)} of {len(CHECKED)} answers changed under load"),
        ("dies", "RuntimeError: no kernel"),
    ],
)
def test_no_row_for_a_server_that_errs(vllm, capsys, mode, said):
    vllm(mode)
    assert list(server.measure(CASE, ("ours",), ENV)) == []
    printed = capsys.readouterr().out
    assert "no row: ours" in printed and said in printed
