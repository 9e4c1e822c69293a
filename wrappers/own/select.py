"""Keys of sparse attention, chosen in one call: logits of the indexer, then the exact largest ones of each token."""

from typing import Any

import torch

from ..deep_gemm.api import paged_call, ragged_call
from ..host.checks import check_integer, check_operand, check_shape
from ..host.scalars import integer
from ..indexer.selection import SCRATCH, SelectionCall, apart, number_of_keys, rows_of_pass, serve, tokens_of_pass
from ..topk.checks import SELECT_REQUESTS, SELECT_ROWS, SELECT_TOKENS, TopKCall

__all__ = ["select_rows", "select_slots"]


def select_slots(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_table: torch.Tensor, top_k: int, *, max_context_len: int | None = None, out: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH, slot_table: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the slots of the top_k keys with the largest logits of each query token, for decode of sparse attention.

    The logits are those of `fp8_paged_mqa_logits`. A key in row r of page p has slot p * P + r, as the `indices` of
    `flash_mla_with_kvcache` count, if the cache to attend to has pages of the same numbers and sizes.

    Args:
        q: float8_e4m3fn (B, next_n, H, D), the rotated and quantised queries of the indexer.
        kv_cache: (pages, P, 1, 132) bytes, the cache of the indexer's keys, as `append_latent` and
            `indexer_k_quant_and_cache` write it; D + 4 bytes of a key in general.
        weights: fp32 (B * next_n, H): weights of the heads times the scales of the queries.
        context_lens: int32 (B,), the keys of each request; its last token sees all of them, the one before it one less,
            and so on. Or (B, next_n): the keys of each token.
        block_table: int32 (B, M), the pages of each request.
        top_k: how many keys a token gets, at least 1.
        max_context_len: no request has more keys; None: as many as its row of block_table may have. If it is at most
            top_k, no logits are computed, since a token gets all of its keys.
        out: receives the slots, int32 (B, next_n, top_k), or None.
        scratch_bytes: memory for logits, at most, if those of one request fit. More requests than fit are computed in
            passes, one after the other.
        slot_table: int32 (B, M), the pages that the slots name, if the rows to attend to lie in other pages than the
            indexer's keys, such as those of a copy; None: block_table.

    Returns the slots, int32 (B, next_n, top_k): by ascending position of the key, then -1. A token with at most top_k
    keys gets all of them. The selection is exact: of equal logits, those of the first positions are chosen, and the
    bits of the result depend on nothing but a token's own arguments. A call can be captured in a CUDA graph and
    replayed with other values, lengths among them; a row of a graph without a request, with a length of 0, gets -1
    alone.

    Raises before anything is launched, as `fp8_paged_mqa_logits` and `top_k_page_table_transform` do. No other library
    has this function.

    >>> cache, q = torch.zeros(4, 2, 1, 36, dtype=torch.uint8), torch.ones(1, 1, 8, 32).to(torch.float8_e4m3fn)
    >>> table, lens = torch.tensor([[3, 1]]).int(), torch.tensor([3]).int()
    >>> select_slots(q, cache, torch.ones(1, 8), lens, table, 2)
    tensor([[[6, 7]]], dtype=torch.int32)
    """
    call = slots_call(
        q, kv_cache, weights, context_lens, block_table, top_k, max_context_len, out, scratch_bytes, slot_table
    )
    return serve(call).view(*q.shape[:2], call.top_k.k)


def slots_call(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, top_k: Any, max_context_len: Any = None,
    out: Any = None, scratch_bytes: Any = SCRATCH, slot_table: Any = None,
) -> SelectionCall:  # fmt: skip
    """Return the call of `select_slots`."""
    check_operand("block_table", block_table, 2, (torch.int32,), None)
    scored = paged_call(q, kv_cache, weights, context_lens, block_table, None, 0)
    if slot_table is not None:
        check_operand("slot_table", slot_table, 2, (torch.int32,), q.device, "that of q")
        check_shape("slot_table", slot_table, tuple(block_table.shape), "that of block_table")
    width = block_table.shape[1] * scored.k.shape[1]
    if max_context_len is not None:
        width = min(width, check_integer("max_context_len", integer(max_context_len), 0))
    scored, requests, count = scored._replace(width=width), q.shape[0], scored.next_n
    k = number_of_keys(top_k)
    if out is not None:
        check_operand("out", out, 3, (torch.int32,), q.device, "that of q")
        check_shape("out", out, (requests, q.shape[1], k), "requests, tokens, top_k")
        given = {"q": q, "kv_cache": kv_cache, "weights": weights, "context_lens": context_lens}
        apart("out", out, given | {"block_table": block_table, "slot_table": slot_table})
        if requests > 1 and out.stride(0) != q.shape[1] * out.stride(1):
            raise ValueError(f"out: strides {out.stride()}, tokens must be equally far apart")
        out = out.view(-1, k)
    kind = SELECT_REQUESTS if scored.ends.shape[0] == requests else SELECT_TOKENS
    chosen = TopKCall(
        kind, None, k, lengths=scored.ends, out=out, table=block_table if slot_table is None else slot_table,
        next_n=count, page_size=scored.k.shape[1],
    )  # fmt: skip
    return SelectionCall(scored, chosen, requests, max(1, rows_of_pass(scored, scratch_bytes) // count))


def select_rows(
    q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor, top_k: int, *, out: torch.Tensor | None = None, scratch_bytes: int = SCRATCH,
) -> torch.Tensor:  # fmt: skip
    """Return the rows of the top_k keys with the largest logits of each query token, for prompts of sparse attention.

    The logits are those of `fp8_mqa_logits`, of keys in one tensor, such as `cp_gather_indexer_k_quant_cache` gathers
    from a cache. The result counts rows of that tensor, as the `indices` of a sparse prefill over rows that were
    gathered alike. No logits are computed of at most top_k keys.

    Args:
        q: float8_e4m3fn (T, H, D). kv: (keys, scales): float8_e4m3fn (S, D), and fp32 (S,). weights: fp32 (T, H).
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (T,): token t sees keys [start, end).
        top_k, out (T, top_k), scratch_bytes: as in `select_slots`; passes have tokens.

    Returns the rows, int32 (T, top_k): ascending, then -1. Selection, graphs and errors are as in `select_slots`. No
    other library has this function.

    >>> q, k = torch.ones(1, 8, 32).to(torch.float8_e4m3fn), torch.ones(5, 32).to(torch.float8_e4m3fn)
    >>> start, end = torch.tensor([1]).int(), torch.tensor([5]).int()
    >>> select_rows(q, (k, torch.tensor([9.0, 1, 3, 2, 4])), torch.ones(1, 8), start, end, 2)
    tensor([[2, 4]], dtype=torch.int32)
    """
    return serve(rows_call(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, top_k, out, scratch_bytes))


def rows_call(
    q: Any, kv: Any, weights: Any, cu_seq_len_k_start: Any, cu_seq_len_k_end: Any, top_k: Any, out: Any = None,
    scratch_bytes: Any = SCRATCH,
) -> SelectionCall:  # fmt: skip
    """Return the call of `select_rows`."""
    scored = ragged_call(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, False)
    k, tokens = number_of_keys(top_k), q.shape[0]
    if out is not None:
        check_operand("out", out, 2, (torch.int32,), q.device, "that of q")
        check_shape("out", out, (tokens, k), "tokens, top_k")
        given = {"q": q, "kv[0]": kv[0], "kv[1]": kv[1], "weights": weights}
        apart("out", out, given | {"cu_seq_len_k_start": cu_seq_len_k_start, "cu_seq_len_k_end": cu_seq_len_k_end})
    chosen = TopKCall(SELECT_ROWS, None, k, starts=cu_seq_len_k_start, lengths=cu_seq_len_k_end, out=out)
    return SelectionCall(scored, chosen, tokens, tokens_of_pass(scored, scratch_bytes))
