"""NVFP4 formats, exactly, against brute force."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.support.emulated import PLAIN, inputs_of
from wrappers import FP4Tensor, fp4
from wrappers.host import machine

E4M3 = torch.float8_e4m3fn


def nearest_code(x: float) -> int:
    """e2m1 code of a finite x: nearest of the grid in exact arithmetic, ties to the even code."""
    distance = [abs(min(abs(x), 8.0) - g) for g in fp4.GRID]  # exact in float64 for any float16 x
    code = min(range(8), key=lambda c: (distance[c], c % 2))
    return code | (8 if np.signbit(x) else 0)


def test_e2m1_of_every_fp16_value():
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    got = fp4.e2m1(torch.from_numpy(x.astype(np.float32))).numpy()
    for value, code in zip(x, got, strict=True):
        if np.isnan(value):
            assert code == 7
        elif np.isinf(value):
            assert code == (15 if value < 0 else 7)
        else:
            assert code == nearest_code(float(value)), value


def test_e4m3_saturates_and_rounds_to_even():
    x = torch.tensor([0.0, 448.0, 449.0, 1e9, float("inf"), -1e9, -float("inf"), 17.0, 19.0, 2.0**-10, float("nan")])
    want = [0.0, 448.0, 448.0, 448.0, 448.0, -448.0, -448.0, 16.0, 20.0, 0.0]
    got = fp4.e4m3(x).float()
    assert got[:-1].tolist() == want
    assert got[-1].isnan()


def around(x):
    """x and the fp32 numbers next to it."""
    return torch.nextafter(x, torch.tensor(-math.inf)), x, torch.nextafter(x, torch.tensor(math.inf))


def test_e2m1_at_every_midpoint():
    grid = torch.tensor(fp4.GRID)
    for sign, bit in ((1, 0), (-1, 8)):
        below, at, above = (fp4.e2m1(sign * x) for x in around((grid[1:] + grid[:-1]) / 2))
        lower = torch.arange(7) | bit
        assert below.tolist() == lower.tolist() and above.tolist() == (lower + 1).tolist()
        assert at.tolist() == [0 | bit, 2 | bit, 2 | bit, 4 | bit, 4 | bit, 6 | bit, 6 | bit]  # the even code
        assert fp4.e2m1(sign * torch.tensor([6.0, 7.0, 3e38])).tolist() == [7 | bit] * 3


FINITE = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 to 448, subnormals too: codes 0 to 0x7e


def test_e4m3_at_every_midpoint():
    middle = (FINITE[1:] + FINITE[:-1]) / 2
    for sign, bit in ((1, 0), (-1, 128)):
        below, at, above = (fp4.e4m3(sign * x).view(torch.uint8) for x in around(middle))
        lower = torch.arange(0x7E) | bit
        assert torch.equal(below, lower.to(torch.uint8)) and torch.equal(above, (lower + 1).to(torch.uint8))
        assert torch.equal(at, (lower + (lower & 1)).to(torch.uint8))  # the even code
        over = torch.tensor([448.0, 463.0, 464.0, 465.0, 1e30])
        assert fp4.e4m3(sign * over).view(torch.uint8).tolist() == [0x7E | bit] * 5


@pytest.mark.parametrize("global_scale", [1.0, 0.25])
def test_scale_factors_at_every_midpoint(global_scale):
    """amax / 6 rounds to the even factor, and saturates; a factor of 0 has codes of 0, signs left out."""
    factors = torch.cat([(FINITE[1:] + FINITE[:-1]) / 2, FINITE, torch.tensor([500.0, 1e6])])
    x = torch.zeros(len(factors), 16)
    x[:, 3], x[:, 5] = -6 * factors / global_scale, factors / global_scale  # exact
    data, sf = fp4.nvfp4_quantize(x, global_scale)
    assert torch.equal(sf.view(torch.uint8).flatten(), fp4.e4m3(factors).view(torch.uint8))
    codes = fp4.unpack(data)
    assert (codes[factors >= 2**-6, 3] == 15).all() and not codes[sf.flatten().float() == 0].any()
    assert not codes[:, [0, 1, 2, 4, *range(6, 16)]].any()


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-3, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_values_are_near(dtype, global_scale):
    """Within half the gap between codes, in units of the block's factor, which is within 1/16 of amax / 6 where it is
    normal, so that 6.375 is the most that is cut to 6."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(500, 8, 16, generator=gen) * torch.exp2(torch.randint(-4, 3, (500, 8, 1), generator=gen))
    x = (x * (torch.rand(500, 8, 16, generator=gen) < 0.9) / global_scale * 8).to(dtype)
    data, scales = fp4.nvfp4_quantize(x.flatten(1), global_scale)
    got = fp4.nvfp4_dequantize(data, scales, global_scale).view(x.shape)
    unit = scales.float()[..., None] / global_scale  # the value of code 1.0
    assert (scales.float() >= 2**-6).all()
    error, size = (got - x.float()).abs() / unit, x.float().abs() / unit
    slack = 1 + 2**-20  # of fp32 divisions
    assert (size <= 6 * (1 + 2**-4) * slack).all()
    for least, most, gap in ((0, 2, 0.5), (2, 4, 1), (4, 6, 2), (6, 7, 2)):
        inside = (size >= least) & (size <= most)
        assert inside.any() and (error[inside] <= gap / 2 * slack).all()
    assert (got.sign() * x.float().sign() >= 0).all() and (got[x == 0] == 0).all()
    assert (got.abs().amax(-1) > 0.9 * x.float().abs().amax(-1)).all()  # 6 is a code
    rms = (got - x.float()).square().mean().sqrt() / x.float().square().mean().sqrt()
    assert 0.05 < rms < 0.15


