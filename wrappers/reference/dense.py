"""Attention of one request in plain torch, fp32 inside, on CPU or GPU: the core of every reference.

Logits are computed for a block of query rows of one KV head at a time, so memory is bounded by `BLOCK` elements per
matrix. On a GPU the caller keeps `torch.backends.cuda.matmul.allow_tf32` off (torch's default).
"""

import math
from typing import NamedTuple

import torch

from .bounds import LeftBound

LOG2E = math.log2(math.e)
BLOCK = 1 << 24  # fp32 elements of one logits block: 64 MiB; a few blocks are alive at a time
INF = float("inf")


class HeadTerms(NamedTuple):
    """One number per query head, (Hq,) fp32, for each of two features.

    sinks: natural-log units; they are added to the denominator only, and not scaled. slopes: ALiBi's; slope *
    (key - query row) is added to a logit before the soft cap.
    """

    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


NONE, UNBOUNDED = HeadTerms(), LeftBound()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | torch.Tensor,
    causal: "bool | torch.Tensor" = True, left: LeftBound = UNBOUNDED, soft_cap: float = 0.0,
    of_heads: HeadTerms = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (o, lse) of one request: o (m, Hq, Dvo) fp32, not scaled; lse (m, Hq) fp32, base 2, sink included.

    q (m, Hq, Dqk), k (n, Hkv, Dqk), v (n, Hkv, Dvo), any floating dtype; query head h reads KV head h // (Hq / Hkv).
    Query row i has position p = i + n - m (bottom-right). Key j is kept if j <= p (causal) and j >= left.first(p).
    Logits are s = scale * q.k (+ slope * (j - i)), with scale a number, (1,) or (Hq,); then
    soft_cap * tanh(s / soft_cap) if soft_cap > 0. A row without kept keys gives o = 0 and lse = -inf
    (or sink * log2 e). Values of keys that are not kept never matter, NaN included.

    causal may be a tensor. int32 (m, W), a mask of drafts: row i keeps all keys before the last m, and key t of the
    last m if bit t of the row is set. uint8 (bytes,), a mask of bits, least significant first: row i keeps key j if bit
    i * n + j is set, and none past the last byte.
    """
    bits = causal if isinstance(causal, torch.Tensor) else None
    sinks, slopes = of_heads
    causal = causal is True
    m, heads, _ = q.shape
    n, kv_heads, dim_vo = v.shape
    group = heads // kv_heads
    o = torch.zeros(m, heads, dim_vo, dtype=torch.float32, device=q.device)
    lse = torch.full((m, heads), -INF, dtype=torch.float32, device=q.device)
    rows = max(1, BLOCK // max(1, n * group))
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].float(), v[:, head].float()
        sink = None if sinks is None else sinks[mine].float()
        head_scale = scale[mine, None] if isinstance(scale, torch.Tensor) and scale.numel() > 1 else scale
        for begin in range(0, m, rows):
            block = slice(begin, min(begin + rows, m))
            positions = torch.arange(block.start, block.stop, device=q.device) + (n - m)
            first = left.first(positions)
            span = _span(int(first.min()), int(block.stop) + n - m, n, causal)
            numbers = torch.arange(span.start, span.stop, device=q.device)
            logits = q[block, mine].float() @ keys[span].T * head_scale  # (rows, group, keys)
            if slopes is not None:
                apart = numbers[None, :] - (positions - (n - m))[:, None]
                logits = logits + slopes[mine].float()[None, :, None] * apart[:, None, :]
            if soft_cap > 0:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            keep = _keep(positions, first, numbers, causal)
            if bits is not None and bits.dtype == torch.uint8:
                keep &= _bits_keep(bits, (positions - (n - m))[:, None] * n + numbers)
            elif bits is not None:
                keep &= _draft_keep(bits[block], numbers - (n - m))
            o[block, mine], lse[block, mine] = _softmax_values(logits, keep[:, None, :], values[span], sink)
    return o, lse


def _span(first: int, end: int, n: int, causal: bool) -> slice:
    """Return the keys from `first` on that any of the positions up to end - 1 may keep."""
    stop = max(0, min(n, end)) if causal else n
    return slice(min(first, stop), stop)


def _keep(positions: torch.Tensor, first: torch.Tensor, keys: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return a bool mask (rows, keys). first: the first key that each row may keep."""
    keep = keys[None, :] >= first[:, None]
    if causal:
        keep &= keys[None, :] <= positions[:, None]
    return keep


def _draft_keep(drafts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a bool mask (rows, keys): key j is draft numbers[j], or, if that is negative, before all drafts."""
    at = numbers.clamp(0, 32 * drafts.shape[1] - 1)
    bits = drafts[:, at // 32] >> (at % 32) & 1
    return (bits == 1) | (numbers != at)


def _bits_keep(bits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the bits with the numbers `at` as bools; False past the last byte."""
    if not len(bits):
        return torch.zeros_like(at, dtype=torch.bool)
    byte = at >> 3
    return (byte < len(bits)) & ((bits[byte.clamp(max=len(bits) - 1)] >> (at & 7) & 1) == 1)


def rotate(x: torch.Tensor, first: int, scale: float, theta: float) -> torch.Tensor:
    """Return x (rows, heads, D) with rotary embedding, in its own dtype. Angles are exact in fp64.

    Row i has position first + i; dimension d is rotated with d + D / 2 by position / scale * theta ** (-2 d / D).
    """
    rows, _, dim = x.shape
    d = torch.arange(dim // 2, dtype=torch.float64, device=x.device)
    positions = torch.arange(first, first + rows, dtype=torch.float64, device=x.device)
    angle = (positions[:, None] / scale * theta ** (-2 * d / dim))[:, None]  # (rows, 1, D / 2)
    low, high = x.float().chunk(2, -1)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def _softmax_values(
    logits: torch.Tensor, keep: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of a block.

    logits: (rows, group, keys). keep: (rows, 1, keys). values: (keys, D). sink: (group,).
    """
    logits = logits.masked_fill(~keep, -INF)
    if sink is not None:  # an extra key without a value
        logits = torch.cat([logits, sink[None, :, None].expand(len(logits), -1, 1)], dim=-1)
        keep = torch.nn.functional.pad(keep, (0, 1))
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    if logits.shape[-1] == 0:
        return logits.new_zeros(*logits.shape[:2], values.shape[-1]), logits.new_full(logits.shape[:2], -INF)
    top = logits.amax(-1, keepdim=True)
    p = torch.exp(logits - top.masked_fill(top == -INF, 0.0))
    total = p.sum(-1, keepdim=True)
    o = p @ values.nan_to_num(0.0, 0.0, 0.0) / total.masked_fill(total == 0, 1.0)
    if not values.isfinite().all():  # 0 * inf and 0 * NaN of keys that are not kept must not reach o
        for bad in (INF, -INF, float("nan")):
            found = values.isnan() if math.isnan(bad) else values == bad
            o = o + torch.where((keep.float() @ found.float()) > 0, bad, 0.0)
    lse = (top + total.log()).squeeze(-1) * LOG2E
    return o, lse
