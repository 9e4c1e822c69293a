"""Attention of one request in plain torch, fp32 inside, on CPU or GPU: the core of every reference.

Logits are computed for a block of query rows of one KV head at a time, so memory is bounded by `BLOCK` elements per
matrix. On a GPU the caller keeps `torch.backends.cuda.matmul.allow_tf32` off (torch's default).
"""

import math
from typing import NamedTuple

import torch

from .masks import TokenMask

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


NONE, CAUSAL = HeadTerms(), TokenMask()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | torch.Tensor, mask: TokenMask = CAUSAL,
    soft_cap: float = 0.0, of_heads: HeadTerms = NONE, largest: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (o, lse) of one request: o (m, Hq, Dvo) fp32, not scaled; lse (m, Hq) fp32, base 2, sink included.

    q (m, Hq, Dqk), k (n, Hkv, Dqk), v (n, Hkv, Dvo), any floating dtype; query head h reads KV head h // (Hq / Hkv).
    Query row i keeps the keys j that `mask` says. Logits are s = scale * q.k (+ slope * (j - i)), with scale a number,
    (1,) or (Hq,); then soft_cap * tanh(s / soft_cap) if soft_cap > 0. A row without kept keys gives o = 0 and
    lse = -inf (or sink * log2 e). Values of keys that are not kept never matter, NaN included. largest: return the
    largest logits, in the units of lse, instead of it.
    """
    sinks, slopes = of_heads
    m, heads, _ = q.shape
    n, kv_heads, dim_vo = v.shape
    group = heads // kv_heads
    o = torch.zeros(m, heads, dim_vo, dtype=torch.float32, device=q.device)
    lse = torch.full((m, heads), -INF, dtype=torch.float32, device=q.device)
    rows = max(1, BLOCK // max(1, n * group))
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].float().contiguous(), v[:, head].float().contiguous()
        sink = None if sinks is None else sinks[mine].float()
        head_scale = scale[mine, None] if isinstance(scale, torch.Tensor) and scale.numel() > 1 else scale
        for begin in range(0, m, rows):
            block = slice(begin, min(begin + rows, m))
            numbers = torch.arange(block.start, block.stop, device=q.device)
            span = mask.span(range(block.start, block.stop), m, n)
            own = torch.arange(span.start, span.stop, device=q.device)
            rows_of_q = q[block, mine].float().contiguous()  # the order of a product's sums follows from its strides
            logits = rows_of_q @ keys[span].T * head_scale  # (rows, group, keys)
            if slopes is not None:
                apart = own[None, :] - numbers[:, None]
                logits = logits + slopes[mine].float()[None, :, None] * apart[:, None, :]
            if soft_cap > 0:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            keep = mask.keep(numbers, own, m, n)
            o[block, mine], lse[block, mine] = _softmax_values(logits, keep[:, None, :], values[span], sink, largest)
    return o, lse


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
    logits: torch.Tensor, keep: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None, largest: bool
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
    p = torch.exp(logits - top.masked_fill(top == -INF, 0.0)).masked_fill(logits == INF, 1.0)  # a sink of +inf
    total = p.sum(-1, keepdim=True)
    o = p @ values.nan_to_num(0.0, 0.0, 0.0) / total.masked_fill(total == 0, 1.0)
    if not values.isfinite().all():  # 0 * inf and 0 * NaN of keys that are not kept must not reach o
        for bad in (INF, -INF, float("nan")):
            found = values.isnan() if math.isnan(bad) else values == bad
            o = o + torch.where((keep.float() @ found.float()) > 0, bad, 0.0)
    lse = (top if largest else top + total.log()).squeeze(-1) * LOG2E
    return o, lse
