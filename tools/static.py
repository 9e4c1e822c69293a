"""Count the instructions that each role of a compiled kernel issues for a block of scores, in its SASS. No GPU is
needed.

    python -m tools.static [KERNEL ...] [--arch sm_100a]   print the loops of shipped kernels: names, or parts of them
    python -m tools.static FILE.cubin ...                  of any kernel, such as a peer's

A loop is the code between a backward branch and its target. The steady path through it counts: the shortest path that
contains all MMAs and all conversions of P, and neither a wait's slow path nor an unnecessary rescale. A warp's count is
the number of issue slots that the loop takes from a scheduler, because each of an SM's four schedulers has one of the
warpgroup's warps. Loading warps are left out: their instructions depend on the pages.

stall: the sum of the stall counts that ptxas encodes in the instructions, the least number of cycles that a warp takes
alone. stored: that sum at each store of P to tensor memory. Both ignore memory, barriers, and the latency of MUFU.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cute_kernels import build, catalog, cubin

OP = "attention.sm100"
WORD = r"/\* 0x([0-9a-f]{16}) \*/"
LINE = re.compile(rf"^\s*/\*([0-9a-f]{{4,}})\*/\s+(.*?)\s*;\s*{WORD}\s*\n\s*{WORD}", re.M)
TEXT = re.compile(r"^(?:@(!?U?P[0-9T]+)\s+)?(\S+)\s*(.*)$")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
MMAS = ("UTCHMMA", "UTCQMMA", "UTCOMMA", "HGMMA", "QGMMA", "HMMA")
LEAST = 8  # least number of exponentials in a loop that computes P
MASKED = 64  # least number of FSEL in a loop that masks keys
STALL = 41, 15  # shift and mask of the stall count in an instruction's second word


class SassInstruction(NamedTuple):
    """One instruction. target: address of a branch's target. always: an unpredicated branch or exit. stall: cycles."""

    address: int
    op: str
    target: int | None
    always: bool
    stall: int

    @property
    def name(self) -> str:
        return self.op.split(".")[0]


def parse(sass: str) -> dict[str, list[SassInstruction]]:
    """Return function -> instructions, from the output of `cuobjdump -sass` with encodings."""
    found = {}
    for part in sass.split("Function : ")[1:]:
        found[part.split()[0]] = [instruction(*m.groups()) for m in LINE.finditer(part)]
    return found


def instruction(address: str, text: str, _: str, high: str) -> SassInstruction:
    guard, op, rest = TEXT.match(text).groups()  # type: ignore[union-attr]
    to = TARGET.search(rest) if op.startswith("BRA") else None
    predicated = guard not in (None, "PT") or rest.lstrip().startswith(("P", "UP", "!")) or op == "BRA.DIV"
    leaves = bool(to) or op.startswith("EXIT")
    stall = max(1, int(high, 16) >> STALL[0] & STALL[1])
    return SassInstruction(int(address, 16), op, int(to[1], 16) if to else None, leaves and not predicated, stall)


@dataclass(frozen=True)
class SassLoop:
    """The steady path of a loop."""

    role: str
    path: tuple[SassInstruction, ...]

    @property
    def names(self) -> Counter[str]:
        return Counter(i.name for i in self.path)

    @property
    def exponentials(self) -> int:
        return sum(i.op == "MUFU.EX2" for i in self.path)

    @property
    def stall(self) -> int:
        return sum(i.stall for i in self.path)

    @property
    def stored(self) -> list[int]:
        """Return the value of `stall` up to each store to tensor memory."""
        clock, found = 0, []
        for i in self.path:
            if i.name == "STTM":
                found.append(clock)
            clock += i.stall
        return found


def worth(i: SassInstruction) -> int:
    """Return whether a steady path must contain the instruction."""
    return i.name in MMAS or i.name == "F2FP"


def steady(code: list[SassInstruction]) -> list[SassInstruction]:
    """Return the shortest of the paths from a loop's first to its last instruction with the highest total `worth`."""
    place = {i.address: k for k, i in enumerate(code)}
    best: list[tuple[int, int, int] | None] = [None] * len(code)  # best path to here: (worth, -length, predecessor)
    best[0] = (worth(code[0]), -1, -1)
    for k, i in enumerate(code[:-1]):
        here = best[k]
        if here is None:
            continue
        ways = [] if i.always else [k + 1]
        if i.target is not None and place.get(i.target, -1) > k:
            ways.append(place[i.target])
        for to in ways:
            there = (here[0] + worth(code[to]), here[1] - 1, k)
            if best[to] is None or there[:2] > best[to][:2]:  # type: ignore[index]
                best[to] = there
    path, k = [], len(code) - 1
    while k >= 0 and best[k] is not None:
        path.append(code[k])
        k = best[k][2]  # type: ignore[index]
    return path[::-1]


def role_of(code: list[SassInstruction]) -> str:
    """Return the role of a loop, or "" if it has none of the roles counted here."""
    names = Counter(i.name for i in code)
    exponentials = sum(i.op == "MUFU.EX2" for i in code)
    if any(names[name] for name in MMAS):
        return "mma" if exponentials < LEAST else "math"
    if exponentials >= LEAST and names["STTM"]:
        return "softmax masked" if names["FSEL"] >= MASKED else "softmax"
    if names["F2FP"] and names["STS"]:
        return "prepare"
    return "correction" if names["STTM"] else ""


def loops(code: list[SassInstruction]) -> Iterator[SassLoop]:
    """Return the loops of a function that have a role and contain no other such loop."""
    place = {i.address: k for k, i in enumerate(code)}
    found = [(place[i.target], k) for k, i in enumerate(code) if i.target in place and place[i.target] <= k]
    kept = [(a, b) for a, b in found if role_of(code[a : b + 1]) and steady(code[a : b + 1])]
    for a, b in sorted(kept):
        if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in kept):
            yield SassLoop(role_of(code[a : b + 1]), tuple(steady(code[a : b + 1])))


def of_cubin(content: bytes) -> list[SassLoop]:
    """Return the loops of a cubin's largest function."""
    return list(loops(max(parse(cubin.sass(content, encodings=True)).values(), key=len)))


def shipped(arch: str, *patterns: str) -> Iterator[tuple[str, bytes]]:
    """Return (name, cubin) of the shipped kernels that match a pattern; without patterns, all prefill kernels of
    Blackwell."""
    for kernel in catalog.shipped(arch):
        chosen = any(catalog.matches(kernel, p) for p in patterns) if patterns else kernel[0] == OP
        if chosen:
            yield kernel[1].name, build.build(*kernel, arch).cubin


def show(name: str, found: list[SassLoop]) -> None:
    print(name)
    for loop in found:
        kinds = ", ".join(f"{n} {name}" for name, n in loop.names.most_common(6))
        stored = f"; P stored at {', '.join(map(str, loop.stored))}" if loop.role.startswith("softmax") else ""
        print(f"  {loop.role:15}{len(loop.path):5} instructions, stall {loop.stall}{stored}; {kinds}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.static", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="names of shipped kernels, or cubins")
    parser.add_argument("--arch", default="sm_100a")
    args = parser.parse_args()
    files = [Path(x) for x in args.what if x.endswith(".cubin")]
    for file in files:
        show(file.name, of_cubin(file.read_bytes()))
    if not files:
        for name, content in shipped(args.arch, *args.what):
            show(name, of_cubin(content))


if __name__ == "__main__":
    main()
