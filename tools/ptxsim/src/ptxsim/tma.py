"""Bulk and tensor copies: forms of cp.async.bulk and st.async, and the engine that carries them out.

A load marks its destination as pending when it is issued, reads global memory when it completes, and then signals
the mbarrier with its bytes. A store marks its source as being read until the issuing thread waits for its bulk
group."""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .atomic import UPDATE, update_of
from .call import FORMATS, TensorMap, elements
from .convert import tf32 as to_tf32
from .exchange import ASYNC, ATOMIC, PENDING, STRONG
from .faults import Fault
from .forms import PtxOp, effect, form
from .layout import box, box_addresses, box_units, box_words
from .machine import PARAMS, MachineState, Threads
from .parse import PtxInstruction, vector

BULK = "Data Movement and Conversion Instructions: cp.async.bulk"
TENSOR = f"{BULK}.tensor"
HINTS = r"(?:\.L2::cache_hint)?"
U32, U64 = np.uint32, np.uint64
TYPES = {"f16": "u2", "bf16": "u2", "f32": "f4", "f64": "f8", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}
TYPES |= {"b16": "u2", "b32": "u4", "b64": "u8", "u16": "u2", "u8": "u1"}


@dataclass
class BulkStore:
    """A bulk operation that reads shared memory."""

    words: Any  # of shared memory, an array or a slice
    warp: int
    complete: Any  # returns the result of exchange.Exchange.store
    done: bool = False
    places: list[Any] = field(default_factory=list)  # parts of global memory that it wrote


@dataclass
class BulkGroups:
    """The bulk groups of a thread."""

    open: list[BulkStore] = field(default_factory=list)
    closed: list[list[BulkStore]] = field(default_factory=list)


def tensor_operand(text: str) -> tuple[str, list[str]]:
    """Parse [map, {c0, c1}] into (map, coordinates)."""
    found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", text)
    if not found:
        raise ValueError(f"{text}: want [map, {{coordinates}}]")
    return found[1], vector(found[2])


def tensor_map(t: Threads, x: PtxInstruction, address: int) -> TensorMap:
    found = t.machine.maps.get(address - PARAMS)
    if found is None:
        raise Fault(f"{t.say(x)}: no tensor map at address {address:#x}")
    return found


def check_box(t: Threads, x: PtxInstruction, tensor: TensorMap, at: list[int], shared: int) -> None:
    """Raise Fault on boxes that the hardware refuses; a misaligned inner coordinate is an illegal instruction on an
    H200."""
    if len(at) != len(tensor.dims):
        raise Fault(f"{t.say(x)}: {len(at)} coordinates for a tensor map of rank {len(tensor.dims)}")
    if at[0] * FORMATS[tensor.format] % 16:
        raise Fault(f"{t.say(x)}: inner coordinate {at[0]} is no multiple of 16 B of {tensor.format}")
    if shared % 128:
        raise Fault(f"{t.say(x)}: {t.machine.shared.name(shared)} is not aligned to 128 B")


