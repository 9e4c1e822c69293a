"""Barriers that a part of the threads executes: by a guard, behind a branch, or because others have exited.

The outcomes in HOPPER are those of an H200, where the same bodies ran with 64 threads; "hangs" there is a deadlock or a
livelock here. It also runs an .aligned barrier under a guard that differs in a warp, which the ISA does not define and
which is a fault here."""

import numpy as np
import pytest
from ptxsim import MODES, Deadlock, Fault, Livelock, launch, run

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .b64 out) .reqntid {threads}, 1, 1
{{
.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;
.shared .align 16 .b8 words[1024];
ld.param.b64 %d0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;
and.b32 %r1, %r0, 16; setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r0, 32; mov.u32 %r5, 7;
mov.u32 %r2, words; shl.b32 %r3, %r0, 2; add.u32 %r2, %r2, %r3;
"""  # %p1: lanes 0 to 15 of each warp; %p2: warp 0
END = "st.global.b32 [%d1], %r5;\nret;\n}\n"
WAYS = [(mode, seed) for mode in MODES for seed in ((0, 1, 2, 3) if mode == "random" else (0,))]
SPIN = "SPIN: ld.volatile.global.b32 %r4, [%d0+1024]; setp.eq.u32 %p5, %r4, 0; @%p5 bra SPIN;"
FLAG = "st.volatile.global.b32 [%d0+1024], 1;"


def execute(body: str, threads: int = 64, **how) -> np.ndarray:
    """Run `body`, which leaves a result in %r5; word 256 of the array is the flag of SPIN."""
    out = np.zeros(257, np.uint32)
    run(launch(HEAD.format(threads=threads) + body + "\n" + END, [out]), **({"limit": 3000} | how))
    return out[:threads]


def arms(first: str, second: str) -> str:
    """Return code in which the upper half of each warp runs `first` and the lower half `second`."""
    return f"@%p1 bra LOW; {first} bra JOIN; LOW: {second} JOIN:"


def others_spin(barrier: str) -> str:
    """Return code in which the upper half of each warp waits for what the lower half does behind a barrier."""
    return f"@!%p1 bra SPIN; {barrier} {FLAG} bra JOIN; {SPIN} JOIN:"


def produced(arrival: str) -> str:
    """Return code in which warp 0 arrives and warp 1 waits."""
    return f"@!%p2 bra WAIT; {arrival} bra JOIN; WAIT: barrier.sync 1, 64; {FLAG} JOIN:"


HALF = np.arange(64) % 32 < 16
RUNS = {
    "a guard that is the same for each warp": ("@%p2 bar.sync 1, 32;", True),
    "lanes that have exited": ("@!%p1 exit; barrier.sync 1, 64;", HALF),
    "lanes that have exited, aligned": ("@!%p1 exit; bar.sync 1, 64;", HALF),
    "half a warp, the rest exits": ("@%p1 barrier.sync 1, 64;", True),
    "half a warp with a count of 32": ("@%p1 barrier.sync 1, 32;", True),
    "two places in a warp": (arms("barrier.sync 1, 64;", "barrier.sync 1, 64;"), True),
    "a warp that has exited, without a count": ("@%p2 exit; bar.sync 0;", np.arange(64) >= 32),
    "a warp that the guard excludes, without a count": ("@%p2 bar.sync 0;", True),
    "half a warp that arrives": (produced("@%p1 barrier.arrive 1, 64;"), True),
    "a loop": (
        "mov.u32 %r6, 0; AGAIN: @%p1 barrier.sync 1, 64; add.u32 %r6, %r6, 1; setp.lt.u32 %p6, %r6, 3; @%p6 bra AGAIN;",
        True,
    ),
}
HANGS = {
    "half a warp, the rest spins": (others_spin("barrier.sync 1, 64;"), Livelock, "0 of 64"),
    "half a warp, the rest spins, 32": (others_spin("barrier.sync 1, 32;"), Livelock, "0 of 32"),
    "a count, and a warp that has exited": ("@%p2 exit; bar.sync 1, 64;", Deadlock, "32 of 64"),
    "a count, and a warp that the guard excludes": ("@%p2 barrier.sync 1, 64;", Deadlock, "32 of 64"),
    "half a warp that arrives, the rest spins": (
        produced(f"@%p1 bra GO; {SPIN} bra JOIN; GO: barrier.arrive 1, 64;"), Livelock, "32 of 64",
    ),
}  # fmt: skip
FAULTS = {
    "two barriers in a warp": (
        arms("barrier.sync 2, 64;", "barrier.sync 1, 64;"), r"barrier.sync: other lanes of the warp are in another"
    ),
    "two barriers by lane": (
        "and.b32 %r6, %r0, 1; barrier.sync %r6, 64;", r"warp \d of CTA 0: barrier.sync: lane 1 names barrier 1, lane 0"
    ),
    "arrivals and waits in a warp": (
        arms("barrier.arrive 1, 64;", "barrier.sync 1, 64;"), r"lanes of the warp are in another bar.*\n  the other: l"
    ),
    "aligned, half a warp": ("@%p1 bar.sync 1, 64;", r"bar.sync: all lanes .* lane 16 is excluded by the guard"),
    "aligned, arrivals": ("@%p1 bar.arrive 1, 64;", r"bar.arrive: all lanes .* lane 16 is excluded by the guard"),
    "aligned, two places": (
        arms("bar.sync 1, 64;", "bar.sync 1, 64;"), r"bar.sync: all lanes .* and lane \d+ is at line 11: bar.sync"
    ),
    "aligned, another barrier by lane": (
        "and.b32 %r6, %r0, 1; @%p1 barrier.sync.aligned %r6, 64;", r"barrier.sync.aligned: all lanes .* is excluded"
    ),
    "no multiple of 32": ("bar.sync 1, 48;", r"bar.sync: 48 threads, must be a multiple of 32"),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "seed"), WAYS)
@pytest.mark.parametrize("name", RUNS)
def test_what_runs_on_hopper(name: str, mode: str, seed: int) -> None:
    body, written = RUNS[name]
    assert (execute(body, mode=mode, seed=seed) == np.where(written, 7, 0)).all()


@pytest.mark.parametrize(("mode", "seed"), WAYS)
@pytest.mark.parametrize("name", HANGS)
def test_what_hangs_on_hopper(name: str, mode: str, seed: int) -> None:
    """The report names the barrier, the threads that have arrived and those that it expects."""
    body, error, count = HANGS[name]
    with pytest.raises(error, match=rf"line 11: (barrier|bar.sync)(.|\n)*barrier 1 of CTA 0: {count} threads"):
        execute(body, mode=mode, seed=seed)


@pytest.mark.parametrize(("mode", "seed"), WAYS)
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong(name: str, mode: str, seed: int) -> None:
    body, message = FAULTS[name]
    with pytest.raises(Fault, match=message):
        execute(body, mode=mode, seed=seed)


@pytest.mark.parametrize("mode", MODES)
def test_a_deadlock_of_two_barriers_names_both(mode: str) -> None:
    with pytest.raises(Deadlock) as caught:
        execute("@%p2 bar.sync 1, 64;\n@!%p2 barrier.sync 2, 64;", mode=mode)
    for text in (
        "warp  0 of CTA 0, 32 lanes, line 11: bar.sync 1, 64 [in the barrier]",
        "warp  1 of CTA 0, 32 lanes, line 12: barrier.sync 2, 64 [in the barrier]",
        "barrier 1 of CTA 0: 32 of 64 threads have arrived",
        "barrier 2 of CTA 0: 32 of 64 threads have arrived",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_collective_names_the_barrier_in_which_a_lane_waits(mode: str) -> None:
    with pytest.raises(Fault, match=r"shfl.*: lane 0 is in the member mask and is at line 12: barrier.sync"):
        execute(arms("shfl.sync.idx.b32 %r6, %r5, 0, 31, -1;", "\nbarrier.sync 1, 64;"), mode=mode)


def test_lanes_that_wait_for_their_warp_are_reported() -> None:
    with pytest.raises(Livelock) as caught:
        execute(others_spin("barrier.sync 1, 64;"))
    for text in (
        "16 lanes, line 11: barrier.sync 1, 64 [in the barrier] [waits for the other lanes of its warp]",
        "barrier 1 of CTA 0: 0 of 64 threads have arrived",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_producer_and_a_consumer(mode: str) -> None:
    """Warp 0 writes and arrives, warp 1 waits and reads, without a branch. The barrier orders the accesses."""
    body = """@%p2 st.shared.b32 [%r2], %r0; @%p2 {arrive} 1, 64; @!%p2 {sync} 1, 64;
    @!%p2 ld.shared.b32 %r5, [%r2+-128];
    """
    for arrive, sync in (("bar.arrive", "bar.sync"), ("barrier.cta.arrive", "barrier.cta.sync")):
        out = execute(body.format(arrive=arrive, sync=sync), mode=mode, seed=1)
        assert (out == [7] * 32 + list(range(32))).all()
    with pytest.raises(Fault, match="without synchronisation in between"):
        execute("@%p2 st.shared.b32 [%r2], %r0; @!%p2 ld.shared.b32 %r5, [%r2+-128];\n", mode=mode, seed=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_reduction_over_a_part_of_the_threads(mode: str) -> None:
    """Lanes 0 to 15 of both warps: thread 40 alone brings true, and thread 63, which takes no part."""
    body = """setp.eq.u32 %p3, %r0, {}; setp.ne.u32 %p4, %r0, %r0;
    @%p1 barrier.red.or.pred %p4, 1, 64, %p3; selp.u32 %r5, 1, 0, %p4;
    """
    assert (execute(body.format(40), mode=mode, seed=1) == HALF).all()
    assert (execute(body.format(63), mode=mode, seed=1) == 0).all()
    count = """setp.ge.u32 %p3, %r0, 40; barrier.red.popc.u32 %r6, 0, !%p3; @%p1 barrier.red.popc.u32 %r5, 1, 64, %p3;
    mad.lo.u32 %r5, %r6, 1000, %r5;
    """  # threads 0 to 39 of all, and threads 40 to 47 of the lower halves
    assert (execute(count, mode=mode, seed=1) == 40000 + np.where(HALF, 8, 7)).all()
    two = arms("barrier.red.and.pred %p4, 1, 64, %p3;", "barrier.red.and.pred %p6, 1, 64, %p3;")
    both = "setp.ne.u32 %p3, %r0, {}; " + two + "@%p1 selp.u32 %r5, 1, 0, %p6; @!%p1 selp.u32 %r5, 1, 0, %p4;"
    assert (execute(both.format(20), mode=mode, seed=1) == 0).all()
    assert (execute(both.format(64), mode=mode, seed=1) == 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_cluster_barriers_of_a_part_of_the_threads(mode: str) -> None:
    meet = "barrier.cluster.arrive{0}; barrier.cluster.wait{0};"
    for body in ("@%p2 bra MEET; exit; MEET: " + meet.format(".aligned"), "@!%p1 exit; " + meet.format("")):
        assert execute(body, mode=mode, seed=1).any()
    assert (execute(arms(meet.format(""), meet.format("")), mode=mode, seed=1) == 7).all()
    assert (execute("@%p1 barrier.cluster.arrive; @%p1 barrier.cluster.wait;", mode=mode, seed=1) == 7).all()
    with pytest.raises(Fault, match=r"barrier.cluster.arrive.aligned: all lanes .* lane 16 is excluded by the guard"):
        execute("@%p1 barrier.cluster.arrive.aligned;", mode=mode, seed=1)
    with pytest.raises(Fault, match=r"barrier.cluster.wait.aligned: all lanes .* lane 16 is excluded by the guard"):
        execute("barrier.cluster.arrive.aligned; @%p1 barrier.cluster.wait.aligned;", mode=mode, seed=1)


RING = """@%p2 bra COPY;
WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [words+512], 0; @!%p5 bra WAIT; bra JOIN;
COPY: cp.async.mbarrier.arrive.noinc.shared.b64 [words+512];
JOIN:"""


def test_arrivals_that_complete_no_phase_wake_nobody():
    """In the mode late, the arrivals of 32 threads complete one after the other; the waiting warp tries twice."""
    first = "setp.eq.u32 %p4, %r0, 0; @%p4 mbarrier.init.shared.b64 [words+512], 32; bar.sync 0;"
    out = np.zeros(257, np.uint32)
    steps = [
        run(launch(HEAD.format(threads=64) + first + body + END, [out]), mode="late").steps
        for body in (RING, RING.replace("@%p2 bra COPY;", "@%p2 bra COPY; bra JOIN;"))
    ]
    assert steps[0] - steps[1] < 10
