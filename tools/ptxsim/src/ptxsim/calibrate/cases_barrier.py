"""Cases of mbarriers, clusters, distributed shared memory. Those that may hang come last."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .case import Sketch, random, wait
from .cases_tma import TILE, B, T, packed_map, tensor

P, Q = "Parallel Synchronization Instructions: ", "Data Movement Instructions: "
SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


def single(name: str, script: str) -> Sketch:
    """Return a sketch of one warp; lane 0 runs the script with the address of 64 bytes of shared memory in %t1 and
    results in $x."""
    body = f"""
        mov.b32 %t1, $smem;
        setp.ne.u32 %p1, $tid, 0;
        @%p1 bra REST;
        {script}
        REST:
    """
    outs = (np.zeros((32, 8), np.uint32),)
    return Sketch(name, name, P + "mbarrier", body, (), outs, shared=64, inout=True)


def test(register: str, parity: int) -> str:
    """Return code that sets `register` to 1 if the phase of that parity is complete, else to 0."""
    return f"mbarrier.test_wait.parity.shared.b64 %p2, [%t1], {parity};\nselp.b32 {register}, 1, 0, %p2;"


def pending(register: str, state: str) -> str:
    return f"mbarrier.pending_count.b64 {register}, {state};"


def counts() -> Iterator[Sketch]:
    """Yield cases of the state of an mbarrier as seen by one thread."""
    init = "mbarrier.init.shared.b64 [%t1], 3;"
    script = f"""{init}
        mbarrier.arrive.shared.b64 %q1, [%t1];
        mbarrier.arrive.shared.b64 %q2, [%t1], 1;
        {pending("$x0", "%q1")}
        {pending("$x1", "%q2")}
        {test("$x2", 0)}
        {test("$x3", 1)}
        mbarrier.test_wait.shared.b64 %p2, [%t1], %q2;
        selp.b32 $x4, 1, 0, %p2;
        mbarrier.arrive.shared.b64 %q3, [%t1];
        {test("$x5", 0)}
        {test("$x6", 1)}
        mbarrier.test_wait.shared.b64 %p2, [%t1], %q2;
        selp.b32 $x7, 1, 0, %p2;"""
    yield single("mbarrier.arrive, test_wait, pending_count", script)
    script = f"""{init}
        mbarrier.arrive.shared.b64 %q1, [%t1], 3;
        {test("$x0", 0)}
        mbarrier.arrive.noComplete.shared.b64 %q2, [%t1], 2;
        {pending("$x1", "%q2")}
        mbarrier.arrive.shared.b64 %q3, [%t1];
        {pending("$x2", "%q3")}
        {test("$x3", 1)}
        {test("$x4", 0)}
        mbarrier.arrive.shared.b64 %q3, [%t1];
        {pending("$x5", "%q3")}
        mbarrier.inval.shared.b64 [%t1];
        mbarrier.init.shared.b64 [%t1], 1;
        {test("$x6", 0)}
        {test("$x7", 1)}"""
    yield single("mbarrier.arrive count, noComplete, inval, several phases", script)
    script = f"""{init}
        mbarrier.arrive_drop.shared.b64 %q1, [%t1];
        mbarrier.arrive.shared.b64 %q1, [%t1], 2;
        {test("$x0", 0)}
        mbarrier.arrive.shared.b64 %q2, [%t1];
        {pending("$x1", "%q2")}
        {test("$x2", 1)}
        mbarrier.arrive.shared.b64 %q2, [%t1];
        {test("$x3", 1)}"""
    yield single("mbarrier.arrive_drop", script)
    script = f"""mbarrier.init.shared.b64 [%t1], 2;
        mbarrier.arrive.expect_tx.shared.b64 %q1, [%t1], 64;
        {pending("$x0", "%q1")}
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%t1], 64;
        {test("$x1", 0)}
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%t1], 32;
        mbarrier.arrive.shared.b64 %q2, [%t1];
        {pending("$x2", "%q2")}
        {test("$x3", 0)}
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%t1], 32;
        {test("$x4", 0)}
        {test("$x5", 1)}
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%t1], 1048575;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%t1], 1048575;
        mbarrier.arrive.shared.b64 %q2, [%t1], 2;
        {test("$x6", 1)}
        {test("$x7", 0)}"""
    yield single("mbarrier.expect_tx, mbarrier.complete_tx, arrive.expect_tx", script)
    script = f"""mbarrier.init.shared.b64 [%t1], 1;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%t1], 48;
        mbarrier.arrive.shared.b64 %q1, [%t1];
        {test("$x0", 0)}
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%t1], 48;
        {test("$x1", 0)}"""
    yield single("mbarrier.complete_tx before expect_tx", script)
    script = f"""mbarrier.init.shared.b64 [%t1], 1048575;
        mbarrier.arrive.shared.b64 %q1, [%t1], 1048574;
        {pending("$x0", "%q1")}
        mbarrier.arrive.shared.b64 %q1, [%t1], 1;
        {pending("$x1", "%q1")}
        {test("$x2", 0)}"""
    yield single("mbarrier.init 2^20 - 1", script)


def forms() -> Iterator[Sketch]:
    """Yield cases of waits with scopes and time limits."""
    script = "mbarrier.init.shared::cta.b64 [%t1], 1;\nmbarrier.arrive.release.cta.shared::cta.b64 %q1, [%t1];"
    for i, op in enumerate(
        (
            "mbarrier.try_wait.parity.shared.b64 %p2, [%t1], 0, 1000;",
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%t1], 0, 1000;",
            "mbarrier.try_wait.acquire.cluster.shared::cta.b64 %p2, [%t1], %q1;",
            "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%t1], 1;",
            "mbarrier.test_wait.acquire.cta.shared::cta.b64 %p2, [%t1], %q1;",
            "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p2, [%t1], 0;",
        )
    ):
        script += f"\n{op}\nselp.b32 $x{i}, 1, 0, %p2;"
    yield single("mbarrier.try_wait, test_wait: scopes, time limit", script)


def handoff() -> Iterator[Sketch]:
    """Yield a case of producer and consumer warps over two mbarriers for three phases."""
    body = f"""
        setp.eq.u32 %p1, $tid, 0;
        @!%p1 bra READY;
        mbarrier.init.shared.b64 [$smem], 32;
        mbarrier.init.shared.b64 [$smem+8], 32;
        READY:
        bar.sync 0;
        mov.b32 $x, 0;
        mov.b32 %t1, 0;
        add.s32 %t5, $smem, 8;
        and.b32 %t2, $tid, 31;
        mad.lo.u32 %t3, %t2, 4, $smem;
        setp.ge.u32 %p2, $tid, 32;
        @%p2 bra CONSUMER;
        PRODUCER:
        and.b32 %t4, %t1, 1;
        xor.b32 %t4, %t4, 1;
        {wait("%t5", "%t4", "EMPTY")}
        mad.lo.u32 %t6, %t1, 1000, $a;
        st.shared.b32 [%t3+64], %t6;
        mbarrier.arrive.release.cta.shared::cta.b64 %q1, [$smem];
        add.u32 %t1, %t1, 1;
        setp.lt.u32 %p3, %t1, 3;
        @%p3 bra PRODUCER;
        bra END;
        CONSUMER:
        and.b32 %t4, %t1, 1;
        {wait("$smem", "%t4", "FULL")}
        sub.s32 %t7, 31, %t2;
        mad.lo.u32 %t7, %t7, 4, $smem;
        ld.shared.b32 %t6, [%t7+64];
        mad.lo.u32 $x, $x, 7, %t6;
        mbarrier.arrive.shared.b64 _, [%t5];
        add.u32 %t1, %t1, 1;
        setp.lt.u32 %p3, %t1, 3;
        @%p3 bra CONSUMER;
        END:
    """
    form = "mbarrier.try_wait.parity, producer and consumer"
    data = random(form).randint(0, 1000, 64).astype(np.uint32)
    yield Sketch(form, form, P + "mbarrier", body, (data,), (np.zeros(64, np.uint32),), shared=256, threads=64)


def registers() -> Iterator[Sketch]:
    """Yield cases of the special registers of grids and clusters."""
    names = (
        *("ctaid.x", "ctaid.y", "nctaid.x", "nctaid.y", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_nctaid.x"),
        *("cluster_nctaid.y", "cluster_ctarank", "cluster_nctarank", "clusterid.x", "clusterid.y"),
        *("nclusterid.x", "nclusterid.y", "ntid.x", "dynamic_smem_size"),
    )
    body = "\n".join(f"mov.u32 $x{i}, %{name};" for i, name in enumerate(names))
    form = "special registers of a cluster"
    for grid, cluster in (
        ((2, 2, 1), (2, 2, 1)),
        ((4, 2, 1), (2, 1, 1)),
        ((2, 4, 1), (1, 2, 1)),
        ((3, 2, 1), (1, 1, 1)),
    ):
        ctas = grid[0] * grid[1]
        outs = (np.zeros((32 * ctas, 16), np.uint32),)
        name = f"special registers grid {grid[0]}x{grid[1]} cluster {cluster[0]}x{cluster[1]}"
        yield Sketch(name, form, "Special Registers", body, (), outs, grid=grid, cluster=cluster, shared=256)
    for x in (1, 2):
        form, name = "%is_explicit_cluster", f"%is_explicit_cluster, {x} CTAs"
        body = "mov.pred %p1, %is_explicit_cluster;\nselp.b32 $x, 1, 0, %p1;"
        flags = (np.zeros(64, np.uint32),)
        yield Sketch(name, form, "Special Registers", body, (), flags, grid=(2, 1, 1), cluster=(x, 1, 1))


def paired(name: str, isa: str, body: str, **more: object) -> Sketch:
    """Return a sketch of a cluster of two CTAs with different shared memories. %t1: own rank, %t2: address of $smem
    in the other CTA."""
    head = """mov.u32 %t1, %cluster_ctarank;
        xor.b32 %t3, %t1, 1;
        mapa.shared::cluster.u32 %t2, $smem, %t3;
    """
    image = random(name).randint(0, 256, (2, 512)).astype(np.uint8)
    options: dict = dict(image=image, dump=512, grid=(2, 1, 1), cluster=(2, 1, 1), shared=640) | more
    return Sketch(name, name, isa, f"{head}{SYNC}\n{body}\n{SYNC}", **options)


def remote() -> Iterator[Sketch]:
    """Yield cases of loads, stores and atomics in the other CTA's shared memory."""
    outs = (np.zeros(64, np.uint32),)
    body = (
        "mad.lo.u32 %t4, $tid, 4, %t2;\nld.shared::cluster.b32 $x, [%t4+64];\nst.shared::cluster.b32 [%t4+256], $tid;"
    )
    yield paired("mapa.shared::cluster.u32, ld.shared::cluster, st.shared::cluster", Q + "mapa", body, outs=outs)
    body = """cvt.u64.u32 %q1, $smem;
        cvta.shared.u64 %q1, %q1;
        mapa.u64 %q2, %q1, %t3;
        mul.wide.u32 %q3, $tid, 4;
        add.s64 %q2, %q2, %q3;
        ld.b32 $x, [%q2+128];
        getctarank.u64 %t5, %q2;
        getctarank.shared::cluster.u32 %t6, %t2;
        mapa.shared::cluster.u32 %t7, $smem, %t1;
        getctarank.shared::cluster.u32 %t8, %t7;
        ld.shared::cluster.b32 %t9, [%t7];
        mad.lo.u32 $x, %t5, 3, $x;
        mad.lo.u32 $x, %t6, 7, $x;
        mad.lo.u32 $x, %t8, 31, $x;
        add.u32 $x, $x, %t9;
        st.b32 [%q2+256], $x;"""
    yield paired("mapa.u64, getctarank, generic ld and st to a cluster", Q + "mapa", body, outs=outs)
    body = """atom.shared::cluster.add.u32 %t5, [%t2], 3;
        red.shared::cluster.max.u32 [%t2+4], $tid;
        red.relaxed.cluster.shared::cluster.xor.b32 [%t2+8], $tid;"""
    yield paired("atom.shared::cluster, red.shared::cluster", P + "atom", body)


