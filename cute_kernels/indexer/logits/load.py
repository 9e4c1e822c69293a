"""Roles that bring work to shared memory: `queries` also finds the tiles, and `keys` the pages of keys.

Queries are copied by cp.async. So are keys, unless they lie as TMA wants them (`boxes`): from rows at any multiple of
4 bytes and from pages of any size. Keys that do not exist become zeros.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ... import abi
from ...device import layout, memory, pipeline
from ...device.divisor import Quotient
from ...device.gather import NO_ROW, copy_rows
from . import KEYS, Q_STAGES, STAGES, boxes, loaders, schedule
from .roles import WARPS, roles
from .schedule import Tile

LANES = 32
EACH = KEYS // LANES  # keys of a block that a lane looks up
QUERIES = 128  # that a warp copies at a time


class TileWork(NamedTuple):
    """Blocks [first_block, first_block + blocks) of a tile. The keys of its tokens end at `end`. No blocks: the CTA has
    done all of its share."""

    request: Int32
    first: Int32
    rows: Int32
    first_block: Int32
    blocks: Int32
    end: Int32


@dataclass(frozen=True)
class InputSmem:
    """Stages of keys and of tiles. k (KEYS, D, stages), k_scale (KEYS, stages). q (rows H, D, stages), weights (rows
    H, stages): those of a token in the order of `place_of_weight`. work (fields, stages): `TileWork`, complete when
    `work_pipe` is full; windows (rows, 2, stages): `schedule.Window` of its tokens. q_pipe: empty when both the work
    and the queries have been read."""

    k: cute.Tensor
    k_scale: cute.Tensor
    k_pipe: pipeline.Pipeline
    q: cute.Tensor
    weights: cute.Tensor
    work: cute.Tensor
    windows: cute.Tensor
    work_pipe: pipeline.Pipeline
    q_pipe: pipeline.Pipeline


def allocate(spec, smem):
    """Allocate `InputSmem` and initialise its pipelines."""
    columns, kind, stages = spec.rows * spec.heads, abi.DTYPES[spec.keys], STAGES[spec.keys]
    keys, queries = (
        layout.smem_layout((n, spec.dim), count, kind) for n, count in ((KEYS, stages), (columns, Q_STAGES))
    )
    k, q = (smem.allocate_tensor(kind, x.outer, 1024, x.inner) for x in (keys, queries))
    k_scale, weights = (
        smem.allocate_tensor(Float32, cute.make_layout(shape), 128) for shape in ((KEYS, stages), (columns, Q_STAGES))
    )
    work, windows = (
        smem.allocate_tensor(Int32, cute.make_layout((*shape, Q_STAGES)), 16)
        for shape in ((len(TileWork._fields),), (spec.rows, 2))
    )
    readers = roles(spec).warps("keys", "mma")
    return InputSmem(
        k, k_scale, pipeline.make(smem, stages, LANES, WARPS), q, weights, work, windows,
        pipeline.make(smem, Q_STAGES, 1, 1), pipeline.make(smem, Q_STAGES, 32, readers),
    )  # fmt: skip


def read_work(s: InputSmem, item) -> TileWork:
    """Wait for the work with a number, and return it."""
    pipeline.consumer_wait(s.work_pipe, item)
    stage = pipeline.stage(s.work_pipe, item)
    return TileWork(*(cute.arch.make_warp_uniform(s.work[i, stage]) for i in range(len(TileWork._fields))))


def place_of_weight(heads, head):
    """Return where the weight of a head lies among those of its token: the columns that a lane of a quad has in an
    accumulator are neighbours."""
    return head % 8 // 2 * (heads // 4) + head // 8 * 2 + head % 2


@cute.jit
def copy_word(target: Int32, source: Int64, exists):
    """Copy 4 bytes to an address in shared memory, or write zeros, by cp.async."""
    text = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, Int32(4) if exists else Int32(0)])


# The queries role: one iteration per tile.
@cute.jit
def load_queries(spec: cutlass.Constexpr, a, s: InputSmem, share: schedule.BlockShare):
    """Publish the tiles of the CTA's share with their queries and weights. Called by one warp."""
    number, skip, left = share
    item, lane = Int32(0), cute.arch.lane_idx()
    while left > 0:
        tile = schedule.tile_at(spec, a, number)
        seen = schedule.window(a, tile, lane)
        begin = cute.arch.warp_redux_sync(seen.begin if seen.begin < seen.end else Int32(0x7FFFFFFF), "min")
        end = cute.arch.warp_redux_sync(seen.end, "max")
        if begin < end:
            first_block = begin // KEYS + skip
            blocks = cutlass.min((end - 1) // KEYS + 1 - first_block, left)
            pipeline.producer_acquire(s.q_pipe, item)
            publish(s, item, TileWork(tile.request, tile.first, tile.rows, first_block, blocks, end), seen)
            copy_queries(spec, a, s, tile, pipeline.stage(s.q_pipe, item))
            cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(s.q_pipe, item))
            left -= blocks
            item += 1
        skip = Int32(0)
        number += 1
    pipeline.producer_acquire(s.q_pipe, item)
    publish(s, item, TileWork(*[Int32(0)] * len(TileWork._fields)), schedule.Window(Int32(0), Int32(0)))


@cute.jit
def publish(s: InputSmem, item: Int32, work: TileWork, seen: schedule.Window):
    """Write the record of a tile. seen: the keys of the token with the lane's number."""
    stage, lane = pipeline.stage(s.work_pipe, item), cute.arch.lane_idx()
    if lane < cute.size(s.windows, mode=[0]):
        s.windows[lane, 0, stage], s.windows[lane, 1, stage] = seen
    if lane == 0:
        for i in cutlass.range_constexpr(len(TileWork._fields)):
            s.work[i, stage] = work[i]
    cute.arch.sync_warp()
    pipeline.producer_commit(s.work_pipe, item)


