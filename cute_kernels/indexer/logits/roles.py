"""Roles of the warps of a CTA that computes logits."""

from functools import cache

from ...device.roles import Role, Roles
from ..spec import IndexerSpec
from . import GROUPS, loaders

WARPS = 4  # warps per warpgroup
LOAD_REGISTERS = 40
REGISTERS = {4: 232, 8: 216}  # warps beside those of mma -> registers of mma


@cache
def roles(spec: IndexerSpec) -> Roles:
    """Return the table of roles."""
    count = loaders(spec)
    beside = -(-(count + 2) // WARPS) * WARPS
    table = {"keys": count, "queries": 1, "clean": 1, "idle": beside - count - 2}
    load = (Role(name, warps, LOAD_REGISTERS) for name, warps in table.items())
    return Roles.of(*load, Role("mma", WARPS * GROUPS, REGISTERS[beside]))


def threads(spec: IndexerSpec) -> int:
    """Return the threads of a CTA."""
    return 32 * roles(spec).warps()