BARRIER = """setp.ne.u32 %p1, $tid, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [$smem+512], {count};
    fence.mbarrier_init.release.cluster;
    READY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    add.s32 %t10, $smem, 512;
    add.s32 %t11, %t2, 512;
"""


def awaited(first: str, every: str = "") -> str:
    """Return code in which thread 0 runs `first`, all threads run `every`, and all wait for the CTA's own mbarrier."""
    return f"""{BARRIER.format(count=1)}
        @%p1 bra LATER;
        {first}
        LATER:
        {every}{wait("%t10", 0, "WAIT")}"""


def signals() -> Iterator[Sketch]:
    """Yield cases of mbarriers of the other CTA."""
    outs = (np.zeros(64, np.uint32),)
    body = f"""{BARRIER.format(count=32)}
        mad.lo.u32 %t4, $tid, 4, %t2;
        st.shared::cluster.b32 [%t4], $tid;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%t11];
        {wait("%t10", 0, "WAIT")}
        mad.lo.u32 %t4, $tid, 4, $smem;
        ld.shared.b32 $x, [%t4];"""
    yield paired("mbarrier.arrive.release.cluster.shared::cluster", P + "mbarrier", body, outs=outs)
    expect = "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%t11], 128;"
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    body = awaited(expect, f"mad.lo.u32 %t4, $tid, 4, %t2;\n{store}.b32 [%t4], $tid, [%t11];\n")
    yield paired("st.async.b32, mbarrier.arrive.expect_tx.shared::cluster", Q + "st.async", body)
    vector = f"mad.lo.u32 %t4, $tid, 16, %t2;\n{store}.v4.b32 [%t4], {{$tid, %t1, 7, 8}}, [%t11];\n"
    body = awaited("mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], 512;", vector)
    yield paired("st.async.v4.b32", Q + "st.async", body)
    for op in ("add.u32", "min.s32", "or.b32", "inc.u32"):
        reduce = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} [%t4], $tid, [%t11];"
        expect = "mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], 128;"
        body = awaited(expect, f"mad.lo.u32 %t4, $tid, 4, %t2;\n{reduce}\n")
        yield paired(f"red.async.relaxed.cluster.{op}", P + "red.async", body)


