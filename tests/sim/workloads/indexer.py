"""Simulated kernels of an indexer, called through public functions and compared with the reference."""

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from ptxsim.runner import RunResult

from bench.cases import indexer as cases
from bench.cases.indexer import PAGED, PAGED_FP4, RAGGED, RAGGED_FP4, SEGMENTS, LogitsCase
from cute_kernels.indexer.spec import IndexerSpec
from wrappers.indexer import logits

from .common import SMS, Outcome, outcome, simulated

PROMPT = 9  # tokens: more than a request has, so that tiles are those of prompts


@dataclass(frozen=True)
class LogitsScenario:
    """Calls on a device of `sms` SMs. selects: keys per token that are then chosen by the same logits, in passes."""

    name: str
    calls: tuple[LogitsCase, ...]
    sms: int = SMS
    selects: int = 0


def logits_cases(spec: IndexerSpec) -> list[LogitsScenario]:
    """Return problems that the kernel serves: requests of as many tokens as its tiles have, and as many or more tokens
    of a prompt."""
    base = LogitsCase(PAGED_FP4, heads=spec.heads, dim=spec.dim, dtype=spec.out, next_n=spec.rows)
    fewer = replace(base, heads=max(spec.heads - 3, spec.heads - 7), next_n=max(1, spec.rows - (spec.rows > 2)))
    tile = logits.dispatch.spec_of(logits.IndexerRequest(spec.heads, spec.dim, PROMPT, keys=spec.keys)).rows
    count = PROMPT if spec.rows == tile else spec.rows
    rows = replace(base, function=RAGGED_FP4, lens=(count, 150), next_n=1)
    rows = replace(rows, function=SEGMENTS) if spec.keys == "bf16" else rows
    tail = replace(
        rows, lens=(count + spec.rows * (spec.rows == tile), 200), windows="random", compressed=90, clean=False
    )
    prompts = LogitsScenario(
        "prompts", (rows, tail, replace(rows, windows="hostile", data="large", shift=8, strided=True)), 5
    )
    if spec.keys == "bf16":  # no cache has pages of them
        few = replace(rows, heads=fewer.heads, lens=(40, 900), windows="random", data="zeros", strided=True)
        many = replace(rows, lens=(PROMPT, 64 * 21 + 5), data="nan")
        return [prompts, LogitsScenario("a share", (many, few), 3)]
    return [
        LogitsScenario(
            "pages",
            (
                replace(base, lens=(70, 0, 200), page_size=16, gap=12, own=spec.rows > 1, more=70),
                replace(fewer, lens=(9, 1), page_size=3, hostile=True, clean=False),
                replace(base, lens=(130,), strided=True, data="zeros", shift=4),
                replace(base, lens=(130, 9, 300, 200, 70), hostile=True, gap=16, clean=False),
            ),
            3,
        ),
        prompts,
        LogitsScenario("a share", (replace(base, lens=(64 * 21 + 5, 3), page_size=256, data="nan"),), 3),
        # more tiles than threads, so that a thread adds up several
        LogitsScenario("requests", (replace(base, lens=(*[0] * 388, 70, 700), page_size=16, clean=False),)),
    ]


def logits_structures(shipped: list[IndexerSpec]) -> list[IndexerSpec]:
    """Return one kernel per structure: one pass over the tokens of a tile or two, one token or several."""
    wanted = (
        IndexerSpec(64, 128, 1),
        IndexerSpec(64, 128, 4),
        IndexerSpec(64, 128, 8),
        IndexerSpec(32, 128, 8, "bf16"),
        IndexerSpec(32, 128, 8, keys="bf16"),
    )
    return [spec for spec in shipped if spec in wanted]


def logits_features() -> list[LogitsScenario]:
    """Return the covering set: the functions that others stand for, and keys at addresses that only words fit."""
    paged = LogitsCase(PAGED, (40, 3), heads=50, next_n=3, page_size=5)
    return [
        LogitsScenario("fp8 functions", (paged, replace(paged, function=RAGGED, lens=(3, 40), next_n=1, shift=1))),
        LogitsScenario(
            "selection",
            (
                replace(paged, lens=(40, 0, 150)),
                replace(paged, own=True),
                replace(paged, function=RAGGED, lens=(9, 150), next_n=1, windows="hostile"),
            ),
            selects=16,
        ),
    ]


def poisoned(call: Any) -> torch.Tensor:
    """Return memory for logits that holds NaN."""
    return torch.full((call.q.shape[0], call.width), math.nan, dtype=logits.DTYPES[call.dtype])


def run_logits(spec: IndexerSpec | None, case: LogitsScenario, arch: str, **how: Any) -> Outcome:
    """Run the calls of a scenario. Columns that a call may leave unwritten must stay as they were."""
    launches: list[RunResult] = []

    def run(call: LogitsCase) -> tuple[float, tuple[torch.Tensor | None, ...]]:
        given = cases.make_inputs(call)
        want = cases.expected(call, given)
        with simulated(arch, launches, case.sms, spec, **how), mock.patch.object(logits, "new_logits", poisoned):
            got = cases.run(call, given)
            picked = cases.select(call, given, top_k=case.selects, scratch_bytes=1 << 12) if case.selects else None
        if picked is not None and not torch.equal(picked, cases.chosen(call, given, got, case.selects)):
            return math.inf, (got, picked)
        unseen = got[want[0] == -math.inf] if got.shape == want[0].shape else got
        kept = call.clean or bool(unseen.isnan().all())
        return cases.error(call, got, want) if kept else math.inf, (got, picked)

    return outcome(case.calls, run, launches)
