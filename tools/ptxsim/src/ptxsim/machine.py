"""The state of the resident CTAs: registers, program counters, memories, barriers, queues of async operations."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .barriers import BarrierState, Mbarrier
from .call import KernelLaunch, TensorMap
from .exchange import Exchange
from .faults import Fault, NotModelled
from .forms import WARP, WARPGROUP
from .naming import CtaNames
from .numbers import count_nonzero
from .order import HappensBefore, VectorClock
from .program import Program
from .shared import RANK, SharedMemory
from .translate import STORAGE
from .unwritten import HeldUse, refuse

MODES = ("eager", "late", "newest", "random")
PARAMS = 0x7E00_0000_0000  # generic address of the parameters
WINDOW = 0x7D00_0000_0000  # generic address of shared memory
POISON = {"B": 0x7F, "W": 0x7FC0DEAD, "H": 0x7FC1, "D": 0x7FF8_DEAD_7FC0_DEAD}  # unwritten registers: NaN


@dataclass
class PendingOperation:
    """A pending asynchronous operation. what: returns its text."""

    what: Callable[[], str]
    complete: Callable[[], None]


class lazy:  # noqa: N801
    """A property computed at its first use; functools.cached_property takes a lock each time."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute, self.name = compute, compute.__name__

    def __get__(self, owner: Any, kind: Any) -> Any:
        found = owner.__dict__[self.name] = self.compute(owner)
        return found


class SourceLocation(NamedTuple):
    """An instruction that threads execute; its text is written only for messages."""

    threads: "Threads"
    x: Any

    def __str__(self) -> str:
        return self.of(self.threads.warps.tolist())

    def of(self, warps: list[int]) -> str:
        """Return the text for some of the warps."""
        at = f" ({self.x.source})" if self.x.source else ""
        return f"line {self.x.line}{at}, {self.threads.machine.names.group(warps)}: {self.x.op}"