def transfers() -> Iterator[Sketch]:
    """Yield cases of bulk copies between CTAs and of multicast."""
    form = "cp.async.bulk.shared::cluster.shared::cta"
    body = awaited(f"""mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], 192;
        fence.proxy.async.shared::cta;
        add.s32 %t4, $smem, 256;
        {form}.mbarrier::complete_tx::bytes [%t2], [%t4], 192, [%t11];""")
    yield paired(form, B, body)
    for op in ("add.u32", "min.s32", "max.u32", "xor.b32", "dec.u32"):
        form = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}"
        body = awaited(f"""mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], 192;
            add.s32 %t4, $smem, 256;
            {form} [%t2], [%t4], 192, [%t11];""")
        yield paired(form, "Asynchronous Copy Instructions: cp.reduce.async.bulk", body)
    what = packed_map("bf16", (40, 9), (16, 4))
    size = 128
    for mask in (1, 2, 3):
        form = "cp.async.bulk.tensor.2d, multicast::cluster"
        op = f"{TILE.format('shared::cluster')}.multicast::cluster"
        body = awaited(f"""setp.eq.u32 %p3, %t1, 0;
            shr.u32 %t4, {mask}, %t1;
            and.b32 %t4, %t4, 1;
            mul.lo.u32 %t4, %t4, {size};
            mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], %t4;
            mov.b32 %t12, 8;
            mov.b32 %t13, 2;
            mov.b16 %h1, {mask};
            add.s32 %t5, $smem, 128;
            @%p3 {op} [%t5], [$m0, {{%t12, %t13}}], [%t10], %h1;""")
        name = f"{form} mask {mask}"
        more = dict(buffers=(tensor(name, what),), maps=(what,))
        yield replace(paired(name, T, body, **more), form=form)
    form = "cp.async.bulk.shared::cluster.global.multicast::cluster"
    op = form.replace(".multicast", ".mbarrier::complete_tx::bytes.multicast")
    body = awaited(f"""mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], 320;
        mov.b16 %h1, 3;
        mul.lo.u32 %t4, %t1, 160;
        cvt.u64.u32 %q2, %t4;
        add.s64 %q2, $g0, %q2;
        add.s32 %t5, $smem, %t4;
        {op} [%t5], [%q2], 160, [%t10], %h1;""")
    data = random(form).randint(0, 256, 512).astype(np.uint8)
    yield paired(form, B, body, buffers=(data,))
    form = "cp.async.bulk.tensor.2d, tile to the other CTA's barrier"
    body = awaited(f"""mbarrier.arrive.expect_tx.shared.b64 %q1, [%t10], {size};
        mov.b32 %t12, 8;
        mov.b32 %t13, 2;
        {TILE.format("shared::cluster")} [%t2], [$m0, {{%t12, %t13}}], [%t11];""")
    yield paired(form, T, body, buffers=(tensor(form, what),), maps=(what,))


