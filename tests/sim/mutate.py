"""Break one synchronisation of a shipped kernel at a time and report whether the simulator notices.

    python -m tests.sim.mutate bf16_d64_full_tma_m192n128s4 [--limit N] [--mode MODE ...] [--case NAME ...]

A mutant counts as noticed if any case in any mode ends in a Fault or in wrong results; the first one ends its
runs. The unmutated control must pass every mode. Cases of Blackwell's prefill take seconds each: select cases and
modes.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from ptxsim.faults import Fault, NotModelled
from ptxsim.machine import MODES
from ptxsim.mutants import Mutant, MutantVerdict, mutants, report, sample
from ptxsim.parse import parse

from cute_kernels import catalog

from . import launcher, workloads
from .pool import pool

LIMIT = 200_000  # units, five times as many in `random`: a mutant that spins is stopped early


def try_mutant(
    kernel: tuple[str, Any, str], modes: Sequence[str], names: Sequence[str], mutant: Mutant
) -> MutantVerdict:
    """Run a mutant until a case notices it. names: of cases; all if empty."""
    op, spec, arch = kernel
    program = launcher.program(launcher.load(op, spec, arch).ptx)
    if mutant.index >= 0:
        program = program.changed(mutant.index, mutant.op, mutant.args)
    family, ran = op.split(".")[0], False
    for mode in modes:
        how = {"mode": mode, "program": program, "limit": LIMIT * (5 if mode == "random" else 1), "seed": 1}
        for case in workloads.CASES[family](spec, thorough=not names):
            if names and case.name not in names:
                continue
            try:
                outcome = workloads.RUN[family](spec, case, arch, **how)
            except Fault as fault:
                return MutantVerdict(mutant, mode, str(fault).split("\n")[0], True)
            except NotModelled as error:
                return MutantVerdict(mutant, mode, f"unsupported: {error}", True)
            if not outcome.error <= 1:
                return MutantVerdict(mutant, mode, "wrong results", True)
            ran |= mutant.index >= 0 and any(one[mutant.index] for one in outcome.result.executed.values())
        if mutant.index >= 0 and not ran:
            break  # the cases are the same in every mode
    return MutantVerdict(mutant, "", "", ran)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", nargs="+", help="names of shipped kernels")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--limit", type=int, default=1 << 30, help="mutants per kernel, evenly from each kind")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; all modes by default")
    parser.add_argument("--case", action="append", default=[], help="repeatable; all cases by default")
    parser.add_argument("--jobs", type=int, default=0, help="processes; one per core by default")
    args = parser.parse_args(argv)
    modes = args.mode or list(MODES)
    for name in args.spec:
        op, spec = next(kernel for kernel in catalog.shipped(args.arch) if kernel[1].name == name)
        kernel = (op, spec, args.arch)
        found = sample(list(mutants(parse(launcher.load(*kernel).ptx))), args.limit)
        control = try_mutant(kernel, modes, args.case, Mutant("control", -1, 0))
        print(f"{name}: control {f'fails in {control.mode}: {control.why}' if control.mode else 'passes'}", flush=True)
        if control.mode:
            return 1
        with pool(args.jobs) as processes:
            print(report(list(processes.map(partial(try_mutant, kernel, modes, args.case), found))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
