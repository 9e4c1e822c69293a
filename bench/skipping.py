"""Skip-softmax as our prefill kernels do it, in plain torch on CPU or GPU: which KV blocks are left out, and what is
then the result.

Blocks of `keys` keys of a request are looked at from the last to the first, some rows at a time (`ROWS`). A block is
left out where every row that sees a key of it finds exp(m_j - m) < factor / kv_len; m_j is the block's maximum of the
row's logits, m the one of the blocks before it that were not left out. The rows' first block is never left out.
"""

import math
from typing import NamedTuple

import torch

from cute_kernels.attention import dispatch
from cute_kernels.attention.spec import FEW
from wrappers import machine
from wrappers.attention.plan import facts_of
from wrappers.attention.problem import Problem
from wrappers.reference.paged import tokens_of

ROWS = {"sm_90a": 64, "sm_100a": 128, "sm_103a": 128}  # that decide together: of a warpgroup
HOPPER = "sm_90a"
SURE = 1e-3  # log2 units: no vote of `expected` is closer
LOG2E = math.log2(math.e)
INF = math.inf


class Skipped(NamedTuple):
    """out (T, Hq, Dvo), lse (T, Hq), fp32, as `reference.paged_attention` gives them. blocks: of all groups of rows,
    those of which a row sees a key; skipped: of these. margin: the least distance of a vote from the other answer, in
    log2 units: other roundings than fp32's cannot change what is skipped while their logits are off by less."""

    out: torch.Tensor
    lse: torch.Tensor
    blocks: int
    skipped: int
    margin: float

    @property
    def sparsity(self) -> float:
        """Share of skipped blocks."""
        return self.skipped / max(1, self.blocks)


class RowGroups(NamedTuple):
    """Rows of a request, padded to whole groups. q: (heads, groups, rows, D) fp32; position: (groups, rows), among the
    keys, beyond which, with a causal mask, the row sees none; valid: (groups, rows) bool."""

    q: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor


