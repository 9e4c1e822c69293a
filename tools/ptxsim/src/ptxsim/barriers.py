"""Synchronisation objects: mbarriers, named barriers, cluster barriers."""

from dataclasses import dataclass, field

import numpy as np

from .faults import Fault
from .order import VectorClock


@dataclass
class Mbarrier:
    """An mbarrier object (PTX ISA, Parallel Synchronization: mbarrier). component: its phases, in
    order.HappensBefore."""

    address: str
    count: int
    component: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    visible: bool = False  # its initialisation has been fenced for the async proxy and the cluster
    arriving: VectorClock = field(default_factory=VectorClock)  # of the current phase
    released: VectorClock = field(default_factory=VectorClock)  # of the completed phases

    def __post_init__(self) -> None:
        self.pending = self.count

    def complete_phase(self) -> bool:
        """Complete the phase if no arrival and no byte is missing. Raise Fault if there was one arrival too many."""
        if self.pending < 0:
            raise Fault(f"mbarrier {self.address}: more arrivals in phase {self.phase} than its count {self.count}")
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        self.released.take(self.arriving)
        self.released.event(self.component, self.phase)
        self.arriving = VectorClock()
        return True

    def __str__(self) -> str:
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals missing, {self.tx} bytes missing"


@dataclass
class BarrierState:
    """A named barrier, or the barrier of a cluster: the arrivals, and the threads that wait."""

    need: int
    arrived: int = 0
    counted: bool = True  # every instruction so far has named the count of threads
    kind: str = ""  # of a reduction: and, or, popc
    warps: list[np.ndarray] = field(default_factory=list)  # that have arrived
    phase: int = 0
    clock: VectorClock = field(default_factory=VectorClock)
    waiting: list[tuple[np.ndarray, int]] = field(default_factory=list)  # threads, unit at which they go on
    predicates: list[np.ndarray] = field(default_factory=list)  # predicates of the threads that arrived
    receivers: list[tuple[int, np.ndarray]] = field(
        default_factory=list
    )  # predicate register, threads that get the result
