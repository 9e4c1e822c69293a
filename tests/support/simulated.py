"""Work of the processes of test_ptxsim_kernels.py: kernels and features by label, and the errors of each."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import product
from typing import Any

from ptxsim.coverage import missing
from ptxsim.faults import Fault
from ptxsim.machine import MODES
from ptxsim.runner import RunResult

from cute_kernels import manifest
from tests.conftest import ARCH, ROOT
from tests.sim import coverage, launcher, memo, workloads
from tests.sim.pool import pool
from tests.support.kernels import (
    BLACKWELL,
    LATER,
    ORDERED,
    REORDERED,
    REPEATED,
    RESIZED,
    SHIPPED,
    TWINS,
    WHOLE,
    family_of,
    structures,
)
from tools import ptxdiff
from tools.matrix import SIMULATED

ELSEWHERE = {
    f"{arch} {manifest.label(op, spec)}": (arch, op, spec) for arch, op, spec in BLACKWELL if (arch, op) in SIMULATED
}
FEATURES = {
    f"{family}/{case.name}": (family, number)
    for family, features in workloads.FEATURES.items()
    for number, case in enumerate(features())
}
MEMORY = ROOT / "build" / "simulated"
FEW = 4  # cases of a kernel that run in modes other than `eager` without --all


def equal_but_for_types(label: str) -> bool:
    """Return whether the PTX of the two twins is equal when bf16 is replaced by f16."""
    texts = (launcher.load(*SHIPPED[name], ARCH).ptx for name in (label, TWINS[label]))
    first, second = (ptxdiff.normalise(text).replace("bf16", "f16") for text in texts)
    return first == second


def cases_of(label: str, some: bool) -> list[Any]:
    """Return the cases of a kernel. some: every second one."""
    op, spec = SHIPPED[label]
    cases = workloads.CASES[family_of(op)](spec)
    return cases[::2] if some else cases


def problems_of_kernel(label: str, turn: int | None, everything: bool) -> list[str]:
    """Return the errors of a kernel.

    turn: number of the case that also runs in a mode other than `eager`, if the kernel is in REORDERED; None if the
    kernel stands for no structure. Such a kernel, and one that differs in sizes alone from one that stands for a
    structure, runs every second case. Without `everything`, a twin is compared with its other one if that is compiled,
    too."""
    if label in TWINS and not everything and TWINS[label] not in LATER and equal_but_for_types(label):
        return []
    op, spec = SHIPPED[label]
    found: list[str] = []
    some = (turn is None or label in RESIZED) and not everything
    cases = cases_of(label, some)
    eager, bits = in_eager(found, (ARCH, op, spec), cases, everything)
    if not found:
        found += [] if some else coverage.uncovered(label, missing(eager))
        others = MODES[1:] if eager.counts else ("random",)  # without asynchronous work only `random` differs
        turn = turn if label in REORDERED else None
        chosen = list(product(cases, others)) if everything else dealt(cases, others[:2], turn)
        in_other_modes(found, (ARCH, op, spec), chosen, bits, everything)
    return found


def in_eager(
    found: list[str], kernel: tuple[str, str, Any], cases: list[Any], everything: bool
) -> tuple[RunResult, dict[str, str]]:
    """Run all cases in `eager`. Return (their results, the bits of each by its name)."""
    whole, bits = RunResult(), {}
    for case in cases:
        outcome = run(found, kernel, case, "eager", everything)
        if outcome:
            whole.add(outcome.result)
            bits[case.name] = outcome.bits
    return whole, bits


def in_other_modes(
    found: list[str], kernel: tuple[str, str, Any], chosen: list[tuple[Any, str]], bits: dict[str, str],
    everything: bool,
) -> None:  # fmt: skip
    """Run pairs (case, mode) and compare the bits. bits: of each case in `eager`."""
    for case, mode in chosen:
        outcome = run(found, kernel, case, mode, everything)
        if outcome and outcome.bits != bits[case.name]:
            found.append(f"{case.name}, {mode}: bits depend on the order in which things happen")


def turns_of(labels: Sequence[str]) -> dict[str, int]:
    """Number kernels within their op, so that those of one op do not decide what those of others run."""
    each: defaultdict[str, list[str]] = defaultdict(list)
    for label in labels:
        each[SHIPPED[label][0]].append(label)
    return {label: turn for some in each.values() for turn, label in enumerate(some)}


def dealt(cases: list[Any], modes: tuple[str, ...], turn: int | None) -> list[tuple[Any, str]]:
    """Return the case and the mode that the `turn`-th kernel runs besides `eager`; none for other kernels. The cases
    behind the first FEW have many tiles."""
    few = cases[:FEW]
    return [] if turn is None else [(few[turn % len(few)], modes[turn % len(modes)])]


def problems_of_feature(label: str, everything: bool) -> list[str]:
    family, number = FEATURES[label]
    found: list[str] = []
    run(found, (ARCH, family, None), workloads.FEATURES[family]()[number], "eager", everything)
    return found


def problems_elsewhere(label: str, everything: bool) -> list[str]:
    """Return the errors of a kernel of another architecture.

    One kernel of each structure also runs in other modes: all cases, or those of `ORDERED`. In them every ring of a
    pipeline wraps around. Without `everything`, kernels that are not in WHOLE run every second case, and one of an op
    that Hopper has, too, its first case.
    """
    kernel = arch, op, spec = ELSEWHERE[label]
    found: list[str] = []
    cases = workloads.CASES[family_of(op)](spec)
    if not everything:
        few = op != "attention.sm100"
        cases = cases[:1] if few else cases if (arch, spec.name) in WHOLE else cases[::2]
    eager, bits = in_eager(found, kernel, cases, everything)
    if not found and kernel in REPEATED and (everything or (arch, spec.name) in WHOLE):
        found += unwrapped(eager) if op == "attention.sm100" else []
        others = MODES[1:] if eager.counts else ("random",)
        named = ORDERED.get((arch, spec.name))
        some = [(case, named[1]) for case in cases if named and case.name == named[0]]
        in_other_modes(found, kernel, list(product(cases, others)) if everything else some, bits, everything)
    return found


def unwrapped(result: RunResult) -> list[str]:
    """Return an error if no CTA waits a second time, in the other phase, for some of the mbarriers."""
    once = {hex(offset) for phases in result.phases.values() for offset, count in phases.items() if count == 1}
    return [f"no case uses the mbarriers at {', '.join(sorted(once))} again"] if once else []


def run(
    found: list[str], kernel: tuple[str, str, Any], case: Any, mode: str, everything: bool
) -> workloads.Outcome | None:
    """Run a case. Return the outcome, or None if the run failed; append errors to `found`.

    kernel: (architecture, op or family, spec). If the spec is None, the kernel that serves the case runs.
    """
    arch, op, spec = kernel
    family, name = family_of(op), f"{case.name}, {mode}"
    how = {"mode": mode, "seed": MODES.index(mode) if mode == "random" else 0}
    try:
        outcome = workloads.RUN[family](spec, case, arch, **how, memory=None if everything else MEMORY)
    except (Fault, NotImplementedError) as error:
        found.append(f"{name}: {error}")
        return None
    if not outcome.error <= 1:
        found.append(f"{name}: {outcome.error:.2f} times the tolerance")
    return outcome


class Simulations:
    """The work of `labels`, on all cores, in parallel to this process. everything: all kernels in all modes, and no
    remembered results."""

    def __init__(self, labels: list[str], everything: bool):
        self.everything, self.processes = everything, pool()
        self.futures: dict[str, Future[list[str]]] = {}
        turns = turns_of(structures())
        for label in sorted(labels, key=lambda label: label not in turns):  # the longest work first
            if label in FEATURES:
                self.submit(problems_of_feature, label)
            elif label in SHIPPED:
                self.submit(problems_of_kernel, label, turns.get(label))
        self.elsewhere = [label for label in labels if label in ELSEWHERE]

    def submit(self, work: Callable[..., list[str]], label: str, *args: Any) -> None:
        self.futures[label] = self.processes.submit(work, label, *args, self.everything)

    def problems(self, label: str, blackwell: Callable[[str], Any] | None) -> list[str]:
        """Wait for the errors of a label.

        blackwell: waits for an architecture's kernels, which these processes cannot compile; the first such label
        requests all of them.
        """
        if blackwell and label in self.elsewhere and label not in self.futures:
            for arch in dict.fromkeys(ELSEWHERE[one][0] for one in self.elsewhere):
                blackwell(arch)
            longest = [one for one in self.elsewhere if (ELSEWHERE[one][0], ELSEWHERE[one][2].name) in ORDERED]
            for one in dict.fromkeys([*longest, *self.elsewhere]):
                self.submit(problems_elsewhere, one)
        return self.futures[label].result()

    def close(self) -> None:
        self.processes.shutdown(cancel_futures=True)
        memo.prune(MEMORY)
