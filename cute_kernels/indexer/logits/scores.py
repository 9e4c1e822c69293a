"""The `mma` role: scores of 64 keys and of all (token, head) pairs of a tile, and from them the logits.

An accumulator has keys in rows and pairs in columns. A thread has two keys, and of the heads of a token every fourth
pair of columns: it multiplies their scores, at least 0, by the weights, and adds them up. The four lanes of a quad
then exchange their sums, so that each has the logits of one key for half of the tokens. Heads are added in one order
whatever the tile, so that the bits of a logit depend on its own query, weights and key alone.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ... import abi
from ...device import copy, memory, pipeline, warp, wgmma
from . import GROUPS, KEYS, chunk_rows, pass_rows
from .load import InputSmem, TileWork, read_work
from .output import element_bytes, store
from .roles import WARPS, roles

QUAD = 4  # lanes that have the columns of a key


class ScoreFragments(NamedTuple):
    """Operands of the MMAs, and accumulators of the tokens of a pass: `chunk_rows` each."""

    mma: cute.TiledMma
    k: cute.Tensor
    q: cute.Tensor
    acc: tuple[cute.Tensor, ...]


class LaneRows(NamedTuple):
    """The tokens of a lane, which stores their logits: their keys, and the addresses of the column of key 0."""

    begin: cute.Tensor
    end: cute.Tensor
    address: cute.Tensor


class TileInputs(NamedTuple):
    """The queries of a tile. stage: of q_pipe. rows: a lane's tokens. weights: those of the tokens of the first pass;
    others are loaded for each block."""

    stage: Int32
    rows: LaneRows
    weights: list[cute.Tensor]


def fragments(spec, s: InputSmem) -> ScoreFragments:
    """Make the fragments of a warpgroup."""
    columns = chunk_rows(spec) * spec.heads
    mma = wgmma.mma_nt(abi.DTYPES[spec.keys], 1, columns)
    part, count = mma.get_slice(0), pass_rows(spec) // chunk_rows(spec)
    acc = tuple(cute.make_rmem_tensor(part.partition_shape_C((KEYS, columns)), Float32) for _ in range(count))
    return ScoreFragments(
        mma, mma.make_fragment_A(part.partition_A(s.k)), mma.make_fragment_B(part.partition_B(s.q)), acc
    )


def lane_rows(spec) -> LaneRows:
    """Allocate `LaneRows`: every second token, or the only one."""
    count = max(1, spec.rows // 2)
    return LaneRows(*(cute.make_rmem_tensor(count, kind) for kind in (Int32, Int32, Int64)))


@cute.jit
def read_rows(spec: cutlass.Constexpr, a, s: InputSmem, rows: LaneRows, work: TileWork, stage: Int32):
    """Read the windows of a lane's tokens."""
    half = cute.arch.lane_idx() // 2 % 2
    for i in cutlass.range_constexpr(cute.size(rows.begin)):
        row = 2 * i + half if const_expr(spec.rows > 1) else Int32(0)
        begin, end = s.windows[row, 0, stage], s.windows[row, 1, stage]
        if const_expr(spec.rows == 1):
            end = end if half == 0 else Int32(0)
        rows.begin[i], rows.end[i] = begin, end
        token = cutlass.min(work.first + row, a.out.shape[0] - 1)
        rows.address[i] = memory.row_of(a.out, token) - Int64(begin if a.compressed != 0 else Int32(0)) * const_expr(
            element_bytes(spec)
        )


