"""The scheduler: threads move in groups at the same unit; asynchronous operations complete in between.

Modes: "eager", operations complete when issued; "late", only when no thread can move, oldest first; "newest", the
same, newest first; "random", groups, parts of groups and operations in an order drawn from the seed."""

import numpy as np

from .convergence import exit_lanes
from .faults import Deadlock, Fault, Livelock
from .forms import THREAD, WARP, WARPGROUP
from .machine import MachineState
from .numbers import count_nonzero
from .report import where
from .sync import complete_cluster_phase
from .undefined import follow
from .unwritten import Race, Unwritten

UNITS_AFTER_FAULT = 5_000  # units that other threads may run after a use of memory that nothing has written
UNITS_PER_TURN = 64  # units that a group runs before the next group is chosen
COMPLETION_CHANCES = (0.3, 0.3, 0.05, 0.01)  # random: probability that an operation completes after a step, by seed


def run(m: MachineState) -> None:
    """Run until every thread has returned and every operation is complete."""
    with np.errstate(all="ignore"):
        while count_nonzero(m.done) < m.threads:
            chosen = choose(m)
            if chosen is None:
                events = m.events
                while m.events == events and complete_one(m):
                    pass
                if m.events != events:
                    continue
                chosen = None if m.unwritten else choose(m, part_of_warp=True)
                if chosen is None:
                    break
            try:
                step(m, *chosen)
            except Race as fault:
                raise Fault(str(fault)) from None
            except Unwritten:
                m.suspended.update(chosen[2].tolist())
            except Fault:  # perhaps of a value that nothing has written
                if not m.suspended:
                    raise
                m.suspended.update(chosen[2].tolist())
            if m.suspended:
                stop(m, list(m.suspended))
            if (
                m.settings.mode == "random"
                and m.random.random() < COMPLETION_CHANCES[m.settings.seed % len(COMPLETION_CHANCES)]
            ):
                complete_one(m)
            if m.steps > m.settings.limit:
                break
        if m.unwritten:
            raise Fault(m.unwritten[0])
        while count_nonzero(m.done) == m.threads and complete_one(m):
            pass
    if m.steps > m.settings.limit:
        raise Livelock(f"no end after {m.settings.limit} units\n{where(m)}")
    if count_nonzero(m.done) < m.threads:
        raise Deadlock(f"deadlock\n{where(m)}")


def stop(m: MachineState, warps: list[int]) -> None:
    """Stop warps for good, because they use memory that nothing has written, and let the others run on for a while
    (unwritten.py)."""
    m.blocked.reshape(-1, 32)[warps] = True
    m.suspended.clear()
    m.settings.limit = min(m.settings.limit, m.steps + UNITS_AFTER_FAULT)


def complete_one(m: MachineState) -> bool:
    """Complete one asynchronous operation; return False if none is pending."""
    queues = [queue for queue in m.state.pending.values() if queue]
    if not queues:
        return False
    mode = m.settings.mode
    if mode == "random":
        queue = queues[int(m.random.integers(len(queues)))]
        index = int(m.random.integers(len(queue))) if queue is m.state.pending[""] else 0
    else:  # stores come last: a kernel that forgets to wait for one reads old memory
        queue = next((queue for queue in queues if queue is not m.state.pending["store"]), queues[0])
        index = -1 if mode == "newest" and queue is m.state.pending[""] else 0
    one = queue[index]
    del queue[index]
    one.complete()
    return True


