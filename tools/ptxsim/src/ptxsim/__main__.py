"""Run a PTX kernel on the CPU, or list the instructions of a PTX file that the simulator does not know.

ptxsim run FILE.ptx --grid 4 --arg x.npy --arg f32:4x128 --arg 128     a value per PTX parameter
ptxsim run FILE.ptx --host FILE.mlir --shared 512 --arg x.npy ...      a value per argument of the host function
ptxsim forms FILE.ptx                                                  unknown instructions, and how often each occurs

A value is FILE.npy (a copy of its array), TYPE:SHAPE[:FILL] (a new array, for example f32:4x128 or s32:64:count), a
number, TYPE=NUMBER (for example f16=0.5) or null. Types: the numpy letter and bits (f32, u8, s32), bf16, e4m3, e5m2.
FILL: zeros (the default), ones, count (0, 1, 2, ...) or normal (random, of a fixed seed).

Without --mode, the kernel runs in all modes, which must give the same bits. The exit status is 0 if it does, 1 at a
fault or if bits differ, and 2 if an instruction is not modelled or an argument is wrong."""

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import coverage
from .call import BEYOND, KernelLaunch
from .faults import Fault, NotModelled
from .forms import find
from .kernel import CompiledKernel, launch, only_entry, run_all
from .machine import MODES
from .numbers import FLOATS
from .parse import parse
from .program import control
from .runner import RunResult

FILLS: dict[str, Callable[[int], np.ndarray]] = {
    "zeros": np.zeros,
    "ones": np.ones,
    "count": lambda size: np.arange(size, dtype=np.float64),
    "normal": lambda size: np.random.default_rng(0).standard_normal(size),
}


def unknown_forms(path: Path) -> Counter[str]:
    """Return the opcodes of a PTX file that no form matches, and how often each occurs."""
    instructions = parse(path.read_text()).instructions
    return Counter(x.op for x in instructions if not control(x) and find(x.op) is None)


def type_of(name: str) -> np.dtype[Any]:
    """Return the numpy type of a name such as f32, s8 or bf16."""
    if name in FLOATS:
        return FLOATS[name]
    letter, bits = name[:1], name[1:]
    if letter not in ("f", "s", "u", "b") or bits not in ("8", "16", "32", "64") or name == "f8":
        raise ValueError(f"type {name!r}, must be {', '.join(FLOATS)}, or one of f, s, u and b with 8, 16, 32 or 64")
    return np.dtype(f"{ {'s': 'i', 'b': 'u'}.get(letter, letter) }{int(bits) // 8}")


def value_of(text: str) -> Any:
    """Return an argument of the command line: an array, a number or None."""
    if text == "null":
        return None
    if text.endswith(".npy"):
        return np.array(np.load(text), order="C")
    kind, colon, rest = text.partition(":")
    if colon:
        shape, _, fill = rest.partition(":")
        if (fill or "zeros") not in FILLS:
            raise ValueError(f"fill {fill!r}, must be {', '.join(FILLS)}")
        extents = tuple(int(extent) for extent in shape.split("x"))
        return FILLS[fill or "zeros"](int(np.prod(extents))).astype(type_of(kind)).reshape(extents)
    kind, equals, number = text.partition("=")
    if equals:
        return type_of(kind).type(float(number) if type_of(kind).kind not in "iu" else int(number, 0))
    return int(text, 0) if text.lstrip("-").isdigit() or text.lower().startswith("0x") else float(text)


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("x", ",").split(","))


def calls_of(args: argparse.Namespace, values: list[Any]) -> list[KernelLaunch]:
    """Return the launches of the command line's arguments."""
    ptx = args.ptx.read_text()
    if args.host:
        calls = CompiledKernel(ptx, args.host.read_text(), args.shared).calls(values)
    else:
        how = {"cluster": args.cluster, "shared": args.shared, "entry": args.entry or only_entry(ptx)}
        calls = [launch(ptx, values, args.grid, args.block, **how)]
    for call in calls:
        call.beyond = tuple(args.beyond)
    return calls


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


