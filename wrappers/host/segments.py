"""Segments of a batch, by boundaries on the device: (N + 1,) int32 for queries, and for keys. Nothing is copied to the
host, and boundaries may hold any numbers."""

from typing import Any, NamedTuple

import torch

from .checks import check_operand, check_shape


class TokenSegments(NamedTuple):
    """The segments of T query tokens, (T,) each. segment: its number. inside: whether the token is in one.
    number: of the token in it. queries: the tokens of the segment. begin, end: its keys."""

    segment: torch.Tensor
    inside: torch.Tensor
    number: torch.Tensor
    queries: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor


def check_boundaries(cu_seqlens_q: Any, cu_seqlens_k: Any, device: torch.device, owner: str) -> None:
    """Check the boundaries of segments. owner: the tensor that has the device, for the message."""
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_operand(name, ends, 1, (torch.int32,), device, owner)
    if not len(cu_seqlens_q):
        raise ValueError("cu_seqlens_q: 0 entries, must be one more than the segments")
    check_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "that of cu_seqlens_q")


def segments_of(tokens: int, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> TokenSegments:
    """Return the segments of `tokens` query tokens, in int64."""
    token = torch.arange(tokens, device=cu_seqlens_q.device)
    if len(cu_seqlens_q) == 1:
        zeros = torch.zeros_like(token)
        return TokenSegments(zeros, zeros > 0, zeros, zeros, zeros, zeros)
    # `ends` is no view: on a GPU, Inductor of torch 2.11 refuses to search a view, or ignores its offset
    k, starts, ends = cu_seqlens_k.long(), cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    segment = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    first, last = starts[segment], ends[segment]
    inside = (token >= first) & (token < last)
    return TokenSegments(segment, inside, token - first, last - first, k[:-1][segment], k[1:][segment])


def rows_of_documents(
    positions: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Return the rows of positions (T, K) in the documents of T tokens, -1 for none."""
    of = segments_of(len(positions), starts_q, starts_k)
    limit = of.end
    if causal:  # the keys of a document end with the key of its last token
        limit = torch.minimum(limit, limit - of.queries + of.number + 1)
    rows = positions + of.begin[:, None]
    keys = of.inside[:, None] & (positions >= 0) & (rows < limit[:, None]) & (rows >= 0) & (rows < 1 << 31)
    return torch.where(keys, rows, -1).int()
