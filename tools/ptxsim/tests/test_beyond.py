"""Clusters that are cancelled before they are launched, and what only kernels of others may rely on."""

import sys

import numpy as np
import pytest
import test_engine
import test_tcgen05
from ptxsim import BEYOND as NAMES
from ptxsim import MODES, Fault, KernelLaunch, RunResult, kernel, launch, run
from test_engine import execute
from test_tcgen05 import WAIT, small

# A warp a CTA. The first of a cluster asks for the next one as long as it gets one; all add 1 at the word of its own.
CANCEL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .b64 out) .reqntid 32, 1, 1
{
.reg .pred %first, %leads, %done, %more;
.reg .b32 %x, %y, %z, %w, %rank, %phase, %answer, %bar, %other, %tid, %at, %old;
.reg .b64 %out, %to;
.shared .align 16 .b8 answer[16];
.shared .align 8 .b64 bar;
ld.param.b64 %out, [out];
mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank;
mov.u32 %answer, answer; mov.u32 %bar, bar; mov.u32 %phase, 0;
setp.eq.u32 %first, %tid, 0; or.b32 %w, %tid, %rank; setp.eq.u32 %leads, %w, 0;
@%first mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
NEXT:
mad.lo.u32 %at, %z, 3, %y; mad.lo.u32 %at, %at, 4, %x; mul.wide.u32 %to, %at, 4; add.u64 %to, %out, %to;
@%first atom.global.add.u32 %old, [%to], 1;
@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 16;
barrier.cluster.arrive; barrier.cluster.wait;
@%leads TRY_CANCEL [%answer], [%bar];
WAIT:
mbarrier.try_wait.parity.shared.b64 %done, [%bar], %phase;
@!%done bra WAIT;
xor.b32 %phase, %phase, 1;
ld.shared.v4.b32 {%x, %y, %z, %w}, [%answer];
fence.proxy.async.shared::cta;
barrier.cluster.arrive; barrier.cluster.wait;
and.b32 %w, %z, 1; setp.ne.u32 %more, %w, 0;
add.u32 %x, %x, %rank; shr.u32 %z, %y, 16; and.b32 %y, %y, 65535;
@%more bra NEXT;
ret;
}
"""
FORM = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128"


def cancelled(text: str = CANCEL, **how) -> tuple[np.ndarray, RunResult]:
    """How often each CTA of a grid of 4 x 3 x 2 in pairs did its part."""
    out = np.zeros((2, 3, 4), np.uint32)
    return out, run(launch(text.replace("TRY_CANCEL", FORM), [out], (4, 3, 2), cluster=2), **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", [1, 5, 12])
def test_cancelled_clusters_run_once_in_the_place_of_others(mode: str, resident: int) -> None:
    out, result = cancelled(mode=mode, resident=resident)
    assert (out == 1).all()
    assert result.counts.get("clusters cancelled", 0) == 12 - resident
    assert result.counts["try_cancel"] == 12


WRONG = {
    "no fence": ("fence.mbarrier_init.release.cluster;\n", "", "not fenced for async use"),
    "of another CTA": ("NEXT:\n", "mapa.shared::cluster.u32 %answer, %answer, 1;\nNEXT:\n", "of the CTA itself"),
    "misaligned": ("[%answer], [%bar]", "[%answer+8], [%bar]", "aligned"),
    "read too soon": ("@!%done bra WAIT;\n", "", "async write is under way"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_of_an_answer(what: str) -> None:
    old, new, message = WRONG[what]
    assert CANCEL.count(old) == 1
    with pytest.raises(Fault, match=message):
        cancelled(CANCEL.replace(old, new), mode="late")


# ------------------------------------------------------------------------------------------------ beyond the ISA
LANES = ("shl.b32 %lanes, %warp, 21", "mov.u32 %lanes, 0")
LEFT = (WAIT, WAIT + "@%leads mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 16;\n")
RELAXED = """setp.lt.u32 %p1, %r0, 32; mov.u32 %r5, 7; mov.u32 %r6, %r3; add.u32 %r7, %r3, 64; setp.eq.u32 %p2, %r0, 0;
@%p2 mbarrier.init.shared.b64 [%r7], 1;
bar.sync 0;
@!%p2 bra WAIT;
st.shared.b32 [%r6], %r5;
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r7];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p3, [%r7], 0;
@!%p3 bra WAIT;
mov.u32 %r5, 0; ld.shared.b32 %r5, [%r6];
"""
BEYOND = {
    "init": (lambda: unfenced(), "was initialised, but not fenced for async use"),
    "exit": (lambda: small("eager", LEFT), "with 16 bytes missing"),
    "lanes": (lambda: small("eager", LANES), "may access lanes 32 to 63"),
    "relaxed": (lambda: execute(RELAXED), "without synchronisation in between"),
}


def unfenced() -> np.ndarray:
    """Run `CANCEL` without its fence; return 7 for every 1."""
    return 7 * cancelled(CANCEL.replace("fence.mbarrier_init.release.cluster;\n", ""))[0]


@pytest.mark.parametrize("what", BEYOND)
def test_a_fault_but_for_kernels_that_rely_on_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, message = BEYOND[what]
    for others in ((), tuple(set(BEYOND) - {what})):
        allow(monkeypatch, others)
        with pytest.raises(Fault, match=message):
            use()
    allow(monkeypatch, (what,))
    got = use()
    assert got is None or (got == 7).all()


def allow(monkeypatch: pytest.MonkeyPatch, beyond: tuple[str, ...]) -> None:
    for module in (test_engine, test_tcgen05, sys.modules[__name__]):
        monkeypatch.setattr(module, "launch", lambda *a, **k: kernel.launch(*a, **k, beyond=beyond))


def test_a_lane_of_another_warp_stays_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, ("lanes",))
    with pytest.raises(Fault, match="tensor memory lane 64, warp 0 of CTA 0 may access lanes 0 to 31"):
        small("eager", (LANES[0], f"mov.u32 %lanes, {64 << 16}"))


def test_names_of_what_is_relied_on() -> None:
    assert set(NAMES) == set(BEYOND)
    with pytest.raises(ValueError, match="beyond: tidy, must be among exit, init, lanes, relaxed"):
        KernelLaunch("", [], beyond=("tidy",))
