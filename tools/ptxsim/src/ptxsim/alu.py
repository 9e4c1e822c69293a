"""Forms of arithmetic, logic, comparison and selection: integers and floats of registers."""

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import functions
from .faults import Fault
from .forms import PtxOp, effect, form, pure, refuse
from .numbers import count_nonzero, decode, encode, flush, fma, fma_to_odd, one_nan, rounded, sum_to_odd
from .parse import PtxInstruction
from .translate import dtype_of

INTEGER = "Integer Arithmetic Instructions"
FLOAT, HALF = "Floating Point Instructions", "Half Precision Floating Point Instructions"
COMPARE, LOGIC = "Comparison and Selection Instructions", "Logic and Shift Instructions"
U32, U64 = np.uint32, np.uint64


def double(dtype: Any) -> Any:
    """Return the integer type of twice the width."""
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


# ------------------------------------------------------------------------------------------------ integers
def quotient(a: Any, b: Any) -> Any:
    if np.asarray(a).dtype.kind == "u":
        return a // b
    floor, rest = np.divmod(a, b)
    return np.where((rest != 0) & ((a < 0) != (b < 0)), floor + 1, floor).astype(np.asarray(a).dtype)


def remainder(a: Any, b: Any) -> Any:
    return (a - quotient(a, b) * b).astype(np.asarray(a).dtype)


def saturated(run: Callable[..., Any]) -> Callable[..., Any]:
    """Clamp 32-bit signed arithmetic to its range (.sat)."""

    def clamp(a: Any, b: Any) -> Any:
        return np.clip(run(np.asarray(a, np.int64), np.asarray(b, np.int64)), -(2**31), 2**31 - 1).astype(np.int32)

    return clamp


def high(a: Any, b: Any) -> Any:
    """Return the upper half of a product."""
    dtype = np.asarray(a).dtype
    if dtype.itemsize < 8:
        wide = double(dtype)
        return ((np.asarray(a, wide) * np.asarray(b, wide)) >> (8 * dtype.itemsize)).astype(dtype)
    exact = np.asarray(a, object) * np.asarray(b, object)
    return (exact >> 64).astype(dtype)


def wide(a: Any, b: Any) -> Any:
    dtype = double(np.asarray(a).dtype)
    return np.asarray(a, dtype) * np.asarray(b, dtype)


BINARY = {"add": operator.add, "sub": operator.sub, "div": quotient, "rem": remainder}
BINARY |= {"min": np.minimum, "max": np.maximum}


@form(r"(add|sub|div|rem|min|max)(\.sat)?(\.relu)?\.([us](?:16|32|64))", INTEGER)
def integer_binary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run = saturated(BINARY[f[1]]) if f[2] else BINARY[f[1]]
    if f[1] in ("div", "rem"):
        return division(x, run, f[4])
    if f[3]:
        inner = run
        run = lambda a, b: np.maximum(inner(a, b), np.asarray(a).dtype.type(0))  # noqa: E731
    return pure(x, run, f[4], f[4], f[4])


def division(x: PtxInstruction, run: Callable[..., Any], kind: str) -> PtxOp:
    """Return the operation of a division, which is a fault if a thread that executes it divides by zero."""

    def divide(t: Any, x: PtxInstruction, a: Any, b: Any) -> Any:
        if count_nonzero(b) < t.count:
            raise Fault(f"{t.say(x)}: integer division by zero")
        return run(a, b)

    return effect(divide, (x.args[1], kind), (x.args[2], kind), outs=((x.args[0], kind),))


