"""KV blocks from pages of any size: row by row with cp.async, 16 bytes per lane, or 8 of NVFP4 rows that end there.

With slots, entries of the page table are no pages but rows of the cache, counted from page to page. A row that the
cache does not have is no key, wherever it is in the list (`present`).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import layout, pipeline, warp
from ...device.divisor import Quotient, quotient_params
from ...device.gather import NO_ROW, copy_rows
from .. import geometry
from . import pages
from .pages import KVBlock, LoadTarget

PARTIAL_TAIL = False  # rows past kv_len are always zeros


@dataclass(frozen=True)
class GatherOperand:
    """K or V in global memory, and the layout of its stages in shared memory."""

    gmem: tuple[cute.Tensor, ...]  # (pages, Hkv, P, D) each; their columns lie side by side in a stage
    layout: cute.ComposedLayout  # (rows, cols, stages) in shared memory
    page_size: Any  # `quotient_params` of the rows of a page
    extra: tuple[cute.Tensor, ...] = ()  # as gmem, of the second cache
    extra_page_size: Any = None


def with_extra(op: GatherOperand, parts):
    """Return the operand with the tensors of a second cache."""
    return replace(op, extra=parts, extra_page_size=quotient_params(cutlass.max(parts[0].shape[2], 1)))


def operand(spec, parts, shape, stages):
    """Make the operand of tensors (pages, Hkv, P, D) with columns that lie side by side in a stage. shape: (n, columns)
    of a stage."""
    x = parts[0]
    page_size = quotient_params(cutlass.max(x.shape[2], 1))
    return GatherOperand(parts, layout.smem_layout(shape, stages, x.element_type), page_size)


class RowPageIds(NamedTuple):
    """Page ids, or slots, of the block that a load warp fills next. Lane c has those of rows c, c + 32, ... of the
    warp's share."""

    page: cute.Tensor
    page_size: Any  # as a divisor
    extra_page_size: Any = None  # likewise, of the second cache


