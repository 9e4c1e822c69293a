"""Tensor cores of sm_100a: forms of tcgen05, and the engine that carries out their asynchronous operations.

tcgen05.mma, cp and commit of a CTA (of a CTA pair with cta_group::2) complete in the order of issue; the mode of
the run decides when. A thread that reads their results, or overwrites their operands, must have waited for the
mbarrier of a later tcgen05.commit of the same issuing thread.

tcgen05.ld completes when it is issued: compiled kernels use its registers without tcgen05.wait::ld. tcgen05.st is
visible to others after tcgen05.wait::st. tcgen05.fence has no effect: compiled kernels leave it out, and barriers
alone order accesses to tensor memory here."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .faults import Fault, NotModelled
from .forms import WARP, PtxOp, effect, form, refuse
from .machine import WINDOW, MachineState, Threads
from .naming import place_of
from .order import VectorClock
from .parse import PtxInstruction, vector
from .tma import multicast_targets
from .tmem import CELL, LANES, SHAPES, Engine, Region, TensorMemory, TmemPool, TmemStore, fragment
from .umma import (
    UmmaInstruction,
    UmmaOperandTile,
    accumulate,
    decode_instruction,
    multiply,
    operand_shape,
    operand_tile,
    scale_factors,
    scaled,
    values,
)

TCGEN05 = "TensorCore 5th Generation Family Instructions"
GROUP = r"\.cta_group::([12])"
U32, U64 = np.uint32, np.uint64


# ------------------------------------------------------------------------------------------------ state
def pool_of(t: Threads, x: PtxInstruction, thread: int, group: int = 0) -> TmemPool:
    """Return the tensor memory that a thread can reach. group: CTAs of the instruction; 0 for instructions without
    cta_group."""
    m = t.machine
    slot = thread // m.per_cta
    found: TmemPool | None = m.state.tensor.get(slot)
    if found is None and group:
        first = slot - slot % group
        if m.cluster_size % group:
            raise Fault(f"{t.say(x)}: a cluster of {m.cluster_size} CTAs has no CTA pairs")
        found = TmemPool(first, group, m.names, m.order)
        for one in range(first, first + group):
            m.state.tensor[one] = found
    if found is None:
        raise Fault(f"{t.say(x)}: no tensor memory is allocated")
    if group and found.group != group:
        raise Fault(f"{t.say(x)}: cta_group::{group} in a kernel that uses cta_group::{found.group}")
    return found


def each_warp(t: Threads, x: PtxInstruction) -> list[tuple[int, slice]]:
    """Return (warp, its threads here) of an instruction that whole warps execute (forms.form checks it)."""
    return [(warp, slice(32 * i, 32 * i + 32)) for i, warp in enumerate(t.warps.tolist())]


def uniform(t: Threads, x: PtxInstruction, operand: np.ndarray) -> int:
    if (operand != operand[0]).any():
        raise Fault(f"{t.say(x)}: an operand differs between the lanes of the warp")
    return int(operand[0])


def check_exit(m: MachineState) -> None:
    for pool in m.state.tensor.values():
        pool.check_exit()


# ------------------------------------------------------------------------------------------------ allocation
@form(rf"tcgen05\.alloc{GROUP}\.sync\.aligned(\.shared::cta)?\.b32", f"{TCGEN05}: tcgen05.alloc", level=WARP)
def allocate(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any, count: Any) -> None:
        m = t.machine
        for warp, part in each_warp(t, x):
            first = warp * 32
            pool = pool_of(t, x, first, int(f[1]))
            column = pool.allocate(first // m.per_cta, uniform(t, x, count[part]), t.say(x))
            at = uniform(t, x, address[part])
            flat = m.flat(t, np.full(t.count, at if f[2] else at - WINDOW), 4, x)[part][:1]
            m.shared.store(np.array([warp]), flat, np.full((1, 1), column, U32), t.say(x))

    return effect(run, (x.args[0], "address"), (x.args[1], "u32"))


@form(rf"tcgen05\.dealloc{GROUP}\.sync\.aligned\.b32", f"{TCGEN05}: tcgen05.dealloc", level=WARP)
def deallocate(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any, count: Any) -> None:
        for warp, part in each_warp(t, x):
            pool = pool_of(t, x, warp * 32, int(f[1]))
            at = uniform(t, x, address[part])
            if at >> 16:
                raise Fault(f"{t.say(x)}: address {at:#x} is not that of an allocation")
            pool.free(warp * 32 // t.machine.per_cta, warp, at, uniform(t, x, count[part]), t.say(x))

    return effect(run, (x.args[0], "u32"), (x.args[1], "u32"))


@form(rf"tcgen05\.relinquish_alloc_permit{GROUP}\.sync\.aligned", f"{TCGEN05}: tcgen05.alloc", level=WARP)
def relinquish(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        for warp, _ in each_warp(t, x):
            pool_of(t, x, warp * 32, int(f[1])).relinquished.add(warp * 32 // t.machine.per_cta)

    return effect(run)


# ------------------------------------------------------------------------------------------------ registers
@dataclass
class Access:
    """The location of a warp's tcgen05.ld or st."""

    tensor: TensorMemory
    lanes: np.ndarray
    columns: np.ndarray
    regions: list[Region]


