"""Cases of floating-point arithmetic: f32, f16, bf16 and their packed forms."""

from collections.abc import Iterator

import numpy as np

from .case import Sketch, elementwise, named, random
from .data import bell, double16, narrow, pairs16, pairs32, single16, single32, triples, widen

F, H, C = "Floating-Point Instructions: ", "Half Precision Floating-Point Instructions: ", "Comparison Instructions: "
BINARY = (
    *(
        "add.f32", "add.rn.f32", "add.rz.f32", "add.rm.f32", "add.rp.f32", "add.ftz.f32", "add.rn.ftz.f32",
        "add.sat.f32",
    ),
    *("add.rm.ftz.f32", "add.ftz.sat.f32", "sub.f32", "sub.rn.ftz.f32", "sub.rp.f32", "sub.sat.f32"),
    *("mul.f32", "mul.rn.f32", "mul.rz.f32", "mul.rm.f32", "mul.rp.f32", "mul.ftz.f32", "mul.rn.ftz.sat.f32"),
    *("div.rn.f32", "div.rz.f32", "div.rm.f32", "div.rp.f32", "div.rn.ftz.f32"),
    *("min.f32", "max.f32", "min.ftz.f32", "max.ftz.f32", "min.NaN.f32", "max.NaN.f32", "max.ftz.NaN.f32"),
    *("min.xorsign.abs.f32", "max.NaN.xorsign.abs.f32", "copysign.f32"),
)  # fmt: skip
TERNARY = ("fma.rn.f32", "fma.rz.f32", "fma.rm.f32", "fma.rp.f32", "fma.rn.ftz.f32", "fma.rn.sat.f32", "mad.rn.f32")
UNARY = ("neg.f32", "abs.f32", "neg.ftz.f32", "abs.ftz.f32", "sqrt.rn.f32", "sqrt.rz.f32", "sqrt.rn.ftz.f32")
UNARY_SLOW = ("rcp.rn.f32", "rcp.rp.f32", "rcp.rn.ftz.f32", "sqrt.rm.f32")
APPROXIMATE = (  # op, the ISA's largest relative error, doubled, and the floor under which the error is absolute
    ("ex2.approx.f32", 2.0**-21, 0.0),
    ("ex2.approx.ftz.f32", 2.0**-21, 0.0),
    ("lg2.approx.f32", 2.0**-21, 1.0),
    ("lg2.approx.ftz.f32", 2.0**-21, 1.0),
    ("rcp.approx.f32", 2.0**-22, 2.0**-126),
    ("rcp.approx.ftz.f32", 2.0**-22, 0.0),
    ("rsqrt.approx.f32", 2.0**-21.9, 0.0),
    ("rsqrt.approx.ftz.f32", 2.0**-21.9, 0.0),
    ("sqrt.approx.f32", 2.0**-22, 0.0),
    ("sqrt.approx.ftz.f32", 2.0**-22, 0.0),
    ("tanh.approx.f32", 2.0**-10, 0.0),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def single() -> Iterator[Sketch]:
    """Yield cases of f32, with the result in bits."""
    for op in BINARY:
        yield elementwise(F + op.split(".")[0], op, pairs32(op), np.uint32, real="f32")
    for op in TERNARY:
        yield elementwise(F + op.split(".")[0], op, triples(pairs32(op), op), np.uint32, real="f32")
    for op in UNARY + UNARY_SLOW:
        yield elementwise(F + op.split(".")[0], op, (single32(op),), np.uint32, real="f32")
    for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        op = f"testp.{kind}.f32 %p1, $a;\nselp.b32 $x, 1, 0, %p1;"
        yield named(F + "testp", f"testp.{kind}.f32", op, (single32("testp"),), name=f"testp.{kind}")


def approximate() -> Iterator[Sketch]:
    """Yield cases of f32 functions for which the ISA leaves the last bits open."""
    for op, tolerance, floor in APPROXIMATE:
        data = single32(op)
        data[-40:] = (random(op).rand(40) * 40 - 20).astype(np.float32).view(np.uint32)
        more = dict(real="f32", tolerance=tolerance, floor=floor)
        yield elementwise(F + op.split(".")[0], op, (data,), np.uint32, **more)
    for op in ("sin.approx.f32", "cos.approx.ftz.f32"):
        data = (random(op).rand(192) * 2 - 1).astype(np.float32) * np.float32(np.pi)
        more = dict(real="f32", tolerance=2.0**-19.5, floor=1.0)
        yield elementwise(F + op.split(".")[0], op, (data.view(np.uint32),), np.uint32, **more)
    for op in ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"):
        more = dict(real="f32", tolerance=2.0**-21, floor=2.0**-126)
        a, b = (bell(random(op), 2, 192) * 100).astype(np.float32).view(np.uint32)
        special = np.array([0, 0x80000000, 0x3F800000, 0x7F800000, 0x7FC00000, 0xC0400000], np.uint32)
        a[:36], b[:36] = np.repeat(special, 6), np.tile(special, 6)
        yield elementwise(F + "div", op, (a, b), np.uint32, **more)


def packed() -> Iterator[Sketch]:
    """Yield cases of f16x2 and bf16x2, and the scalar forms of both."""
    two = {
        "f16": (
            "add", "add.rn", "add.ftz", "add.sat", "sub", "mul", "mul.ftz.sat", "min", "max", "max.NaN", "min.ftz.NaN",
            "fma.rn", "fma.rn.ftz", "fma.rn.relu", "fma.rn.sat", "fma.rn.ftz.relu",
        ),
        "bf16": (
            "add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN", "max.NaN", "max.NaN.xorsign.abs", "fma.rn",
            "fma.rn.relu",
        ),
    }  # fmt: skip
    one = {"f16": ("add", "mul.sat", "min.NaN", "fma.rn"), "bf16": ("add.rn", "mul.rn", "max", "fma.rn")}
    for kind in ("f16", "bf16"):
        for op in (*(f"{name}.{kind}x2" for name in two[kind]), *(f"{name}.{kind}" for name in one[kind])):
            pair = pairs16(kind, op)
            words = triples(pair, op) if op.startswith("fma") else pair
            data = words if op.endswith("x2") else tuple(word.astype(np.uint16) for word in words)
            yield elementwise(H + op.split(".")[0], op, data, data[0].dtype, real=kind)
        for op in ("neg", "abs"):
            yield elementwise(H + op, f"{op}.{kind}x2", (double16(op + kind),), np.uint32, real=kind)
            yield elementwise(H + op, f"{op}.{kind}", (single16(op + kind),), np.uint16, real=kind)


def packed_approximate() -> Iterator[Sketch]:
    """Yield cases of ex2 and tanh of 16-bit numbers. The errors are the ISA's largest ones, doubled."""
    for op, kind, tolerance, floor in (
        ("ex2.approx.f16", "f16", 2.0**-8.9, 2.0**-14),
        ("ex2.approx.ftz.bf16", "bf16", 2.0**-6, 0.0),
        ("tanh.approx.f16", "f16", 2.0**-9.9, 1.0),
        ("tanh.approx.bf16", "bf16", 2.0**-7, 1.0),
    ):
        for full in (op, f"{op}x2"):
            values = narrow((random(full).rand(192) * 24 - 12).astype(np.float32), kind)
            values[:64] = single16(full)[:64]
            data = values | values[::-1].astype(np.uint32) << 16 if full.endswith("x2") else values
            data = data[np.isfinite(widen(data, kind)).reshape(len(data), -1).all(1)]
            data = data[: len(data) // 32 * 32]
            more = dict(real=kind, tolerance=tolerance, floor=floor)
            yield elementwise(H + op.split(".")[0], full, (data,), data.dtype, **more)


def compared() -> Iterator[Sketch]:
    """Yield cases of setp, set, selp, slct of numbers."""
    for kind in COMPARISONS:
        for suffix in ("f32", "ftz.f32") if kind in ("eq", "ltu") else ("f32",):
            op = f"setp.{kind}.{suffix} %p1, $a, $b;\nselp.b32 $x, 1, 0, %p1;"
            yield named(C + "setp", f"setp.{kind}.{suffix}", op, pairs32("setp"))
    for kind in ("eq", "neu", "lt", "geu", "nan"):
        op = f"setp.{kind}.f16x2 %p1|%p2, $a, $b;\nselp.b32 $x, 1, 0, %p1;\n@%p2 add.u32 $x, $x, 2;"
        yield named(H + "setp", f"setp.{kind}.f16x2 p|q", op, pairs16("f16", "setp"))
    a, b = pairs16("bf16", "setp")
    op = "setp.lt.bf16 %p1, $a, $b;\nselp.b16 $x, 1, 0, %p1;"
    yield named(H + "setp", "setp.lt.bf16", op, (a.astype(np.uint16), b.astype(np.uint16)), np.uint16)
    for combine in ("and", "or", "xor"):
        form = f"setp.gt.{combine}.f32 p|q, .., !c"
        op = (
            f"setp.ne.u32 %p3, $c, 0;\nsetp.gt.{combine}.f32 %p1|%p2, $a, $b, !%p3;\n"
            "selp.b32 $x, 1, 0, %p1;\n@%p2 add.u32 $x, $x, 2;"
        )
        a, b = pairs32("setp")
        c = random("setp").randint(0, 2, len(a), dtype=np.uint32)
        yield named(C + "setp", form, op, (a, b, c))
    for op in ("set.lt.u32.f32", "set.geu.f32.f32", "set.eq.s32.f32", "set.nan.ftz.u32.f32"):
        yield elementwise(C + "set", op, pairs32(op), np.uint32)
    for op in ("slct.f32.f32", "slct.ftz.b32.f32"):
        yield elementwise(C + "slct", op, triples(pairs32(op), op), np.uint32)
    op = "slct.u32.s32"
    yield elementwise(C + "slct", op, triples(pairs32(op), op), np.uint32)


def double() -> Iterator[Sketch]:
    """Yield cases of a few f64 forms."""
    rng = random("f64")
    a, b, c = (bell(rng, 3, 64) * 1e3).view(np.uint64)
    for array, value in zip((a, b, c), (np.inf, np.nan, -0.0)):
        array[:4] = np.array([0.0, value, 1e-310, -1.5]).view(np.uint64)
    for name in ("add.rn.f64", "mul.rn.f64", "div.rn.f64", "max.f64"):
        op = f"{name} %q1, $a, $b;\nadd.rn.f64 $x, %q1, 0d3FF0000000000000;"
        yield named(F + name[:3], name, op, (a, b), np.uint64)
    yield named(F + "fma", "fma.rn.f64", "fma.rn.f64 $x, $a, $b, $c;", (a, b, c), np.uint64)


def sketches() -> Iterator[Sketch]:
    for family in (single, approximate, packed, packed_approximate, compared, double):
        yield from family()
