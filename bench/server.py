"""Put vLLM's HTTP server under load: tokens per second, latencies, errors, and the growth of its memory.

`vllm serve` runs on a port of this machine, with our attention backend or with one of its own. `vllm bench serve` sends
it requests of mixed lengths, twice, while other clients abandon theirs in the middle. A provider gets a row if every
request was answered; ours only if the same prompts, asked alone before the load and after it, have the same answers.
"""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases.engine import ABANDONED_OUTPUTS, CHECKED, CHECKED_OUTPUTS, SERVERS, ServerCase
from .engine import LAST_LINES, end_group, exit_on_sigterm, refuse_others
from .engine_backends import BACKENDS, ENVIRONMENT, OTHER_CACHE, OURS, cache_of
from .engine_worker import prepare_vllm, vllm_arguments, write_config
from .results import Environment, ServerRow

LOG = "server.log"  # what a server prints
MODEL = "bench"  # the name under which the model is served
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main"]  # `vllm`, also where it is not installed
START, LIMIT = 240.0, 400.0  # seconds for a server to start, and for a load
PROVIDERS = tuple(p for p in BACKENDS["vllm"] if p not in OTHER_CACHE)
ABANDONING = 8  # clients that abandon their requests
PATIENCE = 40  # tokens after which they do so, at most
DRAIN = 60.0  # seconds in which a server forgets abandoned requests
MIB = 1 << 20


@dataclass
class Load:
    """A load of requests that were all answered. result: what `vllm bench serve` says of it. abandoned: the number of
    requests that other clients abandoned."""

    result: dict[str, Any]
    abandoned: int


class Server:
    """A running server. pid: of its first process."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid

    def ask(self, prompt: list[int], outputs: int, **options: Any) -> http.client.HTTPConnection:
        """Send a request of completion, and return the connection on which the answer comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": outputs, "temperature": 0.0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
        return connection

    def answers(self, case: ServerCase) -> list[Any]:
        """Return the tokens of the answers to the prompts of the check, asked one after another."""
        found = []
        for prompt in case.engine.prompts(1, list(CHECKED)):
            connection = self.ask(prompt, CHECKED_OUTPUTS, return_token_ids=True)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {text[:300]!r}")
            found.append(json.loads(text)["choices"][0]["token_ids"])
            connection.close()
        return found

    def abandon(self, case: ServerCase, seed: int, stop: threading.Event) -> tuple[int, list[str]]:
        """Send requests one after another until `stop`; close each connection after some tokens of the answer. Return
        the number of requests, and the errors."""
        draw, vocabulary = random.Random(f"abandon {seed}"), case.engine.config["vocab_size"]
        requests, errors = 0, []
        while not stop.is_set():
            length = draw.randint(1, 2 * case.engine.prompt)  # tokens
            prompt, left = [draw.randrange(100, vocabulary) for _ in range(length)], draw.randint(0, PATIENCE)
            requests += 1
            try:
                connection = self.ask(prompt, ABANDONED_OUTPUTS, stream=True)
                response = connection.getresponse()
                if response.status != 200:
                    errors.append(f"status {response.status}: {response.read(300)!r}")
                    left = 0
                while left > 0:
                    line = response.readline()
                    left -= line.startswith(b"data:")
                    if not line or b'"error"' in line:
                        errors.append(f"the answer ended: {line[:300]!r}")
                        break
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                errors.append(repr(error))
        return requests, errors

    def wait_until_idle(self) -> None:
        """Wait until the server has forgotten the requests that were abandoned. Raise RuntimeError if it does not."""
        deadline = time.monotonic() + DRAIN
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            running = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
            if running and not any(map(float, running)):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server still has requests after {DRAIN:.0f} s: {running}")
            time.sleep(0.2)


def tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of words w0, w1, ...: a text of n words has n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return the command-line flags of arguments: a bool becomes --x or --no-x, and a dict becomes JSON."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(case: ServerCase, provider: str, folder: Path) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and stop it at the end. Raise RuntimeError if it does not start."""
    write_config(case.engine, folder)
    tokenizer(folder, case.engine.config["vocab_size"])
    prepare_vllm(folder)
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    os.environ |= ENVIRONMENT.get(provider, {})
    port = free_port()
    options = vllm_arguments(cache_of(case.engine, provider), BACKENDS["vllm"][provider])
    options["max_model_len"] = case.longest
    command = [*COMMAND, "serve", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    log = folder / LOG
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--disable-uvicorn-access-log", *flags(options)], stdout=out, stderr=out, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START
            while not (healthy(port) and process.poll() is None):
                if process.poll() is not None or time.monotonic() > deadline:
                    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                    raise RuntimeError("\n".join([*last, f"the server did not start (exit code {process.poll()})"]))
                time.sleep(0.2)
            yield Server(port, process.pid)
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it started, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_group(process.pid)
        process.wait()


def healthy(port: int) -> bool:
    """Return whether a server on this port says that it is ready."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def load(server: Server, case: ServerCase, seed: int, folder: Path) -> Load:
    """Send a load. Raise RuntimeError if a request failed, abandoned ones included."""
    stop = threading.Event()
    command = [*COMMAND, "bench", "serve"] + flags({
        "backend": "vllm", "base_url": f"http://127.0.0.1:{server.port}", "model": MODEL, "tokenizer": str(folder),
        "dataset_name": "random", "random_input_len": case.engine.prompt, "random_output_len": case.engine.outputs,
        "random_range_ratio": case.range, "num_prompts": case.requests, "max_concurrency": case.engine.requests,
        "seed": seed, "temperature": 0.0, "percentile_metrics": "ttft,tpot", "metric_percentiles": "50,99",
        "result_dir": str(folder), "result_filename": f"load{seed}.json",
    })  # fmt: skip
    with ThreadPoolExecutor(ABANDONING) as pool:
        clients = [pool.submit(server.abandon, case, ABANDONING * seed + i, stop) for i in range(ABANDONING)]
        try:
            done = subprocess.run(
                [*command, "--save-result", "--disable-tqdm"], capture_output=True, text=True, timeout=LIMIT
            )
        finally:
            stop.set()
        ended = [client.result() for client in clients]
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:]))
    result: dict[str, Any] = json.loads((folder / f"load{seed}.json").read_text())
    errors = [error for _, found in ended for error in found]
    if result["failed"] or result["completed"] != case.requests or errors:
        raise RuntimeError(
            f"{result['failed']} of {case.requests} requests failed, and {len(errors)} of those that were abandoned: "
            f"{errors[:3]}"
        )
    return Load(result, sum(requests for requests, _ in ended))


def memory(pid: int) -> tuple[float, float]:
    """Return the MiB that a process and its children use on the host, and that all processes use on the GPU."""
    import psutil
    import torch

    first = psutil.Process(pid)
    host = sum(p.memory_info().rss for p in (first, *first.children(recursive=True)))
    free, total = torch.cuda.mem_get_info()
    return host / MIB, (total - free) / MIB


def measure(name: str, providers: tuple[str, ...], env: Environment, logs: str = "") -> Iterator[ServerRow]:
    """Yield the rows of a case, and print why a provider has none. logs: a folder for what each server prints, or
    ""."""
    case = SERVERS[name]
    refuse_others(providers, PROVIDERS)
    with exit_on_sigterm():
        for provider in providers:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = observe(case, provider, Path(folder), env)
                except Exception as error:
                    print(f"  no row: {provider}: {type(error).__name__}: {error}", flush=True)
                    continue
                finally:
                    if logs and Path(folder, LOG).exists():
                        Path(logs).mkdir(parents=True, exist_ok=True)
                        shutil.copy(Path(folder, LOG), Path(logs, f"{name}.{provider}.log"))
            print(f"  {provider:16} {describe(row)}", flush=True)
            yield row


def observe(case: ServerCase, provider: str, folder: Path, env: Environment) -> ServerRow:
    """Run one server. Raise RuntimeError if a request failed, or if the load changed an answer of our backend; the
    engine's own ones need not be deterministic."""
    with running(case, provider, folder) as server:
        before = server.answers(case)
        load(server, case, 1, folder)  # brings the memory of allocators and caches to where it stays
        server.wait_until_idle()
        host, device = memory(server.pid)
        second = load(server, case, 2, folder)
        server.wait_until_idle()
        after = server.answers(case)
        grown_host, grown_device = memory(server.pid)
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    if changed and provider in OURS:
        raise RuntimeError(f"{changed} of {len(before)} answers changed under load")
    result = second.result
    return env.make(
        ServerRow, case=case.name, provider=provider, completed=float(result["completed"]),
        abandoned=float(second.abandoned), changed=float(changed),
        tokens_per_s=result["output_throughput"],
        **{f"{m}_{p}_ms": result[f"{p}_{m}_ms"] for m in ("ttft", "tpot") for p in ("p50", "p99")},
        host_mib=host, host_growth_mib=grown_host - host, device_mib=device, device_growth_mib=grown_device - device,
    )  # fmt: skip


def describe(row: ServerRow) -> str:
    """Return a line about a row."""
    return (
        f"{row.completed:.0f} requests, {row.abandoned:.0f} abandoned, {row.changed:.0f} answers changed   "
        f"{row.tokens_per_s:.0f} tokens/s   "
        f"first token {row.ttft_p50_ms:.0f} ms, p99 {row.ttft_p99_ms:.0f}   "
        f"each {row.tpot_p50_ms:.2f} ms, p99 {row.tpot_p99_ms:.2f}   "
        f"host {row.host_mib:.0f} {row.host_growth_mib:+.1f} MiB   "
        f"GPU {row.device_mib:.0f} {row.device_growth_mib:+.1f} MiB"
    )