def test_pack_puts_even_index_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert fp4.pack(codes).tolist() == [[0x21, 0x0F]]
    assert fp4.unpack(fp4.pack(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("global_scale", [1.0, 300.0, 1e-3])
def test_quantize_against_brute_force(global_scale):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=gen) * torch.tensor([0.0, 1e-6, 1.0, 30.0, 1e4, 1e30])[:, None]
    data, scales = fp4.nvfp4_quantize(x, global_scale)
    assert data.dtype == torch.uint8 and data.shape == (6, 32) and scales.shape == (6, 4)
    for row, block in itertools.product(range(6), range(4)):
        values = x[row, block * 16 : block * 16 + 16]
        sf = min(np.float32(values.abs().max()) * np.float32(global_scale) / np.float32(6), np.float32(448))
        assert scales[row, block].float() == torch.tensor(sf).to(E4M3).float()
        sf = np.float32(scales[row, block].float())
        for i, value in enumerate(values.numpy()):
            byte = int(data[row, block * 8 + i // 2])
            code = byte >> 4 if i % 2 else byte & 15
            want = nearest_code(float(value * np.float32(global_scale) / sf)) if sf else 0
            assert code == want


def test_dequantize_inverts_representable_values():
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)  # every code in every block, so the amax is 6
    sf = torch.tensor([[0.5, 1.0], [2.0, 448.0], [0.015625, 3.5], [16.0, 0.25]])
    x = fp4.nvfp4_dequantize(fp4.pack(codes), sf.to(E4M3), 2.0)
    grid = torch.tensor(fp4.GRID + tuple(-g for g in fp4.GRID)).repeat(4, 2)
    assert torch.equal(x, grid * sf.repeat_interleave(16, 1) / 2)
    data, scales = fp4.nvfp4_quantize(x, 2.0)
    assert torch.equal(data, fp4.pack(codes)) and torch.equal(scales.float(), sf)


def test_quantize_refuses_a_partial_block():
    with pytest.raises(ValueError, match=r"x: shape \(2, 24\)"):
        fp4.nvfp4_quantize(torch.zeros(2, 24))


def test_swizzle_is_the_128x4_layout():
    rows, columns = 256, 12
    linear = torch.arange(rows * columns).view(rows, columns)
    want = linear.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()
    got = torch.empty(rows * columns, dtype=torch.int64)
    for row, column in itertools.product(range(rows), range(columns)):
        got[fp4.swizzled_offset(row, column, columns)] = linear[row, column]
    assert torch.equal(got, want)


@pytest.mark.parametrize("start,rows,columns", [(0, 1, 4), (5, 123, 6), (126, 130, 8), (100, 156, 3)])
def test_scales_written_at_a_start_row_touch_nothing_else(start, rows, columns):
    scale = torch.full((256, fp4.round_up(columns, 4)), 7.0).to(E4M3)
    linear = (torch.arange(rows * columns).view(rows, columns) % 15 + 8.0).to(E4M3)
    fp4.write_scales(linear, scale, start)
    assert torch.equal(fp4.read_scales(scale, rows, columns, start).float(), linear.float())
    assert (scale.float() == 7.0).sum() == scale.numel() - linear.numel()


def test_store_and_load_an_output():
    x = torch.randn(131, 3, 32, generator=torch.Generator().manual_seed(1))
    out = fp4.empty((131, 3, 32), x.device)
    assert out.scale.shape == (256, 8) and out.data.shape == (131, 3, 16) and out.dtype == "nvfp4"
    fp4.store(x, out, 300.0)
    data, scales = fp4.nvfp4_quantize(x.flatten(1), 300.0)
    assert torch.equal(fp4.load(out, 300.0), fp4.nvfp4_dequantize(data, scales, 300.0).view(131, 3, 32))
    assert (fp4.load(out, 300.0) - x).square().mean().sqrt() < 0.3 * x.std()


@pytest.mark.parametrize("shape", [(3, 3, 80), (130, 1, 16), (2, 1, 112), (0, 3, 80)])
def test_factors_that_pad_the_rows_of_a_new_output_are_0(shape, monkeypatch):
    """A GEMM over tiles of 128 x 4 multiplies by them. Memory that is not written holds NaN here."""
    empty = lambda *size, dtype, device: torch.full(size, 0x7F, dtype=torch.uint8).view(dtype)  # noqa: E731
    monkeypatch.setattr(fp4.torch, "empty", empty)
    out = fp4.empty(shape, torch.device("cpu"))
    columns = shape[1] * shape[2] // 16
    rows, padded = out.scale.shape
    assert padded % 4 == 0 and columns < padded
    for row, column in itertools.product(range(rows), range(columns, padded)):
        assert out.scale.view(torch.uint8).flatten()[fp4.swizzled_offset(row, column, padded)] == 0


@pytest.mark.parametrize("function", ["context", "decode"])
def test_outputs_of_attention_have_no_nan_beside_their_factors(here, function, monkeypatch):
    case = replace(PLAIN, heads_q=3, heads_kv=3, head_dim_qk=80, head_dim_vo=80)
    inputs = inputs_of(case, out=None, lse=None, return_lse=False, out_dtype="nvfp4", o_sf_scale=1.0)
    empty = torch.empty
    dirty = lambda *size, dtype=None, **how: (  # noqa: E731
        empty(*size, dtype=dtype, **how).fill_(torch.nan) if dtype is torch.float8_e4m3fn
        else empty(*size, dtype=dtype, **how)
    )  # fmt: skip
    monkeypatch.setattr(fp4.torch, "empty", dirty)
    given = inputs if function == "context" else cases.as_decode(inputs)
    run = getattr(wrappers, f"trtllm_batch_{function}_with_kv_cache")
    with machine.override(machine.HostMachine()):
        on_cpu = run(**given)
    for out in (on_cpu, run(**given)):
        padding = fp4.swizzled_offset(torch.arange(len(out.data)), torch.tensor(15), 16)
        assert out.scale.shape[1] == 16 and not out.scale.view(torch.uint8).flatten()[padding].any()


def test_empty_output_has_a_tile_of_scales():
    assert fp4.empty((0, 2, 16), torch.device("cpu")).scale.shape == (128, 4)


def test_deinterleave_v_scales():
    tokens, columns = 8, 4
    linear = torch.arange(2 * tokens * columns).view(2, tokens, columns)
    stored = torch.empty_like(linear).view(2, -1)
    for t, s in itertools.product(range(tokens), range(columns)):
        stored[:, t // 4 * 4 * columns + s * 4 + t % 4] = linear[:, t, s]
    assert torch.equal(fp4.deinterleave_v_scales(stored.view(2, tokens, columns)), linear)


def test_no_rows():
    empty = fp4.empty((0, 2, 16), torch.device("cpu"))
    assert fp4.load(empty, 1.0).shape == (0, 2, 16)


def test_a_tensor_without_dimensions_is_refused_as_such():
    with pytest.raises(ValueError, match=r"^data: shape \(\), must have at least 1 dimension"):
        fp4.unpack(torch.zeros((), dtype=torch.uint8))


GOOD = {"data": torch.zeros(5, 2, 8, dtype=torch.uint8), "scale": torch.zeros(128, 4, dtype=E4M3)}


@pytest.mark.parametrize("change", [{}, {"scale_start_index": 123}, {"original_shape": (5, 2, 15)}])
def test_fp4tensor_takes(change):
    t = FP4Tensor(**(GOOD | change))
    assert t.data is GOOD["data"] and t.scale is GOOD["scale"] and t.shape == (5, 2, 8)
