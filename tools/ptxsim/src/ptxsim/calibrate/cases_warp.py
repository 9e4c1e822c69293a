"""Cases of instructions of a whole warp: shuffles, votes, reductions, matrix fragments."""

from collections.abc import Iterator

import numpy as np

from .case import Sketch, elementwise, named, random
from .data import bell, double16, small

M, P = "Data Movement Instructions: ", "Parallel Synchronization Instructions: "
X = "Warp-Level Matrix Instructions: "
FULL = "0xffffffff"


def words(name: str, rows: int = 64, high: int = 1 << 32) -> np.ndarray:
    return random(name).randint(0, high, rows, dtype=np.uint64).astype(np.uint32)


def shuffles() -> Iterator[Sketch]:
    """Yield cases of shuffles: distances from registers; widths through bits 8 to 12 of the clamp operand; the
    predicate flips bit 31."""
    values, lanes = words("shfl"), words("shfl lanes", high=40)
    for kind in ("up", "down", "bfly", "idx"):
        for width in (32, 16, 8, 4):
            clamp = (0 if kind == "up" else 31) | (32 - width) << 8
            op = f"shfl.sync.{kind}.b32 $x|%p1, $a, $b, {clamp}, {FULL};\n@%p1 xor.b32 $x, $x, 0x80000000;"
            name = f"shfl.sync.{kind} width {width}"
            yield named(M + "shfl.sync", f"shfl.sync.{kind}.b32 d|p", op, (values, lanes), name=name)
        clamp = 2 if kind == "up" else 11
        op = f"shfl.sync.{kind}.b32 $x|%p1, $a, 3, {clamp}, {FULL};\n@%p1 xor.b32 $x, $x, 0x80000000;"
        yield named(M + "shfl.sync", f"shfl.sync.{kind}.b32 d|p", op, (values,), name=f"shfl.sync.{kind} clamp")
    op = """and.b32 %t1, $tid, 16;
        setp.eq.u32 %p1, %t1, 0;
        mov.b32 $x, 7;
        @%p1 bra LOW;
        shfl.sync.idx.b32 $x, $a, $b, 31, 0xffff0000;
        bra.uni BOTH;
        LOW:
        shfl.sync.bfly.b32 $x, $a, 5, 31, 0xffff;
        BOTH:"""
    data = (values, np.uint32(16) + lanes % np.uint32(16))
    yield named(M + "shfl.sync", "shfl.sync with part of the warp", op, data, name="shfl.sync parts")


def votes() -> Iterator[Sketch]:
    value = np.concatenate([np.zeros(32), np.ones(32), words("vote", 64) % 2]).astype(np.uint32)
    for kind in ("all", "any", "uni"):
        op = f"setp.ne.u32 %p1, $a, 0;\nvote.sync.{kind}.pred %p2, %p1, {FULL};\nselp.b32 $x, 1, 0, %p2;"
        yield named(P + "vote.sync", f"vote.sync.{kind}.pred", op, (value,))
    for sign in ("", "!"):
        op = f"setp.ne.u32 %p1, $a, 0;\nvote.sync.ballot.b32 $x, {sign}%p1, {FULL};"
        yield named(P + "vote.sync", "vote.sync.ballot.b32", op, (value,), name=f"vote.sync.ballot.b32{sign}")
    op = """setp.ne.u32 %p1, $a, 0;
        mov.b32 $x, 9;
        setp.lt.u32 %p2, $tid, 11;
        @!%p2 bra DONE;
        vote.sync.ballot.b32 $x, %p1, 0x7ff;
        vote.sync.all.pred %p3, %p1, 0x7ff;
        @%p3 or.b32 $x, $x, 0x80000000;
        DONE:"""
    yield named(P + "vote.sync", "vote.sync with a member mask", op, (value[64:96],))
    few = words("match", 64, 4)
    yield named(P + "match.sync", "match.any.sync.b32", f"match.any.sync.b32 $x, $a, {FULL};", (few,))
    form = "match.any.sync.b64"
    data = few.astype(np.uint64) << np.uint64(33)
    op = f"{form} %t1, $a, {FULL};\nmov.b64 $x, {{%t1, %t1}};"
    yield named(P + "match.sync", form, op, (data,), np.uint64)
    op = f"match.all.sync.b32 $x|%p1, $a, {FULL};\n@%p1 xor.b32 $x, $x, 5;"
    data32 = np.concatenate([few, np.full(32, 3, np.uint32)])
    yield named(P + "match.sync", "match.all.sync.b32 d|p", op, (data32,))