@cute.jit
def copy_queries(spec: cutlass.Constexpr, a, s: InputSmem, tile: Tile, stage: Int32):
    """Copy the queries of a tile, (token, head) pairs, and their weights. Pairs that do not exist become zeros."""
    columns = const_expr(spec.rows * spec.heads)
    for first in cutlass.range_constexpr(0, columns, QUERIES):
        copy_some_queries(spec, a, s, tile, stage, first, min(QUERIES, columns - first))


@cute.jit
def copy_some_queries(
    spec: cutlass.Constexpr, a, s: InputSmem, tile: Tile, stage: Int32, first: cutlass.Constexpr,
    count: cutlass.Constexpr,
):  # fmt: skip
    """Copy `count` queries, pair `first` and the next ones, and their weights."""
    lane, rows = cute.arch.lane_idx(), cute.make_rmem_tensor(const_expr((count + 31) // 32), Int64)
    weights = s.weights.iterator.toint() + stage * const_expr(4 * spec.rows * spec.heads)
    for i in cutlass.range_constexpr(cute.size(rows)):
        column = first + 32 * i + lane
        row = column // spec.heads
        head = column - row * spec.heads
        exists = column < first + count and row < tile.rows and head < a.q.shape[1]
        token = tile.first + (row if exists else Int32(0))
        head_or_0 = head if exists else Int32(0)
        rows[i] = memory.row_of(a.q, token, head_or_0) if exists else Int64(NO_ROW)
        if column < first + count:
            source = memory.row_of(a.weights, token) + 4 * head_or_0
            copy_word(weights + 4 * (row * spec.heads + place_of_weight(spec.heads, head)), source, exists)
    copy_rows([spec.dim], count, [rows], s.q[None, None, stage], Int32(first))


class KeyPlaces(NamedTuple):
    """Where a lane's keys of a block lie, those number lane and lane + 32: their pages, -1 for a key that has none, and
    their rows in them."""

    page: Int32
    row: Int32
    second_page: Int32
    second_row: Int32


def find_keys(spec, plan, work: TileWork, block) -> KeyPlaces:
    """Look up this lane's keys of a block."""
    return KeyPlaces(*(x for c in range(EACH) for x in find_key(spec, plan, work, block * KEYS + LANES * c)))


@cute.jit
def find_key(spec: cutlass.Constexpr, plan, work: TileWork, first: Int32):
    """Return the page and the row of key `first` + lane."""
    a, key = plan.args, first + cute.arch.lane_idx()
    page, row = Int32(-1), Int32(0)
    if key < work.end:
        page = key
        if a.table.shape[0] > 0:
            size = Quotient(a.k.shape[1], *plan.page_size)
            column = key // size
            page, row = a.table[work.request, column], key - column * size.value
        if page >= a.k.shape[0]:
            page = Int32(-1)
    return page, row


# The keys role: one iteration per tile, an inner one per block; the warps take blocks in turn.
@cute.jit
def load_keys(spec: cutlass.Constexpr, plan, s: InputSmem, loader: Int32):
    """Load one of so many blocks of keys as there are warps of the role, with their scales. Called by one warp."""
    count = const_expr(loaders(spec))
    item, number = Int32(0), Int32(0)
    work = read_work(s, number)
    while work.blocks > 0:
        pipeline.consumer_release(s.q_pipe, number)
        first = (loader - item) & (count - 1)
        places = find_keys(spec, plan, work, work.first_block + first)
        for i in cutlass.range(first, work.blocks, count, unroll=1):
            pipeline.producer_acquire(s.k_pipe, item + i)
            if plan.args.boxes != 0:
                page, row = (cute.arch.make_warp_uniform(x) for x in places[:2])
                boxes.copy_block(spec, plan.args, plan.boxes, s, page, row, item + i)
            else:
                copy_keys(spec, plan.args, s, places, pipeline.stage(s.k_pipe, item + i))
                cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(s.k_pipe, item + i))
            places = find_keys(spec, plan, work, work.first_block + i + count)
        item += work.blocks
        number += 1
        work = read_work(s, number)


@cute.jit
def copy_keys(spec: cutlass.Constexpr, a, s: InputSmem, places: KeyPlaces, stage: Int32):
    """Copy a block of keys, and their scales, by cp.async."""
    starts, into = cute.make_rmem_tensor(EACH, Int64), s.k[None, None, stage]
    for c in cutlass.range_constexpr(EACH):
        found, row = places[2 * c : 2 * c + 2]
        exists, number = found >= 0, Int64(cutlass.max(found, 0))
        page = a.k.iterator.toint() + number * a.k.stride[0]
        scale = page + Int64(a.k.shape[1]) * spec.row_bytes + 4 * row
        if a.k_scale.shape[0] > 0:
            scale = a.k_scale.iterator.toint() + 4 * number * a.k_scale.stride[0]
        starts[c] = page + Int64(row) * spec.row_bytes if exists else Int64(NO_ROW)
        inside = stage * KEYS + LANES * c + cute.arch.lane_idx()
        copy_word(s.k_scale.iterator.toint() + 4 * inside, scale, exists)
    if a.wide_rows != 0:
        copy_rows([spec.dim], KEYS, [starts], into, Int32(0))
    else:
        copy_rows([spec.dim], KEYS, [starts], into, Int32(0), 4)
