"""Rows of whole vectors: the loops of launches in which every lane has two whole, aligned vectors of every row.

Nearly all launches are of this kind. The addresses of a group's rows then advance by a stride, and no access needs a
test: an iteration has a third of the instructions of those in `forward`, which serve all other launches. `applies` is
the same for all threads of a launch. The results of both are equal, bit for bit."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...device import copy, memory
from ...dtypes import BITS
from .. import places, rotate, store
from ..spec import BYTES, SF_VEC_SIZE, VECTOR_BYTES

Q, K, V = range(3)  # operands


def stored_vector_bytes(spec) -> int:
    """Return the bytes that a vector of a row takes in the cache."""
    return spec.elements * BITS[spec.cache] // 8


def address_bits(tensor, modes):
    """Return bits that are all 0 below a power of two if the tensor's address and its strides, in bytes, are multiples
    of it."""
    bits = tensor.iterator.toint()
    for mode in modes:
        bits = bits | Int64(tensor.stride[mode]) * (tensor.element_type.width // 8)
    return bits


def aligned(size, *bits):
    """Return whether addresses and strides (`address_bits`) are multiples of `size` bytes."""
    all_bits = bits[0]
    for other in bits[1:]:
        all_bits = all_bits | other
    return (all_bits & (size - 1)) == 0


@cute.jit
def fits(spec: cutlass.Constexpr, rows: cute.Tensor, cache: cute.Tensor, dim: Int32):
    """Return whether rows of K or V and their cache fit the loops of this file. dim: elements that lanes have."""
    found = rows.shape[2] == dim and aligned(VECTOR_BYTES, address_bits(rows, (0, 1)))
    return found and aligned(widest_store(spec), address_bits(cache, (0, 1, 2)))


def widest_store(spec) -> int:
    """Return the bytes of the widest store to the cache: of a vector; of a block of NVFP4, if a lane has all of it."""
    return SF_VEC_SIZE // 2 if spec.cache == "nvfp4" and not spec.transform else stored_vector_bytes(spec)


@cute.jit
def applies(spec: cutlass.Constexpr, a, g):
    """Return whether the loops of this file serve the launch."""
    dim = const_expr(2 * VECTOR_BYTES // BYTES[spec.dtype]) * g.lanes
    found = fits(spec, a.k, a.k_cache, dim)
    if a.v.shape[1] > 0:
        found = found and fits(spec, a.v, a.v_cache, dim)
    if const_expr(spec.quantised):
        found = found and a.k_scale_ptr.shape[0] <= 1 and a.v_scale_ptr.shape[0] <= 1
    if const_expr(spec.cache == "nvfp4"):
        found = found and a.v_sf_interleaved == 0
    if const_expr(spec.transform):
        found = found and aligned(VECTOR_BYTES, address_bits(a.q, (0, 1)), address_bits(a.q_out, (0, 1)))
        found = found and aligned(VECTOR_BYTES, address_bits(a.q_weight, ()), address_bits(a.k_weight, ()))
        found = found and a.q_weight.shape[0] <= dim and a.k_weight.shape[0] <= dim
        found = found and (places.rotation_rows(a) == 0 or rotate.whole_halves(a, g))
        found = found and (a.v.shape[1] == 0 or a.v.shape[0] >= a.k.shape[0])
        if const_expr(spec.quantised):
            found = found and aligned(8, address_bits(a.q_fp8, (0, 1))) and a.q_scale_ptr.shape[0] <= 1
            found = found and (a.q_fp8.shape[0] == 0 or a.q_out.shape[0] == 0)
    return found


def load_two(address: Int64, vector_stride, words: cute.Tensor):
    """Load two vectors of 16 bytes, `vector_stride` bytes from each other, as words (4, 2)."""
    for half in range(2):
        copy.vector(memory.view(address + half * vector_stride, Uint32, 4, VECTOR_BYTES), words[None, half])


def store_words(address: Int64, words: cute.Tensor):
    """Store words to an address that is aligned to their size."""
    copy.vector(words, memory.view(address, Uint32, cute.size(words), 4 * cute.size(words)))


# ---- rows of K or V that are copied or quantised


# One iteration per row of the group.
#   waits for   the loads of its vectors, which the iteration before issued
#   computes    their values in the cache's type
#   stores      them, and the scale factors of NVFP4
@cute.jit
def write_rows(spec: cutlass.Constexpr, g, rows, to, target: store.TargetRow, words: cute.Tensor):
    """Write the rows of a group to their place in the cache, as `forward.write_rows` does. target: of the group's first
    row. words: this lane's vectors of that row."""
    nvfp4 = const_expr(spec.cache == "nvfp4")
    size = const_expr(stored_vector_bytes(spec))
    begin, vector_stride = (2 * g.lane, Int32(1)) if const_expr(nvfp4) else (g.lane, g.lanes)
    source, step = rows.source + rows.first * rows.source_stride + begin * VECTOR_BYTES, rows.step * rows.source_stride
    address, stride = target.address + begin * size, rows.step * to.stride
    sf, sf_stride = target.sf + target.row * target.sf_row + g.lane, rows.step * to.sf_stride
    raw, values = cute.make_rmem_tensor((4, 2), Uint32), cute.make_rmem_tensor((8, 2), Float32)
    head, inverse = rows.first, store.reciprocal(target.scale)
    while head < rows.heads:
        for half in cutlass.range_constexpr(2):
            if const_expr(spec.quantised):
                memory.unpack(spec.dtype, words[None, half], values[None, half])
            else:
                for i in cutlass.range_constexpr(4):
                    raw[i, half] = words[i, half]
        head += rows.step
        source += step
        if head < rows.heads:
            load_two(source, vector_stride * VECTOR_BYTES, words)
        if const_expr(nvfp4):
            block = cute.make_tensor(values.iterator, cute.make_layout(SF_VEC_SIZE))
            store.store_block(address, sf, target.scale, block)
        else:
            for half in cutlass.range_constexpr(2):
                out = raw[None, half]
                if const_expr(spec.quantised):
                    out = store.narrow_words(spec.cache, values[None, half], target.scale, inverse)
                store_words(address + half * vector_stride * size, out)
        address += stride
        sf += sf_stride


