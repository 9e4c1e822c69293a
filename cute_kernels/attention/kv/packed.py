"""KV blocks from packed records of latent attention: rows are converted to bf16 on their way to shared memory.

Shared memory has no room for rows as they are stored, besides the stages, and few warps that load, wait and convert
take longer than the MMAs of a block. So the mma warps do it, between their MMAs: a warp converts eight rows of a block,
which it has loaded to registers one block earlier, and loads those of the next block under its MMAs (`advance`). Some
boxes of long records are loaded only right before the conversion (`late_boxes`).

Four lanes have a row: a lane holds 16 values of each box of 64 columns, which are 16 bytes of e4m3, 8 of e2m1 or 32 of
bf16, and stores them as two pieces of 16 bytes. Rows are found as in `gather`, with its operand.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import l2, layout, pipeline, to_bf16, warp
from ...device.divisor import quotient_params
from ...device.gather import NO_ROW
from ...records import RECORDS
from ..schedule import work
from . import gather, pages
from .gather import RowPageIds
from .record_rows import BOX, BYTES, RowSource, place_of, sections, sources

PARTIAL_TAIL = False  # rows past kv_len are always zeros
QUARTER = BOX // 4  # values of a box that a lane has
GROUP = 8  # rows that a warp has
LINE = 128  # bytes of a row of a box
PIECE = 16  # bytes
LANE_BYTES = {code: size // 4 for code, size in BYTES.items()}  # of a lane's values of a box
AHEAD = 2  # blocks from one that has been converted to the one that is prefetched
HELD = 36  # words of a row that a lane has loaded a block before; registers have no room for more


def operand(spec, parts, shape, stages):
    """Make the operand of tensors (pages, Hkv, P, bytes). shape: (n, columns) of a stage, which has bf16."""
    page_size = quotient_params(cutlass.max(parts[0].shape[2], 1))
    return gather.GatherOperand(parts, layout.smem_layout(shape, stages, cutlass.BFloat16), page_size)


class LoadedRow(NamedTuple):
    """A lane's part of a row, as loaded: words of each box, and of the factors; as many as the largest record of the
    caches needs. starts: the address of the row in each tensor, negative if there is no row."""

    boxes: list[cute.Tensor]
    factors: cute.Tensor
    starts: list[cute.Tensor]


def allocate_row(forms):
    """Allocate a `LoadedRow`. forms: (record, columns of each of its tensors) of the caches."""
    sizes = [box_words(form, columns) for form, columns in forms]
    count = max(len(words) for words in sizes)
    most = [max(words[i] for words in sizes if i < len(words)) for i in range(count)]
    factors, parts = max(factor_words(form) for form, _ in forms), max(len(columns) for _, columns in forms)
    boxes, starts = (
        [cute.make_rmem_tensor(n, kind) for n in of] for of, kind in ((most, Uint32), ([1] * parts, Int64))
    )
    return LoadedRow(boxes, cute.make_rmem_tensor(max(factors, 1), Uint32), starts)


def box_words(form, columns):
    """Return the words that a lane has of each box."""
    return [LANE_BYTES[section.code] // 4 for section in sections(form, columns) for _ in range(section.boxes)]


def late_boxes(form, columns) -> list[int]:
    """Return the boxes that are loaded only when the row is converted: the last ones of the latent, so that at most
    `HELD` words are loaded before."""
    words: list[int] = box_words(form, columns)
    late: list[int] = []
    while sum(words) - sum(words[i] for i in late) + factor_words(form) > HELD:
        late.append(sections(form, columns)[0].boxes - 1 - len(late))
    return late


class NextRows(NamedTuple):
    """The rows of the next block that a warp has loaded, and the page ids of its lane's row in the two blocks behind
    it. op: the operand. row: a `LoadedRow`; None in the role `prefetch`, which loads nothing and has the page ids of a
    single block."""

    op: Any
    row: Any
    page_ids: RowPageIds


def allocate(spec, op) -> NextRows:
    """Allocate the `NextRows` of a warp."""
    page_ids = gather.page_ids_of(spec, op, 2)
    forms = [(x.form, [part.shape[3] for part in x.parts]) for x in sources(spec, op, page_ids)]
    return NextRows(op, allocate_row(forms), page_ids)


class TileRows(NamedTuple):
    """The rows of a tile that a warp converts. of: where its sequence is. kv_len: its keys. lowest: its first block.
    group: the number of the warp's eight rows in a block."""

    of: pages.SequencePages
    kv_len: Int32
    lowest: Int32
    group: Int32


@cute.jit
def begin(spec: cutlass.Constexpr, rows: NextRows, tile: TileRows, n_block: Int32):
    """Load this warp's rows of the first block that a tile visits, its highest, and look up those of the next ones."""
    for i in cutlass.range_constexpr(2):
        look_up(spec, rows, i, tile, n_block - i)
    with_cache(spec, load_from, rows, tile.of, n_block, row_number(spec, tile, n_block))
    look_ahead(spec, rows, tile, n_block - 1)


