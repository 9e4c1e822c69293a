"""Batches of vLLM's sparse indexer: which tokens share the loads of their keys.

In decode, all requests have equally many tokens (`uniform_rows`), and the tokens of a request share its keys. Tokens of
other batches are put into groups of one request each (`groups_of`).
"""

from typing import NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from .latent_support import SHARING_LONGEST, of_prompts

MOST_ROWS = 8  # tokens of a request that share the loads of keys


def uniform_rows(common: CommonAttentionMetadata) -> int:
    """Return n if the first requests have n tokens each, at most MOST_ROWS, and the others, which pad a graph, have
    none; else 0."""
    n, starts = common.max_query_len, common.query_start_loc_cpu
    if not 0 < n <= MOST_ROWS or n * common.num_reqs != common.num_actual_tokens:
        return 0
    tokens = int(starts[-1])
    requests = tokens // n
    return n if requests * n == tokens == int(starts[requests]) else 0


def has_prompts(common: CommonAttentionMetadata) -> bool:
    """Return whether the tokens of a batch are mostly those of prompts. No batch that a CUDA graph captures is one."""
    tokens = int(common.query_start_loc_cpu[-1])
    return not uniform_rows(common) and of_prompts(tokens, common.num_reqs, common.max_query_len)


def first_prompt(common: CommonAttentionMetadata) -> int | None:
    """Return the first request of a batch that has more tokens than a decode with drafts. Return None if there is none,
    or if the requests from it on have few tokens in the mean. vLLM puts decodes and drafts first, and captures graphs
    of these alone."""
    starts = common.query_start_loc_cpu
    longer = (starts.diff() > SHARING_LONGEST).nonzero()
    if not len(longer):
        return None
    first = int(longer[0])
    tokens = int(starts[-1] - starts[first])
    return first if of_prompts(tokens, common.num_reqs - first, common.max_query_len) else None


def token_lens(common: CommonAttentionMetadata) -> torch.Tensor:
    """Return the keys that each token sees, int32 (T,)."""
    starts = common.query_start_loc
    token = torch.arange(common.num_actual_tokens, device=starts.device, dtype=torch.int32)
    request = torch.searchsorted(starts[1:], token, right=True).clamp(max=common.num_reqs - 1)
    return (common.seq_lens - starts[1:])[request] + token + 1


class TokenGroups(NamedTuple):
    """T tokens in G groups of up to R tokens of one request, in order.

    table: int32 (G, M), the pages of each group's request. lens: int32 (G, R), the keys of each row, 0 without a token.
    owner: int64 (G,), the request of each group; a group without a token has any. tokens: int64 (G * R,), the token of
    each row; a row without a token has any. rows: int64 (T,), the row of each token; a token behind those of all
    requests, which pads a batch, has a row without one. tokens and rows are None if row i has token i, so that nothing
    is copied.
    """

    table: torch.Tensor
    lens: torch.Tensor
    owner: torch.Tensor
    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None


def groups_of(common: CommonAttentionMetadata, size: int) -> TokenGroups:
    """Return groups of up to `size` tokens. Nothing is read on the host but the starts that it has."""
    if common.num_actual_tokens % size == 0 and not (common.query_start_loc_cpu % size).any():
        return whole_groups(common, size)
    return padded_groups(common, size)


def whole_groups(common: CommonAttentionMetadata, size: int) -> TokenGroups:
    """Return groups of `size` tokens, of a batch in which every request has a multiple of them."""
    ends = common.query_start_loc[1:].long()
    first = torch.arange(0, common.num_actual_tokens, size, device=ends.device)
    request = torch.searchsorted(ends, first, right=True)
    owner = request.clamp(max=common.num_reqs - 1)
    token = first[:, None] + torch.arange(size, device=ends.device)
    keys = (common.seq_lens - ends)[owner, None] + token + 1
    owned = (request < common.num_reqs)[:, None]  # a group behind the tokens of all requests has no keys
    return TokenGroups(common.block_table_tensor.index_select(0, owner), torch.where(owned, keys, 0).int(), owner)


def padded_groups(common: CommonAttentionMetadata, size: int) -> TokenGroups:
    """Return as many groups as T tokens of so many requests may need, and one more, which is empty."""
    starts, tokens, requests = common.query_start_loc.long(), common.num_actual_tokens, common.num_reqs
    device, ends = starts.device, starts[1:].contiguous()
    each = torch.div(ends - starts[:-1] + size - 1, size, rounding_mode="floor")
    behind = each.cumsum(0)  # groups of the requests up to each one
    number = torch.arange(tokens // size + requests + 1, device=device)
    request = torch.searchsorted(behind, number, right=True)
    owner = request.clamp(max=requests - 1)
    token = (starts[owner] + (number - behind[owner] + each[owner]) * size)[:, None]
    token = token + torch.arange(size, device=device)
    present = (token < ends[owner, None]) & (request < requests)[:, None]
    keys = common.seq_lens[owner, None] - ends[owner, None] + token + 1
    every = torch.arange(tokens, device=device)
    mine = torch.searchsorted(ends, every, right=True).clamp(max=requests - 1)
    row = (behind[mine] - each[mine]) * size + every - starts[mine]  # behind the tokens of all requests: an empty one
    row = row.clamp(max=len(number) * size - 1)
    return TokenGroups(
        common.block_table_tensor.index_select(0, owner), torch.where(present, keys, 0).int(), owner,
        torch.where(present, token, 0).flatten(), row,
    )  # fmt: skip
