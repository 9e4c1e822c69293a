"""The keys before which a query row sees nothing, in torch: the reference and the checks of values ask this."""

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


def left_bound(call: Any) -> LeftBound:
    """Return the bound of an attention call."""
    return LeftBound(*(getattr(call, field) for field in LeftBound._fields))
