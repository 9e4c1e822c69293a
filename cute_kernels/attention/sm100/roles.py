"""The roles of prefill's warps on Blackwell."""

from ...device.roles import Role, Roles
from ..prepare import dequantises

SLOTS = 2  # S that tensor memory has room for
ROWS = 128  # of a half of the tile: a row for a thread, a lane of tensor memory
WARPS = 4  # warps of a warpgroup


def halves(spec):
    """Of the tile's rows: two, or one, whose blocks have the slots of S in turn."""
    return spec.tile.m // ROWS


def groups(spec):
    """Warpgroups of softmax, each with a slot of S and an O of its own: of a half each, or of one half's blocks in
    turn; one, which has both slots in turn, where two O have no room."""
    return SLOTS if spec.head_dim_vo <= ROWS else 1


def turns(spec):
    """Groups that have the blocks of a half in turn."""
    return groups(spec) // halves(spec)


def group_of(spec, half, i):
    """The group that has item i, a block of a half."""
    return half if halves(spec) == SLOTS else i % turns(spec)


def taken(spec, group, i):
    """How many of the items before i a group had."""
    return (i + (turns(spec) - 1 - group)) // turns(spec) if turns(spec) > 1 else i


REGISTERS = {  # (groups, dequantises) -> of softmax, correction, multiplication and loads, preparation
    (2, False): (184, 88, 56, 0),
    (2, True): (160, 64, 48, 48),
    (1, False): (240, 160, 96, 0),
    (1, True): (208, 104, 96, 96),
}


def roles(spec) -> Roles:
    softmax, correct, few, prepare = REGISTERS[groups(spec), dequantises(spec)]
    last = "load_q" if not dequantises(spec) else "load_scales" if spec.kv.scaled else "idle"
    table = [Role("softmax", groups(spec) * WARPS, softmax), Role("correct", WARPS, correct)]
    table += [Role(name, 1, few) for name in ("mma", "load_k", "load_v", last)]
    if dequantises(spec):
        table += [Role(name, WARPS // 2, prepare) for name in ("prepare_k", "prepare_v")]
    return Roles.of(*table)
