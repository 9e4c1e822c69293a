"""device/umma.py on integers: descriptors say where TMA has put every element, and are those that CUTLASS makes; the
cubic of device/exp2.py."""

import numpy as np
import pytest
from ptxsim.umma import decode_instruction, operand_layout

from cute_kernels.device import exp2, layout, umma
from tests.conftest import run_python

SIZE = 2  # bytes of an element


def address(width, rows, row, byte):
    """Where TMA puts a byte of a row of a stage of so many rows, whose boxes are `width` bytes wide."""
    return byte // width * rows * width + layout.swizzle(width, row, byte % width)


def places(descriptor, start, count, major):
    """Addresses (count, k) of what an MMA reads of the operand that begins at `start`."""
    index, _ = operand_layout(descriptor + (start >> 4), count, umma.STEP, SIZE, major, 16)
    return index * SIZE


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 192, 256])
@pytest.mark.parametrize("rows", [128, 256])
def test_rows_with_neighbours_along_k(dim, rows):
    width = layout.width(dim * SIZE)
    for first in range(0, rows, 128):
        for at in range(0, dim * SIZE, umma.STEP):
            start = 4096 + at // width * rows * width + at % width + first * width
            for row in (0, 1, 7, 8, 13, 127):
                want = [4096 + address(width, rows, first + row, at + SIZE * k) for k in range(umma.STEP // SIZE)]
                assert places(umma.k_major(width), start, 128, "k")[row].tolist() == want


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [64, 128])
def test_rows_with_neighbours_along_n(dim, keys):
    """V as it is stored: k are its rows."""
    width, each = layout.width(dim * SIZE), umma.STEP // SIZE
    for k in range(0, keys, each):
        got = places(umma.mn_major(width, keys), 8192 + k * width, dim, "mn")
        for column in (0, 1, 31, 63, dim - 1):
            want = [8192 + address(width, keys, k + i, SIZE * column) for i in range(each)]
            assert got[column].tolist() == want


@pytest.mark.parametrize("dtype, name", [("bf16", "bf16"), ("fp16", "f16")])
def test_instruction(dtype, name):
    one = decode_instruction("f16", 1, umma.instruction_descriptor("f16", dtype, 128, 64, "mn"), None, "")
    assert (one.m, one.n, one.formats, one.majors) == (128, 64, (name, name), ("k", "mn"))
    assert not one.half and one.sign == 1
    assert decode_instruction("f16", 1, umma.instruction_descriptor("f16", dtype, 128, 128), None, "").majors == (
        "k",
        "k",
    )


def test_cubic():
    f = np.linspace(0, 1, 1 << 16, endpoint=False)
    c = np.float32(exp2.CUBIC).astype(np.float64)
    off = np.abs((c[0] + f * (c[1] + f * (c[2] + f * c[3]))) / 2**f - 1)
    assert off.max() < 7.6e-5 < 2.0**-12 / 3, "of what rounds to fp16"


def test_what_the_cubic_makes_of_nan_is_huge():
    """A device's NaN has all bits but the sign; the simulator's has not, and stays NaN."""
    nan = 0x7FFFFFFF
    made = np.uint32(nan + (nan << 23) & 0xFFFFFFFF).view(np.float32)
    assert np.isfinite(made) and made > exp2.HUGE > 2.0**60


CASES = [("bf16", 128, 64, "k"), ("fp16", 128, 192, "k"), ("bf16", 128, 128, "mn"), ("bf16", 64, 128, "mn"),
         ("e4m3", 128, 128, "mn"), ("e4m3", 64, 128, "mn"), ("bf16", 64, 256, "k"),
         ("bf16", 256, 64, "mn")]  # fmt: skip
KINDS = {"bf16": "f16", "fp16": "f16", "e4m3": "f8f6f4"}


@pytest.fixture(scope="module")
def of_cutlass():
    """Case -> the descriptors that CUTLASS's helpers make of it."""
    names = [",".join(map(str, case)) for case in CASES]
    done = run_python("-m", "tests.support.cutlass_umma", *names, CUTE_DSL_ARCH="sm_100a")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: set(map(int, line[1:])) for line in lines if line and line[0] in names}


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_descriptors_are_those_of_cutlass(of_cutlass, case):
    """Operands at address 0: A (128, k), B (n, k), or, with its neighbours along n, (k, n)."""
    dtype, n, k, major = case
    theirs, size = of_cutlass[",".join(map(str, case))], 1 if dtype == "e4m3" else 2
    width = layout.width(k * size)
    of_a = umma.k_major(width)
    mine = {of_a + (at // width * 128 * width + at % width >> 4) for at in range(0, k * size, umma.STEP)}
    if major == "mn":
        width = layout.width(n * size)
        of_b = umma.mn_major(width, k)
        if n * size == width:  # one block of columns: nothing reads the distance to the next
            of_b &= ~(0x3FFF << 16)
        mine |= {of_b + (at * width >> 4) for at in range(0, k, umma.STEP // size)}
    assert mine | {umma.instruction_descriptor(KINDS[dtype], dtype, 128, n, major)} <= theirs
