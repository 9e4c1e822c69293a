"""Rows of whole, aligned vectors that are neither normalised nor rotated: the loop of nearly all launches of many rows.

`applies` is the same for all threads of a launch. The addresses of a warp's rows then advance by a stride, no access
needs a test, and a row takes a third of the instructions of the loop in `forward`. The results of both are equal, bit
for bit."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from ...cache_write import places, store
from ...cache_write.args import SLOTS
from ...device import copy, memory
from . import INDEX_LANES, VALUES, WARP, factors

VECTOR = 16  # bytes
LATENT_BYTES, PAIR_BYTES = 2 * VALUES, 4  # of a lane


def address_bits(tensor, modes):
    """Return bits that are all 0 below a power of two if the tensor's address and its strides, in bytes, are multiples
    of it."""
    bits = tensor.iterator.toint()
    for mode in modes:
        bits = bits | memory.bytes_of(tensor, mode)
    return bits


@cute.jit
def applies(spec: cutlass.Constexpr, a):
    """Return whether the loop of `write_rows` serves a launch."""
    form = const_expr(spec.form)
    inside = const_expr(form.rotated_as == "codes")
    whole = a.kv.shape[1] == (const_expr(form.latent - (form.rotated if inside else 0)) or WARP * VALUES)
    whole = whole and a.pe.shape[1] == (form.rotated or (0 if form.vec > 0 else 2 * WARP))
    bits = address_bits(a.kv, (0,)) | address_bits(a.cache, (0,) if form.planar else (0, 1))
    # rows of records without factors are as long as the call says; the rotated part then begins behind the latent
    whole = whole and (bits & (VECTOR - 1)) == 0 and (address_bits(a.pe, (0,)) & (VECTOR - 1 if inside else 3)) == 0
    return whole and (address_bits(a.pe_cache, (0, 1)) & 3) == 0 and is_plain(a) and a.pe_out.shape[0] == 0


@cute.jit
def is_plain(a):
    """Return whether a launch writes keys alone, to slots, as they are."""
    turned = a.rope_table.shape[0] > 0 or a.rope_rows.shape[0] > 0
    return a.places == SLOTS and a.weight.shape[0] == 0 and a.q_pe.shape[1] == 0 and not turned and a.kv.shape[0] > 0


class LaneRow(NamedTuple):
    """Where a lane reads its part of the next row, and by how many bytes the row after it is further on."""

    latent: Int64
    latent_step: Int64
    pair: Int64
    pair_step: Int64


@cute.jit
def first_row(spec: cutlass.Constexpr, a, row: Int32, step: Int32) -> LaneRow:
    """Return where a lane reads its first row."""
    lane = cute.arch.lane_idx()
    stride, pair_stride = memory.bytes_of(a.kv, 0), memory.bytes_of(a.pe, 0)
    latent = memory.row_of(a.kv, row) + lane * LATENT_BYTES
    if const_expr(spec.form.rotated_as == "codes"):
        if lane * VALUES >= a.kv.shape[1]:
            latent = memory.row_of(a.pe, row) + (lane - a.kv.shape[1] // VALUES) * LATENT_BYTES
            stride = pair_stride
    pair = memory.row_of(a.pe, row) + lane * PAIR_BYTES
    return LaneRow(latent, step * stride, pair, step * pair_stride)


@cute.jit
def load(spec: cutlass.Constexpr, at: LaneRow, words: cute.Tensor, pair: cute.Tensor) -> LaneRow:
    """Load a lane's part of a row, and return where that of the next one is."""
    if const_expr(spec.form.latent in (0, WARP * VALUES)):
        load_latent(at, words)
    elif cute.arch.lane_idx() * VALUES < spec.form.latent:
        load_latent(at, words)
    if const_expr(spec.form.rotated_as != "codes" and (spec.form.rotated > 0 or spec.form.vec == 0)):
        pair[0] = memory.view(at.pair, Uint32, 1, PAIR_BYTES)[0]
    return at._replace(latent=at.latent + at.latent_step, pair=at.pair + at.pair_step)


