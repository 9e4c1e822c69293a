"""Undefined registers: sums of a wgmma that has multiplied shared memory which nothing has written.

Such a wgmma alone is no fault: kernels issue multiplications ahead and then drop their sums. Registers computed
from such sums are undefined as well, and to store one, to branch on it or to use it as an address is a fault.
They are tracked per warp; a register that only a part of a warp, or a guarded instruction, writes stays
undefined."""

from typing import Any, NamedTuple

from .faults import Fault
from .forms import require
from .parse import PtxInstruction
from .program import REGISTER, Program, control
from .unwritten import refuse


class Flow(NamedTuple):
    """The registers that an instruction reads and writes. carries: values flow only from the reads into the writes."""

    x: PtxInstruction
    reads: frozenset[str]
    writes: tuple[str, ...]
    carries: bool


def flows(program: Program, number: int) -> list[Flow]:
    """Return the flows of the instructions of a unit."""
    unit, out = program.units[number], []
    for x in program.kernel.instructions[unit.first : unit.end]:
        reads = set(REGISTER.findall(x.guard))
        writes: tuple[str, ...] = ()
        carries = False
        if not control(x):
            form, found = require(x)
            op = form.make(x, found)
            for text, _ in op.ins:
                reads |= set(REGISTER.findall(text))
            writes = tuple(register for register, _ in op.outs)
            carries = bool(writes) and all(kind != "address" for _, kind in op.ins)
        out.append(Flow(x, frozenset(reads), writes, carries))
    return out


def follow(m: Any, number: int, t: Any) -> None:
    """Update m.undefined for threads t, which are about to run a unit. Raise Fault if they use an undefined
    register."""
    if number not in m.program.flows:
        m.program.flows[number] = flows(m.program, number)
    for warp in t.warps.tolist():
        known: dict[str, str] = m.undefined.get(warp, {})
        for flow in m.program.flows[number] if known else ():
            used = [name for name in flow.reads if name in known]
            if used and (not flow.carries or flow.x.guard.lstrip("!") in known):
                message = f"{t.say(flow.x)}: uses {used[0]}, which depends on {known[used[0]]}"
                if use := m.shared.blank.get(known[used[0]]):
                    refuse(use, m.shared.held, message)  # raises
                raise Fault(message)
            if used:
                known |= dict.fromkeys(flow.writes, known[used[0]])
            elif t.whole and not flow.x.guard:
                for name in flow.writes:
                    known.pop(name, None)
        if not known:
            m.undefined.pop(warp, None)
