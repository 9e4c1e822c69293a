"""Sums of a wgmma over shared memory that nothing has written: dropping them is right, using them is a fault."""

import re

import numpy as np
import pytest
from ptxsim import MODES, Fault, NotModelled, launch, run

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .b64 out) .reqntid 128, 1, 1
{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<8>; .reg .f32 %f<16>;
ld.param.b64 %rd0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
mov.u32 %r3, dynamic; shl.b32 %r4, %r0, 4; add.s32 %r4, %r3, %r4;
mov.b32 %r5, 0x3F803F80; mov.u32 %r6, 1; setp.ne.u32 %p1, %r6, 0; setp.eq.u32 %p2, %r6, 0;
shr.u32 %r7, %r3, 4; cvt.u64.u32 %rd2, %r7; or.b64 %rd2, %rd2, 0x0000001000080000;
add.s64 %rd3, %rd2, 128;
st.shared.v4.b32 [%r4], {%r5, %r5, %r5, %r5};
mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; mov.f32 %f8, 0f40A00000;
"""
B = "setp.ge.u32 %p3, %r0, 16; @!%p3 st.shared.v4.b32 [%r4+2048], {%r5, %r5, %r5, %r5};\n"
READY = "fence.proxy.async; bar.sync 0;\n"
MMA = """wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd2, %rd3, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""
FRESH = MMA.replace("%p1", "%p2")  # does not add to what the sums were
STORE = "st.global.f32 [%rd1], %f8;\nret;\n}\n"


def execute(body: str, mode: str) -> np.ndarray:
    out = np.zeros(128, np.float32)
    run(launch(HEAD + body + STORE, [out], shared=4096), mode=mode)
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "behind",
    [
        "",
        "mov.f32 %f9, %f1;\n",
        "fma.rn.f32 %f9, %f1, %f8, %f1; mov.f32 %f9, 0f00000000; add.f32 %f8, %f9, %f8;\n",
        f"bar.sync 0; {B}{READY}{FRESH}mov.f32 %f8, %f1; sub.f32 %f8, %f8, 0f41300000;\n",
    ],
    ids=["nothing", "a move", "computed and dropped", "multiplied anew"],
)
def test_sums_that_nobody_uses(behind, mode):
    assert (execute(READY + MMA + behind, mode) == 5).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("behind", "user"),
    [
        ("mov.f32 %f8, %f1;\n", "st.global.f32: uses %f8"),
        ("mov.b32 %r8, %f3; shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1; mov.b32 %f8, %r9;\n", "st.global.f32: uses %f8"),
        ("max.f32 %f9, %f0, %f8; st.shared.f32 [%r4], %f9;\n", "st.shared.f32: uses %f9"),
        ("setp.gt.f32 %p4, %f2, %f8; @%p4 bra OUT; OUT:\n", "bra: uses %p4"),
        ("setp.gt.f32 %p4, %f2, %f8; selp.f32 %f8, %f8, 0f00000000, %p4;\n", "st.global.f32: uses %f8"),
        ("mov.b32 %r8, %f3; and.b32 %r8, %r8, 4; add.s32 %r8, %r8, %r3; ld.shared.f32 %f9, [%r8];\n", "uses %r8"),
        (f"bar.sync 0; {B}{READY}{MMA}mov.f32 %f8, %f1;\n", "st.global.f32: uses %f8"),
        ("@%p2 mov.f32 %f1, 0f00000000; mov.f32 %f8, %f1;\n", "st.global.f32: uses %f8"),
    ],
    ids=["store", "shuffle", "shared", "branch", "predicate", "address", "added to", "guard"],
)
def test_sums_that_are_used(behind, user, mode):
    with pytest.raises(
        Fault, match=rf"{user}.* depends on line 17.*wgmma.*reads shared 0x800, which nothing has written"
    ):
        execute(READY + MMA + behind, mode)


@pytest.mark.parametrize("mode", MODES)
def test_written_tiles(mode):
    assert (execute(B + READY + MMA + "mov.f32 %f8, %f1;\n", mode) == 16).all()


TWO_GROUPS = HEAD.replace(".reqntid 128", ".reqntid 256").replace("st.shared.v4", "@!%p4 st.shared.v4")
TWO_GROUPS = TWO_GROUPS.replace("mov.b32 %r5", "setp.ge.u32 %p4, %r0, 128; setp.eq.u32 %p5, %r0, 128; mov.b32 %r5")
WRITE_B = "@%p5 st.shared.v4.b32 [%r3+2048], {%r5, %r5, %r5, %r5};"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waits", [False, True])
def test_a_tile_that_another_warp_writes_late(waits, mode):
    """Warp 4 writes B: that is a race, unless the warp has waited for the wgmma."""
    read = (
        f"fence.proxy.async; bar.sync 1, 128;\n{MMA}{'bar.arrive 2, 256;' if waits else ''}\nst.global.f32 [%rd1], %f1;"
    )
    write = f"{'bar.sync 2, 256;' if waits else ''}\n{WRITE_B}"
    ptx = f"{TWO_GROUPS}@%p4 bra WRITE;\n{read}\nbra OUT;\nWRITE:\n{write}\nOUT:\nret;\n}}\n"
    for seed in range(4 if mode == "random" else 1):
        with pytest.raises(Fault) as caught:
            run(launch(ptx, [np.zeros(256, np.float32)], shared=4096), mode=mode, seed=seed)
        said = str(caught.value)
        if waits:
            assert re.search(r"%f1, which depends on line 18, .*: reads shared 0x800, which nothing has written$", said)
        elif "overwrites" in said:  # the write came behind the read
            assert re.search(
                r"warp 4 of CTA 0: st.shared.*which warp 0 of CTA 0 has read, (.|\n)*line 18, warp 0", said
            )
        else:
            assert "line 18, warps 0 to 3 of CTA 0: wgmma.mma_async" in said
            assert re.search(
                r"reads shared 0x800, w.* warp 4 of CTA 0(.|\n)* line 25, warp 4 of CTA 0: st.shared", said
            )


def test_blocks_of_part_of_a_warpgroup() -> None:
    with pytest.raises(NotModelled, match="160 threads: wgmma .* 128"):
        run(launch(HEAD.replace(".reqntid 128", ".reqntid 160") + MMA + STORE, [None], shared=4096))
