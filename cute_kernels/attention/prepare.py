"""What a raw stage of K or V, as it is stored, becomes before an MMA reads it.

Warps share the work; each makes its part of an operand stage visible to the MMA by a proxy fence, then arrives.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .. import abi
from ..device import layout, mma, pipeline, warp
from . import quant
from .kv import pages, source
from .quant import permute
from .spec import SF_VEC_SIZE

KEY_HALVES = 2  # shares of a stage that differ in their keys; more differ in their columns
MATRICES_IN_FLIGHT = {2: 2, 4: 4}  # shares -> matrices of 32 columns that a warp has in registers
SWIZZLE_ROWS = 8  # after which a swizzle repeats
BOX_COLS = 64  # fp16 columns of a box of an operand stage


def mma_dtype(spec):
    """Type of what MMAs that read shared memory multiply."""
    return spec.q if spec.q == spec.kv.dtype else quant.mma_sync_dtype(spec)


def dequantises(spec):
    """Whether K and V are stored in a type that those MMAs do not multiply."""
    return mma_dtype(spec) != spec.kv.dtype


def scales_q_rows(spec):
    """Whether Q becomes fp16 in units of its own a row: that has not the range of bf16."""
    return dequantises(spec) and spec.q == "bf16"


@cute.jit
def transpose(raw: cute.Tensor, into: cute.Tensor, valid: Int32, share: Int32, shares: cutlass.Constexpr):
    """One of `shares` warps, 2 or 4: an 8-bit stage (n keys, D) becomes (D, n); zeros for keys from `valid` on.

    Of each 16 rows, the first 8 are the even columns of V, the others the odd ones. Of each 16 columns, 4 q to 4 q + 3
    are the keys 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q: what an accumulator of WGMMA has in lane q of a quad, so that four
    neighbouring exponentials of a lane are four neighbours of the operand P."""
    if valid < cute.size(raw, mode=[0]):
        transpose_keys(raw, into, valid, share, shares, True)
    else:
        transpose_keys(raw, into, valid, share, shares, False)


@cute.jit
def transpose_keys(
    raw: cute.Tensor,
    into: cute.Tensor,
    valid: Int32,
    share: Int32,
    shares: cutlass.Constexpr,
    is_partial: cutlass.Constexpr,
):
    """`transpose` of a block that is `is_partial`, or not.

    A matrix of 8 keys x 8 pairs of columns, transposed as it is read, gives a lane two keys of a pair; with that of the
    8 keys behind it, bytes of even columns make a word of four keys, and those of odd ones.
    """
    n, dim = const_expr(cute.size(raw, mode=[0])), const_expr(cute.size(raw, mode=[1]))
    lane = cute.arch.lane_idx()
    row, matrix, quad = lane % 8, lane // 8, lane % 4
    width, across = const_expr(layout.width(dim)), const_expr(layout.width(n))
    part, side = share // KEY_HALVES, share % KEY_HALVES
    columns = const_expr(dim // (shares // KEY_HALVES))  # of a share
    col = part * columns
    source, target = raw.iterator.toint(), into.iterator.toint() + col * across

    def box(k):  # where a lane reads the matrices of its share's columns from 32 k on
        at = col + 32 * k
        return at // width * (n * width) + layout.swizzle(width, matrix % 2 * 8 + row, at % width + matrix // 2 * 16)

    boxes = [source + box(k) for k in range(columns // 32)]
    items = [(c, k) for c in range(n // 16 // KEY_HALVES) for k in range(columns // 32)]
    for g in cutlass.range_constexpr(0, len(items), MATRICES_IN_FLIGHT[shares]):
        some = items[g : g + MATRICES_IN_FLIGHT[shares]]
        words = [warp.ldmatrix_x4_trans(boxes[k] + (c * KEY_HALVES + side) * (16 * width)) for c, k in some]
        for i in cutlass.range_constexpr(len(some)):
            (c, k), w = some[i], words[i]
            made = [permute(w[j], w[j + 1], selector) for j in (0, 2) for selector in (0x6420, 0x7531)]
            if const_expr(is_partial):
                left, keep = valid - (c * KEY_HALVES + side) * 16 - 2 * quad, Uint32(0)
                for j, key in enumerate((0, 1, 8, 9)):
                    keep |= Uint32(0xFF << 8 * j) if key < left else Uint32(0)
                made = [word & keep for word in made]
            first = const_expr(c * KEY_HALVES * 16)
            place = layout.swizzle(across, matrix * 8 + row, const_expr(first % across) + side * 16)
            place += target + const_expr(first // across * (dim * across) + k * 32 * across)
            warp.stmatrix_x4(place, made)


class DequantPieces(NamedTuple):
    """How a warp shares `SWIZZLE_ROWS` rows of a stage, dequantised, among its lanes: in pieces of `SF_VEC_SIZE`
    columns, `lanes` a row, which rows that begin in the same bank are spread over `passes` for.

    boxes, width: of raw rows, in bytes; groups: of `lanes` pieces that a box has.
    """

    bits: int
    width: int
    boxes: int
    lanes: int
    groups: int
    passes: int

    @staticmethod
    def of(bits, dim) -> "DequantPieces":
        size = dim * bits // 8
        width = layout.width(size)
        pieces = width * 8 // bits // SF_VEC_SIZE
        lanes = min(pieces, 8)
        return DequantPieces(bits, width, size // width, lanes, pieces // lanes, lanes // 4)

    def row(self, lane, turn):
        """Of the `SWIZZLE_ROWS` rows, the lane's in a pass."""
        if self.lanes == 4:
            return lane // 4
        return lane // 8 * 2 + (lane // 4 + lane // 8 + turn) % 2

    def raw(self, lane, turn, group):
        """Byte of its piece, in a box."""
        piece = group * self.lanes + lane % self.lanes
        return layout.swizzle(self.width, self.row(lane, turn), piece * 2 * self.bits)

    def operand(self, n, lane, turn):
        """Byte where the first half of its piece goes, 16 bytes, in boxes of n rows; the other's differs in bit 4."""
        piece = lane % self.lanes
        return piece // 4 * (n * 128) + layout.swizzle(128, self.row(lane, turn), piece % 4 * 32)


