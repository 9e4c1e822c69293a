"""A call that writes rows: what all functions that write to a cache hand to `op.serve`."""

from typing import NamedTuple

from cute_kernels.cache_write.args import PAGES, ROWS, SLOTS

from ..host.schema import GivenTensor, MaybeTensor

__all__ = ["PAGES", "ROWS", "SLOTS", "CacheWriteCall", "QueryTransform"]


class QueryTransform(NamedTuple):
    """Norm and rotary embedding of K, and of Q, which is written too. None stands for an argument that is absent.

    rope_table, rope: as in `cute_kernels.cache_write.args`. The dtype of q_out is q's, or e4m3 or e5m2.
    """

    q: MaybeTensor = None  # (N, Hq, Dk)
    q_out: MaybeTensor = None
    rope_table: MaybeTensor = None
    rope: int = 0
    rope_positions: MaybeTensor = None  # (N,); None: those of the pages
    q_weight: MaybeTensor = None  # (Dk,) or (Hq, Dk)
    k_weight: MaybeTensor = None  # (Dk,) or (H, Dk)
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    q_scale: float = 1.0  # an 8-bit Q is divided by it
    q_scale_ptr: MaybeTensor = None
    rope_cos: MaybeTensor = None  # (L, R / 2) of the rows' dtype, with rope_sin instead of rope_table
    rope_sin: MaybeTensor = None
    kv_lens_out: MaybeTensor = None  # (B,) int32, written: kv_lens and the tokens of each request


class CacheWriteCall(NamedTuple):
    """A call, in the caller's tensors. N tokens, H heads of K and V, Hq of Q, P rows per page.

    function: the public function, which decides the names in messages (`checks.NAMES`). places: SLOTS, PAGES or ROWS.
    Caches and scale factors are (pages, P, H, ...) with `nhd`, else (pages, H, P, ...). The cache is quantised if it
    has another dtype than the rows, unless both have one byte.
    """

    function: str
    k: GivenTensor  # (N, H, Dk)
    v: GivenTensor  # (N, H, Dv)
    k_cache: GivenTensor
    v_cache: GivenTensor
    nhd: bool
    places: int
    slots: MaybeTensor = None  # SLOTS: (N,)
    batch_indices: MaybeTensor = None  # PAGES: (N,)
    positions: MaybeTensor = None  # PAGES: (N,)
    page_table: MaybeTensor = None  # PAGES: (B, M), or
    kv_indices: MaybeTensor = None  # PAGES: (M,), of all requests, with
    kv_indptr: MaybeTensor = None  # PAGES: (B + 1,)
    kv_last_page_len: MaybeTensor = None  # (B,), not read
    cu_seqlens: MaybeTensor = None  # PAGES, without batch_indices: (B + 1,)
    kv_lens: MaybeTensor = None  # PAGES, without batch_indices: (B,)
    k_scale: float = 1.0  # quantised values are divided by it; NVFP4: multiplied
    v_scale: float = 1.0
    k_scale_ptr: MaybeTensor = None  # fp32, one element or one per head, replaces k_scale; divides
    v_scale_ptr: MaybeTensor = None
    k_sf: MaybeTensor = None  # NVFP4
    v_sf: MaybeTensor = None
    v_sf_interleaved: bool = False
    transform: QueryTransform | None = None
