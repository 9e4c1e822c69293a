"""mbarrier pipelines addressed by one running counter.

A pipe is `stages` full and `stages` empty barriers. Producer and consumers each count the items they have passed; item
n lives in stage n % stages and its barriers complete in phase (n // stages) & 1, so a counter is all the state a role
carries. Where the division costs too much, a role carries the `PipelineState` of an item instead, its stage and its
phase; or, where it has no register to spare, a `cursor`: both in one number.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@dataclass(frozen=True)
class Pipeline:
    full: cute.Pointer  # `stages` mbarriers, then as many "empty" ones
    stages: cutlass.Constexpr


@cute.jit
def make(smem, stages: cutlass.Constexpr, producers: cutlass.Constexpr, consumers: cutlass.Constexpr):
    """Allocate and initialise: that many arrivals fill a stage, that many free it. A fence and a barrier follow."""
    p = Pipeline(smem.allocate_array(Int64, 2 * stages), stages)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(p.full + i, producers)
                cute.arch.mbarrier_init(p.full + stages + i, consumers)
    return p


class PipelineState(NamedTuple):
    """Of an item, instead of its number n: n % stages and (n // stages) & 1."""

    index: Int32
    phase: Int32


def initial_state():
    """The place of item 0."""
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def next_state(p: Pipeline, at: PipelineState):
    index, phase = at.index + 1, at.phase
    if index == p.stages:
        index, phase = Int32(0), phase ^ 1
    return PipelineState(index, phase)


def next_item(p: Pipeline, n):
    """The item behind n: its number, or its place."""
    return next_state(p, n) if isinstance(n, PipelineState) else n + 1


def stage(p: Pipeline, n):
    if isinstance(n, PipelineState):
        return n.index
    return n & (p.stages - 1) if p.stages & (p.stages - 1) == 0 else n % p.stages


def phase(p: Pipeline, n):
    if isinstance(n, PipelineState):
        return n.phase
    return (n >> (p.stages.bit_length() - 1) if p.stages & (p.stages - 1) == 0 else n // p.stages) & 1


def full_barrier(p: Pipeline, n):
    return p.full + stage(p, n)


def empty_barrier(p: Pipeline, n):
    return p.full + p.stages + stage(p, n)


def consumer_wait(p: Pipeline, n):
    cute.arch.mbarrier_wait(p.full + stage(p, n), phase(p, n))


def producer_acquire(p: Pipeline, n):
    cute.arch.mbarrier_wait(empty_barrier(p, n), phase(p, n) ^ 1)


@cute.jit
def producer_acquire_tx(p: Pipeline, n: Int32, tx_bytes: Int32):
    """Producer, one warp: wait until item n's stage is free, then announce its bytes."""
    producer_acquire(p, n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full_barrier(p, n), tx_bytes)


@cute.jit
def consumer_release(p: Pipeline, n: Any):
    """Consumer, one warp: it no longer reads item n."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty_barrier(p, n))


@cute.jit
def consumer_release_after(p: Pipeline, n: Any, value: Float32, below: Float32):
    """`release`, once `value` is known. It is never less than `below`, but the compiler cannot tell: it moves neither
    the release nor a wait for MMAs that follows in front of what computes `value`."""
    with cute.arch.elect_one():
        if not value < below:
            cute.arch.mbarrier_arrive(empty_barrier(p, n))


PHASE = 1 << 16  # bit of a cursor: its lower bits are the stage; the first item's is 0


def cursor_stage(cursor):
    return cursor & (PHASE - 1)


@cute.jit
def advance_cursor(p: Pipeline, cursor: Int32):
    """The cursor of the next item."""
    cursor += 1
    if cursor & (PHASE - 1) == p.stages:
        cursor = (cursor - p.stages) ^ PHASE
    return cursor


def consumer_try_wait(p: Pipeline, cursor):
    """Whether the item is there: asked early, it hides the latency of an answer."""
    return cute.arch.mbarrier_test_wait(p.full + cursor_stage(cursor), (cursor >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def consumer_wait_cursor(p: Pipeline, cursor: Int32, known=False):
    """`wait_full` by cursor. known: of `try_wait`."""
    if not known:
        cute.arch.mbarrier_wait(p.full + cursor_stage(cursor), (cursor >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def consumer_release_cursor(p: Pipeline, cursor: Int32, last):
    """Consumer, one warp: it no longer reads the item, if `last`. Lane 0 instead of an elected one: no branch."""
    cute.arch.sync_warp()
    if last & (cute.arch.lane_idx() == 0):
        cute.arch.mbarrier_arrive(p.full + p.stages + cursor_stage(cursor))


@cute.jit
def make_mbarriers(smem, count: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """Pointer to `count` mbarriers, each to be used by itself: so many arrivals end its n-th phase. A fence and a
    barrier follow."""
    first = smem.allocate_array(Int64, count)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(first + i, arrivals)
    return first


def mbarrier_wait(signal: cute.Pointer, n):
    """Until phase n has ended; at once for n = -1."""
    cute.arch.mbarrier_wait(signal, n & 1)


@cute.jit
def mbarrier_arrive(signal: cute.Pointer):
    """One warp: an arrival."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(signal)
