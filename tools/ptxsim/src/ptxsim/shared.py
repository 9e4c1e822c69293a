"""Shared memory of the resident CTAs, with a shadow that finds races whatever the schedule of this run is.

For each 4-byte word the shadow records the last writer (component and event, see order.py), the warps that have
read it since, and the number of pending asynchronous reads and writes. It records the last atomic, which must
happen before later plain accesses. Accesses below 4 bytes by different warps to different parts of one word are
not checked for order. The places of a word's last write and read (PTX line, and for asynchronous operations the warp
that issued them) are there for messages alone.

A shared address is (CTA rank in the cluster << 24) + offset, as on hardware; user memory begins at offset 1024."""

from typing import Any, NamedTuple

import numpy as np

from .call import elements
from .faults import Fault
from .naming import CtaNames, line_of, place_of
from .numbers import count_nonzero
from .order import HappensBefore
from .unwritten import HeldUse, refuse

BASE = 1024  # bytes that the system keeps at the start of a CTA's shared memory
RANK = 24  # bit of a shared address where the CTA rank begins
EMPTY, SEVERAL = -1, -2  # in place of a component: never written; parts written by several warps, unordered. Event 0
ALWAYS = np.iinfo(np.int32).max
UNDER_WAY, BETWEEN = " while an async write is under way", "without synchronisation in between"


class Other(NamedTuple):
    """The other access of a race. said: what is said of it, with {} for the component that made it. read: it is a
    read."""

    said: str
    component: int = EMPTY
    read: bool = False


