"""The share of a kernel's PTX that no case executes is limited, and cases reach the kernel that they are for."""

from dataclasses import replace
from functools import partial

import pytest
from ptxsim.coverage import Missing

from bench.cases import attention as cases
from bench.cases import forms, mla
from bench.cases.mla import MlaCase
from cute_kernels import catalog
from tests.conftest import ARCH, run_python
from tests.sim import coverage, workloads
from tests.sim.workloads import attention
from tests.support import kernels, lines
from tests.support.fake_machine import FakeMachine
from wrappers.host import machine


def test_the_share_of_a_kernel_is_limited():
    assert not coverage.uncovered("topk.radix/a", Missing(3, 10, {}))
    assert not coverage.uncovered("b/a", Missing(1, 50, {}))
    assert coverage.uncovered("b/a", Missing(3, 100, {})) == ["3.0% of its PTX never ran, at most 2% may"]
    assert coverage.uncovered("topk.radix/a", Missing(4, 10, {}))


def test_limits_are_of_ops_that_exist():
    assert coverage.LIMITS.keys() <= {op for op, _ in catalog.shipped(ARCH)}


def test_each_value_of_a_constant_has_a_kernel_that_runs_or_a_reason():
    """A code path that only a value of a field has is else neither compiled nor simulated before a release."""
    shipped = coverage.constants(kernel for arch in catalog.ARCHS for kernel in catalog.shipped(arch))
    simulated = coverage.constants([kernels.SHIPPED[label] for label in kernels.ordinary()])
    simulated |= coverage.constants((op, spec) for _, op, spec in kernels.COVERING)
    assert shipped - simulated == coverage.WITHOUT_KERNEL.keys()


def test_a_value_without_a_kernel_is_told():
    spec = catalog.shipped(ARCH)[0][1]
    other = replace(spec, mask=replace(spec.mask, causal="never"), tile=replace(spec.tile, stages=77))
    found = coverage.constants([("a", other)]) - coverage.constants([("a", spec)])
    assert found == {("a", "mask.causal", "never"), ("a", "tile.stages", 77)}


@pytest.mark.full
def test_every_line_of_the_kernels_runs():
    """Each is compiled once more, with line info."""
    done = run_python("-m", "tests.support.lines", ARCH)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_lines_that_run_in_one_kernel_have_run():
    one, other = ({"topk": {"a.py:1": kernel, "a.py:2": "both"}, "merge": {"b.py:3": kernel}} for kernel in ("x", ""))
    assert lines.never([one, other]) == lines.never([other, one]) == {"topk a.py:2: ": "both"}


def recorded(served, op, spec):
    """A kernel that does nothing, listed in `served`."""
    served.append(spec)
    return lambda *args: None


def check_served(arch, spec, scenario, case):
    served = []
    if isinstance(case, MlaCase):
        with machine.override(FakeMachine(partial(recorded, served), arch, scenario.sms)):
            mla.call(case, mla.make(case))
        assert spec in served, f"{spec.name}: {scenario.name} is served by {[s.name for s in served]}"
        return served
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
