"""A call that writes rows: what all functions that write to a cache hand to `op.serve`."""

from typing import Any, NamedTuple

from cute_kernels.cache_write.args import PAGES, ROWS, SLOTS

__all__ = ["PAGES", "ROWS", "SLOTS", "CacheWriteCall", "QueryTransform"]


class QueryTransform(NamedTuple):
    """Norm and rotary embedding of K, and of Q, which is written too. None stands for an argument that is absent.

    rope_table, rope: as in `cute_kernels.cache_write.args`. The dtype of q_out is q's, or e4m3 or e5m2.
    """

    q: Any = None  # (N, Hq, Dk)
    q_out: Any = None
    rope_table: Any = None
    rope: int = 0
    rope_positions: Any = None  # (N,); None: those of the pages
    q_weight: Any = None  # (Dk,) or (Hq, Dk)
    k_weight: Any = None  # (Dk,) or (H, Dk)
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    q_scale: float = 1.0  # an 8-bit Q is divided by it
    q_scale_ptr: Any = None
    rope_cos: Any = None  # (L, R / 2) of the rows' dtype, with rope_sin instead of rope_table
    rope_sin: Any = None
    kv_lens_out: Any = None  # (B,) int32, written: kv_lens and the tokens of each request


class CacheWriteCall(NamedTuple):
    """A call, in the caller's tensors. N tokens, H heads of K and V, Hq of Q, P rows per page.

    function: the public function, which decides the names in messages (`checks.NAMES`). places: SLOTS, PAGES or ROWS.
    Caches and scale factors are (pages, P, H, ...) with `nhd`, else (pages, H, P, ...). The cache is quantised if it
    has another dtype than the rows, unless both have one byte.
    """

    function: str
    k: Any  # (N, H, Dk)
    v: Any  # (N, H, Dv)
    k_cache: Any
    v_cache: Any
    nhd: bool
    places: int
    slots: Any = None  # SLOTS: (N,)
    batch_indices: Any = None  # PAGES: (N,)
    positions: Any = None  # PAGES: (N,)
    page_table: Any = None  # PAGES: (B, M), or
    kv_indices: Any = None  # PAGES: (M,), of all requests, with
    kv_indptr: Any = None  # PAGES: (B + 1,)
    kv_last_page_len: Any = None  # (B,), not read
    cu_seqlens: Any = None  # PAGES, without batch_indices: (B + 1,)
    kv_lens: Any = None  # PAGES, without batch_indices: (B,)
    k_scale: float = 1.0  # quantised values are divided by it; NVFP4: multiplied
    v_scale: float = 1.0
    k_scale_ptr: Any = None  # fp32, one element or one per head, replaces k_scale; divides
    v_scale_ptr: Any = None
    k_sf: Any = None  # NVFP4
    v_sf: Any = None
    v_sf_interleaved: bool = False
    transform: QueryTransform | None = None
