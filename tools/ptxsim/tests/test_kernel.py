"""Arguments of a launch, and the command, on a kernel written by hand."""

from pathlib import Path

import numpy as np
import pytest
from ptxsim import Fault, NotModelled, TensorMap, TiledArray, launch, run
from ptxsim.__main__ import main, value_of
from ptxsim.coverage import missing

PTX = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry first(.param .b64 x) { ret; }
.visible .entry scale(
 .param .u64 .ptr .global .align 4 x,
 .param .u64 y,
 .param .f32 factor,
 .param .u32 count
)
{
.reg .pred %p<2>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
mov.b32 %r6, 0x40000000;
mov.u32 %r7, %r6;
ld.param.b64 %rd0, [x]; ld.param.b64 %rd1, [y]; ld.param.b32 %r0, [factor]; ld.param.b32 %r1, [count];
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
mad.lo.s32 %r5, %r2, %r3, %r4;
setp.lt.u32 %p0, %r5, %r1;
mad.wide.u32 %rd0, %r5, 4, %rd0; mad.wide.u32 %rd1, %r5, 4, %rd1;
@%p0 ld.global.b32 %r7, [%rd0];
mul.f32 %r7, %r7, %r0;
@%p0 st.global.b32 [%rd1], %r7;
ret;
}
"""


def scaled(*args: object, **how: object) -> None:
    run(launch(PTX, args, grid=3, block=32, entry="scale", **how))  # type: ignore[arg-type]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(70, dtype=np.float32), np.zeros(70, np.float32)


@pytest.mark.parametrize(("factor", "count"), [(2, 70), (2.0, np.uint32(70)), (np.float32(2), b"\x46\0\0\0")])
def test_numbers_take_the_parameters_types(factor: object, count: object) -> None:
    x, y = arrays()
    scaled(x, y, factor, count)
    assert (y == 2 * x).all()


def test_a_view_is_an_address_in_its_buffer() -> None:
    x, y = arrays()
    scaled(x[10:], y[20:], 3, 50)
    assert (y[20:] == 3 * x[10:60]).all() and not y[:20].any()
    with pytest.raises(Fault, match="4 B at offset 280 of argument 0, which has 280 B"):
        scaled(x[10:], y, 3, 70)


@pytest.mark.parametrize(
    ("args", "how", "message"),
    [
        ((1, 2, 3), {}, "3 arguments: kernel scale takes x, y, factor, count"),
        ((None, None, 1.0, 2.5e9 + 2**33), {}, r"argument 3, \.u32 count"),
        ((None, None, np.float64(1), 3), {}, r"argument 2, \.f32 factor: 8 B, must be 4 B"),
        ((None, None, np.zeros(3), 3), {}, "argument 2, .f32 factor: an array, must be a number of 4 B"),
        ((None, None, "2", 3), {}, "argument 2, .f32 factor"),
        ((None, None, 1, -3), {"entry": "third"}, "kernel third: the PTX has first, scale"),
        ((None, None, 1, -3), {"entry": ""}, "entry: must be one of the kernels of the PTX, first, scale"),
        ((None, None, 1, 3), {"grid": (1, 0)}, r"grid: \(1, 0\), must be one to three positive numbers"),
        ((None, None, 1, 3), {"block": None}, "block: the PTX has no .reqntid"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], how: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(launch(PTX, args, **({"grid": 3, "block": 32, "entry": "scale"} | how)))  # type: ignore[arg-type]


def test_other_kernels_leave_and_lines_stay() -> None:
    call = launch(PTX, (None, None, 1, 3), entry="scale")
    assert "first" not in call.ptx
    assert call.ptx.splitlines()[12] == PTX.splitlines()[12]


MAPPED = """.version 8.7
.target sm_90a
.visible .entry kernel(.param .align 64 .b8 map[128]) { ret; }
"""


def test_a_tiled_array_becomes_a_tensor_map() -> None:
    array = np.zeros((6, 5, 128), np.float16)[:, 1:, :64]
    call = launch(MAPPED, [TiledArray(array, (2, 4, 32), 64, "nan")])
    (start,) = call.memory.bases.tolist()
    assert call.params == [TensorMap(start + 256, (64, 4, 6), (256, 1280), (32, 4, 2), "f16", 64, "nan")]
    with pytest.raises(ValueError, match=r"argument 0, .b8 map: strides \(1280, 256, 4\) B, the last must be 2 B"):
        launch(MAPPED, [TiledArray(array[:, :, ::2], (2, 4, 32))])


def test_an_instruction_that_is_not_modelled_is_named() -> None:
    """With its line and text, before anything runs or as it runs."""
    x, y = arrays()
    for old, new, message in (
        ("mul.f32 %r7, %r7, %r0", "frob.f32 %r7, %r7, %r0", "line 23: no form for frob.f32 %r7, %r7, %r0"),
        ("%r2, %ctaid.x", "%r2, %pm3", "line 18: mov.u32 %r2, %pm3: the special register %pm3 is not modelled"),
        ("mov.b32 %r6, 0x40000000", "mov.b32 %r6, what", r"line 15: mov.b32 %r6, what: ValueError\(.*what"),
        ("ld.param.b64 %rd0", "ld.param.b64 %other", r"line 17: ld.param.b64 %other, \[x\]: KeyError\('%other'\)"),
    ):
        assert old in PTX
        with pytest.raises(NotModelled, match=message):
            run(launch(PTX.replace(old, new), [x, y, 2, 70], grid=3, block=32, entry="scale"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PTX[:-3], "the text ends before the kernel"),
        (PTX[:-9], "line 21: @%p0 st.global.b32 .*: no semicolon ends this"),
    ],
)
def test_a_text_that_is_cut_off(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(text[text.index("\n.visible .entry scale") :], [None, None, 1, 3])


# ------------------------------------------------------------------------------------------------ the command
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3", -3), ("0x10", 16), ("0.5", 0.5), ("null", None), ("f16=0.5", np.float16(0.5)),
        ("u8=255", np.uint8(255)), ("s32:2x2:count", np.arange(4, dtype=np.int32).reshape(2, 2)),
        ("f64:3:ones", np.ones(3)),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    got = value_of(text)
    assert type(got) is type(value) and np.array_equal(got, value)
    assert not isinstance(value, np.ndarray) or got.dtype == value.dtype


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A function that runs `ptxsim run` on a PTX text: (exit status, output, errors)."""

    def call(*options: str, ptx: str = PTX) -> tuple[int, str, str]:
        (tmp_path / "kernel.ptx").write_text(ptx)
        status = main(
            ["run", str(tmp_path / "kernel.ptx"), "--entry", "scale", "--grid", "3", "--block", "32", *options]
        )
        return status, *capsys.readouterr()

    return call


