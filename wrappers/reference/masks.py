"""Which keys each query row of a request sees, in torch: the only place of the reference that knows a mask."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch

MOST = 1 << 31  # bound of the keys of a request


class LeftBound(NamedTuple):
    """The bound of the keys of a row on the left. The fields are those of `AttentionCall`, so that `of` copies them.

    window_left: a row at position p sees keys from p - window_left on; negative: off. chunk: it sees keys
    from the begin of its own chunk of this many positions on; 0: off.
    """

    window_left: int = -1
    chunk: int = 0

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first key that rows at `positions` may see, at least 0; int64, of the same shape."""
        first = torch.zeros_like(positions)
        if self.window_left >= 0:
            first = positions - min(self.window_left, MOST)
        if self.chunk:
            chunk = min(self.chunk, MOST)
            first = torch.maximum(first, positions.clamp(min=0) // chunk * chunk)
        return first.clamp(min=0)


class TokenMask(NamedTuple):
    """The mask of a request with m query rows and n keys. Row i has position p = i + n - m (bottom-right).

    Row i sees key j if j <= p, unless causal is False, and j >= left.first(p). Two tensors replace causal. drafts:
    int32 (m, W): row i sees all keys before the last m, and key t of the last m if bit t of the row is set. bits:
    uint8 (bytes,), least significant first: row i sees key j if bit i * n + j is set, and none past the last byte.
    ranges: int32 (m, 2): row i also sees keys ranges[i, 0] to ranges[i, 1], whatever left says, but none before
    range_left.first(p). prefix: a causal row also sees keys before this one, unless left hides them.
    """

    causal: bool = True
    left: LeftBound = LeftBound()
    drafts: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    ranges: torch.Tensor | None = None
    range_left: LeftBound = LeftBound()
    prefix: int = 0

    def span(self, rows: range, m: int, n: int) -> slice:
        """Return keys that include all those that some of the rows sees."""
        if self.ranges is not None:
            return slice(0, n)
        replaced = self.drafts is not None or self.bits is not None
        stop = max(0, min(n, max(rows.stop + n - m, self.prefix))) if self.causal and not replaced else n
        first = int(self.left.first(torch.tensor([rows.start + n - m])))
        return slice(min(first, stop), stop)

    def keep(self, rows: torch.Tensor, keys: torch.Tensor, m: int, n: int) -> torch.Tensor:
        """Return a bool mask (rows, keys): the keys that each row sees."""
        positions = rows + (n - m)
        keep = keys >= self.left.first(positions)[:, None]
        if self.bits is not None:
            return keep & _bits_keep(self.bits, rows[:, None] * n + keys)
        if self.drafts is not None:
            return keep & _draft_keep(self.drafts[rows], keys - (n - m))
        if self.causal:
            keep &= (keys <= positions[:, None]) | (keys < self.prefix)
        if self.ranges is not None:
            first, last = self.ranges[rows, :1], self.ranges[rows, 1:]
            keep |= (keys >= first) & (keys <= last) & (keys >= self.range_left.first(positions)[:, None])
        return keep


def left_bound(call: Any) -> LeftBound:
    """Return the bound of an attention call."""
    return LeftBound(*(getattr(call, field) for field in LeftBound._fields))


def first_key(call: Any, positions: torch.Tensor) -> torch.Tensor:
    """Return the first key that any row at or behind `positions` may see; int64, of the same shape."""
    return torch.zeros_like(positions) if call.ranges is not None else left_bound(call).first(positions)


def masks_of(call: Any, starts: list[int]) -> Iterator[TokenMask]:
    """Yield the mask of each request of an attention call. starts: its first query row, and the end of the last."""
    mask, bits = TokenMask(bool(call.causal), left_bound(call), range_left=LeftBound(call.range_left)), repeat(None)
    if call.custom_mask is not None and call.mask_starts is not None:
        size = len(call.custom_mask)
        bits = (call.custom_mask[start:] for start in call.mask_starts.clamp(0, size).tolist())  # type: ignore[assignment]
    prefixes = repeat(0) if call.prefix_lens is None else call.prefix_lens.tolist()
    for first, end, own, prefix in zip(starts, starts[1:], bits, prefixes):
        drafts, ranges = (None if t is None else t[first:end] for t in (call.drafts, call.ranges))
        yield mask._replace(drafts=drafts, bits=own, ranges=ranges, prefix=prefix)


def _draft_keep(drafts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a bool mask (rows, keys): key j is draft numbers[j], or, if that is negative, before all drafts."""
    at = numbers.clamp(0, 32 * drafts.shape[1] - 1)
    bits = drafts[:, at // 32] >> (at % 32) & 1
    return (bits == 1) | (numbers != at)


def _bits_keep(bits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the bits with the numbers `at` as bools; False past the last byte."""
    if not len(bits):
        return torch.zeros_like(at, dtype=torch.bool)
    byte = at >> 3
    return (byte < len(bits)) & ((bits[byte.clamp(max=len(bits) - 1)] >> (at & 7) & 1) == 1)
