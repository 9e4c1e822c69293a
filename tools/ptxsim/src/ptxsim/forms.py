"""The table of instruction forms: opcode pattern -> function that returns the semantics of an instruction.

A form reads an instruction and its match and returns a PtxOp: the operands that are read and written with their
PTX types, and the function that computes. There are two kinds of functions. `pure` maps numpy arrays of all
threads to arrays. `effect` takes the threads (machine.Threads) and the instruction first and may touch memory,
barriers or engines."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from .faults import NotModelled
from .parse import PtxInstruction

THREAD, WARP, WARPGROUP = 0, 1, 2  # threads that must have converged at an instruction


class PtxOp(NamedTuple):
    run: Callable[..., Any]
    outs: tuple[tuple[str, str], ...]  # (register, PTX type)
    ins: tuple[tuple[str, str], ...]  # (operand, PTX type); type "address" for [...]
    effect: bool = False
    registers: bool = False  # reads or writes the register file itself
    alike: Any = None  # of pure functions: equal where instructions have the same function of each element


class InstructionForm(NamedTuple):
    pattern: re.Pattern[str]
    make: "Make"
    isa: str  # section of the PTX ISA
    level: int
    waits: bool


_FORMS: dict[str, list[InstructionForm]] = {}


Make = Callable[[PtxInstruction, re.Match[str]], PtxOp]


def form(pattern: str, isa: str, level: int = THREAD, waits: bool = False) -> Callable[[Any], Any]:
    """Register a form for opcodes that match the pattern completely. isa: the PTX ISA section that defines the
    semantics."""

    def register(make: Make) -> Make:
        compiled = re.compile(pattern)
        heads = re.match(r"\(([a-z0-9_|]+)\)|([a-z0-9_]+)(?=\\\.|\(|$)", pattern)
        if not heads:
            raise ValueError(f"form {pattern}: must begin with the instruction's name or (a|b|c)")
        checked = make if level == THREAD else together(make, level)
        for head in (heads[1] or heads[2]).split("|"):
            _FORMS.setdefault(head, []).append(InstructionForm(compiled, checked, isa, level, waits))
            _FORMS[head].sort(key=lambda one: -len(one.pattern.pattern))  # the longest pattern is the most specific
        return make

    return register


def together(make: Make, level: int) -> Make:
    """Return the function of a form that checks that the lanes of a warp, or the warps of a warpgroup, execute a .sync
    instruction that is .aligned together, none of them having exited. Barriers, which allow for exited lanes, have a
    check of their own (convergence.py)."""

    def checked(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
        op = make(x, f)
        run = op.run
        if ".sync.aligned" not in x.op or x.op.startswith("bar"):
            return op

        def run_together(t: Any, x: PtxInstruction, *values: Any) -> Any:
            if not t.whole or (level == WARPGROUP and t.level < WARPGROUP):
                t.refuse_apart(x)
            return run(t, x, *values)

        return op._replace(run=run_together)

    return checked


@cache
def find(op: str) -> tuple[InstructionForm, re.Match[str]] | None:
    for candidate in _FORMS.get(op.split(".")[0], ()):
        found = candidate.pattern.fullmatch(op)
        if found:
            return candidate, found
    return None


def text_of(x: PtxInstruction) -> str:
    """Return an instruction as text, for messages: its operands are cut off where they are long."""
    text = f"{x.op} {', '.join(x.args)}".strip()
    return text if len(text) <= 160 else f"{text[:157]}..."


def require(x: PtxInstruction) -> tuple[InstructionForm, re.Match[str]]:
    found = find(x.op)
    if found is None:
        raise NotModelled(f"line {x.line}: no form for {text_of(x)}")
    return found


def registered() -> list[InstructionForm]:
    """Return every form, once."""
    return list(dict.fromkeys(one for many in _FORMS.values() for one in many))


def pure(x: PtxInstruction, run: Callable[..., Any], out: str, *ins: str, known: str = "") -> PtxOp:
    """Return dst = run(sources): the first operand is written with type `out`, the following are read with types
    `ins`. `run` takes arrays of any shape and treats each element alone. known: an operand that `run` depends on."""
    return PtxOp(run, ((x.args[0], out),), tuple(zip(x.args[1:], ins)), alike=(x.op, known))


def effect(run: Callable[..., Any], *ins: tuple[str, str], outs: tuple[tuple[str, str], ...] = ()) -> PtxOp:
    return PtxOp(run, outs, ins, effect=True)


def refuse(x: PtxInstruction, what: str) -> NotModelled:
    return NotModelled(f"line {x.line}: {text_of(x)}: {what} is not modelled")
