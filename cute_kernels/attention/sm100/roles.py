"""Roles of the warps of the Blackwell kernel, and the shape of a tile: halves of 128 rows, groups, iterations.

A half is 128 rows of a tile (FlashAttention 4: a Q stage). A group is a softmax warpgroup with an S and an O of its own
in tensor memory.
"""

from ...device.roles import Role, Roles
from .. import geometry
from ..kv import scales
from ..schedule import policy
from . import precision

SLOTS = 2  # S tiles that tensor memory has room for
ROWS = 128  # rows of a half: one row per thread of a warpgroup, and per lane of tensor memory
WARPS = 4  # warps of a warpgroup


def groups(spec):
    """Return the number of softmax warpgroups: 2, each with a slot of S and an O of its own. With head_dim 256 there is
    room for one O, hence 1 group, which uses both slots in turn."""
    return SLOTS if spec.padded_vo <= ROWS else 1


def tile_q_stage(spec, w):
    """Return the number of halves of tile `w`. With 2 halves, each group has one; with 1, all groups alternate over its
    KV blocks. The result is an int if all tiles of the kernel have the same number."""
    if len(spec.tile.m_choices) == 1:
        return spec.tile.m // ROWS
    return geometry.tile_m(spec, geometry.num_rows(w.sequence.q_len, w.pack_factor)) // ROWS


def pingpong_groups(spec, w):
    """Return the number of groups, 1 or 2, that share a half of tile `w` and alternate over its KV blocks."""
    return groups(spec) + 1 - tile_q_stage(spec, w) if groups(spec) > 1 else 1


def num_iterations(spec, w):
    """Return the number of iterations of tile `w`. In an iteration every group has one block; if two groups alternate
    over an odd number of blocks, one of them has none in the last iteration."""
    n = pingpong_groups(spec, w)
    return w.n_block_max - w.n_block_min if is_static(n, 1) else (w.n_block_max - w.n_block_min + n - 1) >> (n - 1)


def is_static(number, value):
    """Return whether a number is known at trace time and equals `value`."""
    return isinstance(number, int) and number == value


# (groups, whether K and V are converted) -> registers per thread of softmax, correction, mma and loads, prepare
REGISTERS = {
    (2, False): (184, 88, 56, 0),
    (2, True): (160, 64, 48, 48),
    (1, False): (240, 160, 96, 0),
    (1, True): (208, 104, 96, 96),
}


def roles(spec) -> Roles:
    """Return the roles in the order of warps; `forward` has the table of what they wait for and signal."""
    converts_kv, sf_warps = precision.of(spec).converts_kv, scales.load_warps(spec)
    schedule = min(policy.schedule_warps(spec), 1 - sf_warps)  # of the warp that loads no Q
    each = precision.operands(spec)
    spare = WARPS - 1 - len(each)  # of the warpgroup that has one warp for mma, and one per operand
    softmax, correct, few, prepare = REGISTERS[groups(spec), converts_kv]
    table = [Role("softmax", groups(spec) * WARPS, softmax), Role("correction", WARPS, correct)]
    table += [Role(name, 1, few) for name in ("mma", *(x.load_role for x in each))]
    if converts_kv:
        found = {"load_scales": sf_warps, "schedule": schedule, "idle": spare - sf_warps - schedule}
        table += [Role(name, warps, few) for name, warps in found.items()]
        table += [Role(x.prepare_role, WARPS // len(each), prepare) for x in each]
    else:
        table += [Role("load_q", 1, few), Role("idle", spare - 1, few)]
    return Roles.of(*table)
