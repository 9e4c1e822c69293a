"""Read rows of latent attention from the pages of requests, and dequantise them: host part and device entry.

A warp, or eight lanes for an indexer's rows, takes neighbouring rows of the output. It finds the request of the first
one by bisection, and goes from request to request with the rows. Lane l holds values 16 l to 16 l + 15 of the latent,
and pair l of the rotated part; it takes further pieces of a row that is longer. There is no shared memory, and no
barrier.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | | `griddepcontrol.wait`: the kernels that wrote the cache | `launch_dependents` |
| `entry_of` | lanes of a row | offsets, page table | them | registers |
| `load_row` | | rows of the cache | | registers |
| `store_row` | | | them | rows of the output |

Every CTA waits for the grid before it, so a kernel that waits for this one sees what both have written."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from ... import abi
from ...cache_write import places
from ...device import memory, nvfp4, warp
from ...device.divisor import divide
from ...records import BYTES, INDEX
from ..args import READ_INDICES, ReadArgs, pack_read, read_fields
from . import THREADS, VALUES, WARP, ctas_per_sm, lanes

PIECE = 16  # bytes that a lane copies at a time
SCALE_BYTES = 4  # of a row of an indexer
EXPONENT = 23  # bits below it in fp32
FIRST_PAIR = WARP * VALUES  # value of a row of e4m3 from which on a lane holds pairs
UNROLL = 2  # rows that a warp has in flight


def fake_args(spec) -> dict[str, Any]:
    dtype, unit = abi.DTYPES[spec.dtype], spec.form.unit
    found: dict[str, Any] = {
        "cache": abi.tensor(cutlass.Uint8, (None,) * 3, align=unit, stride_divisibility=unit),
        "out": abi.tensor(dtype, (None,) * 2, align=dtype.width // 8),
        "scales": abi.tensor(cutlass.Uint8, (None,) * 2, align=1),
        "page_table": abi.tensor(Int32, (None,) * 2, align=4),
        "starts": abi.tensor(Int32, (None,), align=4),
        "firsts": abi.tensor(Int32, (None,), align=4),
        "scale_ptr": abi.tensor(Float32, (None,), align=4),
        "scale": Float32(1.0),
    }
    return {name: found.get(name, Int32(0)) for name in read_fields(spec)}


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack_read(spec, flat)
    kernel(spec, a).launch(
        grid=[a.ctas, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=1,  # percent: the L1 cache gets the rest
    )


def is_wide(a, name):
    """Return 1 if an index tensor holds int64 values, else 0."""
    return a.wide >> READ_INDICES.index(name) & 1


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: ReadArgs):
    each = const_expr(THREADS // lanes(spec))
    group = cute.arch.block_idx()[0] * each + cute.arch.thread_idx()[0] // const_expr(lanes(spec))
    groups = cute.arch.grid_dim()[0] * each
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    requests, rows = a.page_table.shape[0], cutlass.min(a.rows, a.out.shape[0])
    if (a.starts.shape[0] >> is_wide(a, "starts")) > requests:
        rows = cutlass.min(rows, places.element(a.starts, requests, is_wide(a, "starts")))
    count = divide(cutlass.max(rows, 0) + groups - 1, groups)
    if requests > 0 and group < rows and group * count < rows:
        read_rows(spec, a, group * count, cutlass.min(count, rows - group * count), rows)


@cute.jit
def start_of(a, request: Int32, rows: Int32):
    """Return the first row of a request, or the number of all rows behind the last request."""
    start = rows
    if request < a.page_table.shape[0]:
        start = places.element(a.starts, request, is_wide(a, "starts"))
    return start


class RequestWalk(NamedTuple):
    """A request, and the rows of the output from which it and the one after it begin."""

    request: Int32
    first: Int32
    after: Int32


@cute.jit
def request_of(a, row: Int32, rows: Int32) -> RequestWalk:
    """Return the last request that begins at or before a row. rows: of all requests."""
    low, high = Int32(0), Int32(a.page_table.shape[0])
    while high - low > 1:
        middle = (low + high) >> 1
        if start_of(a, middle, rows) <= row:
            low = middle
        else:
            high = middle
    return RequestWalk(low, start_of(a, low, rows), start_of(a, low + 1, rows))


@cute.jit
def walked(a, at: RequestWalk, row: Int32, rows: Int32) -> RequestWalk:
    """Return the request of a row at or behind those of `at`."""
    request, first, after = at
    while row >= after and request + 1 < a.page_table.shape[0]:
        request += 1
        first, after = after, start_of(a, request + 1, rows)
    return RequestWalk(request, first, after)


@cute.jit
def entry_of(a, at: RequestWalk, row: Int32) -> places.CachePlace:
    """Return the page and the row in it of a row of the output; the page is negative if it has none."""
    page, inside, begin = Int32(-1), Int32(0), Int32(0)
    if at.request < (a.firsts.shape[0] >> is_wide(a, "firsts")):
        begin = places.element(a.firsts, at.request, is_wide(a, "firsts"))
    position = begin + (row - at.first)  # a sum past 2^31 - 1 is negative, and so names no row
    if row >= at.first and begin >= 0 and position >= 0:
        size, words = a.cache.shape[1], is_wide(a, "page_table")
        column = divide(position, size)
        inside = position - column * size
        if column < (a.page_table.shape[1] >> words):
            page = places.element(a.page_table[at.request, None], column, words)
    if page >= a.cache.shape[0]:
        page = Int32(-1)
    return places.CachePlace(page, inside)


class HeldRow(NamedTuple):
    """A lane's part of a row of the cache, in registers: pieces of codes or bytes, their factor, and a pair of the
    rotated part, or the scale of an indexer's row."""

    words: cute.Tensor
    factor: cute.Tensor
    pair: cute.Tensor


