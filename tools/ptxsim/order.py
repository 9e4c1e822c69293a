"""Happens-before between warps and asynchronous engines, as vector clocks.

A component is a source of ordered events: a warp, or an mbarrier (its events are its completed phases). For each
warp, `seen[w, c]` is the number of events of component c in its past, and `fenced[w, c]` the number of those that
a fence.proxy.async has carried over to the async proxy (PTX ISA, Memory Consistency Model, Proxies). Barriers
hand on both. An access is ordered after an event (c, k) if seen[w, c] >= k, whatever the schedule of this run
happens to be."""

import numpy as np


class VectorClock:
    """The clock that a synchronisation object hands from releasing to acquiring threads."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen = np.zeros(0, np.int32)
        self.fenced = np.zeros(0, np.int32)

    def take(self, other: "VectorClock") -> None:
        self.seen, self.fenced = joined(self.seen, other.seen), joined(self.fenced, other.fenced)

    def event(self, component: int, count: int) -> None:
        """Add event `count` of a component with data that needs no fence, since the async proxy itself wrote it."""
        added = np.zeros(component + 1, np.int32)
        added[component] = count
        self.seen, self.fenced = joined(self.seen, added), joined(self.fenced, added)


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the elementwise maximum; a missing entry is 0."""
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
        """Add `count` components without events and return the first."""
        first = self.components
        self.components += count
        if self.components > self.seen.shape[1]:
            more = np.zeros((self.warps, self.components), np.int32)  # doubles the capacity
            self.seen, self.fenced = np.hstack([self.seen, more]), np.hstack([self.fenced, more])
        return first

    def now(self, warps: np.ndarray) -> np.ndarray:
        """Return each warp's own current event."""
        return self.seen[warps, warps]

    def release(self, warps: np.ndarray, clock: VectorClock) -> None:
        """Release everything these warps did or saw so far to `clock`."""
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
        """fence.proxy.async: order all that these warps have seen before later async accesses."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[warps])
        self.seen[warps, warps] += 1
