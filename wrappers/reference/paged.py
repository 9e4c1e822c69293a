"""Paged attention of a batch in plain torch, fp32 inside, CPU or GPU: gather each request, then `dense.attention`."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.spec import LSE_INF, LSE_MAX, LSE_NATURAL, LSE_OF_KEYS
from cute_kernels.records import RECORDS

from .. import fp4
from ..attention.call import AttentionCall
from .dense import LOG2E, HeadTerms, attention, rotate
from .latent import latent_values
from .masks import TokenMask, masks_of


def gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Return a request's tokens, (length, Hkv, D), from cache (pages, Hkv, P, D).

    Entries of `pages` past the length are not read. An entry that is not a page of the cache stands for a page of
    zeros.
    """
    held, _, size, _ = cache.shape
    ids = pages[: -(-length // size)].to(torch.int64)
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # torch indexes no fp8 on CPU
    found = raw[ids.clamp(0, held - 1)]
    found[(ids < 0) | (ids >= held)] = 0
    tokens = found.transpose(1, 2).flatten(0, 1)[:length]
    return tokens.view(cache.dtype)


def _scale(number: float, tensor: torch.Tensor | None) -> float | torch.Tensor:
    """Return a scale as a number, or as a tensor of one element, (1,), or of one per query head, (Hq,)."""
    return number if tensor is None else number * tensor.reshape(-1)


class KeyLocation(NamedTuple):
    """Where a request's keys are.

    pages: (2, N), its entries of the page table for K and V. None: the rows of k from `first` on. slots: instead, the
    rows of the cache, counted from page to page, that are its keys.
    """

    length: int
    pages: torch.Tensor | None
    first: int = 0
    slots: torch.Tensor | None = None


def most_keys(call: AttentionCall) -> int:
    """Return an upper bound of the keys of a request."""
    r = call.requests
    if r.form == "ragged":
        return call.k.shape[2]
    return r.page_table.shape[2] * call.k.shape[2] if call.k.shape[0] else 0


def keys_of(call: AttentionCall) -> list[KeyLocation]:
    """Return the keys of each request, clamped to those that exist: none if the cache has no pages or starts fall."""
    r, most = call.requests, most_keys(call)
    if r.form == "slots":
        return _chosen(call.k, r.page_table[:, 0], r.kv_lens)
    if r.kv_starts is None:
        return [KeyLocation(n, pages) for n, pages in zip(r.kv_lens.clamp(0, most).tolist(), r.page_table, strict=True)]
    ragged, size = r.form == "ragged", call.k.shape[2]
    starts = r.kv_starts.clamp(0, size if ragged else r.page_table.shape[2]).tolist()
    counts = [max(0, end - start) for start, end in pairwise(starts)]
    if ragged:
        return [KeyLocation(count, None, start) for count, start in zip(counts, starts, strict=False)]
    if call.shares_v:  # keys of each request
        lens = (
            min(max(n, 0), count * size if most else 0) for n, count in zip(r.kv_lens.tolist(), counts, strict=False)
        )
        return [
            KeyLocation(n, r.page_table[0, :, start : start + count])
            for n, count, start in zip(lens, counts, starts, strict=False)
        ]
    last = r.kv_lens.clamp(0, size).tolist()
    return [
        KeyLocation((count - 1) * size + rows if count and most else 0, r.page_table[0, :, start : start + count])
        for count, rows, start in zip(counts, last, starts, strict=False)
    ]


def _chosen(cache: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> list[KeyLocation]:
    """Return the keys of tokens that have chosen them in a cache: those slots, among the ones that count, which the
    cache has."""
    (batch, columns), rows = slots.shape, cache.shape[0] * cache.shape[2]
    counts = lens.repeat_interleave(batch // max(len(lens), 1)).clamp(0, columns).tolist()
    found = []
    for n, all_of_token in zip(counts, slots.long(), strict=True):
        own = all_of_token[:n]
        own = own[(own >= 0) & (own < rows)]
        found.append(KeyLocation(len(own), None, 0, own))
    return found


def _values(
    cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor | None, keys: KeyLocation
) -> torch.Tensor:
    def stored(x: torch.Tensor) -> torch.Tensor:
        if keys.slots is not None:
            return x[keys.slots // x.shape[2], :, keys.slots % x.shape[2]]
        if pages is not None:
            return gather(x, pages, keys.length)
        return x[0, :, keys.first : keys.first + keys.length].transpose(0, 1)

    if scales is None:
        return stored(cache)
    if scales.ndim == 3:  # one factor per token and head
        return stored(cache).float() * stored(scales.unsqueeze(-1))
    return fp4.nvfp4_dequantize(stored(cache), stored(scales))


def unpacked(cache: Any, record: str) -> Any:
    """Return a cache. Packed rows become bf16, as kernels make it of them."""
    if not record or cache is None:
        return cache
    if not RECORDS[record].packed:
        return cache.bfloat16()
    return latent_values(record, cache[:, 0]).bfloat16().unsqueeze(1)


class SequenceTokens(NamedTuple):
    """The tokens of a request.

    rows: its query rows among all. q: (m, Hq, Dqk). k (n, Hkv, Dqk), v (n, Hkv, Dvo): of the cache's dtype, or fp32 for
    NVFP4. q and k are rotated if the call asks for it.
    """

    rows: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: TokenMask


def tokens_of(call: AttentionCall) -> Iterator[SequenceTokens]:
    """Yield the tokens of each request with query rows, whatever the form of the call. Reads lengths on the host."""
    tokens, r, v_scales = len(call.q), call.requests, call.v_scales
    first, extra = unpacked(call.k, call.record), unpacked(call.extra_k, call.extra_record)
    k_rope, extra_rope = unpacked(call.k_rope, call.record), unpacked(call.extra_k_rope, call.extra_record)
    if v_scales is not None and call.interleaved:
        v_scales = fp4.deinterleave_v_scales(v_scales)
    if r.cu_seqlens_q is None:
        starts = [n * call.max_q_len for n in range(r.batch + 1)]
    else:
        starts = r.cu_seqlens_q.clamp(0, tokens).tolist()
    for request, (keys, mask) in enumerate(zip(keys_of(call), masks_of(call, starts), strict=False)):
        rows = slice(starts[request], starts[request + 1])
        if rows.start >= rows.stop:
            continue
        pages = (None, None) if keys.pages is None else keys.pages
        q, k, v = (
            call.q[rows],
            _values(first, call.k_scales, pages[0], keys),
            _values(first if call.record else call.v, v_scales, pages[1], keys),
        )
        if call.extra_k is not None and call.extra_slots is not None and call.extra_lens is not None:
            more = _chosen(call.extra_k, call.extra_slots, call.extra_lens)[request]
            k = v = torch.cat((k, _values(extra, None, None, more)))
        if call.q_rope is not None and k_rope is not None:
            q = torch.cat((q, call.q_rope[rows]), -1)
            rope = _values(k_rope, None, pages[0], keys)
            if extra_rope is not None:
                rope = torch.cat((rope, _values(extra_rope, None, None, more)))
            k = torch.cat((k, rope), -1)
        elif call.q_rope is not None:  # rows of K have all columns
            q, v = torch.cat((q, call.q_rope[rows]), -1), k[..., : call.q.shape[2]]
        if call.rope is not None:
            q, k = rotate(q, keys.length - len(q), *call.rope), rotate(k, 0, *call.rope)
        yield SequenceTokens(rows, q, k, v, mask)


def paged_attention(call: AttentionCall, largest: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse): o (T, Hq, Dvo) fp32 including out_scale, lse (T, Hq) fp32 base 2.

    Rows of no request are 0 and -inf. Reads lengths on the host, so a GPU call synchronises. Skips nothing. Invalid
    values are clamped as kernels do: query rows to those that exist; keys to the capacity of a row of the table, or of
    the list of all pages; to none if the cache has no pages. largest: return the largest logits instead of lse.
    """
    tokens, heads, _ = call.q.shape
    o = torch.zeros(tokens, heads, call.dim_vo, dtype=torch.float32, device=call.q.device)
    lse = torch.full((tokens, heads), -float("inf"), dtype=torch.float32, device=call.q.device)
    for x in tokens_of(call):
        o[x.rows], lse[x.rows] = attention(
            x.q,
            x.k,
            x.v,
            scale=_scale(call.scale, call.scale_tensor),
            mask=x.mask,
            soft_cap=call.soft_cap or 0.0,
            of_heads=HeadTerms(call.sinks, call.alibi_slopes),
            largest=largest,
        )
    out_scale = _scale(call.out_scale, call.out_scale_tensor)
    return o * (out_scale[:, None] if isinstance(out_scale, torch.Tensor) else out_scale), lse


def store(o: torch.Tensor, out: "torch.Tensor | fp4.FP4Tensor", o_sf_scale: float | None = None) -> None:
    """Store fp32 o in `out`: rounded to 16 bits, saturated to e4m3, or quantised to NVFP4.

    o_sf_scale: NVFP4's forward scale.
    """
    if isinstance(out, fp4.FP4Tensor):
        fp4.store(o, out, 1.0 if o_sf_scale is None else o_sf_scale)
    else:
        out.copy_(fp4.e4m3(o) if out.dtype == torch.float8_e4m3fn else o)


def formed_lse(call: AttentionCall, lse: torch.Tensor) -> torch.Tensor:
    """Return the LSE of `paged_attention` in the form that a call wants (`AttentionCall.lse_form`)."""
    if call.lse_form & LSE_OF_KEYS and call.sinks is not None:
        lse = paged_attention(call._replace(sinks=None))[1]
    if call.lse_form & LSE_NATURAL:
        lse = lse / LOG2E
    lse = torch.where(lse == -math.inf, math.inf, lse) if call.lse_form & LSE_INF else lse
    if not call.lse_form & LSE_MAX:
        return lse
    return torch.cat([lse, paged_attention(call._replace(sinks=None), True)[1] / LOG2E], 1)
