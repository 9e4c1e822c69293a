"""The roles of prefill's warps: a table from which ranges, arrival counts and register budgets follow."""

from ...device.roles import Role, Roles
from .. import quant

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread
TRANSPOSING = REGISTERS | {2: (48, 232)}
DEQUANTISING = {1: (40, 40, 232), 2: (32, 32, 224)}  # math warpgroups -> (load, prepare, math) registers
WARPS = 4  # warps of a warpgroup


def operand(spec):
    """Type of what the MMAs multiply."""
    return spec.q if spec.q == spec.kv.dtype else quant.operand(spec)


def fp8(spec):
    """Whether the MMAs multiply numbers of 8 bits."""
    return operand(spec) == "e4m3"


def dequantises(spec):
    """Whether K and V are stored in a type that the MMAs do not multiply."""
    return operand(spec) != spec.kv.dtype


def prepared(spec):
    """Whether stages of (K, V) are made from what was loaded: dequantised, or, WGMMA takes an 8-bit V only so,
    transposed."""
    return dequantises(spec), dequantises(spec) or fp8(spec)


def scaled_rows(spec):
    """Whether each row has a score scale of its own."""
    return any(prepared(spec))


def roles(spec) -> Roles:
    if dequantises(spec):
        return dequantising_roles(spec)
    load_regs, math_regs = (TRANSPOSING if fp8(spec) else REGISTERS)[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.loaders, load_regs),
        Role("load_v", spec.tile.loaders, load_regs),
        Role("prepare_v", WARPS - 2 * spec.tile.loaders, load_regs),
        Role("math", WARPS * spec.tile.warpgroups, math_regs),
    )


def dequantising_roles(spec) -> Roles:
    """Those that dequantise have a warpgroup of their own: a warp of it for each of the SM's four schedulers."""
    load_regs, prepare_regs, math_regs = DEQUANTISING[spec.tile.warpgroups]
    return Roles.of(
        Role("load_k", spec.tile.loaders, load_regs),
        Role("load_v", spec.tile.loaders, load_regs),
        Role("load_scales", int(spec.kv.scaled), load_regs),
        Role("idle", WARPS - 2 * spec.tile.loaders - int(spec.kv.scaled), load_regs),
        Role("prepare_k", WARPS // 2, prepare_regs),
        Role("prepare_v", WARPS // 2, prepare_regs),
        Role("math", WARPS * spec.tile.warpgroups, math_regs),
    )
