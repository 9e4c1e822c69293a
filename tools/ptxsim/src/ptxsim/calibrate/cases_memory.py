"""Cases of loads and stores, atomics, asynchronous copies of threads, control flow."""

from collections.abc import Iterator

import numpy as np

from .case import Sketch, named, random
from .data import KEYS16, KEYS32, KEYS_INT, pairs, pairs16

M, P = "Data Movement Instructions: ", "Parallel Synchronization Instructions: "
A = "Asynchronous Copy Instructions: cp.async"
KEYS = {"f16x2": KEYS16["f16"], "bf16x2": KEYS16["bf16"]}


def accesses() -> Iterator[Sketch]:
    """Yield cases of sizes, sign extension, vectors, generic addresses."""
    image = random("accesses").randint(0, 256, 1024).astype(np.uint8)
    for kind, align in (("u8", 1), ("s8", 1), ("b8", 1), ("u16", 2), ("s16", 2), ("u32", 4), ("s32", 4)):
        for space, base in (
            ("shared", "cvt.u32.u64 %t1, %q1;\nadd.s32 %t1, $smem, %t1;"),
            ("global", "add.s64 %q1, $g0, %q1;"),
        ):
            where = (random(kind).randint(0, 1020, 32) // align * align).astype(np.uint64)
            address = "%t1" if space == "shared" else "%q1"
            form = f"ld.{space}.{kind}"
            body = f"mov.b64 %q1, $a;\n{base}\n{form} $x, [{address}];"
            outs = (np.zeros(32, np.uint32),)
            yield Sketch(form, form, M + "ld", body, (where,), outs, (image,), image=image)
    for vector, count in (("v2", 2), ("v4", 4)):
        for kind, size in (("b32", 4), ("b64", 8), ("b16", 2)):
            if count * size > 16:
                continue
            form = f"ld.shared.{vector}.{kind}, st.global.{vector}.{kind}"
            dtype = np.dtype(f"u{size}")
            body = f"""mul.lo.u32 %t1, $tid, {count * size};
                add.s32 %t2, $smem, %t1;
                ld.shared.{vector}.{kind} $x, [%t2+{count * size}];
                cvt.u64.u32 %q1, %t1;
                add.s64 %q1, $g0, %q1;
                st.global.{vector}.{kind} [%q1], $x;"""
            outs = (np.zeros((32, count), dtype),)
            buffers = (np.zeros(32 * count * size, np.uint8),)
            yield Sketch(form, form, M + "ld", body, (), outs, buffers, (0,), image=image)
    form = "cvta.shared.u64, cvta.to.shared.u64, isspacep, generic ld and st"
    body = """cvt.u64.u32 %q1, $smem;
        cvta.shared.u64 %q2, %q1;
        mul.wide.u32 %q3, $tid, 4;
        add.s64 %q4, %q2, %q3;
        ld.b32 %t1, [%q4];
        add.s64 %q5, $g0, %q3;
        ld.b32 %t2, [%q5];
        add.u32 $x, %t1, %t2;
        isspacep.shared %p1, %q4;
        isspacep.global %p2, %q4;
        @%p1 add.u32 $x, $x, 1;
        @%p2 add.u32 $x, $x, 2;
        st.b32 [%q4+256], $x;
        cvta.to.shared.u64 %q6, %q2;
        sub.s64 %q6, %q6, %q1;
        cvt.u32.u64 %t3, %q6;
        add.u32 $x, $x, %t3;"""
    yield Sketch(form, form, M + "cvta", body, (), (np.zeros(32, np.uint32),), (image,), image=image, dump=512)
    for kind in ("b8", "u16", "b32"):
        form = f"st.shared.{kind}"
        size = {"b8": 1, "u16": 2, "b32": 4}[kind]
        body = f"mad.lo.u32 %t1, $tid, {2 * size}, $smem;\n{form} [%t1+{size}], $a;"
        data = random(form).randint(0, 1 << 16, 32, dtype=np.uint32).astype(np.uint32 if size == 4 else np.uint16)
        yield Sketch(form, form, M + "st", body, (data,), image=image, dump=512)
    form = "ld.global.nc, ld.relaxed.gpu, ld.acquire.gpu, st.release.gpu, ld.volatile, fence.acq_rel.gpu, membar.gl"
    body = """mul.wide.u32 %q1, $tid, 4;
        add.s64 %q1, $g0, %q1;
        ld.global.nc.L1::no_allocate.L2::128B.b32 $x, [%q1+128];
        ld.relaxed.gpu.global.b32 %t1, [%q1];
        st.release.gpu.global.b32 [%q1], $x;
        fence.acq_rel.gpu;
        ld.acquire.gpu.global.b32 %t2, [%q1];
        ld.volatile.global.b32 %t3, [%q1];
        membar.gl;
        mad.lo.u32 $x, %t1, 3, %t2;
        add.u32 $x, $x, %t3;"""
    outs = (np.zeros(32, np.uint32),)
    yield Sketch(form, form, M + "ld", body, (), outs, (image[:256].copy(),), (0,))


def atomic_data(op: str, kind: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return (memory, operand, whether numbers are compared) for each pair of special values."""
    if kind in KEYS:
        a, b = pairs16(kind[:-2], op)
    elif kind == "f32":
        a, b = pairs(KEYS32, np.uint32, op)
    else:
        a, b = pairs(KEYS_INT, np.uint64 if kind.endswith("64") else np.uint32, op)
        if kind.endswith("64"):
            a, b = a | a[::-1] << np.uint64(32), b | b[::-1] << np.uint64(32)
    return a[:256], b[:256], kind in ("f32", *KEYS)


def atomics() -> Iterator[Sketch]:
    """Yield cases of atomics, each thread at its own address: the old value and the memory afterwards."""
    integers: tuple[str, ...] = (
        "add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "inc.u32", "dec.u32", "exch.b32",
    )  # fmt: skip
    integers += ("and.b32", "or.b32", "xor.b32", "add.u64", "min.s64", "max.u64", "exch.b64", "xor.b64")
    floats = ("add.f32", "add.noftz.f16x2", "add.noftz.bf16x2", "min.noftz.f16x2", "max.noftz.bf16x2")
    for op in integers + floats:
        kind = op.split(".")[-1]
        for space in ("global", "shared"):
            if space == "shared" and kind in KEYS and not op.startswith("add"):
                continue
            if space == "global" and op.startswith(("min.noftz", "max.noftz")):
                continue
            form = f"atom.{space}.{op}"
            memory, operand, real = atomic_data(op, kind)
            size = memory.itemsize
            if space == "global":
                where = f"mul.wide.u32 %q1, $tid, {size};\nadd.s64 %q1, $g0, %q1;\n{form} $x, [%q1], $a;"
                more: dict = dict(buffers=(memory,), changed=(0,))
            else:
                where = f"mad.lo.u32 %t1, $tid, {size}, $smem;\n{form} $x, [%t1], $a;"
                more = dict(image=memory.view(np.uint8), dump=memory.nbytes if not real else 0)
                if real:
                    where += "\nld.shared.b32 $y, [%t1];"
            outs = [np.zeros_like(operand)] * (2 if space == "shared" and real else 1)
            more |= dict(threads=len(operand), real=(kind.replace("x2", "") if real else ""))
            yield Sketch(form, form, P + "atom", where, (operand,), tuple(outs), **more)
    for kind in ("b32", "b64", "b16"):
        form = f"atom.global.cas.{kind}"
        name = {"b32": np.uint32, "b64": np.uint64, "b16": np.uint16}[kind]
        memory = random(form).randint(0, 3, 64).astype(name)
        compare = random(form + "c").randint(0, 3, 64).astype(name)
        value = random(form + "v").randint(100, 200, 64).astype(name)
        body = f"mul.wide.u32 %q1, $tid, {memory.itemsize};\nadd.s64 %q1, $g0, %q1;\n{form} $x, [%q1], $a, $b;"
        outs1 = (np.zeros(64, name),)
        yield Sketch(form, form, P + "atom", body, (compare, value), outs1, (memory,), (0,), threads=64)


def reductions() -> Iterator[Sketch]:
    """Yield cases of red: many threads at one address if the order does not matter, and vectors."""
    data = pairs(KEYS_INT, np.uint32, "red")[0]
    for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32"):
        form = f"red.global.{op}"
        memory = np.array([12, 5, 0xFF00FF, 7], np.uint32)
        body = f"and.b32 %t1, $tid, 3;\nmul.wide.u32 %q1, %t1, 4;\nadd.s64 %q1, $g0, %q1;\n{form} [%q1], $a;"
        values = data if op != "inc.u32" else np.full(len(data), 50, np.uint32)
        yield Sketch(form, form, P + "red", body, (values,), (), (memory,), (0,), threads=len(data))
        if op[:3] in ("add", "max", "xor"):
            form = f"red.shared.{op}"
            image = memory.view(np.uint8)
            body = f"and.b32 %t1, $tid, 3;\nmad.lo.u32 %t1, %t1, 4, $smem;\n{form} [%t1], $a;"
            yield Sketch(form, form, P + "red", body, (data,), image=image, dump=16, threads=len(data))
    form = "atom.add.release.gpu.global.u32, four CTAs, sum"
    body = "atom.add.release.gpu.global.u32 %t1, [$g0], $a;\nred.relaxed.gpu.global.max.u32 [$g0+4], $a;"
    counts = random(form).randint(0, 1000, 128).astype(np.uint32)
    yield Sketch(form, form, P + "atom", body, (counts,), (), (np.zeros(2, np.uint32),), (0,), grid=(4, 1, 1))
    for count, kind in ((2, "f32"), (4, "f32"), (2, "f16x2"), (4, "bf16x2"), (8, "bf16")):
        op = f"red.global.add{'' if kind == 'f32' else '.noftz'}.v{count}.{kind}"
        dtype = np.uint16 if kind == "bf16" else np.uint32
        keys = pairs(KEYS32, np.uint32, op)[0] if kind == "f32" else pairs16(kind.split("x")[0], op)[0]
        values = keys.astype(dtype)[: 32 * count].reshape(32, count)
        memory = values.reshape(-1)[random(op).permutation(values.size)].copy()
        size = count * np.dtype(dtype).itemsize
        body = f"mul.wide.u32 %q1, $tid, {size};\nadd.s64 %q1, $g0, %q1;\n{op} [%q1], $a;"
        real = kind.split("x")[0]
        yield Sketch(op, op, P + "red", body, (values,), (), (memory,), (0,), real=real)


def copies() -> Iterator[Sketch]:
    """Yield cases of cp.async: sizes, zero fill after src-size, groups."""
    data = random("cp.async").randint(1, 256, 1024).astype(np.uint8)
    for op, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for filled in (False, True):
            form = f"cp.async.{op}.shared.global {size}" + (", src-size" if filled else "")
            copied = np.arange(32, dtype=np.uint32) % np.uint32(size + 1)
            extra = f"{size}, $a" if filled else f"{size}"
            body = f"""mul.lo.u32 %t1, $tid, {size};
                cvt.u64.u32 %q1, %t1;
                add.s64 %q1, $g0, %q1;
                add.s32 %t1, $smem, %t1;
                cp.async.{op}.shared.global [%t1], [%q1+{size}], {extra};
                cp.async.commit_group;
                cp.async.wait_group 0;
                bar.sync 0;"""
            image = np.full(640, 0xA5, np.uint8)
            yield Sketch(form, form, A, body, (copied,), (), (data,), image=image, dump=640)
    form = "cp.async.commit_group, cp.async.wait_group 1, cp.async.wait_all"
    body = """mul.lo.u32 %t1, $tid, 16;
        cvt.u64.u32 %q1, %t1;
        add.s64 %q1, $g0, %q1;
        add.s32 %t1, $smem, %t1;
        cp.async.cg.shared.global [%t1], [%q1], 16;
        cp.async.commit_group;
        cp.async.cg.shared.global [%t1+512], [%q1+512], 16;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.b32 $x, [%t1];
        cp.async.wait_all;
        ld.shared.b32 %t2, [%t1+512];
        xor.b32 $x, $x, %t2;"""
    yield Sketch(form, form, A, body, (), (np.zeros(32, np.uint32),), (data,), shared=1024)
    for kind, count in ((".noinc", 32), ("", 1)):
        form = f"cp.async.mbarrier.arrive{kind}.shared.b64"
        body = f"""setp.eq.u32 %p1, $tid, 0;
            @%p1 mbarrier.init.shared.b64 [$smem+512], {count};
            bar.sync 0;
            mul.lo.u32 %t1, $tid, 16;
            cvt.u64.u32 %q1, %t1;
            add.s64 %q1, $g0, %q1;
            add.s32 %t1, $smem, %t1;
            cp.async.cg.shared.global [%t1], [%q1], 16;
            {form} [$smem+512];
            bar.sync 0;
            {"" if kind else "@%p1 mbarrier.arrive.shared.b64 %q2, [$smem+512];"}
            mov.b32 %t5, 0;
            WAIT:
            mbarrier.try_wait.parity.shared.b64 %p2, [$smem+512], 0;
            add.s32 %t5, %t5, 1;
            setp.lt.and.u32 %p3, %t5, 100000, !%p2;
            @%p3 bra WAIT;
            ld.shared.b32 $x, [%t1];"""
        yield Sketch(form, form, A, body, (), (np.zeros(32, np.uint32),), (data,), shared=528)


def control() -> Iterator[Sketch]:
    """Yield cases of divergent loops, guards, early exit, named barriers, PDL."""
    count = random("control").randint(0, 9, 64).astype(np.uint32)
    form = "bra, divergent loop"
    body = """mov.b32 $x, 1;
        mov.b32 %t1, 0;
        setp.eq.u32 %p1, $a, 0;
        @%p1 bra DONE;
        AGAIN:
        mad.lo.u32 $x, $x, 3, %t1;
        and.b32 %t2, $x, 1;
        setp.ne.u32 %p2, %t2, 0;
        @!%p2 bra EVEN;
        add.u32 $x, $x, 7;
        EVEN:
        add.u32 %t1, %t1, 1;
        setp.lt.u32 %p1, %t1, $a;
        @%p1 bra AGAIN;
        DONE:"""
    yield named("Control Flow Instructions: bra", form, body, (count,))
    form = "brx.idx, exit under a guard"
    body = """TABLE: .branchtargets ZERO, ONE, TWO, TWO;
        mov.b32 $x, 5;
        and.b32 %t1, $a, 3;
        setp.eq.u32 %p1, $a, 8;
        @%p1 exit;
        brx.idx %t1, TABLE;
        ZERO:
        mov.b32 $x, 10;
        bra END;
        ONE:
        mov.b32 $x, 11;
        bra.uni END;
        TWO:
        mov.b32 $x, 12;
        END:"""
    yield named("Control Flow Instructions: brx.idx", form, body, (count,))
    form = "bar.sync a, b; bar.arrive; bar.warp.sync"
    body = """shl.b32 %t1, $tid, 2;
        add.s32 %t1, $smem, %t1;
        st.shared.b32 [%t1], $a;
        setp.lt.u32 %p1, $tid, 32;
        @%p1 bra FIRST;
        bar.arrive 3, 64;
        mov.b32 $x, 4;
        bra JOIN;
        FIRST:
        bar.sync 3, 64;
        ld.shared.b32 $x, [%t1+128];
        bar.warp.sync 0xffffffff;
        JOIN:
        barrier.sync.aligned 1, 64;"""
    yield Sketch(form, form, P + "bar", body, (count,), (np.zeros(64, np.uint32),), shared=256, threads=64)
    for op in ("popc.u32", "and.pred", "or.pred"):
        form = f"bar.red.{op}"
        head = "setp.gt.u32 %p1, $a, 4;\n"
        tail = f"{form} $x, 2, 64, !%p1;" if op == "popc.u32" else f"{form} %p2, 2, 64, %p1;\nselp.b32 $x, 1, 0, %p2;"
        yield named(P + "bar", form, head + tail, (count,))
    body = "griddepcontrol.wait;\nadd.u32 $x, $a, 1;\ngriddepcontrol.launch_dependents;"
    yield named(P + "griddepcontrol", "griddepcontrol.wait, griddepcontrol.launch_dependents", body, (count,))
    body = "setmaxnreg.dec.sync.aligned.u32 40;\nadd.u32 $x, $a, 1;\nsetmaxnreg.inc.sync.aligned.u32 64;"
    data = random("setmaxnreg").randint(0, 99, 128).astype(np.uint32)
    form = "setmaxnreg.dec.sync.aligned.u32, setmaxnreg.inc.sync.aligned.u32"
    yield named("Miscellaneous Instructions: setmaxnreg", form, body, (data,))


def sketches() -> Iterator[Sketch]:
    for family in (accesses, atomics, reductions, copies, control):
        yield from family()
