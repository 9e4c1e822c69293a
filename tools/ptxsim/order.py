"""Happens-before between warps and asynchronous engines, as vector clocks.

A component is whatever produces ordered events: a warp, or an mbarrier (its events are its completed phases). For each
warp `seen[w, c]` says how many events of component c lie in its past, and `fenced[w, c]` how many of those a
fence.proxy.async has carried over to the async proxy (PTX ISA, Memory Consistency Model, Proxies). Barriers hand on
both. An access is ordered after an event (c, k) if seen[w, c] >= k, whatever the schedule of this run happens to be.
"""

import numpy as np


class VectorClock:
    """What a synchronisation object hands from those who release to those who acquire."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen = np.zeros(0, np.int32)
        self.fenced = np.zeros(0, np.int32)

    def take(self, other: "VectorClock") -> None:
        self.seen, self.fenced = joined(self.seen, other.seen), joined(self.fenced, other.fenced)

    def event(self, component: int, count: int) -> None:
        """Add event `count` of a component whose data needs no fence: the async proxy itself wrote it."""
        added = np.zeros(component + 1, np.int32)
        added[component] = count
        self.seen, self.fenced = joined(self.seen, added), joined(self.fenced, added)


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger of both, entry by entry; a missing entry is 0."""
    if a.size < b.size:
        a, b = b, a
    out = a.copy()
    np.maximum(out[: b.size], b, out=out[: b.size])
    return out


class HappensBefore:
    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.components = warps
        self.seen = np.zeros((warps, warps + 64), np.int32)
        self.seen[np.arange(warps), np.arange(warps)] = 1
        self.fenced = np.zeros_like(self.seen)

    def component(self, count: int = 1) -> int:
        """The first of `count` new components, without events yet."""
        first = self.components
        self.components += count
        if self.components > self.seen.shape[1]:
            more = np.zeros((self.warps, self.components), np.int32)  # room for as many again
            self.seen, self.fenced = np.hstack([self.seen, more]), np.hstack([self.fenced, more])
        return first

    def now(self, warps: np.ndarray) -> np.ndarray:
        """The current event of each warp itself."""
        return self.seen[warps, warps]

    def release(self, warps: np.ndarray, clock: VectorClock) -> None:
        """Everything these warps did or saw so far goes to `clock`."""
        clock.seen = joined(clock.seen, self.seen[warps].max(0))
        clock.fenced = joined(clock.fenced, self.fenced[warps].max(0))
        self.seen[warps, warps] += 1

    def acquire(self, warps: np.ndarray, clock: VectorClock) -> None:
        n = clock.seen.size
        if n:
            self.seen[warps, :n] = np.maximum(self.seen[warps, :n], clock.seen)
        n = clock.fenced.size
        if n:
            self.fenced[warps, :n] = np.maximum(self.fenced[warps, :n], clock.fenced)

    def fence_proxy(self, warps: np.ndarray) -> None:
        """fence.proxy.async: what these warps have seen is ordered before async accesses that come after."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[warps])
        self.seen[warps, warps] += 1
