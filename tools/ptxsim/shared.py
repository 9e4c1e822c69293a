"""Shared memory of the resident CTAs, with a shadow that finds races whatever the schedule of this run is.

For each 4-byte word the shadow records the last writer (component and event, see order.py), the warps that have
read it since, and the number of pending asynchronous reads and writes. It records the last atomic, which must
happen before later plain accesses. Accesses below 4 bytes by different warps to different parts of one word are
not checked for order.

A shared address is (CTA rank in the cluster << 24) + offset, as on hardware; user memory begins at offset 1024."""

from typing import Any

import numpy as np

from .call import elements
from .faults import Fault
from .order import HappensBefore

BASE = 1024  # bytes that the system keeps at the start of a CTA's shared memory
RANK = 24  # bit of a shared address where the CTA rank begins
EMPTY, SEVERAL = -1, -2  # in place of a component: never written; parts written by several warps, unordered


class SharedMemory:
    def __init__(self, slots: int, size: int, warps_per_slot: int, order: HappensBefore) -> None:
        """Allocate the memory. slots: CTAs. size: bytes per CTA, static and dynamic."""
        self.size, self.order, self.per_slot = size, order, warps_per_slot
        self.stride = -(-(BASE + size) // 1024) * 1024
        self.bytes = np.full(slots * self.stride, 0xFF, np.uint8)  # NaN in every float type: stale reads show
        words = self.bytes.size // 4
        self.writer = np.full(words, EMPTY, np.int32)
        self.event = np.zeros(words, np.int32)
        self.partly = np.zeros(words, bool)  # the last write was smaller than 4 bytes
        self.readers = np.zeros((words, warps_per_slot), np.int32)  # last event at which each warp of the CTA read
        self.async_reader = np.full(words, EMPTY, np.int32)
        self.async_event = np.zeros(words, np.int32)
        self.updater = np.full(words, EMPTY, np.int32)  # last warp that updated the word by an atomic, and its event
        self.update_event = np.zeros(words, np.int32)
        self.updated = False  # whether any word was
        self.async_reads = np.zeros(words, np.int16)
        self.async_writes = np.zeros(words, np.int16)
        self.exited: set[int] = set()  # slots of exited CTAs
        warp = np.arange(slots * warps_per_slot)[:, None]  # and the warps of its own CTA
        self.own = warp, warp // warps_per_slot * warps_per_slot + np.arange(warps_per_slot)

    def name(self, flat: int) -> str:
        slot, offset = divmod(flat, self.stride)
        return f"shared {offset - BASE:#x}" + (f" of CTA slot {slot}" if len(self.bytes) > self.stride else "")

    def flat(self, first_slot: Any, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """Convert shared addresses to indices into `bytes`. Raise Fault if an access of `size` bytes is out of
        bounds or misaligned.

        first_slot: of the cluster that each address belongs to."""
        address = address.astype(np.int64)
        offset = address & ((1 << RANK) - 1)
        if offset.size and (offset.min() < BASE or offset.max() + size > BASE + self.size):
            bad = offset[(offset < BASE) | (offset + size > BASE + self.size)]
            raise Fault(f"{what}: {size} B at shared {int(bad[0]) - BASE:#x}, the CTA has {self.size} B")
        if (offset % size).any():
            raise Fault(f"{what}: shared {int(offset[offset % size != 0][0]) - BASE:#x} is not aligned to {size} B")
        slot = first_slot + (address >> RANK)
        if self.exited and np.isin(slot, list(self.exited)).any():
            raise Fault(f"{what}: shared memory of a CTA that has exited")
        return slot * self.stride + offset

    def words(self, flat: np.ndarray, size: int) -> np.ndarray:
        """Return the words that accesses of `size` bytes touch: (n,) or (n, size / 4)."""
        first = flat >> 2
        return first if size <= 4 else first[:, None] + np.arange(size // 4)

    # ------------------------------------------------------------- generic proxy
    def load(
        self, warps: np.ndarray, flat: np.ndarray, dtype: Any, count: int, what: str, strong: bool = False
    ) -> np.ndarray:
        """Return (count, n) elements. warps: (n,) global warp numbers of the readers. strong: atomic, volatile and
        the like."""
        dtype = np.dtype(dtype)
        words = self.words(flat, dtype.itemsize * count)
        by = warps if words.ndim == 1 else warps[:, None]
        part = dtype.itemsize * count < 4
        self.check_read(by, words, what, part)
        if self.updated and not strong:
            self.check_updates(by, words, f"{what}: reads")
        if not part and not strong:
            self.record_read(by, words)
        items = (flat // dtype.itemsize) + np.arange(count)[:, None]
        return elements(self.bytes, dtype)[items]

    def record_read(self, by: np.ndarray, words: np.ndarray) -> None:
        """Record a read. Only the last reader from other CTAs is kept per word."""
        by = np.broadcast_to(by, words.shape)
        own = by // self.per_slot == words * 4 // self.stride
        self.readers[words[own], by[own] % self.per_slot] = self.order.now(by[own])
        if not own.all():
            away = ~own
            self.async_reader[words[away]], self.async_event[words[away]] = by[away], self.order.now(by[away])

    def check_read(self, by: np.ndarray, words: np.ndarray, what: str, part: bool = False) -> None:
        """Check a read. part: less than a word is read, so a write to another part of the word is allowed to race.

        For a vector load (words two-dimensional) one written word suffices: compilers widen loads over padding."""
        writer = self.last_writer(words, what)
        empty = writer == EMPTY
        if empty.any() and (words.ndim == 1 or empty.all(1).any()):
            raise Fault(f"{what}: reads {self._first(words, empty)}, which nothing has written")
        self.check_order(self.order.seen[by, np.maximum(writer, 0)], words, what, part)

    def last_writer(self, words: np.ndarray, what: str) -> np.ndarray:
        """Return the writers of words that are read now. Raise Fault if an async write is pending."""
        if self.async_writes[words].any():
            raise Fault(
                f"{what}: reads {self._first(words, self.async_writes[words] > 0)} while an async write is under way"
            )
        return self.writer[words]

    def check_order(self, seen: np.ndarray, words: np.ndarray, what: str, part: bool = False) -> None:
        """Check the order of reads. seen: how many events of each word's writer happen before the read."""
        writer = self.writer[words]
        late = (writer >= 0) & (seen < self.event[words])
        if part:
            late &= ~self.partly[words]
        if late.any():
            raise Fault(
                f"{what}: reads {self._first(words, late)}, written by {self.who(int(writer[late].flat[0]))}, "
                "without synchronisation in between"
            )

    def store(self, warps: np.ndarray, flat: np.ndarray, values: np.ndarray, what: str) -> None:
        """Store values (count, n)."""
        size = values.dtype.itemsize * len(values)
        words = self.words(flat, size)
        by = warps if words.ndim == 1 else warps[:, None]
        apart = self.check_write(by, words, what, size < 4)
        items = (flat // values.dtype.itemsize) + np.arange(len(values))[:, None]
        elements(self.bytes, values.dtype)[items] = values
        self.writer[words], self.event[words] = np.where(apart, SEVERAL, by), self.order.now(by)
        self.partly[words] = size < 4
        clash = (self.writer[words] != by) & ~apart  # another warp of the same group wrote the word
        if size >= 4 and clash.any():
            raise Fault(f"{what}: several warps write {self._first(words, clash)} without synchronisation in between")

    def check_write(self, by: np.ndarray, words: np.ndarray, what: str, part: bool = False) -> np.ndarray:
        """Check a write; return a mask of the words that other warps write in other parts at the same time, which is
        allowed only for a `part` of a word."""
        if self.async_writes[words].any():
            raise Fault(
                f"{what}: writes {self._first(words, self.async_writes[words] > 0)} while an async write is under way"
            )
        if self.async_reads[words].any():
            raise Fault(
                f"{what}: writes {self._first(words, self.async_reads[words] > 0)} while an async operation reads it"
            )
        writer = self.writer[words]
        late = (writer >= 0) & (self.order.seen[by, np.maximum(writer, 0)] < self.event[words])
        if self.updated:
            self.check_updates(by, words, f"{what}: overwrites")
        apart = late & self.partly[words] if part else np.zeros_like(late)
        late &= ~apart
        if late.any():
            raise Fault(
                f"{what}: overwrites {self._first(words, late)}, written by {self.who(int(writer[late].flat[0]))}, "
                "without synchronisation in between"
            )
        self.check_readers(by, words, what)
        return apart | (part & (writer == SEVERAL))

    def update(self, warps: np.ndarray, flat: np.ndarray, size: int, what: str) -> None:
        """Record atomics of `warps` (n,) that update `size` bytes at flat (n,)."""
        words = self.words(flat, size)
        by = warps if words.ndim == 1 else warps[:, None]
        self.check_read(by, words, what, size < 4)
        if self.async_reads[words].any():
            raise Fault(
                f"{what}: updates {self._first(words, self.async_reads[words] > 0)}, which an async operation reads"
            )
        self.check_readers(by, words, what)
        self.updated = True
        self.updater[words], self.update_event[words] = by, self.order.now(by)

    def check_updates(self, by: np.ndarray, words: np.ndarray, what: str) -> None:
        updater = self.updater[words]
        late = (updater >= 0) & (self.order.seen[by, np.maximum(updater, 0)] < self.update_event[words])
        if late.any():
            who = self.who(int(updater[late].flat[0]))
            raise Fault(f"{what} {self._first(words, late)}, updated by {who}, without synchronisation in between")

    def check_exit(self, slot: int) -> None:
        """Check that reads of a CTA's shared memory by other CTAs happen before its exit."""
        words = slice(slot * self.stride // 4, (slot + 1) * self.stride // 4)
        seen = self.order.seen[slot * self.per_slot : (slot + 1) * self.per_slot].max(0)
        reader = self.async_reader[words]
        late = (reader >= 0) & (reader < self.order.warps) & (seen[np.maximum(reader, 0)] < self.async_event[words])
        if late.any():
            place, who = self.name(words.start * 4 + 4 * int(np.argmax(late))), self.who(int(reader[late][0]))
            raise Fault(f"exit: CTA slot {slot} leaves, {who} reads {place} without synchronisation before that")

    def check_readers(self, by: np.ndarray, words: np.ndarray, what: str) -> None:
        """Check that all reads of the words happen before the warps `by`: (1,), or one per word."""
        if by.size == 1:  # the words of one operation lie in one CTA
            start = int(words.flat[0]) * 4 // self.stride * self.per_slot
            ordered = (self.readers[words].max(0) <= self.order.seen[by[0], start : start + self.per_slot]).all()
            if ordered and (self.async_reader[words] == EMPTY).all():
                return
        first = words * 4 // self.stride * self.per_slot  # global number of the CTA's first warp
        if (first == by // self.per_slot * self.per_slot).all():
            late = self.readers[words] > self.order.seen[self.own][by]
        else:
            seen = self.order.seen[by[..., None], first[..., None] + np.arange(self.per_slot)]
            late = self.readers[words] > seen
        by = np.broadcast_to(by, words.shape)
        if late.any():
            where = np.argwhere(late)[0]
            reader, place = int(first[tuple(where[:-1])] + where[-1]), self.name(int(words[tuple(where[:-1])]) * 4)
            raise Fault(
                f"{what}: overwrites {place}, which {self.who(reader)} has read, without synchronisation in between"
            )
        reader = self.async_reader[words]
        late = (reader >= 0) & (self.order.seen[by, np.maximum(reader, 0)] < self.async_event[words])
        if late.any():
            readers = f"{self.who(int(reader[late].flat[0]))} may still read"
            raise Fault(f"{what}: overwrites {self._first(words, late)}, which {readers}")

    # ------------------------------------------------------------- async proxy
    def begin_read(self, warps: np.ndarray, words: np.ndarray, what: str, blank: bool = False) -> str:
        """Start an async read of `words` (k,) by `warps`. blank: words that nothing has written may be read; the
        result then names one of them, or is ""."""
        writer = self.last_writer(words, what)
        component, empty = np.maximum(writer, 0), writer == EMPTY
        nothing = f"{what}: reads {self._first(words, empty)}, which nothing has written" if empty.any() else ""
        if nothing and not blank:
            raise Fault(nothing)
        self.check_order(self.order.seen[warps].min(0)[component], words, what)
        generic = (writer >= 0) & (writer < self.order.warps)
        if generic.any():
            stale = generic & (self.order.fenced[warps].min(0)[component] < self.event[words])
            if stale.any():
                raise Fault(
                    f"{what}: reads {self._first(words, stale)} through the async proxy, written by "
                    f"{self.who(int(writer[stale][0]))} without fence.proxy.async"
                )
        self.async_reads[words] += 1
        return nothing

    def end_read(self, warps: np.ndarray, words: np.ndarray) -> None:
        """End an async read; `warps` have waited for it."""
        self.async_reads[words] -= 1
        for warp in warps:
            self.readers[words, warp % self.per_slot] = self.order.seen[warp, warp]

    def begin_write(self, warp: int, words: np.ndarray, what: str) -> None:
        """Start an async write of `words` (k,) by `warp`."""
        self.check_write(np.array([warp]), words, what)
        writer = self.writer[words]
        generic = (writer >= 0) & (writer < self.order.warps)
        stale = generic & (self.order.fenced[warp, np.maximum(writer, 0)] < self.event[words])
        if stale.any():
            raise Fault(
                f"{what}: overwrites {self._first(words, stale)} through the async proxy, written by "
                f"{self.who(int(writer[stale][0]))} without fence.proxy.async"
            )
        self.async_writes[words] += 1

    def begin_writes(self, words: np.ndarray, what: str) -> None:
        """Start asynchronous writes of several threads, each to its own words (n, k)."""
        before = self.async_writes[words]
        np.add.at(self.async_writes, words, 1)
        twice = self.async_writes[words] > before + 1
        if twice.any():
            raise Fault(f"{what}: several threads write {self._first(words, twice)}")

    def end_write(self, words: np.ndarray, component: Any, event: Any) -> None:
        """End an async write; any thread that has seen (component, event), one or one per word, may read the words."""
        self.async_writes[words] -= 1
        self.writer[words], self.event[words], self.partly[words] = component, event, False
        self.readers[words] = 0
        self.async_reader[words] = EMPTY

    def who(self, component: int) -> str:
        return f"warp {component}" if component < self.order.warps else "an async operation"

    def _first(self, words: np.ndarray, bad: np.ndarray) -> str:
        return self.name(int(words[bad].flat[0]) * 4)
