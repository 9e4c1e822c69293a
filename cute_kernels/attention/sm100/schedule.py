"""The warp that schedules, with split KV: the warp beside mma, load_k and load_v, whatever else it does.

It loads Q, or, over NVFP4 caches, scale factors; over other quantised caches it only schedules
(`stream_k.schedule_warp`), because the warp of V loads Q there. Without split KV, the warp of K schedules.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import geometry, load
from ..schedule import stream_k, work
from .query import load_q_tile


class ScheduleRoleState(NamedTuple):
    """State of the role between two tiles. item: the next item of q_pipe, or of the pipelines of K and V."""

    scheduler: stream_k.SchedulerState
    item: Int32


@cute.jit
def schedule_and_load_q(spec: cutlass.Constexpr, plan, s):
    """Produce the CTA's tiles and splits of tiles, and load their Q. One warp."""
    # As `query.load_q`, but before it loads Q of a tile, the warp finds the CTA's next tile and produces it in
    # work_pipe, which has 4 stages: roles that are ahead, such as the loaders of K and V, find it there. A tile is
    # whole or a split; an invalid one says that there are no more.
    a = plan.args
    pack_factor = geometry.group_divisor(a)
    cta_units, state = stream_k.begin(spec, a)
    first = stream_k.produce_next(spec, a, s, Int32(0), cta_units, state, pack_factor)

    def load_tile(w, t, at):
        scheduler, q = at
        scheduler = stream_k.produce_next(spec, a, s, t + 1, cta_units, scheduler, pack_factor)
        if w.n_block_max > w.n_block_min:
            load_q_tile(spec, plan, s, w, q)
            q += 1
        return ScheduleRoleState(scheduler, q)

    work.for_each_tile(spec, s, load_tile, ScheduleRoleState(first, Int32(0)), carries_tile=True)


@cute.jit
def schedule_and_load_scales(spec: cutlass.Constexpr, plan, s):
    """Produce the CTA's tiles and splits of tiles, and load the scale factors of K and V. One warp."""
    # As `load.load_scales`, but behind the first (highest) block of a tile, the warp finds the CTA's next tile and
    # produces it in work_pipe. Before that block, the search would delay the tile's first MMA.
    a = plan.args
    pack_factor = geometry.group_divisor(a)
    cta_units, state = stream_k.begin(spec, a)
    first = stream_k.produce_next(spec, a, s, Int32(0), cta_units, state, pack_factor)

    def load_tile(w, t, at):
        scheduler, i = at
        rest = cutlass.max(w.n_block_max - 1, w.n_block_min)
        i = load.scales_of_blocks(spec, a, s, w._replace(n_block_min=rest), i)
        scheduler = stream_k.produce_next(spec, a, s, t + 1, cta_units, scheduler, pack_factor)
        i = load.scales_of_blocks(spec, a, s, w._replace(n_block_max=rest), i)
        return ScheduleRoleState(scheduler, i)

    work.for_each_tile(spec, s, load_tile, ScheduleRoleState(first, Int32(0)), carries_tile=True)
