"""The math warpgroups of a CTA: which one a thread is of, their barriers, their turns."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from .roles import roles

TURN_BARRIER = 1  # + warpgroup: may issue MMAs
ALL_BARRIER = 4  # all math threads
GROUP_BARRIER = 5  # + warpgroup: its 128 threads


def group_index(spec):
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128 - roles(spec).first_thread("math") // 128)


@cute.jit
def wait_turn(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        cute.arch.barrier(barrier_id=TURN_BARRIER + group_index(spec), number_of_threads=256)


@cute.jit
def pass_turn(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        after = (group_index(spec) + 1) % spec.tile.warpgroups
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=256)
