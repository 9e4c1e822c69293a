"""Small problems for kernels that merge states, called through the public functions and compared with the reference."""

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from ptxsim.runner import RunResult

from bench.cases import merge_states as cases
from bench.cases.merge_states import IN_PLACE, PAIR, MergeCase
from cute_kernels.merge_states.spec import MergeSpec
from wrappers.host.machine import HostMachine, override
from wrappers.merge import plan

from .common import SMS, Outcome, SimulatedMachine, outcome


@dataclass(frozen=True)
class MergeScenario:
    """Calls, one after the other. Their results must be close to the reference, and all other bytes must stay equal."""

    name: str
    calls: tuple[MergeCase, ...]


def merge_cases(spec: MergeSpec, thorough: bool = False) -> list[MergeScenario]:
    """Return problems that a kernel can run."""
    base = MergeCase(dtype=spec.dtype)
    if spec.pair:
        return [
            MergeScenario("aligned", tuple(replace(call, function=PAIR) for call in (
                base, replace(base, dim=24, tokens=11), replace(base, layout="strided", data="special", tokens=9),
            ))),
            MergeScenario("any address", (
                replace(base, function=PAIR, shift=1, data="special"),
                replace(base, function=PAIR, dim=53, layout="strided"),
                *(replace(base, function=PAIR, shift=1, shifted=(i,), tokens=2) for i in range(2)),
            )),
            MergeScenario("in place", (
                replace(base, function=IN_PLACE, tokens=7, mask="bool"),
                replace(base, function=IN_PLACE, dim=11, mask="uint8", data="special", tokens=9, layout="strided"),
                replace(base, function=IN_PLACE, dim=600, tokens=2, heads=2),
            )),
        ]  # fmt: skip
    return [
        MergeScenario("aligned", (
            base,
            replace(base, states=8, heads=5, dim=80),
            replace(base, states=5, layout="strided", data="special", tokens=9),
            replace(base, states=1, dim=8, tokens=70),
            replace(base, states=2, dim=640, tokens=2, heads=1),
        )),
        MergeScenario("any address", (
            replace(base, shift=1, data="special", tokens=9),
            replace(base, states=4, dim=33),
            replace(base, states=2, dim=577, heads=1, tokens=3, layout="strided"),
        )),
    ]  # fmt: skip


def merge_structures(shipped: list[MergeSpec]) -> list[MergeSpec]:
    """Return one kernel per structure: one tensor or two, elements of 16 bits and of 32."""
    return [spec for spec in shipped if spec.dtype != "fp16"]


def merge_features() -> list[MergeScenario]:
    """Return the covering set: rows with elements that lie apart, and weights of far apart S."""
    base = MergeCase(tokens=4, dim=48)
    calls = [replace(base, function=f, layout="columns", dtype="fp16") for f in (cases.STATES, PAIR, IN_PLACE)]
    far = replace(base, scale=1e4, states=6, tokens=16)
    return [
        MergeScenario("columns apart", tuple(calls)),
        MergeScenario("far S", (far, replace(far, function=PAIR, dtype="fp32"))),
    ]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    return torch.full(like.shape, math.nan, dtype=like.dtype, device=like.device)


def run_merge(spec: MergeSpec | None, case: MergeScenario, arch: str, **how: Any) -> Outcome:
    launches: list[RunResult] = []
    simulated = SimulatedMachine(arch, launches, SMS, spec, how)

    def run(call: MergeCase) -> tuple[float, tuple[torch.Tensor, torch.Tensor]]:
        inputs, given = cases.make_inputs(call), cases.make_inputs(call)
        with override(HostMachine()):
            expected = cases.run(call, given)
        before = [cases.outside(t) for t in inputs.values()]
        with override(simulated), mock.patch.object(plan, "_empty_like", poisoned):
            got = cases.run(call, inputs)
        kept = all(map(torch.equal, before, (cases.outside(t) for t in inputs.values())))
        return cases.difference(call, got, expected) if kept else math.inf, got

    return outcome(case.calls, run, launches)
