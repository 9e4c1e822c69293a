"""The roles of prefill's warps on Blackwell."""

from ...device.roles import Role, Roles
from .. import quant

HALVES = 2  # of the tile's rows, 128 each: a row for a thread, a lane of tensor memory
ROWS = 128
WARPS = 4  # warps of a warpgroup


def operand(spec):
    """Type of what the MMAs multiply."""
    return spec.q if spec.q == spec.kv.dtype else quant.operand(spec)


def dequantises(spec):
    """Whether K and V are stored in a type that the MMAs do not multiply."""
    return operand(spec) != spec.kv.dtype


def in_units(spec):
    """Whether Q becomes fp16 in units of its own a row: that has not the range of bf16."""
    return dequantises(spec) and spec.q == "bf16"


def roles(spec) -> Roles:
    if not dequantises(spec):
        few = (Role(name, 1, 56) for name in ("mma", "load_k", "load_v", "load_q"))
        return Roles.of(Role("softmax", HALVES * WARPS, 184), Role("correct", WARPS, 88), *few)
    few = (Role(name, 1, 48) for name in ("mma", "load_k", "load_v", "load_scales" if spec.kv.scaled else "idle"))
    prepare = (Role(name, WARPS // 2, 48) for name in ("prepare_k", "prepare_v"))
    return Roles.of(Role("softmax", HALVES * WARPS, 160), Role("correct", WARPS, 64), *few, *prepare)