def reductions() -> Iterator[Sketch]:
    value = words("redux")
    for op in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"):
        yield named(P + "redux.sync", f"redux.sync.{op}", f"redux.sync.{op} $x, $a, {FULL};", (value,))
    op = """mov.b32 $x, 1;
        setp.gt.u32 %p1, $tid, 20;
        @!%p1 bra DONE;
        redux.sync.max.s32 $x, $a, 0xffe00000;
        DONE:"""
    yield named(P + "redux.sync", "redux.sync with a member mask", op, (value[:32],))
    form = "elect.sync"
    op = f"elect.sync $x|%p1, {FULL};\nselp.b32 %t1, 256, 0, %p1;\nadd.u32 $x, $x, %t1;"
    yield named(P + form, form, op, (value,))
    op = """mov.b32 $x, 1;
        and.b32 %t2, $tid, 6;
        setp.eq.u32 %p2, %t2, 4;
        @!%p2 bra DONE;
        activemask.b32 %t3;
        elect.sync $x|%p1, 0x30303030;
        @%p1 add.u32 $x, $x, 256;
        xor.b32 $x, $x, %t3;
        DONE:"""
    yield named(P + "activemask", "activemask, elect.sync with a member mask", op, (value[:32],))
    masks = "\n".join(
        f"mov.u32 %t1, %lanemask_{kind};\nmad.lo.u32 $x, $x, 3, %t1;" for kind in ("eq", "le", "lt", "ge", "gt")
    )
    form = "%lanemask_eq, le, lt, ge, gt, %laneid"  # %warpid is any number on hardware
    op = f"""mov.b32 $x, $a;
        {masks}
        mov.u32 %t1, %laneid;
        mad.lo.u32 $x, %t1, 1000, $x;"""
    yield named("Special Registers", form, op, (value,))


def staged() -> Iterator[Sketch]:
    """Yield cases of ldmatrix and stmatrix: rows of 16 bytes in shared memory, at any order of addresses."""
    for trans in ("", ".trans"):
        for count in (1, 2, 4):
            op = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            image = random(op).randint(0, 256, 1024).astype(np.uint8)
            rows = (random(op).permutation(64)[:32] * 16).astype(np.uint32)
            vector = "$x" if count > 1 else "{$x}"
            body = f"add.s32 %t1, $smem, $a;\n{op} {vector}, [%t1];"
            shape = (32, count) if count > 1 else (32,)
            yield Sketch(op, op, X + "ldmatrix", body, (rows,), (np.zeros(shape, np.uint32),), image=image)
            op = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            values = random(op).randint(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
            vector = "$b" if count > 1 else "{$b}"
            body = f"add.s32 %t1, $smem, $a;\n{op} [%t1], {vector};"
            yield Sketch(op, op, X + "stmatrix", body, (rows, values), image=image, dump=1024)


def fragments() -> Iterator[Sketch]:
    """Yield cases of mma.sync: exact sums of small integers, and rounded ones of random numbers."""
    for shape, out, kind, a, b, d in (
        ("m16n8k16", "f32", "f16", 4, 2, 4),
        ("m16n8k16", "f32", "bf16", 4, 2, 4),
        ("m16n8k16", "f16", "f16", 4, 2, 2),
        ("m16n8k8", "f32", "f16", 2, 1, 4),
        ("m16n8k8", "f32", "bf16", 2, 1, 4),
        ("m16n8k8", "f32", "tf32", 4, 2, 4),
        ("m16n8k4", "f32", "tf32", 2, 1, 4),
        ("m16n8k32", "f32", "e4m3", 4, 2, 4),
        ("m16n8k32", "f32", "e5m2", 4, 2, 4),
        ("m16n8k32", "s32", "s8", 4, 2, 4),
    ):
        op = f"mma.sync.aligned.{shape}.row.col.{out}.{kind}.{kind}.{out}"
        ins = [small(op + "a", 32 * a * 4, kind, 2), small(op + "b", 32 * b * 4, kind, 2)]
        ins = [part[: 32 * n * 4].view(np.uint32).reshape(32, n) for part, n in zip(ins, (a, b))]
        ins = [part if part.shape[1] > 1 else part[:, 0].copy() for part in ins]
        start = np.zeros((32, d), np.uint32)
        if out == "s32":
            start = (random(op).randint(-9, 10, (32, d))).astype(np.int32).view(np.uint32)
        elif out == "f32":
            start = random(op).randint(-9, 10, (32, d)).astype(np.float32).view(np.uint32)
        vector = "$b" if b > 1 else "{$b}"
        body = f"{op} $x, $a, {vector}, $x;"
        yield Sketch(op, op, X + "mma", body, tuple(ins), (start,), inout=True)
    op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    a4 = (bell(random(op), 32, 8).astype(np.float16)).view(np.uint32)
    b2 = (bell(random(op + "b"), 32, 4).astype(np.float16)).view(np.uint32)
    start = bell(random(op), 32, 4).astype(np.float32).view(np.uint32)
    body = f"{op} $x, $a, $b, $x;"
    more = dict(inout=True, real="f32", tolerance=2.0**-18, floor=4.0)
    yield Sketch(op + " rounding", op, X + "mma", body, (a4, b2), (start,), **more)  # type: ignore[arg-type]
    a4 = double16(op)[:128].reshape(32, 4)
    yield Sketch(op + " special", op, X + "mma", body, (a4, b2), (start,), **more)  # type: ignore[arg-type]
    op = "movmatrix.sync.aligned.m8n8.trans.b16"
    yield elementwise(X + "movmatrix", op, (words(op, 32),), np.uint32)


def sketches() -> Iterator[Sketch]:
    for family in (shuffles, votes, reductions, staged, fragments):
        yield from family()
