"""Run a launch: the grid in portions of CTAs that are resident together, then the checks at exit."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# The modules that register instruction forms.
from . import alu, atomic, cancel, convert, data, mma, sync, tcgen05, tma, warp, wgmma  # noqa: F401
from .call import KernelLaunch
from .exchange import Exchange
from .faults import Fault
from .machine import MODES, MachineState, Settings
from .program import Program
from .schedule import run as run_machine
from .shared import BASE

Block = tuple[int, int, int]


@dataclass
class RunResult:
    """The result of a run. steps: units executed. counts: asynchronous operations by kind. executed: by PTX text,
    for each instruction whether a thread executed it (program.Program.executed). phases: by PTX text, for the
    mbarrier at each offset in shared memory the number of completed phases, in the CTA that completed most."""

    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    executed: dict[str, np.ndarray] = field(default_factory=dict)
    phases: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, other: "RunResult") -> None:
        """Merge another run into this one."""
        self.steps += other.steps
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for ptx, executed in other.executed.items():
            self.executed[ptx] = self.executed.get(ptx, False) | executed
        for ptx, phases in other.phases.items():
            mine = self.phases.setdefault(ptx, {})
            for offset, count in phases.items():
                mine[offset] = max(count, mine.get(offset, 0))


def run(
    call: KernelLaunch, mode: str = "eager", seed: int = 0, blocks: Iterable[Block] | None = None, resident: int = 4,
    program: Program | None = None, limit: int = 2_000_000, exact: bool = False,
) -> RunResult:  # fmt: skip
    """Execute the grid of `call`; its arrays hold the results.

    mode: when asynchronous operations complete, see schedule.py. blocks: CTAs to run (default: the whole grid);
    whole clusters run. resident: clusters that run at once; CTAs that wait for each other through global memory
    must all be resident. program: the translated PTX of the call, to share it between runs. limit: units until a
    livelock is reported, per portion. exact: WGMMAs of 16-bit and tf32 types give the bits of an H200, at several
    times the time; those of 8-bit types always do. Raises Fault (faults.py) for behaviour that is wrong on
    hardware, NotModelled for instructions that are not modelled."""
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r}, must be one of {MODES}")
    program = program or Program(call.ptx)
    result, memory = RunResult(), Exchange(call.memory)
    waiting = deque(clusters_of(call, blocks))
    count = len(waiting)
    while waiting:
        first = count - len(waiting)
        portion = [block for _ in range(min(resident, len(waiting))) for block in waiting.popleft()]
        machine = MachineState(program, call, memory, portion, Settings(mode, seed + first, limit, exact))
        machine.waiting = waiting
        run_machine(machine)
        if "exit" not in call.beyond:
            check_exit(machine)
        program.spare = machine.files  # to take new memory costs more than to overwrite it
        executed = program.executed(machine.entered, machine.active)
        result.add(RunResult(machine.steps, machine.state.counts, {call.ptx: executed}, {call.ptx: phases_of(machine)}))
    return result


def phases_of(m: MachineState) -> dict[int, int]:
    found: dict[int, int] = {}
    for flat, barrier in m.mbarriers.items():
        offset = flat % m.shared.stride - BASE
        found[offset] = max(barrier.phase, found.get(offset, 0))
    return found


def clusters_of(call: KernelLaunch, blocks: Iterable[Block] | None) -> list[list[Block]]:
    """Return the CTAs by cluster, in rank order; only clusters that hold one of `blocks`."""
    size = call.cluster
    for i, axis in enumerate("xyz"):
        if call.grid[i] % size[i]:
            raise ValueError(f"grid {call.grid}: {axis} is no multiple of the cluster's {size[i]}")
    wanted = None if blocks is None else {tuple(b[i] // size[i] for i in range(3)) for b in blocks}
    out = []
    counts = [call.grid[i] // size[i] for i in range(3)]
    for z in range(counts[2]):
        for y in range(counts[1]):
            for x in range(counts[0]):
                if wanted is None or (x, y, z) in wanted:
                    out.append([
                        (x * size[0] + i, y * size[1] + j, z * size[2] + k)
                        for k in range(size[2]) for j in range(size[1]) for i in range(size[0])
                    ])  # fmt: skip
    return out


def check_exit(m: MachineState) -> None:
    """Raise Fault if work is left over when the kernel ends."""
    for barrier in m.mbarriers.values():
        if barrier.tx:
            raise Fault(f"exit: mbarrier {barrier.address} with {barrier.tx} bytes missing")
    for thread, groups in m.state.bulk.items():
        if groups.open or any(groups.closed):
            raise Fault(f"exit: {m.names.thread(thread)} has not waited for its bulk stores, which read shared memory")
    for first, pipe in m.state.wgmma.items():
        if pipe.open or pipe.groups:
            raise Fault(f"exit: the warpgroup of {m.names.warp(first // 32)} has not waited for its wgmma")
    tcgen05.check_exit(m)