class SFLayout(NamedTuple):
    """Scale factors of a stage. at: address; row, four, block: bytes to the next row of four, to the next four rows, to
    the next block of a row."""

    address: Int32
    row_stride: Any
    row4_stride: Any
    block_stride: Any


def sf_linear(stage, dim):
    """Row by row."""
    size = dim // SF_VEC_SIZE
    return SFLayout(stage.iterator.toint(), size, 4 * size, 1)


def sf_interleaved(stage, dim, interleaves):
    """Row by row or, of four rows, block by block."""
    size = dim // SF_VEC_SIZE
    return SFLayout(stage.iterator.toint(), size + interleaves * (1 - size), 4 * size, 1 + 3 * interleaves)


class DequantLane(NamedTuple):
    """A lane's pieces of `SWIZZLE_ROWS` rows, in bytes from where these begin. source: by pass and group; target: by
    pass, of the first half; factors: by pass, or None; block: from a factor to the next of its row. in_flight: pieces
    that it has in registers."""

    pieces: DequantPieces
    n: int
    source: list
    target: list
    sf_offsets: Any
    block: Any
    in_flight: int


class DequantCursor(NamedTuple):
    """Addresses of `SWIZZLE_ROWS` rows in a raw stage, in that of its operand, in that of its factors."""

    source: Any
    target: Any
    sf: Any


