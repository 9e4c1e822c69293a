"""Run a shipped kernel on the CPU and print the report.

python -m tests.sim bf16_d128_causal_tma_m128n128s2             all variants, all modes
python -m tests.sim 'bf16_d64*' --mode random --seed 3          part or glob of op/name
python -m tests.sim 'fp16*anyw*' --coverage --lines             and the PTX that no case executes
"""

import argparse
import sys
import time

from ptxsim import coverage
from ptxsim.faults import Fault
from ptxsim.machine import MODES
from ptxsim.runner import RunResult

from cute_kernels import catalog

from . import workloads


def run_kernel(kernel: tuple[str, object], arch: str, modes: list[str], cover: bool, **how: object) -> int:
    """Print a line per variant and mode, and with `cover` the PTX that none of them executed; return the number of
    failures."""
    (op, spec), total = kernel, RunResult()
    family, failures = op.split(".")[0], 0
    for case in workloads.CASES[family](spec):
        for mode in modes:
            head = f"{spec.name} {case.name:8} {mode:7}"  # type: ignore[attr-defined]
            start = time.perf_counter()
            try:
                outcome = workloads.RUN[family](spec, case, arch, mode=mode, **how)
            except Fault as fault:
                failures += 1
                print(f"{head} {type(fault).__name__}: {fault}", flush=True)
                continue
            total.add(outcome.result)
            wrong = not outcome.error <= 1
            failures += wrong
            counts = ", ".join(f"{count} {name}" for name, count in outcome.result.counts.items())
            verdict = "WRONG" if wrong else "right"
            seconds = time.perf_counter() - start
            print(f"{head} {verdict}: {outcome.error:.2f} of the tolerance, {seconds:.2f} s, {counts}", flush=True)
    if cover:
        print(coverage.report(total), flush=True)
    return failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", help="name of a shipped kernel, part of it, or a glob")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; all modes by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", action="store_true", help="name source lines: compiles the kernel with line info")
    parser.add_argument("--coverage", action="store_true", help="print the PTX that no case executed")
    args = parser.parse_args(argv)
    shipped = catalog.shipped(args.arch)
    exact = [kernel for kernel in shipped if kernel[1].name == args.spec]
    kernels = exact or [kernel for kernel in shipped if catalog.matches(kernel, args.spec)]
    if not kernels:
        parser.error(f"no shipped kernel of {args.arch} matches {args.spec}")
    how = {"seed": args.seed, "lines": args.lines}
    modes = args.mode or list(MODES)
    return min(1, sum(run_kernel(kernel, args.arch, modes, args.coverage, **how) for kernel in kernels))


if __name__ == "__main__":
    sys.exit(main())
