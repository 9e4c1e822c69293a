"""Epilogue: normalise acc_o and store rows of O and LSE. The four lanes of a quad share two rows of an accumulator."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy, nvfp4, warp, wgmma
from .. import block_scales, epilogue, geometry, logits, quant, softmax
from ..schedule.work import WorkTileInfo
from ..spec import SF_VEC_SIZE
from . import precision
from .groups import o_part

LANES = 4  # lanes that share a row of an accumulator


class CallScales(NamedTuple):
    """Scales of a call. score: from raw scores to log2 units. reduced: from the values that the softmax reduces, scores
    or capped scores, to log2 units. out: factor on the output."""

    score: Float32
    reduced: Float32
    out: Float32


class RowScales(NamedTuple):
    """`CallScales.score` and `CallScales.reduced` of each of a thread's rows."""

    score: Any
    reduced: Any


@cute.jit
def scales_of_call(spec: cutlass.Constexpr, a):
    """Return the `CallScales` of the call.

    With `precision.scales_rows`, scales in device memory may be per head: then `softmax.init_rows` and `store` apply
    them.
    """
    score, dequant_scale = a.logits.softmax_scale_log2, const_expr(precision.of(spec).dequant_scale)
    if const_expr(not precision.scales_rows(spec)):
        score = softmax.device_scale(score, a.logits.softmax_scale_ptr)
    if const_expr(dequant_scale != 1.0):
        score *= dequant_scale
    reduced = score
    if const_expr(spec.logits.soft_cap):
        if a.logits.soft_cap > 0.0:
            reduced = logits.capped_to_log2(a.logits.soft_cap)
    out = a.out.out_scale if const_expr(precision.scales_rows(spec)) else epilogue.output_scale(a)
    if const_expr(dequant_scale != 1.0):
        out *= dequant_scale
    return CallScales(score, reduced, out)


def scales_of(r) -> RowScales:
    """Return the scales of both of this thread's rows: their own, or those of the call."""
    return RowScales([r.call_scales.score] * 2, [r.call_scales.reduced] * 2) if r.scales is None else r.scales


def permuted_columns(spec):
    """Report whether `prepare.transpose` permuted the columns of V, and so of O.

    Per 16 columns, lane q of a quad then has columns 4 q + (0, 2, 1, 3) instead of 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q.
    """
    return precision.transposes_v(spec)


