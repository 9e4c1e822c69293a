"""The roles of decode's warps. Warp ranges, arrival counts of pipelines and register budgets follow from this table."""

from ...device.roles import Role, Roles
from ..kv import scales
from .layout import operands

# (mma warpgroups, CTAs on an SM) -> registers per thread: (other roles, mma)
REGISTERS = {(1, 1): (72, 248), (2, 1): (72, 216), (3, 1): (56, 152), (1, 2): (56, 200)}

WARPS = 4  # of the warpgroup without mma warps


def roles(spec) -> Roles:
    """Return the table of a kernel: name, warps, registers per thread, in the order of the warps."""
    load_regs, mma_regs = REGISTERS[spec.tile.warpgroups, spec.tile.ctas_per_sm]
    loading = [Role(x.load_role, spec.tile.load_warps, load_regs) for x in operands(spec)]
    loading += [Role("schedule", 1, load_regs), Role("load_scales", scales.load_warps(spec), load_regs)]
    return Roles.of(
        *loading,
        Role("idle", WARPS - sum(role.warps for role in loading), load_regs),
        Role("mma", spec.tile.warps, mma_regs),
        ctas_per_sm=spec.tile.ctas_per_sm,
    )