# ---- rows of Q, K and V, normalised and rotated


class TokenParams(NamedTuple):
    """How the rows of a token are transformed, and where they go. to_k, to_v: places of K and V (`forward.TargetRows`).
    writes_q, writes_kv: whether Q, and whether K and V are written. rotates: whether Q and K are rotated, by `cos` and
    `sin`."""

    to_k: Any
    to_v: Any
    writes_q: cutlass.Boolean
    writes_kv: cutlass.Boolean
    rotates: cutlass.Boolean
    cos: cute.Tensor
    sin: cute.Tensor


class LoadCursor(NamedTuple):
    """Where a group loads its next row. address: of this lane's first vector. step: bytes to the group's next row of
    the operand."""

    operand: Int32
    head: Int32
    heads: Int32
    address: Int64
    step: Int64


class StoreCursor(NamedTuple):
    """Where a group stores its next row. address: of this lane's first vector. sf: of the scale factor of its block.
    scale: `store.TargetRow.scale`; inverse: its reciprocal."""

    operand: Int32
    head: Int32
    heads: Int32
    address: Int64
    step: Int64
    sf: Int64
    sf_step: Int64
    scale: Float32
    inverse: Float32


def row_count(a):
    """Return the number of rows of a token: those of Q come first, then those of K, then those of V."""
    return a.q.shape[1] + a.k.shape[1] + a.v.shape[1]


@cute.jit
def operand_of(a, operand: Int32, row: Int32):
    """Return (operand, head) of the row that is `row` rows behind the first one of an operand."""
    if operand == Q and row >= a.q.shape[1]:
        operand, row = Int32(K), row - a.q.shape[1]
    if operand == K and row >= a.k.shape[1]:
        operand, row = Int32(V), row - a.k.shape[1]
    return operand, row


@cute.jit
def load_cursor(a, g, operand: Int32, row: Int32) -> LoadCursor:
    """Return the cursor at the row that is `row` rows behind the first one of an operand."""
    operand, head = operand_of(a, operand, row)
    address, stride, heads = a.q[g.token, 0, None].iterator.toint(), Int64(a.q.stride[1]), a.q.shape[1]
    if operand == K:
        address, stride, heads = a.k[g.token, 0, None].iterator.toint(), Int64(a.k.stride[1]), a.k.shape[1]
    elif operand == V:
        address, stride, heads = a.v[g.token, 0, None].iterator.toint(), Int64(a.v.stride[1]), a.v.shape[1]
    stride = 2 * stride
    address += head * stride + g.lane * VECTOR_BYTES
    return LoadCursor(operand, head, heads, address, a.k_groups * stride)


