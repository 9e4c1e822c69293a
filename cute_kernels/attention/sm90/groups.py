"""The mma warpgroups of a CTA: their index, their rows and columns, and how they wait for each other.

The warp scheduler barriers are those of FlashAttention-3: a warpgroup waits for its turn, issues its MMAs, and passes
the turn to the next one, so that the softmax of one warpgroup runs under the MMAs of another. Without turns,
skip-softmax was 5.9 % slower (H200, 2026-11-23).
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..barriers import NamedBarrier
from .roles import roles


def warpgroup_idx(spec):
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128 - roles(spec).first_thread("mma") // 128)


def row_group(spec):
    """Return which 64 rows of the tile this warpgroup has."""
    return warpgroup_idx(spec) if spec.tile.o_parts == 1 else warpgroup_idx(spec) // spec.tile.o_parts


def o_part(spec):
    """Return which part of the columns of O this warpgroup has."""
    return 0 if spec.tile.o_parts == 1 else warpgroup_idx(spec) % spec.tile.o_parts


@cute.jit
def rows_barrier(spec: cutlass.Constexpr):
    """Synchronise the warpgroups that share 64 rows."""
    if const_expr(spec.tile.o_parts == 1):
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + warpgroup_idx(spec), number_of_threads=128)
    else:  # all warpgroups: the tile has 64 rows
        cute.arch.barrier(barrier_id=NamedBarrier.MMA, number_of_threads=128 * spec.tile.warpgroups)


@cute.jit
def warp_scheduler_barrier_sync(spec: cutlass.Constexpr):
    """Wait for this warpgroup's turn to issue MMAs."""
    if const_expr(spec.tile.warpgroups > 1):
        cute.arch.barrier(barrier_id=NamedBarrier.WARP_SCHEDULER + warpgroup_idx(spec), number_of_threads=256)


@cute.jit
def warp_scheduler_barrier_arrive(spec: cutlass.Constexpr):
    """Pass the turn to the next warpgroup."""
    if const_expr(spec.tile.warpgroups > 1):
        after = (warpgroup_idx(spec) + 1) % spec.tile.warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.WARP_SCHEDULER + after, number_of_threads=256)
