"""A call that writes rows of latent attention: what all functions of its caches hand to `op.serve`."""

from typing import Any, NamedTuple

from cute_kernels.cache_write.args import PAGES, ROWS, SLOTS

from ..host.schema import MaybeTensor

__all__ = ["PAGES", "ROWS", "SLOTS", "LatentCall"]


class LatentCall(NamedTuple):
    """A call, in the caller's tensors. N tokens, Hq heads of queries, P rows per page.

    function: the public function, which decides the names in messages (`checks.NAMES`). record: a key of
    `cute_kernels.records.RECORDS`. None stands for an argument that is absent. Without kv, nothing is written to
    the cache.
    """

    function: str
    record: str
    kv: MaybeTensor  # (N, D)
    pe: MaybeTensor  # (N, R)
    cache: MaybeTensor  # (pages, P, elements)
    pe_cache: MaybeTensor = None  # (pages, P, R): the rotated part has a cache of its own
    places: int = SLOTS  # ROWS: token i goes to row i of page 0
    slots: MaybeTensor = None  # SLOTS: (N,)
    batch_indices: MaybeTensor = None  # PAGES: (N,)
    positions: MaybeTensor = None  # PAGES: (N,)
    page_table: MaybeTensor = None  # PAGES: (B, M), or
    kv_indices: MaybeTensor = None  # PAGES: (M,), of all requests, with
    kv_indptr: MaybeTensor = None  # PAGES: (B + 1,)
    kv_last_page_len: MaybeTensor = None  # (B,), not read
    cu_seqlens: MaybeTensor = None  # PAGES, without batch_indices: (B + 1,)
    kv_lens: MaybeTensor = None  # PAGES, without batch_indices: (B,)
    weight: MaybeTensor = None  # (D,) or (D + R,)
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    rope_table: MaybeTensor = None  # (L, R) fp32 or of the rows' dtype
    interleaved: bool = False
    rope_positions: MaybeTensor = None  # (N,); None: those of the pages
    q: MaybeTensor = None  # (N, Hq, Dq)
    q_pe: MaybeTensor = None  # (N, Hq, R)
    q_out: MaybeTensor = None  # (N, Hq, Dq + R), of the rows' dtype or e4m3
    pe_out: MaybeTensor = None  # (N, R); may be pe
    scale: float = 1.0  # e4m3: values are divided by it
    scale_ptr: MaybeTensor = None
    q_scale: float = 1.0  # an 8-bit query is divided by it
    q_scale_ptr: MaybeTensor = None
    power_of_two: bool = True
    # of an indexer
    bias: MaybeTensor = None  # (D,)
    weights: MaybeTensor = None  # (N, Hq) fp32
    weights_out: MaybeTensor = None  # (N, Hq) fp32
    weight_scale: float = 1.0
    index: Any = (
        None  # a LatentCall of the indexer's rows, which the same launch writes; its places may be the latent's
    )
