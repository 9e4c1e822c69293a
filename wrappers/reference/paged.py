"""Paged attention of a batch in plain torch, fp32 inside, CPU or GPU: gather each request, then `dense.attention`."""

import torch

from .. import fp4
from ..attention.problem import Problem
from .dense import attention


def gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """A request's tokens, (length, Hkv, D), from cache (pages, Hkv, P, D); later entries are not read, one that is no
    page of the cache is a page of zeros."""
    held, _, size, _ = cache.shape
    ids = pages[: -(-length // size)].to(torch.int64)
    raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # torch indexes no fp8 on CPU
    found = raw[ids.clamp(0, held - 1)]
    found[(ids < 0) | (ids >= held)] = 0
    tokens = found.transpose(1, 2).flatten(0, 1)[:length]
    return tokens.view(cache.dtype)


def _values(cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, length: int) -> torch.Tensor:
    tokens = gather(cache, pages, length)
    return tokens if scales is None else fp4.nvfp4_dequantize(tokens, gather(scales, pages, length))


def _factor(number: float, tensor: torch.Tensor | None) -> float | torch.Tensor:
    return number if tensor is None else number * tensor


def paged_attention(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (T, Hq, Dvo) fp32 including out_scale, lse (T, Hq) fp32 base 2). Rows of no request are 0 and -inf. Reads
    lengths on the host, so a GPU call synchronises; skips nothing. Values that make no sense are clamped as kernels
    do: rows to the query's, keys to what a row of the table holds, none where the cache has no pages."""
    tokens, heads, _ = p.q.shape
    o = torch.zeros(tokens, heads, p.dim_vo, dtype=torch.float32, device=p.q.device)
    lse = torch.full((tokens, heads), -float("inf"), dtype=torch.float32, device=p.q.device)
    v_scales, r = p.v_scales, p.requests
    if v_scales is not None and p.interleaved:
        v_scales = fp4.deinterleave_v_scales(v_scales)
    if r.cu_seqlens_q is None:
        starts = [n * p.max_q_len for n in range(r.batch + 1)]
    else:
        starts = r.cu_seqlens_q.clamp(0, tokens).tolist()
    most = r.page_table.shape[2] * p.k.shape[2] if p.k.shape[0] else 0
    for request, length in enumerate(r.kv_lens.clamp(0, most).tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start >= rows.stop:
            continue
        o[rows], lse[rows] = attention(
            p.q[rows],
            _values(p.k, p.k_scales, r.page_table[request, 0], length),
            _values(p.v, v_scales, r.page_table[request, 1], length),
            scale=_factor(p.scale, p.scale_tensor),
            causal=bool(p.causal) if p.drafts is None else p.drafts[rows],
            window_left=min(p.window_left, most),
            soft_cap=p.soft_cap or 0.0,
            sinks=p.sinks,
        )
    return o * _factor(p.out_scale, p.out_scale_tensor), lse


def store(o: torch.Tensor, out: "torch.Tensor | fp4.FP4Tensor", o_sf_scale: float | None = None) -> None:
    """fp32 o into `out`: 16-bit rounded, e4m3 saturated, NVFP4 quantised with the forward global scale o_sf_scale."""
    if isinstance(out, fp4.FP4Tensor):
        fp4.store(o, out, 1.0 if o_sf_scale is None else o_sf_scale)
    else:
        out.copy_(fp4.e4m3(o) if out.dtype == torch.float8_e4m3fn else o)
