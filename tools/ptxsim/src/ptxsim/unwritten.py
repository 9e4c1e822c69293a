"""Uses of memory that nothing has written so far.

Such a use is a race if another warp writes the memory without synchronisation, and the schedule of this run happens to
be one in which the write comes late. The report should name that write. So the warps that use the memory stop for
good, and the others run on: if one of them writes the memory, it cannot have waited for the warps that stand still,
and the fault names both instructions. Otherwise, the fault says that nothing has written the memory."""

from typing import Any, NamedTuple

import numpy as np

from .faults import Fault


class Unwritten(Fault):
    """A use of memory that nothing has written so far, by all warps that run; the scheduler stops them."""


class Race(Fault):
    """A use of memory that another warp writes later, without synchronisation."""


class HeldUse(NamedTuple):
    """A use of memory that nothing has written so far. what: its location; does: what it does, as text; words: numbers
    of the words; by: the warp of each word, or None for all warps of the location; event: the event (order.py) of the
    first warp of the location at the use, if the warps have run on since."""

    what: Any
    does: str
    words: np.ndarray
    by: np.ndarray | None = None
    event: int | None = None

    def race(self, words: np.ndarray, writer: int, instruction: str) -> Race | None:
        """Return the race with a write by a warp; None if it is a write of other words, or by the warp itself.

        instruction: the write, as text."""
        found = np.isin(self.words, words)
        found &= writer not in self.what.threads.warps if self.by is None else self.by != writer
        if not found.any() or self.happens_before(writer):
            return None
        reader = self.what if self.by is None else self.what.of([int(self.by[found][0])])
        said = f"which {self.what.threads.machine.names.warp(writer)} writes without synchronisation in between"
        return Race(f"{reader}: {self.does}, {said}\n  the write: {instruction}")

    def happens_before(self, writer: int) -> bool:
        """Return whether a warp has waited for the use, so that it may write the memory now."""
        seen = self.what.threads.machine.order.seen[writer, self.what.threads.warps[0]]
        return self.event is not None and bool(seen >= self.event)


def refuse(use: HeldUse, held: list[HeldUse], message: str) -> None:
    """Stop the warps of a use, which is added to those whose write is looked for. If all warps that run are among
    them, raise Unwritten; otherwise, the others finish their unit, and the values that are read do not matter."""
    m = use.what.threads.machine
    held.append(use)
    m.unwritten.append(message)
    running = set((m.running >> 5).tolist())
    stopped = running if use.by is None else set(use.by.tolist())
    if running <= stopped:
        raise Unwritten(message)
    m.suspended |= stopped