def changes(before: list[str], values: list[Any]) -> list[str]:
    """Return a line per array that the kernel changed. before: the digests."""
    lines = []
    for number, value in enumerate(values):
        if isinstance(value, np.ndarray) and digest(value) != before[number]:
            first = ", ".join(map(str, value.reshape(-1)[:4].tolist()))
            lines.append(f"argument {number}: {value.dtype} {'x'.join(map(str, value.shape))}, {first}, ...")
    return lines


def simulate(args: argparse.Namespace) -> int:
    """Run the kernel in each mode on equal arguments; return the exit status."""
    total, status = RunResult(), 0
    bits: set[tuple[str, ...]] = set()
    for mode in args.mode or MODES:
        values = [value_of(text) for text in args.arg]
        before = [digest(value) if isinstance(value, np.ndarray) else "" for value in values]
        start = time.perf_counter()
        try:
            result = run_all(
                calls_of(args, values), mode=mode, seed=args.seed, resident=args.resident, exact=args.exact
            )
        except Fault as fault:
            print(f"{mode}: {type(fault).__name__}: {fault}", flush=True)
            status = 1
            continue
        total.add(result)
        counts = "".join(f", {count} {name}" for name, count in result.counts.items())
        print(f"{mode}: ran in {time.perf_counter() - start:.2f} s{counts}", flush=True)
        if not bits:
            print("\n".join(changes(before, values)) or "no array changed")
        bits.add(tuple(digest(value) for value in values if isinstance(value, np.ndarray)))
        for number, _, file in (text.partition("=") for text in args.save):
            np.save(file, values[int(number)])
    if len(bits) > 1:
        print("the bits depend on the mode")
        status = 1
    if args.coverage:
        print(coverage.report(total))
    return status


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ptxsim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    forms = commands.add_parser("forms", help="list the unknown instructions of a file")
    forms.add_argument("ptx", type=Path, metavar="FILE.ptx")
    run = commands.add_parser("run", help="run a kernel")
    run.add_argument("ptx", type=Path, metavar="FILE.ptx")
    add = partial(run.add_argument)
    add("--arg", action="append", default=[], metavar="VALUE", help="repeatable, in order")
    add("--host", type=Path, metavar="FILE.mlir", help="the CuTe DSL's host function")
    add("--entry", help="name of the kernel, if the file has several")
    add("--grid", type=shape_of, default=1, metavar="X[,Y[,Z]]", help="CTAs; 1 by default")
    add("--block", type=shape_of, metavar="X[,Y[,Z]]", help="threads, if the PTX has no .reqntid")
    add("--cluster", type=shape_of, default=1, metavar="X[,Y[,Z]]")
    add("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory per CTA")
    add("--mode", action="append", choices=MODES, help="repeatable; all modes by default")
    add("--seed", type=int, default=0, help="of the mode random")
    add("--resident", type=int, default=4, help="clusters that run at once; 4 by default")
    add("--exact", action="store_true", help="round 16-bit and tf32 WGMMAs as an H200 does")
    add("--beyond", action="append", default=[], choices=BEYOND, help="allow what the ISA does not guarantee")
    add("--coverage", action="store_true", help="report the PTX that did not run")
    add("--save", action="append", default=[], metavar="N=FILE.npy", help="write argument N after each run")
    args = parser.parse_args(argv)
    try:
        if args.command == "run":
            return simulate(args)
        unknown = unknown_forms(args.ptx)
    except (OSError, ValueError, NotModelled) as error:
        print(f"{type(error).__name__}: {error}" if isinstance(error, NotModelled) else error, file=sys.stderr)
        return 2
    print("\n".join(f"{count:6} {op}" for op, count in unknown.most_common()) or "every form is known")
    return int(bool(unknown))


def command() -> None:
    """Run the command `ptxsim`."""
    sys.exit(main())


if __name__ == "__main__":
    command()