class SharedMemory:
    def __init__(self, slots: int, size: int, names: CtaNames, order: HappensBefore) -> None:
        """Allocate the memory. slots: CTAs. size: bytes per CTA, static and dynamic."""
        warps_per_slot = names.warps
        self.size, self.order, self.per_slot, self.names = size, order, warps_per_slot, names
        self.stride = -(-(BASE + size) // 1024) * 1024
        self.bytes = np.full(slots * self.stride, 0xFF, np.uint8)  # NaN in every float type: stale reads show
        words = self.bytes.size // 4
        self.writer = np.full(words, EMPTY, np.int32)
        self.event = np.zeros(words, np.int32)
        self.partly = np.zeros(words, bool)  # the last write was smaller than 4 bytes
        self.write_place, self.read_place = np.zeros(words, np.int64), np.zeros(words, np.int64)  # place_of; 0: unknown
        self.held: list[HeldUse] = []  # uses of words that nothing has written
        self.blank: dict[str, HeldUse] = {}  # those that are allowed until something depends on them, by their text
        self.readers = np.zeros((warps_per_slot, words), np.int32)  # last event at which each warp of the CTA read
        self.async_reader = np.full(words, EMPTY, np.int32)
        self.async_event = np.zeros(words, np.int32)
        self.updater = np.full(words, EMPTY, np.int32)  # last warp that updated the word by an atomic, and its event
        self.update_event = np.zeros(words, np.int32)
        self.updated = False  # whether any word was
        self.async_read = False  # whether async_reader names any reader
        self.async_reads, self.reads = np.zeros(words, np.int16), 0  # pending; the number of words in all of them
        self.async_writes, self.writes = np.zeros(words, np.int16), 0
        self.exited: set[int] = set()  # slots of exited CTAs
        self.slot = np.arange(words) // (self.stride // 4)  # of each word
        warp = np.arange(slots * warps_per_slot)
        self.slot_of_warp, self.row = warp // warps_per_slot, warp % warps_per_slot * words  # row: in `readers`
        self.own = warp[:, None], (warp // warps_per_slot * warps_per_slot)[:, None] + np.arange(warps_per_slot)

    def name(self, flat: int) -> str:
        slot, offset = divmod(flat, self.stride)
        return f"shared {offset - BASE:#x}" + (f" of {self.names.cta(slot)}" if len(self.bytes) > self.stride else "")

    def flat(self, first_slot: Any, address: np.ndarray, size: int, what: object) -> np.ndarray:
        """Convert shared addresses to indices into `bytes`. Raise Fault if an access of `size` bytes is out of
        bounds or misaligned.

        first_slot: of the cluster that each address belongs to."""
        address = address.astype(np.int64)
        offset = address & ((1 << RANK) - 1)
        if count_nonzero((offset - BASE).view(np.uint64) >= np.uint64(max(0, self.size - size + 1))):
            bad = offset[(offset < BASE) | (offset + size > BASE + self.size)]
            raise Fault(f"{what}: {size} B at shared {int(bad[0]) - BASE:#x}, the CTA has {self.size} B")
        if size > 1 and count_nonzero(offset & (size - 1)):
            raise Fault(f"{what}: shared {int(offset[offset % size != 0][0]) - BASE:#x} is not aligned to {size} B")
        slot = first_slot + (address >> RANK)
        if self.exited and np.isin(slot, list(self.exited)).any():
            raise Fault(f"{what}: shared memory of a CTA that has exited")
        return slot * self.stride + offset

    def flat_of_one(self, first_slot: Any, address: Any, size: int) -> int | None:
        """Return the index that `flat` gives for one address; None if it raises, or may raise, Fault."""
        rank, offset = int(address) >> RANK, int(address) & ((1 << RANK) - 1)
        if offset < BASE or offset + size > BASE + self.size or offset % size or self.exited:
            return None
        return (int(first_slot) + rank) * self.stride + offset

    def words(self, flat: np.ndarray, size: int) -> np.ndarray:
        """Return the words that accesses of `size` bytes touch: (n,) or (size / 4, n)."""
        first = flat >> 2
        return first if size <= 4 else first + np.arange(size // 4)[:, None]

    # ------------------------------------------------------------- generic proxy
    def load(
        self, warps: np.ndarray, flat: np.ndarray, dtype: Any, count: int, what: object, strong: bool = False
    ) -> np.ndarray:
        """Return (count, n) elements. warps: (n,) global warp numbers of the readers. strong: atomic, volatile and
        the like."""
        dtype = np.dtype(dtype)
        words = self.words(flat, dtype.itemsize * count)
        part = dtype.itemsize * count < 4
        self.check_read(warps, words, what, part)
        if self.updated and not strong:
            self.check_updates(warps, words, what, "reads")
        if not part and not strong:
            self.record_read(warps, words)
            self.read_place[words] = place_of(what)
        if count == 1:
            return elements(self.bytes, dtype)[flat // dtype.itemsize][None]
        size = dtype.itemsize * count
        return elements(self.bytes, np.dtype(f"V{size}"))[flat // size].view(dtype).reshape(-1, count).T.copy()

    def in_own(self, by: np.ndarray, words: np.ndarray) -> bool:
        """Return whether all words lie in the CTA of the warps `by`."""
        return not count_nonzero(self.slot[words] != self.slot_of_warp[by])

    def record_read(self, by: np.ndarray, words: np.ndarray) -> None:
        """Record a read. Only the last reader from other CTAs is kept per word."""
        if self.in_own(by, words):
            self.readers.reshape(-1)[self.row[by] + words] = self.order.now(by)
            return
        by = np.broadcast_to(by, words.shape)
        own = self.slot[words] == self.slot_of_warp[by]
        self.readers.reshape(-1)[self.row[by[own]] + words[own]] = self.order.now(by[own])
        away, self.async_read = ~own, True
        self.async_reader[words[away]], self.async_event[words[away]] = by[away], self.order.now(by[away])

    def check_read(self, by: np.ndarray, words: np.ndarray, what: object, part: bool = False) -> None:
        """Check a read. part: less than a word is read, so a write to another part of the word is allowed to race.

        For a vector load (words two-dimensional) one written word suffices: compilers widen loads over padding."""
        writer = self.last_writer(by, words, what)
        late = self.order.saw(by, writer) < self.event[words]
        if count_nonzero(late):
            self.refuse_late(by, late & ~self.partly[words] if part else late, words, what)
        empty = writer == EMPTY
        if count_nonzero(empty) and (words.ndim == 1 or empty.all(0).any()):
            self.refuse_empty(by, words, empty if words.ndim == 1 else empty & empty.all(0), what)

    def refuse_empty(self, by: np.ndarray, words: Any, empty: np.ndarray, what: object) -> None:
        """Refuse a read of words that nothing has written (unwritten.py). by: the warp of each word."""
        place, numbers = self._first(words, empty), self._numbers(words)
        use = HeldUse(what, f"reads {place}", numbers[empty], np.broadcast_to(by, numbers.shape)[empty])
        refuse(use, self.held, f"{what}: reads {place}, which nothing has written")

    def check_held(self, by: np.ndarray, words: Any, what: object) -> None:
        """Raise Fault if a write hits words that threads have read before, when nothing had written them."""
        numbers = self._numbers(words)
        each = np.broadcast_to(by, numbers.shape)
        for use in self.held:
            for warp in np.unique(each).tolist():
                instruction = self.names.instruction_at(line_of(what), self.names.warp(warp))
                if found := use.race(numbers[each == warp], warp, instruction):
                    raise found

    def last_writer(self, by: Any, words: np.ndarray, what: object) -> np.ndarray:
        """Return the writers of words that are read now. Raise Fault if an async write is pending."""
        if self.writes and count_nonzero(self.async_writes[words]):
            raise self.race(what, "reads", by, words, self.async_writes[words] > 0, Other(UNDER_WAY))
        return self.writer[words]

    def refuse_late(self, by: Any, late: np.ndarray, words: np.ndarray, what: object) -> None:
        """Raise Fault if a read does not happen after the last write."""
        if late.any():
            other = Other(f", written by {{}}, {BETWEEN}", first_of(self.writer[words], late))
            raise self.race(what, "reads", by, words, late, other)

    def store(self, warps: np.ndarray, flat: np.ndarray, values: np.ndarray, what: object) -> None:
        """Store values (count, n)."""
        size = values.dtype.itemsize * len(values)
        words = self.words(flat, size)
        apart = self.check_write(warps, words, what, size < 4)
        raw = values[0] if len(values) == 1 else np.ascontiguousarray(values.T).view(f"V{size}")[:, 0]
        elements(self.bytes, raw.dtype)[flat // size] = raw
        now = self.order.now(warps)
        if count_nonzero(apart):
            self.writer[words], self.event[words] = np.where(apart, SEVERAL, warps), np.where(apart, 0, now)
        else:
            self.writer[words], self.event[words] = warps, now
        self.partly[words] = size < 4
        self.write_place[words] = place_of(what)
        if size >= 4 and warps.size > 1:
            clash = (self.writer[words] != warps) & ~apart  # another warp of the same group wrote the word
            if count_nonzero(clash):
                other = Other(f", written by {{}}, {BETWEEN}", first_of(self.writer[words], clash))
                raise self.race(what, "overwrites", warps, words, clash, other)

    def check_write(self, by: np.ndarray, words: Any, what: object, part: bool = False) -> np.ndarray:
        """Check a write of `words`, an array or a slice; return a mask of the words that other warps write in other
        parts at the same time, which is allowed only for a `part` of a word."""
        if self.held:
            self.check_held(by, words, what)
        if self.writes and count_nonzero(self.async_writes[words]):
            raise self.race(what, "writes", by, words, self.async_writes[words] > 0, Other(UNDER_WAY))
        if self.reads and count_nonzero(self.async_reads[words]):
            other = Other(" while an async operation reads it", read=True)
            raise self.race(what, "writes", by, words, self.async_reads[words] > 0, other)
        writer = self.writer[words]
        late = apart = self.order.saw(by, writer) < self.event[words]
        if self.updated:
            self.check_updates(by, words, what, "overwrites")
        if count_nonzero(late):
            apart = late & self.partly[words] if part else np.zeros_like(late)
            late = late & ~apart
            if late.any():
                other = Other(f", written by {{}}, {BETWEEN}", first_of(writer, late))
                raise self.race(what, "overwrites", by, words, late, other)
        self.check_readers(by, words, what)
        return apart | (writer == SEVERAL) if part else apart

    def update(self, warps: np.ndarray, flat: np.ndarray, size: int, what: object) -> None:
        """Record atomics of `warps` (n,) that update `size` bytes at flat (n,)."""
        words = self.words(flat, size)
        self.check_read(warps, words, what, size < 4)
        if self.reads and count_nonzero(self.async_reads[words]):
            other = Other(", which an async operation reads", read=True)
            raise self.race(what, "updates", warps, words, self.async_reads[words] > 0, other)
        self.check_readers(warps, words, what)
        self.updated = True
        self.write_place[words] = place_of(what)
        self.updater[words], self.update_event[words] = warps, self.order.now(warps)

    def check_updates(self, by: np.ndarray, words: np.ndarray, what: object, does: str) -> None:
        updater = self.updater[words]
        late = (updater >= 0) & (self.order.saw(by, updater) < self.update_event[words])
        if count_nonzero(late):
            other = Other(f", updated by {{}}, {BETWEEN}", first_of(updater, late))
            raise self.race(what, does, by, words, late, other)

    def check_exit(self, slot: int) -> None:
        """Check that reads of a CTA's shared memory by other CTAs happen before its exit."""
        words = slice(slot * self.stride // 4, (slot + 1) * self.stride // 4)
        seen = self.order.seen[slot * self.per_slot : (slot + 1) * self.per_slot].max(0)
        reader = self.async_reader[words]
        late = (reader >= 0) & (reader < self.order.warps) & (seen[np.maximum(reader, 0)] < self.async_event[words])
        if late.any():
            place, who = self.name(words.start * 4 + 4 * int(np.argmax(late))), self.who(int(reader[late][0]))
            cta = self.names.cta(slot)
            raise Fault(f"exit: {cta} leaves, {who} reads {place} without synchronisation before that")

    def check_readers(self, by: np.ndarray, words: np.ndarray, what: object) -> None:
        """Check that all reads of the words happen before the warps `by`: (1,), or one per word. The words of one
        operation lie in one CTA."""
        if by.size == 1:
            start = int(self.slot[words].flat[0]) * self.per_slot
            last = np.maximum.reduce(self.readers[:, words].reshape(self.per_slot, -1), 1)
            ordered = not count_nonzero(last > self.order.seen[by.flat[0], start : start + self.per_slot])
        else:
            ordered = self.in_own(by, words)
            if ordered:
                seen = self.order.seen[self.own].T[:, by]
                late = self.readers[:, words] > (seen if words.ndim == 1 else seen[:, None])
                ordered = not count_nonzero(late)
        if not ordered:
            self.refuse_readers(by, self._numbers(words), what)
        if not self.async_read:
            return
        reader = self.async_reader[words]
        late = (reader >= 0) & (self.order.saw(by, reader) < self.async_event[words])
        if count_nonzero(late):
            other = Other(", which {} may still read", first_of(reader, late), True)
            raise self.race(what, "overwrites", by, words, late, other)

    def refuse_readers(self, by: np.ndarray, words: np.ndarray, what: object) -> None:
        """Raise Fault if a warp of a word's CTA, which need not be the writer's, may still read the word."""
        first = self.slot[words] * self.per_slot  # global number of the CTA's first warp
        each = np.arange(self.per_slot).reshape(-1, *[1] * words.ndim)
        late = self.readers[:, words] > self.order.seen[by, first + each]
        if late.any():
            thread = late.any(0)
            warp = first_of(first, thread) + int(np.argmax(late.T[thread.T][0]))
            other = Other(f", which {{}} has read, {BETWEEN}", warp, True)
            raise self.race(what, "overwrites", by, words, thread, other)

    # ------------------------------------------------------------- async proxy
    def begin_read(self, warps: np.ndarray, words: Any, what: object, blank: bool = False) -> str:
        """Start an async read of `words`, an array (k,) or a slice, by `warps`. blank: words that nothing has written
        may be read; the result then names one of them, or is ""."""
        writer, nothing = self.last_writer(None, words, what), ""
        if count_nonzero(self.ordered(warps)[writer] < self.event[words]):
            empty = writer == EMPTY
            nothing = f"{what}: reads {self._first(words, empty)}, which nothing has written" if empty.any() else ""
            late = (writer >= 0) & (self.order.seen[warps].min(0)[writer] < self.event[words])
            self.refuse_late(None, late, words, what)
            if nothing and not blank:
                self.refuse_empty(warps[:1], words, empty, what)
            if nothing:
                does, numbers = f"reads {self._first(words, empty)}", self._numbers(words)[empty]
                self.blank[nothing] = HeldUse(what, does, numbers, event=int(self.order.own[warps[0]]))
            self.refuse_stale(warps, words, what, "reads")
        self.async_reads[words] += 1
        self.reads += size_of(words)
        self.read_place[words] = place_of(what, int(warps[0]))
        return nothing

    def ordered(self, warps: np.ndarray) -> np.ndarray:
        """Return how many events of each component happen before an async access by all `warps`: those of threads only
        if they are fenced. The last entries, for SEVERAL and EMPTY, are chosen so that EMPTY alone is refused."""
        order, n = self.order, self.order.warps
        known = np.empty(order.seen.shape[1] + 2, np.int32)
        known[n:-2], known[:n] = lowest(order.seen[warps, n:]), lowest(order.fenced[warps, :n])
        known[SEVERAL], known[EMPTY] = ALWAYS, -1
        return known

    def refuse_stale(self, warps: np.ndarray, words: Any, what: object, does: str) -> None:
        """Raise Fault if a thread wrote words and no fence has carried the write over to the async proxy."""
        writer = self.writer[words]
        generic = (writer >= 0) & (writer < self.order.warps)
        stale = generic & (self.order.fenced[warps].min(0)[np.maximum(writer, 0)] < self.event[words])
        if stale.any():
            said = " through the async proxy, written by {} without fence.proxy.async"
            raise self.race(what, does, None, words, stale, Other(said, int(writer[stale][0])))

    def end_read(self, warps: np.ndarray, words: Any) -> None:
        """End an async read; `warps` have waited for it."""
        self.async_reads[words] -= 1
        self.reads -= size_of(words)
        for warp in warps.tolist():
            self.readers[warp % self.per_slot][words] = self.order.own[warp]

    def end_read_by_engine(self, words: Any, component: int, event: int) -> None:
        """End an async read; any thread that has seen (component, event) may overwrite the words."""
        self.async_reads[words] -= 1
        self.reads -= size_of(words)
        self.async_reader[words], self.async_event[words], self.async_read = component, event, True

    def begin_write(self, warp: int, words: Any, what: object) -> None:
        """Start an async write of `words`, an array (k,) or a slice, by `warp`."""
        warps = np.array([warp])
        self.check_write(warps, words, what)
        writer = self.writer[words]
        if count_nonzero((self.ordered(warps)[writer] < self.event[words]) & (writer != EMPTY)):
            self.refuse_stale(warps, words, what, "overwrites")
        self.expect_write(words)
        self.write_place[words] = place_of(what, warp)

    def expect_write(self, words: Any) -> None:
        self.async_writes[words] += 1
        self.writes += size_of(words)

    def begin_writes(self, warps: np.ndarray, words: np.ndarray, what: object) -> None:
        """Start asynchronous writes of several threads of `warps`, each to its own words (k, n)."""
        before = self.async_writes[words]
        np.add.at(self.async_writes, words, 1)
        self.writes += words.size
        twice = self.async_writes[words] > before + 1
        if count_nonzero(twice):
            raise Fault(f"{what}: several threads write {self._first(words, twice)}")
        self.write_place[words] = place_of(what, warps)

    def end_write(self, words: Any, component: Any, event: Any) -> None:
        """End an async write; any thread that has seen (component, event), one or one per word, may read the words."""
        self.async_writes[words] -= 1
        self.writes -= size_of(words)
        self.writer[words], self.event[words], self.partly[words] = component, event, False
        self.readers[:, words] = 0
        self.async_reader[words] = EMPTY

    def who(self, component: int) -> str:
        if component < 0:
            return "several warps"
        return self.names.warp(component) if component < self.order.warps else "an async operation"

    def race(self, what: Any, does: str, by: np.ndarray | None, words: Any, bad: np.ndarray, other: Other) -> Fault:
        """Return a fault: what an instruction does to the first bad word, and the other instruction of the race, which
        last wrote, or read, that word. by: the warp of each word; None if the whole instruction is meant."""
        places = self.read_place if other.read else self.write_place
        at = what if by is None else what.of([first_of(np.broadcast_to(by, bad.shape), bad)])
        place = int(places[first_of(self._numbers(words), bad)])
        last = self.names.last("read" if other.read else "write", place, other.component)
        return Fault(f"{at}: {does} {self._first(words, bad)}{other.said.format(self.who(other.component))}{last}")

    def _numbers(self, words: Any) -> np.ndarray:
        return np.arange(words.start, words.stop) if isinstance(words, slice) else words

    def _first(self, words: Any, bad: np.ndarray) -> str:
        return self.name(first_of(self._numbers(words), bad) * 4)


def first_of(values: np.ndarray, which: np.ndarray) -> int:
    """Return the first of (n,) or (k, n) values that is chosen, all of a thread before those of the next."""
    return int(values.T[which.T][0])


def size_of(words: Any) -> int:
    return words.stop - words.start if isinstance(words, slice) else words.size


def lowest(rows: np.ndarray) -> np.ndarray:
    return rows[0] if len(rows) == 1 else rows.min(0)
