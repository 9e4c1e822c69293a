"""Counters and scratch memory that launches on a device share: kept, because allocating takes as long as launching.

Launches of one stream never overlap, so what is kept belongs to a stream. A captured launch has its own, since its
graph may be replayed beside anything. What is kept is in the form of `Machine.argument`.
"""

import threading
from typing import Any, NamedTuple

import torch

from . import machine

# 16 MiB a device; captured launches use them up, one each, decoding one for each warp that computes
POOL_SIZE = 1 << 22
MAX_STREAMS = 64  # streams whose scratch is kept, 4 to 20 MB each
PER_THREAD_STREAM = 2  # CUDA's handle of every thread's own default stream: not one stream
_LOCK = threading.Lock()


class CounterPool(NamedTuple):
    """A device's counters for launches, and who has which. Zero before and after every launch."""

    counters: torch.Tensor  # (POOL_SIZE,) int32
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


def launch_counter(device: torch.device, capturing: bool) -> tuple[Any, int]:
    """(counters, index) for a launch on the current stream, which is captured or not; index -1 makes the kernel do
    without.

    The counters are allocated outside captures, where zeroing them would become a graph node.
    """
    here = machine.current
    pool = here.counter_pools.get(device)
    if pool is None:
        if capturing:
            return torch.empty(0, dtype=torch.int32, device=device), -1
        pool = _add_pool(device)
    if capturing:
        return pool.argument, pool.take(1)
    stream = here.raw_stream(device.index)
    index = pool.of_stream.get(stream)
    if index is None:
        index = pool.of_stream.setdefault(stream, pool.take(1))
    return pool.argument, index


def split_scratch(plan: Any, capturing: bool) -> tuple[Any, Any, int]:
    """Scratch for parts of tiles, two of each CTA, with counters, `plan.counters_per_split` a CTA, from an index on.
    plan: an `attention.plan.LaunchPlan`."""
    here, slots, counters = machine.current, 2 * plan.sms, plan.sms * plan.counters_per_split
    if capturing:
        pool = here.counter_pools.get(plan.device)
        first = pool.take(counters) if pool else -1
        if pool and first >= 0:
            return _new_partial(plan, slots), pool.argument, first
        return *new_split_scratch(plan, slots, plan.sms), 0
    if plan.device not in here.counter_pools:
        _add_pool(plan.device)  # for later captures
    stream = here.raw_stream(plan.device.index)
    if stream == PER_THREAD_STREAM:
        return *new_split_scratch(plan, slots, plan.sms), 0
    key = plan.device, stream, plan.dim_vo, plan.tile_m, plan.counters_per_split
    found = here.split_scratch.get(key)
    if found is None:
        if len(here.split_scratch) >= MAX_STREAMS:
            here.split_scratch.clear()
        new, zeros = new_split_scratch(plan, slots, plan.sms)
        found = here.split_scratch.setdefault(key, (here.argument(new), here.argument(zeros)))
    return *found, 0


def new_split_scratch(plan: Any, slots: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch for so many parts, and zeroed counters of tiles."""
    return _new_partial(plan, slots), torch.zeros(
        tiles * plan.counters_per_split, dtype=torch.int32, device=plan.device
    )


def _new_partial(plan: Any, slots: int) -> torch.Tensor:
    return torch.empty((slots, plan.tile_m, plan.dim_vo + 4), dtype=torch.float32, device=plan.device)


def _add_pool(device: torch.device) -> CounterPool:
    """Waits once a device: a launch of another stream must find zeros."""
    counters = torch.zeros(POOL_SIZE, dtype=torch.int32, device=device)
    machine.current.synchronize(device)
    made = CounterPool(counters, machine.current.argument(counters), {PER_THREAD_STREAM: -1}, [0])
    return machine.current.counter_pools.setdefault(device, made)
