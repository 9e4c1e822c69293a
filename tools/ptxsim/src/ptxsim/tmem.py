"""Tensor memory (sm_100a): its words, its allocation, and a shadow that finds accesses without synchronisation.

A CTA has 128 lanes x 512 columns of 32-bit words (PTX ISA, Tensor Memory). An address is lane << 16 | column. The
shadow works like that of shared memory (shared.py), in cells of 16 lanes x 1 column: every modelled instruction
accesses whole cells. An engine is an order component; its events are the tcgen05.mma and tcgen05.cp operations
that one thread has issued."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from .faults import Fault
from .naming import CtaNames, place_of
from .numbers import count_nonzero
from .order import HappensBefore
from .shared import EMPTY
from .unwritten import HeldUse, refuse

LANES, COLUMNS, CELL = 128, 512, 16
Region = tuple[slice, slice]  # cells of 16 lanes, columns
U32 = np.uint32


@dataclass
class Engine:
    """The operations of one issuing thread. component: of order.HappensBefore."""

    component: int
    issued: int = 0
    committed: int = 0  # issued before the last commit
    done: int = 0


@dataclass
class TmemStore:
    """A tcgen05.st that its warp has not waited for. values: None if they are written already."""

    lanes: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    regions: list[Region]


class TensorMemory:
    """The tensor memory of one CTA."""

    def __init__(self, slot: int, names: CtaNames, order: HappensBefore, engines: dict[int, Engine]) -> None:
        """Allocate the memory. engines: by component, those that reach this memory."""
        warps = names.warps
        self.slot, self.warps, self.order, self.engines, self.names = slot, warps, order, engines, names
        self.words = np.full((LANES, COLUMNS), 0xFFFFFFFF, U32)
        self.owned = np.zeros(COLUMNS, bool)
        shape = (LANES // CELL, COLUMNS)
        self.writer, self.event = np.full(shape, EMPTY, np.int32), np.zeros(shape, np.int32)
        self.reader, self.read_event = np.full(shape, EMPTY, np.int32), np.zeros(shape, np.int32)  # the last engine
        self.readers = np.zeros((warps, *shape), np.int32)  # last event at which each warp of the CTA read
        self.write_place, self.read_place = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # naming.place_of
        self.open = np.zeros(shape, bool)  # written by a tcgen05.st that has not been waited for
        self.stores: dict[int, list[TmemStore]] = {}  # by warp
        self.cells = np.arange(LANES // CELL * COLUMNS).reshape(shape)  # numbers of the cells
        self.held: list[HeldUse] = []  # uses of cells that nothing has written

    # ------------------------------------------------------------- checks
    def check_owned(self, region: Region, say: Any) -> None:
        columns = region[1]
        if columns.start < 0 or columns.stop > COLUMNS or not self.owned[columns].all():
            raise Fault(
                f"{say}: columns {columns.start} to {columns.stop - 1} of tensor memory, "
                f"allocated are {self.allocated()}"
            )

    def allocated(self) -> str:
        edges = np.flatnonzero(np.diff(np.r_[False, self.owned, False].astype(np.int8)))
        return ", ".join(f"{a} to {b - 1}" for a, b in zip(edges[::2], edges[1::2])) or "none"

    def check_read(self, by: int, region: Region, say: Any, engine: int = EMPTY) -> None:
        """Check that the last writes happen before a read by warp `by`. engine: the reading engine; its own writes
        are in order."""
        self.check_owned(region, say)
        writer = self.writer[region]
        if count_nonzero(writer == EMPTY):
            place, cells = self.place(region, writer == EMPTY), self.cells[region][writer == EMPTY]
            use = HeldUse(say, f"reads {place}", cells, np.full(len(cells), by))
            refuse(use, self.held, f"{say}: reads {place}, which nothing has written")
        self.check_open(by, region, say, "reads")
        self.check_late(by, region, (writer, self.event[region]), engine, say, "reads {}, written")

    def check_write(self, by: int, region: Region, say: Any, engine: int = EMPTY) -> None:
        """Check that all writes and reads happen before a write by warp `by`."""
        self.check_owned(region, say)
        for use in self.held:
            if found := use.race(self.cells[region], by, say.of([by])):
                raise found
        self.check_open(by, region, say, "overwrites")
        self.check_late(by, region, (self.writer[region], self.event[region]), engine, say, "overwrites {}, written")
        start = self.slot * self.warps
        unseen = self.readers[:, region[0], region[1]] > self.order.seen[by, start : start + self.warps, None, None]
        if count_nonzero(unseen):
            warp = start + int(np.argwhere(np.moveaxis(unseen, 0, -1))[0][-1])
            place, who = self.place(region, np.any(unseen, axis=0)), self.names.warp(warp)
            last = self.last(region, np.any(unseen, axis=0), warp, read=True)
            raise Fault(f"{say}: overwrites {place}, which {who} has read, without synchronisation in between{last}")
        self.check_late(by, region, (self.reader[region], self.read_event[region]), engine, say, "overwrites {}, read")

    def last(self, region: Region, bad: np.ndarray, component: int, read: bool = False) -> str:
        """Return a line for a message: the last write or read of the first bad cell. component: that made it."""
        places = (self.read_place if read else self.write_place)[region]
        return self.names.last("read" if read else "write", int(places[bad][0]), component)

    def check_open(self, by: int, region: Region, say: Any, does: str) -> None:
        """Check that no tcgen05.st of the region is pending. A warp may store again before it waits."""
        if not self.stores or not count_nonzero(self.open[region]):
            return
        bad = self.open[region] & ((self.writer[region] != by) | (does == "reads"))
        if bad.any():
            where = self.place(region, bad)
            last = self.last(region, bad, int(self.writer[region][bad][0]))
            raise Fault(f"{say}: {does} {where}, stored by a tcgen05.st without tcgen05.wait::st{last}")

    def check_late(
        self, by: int, region: Region, last: tuple[np.ndarray, np.ndarray], engine: int, say: Any, what: str
    ) -> None:
        """Check that what components did to the region happens before what warp `by` or `engine` does. last: the
        component and its event of each word."""
        component, event = last
        late = self.order.seen[by][component] < event
        if count_nonzero(late) and count_nonzero(late := late & (component >= 0) & (component != engine)):
            who = self.who(int(component[late].flat[0]), int(event[late].flat[0]))
            instruction = self.last(region, late, int(component[late].flat[0]), what.endswith("read"))
            raise Fault(f"{say}: {what.format(self.place(region, late))} by {who}{instruction}")

    def who(self, component: int, event: int) -> str:
        engine = self.engines.get(component)
        if engine is None:
            return f"{self.names.warp(component)}, without synchronisation in between"
        if engine.done < event:
            return "a tcgen05 operation that is under way"
        if engine.committed < event:
            return "a tcgen05 operation that no tcgen05.commit covers"
        return "a tcgen05 operation, the mbarrier of its tcgen05.commit was not waited for"

    def place(self, region: Region, bad: np.ndarray) -> str:
        cell, column = (int(v) for v in np.argwhere(bad)[0])
        lane = (region[0].start + cell * (region[0].step or 1)) * CELL
        column += region[1].start
        return f"tensor memory lanes {lane} to {lane + CELL - 1}, column {column} of {self.names.cta(self.slot)}"

    # ------------------------------------------------------------- accesses
    def load(self, by: int, regions: list[Region], say: Any) -> None:
        """Load by a warp. The read takes effect when the instruction is issued, see tcgen05.py."""
        for region in regions:
            self.check_read(by, region, say)
            self.readers[by - self.slot * self.warps][region] = self.order.seen[by, by]
            self.read_place[region] = place_of(say)

    def store(self, by: int, store: TmemStore, say: Any) -> None:
        """Store by a warp; the store takes effect at the warp's next wait::st."""
        for region in store.regions:
            self.check_write(by, region, say)
            self.wrote(region, by, int(self.order.seen[by, by]), place_of(say, by))
            self.open[region] = True
        self.stores.setdefault(by, []).append(store)

    def wait(self, by: int) -> None:
        for store in self.stores.pop(by, []):
            if store.values is not None:
                self.words[store.lanes, store.columns] = store.values
            for region in store.regions:
                self.event[region] = self.order.seen[by, by]
                self.open[region] = False

    def wrote(self, region: Region, component: int, event: int, place: int = 0) -> None:
        self.writer[region], self.event[region], self.write_place[region] = component, event, place
        self.readers[:, region[0], region[1]] = 0
        self.reader[region] = EMPTY


