"""Fake tensors for the arguments of `args`, with which a kernel is compiled."""

from math import gcd
from typing import Any

import cutlass
from cutlass import Float32, Int32

from .. import abi
from ..dtypes import BITS
from ..records import RECORDS
from . import args


def fake_args(spec) -> dict[str, Any]:
    """Return name -> fake tensor or scalar, in launch order. Those that `args.KINDS` describes follow from it."""
    qk, vo = spec.head_dim_qk, spec.head_dim_vo
    first = vo if spec.kv.shares_v else qk  # columns of q and k; q_rope and k_rope have the others
    wide: Any = {"align": 16, "stride_divisibility": 8}
    bytewise: Any = {"align": 16, "stride_divisibility": 16}
    cached, each = abi.DTYPES[spec.kv.dtype], max(1, 8 // spec.kv.bits)

    def cache(dim):
        size = gcd(dim // each, 16)  # NVFP4 rows that TMA does not load have as few as 8 bytes
        narrow: Any = {"align": size, "stride_divisibility": size} if spec.kv.bits < 8 else bytewise
        return abi.tensor(cached, (None, None, None, dim // each), **(wide if spec.kv.bits == 16 else narrow))

    def scales(dim):
        row = spec.kv.layout.row_bytes(dim)
        size = max(gcd(row, 16), 1)
        return abi.tensor(cutlass.Uint8, (None, None, None, row), align=size, stride_divisibility=size)

    def plain(kind, modes):
        dtype = getattr(cutlass, kind)
        return abi.tensor(dtype, (None,) * modes, align=4) if modes else dtype(1)

    def query(dim):
        return abi.tensor(abi.DTYPES[spec.q], (None, None, dim), **(wide if BITS[spec.q] == 16 else bytewise))

    def latent(record, dim):
        if not args.is_packed(record):
            return abi.tensor(abi.DTYPES[record], (None, None, None, dim), **bytewise) if record else cache(dim)
        size, planar = RECORDS[record].token_bytes, RECORDS[record].planar
        strides = {1: None, 2: size} if planar else {}  # one head; the factors of a row lie elsewhere
        return abi.tensor(cutlass.Uint8, (None, None, None, size), strides=strides, **bytewise)

    found: dict[str, Any] = {name: plain(*kind) for name, kind in args.KINDS.items()} | {
        "q": query(first),
        "q_rope": query(qk - first),
        "k": latent(spec.kv.record, first),
        "k_rope": latent(spec.kv.record, qk - first),
        "extra_k": latent(spec.kv.extra_record, first),
        "extra_k_rope": latent(spec.kv.extra_record, qk - first),
        "v": latent(spec.kv.record, vo),
        "page_table": abi.tensor(Int32, (None, 2, None), align=4),
        "k_scales": scales(qk),
        "v_scales": scales(vo),
        "tree_mask": abi.tensor(Int32, (None, None), align=4),
        "mask_blocks": abi.tensor(Int32, (None, None), align=4),
        "custom_mask": abi.tensor(cutlass.Uint8, (None,), align=4),
        "o": abi.tensor(abi.DTYPES[spec.out[0]], (None, None, vo), **wide),
        "lse": abi.tensor(Float32, (None, None), align=4, last_stride_one=False),
        "o_fp8": abi.tensor(cutlass.Uint8, (None, None, vo), **bytewise),
        "o_fp4": abi.tensor(cutlass.Uint8, (None, None, vo // 2), align=16, stride_divisibility=gcd(vo // 2, 16)),
        "o_sf": abi.tensor(cutlass.Uint8, (None,), align=4),
        "o_partial": abi.tensor(Float32, (None, None, spec.tile_vo + 4), align=16, stride_divisibility=4),
    }
    return {name: found[name] for name in args.fields(spec)}
