"""Name the lines of kernels' sources that no case of CI executes, over all kernels of a family.

    python -m tests.support.lines [ARCH ...]        sm_90a, or other architectures together

A kernel leaves out a side of many branches, which `python -m tests.sim KERNEL --coverage` prints as PTX, and which
other kernels of its family take. A line that none of them executes is a side that no case takes at all. Each kernel is
compiled once more with line info, which changes none of its instructions; launches that `build/simulated` remembers are
not repeated.
The exit status is the number of lines without a reason.
"""

import json
import linecache
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ptxsim.coverage import known
from ptxsim.runner import RunResult

ROOT = Path(__file__).resolve().parents[2]
REASONS = {
    "elif token < page_size:": "latent attention writes no rows of one page"
}  # the text of a line that no case executes -> why not
Lines = dict[str, dict[str, str]]  # family -> file and line -> a kernel that has it, "" if some case executes it


def results_of(arch: str) -> dict[tuple[str, Any], RunResult]:
    """Return what each kernel that CI simulates for an architecture has executed, in its own cases and in features."""
    from tests.sim import launcher, workloads
    from tests.support import kernels, simulated

    found: dict[tuple[str, Any], RunResult] = defaultdict(RunResult)
    real = launcher.simulate

    def simulate(op: str, spec: Any, *args: Any, **how: Any) -> RunResult:
        result = real(op, spec, *args, **how)
        found[op, spec].add(result)
        return result

    launcher.simulate = simulate  # type: ignore[assignment]
    if arch == kernels.ARCH:
        chosen = {kernels.SHIPPED[x]: simulated.cases_of(x, x in kernels.RESIZED) for x in kernels.structures()}
        for label in simulated.FEATURES:
            simulated.problems_of_feature(label, False)
    else:
        covering = [(op, spec) for own, op, spec in kernels.REPEATED if own == arch]
        chosen = {(op, spec): workloads.CASES[kernels.family_of(op)](spec) for op, spec in covering}
    for (op, spec), cases in chosen.items():
        simulated.in_eager([], (arch, op, spec), cases, False)
    return {kernel: found[kernel] for kernel in chosen}


def lines_of(arch: str) -> Lines:
    """Return the lines of the kernels that CI simulates for an architecture, which this process must compile for."""
    from cute_kernels import manifest
    from tests.sim import launcher

    lines: Lines = defaultdict(dict)
    for (op, spec), result in results_of(arch).items():
        with_lines, excused = known(launcher.load(op, spec, arch, lines=True).ptx)
        of_family = lines[op.split(".")[0]]
        for executed in result.executed.values():
            for index, instruction in enumerate(with_lines.instructions):
                if instruction.source and executed[index]:
                    of_family[instruction.source] = ""
                elif instruction.source and index not in excused:
                    of_family.setdefault(instruction.source, manifest.label(op, spec))
    return lines


def text_of(family: str, source: str) -> str:
    """Return the text of a line. source: file and line."""
    name, _, line = source.rpartition(":")
    folders = (ROOT / "cute_kernels" / family, ROOT / "cute_kernels")
    path = next((path for folder in folders for path in sorted(folder.rglob(name))), Path(name))
    return linecache.getline(str(path), int(line)).strip()


def never(lines: list[Lines]) -> dict[str, str]:
    """Return the lines that no case executes: family, file, line and text -> a kernel that has it."""
    merged: Lines = defaultdict(dict)
    for of_arch in lines:
        for family, found in of_arch.items():
            for source, kernel in found.items():
                merged[family][source] = kernel and merged[family].get(source, kernel)
    return {
        f"{family} {source}: {text_of(family, source)}": kernel
        for family, found in merged.items()
        for source, kernel in sorted(found.items())
        if kernel
    }


def main(given: list[str]) -> int:
    if given[:1] == ["--raw"]:
        print(json.dumps(lines_of(given[1])))
        return 0
    found = []
    for arch in given or ["sm_90a"]:  # a process compiles for one architecture
        command = [sys.executable, "-m", "tests.support.lines", "--raw", arch]
        environ = os.environ | {"CUTE_DSL_ARCH": arch}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    count = 0
    for line, kernel in never(found).items():
        reason = REASONS.get(line.partition(": ")[2], "")
        count += not reason
        print(f"{line}  [{kernel}]" + (f"  {reason}" if reason else ""))
    print(f"{count} lines without a reason")
    return min(count, 255)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