@cute.jit
def store_cursor(spec: cutlass.Constexpr, a, g, params: TokenParams, operand: Int32, row: Int32) -> StoreCursor:
    """Return the cursor at the row that is `row` rows behind the first one of an operand."""
    to_k, to_v = params.to_k, params.to_v
    operand, head = operand_of(a, operand, row)
    size = const_expr(stored_vector_bytes(spec))
    first, stride, sf, sf_stride = to_k.first.address, to_k.stride, to_k.first.sf, to_k.sf_stride
    scale, heads, lane_bytes = Float32(1.0), a.k.shape[1], Int32(size)
    sf_row = to_k.first.sf_row
    if const_expr(spec.quantised):
        scale = store.scale_of(spec, a, a.k_scale, a.k_scale_ptr, Int32(0))
    if operand == V:
        first, stride, sf, sf_stride = to_v.first.address, to_v.stride, to_v.first.sf, to_v.sf_stride
        heads, sf_row = a.v.shape[1], to_v.first.sf_row
        if const_expr(spec.quantised):
            scale = store.scale_of(spec, a, a.v_scale, a.v_scale_ptr, Int32(0))
    elif operand == Q:
        first, stride = a.q_out[g.token, 0, None].iterator.toint(), 2 * Int64(a.q_out.stride[1])
        heads, lane_bytes = a.q.shape[1], Int32(VECTOR_BYTES)
        if const_expr(spec.quantised):
            if a.q_fp8.shape[0] > 0:
                first, stride = a.q_fp8[g.token, 0, None].iterator.toint(), Int64(a.q_fp8.stride[1])
                lane_bytes, scale = Int32(8), a.q_scale
                if a.q_scale_ptr.shape[0] > 0:
                    scale = a.q_scale_ptr[0]
    address = first + head * stride + g.lane * lane_bytes
    sf += to_k.first.row * sf_row + head * sf_stride
    if const_expr(spec.cache == "nvfp4"):
        sf += g.lane >> 1
    inverse = store.reciprocal(scale)
    return StoreCursor(operand, head, heads, address, a.k_groups * stride, sf, a.k_groups * sf_stride, scale, inverse)


def load_row(a, g, at: LoadCursor, words: cute.Tensor) -> LoadCursor:
    """Load a row, and return the cursor at the group's next one."""
    load_two(at.address, g.lanes * VECTOR_BYTES, words)
    return at._replace(head=at.head + a.k_groups, address=at.address + at.step)


def fetch(g, address: Int64, words: cute.Tensor):
    """Load a lane's two vectors of a row of Q, K or V or of weights."""
    load_two(address + g.lane * VECTOR_BYTES, g.lanes * VECTOR_BYTES, words)


@cute.jit
def weights_of(a, operand: Int32):
    """Return the address of the weights of the norm of an operand, 0 for none."""
    address, count = a.q_weight.iterator.toint(), a.q_weight.shape[0]
    if operand == K:
        address, count = a.k_weight.iterator.toint(), a.k_weight.shape[0]
    return address if operand != V and count > 0 else Int64(0)


@cute.jit
def add_offset(spec: cutlass.Constexpr, a, words: cute.Tensor, weights: cute.Tensor):
    """Write to `weights` (8, 2) the weights in words, plus their offset."""
    for half in cutlass.range_constexpr(2):
        memory.unpack(spec.dtype, words[None, half], weights[None, half])
        for e in cutlass.range_constexpr(rotate.HALF):
            weights[e, half] = weights[e, half] + a.norm_offset


