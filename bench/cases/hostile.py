"""Index tensors with arbitrary values: calls that must stay inside their tensors, and their expected results.

Kernels clamp lengths, offsets and page ids when they read them. A request owns the rows [offset, next offset), both
clamped to the query's rows. Its number of keys is its length, clamped to the room of its page table; in CSR and with
ragged K and V, it is given by [start, next start), both clamped. A page id outside the pool reads as zeros. The custom
mask of a request begins at a clamped byte, and hides all keys past the tensor's end. Rows that several requests own are
undefined, and rows that no request owns are not written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from wrappers import reference
from wrappers.attention.call import AttentionCall, SequenceBatch, listed_sequences
from wrappers.attention.op import serve

from . import attention as cases
from . import forms
from .attention import AttentionCase

GUARD = 4096  # bytes before and after every tensor
EXTREME = (-(1 << 31), -(1 << 30), -1, 0, 1, 1 << 30, (1 << 31) - 1)
ROWS = ("offsets", "falling offsets", "rising offsets", "everything", "any bytes")  # query offsets, or all at once
LENGTHS = ("lengths",)  # lengths of requests, or, in CSR, of their last pages
PAGES = ("pages", "no columns", "no pages", "fewer pages of V")
STARTS = ("starts", "falling starts", "rising starts")  # starts of the keys
MASKS = ("mask starts", "no mask")
RANGES = ("ranges",)
TENSORS = (  # fields of a problem for `served`
    "q", "k", "v", "k_scales", "v_scales", "sinks", "custom_mask", "mask_starts", "ranges", "prefix_lens",
    "alibi_slopes",
)  # fmt: skip
TABLES = ("page_table", "kv_lens", "cu_seqlens_q", "kv_starts")  # fields of its requests
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _without_nan(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with zeros in place of NaN."""
    if t.dtype != torch.float8_e4m3fn:
        return t.nan_to_num() if t.is_floating_point() else t
    codes = t.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(t.dtype)


