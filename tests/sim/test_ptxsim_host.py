"""The launch of a shipped kernel as the simulator evaluates it from the host function that the compiler makes."""

import ml_dtypes
import numpy as np
import pytest
from ptxsim import host
from ptxsim.call import TensorMap
from ptxsim.parse import parse

from cute_kernels.attention.args import fields
from tests.conftest import ARCH
from tests.sim import launcher
from tests.support.kernels import SHIPPED


@pytest.mark.kernels
def test_a_shipped_kernel():
    op, spec = SHIPPED["attention.sm90/bf16_d64_causal_tma_m192n128s4"]
    compiled = launcher.load(op, spec, ARCH)
    page, heads, dim = 16, 2, spec.head_dim_qk
    kv = np.zeros((5, 2, heads, page, dim), ml_dtypes.bfloat16)  # K and V of a page side by side
    q = np.zeros((7, 3 * heads, dim), ml_dtypes.bfloat16)
    i32, one, none = np.zeros(8, np.int32), np.ones(1, np.float32), np.zeros(0, np.float32)
    named = {
        "q": q[:, :heads], "k": kv[:, 0], "v": kv[:, 1], "o": np.zeros((7, heads, dim), ml_dtypes.bfloat16),
        "lse": np.zeros((7, heads), "f4"), "cu_seqlens_q": i32[:2], "kv_lens": i32[:1], "counters": i32,
        "page_table": np.zeros((1, 2, 4), np.int32), "kv_starts": i32[:0], "sink": none, "softmax_scale_ptr": one,
        "out_scale_ptr": none, "softmax_scale_log2": 0.5,
        "out_scale": 1.0, "grid": 6, "counter_base": -1, "enable_pdl": 0,
    }  # fmt: skip
    args = [named[name] for name in fields(spec)]
    (call,) = host.evaluate(compiled.host, compiled.ptx, args, compiled.shared)
    assert call.grid == (6, 1, 1) and call.cluster == (1, 1, 1) and call.shared == compiled.shared
    sizes = parse(call.ptx).params.values()
    assert [128 if isinstance(p, TensorMap) else len(p) for p in call.params] == [size for _, size, _ in sizes]
    maps = [p for p in call.params if isinstance(p, TensorMap)]
    start = dict(zip(call.memory.names, call.memory.bases.tolist()))
    kv_boxes = (8, 16, 32, 64)
    count = len(kv_boxes)
    assert maps[2 * count].dims == (dim, 7, heads) and maps[2 * count].strides == (3 * heads * dim * 2, dim * 2)
    assert maps[2 * count].box == (64, spec.tile.m, 1) and maps[2 * count].address == start["argument 0"]
    half, first = heads * page * dim * 2, start[f"argument {fields(spec).index('k')}"]
    for k, v in zip(maps[:count], maps[count : 2 * count]):
        assert k.dims == v.dims == (dim, page, heads, 5) and k.strides == v.strides == (
            dim * 2,
            half // heads,
            2 * half,
        )
        assert (k.address, v.address) == (first, first + half), "one buffer, added once"
    assert [k.box for k in maps[:count]] == [(64, rows, 1, 1) for rows in kv_boxes]