# One iteration per row of the group.
#   waits for   the loads of the row, which the iteration before the last one issued; in shuffles, for the other lanes
#   computes    Q and K in fp32 registers: RMS norm, rotary embedding
#   stores      Q in its output, 16 or 8 bits; K and V in the cache
# Two rows are on their way while one is worked on: a token has few groups, and an SM few warps, if there are many rows.
# The weights of a norm stay in registers as long as the operand does.
@cute.jit
def transform_rows(
    spec: cutlass.Constexpr, a, g, words: cute.Tensor, weight_words: cute.Tensor, params: TokenParams
):  # fmt: skip
    """Normalise, rotate and write the rows of a group, as `forward.transform_any` does. words: the group's first row.
    weight_words: the weights of its norm."""
    next_words, raw = (cute.make_rmem_tensor((4, 2), Uint32) for _ in range(2))
    values, weights = (cute.make_rmem_tensor((rotate.HALF, 2), Float32) for _ in range(2))
    inv_dim = Float32(1.0) / Float32(a.k.shape[2])
    next_words.fill(0)
    row, step, end = g.own, a.k_groups, row_count(a)
    at = LoadCursor(Int32(Q), row + step, Int32(0), Int64(0), Int64(0))
    if row + step < end:
        at = load_row(a, g, load_cursor(a, g, Int32(Q), row + step), next_words)
    x = store_cursor(spec, a, g, params, Int32(Q), row)
    has_weights = weights_of(a, x.operand) != 0
    add_offset(spec, a, weight_words, weights)
    while row < end:
        for half in cutlass.range_constexpr(2):
            memory.unpack(spec.dtype, words[None, half], values[None, half])
            for i in cutlass.range_constexpr(4):
                raw[i, half], words[i, half] = words[i, half], next_words[i, half]
        if row + 2 * step < end:
            if at.head >= at.heads:
                at = load_cursor(a, g, at.operand + 1, at.head - at.heads)
            at = load_row(a, g, at, next_words)
        if params.writes_q if x.operand == Q else params.writes_kv:
            if x.operand != V:
                if has_weights:
                    inverse = rotate.inverse_rms(a, g, values, inv_dim)
                    for half in cutlass.range_constexpr(2):
                        for e in cutlass.range_constexpr(rotate.HALF):
                            values[e, half] = values[e, half] * inverse * weights[e, half]
                if params.rotates:
                    rotate.rotate_pairs(values, params.cos, params.sin)
            store_two(spec, a, g, x, values, raw)
        row += step
        if row < end:
            y = x._replace(head=x.head + step, address=x.address + x.step, sf=x.sf + x.sf_step)
            if y.head >= x.heads:
                y = store_cursor(spec, a, g, params, x.operand + 1, y.head - x.heads)
                address = weights_of(a, y.operand)
                has_weights = address != 0
                if has_weights:
                    fetch(g, address, weight_words)
                    add_offset(spec, a, weight_words, weights)
            x = y


@cute.jit
def store_two(spec: cutlass.Constexpr, a, g, x: StoreCursor, values: cute.Tensor, words: cute.Tensor):
    """Store a lane's two vectors of a row, and its scale if each row has its own; words: as they were read."""
    vector_stride, scale, inverse = g.lanes, x.scale, x.inverse
    if const_expr(spec.by_token):
        if x.operand != Q:
            scale = store.row_scale(spec.cache, g, values)
            inverse = store.reciprocal(scale)
            store.store_row_scale(g, x.sf, scale)
    if const_expr(not spec.quantised):
        if x.operand != V:
            for half in cutlass.range_constexpr(2):
                memory.pack(spec.dtype, values[None, half], words[None, half])
        for half in cutlass.range_constexpr(2):
            store_words(x.address + half * vector_stride * VECTOR_BYTES, words[None, half])
    else:
        if x.operand == Q and a.q_out.shape[0] > 0:
            for half in cutlass.range_constexpr(2):
                memory.pack(spec.dtype, values[None, half], words[None, half])
                store_words(x.address + half * vector_stride * VECTOR_BYTES, words[None, half])
        elif const_expr(spec.cache == "nvfp4") and x.operand != Q:
            for half in cutlass.range_constexpr(2):
                sf = x.sf + half * (vector_stride >> 1)
                store.store_block(x.address + half * vector_stride * 4, sf, x.scale, values[None, half])
        elif const_expr(spec.cache == "int8") and x.operand != Q:
            for half in cutlass.range_constexpr(2):
                out = store.narrow_words(spec.cache, values[None, half], scale, inverse)
                store_words(x.address + half * vector_stride * 8, out)
        else:
            for half in cutlass.range_constexpr(2):
                out = store.narrow_words(spec.q_cache, values[None, half], scale, inverse)
                store_words(x.address + half * vector_stride * 8, out)
