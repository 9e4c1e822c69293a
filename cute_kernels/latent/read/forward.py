"""Read rows of latent attention from the pages of requests, and dequantise them: host part and device entry.

A warp, or eight lanes for an indexer's rows, takes neighbouring rows of the output. It finds the request of the first
one by bisection, and goes from request to request with the rows. Lane l holds values 16 l to 16 l + 15 of the latent,
and pair l of the rotated part; it takes further pieces of a row that is longer. There is no shared memory, and no
barrier.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | | `griddepcontrol.wait`: the kernels that wrote the cache | `launch_dependents` |
| `read_rows` | lanes of a row | offsets, page table | them | registers |
| `read_row` | | a row of the cache | it | a row of the output |

Every CTA waits for the grid before it, so a kernel that waits for this one sees what both have written."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from ... import abi
from ...cache_write import places
from ...device import memory, nvfp4, warp
from ...device.divisor import divide
from ..args import READ_INDICES, ReadArgs, pack_read, read_fields
from ..records import BYTES, INDEX
from . import THREADS, VALUES, ctas_per_sm, lanes

PIECE = 16  # bytes that a lane copies at a time
SCALE_BYTES = 4  # of a row of an indexer
EXPONENT = 23  # bits below it in fp32


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


@cute.jit
def read_rows(spec: cutlass.Constexpr, a, row: Int32, count: Int32, rows: Int32):
    """Read `count` rows of the output from one on. rows: of all requests."""
    # the last request that begins at or before the first row
    low, high = Int32(0), Int32(a.page_table.shape[0])
    while high - low > 1:
        middle = (low + high) >> 1
        if start_of(a, middle, rows) <= row:
            low = middle
        else:
            high = middle
    request, end = low, row + count
    first, after = start_of(a, request, rows), start_of(a, request + 1, rows)
    while row < end:
        while row >= after and request + 1 < a.page_table.shape[0]:
            request += 1
            first, after = after, start_of(a, request + 1, rows)
        if row >= first:
            begin = Int32(0)
            if request < (a.firsts.shape[0] >> is_wide(a, "firsts")):
                begin = places.element(a.firsts, request, is_wide(a, "firsts"))
            position = begin + (row - first)  # a sum past 2^31 - 1 is negative, and so names no row
            if begin >= 0 and position >= 0:
                read_position(spec, a, row, request, position)
        row += 1


@cute.jit
def read_position(spec: cutlass.Constexpr, a, row: Int32, request: Int32, position: Int32):
    """Read the row at a position of a request, if it has a page there."""
    size, words = a.cache.shape[1], is_wide(a, "page_table")
    column = divide(position, size)
    if column < (a.page_table.shape[1] >> words):
        page = places.element(a.page_table[request, None], column, words)
        if page >= 0 and page < a.cache.shape[0]:
            read_row(spec, a, row, page, position - column * size)


@cute.jit
def read_row(spec: cutlass.Constexpr, a, row: Int32, page: Int32, at: Int32):
    """Read a row of a page to a row of the output."""
    lane, form = cute.arch.lane_idx() % const_expr(lanes(spec)), const_expr(spec.form)
    begin, target = a.cache.iterator.toint() + Int64(page) * a.cache.stride[0], memory.row_of(a.out, row)
    if const_expr(form.planar):
        source = begin + Int64(at) * form.row
        behind = begin + Int64(a.cache.shape[1]) * form.row + Int64(at) * form.factor_row
    else:
        source = begin + Int64(at) * a.cache.stride[1]
        behind = source + form.factors_at
    if const_expr(spec.record in (BYTES, INDEX)):
        copy_bytes(source, target, a.out.shape[1], lane, const_expr(lanes(spec)))
        if const_expr(spec.record == INDEX):
            if lane == 0:
                words = cute.make_rmem_tensor(1, Uint32)
                memory.load(behind, words, Int32(SCALE_BYTES), 1)
                memory.store(memory.row_of(a.scales, row), words, Int32(SCALE_BYTES), 1)
    elif const_expr(form.vec == 0):
        scale = a.scale
        if a.scale_ptr.shape[0] > 0:
            scale = a.scale_ptr[0]
        scaled_row(spec, source, target, a.out.shape[1], lane, scale)
    else:
        packed_row(spec, source, behind, target, lane)


@cute.jit
def copy_bytes(source: Int64, target: Int64, count: Int32, lane: Int32, step: cutlass.Constexpr):
    """Copy bytes, in pieces that `step` lanes take in turn."""
    words, first = cute.make_rmem_tensor(PIECE // 4, Uint32), lane * PIECE
    while first < count:
        memory.load(source + first, words, count - first, 1)
        memory.store(target + first, words, count - first, 1)
        first += PIECE * step


def e4m3_pair(pair):
    """Return the values of two e4m3 codes in fp32."""
    text = "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};"
    both = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair.to(Uint16)])
    return memory.widen("fp16", both)


def e4m3_values(word):
    """Return the values of the four e4m3 codes of a word in fp32."""
    return (*e4m3_pair(word), *e4m3_pair(word >> 16))


@cute.jit
def scaled_row(spec: cutlass.Constexpr, source: Int64, target: Int64, count: Int32, lane: Int32, scale: Float32):
    """Read a row of e4m3 codes with one scale."""
    words, values = cute.make_rmem_tensor(VALUES // 4, Uint32), cute.make_rmem_tensor(VALUES, Float32)
    first = lane * VALUES
    while first < count:
        memory.load(source + first, words, count - first, 1)
        for i in cutlass.range_constexpr(VALUES // 4):
            found = e4m3_values(words[i])
            for j in cutlass.range_constexpr(4):
                values[4 * i + j] = found[j] * scale
        store_values(spec, target, first, count, values)
        first += VALUES * const_expr(lanes(spec))


@cute.jit
def store_values(spec: cutlass.Constexpr, target: Int64, first: Int32, count: Int32, values: cute.Tensor):
    """Round a lane's values to the output's type, and store those that belong to the row."""
    for half in cutlass.range_constexpr(2):
        eight = cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8))
        if first + 8 * half < count:
            memory.store_values(spec.dtype, target, first + 8 * half, count, eight)


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
def packed_row(spec: cutlass.Constexpr, source: Int64, behind: Int64, target: Int64, lane: Int32):
    """Read a row of codes with factors, and its rotated part."""
    form, values = const_expr(spec.form), cute.make_rmem_tensor(VALUES, Float32)
    apart = const_expr(form.rotated if form.rotated_as != "codes" else 0)
    if lane * VALUES < form.latent:
        factor = factor_of(form, behind, lane)
        if const_expr(form.codes == "e2m1"):
            words = cute.make_rmem_tensor(VALUES // 8, Uint32)
            memory.load(source + lane * (VALUES // 2), words, Int32(VALUES // 2 // form.unit), form.unit)
            for i in cutlass.range_constexpr(VALUES):
                byte = words[i // 8] >> 8 * (i % 8 // 2) & 0xFF
                values[i] = nvfp4.code_value(byte, i % 2) * factor
        else:
            words = cute.make_rmem_tensor(VALUES // 4, Uint32)
            memory.load(source + lane * VALUES, words, Int32(VALUES // form.unit), form.unit)
            for i in cutlass.range_constexpr(VALUES // 4):
                found = e4m3_values(words[i])
                for j in cutlass.range_constexpr(4):
                    values[4 * i + j] = found[j] * factor
        store_values(spec, target, lane * VALUES, Int32(form.latent), values)
    if const_expr(apart > 0):
        pair = cute.make_rmem_tensor(1, Uint32)
        place = source + form.rotated_at
        if const_expr(form.rotated_as == "e4m3"):
            code = memory.view(place + 2 * lane, Uint8, 2, 1)
            both = e4m3_pair(code[0].to(Uint16) | code[1].to(Uint16) << 8)
            pair[0] = warp.pack_16bit(memory.HALVES[spec.dtype], both[0], both[1])
        else:
            memory.load(place + 4 * lane, pair, Int32(2), 2)
        memory.store(target + 2 * form.latent + 4 * lane, pair, Int32(2), 2)
