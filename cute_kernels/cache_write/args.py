"""Arguments of a launch that writes rows: the only statement of the kernels' launch ABI.

An absent optional tensor has size 0 in its first mode; it is never None. A kernel takes the fields that its spec has
(`fields`); on the device the others are None.

Index tensors are int32. An int64 tensor is passed as its words (a view with twice the elements), and the tensor's bit
of `wide` is set. Values are clamped to [-1, 2^31); a negative one names no row.

Shapes: N tokens, Hq query heads, H KV heads, P rows per page, B requests, M entries per request, R rotated elements.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import families

SLOTS, PAGES, ROWS = range(3)  # meaning of `places`
INTERLEAVED, ANGLES, FROM_FIRST = 1, 2, 4  # bits of `rope`


class CacheWriteArgs(NamedTuple):
    """The arguments of a launch."""

    k: Any  # (N, H, Dk)              spec.dtype; any strides, last 1; ROWS with transform: may be k_cache[0]
    v: Any  # (N, H | 0, Dv)          no heads: only K is written
    k_cache: Any  # (pages, P, H, Dk) spec.cache, nvfp4: packed e2m1 (uint8, half the width); any strides, last 1;
    #                                 or (pages, H, P, Dk), see `nhd`
    v_cache: Any  # (pages, P, H, Dv) without V: any tensor with as many pages as k_cache
    nhd: Any  # Int32                 1: the second mode of caches and scale factors is P, the third H; 0: the reverse
    places: (
        Any  # Int32              where rows of K and V go. SLOTS: token i to slot slots[i], page * P + row. PAGES: to
    )
    #                                 its position in the pages of its request. ROWS: to row i of page 0
    wide: Any  # Int32                bit i: the i-th of the index tensors below holds int64 values
    slots: Any  # (N,)                SLOTS; a negative slot stores nothing
    batch_indices: Any  # (N | 0,)    PAGES: the request of each token; absent: cu_seqlens and kv_lens tell
    positions: Any  # (N | 0,)        PAGES: the position of each token
    page_table: Any  # (B | 0, M)     PAGES: pages of each request; or
    kv_indices: Any  # (M | 0,)       PAGES: pages of all requests, one after another, with
    kv_indptr: Any  # (B + 1 | 0,)    PAGES: first entry of each request in kv_indices
    cu_seqlens: Any  # (B + 1 | 0,)   first token of each request
    kv_lens: Any  # (B | 0,)          keys of each request, including these tokens, which are its last; or, see `rope`,
    #                                 the position of its first token
    lanes_log2: Any  # Int32          log2 of the lanes per row: 1 to 5
    k_groups: Any  # Int32            groups of lanes that share the rows of K of a token; transform: of Q, K and V
    v_groups: Any  # Int32            groups of lanes that share the rows of V of a token; transform: 0
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation
    # quantised caches
    k_scale: Any = None  # Float32    e4m3, e5m2, int8: K is divided by it. nvfp4: K is multiplied by it
    v_scale: Any = None  # Float32    the same for V
    k_scale_ptr: Any = None  # (H | 1 | 0,)  fp32, replaces k_scale, per head or for all: K is divided by it; nvfp4: K
    #                                 is multiplied by its reciprocal
    v_scale_ptr: Any = None  # (H | 1 | 0,)
    k_sf: Any = None  # (pages, P, H, Dk / 16)  nvfp4: scale factors, e4m3 as uint8; any strides, last 1; see `nhd`;
    #                                 by_token: (pages, P, H, 4), bytes of an fp32 scale; written
    v_sf: Any = None  # (pages, P, H, Dv / 16)
    v_sf_interleaved: Any = None  # Int32  factors of 4 rows of V are interleaved: P is a multiple of 4
    scales_multiply: Any = None  # Int32  1: K and V are multiplied by k_scale_ptr and v_scale_ptr themselves
    # transform
    q: Any = None  # (N, Hq | 0, Dk)  spec.dtype; any strides, last 1
    q_out: Any = None  # (N | 0, Hq, Dk)  spec.dtype; any strides, last 1; may be q
    rope_table: Any = None  # (L | 0, R)  fp32, aligned to 16 bytes, row stride a multiple of 4, last 1, R a multiple of
    #                                 16: cosines, then sines of R / 2 pairs at each position. ANGLES: one row, the
    #                                 turns per position, rounded to fp32, then what was rounded away
    rope: Any = None  # Int32         bits INTERLEAVED: pairs are neighbours, not halves; ANGLES: see rope_table;
    #                                 FROM_FIRST: kv_lens holds the position of the first token of each request
    rope_positions: Any = None  # (N | 0,)  position in rope_table; absent: that in the request
    q_weight: Any = None  # (Hq Dk | Dk | 0,)  spec.dtype: weights of the RMS norm of Q, per head or for all
    k_weight: Any = None  # (H Dk | Dk | 0,)
    norm_eps: Any = None  # Float32
    norm_offset: Any = None  # Float32  added to the weights
    # transform, caches of the rows' type
    rope_cos: Any = None  # (L | 0, R / 2)  spec.dtype, aligned to 8 bytes, row stride a multiple of 4, last 1: cosines
    #                                 at each position, and with them rope_sin instead of rope_table, which is (0, R)
    rope_sin: Any = None  # (L | 0, R / 2)
    kv_lens_out: Any = None  # (B | 0,)  FROM_FIRST, int32 cu_seqlens and kv_lens; written: kv_lens and the number of
    #                                 tokens of each request
    # transform, quantised caches
    q_fp8: Any = None  # (N | 0, Hq, Dk)  e5m2 if the cache is, else e4m3: instead of q_out, which is then (0, Hq, Dk)
    q_scale: Any = None  # Float32    Q is divided by it
    q_scale_ptr: Any = None  # (Hq | 1 | 0,)  fp32, replaces q_scale
    # gather, see below
    tables: Any = None  # (B, 2, M)   pages of K and V of each request; with kv_indptr: (1, 2, M | 0), of all requests
    tables_out: Any = None  # as tables; written
    # dequantise: these, k_scale, k_scale_ptr and enable_pdl alone; each contiguous. Values are divided by the scale
    codes: Any = None  # (blocks, 8)  uint8: packed e2m1
    sf: Any = None  # (blocks,)       uint8: scale factors, e4m3
    values: Any = None  # (blocks, 16)  fp32; written


# gather: Q and K of an attention call are rotated, without a norm or V, at any position, also a negative one. Addresses
# and strides of q, q_out, k and k_cache are multiples of 16 bytes, Dk is a multiple of 16, and all of it is rotated.
#
# Q goes to q_out. Request b has rows cu_seqlens[b] to end = cu_seqlens[b + 1] of Q; its row i is at position
# keys - (end - i), where keys is the number of its keys. A row that belongs to no request is at position 0.
#
# K goes from the cache to k. Row e * P + r of k is row r of the page of entry e, where entries are those of `tables`
# [:, 0] one after another, or, if that has no columns, the pages themselves. It is at position c * P + r if its entry
# is number c of its request: of the M of a row of `tables`, or of those from kv_indptr[b] on. A request has kv_lens[b]
# keys; with kv_indptr, its last entry has kv_lens[b], or P if kv_lens is absent. Rows behind the keys of a request, of
# no request, and of pages that the cache lacks are not written. Lengths are clamped to the rows of all entries.
#
# tables_out is the page table that belongs to k: e, or -1 if the cache lacks the page, and the entries of V.
INDICES = (
    "slots", "batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "cu_seqlens", "kv_lens",
    "rope_positions",
)  # fmt: skip
QUANTISED = ("k_scale", "v_scale", "k_scale_ptr", "v_scale_ptr")
FACTORS = ("k_sf", "v_sf")
BLOCK_SCALED = ("v_sf_interleaved", "scales_multiply")
TRANSFORM = ("q", "q_out", "rope_table", "rope", "rope_positions", "q_weight", "k_weight", "norm_eps", "norm_offset")
COPIED_TRANSFORM = ("rope_cos", "rope_sin", "kv_lens_out")
GATHER = ("tables", "tables_out")
DEQUANTISE = ("enable_pdl", "k_scale", "k_scale_ptr", "codes", "sf", "values")  # all that such a kernel takes
Q_QUANTISED = ("q_fp8", "q_scale", "q_scale_ptr")
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; every spec has the fields not listed
    **dict.fromkeys(QUANTISED, lambda spec: spec.quantised),
    **dict.fromkeys(FACTORS, lambda spec: spec.stores_factors),
    **dict.fromkeys(BLOCK_SCALED, lambda spec: spec.cache == "nvfp4"),
    **dict.fromkeys(TRANSFORM, lambda spec: spec.transform),
    **dict.fromkeys(COPIED_TRANSFORM, lambda spec: spec.transform and not (spec.quantised or spec.gather)),
    **dict.fromkeys(GATHER, lambda spec: spec.gather),
    **dict.fromkeys(Q_QUANTISED, lambda spec: spec.transform and spec.quantised),
    **dict.fromkeys(("codes", "sf", "values"), lambda spec: spec.dequantises),
}


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    if spec.dequantises:
        return DEQUANTISE
    return families.fields(CacheWriteArgs, OPTIONAL, spec)


def pack(spec: Any, flat: Sequence[Any]) -> CacheWriteArgs:
    """Put the arguments of a launch, in the order of `fields`, under their names."""
    return families.pack(CacheWriteArgs, fields(spec), flat)
