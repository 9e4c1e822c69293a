"""The work of the prepare role: from a raw stage of K or V, in its storage type, to an operand stage that MMAs read.

- e4m3 V for e4m3 MMAs: `transpose`, because the MMA needs V with the keys contiguous.
- Quantised K and V for fp16 MMAs: `dequantise_stage`. A scale per token and head, which `cache_write.store.row_scale`
  wrote, multiplies the elements here; decode multiplies scores and P instead (`decode.row_scales`).

Several warps share a stage (`Share`). Each makes its part visible to the MMA with a proxy fence, then arrives; both are
in the op's role loop (`sm90.prepare`, `sm100.prepare`).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import layout, mma, pipeline, warp
from . import precision, quant
from .kv import pages, scales, source
from .kv.rings import operand_smem
from .quant import permute
from .spec import SF_VEC_SIZE, KVSpec

KEY_HALVES = 2  # 2 shares of a stage have different keys; with 4 shares, pairs of them have different columns
MATRICES_IN_FLIGHT = {2: 2, 4: 4}  # shares -> matrices of 32 columns that a warp has in registers
MANY_COLUMNS = 256  # of V, with more of which `transpose` keeps fewer addresses
SWIZZLE_ROWS = 8  # rows after which a swizzle repeats
BOX_COLS = 64  # fp16 columns per box of an operand stage
Q_LANES = 8  # lanes per row of Q: each has pieces of 16 bytes, 128 bytes apart


class Share(NamedTuple):
    """A warp's share of work: `number` of `count`, which is static."""

    number: Int32
    count: Any


@cute.jit
def transpose(raw: cute.Tensor, into: cute.Tensor, valid: Int32, share: Share):
    """Transpose an 8-bit stage (n keys, D) to (D, n); keys from `valid` on become zeros. Called by each of 2 or 4
    warps, for its share.

    In each 16 rows of the result, the first 8 are the even columns of V, the others the odd ones. In each 16 columns,
    columns 4 q to 4 q + 3 are the keys 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q: those of a WGMMA accumulator in lane q of a
    quad, so that four neighbouring exponentials of a lane are four neighbours of the operand P.
    """
    if valid < cute.size(raw, mode=[0]):
        transpose_keys(raw, into, valid, share, True)
    else:
        transpose_keys(raw, into, valid, share, False)


