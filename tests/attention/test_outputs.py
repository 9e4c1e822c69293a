"""Quantised outputs of the kernels in the simulator, byte by byte: the quantiser of `wrappers.fp4`, applied to what the
kernel computes in fp32."""

import pytest
import torch

from bench.cases import outputs
from tests.conftest import ARCH
from tests.sim.workloads import simulated
from wrappers import fp4
from wrappers.attention.op import serve

E4M3 = torch.float8_e4m3fn
SMS = 5  # of decode, so that every KV block is a part of its own, and the sums of parts are exact
CALLS = {  # arguments of `outputs.known`, and the first row of the scale factors
    "decode, e4m3 query, head_dim 64": (("decode", "e4m3", 64, (3, 1), "", (512, 1)), 127),
    "decode, 16 rows a warp": (("decode", "bf16", 64, (12, 1), "e4m3", (1, 16, 0)), 3),
    "decode, 16 bits, head_dim 256": (("decode", "bf16", 256, (2, 2), "", (128,)), 128),
    "prefill": (("prefill", "bf16", 64, (2, 1), "", (128, 0, 1)), 122),
    "prefill, e4m3 query": (("prefill", "e4m3", 64, (2, 1), "", (128, 0, 1)), 5),
}


def test_blocks_are_of_all_kinds():
    """Else equal bytes would show little."""
    o = torch.cat([outputs.known(*arguments).o.flatten() for arguments, _ in CALLS.values()])
    data, factors = fp4.nvfp4_quantize(o, outputs.SCALE)
    found, blocks = factors.float(), o.view(-1, fp4.BLOCK)
    ratio = (blocks * outputs.SCALE / found[:, None]).abs()
    assert all(((ratio == tie) & (found == 12)[:, None]).any() for tie in outputs.TIES)
    assert (found == 448).any() and (ratio[found == 448] > 6).any() and ((found > 0) & (found < 2**-6)).any()
    assert (blocks[found == 0] != 0).any() and set(fp4.unpack(data).tolist()) == {*range(16)}


@pytest.mark.kernels
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n == "prefill" else ()) for n in CALLS])
def test_bytes(name):
    arguments, start = CALLS[name]
    p, o = outputs.known(*arguments)
    got, want = outputs.poisoned(o.shape, start), outputs.quantised(o, start)
    with simulated(ARCH, [], SMS):
        result = serve(p._replace(out=got, out_sf_scale=outputs.SCALE))
        e4m3 = serve(p._replace(out_dtype=E4M3)) if "context" in p.signature else None
    assert result.data is got.data and result.scale is got.scale and result.original_shape == o.shape
    assert all(map(torch.equal, outputs.bytes_of(got), outputs.bytes_of(want)))
    if e4m3 is not None:
        assert torch.equal(e4m3.view(torch.uint8), fp4.e4m3(o).view(torch.uint8))
