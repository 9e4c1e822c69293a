"""Take times: rotated inputs, providers interleaved round by round, medians with their spread.

Nothing in this module needs a GPU except `CudaClock`; the tests replace the clock by a fake one.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Call = Callable[[int], object]


class CallClock(Protocol):
    def measure(self, call: Call, sets: Sequence[int]) -> float:
        """Return the microseconds per call, for one call on each of `sets`, back to back."""


def quantile(share: float, values: Sequence[float]) -> float:
    """Return the least value that at least `share` of the values do not exceed.

    >>> quantile(0.5, [3.0, 1.0, 2.0, 9.0])
    2.0
    """
    return sorted(values)[max(0, math.ceil(round(share * len(values), 6)) - 1)]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, and the 10th and 90th percentile of the samples."""

    median: float
    p10: float
    p90: float

    @property
    def spread(self) -> float:
        """Return the width of the middle 80 % of the samples, as a share of the median."""
        return (self.p90 - self.p10) / self.median


def exactly(us: float) -> Timing:
    """Return a computed time as a `Timing` without spread."""
    return Timing(us, us, us)


def summarise(samples: Sequence[float]) -> Timing:
    """Return the median and the percentiles, interpolated linearly between samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Timing(statistics.median(ordered), at(0.1), at(0.9))


def input_sets(set_bytes: int, l2_bytes: int) -> int:
    """Return how many input sets to rotate so that a set has left the L2 when its turn comes again."""
    if set_bytes >= 2 * l2_bytes:
        return 1
    return math.ceil(2 * l2_bytes / max(set_bytes, 1)) + 1


def interleave(
    calls: Mapping[str, Call], clock: CallClock, sets: int, rounds: int = 15, warmup: int = 3, target_us: float = 2000,
    settle_us: float = 0,
) -> dict[str, Timing]:  # fmt: skip
    """Time every provider in every round, so that clock drift affects all of them alike.

    The order rotates by one each round, so that no provider always follows the same other one. A sample is a run of
    back-to-back calls that fills about `target_us`, each call on the next input set. settle_us: before each sample,
    untimed calls of the same provider fill about this time. Under a power limit the provider then has the clock that
    its own power allows, not the one that the provider before it left.
    """
    names = list(calls)
    place = dict.fromkeys(names, 0)

    def sample(name: str, count: int) -> float:
        order = [(place[name] + i) % sets for i in range(count)]
        place[name] += count
        return clock.measure(calls[name], order)

    first = {name: [sample(name, 1) for _ in range(warmup)] for name in names}
    counts = {name: max(1, round(target_us / max(min(times), 1e-3))) for name, times in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if settle_us:
                sample(name, math.ceil(counts[name] * settle_us / target_us))
            samples[name].append(sample(name, min(counts[name], 100)))
    return {name: summarise(times) for name, times in samples.items()}


class CudaClock:
    """CUDA events around the calls. A short spin on the GPU comes first, so that all calls are queued when the first
    one starts and the interval contains no host time."""

    SPIN_CYCLES_A_CALL = 200_000  # 0.1 ms at 2 GHz: more than the host part of any provider here

    def measure(self, call: Call, sets: Sequence[int]) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.SPIN_CYCLES_A_CALL * len(sets))
        begin.record()
        for i in sets:
            call(i)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / len(sets)


class HostClock:
    """Host time of a call: perf_counter around calls without a wait; the queue is drained before and after."""

    def __init__(self, drain: Callable[[], None], now: Callable[[], float] = time.perf_counter):
        self.drain, self.now = drain, now

    def measure(self, call: Call, sets: Sequence[int]) -> float:
        self.drain()
        begin = self.now()
        for i in sets:
            call(i)
        end = self.now()
        self.drain()
        return (end - begin) * 1e6 / len(sets)
