"""The roles of a CTA's warps, in the order of warps: a table from which warp ranges, arrival counts of pipes and
register budgets follow."""

from typing import NamedTuple

REGISTER_FILE = 65536  # registers of an SM


def launch_registers(warps: int) -> int:
    """Registers a thread that a CTA of so many warps, alone on its SM, is launched with."""
    return min(255, REGISTER_FILE // (32 * warps)) // 8 * 8


class Role(NamedTuple):
    name: str
    warps: int
    registers: int  # a thread; equal for all roles of a warpgroup


class Roles(NamedTuple):
    table: tuple[Role, ...]

    @staticmethod
    def of(*table: Role) -> "Roles":
        """ValueError where the warps of a warpgroup differ in registers, or where one is not whole, or where they want
        more together than the CTA is launched with: the last to ask would wait for ever."""
        each = [role.registers for role in table for _ in range(role.warps)]
        if len(each) % 4 or any(len(set(each[i : i + 4])) > 1 for i in range(0, len(each), 4)):
            raise ValueError(f"roles: {table}, four warps each of equal registers")
        if sum(each) > launch_registers(len(each)) * len(each):
            raise ValueError(
                f"roles: {table}, {sum(each) * 32} registers of {launch_registers(len(each)) * len(each) * 32}"
            )
        return Roles(tuple(role for role in table if role.warps))

    def first(self, name: str) -> int:
        """First warp of a role; the number of all warps where there is no such role."""
        before = 0
        for role in self.table:
            if role.name == name:
                break
            before += role.warps
        return before

    def first_thread(self, name: str) -> int:
        return 32 * self.first(name)

    def warps(self, *names: str) -> int:
        """Warps of these roles together, of all where none is named."""
        return sum(role.warps for role in self.table if role.name in names or not names)

    def registers(self, name: str) -> int:
        return next(role.registers for role in self.table if role.name == name)