def pieces(spec) -> int:
    """Return the pieces of a row that a lane holds; those of longer rows are copied one after the other."""
    return 3 if spec.record == BYTES else 1


def held_row(spec) -> HeldRow:
    words = cute.make_rmem_tensor((words_of(spec.form, spec), pieces(spec)), Uint32)
    return HeldRow(words, cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Uint32))


def words_of(form, spec) -> int:
    """Return the words of a piece."""
    return VALUES // 8 if form.codes == "e2m1" else PIECE // 4


# One iteration for UNROLL rows of a warp, or of eight lanes.
#   waits for   page table, then the rows of the cache; the loads of all rows are issued before the first is used
#   computes    values, in registers
#   stores      the rows
@cute.jit
def read_rows(spec: cutlass.Constexpr, a, row: Int32, count: Int32, rows: Int32):
    """Read `count` rows of the output from one on. rows: of all requests."""
    at, end, held = request_of(a, row, rows), row + count, [held_row(spec) for _ in range(UNROLL)]
    lane = cute.arch.lane_idx() % const_expr(lanes(spec))
    pages, inside = (cute.make_rmem_tensor(UNROLL, Int32) for _ in range(2))
    while row < end:
        for u in cutlass.range_constexpr(UNROLL):
            at = walked(a, at, cutlass.min(row + u, end - 1), rows)
            place = entry_of(a, at, row + u)
            pages[u], inside[u] = (place.page if row + u < end else Int32(-1)), place.row
        for u in cutlass.range_constexpr(UNROLL):
            if pages[u] >= 0:
                load_row(spec, a, places.CachePlace(pages[u], inside[u]), lane, held[u])
        for u in cutlass.range_constexpr(UNROLL):
            if pages[u] >= 0:
                store_row(spec, a, row + u, places.CachePlace(pages[u], inside[u]), lane, held[u])
        row += UNROLL


class SourceRow(NamedTuple):
    """Addresses of a row of the cache, and of its factors."""

    row: Int64
    factors: Int64


