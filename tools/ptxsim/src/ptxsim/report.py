"""The report of a stuck kernel: the position of every warp, the state of every barrier, the pending operations."""

import numpy as np

from .machine import MachineState
from .shared import BASE


def where(m: MachineState) -> str:
    """Return one line per group of lanes, mbarrier, barrier and pending operation."""
    lines = []
    for warp in range(m.warps):
        lanes = slice(32 * warp, 32 * warp + 32)
        pc, live = m.pc[lanes], ~m.done[lanes]
        for unit in np.unique(pc[live]):
            standing = (pc == unit) & live
            here, first = int(standing.sum()), 32 * warp + int(np.argmax(standing))
            lines.append(f"  {_warp(m, warp)}, {here:2d} lanes, {_place(m, int(unit), first)}")
            apart = m.program.level[unit] or (warp in m.state.held_lanes and m.blocked[first])
            if apart and here < int(live.sum()):
                lines[-1] += " [waits for the other lanes of its warp]"
    for flat, barrier in sorted(m.mbarriers.items()):
        slot, offset = divmod(flat, m.shared.stride)
        lines.append(f"  mbarrier at shared {offset - BASE:#x} of {m.names.cta(slot)}: {barrier}")
    for (slot, number), point in sorted(m.state.named.items()):
        lines.append(f"  barrier {number} of {m.names.cta(slot)}: {point.arrived} of {point.need} threads have arrived")
    for cluster, point in m.state.cluster.items():
        if point.arrived:
            of = f"the cluster of {m.names.cta(cluster)}"
            lines.append(f"  barrier of {of}: {point.arrived} of {point.need} threads have arrived")
    lines += [f"  under way: {one.what()}" for queue in m.state.pending.values() for one in queue]
    return "\n".join(lines)


def _warp(m: MachineState, warp: int) -> str:
    per_cta = m.per_cta // 32
    return f"warp {warp % per_cta:2d} of {m.names.cta(warp // per_cta)}"


def _place(m: MachineState, unit: int, thread: int) -> str:
    x = m.program.kernel.instructions[m.program.units[unit].first]
    source = f" ({x.source})" if x.source else ""
    state = " [in the barrier]" if m.blocked[thread] else ""
    return f"line {x.line}{source}: {x.op} {', '.join(x.args)[:70]}{state}"
