"""KV blocks from packed records of latent attention: rows are converted to bf16 between global and shared memory.

The load warps of a tile do it, because shared memory has no room for rows as they are stored. Eight rows at a time are
a group, four lanes a row: a lane holds 16 values of each box of 64 columns, which are 16 bytes of e4m3, 8 of e2m1 or 32
of bf16, and stores them as two pieces of 16 bytes. The warps take groups in turn.

Rows are found as in `gather`, with its operand and look-ups. They come from the L2 cache: before a warp waits
for a free stage, it asks for the lines of the block that will go there.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import layout, pipeline, to_bf16, warp
from ...device.divisor import quotient_params
from ...records import RECORDS, LatentRecord
from . import gather, pages
from .gather import NO_PAGE, RowPageIds
from .pages import KVBlock, LoadTarget

PARTIAL_TAIL = False  # rows past kv_len are always zeros
BOX = 64  # columns of a box
QUARTER = BOX // 4  # values of a box that a lane has
GROUP = 8  # rows
LINE = 128  # bytes that the L2 cache is asked for at a time
PIECE = 16  # bytes
BYTES = {"e4m3": QUARTER, "e2m1": QUARTER // 2, "bf16": 2 * QUARTER}  # of a lane's values of a box
page_id_cache, prefetch_pages = gather.page_id_cache, gather.prefetch_pages


class RowSection(NamedTuple):
    """Boxes of columns that are stored alike. part: the tensor that has them. code: their type. first: the first box.
    boxes: their number. at: the byte of a row where they begin. factored: whether they have factors."""

    part: int
    code: str
    first: int
    boxes: int
    at: int
    factored: bool


def sections(form: LatentRecord, columns) -> list[RowSection]:
    """Return the sections of a record. columns: of each tensor that has a part of a row."""
    if not form.packed:  # one scale for all, which is a factor on the logits
        widths = [count // BOX for count in columns]
        return [RowSection(i, form.codes, sum(widths[:i]), n, 0, False) for i, n in enumerate(widths)]
    found, latent = [RowSection(0, form.codes, 0, form.latent // BOX, 0, True)], form.latent // BOX
    if form.rotated and form.rotated_as != "codes":
        found.append(RowSection(0, form.rotated_as or "bf16", latent, form.rotated // BOX, form.rotated_at, False))
    return found


def operand(spec, parts, shape, stages):
    """Make the operand of tensors (pages, Hkv, P, bytes). shape: (n, columns) of a stage, which has bf16."""
    page_size = quotient_params(cutlass.max(parts[0].shape[2], 1))
    return gather.GatherOperand(parts, layout.smem_layout(shape, stages, cutlass.BFloat16), page_size)


class RowPlaces(NamedTuple):
    """Where rows lie: addresses in each tensor, and of their factors, of rows c, c + 32, ... in lane c. Negative for a
    row that does not exist. factors: None if rows have none."""

    parts: list[cute.Tensor]
    factors: Any


@cute.jit
def fill(
    spec: cutlass.Constexpr, into: LoadTarget, page_ids: RowPageIds, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Convert this warp's groups of a KV block into the item's stage, and look up the rows of the next block. Rows past
    kv_len and rows without a page become zeros. A lane arrives when all lanes have stored.

    page_ids: of all rows of the block, from `prefetch_pages`.
    """
    op, smem, ring = into
    if const_expr(spec.kv.extra):
        others = page_ids._replace(page_size=page_ids.extra_page_size)
        if gather.is_extra(spec, at.n_block, sequence_pages.first_keys):
            fill_from(spec, RECORDS[spec.kv.extra_record], op.extra, smem, ring, others, at)
        else:
            fill_from(spec, RECORDS[spec.kv.record], op.gmem, smem, ring, page_ids, at)
    else:
        fill_from(spec, RECORDS[spec.kv.record], op.gmem, smem, ring, page_ids, at)
    prefetch_pages(spec, page_ids, sequence_pages, at._replace(n_block=at.next_n_block))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    pipeline.producer_commit(ring, at.item)