def source_of(spec, a, place) -> SourceRow:
    """Return where a row of the cache lies."""
    form, begin = spec.form, a.cache.iterator.toint() + Int64(place.page) * a.cache.stride[0]
    if form.planar:
        behind = begin + Int64(a.cache.shape[1]) * form.row
        return SourceRow(begin + Int64(place.row) * form.row, behind + Int64(place.row) * form.factor_row)
    row = begin + Int64(place.row) * a.cache.stride[1]
    return SourceRow(row, row + form.factors_at)


@cute.jit
def load_row(spec: cutlass.Constexpr, a, place: places.CachePlace, lane: Int32, held: HeldRow):
    """Load a lane's part of a row."""
    form, source = const_expr(spec.form), source_of(spec, a, place)
    if const_expr(form.vec == 0 or spec.record == INDEX):
        for i in cutlass.range_constexpr(pieces(spec)):
            first = (lane + i * const_expr(lanes(spec))) * PIECE
            if first < a.out.shape[1]:
                memory.load(source.row + first, held.words[None, i], a.out.shape[1] - first, 1)
        if const_expr(spec.record == INDEX):
            if lane == 0:
                memory.load(source.factors, held.pair, Int32(SCALE_BYTES), 1)
        elif const_expr(spec.record != BYTES):
            load_codes(source.row, FIRST_PAIR + 2 * lane, a.out.shape[1], held.pair)
    else:
        size = const_expr(4 * words_of(form, spec))
        if lane * VALUES < form.latent:
            held.factor[0] = factor_of(form, source.factors, lane)
            memory.load(source.row + lane * size, held.words[None, 0], Int32(size // form.unit), form.unit)
        if const_expr(apart_of(form) > 0):
            place_of_pair = source.row + form.rotated_at
            if const_expr(form.rotated_as == "e4m3"):
                code = memory.view(place_of_pair + 2 * lane, Uint8, 2, 1)
                held.pair[0] = code[0].to(Uint32) | code[1].to(Uint32) << 8
            else:
                memory.load(place_of_pair + 4 * lane, held.pair, Int32(2), 2)


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, row: Int32, place: places.CachePlace, lane: Int32, held: HeldRow
):  # fmt: skip
    """Store a lane's part of a row of the output."""
    form, target, width = const_expr(spec.form), memory.row_of(a.out, row), a.out.shape[1]
    if const_expr(spec.dtype == "uint8"):
        for i in cutlass.range_constexpr(pieces(spec)):
            first = (lane + i * const_expr(lanes(spec))) * PIECE
            if first < width:
                memory.store(target + first, held.words[None, i], width - first, 1)
        if const_expr(spec.record == INDEX):
            if lane == 0:
                memory.store(memory.row_of(a.scales, row), held.pair, Int32(SCALE_BYTES), 1)
        else:
            first = (lane + const_expr(pieces(spec) * lanes(spec))) * PIECE
            source = source_of(spec, a, place).row
            while first < width:
                memory.load(source + first, held.words[None, 0], width - first, 1)
                memory.store(target + first, held.words[None, 0], width - first, 1)
                first += PIECE * const_expr(lanes(spec))
    elif const_expr(form.vec == 0):
        scale = a.scale
        if a.scale_ptr.shape[0] > 0:
            scale = a.scale_ptr[0]
        store_scaled(spec, target, lane * VALUES, width, held.words[None, 0], scale)
        first, source = FIRST_PAIR + 2 * lane, source_of(spec, a, place).row
        while first < width:
            store_codes(spec, target, first, width, held.pair, scale)
            first += 2 * const_expr(lanes(spec))
            load_codes(source, first, width, held.pair)
    else:
        store_packed(spec, target, lane, held)


def apart_of(form) -> int:
    """Return the values of the rotated part, if it is not quantised with the latent."""
    return form.rotated if form.rotated_as != "codes" else 0


def e4m3_pair(pair):
    """Return the values of two e4m3 codes in fp32."""
    text = "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};"
    both = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair.to(Uint16)])
    return memory.widen("fp16", both)


