"""The roles of the warps. Warp ranges, arrival counts of pipelines and register budgets follow from this table."""

from ...device.roles import Role, Roles, launch_registers
from .tile_table import SCORE_WARPS, WARPS

REGISTERS = {1: (56, 168, 144), 2: (32, 96, 128)}  # groups of score warps: (load, score, mma)


def roles(spec) -> Roles:
    """Return the table of a kernel: name, warps, registers per thread, in the order of the warps."""
    load, score, mma = REGISTERS[spec.tile.groups]
    return Roles.of(
        Role("load_k", spec.tile.load_warps, load),
        Role("schedule", 1, load),
        Role("score", spec.tile.groups * SCORE_WARPS, score),
        Role("mma", WARPS, mma),
    )


def grows_behind_load(spec) -> bool:
    """Return whether the load warps give registers up, compared with those of the launch, and the others get more."""
    found = roles(spec)
    return found.registers("load_k") <= launch_registers(found.warps()) <= min(map(found.registers, ("score", "mma")))
