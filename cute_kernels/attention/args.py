"""Dynamic facts of an attention launch: the only statement of a kernel's launch ABI.

Arguments come in blocks, each owned by the seam that reads it. A kernel has the fields that its spec has (`fields`), in
the order of the blocks; on the device they lie in the blocks (`AttentionArgs`), where what a spec has not is None. The
same names stand for fake tensors at compile time (`fakes`), torch tensors at launch, and CuTe tensors on the device. An
optional tensor that a call lacks has size 0 in its first mode (an empty tensor), so that presence needs no other
kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class QueryArgs(NamedTuple):
    """Read by `load` and by roles that gather Q."""

    q: Any  # (T, Hq, Dqk)                16-bit, any token and head stride, last stride 1
    cu_seqlens_q: Any  # (B + 1,)         int32


class KVArgs(NamedTuple):
    """Read by `kv` and, the lengths, by `geometry`."""

    k: Any  # (pages, Hkv, P, Dqk)        as q, e4m3, or uint8 of half the width: packed e2m1; any strides, last 1
    v: Any  # (pages, Hkv, P, Dvo)
    kv_lens: Any  # (B,)                  int32: keys; with kv_starts, rows of the last page; ragged: (0,)
    page_table: Any  # (B, 2, M)          int32: [:, 0] pages of K, [:, 1] pages of V; any strides (0: shared); with
    #                                     kv_starts (1, 2, N): of all requests, one after another; ragged: N = 0
    kv_starts: Any  # (B + 1 | 0,)        int32: first entry of each request in page_table, or, ragged, first row of the
    #                                     one page that k and v then are
    k_scales: Any = None  # (pages, Hkv, P, Dqk / 16)  e4m3 as uint8; any strides, last 1
    v_scales: Any = None  # (pages, Hkv, P, Dvo / 16)
    v_scales_interleaved: Any = None  # Int32  V scales of 4 tokens are interleaved


class MaskArgs(NamedTuple):
    """Read by `mask`."""

    window_left: Any = None  # Int32      keys before position - window_left are hidden; 2^30 for none
    causal: Any = None  # Int32           0: tokens see all keys
    tree_mask: Any = None  # (T | 0, W)  int32, bit t of a token's row: it sees draft t; instead of causal
    custom_mask: Any = None  # (N,)       uint8: bit i * kv_len + j of a request, least significant first: token i sees
    #                                     key j; instead of causal, which must be 0
    mask_starts: Any = None  # (B + 1,)   int32: byte of custom_mask where each request's bits begin


class LogitsArgs(NamedTuple):
    """Read by `logits` and `softmax`."""

    softmax_scale_log2: Any  # Float32            logit scale x log2(e)
    softmax_scale_ptr: (
        Any  # (Hq | 1 | 0,)           fp32 device factor on the logits, of a head or all, times softmax_scale_log2
    )
    soft_cap: Any = None  # Float32       natural units, 0 for none
    alibi_slopes: Any = None  # (Hq,)     fp32, natural units: times key - token, added before the cap
    skip_threshold: Any = None  # Float32 skip-softmax: log2 of the threshold times kv_len, -inf for none


class OutArgs(NamedTuple):
    """Read by `epilogue`, `softmax.normalizer` and `combine`."""

    o: Any  # (T | 0, Hq, Dvo)            spec.out[0]; any token and head stride, last stride 1
    lse: Any  # (T | 0, Hq)               fp32, base 2, includes the sink; any strides
    sink: Any  # (Hq | 0,)                fp32, natural-log units
    out_scale: Any  # Float32            factor on the normalised output
    out_scale_ptr: Any  # (Hq | 1 | 0,)       fp32 device factor on the output, of a head or all, times out_scale
    o_fp8: Any = None  # (T | 0, Hq, Dvo) e4m3 as uint8, instead of o, which is then (0, Hq, Dvo)
    o_fp4: Any = None  # (T | 0, Hq, Dvo / 2)  uint8: packed e2m1, instead of either
    o_sf: Any = None  # (M x Hq Dvo / 16,)  e4m3 as uint8: factors of all rows of o_fp4, in the 128x4 layout
    o_sf_start: Any = None  # Int32       row of o_sf that token 0 has
    o_sf_scale: Any = None  # Float32     forward scale of the output before its blocks get factors


class ScheduleArgs(NamedTuple):
    """Read by `schedule` and `combine`."""

    grid: Any  # Int32                    CTAs to launch (persistent)
    counters: Any  # (N,)                 int32, zero, and left so
    counter_base: Any  # Int32            first counter of this launch, no other launch in flight may share it. "tiles":
    #                                     one, or -1: static rounds. "stream_k": as many as a tile has warps a CTA, or,
    #                                     with blocks_per_split, a slot
    enable_pdl: Any  # Int32              launch with programmatic stream serialisation
    o_partial: Any = None  # (slots, m, Dvo + 4)  fp32 scratch, contiguous, for m rows of a tile: O, then LSE
    blocks_per_split: Any = None  # Int32 KV blocks of a part; 0: equal shares of the CTAs


class AttentionArgs(NamedTuple):
    query: QueryArgs
    kv: KVArgs
    mask: MaskArgs
    logits: LogitsArgs
    out: OutArgs
    schedule: ScheduleArgs


BLOCKS: tuple[Any, ...] = (QueryArgs, KVArgs, MaskArgs, LogitsArgs, OutArgs, ScheduleArgs)
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; others every spec has
    "k_scales": lambda spec: spec.kv.block_scaled,
    "v_scales": lambda spec: spec.kv.block_scaled,
    "v_scales_interleaved": lambda spec: spec.kv.block_scaled,
    "window_left": lambda spec: spec.mask.window,
    "causal": lambda spec: spec.mask.causal == "value",
    "tree_mask": lambda spec: spec.mask.tree,
    "custom_mask": lambda spec: spec.mask.custom,
    "mask_starts": lambda spec: spec.mask.custom,
    "alibi_slopes": lambda spec: spec.logits.alibi,
    "soft_cap": lambda spec: spec.logits.soft_cap,
    "skip_threshold": lambda spec: spec.logits.skip,
    "o_fp8": lambda spec: "e4m3" in spec.out,
    "o_fp4": lambda spec: "nvfp4" in spec.out,
    "o_sf": lambda spec: "nvfp4" in spec.out,
    "o_sf_start": lambda spec: "nvfp4" in spec.out,
    "o_sf_scale": lambda spec: "nvfp4" in spec.out,
    "o_partial": lambda spec: spec.schedule == "stream_k",
    "blocks_per_split": lambda spec: spec.schedule == "stream_k",
}


def has(spec: Any, field: str) -> bool:
    return field not in OPTIONAL or OPTIONAL[field](spec)


def fields(spec: Any) -> tuple[str, ...]:
    """Names of the arguments of a kernel of `spec`, in the order of a launch."""
    return tuple(field for block in BLOCKS for field in block._fields if has(spec, field))


def pack(spec: Any, flat: Sequence[Any]) -> AttentionArgs:
    """The arguments of a launch, in the order of `fields`, in their blocks."""
    values = dict(zip(fields(spec), flat, strict=True))
    return AttentionArgs(*(block(**{name: values.get(name) for name in block._fields}) for block in BLOCKS))