def page_id_cache(spec, op):
    """Allocate the `RowPageIds` of an operand, of the rows that a load warp loads."""
    return page_ids_of(spec, op, (most_rows(spec) + 31) // 32)


def page_ids_of(spec, op, count):
    """Allocate `RowPageIds` of `count` rows a lane."""
    found = RowPageIds(cute.make_rmem_tensor(count, Int32), Quotient(op.gmem[0].shape[2], *op.page_size))
    if spec.kv.extra:
        found = found._replace(extra_page_size=Quotient(op.extra[0].shape[2], *op.extra_page_size))
    return found


def most_rows(spec):
    """Return the number of rows of a block that a load warp has; the last warp may have fewer."""
    return -(-spec.tile.n // spec.tile.load_warps // 8) * 8


def least_rows(spec):
    """Return the number of rows of a block that the last load warp has."""
    return spec.tile.n - (spec.tile.load_warps - 1) * most_rows(spec)


def share(spec, at: KVBlock):
    """Return the first row of a block that this load warp has, and how many it has."""
    first, count = at.loader * most_rows(spec), most_rows(spec)
    return first, count if spec.tile.n % count == 0 else cutlass.min(count, spec.tile.n - first)


@cute.jit
def prefetch_pages(spec: cutlass.Constexpr, page_ids: RowPageIds, sequence_pages: pages.SequencePages, at: KVBlock):
    """Look up the pages of a block, -1 past kv_len. The lookup completes while the warp copies the block before."""
    first, count = share(spec, at)
    for c in cutlass.range_constexpr(cute.size(page_ids.page)):
        inside = 32 * c + cute.arch.lane_idx()
        row = at.n_block * spec.tile.n + first + inside
        page_ids.page[c] = page_of_row(spec, page_ids, sequence_pages, at.kv_len, row if inside < count else Int32(-1))


@cute.jit
def look_up_rows(spec: cutlass.Constexpr, page_ids: RowPageIds, of: pages.SequencePages, kv_len: Int32, first: Int32):
    """Look up the pages of the rows of a sequence from `first` on, as many as `page_ids` has; -1 past kv_len."""
    for c in cutlass.range_constexpr(cute.size(page_ids.page)):
        row = first + 32 * c + cute.arch.lane_idx()
        page_ids.page[c] = page_of_row(spec, page_ids, of, kv_len, row)


@cute.jit
def page_of_row(spec: cutlass.Constexpr, page_ids: RowPageIds, of: pages.SequencePages, kv_len: Int32, row: Int32):
    """Return the page, or the slot, of a row of a sequence; -1 if it has none."""
    page = Int32(-1)
    if const_expr(spec.kv.extra):
        behind = row - geometry.extra_start(of.first_keys)
        if row >= 0 and row < of.first_keys:
            page = of.pages[row]
        elif behind >= 0 and row < kv_len:
            page = of.extra[behind]
    elif row >= 0 and row < kv_len:
        page = of.pages[row if const_expr(has_slots(spec)) else row // page_ids.page_size]
    return page


@cute.jit
def fill(
    spec: cutlass.Constexpr, into: LoadTarget, page_ids: RowPageIds, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Copy a KV block, rows [n_block n, (n_block + 1) n) of a KV head, into the item's stage, and look up the pages of
    the next block, n_block - 1. Called by each of the `tile.load_warps` warps, for its share of the rows.

    page_ids: from `prefetch_pages`. Rows past kv_len and rows without a page become zeros. Every lane arrives when its
    copies have completed.
    """
    op, rings = into.op, into.rings
    # use the page ids, then look up those of the next block
    starts = [cute.make_rmem_tensor(cute.size(page_ids.page), Int64) for _ in op.gmem]
    if const_expr(spec.kv.extra):
        others = page_ids._replace(page_size=page_ids.extra_page_size)
        if is_extra(spec, at.n_block, sequence_pages.first_keys):
            set_addresses(spec, starts, op.extra, others, at)
        else:
            set_addresses(spec, starts, op.gmem, page_ids, at)
    else:
        set_addresses(spec, starts, op.gmem, page_ids, at)
    prefetch_pages(spec, page_ids, sequence_pages, at._replace(n_block=at.next_n_block))
    # wait for free columns of the stage, and copy
    groups = const_expr(tuple(range(len(rings))))
    if const_expr(spec.tile.reverses_odd_blocks):
        if at.odd:
            copy_groups(spec, into, starts, at, groups[::-1])
        else:
            copy_groups(spec, into, starts, at, groups)
    else:
        copy_groups(spec, into, starts, at, groups)


@cute.jit
def copy_groups(
    spec: cutlass.Constexpr, into: LoadTarget, starts: cutlass.Constexpr, at: KVBlock, order: cutlass.Constexpr
):
    """Copy this warp's rows of a block, one group of columns after the other. Wait until the stage has the group free,
    copy, and arrive when the copies have completed. starts: from `set_addresses`. order: the groups, by index."""
    op, smem, rings = into
    stored, groups = const_expr([x.shape[3] for x in op.gmem]), const_expr(pages.column_groups(spec))
    stage, (first, rows) = smem[None, None, pipeline.stage(rings[0], at.item)], share(spec, at)
    most, least = const_expr(most_rows(spec)), const_expr(least_rows(spec))
    for n in cutlass.range_constexpr(len(order)):
        i = const_expr(order[n])
        pipeline.producer_acquire(rings[i], at.item)
        copy_rows(stored, least, starts, stage, first, boxes=groups[i])
        if const_expr(least < most):
            if rows > least:
                copy_rows(stored, most, starts, stage, first, boxes=groups[i], begin=least)
        cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(rings[i], at.item))


@cute.jit
def set_addresses(spec: cutlass.Constexpr, starts: cutlass.Constexpr, parts: Any, page_ids: RowPageIds, at: KVBlock):
    """Set the addresses of the rows of a block in each of the tensors `parts`, negative for rows without a page."""
    first, _ = share(spec, at)
    for part in cutlass.range_constexpr(len(parts)):
        x = parts[part]
        head = x.iterator.toint() + Int64(at.head) * x.stride[1] * (x.element_type.width // 8)
        if const_expr(spec.tile.o_tiles > 1):
            head += at.o_tile * const_expr(spec.padded_vo * spec.kv.bits // 8)
        for c in cutlass.range_constexpr(cute.size(page_ids.page)):
            row = at.n_block * spec.tile.n + first + 32 * c + cute.arch.lane_idx()
            page, row = place_of(spec, page_ids, c, row)
            exists = page >= 0 and page < x.shape[0]
            element = Int64(page) * x.stride[0] + Int64(row) * x.stride[2]
            starts[part][c] = head + element * (x.element_type.width // 8) if exists else Int64(NO_ROW)


def has_slots(spec):
    """Return whether entries of the page table are slots."""
    return spec.kv.source == "slots"


@cute.jit
def place_of(spec: cutlass.Constexpr, page_ids: RowPageIds, c: cutlass.Constexpr, row: Int32):
    """Return the page, negative if there is none, and the row in it of a row of the sequence. c: its register."""
    page = page_ids.page[c]
    if const_expr(not has_slots(spec)):
        return page, row % page_ids.page_size
    slot = cutlass.max(page, 0)
    in_cache = slot // page_ids.page_size
    return warp.select(page < 0, page, in_cache), slot - in_cache * page_ids.page_size.value


def is_extra(spec, n_block, first_keys):
    """Return whether the keys of a block are in the second cache. first_keys: those in the first one."""
    return n_block * spec.tile.n >= geometry.extra_start(first_keys)


@cute.jit
def present(spec: cutlass.Constexpr, op: GatherOperand, page_ids: RowPageIds, n_block: Int32, first_keys):
    """Return which keys of a block exist, as bits of words of 32 keys. page_ids: from `look_up_rows`. first_keys: as
    in `is_extra`. Called by all lanes of a warp."""
    words = cute.make_rmem_tensor(cute.size(page_ids.page), Uint32)
    # rows of the cache, of which slots are fewer: products of their numbers may not fit
    rows = Int64(op.gmem[0].shape[0]) * op.gmem[0].shape[2]
    if const_expr(spec.kv.extra):
        if is_extra(spec, n_block, first_keys):
            rows = Int64(op.extra[0].shape[0]) * op.extra[0].shape[2]
    for c in cutlass.range_constexpr(cute.size(page_ids.page)):
        slot = page_ids.page[c]
        words[c] = Uint32(cute.arch.vote_ballot_sync(slot >= 0 and Int64(slot) < rows))
    return words


@cute.jit
def look_up_tokens(tokens: cute.Tensor, of: pages.SequencePages, kv_len: Int32, first: Int32):
    """Look up which tokens of a sequence have chosen its keys from `first` on: bits of `tokens`, of key 32 i + lane of
    the block in element i; none past kv_len."""
    for i in cutlass.range_constexpr(cute.size(tokens)):
        key = first + 32 * i + cute.arch.lane_idx()
        tokens[i] = Uint32(0)
        if key >= 0 and key < kv_len:
            tokens[i] = of.tokens[key].to(Uint32)


def chosen_by(tokens: cute.Tensor, token: Int32):
    """Return which keys of a block a token of its sequence has chosen, as bits of words of 32 keys. tokens: from
    `look_up_tokens`. token: the same in all lanes of the warp, which all call this."""
    votes = [(tokens[i] >> Uint32(token)) & Uint32(1) != 0 for i in range(cute.size(tokens))]
    return [Uint32(cute.arch.vote_ballot_sync(vote)) for vote in votes]


def fence_before_mma():
    """Make a filled stage visible to an MMA, which reads through the async proxy; cp.async writes through the generic
    one."""
    cute.arch.fence_proxy("async.shared", space="cta")
