"""Report the PTX of a kernel that no run has executed.

An instruction is executed if a thread runs it with its guard true; a branch counts, taken or not. Instructions
that can never run by construction (`exempt`) do not count as missing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np

from .parse import PtxKernel, parse
from .program import cut
from .runner import RunResult


@dataclass(frozen=True)
class Missing:
    """The instructions that no run executed, out of `total`. places: their indices, by PTX text."""

    count: int
    total: int
    places: dict[str, list[int]]

    @property
    def share(self) -> float:
        return self.count / max(1, self.total)


@cache
def known(ptx: str) -> tuple[PtxKernel, dict[int, str]]:
    kernel = parse(ptx)
    return kernel, exempt(kernel)


def exempt(kernel: PtxKernel) -> dict[int, str]:
    """Return the instructions that no run can reach, or that carry no information if they run: index -> reason."""
    units = cut(kernel)
    instructions = kernel.instructions
    out: dict[int, str] = {}
    following: list[list[int]] = []
    for number, unit in enumerate(units):
        last = instructions[unit.end - 1]
        stops = [i for i in range(unit.first, unit.end) if instructions[i].op in ("trap", "brkpt")]
        for_all = [i for i in stops if not instructions[i].guard]
        out |= dict.fromkeys(range(unit.first, for_all[0] + 1) if for_all else stops, "the kernel gives up here")
        falls = not for_all and (not unit.ends or bool(last.guard))
        following.append([unit.target] * (unit.target >= 0) + [number + 1] * (falls and number + 1 < len(units)))
        wait = instructions[units[unit.target].first].op if unit.target >= 0 else ""
        alone = unit.end - unit.first == 1 and unit.ends == "branch" and not last.guard
        if alone and wait.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            out[unit.first] = "repeats a wait that was not over at once"
    reached, left = {0}, [0]
    while left:
        found = set(following[left.pop()]) - reached
        reached |= found
        left += found
    for number, unit in enumerate(units):
        if number not in reached:
            out |= dict.fromkeys(range(unit.first, unit.end), "no path leads here")
    return out


def missing(result: RunResult) -> Missing:
    """Return the instructions that the runs merged in `result` (RunResult.add) did not execute."""
    count, total, places = 0, 0, {}
    for ptx, executed in result.executed.items():
        _, excused = known(ptx)
        left = ~executed
        left[list(excused)] = False
        count, total = count + int(left.sum()), total + len(left)
        places[ptx] = np.flatnonzero(left).tolist()
    return Missing(count, total, places)


def report(result: RunResult) -> str:
    """Return the share, then one line per stretch: PTX lines, label before it, first instruction, source lines."""
    found = missing(result)
    lines = [f"never executed: {found.count} of {found.total} instructions, {found.share:.1%}"]
    for ptx, indices in found.places.items():
        kernel, excused = known(ptx)
        starts = sorted((at, name.partition("@")[0]) for name, at in kernel.labels.items())
        place = np.cumsum([i not in excused for i in range(len(kernel.instructions))])  # exempt ones split no stretch
        for stretch in stretches(indices, place.tolist()):
            first, last = kernel.instructions[stretch[0]], kernel.instructions[stretch[-1]]
            before = [name for at, name in starts if at <= stretch[0] and name.startswith("$")]
            label = f", {before[-1]}" if before else ""
            sources = spans({kernel.instructions[i].source for i in stretch})
            lines.append(
                f"  lines {first.line}-{last.line} ({len(stretch)}){label}: {first.op} {', '.join(first.args)[:50]}"
                + (f"  [{sources}]" if sources else "")
            )
    return "\n".join(lines)


def stretches(numbers: list[int], place: Sequence[int]) -> Iterator[list[int]]:
    """Split ascending numbers into stretches: a new one begins when the places of two neighbours are not
    consecutive."""
    for _, group in groupby(enumerate(numbers), lambda pair: place[pair[1]] - pair[0]):
        yield [number for _, number in group]


def spans(sources: set[str]) -> str:
    """Return sources as text: {"a.py:3", "a.py:4", "b.py:9"} -> "a.py:3-4, b.py:9"."""
    files: dict[str, list[int]] = {}
    for file, _, line in (source.rpartition(":") for source in sources if source):
        files.setdefault(file, []).append(int(line))
    out = []
    for file, numbers in sorted(files.items()):
        parts = []
        for run in stretches(sorted(numbers), range(max(numbers) + 1)):
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        out.append(f"{file}:{','.join(parts)}")
    return ", ".join(out)
