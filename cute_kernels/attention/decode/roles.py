"""The roles of decode's warps. Warp ranges, arrival counts of pipelines and register budgets follow from this table."""

from ...device.roles import Role, Roles
from ..kv import scales

REGISTERS = {1: (72, 248), 2: (72, 216), 3: (56, 152)}  # mma warpgroups -> registers per thread: (other roles, mma)


def roles(spec) -> Roles:
    """Return the table of a kernel: name, warps, registers per thread, in the order of the warps."""
    load_regs, mma_regs = REGISTERS[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.load_warps, load_regs),
        Role("load_v", spec.tile.load_warps, load_regs),
        Role("schedule", 1, load_regs),
        Role("load_scales", scales.load_warps(spec), load_regs),
        Role("idle", 1 - scales.load_warps(spec), load_regs),
        Role("mma", spec.tile.warps, mma_regs),
    )