@cute.jit
def load_late(spec: cutlass.Constexpr, rows: NextRows, tile: TileRows, n_block: Int32):
    """Load the late boxes of this warp's rows of a block, which is converted next."""
    with_cache(spec, load_late_from, rows, tile.of, n_block, Int32(0))


@cute.jit
def convert(spec: cutlass.Constexpr, rows: NextRows, tile: TileRows, n_block: Int32, stage: cute.Tensor):
    """Convert this warp's rows of a block into a stage (n, columns). `begin`, or `advance` behind the block above, has
    loaded them, and `load_late` their late boxes."""
    into = stage.iterator.toint() + tile.group * (GROUP * LINE)
    with_cache(spec, convert_from, rows, tile.of, n_block, into)


@cute.jit
def advance(spec: cutlass.Constexpr, rows: NextRows, tile: TileRows, n_block: Int32):
    """Load this warp's rows of the block below one that is converted, if the tile has it, and look up those of further
    blocks."""
    with_cache(spec, load_from, rows, tile.of, n_block - 1, row_number(spec, tile, n_block - 1))
    look_ahead(spec, rows, tile, n_block - 2)


@cute.jit
def look_ahead(spec: cutlass.Constexpr, rows: NextRows, tile: TileRows, n_block: Int32):
    """Let page ids be those of a block, which will be loaded next, and look up those of the block below."""
    rows.page_ids.page[0] = rows.page_ids.page[1]
    look_up(spec, rows, 1, tile, n_block - 1)


@cute.jit
def look_up(spec: cutlass.Constexpr, rows: NextRows, which: cutlass.Constexpr, tile: TileRows, n_block: Int32):
    """Look up the page of this lane's row of a block; -1 if the tile does not have the block."""
    row = row_number(spec, tile, n_block) if n_block >= tile.lowest else Int32(-1)
    rows.page_ids.page[which] = gather.page_of_row(spec, rows.page_ids, tile.of, tile.kv_len, row)


def row_number(spec, tile: TileRows, n_block):
    """Return the number, in the sequence, of this lane's row of a block."""
    return n_block * spec.tile.n + tile.group * GROUP + cute.arch.lane_idx() // 4


@cute.jit
def with_cache(
    spec: cutlass.Constexpr, do: cutlass.Constexpr, rows: NextRows, of: pages.SequencePages, n_block: Int32,
    given: Int32,
):  # fmt: skip
    """Call `do(spec, cache, rows, given)` with the cache that has a block."""
    each = sources(spec, rows.op, rows.page_ids)
    if const_expr(spec.kv.extra):
        if gather.is_extra(spec, n_block, of.first_keys):
            do(spec, each[1], rows, given)
        else:
            do(spec, each[0], rows, given)
    else:
        do(spec, each[0], rows, given)


@cute.jit
def convert_from(spec: cutlass.Constexpr, source: cutlass.Constexpr, rows: NextRows, into: Int32):
    """Convert this lane's part of a row of one cache. into: the address of the warp's rows in the stage."""
    convert_row(source, rows.row, into, spec.tile.n)


@cute.jit
def load_late_from(spec: cutlass.Constexpr, source: cutlass.Constexpr, rows: NextRows, _: Int32):
    """Load the late boxes of this lane's part of a row of one cache."""
    columns = const_expr([x.shape[3] for x in source.parts])
    load_boxes(source.form, columns, rows.row, rows.row.starts[0][0] >= 0, True)


@cute.jit
def load_from(spec: cutlass.Constexpr, source: cutlass.Constexpr, rows: NextRows, row: Int32):
    """Load this lane's part of a row, given by its number, from one cache; zeros if it has no page."""
    at, columns = place_of(spec, source, rows.page_ids, 0, row), const_expr([x.shape[3] for x in source.parts])
    for i in cutlass.range_constexpr(len(source.parts)):
        rows.row.starts[i][0] = warp.select(at.exists, at.starts[i], Int64(NO_ROW))
    load_row(source.form, columns, rows.row, at.factors, at.exists)