# ------------------------------------------------------------------------------------------------ loads
@form(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(cta|cluster)\.global(?:\.tile)?(::gather4)?\.mbarrier::complete_tx::bytes"
    rf"(\.multicast::cluster)?{HINTS}(\.cta_group::[12])?{HINTS}",
    TENSOR,
)
def load_tensor(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    tensor, at = tensor_operand(x.args[1])
    mask = [(x.args[3], "u32")] if f[4] else []

    def run(t: Threads, x: PtxInstruction, target: Any, address: Any, barrier: Any, *rest: Any) -> None:
        m = t.machine
        to, signal = m.flat(t, target, 16, x), m.flat(t, barrier, 8, x)
        for i in range(t.count):
            described = tensor_map(t, x, int(address[i]))
            place = [int(c[i]) for c in rest[len(mask) :]]
            for start, coordinates in tiles(described, place, int(to[i]), bool(f[3])):
                check_box(t, x, described, coordinates, int(to[i]))
                data = TensorBox(described, coordinates, start)
                everyone = multicast_targets(m, t, i, data.to, int(signal[i]), int(rest[0][i]) if mask else None)
                for into, where in everyone if f[5] != ".cta_group::2" else pair_targets(m, everyone, int(signal[i])):
                    issue_load(t, x, i, data, into, where)

    ins = [(x.args[0], "address"), (tensor, "u64"), (x.args[2], "address"), *mask, *[(c, "s32") for c in at]]
    return effect(run, *ins)


def tiles(tensor: TensorMap, at: list[int], shared: int, four: bool) -> list[tuple[int, list[int]]]:
    """Return (shared address, coordinates) of each box; tile::gather4 and scatter4 name a column and four rows."""
    if not four:
        return [(shared, at)]
    pitch = tensor.swizzle or box(tensor)[3]
    return [(shared + j * pitch, [at[0], row]) for j, row in enumerate(at[1:])]


def multicast_targets(
    m: MachineState, t: Threads, i: int, to: int, signal: int, mask: int | None
) -> list[tuple[int, int]]:
    """Return (destination, mbarrier) in every CTA of a multicast mask; without a mask the named ones."""
    if mask is None:
        return [(to, signal)]
    first = int(m.first_slot[t.index[i]])
    inside, barrier = to % m.shared.stride, signal % m.shared.stride
    ranks = [rank for rank in range(m.cluster_size) if mask >> rank & 1]
    return [((first + rank) * m.shared.stride + inside, (first + rank) * m.shared.stride + barrier) for rank in ranks]


def pair_targets(m: MachineState, targets: list[tuple[int, int]], signal: int) -> list[tuple[int, int]]:
    """Redirect the mbarriers of cta_group::2: in each CTA pair to the CTA with the rank parity of the named CTA."""
    parity, stride = signal // m.shared.stride & 1, m.shared.stride
    return [(place, (where // stride & ~1 | parity) * stride + where % stride) for place, where in targets]


@dataclass
class TensorBox:
    """A box of a tensor map at coordinates `at`, and its address in shared memory."""

    tensor: TensorMap
    at: list[int]
    to: int


def issue_load(t: Threads, x: PtxInstruction, i: int, load: TensorBox, to: int, signal: int) -> None:
    m = t.machine
    _, linear, unit, size = box(load.tensor, True)
    barrier = m.signalled(t, signal, x)
    words = box_words(load.tensor, to)
    check_inside_cta(t, x, to, int(linear[-1]) + unit)
    m.shared.begin_write(int(t.warp[i]), words, t.say(x))
    m.count("tma load")
    say, past = t.say(x), m.memory.bulk_past(int(t.warp[i]))

    def complete() -> None:
        source, inside = box_addresses(load.tensor, load.at)
        values = blank(load.tensor, size).view(f"V{unit}")
        if inside.any():
            fine = FORMATS[load.tensor.format] < 4
            got = m.memory.load(past, source[inside], values.dtype, say, fine=fine)
            if load.tensor.format == "tf32":  # rounded on the way
                got = to_tf32("rn", False, False)(got.view(np.float32)).view(values.dtype)
            values[inside] = got
        elements(m.shared.bytes, values.dtype)[box_units(load.tensor, to, True)] = values
        complete_tx(m, barrier, words, size)

    m.post(lambda: f"{say} to {m.shared.name(to)}, mbarrier {barrier.address}", complete)


def blank(tensor: TensorMap, size: int) -> np.ndarray:
    """Return `size` bytes of elements outside the tensor."""
    if tensor.fill == "zero":
        return np.zeros(size, np.uint8)
    pattern = {2: np.uint16(0x7FF7), 4: np.uint32(0x7FF77FF7)}[int(FORMATS[tensor.format])]
    return np.full(size // pattern.itemsize, pattern).view(np.uint8)


def check_inside_cta(t: Threads, x: PtxInstruction, flat: int, size: int) -> None:
    shared = t.machine.shared
    if flat % shared.stride + size > 1024 + shared.size:
        raise Fault(f"{t.say(x)}: {size} B at {shared.name(flat)}, the CTA has {shared.size} B")


def complete_tx(m: MachineState, barrier: Any, words: Any, size: int) -> None:
    """Complete the bytes of a copy: `words`, an array or a slice, become readable by any thread that sees this phase of
    the mbarrier complete."""
    m.shared.end_write(words, barrier.component, barrier.phase + 1)
    barrier.tx -= size
    m.events += barrier.complete_phase()


@form(
    rf"cp\.async\.bulk\.shared::(cta|cluster)\.(global|shared::cta)\.mbarrier::complete_tx::bytes(\.multicast::cluster)?{HINTS}",
    BULK,
)
def load_bulk(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return copy_bulk(x, f[2] == "global", bool(f[3]), None)


@form(
    r"cp\.reduce\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes"
    r"\.(add|min|max|inc|dec|and|or|xor)\.([busf](?:32|64))",
    "Data Movement and Conversion Instructions: cp.reduce.async.bulk",
)
def reduce_bulk(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    update, dtype = UPDATE[f[1]], np.dtype(TYPES[f[2]])
    return copy_bulk(x, False, False, lambda old, new: update(old.view(dtype), new.view(dtype)).view(np.uint8))


def copy_bulk(x: PtxInstruction, from_global: bool, multicast: bool, update: Any) -> PtxOp:
    """Copy bytes into shared memory. update: function of the old and the new bytes; None if the new bytes replace
    the old."""
    mask = [(x.args[4], "u32")] if multicast else []

    def run(t: Threads, x: PtxInstruction, target: Any, source: Any, size: Any, barrier: Any, *masks: Any) -> None:
        m = t.machine
        to, signal = m.flat(t, target, 16, x), m.flat(t, barrier, 8, x)
        for i in range(t.count):
            check_size(t, x, int(size[i]))
            for place, where in multicast_targets(
                m, t, i, int(to[i]), int(signal[i]), int(masks[0][i]) if masks else None
            ):
                issue_bulk(t, x, i, BulkCopy(place, where, int(source[i]), int(size[i])), from_global, update)

    ins = [(x.args[0], "address"), (x.args[1], "address"), (x.args[2], "u32"), (x.args[3], "address"), *mask]
    return effect(run, *ins)


def check_size(t: Threads, x: PtxInstruction, size: int) -> None:
    if size % 16:
        raise Fault(f"{t.say(x)}: {size} B, must be a multiple of 16")


class BulkCopy(NamedTuple):
    """A copy of contiguous bytes. signal: the mbarrier that counts them."""

    to: int
    signal: int
    source: int
    size: int


def issue_bulk(t: Threads, x: PtxInstruction, i: int, copy: BulkCopy, from_global: bool, update: Any) -> None:
    m = t.machine
    to, signal, source, size = copy
    barrier, say, warp = m.signalled(t, signal, x), t.say(x), int(t.warp[i])
    words = slice(to >> 2, (to + size) >> 2)
    check_inside_cta(t, x, to, size)
    if update is None:  # several updates of one word may be pending
        m.shared.begin_write(warp, words, say)
    else:
        m.shared.expect_write(words)
    m.count("bulk load")
    if from_global:
        if source % 16:
            raise Fault(f"{say}: global address {source:#x} is not aligned to 16 B")
        origin = None
    else:
        origin = int(m.shared.flat(m.first_slot[t.index[i : i + 1]], np.array([source]), 16, say)[0])
        m.shared.begin_read(np.array([warp]), slice(origin >> 2, (origin + size) >> 2), say)

    past = m.memory.bulk_past(warp)

    def complete() -> None:
        if origin is None:
            data = m.memory.load(past, U64(source) + np.arange(0, size, 16, dtype=U64), "V16", say).view(np.uint8)
        else:
            data = m.shared.bytes[origin : origin + size].copy()
            from_words = slice(origin >> 2, (origin + size) >> 2)
            m.shared.end_read_by_engine(from_words, barrier.component, barrier.phase + 1)
        m.shared.bytes[to : to + size] = data if update is None else update(m.shared.bytes[to : to + size], data)
        complete_tx(m, barrier, words, size)

    m.post(lambda: f"{say} to {m.shared.name(to)}, mbarrier {barrier.address}", complete)


@form(
    r"st\.async(?:\.weak)?(?:\.cluster)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.(v2|v4))?\.([busf](?:32|64))",
    "Data Movement and Conversion Instructions: st.async",
)
def store_async(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype = np.dtype(TYPES[f[2]])

    def run(t: Threads, x: PtxInstruction, target: Any, barrier: Any, *values: Any) -> None:
        m = t.machine
        size = dtype.itemsize * len(values)
        to, signal = m.flat(t, target, size, x), m.flat(t, barrier, 8, x)
        for i in range(t.count):
            words = np.arange(to[i] >> 2, (to[i] + size) >> 2)
            object_ = m.signalled(t, int(signal[i]), x)
            m.shared.begin_write(int(t.warp[i]), words, t.say(x))
            m.count("st.async")
            data = np.array([value[i] for value in values], dtype).view(np.uint8)

            def complete(place: int = int(to[i]), data: Any = data, words: Any = words, object_: Any = object_) -> None:
                m.shared.bytes[place : place + size] = data
                complete_tx(m, object_, words, size)

            m.post(partial("{} to {}".format, t.say(x), m.shared.name(int(to[i]))), complete)

    return effect(run, (x.args[0], "address"), (x.args[2], "address"), *[(v, f[2]) for v in vector(x.args[1])])


# ------------------------------------------------------------------------------------------------ stores
@form(
    r"cp\.(reduce\.)?async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.(add|min|max|inc|dec|and|or|xor))?(?:\.tile)?(::scatter4)?"
    rf"\.bulk_group{HINTS}",
    TENSOR,
)
def store_tensor(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    tensor, at = tensor_operand(x.args[0])

    def run(t: Threads, x: PtxInstruction, source: Any, address: Any, *coordinates: Any) -> None:
        origin = t.machine.flat(t, source, 16, x)
        for i in range(t.count):
            described = tensor_map(t, x, int(address[i]))
            for start, place in tiles(described, [int(c[i]) for c in coordinates], int(origin[i]), bool(f[4])):
                check_box(t, x, described, place, int(origin[i]))
                if min(place) < 0:
                    raise Fault(f"{t.say(x)}: coordinates {place}: a negative one is an illegal instruction on an H200")
                store_box(t, x, i, TensorBox(described, place, start), f[3])

    return effect(run, (x.args[1], "address"), (tensor, "u64"), *[(c, "s32") for c in at])


def store_box(t: Threads, x: PtxInstruction, i: int, tile: TensorBox, reduction: str | None) -> None:
    """Store one box, which lies in shared memory at `tile.to`."""
    m, start, described = t.machine, tile.to, tile.tensor
    _, linear, unit, _ = box(described)
    where, inside = box_addresses(described, tile.at, store=True)
    check_inside_cta(t, x, start, int(linear[-1]) + unit)

    def complete() -> list[Any]:
        values = elements(m.shared.bytes, np.dtype(f"u{unit}"))[box_units(described, start, False)]
        return write_global(t, x, i, (where[inside], values[inside]), (reduction, described.format))

    issue_store(t, x, i, box_words(described, start), complete)


@form(
    rf"cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group{HINTS}(?:\.(add|min|max|inc|dec|and|or|xor))?(\.noftz)?(?:\.(\w+))?",
    BULK,
)
def store_bulk(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    kind = f[4] or "u8"

    def run(t: Threads, x: PtxInstruction, target: Any, source: Any, size: Any) -> None:
        m = t.machine
        origin = m.flat(t, source, 16, x)
        for i in range(t.count):
            check_size(t, x, int(size[i]))
            start, end, to = int(origin[i]), int(origin[i]) + int(size[i]), int(target[i])
            check_inside_cta(t, x, start, end - start)

            def complete(i: int = i, start: int = start, end: int = end, to: int = to) -> list[Any]:
                dtype = np.dtype(TYPES[kind])
                values = m.shared.bytes[start:end].view(f"u{dtype.itemsize}")
                where = U64(to) + np.arange(0, end - start, dtype.itemsize, dtype=U64)
                return write_global(t, x, i, (where, values), (f[2], kind))

            issue_store(t, x, i, slice(start >> 2, end >> 2), complete)

    return effect(run, (x.args[0], "address"), (x.args[1], "address"), (x.args[2], "u32"))


def write_global(
    t: Threads, x: PtxInstruction, i: int, what: tuple[np.ndarray, np.ndarray], how: tuple[str | None, str]
) -> list[Any]:
    """Store bits to global memory, or reduce them into it, for thread i; return the result of
    exchange.Exchange.store.

    what: (addresses, values); how: (reduction, element type)."""
    (address, values), (reduction, kind) = what, how
    m, say, warps = t.machine, t.say(x), t.warp[i : i + 1]
    if reduction is None:
        return m.memory.store(warps, address, values, say, ASYNC | PENDING)
    old = m.memory.load(m.memory.past(warps), address, values.dtype, say, STRONG)
    stored, update = update_of(reduction, kind, in_cache=True)
    dtype = np.dtype(TYPES[stored])
    new = update(old.view(dtype), values.view(dtype)).astype(dtype).view(values.dtype)
    return m.memory.store(warps, address, new, say, ASYNC | PENDING | ATOMIC)


def issue_store(t: Threads, x: PtxInstruction, i: int, words: Any, complete: Any) -> None:
    m, warp = t.machine, int(t.warp[i])
    m.shared.begin_read(np.array([warp]), words, t.say(x))
    m.count("tma store")
    store = BulkStore(words, warp, complete)
    m.state.bulk.setdefault(int(t.index[i]), BulkGroups()).open.append(store)
    m.post(lambda: str(t.say(x)), lambda: finish(store), queue="store")


def finish(store: BulkStore) -> None:
    if not store.done:
        store.done = True
        store.places = store.complete()


@form(r"cp\.async\.bulk\.commit_group", BULK)
def commit_bulk(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        for thread in t.index.tolist():
            groups = t.machine.state.bulk.get(thread)
            if groups:
                groups.closed.append(groups.open)
                groups.open = []

    return effect(run)


@form(r"cp\.async\.bulk\.wait_group(\.read)?", BULK)
def wait_bulk(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    keep = int(x.args[0], 0)

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        for thread in t.index.tolist():
            groups = m.state.bulk.get(thread)
            while groups and len(groups.closed) > keep:
                for store in groups.closed.pop(0):
                    finish(store)
                    m.shared.end_read(np.array([store.warp]), store.words)
                    if not f[1]:
                        m.memory.complete_stores(store.places, store.warp)

    return effect(run)


@form(r"cp\.async\.bulk\.prefetch\.tensor\..*", BULK)
def prefetch_tensor(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return effect(lambda t, x: None)


@form(rf"cp\.async\.bulk\.prefetch\.L2\.global{HINTS}", BULK)
def prefetch(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Check that the bytes exist: PTX does not say what a prefetch of others does."""

    def run(t: Threads, x: PtxInstruction, source: Any, size: Any) -> None:
        for i in range(t.count):
            check_size(t, x, int(size[i]))
            t.machine.memory.memory.locate(source[i] + np.arange(0, int(size[i]), 16, dtype=U64), 16, t.say(x))

    return effect(run, (x.args[0], "address"), (x.args[1], "u32"))
