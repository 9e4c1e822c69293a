"""`nvfp4_dequantize` by a kernel: its launches and plans, and every code with every factor in the simulator."""

import pytest
import torch

import wrappers
from bench.cases import cache_write as cases
from tests.conftest import ARCH
from tests.sim.workloads import simulated
from tests.support.emulated import emulation
from wrappers import fp4
from wrappers.cache_write import quantize

E4M3 = torch.float8_e4m3fn


def dequantised(shape):
    """Random codes and factors of a tensor, views of wider ones."""
    gen = torch.Generator().manual_seed(0)
    data, scales = (torch.randint(256, (*shape[:-1], 2 * n), generator=gen) for n in (shape[-1] // 2, shape[-1] // 16))
    return data.to(torch.uint8)[..., : shape[-1] // 2], scales.to(torch.uint8)[..., : shape[-1] // 16]


def equal_values(got, want):
    """Whether fp32 values have the same bits, where any NaN equals any other."""
    nan = want.isnan()
    bits = (t.view(torch.int32).masked_fill(nan, 0) for t in (got, want))
    return got.dtype == want.dtype == torch.float32 and got.isnan().equal(nan) and torch.equal(*bits)


@pytest.mark.parametrize("shape", [(16,), (5, 32), (16, 48), (3, 2, 64), (2, 3, 5, 16), (0, 32), (3, 0)])
@pytest.mark.parametrize("scale", [1.0, 3, torch.tensor([0.37]), torch.tensor(2.0)])
def test_dequantised_by_one_launch(shape, scale):
    data, scales = dequantised(shape)
    want = fp4.nvfp4_dequantize(data, scales, scale)
    for factors in (scales, scales.view(E4M3), scales.contiguous().view(E4M3).requires_grad_()):
        with emulation() as machine:
            for codes in (data, data.contiguous()):
                got = wrappers.nvfp4_dequantize(codes, factors, scale)
                assert equal_values(got, want) and got.shape == shape and not got.requires_grad
            assert len(machine.launches) == 2 * bool(data.numel()) and len(machine.plans) == bool(data.numel())


def test_more_factors_than_the_kernel_counts_are_refused(monkeypatch):
    monkeypatch.setattr(quantize, "MOST_BLOCKS", 9)
    with emulation() as machine, pytest.raises(NotImplementedError, match="^scales: 10 scale factors, .* at most 9"):
        wrappers.nvfp4_dequantize(*dequantised((5, 32)))
    assert not machine.launches
    assert wrappers.nvfp4_dequantize(*dequantised((5, 32))).shape == (5, 32)


def test_one_plan_dequantises_all_shapes_of_a_device():
    with emulation() as machine:
        for shape in ((16,), (5, 32)):
            wrappers.nvfp4_dequantize(*dequantised(shape))
        assert len(machine.launches) == 2 and len(machine.plans) == 1
        machine.devices, machine.device = 2, 7
        machine.plans.clear()
        wrappers.nvfp4_dequantize(*dequantised((16,)))  # on the tensors' device
        assert machine.device == 7 and len(machine.launches) == 3
    with emulation() as machine, pytest.raises(NotImplementedError, match="^data: .* architecture sm_80"):
        machine.known = "sm_80", 132
        wrappers.nvfp4_dequantize(*dequantised((16,)))


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [300.0, torch.tensor([1.7 * 2.0**119])])
def test_every_code_is_dequantised_with_every_factor(scale):
    """Also with NaN and subnormal factors, and where quotients are subnormal."""
    data, scales = cases.every_code_and_factor()
    with simulated(ARCH, []):
        got = wrappers.nvfp4_dequantize(data, scales, scale)
    assert equal_values(got, fp4.nvfp4_dequantize(data, scales, scale))
