"""What the processes of test_ptxsim_kernels.py do: kernels and features by label, and what is wrong with each."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from typing import Any

from cute_kernels import catalog, manifest
from tests.conftest import ARCH, ROOT
from tests.kernels import BLACKWELL, COVERING, ORDERED
from tools import ptxdiff
from tools.ptxsim import coverage, launcher, memo, workloads
from tools.ptxsim.faults import Fault
from tools.ptxsim.machine import MODES
from tools.ptxsim.pool import pool
from tools.ptxsim.run import RunResult

SHIPPED = {manifest.label(op, spec): (op, spec) for op, spec in catalog.shipped(ARCH)}
ELSEWHERE = {f"{arch} {manifest.label(op, spec)}": (arch, op, spec) for arch, op, spec in BLACKWELL}
FEATURES = {
    f"{family}/{case.name}": (family, number)
    for family, features in workloads.FEATURES.items()
    for number, case in enumerate(features())
}
MEMORY = ROOT / "build" / "simulated"


def family_of(op: str) -> str:
    return op.split(".")[0]


def structures() -> list[str]:
    """Labels of the kernels that stand for the structures of all."""
    found = []
    for family, choose in workloads.STRUCTURES.items():
        of_family = {spec: label for label, (op, spec) in SHIPPED.items() if family_of(op) == family}
        found += [of_family[spec] for spec in choose(list(of_family))]
    return found


def untyped(op: str, spec: Any) -> str:
    """A spec in which bf16 and fp16 read alike: kernels of equal ones are twins."""
    return re.sub("bf16|fp16", "half", f"{op} {manifest.canonical(manifest.to_json(spec))}")


TWINS = {}  # the fp16 kernel -> the bf16 one, by label
for label, (op, spec) in SHIPPED.items():
    others = [other for other, kernel in SHIPPED.items() if other != label and untyped(*kernel) == untyped(op, spec)]
    if others and '"fp16"' in manifest.canonical(manifest.to_json(spec)):
        (TWINS[label],) = others


def equal_but_for_types(label: str) -> bool:
    """Whether the PTX of a twin is that of the other one with the types' names exchanged."""
    texts = (launcher.load(*SHIPPED[name], ARCH).ptx for name in (label, TWINS[label]))
    first, second = (ptxdiff.normalise(text).replace("bf16", "f16") for text in texts)
    return first == second


def problems_of_kernel(label: str, turn: int | None, everything: bool) -> list[str]:
    """turn: the first of the cases that run in another mode than `eager` too; None where none does."""
    if label in TWINS and not everything and equal_but_for_types(label):
        return []
    op, spec = SHIPPED[label]
    found: list[str] = []
    cases = workloads.CASES[family_of(op)](spec)
    eager, bits = in_eager(found, (ARCH, op, spec), cases, everything)
    if not found:
        found += coverage.grown({label: coverage.missing(eager).share})
        others = MODES[1:] if eager.counts else ("random",)  # where nothing is asynchronous, `random` alone differs
        chosen = list(product(cases, others)) if everything else dealt(cases, others, turn)
        in_other_modes(found, (ARCH, op, spec), chosen, bits, everything)
    return found


def in_eager(
    found: list[str], kernel: tuple[str, str, Any], cases: list[Any], everything: bool
) -> tuple[RunResult, dict[str, str]]:
    """All cases: (their results, bits of each by its name)."""
    whole, bits = RunResult(), {}
    for case in cases:
        outcome = run(found, kernel, case, "eager", everything)
        if outcome:
            whole.add(outcome.result)
            bits[case.name] = outcome.bits
    return whole, bits


def in_other_modes(
    found: list[str],
    kernel: tuple[str, str, Any],
    chosen: list[tuple[Any, str]],
    bits: dict[str, str],
    everything: bool,
) -> None:
    """chosen: (case, mode). bits: of each case in `eager`."""
    for case, mode in chosen:
        outcome = run(found, kernel, case, mode, everything)
        if outcome and outcome.bits != bits[case.name]:
            found.append(f"{case.name}, {mode}: bits depend on the order in which things happen")


def dealt(cases: list[Any], modes: tuple[str, ...], turn: int | None) -> list[tuple[Any, str]]:
    """Each of `modes` with a case of its own, as far as there are so many, from the `turn`-th on."""
    return [] if turn is None else [(cases[(turn + i) % len(cases)], mode) for i, mode in enumerate(modes)]


def problems_of_feature(label: str, everything: bool) -> list[str]:
    family, number = FEATURES[label]
    found: list[str] = []
    run(found, (ARCH, family, None), workloads.FEATURES[family]()[number], "eager", everything)
    return found


def problems_elsewhere(label: str, everything: bool) -> list[str]:
    """Of a kernel of another architecture. One of each structure runs other modes too, all cases or those of `ORDERED`,
    in which every ring of a pipe wraps around."""
    kernel = arch, op, spec = ELSEWHERE[label]
    found: list[str] = []
    cases = workloads.CASES[family_of(op)](spec)
    eager, bits = in_eager(found, kernel, cases, everything)
    if not found and kernel in COVERING:
        if op == "attention.sm100":
            found += unwrapped(eager)
        others = MODES[1:] if eager.counts else ("random",)
        named = ORDERED.get((arch, spec.name))
        some = [(case, named[1]) for case in cases if named and case.name == named[0]]
        in_other_modes(found, kernel, list(product(cases, others)) if everything else some, bits, everything)
    return found


def unwrapped(result: RunResult) -> list[str]:
    """What is wrong with the cases of a kernel: mbarriers that no CTA waits for a second time, in the other phase."""
    once = {hex(offset) for phases in result.phases.values() for offset, count in phases.items() if count == 1}
    return [f"no case uses the mbarriers at {', '.join(sorted(once))} again"] if once else []


def run(
    found: list[str], kernel: tuple[str, str, Any], case: Any, mode: str, everything: bool
) -> workloads.Outcome | None:
    """The outcome, None where the run failed; adds what is wrong to `found`. kernel: (architecture, op or family,
    spec), a spec of None is whatever serves the case."""
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
    """The work of `labels`, on all cores, beside whatever this process does. everything: all kernels in all modes, and
    nothing that is remembered."""

    def __init__(self, labels: list[str], everything: bool):
        self.everything, self.processes = everything, pool()
        self.futures: dict[str, Future[list[str]]] = {}
        turns = {label: turn for turn, label in enumerate(structures())}
        for label in sorted(labels, key=lambda label: label not in turns):  # what takes longest first
            if label in FEATURES:
                self.submit(problems_of_feature, label)
            elif label in SHIPPED:
                self.submit(problems_of_kernel, label, turns.get(label))
        self.elsewhere = [label for label in labels if label in ELSEWHERE]

    def submit(self, work: Callable[..., list[str]], label: str, *args: Any) -> None:
        self.futures[label] = self.processes.submit(work, label, *args, self.everything)

    def problems(self, label: str, blackwell: Callable[[str], Any] | None) -> list[str]:
        """What is wrong, once it is known. blackwell: waits for an architecture's kernels, which these processes cannot
        compile; the first label of one asks for all of them."""
        if blackwell and label in self.elsewhere and label not in self.futures:
            for arch in dict.fromkeys(ELSEWHERE[one][0] for one in self.elsewhere):
                blackwell(arch)
            for one in self.elsewhere:
                self.submit(problems_elsewhere, one)
        return self.futures[label].result()

    def close(self) -> None:
        self.processes.shutdown(cancel_futures=True)
        memo.prune(MEMORY)
