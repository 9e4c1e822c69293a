"""Shipped kernels run on the CPU: their PTX in the simulator, called through public functions.

Kernels that stand for a structure run all their cases in mode `eager`. Those that differ from such a kernel in sizes
alone, and others of `kernels.ordinary`, run every second case. Kernels of structures, if they are in
`kernels.REORDERED`, run one case in another mode too, which must not change a bit. They take the modes in turn; a few
of Blackwell's kernels do so. The covering set of
features runs in `eager`, by whatever kernels dispatch chooses. If the PTX of the bf16 and the fp16 kernel of a spec
differs in types alone, one of the two is simulated. Launches that build/simulated remembers (tests/sim/memo.py) are
not repeated. With --all, all Hopper kernels run all cases in all modes, twins included, so do those of Blackwell that
stand for a structure, and nothing is remembered.

The work begins, in processes of its own, when the kernels are compiled, and goes on beside the tests before these.
"""

import re

import pytest
from ptxsim.runner import RunResult

from tests.sim import workloads
from tests.support.kernels import CALLED, COVERING, LATER, ORDERED, SHIPPED
from tests.support.simulated import ELSEWHERE, FEATURES, dealt, equal_but_for_types, unwrapped

pytestmark = pytest.mark.kernels
LABELS = [pytest.param(label, marks=pytest.mark.full if label in LATER | CALLED else ()) for label in SHIPPED]


@pytest.mark.parametrize("label", LABELS)
def test_shipped_kernel(problems, label):
    assert not problems(label), "\n".join(problems(label))


# Features of kernels of top-k that nothing else compiles: one CTA with candidates of fp32, and another capacity.
RARE = re.compile("topk/(candidates fp32_c1|full bf16_c1|two launches, streamed)")


@pytest.mark.parametrize("label", [pytest.param(x, marks=pytest.mark.full if RARE.match(x) else ()) for x in FEATURES])
def test_feature(problems, label):
    assert not problems(label), "\n".join(problems(label))


@pytest.mark.parametrize(
    "label",
    [pytest.param(x, marks=() if kernel in COVERING else pytest.mark.full) for x, kernel in ELSEWHERE.items()],
)
def test_kernel_of_blackwell(problems, label):
    """On which no device ran it: compiled and simulated."""
    assert not problems(label), "\n".join(problems(label))


@pytest.mark.parametrize("twin", [x for x in LABELS if re.match(r"attention\.\w+/fp16(?!.*_kv)", x.values[0])])
def test_types_alone_differ_between_twins(twin):
    """Else both are simulated. Kernels that convert a cache differ, and so do those of top-k."""
    assert equal_but_for_types(twin)


def test_modes_are_dealt_to_kernels():
    modes = ("late", "newest", "random")
    assert dealt(["a", "b", "c", "d"], modes, None) == []
    assert [dealt(["a", "b"], modes, turn) for turn in range(4)] == [
        [("a", "late")], [("b", "newest")], [("a", "random")], [("b", "late")],
    ]  # fmt: skip
    assert {dealt([*"abcdef"], modes, turn)[0][0] for turn in range(9)} == {*"abcd"}


def test_modes_that_delay_and_reorder_run_on_blackwell():
    assert {mode for _, mode in ORDERED.values()} == {"late", "newest"}
    names = {(arch, spec.name): spec for arch, op, spec in COVERING if op == "attention.sm100"}
    for kernel, (case, _) in ORDERED.items():
        assert case in [scenario.name for scenario in workloads.CASES["attention"](names[kernel])]


def test_a_ring_that_no_case_fills_again_is_told():
    once = RunResult(phases={"a": {16: 1, 24: 2}, "b": {16: 0}})
    assert unwrapped(once) == ["no case uses the mbarriers at 0x10 again"]
    once.add(RunResult(phases={"a": {16: 3, 24: 1}}))
    assert once.phases["a"] == {16: 3, 24: 2} and not unwrapped(once)
