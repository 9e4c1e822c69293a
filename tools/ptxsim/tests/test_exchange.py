"""Values that CTAs hand each other through global memory: planted bugs are found in any schedule, right code passes."""

import numpy as np
import pytest
from ptxsim import MODES, Fault, launch, run

CTAS, THREADS = 3, 64
HEAD = f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .b64 part, .param .b64 tickets, .param .b64 out) .reqntid {THREADS}, 1, 1
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
ld.param.b64 %rd0, [part]; ld.param.b64 %rd2, [tickets]; ld.param.b64 %rd3, [out];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r3, dynamic;
mad.lo.s32 %r2, %r1, {THREADS}, %r0; mul.wide.u32 %rd4, %r2, 4; add.s64 %rd1, %rd0, %rd4;
mul.wide.u32 %rd4, %r0, 4; add.s64 %rd4, %rd0, %rd4; mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd3, %rd5;
setp.eq.u32 %p0, %r0, 0; add.s32 %r2, %r2, 1;
"""
# Each CTA writes a part; the last one to finish adds them up, thread i what threads 63 - i wrote.
MERGE = """st.global.b32 [%rd1], %r2;
bar.sync 0;                             // [before]
@!%p0 bra JOIN;
fence.acq_rel.gpu;                      // [release]
atom.relaxed.gpu.global.add.u32 %r4, [%rd2], 1;
st.shared.b32 [%r3], 0;
setp.ne.u32 %p1, %r4, 2;
@%p1 bra JOIN;
fence.acq_rel.gpu;                      // [acquire]
st.global.b32 [%rd2], 0;                // [reset]
st.shared.b32 [%r3], 1;
JOIN: bar.sync 0;                       // [behind]
ld.shared.b32 %r5, [%r3];
setp.eq.u32 %p2, %r5, 0;
@%p2 bra OUT;
sub.s32 %r6, 63, %r0; mul.wide.u32 %rd6, %r6, 4; add.s64 %rd6, %rd0, %rd6;
ld.global.b32 %r7, [%rd6]; ld.global.b32 %r8, [%rd6+256]; ld.global.b32 %r9, [%rd6+512];
add.s32 %r7, %r7, %r8; add.s32 %r7, %r7, %r9; st.global.b32 [%rd5], %r7;
OUT:
"""
SUMS = 3 * np.arange(THREADS, 0, -1) + (0 + 64 + 128)


class Launches:
    def __init__(self, body: str) -> None:
        part, self.counters = np.zeros((CTAS, THREADS), np.uint32), np.zeros(4, np.uint32)
        self.out = np.zeros(THREADS, np.uint32)
        self.call = launch(f"{HEAD}{body}ret;\n}}\n", [part, self.counters, self.out], CTAS, shared=4096)

    def run(self, **how) -> np.ndarray:
        self.out[:] = 0
        run(self.call, **how)
        return self.out


def without(place: str) -> str:
    kept = [line for line in MERGE.splitlines() if f"[{place}]" not in line or "JOIN" in line]
    return "\n".join(line.replace("bar.sync 0;", "") if f"[{place}]" in line else line for line in kept) + "\n"


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_correct(mode, resident):
    launches = Launches(MERGE)
    for seed in range(2):
        assert (launches.run(mode=mode, seed=seed, resident=resident) == SUMS).all()
        assert not launches.counters.any()


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("mode", ["eager", "random"])
@pytest.mark.parametrize("place", ["before", "release", "acquire", "behind"])
def test_planted_bug(place, mode, resident):
    with pytest.raises(Fault, match="ld.(global|shared).*(without synchronisation in between|nothing has written)"):
        Launches(without(place)).run(mode=mode, resident=resident)


def test_a_reset_that_is_missing_shows_in_the_second_launch():
    launches = Launches(without("reset"))
    assert (launches.run() == SUMS).all() and (launches.run() == 0).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fence.acq_rel.gpu;", "fence.acq_rel.cta;"),
        ("atom.relaxed.gpu", "atom.relaxed.cta"),
    ],
)
def test_too_narrow_or_too_weak(old, new):
    with pytest.raises(Fault, match="without synchronisation in between"):
        Launches(MERGE.replace(old, new)).run(resident=1)


def test_atomics_that_acquire_and_release_need_no_fence():
    body = MERGE.replace("fence.acq_rel.gpu;", "").replace("atom.relaxed.gpu", "atom.acq_rel.gpu")
    assert (Launches(body).run() == SUMS).all()
    for half in ("acquire", "release"):
        with pytest.raises(Fault, match="without synchronisation in between"):
            Launches(body.replace("acq_rel", half)).run()


FLAG = """setp.ne.u32 %p1, %r1, 1; @%p1 bra READER;
st.global.b32 [%rd1], %r2; bar.sync 0; @!%p0 bra OUT; {} bra OUT;
READER: setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT; @!%p0 bra READ;
SPIN: {} setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;
READ: bar.sync 0; ld.global.b32 %r5, [%rd4+256]; st.global.b32 [%rd5], %r5; OUT:
"""
GIVE = "st.release.gpu.global.b32 [%rd2], 1;"
TAKE = "ld.acquire.gpu.global.b32 %r4, [%rd2];"


@pytest.mark.parametrize("mode", MODES)
def test_a_flag_that_is_stored_and_polled(mode):
    rows = np.arange(64) + 65
    assert (Launches(FLAG.format(GIVE, TAKE)).run(mode=mode) == rows).all()
    fenced = FLAG.format(
        "fence.acq_rel.gpu;" + GIVE.replace("release", "relaxed"),
        TAKE.replace("acquire", "volatile").replace(".gpu", ""),
    ).replace("READ: bar.sync 0;", "fence.acq_rel.gpu; READ: bar.sync 0;")
    assert (Launches(fenced).run(mode=mode) == rows).all()
    weaker = [(GIVE, TAKE.replace("acquire", "relaxed")), (GIVE.replace("release", "relaxed"), TAKE)]
    weaker += [(GIVE.replace(".release.gpu", ""), TAKE), (GIVE, TAKE.replace(".acquire.gpu", ""))]
    for give, take in weaker:
        with pytest.raises(Fault, match="without synchronisation in between"):
            Launches(FLAG.format(give, take)).run(mode=mode)


def test_ctas_that_write_one_word():
    same = "st.global.b32 [%rd5], 7;\n"
    assert (Launches(same).run() == 7).all() and (Launches(same).run(resident=1) == 7).all()
    for resident in (1, 3):
        with pytest.raises(Fault, match=r"overwrites .* written by (several warps|warp \d of CTA \d)"):
            Launches("st.global.b32 [%rd5], %r1;\n").run(resident=resident)
    with pytest.raises(Fault, match=r"warp 0 of CTA 0: st.global.b32: overwrites .* by warp 1 of CTA 0, without"):
        Launches("setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT; shr.u32 %r4, %r0, 5; st.global.b32 [%rd3], %r4; OUT:\n").run()


@pytest.mark.parametrize("resident", [1, 3])
def test_ctas_that_write_parts_of_a_word(resident):
    body = """cvt.u16.u32 %h0, %r1; mul.wide.u32 %rd6, %r1, 1; mul.wide.u32 %rd7, %r0, 4; add.s64 %rd6, %rd6, %rd7;
    add.s64 %rd6, %rd3, %rd6; st.global.b8 [%rd6], %h0;\n"""
    assert (Launches(body).run(resident=resident) == 0x020100).all()


def test_the_read_only_path_is_for_what_nobody_writes():
    body = "st.global.b32 [%rd1], %r2; bar.sync 0; ld.global{}.b32 %r5, [%rd1]; st.global.b32 [%rd5], 7;\n"
    assert (Launches(body.format("")).run() == 7).all()
    with pytest.raises(
        Fault, match="ld.global.nc.b32: reads offset 0 of argument 0, written by warp 0 of CTA 0, in this launch"
    ):
        Launches(body.format(".nc")).run()
    assert (Launches("ld.global.nc.b32 %r5, [%rd1]; st.global.b32 [%rd5], %r5;\n").run() == 0).all()


COPY = """st.global.b32 [%rd1], %r2; {} bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT;
add.s32 %r4, %r3, 1024; @!%p0 bra WAIT; mbarrier.init.shared.b64 [%r4], 1; fence.proxy.async;
mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 256, [%r4];
WAIT: bar.sync 0; AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra AGAIN;
mul.lo.s32 %r6, %r0, 4; add.s32 %r6, %r3, %r6; ld.shared.b32 %r5, [%r6]; st.global.b32 [%rd5], %r5; OUT:
"""


@pytest.mark.parametrize("mode", MODES)
def test_bulk_copies_read_what_was_fenced_for_them(mode):
    rows = np.arange(64) + 1
    assert (Launches(COPY.format("fence.proxy.async;")).run(mode=mode) == rows).all()
    barrier_first = COPY.format("").replace("fence.proxy.async;", "")
    with pytest.raises(Fault, match="bulk.*reads offset 0 .*, which no fence.proxy.async has made visible"):
        Launches(barrier_first.replace("[%r4], 1;", "[%r4], 1; fence.mbarrier_init.release.cluster;")).run(mode=mode)


def test_prefetches_stay_in_their_buffers():
    """PTX does not say what those of other bytes do."""
    text, size = "cp.async.bulk.prefetch.L2.global [%rd0], {};\n", 4 * CTAS * THREADS
    assert not Launches(text.format(size)).run().any()
    outside = f"16 B at offset {size} of argument 0, which has {size} B"
    for wrong, why in ((size + 16, outside), (24, "24 B, must be a multiple of 16")):
        with pytest.raises(Fault, match=f"bulk.prefetch.*: {why}"):
            Launches(text.format(wrong)).run()


STORED = """setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT; mul.lo.s32 %r6, %r0, 4; add.s32 %r6, %r3, %r6;
st.shared.b32 [%r6], %r2; fence.proxy.async; bar.sync 0; @!%p0 bra READ;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r3], 256; cp.async.bulk.commit_group;
cp.async.bulk.wait_group{} 0; READ: bar.sync 0; ld.global.b32 %r5, [%rd1]; st.global.b32 [%rd5], %r5; OUT:
"""


@pytest.mark.parametrize("mode", MODES)
def test_bulk_stores_are_there_when_they_are_complete(mode):
    assert (Launches(STORED.format("")).run(mode=mode) == np.arange(64) + 1).all()
    with pytest.raises(Fault, match="reads offset 0 of argument 0, written by warp 0 of CTA 0, without"):
        Launches(STORED.format(".read")).run(mode=mode)


def test_copies_by_threads():
    body = """st.global.b32 [%rd1], %r2; {} sub.s32 %r6, 63, %r0; mul.wide.u32 %rd6, %r6, 4; add.s64 %rd6, %rd0, %rd6;
    mul.lo.s32 %r7, %r0, 4; add.s32 %r7, %r3, %r7; cp.async.ca.shared.global [%r7], [%rd6], 4;
    cp.async.wait_all; ld.shared.b32 %r5, [%r7]; setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT; st.global.b32 [%rd5], %r5; OUT:
    """
    first = body.replace(
        "st.global.b32 [%rd1], %r2;", "setp.ne.u32 %p1, %r1, 0; @%p1 bra OUT; st.global.b32 [%rd1], %r2;"
    )
    assert (Launches(first.format("bar.sync 0;")).run() == np.arange(64, 0, -1)).all()
    with pytest.raises(Fault, match="cp.async.*reads offset .* without synchronisation"):
        Launches(first.format("")).run()