# The prefetch role: two warps, each lane of which has a row of a block. One iteration per tile, an inner one per block.
#   waits for   work_pipe full (the tile), k.pipe full: a block has been converted
#   prefetches  the rows of the block `AHEAD` blocks below into the L2, by bulk copies
#   signals     work_pipe, k.pipe empty; without the latter, a phase of a barrier could pass unseen
# The mma warps, which load the rows, have no time for it: the requests of a block fill the queue of the load unit.
@cute.jit
def prefetch(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """Run the `prefetch` role in one of its warps. warp: its number among them."""
    op = plan.kv[pages.K]
    rows = NextRows(op, None, gather.page_ids_of(spec, op, 1))

    def prefetch_tile(w, _, kv):
        of, keys = pages.of_sequence(plan.args, w.batch_idx, pages.K, w.sequence.extra), w.sequence.kv_len
        first = w.n_block_max - 1
        for n_block in cutlass.range(first, cutlass.max(first - AHEAD, w.n_block_min - 1), -1, unroll=1):
            prefetch_block(spec, rows, of, keys, n_block, warp)
        for n_block in cutlass.range(first, w.n_block_min - 1, -1, unroll=1):
            if n_block - AHEAD >= w.n_block_min:
                prefetch_block(spec, rows, of, keys, n_block - AHEAD, warp)
            pipeline.consumer_wait(s.k.pipe, kv)
            pipeline.consumer_release(s.k.pipe, kv)
            kv = pipeline.next_item(s.k.pipe, kv)
        return kv

    work.for_each_tile(spec, s, prefetch_tile, pipeline.initial_state())


@cute.jit
def prefetch_block(
    spec: cutlass.Constexpr, rows: NextRows, of: pages.SequencePages, kv_len: Int32, n_block: Int32, warp: Int32
):
    """Prefetch this lane's row of a block."""
    row = n_block * spec.tile.n + 32 * warp + cute.arch.lane_idx()
    rows.page_ids.page[0] = gather.page_of_row(spec, rows.page_ids, of, kv_len, row)
    with_cache(spec, prefetch_row, rows, of, n_block, row)


@cute.jit
def prefetch_row(spec: cutlass.Constexpr, source: cutlass.Constexpr, rows: NextRows, row: Int32):
    """Prefetch a row, given by its number, of one cache."""
    at = place_of(spec, source, rows.page_ids, 0, row)
    if at.exists:
        for i in cutlass.range_constexpr(len(source.parts)):
            l2.prefetch(at.starts[i], Int32(source.form.row or source.parts[i].shape[3]))
        if const_expr(source.form.planar):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at.factors])


def load_row(form, columns, into: LoadedRow, factors, exists):
    """Load this lane's part of a row, except its late boxes. factors: the address of its factors. exists: whether there
    is such a row; else its part becomes zeros."""
    if form.packed:
        load_factors(form, factors, cute.arch.lane_idx() % 4, exists, into.factors)
    load_boxes(form, columns, into, exists, False)


