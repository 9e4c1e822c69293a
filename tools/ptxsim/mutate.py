"""Fault injection: break one synchronisation of a kernel at a time and report whether the simulator notices.

    python -m tools.ptxsim.mutate bf16_d64_full_tma_m192n128s4 [--limit N] [--mode MODE ...] [--case NAME ...]

A mutant counts as noticed if any case in any mode ends in a Fault or in wrong results; the first one ends its
runs. The unmutated control must pass every mode. Cases of Blackwell's prefill take seconds each: select cases and
modes."""

import argparse
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cute_kernels import catalog

from . import launcher, workloads
from .faults import Fault, NotModelled
from .machine import MODES
from .parse import PtxInstruction, PtxKernel, parse
from .pool import pool

LIMIT = 200_000  # units, five times as many in `random`: a mutant that spins is stopped early
_NOP = ("nop", ())


@dataclass(frozen=True)
class Mutant:
    what: str
    index: int  # instruction; -1 the control
    line: int
    op: str = ""
    args: tuple[str, ...] = ()


DROPPED = {  # opcode: name of the mutation that drops it
    r"mbarrier\.arrive\.expect_tx.*": "arrive.expect_tx",
    r"mbarrier\.arrive(?!\.expect).*": "mbarrier.arrive",
    r"mbarrier\.init.*": "mbarrier.init",
    r"bar\.sync": "bar.sync",
    r"bar\.arrive": "bar.arrive",
    r"barrier\.cluster\..*": "barrier.cluster",
    r"fence\.(acq_rel|sc)\..*": "fence.acq_rel",
    r"(atom|red)\..*": "atom, red",
    r"cp\.async\.(ca|cg|wait|mbarrier).*": "cp.async",
    r"(ldmatrix|mma)\.sync.*": "ldmatrix, mma.sync",
    r"st\.shared.*": "st.shared",
    r"fence\.proxy\.async.*": "fence.proxy.async",
    r"fence\.mbarrier_init.*": "fence.mbarrier_init",
    r"wgmma\.fence.*": "wgmma.fence",
    r"wgmma\.commit_group.*": "wgmma.commit_group",
    r"wgmma\.wait_group.*": "wgmma.wait_group",
    r"wgmma\.mma_async.*": "wgmma.mma_async",
    r"cp\.async\.bulk\.tensor.*": "cp.async.bulk.tensor",
    r"cp\.async\.bulk\.wait_group.*": "bulk.wait_group",
    r"tcgen05\.(mma|commit|cp|wait::st|dealloc).*": "tcgen05",
}


def mutants(kernel: PtxKernel) -> Iterator[Mutant]:
    """Yield every single mutation: an operation dropped, a wait skipped, a count or a coordinate that is off by one."""
    for i, x in enumerate(kernel.instructions):
        for pattern, name in DROPPED.items():
            if re.fullmatch(pattern, x.op):
                yield Mutant(f"drop {name}", i, x.line, *_NOP)
        yield from changed(i, x)


def changed(i: int, x: PtxInstruction) -> Iterator[Mutant]:
    if x.op.startswith("mbarrier.try_wait"):
        yield Mutant("skip mbarrier.try_wait", i, x.line, "setp.eq.u32", (x.args[0], "0", "0"))
        phase = "1" if x.args[2] == "0" else "0"
        if x.args[2] in ("0", "1"):
            yield Mutant("wait for the other phase", i, x.line, x.op, (*x.args[:2], phase, *x.args[3:]))
    elif x.op.startswith("mbarrier.init") and x.args[1].isdigit():
        yield Mutant("mbarrier.init with one arrival more", i, x.line, x.op, (x.args[0], str(int(x.args[1]) + 1)))
    elif x.op.startswith("mbarrier.arrive.expect_tx") and x.args[-1].isdigit():
        yield Mutant("expect 16 bytes less", i, x.line, x.op, (*x.args[:-1], str(int(x.args[-1]) - 16)))
    elif x.op.startswith("cp.async.bulk.tensor") and "complete_tx" in x.op:
        found = re.fullmatch(r"(\[\S+\s*,\s*\{)(.*)(\}\])", x.args[1])
        parts = [part.strip() for part in found[2].split(",")] if found else []
        if found and len(parts) > 2:
            swapped = ", ".join([parts[0], parts[2], parts[1], *parts[3:]])
            text = found[1] + swapped + found[3]
            yield Mutant("swap two coordinates of a load", i, x.line, x.op, (x.args[0], text, *x.args[2:]))
    elif re.fullmatch(r"st\.global\.b32", x.op) and x.args[1] == "0":
        yield Mutant("drop st.global of zero", i, x.line, *_NOP)
    elif x.op == "fence.acq_rel.gpu":
        yield Mutant("fence of the CTA alone", i, x.line, "fence.acq_rel.cta")
    elif x.op.startswith("wgmma.wait_group") and x.args[0] == "0":
        yield Mutant("wait_group leaves one group", i, x.line, x.op, ("1",))


@dataclass(frozen=True)
class MutantVerdict:
    mutant: Mutant
    mode: str  # the mode that noticed it; "" if none did
    why: str
    ran: bool  # some case executed the changed instruction


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


def report(verdicts: list[MutantVerdict]) -> str:
    """Return a line per kind of mutation, then the survivors."""
    kinds: dict[str, list[MutantVerdict]] = defaultdict(list)
    for verdict in verdicts:
        kinds[verdict.mutant.what].append(verdict)
    lines = []
    for what, group in sorted(kinds.items()):
        modes = Counter(v.mode for v in group if v.mode)
        first = ", ".join(f"{count} in {mode}" for mode, count in modes.items())
        lines.append(f"{what:38} {sum(bool(v.mode) for v in group):4} of {len(group):4} noticed: {first}")
    ran = [v for v in verdicts if v.ran]
    noticed = sum(bool(v.mode) for v in ran)
    lines.append(
        f"{noticed} of {len(ran)} noticed, {noticed / max(1, len(ran)):.0%}; {len(verdicts) - len(ran)} never ran"
    )
    for v in verdicts:
        if not v.mode:
            lines.append(f"{'survives' if v.ran else 'never ran'}: line {v.mutant.line}: {v.mutant.what}")
    return "\n".join(lines)


def sample(found: list[Mutant], limit: int) -> list[Mutant]:
    """Return at most `limit` mutants, taken in turn from each kind."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        kinds[mutant.what].append(mutant)
    rng = random.Random(0)
    for group in kinds.values():
        rng.shuffle(group)
    chosen: list[Mutant] = []
    while len(chosen) < min(limit, len(found)):
        chosen += [group.pop() for group in kinds.values() if group]
    return chosen[:limit]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptxsim.mutate", description=(__doc__ or "").split("\n")[0])
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
