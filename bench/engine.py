"""Measure whole engines: tokens per second and latencies of a real vLLM or SGLang, with our attention backend and with
its own.

Each (case, provider) is a process of its own (`engine_worker`), which first answers a few prompts with log
probabilities, then runs the load several times. A provider gets a row if its answers agree with those of the
reference, which is the engine's first backend that ran: the log probabilities of the tokens, until the answers part,
differ in the mean by at most `allowed`, which grows with the difference between the engine's own backends.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .cases.engine import CASES
from .engine_backends import BACKENDS, OTHER_CACHE, OURS, has_backend
from .engine_worker import MARK, TURNS
from .results import EngineRow, Environment, ResultRow, with_ratios

PROVIDERS = tuple(dict.fromkeys(p for providers in BACKENDS.values() for p in providers))
REFERENCES = (*(p for p in PROVIDERS if p not in OURS), *OTHER_CACHE, "ours")  # answers are compared with the first's
# Mean difference of log probabilities, by the type of the cache
LIMITS = {"bf16": 0.1, "fp8": 0.25, "nvfp4": 1.0, "fp8_ds_mla": 0.15, "nvfp4_ds_mla": 1.0}
SLACK = 1.5  # times the largest difference between two of the engine's own backends
TIMEOUT = 540.0  # seconds for a process
LAST_LINES = 12  # of a worker that failed, which are printed
Run = Callable[[str, str, int], "dict[str, Any] | None"]  # (case, provider, passes) -> what the worker prints


@dataclass(frozen=True)
class Agreement:
    """How two engines' answers agree. common: share of the tokens before the runs part. difference: mean absolute
    difference of the log probabilities of these."""

    common: float
    difference: float


def agreement(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> Agreement:
    """Compare the answers to the same prompts."""
    differences: list[float] = []
    total = 0
    for a, b in zip(answers, others, strict=True):
        total += len(a["tokens"])
        for token, other, p, q in zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"]):
            differences.append(abs(p - q))  # of the token at which they part, too: each one's own choice
            if token != other:
                break
    return Agreement(len(differences) / max(1, total), fmean(differences) if differences else float("inf"))


def allowed(kv: str, own: list[Agreement]) -> float:
    """Return the largest difference from the reference with which a provider gets a row.

    kv: type of the cache. own: how the engine's other backends agree with the reference. A router of experts turns
    rounding into other tokens, whatever the backend.
    """
    return max([LIMITS[kv], *(SLACK * a.difference for a in own)])


def end_group(pid: int) -> None:
    """Kill what is left of the processes that a process started, if it began a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that what a function has started ends with this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Workers:
    """Starts worker processes. logs: a folder for what they print, or "". module: what they run. turns: the folder of
    `engine_worker.Turns`, or "" if they need not wait for each other."""

    def __init__(self, logs: str = "", module: str = "bench.engine_worker", turns: str = "") -> None:
        self.logs, self.module, self.turns = logs, module, turns
        self._running: set[int] = set()

    def __call__(self, case: str, provider: str, passes: int) -> dict[str, Any] | None:
        """Run a worker; return its result, or None after printing why there is none."""
        process = subprocess.Popen(
            [sys.executable, "-m", self.module, case, provider, str(passes)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            env=os.environ | {TURNS: self.turns},
        )  # fmt: skip
        self._running.add(process.pid)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            print(f"  no row: {case} {provider}: still running after {TIMEOUT:.0f} s", flush=True)
            return None
        finally:
            end_group(process.pid)  # engines have processes of their own, which hold the GPU's memory
            self._running.discard(process.pid)
            if self.turns:  # a worker that has failed keeps no other one waiting
                Path(self.turns, provider).unlink(missing_ok=True)
        if self.logs:
            Path(self.logs).mkdir(parents=True, exist_ok=True)
            Path(self.logs, f"{case}.{provider}.log").write_text(out + err)
        lines = [line for line in out.splitlines() if line.startswith(MARK)]
        if not lines:
            said = (out + err).splitlines()
            errors = [line for line in said if "Error" in line]
            why = errors[-1].strip()[-300:] if errors else f"exit code {process.returncode}"
            print("\n".join([*said[-LAST_LINES:], f"  no row: {case} {provider}: {why}"]), flush=True)
            return None
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return found

    def in_turn(self, case: str, providers: tuple[str, ...], passes: int) -> list[dict[str, Any] | None]:
        """Run workers that start side by side, and then use the GPU in turn, pass by pass. Return their results."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(providers)) as pool:
            for provider in providers:
                Path(folder, provider).touch()
            workers = Workers(self.logs, self.module, folder)
            try:
                return list(pool.map(lambda provider: workers(case, provider, passes), providers))
            finally:
                workers.end()

    def end(self) -> None:
        """Kill all workers that run."""
        for pid in list(self._running):
            end_group(pid)


def results_of(
    name: str, providers: tuple[str, ...], passes: int, rounds: int, run: Run, together: int
) -> dict[str, list[dict[str, Any]]]:
    """Run the workers of a case. Return what each provider's printed, and print a line about each of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for i in range(rounds):
        order = providers[:: -1 if i % 2 else 1]
        for first in range(0, len(order), together):
            some = order[first : first + together]
            results = run.in_turn(name, some, passes) if isinstance(run, Workers) and len(some) > 1 else [
                run(name, provider, passes) for provider in some
            ]  # fmt: skip
            for provider, result in zip(some, results):
                if result is not None:
                    print(f"  {describe(provider, result)}", flush=True)
                    found.setdefault(provider, []).append(result)
    return found


def measure(
    name: str, providers: tuple[str, ...], env: Environment, passes: int = 3, rounds: int = 1, run: Run | None = None,
    together: int = 1,
) -> tuple[list[ResultRow], list[EngineRow]]:  # fmt: skip
    """Return the rows of a case: times per output token, and all figures.

    providers: empty for all that run the case. rounds: each runs that often, odd rounds in the reverse order; its row
    is the median run. together: engines that start side by side if the GPU has memory for so many, and then have their
    passes in turn; 1: each one starts when the one before has ended.
    """
    case = CASES[name]
    found = results_of(name, chosen(name, providers), passes, rounds, run or Workers(), together)
    reference = reference_of(found)
    same = {p: agreement(r[0]["answers"], found[reference][0]["answers"]) for p, r in found.items() if reference}
    limit = allowed(case.kv, [a for p, a in same.items() if p not in OURS and p != reference])
    engine_rows, rows = [], []
    for provider, results in found.items():
        if provider in OURS and same[provider].difference > limit:
            differ = f"log probabilities differ from {reference}'s by {same[provider].difference:.3f}"
            print(f"  no row: {provider}: {differ}, at most {limit:.3f} is allowed", flush=True)
            continue
        runs = sorted((r["median"] for r in results), key=lambda m: float(m["tokens_per_s"]))
        mid = runs[len(runs) // 2]
        speeds = [p["tokens_per_s"] for r in results for p in r["passes"]]
        engine_rows.append(
            env.make(EngineRow, case=name, provider=provider, cache_tokens=results[0]["cache_tokens"],
                cold_tokens_per_s=median(r["warm"]["tokens_per_s"] for r in results),
                passes=len(speeds), noise=(max(speeds) - min(speeds)) / mid["tokens_per_s"],
                common=same[provider].common, difference=same[provider].difference, reference=reference,
                **{key: value for key, value in mid.items() if key not in ("seconds", "computed")},
            )
        )  # fmt: skip
        rows.append(env.row(name, provider, 1e6 / mid["tokens_per_s"]))
    best = min((r for r in rows if r.provider not in OURS), key=lambda r: r.time_us, default=None)
    if best is not None:
        rows.append(env.row(name, f"{case.engine}-best", best.time_us))
    return with_ratios(rows), engine_rows


def chosen(name: str, providers: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the providers that run a case, of all if none is named, and print which ones do not."""
    case = CASES[name]
    refuse_others(providers, PROVIDERS)
    found = tuple(p for p in providers or BACKENDS[case.engine] if has_backend(case, p))
    if others := [p for p in providers if p not in found]:
        print(f"  {name} is not run by {', '.join(others)}", flush=True)
    return found


def reference_of(found: Iterable[str]) -> str | None:
    """Return the provider that is the reference: the answers of all other providers are compared with its answers."""
    return next((p for p in REFERENCES if p in found), None)


def repeated(result: dict[str, Any]) -> str:
    """Return how many answers of a worker were equal when it was asked again."""
    repeats = ", ".join(f"{count} {how}" for how, count in result["repeats"].items())
    preempted = f", after {result['preempted']} preemptions" if "preempted" in result else ""
    return f"of {len(result['answers'])} answers, equal: {repeats}{preempted}"


def describe(provider: str, result: dict[str, Any]) -> str:
    """Return a line about one worker's result."""
    m, speeds = result["median"], [p["tokens_per_s"] for p in result["passes"]]
    return (
        f"{provider:16} {m['tokens_per_s']:8.0f} tokens/s ({min(speeds):.0f} to {max(speeds):.0f})   "
        f"first token {m['ttft_p50_ms']:.0f} ms, p99 {m['ttft_p99_ms']:.0f}   "
        f"each {m['tpot_p50_ms']:.2f} ms, p99 {m['tpot_p99_ms']:.2f}   "
        f"{m['computed']:.0f} tokens of prompts computed   "
        f"first pass {result['warm']['tokens_per_s']:.0f} tokens/s   {result['cache_tokens']} tokens in the cache, "
        f"started in {result['started_s']:.0f} s   {repeated(result)}"
    )


def refuse_others(providers: Iterable[str], known: Iterable[str]) -> None:
    """Raise SystemExit if a provider is not among those that are known."""
    if unknown := [p for p in providers if p not in known]:
        raise SystemExit(f"no provider is named {', '.join(unknown)}; there are: {', '.join(known)}")
