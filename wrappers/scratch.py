"""Counters and scratch memory that launches on a device share: kept, because allocating takes as long as launching.

Launches of one stream never overlap, so what is kept belongs to a stream. A captured launch has its own, since its
graph may be replayed beside anything. What is kept is in the form of `HostMachine.argument`.
"""

import threading
from typing import Any, NamedTuple

import torch

from . import machine

TICKETS = 1 << 22  # 16 MiB a device; captured launches use them up, one each, decoding one for each warp that computes
MOST = 64  # streams whose scratch is kept, 4 to 20 MB each
PER_THREAD_STREAM = 2  # CUDA's handle of every thread's own default stream: not one stream
_LOCK = threading.Lock()


class CounterPool(NamedTuple):
    """A device's counters for launches, and who has which. Zero before and after every launch."""

    counters: torch.Tensor  # (TICKETS,) int32
    argument: Any  # the same, as launches take it
    of_stream: dict[int, int]  # raw stream -> counter: launches of one stream never overlap
    used: list[int]  # one number: how many have an owner

    def take(self, count: int) -> int:
        """First of so many counters that nobody has, -1 where there are none left."""
        with _LOCK:
            first = self.used[0]
            if first + count > len(self.counters):
                return -1
            self.used[0] += count
            return first


def ticket(device: torch.device, capturing: bool) -> tuple[Any, int]:
    """(counters, index) for a launch on the current stream, which is captured or not; index -1 makes the kernel do
    without.

    The counters are allocated outside captures, where zeroing them would become a graph node.
    """
    here = machine.current
    tickets = here.tickets.get(device)
    if tickets is None:
        if capturing:
            return torch.empty(0, dtype=torch.int32, device=device), -1
        tickets = _add_tickets(device)
    if capturing:
        return tickets.argument, tickets.take(1)
    stream = here.raw_stream(device.index)
    index = tickets.of_stream.get(stream)
    if index is None:
        index = tickets.of_stream.setdefault(stream, tickets.take(1))
    return tickets.argument, index


def parts(plan: Any, capturing: bool) -> tuple[Any, Any, int]:
    """Scratch for parts of tiles, two of each CTA, with counters, `plan.counters` a CTA, from an index on. plan: an
    `attention.plan.LaunchPlan`."""
    here, slots, counters = machine.current, 2 * plan.sms, plan.sms * plan.counters
    if capturing:
        tickets = here.tickets.get(plan.device)
        first = tickets.take(counters) if tickets else -1
        if tickets and first >= 0:
            return _new_part(plan, slots), tickets.argument, first
        return *new_parts(plan, slots, plan.sms), 0
    if plan.device not in here.tickets:
        _add_tickets(plan.device)  # for later captures
    stream = here.raw_stream(plan.device.index)
    if stream == PER_THREAD_STREAM:
        return *new_parts(plan, slots, plan.sms), 0
    key = plan.device, stream, plan.dim_vo, plan.tile_rows, plan.counters
    found = here.parts.get(key)
    if found is None:
        if len(here.parts) >= MOST:
            here.parts.clear()
        new, zeros = new_parts(plan, slots, plan.sms)
        found = here.parts.setdefault(key, (here.argument(new), here.argument(zeros)))
    return *found, 0


def new_parts(plan: Any, slots: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch for so many parts, and zeroed counters of tiles."""
    return _new_part(plan, slots), torch.zeros(tiles * plan.counters, dtype=torch.int32, device=plan.device)


def _new_part(plan: Any, slots: int) -> torch.Tensor:
    return torch.empty((slots, plan.tile_rows, plan.dim_vo + 4), dtype=torch.float32, device=plan.device)


def _add_tickets(device: torch.device) -> CounterPool:
    """Waits once a device: a launch of another stream must find zeros."""
    counters = torch.zeros(TICKETS, dtype=torch.int32, device=device)
    machine.current.synchronize(device)
    made = CounterPool(counters, machine.current.argument(counters), {PER_THREAD_STREAM: -1}, [0])
    return machine.current.tickets.setdefault(device, made)
