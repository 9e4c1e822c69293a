"""Every shipped kernel runs on the CPU: its PTX in the simulator, called through the public function."""

import pytest

from cute_kernels import manifest
from tests.conftest import ARCH
from tools import aot
from tools.ptxsim.pool import pool

SHIPPED = aot.shipped(ARCH)
NAMES = [manifest.label(op, spec) for op, spec in SHIPPED]


def problems(number: int) -> list[str]:
    """What is wrong with a shipped kernel, over all cases and modes."""
    from tools.ptxsim import workloads
    from tools.ptxsim.faults import Fault
    from tools.ptxsim.machine import MODES

    op, spec = SHIPPED[number]
    family, found = op.split(".")[0], []
    for case in workloads.CASES[family](spec):
        bits = set()
        for seed, mode in enumerate(MODES):
            try:
                outcome = workloads.RUN[family](spec, case, ARCH, mode=mode, seed=seed if mode == "random" else 0)
            except (Fault, NotImplementedError) as error:
                found.append(f"{case.name}, {mode}: {error}")
                continue
            if not outcome.error <= 1:
                found.append(f"{case.name}, {mode}: {outcome.error:.2f} times the tolerance")
            bits.add(outcome.bits)
        if len(bits) > 1:
            found.append(f"{case.name}: bits depend on when asynchronous operations complete")
    return found


@pytest.fixture(scope="module")
def found(bundle) -> dict[str, list[str]]:
    """The problems of every kernel, on all cores."""
    with pool() as processes:
        return dict(zip(NAMES, processes.map(problems, range(len(SHIPPED)))))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_kernel(found, name):
    assert not found[name], "\n".join(found[name])
