"""The roles of prefill's warps on Blackwell."""

from ...device.roles import Role, Roles
from .. import geometry
from ..prepare import dequantises

SLOTS = 2  # S that tensor memory has room for
ROWS = 128  # of a half of the tile: a row for a thread, a lane of tensor memory
WARPS = 4  # warps of a warpgroup


def q_stage(spec):
    """Of the largest tile's rows: two, or one."""
    return spec.tile.m // ROWS


def groups(spec):
    """Warpgroups of softmax, each with a slot of S and an O of its own; one, which has both slots in turn, where two O
    have no room."""
    return SLOTS if spec.head_dim_vo <= ROWS else 1


def tile_q_stage(spec, w):
    """Of a tile: a group each, or one, whose blocks all groups have in turn. An int where all tiles have as many."""
    if len(spec.tile.m_choices) == 1:
        return q_stage(spec)
    return geometry.tile_m(spec, geometry.num_rows(w.q_len, w.pack_factor)) // ROWS


def pingpong_groups(spec, w):
    """Groups that have the blocks of a half of a tile in turn, 1 or 2."""
    return groups(spec) + 1 - tile_q_stage(spec, w) if groups(spec) > 1 else 1


def num_iterations(spec, w):
    """Rounds of a tile: in each every group has a block, or none where blocks in turn have come to an end."""
    n = pingpong_groups(spec, w)
    return w.n_block_max - w.n_block_min if is_static(n, 1) else (w.n_block_max - w.n_block_min + n - 1) >> (n - 1)


def is_static(number, value):
    """Whether a number is one of all tiles, and this."""
    return isinstance(number, int) and number == value


REGISTERS = {  # (groups, dequantises) -> of softmax, correction, multiplication and loads, preparation
    (2, False): (184, 88, 56, 0),
    (2, True): (160, 64, 48, 48),
    (1, False): (240, 160, 96, 0),
    (1, True): (208, 104, 96, 96),
}


def roles(spec) -> Roles:
    softmax, correct, few, prepare = REGISTERS[groups(spec), dequantises(spec)]
    last = "load_q" if not dequantises(spec) else "load_scales" if spec.kv.block_scaled else "idle"
    table = [Role("softmax", groups(spec) * WARPS, softmax), Role("correction", WARPS, correct)]
    table += [Role(name, 1, few) for name in ("mma", "load_k", "load_v", last)]
    if dequantises(spec):
        table += [Role(name, WARPS // 2, prepare) for name in ("prepare_k", "prepare_v")]
    return Roles.of(*table)