@cute.jit
def fill_from(
    spec: cutlass.Constexpr, form: cutlass.Constexpr, parts: Any, smem: cute.Tensor, ring: Any, page_ids: RowPageIds,
    at: KVBlock,
):  # fmt: skip
    """Convert this warp's groups of a block of one cache, as soon as the stage is free."""
    places = places_of(spec, form, parts, page_ids, at)
    ask_for_rows(form, parts, places, at.loader, spec.tile.load_warps)
    pipeline.producer_acquire(ring, at.item)
    stage = smem[None, None, pipeline.stage(ring, at.item)].iterator.toint()
    groups = const_expr(spec.tile.n // GROUP)
    # the warps take turns at having a group less
    first = (at.loader + at.item * const_expr(groups % spec.tile.load_warps)) % spec.tile.load_warps
    for group in cutlass.range(first, groups, spec.tile.load_warps, unroll=1):
        convert_group(spec.tile.n, sections(form, [x.shape[3] for x in parts]), form, places, stage, group)


@cute.jit
def convert_rows(
    count: cutlass.Constexpr, columns: cutlass.Constexpr, own: cutlass.Constexpr, starts: cutlass.Constexpr,
    stage: Int32, first: Int32,
):  # fmt: skip
    """Convert `own` rows of e4m3, at most 32, into a stage of `count` rows, from row `first` on, a multiple of 8.
    Called by one warp. columns, starts: of each tensor that has a part of a row, as `gather.copy_rows` has them."""
    form = const_expr(RECORDS["e4m3"])
    places = RowPlaces(starts, None)
    for group in cutlass.range_constexpr(own // GROUP):
        convert_group(count, sections(form, columns), form, places, stage + first * LINE, Int32(group))


@cute.jit
def places_of(
    spec: cutlass.Constexpr, form: cutlass.Constexpr, parts: Any, page_ids: RowPageIds, at: KVBlock
) -> RowPlaces:
    """Return where the rows of a block lie."""
    count = const_expr(cute.size(page_ids.page))
    found = RowPlaces([cute.make_rmem_tensor(count, Int64) for _ in parts], cute.make_rmem_tensor(count, Int64))
    for c in cutlass.range_constexpr(count):
        row = at.n_block * spec.tile.n + 32 * c + cute.arch.lane_idx()
        page, row = gather.place_of(spec, page_ids, c, row)
        for i in cutlass.range_constexpr(len(parts)):
            x = parts[i]
            begin = x.iterator.toint() + Int64(page) * x.stride[0]
            start = begin + Int64(at.head) * x.stride[1] + Int64(row) * x.stride[2]
            factors = start + form.factors_at
            if const_expr(form.planar):
                start = begin + Int64(row) * form.row
                factors = begin + Int64(x.shape[2]) * form.row + Int64(row) * form.factor_row
            exists = page >= 0 and page < x.shape[0]
            found.parts[i][c] = start if exists else Int64(NO_PAGE)
            if const_expr(i == 0):
                found.factors[c] = factors if exists else Int64(NO_PAGE)
    return found


@cute.jit
def ask_for_rows(form: cutlass.Constexpr, parts: Any, places: RowPlaces, loader: Int32, warps: cutlass.Constexpr):
    """Ask the L2 cache for the rows of a block: each load warp for some of the lines of all rows."""
    for i in cutlass.range_constexpr(len(parts)):
        size = const_expr(form.row or parts[i].shape[3])
        for c in cutlass.range_constexpr(cute.size(places.factors)):
            start = places.parts[i][c]
            for k in cutlass.range_constexpr(-(-size // (LINE * warps))):
                byte = (loader + k * warps) * LINE
                if start >= 0 and byte < size:
                    prefetch(start + byte)
    if const_expr(form.planar):
        if loader == 0:
            for c in cutlass.range_constexpr(cute.size(places.factors)):
                if places.factors[c] >= 0:
                    prefetch(places.factors[c])


def prefetch(address):
    """Ask the L2 cache for the line of an address."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


@cute.jit
def convert_group(
    count: cutlass.Constexpr, each: cutlass.Constexpr, form: cutlass.Constexpr, places: RowPlaces, stage: Int32,
    group: Int32,
):  # fmt: skip
    """Convert 8 rows into a stage of `count` rows. each: the sections of a row."""
    lane = cute.arch.lane_idx()
    row, quarter = lane // 4, lane % 4
    starts = [row_place(x, group, row) for x in places.parts]
    exists = starts[0] >= 0
    # loads
    held = [load_boxes(section, starts[section.part], quarter, exists) for section in each]
    factors: Any = []
    if const_expr(form.packed):
        factors = load_factors(form, row_place(places.factors, group, row), quarter, exists)
    # values
    into = stage + group * const_expr(GROUP * LINE) + layout.swizzle(LINE, row, 2 * PIECE * quarter)
    other = stage + group * const_expr(GROUP * LINE) + layout.swizzle(LINE, row, 2 * PIECE * quarter + PIECE)
    for i in cutlass.range_constexpr(len(each)):
        section = const_expr(each[i])
        for b in cutlass.range_constexpr(section.boxes):
            words = values_of(section, held[i][b])
            if const_expr(section.factored):
                factor = factor_of(form, factors, const_expr(section.first + b), quarter)
                words = [to_bf16.multiply(word, factor) for word in words]
            box = const_expr((section.first + b) * count * LINE)
            store_piece(into + box, words[:4])
            store_piece(other + box, words[4:])


def row_place(places, group, row):
    """Return the address of a row of a group. Called by all lanes of a warp."""
    mine = places[0]
    if cute.size(places) > 1:  # of 64 rows
        mine = warp.select(group < 32 // GROUP, mine, places[1])
    return cute.arch.shuffle_sync(mine, group % (32 // GROUP) * GROUP + row)


def load(address, offset, count, exists):
    """Return `count` words, 1, 2 or 4, at an aligned address in global memory; zeros if there is no row."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    vector = f"v{count}." if count > 1 else ""
    names = f"{{{names}}}" if count > 1 else names
    loaded = f"@p ld.global.{vector}b32 {names}, [{{$r0}}+{offset}];"
    text = f"{{ .reg .pred p; setp.ne.u32 p, {{$r1}}, 0; {zeros} {loaded} }}"
    found = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[address, Uint32(exists)])
    return list(found)


def load_boxes(section, start, quarter, exists):
    """Return the words of a lane's part of each box of a section."""
    size = BYTES[section.code]
    mine = start + size * quarter
    return [
        [
            word
            for byte in range(0, size, PIECE)
            for word in load(mine, section.at + 4 * size * b + byte, min(size, PIECE) // 4, exists)
        ]
        for b in range(section.boxes)
    ]


def values_of(section, words):
    """Return a lane's 16 values of a box, without their factor, as words of bf16."""
    if section.code == "bf16":
        return words
    convert = to_bf16.e4m3_words if section.code == "e4m3" else to_bf16.e2m1_words
    return [to_bf16.multiply(bits, to_bf16.EXACT[section.code]) for word in words for bits in convert(word)]


def store_piece(address, words):
    """Store 16 bytes in shared memory."""
    text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words])


# Factors: a lane has those of its row, or of its quarter of the boxes


def load_factors(form, start, quarter, exists):
    """Return the words of a row's factors, or, permuted, of those of a lane's quarters."""
    if form.permuted:
        return load(start + 8 * quarter, 0, 2, exists)
    size = form.latent // form.vec * (4 if form.factor == "fp32" else 1)
    size = -(-size // 8) * 8  # with padding
    return [word for byte in range(0, size, PIECE) for word in load(start, byte, min(size - byte, PIECE) // 4, exists)]


def factor_of(form, words, box, quarter):
    """Return the factor of a lane's values of a box, as a bf16, twice."""
    first, more = (BOX * box) // form.vec, BOX // form.vec  # the box's first factor; factors of a box, 0 for less
    if form.factor == "fp32":
        return to_bf16.pair_of_fp32(words[first])
    if form.permuted:
        byte, shift = words[box // 4], 8 * (box % 4)
    else:
        byte, shift = words[first // 4], 8 * (first % 4)
        if more > 1:
            byte = byte >> (8 * (quarter * more // 4)).to(Uint32)
    byte = (byte >> shift) & Uint32(0xFF)
    if form.factor == "ue8m0":
        return to_bf16.pair(byte << 7)
    return to_bf16.multiply(to_bf16.pair((byte & 0x7F) << 4), to_bf16.EXACT["e4m3"])


def fence_before_mma():
    """Do nothing: the load warps have made their stores visible to the async proxy."""
