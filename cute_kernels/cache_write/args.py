"""Arguments of a launch that writes rows: the only statement of the kernels' launch ABI.

An absent optional tensor has size 0 in its first mode; it is never None. A kernel takes the fields that its spec has
(`fields`); on the device the others are None.

Index tensors are int32. An int64 tensor is passed as its words (a view with twice the elements), and the tensor's bit
of `wide` is set. Values are clamped to [-1, 2^31); a negative one names no row.

Shapes: N tokens, Hq query heads, H KV heads, P rows per page, B requests, M entries per request, R rotated elements.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    k_scale: Any = None  # Float32    e4m3, e5m2: K is divided by it. nvfp4: K is multiplied by it
    v_scale: Any = None  # Float32    the same for V
    k_scale_ptr: Any = None  # (H | 1 | 0,)  fp32, replaces k_scale, per head or for all: K is divided by it; nvfp4: K
    #                                 is multiplied by its reciprocal
    v_scale_ptr: Any = None  # (H | 1 | 0,)
    k_sf: Any = None  # (pages, P, H, Dk / 16)  nvfp4: scale factors, e4m3 as uint8; any strides, last 1; see `nhd`
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
    # transform, quantised caches
    q_fp8: Any = None  # (N | 0, Hq, Dk)  e5m2 if the cache is, else e4m3: instead of q_out, which is then (0, Hq, Dk)
    q_scale: Any = None  # Float32    Q is divided by it
    q_scale_ptr: Any = None  # (Hq | 1 | 0,)  fp32, replaces q_scale


INDICES = (
    "slots", "batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "cu_seqlens", "kv_lens",
    "rope_positions",
)  # fmt: skip
QUANTISED = ("k_scale", "v_scale", "k_scale_ptr", "v_scale_ptr")
BLOCK_SCALED = ("k_sf", "v_sf", "v_sf_interleaved", "scales_multiply")
TRANSFORM = ("q", "q_out", "rope_table", "rope", "rope_positions", "q_weight", "k_weight", "norm_eps", "norm_offset")
Q_QUANTISED = ("q_fp8", "q_scale", "q_scale_ptr")
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; every spec has the fields not listed
    **dict.fromkeys(QUANTISED, lambda spec: spec.quantised),
    **dict.fromkeys(BLOCK_SCALED, lambda spec: spec.cache == "nvfp4"),
    **dict.fromkeys(TRANSFORM, lambda spec: spec.transform),
    **dict.fromkeys(Q_QUANTISED, lambda spec: spec.transform and spec.quantised),
}


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    return tuple(field for field in CacheWriteArgs._fields if field not in OPTIONAL or OPTIONAL[field](spec))


def pack(spec: Any, flat: Sequence[Any]) -> CacheWriteArgs:
    """Put the arguments of a launch, in the order of `fields`, under their names."""
    values = dict(zip(fields(spec), flat, strict=True))
    return CacheWriteArgs(**{name: values.get(name) for name in CacheWriteArgs._fields})
