"""Cases of integer arithmetic, bits, shifts, selection."""

from collections.abc import Callable, Iterator

import numpy as np

from .case import Sketch, elementwise, named, random
from .data import KEYS_INT, pairs, triples

N, L, C = "Integer Arithmetic Instructions: ", "Logic and Shift Instructions: ", "Comparison Instructions: "
E, M = "Extended-Precision Arithmetic Instructions: ", "Data Movement Instructions: "
BINARY = (
    *("add.u32", "add.s32", "add.sat.s32", "sub.s32", "sub.sat.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32"),
    *("mul24.lo.s32", "mul24.lo.u32", "mul24.hi.s32", "mul24.hi.u32", "min.s32", "min.u32", "max.s32", "max.u32"),
    *("min.relu.s32", "max.relu.s32"),
)
PACKED = ("add.u16x2", "add.s16x2", "min.s16x2", "max.u16x2", "min.relu.s16x2", "max.relu.s16x2", "min.u16x2")
TERNARY = (
    *("mad.lo.s32", "mad.hi.s32", "mad.hi.u32", "mad.hi.sat.s32", "mad24.lo.s32", "mad24.hi.u32", "sad.s32", "sad.u32"),
    *("dp4a.u32.u32", "dp4a.s32.s32", "dp4a.s32.u32", "dp4a.u32.s32", "dp2a.lo.s32.s32", "dp2a.hi.u32.s32"),
)
UNARY = (
    "neg.s32", "abs.s32", "popc.b32", "clz.b32", "brev.b32", "bfind.s32", "bfind.u32", "bfind.shiftamt.s32", "cnot.b32",
)  # fmt: skip
MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def keys(name: str, dtype: type = np.uint32) -> tuple[np.ndarray, np.ndarray]:
    return pairs(KEYS_INT, dtype, name)


