"""Quantise rows of latent attention (MLA) and write them to caches in three tensors, as FlashInfer's `page` does.

The latent goes to NVFP4 and the rotated part to e4m3, in a launch each of the kernel that writes rows of K and V."""

from typing import Any

import torch

from ..cache_write.call import PAGES, CacheWriteCall
from ..cache_write.checks import KPE, NVFP4_MLA, WIDE
from ..cache_write.parts import serve_parts, without_v
from ..fp4 import BLOCK, SCALE_TYPES
from ..host.checks import check_operand, check_shape
from ..host.scalars import dequantisation_scale

E4M3 = torch.float8_e4m3fn


def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: torch.Tensor, append_kpe: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    ckv_cache: torch.Tensor, ckv_sf_cache: torch.Tensor, kpe_cache: torch.Tensor, kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, ckv_scale: float | torch.Tensor,
    kpe_scale: float | torch.Tensor,
) -> None:  # fmt: skip
    """Quantise latents to NVFP4 and rotated parts to e4m3, and write them to a paged cache in three tensors.

    Args:
        append_ckv, append_kpe: fp16 or bf16 (nnz, 512) and (nnz, 64), any row strides. Other sizes: a multiple of 16,
            and any number.
        ckv_cache: uint8 (pages, P, 256), two e2m1 codes a byte. ckv_sf_cache: e4m3, or its bytes in uint8, (pages, P,
            32), linear. kpe_cache: e4m3 (pages, P, 64). Any P and any strides, the last 1.
        ckv_scale, kpe_scale: global dequantisation scales: a latent is code * factor * ckv_scale, a rotated value code
            * kpe_scale. A positive float, or an fp32 tensor of one element, which FlashInfer's function does not take:
            on the host it counts as a float, on CUDA its value is not read.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as in `append_paged_kv_cache`.

    Two launches. The factor of a block is its largest magnitude over 6 * ckv_scale, rounded to the nearest e4m3. A row
    is not written if it has no place in the cache; other rows are written whole. Raises before anything is written:
    TypeError for a dtype; ValueError for a shape, stride, device or number. FlashInfer's function.

    >>> codes, sf = torch.zeros(1, 4, 8, dtype=torch.uint8), torch.zeros(1, 4, 1, dtype=torch.uint8)  # a page of 4 rows
    >>> kpe, zero = torch.zeros(1, 4, 2).to(torch.float8_e4m3fn), torch.tensor([0])
    >>> ckv, starts, last = torch.ones(1, 16).half(), torch.tensor([0, 1]), torch.tensor([1])
    >>> nvfp4_quantize_append_paged_mla_kv_cache(
    ...     ckv, torch.ones(1, 2).half(), zero, zero, codes, sf, kpe, zero, starts, last, 1.0, 0.5
    ... )
    >>> nvfp4_dequantize(codes, sf)[0, 0, :2], kpe[0, 0].float()
    (tensor([1.0312, 1.0312]), tensor([2., 2.]))
    """
    first, second = nvfp4_append_call(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, ckv_sf_cache, kpe_cache, kv_indices, kv_indptr,
        kv_last_page_len, ckv_scale, kpe_scale,
    )  # fmt: skip
    serve_parts(first, second)


def nvfp4_append_call(
    append_ckv: Any, append_kpe: Any, batch_indices: Any, positions: Any, ckv_cache: Any, ckv_sf_cache: Any,
    kpe_cache: Any, kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any, ckv_scale: Any, kpe_scale: Any,
) -> tuple[CacheWriteCall, CacheWriteCall]:  # fmt: skip
    """Return the calls of `nvfp4_quantize_append_paged_mla_kv_cache`."""
    check_operand("append_ckv", append_ckv, 2, WIDE, None)
    device, owner = append_ckv.device, "that of append_ckv"
    check_operand("append_kpe", append_kpe, 2, WIDE, device, owner)
    if append_kpe.dtype != append_ckv.dtype:
        raise TypeError(f"append_kpe: dtype {append_kpe.dtype}, must be {owner}, {append_ckv.dtype}")
    check_operand("ckv_cache", ckv_cache, 3, (torch.uint8,), device, owner)
    check_operand("ckv_sf_cache", ckv_sf_cache, 3, SCALE_TYPES, device, owner)
    check_operand("kpe_cache", kpe_cache, 3, (E4M3,), device, owner)
    (tokens, latent), rotated, pages = append_ckv.shape, append_kpe.shape[1], tuple(ckv_cache.shape[:2])
    if latent % BLOCK:
        raise ValueError(f"append_ckv: shape {tuple(append_ckv.shape)}, the last dimension must be a multiple of 16")
    check_shape("append_kpe", append_kpe, (tokens, rotated), "rows of append_ckv")
    check_shape("ckv_cache", ckv_cache, (*pages, latent // 2), "half of the last dimension of append_ckv")
    check_shape("ckv_sf_cache", ckv_sf_cache, (*pages, latent // BLOCK), "pages and P of ckv_cache, a factor per block")
    check_shape("kpe_cache", kpe_cache, (*pages, rotated), "pages and P of ckv_cache, the last dimension of append_kpe")
    factor, factor_ptr = dequantisation_scale("ckv_scale", ckv_scale, append_ckv, "append_ckv", True)
    divisor, divisor_ptr = dequantisation_scale("kpe_scale", kpe_scale, append_ckv, "append_ckv", False)
    places = {
        "batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr,
        "kv_last_page_len": kv_last_page_len,
    }  # fmt: skip
    first = CacheWriteCall(
        NVFP4_MLA, append_ckv.unsqueeze(1), None, ckv_cache.unsqueeze(2), None, True, PAGES, k_scale=factor,
        k_scale_ptr=factor_ptr, k_sf=ckv_sf_cache.unsqueeze(2), **places,
    )  # fmt: skip
    second = CacheWriteCall(
        NVFP4_MLA + KPE, append_kpe.unsqueeze(1), None, kpe_cache.unsqueeze(2), None, True, PAGES, k_scale=divisor,
        k_scale_ptr=divisor_ptr, **places,
    )  # fmt: skip
    return without_v(first), without_v(second)
