"""Cases of wgmma: the shared memory that descriptors reach, the layout of fragments, the rounding of sums.

Shared memory holds random small integers everywhere, so a result shows which bytes were read, and no layout
formula is needed here. Sums are exact in f32 and f16. Only a case that names a tolerance has one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .case import Sketch, random
from .data import bell, double16, narrow, small

ISA = "Asynchronous Warpgroup Level Matrix Instructions: "
MODE = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes of the swizzle -> field at bit 62
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class OperandDescriptor:
    """A matrix descriptor. All in bytes: start in shared memory, leading and stride dimension offsets, swizzle span."""

    start: int = 0
    leading: int = 0
    stride: int = 0
    swizzle: int = 0
    base: int = 0

    def constant(self) -> int:
        """Return the descriptor without the address of the shared memory itself."""
        word = self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return word | self.base << 49 | MODE[self.swizzle] << 62


@dataclass(frozen=True)
class WgmmaForm:
    """One instruction form, executed `steps` times with descriptors that advance by `advance` bytes (A, B)."""

    n: int
    a: OperandDescriptor
    b: OperandDescriptor
    kinds: tuple[str, str] = ("bf16", "bf16")
    out: str = "f32"
    flags: tuple[int, int, int, int] = (1, 1, 0, 0)  # scale-a, scale-b, trans-a, trans-b
    registers: bool = False  # A in registers
    steps: int = 1
    advance: tuple[int, int] = (0, 0)
    accumulate: bool = True

    def op(self) -> str:
        depth = DEPTH[self.kinds[0]]
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{depth}.{self.out}.{self.kinds[0]}.{self.kinds[1]}"

    def accumulators(self) -> int:
        """Return the number of 32-bit accumulator registers per thread."""
        return self.n // 4 if self.out == "f16" else self.n // 2

    def form(self) -> str:
        side = "registers" if self.registers else place(self.a, self.flags[2])
        return f"{self.op().replace('.sync.aligned', '')} A={side} B={place(self.b, self.flags[3])}"


def place(operand: OperandDescriptor, transposed: int) -> str:
    return f"{'MN' if transposed else 'K'}-major {operand.swizzle or 'no'} swizzle"


def body(shape: WgmmaForm) -> str:
    lines = ["shr.u32 %t1, $smem, 4;", "cvt.u64.u32 %q1, %t1;"]
    lines += [f"mov.b32 %t2, {int(shape.accumulate)};", "setp.ne.u32 %p1, %t2, 0;"]
    imm = ""
    if shape.kinds[0] not in ("s8", "u8"):
        imm += f", {shape.flags[0]}, {shape.flags[1]}"
    if shape.kinds[0] in ("f16", "bf16"):
        imm += f", {shape.flags[3]}" if shape.registers else f", {shape.flags[2]}, {shape.flags[3]}"
    for step in range(shape.steps):
        a = replace(shape.a, start=shape.a.start + step * shape.advance[0]).constant()
        b = replace(shape.b, start=shape.b.start + step * shape.advance[1]).constant()
        lines += [f"add.s64 %q{2 + 2 * step}, %q1, {a:#x};", f"add.s64 %q{3 + 2 * step}, %q1, {b:#x};"]
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(shape.steps):
        a_text = "$a" if shape.registers else f"%q{2 + 2 * step}"
        accumulators = "$x" if shape.accumulators() > 1 else "{$x}"
        lines.append(f"{shape.op()} {accumulators}, {a_text}, %q{3 + 2 * step}, %p1{imm};")
        if not shape.accumulate and step == 0 and shape.steps > 1:
            lines.append("setp.eq.u32 %p1, %t2, 0;")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"])


def sketch(name: str, shape: WgmmaForm, image: np.ndarray, **more: object) -> Sketch:
    """Return the sketch of a case. The accumulators start with small integers."""
    count = shape.accumulators()
    values = random(name + "start").randint(-4, 5, (128, count * (2 if shape.out == "f16" else 1)))
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[shape.out]
    start = values.astype(dtype).view(np.uint32).reshape(128, count)
    start = start if count > 1 else start[:, 0].copy()
    ins: tuple[np.ndarray, ...] = ()
    if shape.registers:
        fragment = more.pop("fragment", None)
        if fragment is None:
            fragment = (
                small(name + "a", 128 * 16 // WIDTH[shape.kinds[0]], shape.kinds[0]).view(np.uint32).reshape(128, 4)
            )
        assert isinstance(fragment, np.ndarray)
        ins = (fragment,)
    form = str(more.pop("form", shape.form()))
    options = dict(inout=True, threads=128, real=shape.out if shape.out != "s32" else "") | more
    return Sketch(name, form, ISA + "wgmma.mma_async", body(shape), ins, (start,), image=image, **options)  # type: ignore[arg-type]


def integers(name: str, size: int, kind: str) -> np.ndarray:
    return small(name, size // WIDTH[kind], kind)


# Operands that reach 64 rows (A) or up to 256 (B) of one instruction's depth. K-major: 8 rows of a swizzle span follow
# each other, groups of 8 are `stride` apart. Without swizzle, 8 rows of 16 bytes are a core matrix; `leading` is the
# offset of the next one along k.
K_MAJOR = {span: OperandDescriptor(0, 16, 8 * span, span) for span in (32, 64, 128)} | {
    0: OperandDescriptor(0, 128, 256)
}
# MN-major: a row of one k is a span of M or N; `leading` is the offset of the next span, `stride` of the next 8 k.
MN_MAJOR = {span: OperandDescriptor(0, 16 * span, 8 * span, span) for span in (32, 64, 128)} | {
    0: OperandDescriptor(0, 1024, 128)
}


BEHIND = replace(K_MAJOR[128], start=8192)  # an operand behind one that begins at 0


def drawn(name: str, shape: WgmmaForm, size: int, form: str = "") -> Sketch:
    """Return the sketch of a case. Its shared memory has `size` bytes of small random integers."""
    return sketch(name, shape, integers(name, size, shape.kinds[1]), **({"form": form} if form else {}))


def plain() -> Iterator[Sketch]:
    """Yield cases of types and widths: 128-byte swizzle, K-major."""
    for kinds, out, n in (
        (("bf16", "bf16"), "f32", 8),
        (("bf16", "bf16"), "f32", 24),
        (("bf16", "bf16"), "f32", 64),
        (("bf16", "bf16"), "f32", 256),
        (("f16", "f16"), "f32", 16),
        (("f16", "f16"), "f16", 8),
        (("f16", "f16"), "f16", 64),
        (("f16", "f16"), "f16", 128),
        (("tf32", "tf32"), "f32", 32),
        (("e4m3", "e4m3"), "f32", 32),
        (("e4m3", "e5m2"), "f32", 32),
        (("e5m2", "e4m3"), "f32", 32),
        (("e5m2", "e5m2"), "f32", 16),
        (("e4m3", "e4m3"), "f16", 32),
        (("s8", "s8"), "s32", 32),
        (("u8", "s8"), "s32", 16),
    ):
        shape = WgmmaForm(n, K_MAJOR[128], BEHIND, kinds, out)
        name = f"{shape.op()} shared"
        image = np.concatenate([integers(name, 8192, kinds[0]), integers(name + "b", max(n, 8) * 128, kinds[1])])
        yield sketch(name, shape, image)
        if n <= 64:
            name = f"{shape.op()} registers"
            image = integers(name, 8192 + max(n, 8) * 128, kinds[1])
            yield sketch(name, replace(shape, registers=True), image)


def layouts() -> Iterator[Sketch]:
    """Yield cases of layouts: both majors of both operands, all swizzles, offsets with gaps in between."""
    for kind in ("bf16", "tf32", "e4m3"):
        for span in (0, 32, 64, 128):
            gap = replace(K_MAJOR[span], stride=K_MAJOR[span].stride + 1024 - 8 * span % 1024 if span else 384)
            for label, a in (("packed", K_MAJOR[span]), ("gaps", gap)):
                shape = WgmmaForm(32, a, replace(a, start=16384), (kind, kind))
                yield drawn(f"layout {kind} K-major swizzle {span} {label}", shape, 32768)
    for span in (0, 32, 64, 128):
        for trans in ((1, 0), (0, 1), (1, 1)):
            pair = [(MN_MAJOR if t else K_MAJOR)[span] for t in trans]
            shape = WgmmaForm(64, pair[0], replace(pair[1], start=16384), ("bf16", "bf16"), flags=(1, 1, *trans))
            yield drawn(f"layout bf16 swizzle {span} trans {trans[0]} {trans[1]}", shape, 32768)
        odd = OperandDescriptor(0, 2048 + 1024, 1024, span) if span else OperandDescriptor(0, 2048, 256)
        shape = WgmmaForm(128, odd, replace(odd, start=16384), ("f16", "f16"), flags=(1, 1, 1, 1))
        yield drawn(f"layout f16 MN-major swizzle {span} gaps", shape, 49152)
        swapped = OperandDescriptor(0, odd.stride, odd.leading, span)
        shape = WgmmaForm(32, swapped, replace(swapped, start=16384), ("f16", "f16"), flags=(1, 1, 1, 1))
        yield drawn(f"layout f16 MN-major swizzle {span} offsets swapped", shape, 32768)
        shape = WgmmaForm(96, OperandDescriptor(), replace(MN_MAJOR[span]), flags=(1, 1, 0, 1), registers=True)
        yield drawn(f"layout bf16 A registers B MN-major swizzle {span}", shape, 16384)


def steps() -> Iterator[Sketch]:
    """Yield cases of several k steps: the start address advances inside a swizzle atom, or over atoms if MN-major."""
    for span in (32, 64, 128):
        a = K_MAJOR[span]
        shape = WgmmaForm(16, a, replace(a, start=8192), steps=span // 32, advance=(32, 32))
        yield drawn(f"steps K-major swizzle {span}", shape, 16384)
    shape = WgmmaForm(16, K_MAJOR[128], BEHIND, ("e4m3", "e4m3"), steps=4, advance=(32, 32))
    yield sketch("steps e4m3 swizzle 128", shape, integers("steps e4m3", 16384, "e4m3"))
    shape = WgmmaForm(16, K_MAJOR[128], MN_MAJOR[128], steps=4, advance=(32, 2048), flags=(1, 1, 0, 1))
    shape = replace(shape, b=replace(shape.b, start=8192), n=64)
    yield sketch("steps B MN-major swizzle 128", shape, integers("steps MN", 16384, "bf16"))
    bare = OperandDescriptor(0, 128, 1024)
    shape = WgmmaForm(16, bare, replace(bare, start=8192), steps=4, advance=(256, 256))
    yield sketch("steps K-major no swizzle", shape, integers("steps none", 16384, "bf16"))
    for rows in (1, 4):
        start = 128 * rows
        a = replace(K_MAJOR[128], start=start, base=rows)
        shape = WgmmaForm(16, a, replace(K_MAJOR[128], start=12288))
        form = "wgmma.mma_async descriptor base offset"
        yield sketch(f"base offset {rows}", shape, integers(f"base offset {rows}", 16384, "bf16"), form=form)
        shape = replace(shape, a=replace(a, base=0))
        form = "wgmma.mma_async start inside a swizzle repeat, base offset 0"
        yield sketch(f"no base offset {rows}", shape, integers(f"base offset {rows}", 16384, "bf16"), form=form)


def flags() -> Iterator[Sketch]:
    """Yield cases of imm-scale, scale-d, chained accumulation, groups."""
    for a_scale, b_scale in ((-1, 1), (1, -1), (-1, -1)):
        shape = WgmmaForm(8, K_MAJOR[128], BEHIND, flags=(a_scale, b_scale, 0, 0))
        yield drawn(f"imm-scale {a_scale} {b_scale}", shape, 16384, form="wgmma.mma_async imm-scale-a, imm-scale-b")
    shape = WgmmaForm(8, K_MAJOR[128], BEHIND, flags=(-1, 1, 0, 0), registers=True)
    yield sketch(
        "imm-scale registers", shape, integers("imm", 16384, "bf16"), form="wgmma.mma_async imm-scale-a, imm-scale-b"
    )
    for out, kind in (("f32", "bf16"), ("f16", "f16")):
        shape = WgmmaForm(
            16, K_MAJOR[64], replace(K_MAJOR[64], start=8192), (kind, kind), out, accumulate=False, steps=2
        )
        shape = replace(shape, advance=(32, 32))
        yield drawn(f"scale-d {out}", shape, 16384, form=f"wgmma.mma_async scale-d, D {out}")


def rounding() -> Iterator[Sketch]:
    """Yield random numbers, special values and cancellation; the ISA leaves the order and rounding of sums open."""
    for kind in ("bf16", "f16", "tf32"):
        values = bell(random("rounding" + kind), 16384 // WIDTH[kind]).astype(np.float32)
        image = (values if kind == "tf32" else narrow(values, kind)).view(np.uint8)
        shape = WgmmaForm(16, K_MAJOR[128], BEHIND, (kind, kind), steps=4, advance=(32, 32), accumulate=False)
        name = f"rounding {kind}"
        yield sketch(name, shape, image, form=f"wgmma.mma_async {kind} rounding")
    for kind, out, tolerance in (("e4m3", "f32", 0.0), ("e5m2", "f32", 0.0), ("e4m3", "f16", 2.0**-9)):
        codes = random("rounding" + kind).randint(0, 256, 16384).astype(np.uint8) & np.uint8(0xBF)  # below 2
        shape = WgmmaForm(16, K_MAJOR[128], BEHIND, (kind, kind), out, steps=4, advance=(32, 32), accumulate=False)
        name = f"rounding {kind} {out}"
        more = dict(tolerance=tolerance, floor=8.0)
        yield sketch(name, shape, codes, form=f"wgmma.mma_async {kind}, D {out}, rounding", **more)
    halves = narrow(bell(random("rounding f16 f16"), 8192), "f16").view(np.uint8)
    shape = WgmmaForm(16, K_MAJOR[128], BEHIND, ("f16", "f16"), "f16", steps=4, advance=(32, 32), accumulate=False)
    more = dict(tolerance=2.0**-8, floor=4.0)
    yield sketch("rounding f16 f16", shape, halves, form="wgmma.mma_async f16, D f16, rounding", **more)
    for kind in ("bf16", "f16"):
        special = double16("wgmma special" + kind).view(np.uint8)
        image = np.tile(integers("special" + kind, 1024, kind), 16)
        for i in range(6):  # rows of A with 16-byte chunks that the swizzle leaves in place
            image[1024 * i : 1024 * i + 12] = special[24 * i : 24 * i + 12]
        shape = WgmmaForm(8, K_MAJOR[128], BEHIND, (kind, kind))
        more = dict(tolerance=2.0**-16, floor=1e-30)
        yield sketch(
            f"special values {kind}", shape, image, form=f"wgmma.mma_async {kind} NaN, infinity, denormals", **more
        )
    denormal = np.tile(np.array([0x0001, 0x0003, 0x8002, 0x03FF], np.uint16), 2048).view(np.uint8).copy()
    denormal[8192:] = integers("denormal", 8192, "f16")
    shape = WgmmaForm(8, K_MAJOR[128], BEHIND, ("f16", "f16"), accumulate=False)
    yield sketch("denormals f16", shape, denormal, form="wgmma.mma_async f16 NaN, infinity, denormals")


def groups() -> Iterator[Sketch]:
    """Yield cases of wait_group with a group left open, and of two groups over different accumulators."""
    shape = WgmmaForm(8, K_MAJOR[128], BEHIND)
    text = body(shape).splitlines()
    mma = next(line for line in text if line.startswith("wgmma.mma"))
    second = mma.replace("$x", "$y").replace("%q2", "%q4")
    extra = f"add.s64 %q4, %q1, {replace(shape.a, start=32).constant():#x};"
    lines = [extra if line.startswith("wgmma.fence") else line for line in text[:-3]]
    lines = [*lines, "wgmma.fence.sync.aligned;", mma, "wgmma.commit_group.sync.aligned;", second]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]
    lines += [f"add.f32 $x{i}, $x{i}, 0f3F800000;" for i in range(4)] + ["wgmma.wait_group.sync.aligned 0;"]
    outs = tuple(np.zeros((128, 4), np.uint32) for _ in range(2))
    name = "wgmma.commit_group, wgmma.wait_group 1"
    image = integers(name, 16384, "bf16")
    yield Sketch(name, name, ISA + "wgmma.wait_group", "\n".join(lines), (), outs, image=image, inout=True, threads=128)


def sketches() -> Iterator[Sketch]:
    for family in (plain, layouts, steps, flags, rounding, groups):
        yield from family()