@dataclass
class Threads:
    """Threads that run a unit together. where: their columns of the register file."""

    machine: "MachineState"
    where: Any
    count: int
    pick: Any = None  # of a selection: its positions among the threads it was selected from

    @lazy
    def index(self) -> np.ndarray:
        return np.arange(self.machine.threads)[self.where] if isinstance(self.where, slice) else self.where

    @lazy
    def warp(self) -> np.ndarray:
        """Return the warp of each thread, numbered through all resident CTAs."""
        return self.index >> 5

    @lazy
    def warps(self) -> np.ndarray:
        return distinct(self.warp)

    @lazy
    def whole(self) -> bool:
        """Return whether all 32 lanes of every warp are here."""
        return self.count == 32 * len(self.warps)

    @lazy
    def level(self) -> int:
        """Return the level of collectives that whole warps may run together."""
        first, last = self.warps[::4], self.warps[3::4]
        whole = len(first) == len(last) and not count_nonzero((first & 3) | (last - first - 3))
        return WARPGROUP if whole else WARP

    @lazy
    def first_slot(self) -> np.ndarray:
        """Return the first slot of the cluster of each thread."""
        return self.machine.first_slot[self.where]

    @lazy
    def in_cluster(self) -> bool:
        """Return whether all threads belong to one cluster."""
        return bool(self.first_slot[0] == self.first_slot[-1])

    def select(self, mask: np.ndarray) -> "Threads | None":
        """Return the threads for which `mask` holds; None if there are none."""
        (pick,) = mask.nonzero()
        return Threads(self.machine, self.index[pick], len(pick), pick) if len(pick) else None

    def merge(self, old: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return `old` of all threads with `values` in place of those selected."""
        out = old.copy()
        out[self.pick] = values
        return out

    def say(self, x: Any) -> SourceLocation:
        """Return the location, which is text in a message: PTX line, source line, warps, opcode."""
        return SourceLocation(self, x)

    def refuse_apart(self, x: Any) -> NoReturn:
        """Raise Fault, because an instruction is .aligned and a lane of a warp does not execute it with the others."""
        m = self.machine
        here = np.zeros(m.threads, bool)
        here[self.index] = True
        if self.whole:  # of a warpgroup, some warps
            raise Fault(f"{self.say(x)}: all warps of the warpgroup must execute it together")
        absent = ~here.reshape(-1, 32)[self.warps]
        live = absent & ~m.done.reshape(-1, 32)[self.warps]
        row, lane = np.argwhere(live if live.any() else absent)[0].tolist()
        warp = int(self.warps[row])
        say, stands = self.say(x).of([warp]), m.stands(32 * warp + lane)
        raise Fault(f"{say}: all lanes of the warp must execute it together, and lane {lane} {stands}")


def distinct(ascending: np.ndarray) -> np.ndarray:
    """Return np.unique of ascending numbers, in a fraction of its time."""
    if len(ascending) and ascending[0] == ascending[-1]:
        return ascending[:1]
    first = np.empty(len(ascending), bool)
    first[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending[first]


def groups(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return each value, ascending, and a mask of the elements that have it."""
    first = values == values[0]
    if count_nonzero(first) == len(values):
        return [(int(values[0]), first)]
    return [(value, values == value) for value in np.unique(values).tolist()]


@dataclass
class Settings:
    mode: str = "eager"
    seed: int = 0
    limit: int = 2_000_000  # units until a livelock is reported
    exact: bool = False  # round sums of 16-bit and tf32 WGMMAs as hardware does


@dataclass
class EngineState:
    """The state of the asynchronous engines and of synchronisation."""

    # Pending operations by queue: those in "" complete in any order, those in other queues in the order of issue.
    pending: dict[str, deque[PendingOperation]] = field(
        default_factory=lambda: defaultdict(deque, {"": deque(), "store": deque()})
    )
    wgmma: dict[int, Any] = field(default_factory=dict)  # warpgroup -> wgmma.WgmmaQueue
    bulk: dict[int, Any] = field(default_factory=dict)  # thread -> bulk groups
    copies: list[Any] = field(default_factory=list)  # data.Copies that are not complete
    named: dict[tuple[int, int], BarrierState] = field(default_factory=dict)  # (slot, id)
    # warp -> (function, list of convergence.Arrivals): lanes that wait in a barrier for the others of their warp
    held_lanes: dict[int, Any] = field(default_factory=dict)
    cluster: dict[int, BarrierState] = field(default_factory=dict)
    # By address: released by strong operations on shared memory, or of scope .cta.
    flags: dict[int, VectorClock] = field(default_factory=dict)
    # By warp, and whether other CTAs count: its past at its last fence; relaxed reads that no fence has acquired yet.
    fences: dict[tuple[int, bool], VectorClock] = field(default_factory=dict)
    unacquired: dict[tuple[int, bool], VectorClock] = field(default_factory=dict)
    tensor: dict[int, Any] = field(default_factory=dict)  # slot -> tensor memory
    released: dict[int, VectorClock] = field(default_factory=dict)  # warp -> its past at its last fence for the cluster
    remote: set[int] = field(default_factory=set)  # warps with stores to other CTAs since a full release
    counts: dict[str, int] = field(default_factory=dict)


class MachineState:
    """The CTAs of whole clusters that are resident together."""

    def __init__(
        self, program: Program, call: KernelLaunch, memory: Exchange, blocks: list[tuple[int, int, int]],
        settings: Settings,
    ) -> None:  # fmt: skip
        """Set up the CTAs. blocks: indices of the CTAs, those of a cluster one after the other in rank order."""
        self.program, self.call, self.memory, self.settings = program, call, memory, settings
        self.random = np.random.default_rng(settings.seed)
        shape = call.block or program.kernel.block
        if not all(shape):
            raise ValueError("block: the PTX has no .reqntid, so the call must say")
        self.block = shape
        self.per_cta = int(np.prod(shape))
        if self.per_cta % 32:
            raise ValueError(f"block {shape}: {self.per_cta} threads are no multiple of 32")
        if self.per_cta % 128 and (program.level == WARPGROUP).any():
            raise NotModelled(f"{self.per_cta} threads: wgmma in a block of no multiple of 128 threads is not modelled")
        self.cluster_size = int(np.prod(call.cluster))
        self.slots = len(blocks)
        self.threads = self.per_cta * self.slots
        self.warps = self.threads // 32
        self.order = HappensBefore(self.warps)
        size = program.kernel.shared_bytes + call.shared
        self.names = CtaNames(blocks, call.grid, self.per_cta // 32, program.instruction_at)
        self.shared = SharedMemory(self.slots, size, self.names, self.order)
        memory.begin(self.order, self.names)
        if not program.spare or program.spare[0].shape[1] < self.threads:
            counts = program.registers.count
            program.spare = [np.empty((counts[letter], self.threads), dtype) for letter, dtype in STORAGE.items()]
        self.files, program.spare = program.spare, []  # taken, until the run gives them back
        self.P, self.B, self.H, self.W, self.D = (file[:, : self.threads] for file in self.files)
        self.poisoned = {letter: np.zeros(count, bool) for letter, count in program.registers.count.items()}
        self.special = specials(call, blocks, shape)
        self.first_slot = np.arange(self.threads) // self.per_cta // self.cluster_size * self.cluster_size
        self.params, self.maps = pack(program, call)
        self.mbarriers: dict[int, Mbarrier] = {}  # flat shared address -> object
        self.state = EngineState()
        self.waiting: deque[list[tuple[int, int, int]]] = deque()  # clusters of the run that are not resident yet
        self.pc = np.zeros(self.threads, np.int32)
        self.done = np.zeros(self.threads, bool)
        self.blocked = np.zeros(self.threads, bool)  # inside a barrier
        self.failed = np.full(self.threads, -1, np.int32)  # unit at which a wait failed, at event `failed_at`
        self.failed_at = 0
        self.groups: dict[tuple[int, int], Threads] = {}  # contiguous ones that have run, by first thread and number
        self.touched = np.ones(self.threads, bool)  # wgmma registers written since the last wgmma.fence
        self.undefined: dict[int, dict[str, str]] = {}  # warp -> undefined registers and the reasons (undefined.py)
        self.copy_groups = np.zeros(self.threads, np.int32)  # of cp.async that each thread has committed
        self.cluster_phase = np.zeros(self.threads, np.int64)  # of the cluster barrier, after the last arrival
        self.cluster_waited = np.zeros(self.threads, np.int64)  # the same, after the last wait
        self.events = 0  # counts what may let a wait succeed: completed phases, and threads that exit
        self.stalled: np.ndarray | None = None  # numbers of the threads that stay at the running unit
        self.unit = 0  # the running unit
        self.running = np.zeros(0, np.int64)  # the threads that run it
        self.entered = bytearray(len(program.units))  # units that have run
        self.active = bytearray(len(program.kernel.instructions))  # instructions with a guard that held for a thread
        self.steps = 0
        self.unwritten: list[str] = []  # faults that are held (unwritten.py)
        self.suspended: set[int] = set()  # warps that stop after the running unit, because of such a fault
        self.last = -1

    # ------------------------------------------------------------- read by generated code
    def uniform(self, name: str) -> Any:
        """Return a special register that all threads share."""
        if name.startswith("ntid."):
            return np.uint32(self.block["xyz".index(name[-1])])
        if name in ("clock", "clock64", "globaltimer", "globaltimer_lo"):
            return np.uint64(self.steps)
        values = {"dynamic_smem_size": self.call.shared, "total_smem_size": self.shared.size, "nsmid": 132, "smid": 0}
        return np.uint32(values[name])

    def shared_address(self, where: Any, offset: int) -> np.ndarray:
        """Return the address of a shared variable per thread. offset: in static memory; -1 means the dynamic part."""
        start = self.program.dynamic_start if offset < 0 else offset
        return (self.special["cluster_ctarank"][where] << np.uint32(RANK)) + np.uint32(1024 + start)

    def param_address(self, offset: int) -> np.uint64:
        return np.uint64(PARAMS + offset)

    # ------------------------------------------------------------- used by the scheduler
    def enter(self, number: int) -> None:
        """Note that a unit runs for the first time, and poison the registers that it is the first to name."""
        self.entered[number] = 1
        for letter, rows in self.program.units[number].rows.items():
            new = rows[~self.poisoned[letter][rows]]
            getattr(self, letter)[new] = POISON.get(letter, 0)
            self.poisoned[letter][new] = True

    def failures(self) -> np.ndarray:
        """Return the unit at which a wait of each thread has failed since the last event, or -1."""
        if self.failed_at != self.events:
            self.failed.fill(-1)
            self.failed_at = self.events
        return self.failed

    def group(self, index: np.ndarray, warps: np.ndarray) -> Threads:
        """Return threads, ascending, of these warps."""
        first, n = int(index[0]), len(index)
        if int(index[-1]) - first + 1 != n:
            group = Threads(self, index, n)
        elif (first, n) in self.groups:
            return self.groups[first, n]
        else:
            group = self.groups[first, n] = Threads(self, slice(first, first + n), n)
        group.warps = warps
        return group

    # ------------------------------------------------------------- used by forms
    def flat(self, t: Threads, address: np.ndarray, size: int, x: Any) -> np.ndarray:
        """Convert shared addresses of threads to indices into shared.bytes."""
        return self.shared.flat(t.first_slot, address, size, t.say(x))

    def mbarrier(self, t: Threads, flat: int, x: Any) -> Mbarrier:
        found = self.mbarriers.get(int(flat))
        if found is None:
            place, say = self.shared.name(int(flat)), t.say(x)
            use = HeldUse(say, f"uses the mbarrier at {place}", np.array([int(flat) >> 2]))
            refuse(use, self.shared.held, f"{say}: no initialised mbarrier at {place}")  # raises
        return found  # type: ignore[return-value]

    def stands(self, thread: int) -> str:
        """Return where a thread is that does not execute the running instruction, as the end of a sentence."""
        if self.done[thread]:
            return "has exited"
        if (self.running == thread).any():
            return "is excluded by the guard"
        x = self.program.kernel.instructions[self.program.units[int(self.pc[thread])].first]
        return f"is at line {x.line}: {x.op}"

    def signalled(self, t: Threads, flat: int, x: Any) -> Mbarrier:
        """Return an mbarrier that an async operation will signal."""
        barrier = self.mbarrier(t, flat, x)
        if not barrier.visible and "init" not in self.call.beyond:
            raise Fault(f"{t.say(x)}: the mbarrier at {barrier.address} was initialised, but not fenced for async use")
        return barrier

    def post(self, what: Callable[[], str], complete: Callable[[], None], queue: str = "") -> None:
        """Start an async operation; the mode decides when it completes. what: returns its text."""
        if self.settings.mode == "eager":
            complete()
        else:
            self.state.pending[queue].append(PendingOperation(what, complete))

    def count(self, what: str) -> None:
        self.state.counts[what] = self.state.counts.get(what, 0) + 1


def specials(
    call: KernelLaunch, blocks: list[tuple[int, int, int]], shape: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """Return the special registers that differ between threads or CTAs (PTX ISA, Special Registers)."""
    per_cta = int(np.prod(shape))
    lane = np.tile(np.arange(per_cta, dtype=np.uint32), len(blocks))
    out: dict[str, np.ndarray] = {
        "tid.x": lane % shape[0],
        "tid.y": lane // shape[0] % shape[1],
        "tid.z": lane // (shape[0] * shape[1]),
        "laneid": lane & 31,
        "warpid": lane >> 5,
    }
    bit = np.uint32(1) << (lane & np.uint32(31))
    out |= {"lanemask_eq": bit, "lanemask_lt": bit - 1, "lanemask_le": bit | (bit - 1)}
    out |= {"lanemask_ge": ~(bit - 1), "lanemask_gt": ~(bit | (bit - 1))}
    index = np.repeat(np.array(blocks, np.uint32).reshape(-1, 3), per_cta, 0)
    rank = np.zeros(len(lane), np.uint32)
    for i, axis in enumerate("xyz"):
        size, count = call.cluster[i], call.grid[i]
        out[f"ctaid.{axis}"] = index[:, i]
        out[f"nctaid.{axis}"] = np.full(len(lane), count, np.uint32)
        out[f"cluster_ctaid.{axis}"] = index[:, i] % size
        out[f"cluster_nctaid.{axis}"] = np.full(len(lane), size, np.uint32)
        out[f"clusterid.{axis}"] = index[:, i] // size
        out[f"nclusterid.{axis}"] = np.full(len(lane), count // size, np.uint32)
        rank += out[f"cluster_ctaid.{axis}"] * np.uint32(np.prod(call.cluster[:i], dtype=int))
    out["cluster_ctarank"] = rank
    out["is_explicit_cluster"] = np.full(len(lane), call.cluster != (1, 1, 1), np.uint32)
    out["cluster_nctarank"] = np.full(len(lane), np.prod(call.cluster), np.uint32)
    return {name: values.astype(np.uint32) for name, values in out.items()}


def pack(program: Program, call: KernelLaunch) -> tuple[np.ndarray, dict[int, TensorMap]]:
    """Return the parameter bytes, and the tensor maps by their offset in them."""
    expected = list(program.kernel.params.values())
    if len(call.params) != len(expected):
        raise ValueError(f"params: {len(call.params)} values, the kernel has {len(expected)} parameters")
    end = max((offset + size for offset, size, _ in expected), default=0)
    data, maps = bytearray(end), {}
    for i, (value, (offset, size, _)) in enumerate(zip(call.params, expected)):
        if isinstance(value, TensorMap):
            maps[offset] = value
            continue
        if len(value) != size:
            raise ValueError(f"params[{i}]: {len(value)} B, the kernel's parameter has {size} B")
        data[offset : offset + size] = value
    return np.frombuffer(bytes(data), np.uint8), maps
