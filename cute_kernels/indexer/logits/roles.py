"""Roles of the warps of a CTA that computes logits."""

from functools import cache

from ...device.roles import Role, Roles
from ..spec import IndexerSpec
from . import GROUPS, ctas_per_sm, loaders

WARPS = 4  # warps per warpgroup
LOAD_REGISTERS = 40
REGISTERS = {(4, 1): 232, (8, 1): 216, (8, 2): 88}  # warps beside those of mma, CTAs of an SM -> registers of mma


@cache
def roles(spec: IndexerSpec) -> Roles:
    """Return the table of roles."""
    count = loaders(spec)
    beside = -(-(count + 2) // WARPS) * WARPS
    table = {"keys": count, "queries": 1, "clean": 1, "idle": beside - count - 2}
    load = (Role(name, warps, LOAD_REGISTERS) for name, warps in table.items())
    ctas = ctas_per_sm(spec)
    return Roles.of(*load, Role("mma", WARPS * GROUPS, REGISTERS[beside, ctas]), ctas_per_sm=ctas)


def threads(spec: IndexerSpec) -> int:
    """Return the threads of a CTA."""
    return 32 * roles(spec).warps()