def load_boxes(form, columns, into: LoadedRow, exists, late):
    """Load this lane's part of the late boxes of a row, or of the others."""
    for section in sections(form, columns):
        size = LANE_BYTES[section.code]
        mine = into.starts[section.part][0] + size * (cute.arch.lane_idx() % 4)
        for b in range(section.boxes):
            if (section.first + b in late_boxes(form, columns)) == late:
                for byte in range(0, size, PIECE):
                    at = section.at + 4 * size * b + byte
                    for i, word in enumerate(load(mine, at, min(size, PIECE) // 4, exists)):
                        into.boxes[section.first + b][byte // 4 + i] = word


@cute.jit
def convert_rows(
    count: cutlass.Constexpr, columns: cutlass.Constexpr, own: cutlass.Constexpr, starts: cutlass.Constexpr,
    stage: Int32, first: Int32,
):  # fmt: skip
    """Convert `own` rows of e4m3, at most 32, into a stage of `count` rows, from row `first` on, a multiple of 8.
    Called by one warp. columns: of each tensor that has a part of a row. starts: of each, the address of row c in lane
    c, negative if there is none."""
    form, row = const_expr(RECORDS["e4m3"]), cute.arch.lane_idx() // 4
    assert not late_boxes(form, columns)
    held = allocate_row([(form, columns)])
    for group in cutlass.range_constexpr(own // GROUP):
        for i in cutlass.range_constexpr(len(starts)):
            held.starts[i][0] = cute.arch.shuffle_sync(starts[i][0], group * GROUP + row)
        load_row(form, columns, held, None, held.starts[0][0] >= 0)
        convert_row(RowSource(columns, form, None), held, stage + (first + group * GROUP) * LINE, count)


def load(address, offset, count, exists):
    """Return `count` words, 2 or 4, at an aligned address in global memory; zeros if there is no row. exists: as in
    `load_row`."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    guarded = f"@p ld.global.v{count}.b32 {{{names}}}, [{{$r0}}+{offset}];"
    text = f"{{ .reg .pred p; setp.ne.u32 p, {{$r1}}, 0; {zeros} {guarded} }}"
    given = [address, Uint32(exists)]
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=given))


@cute.jit
def convert_row(source: cutlass.Constexpr, held: LoadedRow, stage: Int32, count: cutlass.Constexpr):
    """Convert this lane's part of a row that is loaded. stage: the address of the first of the warp's rows in a stage
    of `count` rows."""
    parts, form, _ = source
    columns = const_expr([x if isinstance(x, int) else x.shape[3] for x in parts])
    turns = const_expr(1 + bool(late_boxes(form, columns)))
    if const_expr(not form.packed or not has_products_at_once(form)):
        for late in cutlass.range_constexpr(turns):
            convert_boxes(form, columns, held, late == 1, False, stage, count)
    else:
        exceeding = Int32(cute.arch.vote_any_sync(exceeds(form, held.factors)))
        for late in cutlass.range_constexpr(turns):
            # a branch of its own for late boxes, or the compiler converts some of them first, and waits for their loads
            if warp.opaque(exceeding) != 0:
                convert_boxes(form, columns, held, late == 1, False, stage, count)
            else:
                convert_boxes(form, columns, held, late == 1, True, stage, count)


def convert_boxes(form, columns, held: LoadedRow, late, at_once, stage, count):
    """Do the work of `convert_row` for the late boxes of a row, or for the others. at_once: multiply by `EXACT` and by
    the factor at once, which has the same bits if no factor `exceeds` its range."""
    row, quarter = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    into = [stage + layout.swizzle(LINE, row, 2 * PIECE * quarter + PIECE * k) for k in range(2)]
    for section in sections(form, columns)[::-1]:
        for box in range(section.first, section.first + section.boxes):
            if (box in late_boxes(form, columns)) != late:
                continue
            words = [held.boxes[box][i] for i in range(LANE_BYTES[section.code] // 4)]
            words = values_of(section, words, not (section.factored and at_once))
            if section.factored:
                factor = factor_of(form, held.factors, box, quarter, at_once)
                words = [to_bf16.multiply(word, factor) for word in words]
            for k in range(2):
                store_piece(into[k] + box * count * LINE, words[4 * k : 4 * k + 4])


def values_of(section, words, exact):
    """Return a lane's 16 values of a box, without their factor, as words of bf16. exact: and not too small by a power
    of two."""
    if section.code == "bf16":
        return words
    convert = to_bf16.e4m3_words if section.code == "e4m3" else to_bf16.e2m1_words
    found = [bits for word in words for bits in convert(word)]
    return [to_bf16.multiply(bits, to_bf16.EXACT[section.code]) for bits in found] if exact else found


def store_piece(address, words):
    """Store 16 bytes in shared memory."""
    text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words])


# Factors: a lane has those of its row, or of its quarter of the boxes


def factor_words(form):
    """Return the words of the factors that a lane has, with padding."""
    if not form.packed:
        return 0
    size = form.latent // form.vec * (4 if form.factor == "fp32" else 1)
    return 2 if form.permuted else -(-size // 8) * 2


def load_factors(form, start, quarter, exists, into):
    """Load the words of a row's factors or, permuted, of those of a lane's quarters. start: their address."""
    if form.permuted:
        start = start + 8 * quarter
    size = 4 * factor_words(form)
    for byte in range(0, size, PIECE):
        for i, word in enumerate(load(start, byte, min(size - byte, PIECE) // 4, exists)):
            into[byte // 4 + i] = word


def has_products_at_once(form):
    """Return whether factors can be multiplied by `EXACT` before codes are: not those that cover its range."""
    return form.factor != "e4m3"


def exceeds(form, words):
    """Return whether a factor of a row is 2 or more: then its product with `EXACT` may not be a bf16."""
    size = form.latent // form.vec * (4 if form.factor == "fp32" else 1)  # bytes; what follows is padding
    top, any_top = 0x40000000 if form.factor == "fp32" else 0x80808080, Uint32(0)
    for i in range(-(-size // 4)):
        any_top = any_top | words[i] & Uint32(top & (1 << 8 * min(4, size - 4 * i)) - 1)
    return any_top != 0


def factor_of(form, words, box, quarter, at_once):
    """Return the factor of a lane's values of a box, as a bf16, twice. at_once: times `EXACT` of e4m3."""
    first, more = (BOX * box) // form.vec, BOX // form.vec  # the box's first factor; factors of a box, 0 for less
    exponent = to_bf16.BELOW["e4m3"] * at_once
    if form.factor == "fp32":
        return to_bf16.factor_pair(form.factor, words[first], exponent)
    if form.permuted:
        byte, shift = words[box // 4], 8 * (box % 4)
    else:
        byte, shift = words[first // 4], 8 * (first % 4)
        if more > 1:
            byte = byte >> (8 * (quarter * more // 4)).to(Uint32)
    return to_bf16.factor_pair(form.factor, (byte >> shift) & Uint32(0xFF), exponent)


def fence_before_mma():
    """Do nothing: the load warps have made their stores visible to the async proxy."""
