"""Rotary embedding before a launch: the kernels have none, so torch operations rotate Q and K.

Nothing here waits for the device or copies from it, so a call can be captured. Memory traffic for K of S bytes: a
gather of its pages (2 S), then two operations for each half of the result, in fp32 between them: x * cos
(reads S / 2, writes S), and the sum (reads S and S / 2, writes S / 2). This makes 9 S in total; Q takes 7 S, as it is
not gathered.
"""

from math import pi

import torch

from .call import AttentionCall, Rope, SequenceBatch

TEMPORARY = 1 << 28  # bound of the temporary bytes alive at a time, unless one page needs more
TYPES = (torch.bfloat16, torch.float16)


def rotated(call: AttentionCall) -> AttentionCall:
    """Return the call with rotated copies of Q and K, and without `rope`.

    Otherwise only K's row of the page table differs.

    Entry e of the page table becomes page e of the new K, rotated at the positions of its request: a page in several
    entries is copied for each. K takes memory for all entries, used or not: B * M pages for a table (B, 2, M) whatever
    the lengths, N pages for CSR, all rows of ragged K. An entry outside the pool becomes -1, which kernels read as
    zeros. Offsets are clamped. If offsets fall, a row or page of several requests belongs to the first of them, and one
    of no request is rotated by an unspecified angle. Query positions are negative if a request has more queries than
    keys.

    Raises NotImplementedError unless Q and K have 16 bits.
    """
    if call.rope is None:
        return call
    for name, x in (("query", call.q), ("key", call.k)):
        if x.dtype not in TYPES:
            kind = "NVFP4" if x.dtype == torch.uint8 else str(x.dtype).removeprefix("torch.")
            raise NotImplementedError(f"pos_encoding_mode: 'ROPE_LLAMA' with a {kind} {name}, must be fp16 or bf16")
    if not call.requests.batch:
        return call._replace(rope=None)
    turns = frequencies(call.q.shape[2], call.rope, call.q.device)
    q = rotate(call.q, _query_positions(call), turns)
    k, requests = _ragged_keys(call, turns) if call.requests.form == "ragged" else _paged_keys(call, turns)
    return call._replace(q=q, k=k, requests=requests, rope=None)


def frequencies(dim: int, rope: Rope, device: torch.device) -> torch.Tensor:
    """Return the turns per position, (dim / 2,) fp64: theta^(-2 d / dim) / scale radians, divided by 2 pi."""
    exponents = torch.arange(0, -dim, -2, dtype=torch.float64, device=device).div_(dim)
    return torch.pow(rope.theta, exponents).div_(2 * pi * rope.scale)


