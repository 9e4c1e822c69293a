"""The roles of prefill's warps: a table from which ranges, arrival counts and register budgets follow."""

from ...device.roles import Role, Roles

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread


def roles(spec) -> Roles:
    load_regs, math_regs = REGISTERS[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.loaders, load_regs),
        Role("load_v", spec.tile.loaders, load_regs),
        Role("math", 4 * spec.tile.warpgroups, math_regs),
    )
