"""Compare the share of a kernel's PTX that no case executes with a baseline.

python -m tests.sim KERNEL --coverage               the stretches that no case executes
python -m tests.sim.coverage [KERNEL ...]           measure the shipped kernels (or these) in `eager`, and write
                                                    tests/data/ptx_unexecuted.csv
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from ptxsim.coverage import Missing, missing
from ptxsim.runner import RunResult

from cute_kernels import catalog, manifest

from . import workloads
from .pool import pool

BASELINE = Path(__file__).resolve().parents[1] / "data" / "ptx_unexecuted.csv"
COLUMNS = ("op", "kernel", "share", "instructions")  # never executed: share of all instructions, and their number
GOAL = 0.02  # largest share of a kernel that has no line in the baseline
SLACK = 0.001  # tolerated growth: the compiler may add some instructions


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
    op, spec, arch = kernel
    family, total = op.split(".")[0], RunResult()
    for case in workloads.CASES[family](spec):
        total.add(workloads.RUN[family](spec, case, arch).result)
    return missing(total)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.coverage", description=(__doc__ or "").split("\n")[0])
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
