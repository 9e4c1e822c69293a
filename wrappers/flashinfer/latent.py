"""Write paged caches of latent attention (MLA), as FlashInfer's `page` and `concat_ops` do."""

from typing import Any

import torch

from ..cache_write.call import PAGES
from ..host.checks import check_operand, check_strided
from ..latent.call import LatentCall
from ..latent.checks import MLA_APPEND, WIDE
from ..latent.op import serve

__all__ = ["append_paged_mla_kv_cache"]
E4M3 = torch.float8_e4m3fn


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor, append_kpe: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:  # fmt: skip
    """Write rows of latent attention to a paged cache in two tensors. The cache's page lists already count them.

    Args:
        append_ckv, append_kpe: fp16 or bf16 (nnz, 512) and (nnz, 64), any row strides. Other sizes: a multiple of 16 up
            to 512, an even number up to 64.
        ckv_cache, kpe_cache: (pages, P, 512), (pages, P, 64) of the rows' dtype, or e4m3, in which values saturate; any
            P and any strides, the last 1, such as views of one packed tensor.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as in `append_paged_kv_cache`.

    A row is not written if it has no place in the cache; other rows are written whole. Raises before anything is
    written: TypeError for a dtype; ValueError for a shape, stride or device; NotImplementedError for sizes that no
    kernel serves. FlashInfer's function, which takes no e4m3.

    >>> ckv, kpe = torch.zeros(3, 4, 512).half(), torch.zeros(3, 4, 64).half()  # 3 pages of 4 rows
    >>> pages, starts, last = torch.tensor([2, 0]), torch.tensor([0, 2]), torch.tensor([1])  # one request, 5 keys
    >>> new, rotated, both = torch.ones(2, 512).half(), torch.ones(2, 64).half(), torch.tensor([0, 0])
    >>> append_paged_mla_kv_cache(new, rotated, both, torch.tensor([3, 4]), ckv, kpe, pages, starts, last)
    >>> kpe[..., 0].nonzero().tolist()  # row 3 of page 2, and row 0 of page 0
    [[0, 0], [2, 3]]
    """
    serve(append_call(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
    ))  # fmt: skip


def append_call(
    append_ckv: Any, append_kpe: Any, batch_indices: Any, positions: Any, ckv_cache: Any, kpe_cache: Any,
    kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any,
) -> LatentCall:  # fmt: skip
    """Return the call of `append_paged_mla_kv_cache`."""
    for name, t in (("append_ckv", append_ckv), ("append_kpe", append_kpe)):
        check_operand(name, t, 2, WIDE, None)
    for name, t in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), ("kv_indptr", kv_indptr)):
        check_strided(name, t)
    check_strided("kv_last_page_len", kv_last_page_len, 1)
    record = "e4m3" if ckv_cache.dtype == E4M3 else "rows"
    return LatentCall(
        MLA_APPEND, record, append_ckv, append_kpe, ckv_cache, pe_cache=kpe_cache, places=PAGES,
        batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
    )  # fmt: skip
