"""tools.ptxdiff: what it takes for equal, and what not."""

import pytest

from tools import ptxdiff

PTX = """\
// Compiler Build ID: CL-{build}
.version 9.4
.target sm_90a

.visible .entry {name}(
\t.param .align 8 .b8 {name}_param_0[{size}],
\t.param .u32 {name}_param_1
)
.reqntid 384, 1, 1
{{
\t.reg .b32 \t%r<{registers}>;
\t.loc 1 {line} 5
\tld.param.b32 \t%r1, [{name}_param_0{offset}];
\tld.param.b32 \t%r2, [{name}_param_1];
\tmov.u32 \t%r{third}, %tid.x;
\tadd.s32 \t%r5, %r{third}, {added};\t// comment
\tmad.lo.s32 \t%r6, %r1, %r5, %r2;
$L__BB0_1:
\tret;
}}
"""
PLAIN = dict(build=1, name="decode_m16_0", size=32, registers=7, line=3, offset="+8", third=4, added=1)


def text(**changes):
    return PTX.format(**{**PLAIN, **changes})


@pytest.mark.parametrize("changes", [{"name": "narrow__m16"}, {"build": 2}, {"line": 90}])
def test_names_and_comments_are_no_code(changes):
    assert ptxdiff.normalise(text(**changes)) == ptxdiff.normalise(text())


@pytest.mark.parametrize("changes", [{"size": 48}, {"offset": "+16"}, {"offset": ""}, {"registers": 8, "third": 7}])
def test_places_of_parameters_are_code_unless_the_abi_may_change(changes):
    assert ptxdiff.normalise(text(**changes)) != ptxdiff.normalise(text())
    assert ptxdiff.normalise(text(**changes), abi=True) == ptxdiff.normalise(text(), abi=True)


@pytest.mark.parametrize("abi", [False, True])
@pytest.mark.parametrize("before, after", [("$L__BB0_1:", "$L__BB0_2:"), ("%r1, %r5", "%r5, %r1"), ("384", "256")])
def test_code_is_code(abi, before, after):
    assert ptxdiff.normalise(text().replace(before, after), abi) != ptxdiff.normalise(text(), abi)


def test_compare_reports_what_has_no_equal_beside_the_closest_name(tmp_path, capsys):
    for folder, kernels in {
        "a": {"old/m16": text(), "old/m32": text(added=2)},
        "b": {"new/tile16": text(name="tile16"), "new/m32": text(added=3), "new/other": text(added=4)},
    }.items():
        for label, ptx in kernels.items():
            path = tmp_path / folder / f"{label}.ptx"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(ptx)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert ptxdiff.main(["compare", a, b]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 kernels have an equal, 1 have none, 2 are new" in said
    assert "old/m32: 2 of 17 lines differ from new/m32" in said
    assert "old/m16" not in said
    (tmp_path / "map").write_text("old/m32 new/other\nold/m16 new/other\n")
    assert ptxdiff.main(["compare", a, b, "--map", str(tmp_path / "map")]) == 1
    said = capsys.readouterr().out
    assert "old/m32: 2 of 17 lines differ from new/other" in said
    assert "old/m16: has an equal, but new/other is not it" in said
    assert ptxdiff.main(["compare", a, a, "--abi"]) == 0
