"""The simulator finds the bugs planted in a small kernel, whatever the schedule, and passes the kernel without one."""

import re
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from ptxsim import host
from ptxsim.faults import Deadlock, Fault
from ptxsim.machine import MODES
from ptxsim.runner import run

from cute_kernels import build
from tests.conftest import ARCH

pytestmark = pytest.mark.kernels
LENGTH, PAGES = 70, 5


PAGE = 32  # rows, as in planted.py
EXPECTED = {
    "bytes": (
        Deadlock,
        r"warp  0.*\(pipeline.py:\d+\): mbarrier.try_wait(.|\n)*phase 0, 0 of 1 arrivals missing, 16 bytes missing",
    ),
    "arrival": (Deadlock, r"phase 0, 1 of 2 arrivals missing"),
    "fence": (Fault, r"through the async proxy, written by warp \d of CTA \d without fence.proxy.async"),
    "page": (Fault, r"line \d+ \(planted.py:\d+\), warp \d.*4 B at offset 12 of argument 2, which has 12 B"),
    "ragged": (Fault, r"at offset \d+ of argument 3, which has 8960 B"),
    "wait": (Fault, r"under way|without synchronisation|nothing has written"),
    "barrier": (Fault, r"no initialised mbarrier|without synchronisation"),
    "early": (Fault, r"has not waited for its bulk stores"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernel with a bug, which all modes share: (host function, PTX, bytes of shared memory)."""
    build.use_arch(ARCH)
    import cutlass.cute as cute

    from cute_kernels import abi
    from tests.support import planted

    @cache
    def kernel(bug: str) -> tuple:
        with build.host_functions() as hosts:
            options = f"{build.OPTIONS} --generate-line-info --dump-dir {tmp_path_factory.mktemp('kernel')}"
            found = cute.compile(planted.forward, bug, abi.stream(), *planted.fake_args(), options=options)
        (host_function,) = hosts
        return host_function, found.__ptx__, build._dynamic_shared(str(found.ir_module))

    return kernel


def launch(kernel: tuple) -> tuple:
    """(call, pool, table, copied, out) of a problem of three pages, the last one ragged."""
    host_function, ptx, shared = kernel
    rng = np.random.default_rng()
    pool = rng.standard_normal((PAGES, PAGE, 64)).astype(ml_dtypes.bfloat16)
    table = rng.permutation(PAGES)[:3].astype(np.int32)
    copied = np.full((3, PAGE, 64), np.nan, ml_dtypes.bfloat16)
    out = np.full((LENGTH, 64), np.nan, ml_dtypes.bfloat16)
    args = [pool, copied, table, out, LENGTH, 3]
    (call,) = host.evaluate(host_function, ptx, args, shared)
    return call, pool, table, copied, out


@pytest.mark.parametrize("mode", MODES)
def test_no_bug(compiled, mode):
    call, pool, table, copied, out = launch(compiled(""))
    run(call, mode=mode, seed=1)
    expected = (pool[table].astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    assert (copied == expected).all()
    assert (out == expected.reshape(-1, 64)[:LENGTH]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", EXPECTED)
def test_planted_bug(compiled, bug, mode):
    call, *_ = launch(compiled(bug))
    kind, message = EXPECTED[bug]
    with pytest.raises(kind) as caught:
        run(call, mode=mode, seed=1)
    assert re.search(message, str(caught.value)), str(caught.value)
