"""Forms that move and convert registers: mov, prmt, cvt, cvta, mapa."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .alu import unit
from .forms import PtxOp, effect, form, pure, refuse
from .machine import PARAMS, WINDOW, Threads
from .numbers import LARGEST, decode, encode, flush, truncate
from .parse import PtxInstruction, vector
from .shared import RANK
from .translate import dtype_of

MOVE = "Data Movement and Conversion Instructions"
U32, U64 = np.uint32, np.uint64


@form(r"mov\.(pred|[busf](?:16|32|64|128))", f"{MOVE}: mov")
def move(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    into, out_of = vector(x.args[0]), vector(x.args[1])
    if x.args[0].startswith("{"):
        return unpack(x, f[1], into)
    if x.args[1].startswith("{"):
        bits = int(f[1].lstrip("busf"))
        width = bits // len(out_of)
        dtype = dtype_of(f"u{bits}")
        join = lambda *parts: packed(parts, dtype_of(f"u{width}")).view(dtype)[..., 0]  # noqa: E731
        return PtxOp(join, ((x.args[0], f"b{bits}"),), tuple((part, f"b{width}") for part in out_of))
    return pure(x, np.array, f[1], f[1])  # a copy: registers are views of the register file


def packed(parts: tuple[Any, ...], dtype: Any) -> np.ndarray:
    """Return the elements of the parts, side by side in a last dimension."""
    out = np.empty((*np.broadcast(*parts).shape, len(parts)), dtype)
    for i, part in enumerate(parts):
        out[..., i] = part
    return out


def unpack(x: PtxInstruction, kind: str, into: list[str]) -> PtxOp:
    bits = int(kind.lstrip("busf"))
    width = bits // len(into)
    part = dtype_of(f"u{width}")

    def run(a: Any) -> Any:
        return tuple(np.array(np.array(a)[..., None].view(part).T, order="C"))

    if x.args[1].startswith("{"):
        raise refuse(x, "vector to vector")
    return PtxOp(run, tuple((register, f"b{width}") for register in into), ((x.args[1], f"b{bits}"),))


@form(r"prmt\.b32(?:\.(f4e|b4e|rc8|ecl|ecr|rc16))?", f"{MOVE}: prmt")
def permute(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Choose bytes of {b, a} by the selector; bit 3 of a choice replicates the byte's sign."""

    def run(a: Any, b: Any, choice: Any) -> Any:
        source = np.asarray(a, U64) | (np.asarray(b, U64) << U64(32))
        choice = np.asarray(choice, U32)
        out = U32(0)
        for i in range(4):
            place, sign = nibble(f[1], choice, i)
            value = (source >> (place * U64(8))) & U64(255)
            value = np.where(sign, np.where(value & U64(128), U64(255), U64(0)), value)
            out = out | (value.astype(U32) << U32(8 * i))
        return out

    choice = x.args[3].rstrip("U")
    if f[1] or choice.startswith("%") or int(choice, 0) & 0x8888:
        return pure(x, run, "b32", "b32", "b32", "b32")
    places = [int(choice, 0) >> 4 * i & 7 for i in range(4)]

    def known(a: Any, b: Any) -> Any:
        return packed((a, b), U32).view(np.uint8).take(places, -1).view(U32)[..., 0]

    return pure(x, known, "b32", "b32", "b32", known=x.args[3])


def nibble(mode: str | None, choice: Any, i: int) -> tuple[Any, Any]:
    """Return (source byte, whether to replicate its sign) of byte i of the result."""
    if mode is None:
        part = choice >> U32(4 * i)
        return (part & U32(7)).astype(U64), (part & U32(8)) != 0
    n = (choice & U32(3)).astype(np.int64)
    place = {
        "f4e": n + i,
        "b4e": (n - i) % 8,
        "rc8": n,
        "ecl": np.maximum(n, i),
        "ecr": np.minimum(n, i),
        "rc16": (n & 1) * 2 + i % 2,
    }[mode]
    return place.astype(U64), np.False_


# ------------------------------------------------------------------------------------------------ cvt
ROUND: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_KIND = r"[us](?:8|16|32|64)|f16|f32|f64|bf16|tf32"
CVT = f"{MOVE}: cvt"
TF32_LARGEST = np.array(0x7F7FE000, U32).view(np.float32)[()]


