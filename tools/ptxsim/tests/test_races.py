"""The report of a race names both instructions with their lines, PTX and source, their warp and their CTA, whatever
the schedule is."""

import re

import numpy as np
import pytest
from ptxsim import MODES, Fault, launch, run

HEAD = """.version 8.7
.target sm_90a
.file 1 "/somewhere/kernel.py"
.visible .entry kernel(.param .b64 out) .reqntid 64, 1, 1
{
.reg .pred %p<8>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
.shared .align 128 .b8 words[1024]; .shared .align 8 .b64 barrier;
ld.param.b64 %rd0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, words; mov.u32 %r2, barrier;
setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32;
shl.b32 %r3, %r0, 2; add.u32 %r3, %r1, %r3; sub.u32 %r4, %r3, 128; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd2, %rd0, %rd1;
mov.u32 %r6, 0; mov.u32 %r7, 256;
.loc 1 10 1
"""  # line 13 follows
BULK = """cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 256, [%r2];
"""
SETUP = """@%p1 mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
"""
W0, W1 = "warp 0 of CTA 0", "warp 1 of CTA 0"
RACES = {
    "read before a barrier": (
        "st.shared.b32 [%r3], 1;\n.loc 1 11 1\n@!%p0 ld.shared.b32 %r5, [%r4];\n",
        f"line 15 (kernel.py:11), {W1}: ld.shared.b32: reads shared 0x0, written by {W0}, without",
        f"the last write: line 13 (kernel.py:10), {W0}: st.shared.b32",
    ),
    "two writes": (
        "@%p0 st.shared.b32 [%r3], 1;\n.loc 1 11 1\n@!%p0 st.shared.b32 [%r4], 1;\n",
        f"line 15 (kernel.py:11), {W1}: st.shared.b32: overwrites shared 0x0, written by {W0}, without",
        f"the last write: line 13 (kernel.py:10), {W0}: st.shared.b32",
    ),
    "a write behind a read": (
        "@%p0 st.shared.b32 [%r3], 1;\nbar.sync 0;\n@%p0 ld.shared.b32 %r5, [%r3];\n.loc 1 11 1\n"
        "@!%p0 st.shared.b32 [%r4], 1;\n",
        f"line 17 (kernel.py:11), {W1}: st.shared.b32: overwrites shared 0x0, which {W0} has read, without",
        f"the last read: line 15 (kernel.py:10), {W0}: ld.shared.b32",
    ),
    "a read beside an atomic": (
        "st.shared.b32 [%r3], 1;\nbar.sync 0;\n@%p0 red.shared.add.u32 [%r3], 1;\n.loc 1 11 1\n"
        "@!%p0 ld.shared.b32 %r5, [%r4];\n",
        f"line 17 (kernel.py:11), {W1}: ld.shared.b32: reads shared 0x0, updated by {W0}, without",
        f"the last write: line 15 (kernel.py:10), {W0}: red.shared.add.u32",
    ),
    "an asynchronous copy that is not waited for": (
        f"{SETUP}@%p1 {BULK}.loc 1 11 1\nld.shared.b32 %r5, [%r3];\n",
        "ld.shared.b32: reads shared 0x0 while an async write is under way",
        f"the last write: line 17 (kernel.py:10), {W0}: cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes",
    ),
    "a copy over what was written without a fence": (
        f"@%p1 st.shared.b32 [%r3], 1;\n{SETUP}.loc 1 11 1\n@%p1 {BULK}",
        f"overwrites shared 0x0 through the async proxy, written by {W0} without fence.proxy.async",
        f"the last write: line 13 (kernel.py:10), {W0}: st.shared.b32",
    ),
    "global memory": (
        "@%p0 st.global.b32 [%rd2], 1;\n.loc 1 11 1\n@!%p0 ld.global.b32 %r5, [%rd2+-128];\n",
        f"line 15 (kernel.py:11), {W1}: ld.global.b32: reads offset 0 of argument 0, written by {W0}, without",
        f"the last write: line 13 (kernel.py:10), {W0}: st.global.b32",
    ),
    "two writes of global memory": (
        "@%p0 st.global.b32 [%rd2], %r0;\n.loc 1 11 1\n@!%p0 st.global.b32 [%rd2+-128], %r0;\n",
        f"line 15 (kernel.py:11), {W1}: st.global.b32: overwrites offset 0 of argument 0, written by {W0}, without",
        f"the last write: line 13 (kernel.py:10), {W0}: st.global.b32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_both_instructions_are_named(name: str) -> None:
    body, first, second = RACES[name]
    with pytest.raises(Fault, match=f"{re.escape(first)}.*\n  {re.escape(second)}$"):
        run(launch(f"{HEAD}{body}ret;\n}}\n", [np.zeros(64, np.uint32)]), mode="late")


BRANCHES = "@%p0 bra WRITE;\n{}\nbra OUT;\nWRITE:\n"  # warp 1 reads, warp 0 writes
WRITTEN = "st.shared.b32 [%r3], 1;\nOUT:\n"
FLIPPED = {  # a read, or the use of an mbarrier, and a write: in some schedules the write comes late
    "behind each other": ("st.shared.b32 [%r3], 1;\nxor.b32 %r5, %r3, 128; {}\n", "ld.shared.b32 %r5, [%r5];"),
    "two guards": ("{}\n@%p0 st.shared.b32 [%r3], 1;\n", "@!%p0 ld.shared.b32 %r5, [%r4];"),
    "two branches": (BRANCHES + WRITTEN, "ld.shared.b32 %r5, [%r4];"),
    "a vector": (
        "shl.b32 %r5, %r0, 4; add.u32 %r5, %r1, %r5; xor.b32 %r8, %r5, 512;\n"
        "st.shared.v4.b32 [%r5], {{%r0, %r0, %r0, %r0}};\n{}\n",
        "ld.shared.v4.b32 {%r9, %r10, %r11, %r12}, [%r8];",
    ),
    "an atomic": (BRANCHES + WRITTEN, "red.shared.add.u32 [%r4], 1;"),
    "an mbarrier": (
        BRANCHES + "@%p1 mbarrier.init.shared.b64 [%r2], 1;\nOUT:\n",
        "@%p2 mbarrier.arrive.shared.b64 _, [%r2];",
    ),
    "a bulk store": (
        BRANCHES.replace("{}", "{}\ncp.async.bulk.commit_group; cp.async.bulk.wait_group 0;") + WRITTEN,
        "@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 128;",
    ),
    "a bulk load": (f"{SETUP}{BRANCHES}@%p1 {BULK}OUT:\n", "ld.shared.b32 %r5, [%r4];"),
    "cp.async": (
        BRANCHES + "cp.async.ca.shared.global [%r3], [%rd2], 4;\nOUT:\n", "ld.shared.b32 %r5, [%r4];"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FLIPPED)
def test_a_race_is_no_use_of_unwritten_memory(name: str, mode: str) -> None:
    """Both instructions are named, with a line, a warp and a CTA each."""
    body, reading = FLIPPED[name]
    place = r"line \d+ \(kernel.py:10\), warp \d of CTA [01]"
    for seed in range(8 if mode == "random" else 1):
        with pytest.raises(Fault) as caught:
            call = launch(f"{HEAD}{body.format(reading)}ret;\n}}\n", [np.zeros(64, np.uint32)], grid=2)
            run(call, mode=mode, seed=seed, limit=20_000)
        said = str(caught.value)
        assert len(re.findall(place, said)) == 2 and "nothing has written" not in said, said
        (op,) = [part for part in reading.split() if "." in part][:1]
        assert op in said and re.search(r"without synchronisation in between|while an async|which an async", said), said
        warps = re.findall(r"line \d+ \(kernel.py:10\), (warp \d of CTA [01])", said)
        assert warps[0] != warps[1] and warps[0][-1] == warps[1][-1]


@pytest.mark.parametrize("mode", MODES)
def test_what_nobody_writes(mode: str) -> None:
    """Words that nothing writes, and words that are written only by threads that have waited for the reader."""
    for body in (
        "{}\n",
        "@!%p0 bra LATER;\n{}\nbar.sync 0;\nbra OUT;\nLATER: bar.sync 0;\nst.shared.b32 [%r4], 1;\nOUT:\n",
        "{}\nst.shared.b32 [%r3], 1;\n",
    ):
        with pytest.raises(Fault, match=r"ld.shared.b32: reads shared 0x0, which nothing has written$"):
            run(launch(f"{HEAD}{body.format('ld.shared.b32 %r5, [%r3];')}ret;\n}}\n", [None]), mode=mode, seed=1)
    with pytest.raises(Fault, match=r"mbarrier.test_wait.parity.shared.b64: no initialised mbarrier at shared 0x400$"):
        wait = "mbarrier.test_wait.parity.shared.b64 %p3, [%r2], 0;\n"
        run(launch(f"{HEAD}{wait}ret;\n}}\n", [None]), mode=mode, seed=1)


@pytest.mark.parametrize(
    ("grid", "cta"), [((3, 1, 1), "CTA 2"), ((3, 2, 1), r"CTA \(2, 1\)"), ((3, 1, 2), r"CTA \(2, 0, 1\)")]
)
def test_a_cta_has_its_index_in_the_grid(grid: tuple[int, int, int], cta: str) -> None:
    """Also where the CTAs before it are not resident any more."""
    is_last = """mov.u32 %r8, %ctaid.{0}; mov.u32 %r9, %nctaid.{0}; sub.u32 %r9, %r9, 1; setp.ne.u32 %p3, %r8, %r9;
    @%p3 bra OUT;
    """
    race = "st.shared.b32 [%r3], 1;\n@!%p0 ld.shared.b32 %r5, [%r4];\nOUT:\n"
    body = "".join(is_last.format(axis) for axis in "xyz") + race
    for resident in (1, 4):
        with pytest.raises(
            Fault, match=rf"warp 1 of {cta}: ld.*written by warp 0 of {cta}, .*\n.*, warp 0 of {cta}: st"
        ):
            run(launch(f"{HEAD}{body}ret;\n}}\n", [None], grid=grid), resident=resident)


def test_a_race_with_a_cta_that_has_left() -> None:
    body = "@!%p0 bra OUT;\nmov.u32 %r8, %ctaid.x; setp.eq.u32 %p3, %r8, 0;\n@!%p3 st.global.b32 [%rd2], %r8;\nOUT:\n"
    said = r"warp 0 of CTA 2: st.*overwrites .*written by warp 0 of CTA 1, (.|\n)*, warp 0 of CTA 1: st"
    with pytest.raises(Fault, match=said):
        run(launch(f"{HEAD}{body}ret;\n}}\n", [np.zeros(64, np.uint32)], grid=3), resident=1)


TENSOR = """.version 8.7
.target sm_100a
.visible .entry kernel(.param .b64 out) .reqntid 256, 1, 1
{
.reg .pred %p<9>; .reg .b32 %r<9>; .shared .b32 column;
mov.u32 %r0, %tid.x; mov.u32 %r1, column; shr.u32 %r2, %r0, 5; setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p4, %r2, 4;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
bar.sync 0;
ld.shared.b32 %r3, [%r1];
"""  # line 10 follows; warps 0 and 4 reach the same lanes
LOAD = "@%p0 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];\n"
SAVE = "@%p4 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0};\n@%p4 tcgen05.wait::st.sync.aligned;\n"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (LOAD + SAVE, r"line 10, {0}: tcgen05.ld.*, which {4} writes without.*\n  the write: line 11, {4}: tcgen05.st"),
        (
            SAVE + LOAD,
            r"line 12, {0}: tcgen05.ld.*(written by|which) {4}.* without.*\n.*write: line 10, {4}: tcgen05.st",
        ),
        (
            f"{SAVE}bar.sync 0;\n{LOAD}{SAVE}",
            r"line 14, {4}: .*overwrites .*, which {0} has read, .*\n  the last read: line 13, {0}: tcgen05.ld|"
            r"line 13, {0}: .*reads .*by {4}, .*\n  the last write: line 14, {4}: tcgen05.st",
        ),
        (LOAD, "tcgen05.ld.*: reads .*, which nothing has written$"),
    ],
    ids=["the read first", "the write first", "a write behind a read", "no write"],
)
def test_tensor_memory(body: str, said: str, mode: str) -> None:
    for seed in range(3 if mode == "random" else 1):
        with pytest.raises(Fault, match=said.replace("{0}", W0).replace("{4}", "warp 4 of CTA 0")):
            run(launch(f"{TENSOR}{body}ret;\n}}\n", [None]), mode=mode, seed=seed)


@pytest.mark.parametrize("mode", MODES)
def test_what_follows_from_a_stopped_warp_is_not_reported(mode: str) -> None:
    """Lane 0 uses an mbarrier that nothing initialises; the others wait in a shuffle, and warp 1 in a barrier."""
    body = "@!%p1 bra MEET;\nmbarrier.arrive.shared.b64 _, [%r2];\nMEET:\nshfl.sync.idx.b32 %r5, %r0, 0, 31, -1;\n"
    said = r"line 14 .*, warp 0 of CTA 0: mbarrier.arrive.*: no initialised mbarrier at shared 0x400$"
    with pytest.raises(Fault, match=said):
        run(launch(f"{HEAD}{body}bar.sync 0;\nret;\n}}\n", [None]), mode=mode, seed=1)
