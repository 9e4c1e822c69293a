"""Instructions that need several threads, executed by a part of them: they work, or a fault names the instruction."""

import numpy as np
import pytest
from ptxsim import MODES, Deadlock, Fault, NotModelled, launch, run
from ptxsim.forms import THREAD, find, registered

HEAD = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .b64 out) .reqntid 128, 1, 1
{
.reg .pred %p<16>; .reg .b32 %r<64>; .reg .b64 %d<8>; .reg .f32 %f<16>;
.shared .align 1024 .b8 words[8192]; .shared .align 8 .b64 barrier; .shared .align 16 .b8 answer[16];
.shared .b32 column;
ld.param.b64 %d0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;
mov.u32 %r1, words; mov.u32 %r2, barrier; shl.b32 %r3, %r0, 4; add.u32 %r3, %r1, %r3; mov.u32 %r10, answer;
mov.u32 %r11, column; mov.u64 %d2, 0; mov.u64 %d3, 0; mov.u32 %r12, 0; mov.u32 %r5, 7; mov.u32 %r6, 0; mov.u32 %r7, 0;
mov.u32 %r8, 0; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
and.b32 %r4, %r0, 16; setp.eq.u32 %p1, %r4, 0; setp.lt.u32 %p2, %r0, 32; setp.ne.u32 %p3, %r0, %r0;
setp.eq.u32 %p4, %r0, 0; setp.lt.u32 %p5, %r0, 16;
st.shared.v4.b32 [%r3], {%r0, %r0, %r0, %r0}; add.u32 %r9, %r3, 2048; st.shared.v4.b32 [%r9], {%r0, %r0, %r0, %r0};
@%p4 mbarrier.init.shared.b64 [%r2], 1024; fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
"""
END = "st.global.b32 [%d1], %r5;\nret;\n}\n"
GUARDS = {"a warp": "%p2", "nobody": "%p3", "half of each warp": "%p1", "a lane": "%p4", "half a warp": "%p5"}
MMA = "{%f0, %f1, %f2, %f3}, {%r5, %r6, %r7, %r8}, {%r5, %r6}, {%f0, %f1, %f2, %f3}"
COLLECTIVE = f"""
bar.sync 1, 32
bar.arrive 1, 64
barrier.cta.sync.aligned 1, 32
bar.red.and.pred %p9, 1, 32, %p1
bar.red.popc.u32 %r5, 1, 32, %p1
barrier.cta.red.or.aligned.pred %p9, 1, 32, %p1
bar.warp.sync -1
bar.warp.sync 0xffff
barrier.cluster.arrive.aligned
barrier.cluster.wait.aligned
setmaxnreg.dec.sync.aligned.u32 24
elect.sync _|%p9, -1
elect.sync %r5|%p9, 0xffff
vote.sync.all.pred %p9, %p1, -1
vote.sync.ballot.b32 %r5, %p1, 0xffff
shfl.sync.idx.b32 %r5, %r0, 0, 31, -1
shfl.sync.bfly.b32 %r5|%p9, %r0, 1, 31, 0xffff
shfl.sync.bfly.b32 %r5, %r0, 16, 31, 0xffff
match.any.sync.b32 %r5, %r0, -1
match.all.sync.b32 %r5|%p9, %r0, 0xffff
redux.sync.add.u32 %r5, %r0, -1
redux.sync.min.f32 %f0, %f1, 0xffff
activemask.b32 %r5
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, [%r3]
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r3]
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {{%r5, %r6}}, [%r3]
stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {{%r5, %r6}}
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {{%r5}}
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {MMA}
movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r6
wgmma.fence.sync.aligned
wgmma.commit_group.sync.aligned
wgmma.wait_group.sync.aligned 0
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d2, %d3, 1, 1, 1, 0, 0
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r11], 32
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 32
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r12]
tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {{%r5, %r6}}, %r7, [%r12]
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {{%r5}}
tcgen05.wait::st.sync.aligned
""".strip().splitlines()
OTHERS = """
barrier.sync 1, 32
barrier.arrive 1, 64
barrier.red.or.pred %p9, 1, 32, %p1
barrier.red.popc.u32 %r5, 1, 32, %p1
barrier.cluster.arrive
barrier.cluster.wait
mbarrier.init.shared.b64 [%r2+8], 1
mbarrier.inval.shared.b64 [%r2]
mbarrier.arrive.shared.b64 %d2, [%r2]
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 0
mbarrier.test_wait.parity.shared.b64 %p9, [%r2], 1
mbarrier.try_wait.shared.b64 %p9, [%r2], %d2
fence.proxy.async
fence.acq_rel.gpu
griddepcontrol.wait
griddepcontrol.launch_dependents
cp.async.ca.shared.global [%r3], [%d1], 4
cp.async.commit_group
cp.async.wait_group 0
cp.async.wait_all
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d0], 16, [%r2]
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 16
cp.async.bulk.commit_group
cp.async.bulk.wait_group 0
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d0, {%r5, %r5}], [%r2]
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r1], [%r1], 16, [%r2]
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r3], %r5, [%r2]
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r3], %r5, [%r2]
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r2]
tcgen05.fence::after_thread_sync
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2]
tcgen05.mma.cta_group::1.kind::f16 [%r12], %d2, %d3, %r5, 1
tcgen05.cp.cta_group::1.128x256b [%r12], %d2
atom.shared.add.u32 %r5, [%r1], 1
div.u32 %r5, %r5, %r5
rem.s32 %r5, %r5, %r5
""".strip().splitlines()


def outcome(text: str, guard: str, branch: bool, mode: str) -> str:
    """Run an instruction under a guard, or behind a branch; return what the fault says, or "" if it runs."""
    body = f"@!{guard} bra OUT; {text}; OUT:\n" if branch else f"@{guard} {text};\n"
    try:
        run(launch(HEAD + body + END, [np.zeros(512, np.uint32)]), mode=mode, limit=5000)
    except (Fault, NotModelled) as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("text", [*COLLECTIVE, *OTHERS])
def test_it_works_or_is_named(text: str, guard: str) -> None:
    for number, branch in enumerate((False, True)):
        said = outcome(text, GUARDS[guard], branch, MODES[3 * number])
        assert not said or text.split()[0] in said or said.startswith("exit: "), said
        if guard == "nobody":
            assert not said


@pytest.mark.parametrize("text", [text for text in COLLECTIVE if ".sync.aligned" in text and "barrier" not in text])
def test_aligned_instructions_need_all_lanes(text: str) -> None:
    """A lane that the guard excludes, and a lane that has exited."""
    must = f"{text.split()[0]}: all lanes of the warp must execute it together, and lane"
    for guard, lane in (("half of each warp", 16), ("a lane", 1), ("half a warp", 16)):
        assert f"{must} {lane} is excluded by the guard" in outcome(text, GUARDS[guard], False, "late")
    if not text.startswith("wgmma"):
        assert f"{must} 0 has exited" in outcome(f"@%p4 exit; {text}", "%p2", True, "late")


@pytest.mark.parametrize("text", [text for text in COLLECTIVE if text.startswith("wgmma")])
def test_warpgroup_instructions_need_all_warps(text: str) -> None:
    said = outcome(text, "%p2", False, "late")
    assert f"{text.split()[0]}: all warps of the warpgroup must execute it together" in said
    assert "deadlock" in outcome(text, "%p2", True, "late")


def test_lanes_outside_the_member_mask_are_named() -> None:
    said = outcome("vote.sync.all.pred %p9, %p1, 0xffff", "%p2", False, "late")
    assert "warp 0 of CTA 0: vote.sync.all.pred: lane 16 executes it and its member mask leaves it out" in said
    said = outcome("bar.warp.sync -1", "%p5", False, "late")
    assert "warp 0 of CTA 0: bar.warp.sync: lane 16 is in the member mask and is excluded by the guard" in said
    said = outcome("shfl.sync.bfly.b32 %r5, %r0, 16, 31, 0xffff", "%p5", False, "late")
    assert "warp 0 of CTA 0: shfl.sync.bfly.b32: lane 0 reads lane 16, which does not take part" in said


def test_every_form_of_several_threads_is_here() -> None:
    known = {find(text.split()[0])[0] for text in COLLECTIVE}  # type: ignore[index]
    assert not [one.pattern.pattern for one in registered() if one.level > THREAD and one not in known]


def test_a_division_by_zero_under_a_guard() -> None:
    """It counts only for the threads that execute it, and the fault names them."""
    guarded = "mov.u32 %r6, 3; @%p4 mov.u32 %r6, 0; setp.ne.u32 %p6, %r6, 0; @{}%p6 {} %r5, %r5, %r6;\n"
    for op in ("div.u32", "rem.s64", "div.s32"):
        if op.endswith("32"):
            out = np.zeros(512, np.uint32)
            run(launch(HEAD + guarded.format("", op) + END, [out]))
            assert (out[:128] == np.where(np.arange(128), 2, 7)).all()
            with pytest.raises(Fault, match=rf"line \d+, warp 0 of CTA 0: {op}: integer division by zero"):
                run(launch(HEAD + guarded.format("!", op) + END, [out]))


def test_a_barrier_that_waits_for_the_skipped_warps_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"barrier 1 of CTA 0: 32 of 64 threads have arrived"):
        run(launch(HEAD + "@%p2 bar.sync 1, 64;\n" + END, [np.zeros(512, np.uint32)]))
