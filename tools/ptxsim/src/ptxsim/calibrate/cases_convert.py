"""Cases of cvt: between floating-point formats, and between numbers and integers."""

from collections.abc import Iterator

import numpy as np

from .case import Sketch, elementwise, random
from .data import bell, double16, pairs32, single16, single32

D = "Data Movement and Conversion Instructions: cvt"
INT = {"s8": np.uint16, "u8": np.uint16, "s16": np.uint16, "u16": np.uint16}
INT |= {"s32": np.uint32, "u32": np.uint32, "s64": np.uint64, "u64": np.uint64}


def to_half() -> Iterator[Sketch]:
    """Yield cases of f32 to 16 bits, one number and two: the first operand is the upper half."""
    for kind in ("f16", "bf16"):
        for how in ("rn", "rz", "rn.relu", "rz.relu", "rn.satfinite", "rn.satfinite.relu", "rz.satfinite"):
            op = f"cvt.{how}.{kind}.f32"
            yield elementwise(D, op, (single32(op),), np.uint16, real=kind)
            op = f"cvt.{how}.{kind}x2.f32"
            yield elementwise(D, op, (single32(op), single32(op)[::-1].copy()), np.uint32, real=kind)
    for how in ("rm", "rp", "rn.ftz", "rn.sat"):
        op = f"cvt.{how}.f16.f32"
        yield elementwise(D, op, (single32(op),), np.uint16, real="f16")
    for op in ("cvt.f32.f16", "cvt.f32.bf16", "cvt.ftz.f32.f16"):
        yield elementwise(D, op, (single16(op),), np.uint32, real="f32")
    for op, kind in (("cvt.rn.f16.bf16", "f16"), ("cvt.rn.bf16.f16", "bf16")):
        yield elementwise(D, op, (single16(op),), np.uint16, real=kind)


def to_tf32() -> Iterator[Sketch]:
    for how in ("rna", "rn", "rz", "rn.relu", "rz.relu", "rna.satfinite"):
        op = f"cvt.{how}.tf32.f32"
        yield elementwise(D, op, (single32(op),), np.uint32, real="f32")


def eighths() -> Iterator[Sketch]:
    """Yield cases of 8-bit formats, in pairs."""
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            op = f"cvt.rn.satfinite{relu}.{kind}.f32"
            a, b = single32(op), single32(op + "second")
            small = (bell(random(op), 96) * 2.0 ** random(op).randint(-18, 18, 96)).astype(np.float32).view(np.uint32)
            a[-96:], b[-96:] = small, small[::-1]
            yield elementwise(D, op, (a, b), np.uint16)
            op = f"cvt.rn.satfinite{relu}.{kind}.f16x2"
            yield elementwise(D, op, (double16(op),), np.uint16)
            op = f"cvt.rn{relu}.f16x2.{kind}"
            codes = np.arange(256, dtype=np.uint16)
            yield elementwise(D, op, (codes | codes[::-1] << 8,), np.uint32, real="f16")


def double(name: str) -> np.ndarray:
    """Return f64 bits: values that f32 can hold and values in between."""
    data = single32(name)
    values = np.where(data << np.uint32(1) > 0xFF000000, np.uint32(0), data).view(np.float32).astype(np.float64)
    values[:4], values[96:] = (np.nan, np.inf, 1e300, -1e-300), values[96:] * (1 + 2.0**-30)
    return values.view(np.uint64)


def to_integer() -> Iterator[Sketch]:
    """Yield cases of rounding, of saturation and of the conversion of NaN."""
    for how in ("rni", "rzi", "rmi", "rpi"):
        for kind, dtype in INT.items():
            if how in ("rzi", "rni") or kind in ("s32", "u8", "u64"):
                op = f"cvt.{how}.{kind}.f32"
                yield elementwise(D, op, (single32("integer"),), dtype)
        op = f"cvt.{how}.f32.f32"
        yield elementwise(D, op, (single32("integer"),), np.uint32, real="f32")
    for op in ("cvt.rni.ftz.s32.f32", "cvt.rpi.ftz.u32.f32", "cvt.rmi.sat.s32.f32"):
        yield elementwise(D, op, (single32("integer"),), np.uint32)
    for op, dtype in (("cvt.rzi.s32.f16", np.uint32), ("cvt.rni.u16.f16", np.uint16), ("cvt.rmi.s64.f16", np.uint64)):
        yield elementwise(D, op, (single16(op),), dtype)
    for op in ("cvt.rni.f16.f16", "cvt.rzi.f16.f16"):
        yield elementwise(D, op, (single16(op),), np.uint16, real="f16")
    for op in ("cvt.sat.f32.f32", "cvt.ftz.f32.f32", "cvt.rn.f32.f64"):
        data = double(op) if op.endswith("f64") else single32(op)
        yield elementwise(D, op, (data,), np.uint32, real="f32")
    yield elementwise(D, "cvt.f64.f32", (single32("cvt.f64.f32")[np.arange(192) != 15][:160],), np.uint64)


def from_integer() -> Iterator[Sketch]:
    rng = random("from integer")
    edges = np.array(
        [0, 1, 2**24 + 1, 2**24 + 3, 2**25 + 2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 65519, 65520], "u8"
    )
    data = np.concatenate(
        [edges, rng.randint(0, 1 << 63, 52, dtype=np.uint64) >> rng.randint(0, 63, 52).astype(np.uint64)]
    )
    data[40:] = ~data[40:]
    single = [f"cvt.{how}.f32.{kind}" for how in ("rn", "rz", "rm", "rp") for kind in ("s32", "u32", "s64", "u64")]
    single += ["cvt.rn.f32.s16", "cvt.rn.f32.u16", "cvt.rn.f32.s8", "cvt.rn.f32.u8"]
    for op in (*single, "cvt.rn.f16.s32", "cvt.rn.f16.u16", "cvt.rn.bf16.s32", "cvt.rn.bf16.u64"):
        *_, to, kind = op.split(".")
        yield elementwise(D, op, (data.astype(INT[kind]),), np.uint32 if to == "f32" else np.uint16)


def between_integers() -> Iterator[Sketch]:
    """Yield cases of truncation, extension by the source's sign, saturation."""
    a, b = pairs32("between")
    given = {np.uint16: a.astype(np.uint16), np.uint32: a, np.uint64: a | b.astype(np.uint64) << np.uint64(32)}
    for kinds in (
        *("s8.s32", "u8.u32", "s16.s32", "sat.s8.s32", "sat.u8.s32", "sat.u16.s32", "sat.s16.u32"),
        *("s64.s32", "u64.u32", "u64.s32", "s64.u32"),
        *("u32.u64", "s32.s64", "sat.s32.s64", "sat.u32.s64", "sat.s32.u64"),
        *("s32.s8", "u32.u8", "s32.s16", "u32.u16", "u32.s16", "s32.u16", "s16.s8"),
    ):
        *_, to, source = kinds.split(".")
        yield elementwise(D, f"cvt.{kinds}", (given[INT[source]],), INT[to])
    c = a[::-1].copy()
    for op in ("cvt.pack.sat.s16.s32", "cvt.pack.sat.u16.s32"):
        yield elementwise(D + ".pack", op, (a, b), np.uint32)
    for op in ("cvt.pack.sat.s8.s32.b32", "cvt.pack.sat.u8.s32.b32"):
        yield elementwise(D + ".pack", op, (a, b, c), np.uint32)


def sketches() -> Iterator[Sketch]:
    for family in (to_half, to_tf32, eighths, to_integer, from_integer, between_integers):
        yield from family()