def access(t: Threads, x: PtxInstruction, warp: int, address: int, layout: tuple[str, int, bool, int]) -> Access:
    """Locate an access. layout: arguments of tmem.fragment. A warp reaches the lanes 32 * (warp in the CTA % 4) and
    the 31 after it."""
    m = t.machine
    tensor = pool_of(t, x, warp * 32).tensors[warp * 32 // m.per_cta]
    base, column = address >> 16, address & 0xFFFF
    rows = SHAPES[layout[0]][0]
    quarter = warp % (m.per_cta // 32) % 4
    if "lanes" in m.call.beyond and base < 32:
        base += 32 * quarter
    if base // 32 != quarter:
        allowed = f"{m.names.warp(warp)} may access lanes {32 * quarter} to {32 * quarter + 31}"
        raise Fault(f"{t.say(x)}: tensor memory lane {base}, {allowed}")
    if base % rows:
        raise Fault(f"{t.say(x)}: tensor memory lane {base} is no multiple of {rows}")
    lanes, columns, touched = fragment(*layout)
    cells = slice(base // CELL, (base + rows) // CELL)
    regions = [(cells, slice(column + part.start, column + part.stop)) for part in touched]
    for region in regions:
        tensor.check_owned(region, t.say(x))
    return Access(tensor, lanes + base, columns + column, regions)


REGISTERS = r"\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(\d+)"


def words(
    t: Threads, x: PtxInstruction, address: Any, layout: tuple[str, int, bool, int], registers: int
) -> np.ndarray:
    """Return the words that a tcgen05.ld reads, [registers, threads]."""
    out = np.empty((registers, t.count), U32)
    t.machine.count("tcgen05.ld")
    for warp, part in each_warp(t, x):
        where = access(t, x, warp, uniform(t, x, address[part]), layout)
        where.tensor.load(warp, where.regions, t.say(x))
        got = where.tensor.words[where.lanes, where.columns]
        out[:, part] = got[:, 0] & U32(0xFFFF) | got[:, 1] << U32(16) if layout[2] else got
    return out


@form(rf"tcgen05\.ld{REGISTERS}(\.pack::16b)?\.b32", f"{TCGEN05}: tcgen05.ld", level=WARP)
def load(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    into = vector(x.args[0])
    layout = (f[1], int(f[2]), bool(f[3]), int(x.args[2], 0) if f[1] == "16x32bx2" else 0)
    check_registers(x, layout, len(into))

    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        out = words(t, x, address, layout, len(into))
        return tuple(out) if len(into) > 1 else out[0]

    return effect(run, (x.args[1], "address"), outs=tuple((register, "b32") for register in into))


@form(
    r"tcgen05\.ld\.red\.sync\.aligned\.32x32b\.x(\d+)(\.f32)?\.(min|max)(\.abs)?(\.NaN)?(?(2)|\.f32)",
    f"{TCGEN05}: tcgen05.ld",
    level=WARP,
)
def load_and_reduce(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Return each lane's words as fp32, and their minimum or maximum. ptxas accepts the type before the operation,
    too."""
    into, layout = vector(x.args[0]), ("32x32b", int(f[1]), False, 0)
    check_registers(x, layout, len(into))
    least = f[3] == "min"
    reduce = {(True, False): np.fmin, (False, False): np.fmax, (True, True): np.minimum, (False, True): np.maximum}

    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        out = words(t, x, address, layout, len(into))
        values = np.abs(out.view(np.float32)) if f[4] else out.view(np.float32)
        return (*out, reduce[least, bool(f[5])].reduce(values).view(U32))

    return effect(run, (x.args[2], "address"), outs=(*((register, "b32") for register in into), (x.args[1], "b32")))


@form(rf"tcgen05\.st{REGISTERS}(\.unpack::16b)?\.b32", f"{TCGEN05}: tcgen05.st", level=WARP)
def store(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    sources = vector(x.args[-1])
    layout = (f[1], int(f[2]), bool(f[3]), int(x.args[1], 0) if f[1] == "16x32bx2" else 0)
    check_registers(x, layout, len(sources))

    def run(t: Threads, x: PtxInstruction, address: Any, *registers: Any) -> None:
        table = np.stack(registers)
        t.machine.count("tcgen05.st")
        for warp, part in each_warp(t, x):
            where = access(t, x, warp, uniform(t, x, address[part]), layout)
            data = table[:, part]
            if f[3]:
                data = np.stack([data & U32(0xFFFF), data >> U32(16)], 1)
            now = t.machine.settings.mode == "eager"
            if now:
                where.tensor.words[where.lanes, where.columns] = data
            open_ = TmemStore(where.lanes, where.columns, None if now else data.copy(), where.regions)
            where.tensor.store(warp, open_, t.say(x))

    return effect(run, (x.args[0], "address"), *[(register, "b32") for register in sources])


def check_registers(x: PtxInstruction, layout: tuple[str, int, bool, int], count: int) -> None:
    if layout[1] * SHAPES[layout[0]][1] != count:
        raise Fault(f"line {x.line}: {x.op} with {count} registers")


@form(r"tcgen05\.wait::(ld|st)\.sync\.aligned", f"{TCGEN05}: tcgen05.wait", level=WARP)
def wait(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        for warp, _ in each_warp(t, x) if f[1] == "st" else []:
            pool_of(t, x, warp * 32).tensors[warp * 32 // t.machine.per_cta].wait(warp)

    return effect(run)


@form(r"tcgen05\.fence::(before|after)_thread_sync", f"{TCGEN05}: tcgen05.fence")
def fence(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return effect(lambda t, x: None)


# ------------------------------------------------------------------------------------------------ async operations
@dataclass
class Operation:
    """The memory that a tcgen05.mma or cp touches. run: carries it out."""

    words: list[np.ndarray] = field(default_factory=list)  # of shared memory
    reads: list[tuple[TensorMemory, Region]] = field(default_factory=list)
    writes: list[tuple[TensorMemory, Region, bool]] = field(default_factory=list)  # and whether it reads them first
    run: Callable[[], None] = lambda: None


def issue(t: Threads, x: PtxInstruction, i: int, pool: TmemPool, operation: Operation) -> None:
    """Check the operation of thread i against the past of its warp, and queue it."""
    m, by, say = t.machine, int(t.warp[i]), t.say(x)
    engine = pool.engine(int(t.index[i]))
    mine = engine.component
    words, warps = np.concatenate(operation.words), np.array([by])
    try:
        m.shared.begin_read(warps, words, say)
    except Fault:
        m.shared.begin_read(warps, np.unique(words), say)  # names the first word
        raise
    for tensor, region in operation.reads:
        tensor.check_read(by, region, say, mine)
    for tensor, region, first in operation.writes:
        if first:
            tensor.check_read(by, region, say, mine)
        tensor.check_write(by, region, say, mine)
    engine.issued += 1
    event = engine.issued
    for tensor, region in operation.reads:
        tensor.reader[region], tensor.read_event[region], tensor.read_place[region] = mine, event, place_of(say, by)
    for tensor, region, _ in operation.writes:
        tensor.wrote(region, mine, event, place_of(say, by))

    def complete() -> None:
        operation.run()
        m.shared.end_read_by_engine(words, mine, event)
        engine.done = event

    m.post(lambda: str(say), complete, queue=f"tcgen05 {pool.first}")


@form(
    rf"tcgen05\.commit{GROUP}\.mbarrier::arrive::one(?:\.shared::cluster)?(\.multicast::cluster)?\.b64",
    f"{TCGEN05}: tcgen05.commit",
)
def commit(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    mask = [(x.args[1], "b16")] if f[2] else []

    def run(t: Threads, x: PtxInstruction, address: Any, *masks: Any) -> None:
        m = t.machine
        flat = m.flat(t, address, 8, x)
        for i in range(t.count):
            pool = pool_of(t, x, int(t.index[i]), int(f[1]))
            engine = pool.engine(int(t.index[i]))
            to = multicast_targets(m, t, i, int(flat[i]), int(flat[i]), int(masks[0][i]) if masks else None)
            arrive(t, x, i, engine, [where for where, _ in to], f"tcgen05 {pool.first}")

    return effect(run, (x.args[0], "address"), *mask)


def arrive(t: Threads, x: PtxInstruction, i: int, engine: Engine, targets: list[int], queue: str) -> None:
    """Queue an arrival. It releases what the thread has seen, and the completion of its operations so far."""
    m = t.machine
    barriers = [m.signalled(t, where, x) for where in targets]
    clock = VectorClock()
    m.order.release(t.warp[i : i + 1], clock)
    clock.event(engine.component, engine.issued)
    engine.committed = engine.issued
    m.count("tcgen05.commit")

    def complete() -> None:
        for barrier in barriers:
            barrier.arriving.take(clock)
            barrier.pending -= 1
            m.events += barrier.complete_phase()

    m.post(lambda: f"{t.say(x)}, mbarrier {', '.join(barrier.address for barrier in barriers)}", complete, queue)


# ------------------------------------------------------------------------------------------------ mma
COLLECTOR = r"(?:\.collector::[ab]\d?::\w+)*"


@form(rf"tcgen05\.mma{GROUP}\.kind::(f16|tf32|f8f6f4){COLLECTOR}", f"{TCGEN05}: tcgen05.mma")
def mma(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    rest = list(x.args[4:])
    lanes = vector(rest.pop(0)) if rest[0].startswith("{") else []
    shift = int(rest[1], 0) if len(rest) > 1 else 0

    def run(t: Threads, x: PtxInstruction, d: Any, a: Any, b: Any, bits: Any, keep: Any, *off: Any) -> None:
        if any(one.any() for one in off):
            raise refuse(x, "a disabled output lane")
        for i in range(t.count):
            one = decode_instruction(f[2], int(f[1]), int(bits[i]), None, t.say(x))
            place = UmmaOperands(int(d[i]), int(a[i]), int(b[i]), x.args[1].startswith("["))
            issue_mma(t, x, i, one, place, (bool(keep[i]), shift))

    return effect(run, *operands(x), (rest[0], "pred"), *[(name, "b32") for name in lanes])


@form(
    rf"tcgen05\.mma{GROUP}\.kind::(mxf8f6f4|mxf4|mxf4nvf4)\.block_scale(?:\.(scale_vec::[124]X|block16|block32))?{COLLECTOR}",
    f"{TCGEN05}: tcgen05.mma",
)
def mma_scaled(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, d: Any, a: Any, b: Any, bits: Any, keep: Any, *scales: Any) -> None:
        for i in range(t.count):
            one = decode_instruction(f[2], int(f[1]), int(bits[i]), f[3] or "", t.say(x))
            factors_at = tuple(int(scale[i]) & 0xFFFF for scale in scales)
            place = UmmaOperands(int(d[i]), int(a[i]), int(b[i]), x.args[1].startswith("["), factors_at)
            issue_mma(t, x, i, one, place, (bool(keep[i]), 0))

    return effect(run, *operands(x), (x.args[6], "pred"), (x.args[4], "address"), (x.args[5], "address"))


def operands(x: PtxInstruction) -> list[tuple[str, str]]:
    """Return the operands D, A, B, instruction descriptor."""
    a = (x.args[1], "address" if x.args[1].startswith("[") else "b64")
    return [(x.args[0], "address"), a, (x.args[2], "b64"), (x.args[3], "b32")]


@dataclass
class UmmaOperands:
    """The operands of an mma: addresses in tensor memory, or shared memory descriptors. scales: columns."""

    d: int
    a: int
    b: int
    a_in_tensor: bool
    scales: tuple[int, ...] = ()


def memory(m: MachineState, slot: int) -> tuple[int, int]:
    """Return (start of the slot's shared memory in shared.bytes, its user bytes)."""
    return slot * m.shared.stride, m.shared.size


def lane_base(one: UmmaInstruction, address: int, say: object) -> int:
    base = address >> 16
    if base not in (0, one.below):
        raise Fault(f"{say}: tensor memory lane {base}, M = {one.m} takes {'0 or 16' if one.below else '0'}")
    return base


def issue_mma(
    t: Threads, x: PtxInstruction, i: int, one: UmmaInstruction, place: UmmaOperands, how: tuple[bool, int]
) -> None:
    """Issue an mma. how: (whether D is an input, binary logarithm of the divisor of D)."""
    m, say = t.machine, t.say(x)
    pool = pool_of(t, x, int(t.index[i]), one.group)
    base, column = lane_base(one, place.d, say), place.d & 0xFFFF
    operation = Operation()
    b_tiles, parts = [], []
    for slot, tensor in pool.tensors.items():
        b_tiles.append(operand_tile(memory(m, slot), place.b, operand_shape(one, 1, one.n // one.group), say))
        operation.words.append(b_tiles[-1].words)
        a: UmmaOperandTile | np.ndarray
        if place.a_in_tensor:
            a = tensor_operand(one, place, operation, tensor, say)
        else:
            a = operand_tile(memory(m, slot), place.a, operand_shape(one, 0, one.rows), say)
            operation.words.append(a.words)
        for which, start in enumerate(place.scales):
            rows = one.n if which else one.rows
            width = -(-rows // (64 if which and one.split else 32))
            operation.reads.append((tensor, (slice(0, LANES // CELL), slice(start, start + width))))
        operation.writes.append((tensor, one.region(base, column, one.columns), how[0]))
        parts.append((tensor, a))
    m.count(f"tcgen05.mma {one.kind}")

    def run() -> None:
        b = np.concatenate([values(part.raw(m.shared.bytes), one.formats[1], one.packing) for part in b_tiles])
        cells = one.lanes(base)[:, None], np.arange(column, column + one.columns)
        for tensor, a in parts:
            if isinstance(a, UmmaOperandTile):
                raw = a.raw(m.shared.bytes)
            else:
                raw = tensor.words[one.lanes(base)[:, None], a].view(f"u{operand_shape(one, 0, 8)[2]}")
            left, right = values(raw, one.formats[0], one.packing), b
            if one.scales:
                left = scaled(left, scale_factors(tensor, place.scales[0], one, 0, say))
                right = scaled(right, scale_factors(tensor, place.scales[1], one, 1, say))
            tensor.words[cells] = accumulate(one, tensor.words[cells], multiply(one, left, right), *how)

    operation.run = run
    issue(t, x, i, pool, operation)


def tensor_operand(
    one: UmmaInstruction, place: UmmaOperands, operation: Operation, tensor: TensorMemory, say: object
) -> np.ndarray:
    """Return the columns of A in tensor memory: row r in the lane of row r of D, elements packed in 8 columns."""
    if one.packing == "padded" and one.formats[0].startswith(("e2", "e3")):
        raise NotModelled(f"{say}: {one.formats[0]} in tensor memory is not modelled")
    if one.majors[0] != "k":
        raise Fault(f"{say}: A in tensor memory cannot be transposed")
    column = place.a & 0xFFFF
    if place.a >> 16 != place.d >> 16:
        raise Fault(f"{say}: A begins at tensor memory lane {place.a >> 16}, D at lane {place.d >> 16}")
    operation.reads.append((tensor, one.region(lane_base(one, place.a, say), column, 8)))
    return np.arange(column, column + 8)


# ------------------------------------------------------------------------------------------------ copies
COPIES = {  # rows and bytes of the source, and the lanes that get its rows, one array per copy
    "128x256b": (128, 32, [np.arange(128)]),
    "128x128b": (128, 16, [np.arange(128)]),
    "32x128b.warpx4": (32, 16, [np.arange(32) + 32 * warp for warp in range(4)]),
    "64x128b.warpx2::02_13": (64, 16, [np.arange(64), np.arange(64) + 64]),
    "64x128b.warpx2::01_23": (64, 16, [np.arange(64) + np.arange(64) // 32 * 32 + 32 * half for half in range(2)]),
}


@form(
    rf"tcgen05\.cp{GROUP}\.(128x256b|128x128b|32x128b\.warpx4|64x128b\.warpx2::(?:02_13|01_23))",
    f"{TCGEN05}: tcgen05.cp",
)
def copy(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    rows, row_bytes, lanes = COPIES[f[2]]

    def run(t: Threads, x: PtxInstruction, address: Any, source: Any) -> None:
        m, say = t.machine, t.say(x)
        for i in range(t.count):
            pool = pool_of(t, x, int(t.index[i]), int(f[1]))
            column, parts, operation = int(address[i]) & 0xFFFF, [], Operation()
            if int(address[i]) >> 16:
                raise Fault(f"{say}: tensor memory lane {int(address[i]) >> 16}, must be 0")
            columns = slice(column, column + row_bytes // 4)
            for slot, tensor in pool.tensors.items():
                part = operand_tile(memory(m, slot), int(source[i]), (rows, row_bytes, 4, "k", 16), say)
                operation.words.append(part.words)
                operation.writes.append((tensor, (slice(0, LANES // CELL), columns), False))
                parts.append((tensor, part))
            m.count("tcgen05.cp")
            operation.run = partial(copy_lanes, m, parts, lanes, columns)
            issue(t, x, i, pool, operation)

    return effect(run, (x.args[0], "address"), (x.args[1], "b64"))


def copy_lanes(
    m: MachineState, parts: list[tuple[TensorMemory, UmmaOperandTile]], lanes: list[np.ndarray], columns: slice
) -> None:
    for tensor, part in parts:
        for where in lanes:
            tensor.words[where, columns] = part.raw(m.shared.bytes)