def wide(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return 64-bit pairs; the upper half comes from another pair."""
    a, b = keys(name)
    order = random(name).permutation(len(a))
    return a | a[order].astype(np.uint64) << np.uint64(32), b | b[order].astype(np.uint64) << np.uint64(32)


def short(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return 16-bit pairs."""
    a, b = keys(name)
    return a.astype(np.uint16), b.astype(np.uint16)


def wide_addend(name: str) -> tuple[np.ndarray, ...]:
    """Return 32-bit pairs and 64-bit addends."""
    pair = keys(name)
    return *pair, random(name).randint(0, 1 << 63, len(pair[0]), dtype=np.uint64) * np.uint64(2)


def without_zero(pair: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs without a zero divisor, for which the ISA leaves the result open."""
    return pair[0], np.where(pair[1] == 0, pair[1].dtype.type(5), pair[1])


def shifts(name: str, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values, and shift distances up to and past the width."""
    rng = random(name)
    amount = np.array([0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x80000001], np.uint32)
    b = np.tile(amount, 4)
    return rng.randint(0, 1 << 32, (len(b), 2), dtype=np.uint64).astype(np.uint32).view(np.uint64)[:, 0].astype(
        f"u{bits // 8}"
    ), b


ARITHMETIC: tuple[tuple[tuple[str, ...], Callable[[str], tuple[np.ndarray, ...]], type], ...] = (
    (BINARY + PACKED, keys, np.uint32),  # forms, inputs, type of the results
    (TERNARY, lambda op: triples(keys(op), op), np.uint32),
    (UNARY, lambda op: keys(op)[1:], np.uint32),
    (("mul.wide.s32", "mul.wide.u32"), keys, np.uint64),
    (("mul.wide.s16", "mul.wide.u16"), short, np.uint32),
    (("mad.wide.s32", "mad.wide.u32"), wide_addend, np.uint64),
    (("add.s16", "sub.u16", "mul.lo.s16", "mul.hi.s16", "mul.hi.u16", "min.s16", "max.u16"), short, np.uint16),
    (("add.s64", "sub.u64", "mul.lo.s64", "mul.hi.s64", "mul.hi.u64", "min.s64", "max.u64"), wide, np.uint64),
    (("neg.s64", "abs.s64", "brev.b64"), lambda op: wide(op)[:1], np.uint64),
    (("popc.b64", "clz.b64", "bfind.s64", "bfind.u64"), lambda op: wide(op)[1:], np.uint32),
    (("div.s32", "div.u32", "rem.s32", "rem.u32"), lambda op: without_zero(keys(op)), np.uint32),
    (("div.s64", "rem.u64", "rem.s64"), lambda op: without_zero(wide(op)), np.uint64),
    (("div.s16", "rem.u16"), lambda op: without_zero(short(op)), np.uint16),
)


def arithmetic() -> Iterator[Sketch]:
    for ops, inputs, out in ARITHMETIC:
        for op in ops:
            yield elementwise(N + op.split(".")[0], op, inputs(op), out)


def carries() -> Iterator[Sketch]:
    add = "add.cc.u32 %t1, $a, $b;\naddc.cc.u32 %t2, $b, $c;\naddc.u32 $x, %t1, %t2;"
    sub = "sub.cc.u32 %t1, $a, $b;\nsubc.cc.u32 %t2, $b, $c;\nsubc.u32 $x, %t1, %t2;"
    mad = "mad.lo.cc.u32 %t1, $a, $b, $c;\nmadc.hi.u32 $x, $a, $b, %t1;"
    for form, op in (
        *(("add.cc.u32, addc.cc.u32, addc.u32", add), ("sub.cc.u32, subc.cc.u32, subc.u32", sub)),
        ("mad.lo.cc.u32, madc.hi.u32", mad),
    ):
        yield named(E + form[:3], form, op, triples(keys(form), form))
    form, op = "add.cc.u64, addc.u64", "add.cc.u64 %q1, $a, $b;\naddc.u64 $x, $b, 0;"
    yield named(E + "add", form, op, wide(form), np.uint64)


def fields() -> Iterator[Sketch]:
    """Yield cases of bit fields, masks and shifts, with positions and lengths past the width."""
    rng = random("fields")
    position = np.tile(np.array([0, 1, 8, 31, 32, 40, 255, 256], np.uint32), 16)
    length = np.repeat(np.array([0, 1, 4, 16, 31, 32, 33, 255], np.uint32), 16)
    value = rng.randint(0, 1 << 32, len(length), dtype=np.uint64).astype(np.uint32)
    for op in ("bfe.s32", "bfe.u32"):
        yield elementwise(N + "bfe", op, (value, position, length), np.uint32)
    long = rng.randint(0, 1 << 63, len(length), dtype=np.uint64) * np.uint64(2)
    far = position * np.uint32(2) & np.uint32(255)
    for op in ("bfe.s64", "bfe.u64"):
        yield elementwise(N + "bfe", op, (long, far, length), np.uint64)
    yield elementwise(N + "bfi", "bfi.b32", (value, value[::-1].copy(), position, length), np.uint32)
    yield elementwise(N + "bfi", "bfi.b64", (long, long[::-1].copy(), position & np.uint32(255), length), np.uint64)
    for op in ("bmsk.clamp.b32", "bmsk.wrap.b32"):
        yield elementwise(N + "bmsk", op, (position, length), np.uint32)
    for op in ("szext.clamp.s32", "szext.wrap.u32"):
        yield elementwise(N + "szext", op, (value, position), np.uint32)
    for bits in (32, 64, 16):
        for op in (f"shl.b{bits}", f"shr.u{bits}", f"shr.s{bits}"):
            a, b = shifts(op, bits)
            yield elementwise(L + op[:3], op, (a, b), a.dtype)
    for op in ("shf.l.wrap.b32", "shf.r.wrap.b32", "shf.l.clamp.b32", "shf.r.clamp.b32"):
        a, c = shifts(op, 32)
        yield elementwise(L + "shf", op, (a, a[::-1].copy(), c), np.uint32)


def logic() -> Iterator[Sketch]:
    for op in ("and.b32", "or.b32", "xor.b32"):
        yield elementwise(L + op.split(".")[0], op, keys(op), np.uint32)
    for op in ("and.b16", "xor.b16"):
        yield elementwise(L + op.split(".")[0], op, short(op), np.uint16)
    yield elementwise(L + "not", "not.b32", (keys("not")[1],), np.uint32)
    yield elementwise(L + "or", "or.b64", wide("or"), np.uint64)
    for lut in (0x01, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xF8):
        op = f"lop3.b32 $x, $a, $b, $c, {lut};"
        yield named(L + "lop3", "lop3.b32", op, triples(keys("lop3"), "lop3"), name=f"lop3.b32 {lut:#x}")
    form = "and.pred, or.pred, xor.pred, not.pred"
    op = """setp.lt.s32 %p1, $a, $b;
        setp.gt.u32 %p2, $a, $b;
        and.pred %p3, %p1, %p2;
        or.pred %p4, %p1, %p2;
        xor.pred %p5, %p1, %p2;
        not.pred %p6, %p1;
        selp.b32 $x, 1, 0, %p3;
        @%p4 or.b32 $x, $x, 2;
        @!%p5 or.b32 $x, $x, 4;
        @%p6 or.b32 $x, $x, 8;"""
    yield named(L + "and", form, op, keys("pred"))
    rng = random("prmt")
    a, b, c = rng.randint(0, 1 << 32, (3, 128), dtype=np.uint64).astype(np.uint32)
    yield elementwise(M + "prmt", "prmt.b32", (a, b, c), np.uint32)
    for mode in MODES:
        yield elementwise(M + "prmt", f"prmt.b32.{mode}", (a, b, c), np.uint32)


def compared() -> Iterator[Sketch]:
    signed = ("eq.s32", "ne.s32", "lt.s32", "le.s32", "gt.s32", "ge.s32")
    for kinds, chosen, (a, b) in (
        (signed, "selp.b32 $x, $a, $b", keys("setp")),
        (("lo.u32", "ls.u32", "hi.u32", "hs.u32"), "selp.b32 $x, 1, 0", keys("setp")),
        (("lt.s64", "ge.u64", "ne.b64"), "selp.b64 $x, $a, $b", wide("setp")),
        (("lt.s16", "gt.u16"), "selp.b16 $x, $a, $b", short("setp")),
    ):
        for form in (f"setp.{kind}" for kind in kinds):
            op = f"{form} %p1, $a, $b;\n{chosen}, %p1;"
            yield named(C + "setp", form, op, (a, b), a.dtype)
    for op in ("set.lt.u32.s32", "set.ge.s32.u32", "set.ne.f32.u32"):
        yield elementwise(C + "set", op, keys(op), np.uint32)


def moves() -> Iterator[Sketch]:
    """Yield cases of mov between vectors and words."""
    word = "mov.b32 {%h1, %h2}, $a;\nmov.b32 $x, {%h2, %h1};"
    long = "mov.b64 {%t1, %t2}, $a;\nmov.b64 $x, {%t2, %t1};"
    quarter = "mov.b64 {%h1, %h2, %h3, %h4}, $a;\nmov.b64 $x, {%h3, %h1, %h4, %h2};"
    for form, op, data in (
        ("mov.b32 {b16, b16}", word, keys("mov")[0]),
        ("mov.b64 {b32, b32}", long, wide("mov")[0]),
        ("mov.b64 {b16, b16, b16, b16}", quarter, wide("mov")[1]),
    ):
        yield named(M + "mov", form, op, (data,), data.dtype)


def sketches() -> Iterator[Sketch]:
    for family in (arithmetic, carries, fields, logic, compared, moves):
        yield from family()
