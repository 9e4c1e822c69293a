"""Instructions that run at once give the bits that they give one by one."""

import numpy as np
import pytest
from ptxsim import launch, run, together

REGISTERS, PREDICATES = 12, 3
HEAD = f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out) .reqntid 64, 1, 1
{{
.reg .pred %p<{PREDICATES}>, %q;
.reg .b32 %r<{REGISTERS}>;
.reg .b32 %t;
.reg .b64 %rd<2>;
ld.param.b64 %rd0, [out]; mov.u32 %t, %tid.x;
mad.wide.u32 %rd0, %t, {4 * REGISTERS}, %rd0;
"""


def instruction(draw: np.random.Generator) -> str:
    """Draw an instruction of any registers: equal ones in a row are likely, and so is every kind of dependence."""
    a, b, c, d = draw.integers(0, REGISTERS, 4)
    p, q = draw.integers(0, PREDICATES, 2)
    number = int(draw.integers(0, 40))
    guard = f"@%p{p} " if draw.random() < 0.05 else ""
    kinds = (
        f"add.s32 %r{a}, %r{b}, %r{c};", f"add.s32 %r{a}, %r{b}, {number};", f"xor.b32 %r{a}, %r{b}, %r{c};",
        f"fma.rn.f32 %r{a}, %r{b}, %r{c}, %r{d};", f"max.f32 %r{a}, %r{b}, %r{c};", f"mov.b32 %r{a}, %r{b};",
        f"mov.b32 %r{a}, {number};", f"cvt.rn.bf16x2.f32 %r{a}, %r{b}, %r{c};", f"shl.b32 %r{a}, %r{b}, {number % 9};",
        f"setp.lt.s32 %p{p}, %r{a}, {number};", f"setp.lt.s32 %p{p}, %r{a}, %r{b};", f"and.pred %p{p}, %p{q}, %p{p};",
        f"selp.b32 %r{a}, %r{b}, %r{c}, %p{p};", f"prmt.b32 %r{a}, %r{b}, %r{c}, 0x3{number % 8}10;",
        f"shfl.sync.bfly.b32 %r{a}, %r{b}, 1, 31, -1;", f"ex2.approx.ftz.f32 %r{a}, %r{b};",
    )  # fmt: skip
    kind = kinds[int(draw.integers(0, len(kinds)))]
    return kind if kind.startswith("shfl") else guard + kind


def body(draw: np.random.Generator) -> str:
    lines = [f"mad.lo.s32 %r{i}, %t, {i + 3}, {7 * i};" for i in range(REGISTERS)]
    lines += [f"setp.gt.u32 %p{i}, %t, {20 * i};" for i in range(PREDICATES)]
    while len(lines) < 120:
        kind = instruction(draw)
        names = [f"%r{i}" for i in draw.permutation(REGISTERS)]
        copies = int(draw.integers(1, 9)) if "%r" in kind and kind[0] != "@" else 1
        lines += [kind] + [f"add.s32 {names[i]}, {names[-1 - i]}, {names[6]};" for i in range(copies - 1)]
    return "\n".join(lines)


def results(text: str, branch: bool) -> np.ndarray:
    """branch: only the odd lanes of each warp run the code."""
    out = np.zeros((64, REGISTERS), np.uint32)
    skip = "and.b32 %r0, %t, 1; setp.eq.u32 %q, %r0, 0; @%q bra OUT;\n" if branch else ""
    stores = "".join(f"st.global.b32 [%rd0+{4 * i}], %r{i};\n" for i in range(REGISTERS))
    run(launch(f"{HEAD}{skip}{text}\n{stores}OUT: ret;\n}}\n", [out]))
    return out


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_bits_are_those_of_one_instruction_after_the_other(seed, branch, monkeypatch):
    text = body(np.random.default_rng(seed))
    if branch:  # other lanes of the warp stand elsewhere
        text = "\n".join(line for line in text.splitlines() if "shfl" not in line)
    found = results(text, branch)
    monkeypatch.setattr(together, "LEAST", 1 << 30)
    assert (found == results(text, branch)).all() and len(np.unique(found)) > 100


def test_equal_instructions_that_depend_on_none_of_each_other_share_a_group(monkeypatch):
    groups = []
    order = together.order
    monkeypatch.setattr("ptxsim.translate.order", lambda *unit: groups.append(order(*unit)) or groups[-1])
    adds = [f"add.s32 %r{i}, %r{i}, {i};" for i in range(6)]
    results("\n".join([*adds, *adds, "add.s32 %r6, %r0, %r1; xor.b32 %r7, %r0, %r1;"]), False)
    sizes = [len(group) for unit in groups for group in unit]
    assert sizes.count(6) == 2 and sum(sizes) > 12