@form(r"(min|max)(\.relu)?\.([us]16)x2", INTEGER)
def integer_pairs(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype, choose = dtype_of(f[3]), BINARY[f[1]]

    def run(a: Any, b: Any) -> Any:
        out = choose(*(np.array(word, U32)[..., None].view(dtype) for word in (a, b)))
        return (np.maximum(out, dtype.type(0)) if f[2] else out).view(U32)[..., 0]

    return pure(x, run, "b32", "b32", "b32")


@form(r"(mul|mad)\.(lo|hi|wide)\.([us](?:16|32|64))", INTEGER)
def multiply(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    kind = f[3]
    out = f"{kind[0]}{2 * int(kind[1:])}" if f[2] == "wide" else kind
    times = {"lo": operator.mul, "hi": high, "wide": wide}[f[2]]
    if f[1] == "mul":
        return pure(x, times, out, kind, kind)
    return pure(x, lambda a, b, c: times(a, b) + c, out, kind, kind, out)


@form(r"(mul24|mad24)\.lo\.([us]32)", INTEGER)
def multiply24(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    low = lambda a: np.asarray(a << 8, dtype_of(f[2])) >> 8  # noqa: E731
    if f[1] == "mul24":
        return pure(x, lambda a, b: low(a) * low(b), f[2], f[2], f[2])
    return pure(x, lambda a, b, c: low(a) * low(b) + c, f[2], f[2], f[2], f[2])


@form(r"(neg|abs)\.(s(?:16|32|64))", INTEGER)
def integer_unary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return pure(x, operator.neg if f[1] == "neg" else np.abs, f[2], f[2])


@form(r"sad\.([us](?:16|32|64))", INTEGER)
def absolute_difference(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return pure(x, lambda a, b, c: c + np.where(a < b, b - a, a - b), f[1], f[1], f[1], f[1])


def ones(a: Any) -> Any:
    a = np.asarray(a)
    return np.bitwise_count(a).astype(U32)


def leading(a: Any) -> Any:
    """Return the number of leading zeros."""
    a = np.asarray(a)
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if a.dtype == U32 else 6]:
        a = a | (a >> a.dtype.type(shift))
    return U32(8 * a.dtype.itemsize) - ones(a)


def reverse(a: Any) -> Any:
    a = np.asarray(a)
    out = np.zeros_like(a)
    for i in range(8 * a.dtype.itemsize):
        out |= ((a >> a.dtype.type(i)) & a.dtype.type(1)) << a.dtype.type(8 * a.dtype.itemsize - 1 - i)
    return out


@form(r"(popc|clz|brev)\.(b32|b64)", INTEGER)
def bits_unary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run = {"popc": ones, "clz": leading, "brev": reverse}[f[1]]
    return pure(x, run, f[2] if f[1] == "brev" else "u32", f[2])


@form(r"bfind(\.shiftamt)?\.([us](?:32|64))", INTEGER)
def highest_bit(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    unsigned = np.dtype(f"u{dtype_of(f[2]).itemsize}")
    width = 8 * unsigned.itemsize

    def run(a: Any) -> Any:
        a = np.asarray(a)
        pattern = np.where(a < 0, ~a, a).astype(a.dtype).view(unsigned) if f[2][0] == "s" else a
        zeros = leading(pattern)
        place = zeros if f[1] else U32(width - 1) - zeros
        return np.where(zeros == width, U32(0xFFFFFFFF), place)

    return pure(x, run, "u32", f[2])


def low_bits(count: Any, dtype: Any) -> Any:
    """Return masks of the `count` lowest bits."""
    width = 8 * dtype.itemsize
    partial = (dtype.type(1) << np.minimum(count, width - 1).astype(dtype)) - dtype.type(1)
    return np.where(count >= width, ~dtype.type(0), partial)


@form(r"bfe\.([us](?:32|64))", INTEGER)
def extract(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype = dtype_of(f[1])
    width, unsigned = 8 * dtype.itemsize, np.dtype(f"u{dtype.itemsize}")

    def run(a: Any, position: Any, length: Any) -> Any:
        bits = np.asarray(a).view(unsigned)
        position = (np.asarray(position) & U32(255)).astype(np.int64)
        length = (np.asarray(length) & U32(255)).astype(np.int64)
        have = low_bits(np.clip(np.minimum(length, width - position), 0, width), unsigned)
        shifted = np.where(position < width, bits >> np.minimum(position, width - 1).astype(unsigned), unsigned.type(0))
        top = np.clip(position + length - 1, 0, width - 1).astype(unsigned)
        sign = (bits >> top) & unsigned.type(1) if f[1][0] == "s" else unsigned.type(0)
        fill = np.where((sign == 1) & (length > 0), ~have, unsigned.type(0))
        return ((shifted & have) | fill).view(dtype)

    return pure(x, run, f[1], f[1], "u32", "u32")


@form(r"bfi\.(b32|b64)", INTEGER)
def insert(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype = dtype_of(f[1])
    width = 8 * dtype.itemsize

    def run(a: Any, b: Any, position: Any, length: Any) -> Any:
        position = (np.asarray(position) & U32(255)).astype(np.int64)
        length = (np.asarray(length) & U32(255)).astype(np.int64)
        place = np.minimum(position, width - 1).astype(dtype)
        mask = low_bits(np.minimum(length, width), dtype) << place
        mask = np.where(position < width, mask, dtype.type(0))
        return (b & ~mask) | ((a << place) & mask)

    return pure(x, run, f[1], f[1], f[1], "u32", "u32")


@form(r"dp4a\.([us])32\.([us])32", INTEGER)
def dot4(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(a: Any, b: Any, c: Any) -> Any:
        total = np.asarray(c).astype(np.int64)
        for i in range(4):
            total = total + byte(a, i, f[1]) * byte(b, i, f[2])
        return total.astype(U32).view(dtype_of(f"{kind}32"))

    kind = "s" if "s" in (f[1], f[2]) else "u"
    return pure(x, run, f"{kind}32", "u32", "u32", f"{kind}32")


def byte(a: Any, i: int, sign: str) -> Any:
    value = ((np.asarray(a) >> U32(8 * i)) & U32(255)).astype(np.int64)
    return np.where(value > 127, value - 256, value) if sign == "s" else value


# ------------------------------------------------------------------------------------------------ logic
@form(r"(and|or|xor|not)\.(pred|b16|b32|b64)", LOGIC)
def logic(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run: Any = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert}[f[1]]
    return pure(x, run, f[2], *[f[2]] * (1 if f[1] == "not" else 2))


@form(r"cnot\.(b16|b32|b64)", LOGIC)
def logical_not(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return pure(x, lambda a: (np.asarray(a) == 0).astype(np.asarray(a).dtype), f[1], f[1])


@form(r"lop3\.b32", LOGIC)
def lop3(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    table = int(x.args[4], 0)
    minterms = [i for i in range(8) if table >> i & 1]

    def run(a: Any, b: Any, c: Any) -> Any:
        out = np.zeros_like(a | b | c)
        for i in minterms:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return out

    return pure(x, run, "b32", "b32", "b32", "b32", known=x.args[4])


@form(r"(shl|shr)\.([bus](?:16|32|64))", LOGIC)
def shift(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype = dtype_of(f[2])
    width = 8 * dtype.itemsize
    move = operator.lshift if f[1] == "shl" else operator.rshift
    if x.args[2].isdigit() and int(x.args[2]) < width:
        known = dtype.type(int(x.args[2]))
        return pure(x, lambda a, amount: move(a, known), f[2], f[2], "u32", known=x.args[2])

    def run(a: Any, amount: Any) -> Any:
        amount = np.asarray(amount)
        small = np.minimum(amount, U32(width - 1)).astype(dtype)
        if f[1] == "shl":
            return np.where(amount < width, a << small, dtype.type(0))
        return a >> small if dtype.kind == "i" else np.where(amount < width, a >> small, dtype.type(0))

    return pure(x, run, f[2], f[2], "u32")


@form(r"shf\.(l|r)\.(wrap|clamp)\.b32", LOGIC)
def funnel(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(low: Any, upper: Any, amount: Any) -> Any:
        amount = np.asarray(amount)
        amount = (amount & U32(31) if f[2] == "wrap" else np.minimum(amount, U32(32))).astype(U64)
        both = np.asarray(low, U64) | (np.asarray(upper, U64) << U64(32))
        return ((both << amount) >> U64(32) if f[1] == "l" else both >> amount).astype(U32)

    return pure(x, run, "b32", "b32", "b32", "u32")


# ------------------------------------------------------------------------------------------------ floats
def greater(a: Any, b: Any) -> Any:
    """Return max: a NaN operand loses, +0 is greater than -0."""
    out = np.fmax(a, b)
    return (
        out if count_nonzero(out) == np.size(out) else np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), out)
    )


def lesser(a: Any, b: Any) -> Any:
    out = np.fmin(a, b)
    return (
        out if count_nonzero(out) == np.size(out) else np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), out)
    )


def extreme(which: str, nan: bool, magnitude: bool = False) -> Callable[..., Any]:
    choose = greater if which == "max" else lesser

    def run(*operands: Any) -> Any:
        out = operands[0]
        for b in operands[1:]:
            if magnitude:
                a_wins = np.abs(out) > np.abs(b) if which == "max" else np.abs(out) < np.abs(b)
                tie = np.abs(out) == np.abs(b)
                out = np.where(tie | np.isnan(out) | np.isnan(b), choose(out, b), np.where(a_wins, out, b))
            else:
                out = choose(out, b)
        if nan:
            bad = np.isnan(operands[0])
            for b in operands[1:]:
                bad = bad | np.isnan(b)
            out = np.where(bad, np.asarray(out).dtype.type(np.nan), out)
        return out

    return run


@form(r"(min|max)(\.ftz)?(\.NaN)?(\.xorsign)?(\.abs)?\.(f32|f64|f16)", FLOAT)
def float_extreme(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    if f[4]:
        raise refuse(x, ".xorsign")
    run = extreme(f[1], bool(f[3]), bool(f[5]))
    return arithmetic(x, flushed(run) if f[2] else run, f[6], *[f[6]] * (len(x.args) - 1))


def arithmetic(x: PtxInstruction, run: Callable[..., Any], kind: str, *ins: str) -> PtxOp:
    """Return a pure form of numbers with the device's NaN: see `one_nan`."""
    return pure(x, lambda *operands: one_nan(run(*operands), operands), kind, *ins)


def flushed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Flush denormal operands and results to zero (.ftz)."""
    return lambda *operands: flush(run(*map(flush, operands)))


ARITHMETIC: dict[str, Any] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


@form(r"(add|sub|mul|div)(?:\.(rn|rz|rm|rp|full|approx))?(\.ftz)?(\.sat)?\.(f32|f64|f16)", FLOAT)
def float_binary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run = ARITHMETIC[f[1]]
    if f[2] in ("rz", "rm", "rp"):
        if f[5] != "f32":
            raise refuse(x, f".{f[2]}.{f[5]}")
        run = directed(f[1], f[2])
    run = flushed(run) if f[3] else run
    if f[4]:
        inner = run
        run = lambda a, b: unit(inner(a, b))  # noqa: E731
    return arithmetic(x, run, f[5], f[5], f[5])


def unit(values: Any) -> Any:
    """Clamp to [0, 1] (.sat): NaN and -0 give +0."""
    return np.nan_to_num(np.clip(values, 0, 1), nan=0.0) + np.asarray(values).dtype.type(0)


def directed(name: str, mode: str) -> Callable[..., Any]:
    """Return float32 arithmetic rounded toward zero, down or up."""

    def run(a: Any, b: Any) -> Any:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if name in ("add", "sub"):
            total = sum_to_odd(a, -b if name == "sub" else b)
            exact_zero = (total == 0) & ((a != 0) | (np.signbit(a) != np.signbit(-b if name == "sub" else b)))
            return np.where(exact_zero & (mode == "rm"), np.float32(-0.0), rounded(total, mode))
        return rounded(ARITHMETIC[name](a, b), mode)

    return run


@form(r"(add|sub|mul)(?:\.(rn))?\.(f16x2|bf16x2|bf16)", HALF)
def half_binary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return halves(x, f[3], ARITHMETIC[f[1]], 2)


@form(r"(min|max)(\.NaN)?\.(f16x2|bf16x2|bf16)", HALF)
def half_extreme(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return halves(x, f[3], extreme(f[1], bool(f[2])), 2)


@form(r"fma\.rn(\.relu)?\.(f16x2|bf16x2|bf16|f16)", HALF)
def half_fma(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    relu = (lambda a: np.where(np.isnan(a), a, np.maximum(a, np.float32(0)))) if f[1] else lambda a: a
    return halves(x, f[2], lambda a, b, c: relu(fma_to_odd(a, b, c)), 3)


@form(r"(neg|abs|ex2|tanh)(?:\.approx)?(?:\.ftz)?\.(f16x2|bf16x2|bf16|f16)", HALF)
def half_unary(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run: Any = {"neg": operator.neg, "abs": np.abs, "tanh": functions.tanh, "ex2": functions.exp2}[f[1]]
    return halves(x, f[2], run, 1)


def halves(x: PtxInstruction, kind: str, run: Callable[..., Any], count: int) -> PtxOp:
    """Apply `run` to float32 values of one or two 16-bit floats and round the results to nearest."""
    if not kind.endswith("x2"):
        bits = lambda a: np.atleast_1d(np.asarray(a, np.uint16))  # noqa: E731
        one = lambda *ops: encode(run(*(decode(bits(a), kind) for a in ops)), kind)  # noqa: E731
        return pure(x, one, "b16", *["b16"] * count)
    single = kind[:-2]

    def both(*operands: Any) -> Any:
        values = [decode(np.array(a, U32)[..., None].view(np.uint16), single) for a in operands]
        return encode(run(*values), single).view(U32)[..., 0]

    return pure(x, both, "b32", *["b32"] * count)


@form(r"(fma|mad)\.(rn|rz|rm|rp)(\.ftz)?(\.sat)?\.(f32|f64)", FLOAT)
def float_fma(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    if f[2] != "rn" or f[4] or f[5] == "f64":
        raise refuse(x, "this rounding, saturation or width")
    return arithmetic(x, flushed(fma) if f[3] else fma, "f32", "f32", "f32", "f32")


@form(r"(add|sub|mul|fma)(?:\.(rn|rz|rm|rp))?(\.ftz)?\.f32x2", FLOAT)
def packed(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Compute on two float32 in a 64-bit register (sm_100). Without a rounding modifier, rn."""
    nearest = f[2] in (None, "rn")
    if f[1] == "fma" and not nearest:
        raise refuse(x, "this rounding")
    run = fma if f[1] == "fma" else ARITHMETIC[f[1]] if nearest else directed(f[1], f[2])
    run = flushed(run) if f[3] else run

    def both(*operands: Any) -> Any:
        values = run(*[np.array(a, U64)[..., None].view(np.float32) for a in operands])
        return one_nan(values.reshape(-1)).reshape(values.shape).view(U64)[..., 0]

    return pure(x, both, "b64", *["b64"] * (len(x.args) - 1))


@form(r"(neg|abs|testp|copysign)(\.\w+)?\.(f32|f64)", FLOAT)
def float_sign(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    if f[1] == "copysign":  # copysign d, a, b: the sign of a, the magnitude of b
        return pure(x, lambda a, b: np.copysign(b, a), f[3], f[3], f[3])
    tests: dict[str, Any] = {"finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan}
    tests |= {"number": lambda a: ~np.isnan(a)}
    tests |= {"normal": lambda a: np.isfinite(a) & ((a == 0) | (np.abs(a) >= np.finfo(np.asarray(a).dtype).tiny))}
    tests |= {"subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(np.asarray(a).dtype).tiny)}
    if f[1] == "testp":
        return pure(x, tests[f[2][1:]], "pred", f[3])
    run: Any = operator.neg if f[1] == "neg" else np.abs
    return pure(x, flushed(run) if f[2] else run, f[3], f[3])


ONE = np.float32(1)
FUNCTIONS: dict[str, Any] = {
    "ex2": functions.exp2_with_denormals,
    "lg2": functions.log2,
    "rcp": lambda a: np.asarray(a).dtype.type(1) / a,
    "rsqrt": lambda a: ONE / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": functions.sin,
    "cos": functions.cos,
    "tanh": functions.tanh,
}


@form(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.(approx|rn)(\.ftz)?\.(f32|f64)", FLOAT)
def function(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    run = FUNCTIONS[f[1]]
    if f[3] and f[1] == "ex2":  # a denormal operand gives 1 either way
        return arithmetic(x, lambda a: flush_positive(functions.exp2(a)), f[4], f[4])
    return arithmetic(x, flushed(run) if f[3] else run, f[4], f[4])


def flush_positive(values: Any) -> Any:
    return np.where(values < np.float32(2.0**-126), np.float32(0), values)


# ------------------------------------------------------------------------------------------------ comparison
TESTS: dict[str, Any] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def comparison(name: str, floating: bool) -> Callable[..., Any]:
    if not floating:
        return TESTS[name]
    unordered = lambda a, b: np.isnan(a) | np.isnan(b)  # noqa: E731
    if name == "num":
        return lambda a, b: ~unordered(a, b)
    if name == "nan":
        return unordered
    if name.endswith("u") and name[:-1] in TESTS:
        test = TESTS[name[:-1]]
        return lambda a, b: test(a, b) | unordered(a, b)
    if name == "ne":
        return lambda a, b: (a != b) & ~unordered(a, b)
    return TESTS[name]


COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@form(r"setp\.(\w+)(?:\.(and|or|xor))?(\.ftz)?\.([busf](?:16|32|64)|bf16|f16x2|bf16x2)", COMPARE)
def compare(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    if f[4].endswith("x2"):
        raise refuse(x, f[4])
    kind = "b16" if f[4] in ("bf16", "f16") else f[4]
    test = comparison(f[1], "f" in f[4])
    if kind == "b16" and "f" in f[4]:
        inner, name = test, f[4]
        bits = lambda a: decode(np.atleast_1d(np.asarray(a, np.uint16)), name)  # noqa: E731
        test = lambda a, b: inner(bits(a), bits(b))  # noqa: E731
    if f[3]:
        plain = test
        test = lambda a, b: plain(flush(a), flush(b))  # noqa: E731
    first, _, second = x.args[0].partition("|")
    ins = [(x.args[1], kind), (x.args[2], kind)]
    if f[2]:
        ins.append((x.args[3], "pred"))

    def run(a: Any, b: Any, *other: Any) -> Any:
        holds = np.asarray(test(a, b))
        both = (holds, ~holds) if second else (holds,)
        if other:
            both = tuple(COMBINE[f[2]](value, other[0]) for value in both)
        return both if second else both[0]

    outs = tuple((register, "pred") for register in (first, second) if register)
    return PtxOp(run, outs, tuple(ins), alike=x.op)


@form(r"set\.(\w+)(\.ftz)?\.(u32|s32|f32)\.([busf](?:16|32|64))", COMPARE)
def compare_value(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    test, out = comparison(f[1], f[4][0] == "f"), dtype_of(f[3])
    true = out.type(1.0) if f[3] == "f32" else np.array(0xFFFFFFFF, U32).view(out)[()]
    return pure(x, lambda a, b: np.where(test(a, b), true, out.type(0)), f[3], f[4], f[4])


@form(r"selp\.([busf](?:16|32|64))", COMPARE)
def select(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return pure(x, lambda a, b, p: np.where(p, a, b), f[1], f[1], f[1], "pred")


@form(r"slct(\.ftz)?\.([busf](?:16|32|64))\.(s32|f32)", COMPARE)
def select_sign(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    sign = flush if f[1] else lambda c: c
    return pure(x, lambda a, b, c: np.where(sign(c) >= 0, a, b), f[2], f[2], f[2], f[3])
