"""The report of PTX that no run executed."""

import numpy as np
from ptxsim import RunResult, coverage, launch, run

PTX = """.version 8.7
.target sm_90a
.address_size 64
.file 1 "/somewhere/kernel.py"
.visible .entry kernel(.param .b64 out, .param .b32 number) .reqntid 64, 1, 1
{
.reg .pred %p<8>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
.shared .align 8 .b64 barrier;
ld.param.b64 %rd0, [out];
ld.param.b32 %r1, [number];
mov.u32 %r0, %tid.x;
setp.ne.u32 %p1, %r1, 1;
setp.eq.u32 %p2, %r1, 2;
@%p1 bra $OTHER;
.loc 1 40 3
st.global.b32 [%rd0], 7;
.loc 1 41 3
st.global.b32 [%rd0], 8;
.loc 1 50 3
$OTHER: @%p2 st.global.b32 [%rd0], 9;
setp.lt.u32 %p3, %r1, 5;
@%p3 bra $FINE;
trap;
$FINE: mov.u32 %r3, barrier;
setp.ne.u32 %p4, %r0, 0;
@%p4 bra $READY;
mbarrier.init.shared.b64 [%r3], 64;
$READY: bar.sync 0;
mbarrier.arrive.shared.b64 _, [%r3];
LAB_WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r3], 0;
@%p5 bra DONE;
bra LAB_WAIT;
DONE: ret;
mov.u32 %r4, 0;
}
"""


def result(*numbers: int) -> RunResult:
    total = RunResult()
    for number in numbers:
        total.add(run(launch(PTX, [np.zeros(64, np.uint32), number])))
    return total


def lines(found: coverage.Missing) -> list[int]:
    kernel = coverage.known(PTX)[0]
    return [kernel.instructions[i].line for i in found.places[PTX]]


def test_branches_and_guards_decide():
    assert lines(coverage.missing(result(1))) == [22]
    assert lines(coverage.missing(result(2))) == [18, 20]
    assert lines(coverage.missing(result(3))) == [18, 20, 22]


def test_runs_add_up():
    found = coverage.missing(result(1, 2))
    assert found.count == 0 and found.share == 0 and found.total == 23


def test_what_cannot_run_is_exempt():
    kernel, reasons = coverage.known(PTX)
    assert {kernel.instructions[i].line: reason for i, reason in reasons.items()} == {
        25: "the kernel gives up here",
        34: "repeats a wait that was not over at once",
        36: "no path leads here",
    }


def test_the_report_names_lines_labels_and_sources():
    text = coverage.report(result(3))
    assert text.splitlines() == [
        "never executed: 3 of 23 instructions, 13.0%",
        "  lines 18-22 (3): st.global.b32 [%rd0], 7  [kernel.py:40-41,50]",
    ]
    assert "  lines 22-22 (1), $OTHER: st.global.b32 [%rd0], 9  [kernel.py:50]" in coverage.report(result(1))
