"""Check the values that an attention call reads: lengths, offsets, page ids and scales.

The reference refuses invalid values; CUDA calls do so if CUTE_KERNELS_CHECK is 1. Kernels, and
`reference.paged_attention` by itself, clamp them: query rows to [0, T), keys to the table's columns times the page size
(none if the cache has no pages); a page outside the cache counts as zeros.
"""

from typing import Any

import torch

from ..host.checks import check_in_fp32
from ..reference.masks import first_key
from .call import AttentionCall
from .checks import Names, names_of


def check(call: AttentionCall, positive: bool = False) -> None:
    """Raise ValueError for the first invalid value of a call that `checks.validate` accepts.

    The message names the argument, the request, the value and what is allowed. positive: the factor on the logits must
    be positive. Waits for the device.
    """
    name = names_of(call)
    for field in ("scale", "out_scale"):
        scale = getattr(call, f"{field}_tensor")
        if scale is not None:
            for head, value in enumerate(scale.flatten().tolist()):
                where = f" of query head {head}" if scale.numel() > 1 else ""
                check_in_fp32(f"{name(field)}", value, positive and field == "scale", where)
    starts, rows = _starts(call, name)
    lens = _lengths(call, name, starts)
    first = first_key(call, lens - rows)
    if call.requests.form not in ("ragged", "slots"):  # any number may be in the place of a slot
        _pages(call, name, torch.where(rows > 0, first, lens), lens)
    if call.custom_mask is not None:
        _mask(call, name, rows * lens)


def _starts(call: AttentionCall, name: Names) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (starts, rows) on the CPU, after a check of both.

    starts: (B + 1,), the first entry or row of each request's keys, or None if there is a table. rows: (B,), query rows
    of each request.
    """
    r, tokens, starts = call.requests, call.q.shape[0], None
    if r.kv_starts is not None:
        ragged = r.form == "ragged"
        what = f"rows of {name('k')}" if ragged else f"entries of {name('page_table')}"
        starts = _rising(name("kv_starts"), r.kv_starts, call.k.shape[2] if ragged else r.page_table.shape[2], what)
    if r.cu_seqlens_q is None:
        return starts, torch.full((r.batch,), call.max_q_len)
    return starts, _rising(name("cu_seqlens_q"), r.cu_seqlens_q, tokens, "tokens").diff()


def _rising(name: str, offsets: torch.Tensor, most: int, what: str) -> torch.Tensor:
    """Return offsets as int64 on the CPU, after a check that each is between the one before it and `most`."""
    least = 0
    for i, offset in enumerate(offsets.tolist()):
        if not least <= offset <= most:
            where = f"{name}[{i}]: {offset} of request {max(0, min(i, len(offsets) - 2))}"
            why = f"from the entry before it to the number of {what}"
            raise ValueError(f"{where}, must be in [{least}, {most}]: {why}")
        least = offset
    return offsets.cpu().long()


def _lengths(call: AttentionCall, name: Names, starts: torch.Tensor | None) -> torch.Tensor:
    """Return the number of keys of each request, (B,) int64 on the CPU, after a check."""
    r, (pages, _, size, _) = call.requests, call.k.shape
    counts = None if starts is None else starts.diff()
    if r.form == "ragged" and counts is not None:
        return counts
    lens = r.kv_lens.cpu().long()
    if counts is None:
        if r.form == "slots":
            return _chosen(call, name, lens)
        most: Any = r.page_table.shape[2] * size if pages else 0
        why = f"{r.page_table.shape[2]} columns of {name('page_table')} x pages of {size}"
        bad = (lens < 0) | (lens > most)
    elif call.shares_v:  # of which lengths are keys
        most, why = counts.clamp(min=0) * (size if pages else 0), "rows of its pages"
        bad = (lens < 0) | (lens > most)
    else:
        most, why = (size if pages else 0), "rows of a page"
        bad = ((lens < 0) | (lens > most)) & (counts > 0)
    if bad.any():
        request = int(bad.nonzero()[0])
        most = int(most[request]) if isinstance(most, torch.Tensor) else most
        length = int(lens[request]) & 0xFFFFFFFF if r.unsigned else int(lens[request])
        why = why if pages else f"{name('kv')} has no pages"
        raise ValueError(f"{name('kv_lens')}: {length} of request {request}, must be in [0, {most}]: {why}")
    if counts is None or call.shares_v:
        return lens
    return torch.where(counts > 0, (counts - 1) * size + lens, 0) if pages else torch.zeros_like(counts)


def _chosen(call: AttentionCall, name: Names, lens: torch.Tensor) -> torch.Tensor:
    """Return the number of slots that count of each token, after a check of lens. A row has no more than it has."""
    r = call.requests
    for field, numbers in (("kv_lens", lens), ("extra_lens", call.extra_lens)):
        for i, length in enumerate([] if numbers is None else numbers.tolist()):
            if length < 0:
                raise ValueError(f"{name(field)}: {length} in entry {i}, must be at least 0")
    each = lens.clamp(max=r.page_table.shape[2])
    return each.repeat_interleave(r.batch // len(lens)) if len(lens) else each


def _mask(call: AttentionCall, name: Names, bits: torch.Tensor) -> None:
    """Check that the bits of each request lie within the mask."""
    assert call.custom_mask is not None and call.mask_starts is not None
    size = len(call.custom_mask)
    for request, (start, count) in enumerate(zip(call.mask_starts.tolist(), bits.tolist(), strict=False)):
        need = -(-count // 8)
        if count and not 0 <= start <= size - need:
            where = f"{name('mask_starts')}: {start} of request {request}"
            why = f"its bits take {need} of the {size} bytes of {name('custom_mask')}"
            raise ValueError(f"{where}, must be in [0, {size - need}]: {why}")


def _pages(call: AttentionCall, name: Names, first: torch.Tensor, lens: torch.Tensor) -> None:
    """Check the ids of the pages that hold keys from `first` on. In xqa a negative id stands for a page of zeros."""
    r, size, table = call.requests, call.k.shape[2], call.requests.page_table.cpu()
    pools = torch.tensor([[call.k.shape[0]], [call.v.shape[0]]])
    at = torch.arange(table.shape[2])
    if r.kv_starts is None:
        needed = (at >= first[:, None] // size) & (at < (lens[:, None] + size - 1) // size)
    else:
        starts = r.kv_starts.cpu().long()
        owner = torch.bucketize(at, starts[1:], right=True)  # the request of each entry, B past the last one
        known = owner.clamp(max=max(len(lens) - 1, 0))
        needed = torch.zeros(1, len(at), dtype=torch.bool)
        if len(lens):
            row = (at - starts[known]) * size
            needed = ((owner < len(lens)) & (row > first[known] - size) & (row >= 0) & (row < lens[known]))[None]
    zeros = call.signature == "xqa"
    bad = needed[:, None] & ((table >= pools) | (table < 0 if not zeros else torch.zeros_like(needed)[:, None]))
    found: Any = bad.nonzero()
    if len(found):
        request, which, column = found[0].tolist()
        pages = int(pools[which])
        entry = f"column {column} of request {request}"
        if r.kv_starts is not None:
            entry = f"entry {column}, of request {int(owner[column])}"
        where = f"{table[request, which, column]} in {entry} ({'KV'[which]})"
        allowed = f"in [0, {pages}), the pages of {name('kv')}{', or negative' if zeros else ''}"
        raise ValueError(f"{name('page_table')}: {where}, must be {allowed}")
