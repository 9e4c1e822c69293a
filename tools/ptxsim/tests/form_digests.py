"""Digests of the simulator's arithmetic over dense inputs. They must be the same on every processor.

`python form_digests.py` prints them as JSON: one line per opcode of the calibration cases that computes numbers,
and lines per operand format of the tensor cores. `--record` writes them to form_digests.json.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ptxsim import alu, convert, tensorcore, translate  # noqa: F401  (alu and convert register their forms)
from ptxsim.calibrate import cases
from ptxsim.faults import NotModelled
from ptxsim.forms import find
from ptxsim.numbers import FLOATS, decode
from ptxsim.parse import PtxInstruction, parse

RECORD = Path(__file__).with_suffix(".json")
SECTIONS = (
    "Floating Point Instructions",
    "Half Precision Floating Point Instructions",
    "Comparison and Selection Instructions",
    "Data Movement and Conversion Instructions: cvt",
)
DENSE = 1 << 16  # values of an operand: every upper half of a float32, every 16-bit number
SPECIALS = (0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, -np.nan)
TAIL = 7  # a number of values that no vector length of a processor divides
OTHERS = (  # Blackwell opcodes without a calibration case
    *("add.rn.f32x2", "mul.ftz.f32x2", "fma.rn.f32x2"),
    *("cvt.rn.satfinite.e2m1x2.f32", "cvt.rn.f16x2.e2m1x2"),
)
MATRICES = ("f16", "bf16", "tf32", "e4m3", "e5m2")  # formats of tensor-core operands


def values(kind: str, operand: int) -> np.ndarray:
    """Return values of a PTX type, different for each operand: dense ones, then all combinations of three SPECIALS."""
    dtype, random, count = translate.dtype_of(kind), np.random.RandomState(operand), DENSE + len(SPECIALS) ** 3 + TAIL
    if kind == "pred":
        return random.randint(0, 2, count).astype(bool)
    size = dtype.itemsize
    upper = np.arange(count) if operand == 0 else random.permutation(count)
    words = upper.astype(np.uint64) << np.uint64(max(8 * size - 16, 0))
    if size > 2:
        words += random.randint(0, 1 << 16, count).astype(np.uint64) << np.uint64(8 * size - 32)
    found = words.astype(f"u{size}").view(dtype)
    if dtype.kind == "f":
        specials = np.array(SPECIALS, dtype)
        specials.view(f"u{size}")[np.isnan(specials)] += np.array(operand + 1, f"u{size}")  # payloads
        order = np.arange(len(SPECIALS) ** 3) // len(SPECIALS) ** (operand % 3) % len(SPECIALS)
        found[DENSE:-TAIL] = specials[order]
    return found


def digest(results: Any) -> str:
    state = hashlib.sha256()
    for array in results if isinstance(results, tuple) else (results,):
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def of_forms() -> dict[str, str]:
    """Return the digest of each opcode that maps numbers to numbers."""
    found: dict[str, str] = {}
    instructions = [x for case in cases.CASES for x in parse(case.ptx).instructions]
    instructions += [PtxInstruction("", op, tuple("dabc"[: 3 + op.startswith("fma")]), 0, "") for op in OTHERS]
    for x in instructions:
        form = find(x.op)
        if x.op in found or form is None or form[0].isa not in SECTIONS:
            continue
        try:
            op = form[0].make(x, form[1])
        except NotModelled:
            continue
        found[x.op] = digest(op.run(*(values(kind, i) for i, (_, kind) in enumerate(op.ins))))
    return found


def matrix(kind: str, rows: int, seed: int, specials: bool) -> np.ndarray:
    """Return a float32 matrix (rows, 32) of random bits in an operand format; without specials, finite numbers times
    2^-10."""
    random = np.random.RandomState(seed)
    if kind == "tf32":
        bits = random.randint(0, 1 << 32, (rows, 32), dtype=np.uint64).astype(np.uint32)
    else:
        size = FLOATS[kind].itemsize
        bits = random.randint(0, 1 << 8 * size, (rows, 32)).astype(f"u{size}")
    found = decode(bits, kind)
    if specials:
        return found
    return np.where(np.isfinite(found), found, np.float32(1)) * np.float32(2.0**-10)


def of_products() -> dict[str, str]:
    """Return the digests of tensor-core sums, rounded as hardware rounds them and exact."""
    found = {}
    for kind in MATRICES:
        for specials in (False, True):
            a, b = matrix(kind, 64, 1, specials), matrix(kind, 32, 2, specials)
            name = f"{kind} with infinity and NaN" if specials else kind
            total = np.float32(0.5) + np.zeros((64, 32), np.float32)
            found[f"sum of {name}"] = digest(tensorcore.multiply(a, b, total, (kind, kind)))
            found[f"product of {name}"] = digest(tensorcore.product(a, b))
    return found


def all_digests() -> dict[str, str]:
    with np.errstate(all="ignore"):
        return of_forms() | of_products()


if __name__ == "__main__":
    text = json.dumps(all_digests(), indent=0)
    if "--record" in sys.argv:
        RECORD.write_text(text + "\n")
    print(text)
