"""Global memory as the CTAs of a launch share it: the last writer of each word in this launch, and releases of
flags.

The write of a word must happen before a plain read of it (order.py): by the reader's own warp, or ordered by
barriers, by a release and an acquire, or by fences around relaxed operations on one address (PTX ISA, Memory
Consistency Model). Two unordered writes must write the same value. Only buffers that the launch writes have a
shadow, so inputs cost nothing; each launch begins without shadows. Accesses below 4 bytes by different warps to
parts of one word are not checked. Atomics and other strong operations do not race with each other; a plain store
may overwrite their result, as the last user of a counter does, but no access may then use the word unordered.
Reads before writes are not recorded: a write that comes too early for a reader elsewhere is not found."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .call import Global
from .faults import Fault
from .naming import CtaNames, line_of
from .numbers import count_nonzero
from .order import HappensBefore, VectorClock

WEAK, STRONG, CONSTANT = "weak", "strong", "constant"  # plain; relaxed, volatile or atomic; ld.global.nc
PARTLY, ATOMIC, ASYNC, PENDING = 1, 2, 4, 8  # kinds of a word's last write; PENDING: of a pending bulk store
NOBODY, SEVERAL = 0, -1  # in place of a writer


@dataclass
class Shadow:
    """The shadow of a buffer's words: last writer (number of the warp in the launch, + 1), its event, kind of the
    write."""

    writer: np.ndarray
    event: np.ndarray
    kind: np.ndarray
    line: np.ndarray  # in the PTX, for messages; 0: unknown


@dataclass
class Past:
    """The past of accesses: `seen` and `fenced` of order.HappensBefore, and the row of each access. bulk: by an
    engine, which reads past the caches, so that writes of threads must have been fenced for it."""

    seen: np.ndarray
    fenced: np.ndarray
    rows: np.ndarray
    bulk: bool = False


class Change(NamedTuple):
    """Bytes of memory before a write, after it, and the written bytes."""

    before: np.ndarray
    after: np.ndarray
    written: np.ndarray


class WriteInfo(NamedTuple):
    """A write. what: the instruction, for messages; kind: of the write."""

    what: object
    kind: int


class Exchange:
    def __init__(self, memory: Global) -> None:
        self.memory = memory
        self.order = HappensBefore(0)  # of the CTAs that run
        self.shadows: dict[int, Shadow] = {}  # by number of the buffer
        self.flags: dict[int, VectorClock] = {}  # address of strong operations -> the clock that they release
        self.base = 0  # warps of the CTAs that ran before
        self.names: list[tuple[int, CtaNames]] = []  # `base` of the CTAs that ran, and their names
        self.column = np.zeros(1, np.int64)  # of a writer, in `order`; -1: in nobody's past

    def begin(self, order: HappensBefore, names: CtaNames) -> None:
        """Start the next CTAs, with warps numbered from 0 again: components of earlier CTAs in the flags are
        renumbered."""
        held = VectorClock()
        for flag in self.flags.values():
            held.take(flag)
        writers = np.flatnonzero(self.column >= 0)[1:]
        old = self.column[writers]
        kept = [i for i, column in enumerate(old.tolist()) if column < held.seen.size and held.seen[column]]
        writers, old = writers[kept], old[kept]
        new = order.component(len(kept)) + np.arange(len(kept))
        for flag in self.flags.values():
            flag.seen, flag.fenced = moved(flag.seen, old, new), moved(flag.fenced, old, new)
        self.base += self.order.warps
        self.names.append((self.base, names))
        self.order = order
        self.column = np.full(self.base + order.warps + 1, -1, np.int64)
        self.column[0], self.column[writers] = 0, new
        self.column[self.base + 1 :] = np.arange(order.warps)

    def past(self, warps: np.ndarray) -> Past:
        return Past(self.order.seen, self.order.fenced, warps)

    def bulk_past(self, warp: int) -> Past:
        """Return the past of an operation that `warp` issues now and an engine carries out later."""
        one = slice(warp, warp + 1)
        return Past(self.order.seen[one].copy(), self.order.fenced[one].copy(), np.zeros(1, np.int64), True)

    # ------------------------------------------------------------- accesses
    def load(
        self, past: Past, address: np.ndarray, dtype: Any, what: object, how: str = WEAK, fine: bool = False
    ) -> np.ndarray:
        """Return elements of `dtype` at byte addresses (n,). fine: they consist of elements below 4 bytes."""

        def check(index: int, offset: np.ndarray, which: Any) -> None:
            if index in self.shadows:
                self.check_read(index, (offset, size), rows_of(past, which), what, (how, fine or size < 4))

        size = np.dtype(dtype).itemsize
        return self.memory.load(address, dtype, what, check if self.shadows else None)

    def store(
        self, warps: np.ndarray, address: np.ndarray, values: np.ndarray, what: object, kind: int = 0
    ) -> list[Any]:
        """Write elements to byte addresses (n,). kind: of the write, without PARTLY. Return the argument of
        `complete_stores`."""
        places: list[Any] = []
        part = PARTLY if values.dtype.itemsize < 4 else 0

        def note(index: int, offset: np.ndarray, which: Any, change: tuple[np.ndarray, ...]) -> None:
            by = warps if len(warps) == 1 else warps[which]
            places.append((index, self.write(index, offset, by, Change(*change), WriteInfo(what, kind | part))))

        self.memory.store(address, values, what, note)
        return places

    def complete_stores(self, places: list[Any], warp: int) -> None:
        """Complete a bulk store that `warp` has waited for."""
        for index, words in places:
            shadow = self.shadows[index]
            mine = words[shadow.writer[words] == self.base + warp + 1]
            shadow.kind[mine] &= ~np.uint8(PENDING)
            shadow.event[mine] = self.order.seen[warp, warp]

    # ------------------------------------------------------------- checks
    def unordered(self, shadow: Shadow, words: np.ndarray, past: Past) -> np.ndarray:
        """Return a mask of the words for which the last write does not happen before the access."""
        writer, kind = shadow.writer[words], shadow.kind[words]
        column, event = self.column[np.maximum(writer, 0)], shadow.event[words]
        rows = past.rows[:, None] if words.ndim == 2 else past.rows
        late = (column < 0) | (past.seen[rows, column] < event)
        if past.bulk:
            late |= (kind & ASYNC == 0) & (past.fenced[rows, column] < event)
        return (writer > NOBODY) & (late | (kind & PENDING > 0))

    def check_read(
        self, index: int, place: tuple[np.ndarray, int], past: Past, what: object, way: tuple[str, bool]
    ) -> None:
        """Check a read. place: offsets of the accesses and their size. way: how, and whether of parts of words."""
        shadow, words, how = self.shadows[index], words_of(*place), way[0]
        if not count_nonzero(shadow.writer[words]):
            return
        kind = shadow.kind[words]
        apart = (kind & PARTLY > 0) & way[1]
        late = (shadow.writer[words] != NOBODY if how == CONSTANT else self.unordered(shadow, words, past)) & ~apart
        if how == STRONG:
            late &= kind & ATOMIC == 0
        if count_nonzero(late):
            why = "in this launch" if how == CONSTANT else "without synchronisation in between"
            why = "which no fence.proxy.async has made visible" if past.bulk else why
            rows = np.broadcast_to(past.rows[:, None] if words.ndim == 2 else past.rows, words.shape)
            at = what if past.bulk else located(what, rows, late)  # the rows of an engine are no warps
            raise Fault(f"{at}: reads {self.name(index, words, late)}, {why}{self.other(index, words, late)}")

    def write(self, index: int, offset: np.ndarray, by: np.ndarray, change: Change, how: WriteInfo) -> np.ndarray:
        """Check and record a write; return the words. by: warps."""
        what, kind = how
        before, after, written = change
        size = written.dtype.itemsize
        shadow = self.shadow(index)
        words = words_of(offset, size)
        late = np.zeros(words.shape, bool)
        if count_nonzero(shadow.writer[words]):
            late = self.unordered(shadow, words, self.past(by)) & (shadow.kind[words] & ATOMIC == 0)
        if count_nonzero(late):
            apart = (shadow.kind[words] & PARTLY > 0) & (size < 4)
            wrong = late & ~apart & differ(before, written, words)
            if count_nonzero(wrong):
                raise self.race(index, words, by, wrong, what)
        me = np.broadcast_to((by[:, None] if words.ndim == 2 else by) + self.base + 1, words.shape)
        shadow.writer[words] = np.where(late, SEVERAL, me)
        shadow.event[words] = self.order.now(by)[:, None] if words.ndim == 2 else self.order.now(by)
        shadow.kind[words], shadow.line[words] = kind, line_of(what)
        clash = (shadow.writer[words] != me) & ~late
        if count_nonzero(clash) and not kind & ATOMIC:
            if size >= 4 and (clash & differ(after, written, words)).any():
                raise self.race(index, words, by, clash, what)
            shadow.writer[words[clash]] = SEVERAL
        return words

    def shadow(self, index: int) -> Shadow:
        if index not in self.shadows:
            count = -(-self.memory.buffers[index].size // 4)
            self.shadows[index] = Shadow(
                np.zeros(count, np.int32),
                np.zeros(count, np.int32),
                np.zeros(count, np.uint8),
                np.zeros(count, np.int32),
            )
        return self.shadows[index]

    def race(self, index: int, words: np.ndarray, by: np.ndarray, bad: np.ndarray, what: Any) -> Fault:
        """Return a fault: warps `by` overwrite the first bad word, and the other instruction of the race."""
        at = located(what, np.broadcast_to(by[:, None] if words.ndim == 2 else by, words.shape), bad)
        names, other = self.name(index, words, bad), self.other(index, words, bad)
        return Fault(f"{at}: overwrites {names}, without synchronisation in between{other}")

    def other(self, index: int, words: np.ndarray, bad: np.ndarray) -> str:
        """Return a line for a message: the last write of the first bad word."""
        line = int(self.shadows[index].line[int(words[bad].flat[0])])
        who = self.who(index, words, bad)
        return f"\n  the last write: {self.names[-1][1].instruction_at(line, who)}" if line else ""

    def who(self, index: int, words: np.ndarray, bad: np.ndarray) -> str:
        """Return the name of the warp that wrote the first bad word."""
        writer = int(self.shadows[index].writer[int(words[bad].flat[0])]) - 1
        if writer < 0:
            return "several warps"
        base, names = next(one for one in reversed(self.names) if one[0] <= writer)
        return names.warp(writer - base)

    def name(self, index: int, words: np.ndarray, bad: np.ndarray) -> str:
        word, who = int(words[bad].flat[0]), self.who(index, words, bad)
        return f"offset {4 * word} of {self.memory.names[index]}, written by {who}"


def located(what: Any, by: np.ndarray, bad: np.ndarray) -> str:
    """Return the location of an access, for the warp of the first bad word. what: machine.SourceLocation; by: the warp
    of each word."""
    return what.of([int(by[bad].flat[0])])


def moved(clock: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return a clock with its components `old` renumbered to `new`; other components are dropped."""
    out = np.zeros(int(new.max(initial=-1)) + 1, np.int32)
    here = old < clock.size
    out[new[here]] = clock[old[here]]
    return out


def rows_of(past: Past, which: Any) -> Past:
    return past if len(past.rows) == 1 else Past(past.seen, past.fenced, past.rows[which], past.bulk)


def words_of(offset: np.ndarray, size: int) -> np.ndarray:
    """Return the words that accesses of `size` bytes touch: (n,) or (n, size / 4)."""
    first = offset >> 2
    return first if size <= 4 else first[:, None] + np.arange(size // 4)


def differ(a: np.ndarray, b: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return a mask of the elements that differ, in the shape of their words."""
    as_bytes = [np.ascontiguousarray(x).view(np.uint8).reshape(*words.shape, -1) for x in (a, b)]
    return (as_bytes[0] != as_bytes[1]).any(-1)
