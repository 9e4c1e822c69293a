"""mbarrier pipelines, addressed by items.

A pipeline has `stages` full and `stages` empty mbarriers. Producers and consumers each count the items they have
passed. Item n uses stage n % stages, and its barriers complete in phase (n // stages) & 1, so the number is all the
state that a role carries. All functions here take an item in any of three forms, and `next_item` returns the form that
it is given:

- its number n;
- `PipelineState`, its stage and its phase, if the division costs too much;
- `PackedState`, stage and phase in one register, if registers are short.

The protocol, with TMA as the producer:

    k_pipe = pipeline.make(smem, stages, 1, consumer_warps)     # then mbarrier_init_fence() and a CTA barrier

    pipeline.producer_acquire_tx(k_pipe, n, tx_bytes)           # producer warp: wait for `empty`, expect the bytes
    cute.copy(box.atom, g, s, tma_bar_ptr=pipeline.full_barrier(k_pipe, n))   # TMA completes `full`

    pipeline.consumer_wait(k_pipe, n)                           # consumer warps: wait for `full`
    ...                                                         # read stage(k_pipe, n)
    pipeline.consumer_release(k_pipe, n)                        # arrive at `empty`, once per warp

A producer warp that writes the stage itself calls `producer_acquire`, then `producer_commit`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@dataclass(frozen=True)
class Pipeline:
    """The mbarriers of a pipeline: its full barriers, then its empty ones."""

    full: cute.Pointer  # `stages` full mbarriers, then `stages` empty ones
    stages: cutlass.Constexpr


@cute.jit
def make(smem, stages: cutlass.Constexpr, producers: cutlass.Constexpr, consumers: cutlass.Constexpr):
    """Allocate and initialise a pipeline.

    producers, consumers: arrivals that complete a phase of a full and of an empty barrier. The caller adds the
    fence (`mbarrier_init_fence`) and a CTA barrier before the first use."""
    p = Pipeline(smem.allocate_array(Int64, 2 * stages), stages)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(p.full + i, producers)
                cute.arch.mbarrier_init(p.full + stages + i, consumers)
    return p


class PipelineState(NamedTuple):
    """The stage and the phase of item n: n % stages and (n // stages) & 1."""

    index: Int32
    phase: Int32


PHASE_BIT = 16  # of the word of a `PackedState`; its lower bits are the stage


class PackedState(NamedTuple):
    """The stage and the phase of an item in one word."""

    word: Int32


def initial_state():
    """Return the `PipelineState` of item 0."""
    return PipelineState(Int32(0), Int32(0))


def state_of(p: Pipeline, n):
    """Return the `PipelineState` of item number n."""
    return PipelineState(Int32(stage(p, n)), Int32(phase(p, n)))


@cute.jit
def next_state(p: Pipeline, at: PipelineState):
    """Return the state of the next item."""
    index, phase = at.index + 1, at.phase
    if index == p.stages:
        index, phase = Int32(0), phase ^ 1
    return PipelineState(index, phase)


@cute.jit
def next_packed_state(p: Pipeline, at: PackedState):
    """Return the state of the next item."""
    word = at.word + 1
    if word & ((1 << PHASE_BIT) - 1) == p.stages:
        word = (word - p.stages) ^ (1 << PHASE_BIT)
    return PackedState(word)


def next_item(p: Pipeline, n):
    """Return the item after n, in the form of n."""
    if isinstance(n, PackedState):
        return next_packed_state(p, n)
    return next_state(p, n) if isinstance(n, PipelineState) else n + 1


def stage(p: Pipeline, n):
    """Return the stage of item n."""
    if isinstance(n, PipelineState):
        return n.index
    if isinstance(n, PackedState):
        return n.word & ((1 << PHASE_BIT) - 1)
    return n & (p.stages - 1) if p.stages & (p.stages - 1) == 0 else n % p.stages


def phase(p: Pipeline, n):
    """Return the phase parity in which item n completes its barriers."""
    if isinstance(n, PipelineState):
        return n.phase
    if isinstance(n, PackedState):
        return (n.word >> PHASE_BIT) & 1
    return (n >> (p.stages.bit_length() - 1) if p.stages & (p.stages - 1) == 0 else n // p.stages) & 1


def full_barrier(p: Pipeline, n):
    return p.full + stage(p, n)


def empty_barrier(p: Pipeline, n):
    return p.full + p.stages + stage(p, n)


def consumer_try_wait(p: Pipeline, n):
    """Return whether item n is in its stage, without waiting.

    Pass the answer to `consumer_wait`. A test that is issued early hides its latency."""
    return cute.arch.mbarrier_test_wait(full_barrier(p, n), phase(p, n))


@cute.jit
def consumer_wait(p: Pipeline, n: Any, ready=False):
    """Wait until item n is in its stage. ready: the answer of `consumer_try_wait`."""
    if not ready:
        cute.arch.mbarrier_wait(full_barrier(p, n), phase(p, n))


def producer_acquire(p: Pipeline, n):
    """Wait until the stage of item n is free. The first `stages` items do not wait."""
    cute.arch.mbarrier_wait(empty_barrier(p, n), phase(p, n) ^ 1)


@cute.jit
def producer_acquire_tx(p: Pipeline, n: Int32, tx_bytes: Int32):
    """Wait until the stage of item n is free, then arrive at its full barrier and expect `tx_bytes` (one warp)."""
    producer_acquire(p, n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full_barrier(p, n), tx_bytes)


@cute.jit
def producer_commit(p: Pipeline, n: Any):
    """Tell the consumers that item n is in its stage (one warp: one arrival)."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full_barrier(p, n))


@cute.jit
def consumer_release(p: Pipeline, n: Any):
    """Free the stage of item n for the producer (one warp: one arrival)."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty_barrier(p, n))


@cute.jit
def cluster_release(p: Pipeline, n: Any, ctas: cutlass.Constexpr):
    """Free the stage of item n for the producers of all `ctas` CTAs of a cluster, each of which writes to all of them
    (one warp: an arrival in each CTA)."""
    with cute.arch.elect_one():
        for rank in cutlass.range_constexpr(ctas):
            cute.arch.mbarrier_arrive(empty_barrier(p, n), rank)


@cute.jit
def consumer_release_after(p: Pipeline, n: Any, value: Float32, below: Float32):
    """Free the stage of item n after `value` is computed (one warp: one arrival).

    value: never less than `below`, which the compiler cannot know. So it moves neither the release nor a wait for
    MMAs behind it above the code that computes `value`."""
    with cute.arch.elect_one():
        if not value < below:
            cute.arch.mbarrier_arrive(empty_barrier(p, n))


@cute.jit
def consumer_release_if(p: Pipeline, n: Any, last):
    """Free the stage of item n for the producer if `last` (one warp: one arrival).

    Lane 0 arrives instead of an elected lane: this needs no branch."""
    cute.arch.sync_warp()
    if last & (cute.arch.lane_idx() == 0):
        cute.arch.mbarrier_arrive(empty_barrier(p, n))


@cute.jit
def make_mbarriers(smem, count: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """Allocate and initialise `count` single mbarriers and return a pointer to the first.

    arrivals: how many complete a phase. The caller adds the fence and a CTA barrier before the first use. Use:

        ready = pipeline.make_mbarriers(smem, 1, warps)
        pipeline.mbarrier_arrive(ready)     # each of `warps` warps, once per phase
        pipeline.mbarrier_wait(ready, n)    # until phase n has completed
    """
    first = smem.allocate_array(Int64, count)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(first + i, arrivals)
    return first


def mbarrier_wait(mbarrier: cute.Pointer, n):
    """Wait until phase n of an mbarrier has completed; return at once if n is -1."""
    cute.arch.mbarrier_wait(mbarrier, n & 1)


@cute.jit
def mbarrier_arrive(mbarrier: cute.Pointer):
    """Arrive at an mbarrier (one warp: one arrival)."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(mbarrier)
