"""Logits of an indexer, in plain torch."""

from typing import Any

import torch

from cute_kernels.indexer.args import IndexerArgs, pack

SCORES = 1 << 25  # that are held at a time


def indexer_windows(a: IndexerArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [begin, end) that each token sees, int64 (N,); both are 0 if it sees none."""
    tokens = a.q.shape[0]
    keys = a.table.shape[1] * a.k.shape[1] if len(a.table) else len(a.k)
    end = a.ends.long()
    if len(end) != tokens:
        end = end.repeat_interleave(a.next_n)
        if a.causal:
            end = end.clamp(min=0) + torch.arange(tokens, device=end.device) % a.next_n - (a.next_n - 1)
    begin = a.starts.long().clamp(0, keys) if len(a.starts) else torch.zeros_like(end)
    end = torch.minimum(end.clamp(max=keys), (begin if a.compressed else 0) + torch.full_like(end, a.out.shape[1]))
    sees = begin < end
    return begin * sees, end * sees


def indexer_logits(spec: Any, *flat: Any) -> None:
    """Write logits. flat: the arguments of a launch. A key on a page that does not exist counts as zeros."""
    a = pack(spec, flat)
    begin, end = indexer_windows(a)
    if a.clean:
        a.out.fill_(-torch.inf)
    for request in range(len(a.table) or 1):
        mine = slice(request * a.next_n, (request + 1) * a.next_n)
        low, high = begin[mine], end[mine]
        seen = low < high
        if bool(seen.any()):
            first, last = int(low[seen].min()), int(high.max())
            _request(a, mine, low, high, first, last)


def _request(a: IndexerArgs, mine: slice, low: torch.Tensor, high: torch.Tensor, first: int, last: int) -> None:
    """Write the logits of the tokens `mine` for keys [first, last), of which each sees [low, high)."""
    q, weights = a.q[mine].float(), a.weights[mine]
    tokens, heads = q.shape[:2]
    step = max(1, SCORES // (tokens * heads))
    for at in range(first, last, step):
        positions = torch.arange(at, min(at + step, last), device=q.device)
        k, scale = _keys(a, mine.start // a.next_n, positions, q.shape[2])
        scores = torch.einsum("nhd,kd->nhk", q, k)
        none = scores <= 0 if a.q.dtype is torch.float8_e4m3fn else ~(scores > 0)  # NaN of bf16 is no score
        scores = scores.masked_fill(none, 0.0)
        logits = torch.einsum("nhk,nh->nk", scores, weights) * scale
        columns = positions - (low[:, None] if a.compressed else 0)
        seen = (positions >= low[:, None]) & (positions < high[:, None])
        rows = torch.arange(mine.start, mine.start + tokens, device=q.device)[:, None].expand_as(seen)
        a.out[rows[seen], columns.expand_as(seen)[seen]] = logits[seen].to(a.out.dtype)


def _keys(a: IndexerArgs, request: int, positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys at some positions of a request, and their scales, in fp32."""
    kind = a.q.dtype
    if not len(a.table):
        return a.k[positions, 0].contiguous().view(kind).float(), a.k_scale[positions]
    row = dim * kind.itemsize
    size = a.k.shape[1]
    pages, rows = a.table[request, positions // size].long(), positions % size
    exists = (pages >= 0) & (pages < len(a.k))
    if not len(a.k):
        return torch.zeros(len(positions), dim, device=pages.device), torch.zeros(len(positions), device=pages.device)
    flat = a.k.as_strided((len(a.k), size * (row + 4)), (a.k.stride(0), 1))[pages * exists]
    at = torch.arange(len(positions), device=pages.device)
    codes = flat[:, : size * row].reshape(-1, size, row)[at, rows]
    scales = flat[:, size * row :].reshape(-1, size, 4)[at, rows]
    k = torch.where(exists[:, None], codes.view(kind).float(), 0.0)
    return k, torch.where(exists, scales.contiguous().view(torch.float32)[:, 0], 0.0)
