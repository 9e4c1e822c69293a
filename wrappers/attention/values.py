"""Values that an attention call reads: lengths, offsets, page ids, scales. The reference refuses those that make no
sense, CUDA calls do where CUTE_KERNELS_CHECK is 1. Kernels, and `reference.paged_attention` by itself, clamp them: rows
to [0, T), keys to the columns times the page size, none where the cache has no pages; a page outside it holds zeros.
"""

from typing import Any

import torch

from ..checks import INF
from .checks import Names, names_of
from .problem import Problem

MOST = 2**31  # keys of a request


def check(p: Problem, positive: bool = False) -> None:
    """ValueError names the argument, the request, its value and what is allowed, for the first value of a valid problem
    that does not fit. positive: the logits' factor must be. Waits for the device."""
    name = names_of(p)
    for field in ("scale", "out_scale"):
        factor = getattr(p, f"{field}_tensor")
        if factor is not None:
            value, least = factor.item(), 0 if positive and field == "scale" else -INF
            if not least < value < INF:
                raise ValueError(f"{name(field)}: {value}, must be {'positive and ' if least == 0 else ''}finite")
    first = _offsets(p, name)
    lens = p.requests.kv_lens.cpu()
    (pages, _, size, _), columns = p.k.shape, p.requests.page_table.shape[2]
    most = columns * size if pages else 0
    why = f"{columns} columns of {name('page_table')} x pages of {size}" if pages else f"{name('kv')} has no pages"
    bad = ((lens < 0) | (lens > most)).nonzero()
    if len(bad):
        request = int(bad[0])
        length = int(lens[request]) & 0xFFFFFFFF if p.requests.unsigned else int(lens[request])
        raise ValueError(f"{name('kv_lens')}: {length} of request {request}, must be in [0, {most}]: {why}")
    _pages(p, name, first, lens)


def _offsets(p: Problem, name: Names) -> torch.Tensor:
    """First key position of each request that a query may see where there is a window, (B,) on the CPU, after a check
    of where its rows are; the length of the KV where it has no rows."""
    lens, offsets, tokens = p.requests.kv_lens.cpu().long(), p.requests.cu_seqlens_q, p.q.shape[0]
    if offsets is None:
        rows = torch.full_like(lens, p.max_q_len)
    else:
        least = 0
        for i, offset in enumerate(offsets.tolist()):
            if not least <= offset <= tokens:
                where = f"{name('cu_seqlens_q')}[{i}]: {offset} of request {max(0, min(i, len(lens) - 1))}"
                raise ValueError(f"{where}, must be in [{least}, {tokens}]: from the entry before it to the tokens")
            least = offset
        rows = offsets.cpu().long().diff()
    window = min(p.window_left, MOST)
    first = (lens - rows - window).clamp(min=0) if window >= 0 else torch.zeros_like(lens)
    return torch.where(rows > 0, first, lens)


def _pages(p: Problem, name: Names, first: torch.Tensor, lens: torch.Tensor) -> None:
    """Ids of the pages that hold keys from `first` on; xqa's callers say a page of zeros by a negative one."""
    (pages, _, size, _), table = p.k.shape, p.requests.page_table.cpu()
    at = torch.arange(table.shape[2])
    needed = (at >= first[:, None] // size) & (at < (lens[:, None] + size - 1) // size)
    zeros = p.signature == "xqa"
    bad = needed[:, None] & ((table >= pages) | (table < 0 if not zeros else torch.zeros_like(needed)[:, None]))
    found: Any = bad.nonzero()
    if len(found):
        request, which, column = found[0].tolist()
        where = f"{table[request, which, column]} in column {column} of request {request} ({'KV'[which]})"
        allowed = f"in [0, {pages}), the pages of {name('kv')}{', or negative' if zeros else ''}"
        raise ValueError(f"{name('page_table')}: {where}, must be {allowed}")
