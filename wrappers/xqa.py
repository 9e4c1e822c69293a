"""`xqa`: decode attention in place, in the terms of FlashInfer's XQA."""

from typing import Any

import torch

from . import checks, ops
from .attention import Mode, attend
from .decode import check_interleaved, drafts_of, uniform

PAGE_SIZES = (16, 32, 64, 128)
NAMES = {  # of `attend`'s arguments
    "query": "q", "kv_cache": "k_cache, v_cache", "block_tables": "page_table", "out": "output",
    "cum_seq_lens_q": "q_cu_seq_lens", "bmm1_scale": "q_scale * kv_scale", "kv_block_scales": "k_sf_cache, v_sf_cache",
}  # fmt: skip


def xqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
    output: torch.Tensor, workspace_buffer: torch.Tensor | None, semaphores: torch.Tensor | None, num_kv_heads: int,
    page_size: int, sinks: torch.Tensor | None = None, q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor | None = None, sliding_win_size: int = 0, kv_layout: str | int | None = "NHD",
    sm_count: int | None = None, enable_pdl: bool | None = None, rcp_out_scale: float = 1.0, q_seq_len: int = 1,
    mask: torch.Tensor | None = None, *, q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None, v_sf_cache: torch.Tensor | None = None,
    v_scales_interleaved: bool = False, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """Attention of one token, or of some drafts, a request over a paged KV cache that already holds them, written to
    `output`.

    o = kv_scale * softmax(q_scale * kv_scale / sqrt(D) * q k^T) v; kv_scale applies to caches of any dtype.

    Args, upstream's order (FlashInfer):
        q: (B, 1, Hq, D) fp16 or bf16; the second dimension is the beam width, 1. Drafts: (B, 1, q_seq_len, Hq, D), or
            ragged (T, Hq, D) with q_cu_seq_lens, int32 or uint32 (B + 1,), and q_seq_len, the most of a request.
        output: q's shape; its dtype or e4m3, which is multiplied by rcp_out_scale and saturated.
        k_cache, v_cache: (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND", or flat (pages * P * Hkv, D), rows in
            NHD order; q's dtype, e4m3, or uint8: packed NVFP4, last dimension D / 2, with k_sf_cache and v_sf_cache,
            uint8 or e4m3 scale factors, last dimension D / 16, in the same order.
        page_table: int32 (B, M); entries past a request's last page are not read, a negative one before it is a page
            of zeros. seq_lens: uint32 or int32 (B, 1), KV length with the tokens.
        num_kv_heads, page_size: Hkv, and P, one of 16, 32, 64, 128.
        sinks: fp32 (Hkv, Hq / Hkv), join the softmax denominator, natural-log units, unscaled.
        q_scale, kv_scale: a float or an fp32 tensor of one element (kv_scale None: 1).
        sliding_win_size: W last positions are seen, 0: all.
        kv_layout: an int in its place is sm_count, as in older signatures.
        mask: uint16 (B, q_seq_len, W) or (T, W), W two for every 32 drafts: which drafts a draft sees, as
            `trtllm_batch_decode_with_kv_cache` says; required where q_seq_len > 1.
        v_scales_interleaved, batch_invariant: as there.

    Accepted and not used: workspace_buffer, semaphores (whatever they hold), sm_count, enable_pdl (a hint).
    ValueError rank, shape, stride, device; TypeError dtype; NotImplementedError what no kernel does.
    """
    if (k_sf_cache is None) != (v_sf_cache is None):
        raise ValueError("k_sf_cache, v_sf_cache: one of the two is None, must be both or none")
    check_interleaved(v_scales_interleaved, k_sf_cache)
    for name, t in (("q", q), ("output", output), ("seq_lens", seq_lens)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {type(t).__name__}, must be a torch.Tensor")
    rows, out, offsets, lead = _tokens(
        q, output, seq_lens, checks.check_integer("q_seq_len", q_seq_len, 1), q_cu_seq_lens
    )
    drafts = None
    if mask is not None:
        drafts = drafts_of(mask, lead, q_seq_len, q.device)
    elif q_seq_len > 1:
        raise ValueError(f"mask: None, required where q_seq_len is {q_seq_len}")
    rcp = checks.check_scale("rcp_out_scale", rcp_out_scale, q.device)
    if isinstance(rcp, torch.Tensor):
        raise TypeError("rcp_out_scale: a tensor, must be a float")
    if isinstance(kv_layout, int) or kv_layout is None:
        kv_layout = "NHD"  # it was sm_count
    if checks.check_integer("page_size", page_size) not in PAGE_SIZES:
        raise ValueError(f"page_size: {page_size}, must be one of {checks.listed(PAGE_SIZES)}")
    checks.check_integer("num_kv_heads", num_kv_heads, 1)

    def paged(name: str, cache: torch.Tensor | None) -> torch.Tensor:
        return _paged(name, cache, page_size, num_kv_heads, kv_layout)

    caches, factors = (paged("k_cache", k_cache), paged("v_cache", v_cache)), None
    if k_sf_cache is not None:
        factors = paged("k_sf_cache", k_sf_cache), paged("v_sf_cache", v_sf_cache)
    batch, (_, heads, dim) = len(seq_lens), rows.shape
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor):
            raise TypeError(f"sinks: {type(sinks).__name__}, must be a torch.Tensor")
        checks.check_shape("sinks", sinks, (num_kv_heads, heads // num_kv_heads), "KV heads, query heads of each")
        sinks = sinks.reshape(heads)
    if checks.check_integer("sliding_win_size", sliding_win_size, 0) > 0:
        sliding_win_size -= 1
    else:
        sliding_win_size = -1
    k_factor = checks.check_scale("kv_scale", 1.0 if kv_scale is None else kv_scale, q.device)
    factor = checks.check_scale("q_scale", q_scale, q.device)
    scale, unit = k_factor, dim**-0.5
    if isinstance(factor, torch.Tensor):
        scale = factor * k_factor
    else:
        unit *= factor
    try:
        call = checks.Call(
            rows, caches, None, page_table, seq_lens.reshape(batch), q_seq_len, None, scale, k_factor, batch,
            offsets, None, sliding_win_size, out, kv_layout=kv_layout, enable_pdl=enable_pdl, sinks=sinks,
            kv_block_scales=factors)  # fmt: skip
        mode = Mode(True, unit, rcp if output.dtype == checks.E4M3 else 1.0, drafts, bool(v_scales_interleaved),
                    bool(batch_invariant))  # fmt: skip
        ops.trace(mode, call) if torch.compiler.is_compiling() else attend(mode, *call)
    except (ValueError, TypeError, NotImplementedError) as error:
        name, colon, rest = str(error).partition(":")
        first = name.split(" ")[0]
        if colon and first in NAMES:
            raise type(error)(NAMES[first] + name[len(first) :] + colon + rest) from error
        raise


def _tokens(
    q: torch.Tensor, output: torch.Tensor, seq_lens: torch.Tensor, most: int, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """(q (T, Hq, D), output (T, Hq, D), their offsets (B + 1,), leading dimensions of a mask)."""
    checks.check_one_of("q: dtype", q.dtype, (torch.float16, torch.bfloat16))
    drafts, ragged = most > 1 or q.dim() == 5, offsets is not None
    if ragged:
        shape, fits = "(tokens, heads, head_dim) with q_cu_seq_lens", q.dim() == 3
    elif drafts:
        shape, fits = f"(batch, beam width 1, q_seq_len {most}, heads, head_dim)", q.dim() == 5 and q.shape[2] == most
    else:
        shape, fits = "(batch, beam width 1, heads, head_dim)", q.dim() == 4
    if not fits or not ragged and q.shape[1] != 1:
        raise ValueError(f"q: shape {tuple(q.shape)}, must be {shape}")
    checks.check_shape("output", output, tuple(q.shape), "that of q")
    checks.check_one_of("output: dtype", output.dtype, (q.dtype, checks.E4M3))
    batch = len(seq_lens) if ragged and seq_lens.dim() else q.shape[0]
    checks.check_shape("seq_lens", seq_lens, (batch, 1) if seq_lens.dim() == 2 else (batch,), "batch, 1")
    if offsets is not None:
        if not isinstance(offsets, torch.Tensor):
            raise TypeError(f"q_cu_seq_lens: {type(offsets).__name__}, must be a torch.Tensor or None")
        checks.check_one_of("q_cu_seq_lens: dtype", offsets.dtype, (torch.int32, torch.uint32))
        checks.check_shape("q_cu_seq_lens", offsets, (batch + 1,), "batch + 1")
        return q, output, offsets.view(torch.int32), (q.shape[0],)
    if drafts:
        if not output.is_contiguous():
            raise ValueError(f"output: strides {output.stride()}, must be contiguous where q_seq_len is given")
        return q[:, 0].flatten(0, 1), output.view(-1, *q.shape[3:]), uniform(batch, most, q.device), (batch, most)
    return q[:, 0], output[:, 0], uniform(batch, 1, q.device), (batch, 1)


def _paged(name: str, cache: Any, page_size: int, heads: int, layout: Any) -> torch.Tensor:
    """A cache in 4 dimensions, checked against page_size and num_kv_heads; scale factors as e4m3."""
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{name}: {type(cache).__name__}, must be a torch.Tensor")
    if name.endswith("_sf_cache"):
        checks.check_one_of(f"{name}: dtype", cache.dtype, (torch.uint8, checks.E4M3))
        cache = cache.view(checks.E4M3)
    if cache.dim() == 2:
        if cache.shape[0] % (page_size * heads) or layout != "NHD" or not cache.is_contiguous():
            given = f"shape {tuple(cache.shape)}, strides {cache.stride()}, {layout}"
            pages = f"whole pages of {page_size} tokens x {heads} heads"
            raise ValueError(f"{name}: {given}, a flat cache is contiguous, NHD, of {pages}")
        return cache.view(-1, page_size, heads, cache.shape[1])
    if cache.dim() != 4:
        raise ValueError(f"{name}: shape {tuple(cache.shape)}, must have 2 or 4 dimensions")
    if layout in ("NHD", "HND"):
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        checks.check_shape(name, cache, (cache.shape[0], *inner, cache.shape[3]), f"{layout}, page_size, num_kv_heads")
    return cache
