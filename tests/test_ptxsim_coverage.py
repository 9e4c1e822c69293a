"""The share of a kernel's PTX that no case executes is limited."""

from ptxsim.coverage import Missing

from cute_kernels import catalog
from tests.conftest import ARCH
from tests.sim import coverage


def test_the_share_of_a_kernel_is_limited():
    assert not coverage.uncovered("topk.radix/a", Missing(3, 10, {}))
    assert not coverage.uncovered("b/a", Missing(1, 50, {}))
    assert coverage.uncovered("b/a", Missing(3, 100, {})) == ["3.0% of its PTX never ran, at most 2% may"]
    assert coverage.uncovered("topk.radix/a", Missing(4, 10, {}))


def test_limits_are_of_ops_that_exist():
    assert coverage.LIMITS.keys() <= {op for op, _ in catalog.shipped(ARCH)}
