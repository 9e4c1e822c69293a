"""mbarrier pipelines addressed by one running counter.

A pipe is `stages` full and `stages` empty barriers. Producer and consumers each count the items they have passed; item
n lives in stage n % stages and its barriers complete in phase (n // stages) & 1, so a counter is all the state a role
carries. Where the division costs too much, a role carries a position instead: `stage_of`, `behind`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@dataclass(frozen=True)
class Pipe:
    full: cute.Pointer  # `stages` mbarriers, then as many "empty" ones
    stages: cutlass.Constexpr


@cute.jit
def make(smem, stages: cutlass.Constexpr, producers: cutlass.Constexpr, consumers: cutlass.Constexpr):
    """Allocate and initialise: that many arrivals fill a stage, that many free it. A fence and a barrier follow."""
    p = Pipe(smem.allocate_array(Int64, 2 * stages), stages)
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(p.full + i, producers)
                cute.arch.mbarrier_init(p.full + stages + i, consumers)
    return p


def slot(p: Pipe, n):
    return n & (p.stages - 1) if p.stages & (p.stages - 1) == 0 else n % p.stages


def phase(p: Pipe, n):
    return (n >> (p.stages.bit_length() - 1) if p.stages & (p.stages - 1) == 0 else n // p.stages) & 1


def full(p: Pipe, n):
    return p.full + slot(p, n)


def wait_full(p: Pipe, n):
    cute.arch.mbarrier_wait(p.full + slot(p, n), phase(p, n))


def wait_empty(p: Pipe, n):
    cute.arch.mbarrier_wait(p.full + p.stages + slot(p, n), phase(p, n) ^ 1)


@cute.jit
def fill(p: Pipe, n: Int32, tx_bytes: Int32):
    """Producer, one warp: wait until item n's stage is free, then announce its bytes."""
    wait_empty(p, n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full(p, n), tx_bytes)


@cute.jit
def release(p: Pipe, n: Int32):
    """Consumer, one warp: it no longer reads item n."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(p.full + p.stages + slot(p, n))


@cute.jit
def release_after(p: Pipe, n: Int32, value: Float32, below: Float32):
    """`release`, once `value` is known. It is never less than `below`, but the compiler cannot tell: it moves neither
    the release nor a wait for MMAs that follows in front of what computes `value`."""
    with cute.arch.elect_one():
        if not value < below:
            cute.arch.mbarrier_arrive(p.full + p.stages + slot(p, n))


PHASE = 1 << 16  # bit of a position: its lower bits are the stage; the first item's is 0


def stage_of(at):
    return at & (PHASE - 1)


@cute.jit
def behind(p: Pipe, at: Int32):
    """The position of the next item."""
    at += 1
    if at & (PHASE - 1) == p.stages:
        at = (at - p.stages) ^ PHASE
    return at


def is_full_at(p: Pipe, at):
    """Whether the item is there: asked early, it hides the latency of an answer."""
    return cute.arch.mbarrier_test_wait(p.full + stage_of(at), (at >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def wait_full_at(p: Pipe, at: Int32, known=False):
    """known: of `is_full_at`."""
    if not known:
        cute.arch.mbarrier_wait(p.full + stage_of(at), (at >> (PHASE.bit_length() - 1)) & 1)


@cute.jit
def release_at(p: Pipe, at: Int32, last):
    """Consumer, one warp: it no longer reads what is there, if `last`. Lane 0 instead of an elected one: no branch."""
    cute.arch.sync_warp()
    if last & (cute.arch.lane_idx() == 0):
        cute.arch.mbarrier_arrive(p.full + p.stages + stage_of(at))
