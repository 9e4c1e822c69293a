"""Barriers and the lanes of a warp: a warp arrives when all of its lanes have, apart from those that have exited.

An instruction that is .aligned, as every `bar` is, must be executed by all lanes of a warp together; anything else is
undefined, and a fault here. Without .aligned, lanes may reach a barrier one after the other or at several places: each
waits for the other lanes of its warp, and the last one marks the arrival of the warp (PTX ISA, barrier). An H200 does
the same. It traps if lanes of a warp name different barriers, and hangs if some arrive and others wait; both are
faults here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .barriers import BarrierState
from .faults import Fault
from .machine import MachineState, distinct
from .numbers import count_nonzero


class BarrierCall(NamedTuple):
    """A use of a barrier, which must be the same for all lanes of a warp. key: (slot, id). need: threads that the
    barrier expects; counted: whether the instruction names this count. kind: sync, arrive, and, or, popc."""

    key: tuple[int, int]
    need: int
    counted: bool
    kind: str


@dataclass
class Arrivals:
    """Threads that reach a barrier at one place. place: the location. brought: their predicates, for a reduction, and
    result: the register that gets the result."""

    index: np.ndarray
    unit: int
    place: Any
    call: BarrierCall
    brought: Any = None
    result: int = -1

    def part(self, which: np.ndarray) -> "Arrivals":
        """Return those of a mask of the threads."""
        brought = None if self.brought is None else self.brought[which]
        return Arrivals(self.index[which], self.unit, self.place, self.call, brought, self.result)


def absent_lanes(m: MachineState, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the warps of threads, and a (warps, 32) mask of their lanes that are not among these threads, apart from
    lanes that have exited."""
    warps = distinct(index >> 5)
    here = np.zeros((len(warps), 32), bool)
    here[np.searchsorted(warps, index >> 5), index & 31] = True
    return warps, ~here & ~m.done.reshape(-1, 32)[warps]


def arrive(m: MachineState, arrivals: Arrivals, aligned: bool, finish: Callable[..., None]) -> None:
    """Let threads arrive: whole warps at once, by `finish`, and other lanes when the rest of their warp has come."""
    warps, absent = absent_lanes(m, arrivals.index)
    apart = absent.any(1)
    if not apart.any():
        return finish(m, [arrivals])
    if aligned:
        arrivals.place.threads.refuse_apart(arrivals.place.x)
    split = np.isin(arrivals.index >> 5, warps[apart])
    for warp in warps[apart].tolist():
        hold(m, warp, arrivals.part(arrivals.index >> 5 == warp), finish)
    if not split.all():
        finish(m, [arrivals.part(~split)])


def hold(m: MachineState, warp: int, arrivals: Arrivals, finish: Callable[..., None]) -> None:
    """Let lanes of a warp wait in a barrier for the other lanes of the warp."""
    held = m.state.held_lanes.setdefault(warp, (finish, []))[1]
    if held and held[0].call != arrivals.call:
        raise Fault(f"{arrivals.place}: other lanes of the warp are in another barrier\n  the other: {held[0].place}")
    m.blocked[arrivals.index] = True
    held.append(arrivals)
    if finish is arrive_named:
        m.state.named.setdefault(arrivals.call.key, BarrierState(arrivals.call.need))  # for the report of a deadlock
    finish_warp(m, warp)


def finish_warp(m: MachineState, warp: int) -> None:
    """Mark the arrival of a warp if all of its lanes that have not exited are held."""
    finish, held = m.state.held_lanes[warp]
    live = count_nonzero(~m.done[32 * warp : 32 * warp + 32])
    if sum(len(one.index) for one in held) == live:
        del m.state.held_lanes[warp]
        finish(m, held)


def arrive_named(m: MachineState, arrivals: list[Arrivals]) -> None:
    """Mark the arrival of warps at a named barrier. Several arrivals belong to one warp."""
    call, place = arrivals[0].call, arrivals[0].place
    point = m.state.named.setdefault(call.key, BarrierState(call.need))
    if point.arrived and point.need != call.need:
        raise Fault(f"{place}: barrier {call.key[1]} with {call.need} threads, others wait for {point.need}")
    point.need = call.need
    point.counted &= call.counted
    warps = distinct(arrivals[0].index >> 5)
    point.arrived += 32 * len(warps)
    point.warps.append(warps)
    if point.arrived > point.need:
        raise Fault(f"{place}: {point.arrived} threads at barrier {call.key[1]}, which is for {point.need}")
    m.order.release(warps, point.clock)
    for one in arrivals:
        if one.brought is not None:
            point.kind = call.kind
            point.predicates.append(one.brought)
            point.receivers.append((one.result, one.index))
        m.blocked[one.index] = call.kind != "arrive"
        if call.kind != "arrive":
            point.waiting.append((one.index, one.unit + 1))
        elif len(arrivals) > 1 or one.unit != m.unit:
            m.pc[one.index] = one.unit + 1  # lanes that were held
    complete_named(m, call.key)


def complete_named(m: MachineState, key: tuple[int, int]) -> None:
    """Complete a named barrier and release its threads if all that it expects have arrived.

    Without a count, a barrier is for the warps of the CTA that have not exited."""
    point = m.state.named[key]
    if point.arrived < point.need:
        if point.counted:
            return
        done = m.done[key[0] * m.per_cta : (key[0] + 1) * m.per_cta]
        if not count_nonzero(done):
            return
        missing = np.array((~done.reshape(-1, 32)).any(1))
        missing[np.concatenate(point.warps) % (m.per_cta // 32)] = False
        if missing.any():
            return
    if point.receivers:
        every = np.concatenate(point.predicates)
        for row, index in point.receivers:
            if point.kind == "popc":
                m.W[row, index] = count_nonzero(every)
            else:
                m.P[row, index] = every.all() if point.kind == "and" else every.any()
    for waiting, unit in point.waiting:
        m.blocked[waiting] = False
        m.pc[waiting] = unit
        m.order.acquire(distinct(waiting >> 5), point.clock)
    del m.state.named[key]
    m.events += 1


def exit_lanes(m: MachineState) -> None:
    """Let barriers go on that have waited for threads which have now exited."""
    for warp in list(m.state.held_lanes):
        finish_warp(m, warp)
    for key, point in list(m.state.named.items()):
        if not point.counted and point.arrived:
            complete_named(m, key)
