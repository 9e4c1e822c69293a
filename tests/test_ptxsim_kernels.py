"""Every shipped kernel runs on the CPU: its PTX in the simulator, called through public functions.

All kernels run their cases in mode `eager`; those that stand for a structure run them in all modes, which must not
change a bit. The covering set of features runs in `eager`, by whatever kernels dispatch chooses. Of the bf16 and the
fp16 kernel of a spec one is simulated where their PTX is equal but for types. Launches that build/simulated remembers
(tools/ptxsim/memo.py) are not repeated. With --all, all kernels run in all modes, twins too, and nothing is remembered.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from cute_kernels import catalog, manifest
from tests.conftest import ARCH, ROOT
from tests.kernels import BLACKWELL, COVERING
from tools import ptxdiff
from tools.ptxsim import coverage, launcher, memo, workloads
from tools.ptxsim.faults import Fault
from tools.ptxsim.machine import MODES
from tools.ptxsim.pool import pool
from tools.ptxsim.run import Result

pytestmark = pytest.mark.kernels
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


def structures() -> set[str]:
    """Labels of the kernels that stand for the structures of all."""
    found = set()
    for family, choose in workloads.STRUCTURES.items():
        of_family = {spec: label for label, (op, spec) in SHIPPED.items() if family_of(op) == family}
        found |= {of_family[spec] for spec in choose(list(of_family))}
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


# ---- what the processes do


def problems_of_kernel(label: str, modes: tuple[str, ...], everything: bool) -> list[str]:
    if label in TWINS and not everything and equal_but_for_types(label):
        return []
    op, spec = SHIPPED[label]
    family, found, eager = family_of(op), [], Result()
    for case in workloads.CASES[family](spec):
        bits = set()
        for mode in modes:
            outcome = run(found, f"{case.name}, {mode}", family, spec, case, mode, everything)
            if outcome:
                bits.add(outcome.bits)
            if outcome and mode == "eager":
                eager.add(outcome.result)
        if len(bits) > 1:
            found.append(f"{case.name}: bits depend on when asynchronous operations complete")
    if not found:
        found += coverage.grown({label: coverage.missing(eager).share})
    return found


def problems_of_feature(label: str, everything: bool) -> list[str]:
    family, number = FEATURES[label]
    found: list[str] = []
    run(found, label, family, None, workloads.FEATURES[family]()[number], "eager", everything)
    return found


def problems_elsewhere(label: str, everything: bool) -> list[str]:
    """Of a kernel of another architecture."""
    arch, op, spec = ELSEWHERE[label]
    found: list[str] = []
    for case in workloads.CASES[family_of(op)](spec):
        run(found, f"{case.name}, {arch}", family_of(op), spec, case, "eager", everything, arch)
    return found


def run(
    found: list[str],
    name: str,
    family: str,
    spec: Any,
    case: Any,
    mode: str,
    everything: bool,
    arch: str = ARCH,
) -> workloads.Outcome | None:
    """The outcome, None where the run failed; adds what is wrong to `found`."""
    how = {"mode": mode, "seed": MODES.index(mode) if mode == "random" else 0}
    try:
        outcome = workloads.RUN[family](spec, case, arch, **how, memory=None if everything else MEMORY)
    except (Fault, NotImplementedError) as error:
        found.append(f"{name}: {error}")
        return None
    if not outcome.error <= 1:
        found.append(f"{name}: {outcome.error:.2f} times the tolerance")
    return outcome


# ---- tests


@pytest.fixture(scope="module")
def problems(request) -> Any:
    """label -> what is wrong: all selected tests' work, on all cores, what takes longest first."""
    everything = request.config.getoption("--all")
    work: dict[str, tuple[Callable[..., list[str]], tuple[Any, ...]]] = {}
    chosen = structures()
    for item in request.session.items:
        label = item.callspec.params.get("label") if item.path == request.path and hasattr(item, "callspec") else None
        if label in FEATURES:
            work[label] = problems_of_feature, (label, everything)
        elif label in ELSEWHERE:
            request.getfixturevalue("blackwell")(ELSEWHERE[label][0])  # this process compiles for ARCH only
            work[label] = problems_elsewhere, (label, everything)
        elif label in SHIPPED:
            modes = MODES if everything or label in chosen else ("eager",)
            work[label] = problems_of_kernel, (label, modes, everything)
    with pool() as processes:
        order = sorted(work, key=lambda label: label not in chosen)
        futures = {label: processes.submit(work[label][0], *work[label][1]) for label in order}
        yield lambda label: futures[label].result()
        processes.shutdown(cancel_futures=True)
    memo.prune(MEMORY)


@pytest.mark.parametrize("label", SHIPPED)
def test_shipped_kernel(problems, label):
    assert not problems(label), "\n".join(problems(label))


@pytest.mark.parametrize("label", FEATURES)
def test_feature(problems, label):
    assert not problems(label), "\n".join(problems(label))


@pytest.mark.parametrize(
    "label",
    [pytest.param(x, marks=() if kernel in COVERING else pytest.mark.full) for x, kernel in ELSEWHERE.items()],
)
def test_kernel_of_blackwell(problems, label):
    """On which no device ran it: compiled and simulated."""
    assert not problems(label), "\n".join(problems(label))


@pytest.mark.parametrize("twin", [x for x in SHIPPED if x.startswith("attention.") and "/fp16" in x and "_kv" not in x])
def test_types_alone_differ_between_twins(twin):
    """Else both are simulated. Kernels that convert a cache differ, and so do those of top-k."""
    assert equal_but_for_types(twin)
