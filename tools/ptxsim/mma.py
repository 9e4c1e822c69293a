"""Matrix multiply of a warp: forms of mma.sync and movmatrix.

Fragments (PTX ISA, Matrix Fragments for mma.m16n8k*): with g = lane / 4 and q = lane % 4, register r of A holds row
g + 8 (r % 2) and columns per * q + 4 * per * (r / 2) on, per elements a register; register r of B holds column g and
the same columns as rows; D holds (g + 8 (i / 2), 2 q + i % 2).
"""

import re
from typing import Any

import numpy as np

from . import tensorcore
from .forms import WARP, Op, effect, form, refuse
from .machine import Threads
from .numbers import decode
from .parse import Instruction, vector
from .translate import dtype_of

MMA = "Warp Level Matrix Multiply-Accumulate Instructions"
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
LANE = np.arange(32)


def fragment(registers: list[np.ndarray], kind: str, rows: int) -> np.ndarray:
    """(warps, rows, k) float32 of A (rows 16) or of B transposed (rows 8)."""
    size = BYTES[kind]
    per, halves = 4 // size, rows // 8
    k = 4 * per * len(registers) // halves
    out = np.empty((len(registers[0]) // 32, rows, k), np.float32)
    for r, register in enumerate(registers):
        parts = np.ascontiguousarray(register).reshape(-1, 32, 1).view(f"u{size}")
        row, column = LANE // 4 + 8 * (r % halves), per * (LANE % 4) + 4 * per * (r // halves)
        for i in range(per):
            out[:, row, column + i] = decode(np.ascontiguousarray(parts[..., i]), kind)
    return out


@form(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::\w+)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.(f32|f16|s32)",
    MMA,
    level=WARP,
)
def multiply(x: Instruction, f: re.Match[str]) -> Op:
    if f[2] != "f32" or f[5] != "f32" or f[3] not in BYTES or f[4] not in BYTES:
        raise refuse(x, f"{f[2]} += {f[3]} {f[4]}")
    d, a, b, c = (vector(text) for text in x.args)

    def run(t: Threads, x: Instruction, *values: Any) -> Any:
        left = fragment(list(values[: len(a)]), f[3], 16)
        right = fragment(list(values[len(a) : len(a) + len(b)]), f[4], 8)
        sums = np.empty((len(left), 16, 8), np.float32)
        places = [(LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2) for i in range(len(c))]
        for (row, column), addend in zip(places, values[len(a) + len(b) :]):
            sums[:, row, column] = addend.reshape(-1, 32)
        for warp in range(len(sums)):
            sums[warp] = tensorcore.multiply(left[warp], right[warp], sums[warp], (f[3], f[4]))
        return tuple(sums[:, row, column].reshape(-1) for row, column in places)

    ins = [*((r, "b32") for r in (*a, *b)), *((r, "f32") for r in c)]
    return effect(run, *ins, outs=tuple((r, "f32") for r in d))


@form(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", MMA, level=WARP)
def transpose(x: Instruction, f: re.Match[str]) -> Op:
    def run(t: Threads, x: Instruction, a: Any) -> Any:
        matrix = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(matrix).reshape(-1).view(dtype_of("b32"))

    return effect(run, (x.args[1], "b32"), outs=((x.args[0], "b32"),))
