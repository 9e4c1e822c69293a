"""Counters, scratch memory and constant tensors of a device, kept since an allocation takes as long as a launch.

Launches of one stream never overlap, so what is kept belongs to a stream. A graph may be replayed beside any other
launch, but not beside itself: so the launches that one capture records on one stream share counters, which belong to
the graph. Counters and scratch memory are kept in the form of `HostMachine.argument`. Whatever is kept is allocated by
`kept`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from . import machine

MAX_STREAMS = 64  # the scratch of this many streams is kept, 4 to 20 MB each
PER_THREAD_STREAM = 2  # CUDA's handle of the per-thread default stream: one handle for several streams
_LOCK = threading.Lock()
T = TypeVar("T")


class CounterPool(NamedTuple):
    """The counters of a device for launches, and their owners. All are zero before and after every launch."""

    counters: torch.Tensor  # (max_counters,) int32
    argument: Any  # the same, in the form that launches take
    of_stream: dict[int, int]  # raw stream -> counter: launches of one stream never overlap
    used: list[int]  # one element: the number of counters with an owner

    def take(self, count: int) -> int:
        """Return the first of `count` consecutive free counters and mark them as owned; -1 if there are not enough."""
        with _LOCK:
            first = self.used[0]
            if first + count > len(self.counters):
                return -1
            self.used[0] += count
            return first


def kept(make: Callable[[], T], device: torch.device, wait: bool = False) -> T:
    """Return make(): tensors that stay alive after the call. A thread of its own runs it, on this thread's stream.

    The calling thread may be allocating in a memory pool that somebody else owns and frees. torch.compile with
    `mode="reduce-overhead"` opens one for the first run of a graph (`_cuda_beginAllocateCurrentThreadToPool` in
    torch/_inductor/cudagraph_trees.py), and so does `torch.cuda.use_mem_pool`. Such a pool serves only the thread that
    opened it, so a new thread allocates ordinary memory; nor has it an inference mode, autocast or a mode of torch. The
    pool of a capture serves a stream, from whatever thread: do not call this in a capture.

    wait: until the tensors are written, for launches of other streams. The thread costs 0.1 ms on an idle host.
    """
    here = machine.current
    stream = here.current_stream(device)

    def work() -> T:
        with here.on_stream(stream):
            made = make()
            if wait:
                here.synchronize(device)
            return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def constant(make: Callable[..., torch.Tensor], device: torch.device, plain: bool, *numbers: int) -> torch.Tensor:
    """Return make(device, *numbers), which nobody writes again and which is kept by its arguments.

    It is kept for launches of the current stream, which are ordered behind its writes, so that the host never waits.
    It is never freed. Nothing is kept of a capture: its graph owns the memory.

    plain: False if something traces the call. Then the tensor is made anew.
    """
    here = machine.current
    stream = here.uncaptured_stream(device) if plain else None
    if stream is None or stream == PER_THREAD_STREAM:
        return make(device, *numbers)
    key = make, device, stream, *numbers
    found = here.constants.get(key)
    if found is None:
        if len(here.constants) >= here.max_plans:
            return make(device, *numbers)
        found = here.constants[key] = kept(lambda: make(device, *numbers), device)
    return found


def filled(device: torch.device, size: int, value: int) -> torch.Tensor:
    """Return int32 (size,) of one value, to be kept by `constant`."""
    return torch.full((size,), value, dtype=torch.int32, device=device)


def steps(device: torch.device, count: int, step: int) -> torch.Tensor:
    """Return int32 (count,), the multiples of a step from 0 on, to be kept by `constant`."""
    return torch.arange(count, dtype=torch.int32, device=device) * step


def pages_in_order(device: torch.device, batch: int, pages: int) -> torch.Tensor:
    """Return int32 (batch, pages), pages in ascending order, to be kept by `constant`.

    It is a view of numbers that tables share, so tables of many sizes take twice the memory of the largest at most.
    """
    count = batch * pages
    return constant(steps, device, True, 1 << max(count - 1, 0).bit_length(), 1)[:count].view(batch, pages)


def captured_counters(device: torch.device, count: int) -> tuple[Any, int]:
    """Return (counters, first index) of `count` counters for a launch that is being captured; with index -1 none.

    They are those of the earlier launches that this capture has recorded on this stream, or new ones, which the graph
    owns for good: nobody says when a graph is destroyed. (None, -1) if the device has none, or none left.
    """
    here, stream = machine.current, machine.current.raw_stream(device.index)
    pool, capture = here.counter_pools.get(device), here.capture_id(stream)
    owner = device, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0
    known, counters = here.captures.get(owner, (None, {}))
    if known != capture:
        if len(here.captures) >= MAX_STREAMS:
            here.captures.clear()  # a capture that is not over takes other counters for its next launches
        counters = {}
        here.captures[owner] = capture, counters
    found = counters.get(count)
    if found is None:
        first = -1 if pool is None else pool.take(count)
        counters[count] = found = (None, -1) if pool is None or first < 0 else (pool.argument, first)
    return found


def launch_counter(device: torch.device, capturing: bool) -> tuple[Any, int]:
    """Return (counters, index) for a launch on the current stream, captured or not; with index -1 the kernel uses none.

    The counters are allocated outside captures: inside, zeroing them would become a graph node.
    """
    here = machine.current
    if capturing:
        counters, first = captured_counters(device, 1)
        return torch.empty(0, dtype=torch.int32, device=device) if first < 0 else counters, first
    pool = here.counter_pools.get(device) or _add_pool(device)
    stream = here.raw_stream(device.index)
    index = pool.of_stream.get(stream)
    if index is None:
        index = pool.of_stream.setdefault(stream, pool.take(1))
    return pool.argument, index


def split_scratch(plan: Any, capturing: bool) -> tuple[Any, Any, int]:
    """Return (scratch, counters, first index) for the splits of tiles.

    There are two splits per CTA, and `plan.counters_per_split` counters per CTA.

    plan: an `attention.plan.LaunchPlan`.
    """
    here, ctas = machine.current, plan.most_ctas * plan.cluster
    slots, counters = 2 * ctas, ctas * plan.counters_per_split
    if capturing:
        argument, first = captured_counters(plan.device, counters)
        if first >= 0:
            return _new_partial(plan, slots), argument, first
        return *new_split_scratch(plan, slots, ctas), 0
    if plan.device not in here.counter_pools:
        _add_pool(plan.device)  # later captures need them
    stream = here.raw_stream(plan.device.index)
    if stream == PER_THREAD_STREAM:
        return *new_split_scratch(plan, slots, ctas), 0
    key = plan.device, stream, plan.dim_vo // plan.o_tiles, plan.tile_m // plan.cluster, plan.counters_per_split, ctas
    found = here.split_scratch.get(key)
    if found is None:
        if len(here.split_scratch) >= MAX_STREAMS:
            here.split_scratch.clear()
        new, zeros = kept(lambda: new_split_scratch(plan, slots, ctas), plan.device)
        found = here.split_scratch.setdefault(key, (here.argument(new), here.argument(zeros)))
    return *found, 0


def new_split_scratch(plan: Any, slots: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scratch memory for `slots` splits, and zeroed counters of `tiles` tiles."""
    return _new_partial(plan, slots), torch.zeros(
        tiles * plan.counters_per_split, dtype=torch.int32, device=plan.device
    )


def _new_partial(plan: Any, slots: int) -> torch.Tensor:
    shape = slots, plan.tile_m // plan.cluster, plan.dim_vo // plan.o_tiles + 4
    return torch.empty(shape, dtype=torch.float32, device=plan.device)


def _add_pool(device: torch.device) -> CounterPool:
    """Allocate the counters of a device. Waits, once per device: a launch of another stream must find zeros."""
    here = machine.current
    counters = kept(lambda: torch.zeros(here.max_counters, dtype=torch.int32, device=device), device, wait=True)
    made = CounterPool(counters, here.argument(counters), {PER_THREAD_STREAM: -1}, [0])
    return here.counter_pools.setdefault(device, made)
