"""Attention of a call in a second, independent implementation: plain torch in fp32, on any device.

It shares no code with `wrappers.reference`. Index tensors may hold any values: they are clamped as the documents of
hostile values say (`bench.cases.hostile`).
"""

import math
from typing import Any, NamedTuple

import torch

from wrappers.attention.call import AttentionCall

LOG2E = math.log2(math.e)
HALF_STEP = 2.0**-4  # of e4m3: the most that rounding changes a value, relative to it
SMALLEST = 2.0**-14  # probabilities below this share of a row's largest become zero in e4m3
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class RightAttention(NamedTuple):
    """The right results of an attention call.

    o (T, Hq, Dvo) fp32 with the factor of the output, lse (T, Hq) fp32 in base 2. keys (T,): keys that a row sees, the
    fewest of its heads. owners (T,): requests that own a row. peak (T, Hq): the largest logit of a row in base 2, the
    sink included. e4m3_error (T, Hq, Dvo): the most that o changes if probabilities are rounded to e4m3.
    """

    o: torch.Tensor
    lse: torch.Tensor
    keys: torch.Tensor
    owners: torch.Tensor
    peak: torch.Tensor
    e4m3_error: torch.Tensor


def values_of(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 values of stored rows (..., D), with a scale each (...,) or none, or of NVFP4 codes (..., D / 2) with
    block scales (..., D / 16)."""
    if scales is None:
        return stored.float()
    if scales.dtype is torch.float32:
        return stored.float() * scales[..., None]
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=stored.device)
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).long()
    return table[codes] * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)


def uninterleaved(scales: torch.Tensor) -> torch.Tensor:
    """Return linear block scales (pages, H, P, S) of the layout in which 4 rows lie block by block."""
    pages, heads, rows, blocks = scales.shape
    tiles = scales.contiguous().view(torch.uint8).reshape(pages, heads, rows // 4, blocks, 4)
    return tiles.transpose(-1, -2).reshape(pages, heads, rows, blocks).view(scales.dtype)


def _turned(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """Return x (rows, H, D) rotated by halves, rounded to its own dtype."""
    half = x.shape[-1] // 2
    rate = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half) / scale
    turn = torch.polar(torch.ones(1, dtype=torch.float64, device=x.device), positions.double()[:, None, None] * rate)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([pairs.real, pairs.imag], -1).float().to(x.dtype)


def _rows_of(p: AttentionCall, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K (n, Hkv, Dqk) and V (n, Hkv, Dvo) of a request, in the stored dtype or fp32."""
    r = p.requests
    if r.form == "ragged":
        assert r.kv_starts is not None
        first, last = (min(max(int(x), 0), p.k.shape[2]) for x in r.kv_starts[b : b + 2])
        return tuple(t[0, :, first : max(first, last)].transpose(0, 1) for t in (p.k, p.v))  # type: ignore[return-value]
    size, columns = p.k.shape[2], r.page_table.shape[2]
    begin, end, line, own = 0, columns, b, size  # own: rows that an entry stands for
    if r.form == "slots":
        own, count = 1, min(max(int(r.kv_lens[b]), 0), columns)
    elif r.form == "csr":
        assert r.kv_starts is not None
        begin, end = (min(max(int(x), 0), columns) for x in r.kv_starts[b : b + 2])
        end, line = max(begin, end), 0
        last_rows = min(max(int(r.kv_lens[b]), 0), size)
        count = (end - begin - 1) * size + last_rows if end > begin else 0
    else:
        count = min(max(int(r.kv_lens[b]), 0), columns * size)
    if not len(p.k) or not len(p.v):
        count = 0
    row = torch.arange(count, device=p.q.device)
    found = []
    sf_v = uninterleaved(p.v_scales) if p.interleaved and p.v_scales is not None else p.v_scales
    for side, (cache, scales) in enumerate(((p.k, p.k_scales), (p.v, sf_v))):
        entry = r.page_table[line, side, begin:end].long()[row // own]
        page, in_page = (entry // size, entry % size) if r.form == "slots" else (entry, row % size)
        there = (page >= 0) & (page < len(cache))
        at = page.clamp(0, max(0, len(cache) - 1)), in_page
        plain = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # torch indexes no fp8 on the CPU
        picked = plain.transpose(1, 2)[at].view(cache.dtype)
        bytewise = scales is not None and scales.element_size() == 1
        plain_scales = scales.view(torch.uint8) if bytewise and scales is not None else scales
        factors = None if plain_scales is None else plain_scales.transpose(1, 2)[at]
        values = values_of(picked, factors) if factors is not None or cache.element_size() == 1 else picked
        # an entry without a page is a row of zeros; a slot without one is no key
        found.append(values[there] if r.form == "slots" else values.masked_fill(~there[:, None, None], 0.0))
    return found[0], found[1]


def _seen(p: AttentionCall, b: int, rows: slice, n: int) -> torch.Tensor:
    """Return which keys each row of a request sees, bool (m, n)."""
    m, device = rows.stop - rows.start, p.q.device
    key = torch.arange(n, device=device)
    own = torch.arange(n - m, n, device=device)[:, None]
    if p.custom_mask is not None and p.mask_starts is not None:
        first = min(max(int(p.mask_starts[b]), 0), len(p.custom_mask))
        bits = p.custom_mask[first:]
        number = torch.arange(m, device=device)[:, None] * n + key
        inside = number < 8 * len(bits)
        byte = bits[(number // 8).clamp(max=max(0, len(bits) - 1))] if len(bits) else torch.zeros_like(number)
        seen = inside & ((byte.int() >> (number % 8).int()) & 1).bool()
    elif p.drafts is not None:
        draft = key - (n - m)
        word = p.drafts[rows][:, (draft.clamp(min=0) // 32).clamp(max=p.drafts.shape[1] - 1)]
        seen = (draft < 0) | (draft >= 32 * p.drafts.shape[1]) | ((word >> (draft.clamp(min=0) % 32).int()) & 1).bool()
    else:
        seen = key <= own if p.causal else torch.ones(m, n, dtype=torch.bool, device=device)
    if p.prefix_lens is not None:
        seen |= key < int(p.prefix_lens[b])
    if p.window_left >= 0:
        seen &= key >= own - p.window_left
    if p.ranges is not None:
        begin, last = p.ranges[rows, :1].long(), p.ranges[rows, 1:].long()
        inside = (begin <= key) & (key <= last)
        seen |= inside & (key >= own - p.range_left) if p.range_left >= 0 else inside
    return seen


def _factor(number: float, tensor: torch.Tensor | None) -> torch.Tensor | float:
    """Return a scale that broadcasts with (Hq, ...)."""
    return number if tensor is None else number * tensor.flatten().float()


def _attend(
    p: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> list[torch.Tensor]:
    """Return o (m, Hq, Dvo), lse and the largest logit (m, Hq) of a request, in base 2, and `e4m3_error`."""
    m, heads, dim = q.shape
    n, kv_heads = k.shape[:2]
    v = v.float().masked_fill(~seen.any(0)[:, None, None], 0.0)
    k = k.float().masked_fill(~seen.any(0)[:, None, None], 0.0)
    grouped = q.float().view(m, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    logits = (grouped @ k.permute(1, 2, 0)[:, None]).flatten(0, 1)  # (Hq, m, n)
    scale = _factor(p.scale, p.scale_tensor)
    logits = logits * (scale[:, None, None] if isinstance(scale, torch.Tensor) and scale.numel() > 1 else scale)
    if p.alibi_slopes is not None:
        apart = torch.arange(n, device=q.device) - torch.arange(m, device=q.device)[:, None]
        logits = logits + p.alibi_slopes.view(-1, 1, 1) * apart
    if p.soft_cap:
        logits = p.soft_cap * torch.tanh(logits / p.soft_cap)
    logits = logits.masked_fill(~seen, -math.inf)
    sink = torch.full((heads, 1), -math.inf, device=q.device) if p.sinks is None else p.sinks.float()[:, None]
    peak = torch.maximum(logits.amax(-1) if n else sink.expand(-1, m), sink)
    lse = torch.logsumexp(torch.cat([logits, sink[..., None].expand(-1, m, 1)], -1), -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    largest = weights.amax(-1, keepdim=True) if n else 0.0
    error = weights * HALF_STEP + weights.clamp(max=SMALLEST * largest)  # type: ignore[arg-type]

    def summed(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        of_groups = p.view(kv_heads, heads // kv_heads, m, n) @ values.transpose(0, 1)[:, None]
        return of_groups.flatten(0, 1).transpose(0, 1)

    return [summed(weights, v), lse.T * LOG2E, peak.T * LOG2E, summed(error, v.abs())]


def attention(p: AttentionCall) -> RightAttention:
    """Return the right results of a call. Rows with several owners are undefined."""
    tokens, heads, _ = p.q.shape
    device, r = p.q.device, p.requests
    o, e4m3_error = (torch.zeros(tokens, heads, p.dim_vo, device=device) for _ in range(2))
    lse = torch.full((tokens, heads), -math.inf, device=device)
    peak, keys = lse.clone(), torch.zeros(tokens, device=device)
    owners = torch.zeros(tokens, dtype=torch.int32, device=device)
    if r.cu_seqlens_q is None:
        starts = [b * p.max_q_len for b in range(r.batch + 1)]
    else:
        starts = [min(max(x, 0), tokens) for x in r.cu_seqlens_q.tolist()]
    r = r._replace(kv_lens=r.kv_lens.cpu(), kv_starts=None if r.kv_starts is None else r.kv_starts.cpu())
    p = p._replace(requests=r, mask_starts=None if p.mask_starts is None else p.mask_starts.cpu())
    for b in range(r.batch):
        rows = slice(starts[b], starts[b + 1])
        if rows.stop <= rows.start:
            continue
        owners[rows] += 1
        k, v = _rows_of(p, b)
        q, n, m = p.q[rows], len(k), rows.stop - rows.start
        if p.rope is not None:
            own = torch.arange(n - m, n, device=device)
            q, k = _turned(q, own, *p.rope), _turned(k, torch.arange(n, device=device), *p.rope)
        seen = _seen(p, b, rows, n)
        o[rows], lse[rows], peak[rows], e4m3_error[rows] = _attend(p, q, k, v, seen)
        keys[rows] = seen.sum(1).float()
    factor = _factor(p.out_scale, p.out_scale_tensor)
    of_heads: Any = factor[:, None] if isinstance(factor, torch.Tensor) and factor.numel() > 1 else factor
    return RightAttention(o * of_heads, lse, keys, owners, peak, e4m3_error * abs(of_heads))
