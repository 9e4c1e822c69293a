"""KV blocks by TMA. A box is a page, a part of a page or, if ragged, some neighbouring rows."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr

from ...device import copy, layout, pipeline
from .. import pdl
from . import pages
from .pages import KVBlock, LoadTarget

BOXES = (8, 16, 32, 64)  # rows per TMA box; a load uses the largest that divides page and tile


class BoxPages(NamedTuple):
    """The boxes of a block, spread over the lanes of a warp: page, row in the page (None: always the first)."""

    page: cute.Tensor
    row: Any


PARTIAL_TAIL = True  # kv_len may end inside a box, so that a stage has rows past it


def boxes(n, cluster=1):
    """Return the box sizes, in rows, that can fill a tile of n rows, ascending. cluster: CTAs that load equal parts."""
    return tuple(b for b in BOXES if n % (b * cluster) == 0)


class PageIdCache(NamedTuple):
    """Page ids of the block that a load warp fills next, looked up ahead."""

    box_pages: BoxPages
    page_size: Any
    pool: Any  # number of pages: the id of a page past them, which TMA reads as zeros


def box_pages(spec):
    """Allocate the `BoxPages` of a block."""
    return BoxPages(*(cute.make_rmem_tensor((spec.tile.n // BOXES[0] + 31) // 32, Int32) for _ in range(2)))


def page_id_cache(spec, op):
    """Allocate the `PageIdCache` of an operand; None in kernels that look up no pages ahead."""
    return (
        PageIdCache(box_pages(spec), op.boxes[0].gmem.shape[0], op.boxes[0].gmem.shape[3])
        if pdl.has_prologue(spec) or spec.tile.pieces > 1
        else None
    )


@cute.jit
def prefetch_pages(spec: cutlass.Constexpr, page_ids: Any, sequence_pages: pages.SequencePages, at: KVBlock):
    """Look up the pages of a block ahead of its `fill`. Lane c has rows [8 c, 8 c + 8), and those 256 rows further on.
    Boxes past kv_len get a page past the pool; their table entries are never read."""
    if const_expr(page_ids is not None):
        for c in cutlass.range_constexpr(cute.size(page_ids.box_pages.page)):
            first = (32 * c + cute.arch.lane_idx()) * BOXES[0]
            row = at.n_block * spec.tile.n + first
            page_ids.box_pages.page[c], page_ids.box_pages.row[c] = Int32(page_ids.pool), Int32(0)
            if row < at.kv_len and first < spec.tile.n:
                page_ids.box_pages.page[c] = pages.page_of(sequence_pages, row, page_ids.page_size)
                page_ids.box_pages.row[c] = pages.row_in_page(sequence_pages, row, page_ids.page_size)


@cute.jit
def fill(spec: cutlass.Constexpr, into: LoadTarget, prefetched: Any, sequence_pages: pages.SequencePages, at: KVBlock):
    """Load a KV block, rows [n_block n, (n_block + 1) n) of a KV head, into the item's stage. Called by each of the
    `tile.load_warps` warps, for its share of the boxes.

    prefetched: the page ids from `prefetch_pages`, which are then looked up for the next block, n_block - 1; or None,
    then they are looked up here. Boxes past kv_len are read from a page past the pool, which TMA fills with zeros.
    """
    page_ids, gmem = prefetched, into.op.boxes[0].gmem
    if const_expr(prefetched is None):
        page_ids = PageIdCache(box_pages(spec), gmem.shape[0], gmem.shape[3])
        prefetch_pages(spec, page_ids, sequence_pages, at)
    fill_stage(spec, into, page_ids.box_pages, sequence_pages, at)
    # page ids of the next block
    if const_expr(prefetched is not None):
        if at.n_block > 0:
            prefetch_pages(spec, prefetched, sequence_pages, at._replace(n_block=at.next_n_block))


@cute.jit
def fill_pieces(
    spec: cutlass.Constexpr, into: LoadTarget, prefetched: PageIdCache, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Do the work of `fill` for a block that takes `tile.pieces` stages, each with some of its columns or, if a stage
    has fewer rows than a block, some rows. at.item counts blocks here."""
    rows = const_expr(cute.size(into.smem, mode=[0]))
    lanes = const_expr(rows // BOXES[0] if rows < spec.tile.n else 0)  # of a piece, see `prefetch_pages`
    found, own = box_pages(spec), box_pages(spec)
    for x, ahead in zip(found, prefetched.box_pages, strict=True):
        x[0] = ahead[0]
    # page ids of the next block
    if at.n_block > 0:
        prefetch_pages(spec, prefetched, sequence_pages, at._replace(n_block=at.next_n_block))
    for i in cutlass.range(spec.tile.pieces, unroll=1):
        for x, y in zip(own, found, strict=True):
            x[0] = y[0] if const_expr(lanes == 0) else cute.arch.shuffle_sync(y[0], cute.arch.lane_idx() + lanes * i)
        piece = at._replace(item=at.item * spec.tile.pieces + i, o_tile=i if const_expr(lanes == 0) else 0)
        fill_stage(spec, into, own, sequence_pages, piece)


@cute.jit
def fill_stage(
    spec: cutlass.Constexpr, into: LoadTarget, box_pages: BoxPages, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Load this warp's share of the boxes of a stage, the pages of which are known."""
    op = into.op
    page_size = op.boxes[0].gmem.shape[0]
    if sequence_pages.start >= 0:  # ragged: the largest boxes
        page_size = Int32(op.boxes[-1].rows)
    if const_expr(not isinstance(op, copy.DenseOperand)):
        fill_page_boxes(spec, into, (op.boxes, op.rest), box_pages, page_size, at)
    elif op.as_lines != 0 and sequence_pages.start < 0:  # ragged rows may begin inside a line
        lines = into._replace(smem=cute.make_tensor(into.smem.iterator, op.line_layout))
        fill_page_boxes(spec, lines, (op.line_boxes, ()), box_pages, page_size, at)
    else:
        fill_page_boxes(spec, into, (op.boxes, ()), box_pages, page_size, at)


@cute.jit
def fill_page_boxes(
    spec: cutlass.Constexpr, into: LoadTarget, boxes: Any, box_pages: BoxPages, page_size: Int32, at: KVBlock
):
    """Load this warp's share of a KV block in the largest of `boxes` that divide the page. boxes: the operand's, of the
    rows of `BOXES` or of the lines of as many rows, and those of its further columns."""
    first, rest = boxes
    for k in cutlass.range_constexpr(len(first)):
        rows, largest = BOXES[k], const_expr(k + 1 == len(first))
        if page_size >= rows and (largest or page_size == rows):
            of = box_pages if const_expr(largest) else BoxPages(box_pages.page, None)
            groups = const_expr(pages.column_groups(spec))
            for i in cutlass.range_constexpr(len(groups)):
                fill_boxes(spec, into, (first[0], first[k], *rest[k : k + 1]), of, at, i, groups[i])


@cute.jit
def fill_boxes(
    spec: cutlass.Constexpr, into: LoadTarget, boxes: Any, box_pages: BoxPages, at: KVBlock, which: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):  # fmt: skip
    """Wait for a free stage and load this warp's boxes of a group of its columns, in all CTAs of the cluster. boxes:
    the smallest box, the one to load, and that of further columns, if there are any. which: the number of the group.
    columns: its boxes, none for all."""
    b, of, op, smem, ring = boxes[1], spec.tile.loaders, into.op, into.smem, into.rings[which]
    each = b.rows // boxes[0].rows  # smallest boxes in a box
    count = const_expr(cute.size(smem, mode=[0]) // b.rows)  # boxes per stage
    group = 32 // each  # boxes per register of `box_pages`
    all_columns = cute.size(smem, mode=[1]) // b.cols
    whole = op.bytes // all_columns * (len(columns) if const_expr(len(columns) > 0) else all_columns)
    size = whole // count * ((count - at.loader + of - 1) // of) if const_expr(of > 1) else whole
    if const_expr(spec.tile.cluster > 1):  # one warp announces what all CTAs write
        size = whole
    # wait for a free stage and announce the bytes
    pipeline.producer_acquire_tx(ring, at.item, size)
    # A coordinate that the compiler knows to be warp-uniform costs one move to a uniform register, any other a loop.
    head = cute.arch.make_warp_uniform(at.head)
    stage = cute.arch.make_warp_uniform(pipeline.stage(ring, at.item))
    # load the boxes
    target = StageTarget(smem, stage, ring.full + stage, head, cute.size(smem, mode=[1]) // b.cols * at.o_tile, columns)
    at_once = const_expr(spec.tile.boxes_at_once)
    if const_expr(0 < at_once < count and count % at_once == 0):
        for g in cutlass.range_constexpr((count + group - 1) // group):
            for c in cutlass.range(g * group, cutlass.min(count, (g + 1) * group), at_once, unroll=1):
                fetch(spec, boxes, target, box_pages, g, [c + i for i in range(at_once)])
    elif const_expr(each > 1 or count <= of):
        for c in cutlass.range_constexpr(0, count, of):
            box = c + at.loader if const_expr(of > 1) else c  # static if possible
            fetch(spec, boxes, target, box_pages, c // group, [box])
    else:  # such small pages are rare: not worth unrolled code
        for g in cutlass.range_constexpr((count + group - 1) // group):
            end = cutlass.min(count, (g + 1) * group)
            for c in cutlass.range(g * group, end, of, unroll=1):
                fetch(spec, boxes, target, box_pages, g, [c + at.loader])


class StageTarget(NamedTuple):
    """The stage that boxes go to: its index and full barrier, the KV head, and the number of the first box of a row.
    columns: the boxes of a row that are loaded, none for all."""

    smem: cute.Tensor
    stage: Int32
    full: cute.Pointer
    head: Int32
    first_col: Any
    columns: cutlass.Constexpr


@cute.jit
def fetch(
    spec: cutlass.Constexpr,
    boxes: Any,
    into: StageTarget,
    box_pages: BoxPages,
    group: cutlass.Constexpr,
    numbers: Any,
):
    """Load some boxes, as far as the stage has them. Their page ids are in register `group` of one lane each, and are
    fetched from there before the first copy, so that their latencies overlap. Called by one warp. boxes: as in
    `fill_boxes`. numbers: of the boxes in the stage."""
    b, each = boxes[1], boxes[1].rows // boxes[0].rows  # lanes per box; the shuffle reads only the low five bits
    count = const_expr(cute.size(into.smem, mode=[0]) // b.rows)
    page_ids = [cute.arch.shuffle_sync(box_pages.page[group], box * each) for box in numbers]
    rows: Any = None
    if const_expr(box_pages.row is not None):
        rows = [cute.arch.shuffle_sync(box_pages.row[group], box * each) for box in numbers]
        if const_expr(boxes[0].rows != BOXES[0]):  # rows of a box are lines: as many in each 8 rows of the page
            rows = [row // BOXES[0] * boxes[0].rows for row in rows]
    for i in cutlass.range_constexpr(len(numbers)):
        if const_expr(count % spec.tile.loaders == 0) or numbers[i] < count:
            column = 0
            for part in cutlass.range_constexpr(1, len(boxes)):
                x = boxes[part]
                gmem = x.gmem if const_expr(rows is None) else cute.domain_offset((rows[i], 0, 0, 0), x.gmem)
                s, g = copy.partition(x, into.smem, gmem)
                last = const_expr(part + 1 == len(boxes))
                held = cute.size(s, mode=[2]) - column if last else cute.ceil_div(cute.size(x.gmem, mode=[1]), x.cols)
                for d in cutlass.range_constexpr(held):
                    if const_expr(layout.is_chosen(into.columns, column + d)):
                        dst = s[None, numbers[i], column + d, into.stage]
                        source = g[None, 0, into.first_col + d, into.head, page_ids[i]]
                        if const_expr(spec.tile.cluster == 1):
                            cute.copy_atom_call(x.atom, source, dst, tma_bar_ptr=into.full)
                        else:
                            everyone = Int16((1 << spec.tile.cluster) - 1)
                            cute.copy_atom_call(x.atom, source, dst, tma_bar_ptr=into.full, mcast_mask=everyone)
                column += held


def operand(spec, parts, shape, stages, make=copy.operand):
    """Make the TMA operand of one or two tensors (pages, Hkv, P, D) with columns that lie side by side in a stage.
    shape: (n, columns) of a stage. make: `copy.operand` or, for one tensor, `copy.dense_operand`."""
    rows = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in parts]
    cluster = spec.tile.cluster
    how = {"multicast": True} if cluster > 1 else {}
    return make(rows[0], shape, stages, boxes(shape[0], cluster), *rows[1:], **how)


def fence_before_mma():
    """Do nothing: an MMA may read what TMA has written."""


def has_partial_tail(n, valid):
    """Return whether a stage of n rows, of which the first `valid` exist, may end inside a box, so that `zero_tail` has
    work to do."""
    return valid % boxes(n)[-1] != 0


@cute.jit
def zero_tail(spec: cutlass.Constexpr, stage: cute.Tensor, valid: Int32, tid: Int32, threads: cutlass.Constexpr):
    """Zero the rows [valid, next multiple of the largest box) of a V stage: they may share a page with rows before
    kv_len and hold whatever the page held, and 0 * NaN is NaN. `threads` threads share the work. The caller must add a
    proxy fence and a barrier."""
    vec = const_expr(128 // stage.element_type.width)  # elements of a 16-byte store
    per_row = const_expr(cute.size(stage, mode=[1]) // vec)
    zeros = cute.make_rmem_tensor(vec, stage.element_type)
    zeros.fill(0.0)
    box = boxes(cute.size(stage, mode=[0]), spec.tile.cluster)[-1]
    rows = (valid + box - 1) // box * box - valid
    for i in cutlass.range(tid, rows * per_row, threads, unroll=1):
        copy.vector(zeros, cute.local_tile(stage, (1, vec), (valid + i // per_row, i % per_row))[0, None])
