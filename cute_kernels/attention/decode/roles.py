"""The roles of decode's warps: a table from which ranges, arrival counts and register budgets follow."""

from ...device.roles import Role, Roles

REGISTERS = {1: (72, 248), 2: (72, 216), 3: (56, 152)}  # math warpgroups -> (other, math) registers a thread


def roles(spec) -> Roles:
    load_regs, mma_regs = REGISTERS[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.load_warps, load_regs),
        Role("load_v", spec.tile.load_warps, load_regs),
        Role("schedule", 1, load_regs),
        Role("load_scales" if spec.kv.block_scaled else "idle", 1, load_regs),
        Role("mma", spec.tile.warps, mma_regs),
    )
