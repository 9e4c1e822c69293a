"""The arguments of an attention kernel: the only statement of the launch ABI.

The arguments are grouped in blocks by the module that reads them. A kernel takes the fields that its spec has
(`fields`), in the order of the blocks. On the device they are in `AttentionArgs`; fields that the spec does not have
are None. The same names hold fake tensors at compile time (`fakes`), torch tensors at launch and CuTe tensors on the
device. If a call does not use an optional tensor, its first mode has size 0 (an empty tensor): its presence needs no
other kernel.

Shapes: T query tokens, B sequences, Hq query heads, Hkv KV heads, P rows per page.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

from ..records import RECORDS
from .schedule import policy

# Kinds of arguments that are alike in all kernels: the names of an element type and the number of modes. From these
# follow the fake tensors (`fakes`); the other arguments depend on the spec and are `Any`.
Int32: TypeAlias = Annotated[Any, "Int32", 0]
Float32: TypeAlias = Annotated[Any, "Float32", 0]
Ints: TypeAlias = Annotated[Any, "Int32", 1]
Floats: TypeAlias = Annotated[Any, "Float32", 1]
Int32Rows: TypeAlias = Annotated[Any, "Int32", 2]
Uint8Rows: TypeAlias = Annotated[Any, "Uint8", 2]


class QueryArgs(NamedTuple):
    """Q; read by `load` and by roles that gather Q."""

    q: Any  # (T, Hq, Dqk)                spec.q; any token and head stride, last stride 1
    cu_seqlens_q: Ints  # (B + 1,)        int32
    q_rope: Any = None  # (T, Hq, Dqk - Dvo)  where V lies in K, the columns of Q behind those that q has, (T, Hq, Dvo)


class KVArgs(NamedTuple):
    """The KV cache; read by `kv` and, the lengths, by `geometry`."""

    k: Any  # (pages, Hkv, P, Dqk)        spec.kv.dtype, nvfp4: packed e2m1 (uint8, half the width); any strides, last 1
    #                                     With spec.kv.record, e4m3 (Dvo), or the bytes of a token's record, as uint8
    v: Any  # (pages, Hkv, P, Dvo)        not loaded where V lies in K
    kv_lens: Ints  # (B,)                 int32: keys; with kv_starts: rows of the last page, except where V lies in K;
    #                                     ragged: (0,); slots: (B / n,), entries that count, of n sequences in turn
    page_table: Any  # (B, 2, M)          int32: [:, 0] pages of K, [:, 1] pages of V; any strides (0: shared); with
    #                                     kv_starts (1, 2, N): of all sequences, one after another; ragged: N = 0;
    #                                     slots: rows of the cache, counted from page to page, other numbers for no key
    kv_starts: Ints  # (B + 1 | 0,)       int32: first entry of each sequence in page_table; ragged: its first row in k
    #                                     and v, which then are one page
    k_scales: Any = None  # (pages, Hkv, P, N)  bytes of a row's factors, `spec.ScaleLayout.row_bytes`; last stride 1
    v_scales: Any = None
    v_scales_interleaved: Int32 = None  # V scales of 4 tokens are interleaved
    # With slots, a second cache, the keys of which come behind those of the first one in a sequence
    extra_k: Any = None  # (pages, Hkv, P, Dvo)  as k
    extra_k_rope: Any = None  # (pages, Hkv, P, Dqk - Dvo)
    extra_slots: Int32Rows = None  # (B, M)  int32, as page_table
    extra_lens: Ints = None  # (B / n,)   int32, as kv_lens, of as many entries
    k_rope: Any = None  # (pages, Hkv, P, Dqk - Dvo)  where V lies in K, the columns of K behind those of V, which k has
    # With slots of T tokens, of which n that follow one another share their keys and are a sequence: page_table and
    # kv_lens have entries for tokens instead of sequences. Scratch of any contents, see `key_union`
    union_slots: Int32Rows = None  # (B, >= n M)  the slots that some token of a sequence has chosen
    union_tokens: Uint8Rows = None  # (B, >= n M)  bit t of an entry: token t of the sequence has chosen it
    union_lens: Ints = None  # (B,)       entries of each sequence
    union_size: Int32 = None  #           n


class MaskArgs(NamedTuple):
    """The mask; read by `mask`, `logits` (the tree), the modules of custom masks (`mask_bits`, `mask_ranges`,
    `mask_blocks`) and, the prefix, by `geometry`."""

    window_left: Int32 = None  #          keys before position - window_left are masked; 2^30 for none; with ranges, it
    #                                     bounds the causal part
    chunk: Int32 = None  #                keys before the position's chunk of so many are masked; 2^30 for none
    prefix_lens: Ints = None  # (B,)      int32: all tokens see so many keys from the first one on
    causal: Int32 = None  #               0: tokens see all keys
    tree_mask: Any = None  # (T | 0, W)  int32, bit t of a token's row: it sees draft token t; instead of causal
    custom_mask: Any = None  # (N,)       uint8: bit i * kv_len + j of a sequence, least significant first: token i sees
    #                                     key j; instead of causal, which must be 0
    mask_starts: Ints = None  # (B + 1,)  int32: first byte of each sequence in custom_mask
    ranges: Int32Rows = None  # (T, 2)    a token sees keys [0] to [1], too, but none before position - range_left
    range_left: Int32 = None  #           likewise
    mask_blocks: Any = None  # (rows, N + 3)  int32 scratch, of any contents: the KV blocks of each tile, see
    #                                     `mask_blocks`. rows: T x rows of a token // rows of a tile + B; N: KV blocks


class LogitsArgs(NamedTuple):
    """Scales and transforms of the logits; read by `logits` and `softmax`."""

    softmax_scale_log2: Float32  #        softmax scale x log2(e)
    # (Hq | 1 | 0,)                       fp32 on the device, per head or for all, multiplies softmax_scale_log2
    softmax_scale_ptr: Floats
    soft_cap: Float32 = None  #           natural units, 0 for none
    alibi_slopes: Floats = None  # (Hq,)  fp32, natural units: slope * (key - token) is added before the soft cap
    skip_threshold: Float32 = None  #     skip-softmax: log2 of the threshold times kv_len, -inf for none


class OutArgs(NamedTuple):
    """The output; read by `epilogue`, `softmax.normalizer` and `combine`."""

    o: Any  # (T | 0, Hq, Dvo)            spec.out[0]; any token and head stride, last stride 1
    lse: Any  # (T | 0, Hq | 2 Hq)        fp32, base 2, includes the sink; any strides
    sink: Floats  # (Hq | 0,)             fp32, natural-log units
    out_scale: Float32  #                 multiplies the normalised output
    out_scale_ptr: Floats  # (Hq | 1 | 0,) fp32 on the device, per head or for all, multiplies out_scale
    o_fp8: Any = None  # (T | 0, Hq, Dvo) e4m3 as uint8, instead of o, which is then (0, Hq, Dvo)
    o_fp4: Any = None  # (T | 0, Hq, Dvo / 2)  uint8: packed e2m1, instead of o and o_fp8
    o_sf: Any = None  # (M x Hq Dvo / 16,)  e4m3 as uint8: scale factors of o_fp4, in the 128x4 layout
    o_sf_start: Int32 = None  #           row of o_sf of token 0
    o_sf_scale: Float32 = None  #         global scale, multiplies the output before its blocks are scaled
    lse_form: Int32 = None  #             how lse differs from the above: bits of `spec.LSE_*`


class ScheduleArgs(NamedTuple):
    """The tile scheduler and split KV; read by `schedule` and `combine`."""

    grid: Int32  #                        CTAs to launch (persistent)
    counters: Ints  # (N,)                int32, zero before and after the launch
    counter_base: Int32  #                first counter of this launch, which no other launch in flight may share.
    #                                     Whole tiles: one counter, or -1: static assignment. Split KV:
    #                                     tile.counters_per_split per CTA or, with blocks_per_split, per slot
    enable_pdl: Int32  #                  launch with programmatic stream serialisation
    o_partial: Any = None  # (slots, m, Dvo / o_tiles + 4)  fp32 scratch: O and LSE of a split, by rows or `stripes`
    blocks_per_split: Int32 = None  #     KV blocks per split; 0: equal shares for all CTAs
    whole_ctas: Int32 = None  #           CTAs that take whole tiles if all tiles have equally many KV blocks
    whole_tiles: Int32 = None  #          tiles of each of these CTAs; 0: equal shares for all CTAs
    m_tiles: Int32 = None  #              tiles of a KV head of a sequence, at most: the first ones of all sequences
    #                                     come before the second ones, so that CTAs read the same keys together


class AttentionArgs(NamedTuple):
    """All arguments of a kernel, in their blocks."""

    query: QueryArgs
    kv: KVArgs
    mask: MaskArgs
    logits: LogitsArgs
    out: OutArgs
    schedule: ScheduleArgs
    launch: Any = None  # `geometry.LaunchGeometry`, which the host part of a launch computes from the shapes


def is_packed(record: str) -> bool:
    """Return whether the rows of a cache are packed, so that K is one tensor of bytes. record: of `spec.KVSpec`."""
    return bool(record) and RECORDS[record].packed


BLOCKS: tuple[Any, ...] = (QueryArgs, KVArgs, MaskArgs, LogitsArgs, OutArgs, ScheduleArgs)
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; every spec has the fields not listed
    **dict.fromkeys(("k_scales", "v_scales"), lambda spec: spec.kv.layout.exists),
    "q_rope": lambda spec: spec.kv.shares_v and spec.head_dim_qk > spec.head_dim_vo,
    "k_rope": lambda spec: has(spec, "q_rope") and not is_packed(spec.kv.record),
    **dict.fromkeys(("extra_k", "extra_slots", "extra_lens"), lambda spec: spec.kv.extra),
    "extra_k_rope": lambda spec: spec.kv.extra and has(spec, "q_rope") and not is_packed(spec.kv.extra_record),
    **dict.fromkeys(("union_slots", "union_tokens", "union_lens", "union_size"), lambda spec: spec.kv.union),
    "v_scales_interleaved": lambda spec: spec.kv.layout.exists and not spec.kv.layout.of_rows,
    "window_left": lambda spec: spec.mask.window or spec.mask.custom == "ranges",
    "chunk": lambda spec: spec.mask.chunk,
    "prefix_lens": lambda spec: spec.mask.prefix,
    "causal": lambda spec: spec.mask.causal == "value",
    "tree_mask": lambda spec: spec.mask.tree,
    **dict.fromkeys(("custom_mask", "mask_starts"), lambda spec: spec.mask.custom == "bits"),
    **dict.fromkeys(("ranges", "range_left"), lambda spec: spec.mask.custom == "ranges"),
    "mask_blocks": lambda spec: bool(spec.mask.custom),
    "alibi_slopes": lambda spec: spec.logits.alibi,
    "soft_cap": lambda spec: spec.logits.soft_cap,
    "skip_threshold": lambda spec: spec.logits.skip,
    "o_fp8": lambda spec: "e4m3" in spec.out,
    **dict.fromkeys(("o_fp4", "o_sf", "o_sf_start", "o_sf_scale"), lambda spec: "nvfp4" in spec.out),
    "lse_form": lambda spec: spec.kv.shares_v,
    "m_tiles": lambda spec: spec.kv.shares_v and policy.is_split_kv(spec),
    **dict.fromkeys(("o_partial", "blocks_per_split"), policy.is_split_kv),
    **dict.fromkeys(("whole_ctas", "whole_tiles"), policy.prefers_whole_tiles),
}
# field -> (element type, modes) of those that are alike in all kernels
KINDS: dict[str, tuple[str, int]] = {
    field: hint.__metadata__
    for block in BLOCKS
    for field, hint in get_type_hints(block, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def has(spec: Any, field: str) -> bool:
    """Return whether kernels of `spec` take the argument `field`."""
    return field not in OPTIONAL or OPTIONAL[field](spec)


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    return tuple(field for block in BLOCKS for field in block._fields if has(spec, field))


def pack(spec: Any, flat: Sequence[Any]) -> AttentionArgs:
    """Put the arguments of a launch, in the order of `fields`, into their blocks."""
    values = dict(zip(fields(spec), flat, strict=True))
    return AttentionArgs(*(block(**{name: values.get(name) for name in block._fields}) for block in BLOCKS))