def lane_of(spec, n, dim, sf) -> DequantLane:
    """The lane's place in stages of n rows."""
    lane, p = cute.arch.lane_idx(), DequantPieces.of(spec.kv.bits, dim)
    source = [[p.raw(lane, turn, group) for group in range(p.groups)] for turn in range(p.passes)]
    target = [p.operand(n, lane, turn) for turn in range(p.passes)]
    if sf is None:
        return DequantLane(p, n, source, target, None, 0, spec.tile.dequant_pieces)
    rows, column = [p.row(lane, turn) for turn in range(p.passes)], lane % p.lanes * sf.block_stride
    own = [row // 4 * sf.row4_stride + row % 4 * sf.row_stride + column for row in rows]
    return DequantLane(p, n, source, target, own, sf.block_stride, spec.tile.dequant_pieces)


def dequantise_rows(fmt, x: DequantLane, at: DequantCursor, four, count):
    """`count` times `SWIZZLE_ROWS` rows; four: bytes of the factors of four rows."""
    p = x.pieces
    each = [(b, t, g) for b in range(p.boxes) for t in range(p.passes) for g in range(p.groups)]
    places = [(k, *place) for k in range(count) for place in each]
    for i in range(0, len(places), x.in_flight):
        mine, words, sf = places[i : i + x.in_flight], [], []
        for k, b, turn, group in mine:
            source = at.source + x.source[turn][group] + (k * SWIZZLE_ROWS + b * x.n) * p.width
            words.append(mma.load(source, p.bits // 2))
            if x.sf_offsets is not None:
                source = at.sf + x.sf_offsets[turn] + k * (SWIZZLE_ROWS // 4 * four)
                sf.append(mma.load_bytes(source + (b * p.groups + group) * p.lanes * x.block, 1))
        for j, (k, b, turn, group) in enumerate(mine):
            pairs = [pair for word in words[j] for pair in quant.unpack_neighbours(fmt, word)]
            if x.sf_offsets is not None:
                pairs = quant.scale_pairs(pairs, [quant.sf_pair(sf[j])], 0)
            boxes = (b * p.groups + group) * p.lanes // 4
            target = at.target + x.target[turn]
            for half in range(2):
                mma.store((target ^ 16 * half) + (k * SWIZZLE_ROWS + boxes * x.n) * 128, pairs[4 * half : 4 * half + 4])


@cute.jit
def dequantise(
    spec: cutlass.Constexpr,
    raw: cute.Tensor,
    into: cute.Tensor,
    sf: Any,
    share: Int32,
    shares: cutlass.Constexpr,
):
    """One of `shares` warps: its rows of a stage as it is stored become those of an fp16 stage (n, D). factors:
    `SFLayout`, or None. No bank is met twice, but by loads of 4-bit rows of 256 columns."""
    n, dim = const_expr(cute.size(into, mode=[0])), const_expr(cute.size(into, mode=[1]))
    groups, four, mine = (
        const_expr(n // shares // SWIZZLE_ROWS),
        const_expr(dim // SF_VEC_SIZE * 4),
        lane_of(spec, n, dim, sf),
    )
    count = const_expr(2 if spec.kv.block_scaled and groups % 2 == 0 else 1)  # at a time: what registers allow
    first = share * (groups * SWIZZLE_ROWS)
    source, target = raw.iterator.toint() + first * mine.pieces.width, into.iterator.toint() + first * 128
    scales = Int32(0) if const_expr(sf is None) else sf.address + first // 4 * four
    for _ in cutlass.range(0, groups, count, unroll=1):
        dequantise_rows(quant.kv_format(spec), mine, DequantCursor(source, target, scales), four, count)
        source += count * SWIZZLE_ROWS * mine.pieces.width
        target += count * SWIZZLE_ROWS * 128
        scales += count * SWIZZLE_ROWS // 4 * four


@cute.jit
def zero_rows(into: cute.Tensor, valid: Int32, share: Int32, shares: cutlass.Constexpr):
    """One of `shares` warps: zeros into its rows of an fp16 stage (n, D) from `valid` on, which hold whatever the page
    held: 0 * NaN is NaN."""
    n, dim = const_expr(cute.size(into, mode=[0])), const_expr(cute.size(into, mode=[1]))
    count, pieces = const_expr(n // shares), const_expr(BOX_COLS // 8)
    first, lane = cutlass.max(share * count, valid), cute.arch.lane_idx()
    for i in cutlass.range(lane, ((share + 1) * count - first) * pieces, 32, unroll=1):
        at = into.iterator.toint() + layout.swizzle(128, first + i // pieces, i % pieces * 16)
        for b in cutlass.range_constexpr(dim // BOX_COLS):
            mma.store(at + b * n * 128, [Uint32(0)] * 4)


def operand_stages(spec, smem, shape, stages):
    """Stages that are prepared."""
    dtype = abi.DTYPES[mma_dtype(spec)]
    kind = layout.smem_layout(shape, stages, dtype)
    return smem.allocate_tensor(dtype, kind.outer, 1024, kind.inner)


class StagePipelines(NamedTuple):
    """Pipes of raw and of operand stages of K or V."""

    raw: pipeline.Pipeline
    operand: pipeline.Pipeline


def stage_pipelines(s, which):
    """Those of K or V (`which`, of kv.pages)."""
    return (StagePipelines(s.raw_k_pipe, s.k_pipe), StagePipelines(s.raw_v_pipe, s.v_pipe))[which]


def stage_tensors(s, which, i):
    """The raw stage and the operand stage of item i of their pipes."""
    raw, into = ((s.raw_k, s.k), (s.raw_v, s.v))[which]
    ring = stage_pipelines(s, which)
    return raw[None, None, pipeline.stage(ring.raw, i)], into[None, None, pipeline.stage(ring.operand, i)]


def stage_sf(spec, a, s, which, i):
    """Scale factors of item i, None where the cache has none."""
    if not spec.kv.block_scaled:
        return None
    stage = (s.k_scales, s.v_scales)[which][None, None, pipeline.stage(stage_pipelines(s, which).raw, i)]
    if which == pages.K:
        return sf_linear(stage, spec.head_dim_qk)
    return sf_interleaved(stage, spec.head_dim_vo, a.kv.v_scales_interleaved)


@cute.jit
def dequantise_stage(
    spec: cutlass.Constexpr,
    a,
    s,
    which: cutlass.Constexpr,
    share: Int32,
    shares: cutlass.Constexpr,
    i: Int32,
    valid: Int32,
):
    """One of `shares` warps: its rows of item i of the pipes of K or V, a block whose first `valid` keys, or all, are
    the request's."""
    raw, into = stage_tensors(s, which, i)
    dequantise(spec, raw, into, stage_sf(spec, a, s, which, i), share, shares)
    if const_expr(
        which == pages.V and (source(spec).PARTIAL_TAIL or spec.kv.block_scaled)
    ):  # a factor past them may be NaN
        if valid < spec.tile.n:
            cute.arch.sync_warp()
            zero_rows(into, valid, share, shares)
