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

    stage: Int32
    phase: Int32


def first():
    """The place of item 0."""
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def next_place(p: Pipeline, at: PipelineState):
    stage, phase = at.stage + 1, at.phase
    if stage == p.stages:
        stage, phase = Int32(0), phase ^ 1
    return PipelineState(stage, phase)


def after(p: Pipeline, n):
    """The item behind n: its number, or its place."""
    return next_place(p, n) if isinstance(n, PipelineState) else n + 1


def stage(p: Pipeline, n):
    if isinstance(n, PipelineState):
        return n.stage
    return n & (p.stages - 1) if p.stages & (p.stages - 1) == 0 else n % p.stages


def phase(p: Pipeline, n):
    if isinstance(n, PipelineState):
        return n.phase
    return (n >> (p.stages.bit_length() - 1) if p.stages & (p.stages - 1) == 0 else n // p.stages) & 1


def full(p: Pipeline, n):
    return p.full + stage(p, n)


def empty(p: Pipeline, n):
    return p.full + p.stages + stage(p, n)


def wait_full(p: Pipeline, n):
    cute.arch.mbarrier_wait(p.full + stage(p, n), phase(p, n))


def wait_empty(p: Pipeline, n):
    cute.arch.mbarrier_wait(empty(p, n), phase(p, n) ^ 1)


@cute.jit
def fill(p: Pipeline, n: Int32, tx_bytes: Int32):
    """Producer, one warp: wait until item n's stage is free, then announce its bytes."""
    wait_empty(p, n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full(p, n), tx_bytes)


@cute.jit
def release(p: Pipeline, n: Any):
    """Consumer, one warp: it no longer reads item n."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty(p, n))


@cute.jit
def release_after(p: Pipeline, n: Any, value: Float32, below: Float32):
    """`release`, once `value` is known. It is never less than `below`, but the compiler cannot tell: it moves neither
    the release nor a wait for MMAs that follows in front of what computes `value`."""
    with cute.arch.elect_one():
        if not value < below:
            cute.arch.mbarrier_arrive(empty(p, n))


PHASE = 1 << 16  # bit of a cursor: its lower bits are the stage; the first item's is 0


def cursor_stage(cursor):
    return cursor & (PHASE - 1)


@cute.jit
def advance(p: Pipeline, cursor: Int32):
    """The cursor of the next item."""
    cursor += 1
    if cursor & (PHASE - 1) == p.stages:
        cursor = (cursor - p.stages) ^ PHASE
    return cursor


def try_wait(p: Pipeline, cursor):
    """Whether the item is there: asked early, it hides the latency of an answer."""
    return cute.arch.mbarrier_test_wait(p.full + cursor_stage(cursor), (cursor >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def wait_cursor(p: Pipeline, cursor: Int32, known=False):
    """`wait_full` by cursor. known: of `try_wait`."""
    if not known:
        cute.arch.mbarrier_wait(p.full + cursor_stage(cursor), (cursor >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def release_cursor(p: Pipeline, cursor: Int32, last):
    """Consumer, one warp: it no longer reads the item, if `last`. Lane 0 instead of an elected one: no branch."""
    cute.arch.sync_warp()
    if last & (cute.arch.lane_idx() == 0):
        cute.arch.mbarrier_arrive(p.full + p.stages + cursor_stage(cursor))


@cute.jit
def signals(smem, count: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """Pointer to `count` mbarriers, each to be used by itself: so many arrivals end its n-th phase. A fence and a
    barrier follow."""
    first = smem.allocate_array(Int64, count)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(first + i, arrivals)
    return first


def wait_signal(signal: cute.Pointer, n):
    """Until phase n has ended; at once for n = -1."""
    cute.arch.mbarrier_wait(signal, n & 1)


@cute.jit
def send(signal: cute.Pointer):
    """One warp: an arrival."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(signal)
