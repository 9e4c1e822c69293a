"""The roles of prefill's warps on Blackwell."""

from ...device.roles import Role, Roles

HALVES = 2  # of the tile's rows, 128 each: a row for a thread, a lane of tensor memory
ROWS = 128
WARPS = 4  # warps of a warpgroup


def roles(spec) -> Roles:
    few = (Role(name, 1, 56) for name in ("mma", "load_k", "load_v", "load_q"))
    return Roles.of(Role("softmax", HALVES * WARPS, 184), Role("correct", WARPS, 88), *few)
