"""The roles of prefill's warps: a table from which ranges, arrival counts and register budgets follow."""

from ...device.roles import Role, Roles
from .. import quant

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread
EACH = 4  # warps of a warpgroup


def operand(spec):
    """Type of what the MMAs multiply."""
    return spec.q if spec.q == spec.kv.dtype else quant.operand(spec)


def fp8(spec):
    """Whether the MMAs multiply numbers of 8 bits."""
    return operand(spec) == "e4m3"


def prepared(spec):
    """Whether stages of (K, V) are made from what was loaded: WGMMA takes an 8-bit V only transposed."""
    return False, fp8(spec)


def roles(spec) -> Roles:
    load_regs, math_regs = REGISTERS[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.loaders, load_regs),
        Role("load_v", spec.tile.loaders, load_regs),
        Role("prepare", EACH - 2 * spec.tile.loaders, load_regs),
        Role("math", EACH * spec.tile.warpgroups, math_regs),
    )
