"""A PTX kernel cut into units: straight-line runs of instructions that a group of threads executes as one."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .forms import require
from .parse import PtxInstruction, PtxKernel, parse
from .translate import Names, RegisterMap, Translator, build

REGISTER = re.compile(r"%[\w$@]+")


@dataclass
class Unit:
    first: int  # instruction
    end: int  # instruction after the last
    level: int  # threads that must converge here: forms.THREAD, WARP, WARPGROUP
    waits: bool  # may leave threads at this unit
    ends: str  # "branch", "return" or "" (falls through)
    target: int = -1  # unit of a branch
    run: Callable[[Any], Any] | None = None
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # of the register file that it names, by class


class Program:
    """A translated kernel."""

    def __init__(self, ptx: str) -> None:
        self.kernel = parse(ptx)
        self.dynamic_start = -(-self.kernel.shared_bytes // 16) * 16
        self.registers = RegisterMap(self.kernel)
        self.names = Names()
        self.units = cut(self.kernel)
        named = [registers_of(self.kernel, unit) for unit in self.units]
        count = Counter(name for names in named for name in names)
        self.own = [{name for name in names if count[name] == 1} for names in named]  # registers of one unit alone
        self.spare: list[np.ndarray] = []  # register files of a machine that has ended
        self.flows: dict[int, Any] = {}  # by unit, for undefined.py
        self.level = np.array([*(unit.level for unit in self.units), 0], np.int8)  # 0: of no unit

    def changed(self, index: int, op: str, args: tuple[str, ...]) -> "Program":
        """Return the program with another instruction in place of one that does not branch. The units keep their
        bounds, and all but one are shared with this program, so that each is translated once."""
        other = copy.copy(self)
        instructions = list(self.kernel.instructions)
        instructions[index] = instructions[index]._replace(op=op, args=args)
        other.kernel = replace(self.kernel, instructions=instructions)
        number = next(i for i, unit in enumerate(self.units) if unit.first <= index < unit.end)
        other.units = list(self.units)
        other.units[number] = replace(self.units[number], run=None)
        other.flows = {}
        return other

    def code(self, number: int) -> Callable[[Any], Any]:
        """Return the function of a unit, translated at its first use."""
        unit = self.units[number]
        if unit.run is None:
            name = f"unit_{number}"
            translator = Translator(self.kernel, self.registers, self.names, set(self.own[number]))
            source = translator.unit(name, unit.first, unit.end)
            unit.run = build(self.names, name, source)
            unit.rows = self.registers.rows_by_class(translator.filed)
        return unit.run

    def instruction_at(self, line: int, who: str = "") -> str:
        """Return the instructions of a PTX line as text, with the source line. who: the warp that executed them."""
        found = [x for x in self.kernel.instructions if x.line == line]
        at = f" ({found[0].source})" if found and found[0].source else ""
        return f"line {line}{at}{who and f', {who}'}: {'; '.join(x.op for x in found)}"

    def executed(self, entered: bytes | bytearray, active: bytes | bytearray) -> np.ndarray:
        """Return which instructions some thread executed (instructions,). entered: for each unit, whether it ran;
        active: for each instruction with a guard, whether the guard held for a thread. A branch counts, taken or
        not."""
        out = np.repeat(np.frombuffer(entered, bool), [unit.end - unit.first for unit in self.units])
        guarded = [i for i, x in enumerate(self.kernel.instructions) if x.guard and not control(x)]
        out[guarded] &= np.frombuffer(active, bool)[guarded]
        return out


def registers_of(kernel: PtxKernel, unit: Unit) -> set[str]:
    """Return the registers that the instructions of a unit name."""
    text = " ".join(part for x in kernel.instructions[unit.first : unit.end] for part in (x.guard, *x.args))
    return set(REGISTER.findall(text))


def control(x: PtxInstruction) -> str:
    head = x.op.split(".")[0]
    return {"bra": "branch", "ret": "return", "exit": "return"}.get(head, "")


def cut(kernel: PtxKernel) -> list[Unit]:
    """Cut a kernel into units. They begin at labels, after branches, around waits, and where more threads must
    converge."""
    instructions = kernel.instructions
    facts = [(0, False) if control(x) else (require(x)[0].level, require(x)[0].waits) for x in instructions]
    leads = {0, *kernel.labels.values()}
    for i, x in enumerate(instructions):
        if control(x):
            leads.add(i + 1)
        if facts[i][1]:
            leads |= {i, i + 1}
    current = 0
    for i, (level, _) in enumerate(facts):
        if i in leads or level > current:
            leads.add(i)
            current = level
    starts = sorted(i for i in leads if i < len(instructions))
    at = {first: number for number, first in enumerate(starts)}
    units = []
    for first, end in zip(starts, [*starts[1:], len(instructions)]):
        last = instructions[end - 1]
        unit = Unit(first, end, facts[first][0], facts[first][1], control(last))
        if unit.ends == "branch":
            unit.target = at[kernel.labels[last.args[0]]]
        units.append(unit)
    return units