def choose(m: MachineState, part_of_warp: bool = False) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Return (unit, threads, their warps); None if no thread can move.

    part_of_warp: lanes may run a collective without the rest of their warp; its member mask then tells whether
    that is right."""
    program, pc = m.program, m.pc
    stuck = m.done | m.blocked | (m.failures() == pc)
    # In a diverged warp the lanes at the lowest unit go first, so that they catch up with the others.
    first = lowest(m, stuck)
    level = program.level[first]
    (rows,) = level.nonzero()
    if len(rows) and not all_together(m, rows, first, level):  # other lanes of these warps may go
        together, groups = converged(m)
        together |= part_of_warp
        level = program.level[pc]
        collective = (level == WARP) & together.repeat(32) | (level == WARPGROUP) & groups.repeat(32)
        stuck |= ~((level == THREAD) | collective)
        first = lowest(m, stuck)
    candidates = set(first.tolist()) - {len(program.units)}
    if not candidates:
        return None
    random = m.settings.mode == "random"
    if random:
        unit = sorted(candidates)[int(m.random.integers(len(candidates)))]
    else:  # round robin: the next unit in program order
        unit = min((number for number in candidates if number > m.last), default=min(candidates))
    m.last = unit
    warps = first == unit
    if random and program.level[unit] < WARPGROUP:
        keep = m.random.random(count_nonzero(warps)) < 0.6
        if count_nonzero(keep):
            warps[warps] = keep
    chosen = ((pc == unit) > stuck).reshape(-1, 32) & warps[:, None]
    return unit, chosen.reshape(-1).nonzero()[0], warps.nonzero()[0]


def lowest(m: MachineState, but: np.ndarray) -> np.ndarray:
    """Return the lowest unit at which a lane of each warp stands, all lanes aside from those of a mask; the number of
    units if there is none."""
    return np.minimum.reduce(np.maximum(m.pc, but * np.int32(len(m.program.units))).reshape(-1, 32), 1)


def all_together(m: MachineState, warps: np.ndarray, first: np.ndarray, level: np.ndarray) -> bool:
    """Return whether all live lanes of these warps stand at their warp's unit in `first`, and none at a unit of
    warpgroups."""
    away = (m.pc.reshape(-1, 32)[warps] != first[warps, None]) > m.done.reshape(-1, 32)[warps]
    return not count_nonzero(away) and not count_nonzero(level[warps] == WARPGROUP)


def converged(m: MachineState) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks of warps: those of which all lanes that have not exited are at the same unit, and, of these,
    those of which the whole warpgroup is at that unit."""
    first = lowest(m, m.done)
    together = first >= np.where(m.done.reshape(-1, 32), -1, m.pc.reshape(-1, 32)).max(1)
    if m.per_cta % 128:
        return together, np.zeros_like(together)
    by_group = first.reshape(-1, 4)
    whole = together.reshape(-1, 4).all(1) & (by_group.min(1) == by_group.max(1))
    return together, (whole & ~m.done.reshape(-1, 128).any(1)).repeat(4)


def step(m: MachineState, number: int, index: np.ndarray, warps: np.ndarray) -> None:
    """Run a group until it splits, waits, needs other threads, or has run RUN units."""
    n, units, t = len(index), m.program.units, m.group(index, warps)
    m.running = index
    s, level = t.where, t.level  # of collectives that the threads may run without another choice
    if not t.whole:
        level = WARP if n == count_nonzero(~m.done.reshape(-1, 32)[warps]) else THREAD
    for _ in range(1 if m.settings.mode == "random" else UNITS_PER_TURN):
        unit = units[number]
        code = unit.run or m.program.code(number)
        m.unit, m.stalled = number, None
        if not m.entered[number]:
            m.enter(number)
        if m.undefined:
            follow(m, number, t)
        m.steps += 1
        result = code(t)
        following = number + 1
        if m.stalled is not None:  # some threads stay in a barrier
            m.pc[s] = following
            m.pc[m.stalled] = number
            return
        if unit.ends:
            taken = result if np.ndim(result) else np.full(n, result)
            if unit.ends == "return":
                m.done[index[taken]] = True
                exit_threads(m)
                m.pc[index[~taken]] = following
                m.events += 1
                return
            count = count_nonzero(taken)
            if count == n:
                following = unit.target
            elif count:
                m.pc[s] = np.where(taken, unit.target, following)
                return
        number = following
        if units[number].level > level or m.suspended:
            break
        if units[number].waits and count_nonzero(m.failures()[s] == number):
            break
    m.pc[s] = number


def exit_threads(m: MachineState) -> None:
    """Handle exited threads: barriers no longer wait for them, and their CTA's shared memory may be freed."""
    exit_lanes(m)
    for cluster in list(m.state.cluster):
        complete_cluster_phase(m, cluster)
    if m.cluster_size == 1:
        return
    whole = m.done.reshape(m.slots, -1).all(1)
    for slot in set(np.flatnonzero(whole).tolist()) - m.shared.exited:
        m.shared.check_exit(slot)
        m.shared.exited.add(slot)
