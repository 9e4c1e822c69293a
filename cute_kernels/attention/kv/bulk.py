"""KV blocks of rows of latent attention, as they are stored: one bulk copy for each row, from any page or slot.

A row that does not exist becomes zeros. The factors of a planar record are copied by cp.async, and lie in shared memory
right behind their row.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import mma, pipeline
from ...device.divisor import quotient_params
from ...device.gather import NO_ROW, PIECES
from ...device.warp import select
from ...records import RECORDS
from . import gather, pages
from .gather import GatherOperand, RowPageIds
from .gather import page_id_cache as page_id_cache
from .gather import prefetch_pages as prefetch_pages
from .pages import KVBlock, LoadTarget
from .record_rows import part_sizes, place_of, sources

LANES, AT_ONCE = 32, 8  # of a warp; rows that it copies at a time
PIECE = 16  # bytes


def operand(spec, parts, shape, stages):
    """Make the operand of tensors (pages, Hkv, P, bytes). shape: (n, bytes from a row to the next) of a stage."""
    n, pitch = shape
    layout = cute.make_layout((n, pitch, stages), stride=(pitch, 1, n * pitch))
    return GatherOperand(parts, layout, quotient_params(cutlass.max(parts[0].shape[2], 1)))


class BulkRows(NamedTuple):
    """Where a load warp copies its rows of a block to. count: how many. every: all of them exist. stage: the address of
    the first one. pitch: bytes from a row to the next. barrier: the address of the mbarrier."""

    count: Any
    every: Any
    stage: Int32
    pitch: Any
    barrier: Int32


def arrivals(spec):
    """Return how often a load warp arrives at the full barrier of a stage: once for its rows and, if a cache is planar,
    once per lane, which copies the factors of a row."""
    return 1 + LANES * copies_factors(spec)


def copies_factors(spec):
    """Return whether a cache is planar."""
    return any(RECORDS[record].planar for record in (spec.kv.record, spec.kv.extra_record) if record)


@cute.jit
def fill(
    spec: cutlass.Constexpr, into: LoadTarget, page_ids: RowPageIds, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Copy the rows of a block into the item's stage, and look up those of the next block. Called by each of the
    `tile.load_warps` warps, for its share of the rows."""
    each = sources(spec, into.op, page_ids)
    if const_expr(spec.kv.extra):
        if gather.is_extra(spec, at.n_block, sequence_pages.first_keys):
            fill_from(spec, each[1], into, page_ids, sequence_pages, at)
        else:
            fill_from(spec, each[0], into, page_ids, sequence_pages, at)
    else:
        fill_from(spec, each[0], into, page_ids, sequence_pages, at)


@cute.jit
def fill_from(
    spec: cutlass.Constexpr, source: cutlass.Constexpr, into: LoadTarget, page_ids: RowPageIds,
    sequence_pages: pages.SequencePages, at: KVBlock,
):  # fmt: skip
    """Do the work of `fill` for a block of one cache."""
    assert gather.most_rows(spec) <= LANES
    (parts, form, _), ring, pitch = source, into.ring, const_expr(cute.size(into.smem, mode=[1]))
    first, count = gather.share(spec, at)
    place = place_of(spec, source, page_ids, 0, at.n_block * spec.tile.n + first + cute.arch.lane_idx())
    prefetch_pages(spec, page_ids, sequence_pages, at._replace(n_block=at.next_n_block))
    starts = [select(place.exists, start, Int64(NO_ROW)) for start in place.starts]
    rows = cute.arch.popc(cute.arch.vote_ballot_sync(place.exists))
    sizes, most = const_expr(part_sizes(source)), const_expr(gather.most_rows(spec))
    pipeline.producer_acquire(ring, at.item)
    cute.arch.fence_proxy("async.shared", space="cta")  # behind zeros that lie where rows are copied to
    stage = into.smem.iterator.toint() + (pipeline.stage(ring, at.item) * spec.tile.n + first) * pitch
    barrier = pipeline.full_barrier(ring, at.item)
    to = BulkRows(count, rows == count, stage, pitch, barrier.toint())
    if const_expr(len(sizes) == 1):
        copy_rows(most, sizes, starts, to)
    elif are_joined(parts):
        copy_rows(most, [sum(sizes)], starts[:1], to)
    else:
        copy_rows(most, sizes, starts, to)
    mine = stage + cute.arch.lane_idx() * pitch
    if not place.exists and cute.arch.lane_idx() < count:
        for byte in cutlass.range(0, const_expr(sum(sizes) + form.factor_row), PIECE, unroll=1):
            mma.store(mine + byte, [Uint32(0)] * 4)
    if const_expr(copies_factors(spec)):
        if const_expr(form.planar):
            if place.exists:
                copy_factors(mine + form.row, place.factors, form.factor_row)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
    cute.arch.sync_warp()  # the zeros are written before one lane arrives
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * const_expr(sum(sizes)))


def copy_factors(target, source, size):
    """Start a copy of `size` bytes, 8 or 16, to shared memory."""
    text = f"cp.async.{PIECES[size]}.shared.global [{{$r0}}], [{{$r1}}], {size};"
    cute.arch.inline_ptx(text, read_only_args=[target, source])


def are_joined(parts):
    """Return whether the second of two tensors has the columns behind those of the first one in each row of memory."""
    x, y = parts
    apart = y.iterator.toint() - x.iterator.toint() == x.shape[3] * (x.element_type.width // 8)
    return apart & (x.stride[0] == y.stride[0]) & (x.stride[2] == y.stride[2])


@cute.jit
def copy_rows(most: cutlass.Constexpr, sizes: cutlass.Constexpr, starts: cutlass.Constexpr, to: BulkRows):
    """Copy rows of which a lane has the addresses of all parts, negative if there is no row. One lane starts all
    copies: the hardware takes their addresses from uniform registers, so that lanes would take turns. most: rows of a
    warp. sizes: bytes of the parts."""
    if to.every and const_expr(len(sizes) == 1):
        # without branches, the way of an address to a uniform register is hidden behind the copies before it
        for row in cutlass.range_constexpr(0, most, AT_ONCE):
            if row < to.count:
                some = [cute.arch.shuffle_sync(starts[0], row + i) for i in range(AT_ONCE)]
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(AT_ONCE):
                        copy_row(to.stage + (row + i) * to.pitch, some[i], sizes[0], to.barrier)
    else:
        for row in cutlass.range(0, to.count, AT_ONCE, unroll=1):
            for part in cutlass.range_constexpr(len(sizes)):
                some = [cute.arch.shuffle_sync(starts[part], row + i) for i in range(AT_ONCE)]
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(AT_ONCE):
                        if some[i] >= 0:
                            target = to.stage + (row + i) * to.pitch + const_expr(sum(sizes[:part]))
                            copy_row(target, some[i], sizes[part], to.barrier)


def copy_row(target, source, size, barrier):
    """Start a bulk copy of `size` bytes, a multiple of 16, to shared memory; it completes at an mbarrier."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
    cute.arch.inline_ptx(f"{text}{size}, [{{$r2}}];", read_only_args=[target, source, barrier])


def fence_before_mma():
    """Do nothing: the mbarrier makes the copies visible."""