def rows_of(q: torch.Tensor, kv_heads: int, kv_len: int, packed: bool, together: int) -> RowGroups:
    """q (m, Hq, D). packed: rows are (token, query head of a KV head), the head fastest; else tokens of one head.
    together: rows of a group."""
    m, heads, dim = q.shape
    group = heads // kv_heads if packed else 1
    rows = q.float().view(m, heads // group, group, dim).transpose(0, 1).reshape(heads // group, m * group, dim)
    pad = -rows.shape[1] % together
    token = torch.arange(rows.shape[1] + pad, device=q.device) // group
    rows = torch.nn.functional.pad(rows, (0, 0, 0, pad)).unflatten(1, (-1, together))
    return RowGroups(rows, (token + kv_len - m).view(-1, together), (token < m).view(-1, together))


def visible(p: Problem, rows: RowGroups, first: int, end: int) -> torch.Tensor:
    """(groups, rows, end - first) bool: which of these keys a row sees."""
    key, position = torch.arange(first, end, device=p.q.device), rows.position[..., None]
    seen = rows.valid[..., None] & (key >= 0)
    if p.causal:
        seen = seen & (key <= position)
    if p.window_left >= 0:
        seen = seen & (key >= position - p.window_left)
    return seen


class OnlineSoftmax(NamedTuple):
    """Of all rows (heads, groups, rows), changed in place. top: maximum so far, total and o: sums relative to it."""

    top: torch.Tensor
    total: torch.Tensor
    o: torch.Tensor


def wanted(now: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """What decides on a block, of rows that decide together, (..., rows) -> (...): by how much `now`, the maximum of a
    row's logits in it, exceeds `top`, that of the blocks before that were not left out; of the row where it does most.
    inf: a row sees its first key; -inf: none sees a key. Where it is below the threshold's logarithm, the block is left
    out.

    >>> wanted(torch.tensor([[1.0, -9.0], [-INF, 3.0]]), torch.tensor([[3.0, 0.0], [0.0, -INF]])).tolist()
    [-2.0, inf]
    """
    return torch.where(now == -INF, -INF, now - top).amax(-1)


def add(state: OnlineSoftmax, s: torch.Tensor, top: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> None:
    """A block's logits s (heads, groups, rows, keys), log2 units, maxima `top` and v (heads, keys, D) into the sums of
    the groups that it is `kept` in (heads, groups)."""
    new = torch.maximum(state.top, top)
    base = new.masked_fill(new == -INF, 0.0)
    weights = torch.exp2(s - base[..., None])
    owed = torch.exp2(state.top - base)
    chosen = kept[..., None]
    o = state.o * owed[..., None] + torch.einsum("hgrk,hkd->hgrd", weights, v)
    state.o.copy_(torch.where(chosen[..., None], o, state.o))
    state.total.copy_(torch.where(chosen, state.total * owed + weights.sum(-1), state.total))
    state.top.copy_(torch.where(chosen, new, state.top))


def attend(p: Problem, keys: int, few: int = FEW, together: int = ROWS[HOPPER]) -> Skipped:
    """A prefill call with p.skip, as kernels with blocks of so many keys compute it; of any types and requests, without
    masks of bits, ALiBi and factors a head. few: most query tokens of a request whose rows are packed; together: rows
    that decide together."""
    assert p.skip and p.alibi_slopes is None and p.custom_mask is None and p.drafts is None
    out = torch.zeros(*p.q.shape[:2], p.dim_vo, device=p.q.device)
    lse = torch.full(p.q.shape[:2], -INF, device=p.q.device)
    blocks, skipped, margin = 0, 0, INF
    scale = p.scale * LOG2E * (1.0 if p.scale_tensor is None else float(p.scale_tensor))
    for of in tokens_of(p):
        (m, heads, _), length = of.q.shape, len(of.k)
        k, v = (x.float().transpose(0, 1) for x in (of.k, of.v))
        rows = rows_of(of.q, len(k), length, m <= few, together)
        k, v = (x.repeat_interleave(len(rows.q) // len(k), 0) for x in (k, v))
        shape = rows.q.shape[:3]
        state = OnlineSoftmax(
            torch.full(shape, -INF, device=k.device), torch.zeros(shape, device=k.device),
            torch.zeros(*shape, p.dim_vo, device=k.device),
        )  # fmt: skip
        least = math.log2(p.skip) - math.log2(max(1, length))
        for first in range((length - 1) // keys * keys, -1, -keys):
            end = min(first + keys, length)
            seen = visible(p, rows, first, end)
            if not seen.any():
                continue
            s = torch.einsum("hgrd,hkd->hgrk", rows.q, k[:, first:end]) * scale
            if p.soft_cap:
                s = p.soft_cap * LOG2E * torch.tanh(s / (p.soft_cap * LOG2E))
            s = s.masked_fill(~seen, -INF)
            top = s.amax(-1)
            want = wanted(top, state.top)  # (heads, groups)
            kept, counted = want >= least, want > -INF
            margin = min(margin, float((want - least).abs().min()))
            blocks += int(counted.sum())
            skipped += int((counted & ~kept).sum())
            add(state, s, top, v[:, first:end], kept)
        group = heads // len(rows.q)

        def tokens(x: torch.Tensor, m: int = m, group: int = group) -> torch.Tensor:
            """(heads, groups, rows, ...) -> (m, Hq, ...)."""
            of_rows = x.flatten(1, 2)[:, : m * group].unflatten(1, (m, group))
            return of_rows.transpose(0, 1).flatten(1, 2)

        out[of.rows], lse[of.rows] = finish(p, tokens(state.o), tokens(state.total), tokens(state.top))
    factor = 1.0 if p.out_scale_tensor is None else float(p.out_scale_tensor)
    return Skipped(out * (p.out_scale * factor), lse, blocks, skipped, margin)


def of_kernel(p: Problem) -> Skipped:
    """What the kernel that serves a call on the current machine, or else on Hopper, leaves out; `dispatch.Unsupported`
    where none does."""
    arch, _ = machine.current.facts(p.q.device) or (HOPPER, 0)
    _, spec = dispatch.select(facts_of(p), arch)
    return attend(p, spec.tile.n, together=ROWS[arch])


def expected(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of that kernel; ValueError where rounding may decide a vote, so that nothing can be expected."""
    found = of_kernel(p)
    if found.margin < SURE:
        raise ValueError(f"whether a block is skipped is as good as open: by {found.margin} log2 units")
    return found.out, found.lse


def finish(p: Problem, o: torch.Tensor, total: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a request's rows (m, Hq), the sinks among what is divided by."""
    sink = torch.full_like(top, -INF) if p.sinks is None else (p.sinks.float() * LOG2E).expand_as(top)
    peak = torch.maximum(top, sink)
    base = peak.masked_fill(peak == -INF, 0.0)
    mine = torch.exp2(top - base)
    whole = total * mine + torch.exp2(sink - base)
    return o * (mine / whole.masked_fill(whole == 0, 1.0))[..., None], base + torch.log2(whole)
