"""Paged attention of a batch in plain torch, fp32 inside, CPU or GPU: gather each request, then `dense.attention`."""

from dataclasses import dataclass

import torch

from .. import fp4
from .dense import attention


@dataclass(frozen=True)
class PagedProblem:
    """What a paged attention call computes, in one layout whatever the public function's arguments looked like.

    k and v hold 16-bit or e4m3 values, or packed e2m1 (uint8, last dimension D / 2) with k_scales and v_scales.
    Reads lengths on the host, so a GPU call synchronises.
    """

    q: torch.Tensor  # (T, Hq, Dqk)
    k: torch.Tensor  # (pages, Hkv, P, Dqk)
    v: torch.Tensor  # (pages, Hkv, P, Dvo)
    page_table: torch.Tensor  # (B, 2, M) int32: [:, 0] pages of K, [:, 1] pages of V
    kv_lens: torch.Tensor  # (B,) int32 or uint32
    cu_seqlens_q: torch.Tensor  # (B + 1,) int32
    scale: float | torch.Tensor  # factor on the logits, natural units
    out_scale: float | torch.Tensor  # factor on the normalised output
    causal: bool = True
    window_left: int = -1  # negative: off
    soft_cap: float = 0.0  # 0: off
    sinks: torch.Tensor | None = None  # (Hq,) fp32, natural-log units
    k_scales: torch.Tensor | None = None  # (pages, Hkv, P, Dqk / 16) e4m3
    v_scales: torch.Tensor | None = None  # (pages, Hkv, P, Dvo / 16) e4m3
    v_scales_interleaved: bool = False  # as `fp4.deinterleave_v_scales` describes
    drafts: torch.Tensor | None = None  # (T, W) int32, instead of causal: bit t of a token's row, it sees draft t


def gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """A request's tokens, (length, Hkv, D), from cache (pages, Hkv, P, D); later entries are not read, a negative one
    is a page of zeros."""
    size = cache.shape[2]
    used = -(-length // size)
    if used > len(pages):
        raise ValueError(f"seq_lens: {length} tokens need {used} pages, block_tables has {len(pages)} a request")
    ids = pages[:used].to(torch.int64)
    raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # torch indexes no fp8 on CPU
    found = raw[ids.clamp(min=0)]
    found[ids < 0] = 0
    tokens = found.transpose(1, 2).flatten(0, 1)[:length]
    return tokens.view(cache.dtype)


def _values(cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, length: int) -> torch.Tensor:
    tokens = gather(cache, pages, length)
    return tokens if scales is None else fp4.nvfp4_dequantize(tokens, gather(scales, pages, length))


def paged_attention(p: PagedProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (T, Hq, Dvo) fp32 including out_scale, lse (T, Hq) fp32 base 2). Rows of no request are 0 and -inf."""
    tokens, heads, _ = p.q.shape
    dim_vo = p.v.shape[-1] * (1 if p.v_scales is None else 2)
    o = torch.zeros(tokens, heads, dim_vo, dtype=torch.float32, device=p.q.device)
    lse = torch.full((tokens, heads), -float("inf"), dtype=torch.float32, device=p.q.device)
    v_scales = p.v_scales
    if v_scales is not None and p.v_scales_interleaved:
        v_scales = fp4.deinterleave_v_scales(v_scales)
    starts = p.cu_seqlens_q.tolist()
    for request, length in enumerate(p.kv_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        k = _values(p.k, p.k_scales, p.page_table[request, 0], length)
        v = _values(p.v, v_scales, p.page_table[request, 1], length)
        o[rows], lse[rows] = attention(
            p.q[rows],
            k,
            v,
            scale=p.scale,
            causal=p.causal if p.drafts is None else p.drafts[rows],
            window_left=p.window_left,
            soft_cap=p.soft_cap,
            sinks=p.sinks,
        )
    return o * p.out_scale, lse


def store(o: torch.Tensor, out: "torch.Tensor | fp4.FP4Tensor", o_sf_scale: float | None = None) -> None:
    """fp32 o into `out`: 16-bit rounded, e4m3 saturated, NVFP4 quantised with the forward global scale o_sf_scale."""
    if isinstance(out, fp4.FP4Tensor):
        fp4.store(o, out, 1.0 if o_sf_scale is None else o_sf_scale)
    else:
        out.copy_(fp4.e4m3(o) if out.dtype == torch.float8_e4m3fn else o)