def load_latent(at, words):
    for half in range(2):
        copy.vector(memory.view(at.latent + VECTOR * half, Uint32, 4, VECTOR), words[None, half])


def store_words(address, words):
    """Store words to an address that is aligned to their size."""
    copy.vector(words, memory.view(address, Uint32, cute.size(words), 4 * cute.size(words)))


# One iteration per row of the warp.
#   waits for   the loads of the row and of its slot, which the iteration before issued; in shuffles, for other lanes
#   computes    factors and codes, in registers
#   stores      the row
@cute.jit
def write_rows(spec: cutlass.Constexpr, a, row: Int32, step: Int32):
    """Write every `step`-th key, from one on."""
    words, held = (cute.make_rmem_tensor((4, 2), Uint32) for _ in range(2))
    pair, held_pair = (cute.make_rmem_tensor(1, Uint32) for _ in range(2))
    words.fill(0)
    pair.fill(0)
    pool, rows = places.PagePool(a.cache.shape[0], a.cache.shape[1]), a.kv.shape[0]
    slot, at = places.IndexWords(Int32(-1), Int32(-1)), first_row(spec, a, row, step)
    scale = a.scale
    if a.scale_ptr.shape[0] > 0:
        scale = a.scale_ptr[0]
    inverse = store.reciprocal(scale)
    if row < rows:
        slot, at = places.request_slot(a, row), load(spec, at, words, pair)
    while row < rows:
        own = slot
        for i in cutlass.range_constexpr(cute.size(words)):
            held[i] = words[i]
        held_pair[0] = pair[0]
        row += step
        if row < rows:
            slot, at = places.request_slot(a, row), load(spec, at, words, pair)
        place = places.place_of(a, pool, row, places.TokenPosition(Int32(-1), Int32(-1)), own)
        if place.page >= 0:
            store_row(spec, a, place, held, held_pair[0], scale, inverse)


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, place: places.CachePlace, words: cute.Tensor, pair: Uint32, scale: Float32,
    inverse: Float32,
):  # fmt: skip
    """Store a row of the cache. scale: of records without factors; inverse: its reciprocal."""
    lane, form = cute.arch.lane_idx(), const_expr(spec.form)
    page = a.cache.iterator.toint() + Int64(place.page) * a.cache.stride[0]
    if const_expr(form.planar):
        address = page + Int64(place.row) * form.row
        behind = page + Int64(a.cache.shape[1]) * form.row + Int64(place.row) * form.factor_row
    else:
        address = page + Int64(place.row) * a.cache.stride[1]
        behind = address + form.factors_at
    values = cute.make_rmem_tensor(VALUES, Float32)
    if const_expr(form.codes != ""):
        for half in cutlass.range_constexpr(2):
            eight = cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8))
            memory.unpack(spec.dtype, words[None, half], eight)
    if const_expr(form.codes == ""):
        for half in cutlass.range_constexpr(2):
            store_words(address + lane * LATENT_BYTES + VECTOR * half, words[None, half])
    elif const_expr(form.codes == "e2m1"):
        f = factors.block_scale(values)
        factors.store_e2m1_factor(spec, behind, lane, f)
        store_words(address + lane * (VALUES // 2), factors.e2m1_words(values, f))
    elif const_expr(form.vec == 0):
        store_words(address + lane * VALUES, store.narrow_words("e4m3", values, scale, inverse))
    else:
        lanes = const_expr(form.vec // VALUES)
        found = factors.scale_of(spec, a, factors.largest(values, lanes, Uint32(factors.ALL)))
        if lane * VALUES < form.latent:
            if lane % lanes == 0:
                size = const_expr(4 if form.factor == "fp32" else 1)
                factors.store_factor(spec, behind + (lane // lanes) * size, found)
            store_words(address + lane * VALUES, factors.e4m3_words(spec, a, values, found))
    if const_expr(form.rotated_as != "codes" and (form.rotated > 0 or form.vec == 0)):
        store_pair(spec, a, place, address, pair, scale, inverse)


@cute.jit
def store_pair(
    spec: cutlass.Constexpr, a, place: places.CachePlace, address: Int64, pair: Uint32, scale: Float32,
    inverse: Float32,
):  # fmt: skip
    """Store a lane's pair of neighbours of the rotated part. address: of the row."""
    lane, form = cute.arch.lane_idx(), const_expr(spec.form)
    size = const_expr(1 if form.rotated_as == "e4m3" else 2)
    target = address + form.rotated_at
    if const_expr(form.row == 0):
        target = address + size * WARP * VALUES
    if a.pe_cache.shape[0] > 0:
        target = a.pe_cache.iterator.toint() + Int64(place.page) * a.pe_cache.stride[0]
        target += Int64(place.row) * a.pe_cache.stride[1]
    if const_expr(form.rotated_as == "e4m3"):
        low, high = memory.widen(spec.dtype, pair)
        if const_expr(form.vec == 0):
            low, high = store.quotient(low, scale, inverse), store.quotient(high, scale, inverse)
        for i in cutlass.range_constexpr(2):
            byte = factors.e4m3_byte(high if const_expr(i == 1) else low)
            memory.view(target + 2 * lane + i, Uint8, 1, 1)[0] = byte.to(Uint8)
    else:
        memory.view(target + PAIR_BYTES * lane, Uint32, 1, PAIR_BYTES)[0] = pair


# ---- keys of an indexer: eight lanes share a row


@cute.jit
def applies_to_index(spec: cutlass.Constexpr, a):
    """Return whether the loop of `write_index_rows` serves a launch."""
    bits = address_bits(a.kv, (0,)) | address_bits(a.cache, (0,))
    return (bits & (VECTOR - 1)) == 0 and is_plain(a)


@cute.jit
def write_index_rows(spec: cutlass.Constexpr, a, first: Int32, step: Int32):
    """Write the keys of every `step`-th warp, from one on, as `write_rows` does."""
    words, held = (cute.make_rmem_tensor((4, 2), Uint32) for _ in range(2))
    lane, group = cute.arch.lane_idx() % INDEX_LANES, cute.arch.lane_idx() // INDEX_LANES
    mask = Uint32((1 << INDEX_LANES) - 1) << Uint32(group * INDEX_LANES)
    pool, rows = places.PagePool(a.cache.shape[0], a.cache.shape[1]), a.kv.shape[0]
    row, more = first * (WARP // INDEX_LANES) + group, step * (WARP // INDEX_LANES)
    source, stride = memory.row_of(a.kv, row) + lane * LATENT_BYTES, more * memory.bytes_of(a.kv, 0)
    slot, at = places.IndexWords(Int32(-1), Int32(-1)), LaneRow(source, stride, Int64(0), Int64(0))
    form, values = const_expr(spec.form), cute.make_rmem_tensor(VALUES, Float32)
    words.fill(0)
    if row < rows:
        slot = places.request_slot(a, row)
        load_latent(at, words)
    while row < rows:
        own = slot
        for i in cutlass.range_constexpr(cute.size(words)):
            held[i] = words[i]
        row += more
        at = at._replace(latent=at.latent + at.latent_step)
        if row < rows:
            slot = places.request_slot(a, row)
            load_latent(at, words)
        for half in cutlass.range_constexpr(2):
            eight = cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8))
            memory.unpack(spec.dtype, held[None, half], eight)
        scale = factors.scale_of(spec, a, factors.largest(values, INDEX_LANES, mask))
        place = places.place_of(a, pool, row, places.TokenPosition(Int32(-1), Int32(-1)), own)
        if place.page >= 0:
            page = a.cache.iterator.toint() + Int64(place.page) * a.cache.stride[0]
            address = page + Int64(place.row) * form.row + lane * VALUES
            store_words(address, factors.e4m3_words(spec, a, values, scale))
            if lane == 0:
                behind = page + Int64(a.cache.shape[1]) * form.row + Int64(place.row) * form.factor_row
                factors.store_factor(spec, behind, scale)
