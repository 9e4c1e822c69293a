"""Cases of tensor copies: tiles of one to five dimensions between global and shared memory, and bulk copies of
bytes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .case import Sketch, TensorMapArg, random, wait
from .data import KEYS16, KEYS32, bell

T, B = "Asynchronous Copy Instructions: cp.async.bulk.tensor", "Asynchronous Copy Instructions: cp.async.bulk"
R = "Asynchronous Copy Instructions: cp.reduce.async.bulk"
DTYPE = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f16": np.uint16, "bf16": np.uint16}
DTYPE |= {"f32": np.uint32, "tf32": np.uint32}
TILE = "cp.async.bulk.tensor.2d.{}.global.tile.mbarrier::complete_tx::bytes"
OOB = "out of bounds"


def start(count: int = 1, at: int = 0) -> str:
    """Return code in which thread 0 initialises an mbarrier `at` bytes into shared memory. %t1: its address. %p1:
    whether this is thread 0."""
    return f"""
        add.s32 %t1, $smem, {at};
        setp.eq.u32 %p1, $tid, 0;
        @!%p1 bra READY;
        mbarrier.init.shared.b64 [%t1], {count};
        fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta;
        READY:
        bar.sync 0;
    """


def tensor(name: str, what: TensorMapArg, pad: int = 0) -> np.ndarray:
    """Return random elements, as far as the strides reach."""
    dtype = np.dtype(DTYPE[what.format])
    size = what.strides[-1] * what.dims[-1] if what.strides else what.dims[0] * dtype.itemsize
    return random(name).randint(0, 256, size + pad).astype(np.uint8).view(dtype)


def packed_map(
    format: str, dims: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0, fill: str = "zero"
) -> TensorMapArg:
    """Return a map with rows padded by 16 bytes and planes without padding."""
    row = (dims[0] * np.dtype(DTYPE[format]).itemsize + 15) // 16 * 16 + 16
    strides = [int(row * np.prod(dims[1:i], dtype=int)) for i in range(1, len(dims))]
    return TensorMapArg(0, dims, tuple(strides), box, format, swizzle, fill)


def coordinates(what: TensorMapArg, where: tuple[int, ...]) -> str:
    """Return code that sets %t10 and following. The innermost of `where` counts 16 bytes: at others the hardware
    traps."""
    per = 16 // np.dtype(DTYPE[what.format]).itemsize
    return "\n".join(f"mov.b32 %t{10 + i}, {c * (1 if i else per)};" for i, c in enumerate(where))


def load(name: str, form: str, what: TensorMapArg, where: tuple[int, ...], at: int = 0, note: str = "") -> Sketch:
    """Return a sketch that loads one tile to shared memory at `at`; all of it is dumped, with the bytes around the
    tile."""
    rank = len(what.dims)
    size = int(np.prod(what.box)) * np.dtype(DTYPE[what.format]).itemsize
    room = (at + (2 * size if note == "narrow" else size) + 255) // 128 * 128
    names = ", ".join(f"%t{10 + i}" for i in range(rank))
    op = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    hint = ""
    if "cache_hint" in note:
        op, hint = op + ".L2::cache_hint", ", %q1"
    if "shared::cluster" in note:
        op = op.replace("shared::cta", "shared::cluster")
    body = f"""{start(1, room)}
        {coordinates(what, where)}
        mov.b64 %q1, 1152921504606846976;
        add.s32 %t2, $smem, {at};
        @!%p1 bra GO;
        mbarrier.arrive.expect_tx.shared.b64 %q2, [%t1], {size};
        {op} [%t2], [$m0, {{{names}}}], [%t1]{hint};
        GO:
        {wait("%t1", 0, "WAIT")}
    """
    image = np.full(room, 0xA5, np.uint8)
    data = tensor(name, what)
    return Sketch(name, form, T, body, buffers=(data,), maps=(what,), image=image, dump=room, shared=room + 16)


def loads() -> Iterator[Sketch]:
    """Yield cases of ranks, element sizes, coordinates in and out of the tensor."""
    sizes = ((70,), (40, 9), (24, 6, 5), (16, 4, 3, 3), (16, 3, 3, 2, 3))
    boxes = ((32,), (16, 4), (8, 3, 2), (8, 2, 2, 2), (8, 2, 1, 2, 2))
    for rank in range(1, 6):
        what = packed_map("bf16", sizes[rank - 1], boxes[rank - 1])
        form = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile"
        for label, where in (
            ("inside", tuple(range(1, rank + 1)) if rank < 4 else (1, 1, 0, 1, 0)[:rank]),
            ("before", (-1, -1, -1, 1, 0)[:rank]),
            ("after", (what.dims[0] // 8 - 1, *(d - 1 for d in what.dims[1:]))),
        ):
            yield load(f"tile {rank}d {label}", form if label == "inside" else f"{form}, {OOB}", what, where)
        nan = replace(what, fill="nan")
        yield load(f"tile {rank}d nan", f"{form}, {OOB}, NaN fill", nan, (-1, 2, -1, 1, 1)[:rank])
    for format in DTYPE:
        size = np.dtype(DTYPE[format]).itemsize
        what = packed_map(format, (64, 8), (32 // size, 4))
        yield load(f"tile format {format}", f"cp.async.bulk.tensor, element {format}", what, (5, -1))
        if format in ("f16", "bf16", "f32", "tf32"):
            what = replace(what, fill="nan")
            form = f"cp.async.bulk.tensor, element {format}, NaN fill"
            yield load(f"tile format {format} nan", form, what, (4 * size - 1, 6))
    far = packed_map("u8", (48, 4), (32, 2))
    yield load("tile far outside", f"cp.async.bulk.tensor.2d, {OOB}", far, (-1000000, 2147483000))
    yield load("tile all outside", f"cp.async.bulk.tensor.2d, {OOB}", far, (3, 4))
    what = packed_map("bf16", (40, 9), (16, 4))
    yield load("tile cache hint", "cp.async.bulk.tensor.2d .L2::cache_hint", what, (1, 3), note="cache_hint")
    yield load("tile shared::cluster", "cp.async.bulk.tensor.2d.shared::cluster", what, (1, 3), note="shared::cluster")
    sketch = load(
        "tile inner coordinate at 2 bytes", f"{T}: an inner coordinate at no multiple of 16 bytes", what, (1, 3)
    )
    yield replace(sketch, body=sketch.body.replace("mov.b32 %t10, 8;", "mov.b32 %t10, 9;"))
    wide = packed_map("u16", (300, 3), (256, 2))
    yield load("tile box 256", "cp.async.bulk.tensor.2d.shared::cta.global.tile", wide, (5, 1))
    overlapping = TensorMapArg(0, (16, 6), (16,), (16, 4), "bf16")
    form = "cp.async.bulk.tensor.2d, rows that overlap in global memory"
    sketch = load("tile overlapping", form, overlapping, (0, 1))
    yield replace(sketch, buffers=(tensor("overlapping", overlapping, 32),))
    repeated = TensorMapArg(0, (16, 4, 3), (0, 48), (16, 3, 2), "bf16")
    form = "cp.async.bulk.tensor.3d, stride 0"
    yield load("tile stride 0", form, repeated, (0, 0, 1))


def swizzles() -> Iterator[Sketch]:
    """Yield cases of swizzles. The swizzle follows the address in shared memory, not the tile."""
    for span in (32, 64, 128):
        for format in ("bf16", "u8", "f32"):
            size = np.dtype(DTYPE[format]).itemsize
            what = packed_map(format, (span // size + 8, 20), (span // size, 16), span)
            form = f"cp.async.bulk.tensor.2d, swizzle {span}"
            yield load(f"swizzle {span} {format}", form, what, (1, 2))
            if format == "bf16":
                yield load(f"swizzle {span} {OOB}", form, what, (-1, 10))
                for at in (128, 384, 1664):
                    yield load(f"swizzle {span} at {at}", f"{form}, at 128-byte multiples", what, (1, 1), at)
        half = packed_map("bf16", (64, 20), (span // 4, 16), span)
        if span > 32:
            form = f"cp.async.bulk.tensor.2d, swizzle {span}, inner row narrower than the span"
            yield load(f"swizzle {span} narrow", form, half, (1, 2), note="narrow")
        cube = packed_map("bf16", (span // 2, 6, 4), (span // 2, 3, 4), span)
        yield load(f"swizzle {span} 3d", f"cp.async.bulk.tensor.3d, swizzle {span}", cube, (0, 2, 1))


def numbers(name: str, size: int, format: str) -> np.ndarray:
    """Return elements for a reduction: random, or special ones for numbers."""
    rng = random(name)
    if format in KEYS16:
        keys = np.array(KEYS16[format][:14], np.uint16)
        values = bell(rng, size).astype(np.float16).view(np.uint16)
        if format == "bf16":
            values = (bell(rng, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.where(rng.rand(size) < 0.3, keys[rng.randint(0, len(keys), size)], values)
    if format == "f32":
        keys32 = np.array(KEYS32[:14], np.uint32)
        near = bell(rng, size).astype(np.float32).view(np.uint32)
        return np.where(rng.rand(size) < 0.3, keys32[rng.randint(0, len(keys32), size)], near)
    return rng.randint(0, 256, size * np.dtype(DTYPE[format]).itemsize).astype(np.uint8).view(DTYPE[format])


def store(name: str, form: str, what: TensorMapArg, where: tuple[int, ...], op: str = "") -> Sketch:
    """Return a sketch that stores one tile from shared memory, or reduces it by `op`; the whole tensor is compared."""
    rank = len(what.dims)
    count = int(np.prod(what.box))
    size = count * np.dtype(DTYPE[what.format]).itemsize
    names = ", ".join(f"%t{10 + i}" for i in range(rank))
    head = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}"
        if op
        else f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
    )
    body = f"""
        setp.ne.u32 %p1, $tid, 0;
        {coordinates(what, where)}
        @%p1 bra GONE;
        {head}.tile.bulk_group [$m0, {{{names}}}], [$smem];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        GONE:
    """
    image = numbers(name, count, what.format).view(np.uint8)
    data = tensor(name, what, 32)
    if op:
        data = numbers(name + "tensor", data.size, what.format)
    assert image.size == size
    real = what.format if op == "add" and what.format in ("f32", "f16", "bf16") else ""
    section = T if not op else R + ".tensor"
    return Sketch(name, form, section, body, buffers=(data,), changed=(0,), maps=(what,), image=image, real=real)


def stores() -> Iterator[Sketch]:
    sizes = ((70,), (40, 9), (24, 6, 5), (16, 4, 3, 3), (16, 3, 3, 2, 3))
    boxes = ((32,), (16, 4), (8, 3, 2), (8, 2, 2, 2), (8, 2, 1, 2, 2))
    for rank in range(1, 6):
        what = packed_map("bf16", sizes[rank - 1], boxes[rank - 1])
        form = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
        yield store(f"store {rank}d inside", form, what, (1, 1, 0, 1, 0)[:rank])
        where = (what.dims[0] // 8 - 1, *(d - 1 for d in what.dims[1:]))
        yield store(f"store {rank}d {OOB}", f"{form}, {OOB}", what, where)
        ragged = packed_map("bf16", (what.dims[0] - 3, *what.dims[1:]), what.box)
        yield store(f"store {rank}d {OOB} inside 16 bytes", f"{form}, {OOB}", ragged, where)
        if rank < 3:
            negative = (-1,) if rank == 1 else (1, -1)
            yield store(f"store {rank}d negative", f"{form}, a negative coordinate", what, negative)
        if rank in (2, 4):
            where = (5, what.dims[1], 0, 0)[:rank]
            yield store(f"store {rank}d all outside", f"{form}, {OOB}", what, where)
    for span in (32, 64, 128):
        for format in ("bf16", "u8", "f32"):
            size = np.dtype(DTYPE[format]).itemsize
            what = packed_map(format, (span // size + 8, 20), (span // size, 16), span)
            form = f"cp.async.bulk.tensor.2d.global.shared::cta, swizzle {span}"
            yield store(f"store swizzle {span} {format}", form, what, (1, 6))
    for format, ops in (
        ("f32", ("add",)),
        ("f16", ("add", "min", "max")),
        ("bf16", ("add", "min", "max")),
        ("u32", ("add", "min", "max", "inc", "dec", "and", "or", "xor")),
        ("u64", ("add", "min", "max", "and")),
    ):
        for op in ops:
            what = packed_map(format, (40, 6), (16, 4))
            form = f"cp.reduce.async.bulk.tensor.2d.{op}, element {format}"
            yield store(f"reduce {op} {format}", form, what, (3, 1), op)
    what = packed_map("f32", (40, 6), (16, 4))
    yield store(f"reduce add f32 {OOB}", f"cp.reduce.async.bulk.tensor.2d.add, {OOB}", what, (8, 4), "add")
    what = packed_map("bf16", (72, 10), (64, 8), 128)
    yield store("reduce add bf16 swizzle", "cp.reduce.async.bulk.tensor.2d.add, swizzle 128", what, (2, 1), "add")


def bulk() -> Iterator[Sketch]:
    """Yield cases of plain bytes; sizes and addresses are multiples of 16."""
    for op in ("cp.async.bulk.shared::cta.global", "cp.async.bulk.shared::cluster.global"):
        for size in (16, 1008):
            body = f"""{start(1, 1280)}
                add.s32 %t2, $smem, 48;
                add.s64 %q1, $g0, 32;
                @!%p1 bra GO;
                mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%t1], {size};
                {op}.mbarrier::complete_tx::bytes [%t2], [%q1], {size}, [%t1];
                mbarrier.arrive.shared.b64 %q2, [%t1];
                GO:
                {wait("%t1", 0, "WAIT")}
            """
            name = f"{op} {size}"
            data = random(name).randint(0, 256, 1072).astype(np.uint8)
            image = np.full(1280, 0xA5, np.uint8)
            yield Sketch(name, op, B, body, buffers=(data,), image=image, dump=1280, shared=1296)
    op = "cp.async.bulk.global.shared::cta.bulk_group"
    for kind in ("", ".read"):
        body = f"""
            setp.ne.u32 %p1, $tid, 0;
            add.s32 %t2, $smem, 64;
            add.s64 %q1, $g0, 16;
            @%p1 bra GONE;
            {op} [%q1], [%t2], 512;
            cp.async.bulk.commit_group;
            {op} [$g1], [$smem], 128;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group{kind} 1;
            cp.async.bulk.wait_group 0;
            GONE:
        """
        form = f"{op}, wait_group{kind}"
        image = random(form).randint(0, 256, 1024).astype(np.uint8)
        buffers = (np.zeros(640, np.uint8), np.zeros(256, np.uint8))
        yield Sketch(form, form, B, body, buffers=buffers, changed=(0, 1), image=image)
    for kind, ops in (
        ("u32", ("add", "min", "max", "inc", "dec")),
        ("s32", ("add", "min", "max")),
        ("u64", ("add", "min")),
        ("s64", ("max",)),
        ("b32", ("and", "or", "xor")),
        ("f32", ("add",)),
        ("f16", ("add.noftz", "min", "max")),
        ("bf16", ("add.noftz", "min")),
    ):
        for op in ops:
            form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind}"
            body = f"""
                setp.ne.u32 %p1, $tid, 0;
                @%p1 bra GONE;
                {form} [$g0], [$smem], 256;
                cp.async.bulk.commit_group;
                cp.async.bulk.wait_group 0;
                GONE:
            """
            format = kind.replace("s", "u").replace("b32", "u32")
            count = 256 // np.dtype(DTYPE[format]).itemsize
            image = numbers(form, count, format).view(np.uint8)
            real = kind if op.startswith("add") and kind in ("f32", "f16", "bf16") else ""
            data = numbers(form + "g", count + 16, format)
            yield Sketch(form, form, R, body, buffers=(data,), changed=(0,), image=image, real=real)
    form = "cp.async.bulk.prefetch, cp.async.bulk.prefetch.tensor, prefetch.tensormap"
    what = packed_map("bf16", (40, 9), (16, 4))
    sketch = load("prefetch", form, what, (1, 3))
    more = """setp.eq.u32 %p1, $tid, 0;
        @!%p1 bra EARLY;
        prefetch.tensormap [$m0];
        mov.b32 %t10, 0;
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile [$m0, {%t10, %t10}];
        cp.async.bulk.prefetch.L2.global [$g0], 64;
        EARLY:
    """
    yield replace(sketch, body=more + sketch.body)


def counting() -> Iterator[Sketch]:
    """Yield a case of the bytes that an out-of-bounds tile reports: all of its box. A second tile ends the phase,
    not the first."""
    what = packed_map("bf16", (40, 9), (16, 4))
    body = f"""{start(1, 512)}
        mov.b32 %t10, 32;
        mov.b32 %t11, 8;
        add.s32 %t2, $smem, 128;
        mov.b32 $x, 0;
        @!%p1 bra GO;
        mbarrier.arrive.expect_tx.shared.b64 %q2, [%t1], 256;
        mbarrier.test_wait.parity.shared.b64 %p2, [%t1], 0;
        selp.b32 $x, 1, 0, %p2;
        mbarrier.test_wait.parity.shared.b64 %p2, [%t1], 1;
        @%p2 or.b32 $x, $x, 2;
        {TILE.format("shared::cta")} [$smem], [$m0, {{%t10, %t11}}], [%t1];
        {TILE.format("shared::cta")} [%t2], [$m0, {{%t11, %t11}}], [%t1];
        GO:
        {wait("%t1", 0, "WAIT")}
        mbarrier.test_wait.parity.shared.b64 %p2, [%t1], 1;
        @%p2 or.b32 $x, $x, 4;
    """
    form = "mbarrier::complete_tx::bytes counts the whole box"
    image, outs = np.zeros(512, np.uint8), (np.zeros(32, np.uint32),)
    yield Sketch(form, form, T, body, (), outs, (tensor(form, what),), maps=(what,), image=image, dump=512, shared=528)


def sketches() -> Iterator[Sketch]:
    for family in (loads, swizzles, stores, bulk, counting):
        yield from family()
