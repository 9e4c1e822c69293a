"""Measure a serving engine's trace: the attention of one layer, step by step, with every provider.

Requests arrive at random times; their prompts and outputs have log-normal lengths. All of it is drawn from one seed. A
scheduler like that of serving engines gives each step one token of every decoding request and, up to a token budget,
chunks of prompts in order of arrival. A request is admitted if the pool has room for all its tokens. All providers
compute the same steps on the same pages (flash-attn-4: on contiguous copies, made outside the timed call; flashinfer's
plan is outside it too). Figures about requests, such as the time to the first token, are sums of attention times alone.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import prefill
from .cases.attention import AttentionCase, make_inputs
from .harness import Measurement, Setup
from .timing import exactly, quantile


@dataclass(frozen=True)
class Trace:
    """Parameters of a trace.

    every: average number of steps between two arrivals. prompt, output: median tokens, and sigma of their logarithm.
    budget: tokens of a step. room: tokens of the pool.
    """

    name: str
    requests: int = 200
    every: float = 2.0
    prompt: tuple[float, float] = (1500.0, 1.0)
    output: tuple[float, float] = (120.0, 0.8)
    budget: int = 2048
    room: int = 256 * 1024
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page: int = 16
    seed: int = 0


TRACE = Trace("trace-bf16-h32x8-d128-p16")
MOST_PROMPT, MOST_OUTPUT = 32768, 1024
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(eq=False)
class TraceRequest:
    """A request. known: its tokens in the pool. first: the step that gave its first token, -1 before that."""

    arrival: int
    prompt: int
    total: int
    known: int = 0
    first: int = -1


class TraceStep(NamedTuple):
    """Query tokens (q_lens) and all tokens so far (kv_lens) of a step's requests. Decoding requests come first."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def requests_of(trace: Trace) -> list[TraceRequest]:
    draw, arrival, found = random.Random(trace.seed), 0.0, []
    for _ in range(trace.requests):
        prompt, output = (
            max(1, min(most, round(median * draw.lognormvariate(0.0, sigma))))
            for (median, sigma), most in ((trace.prompt, MOST_PROMPT), (trace.output, MOST_OUTPUT))
        )
        arrival += draw.expovariate(1 / trace.every)
        found.append(TraceRequest(int(arrival), prompt, prompt + output))
    return found


def steps_of(trace: Trace, requests: list[TraceRequest]) -> list[TraceStep]:
    """Return all steps until the last request ends, and set `first` of each request. Raise ValueError if a request has
    no room in the pool."""
    if max(r.total for r in requests) > trace.room:
        raise ValueError(f"room: {trace.room} tokens, too few for the longest request")
    waiting, running, steps = deque(sorted(requests, key=lambda r: r.arrival)), list[TraceRequest](), list[TraceStep]()
    now = 0
    while waiting or running:
        decodes = [r for r in running if r.known >= r.prompt]
        work, left = [(r, 1) for r in decodes], trace.budget - len(decodes)
        for r in running:
            if r.known < r.prompt and left > 0:
                work.append((r, min(left, r.prompt - r.known)))
                left -= work[-1][1]
        while left > 0 and waiting and waiting[0].arrival <= now:
            if sum(r.total for r in running) + waiting[0].total > trace.room:
                break
            running.append(waiting.popleft())
            work.append((running[-1], min(left, running[-1].prompt)))
            left -= work[-1][1]
        for r, n in work:
            r.known += n
            if r.known >= r.prompt and r.first < 0:
                r.first = len(steps)
        if work:
            steps.append(TraceStep(*zip(*((n, r.known) for r, n in work))))
        running = [r for r in running if r.known < r.total]
        now = max(now + 1, waiting[0].arrival) if waiting and not running else now + 1
    return steps


def case_of(trace: Trace, step: TraceStep) -> AttentionCase:
    dims = *trace.heads, trace.dim, trace.dim, trace.page
    return AttentionCase(trace.name, "bf16", *step, *dims, lse=False, spare_pages=8)


def times_of(trace: Trace, steps: list[TraceStep], setup: Setup) -> dict[str, list[float]]:
    """Return the microseconds of each step, for each provider with right results in all steps; its best variant
    counts."""
    found: dict[str, list[float]] = {}
    names = setup.providers
    for number, step in enumerate(steps):
        inputs = make_inputs(case_of(trace, step), setup.device, number)
        calls = prefill.collect([inputs], names)
        names = tuple(name for name in names if any(label.partition("/")[0] == name for label in calls))
        for name in names:
            mine = [call for label, call in calls.items() if label.partition("/")[0] == name]
            found.setdefault(name, []).append(min(setup.clock.measure(call, [0]) for call in mine))
        if setup.device != "cpu":
            torch.cuda.empty_cache()
    return {name: found[name] for name in names}


class TraceReport(NamedTuple):
    """A provider's times in microseconds: steps and waits for the first token by SHARES, and the sum of all steps;
    tokens/s."""

    steps: dict[str, float]
    waits: dict[str, float]
    total: float
    tokens: float


def report(requests: list[TraceRequest], steps: list[TraceStep], times: list[float]) -> TraceReport:
    """Summarise a provider's times. A step begins when the one before it ends: time without requests does not count."""
    waits = [sum(times[min(r.arrival, r.first) : r.first + 1]) for r in requests]
    tokens = sum(sum(step.q_lens) for step in steps)
    of_steps, of_waits = (
        {name: quantile(share, values) for name, share in SHARES.items()} for values in (times, waits)
    )
    return TraceReport(of_steps, of_waits, sum(times), tokens / sum(times) * 1e6)


def measure(setup: Setup, trace: Trace = TRACE) -> list[Measurement]:
    """Measure the trace. Rows: a step by SHARES and on average, and the wait for the first token by SHARES."""
    requests = requests_of(trace)
    steps, rows = steps_of(trace, requests), list[Measurement]()
    tokens = sum(sum(step.q_lens) for step in steps)
    print(f"{trace.name}: {len(requests)} requests, {len(steps)} steps, {tokens} tokens", flush=True)
    for name, times in times_of(trace, steps, setup).items():
        r = report(requests, steps, times)
        print(f"  {name:13} {r.tokens:9.0f} tokens/s a layer, {r.total / 1e3:.1f} ms in all", flush=True)
        parts = {f"step-{share}": us for share, us in r.steps.items()} | {"step-mean": r.total / len(steps)}
        parts |= {f"first-{share}": us for share, us in r.waits.items()}
        rows += [Measurement(f"{trace.name}-{part}", name, exactly(us)) for part, us in parts.items()]
    return rows
