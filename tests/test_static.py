"""tools/static.py on a program written down here; Blackwell's prefill uses instructions of kernels which ran there."""

import pytest

from tests.conftest import ROOT
from tests.kernels import COVERING
from tools import proven, static

pytestmark = pytest.mark.slow

STALLED = 2 << 41  # high word of an instruction


def listing(*texts):
    lines = ["Function : k"]
    for k, text in enumerate(texts):
        lines.append(f"        /*{16 * k:04x}*/                   {text} ;    /* 0x{k:016x} */")
        lines.append(f"                                                /* 0x{STALLED:016x} */")
    return "\n".join(lines) + "\n"


def test_a_steady_path_leaves_out_what_is_not_owed():
    texts = ["MOV R1, R2", "VOTE.ANY P0, P0", "@!P0 BRA 0x50", "LDTM.x32 R4, tmem[UR4]", "STTM.x32 tmem[UR4], R4",
             "FADD R1, R1, R2", "@P1 BRA 0x10", "EXIT"]  # fmt: skip
    (code,) = static.parse(listing(*texts)).values()
    (loop,) = static.loops(code)
    assert loop.role == "correction"
    assert [i.address for i in loop.path] == [0x10, 0x20, 0x50, 0x60]
    assert loop.stall == 8 and loop.stored == []


def test_a_steady_path_takes_in_all_mmas():
    texts = ["NOP", "@P0 BRA 0x30", "UTCHMMA gdesc[UR4]", "BRA 0x50", "EXIT", "@!P1 BRA 0x0", "BRA 0x0"]
    (code,) = static.parse(listing(*texts)).values()
    loop = next(iter(static.loops(code)))
    assert loop.role == "mma" and [i.name for i in loop.path].count("UTCHMMA") == 1


def shipped_here():
    return [(arch, spec) for arch, op, spec in COVERING if op == static.OP]


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "spec"), [pytest.param(*x, id=f"{x[0]}-{x[1].name}") for x in shipped_here()])
def test_kernels_use_what_kernels_that_ran_on_a_device_use(blackwell, arch, spec):
    entry = blackwell(arch).find(static.OP, spec)
    assert not proven.unproven(object_of(entry, "ptx").read_text())


def test_forms_are_told_with_all_qualifiers():
    ptx = """
    tcgen05.st.sync.aligned.32x32b.x64.b32 [%r1], {%r2};
    @%p1 add.rm.f32x2 %rd1, %rd2, %rd3; // tcgen05.other
    mul.f32x2 %rd1, %rd2, %rd3;
    max.f32 %f1, %f2, %f3;
    max.NaN.f32 %f1, %f2, %f3, %f4;
    cvt.rn.f16x2.e2m1x2 %r1, %b1;
    cvt.rn.f16x2.e4m3x2 %r1, %h1;
    cvt.rn.relu.f16x2.e2m1x2 %r1, %b1;
    """
    unknown = {"tcgen05.st.sync.aligned.32x32b.x64.b32", "max.NaN.f32", "cvt.rn.relu.f16x2.e2m1x2"}
    assert proven.forms(ptx) == unknown | {"add.rm.f32x2", "mul.rn.f32x2", *proven.ALONE}
    assert proven.unproven(ptx) == unknown


def object_of(entry, suffix):
    return ROOT / "build" / "obj" / f"{entry['key']}.{suffix}"
