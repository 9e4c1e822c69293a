"""The share of a kernel's PTX that no case executes is limited, and cases reach the kernel that they are for."""

from functools import partial

import pytest
from ptxsim.coverage import Missing

from bench.cases import attention as cases
from bench.cases import forms
from cute_kernels import catalog
from tests.conftest import ARCH
from tests.sim import coverage, workloads
from tests.sim.workloads import attention
from tests.support.fake_machine import FakeMachine
from wrappers.host import machine


def test_the_share_of_a_kernel_is_limited():
    assert not coverage.uncovered("topk.radix/a", Missing(3, 10, {}))
    assert not coverage.uncovered("b/a", Missing(1, 50, {}))
    assert coverage.uncovered("b/a", Missing(3, 100, {})) == ["3.0% of its PTX never ran, at most 2% may"]
    assert coverage.uncovered("topk.radix/a", Missing(4, 10, {}))


def test_limits_are_of_ops_that_exist():
    assert coverage.LIMITS.keys() <= {op for op, _ in catalog.shipped(ARCH)}


def recorded(served, op, spec):
    """A kernel that does nothing, listed in `served`."""
    served.append(spec)
    return lambda *args: None


def check_served(arch, spec, scenario, case):
    served = []
    with machine.override(FakeMachine(partial(recorded, served), arch, scenario.sms)), scenario.choice:
        run = attention.listed if scenario.forms else attention.launched
        run(case, forms.apply(cases.make_call(case), scenario.forms))
    assert not served or spec in served, f"{spec.name}: {scenario.name} is served by {[s.name for s in served]}"
    return served


@pytest.mark.slow
@pytest.mark.parametrize("arch", catalog.ARCHS)
def test_the_first_case_of_each_kernel_is_served_by_it(arch):
    """Else the simulator runs another kernel in its place, or none."""
    for op, spec in catalog.shipped(arch):
        if op.startswith("attention."):
            scenario = workloads.CASES["attention"](spec)[0]
            assert check_served(arch, spec, scenario, scenario.calls[0])


@pytest.mark.full
@pytest.mark.parametrize("arch", catalog.ARCHS)
def test_every_case_of_each_kernel_is_served_by_it(arch):
    """Mutants run these cases, too. Some calls without keys launch nothing."""
    for op, spec in catalog.shipped(arch):
        for scenario in workloads.CASES["attention"](spec, thorough=True) if op.startswith("attention.") else ():
            for case in scenario.calls:
                check_served(arch, spec, scenario, case)
