"""Names of CTAs and warps in messages: a CTA has its index in the grid, a warp its number in the CTA.

Inside the simulator, the CTAs that are resident together have consecutive slots, and their warps are numbered through
all slots; no message shows these numbers."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

SHOWN = 3  # CTAs that a list of warps names
ISSUER = 1 << 32  # factor of the warp in a place


class CtaNames:
    def __init__(
        self, blocks: list[tuple[int, int, int]], grid: tuple[int, int, int], warps: int,
        instruction_at: Callable[[int, str], str],
    ) -> None:  # fmt: skip
        """Set up the names. blocks: index in the grid of the CTA of each slot. warps: per CTA. instruction_at: returns
        the instruction of a PTX line that a warp executed."""
        self.blocks, self.warps, self.instruction_at = blocks, warps, instruction_at
        self.axes = 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1

    def cta(self, slot: int) -> str:
        index = self.blocks[slot][: self.axes]
        return f"CTA {index[0]}" if self.axes == 1 else f"CTA ({', '.join(map(str, index))})"

    def warp(self, warp: int) -> str:
        return f"warp {warp % self.warps} of {self.cta(warp // self.warps)}"

    def thread(self, thread: int) -> str:
        per_cta = 32 * self.warps
        return f"thread {thread % per_cta} of {self.cta(thread // per_cta)}"

    def last(self, kind: str, place: int, warp: int) -> str:
        """Return a line for a message: the last write or read of a word, "" if it is unknown. place: of place_of; warp:
        the one that executed the instruction, unless the place has one."""
        issuer, line = divmod(place, ISSUER)
        warp = issuer - 1 if issuer else warp
        who = self.warp(warp) if 0 <= warp < self.warps * len(self.blocks) else ""
        return f"\n  the last {kind}: {self.instruction_at(line, who)}" if line else ""

    def group(self, warps: Iterable[int]) -> str:
        """Return the names of ascending warps."""
        parts = []
        for slot, some in groupby(warps, lambda warp: warp // self.warps):
            numbers = [warp % self.warps for warp in some]
            parts.append(f"{series(numbers)} of {self.cta(slot)}")
        more = len(parts) - SHOWN
        return "; ".join(parts[:SHOWN]) + (f"; warps of {more} other CTA{'s' * (more > 1)}" if more > 0 else "")


def place_of(what: object, warps: Any = -1) -> Any:
    """Return an instruction's PTX line and the warp that issued it, as one number; an array for an array of warps.

    Without `warps`, the place has only the line."""
    return line_of(what) + (warps + 1) * ISSUER


def line_of(what: object) -> int:
    """Return the PTX line of a location (machine.SourceLocation); 0 of other texts."""
    x = getattr(what, "x", None)
    return 0 if x is None else int(x.line)


def series(numbers: list[int]) -> str:
    """Return ascending numbers of warps as text, such as "warps 0 to 3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return f"warp{'s' * (len(numbers) > 1)} {', '.join(texts)}"
