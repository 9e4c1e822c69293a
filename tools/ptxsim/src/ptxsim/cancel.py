"""clusterlaunchcontrol.try_cancel: a running cluster takes the place of one that has not been launched.

Clusters of a run that are not resident yet wait in `MachineState.waiting`; a request that completes takes the
first of them, and fails if there is none. Its response is opaque in the ISA, which has query_cancel to read it;
kernels in the CuTe DSL read its words directly: x; y and z in 16 bits each; whether a cluster was cancelled, in
bit 0 of the third word."""

import re
from typing import Any

import numpy as np

from .faults import Fault
from .forms import PtxOp, effect, form
from .machine import POISON, MachineState, Threads
from .parse import PtxInstruction
from .sync import SYNC
from .tma import check_inside_cta, complete_tx, multicast_targets

SIZE = 16  # bytes of a response


@form(
    r"clusterlaunchcontrol\.try_cancel\.async\.shared::cta\.mbarrier::complete_tx::bytes(\.multicast::cluster::all)?\.b128",
    f"{SYNC}: clusterlaunchcontrol.try_cancel",
)
def try_cancel(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any, barrier: Any) -> None:
        m = t.machine
        to, signal = m.flat(t, address, SIZE, x), m.flat(t, barrier, 8, x)
        everyone = (1 << m.cluster_size) - 1 if f[1] else None
        for i in range(t.count):
            own = int(t.index[i]) // m.per_cta
            if {int(to[i]) // m.shared.stride, int(signal[i]) // m.shared.stride} != {own}:
                raise Fault(f"{t.say(x)}: both operands must lie in shared memory of the CTA itself")
            request(t, x, i, multicast_targets(m, t, i, int(to[i]), int(signal[i]), everyone))

    return effect(run, (x.args[0], "address"), (x.args[1], "address"))


def request(t: Threads, x: PtxInstruction, i: int, targets: list[tuple[int, int]]) -> None:
    """Issue a request. targets: (address of the response, mbarrier) of each CTA that gets it."""
    m, found = t.machine, []
    for to, signal in targets:
        barrier, words = m.signalled(t, signal, x), np.arange(to >> 2, to + SIZE >> 2)
        check_inside_cta(t, x, to, SIZE)
        m.shared.begin_write(int(t.warp[i]), words, t.say(x))
        found.append((to, words, barrier))
    m.count("try_cancel")

    def complete() -> None:
        data = answer(m)
        for to, words, barrier in found:
            m.shared.bytes[to : to + SIZE] = data
            complete_tx(m, barrier, words, SIZE)

    m.post(lambda: f"{t.say(x)}, mbarrier {found[0][2].address}", complete)


def answer(m: MachineState) -> np.ndarray:
    """Return the response. If the request fails, all bits except the one that says so are undefined."""
    undefined = POISON["W"]
    if not m.waiting:
        return np.array([undefined, undefined, undefined & ~1, undefined], np.uint32).view(np.uint8)
    m.count("clusters cancelled")
    x, y, z = m.waiting.popleft()[0]
    return np.array([x, y | z << 16, 1, 0], np.uint32).view(np.uint8)