def rotate(x: torch.Tensor, positions: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return x (T, H, D) of 16 bits, rotated at positions (T,) by `frequencies` turns (D / 2,).

    x may have any strides; the result is new and contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _fill(out.unsqueeze(2), x.unsqueeze(2), None, positions, turns)
    return out


def _fill(
    out: torch.Tensor, pages: torch.Tensor, ids: torch.Tensor | None, first: torch.Tensor, turns: torch.Tensor
) -> None:
    """Write pages (pages, H, P, D), or those of ids (E,), to out (E, H, P, D), rotated from positions `first` (E,) on.

    Whole turns are dropped in fp64: in fp32, an angle at position 131072 is off by 2^-8 radians. The rest, its sine and
    the products are fp32.
    """
    entries, heads, rows, dim = out.shape
    a, b = slice(0, dim // 2), slice(dim // 2, dim)
    size = max(1, TEMPORARY // max(1, rows * dim * (4 * heads + 10)))  # pages: each in 16 bits, half in fp32, tables
    within = torch.arange(rows, device=out.device)
    by_row = out.stride(1) < out.stride(2)  # NHD: in this order a gather copies whole pages
    for begin in range(0, entries, size):
        part = slice(begin, begin + size)
        turned = (first[part, None] + within)[:, None, :, None] * turns
        angle = turned.frac_().float().mul_(2 * pi)
        cos, sin = angle.cos(), angle.sin()
        if ids is None:
            x = pages[part]
        elif by_row:
            x = pages.transpose(1, 2).index_select(0, ids[part]).transpose(1, 2)
        else:
            x = pages.index_select(0, ids[part])
        half = x[..., a] * cos
        torch.addcmul(half, x[..., b], sin, value=-1, out=out[part, ..., a])
        torch.mul(x[..., a], sin, out=half)
        torch.addcmul(half, x[..., b], cos, out=out[part, ..., b])


def _empty(like: torch.Tensor, pages: int) -> torch.Tensor:
    """Return an empty (pages, H, P, D) tensor, dense, with the dtype of `like` and its order of heads and rows."""
    _, heads, rows, dim = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(pages, rows, heads, dim).transpose(1, 2)
    return like.new_empty(pages, heads, rows, dim)


def _paged_keys(call: AttentionCall, turns: torch.Tensor) -> tuple[torch.Tensor, SequenceBatch]:
    r, pool = call.requests, call.k.shape[0]
    if not pool:  # no request has keys
        return call.k, r
    given, rows = r.page_table[:, 0], call.k.shape[2]
    entry = torch.arange(given.numel(), dtype=torch.int32, device=given.device).view(given.shape)
    if r.kv_starts is None:
        first = (entry % given.shape[1] if given.shape[1] else entry) * rows
    else:
        first = _offsets_within(entry, r.kv_starts.clamp(0, given.shape[1])) * rows
    k = _empty(call.k, given.numel())
    ids = given.clamp(0, pool - 1)
    _fill(k, call.k, ids.flatten(), first.flatten(), turns)
    table = torch.stack((entry.masked_fill(given != ids, -1), r.page_table[:, 1]), 1)
    return k, r._replace(page_table=table)


def _ragged_keys(call: AttentionCall, turns: torch.Tensor) -> tuple[torch.Tensor, SequenceBatch]:
    assert call.requests.kv_starts is not None
    rows = call.k.shape[2]
    row = torch.arange(rows, dtype=torch.int32, device=call.k.device)
    k = _empty(call.k, 1)
    first = _offsets_within(row, call.requests.kv_starts.clamp(0, rows))
    _fill(k.permute(2, 1, 0, 3), call.k.permute(2, 1, 0, 3), None, first, turns)  # each row is a page
    return k, call.requests


def _owner(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the request of each element of x: the first one with an end behind it, or the last request.

    Since the end of the request before is not behind x, the request begins at or before x.
    """
    return torch.searchsorted(ends.cummax(0).values, x, right=True).clamp_(max=len(ends) - 1)


def _offsets_within(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the distance of each element of x from the start of its request."""
    return x - starts[_owner(x, starts[1:])]


def _key_counts(call: AttentionCall) -> torch.Tensor:
    """Return the number of keys of each request, (B,) int32, clamped as kernels do."""
    r, rows = call.requests, call.k.shape[2]
    width = rows if r.form == "ragged" else r.page_table.shape[2]
    if r.kv_starts is None:
        return r.kv_lens.clamp(0, width * rows if call.k.shape[0] else 0)
    counts = r.kv_starts.clamp(0, width).diff().clamp_(min=0)
    if r.form == "ragged":
        return counts
    return ((counts - 1) * rows + r.kv_lens.clamp(0, rows)).masked_fill_(counts == 0, 0)


def _query_positions(call: AttentionCall) -> torch.Tensor:
    """Return the position of each query row, (T,) int32: i + n - m for row i of a request with m queries and n keys."""
    tokens, counts, offsets = call.q.shape[0], _key_counts(call), call.requests.cu_seqlens_q
    if offsets is None:
        before = torch.arange(-call.max_q_len, 0, dtype=torch.int32, device=call.q.device)
        return (counts[:, None] + before).flatten()
    row = torch.arange(tokens, dtype=torch.int32, device=call.q.device)
    ends = offsets.clamp(0, tokens)[1:]
    return row + (counts - ends)[_owner(row, ends)]
