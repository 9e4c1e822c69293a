"""Fault injection: kernels with one broken synchronisation each, and the report of those that a run noticed.

`Program.changed(mutant.index, mutant.op, mutant.args)` is the program of a mutant. A mutant counts as noticed if a run
in any mode ends in a Fault or in wrong results. The caller has the runs: it knows the right results."""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .parse import PtxInstruction, PtxKernel

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
