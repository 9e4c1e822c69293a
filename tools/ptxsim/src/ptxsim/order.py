"""Happens-before between warps and asynchronous engines, as vector clocks.

A component is a source of ordered events: a warp, or an mbarrier (its events are its completed phases). For each
warp, `seen[w, c]` is the number of events of component c in its past, and `fenced[w, c]` the number of those that
a fence.proxy.async has carried over to the async proxy (PTX ISA, Memory Consistency Model, Proxies). Barriers
hand on both. An access is ordered after an event (c, k) if seen[w, c] >= k, whatever the schedule of this run
happens to be."""

from typing import Any

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
        self.seen, self.fenced = raised(self.seen, component, count), raised(self.fenced, component, count)


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the elementwise maximum; a missing entry is 0. No clock is changed in place, so it may be `a` or `b`."""
    if a.size < b.size:
        a, b = b, a
    if not b.size:
        return a
    out = a.copy()
    np.maximum(a[: b.size], b, out=out[: b.size])
    return out


def raised(clock: np.ndarray, component: int, count: int) -> np.ndarray:
    """Return a clock with at least `count` events of a component."""
    out = np.zeros(max(clock.size, component + 1), np.int32)
    out[: clock.size] = clock
    out[component] = max(out[component], count)
    return out


class HappensBefore:
    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.components = warps
        self.seen = np.zeros((warps, warps + 64), np.int32)
        self.fenced = np.zeros_like(self.seen)
        self.own = self.diagonal()  # each warp's own current event
        self.own += 1

    def diagonal(self) -> np.ndarray:
        """Return a view of seen[w, w]."""
        return self.seen.reshape(-1)[:: self.seen.shape[1] + 1]

    def component(self, count: int = 1) -> int:
        """Add `count` components without events and return the first."""
        first = self.components
        self.components += count
        if self.components > self.seen.shape[1]:
            more = np.zeros((self.warps, self.components), np.int32)  # doubles the capacity
            self.seen, self.fenced = np.hstack([self.seen, more]), np.hstack([self.fenced, more])
            self.own = self.diagonal()
        return first

    def now(self, warps: np.ndarray) -> np.ndarray:
        """Return each warp's own current event."""
        return self.own[warps]

    def saw(self, warps: np.ndarray, component: np.ndarray) -> np.ndarray:
        """Return how many events of a component each warp has seen; any number if the component is negative."""
        return self.seen.reshape(-1)[warps * self.seen.shape[1] + component]

    def release(self, warps: np.ndarray, clock: VectorClock) -> None:
        """Release everything these warps did or saw so far to `clock`."""
        rows = rows_of(warps)
        clock.seen = joined(clock.seen, np.maximum.reduce(self.seen[rows]))
        clock.fenced = joined(clock.fenced, np.maximum.reduce(self.fenced[rows]))
        self.own[rows] += 1

    def acquire(self, warps: np.ndarray, clock: VectorClock) -> None:
        rows = rows_of(warps)
        for known, new in ((self.seen, clock.seen), (self.fenced, clock.fenced)):
            if new.size:
                known[rows, : new.size] = np.maximum(known[rows, : new.size], new)

    def fence_proxy(self, warps: np.ndarray) -> None:
        """fence.proxy.async: order all that these warps have seen before later async accesses."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[warps])
        self.own[warps] += 1


def rows_of(warps: np.ndarray) -> Any:
    """Return distinct ascending warps as a slice if they have no gaps, which saves a copy."""
    first, last = int(warps[0]), int(warps[-1])
    return slice(first, last + 1) if last - first + 1 == len(warps) else warps
