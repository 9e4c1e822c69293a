"""The two MMAs of decode, S^T = K @ Q^T and O^T += V^T @ P^T, and their operands.

K and V are the A operands: read from shared memory in their storage type and converted in registers (`quant`). Q and P
are the B operands; Q stays in registers for a whole tile. `layout` says which bytes and columns a lane has.

A chunk is the part of a row of K or V in one TMA box, at most 128 bytes (`layout.CachedRow`). An n tile is the 8 query
rows of one MMA.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import copy, mma, pipeline
from .. import geometry, logits, precision, quant
from ..kv import scales
from ..spec import SF_VEC_SIZE
from .layout import CachedRow, columns, keys, num_n_tiles, q_words, scale_blocks, sf_per_quarter, v_offset_of


class KeyCursor(NamedTuple):
    """A group of `layout.keys` keys: the item of their block in k.pipe and v.pipe, their first row in the stage, and
    their first key in the sequence."""

    block: pipeline.PackedState
    row: Int32
    key: Int32


class VFragment(NamedTuple):
    """Registers of a chunk of V: words (word, a lane's 4 keys, groups of 16 keys), and scale factors (block, a lane's 4
    keys, groups of 16 keys) or None."""

    words: cute.Tensor
    scales: Any


def fill(spec, c, value):
    """Set every register of an accumulator to `value`. On Blackwell one at a time: its compiler keeps a vector in
    pairs of registers, which it copies to the four registers of each MMA, and back."""
    if not spec.tile.blackwell:
        c.fill(value)
        return
    for i in range(cute.size(c)):
        c[i] = Float32(value)


def allocate_v(spec, s):
    """Allocate the registers of one chunk of V."""
    count = keys(spec) // 16
    words = cute.make_rmem_tensor((CachedRow.of_v(spec).width // 32, 4, count), Uint32)
    has_scales = scales.has_block_factors(spec)
    return VFragment(words, cute.make_rmem_tensor((scale_blocks(spec), 4, count), Uint32) if has_scales else None)


@cute.jit
def fetch_q(spec: cutlass.Constexpr, a, r, tile, words: cute.Tensor):
    """Load this lane's rows g of Q as words (D / 8, n tile): zeros past the sequence and past head_dim_qk, columns in
    the order of chunks."""
    w, row = tile.w, CachedRow.of_k(spec)
    g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    # vectors of 8 elements in a lane's quarter of a chunk
    vectors = const_expr(row.width * 8 // spec.kv.bits // 4 // 8)
    words.fill(0)
    for n_tile in cutlass.range_constexpr(num_n_tiles(spec)):
        at = tile.first_row + spec.tile.rows_per_warp * tile.row_group + 8 * n_tile + g
        if at < tile.rows:
            token = geometry.token_of(at, r.pack_factor)
            head = geometry.head_of(at, w.head_idx, r.pack_factor)
            source = a.query.q[w.sequence.q_start + token, head, None]
            for i in cutlass.range_constexpr(row.chunks * vectors):
                number = (i // vectors * 4 + t) * vectors + i % vectors
                target = cute.local_tile(words[None, n_tile], (4,), (i,))
                if const_expr(row.pitch > 0 or spec.padded_qk == spec.head_dim_qk):
                    load_query(cute.local_tile(source, (8,), (number,)), target)
                elif number < spec.head_dim_qk // 8:
                    load_query(cute.local_tile(source, (8,), (number,)), target)
            if const_expr(row.tail > 0):
                # the last 16 columns, of which a lane has 4
                last = const_expr(cute.size(words, mode=[0]) // 2 - 1)
                number = 8 * row.chunks + t
                load_query(
                    cute.local_tile(source, (4,), (number,)), cute.local_tile(words[None, n_tile], (2,), (last,))
                )


@cute.jit
def load_query(piece: cute.Tensor, words: cute.Tensor):
    """Load 4 or 8 elements of Q as words of pairs; e4m3 becomes fp16, which holds its values exactly."""
    if const_expr(piece.element_type.width == 16):
        copy.vector(piece, cute.recast_tensor(words, piece.element_type))
    else:
        stored = cute.make_rmem_tensor(cute.size(piece), piece.element_type)
        copy.vector(piece, stored)
        for i in cutlass.range_constexpr(cute.size(words) // 2):
            words[2 * i], words[2 * i + 1] = quant.from_e4m3(cute.recast_tensor(stored, Uint32)[i])


@cute.jit
def set_q(spec: cutlass.Constexpr, a, r, tile, words: cute.Tensor, softmax_scale_log2: Float32):
    """Make the B operand of S^T from the fetched `words`: in the MMA's type, with the columns in the order in which the
    words of K, as stored, are converted. Also set the token and the score factors of each row."""
    p = precision.of_mma_sync(spec)
    t = cute.arch.lane_idx() % 4
    for n_tile in cutlass.range_constexpr(num_n_tiles(spec)):
        # fp16 with a scale per row, if K is quantised
        q_row_scale, own = Float32(p.dequant_scale), words[None, n_tile]
        if const_expr(p.scales_q_rows):
            q_row_scale *= quant.to_fp16(own)
        # token and score factors of this lane's rows of S
        for i in cutlass.range_constexpr(2):
            k = 2 * n_tile + i
            row = tile.first_row + spec.tile.rows_per_warp * tile.row_group + 8 * n_tile + 2 * t + i
            r.tokens[k] = geometry.token_of(row, r.pack_factor)
            r.score_to_log2[k] = cute.arch.shuffle_sync(q_row_scale, 8 * t + 4 * i) * softmax_scale_log2
            capped = a.logits.soft_cap > 0.0
            r.to_log2[k] = logits.capped_to_log2(a.logits.soft_cap) if capped else r.score_to_log2[k]
        # the B operand
        for i in cutlass.range_constexpr(q_words(spec)):
            r.q[i, n_tile] = in_order(p.kv_format, own, i)


def in_order(fmt, words, i):
    """Return the i-th pair of a row of Q in the order in which the words of K, as stored, are converted."""
    start = i * 2 // fmt.elements * fmt.elements
    first, second = (start + fmt.order[i * 2 % fmt.elements + e] for e in range(2))
    if second == first + 1:
        return words[i]
    return quant.permute(words[first // 2], words[second // 2], (0x5410, 0x7632)[first % 2])


def gemm_qk(spec, s, r, acc_s, stage, row):
    """Compute acc_s = K @ Q^T for the rows [row, row + keys) of a K stage."""
    types = precision.of_mma_sync(spec)
    mma_dtype, fmt = types.mma_dtype, types.kv_format
    k, n = CachedRow.of_k(spec), spec.tile.n
    base = s.k.smem.iterator.toint() + stage * (n * k.stage_bytes) + row * k.row_bytes
    quarter = k.width // 4  # bytes of a chunk that a lane reads
    fill(spec, acc_s, 0.0)
    for m in range(keys(spec) // 16):  # 16 keys, of which this lane has two: rows g and g + 8 of the A operand
        offsets = (16 * m, 16 * m + 8)
        sf = [load_k_sf(spec, s, r, stage, row + offset) for offset in offsets]
        for chunk in range(k.chunks + (k.tail > 0)):
            # load this lane's quarter of the chunk, for both keys, and convert it
            pairs: list[list[Any]] = [[], []]
            whole = chunk < k.chunks
            for a_row, offset in enumerate(offsets):
                for piece in range(max(1, quarter // 16)):
                    address = base + k.offset(n, offset, chunk) + r.k_offsets[piece if whole else 1]
                    for word in mma.load(address, min(4, quarter // 4) if whole else 1):
                        block = (chunk * quarter // 4 + len(pairs[a_row]) // 4) // 2
                        pairs[a_row] += quant.scale_pairs(quant.unpack_row(fmt, word), sf[a_row], block)
            # S^T += K @ Q^T, 16 columns per MMA
            for i in range(0, len(pairs[0]), 2):
                a = [pairs[a_row][i + e] for e in range(2) for a_row in range(2)]
                q = chunk * (quarter * 8 // spec.kv.bits // 2) + i
                for n_tile in range(num_n_tiles(spec)):
                    mma.issue(mma_dtype, acc_s[None, n_tile], 4 * m, a, [r.q[q, n_tile], r.q[q + 1, n_tile]])


def load_k_sf(spec, s, r, stage, row):
    """Load the scale factors of this lane's quarter of each chunk of a row of K, each as a pair; None if blocks have
    none."""
    if not scales.has_block_factors(spec):
        return None
    k, size = CachedRow.of_k(spec), spec.padded_qk // SF_VEC_SIZE
    at, count = s.k.scales.iterator.toint() + (stage * spec.tile.n + row) * size + r.sf_offsets[0], sf_per_quarter(k)
    found = []
    for chunk in range(k.chunks):
        both = quant.from_e4m3(mma.load_bytes(at + chunk * 4 * count, count))
        found += [quant.broadcast(both[b // 2], b % 2) for b in range(count)]
    return found


def load_v_sf(spec, s, r, v: VFragment, stage, row, e, c):
    """Load the scale factors of the e-th of a lane's four keys among the 16 from row + 16 c on, if the cache has
    scale factors."""
    if v.scales is not None:
        size, inside = spec.padded_vo // SF_VEC_SIZE, 16 * c + 8 * (e // 2)
        base = s.v.scales.iterator.toint() + (stage * spec.tile.n + row + inside) * size + r.sf_offsets[1]
        for k in range(scale_blocks(spec)):
            v.scales[k, e, c] = mma.load_bytes(base + e % 2 * r.sf_offsets[2] + k * r.sf_offsets[3], 1)


@cute.jit
def load_v(spec: cutlass.Constexpr, s, r, tile, at: KeyCursor, b: cutlass.Constexpr, v: VFragment):
    """Load this lane's words of chunk `b` of V and the scale factors of each key; keys past kv_len become zeros
    (`zero_v`)."""
    chunk, n, row, key = CachedRow.of_v(spec), spec.tile.n, at.row, at.key
    stage, t = pipeline.stage(s.v.pipe, at.block), cute.arch.lane_idx() % 4
    # this lane's eighth of the chunk, for 4 keys in each 16: 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
    base = s.v.smem.iterator.toint() + stage * (n * chunk.stage_bytes) + row * chunk.row_bytes
    per = const_expr(chunk.width // 32)
    for c in cutlass.range_constexpr(keys(spec) // 16):
        for e in cutlass.range_constexpr(4):
            own, inside = v_offset_of(spec, b, 16 * c + 8 * (e // 2) + e % 2)
            words = mma.load(base + chunk.offset(n, inside, b) + r.v_offsets[own], per)
            for u in cutlass.range_constexpr(per):
                v.words[u, e, c] = words[u]
            load_v_sf(spec, s, r, v, stage, row, e, c)
    # zeros for keys past kv_len
    if key + keys(spec) > tile.w.sequence.kv_len:
        for c in cutlass.range_constexpr(keys(spec) // 16):
            for e in cutlass.range_constexpr(4):
                if key + 16 * c + 8 * (e // 2) + 2 * t + e % 2 >= tile.w.sequence.kv_len:
                    zero_v(spec, v, e, c)


def zero_v(spec, v: VFragment, e, c):
    """Zero the e-th of a lane's keys of 16: rows past kv_len hold whatever the page held, and 0 * NaN is NaN. A scale
    factor may be NaN, too."""
    if precision.of_mma_sync(spec).kv_format.zeroes_codes:
        v.words[None, e, c].fill(0)
    if v.scales is not None:
        v.scales[None, e, c].fill(0)


def v_sf_pairs(spec, v: VFragment, c):
    """Return the scale factors of 16 keys as pairs [pair of keys][block]; [None, None] if the cache has none."""
    if v.scales is None:
        return [None, None]

    def pair(k, e):  # bytes of two keys
        return quant.permute(v.scales[k, 2 * e, c], v.scales[k, 2 * e + 1, c], 0x40)

    each = [[quant.from_e4m3(pair(k, e))[0] for e in range(2)] for k in range(scale_blocks(spec))]
    return [[by_pair[e] for by_pair in each] for e in range(2)]


def gemm_pv(spec, r, p, chunk, v: VFragment):
    """Compute O^T += V^T @ P^T for the columns of a chunk. p: words of P (two per 16 keys, n tile)."""
    types = precision.of_mma_sync(spec)
    mma_dtype, fmt = types.mma_dtype, types.kv_format
    for c in range(keys(spec) // 16):  # 16 keys, of which this lane has two pairs
        sf = v_sf_pairs(spec, v, c)
        for u in range(cute.size(v.words, mode=[0])):
            # convert the u-th word of the four keys to pairs of keys: [pair of keys][column of the word]
            pairs = [quant.unpack_two_rows(fmt, v.words[u, 2 * e, c], v.words[u, 2 * e + 1, c]) for e in range(2)]
            pairs = [quant.scale_pairs(pairs[e], sf[e], u // 2) for e in range(2)]
            by_column = [dict(zip(fmt.order, pairs[e])) for e in range(2)]
            # O^T += V^T @ P^T, two of the lane's columns per MMA
            for i in range(0, fmt.elements, 2):
                a = [by_column[e][i + a_row] for e in range(2) for a_row in range(2)]  # rows g and g + 8 of A = V^T
                o = 2 * (chunk * columns(spec) + u * fmt.elements + i)
                for n_tile in range(num_n_tiles(spec)):
                    mma.issue(mma_dtype, r.acc_o[None, n_tile], o, a, [p[2 * c, n_tile], p[2 * c + 1, n_tile]])