def e4m3_values(word):
    """Return the values of the four e4m3 codes of a word in fp32."""
    return (*e4m3_pair(word), *e4m3_pair(word >> 16))


@cute.jit
def load_codes(source: Int64, first: Int32, width: Int32, pair: cute.Tensor):
    """Load the codes of values `first` and `first` + 1 of a row, those that it has."""
    if first < width:
        low, high = memory.view(source + first, Uint8, 1, 1)[0].to(Uint32), Uint32(0)
        if first + 1 < width:
            high = memory.view(source + first + 1, Uint8, 1, 1)[0].to(Uint32)
        pair[0] = low | high << 8


@cute.jit
def store_codes(
    spec: cutlass.Constexpr, target: Int64, first: Int32, width: Int32, pair: cute.Tensor, scale: Float32
):  # fmt: skip
    """Store the values of a pair of codes, those that belong to the row."""
    words, (low, high) = cute.make_rmem_tensor(1, Uint32), e4m3_pair(pair[0])
    words[0] = warp.pack_16bit(memory.HALVES[spec.dtype], low * scale, high * scale)
    memory.store(target + 2 * first, words, cutlass.min(width - first, 2), 2)


@cute.jit
def store_scaled(
    spec: cutlass.Constexpr, target: Int64, first: Int32, width: Int32, words: cute.Tensor, scale: Float32
):
    """Store the values of e4m3 codes with one scale, if they belong to the row."""
    if first < width:
        values = cute.make_rmem_tensor(VALUES, Float32)
        for i in cutlass.range_constexpr(VALUES // 4):
            found = e4m3_values(words[i])
            for j in cutlass.range_constexpr(4):
                values[4 * i + j] = found[j] * scale
        store_values(spec, target, first, width, values)


@cute.jit
def store_values(spec: cutlass.Constexpr, target: Int64, first: Int32, width: Int32, values: cute.Tensor):
    """Round a lane's values to the output's type, and store those that belong to the row."""
    for half in cutlass.range_constexpr(2):
        eight = cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8))
        if first + 8 * half < width:
            memory.store_values(spec.dtype, target, first + 8 * half, width, eight)


def factor_of(form, behind, lane):
    """Return the factor of a lane's values. behind: address of those of the row."""
    block = lane * VALUES // form.vec
    if form.factor == "fp32":
        return memory.view(behind + 4 * block, Float32, 1, 4)[0]
    if form.permuted:
        block = 8 * (block % 4) + block // 4
    byte = memory.view(behind + block, Uint8, 1, 1)[0]
    if form.factor == "ue8m0":
        return warp.from_bits(byte.to(Uint32) << EXPONENT)
    return e4m3_pair(byte)[0]


@cute.jit
def store_packed(spec: cutlass.Constexpr, target: Int64, lane: Int32, held: HeldRow):
    """Store the values of codes with factors, and a pair of the rotated part."""
    form, values = const_expr(spec.form), cute.make_rmem_tensor(VALUES, Float32)
    words, factor = held.words[None, 0], held.factor[0]
    if lane * VALUES < form.latent:
        if const_expr(form.codes == "e2m1"):
            for i in cutlass.range_constexpr(VALUES):
                byte = words[i // 8] >> 8 * (i % 8 // 2) & 0xFF
                values[i] = nvfp4.code_value(byte, i % 2) * factor
        else:
            for i in cutlass.range_constexpr(VALUES // 4):
                found = e4m3_values(words[i])
                for j in cutlass.range_constexpr(4):
                    values[4 * i + j] = found[j] * factor
        store_values(spec, target, lane * VALUES, Int32(form.latent), values)
    if const_expr(apart_of(form) > 0):
        pair = held.pair
        if const_expr(form.rotated_as == "e4m3"):
            both = e4m3_pair(pair[0])
            pair[0] = warp.pack_16bit(memory.HALVES[spec.dtype], both[0], both[1])
        memory.store(target + 2 * form.latent + 4 * lane, pair, Int32(2), 2)