# The transpose loop of one warp and one stage: an iteration per MATRICES_IN_FLIGHT matrices (32 columns x 16 keys).
#   waits for   nothing: the caller has waited for the raw stage and for a free operand stage
#   computes    ldmatrix with transposition gives a lane two keys of a pair of columns; byte permutes make words of four
#               keys of one column; stmatrix writes them
#   releases    nothing: the caller fences and arrives
# Several loads are in flight before their results are used. Only the copy of the loop for partial blocks masks keys.
@cute.jit
def transpose_keys(raw: cute.Tensor, into: cute.Tensor, valid: Int32, share: Share, is_partial: cutlass.Constexpr):
    """Do the work of `transpose`. is_partial: `valid` is less than the keys of the block.

    A matrix of 8 keys x 8 pairs of columns, transposed as it is read, gives a lane two keys of a pair of columns.
    Together with the matrix of the next 8 keys, the bytes of the even columns make a word of four keys, and so do those
    of the odd columns.
    """
    n, dim = const_expr(cute.size(raw, mode=[0])), const_expr(cute.size(raw, mode=[1]))
    lane = cute.arch.lane_idx()
    row, matrix, quad = lane % 8, lane // 8, lane % 4
    width, across = const_expr(layout.width(dim)), const_expr(layout.width(n))
    column_share, side = share.number // KEY_HALVES, share.number % KEY_HALVES
    columns = const_expr(dim // (share.count // KEY_HALVES))  # per share
    col = column_share * columns
    source, target = raw.iterator.toint(), into.iterator.toint() + col * across

    def box(k):  # offset at which a lane reads the matrices of its share's columns from 32 k on
        at = col + 32 * k
        return at // width * (n * width) + layout.swizzle(width, matrix % 2 * 8 + row, at % width + matrix // 2 * 16)

    boxes = [source + box(k) for k in range(columns // 32)]
    if const_expr(dim > MANY_COLUMNS):  # few addresses, and constants behind them: registers are short
        source += col // width * (n * width)
        starts = [layout.swizzle(width, matrix % 2 * 8 + row, 32 * k + matrix // 2 * 16) for k in range(width // 32)]
        starts = [source + start for start in starts]
        boxes = [starts[k % len(starts)] + const_expr(k // len(starts) * n * width) for k in range(columns // 32)]
    items = [(c, k) for c in range(n // 16 // KEY_HALVES) for k in range(columns // 32)]
    for g in cutlass.range_constexpr(0, len(items), MATRICES_IN_FLIGHT[share.count]):
        # load, transposed
        some = items[g : g + MATRICES_IN_FLIGHT[share.count]]
        words = [warp.ldmatrix_x4_trans(boxes[k] + (c * KEY_HALVES + side) * (16 * width)) for c, k in some]
        for i in cutlass.range_constexpr(len(some)):
            (c, k), w = some[i], words[i]
            # words of four keys: even columns, odd columns
            made = [permute(w[j], w[j + 1], selector) for j in (0, 2) for selector in (0x6420, 0x7531)]
            if const_expr(is_partial):
                # zeros for keys from `valid` on
                left, keep = valid - (c * KEY_HALVES + side) * 16 - 2 * quad, Uint32(0)
                for j, key in enumerate((0, 1, 8, 9)):
                    keep |= Uint32(0xFF << 8 * j) if key < left else Uint32(0)
                made = [word & keep for word in made]
            # store
            first = const_expr(c * KEY_HALVES * 16)
            address = layout.swizzle(across, matrix * 8 + row, const_expr(first % across) + side * 16)
            address += target + const_expr(first // across * (dim * across) + k * 32 * across)
            warp.stmatrix_x4(address, made)


class DequantPieces(NamedTuple):
    """How a warp divides `SWIZZLE_ROWS` rows of a stage among its lanes for dequantisation.

    A piece has `SF_VEC_SIZE` columns; `lanes` lanes share a row. Rows that begin in the same bank are done in different
    `passes`. width: bytes per row of a raw box. boxes: raw boxes per row. groups: per box, of `lanes` pieces each.
    """

    bits: int
    width: int
    boxes: int
    lanes: int
    groups: int
    passes: int

    @staticmethod
    def of(bits, dim) -> "DequantPieces":
        """Return the division of rows of `dim` elements of `bits` bits."""
        size = dim * bits // 8
        width = layout.width(size)
        pieces = width * 8 // bits // SF_VEC_SIZE
        lanes = min(pieces, 8)
        return DequantPieces(bits, width, size // width, lanes, pieces // lanes, lanes // 4)

    def row(self, lane, turn):
        """Return the lane's row, of the `SWIZZLE_ROWS` rows, in pass `turn`."""
        if self.lanes == 4:
            return lane // 4
        return lane // 8 * 2 + (lane // 4 + lane // 8 + turn) % 2

    def raw(self, lane, turn, group):
        """Return the byte offset of the lane's piece in a raw box."""
        piece = group * self.lanes + lane % self.lanes
        return layout.swizzle(self.width, self.row(lane, turn), piece * 2 * self.bits)

    def operand(self, n, lane, turn):
        """Return the byte offset to which the first half of the lane's piece goes, 16 bytes, in operand boxes of n
        rows; that of the second half differs in bit 4."""
        piece = lane % self.lanes
        return piece // 4 * (n * 128) + layout.swizzle(128, self.row(lane, turn), piece % 4 * 32)


class SFLayout(NamedTuple):
    """Where the scale factors of a stage are. Strides in bytes: row_stride to the next row in a group of four,
    row4_stride to the next four rows, block_stride to the next block of a row."""

    address: Int32
    row_stride: Any
    row4_stride: Any
    block_stride: Any


class DequantLane(NamedTuple):
    """A lane's pieces of `SWIZZLE_ROWS` rows, as byte offsets from the first row. source: per pass and group. target:
    per pass, of the first half. sf_offsets: per pass, or None. block: from a scale factor to the next of its row, 0 if
    a row has one. in_flight: pieces that the lane has in registers."""

    pieces: DequantPieces
    n: int
    source: list
    target: list
    sf_offsets: Any
    block: Any
    in_flight: int


class DequantCursor(NamedTuple):
    """Addresses of `SWIZZLE_ROWS` rows: in the raw stage, in the operand stage, and of their scale factors."""

    source: Any
    target: Any
    sf: Any


def lane_of(spec, n, dim, sf) -> DequantLane:
    """Return the lane's `DequantLane` for stages of n rows."""
    lane, p = cute.arch.lane_idx(), DequantPieces.of(spec.kv.bits, dim)
    source = [[p.raw(lane, turn, group) for group in range(p.groups)] for turn in range(p.passes)]
    target = [p.operand(n, lane, turn) for turn in range(p.passes)]
    if sf is None:
        return DequantLane(p, n, source, target, None, 0, spec.tile.dequant_pieces)
    rows, column = [p.row(lane, turn) for turn in range(p.passes)], lane % p.lanes * sf.block_stride
    own = [row // 4 * sf.row4_stride + row % 4 * sf.row_stride + column for row in rows]
    return DequantLane(p, n, source, target, own, sf.block_stride, spec.tile.dequant_pieces)


def dequantise_rows(spec, x: DequantLane, at: DequantCursor, four, count):
    """Dequantise `count` * `SWIZZLE_ROWS` rows. four: bytes of the scale factors of four rows."""
    p, fmt, of_rows = x.pieces, quant.kv_format(spec), scales.has_row_factors(spec)
    each = [(b, t, g) for b in range(p.boxes) for t in range(p.passes) for g in range(p.groups)]
    pieces = [(k, *piece) for k in range(count) for piece in each]
    for i in range(0, len(pieces), x.in_flight):
        # load words and scale factors of the pieces in flight
        mine, words, sf = pieces[i : i + x.in_flight], [], []
        for k, b, turn, group in mine:
            source = at.source + x.source[turn][group] + (k * SWIZZLE_ROWS + b * x.n) * p.width
            words.append(mma.load(source, p.bits // 2))
            if x.sf_offsets is not None:
                source = at.sf + x.sf_offsets[turn] + k * (SWIZZLE_ROWS // 4 * four)
                source += (b * p.groups + group) * p.lanes * x.block
                sf.append(warp.from_bits(mma.load(source, 1)[0]) if of_rows else mma.load_bytes(source, 1))
        # convert, scale and store them
        for j, (k, b, turn, group) in enumerate(mine):
            pairs = [pair for word in words[j] for pair in quant.unpack_neighbours(fmt, word)]
            if x.sf_offsets is not None and of_rows:
                pairs = quant.scale_row(pairs, sf[j], precision.of(spec).mma_type)
            elif x.sf_offsets is not None:
                pairs = quant.scale_pairs(pairs, [quant.sf_pair(sf[j])], 0)
            boxes = (b * p.groups + group) * p.lanes // 4
            target = at.target + x.target[turn]
            for half in range(2):
                mma.store((target ^ 16 * half) + (k * SWIZZLE_ROWS + boxes * x.n) * 128, pairs[4 * half : 4 * half + 4])


# The dequantise loop of one warp and one stage: an iteration per `count` * SWIZZLE_ROWS rows.
#   waits for   nothing: the caller has waited for the raw stage and for a free operand stage
#   computes    loads pieces of 16 elements, converts them to fp16 pairs, multiplies them by the scale factor of the
#               block or of the row, and stores them in the operand's swizzle (`dequantise_rows`)
#   releases    nothing: the caller fences and arrives
@cute.jit
def dequantise(spec: cutlass.Constexpr, raw: cute.Tensor, into: cute.Tensor, sf: Any, share: Share):
    """Convert a raw stage to an fp16 stage (n, D). Called by each warp that shares it, for its rows. sf: `SFLayout`, or
    None. There are no bank conflicts, except for loads of 4-bit rows of 256 columns."""
    n, dim = const_expr(cute.size(into, mode=[0])), const_expr(cute.size(into, mode=[1]))
    groups = const_expr(n // share.count // SWIZZLE_ROWS)
    four = const_expr(4 * max(spec.kv.layout.row_bytes(dim), 1))
    mine = lane_of(spec, n, dim, sf)
    count = const_expr(2 if sf is not None and groups % 2 == 0 else 1)  # at a time: as much as registers allow
    first = share.number * (groups * SWIZZLE_ROWS)
    source, target = raw.iterator.toint() + first * mine.pieces.width, into.iterator.toint() + first * 128
    factors = Int32(0) if const_expr(sf is None) else sf.address + first // 4 * four
    for _ in cutlass.range(0, groups, count, unroll=1):
        dequantise_rows(spec, mine, DequantCursor(source, target, factors), four, count)
        source += count * SWIZZLE_ROWS * mine.pieces.width
        target += count * SWIZZLE_ROWS * 128
        factors += count * SWIZZLE_ROWS // 4 * four


@cute.jit
def zero_rows(into: cute.Tensor, valid: Int32, share: Share):
    """Zero the rows from `valid` on of an fp16 stage (n, D): they hold whatever the page held, and 0 * NaN is NaN.
    Called by each warp that shares it, for its rows."""
    n, dim = const_expr(cute.size(into, mode=[0])), const_expr(cute.size(into, mode=[1]))
    count, pieces = const_expr(n // share.count), const_expr(BOX_COLS // 8)
    first, lane = cutlass.max(share.number * count, valid), cute.arch.lane_idx()
    for i in cutlass.range(lane, ((share.number + 1) * count - first) * pieces, 32, unroll=1):
        at = into.iterator.toint() + layout.swizzle(128, first + i // pieces, i % pieces * 16)
        for b in cutlass.range_constexpr(dim // BOX_COLS):
            mma.store(at + b * n * 128, [Uint32(0)] * 4)


def stage_tensors(s, which, i):
    """Return the raw stage and the operand stage of item i of their pipelines."""
    x = operand_smem(s, which)
    return x.raw[None, None, pipeline.stage(x.raw_pipe, i)], x.smem[None, None, pipeline.stage(x.pipe, i)]


def stage_sf(spec, a, s, which, i):
    """Return the `SFLayout` of item i; None if the cache has no scale factors. Scale factors are stored row by row. If
    the call says that those of V are interleaved, they are stored block by block, in groups of four rows."""
    x = operand_smem(s, which)
    if x.scales is None:
        return None
    stage = x.scales[None, None, pipeline.stage(x.raw_pipe, i)]
    size = spec.kv.layout.row_bytes((spec.padded_qk, spec.padded_vo)[which])
    if scales.has_row_factors(spec):
        return SFLayout(stage.iterator.toint(), size, 4 * size, 0)
    interleaved = 0 if which == pages.K else a.kv.v_scales_interleaved
    return SFLayout(stage.iterator.toint(), size + interleaved * (1 - size), 4 * size, 1 + 3 * interleaved)


@cute.jit
def dequantise_stage(spec: cutlass.Constexpr, a, s, which: cutlass.Constexpr, share: Share, i: Int32, valid: Int32):
    """Dequantise item i of the pipelines of K or V. Called by each warp that shares it, for its rows. valid: keys of
    the block that are the sequence's; may exceed the block."""
    raw, into = stage_tensors(s, which, i)
    sf = stage_sf(spec, a, s, which, i)
    dequantise(spec, raw, into, sf, share)
    # rows past the sequence: of V only, as P is 0 there; with factors beside the cache always, as one may be NaN
    if const_expr(which == pages.V and (source(spec).PARTIAL_TAIL or sf is not None)):
        if valid < spec.tile.n:
            cute.arch.sync_warp()
            zero_rows(into, valid, share)


@cute.jit
def widen_q(spec: cutlass.Constexpr, s, stage: Int32, share: Share):
    """Convert a stage of 8-bit Q to fp16, in a stage beside it: the rows of one warp."""
    stored = const_expr(replace(spec, kv=KVSpec(spec.q)))
    dequantise(stored, s.raw_q[None, None, stage], s.q[None, None, stage], None, share)


@cute.jit
def q_to_fp16(spec: cutlass.Constexpr, s, stage: Int32, scale_stage: Int32, share: Share):
    """Convert bf16 rows of Q to fp16 in place, and store the scale of each to s.q_row_scales: the rows of one
    warp."""
    m, boxes = spec.tile.m, const_expr(spec.padded_qk * 2 // 128)
    lane, rows = cute.arch.lane_idx(), const_expr(32 // Q_LANES)
    base = s.raw_q.iterator.toint() + stage * (m * spec.padded_qk * 2)
    words = cute.make_rmem_tensor(4 * boxes, Uint32)
    for r in cutlass.range(0, m // share.count, rows, unroll=1):
        row = share.number * (m // share.count) + r + lane // Q_LANES
        at = base + layout.swizzle(128, row, lane % Q_LANES * 16)
        for b in cutlass.range_constexpr(boxes):
            four = mma.load(at + b * m * 128, 4)
            for e in cutlass.range_constexpr(4):
                words[4 * b + e] = four[e]
        q_row_scale = quant.to_fp16(words, Q_LANES)
        for b in cutlass.range_constexpr(boxes):
            mma.store(at + b * m * 128, [words[4 * b + e] for e in range(4)])
        if lane % Q_LANES == 0:
            s.q_row_scales[row, scale_stage] = q_row_scale