@cute.jit
def unpermute_columns(values: cute.Tensor):
    """Return a lane's values with `permuted_columns` in ascending order of columns."""
    found = cute.make_rmem_tensor(cute.size(values), Float32)
    for i in cutlass.range_constexpr(cute.size(values)):
        found[i] = values[i // 4 * 4 + (0, 2, 1, 3)[i % 4]]
    return found


def vec_bits_of(spec, bits):
    """Return the bits of the neighbouring columns that a lane has in a row of values of `bits` bits."""
    return bits * (4 if permuted_columns(spec) else 2)


def words_of(spec, bits):
    """Return the words that a lane has of its part of a row of values of `bits` bits, which is also the part's 16-byte
    pieces."""
    return spec.padded_vo // spec.tile.o_parts * bits // 128


def pieces_of(spec, bits):
    """Return the 16-byte pieces of a part of a row of values of `bits` bits that are stored: those before head_dim_vo.
    The last one may be half a piece."""
    return -(-spec.head_dim_vo // spec.tile.o_parts * bits // 128)


def first_piece(spec, bits):
    """Return the number of the first 16-byte piece of this warpgroup's part of a row."""
    return o_part(spec) * pieces_of(spec, bits)


def sf_blocks(spec):
    """Return the NVFP4 blocks of a part of a row."""
    return spec.head_dim_vo // spec.tile.o_parts // SF_VEC_SIZE


def allocate_words(spec, bits):
    """Allocate the words of a lane, rounded up to whole transposes of the quad."""
    return cute.make_rmem_tensor((words_of(spec, bits) + 3) // 4 * 4, Int32)


@cute.jit
def gather_vecs(words: cute.Tensor, at: cutlass.Constexpr, vec_bits: cutlass.Constexpr):
    """Reorder words[at:at+4], one from each lane of the quad, so that their vectors of vec_bits follow the row's order:
    the first vector of all lanes, then the second, and so on."""
    w = [words[at + i] for i in range(4)]
    if const_expr(vec_bits == 16):
        pairs = [quant.permute(w[i], w[i + 1], selector) for selector in (0x5410, 0x7632) for i in (0, 2)]
        for i in cutlass.range_constexpr(4):
            words[at + i] = pairs[i]
    elif const_expr(vec_bits == 8):
        pairs = [quant.permute(w[i], w[i + 1], selector) for selector in (0x5140, 0x7362) for i in (0, 2)]
        for i in cutlass.range_constexpr(4):
            words[at + i] = quant.permute(pairs[i // 2 * 2], pairs[i // 2 * 2 + 1], (0x5410, 0x7632)[i % 2])


@cute.jit
def store_piece(out: cute.Tensor, piece: cute.Tensor, number: Int32, whole: cutlass.Constexpr):
    """Store the number-th piece of a row, if the row has it. whole: each row has it."""
    size = const_expr(cute.size(piece))
    if const_expr(cute.size(out) % size != 0):  # the row ends with half a piece, and rows are aligned to as much
        for half in cutlass.range_constexpr(2):
            if number * 2 + half < cute.size(out) // (size // 2):
                some = cute.local_tile(piece, (size // 2,), (half,))
                copy.vector(some, cute.local_tile(out, (size // 2,), (number * 2 + half,)))
    else:
        target = cute.local_tile(out, (size,), (number,))
        if const_expr(whole):
            copy.vector(piece, target)
        elif number < cute.size(out) // size:
            copy.vector(piece, target)


@cute.jit
def store_words(spec: cutlass.Constexpr, out: cute.Tensor, words: cute.Tensor, bits: cutlass.Constexpr, keep):
    """Store a row of values of `bits` bits, if `keep`. words: this lane's, in the order of the accumulator.

    The quad transposes them so that each lane holds whole 16-byte pieces, and stores 64 contiguous bytes at a time.
    """
    lane, vec_bits = cute.arch.lane_idx() % 4, vec_bits_of(spec, bits)
    count, step = pieces_of(spec, bits), const_expr(4 if vec_bits <= 32 else 2)
    if const_expr(vec_bits <= 32):
        for k in cutlass.range_constexpr(0, count, 4):
            warp.quad_transpose(words, k)
            gather_vecs(words, k, vec_bits)
    if const_expr(spec.tile.o_parts > 1):  # a shuffle, so before a branch in which lanes differ
        first = first_piece(spec, bits) * const_expr(4 // step)
    if keep:
        for k in cutlass.range_constexpr(0, count, step):
            piece = cute.make_rmem_tensor(step, Int32)
            for i in cutlass.range_constexpr(step):
                piece[i] = words[k + i]
            number = k + lane if const_expr(vec_bits <= 32) else 2 * k + lane
            if const_expr(spec.tile.o_parts > 1):
                number += first
            store_piece(out, cute.recast_tensor(piece, out.element_type), number, count % 4 == 0)


@cute.jit
def store_16bit(spec: cutlass.Constexpr, a, token: Int32, head: Int32, values: cute.Tensor, keep):
    out = a.out.o[token, head, None]
    words = allocate_words(spec, 16)
    warp.convert16(values, cute.recast_tensor(words, out.element_type))
    store_words(spec, out, words, 16, keep)


@cute.jit
def store_e4m3(spec: cutlass.Constexpr, a, token: Int32, head: Int32, values: cute.Tensor, keep):
    words = allocate_words(spec, 8)
    warp.convert8(values, cute.make_tensor(words.iterator, cute.make_layout(words_of(spec, 8))))
    store_words(spec, a.out.o_fp8[token, head, None], words, 8, keep)


@cute.jit
def store_nvfp4(spec: cutlass.Constexpr, a, token: Int32, head: Int32, values: cute.Tensor, keep):
    """Store a row in NVFP4. A block of 16 columns is four values of each lane of the quad, in either column order; each
    lane stores the scale factors of four blocks, as one word if a head has whole words."""
    lane, blocks, part = cute.arch.lane_idx() % 4, sf_blocks(spec), o_part(spec)
    words = allocate_words(spec, 4)
    words.fill(0)
    for first in cutlass.range_constexpr(0, blocks, 4):
        sf_word = Int32(0)
        for i in cutlass.range_constexpr(min(4, blocks - first)):
            block = const_expr(first + i)
            own = cute.make_rmem_tensor(4, Float32)
            for e in cutlass.range_constexpr(4):
                own[e] = values[4 * block + e]
            sf = nvfp4.compute_sf(nvfp4.block_amax(own, (1, 2)), a.out.o_sf_scale)
            words[block // 2] = words[block // 2] | nvfp4.codes(own, sf) << (16 * (block % 2))
            sf_word = sf_word | sf.byte.to(Int32) << (8 * i)
        if keep and lane == first // 4 % 4:
            block_scales.store_sf4(a, token, head, part * blocks + first, min(4, blocks - first), sf_word)
    store_words(spec, a.out.o_fp4[token, head, None], words, 4, keep)


@cute.jit
def store_row(spec: cutlass.Constexpr, a, token: Int32, head: Int32, values: cute.Tensor, keep):
    """Store a row of O in the call's output type. values (D / 4,): this lane's, in the order of the accumulator."""
    if const_expr(len(spec.out) > 1):
        if a.out.o_fp4.shape[0] > 0:
            store_nvfp4(spec, a, token, head, values, keep)
        elif a.out.o_fp8.shape[0] > 0:
            store_e4m3(spec, a, token, head, values, keep)
        else:
            store_16bit(spec, a, token, head, values, keep)
    else:
        store_16bit(spec, a, token, head, values, keep)


@cute.jit
def zero_pieces(spec: cutlass.Constexpr, out: cute.Tensor, bits: cutlass.Constexpr, keep):
    """Store zeros to a row of values of `bits` bits, if `keep`."""
    lane, piece = cute.arch.lane_idx() % LANES, cute.make_rmem_tensor(4, Int32)
    pieces = pieces_of(spec, bits)
    piece.fill(0)
    if const_expr(spec.tile.o_parts > 1):
        lane += first_piece(spec, bits)
    if keep:
        for k in cutlass.range_constexpr(0, pieces, 4):
            store_piece(out, cute.recast_tensor(piece, out.element_type), k + lane, pieces % 4 == 0)


@cute.jit
def zero_row(spec: cutlass.Constexpr, a, token: Int32, head: Int32, keep):
    """Store a row of zeros to O in the output type of the call."""
    if const_expr(len(spec.out) > 1):
        if a.out.o_fp4.shape[0] > 0:
            zero_pieces(spec, a.out.o_fp4[token, head, None], 4, keep)
            lane, blocks = (
                cute.arch.lane_idx() % LANES,
                sf_blocks(spec),
            )
            before = o_part(spec) * blocks
            if const_expr(blocks % 4 == 0):
                if keep and lane * 4 < blocks:
                    block_scales.store_sf4(a, token, head, before + lane * 4, 4, Int32(0))
            elif keep and lane == 0:
                for first in cutlass.range_constexpr(0, blocks, 4):
                    block_scales.store_sf4(a, token, head, before + first, min(4, blocks - first), Int32(0))
        elif a.out.o_fp8.shape[0] > 0:
            zero_pieces(spec, a.out.o_fp8[token, head, None], 8, keep)
        else:
            zero_pieces(spec, a.out.o[token, head, None], 16, keep)
    else:
        zero_pieces(spec, a.out.o[token, head, None], 16, keep)


@cute.jit
def store(spec: cutlass.Constexpr, a, r, w: WorkTileInfo, empty: cutlass.Constexpr):
    """Normalise this thread's rows and store those of the sequence to O and LSE. empty: no row sees a key."""
    o = wgmma.rows_cols(r.acc_o)
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        row = w.m_block * spec.tile.m + r.cols[k, 0][0]
        token = geometry.token_of(row, geometry.pack_divisor(w))
        keep = token < w.sequence.q_len
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        sink = epilogue.sink_of(a, head)
        lse, top = epilogue.lse_of(a, sink * logits.LOG2_E, Float32(0.0), Float32(0.0)), -Float32.inf
        if const_expr(empty):
            zero_row(spec, a, w.sequence.q_start + token, head, keep)
        else:
            values = cute.make_rmem_tensor(cute.size(o, mode=[1]), Float32)
            top, total = softmax.row_sum_of(r.st, k, LANES)
            normal = softmax.normalizer(top, total, sink)
            lse = epilogue.lse_of(a, normal.lse, top, total)
            scale = normal.inv_row_sum * r.call_scales.out
            if const_expr(r.scales is not None):
                scale *= softmax.head_scale(a.out.out_scale_ptr, head)
            values.store(o[k, None].load() * scale)
            if const_expr(permuted_columns(spec)):
                values = unpermute_columns(values)
            store_row(spec, a, w.sequence.q_start + token, head, values, keep)
        mine = keep and cute.arch.lane_idx() % LANES == 0
        if const_expr(spec.tile.o_parts > 1):
            is_first = o_part(spec) == 0
            mine = mine and is_first
        epilogue.store_lse(a, w.sequence.q_start + token, head, lse, mine)
        epilogue.store_max(a, w.sequence.q_start + token, head, top, mine)
