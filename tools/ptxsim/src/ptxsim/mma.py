"""Warp-level matrix multiply: forms of mma.sync and movmatrix.

Fragments (PTX ISA, Matrix Fragments for mma.m16n8k*): let g = lane / 4, q = lane % 4, and `per` the elements per
register. Register r of A holds row g + 8 (r % 2) and `per` columns from per * q + 4 * per * (r / 2); register r
of B holds column g and the same columns as rows; register i of D holds (g + 8 (i / 2), 2 q + i % 2)."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from . import tensorcore
from .forms import WARP, PtxOp, effect, form, refuse
from .machine import Threads
from .numbers import decode
from .parse import PtxInstruction, vector
from .translate import dtype_of

MMA = "Warp Level Matrix Multiply-Accumulate Instructions"
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
LANE = np.arange(32)


@cache
def operand(count: int, per: int, halves: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of each element of `count` registers of A (halves 2) or of B transposed (1), (count, 32,
    per)."""
    r, lane, i = np.arange(count)[:, None, None], LANE[None, :, None], np.arange(per)
    return lane // 4 + 8 * (r % halves) + 0 * i, per * (lane % 4) + 4 * per * (r // halves) + i


@cache
def accumulator(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of each of `count` registers of C and D, (count, 32)."""
    i = np.arange(count)[:, None]
    return LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2


def fragment(registers: Sequence[np.ndarray], kind: str, rows: int) -> np.ndarray:
    """Return (warps, rows, k) float32 of A (rows 16) or of B transposed (rows 8)."""
    size, halves = BYTES[kind], rows // 8
    per, count = 4 // size, len(registers)
    bits = np.array(registers).view(f"u{size}").reshape(count, -1, 32, per)
    out = np.empty((bits.shape[1], rows, 4 * per * count // halves), np.float32)
    row, column = operand(count, per, halves)
    out[:, row, column] = decode(bits, kind).swapaxes(0, 1)
    return out


@form(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::\w+)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.(f32|f16|s32)",
    MMA,
    level=WARP,
)
def multiply(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    if f[2] != "f32" or f[5] != "f32" or f[3] not in BYTES or f[4] not in BYTES:
        raise refuse(x, f"{f[2]} += {f[3]} {f[4]}")
    d, a, b, c = (vector(text) for text in x.args)

    def run(t: Threads, x: PtxInstruction, *values: Any) -> Any:
        left = fragment(values[: len(a)], f[3], 16)
        right = fragment(values[len(a) : len(a) + len(b)], f[4], 8)
        sums = np.empty((len(left), 16, 8), np.float32)
        row, column = accumulator(len(c))
        sums[:, row, column] = np.array(values[len(a) + len(b) :]).reshape(len(c), -1, 32).swapaxes(0, 1)
        sums = tensorcore.multiply(left, right, sums, (f[3], f[4]))
        return tuple(sums[:, row, column].swapaxes(0, 1).reshape(len(c), -1))

    ins = [*((r, "b32") for r in (*a, *b)), *((r, "f32") for r in c)]
    return effect(run, *ins, outs=tuple((r, "f32") for r in d))


@form(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", MMA, level=WARP)
def transpose(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, a: Any) -> Any:
        matrix = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(matrix).reshape(-1).view(dtype_of("b32"))

    return effect(run, (x.args[1], "b32"), outs=((x.args[0], "b32"),))