def cluster_barriers() -> Iterator[Sketch]:
    """Yield cases of cluster barriers: arrive and wait apart, four CTAs that pass a value around."""
    body = """mov.u32 %t1, %cluster_ctarank;
        add.u32 %t3, %t1, 1;
        and.b32 %t3, %t3, 3;
        mapa.shared::cluster.u32 %t2, $smem, %t3;
        mad.lo.u32 %t4, $tid, 4, $smem;
        st.shared.b32 [%t4], $a;
        mov.b32 %t5, 0;
        AGAIN:
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mad.lo.u32 %t6, $tid, 4, %t2;
        ld.shared::cluster.b32 $x, [%t6];
        barrier.cluster.arrive.aligned;
        mad.lo.u32 $x, $x, 5, %t1;
        barrier.cluster.wait.aligned;
        st.shared.b32 [%t4], $x;
        add.u32 %t5, %t5, 1;
        setp.lt.u32 %p1, %t5, 3;
        @%p1 bra AGAIN;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.aligned;"""
    form = "barrier.cluster.arrive, barrier.cluster.wait"
    data = random(form).randint(0, 99, 128).astype(np.uint32)
    outs = (np.zeros(128, np.uint32),)
    more: dict = dict(grid=(4, 1, 1), cluster=(4, 1, 1), shared=256)
    yield Sketch(form, form, P + "barrier.cluster", body, (data,), outs, **more)


def sketches() -> Iterator[Sketch]:
    for family in (counts, forms, handoff, registers, remote, cluster_barriers, signals, transfers):
        yield from family()