@dataclass
class TmemAllocation:
    """The columns of one allocation. A CTA pair allocates and frees together: sets of slots that have done so."""

    count: int
    holders: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)


class TmemPool:
    """The tensor memory that the CTA, or the CTA pair, of one cta_group shares. group: CTAs. first: slot of the
    first."""

    def __init__(self, first: int, group: int, names: CtaNames, order: HappensBefore) -> None:
        self.first, self.group, self.order, self.names = first, group, order, names
        self.engines: dict[int, Engine] = {}  # by component
        self.tensors = {slot: TensorMemory(slot, names, order, self.engines) for slot in range(first, first + group)}
        self.blocks: dict[int, TmemAllocation] = {}
        self.relinquished: set[int] = set()
        self.issuers: dict[int, Engine] = {}  # by thread

    def engine(self, thread: int) -> Engine:
        if thread not in self.issuers:
            engine = Engine(self.order.component())
            self.issuers[thread] = self.engines[engine.component] = engine
        return self.issuers[thread]

    def allocate(self, slot: int, count: int, say: Any) -> int:
        """Return the first column. In a pair, the CTA that comes first allocates for both."""
        if count not in (32, 64, 128, 256, 512):
            raise Fault(f"{say}: {count} columns, must be a power of two from 32 to 512")
        if slot in self.relinquished:
            raise Fault(f"{say}: allocates after tcgen05.relinquish_alloc_permit")
        for column, block in self.blocks.items():
            if slot not in block.holders:
                if block.count != count:
                    raise Fault(f"{say}: {count} columns, the other CTA of the pair allocates {block.count}")
                block.holders.add(slot)
                return column
        owned = self.tensors[slot].owned
        for column in range(0, COLUMNS, count):
            if not owned[column : column + count].any():
                self.blocks[column] = TmemAllocation(count, {slot})
                for tensor in self.tensors.values():
                    tensor.owned[column : column + count] = True
                return column
        raise Fault(
            f"{say}: no {count} columns of tensor memory are free, allocated are {self.tensors[slot].allocated()}; "
            "hardware would wait"
        )

    def free(self, slot: int, by: int, column: int, count: int, say: Any) -> None:
        block = self.blocks.get(column)
        if block is None or block.count != count or slot not in block.holders - block.freed:
            held = self.tensors[slot].allocated()
            raise Fault(f"{say}: {count} columns from {column} are no allocation of the CTA, allocated are {held}")
        region = (slice(0, LANES // CELL), slice(column, column + count))
        self.tensors[slot].check_write(by, region, say)
        block.freed.add(slot)
        if len(block.freed) == self.group:
            del self.blocks[column]
            for tensor in self.tensors.values():
                tensor.owned[column : column + count] = False
                tensor.wrote(region, EMPTY, 0)

    def check_exit(self) -> None:
        """Raise Fault if allocations, stores or uncommitted operations are left over when the kernel ends."""
        for column, block in self.blocks.items():
            where = ", ".join(self.names.cta(slot) for slot in sorted(set(self.tensors) - block.freed))
            raise Fault(
                f"exit: {block.count} columns of tensor memory from column {column} are not deallocated, {where}"
            )
        for tensor in self.tensors.values():
            for warp in tensor.stores:
                who = self.names.warp(warp)
                raise Fault(f"exit: {who} has not waited for its tcgen05.st (tcgen05.wait::st)")
        for thread, engine in self.issuers.items():
            if engine.committed < engine.issued:
                left = engine.issued - engine.committed
                who = self.names.thread(thread)
                raise Fault(f"exit: no tcgen05.commit covers the last {left} tcgen05 operations of {who}")


# ------------------------------------------------------------------------------------------------ register fragments
SHAPES = {
    "32x32b": (32, 1, 1),
    "16x64b": (16, 1, 2),
    "16x128b": (16, 2, 4),
    "16x256b": (16, 4, 8),
    "16x32bx2": (16, 1, 1),
}


@cache
def fragment(shape: str, count: int, packed: bool, offset: int) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Return (lane, column) of register i of thread t, and the columns touched (PTX ISA, tcgen05: Data Movement
    Shape).

    Both arrays are (registers, 32), or (registers, 2, 32) if a register holds the low halves of two columns
    (packed). count: .num. offset: columns between the halves of 16x32bx2."""
    _, registers, columns = SHAPES[shape]
    i, t = np.arange(count * registers)[:, None], np.arange(32)[None, :]
    if shape == "32x32b":
        lane, column = t, i
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * i
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    else:
        lane, column = t % 16, i
    lane, column = np.broadcast_arrays(lane, column)
    width = count * columns
    if packed:
        half = np.arange(2)[None, :, None]
        lane, column, width = np.repeat(lane[:, None], 2, 1), 2 * column[:, None] + half, 2 * width
    if shape == "16x32bx2":
        return lane, column + offset * (t // 16), [slice(0, width), slice(offset, offset + width)]
    return lane, column, [slice(0, width)]
