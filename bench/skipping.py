"""Skip-softmax as our prefill kernels compute it, in plain torch on the CPU or a GPU: the KV blocks that are left out,
and the result without them.

A request's blocks of `keys` keys are visited from the last to the first, for a group of rows at a time (`ROWS`). A
block is left out if every row that sees a key of it has exp(m_j - m) < factor / kv_len. Here m_j is the largest logit
of the row in the block, and m is its largest logit in the blocks visited before that were not left out. The first block
that a group visits is never left out. On Hopper, a group that has kept many blocks in turn keeps some without a vote
(`Unasked`), and m takes no notice of these.
"""

import math
from typing import NamedTuple

import torch

from cute_kernels.attention import dispatch
from cute_kernels.attention.sm90 import tile_table
from cute_kernels.attention.spec import PACK_GQA_MAX_Q
from wrappers.attention import plan
from wrappers.attention.call import AttentionCall
from wrappers.host import machine
from wrappers.reference.paged import tokens_of

ROWS = {"sm_90a": 64, "sm_100a": 128, "sm_103a": 128}  # rows that vote together: those of a warpgroup
HOPPER = "sm_90a"
SURE = 1e-3  # log2 units: the least margin of a vote that `expected` accepts
LOG2E = math.log2(math.e)
INF = math.inf


class Skipped(NamedTuple):
    """The result of a call with skip-softmax, and how often it skipped.

    out (T, Hq, Dvo) and lse (T, Hq) are fp32, as `reference.paged_attention` returns them. blocks: the blocks with a
    key that a row of the group sees, over all groups; skipped: the number left out of these. margin: the least
    distance, in log2 units, of a vote from the opposite answer. As long as the logits' rounding error is below it, the
    same blocks are skipped.
    """

    out: torch.Tensor
    lse: torch.Tensor
    blocks: int
    skipped: int
    margin: float

    @property
    def sparsity(self) -> float:
        """Return the share of skipped blocks."""
        return self.skipped / max(1, self.blocks)


class RowGroups(NamedTuple):
    """Rows of a request, padded to whole groups.

    q: (heads, groups, rows, D) fp32. position: (groups, rows), the row's position among the keys; with a causal mask
    the row sees no key after it. valid: (groups, rows) bool.
    """

    q: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor


def rows_of(q: torch.Tensor, kv_heads: int, kv_len: int, packed: bool, together: int) -> RowGroups:
    """Group the rows of q (m, Hq, D).

    packed: a row is a (token, query head of a KV head) pair, the head fastest; otherwise a row is a token of one head.
    together: rows per group.
    """
    m, heads, dim = q.shape
    group = heads // kv_heads if packed else 1
    rows = q.float().view(m, heads // group, group, dim).transpose(0, 1).reshape(heads // group, m * group, dim)
    pad = -rows.shape[1] % together
    token = torch.arange(rows.shape[1] + pad, device=q.device) // group
    rows = torch.nn.functional.pad(rows, (0, 0, 0, pad)).unflatten(1, (-1, together))
    return RowGroups(rows, (token + kv_len - m).view(-1, together), (token < m).view(-1, together))


def visible(p: AttentionCall, rows: RowGroups, first: int, end: int) -> torch.Tensor:
    """Return which of the keys [first, end) each row sees: (groups, rows, end - first) bool."""
    key, position = torch.arange(first, end, device=p.q.device), rows.position[..., None]
    seen = rows.valid[..., None] & (key >= 0)
    if p.causal:
        seen = seen & (key <= position)
    if p.window_left >= 0:
        seen = seen & (key >= position - p.window_left)
    return seen


class OnlineSoftmax(NamedTuple):
    """Softmax state of all rows (heads, groups, rows), changed in place. top: maximum so far; total and o: sums
    relative to it; voted: maximum of the blocks that were kept by a vote."""

    top: torch.Tensor
    total: torch.Tensor
    o: torch.Tensor
    voted: torch.Tensor


class Unasked:
    """Finds, for each (head, group), which blocks are kept without a vote. A kernel's tiles have `groups` groups, and
    the `first` highest blocks of each tile are always decided by votes."""

    def __init__(self, shape: tuple[int, int], groups: int, first: int, device: torch.device) -> None:
        self.groups, self.first = groups, first
        self.passed = torch.zeros(-(-shape[1] // groups), dtype=torch.int64, device=device)  # blocks of each tile
        self.counts = torch.zeros(shape[1], dtype=torch.bool, device=device)  # groups that may keep the block unasked
        self.votes, self.kept, self.left = torch.zeros(3, *shape, dtype=torch.int64, device=device)

    def of_tiles(self, x: torch.Tensor, fill: bool) -> torch.Tensor:
        """(groups, ...) -> (tiles, all that a tile has)."""
        pad = x.new_full((-len(x) % self.groups, *x.shape[1:]), fill)
        return torch.cat((x, pad)).view(len(self.passed), -1)

    def of_groups(self, tiles: torch.Tensor) -> torch.Tensor:
        """(tiles,) -> (groups,)."""
        return tiles.repeat_interleave(self.groups)[: self.votes.shape[1]]

    def begin(self, seen: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a block, of which rows see the keys `seen` (groups, rows, keys). valid: (groups, rows).

        Return its number in the tile of each group, -1 if the tile has no key of it, and whether it is kept without a
        vote (heads, groups)."""
        has, full = self.of_tiles(seen, False).any(1), self.of_tiles(seen | ~valid[..., None], True).all(1)
        number = torch.where(has, self.passed, -1)
        self.passed += has
        self.counts = self.of_groups(full & (number >= self.first))
        return self.of_groups(number), self.counts & (self.left > 0)

    def end(self, number: torch.Tensor, unasked: torch.Tensor, kept: torch.Tensor) -> None:
        """End the block: count it."""
        self.kept = torch.where(number < 0, self.kept, torch.where(kept, self.kept + 1, 0))
        self.kept[:, number == 0] = 1  # the tile's first block, whoever sees it
        voted = self.counts & ~unasked
        self.left -= unasked.long()
        self.votes += voted.long()
        done = voted & (self.votes == tile_table.VOTES)
        self.left = torch.where(done & (self.kept >= tile_table.STEADY), tile_table.UNASKED * self.kept, self.left)
        self.votes[done] = 0


def wanted(now: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return the number that decides on a block, for rows that vote together: (..., rows) -> (...).

    It is the largest difference, over the rows, between `now` (the row's largest logit in the block) and `top` (its
    largest in the blocks before that were not left out): inf if a row sees its first key, -inf if no row sees a key.
    The block is left out if the number is below the threshold's logarithm.

    >>> wanted(torch.tensor([[1.0, -9.0], [-INF, 3.0]]), torch.tensor([[3.0, 0.0], [0.0, -INF]])).tolist()
    [-2.0, inf]
    """
    return torch.where(now == -INF, -INF, now - top).amax(-1)


def add(
    state: OnlineSoftmax,
    s: torch.Tensor,
    top: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    unasked: torch.Tensor,
) -> None:
    """Add a block to the softmax state of the groups that keep it.

    s: logits (heads, groups, rows, keys) in log2 units. top: the maxima of s. v: (heads, keys, D). kept, unasked:
    (heads, groups), whether it is kept, and whether without a vote.
    """
    new = torch.maximum(state.top, top)
    base = new.masked_fill(new == -INF, 0.0)
    weights = torch.exp2(s - base[..., None])
    owed = torch.exp2(state.top - base)
    chosen = kept[..., None]
    o = state.o * owed[..., None] + torch.einsum("hgrk,hkd->hgrd", weights, v)
    state.o.copy_(torch.where(chosen[..., None], o, state.o))
    state.total.copy_(torch.where(chosen, state.total * owed + weights.sum(-1), state.total))
    state.top.copy_(torch.where(chosen, new, state.top))
    state.voted.copy_(torch.where(chosen & ~unasked[..., None], torch.maximum(state.voted, top), state.voted))


def attend(
    p: AttentionCall,
    keys: int,
    few: int = PACK_GQA_MAX_Q,
    together: int = ROWS[HOPPER],
    tile: tuple[int, int] | None = None,
) -> Skipped:
    """Compute a prefill call with p.skip as kernels with blocks of `keys` keys compute it.

    Any dtypes and requests; no bit mask, ALiBi or scales per head. few: the largest number of query tokens of a request
    with packed rows. together: rows that vote together. tile: of kernels that keep blocks without a vote, the groups of
    a tile, and its highest blocks that do not count.
    """
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
            torch.zeros(*shape, p.dim_vo, device=k.device), torch.full(shape, -INF, device=k.device),
        )  # fmt: skip
        counter = Unasked((shape[0], shape[1]), *tile, k.device) if tile else None
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
            want = wanted(top, state.voted)  # (heads, groups)
            number, unasked = counter.begin(seen, rows.valid) if counter else (want, want > INF)
            kept, counted = (want >= least) | unasked, want > -INF
            margin = min(margin, float((want - least).abs().masked_fill(unasked, INF).min()))
            blocks += int(counted.sum())
            skipped += int((counted & ~kept).sum())
            add(state, s, top, v[:, first:end], kept, unasked)
            if counter:
                counter.end(number, unasked, kept)
        group = heads // len(rows.q)

        def tokens(x: torch.Tensor, m: int = m, group: int = group) -> torch.Tensor:
            """(heads, groups, rows, ...) -> (m, Hq, ...)."""
            of_rows = x.flatten(1, 2)[:, : m * group].unflatten(1, (m, group))
            return of_rows.transpose(0, 1).flatten(1, 2)

        out[of.rows], lse[of.rows] = finish(p, tokens(state.o), tokens(state.total), tokens(state.top))
    factor = 1.0 if p.out_scale_tensor is None else float(p.out_scale_tensor)
    return Skipped(out * (p.out_scale * factor), lse, blocks, skipped, margin)


def of_kernel(p: AttentionCall) -> Skipped:
    """Run `attend` as the kernel that serves the call on the current machine (without a GPU: on Hopper).

    Raises `dispatch.Unsupported` if no kernel serves it.
    """
    arch, _ = machine.current.device_info(p.q.device) or (HOPPER, 0)
    _, spec = dispatch.select(plan.request_of(p), arch)
    tile = None
    if arch == HOPPER and tile_table.keeps_unasked(spec):
        tile = spec.tile.m // ROWS[HOPPER], 1 + tile_table.exact_max_blocks(spec)
    return attend(p, spec.tile.n, together=ROWS[arch], tile=tile)


def expected(p: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of that kernel. Raise ValueError if rounding may decide a vote, so that no result can be
    expected."""
    found = of_kernel(p)
    if found.margin < SURE:
        raise ValueError(f"rounding may decide whether a block is skipped: the margin is {found.margin} log2 units")
    return found.out, found.lse


def finish(
    p: AttentionCall, o: torch.Tensor, total: torch.Tensor, top: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a request's rows (m, Hq). The sinks are part of the softmax denominator."""
    sink = torch.full_like(top, -INF) if p.sinks is None else (p.sinks.float() * LOG2E).expand_as(top)
    peak = torch.maximum(top, sink)
    base = peak.masked_fill(peak == -INF, 0.0)
    mine = torch.exp2(top - base)
    whole = total * mine + torch.exp2(sink - base)
    return o * (mine / whole.masked_fill(whole == 0, 1.0))[..., None], base + torch.log2(whole)