@form(rf"cvt(?:\.(rni|rzi|rmi|rpi|rna|rn|rz|rm|rp))?(\.relu)?(\.ftz)?(\.satfinite|\.sat)?\.({_KIND})\.({_KIND})", CVT)
def convert(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    mode, relu, ftz, sat, to, source = f.groups()
    if to == "tf32":
        return pure(x, tf32(mode, bool(relu), sat == ".satfinite"), "b32", "f32")
    if to in ("bf16", "f16") and source == "f32" and (mode in ("rm", "rp") or sat == ".sat"):
        raise refuse(x, f"{mode} or .sat to 16 bits")
    if to in ("bf16", "f16") and source == "f32":
        return pure(x, narrowing(to, mode, bool(relu), sat == ".satfinite"), "b16", "f32")
    if source in ("bf16", "f16") and to in ("f32", "f64"):
        wide = np.float32 if to == "f32" else np.float64
        return pure(x, lambda a: decode(np.atleast_1d(a), source).astype(wide), to, "b16")
    if "bf16" in (to, source) or relu:
        raise refuse(x, "this pair of types")
    if to[0] == "f":
        if mode in ("rz", "rm", "rp"):
            raise refuse(x, f".{mode}")
        dtype = dtype_of(to)
        whole = ROUND.get(mode or "", lambda a: a)
        run = lambda a: whole(np.asarray(a)).astype(dtype)  # noqa: E731
        if sat:
            plain = run
            run = lambda a: unit(plain(a))  # noqa: E731
        return pure(x, (lambda a: flush(run(flush(a)))) if ftz else run, to, source)
    if source[0] == "f":
        run = to_integer(to, ROUND[mode or "rzi"])
        return pure(x, (lambda a: run(flush(a))) if ftz else run, to, source)
    if sat:
        bounds = np.iinfo(dtype_of(to))
        clip = lambda a: np.clip(np.asarray(a).astype(object), bounds.min, bounds.max).astype(bounds.dtype)  # noqa: E731
        return pure(x, clip, to, source)
    dtype = dtype_of(to)
    return pure(x, lambda a: np.asarray(a).astype(dtype), to, source)


def to_integer(to: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion that saturates; NaN gives 0 for types below 64 bits, and only the top bit for 64 bits."""
    bounds = np.iinfo(dtype_of(to))

    def run(a: Any) -> Any:
        a = whole(np.asarray(a, np.float64))
        low, high = a <= float(bounds.min), a >= float(bounds.max)
        inside = np.where(low | high | np.isnan(a), 0.0, a).astype(bounds.dtype)
        out = np.where(low, bounds.dtype.type(bounds.min), np.where(high, bounds.dtype.type(bounds.max), inside))
        nan = bounds.dtype.type(0)
        if bounds.bits == 64:
            nan = np.array(1 << 63, U64).view(bounds.dtype)[()]
        return np.where(np.isnan(a), nan, out)

    return run


def tf32(mode: str | None, relu: bool, satfinite: bool) -> Callable[..., Any]:
    """Return a conversion to the 19 bits of tf32: rna rounds halves away from zero."""

    def run(a: Any) -> Any:
        a = np.atleast_1d(np.asarray(a, np.float32))
        if relu:
            a = np.where(np.isnan(a), a, np.maximum(a, np.float32(0)) + np.float32(0))
        if satfinite:
            a = np.clip(a, -TF32_LARGEST, TF32_LARGEST)
        bits = a.view(U32)
        if mode == "rn":
            bits = bits + U32(0xFFF) + ((bits >> U32(13)) & U32(1))
        elif mode == "rna":
            bits = bits + U32(0x1000)
        return np.where(np.isnan(a), U32(0x7FFFFFFF), bits & U32(0xFFFFE000))

    return run


def narrowing(to: str, mode: str | None, relu: bool, satfinite: bool) -> Callable[..., Any]:
    def run(a: Any) -> Any:
        a = np.atleast_1d(np.asarray(a, np.float32))
        if relu:
            a = np.where(np.isnan(a), a, np.maximum(a, np.float32(0)))
        if satfinite:
            a = np.clip(a, np.float32(-LARGEST[to]), np.float32(LARGEST[to]))
        return truncate(a, to) if mode == "rz" else encode(a, to)

    return run


@form(r"cvt\.pack\.sat\.([su](?:8|16))\.s32(\.b32)?", f"{CVT}.pack")
def convert_and_pack(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Convert two integers, saturated, to the low bits of d: b lowest. Bytes leave room for the low half of c above."""
    dtype = dtype_of(f[1])
    bounds, low = np.iinfo(dtype), dtype_of(f"u{f[1][1:]}")

    def join(a: Any, b: Any, c: Any = 0) -> Any:
        a, b = (np.clip(np.atleast_1d(t), bounds.min, bounds.max).astype(low).astype(U32) for t in (a, b))
        return b | a << U32(bounds.bits) | np.asarray(c, U32) << U32(16)

    return pure(x, join, "b32", "s32", "s32", *(["b32"] if f[2] else []))


@form(r"cvt\.(rn|rz)(\.relu)?(\.satfinite)?\.(f16x2|bf16x2)\.f32", CVT)
def convert_pair(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Convert and pack: d = {high: a, low: b}."""
    one = narrowing(f[4][:-2], f[1], bool(f[2]), bool(f[3]))
    return pure(x, lambda a, b: one(packed((b, a), np.float32)).view(U32)[..., 0], "b32", "f32", "f32")


@form(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2)\.(f32|f16x2)", CVT)
def convert_narrow(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    kind = f[2][:-2]

    def one(a: Any) -> Any:
        a = np.atleast_1d(np.asarray(a, np.float32))
        if f[1]:
            a = np.where(np.isnan(a), a, np.maximum(a, np.float32(0)))
        if kind in ("e2m1", "e2m3", "e3m2"):
            a = np.where(np.isnan(a), np.float32(LARGEST[kind]), a)
        return encode(a, kind, saturate=True)

    def join(high: Any, low: Any) -> Any:
        if kind == "e2m1":
            return ((one(high) << np.uint8(4)) | (one(low) & np.uint8(15))).astype(np.uint16)
        return (one(high).astype(np.uint16) << np.uint16(8)) | one(low)

    if f[3] == "f32":
        return pure(x, join, "b8" if kind == "e2m1" else "b16", "f32", "f32")
    from_pair = lambda a: join(*reversed(halves(a)))  # noqa: E731
    return pure(x, from_pair, "b16", "b32")


def halves(a: Any) -> tuple[Any, Any]:
    a = np.atleast_1d(np.asarray(a, U32))
    return decode((a & U32(0xFFFF)).astype(np.uint16), "f16"), decode((a >> U32(16)).astype(np.uint16), "f16")


@form(r"cvt\.rn(\.relu)?\.(f16x2|bf16x2)\.(e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2|ue8m0x2)", CVT)
def convert_wide(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Widen pairs. Every value of the narrow formats is exact in f16, and every value of ue8m0 in bf16."""
    kind, to = f[3][:-2], f[2][:-2]
    table = wide_pairs(kind, to, bool(f[1]))
    return pure(x, lambda a: table[a], "b32", "b8" if kind == "e2m1" else "b16")


@cache
def wide_pairs(kind: str, to: str, relu: bool) -> np.ndarray:
    """Return the widened pairs of all bits that a pair can have."""
    if kind == "e2m1":
        one = np.arange(256) & 15, np.arange(256) >> 4
    else:
        one = np.arange(65536) & 255, np.arange(65536) >> 8
    values = decode(np.stack(one, 1).astype(np.uint8), kind)
    if relu:
        values = np.where(np.isnan(values), values, np.maximum(values, np.float32(0)))
    return encode(values, to).view(U32)[:, 0]


@form(r"cvt\.(rz|rp)(\.satfinite)?\.ue8m0x2\.(f32|bf16x2)", CVT)
def convert_scale(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Convert to powers of two: the exponent of the magnitude, rounded toward zero or up."""

    def one(a: Any) -> Any:
        bits = np.atleast_1d(np.asarray(a, np.float32)).view(U32) & U32(0x7FFFFFFF)
        exponent = bits >> U32(23)
        if f[1] == "rp":
            exponent = exponent + ((bits & U32(0x7FFFFF)) != 0)
        return np.where(bits > U32(0x7F800000), U32(255), np.minimum(exponent, U32(254))).astype(np.uint16)

    if f[3] != "f32":
        raise refuse(x, f[3])
    return pure(x, lambda a, b: (one(a) << np.uint16(8)) | one(b), "b16", "f32", "f32")


# ------------------------------------------------------------------------------------------------ addresses
@form(r"cvta(\.to)?\.(global|shared(?:::cta|::cluster)?|param|const|local)\.(u32|u64)", f"{MOVE}: cvta")
def generic(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Convert to generic addresses: global ones are unchanged, shared ones and parameters have a window each."""
    if f[2] in ("const", "local"):
        raise refuse(x, f".{f[2]}")
    if not f[2].startswith("shared"):
        return pure(x, lambda a: np.array(a), f[3], f[3])
    wide = lambda a: np.asarray(a).astype(U64)  # noqa: E731
    if f[1]:
        return pure(x, lambda a: wide(a) - U64(WINDOW), f[3], f[3])
    return pure(x, lambda a: wide(a) + U64(WINDOW), f[3], f[3])


@form(r"mapa(\.shared::cluster)?\.(u32|u64)", f"{MOVE}: mapa")
def map_address(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Return the address of the same variable in the shared memory of the CTA with rank b."""

    def run(t: Threads, x: PtxInstruction, a: Any, rank: Any) -> Any:
        if (rank >= t.machine.cluster_size).any():
            raise refuse(x, f"rank {int(rank.max())} in a cluster of {t.machine.cluster_size} CTAs")
        inside = a & a.dtype.type((1 << RANK) - 1)
        return (
            inside
            | (rank.astype(a.dtype) << a.dtype.type(RANK))
            | (a.dtype.type(WINDOW) if f[1] is None else a.dtype.type(0))
        )

    return effect(run, (x.args[1], f[2]), (x.args[2], "u32"), outs=((x.args[0], f[2]),))


@form(r"getctarank(\.shared::cluster)?\.(u32|u64)", f"{MOVE}: getctarank")
def rank_of(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return pure(
        x,
        lambda a: ((np.asarray(a) >> np.asarray(a).dtype.type(RANK)) & np.asarray(a).dtype.type(255)).astype(U32),
        "u32",
        f[2],
    )


@form(r"isspacep\.(global|shared(?:::cta|::cluster)?|param|local|const)", f"{MOVE}: isspacep")
def in_space(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(a: Any) -> Any:
        shared = (np.asarray(a) >= WINDOW) & (np.asarray(a) < PARAMS)
        if f[1].startswith("shared"):
            return shared
        return ~shared if f[1] == "global" else np.zeros_like(shared)

    return pure(x, run, "pred", "u64")