ARGS = [part for value in ("f32:70:count", "f32:70", "2", "70") for part in ("--arg", value)]


def test_a_run_in_all_modes(command, tmp_path: Path) -> None:
    status, out, _ = command(*ARGS, "--save", f"1={tmp_path / 'y.npy'}", "--coverage")
    assert status == 0 and "argument 1: float32 70, 0.0, 2.0, 4.0, 6.0, ..." in out
    assert "never executed: 0 of 17 instructions, 0.0%" in out
    assert (np.load(tmp_path / "y.npy") == 2 * np.arange(70)).all()


def test_a_fault_ends_with_1(command) -> None:
    status, out, _ = command(*ARGS, "--arg", "3", "--mode", "late")
    assert status == 2
    status, out, _ = command(*[part.replace("f32:70:", "f32:60:") for part in ARGS], "--mode", "late")
    assert status == 1 and "late: Fault: line 22, warp" in out and "of argument 0, which has 240 B" in out


def test_errors_of_users_end_with_2(command) -> None:
    for options, message in (
        (ARGS[:-2], "3 arguments: kernel scale takes"),
        ([*ARGS[:-1], "q3:4"], "type 'q3', must be"),
        ([*ARGS[:-1], "f32:4:some"], "fill 'some', must be zeros, ones, count, normal"),
        ([*ARGS[:-1], "none.npy"], "none.npy"),
    ):
        status, _, error = command(*options)
        assert status == 2 and message in error
    status, _, error = command(*ARGS, ptx=PTX.replace("mul.f32", "frob.f32"))
    assert status == 2 and "NotModelled: line 23: no form for frob.f32" in error


def test_what_no_run_executed() -> None:
    x, y = arrays()
    result = run(launch(PTX, [x, y, 2, 0], grid=3, block=32, entry="scale"))
    assert missing(result).count == 2