# The mma role: one iteration per tile, an inner one per block; the warpgroups take blocks in turn.
#   waits for   q_pipe, k_pipe full
#   computes    scores of a pass, then logits of the first MMA's tokens while the others run
#   releases    k_pipe behind the last MMA that reads the block, q_pipe behind the last block of the tile
@cute.jit
def compute(spec: cutlass.Constexpr, a, s: InputSmem):
    """Compute the logits of the CTA's share. Called by all warps of a warpgroup."""
    group = cute.arch.make_warp_uniform((cute.arch.warp_idx() - roles(spec).first("mma")) // WARPS)
    r, rows, item, number = fragments(spec, s), lane_rows(spec), Int32(0), Int32(0)
    work = read_work(s, number)
    while work.blocks > 0:
        pipeline.consumer_wait(s.q_pipe, number)
        stage = pipeline.stage(s.q_pipe, number)
        read_rows(spec, a, s, rows, work, stage)
        tile = TileInputs(stage, rows, load_weights(spec, s, 0, pass_rows(spec), stage))
        first, before = (group - item) & (GROUPS - 1), no_sums(spec)
        for i in cutlass.range(first, work.blocks, GROUPS, unroll=1):
            before = one_block(spec, s, r, tile, item + i, work.first_block + i, before)
        store_logits(spec, rows, before, const_expr(spec.rows - pass_rows(spec)), pass_rows(spec))
        pipeline.consumer_release(s.q_pipe, number)
        item += work.blocks
        number += 1
        work = read_work(s, number)


class BlockSums(NamedTuple):
    """The sums of a lane of a block: of key 0 and 1 of each token of the last pass. key: the one that the lane stores.
    scale: its logit over its sum."""

    sums: list[Float32]
    key: Int32
    scale: Float32


def no_sums(spec) -> BlockSums:
    """Return the sums of a block without a key that a token sees."""
    return BlockSums([Float32(0.0)] * (2 * pass_rows(spec)), Int32(-1), Float32(0.0))


@cute.jit
def one_block(
    spec: cutlass.Constexpr, s: InputSmem, r: ScoreFragments, tile: TileInputs, item: Int32, block: Int32,
    before: BlockSums,
) -> BlockSums:  # fmt: skip
    """Compute the sums of a block of keys, and meanwhile store the logits of the block before. item: of k_pipe."""
    lane, inside = cute.arch.lane_idx(), cute.arch.warp_idx() % WARPS * 16
    inside += lane // QUAD + 8 * (lane % 2)  # the key that this lane stores
    pipeline.consumer_wait(s.k_pipe, item)
    at = pipeline.stage(s.k_pipe, item)
    scale = s.k_scale[inside, at] * const_expr(0.5 if doubled(spec) else 1.0)
    cute.arch.fence_proxy("async.shared", space="cta")
    each, count = const_expr(chunk_rows(spec)), const_expr(len(r.acc))
    queries = r.q[None, None, None, warp.opaque(tile.stage)]  # descriptors of several passes would fill the registers
    for begin in cutlass.range_constexpr(0, spec.rows, each * count):
        for c in cutlass.range_constexpr(count):
            wgmma.issue(r.mma, r.acc[c], r.k[None, None, None, at], queries, True, begin // each + c)
        # under the MMAs
        store_logits(spec, tile.rows, before, const_expr((begin - each * count) % spec.rows), each * count)
        weights, sums = tile.weights, []
        if const_expr(begin > 0):
            weights = load_weights(spec, s, begin, each * count, tile.stage)
        for c in cutlass.range_constexpr(count):
            warpgroup.wait_group(count - 1 - c)
            if const_expr(c + 1 == count and begin + each * count == spec.rows):
                pipeline.consumer_release(s.k_pipe, item)
            for row in cutlass.range_constexpr(each):
                sums += weigh(spec, r.acc[c], weights[each * c + row], row)
        before = BlockSums(sums, block * KEYS + inside, scale)
    return before


@cute.jit
def store_logits(
    spec: cutlass.Constexpr, rows: LaneRows, block: BlockSums, first: cutlass.Constexpr, count: cutlass.Constexpr
):
    """Store the logits of a block, those of `count` tokens from `first` on."""
    lane, sums = cute.arch.lane_idx(), block.sums
    for i in cutlass.range_constexpr(max(1, count // 2)):
        # lanes 0 and 2 of a quad get the sums of the first key, 1 and 3 those of the second one
        odd, pair = lane % 2 != 0, const_expr(range(2 * i, min(2 * i + 2, count)))
        some = [exchange(sums[2 * row], sums[2 * row + 1], odd, 1) for row in pair]
        # lanes 0 and 1 get those of the first token, 2 and 3 those of the second one
        total = some[0] + cute.arch.shuffle_sync_bfly(some[0], 2)
        if const_expr(count > 1):
            total = exchange(some[0], some[1], lane // 2 % 2 != 0, 2)
        at = const_expr(first // 2 + i)
        if block.key >= rows.begin[at] and block.key < rows.end[at]:
            store(spec, rows.address[at], block.key, total * block.scale)


def exchange(x, y, second, distance):
    """Return the sum of x of two lanes for the first of them, that of y for the second one."""
    given = warp.select(second, x, y)
    return warp.select(second, y, x) + cute.arch.shuffle_sync_bfly(given, distance)


def load_weights(spec, s: InputSmem, first, count, stage):
    """Return this lane's weights of `count` tokens from `first` on."""
    own = spec.heads // QUAD
    each, found = (4 if own % 4 == 0 else 2), []
    for row in range(first, first + count):
        weights = cute.make_rmem_tensor(own, Float32)
        begin = s.weights.iterator + (stage * spec.rows + row) * spec.heads + cute.arch.lane_idx() % QUAD * own
        for i in range(own // each):
            pointer = cute.make_ptr(Float32, (begin + i * each).toint(), cute.AddressSpace.smem, assumed_align=4 * each)
            copy.vector(
                cute.make_tensor(pointer, cute.make_layout(each)), cute.make_tensor(weights.iterator + i * each, each)
            )
        found.append(weights)
    return found


def weigh(spec, acc: cute.Tensor, weights: cute.Tensor, column):
    """Return the sums of the weighted scores of a token, those that this lane has of both keys. column: of its heads,
    in units of them."""
    own, found = spec.heads // QUAD, []
    scores = wgmma.rows_cols(acc)
    for key in range(2):
        total = [Float32(0.0), Float32(0.0)]
        for i in range(own):
            total[i % 2] = warp.fma(weights[i], rectified(spec, scores[key, own * column + i]), total[i % 2])
        found.append(total[0] + total[1])
    return found


def doubled(spec):
    """Return whether sums are twice those of the logits. Scores of e4m3 are finite, so that s + |s| is exactly twice
    max(s, 0); it takes half as long, because the SM computes maxima at half of the rate of sums. Powers of two change
    no rounding, unless a sum is beyond half of the largest fp32, or the half of a key's scale is subnormal."""
    return spec.keys == "e4m3"


def rectified(spec, score):
    """Return max(score, 0), or twice that."""
    if doubled(spec):
        return score + cute.math.absf(score)
    return cute.arch.fmax(score, Float32(0.0))
