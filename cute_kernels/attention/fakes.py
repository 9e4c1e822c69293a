"""Fake tensors for the arguments of `args`, with which a kernel is compiled."""

from math import gcd
from typing import Any

import cutlass
from cutlass import Float32, Int32

from .. import abi
from . import args
from .spec import BITS, SF_VEC_SIZE

STORED = {"nvfp4": "uint8"}  # cache types without an element type in the DSL -> stored type


def fake_args(spec) -> dict[str, Any]:
    """Return name -> fake tensor or scalar, in launch order."""
    qk, vo = spec.head_dim_qk, spec.head_dim_vo
    wide: Any = {"align": 16, "stride_divisibility": 8}
    bytewise: Any = {"align": 16, "stride_divisibility": 16}
    cached, each = abi.DTYPES[STORED.get(spec.kv.dtype, spec.kv.dtype)], max(1, 8 // spec.kv.bits)

    def cache(dim):
        return abi.tensor(cached, (None, None, None, dim // each), **(wide if spec.kv.bits == 16 else bytewise))

    def scales(dim):
        size = gcd(dim // SF_VEC_SIZE, 16)
        return abi.tensor(cutlass.Uint8, (None, None, None, dim // SF_VEC_SIZE), align=size, stride_divisibility=size)

    def vector(dtype):
        return abi.tensor(dtype, (None,), align=4)

    found: dict[str, Any] = {
        "q": abi.tensor(abi.DTYPES[spec.q], (None, None, qk), **(wide if BITS[spec.q] == 16 else bytewise)),
        "cu_seqlens_q": vector(Int32),
        "k": cache(qk),
        "v": cache(vo),
        "kv_lens": vector(Int32),
        "page_table": abi.tensor(Int32, (None, 2, None), align=4),
        "kv_starts": vector(Int32),
        "k_scales": scales(qk),
        "v_scales": scales(vo),
        "v_scales_interleaved": Int32(0),
        "window_left": Int32(0),
        "causal": Int32(0),
        "tree_mask": abi.tensor(Int32, (None, None), align=4),
        "custom_mask": abi.tensor(cutlass.Uint8, (None,), align=1),
        "mask_starts": vector(Int32),
        "softmax_scale_log2": Float32(1.0),
        "softmax_scale_ptr": vector(Float32),
        "soft_cap": Float32(0.0),
        "alibi_slopes": vector(Float32),
        "skip_threshold": Float32(0.0),
        "o": abi.tensor(abi.DTYPES[spec.out[0]], (None, None, vo), **wide),
        "lse": abi.tensor(Float32, (None, None), align=4, last_stride_one=False),
        "sink": vector(Float32),
        "out_scale": Float32(1.0),
        "out_scale_ptr": vector(Float32),
        "o_fp8": abi.tensor(cutlass.Uint8, (None, None, vo), **bytewise),
        "o_fp4": abi.tensor(cutlass.Uint8, (None, None, vo // 2), align=16, stride_divisibility=gcd(vo // 2, 16)),
        "o_sf": abi.tensor(cutlass.Uint8, (None,), align=4),
        "o_sf_start": Int32(0),
        "o_sf_scale": Float32(1.0),
        "grid": Int32(1),
        "counters": vector(Int32),
        "counter_base": Int32(0),
        "enable_pdl": Int32(0),
        "o_partial": abi.tensor(Float32, (None, None, vo + 4), align=16, stride_divisibility=4),
        "blocks_per_split": Int32(0),
    }
    return {name: found[name] for name in args.fields(spec)}
