"""Write paged caches of latent attention (MLA), and join the parts of its keys, as FlashInfer's `page` and `concat_ops`
do."""

from typing import Any

import torch

from cute_kernels.latent.write import MOST_LATENT, MOST_ROTATED, VALUES

from ..cache_write.call import PAGES
from ..host.checks import MixedDtypes, UnknownName, check_apart, check_operand, check_shape, check_strided, listed
from ..host.plain import traced
from ..latent.call import LatentCall
from ..latent.checks import CONCAT_K, E4M3, MLA_APPEND, WIDE
from ..latent.op import serve

__all__ = ["append_paged_mla_kv_cache", "concat_mla_k"]
FP8 = (E4M3, torch.float8_e5m2)
BACKENDS = ("default", "cake")  # upstream's; a hint here


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


def concat_mla_k(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default"
) -> None:  # fmt: skip
    """Join the parts of the keys of latent attention, of which all heads share the rotated one: k = [k_nope, k_rope].

    Args:
        k: receives the keys, (N, H, D + R).
        k_nope, k_rope: (N, H, D) and (N, 1, R). All are fp16, bf16, e4m3 or e5m2, of one dtype, with any strides, the
            last 1. D is a multiple of 16 up to 512, R even, up to 64. Values of 8 bits are copied in pairs: D is a
            multiple of 32 up to 1024, R one of 4 up to 128, and rows begin at even addresses.
        backend: "default" or "cake", a hint.

    Bits are copied. Raises before anything is written: TypeError for a dtype, which is a RuntimeError, too, if it is
    not that of k_nope; ValueError for a shape, stride or device; NotImplementedError for other D and R, and for rows of
    8 bits at odd addresses; an error that is both a KeyError and a ValueError for an unknown backend. FlashInfer's
    function.

    >>> k = torch.empty(1, 2, 20).half()
    >>> concat_mla_k(k, torch.ones(1, 2, 16).half(), torch.zeros(1, 1, 4).half())
    >>> k[0, 1, 14:18].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    serve(concat_k_call(k, k_nope, k_rope, backend))


def concat_k_call(k: Any, k_nope: Any, k_rope: Any, backend: Any = BACKENDS[0]) -> LatentCall:
    """Return the call of `concat_mla_k`."""
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    tokens, heads, latent = check_operand("k_nope", k_nope, 3, (*WIDE, *FP8), None).shape
    owner = "that of k_nope"
    for name, t in (("k_rope", k_rope), ("k", k)):
        check_operand(name, t, 3, (*WIDE, *FP8), k_nope.device, owner)
        if t.dtype != k_nope.dtype:
            raise MixedDtypes(f"{name}: dtype {t.dtype}, must be {owner}, {k_nope.dtype}")
    rotated = k_rope.shape[2]
    check_shape("k_rope", k_rope, (tokens, 1, rotated), "rows of k_nope, and one head")
    check_shape("k", k, (tokens, heads, latent + rotated), "rows and heads of k_nope, and values of both parts")
    if k_nope.dtype in FP8:
        if latent % (2 * VALUES) or latent > 2 * MOST_LATENT or rotated % 4 or rotated > 2 * MOST_ROTATED:
            allowed = f"a multiple of {2 * VALUES} up to {2 * MOST_LATENT}, and one of 4 up to {2 * MOST_ROTATED}"
            raise NotImplementedError(f"k_nope, k_rope: {latent} and {rotated} values of 8 bits, must be {allowed}")
        if not traced(k):
            check_apart({"k": k}, {"k_nope": k_nope, "k_rope": k_rope})  # in elements of their own
        k, k_nope, k_rope = (_pairs(name, t) for name, t in (("k", k), ("k_nope", k_nope), ("k_rope", k_rope)))
    return LatentCall(CONCAT_K, "rows", None, None, None, q=k_nope, q_pe=k_rope.expand(-1, heads, -1), q_out=k)


def _pairs(name: str, t: torch.Tensor) -> torch.Tensor:
    """Return rows of 8 bits as pairs of 16."""
    odd = any(step % 2 for size, step in zip(t.shape[:2], t.stride()) if size > 1)
    if t.shape[2] % 2 or odd or t.storage_offset() % 2 or not traced(t) and t.data_ptr() % 2:
        found = f"shape {tuple(t.shape)}, strides {t.stride()}, offset {t.storage_offset()}"
        raise NotImplementedError(f"{name}: {found}, rows of 8 bits must have even sizes and begin at even addresses")
    if any(step % 2 for step in t.stride()[:2]):  # of one row or head, which no element is behind
        t = t.as_strided(t.shape, (*(step + step % 2 for step in t.stride()[:2]), 1))
    return t.view(torch.float16)
