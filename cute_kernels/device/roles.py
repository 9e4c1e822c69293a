"""The roles of a CTA's warps, as a table in the order of warps.

Warp ranges, arrival counts of pipelines and register budgets (`setmaxnreg`) follow from it.

    roles = Roles.of(Role("mma", 8, 240), Role("load", 1, 24), Role("idle", 3, 24))
    roles.first("load"), roles.warps("mma")   # 8, 8
"""

from typing import NamedTuple

REGISTER_FILE = 65536  # registers of an SM


def launch_registers(warps: int, ctas_per_sm: int = 1) -> int:
    """Return the registers per thread with which CTAs of `warps` warps are launched."""
    return min(255, REGISTER_FILE // (32 * warps * ctas_per_sm)) // 8 * 8


class Role(NamedTuple):
    """A role: its name, its number of warps, and its registers per thread."""

    name: str
    warps: int
    registers: int  # per thread; equal for all roles of a warpgroup


class Roles(NamedTuple):
    """The roles of a kernel, without those of no warps."""

    table: tuple[Role, ...]

    @staticmethod
    def of(*table: Role, ctas_per_sm: int = 1) -> "Roles":
        """Make the table of roles. ctas_per_sm: CTAs that share the registers of an SM.

        Raise ValueError if the warps are no whole warpgroups, if the warps of a warpgroup differ in registers, or
        if the roles want more registers than the CTA is launched with: the last role to ask for them would wait
        for ever."""
        each = [role.registers for role in table for _ in range(role.warps)]
        if len(each) % 4 or any(len(set(each[i : i + 4])) > 1 for i in range(0, len(each), 4)):
            raise ValueError(f"roles: {table}, must be warpgroups of four warps with equal registers")
        held = launch_registers(len(each), ctas_per_sm) * len(each)
        if sum(each) > held:
            raise ValueError(f"roles: {table}, need {sum(each) * 32} registers, must be at most {held * 32}")
        return Roles(tuple(role for role in table if role.warps))

    def first(self, name: str) -> int:
        """Return the first warp of a role, or the number of all warps if there is no such role."""
        before = 0
        for role in self.table:
            if role.name == name:
                break
            before += role.warps
        return before

    def first_thread(self, name: str) -> int:
        return 32 * self.first(name)

    def warps(self, *names: str) -> int:
        """Return the number of warps of these roles together, or of all roles if none is named."""
        return sum(role.warps for role in self.table if role.name in names or not names)

    def registers(self, name: str) -> int:
        return next(role.registers for role in self.table if role.name == name)
