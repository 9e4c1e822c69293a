"""Index tensors that hold anything: calls which must stay inside their tensors, and what they compute.

Kernels clamp lengths, offsets and page ids where they read them. A request owns the rows [offset, next offset), both
clamped to the query's; it has as many keys as its length says and its page table has room for; a page that the pool
has not is zeros. What rows hold that several requests own is left open, and rows that none owns are not written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from wrappers import reference
from wrappers.attention.problem import Problem

from . import attention as cases
from .attention import AttentionCase

GUARD = 4096  # bytes before and behind every tensor
EXTREME = (-(1 << 31), -(1 << 30), -1, 0, 1, 1 << 30, (1 << 31) - 1)
KINDS = (
    "lengths", "offsets", "falling offsets", "rising offsets", "pages", "no columns", "no pages", "everything",
    "any bytes",
)  # fmt: skip
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _without_nan(t: torch.Tensor) -> torch.Tensor:
    """A copy, with zeros instead."""
    if t.dtype != torch.float8_e4m3fn:
        return t.nan_to_num() if t.is_floating_point() else t
    codes = t.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(t.dtype)


def spoilt(case: AttentionCase, p: Problem, kind: str, seed: int) -> Problem:
    """The case's problem with index tensors of a kind of KINDS. Pools hold no NaN: a table may name any row of them."""
    gen, r = torch.Generator().manual_seed(seed), p.requests
    table, lens, offsets = r.page_table[:, : 2 if case.separate_tables else 1], r.kv_lens, r.cu_seqlens_q
    most = table.shape[2] * p.k.shape[2]
    assert offsets is not None
    fields = ("k", "v") if p.k_scales is None else ("k", "v", "k_scales", "v_scales")
    pools: dict[str, Any] = {field: _without_nan(getattr(p, field)) for field in fields}

    def some(t: torch.Tensor, *values: int) -> torch.Tensor:
        """Two of three entries of t are of these values."""
        chosen = torch.tensor(values)[torch.randint(len(values), t.shape, generator=gen)].to(t)
        return torch.where(torch.rand(t.shape, generator=gen).to(t.device) < 2 / 3, chosen, t)

    def any_bytes(t: torch.Tensor) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, t.shape, generator=gen).to(t)

    tokens, pages = len(p.q), len(p.k)
    if kind in ("lengths", "rising offsets", "everything"):
        lens = some(lens, *EXTREME, most - 1, most, most + 1)
    if kind in ("offsets", "rising offsets", "everything"):
        offsets = some(offsets, *EXTREME, tokens - 1, tokens, tokens + 1)
    if kind == "rising offsets":
        offsets = offsets.sort().values
    if kind == "falling offsets":
        offsets = torch.tensor([tokens + 9, -9]).repeat(len(offsets))[: len(offsets)].to(offsets)
    if kind in ("pages", "everything"):
        table = some(table, *EXTREME, pages - 1, pages, pages + 1)
    if kind == "any bytes":
        table, lens, offsets = any_bytes(table), any_bytes(lens), any_bytes(offsets)
    if kind == "no columns":
        table = table[:, :, :0]
    if kind == "no pages":
        pools = {field: pool[:0].contiguous() for field, pool in pools.items()}
    table = table.expand(-1, 2, -1).contiguous()
    return p._replace(requests=r._replace(page_table=table, kv_lens=lens, cu_seqlens_q=offsets), **pools)


def expected(p: Problem) -> Results:
    """(o, lse, owners): o (T, Hq, Dvo) and lse (T, Hq) in fp32 of the rows that one request owns; owners (T,): how many
    do."""
    r, (tokens, heads, _), (pages, _, size, _) = p.requests, p.q.shape, p.k.shape
    assert r.cu_seqlens_q is not None
    offsets = r.cu_seqlens_q.long().clamp(0, tokens).tolist()
    lens = r.kv_lens.long().clamp(0, r.page_table.shape[2] * size if pages else 0).to(torch.int32)
    table = torch.where((r.page_table >= 0) & (r.page_table < pages), r.page_table, -1)  # -1: a page of zeros
    o, lse = torch.zeros(tokens, heads, p.dim_vo, device=p.q.device), torch.zeros(tokens, heads, device=p.q.device)
    owners = torch.zeros(tokens, dtype=torch.int32, device=p.q.device)
    for b in range(r.batch):
        rows = slice(offsets[b], offsets[b + 1])
        if rows.stop <= rows.start:
            continue
        count = rows.stop - rows.start
        whole = r._replace(
            page_table=table[b : b + 1], kv_lens=lens[b : b + 1], batch=1,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=p.q.device),
        )  # fmt: skip
        drafts = None if p.drafts is None else p.drafts[rows]
        o[rows], lse[rows] = reference.paged_attention(
            p._replace(q=p.q[rows], requests=whole, max_q_len=count, drafts=drafts)
        )
        owners[rows] += 1
    return o, lse, owners


def arguments(case: AttentionCase, p: Problem) -> dict[str, Any]:
    """Keyword arguments of the case's function, of a problem whose lengths are not the case's."""
    return cases.FUNCTIONS[case.function][1](replace(case, fresh=False), p)


@contextmanager
def guarded(inputs: dict[str, Any], outputs: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The same arguments, each tensor between guards. On leaving, AssertionError where a guard or an input has changed.
    Guards are NaN as floats, and as integers numbers that no tensor has room for."""
    kept: list[tuple[str, torch.Tensor, torch.Tensor, slice]] = []

    def moved(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(moved(name, x) for x in value)
        if not isinstance(value, torch.Tensor):
            return value
        data = value.contiguous().view(-1).view(torch.uint8)
        whole = torch.full((len(data) + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=value.device)
        if not value.is_floating_point():
            whole[3::4] = 0x7F
        whole[GUARD : GUARD + len(data)] = data
        inside = slice(GUARD, GUARD + len(data)) if name in outputs else slice(0, 0)
        kept.append((name, whole, whole.clone(), inside))
        return whole[GUARD : GUARD + len(data)].view(value.dtype).view(value.shape)

    yield {name: moved(name, value) for name, value in inputs.items()}
    for name, whole, before, inside in kept:
        changed = whole != before
        changed[inside] = False
        assert not changed.any(), f"{name}: byte {int(changed.nonzero()[0]) - GUARD} of {len(whole) - 2 * GUARD}"
