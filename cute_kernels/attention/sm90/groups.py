"""The math warpgroups of a CTA: which one a thread is of, their barriers, their turns."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from .roles import roles

WARP_SCHEDULER_BARRIER = 1  # + warpgroup: may issue MMAs
ALL_BARRIER = 4  # all math threads
WARPGROUP_BARRIER = 5  # + warpgroup: its 128 threads


def warpgroup_idx(spec):
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128 - roles(spec).first_thread("mma") // 128)


@cute.jit
def warp_scheduler_barrier_sync(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        cute.arch.barrier(barrier_id=WARP_SCHEDULER_BARRIER + warpgroup_idx(spec), number_of_threads=256)


@cute.jit
def warp_scheduler_barrier_arrive(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        after = (warpgroup_idx(spec) + 1) % spec.tile.warpgroups
        cute.arch.barrier_arrive(barrier_id=WARP_SCHEDULER_BARRIER + after, number_of_threads=256)
