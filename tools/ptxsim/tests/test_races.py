"""The report of a race names both instructions with their lines, PTX and source."""

import re

import numpy as np
import pytest
from ptxsim import Fault, launch, run

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
RACES = {
    "read before a barrier": (
        "st.shared.b32 [%r3], 1;\n.loc 1 11 1\n@!%p0 ld.shared.b32 %r5, [%r4];\n",
        "line 15 (kernel.py:11), warp 1: ld.shared.b32: reads shared 0x0, written by warp 0, without",
        "the last write: line 13 (kernel.py:10): st.shared.b32",
    ),
    "two writes": (
        "@%p0 st.shared.b32 [%r3], 1;\n.loc 1 11 1\n@!%p0 st.shared.b32 [%r4], 1;\n",
        "line 15 (kernel.py:11), warp 1: st.shared.b32: overwrites shared 0x0, written by warp 0, without",
        "the last write: line 13 (kernel.py:10): st.shared.b32",
    ),
    "a write behind a read": (
        "@%p0 st.shared.b32 [%r3], 1;\nbar.sync 0;\n@%p0 ld.shared.b32 %r5, [%r3];\n.loc 1 11 1\n"
        "@!%p0 st.shared.b32 [%r4], 1;\n",
        "line 17 (kernel.py:11), warp 1: st.shared.b32: overwrites shared 0x0, which warp 0 has read, without",
        "the last read: line 15 (kernel.py:10): ld.shared.b32",
    ),
    "a read beside an atomic": (
        "st.shared.b32 [%r3], 1;\nbar.sync 0;\n@%p0 red.shared.add.u32 [%r3], 1;\n.loc 1 11 1\n"
        "@!%p0 ld.shared.b32 %r5, [%r4];\n",
        "line 17 (kernel.py:11), warp 1: ld.shared.b32: reads shared 0x0, updated by warp 0, without",
        "the last write: line 15 (kernel.py:10): red.shared.add.u32",
    ),
    "an asynchronous copy that is not waited for": (
        f"{SETUP}@%p1 {BULK}.loc 1 11 1\nld.shared.b32 %r5, [%r3];\n",
        "ld.shared.b32: reads shared 0x0 while an async write is under way",
        "the last write: line 17 (kernel.py:10): cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes",
    ),
    "a copy over what was written without a fence": (
        f"@%p1 st.shared.b32 [%r3], 1;\n{SETUP}.loc 1 11 1\n@%p1 {BULK}",
        "overwrites shared 0x0 through the async proxy, written by warp 0 without fence.proxy.async",
        "the last write: line 13 (kernel.py:10): st.shared.b32",
    ),
    "global memory": (
        "@%p0 st.global.b32 [%rd2], 1;\n.loc 1 11 1\n@!%p0 ld.global.b32 %r5, [%rd2+-128];\n",
        "line 15 (kernel.py:11), warp 1: ld.global.b32: reads offset 0 of argument 0, written by warp 0, without",
        "the last write: line 13 (kernel.py:10): st.global.b32",
    ),
    "two writes of global memory": (
        "@%p0 st.global.b32 [%rd2], %r0;\n.loc 1 11 1\n@!%p0 st.global.b32 [%rd2+-128], %r0;\n",
        "line 15 (kernel.py:11), warp 1: st.global.b32: overwrites offset 0 of argument 0, written by warp 0, without",
        "the last write: line 13 (kernel.py:10): st.global.b32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_both_instructions_are_named(name: str) -> None:
    body, first, second = RACES[name]
    with pytest.raises(Fault, match=f"{re.escape(first)}.*\n  {re.escape(second)}$"):
        run(launch(f"{HEAD}{body}ret;\n}}\n", [np.zeros(64, np.uint32)]), mode="late")
