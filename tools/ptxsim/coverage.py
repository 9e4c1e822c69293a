"""Report the PTX of a kernel that no run has executed, and compare its share with a baseline.

    python -m tools.ptxsim KERNEL --coverage               the stretches that no case executes
    python -m tools.ptxsim.coverage [KERNEL ...]           measure the shipped kernels (or these) in `eager`, and write
                                                           tests/data/ptx_unexecuted.csv

An instruction is executed if a thread runs it with its guard true; a branch counts, taken or not. Instructions
that can never run by construction (`exempt`) do not count as missing."""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from cute_kernels import catalog, manifest

from .parse import PtxKernel, parse
from .pool import pool
from .program import cut
from .run import RunResult

BASELINE = Path(__file__).resolve().parents[2] / "tests" / "data" / "ptx_unexecuted.csv"
COLUMNS = ("op", "kernel", "share", "instructions")  # never executed: share of all instructions, and their number
GOAL = 0.02  # largest share of a kernel that has no line in the baseline
SLACK = 0.001  # tolerated growth: the compiler may add some instructions


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


def baseline(file: Path = BASELINE) -> dict[str, tuple[float, int]]:
    """Return label (manifest.label) -> (share, number) of the instructions that had never been executed when the
    baseline was written."""
    with file.open() as lines:
        return {
            f"{row['op']}/{row['kernel']}": (float(row["share"]), int(row["instructions"]))
            for row in csv.DictReader(lines)
        }


def grown(measured: Mapping[str, Missing], file: Path = BASELINE) -> list[str]:
    """Return one line per kernel with too many instructions that no case executed; empty if all is well.

    measured: label (`manifest.label(op, spec)`) -> `missing(result)` of all runs of that kernel, merged by
    `RunResult.add`. A kernel in the baseline may exceed its recorded share by SLACK, or have as many instructions that
    never ran and fewer others; a kernel without a line may have GOAL. Lines of the baseline that were not measured are
    not judged."""
    known, out = baseline(file), []
    for label, found in measured.items():
        share, count = known.get(label, (GOAL, -1))
        if label not in known and found.share > GOAL:
            out.append(f"{label}: {found.share:.1%} of its PTX never ran, a new kernel may have {GOAL:.0%}")
        elif label in known and found.share > share + SLACK and found.count > count:
            out.append(f"{label}: {found.share:.2%} of its PTX never ran, {share:.2%} before")
    return out


def write(measured: Mapping[str, Missing], file: Path = BASELINE) -> None:
    """Write the lines of these kernels (by label); other lines stay."""
    rows = {}
    if file.exists():
        with file.open() as lines:
            rows = {f"{row['op']}/{row['kernel']}": [row[name] for name in COLUMNS] for row in csv.DictReader(lines)}
    for label, found in measured.items():
        rows[label] = [*label.split("/"), f"{found.share:.4f}", str(found.count)]
    with file.open("w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *(rows[label] for label in sorted(rows))])


def measure(kernel: tuple[str, object, str]) -> Missing:
    """Run all cases of a shipped kernel in `eager` and return what they did not execute."""
    from . import workloads

    op, spec, arch = kernel
    family, total = op.split(".")[0], RunResult()
    for case in workloads.CASES[family](spec):
        total.add(workloads.RUN[family](spec, case, arch).result)
    return missing(total)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptxsim.coverage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", nargs="*", help="names of shipped kernels, parts of them, or globs; all by default")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=0, help="processes; one per core by default")
    args = parser.parse_args(argv)
    kernels = [k for k in catalog.shipped(args.arch) if not args.spec or any(catalog.matches(k, s) for s in args.spec)]
    with pool(args.jobs) as processes:
        found = list(processes.map(measure, [(op, spec, args.arch) for op, spec in kernels]))
    labels = [manifest.label(op, spec) for op, spec in kernels]
    for label, one in zip(labels, found):
        print(f"{label}: {one.count} of {one.total} instructions never executed, {one.share:.1%}")
    write(dict(zip(labels, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