def kinds(in_forms: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the kinds of hostile values for problems in these of `forms.FORMS`."""
    found = ROWS + (MASKS if "mask" in in_forms else RANGES if {"ranges", "prefix"} & set(in_forms) else ())
    if "ragged" in in_forms:
        return (*found, *STARTS, "no pages")
    return found + LENGTHS + PAGES + (STARTS if "csr" in in_forms else ())


def made(case: AttentionCase, in_forms: tuple[str, ...], device: Any = "cpu", seed: int = 0) -> AttentionCall:
    """Return the case's problem in other forms. Its caches hold no NaN, because tables and starts may name any of their
    rows."""
    p = forms.apply(cases.make_call(case, device, seed), in_forms, seed)
    fields = ("k", "v") if p.k_scales is None else ("k", "v", "k_scales", "v_scales")
    caches: dict[str, Any] = {field: _without_nan(getattr(p, field)) for field in fields}
    return p._replace(**caches)


def spoilt(case: AttentionCase, p: AttentionCall, kind: str, seed: int) -> AttentionCall:
    """Give a problem from `made` index tensors of one of its `kinds`."""
    gen, r = torch.Generator().manual_seed(seed), p.requests
    table, lens, offsets = r.page_table[:, : 2 if case.separate_tables else 1], r.kv_lens, r.cu_seqlens_q
    tokens, pages, size, columns = len(p.q), len(p.k), p.k.shape[2], table.shape[2]
    ragged, starts, mask, mask_starts = r.form == "ragged", r.kv_starts, p.custom_mask, p.mask_starts
    most = size if r.form == "csr" else columns * size
    assert offsets is not None

    def some(t: Any, *values: int) -> Any:
        """Replace about two thirds of the entries of t by these values."""
        if t is None:
            return None
        chosen = torch.tensor(values)[torch.randint(len(values), t.shape, generator=gen)].to(t)
        return torch.where(torch.rand(t.shape, generator=gen).to(t.device) < 2 / 3, chosen, t)

    def wild(t: Any, count: int) -> Any:
        return some(t, *EXTREME, count - 1, count, count + 1)

    def falling(t: Any, count: int) -> Any:
        return torch.tensor([count + 9, -9]).repeat(len(t))[: len(t)].to(t)

    def any_bytes(t: Any) -> Any:
        return None if t is None else torch.randint(-(1 << 31), 1 << 31, t.shape, generator=gen).to(t)

    room = size if ragged else columns
    if kind in ("lengths", "rising offsets", "everything"):
        lens = wild(lens, most)
    if kind in ("offsets", "rising offsets", "everything"):
        offsets = wild(offsets, tokens)
    if kind == "rising offsets":
        offsets = offsets.sort().values
    if kind == "falling offsets":
        offsets = falling(offsets, tokens)
    if kind in ("starts", "rising starts", "everything"):
        starts = wild(starts, room)
    if kind == "rising starts" and starts is not None:
        starts = starts.sort().values
    if kind == "falling starts":
        starts = falling(starts, room)
    if kind in ("pages", "everything"):
        table = wild(table, pages)
    if kind in ("mask starts", "everything") and mask is not None:
        mask_starts = wild(some(mask_starts, -3, 2, len(mask) // 2), len(mask))
    ranges, prefixes = p.ranges, p.prefix_lens
    if kind in ("ranges", "everything"):
        ranges, prefixes = wild(ranges, most), wild(prefixes, most)
    if kind == "any bytes":
        ranges, prefixes = any_bytes(ranges), any_bytes(prefixes)
        table, lens, offsets, starts, mask_starts = map(any_bytes, (table, lens, offsets, starts, mask_starts))
    if kind == "no columns":
        table = table[:, :, :0]
    if kind == "no mask" and mask is not None:
        mask = mask[:0]
    caches: dict[str, Any] = {}
    if kind == "no pages":
        caches = {field: getattr(p, field) for field in ("k", "v", "k_scales", "v_scales")}
    if kind == "fewer pages of V":
        caches = {field: getattr(p, field) for field in ("v", "v_scales")}
    for field, t in caches.items():
        if t is not None:
            caches[field] = t[:, :, :0] if ragged else t[: len(t) // 2 if kind == "fewer pages of V" else 0].clone()
    table = table.expand(-1, 2, -1).contiguous()
    r = r._replace(page_table=table, kv_lens=lens, cu_seqlens_q=offsets, kv_starts=starts)
    return p._replace(
        requests=r, custom_mask=mask, mask_starts=mask_starts, ranges=ranges, prefix_lens=prefixes, **caches
    )


def _alone(p: AttentionCall, b: int) -> AttentionCall:
    """Return the problem reduced to the keys and the mask of request b, with valid index tensors: invalid pages become
    -1, and ragged rows become pages of one row."""
    r, k, v = p.requests, p.k, p.v
    table, size = r.page_table, k.shape[2]
    if r.kv_starts is None:
        table = table[b : b + 1]
        count = table.shape[2] * size
        length = int(r.kv_lens[b].long().clamp(0, count))
    else:
        if r.form == "ragged":
            k, v = (x[0].transpose(0, 1).unsqueeze(2) for x in (k, v))
            table = torch.arange(len(k), dtype=torch.int32, device=k.device).expand(1, 2, -1)
        start, end = r.kv_starts[b : b + 2].long().clamp(0, table.shape[2]).tolist()
        table = table[:, :, start : max(start, end)]
        length = max(0, end - start)
        if r.form == "csr" and length:
            length = (length - 1) * size + int(r.kv_lens[b].long().clamp(0, size))
    pools = torch.tensor([[len(k)], [len(v)]], device=k.device)
    table = torch.where((table >= 0) & (table < pools), table, -1)
    lens = torch.tensor([length if len(k) and len(v) else 0], dtype=torch.int32, device=k.device)
    mask, starts = p.custom_mask, p.mask_starts
    if mask is not None and starts is not None:
        mask, starts = mask[int(starts[b].long().clamp(0, len(mask))) :], torch.zeros_like(starts[:2])
    requests = SequenceBatch(table, lens, None, 1, None)
    return p._replace(k=k, v=v, requests=requests, custom_mask=mask, mask_starts=starts)


def expected(p: AttentionCall) -> Results:
    """Return (o, lse, owners): o (T, Hq, Dvo) and lse (T, Hq) in fp32, valid for rows with one owner; owners (T,): the
    number of requests that own the row."""
    tokens, heads, device = len(p.q), p.q.shape[1], p.q.device
    assert p.requests.cu_seqlens_q is not None
    offsets = p.requests.cu_seqlens_q.long().clamp(0, tokens).tolist()
    o, lse = torch.zeros(tokens, heads, p.dim_vo, device=device), torch.zeros(tokens, heads, device=device)
    owners = torch.zeros(tokens, dtype=torch.int32, device=device)
    for b in range(p.requests.batch):
        rows = slice(offsets[b], offsets[b + 1])
        if rows.stop <= rows.start:
            continue
        count, own = rows.stop - rows.start, _alone(p, b)
        own_offsets = torch.tensor([0, count], dtype=torch.int32, device=device)
        requests = own.requests._replace(cu_seqlens_q=own_offsets)
        prefix = None if p.prefix_lens is None else p.prefix_lens[b : b + 1]
        drafts, ranges = (None if t is None else t[rows] for t in (p.drafts, p.ranges))
        o[rows], lse[rows] = reference.paged_attention(
            own._replace(
                q=p.q[rows], requests=requests, max_q_len=count, drafts=drafts, ranges=ranges, prefix_lens=prefix
            )
        )
        owners[rows] += 1
    return o, lse, owners


def arguments(case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return the keyword arguments of the case's function, or of `served` if the problem has another form. The lengths
    are the problem's, not the case's. Outputs are NaN."""
    if p.requests.form == "table":
        return cases.FUNCTIONS[case.function][1](replace(case, fresh=False), p)
    found = {field: getattr(p, field) for field in TENSORS} | {name: getattr(p.requests, name) for name in TABLES}
    out = torch.full((len(p.q), case.heads_q, case.head_dim_vo), float("nan"), dtype=p.q.dtype, device=p.q.device)
    return found | {"out": out, "lse": torch.full(out.shape[:2], float("nan"), device=out.device)}


def served(p: AttentionCall) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that takes `arguments` of a problem in another form: it runs the same path as the public
    classes."""

    def call(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table, lens, offsets, starts = (given.pop(name) for name in TABLES)
        serve(p._replace(requests=listed_sequences(table, lens, offsets, starts, p.requests.form), **given))
        return given["out"], given["lse"]

    return call


@contextmanager
def guarded(inputs: dict[str, Any], outputs: tuple[str, ...], guard: int = GUARD) -> Iterator[dict[str, Any]]:
    """Yield the same arguments, with each tensor in its own memory between guards of `guard` bytes.

    On exit, raise AssertionError if a guard or an input has changed. Guards are NaN as floats; as integers they are
    numbers larger than any tensor. Without guards a simulator also sees reads beside a tensor.
    """
    kept: list[tuple[str, torch.Tensor, torch.Tensor, slice]] = []

    def moved(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(moved(name, x) for x in value)
        if not isinstance(value, torch.Tensor):
            return value
        data = value.contiguous().view(-1).view(torch.uint8)
        whole = torch.full((len(data) + 2 * guard,), 0xFF, dtype=torch.uint8, device=value.device)
        if not value.is_floating_point():
            whole[3::4] = 0x7F
        whole[guard : guard + len(data)] = data
        inside = slice(guard, guard + len(data)) if name in outputs else slice(0, 0)
        kept.append((name, whole, whole.clone(), inside))
        return whole[guard : guard + len(data)].view(value.dtype).view(value.shape)

    yield {name: moved(name, value) for name, value in inputs.items()}
    for name, whole, before, inside in kept:
        changed = whole != before
        changed[inside] = False
        assert not changed.any(), f"{name}: byte {int(changed.nonzero()[0]) - guard} of {len(whole) - 2 * guard}"
