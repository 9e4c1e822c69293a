"""The roles of the warps. Warp ranges, arrival counts of pipelines and register budgets follow from this table."""

from ...device.roles import Role, Roles
from .tile_table import SCORE_WARPS, WARPS

REGISTERS = 40, 128, 88  # (load, score, mma)


def roles(spec) -> Roles:
    """Return the table of a kernel: name, warps, registers per thread, in the order of the warps."""
    load, score, mma = REGISTERS
    return Roles.of(
        Role("load_k", spec.tile.load_warps, load),
        Role("schedule", 1, load),
        Role("idle", 1, load),
        Role("score", SCORE_WARPS, score),
        Role("mma", WARPS, mma),
    )
