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
from . import GROUPS, KEYS, accumulators, chunk_rows, holds_weights
from .load import InputSmem, TileWork, read_work
from .output import element_bytes, store
from .roles import WARPS, roles

QUAD = 4  # lanes that have the columns of a key


class ScoreFragments(NamedTuple):
    """Operands of the MMAs, and the accumulators, which take turns: a unit, `chunk_rows` tokens and a block of keys,
    has one."""

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
    """The queries of a tile. stage: of q_pipe. rows: a lane's tokens. weights: those of all tokens; if there are none,
    they are loaded for each unit."""

    stage: Int32
    rows: LaneRows
    weights: list[cute.Tensor]


class LaneKey(NamedTuple):
    """The key of a block that a lane stores. first: the block's first one. scale: the key's logit over its sum."""

    first: Int32
    key: Int32
    scale: Float32


def fragments(spec, s: InputSmem) -> ScoreFragments:
    """Make the fragments of a warpgroup."""
    columns = chunk_rows(spec) * spec.heads
    mma = wgmma.mma_nt(abi.DTYPES[spec.keys], 1, columns)
    part, shape = mma.get_slice(0), (KEYS, columns)
    acc = tuple(cute.make_rmem_tensor(part.partition_shape_C(shape), Float32) for _ in range(accumulators(spec)))
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
#   computes    unit by unit, scores and then logits; the MMAs of the next unit run under the logits of a unit
#   releases    k_pipe behind the last MMA that reads the block, q_pipe behind the last block of the tile
@cute.jit
def compute(spec: cutlass.Constexpr, a, s: InputSmem):
    """Compute the logits of the CTA's share. Called by all warps of a warpgroup."""
    group = cute.arch.make_warp_uniform((cute.arch.warp_idx() - roles(spec).first("mma")) // WARPS)
    r, rows, item, number = fragments(spec, s), lane_rows(spec), Int32(0), Int32(0)
    work = read_work(s, number)
    while work.blocks > 0:
        pipeline.consumer_wait(s.q_pipe, number)
        fence_before_mma()
        stage = pipeline.stage(s.q_pipe, number)
        read_rows(spec, a, s, rows, work, stage)
        held = spec.rows if const_expr(holds_weights(spec)) else 0
        tile = TileInputs(stage, rows, load_weights(spec, s, 0, held, stage))
        first = (group - item) & (GROUPS - 1)
        if first < work.blocks:
            compute_tile(spec, a, s, r, tile, item, work, first)
        pipeline.consumer_release(s.q_pipe, number)
        item += work.blocks
        number += 1
        work = read_work(s, number)


@cute.jit
def compute_tile(
    spec: cutlass.Constexpr, a, s: InputSmem, r: ScoreFragments, tile: TileInputs, item: Int32, work: TileWork,
    first: Int32,
):  # fmt: skip
    """Compute the logits of every second block of a tile from number `first` on. item: of block 0 in k_pipe."""
    place = wait_for_keys(spec, a, s, item + first, (work.first_block + first) * KEYS)
    issue(s, r, tile, 0, item + first)
    last = work.blocks - 1 - ((work.blocks - 1 - first) & (GROUPS - 1))
    for i in cutlass.range(first, last, GROUPS, unroll=1):
        place = one_block(spec, a, s, r, tile, item + i, place, True)
    one_block(spec, a, s, r, tile, item + last, place, False)


@cute.jit
def one_block(
    spec: cutlass.Constexpr, a, s: InputSmem, r: ScoreFragments, tile: TileInputs, item: Int32, place: LaneKey,
    more: cutlass.Constexpr,
) -> LaneKey:  # fmt: skip
    """Store the logits of a block, of which the MMAs of the first unit have been issued. Issue those of the first unit
    of the warpgroup's next block if there are `more`, and return its key.

    Only one unit is in flight when the warpgroup waits: ptxas lets no MMA of several ones run on beyond the end of a
    loop that reads their accumulators."""
    each, count = const_expr(chunk_rows(spec)), const_expr(spec.rows // chunk_rows(spec))
    following, alone = place, const_expr(len(r.acc) == 1)
    for unit in cutlass.range_constexpr(count):
        warpgroup.wait_group(0)
        if const_expr(unit + 1 == count):
            pipeline.consumer_release(s.k_pipe, item)
        sums = []
        if const_expr(alone):  # as bits, because the compiler moves sums behind the MMAs that overwrite their scores
            sums = [warp.from_bits(warp.bits(x)) for x in weigh_unit(spec, s, r, tile, unit)]
        # the next MMAs, under which the logits of this unit are computed
        if const_expr(unit + 1 < count):
            issue(s, r, tile, unit + 1, item)
        elif const_expr(more):
            following = wait_for_keys(spec, a, s, item + GROUPS, place.first + const_expr(GROUPS * KEYS))
            issue(s, r, tile, 0, item + GROUPS)
        if const_expr(not alone):
            sums = weigh_unit(spec, s, r, tile, unit)
        store_logits(spec, tile.rows, place, sums, each * unit)
    return following


def weigh_unit(spec, s: InputSmem, r: ScoreFragments, tile: TileInputs, unit):
    """Return the sums of a unit, those of keys 0 and 1 of each token that this lane has."""
    each = chunk_rows(spec)
    weights = tile.weights[each * unit : each * (unit + 1)] or load_weights(spec, s, each * unit, each, tile.stage)
    return [x for row in range(each) for x in weigh(spec, r.acc[unit % len(r.acc)], weights[row], row)]


def fence_before_mma():
    """Let MMAs read what cp.async has written; what TMA has written they may read without."""
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def wait_for_keys(spec: cutlass.Constexpr, a, s: InputSmem, item: Int32, first: Int32) -> LaneKey:
    """Wait for the block of keys from key `first` on, and return the one that this lane stores."""
    lane, inside = cute.arch.lane_idx(), cute.arch.warp_idx() % WARPS * 16
    inside += lane // QUAD + 8 * (lane % 2)
    pipeline.consumer_wait(s.k_pipe, item)
    scale = s.k_scale[inside, pipeline.stage(s.k_pipe, item)] * const_expr(0.5 if doubled(spec) else 1.0)
    if a.boxes == 0:
        fence_before_mma()
    return LaneKey(first, first + inside, scale)


def issue(s: InputSmem, r: ScoreFragments, tile: TileInputs, unit, item):
    """Issue the MMAs of a unit of a block."""
    queries = r.q[None, None, None, warp.opaque(tile.stage)]  # descriptors of several units would fill the registers
    keys = r.k[None, None, None, pipeline.stage(s.k_pipe, item)]
    wgmma.issue(r.mma, r.acc[unit % len(r.acc)], keys, queries, True, unit)


@cute.jit
def store_logits(spec: cutlass.Constexpr, rows: LaneRows, place: LaneKey, sums, first: cutlass.Constexpr):
    """Store the logits of the tokens from `first` on. sums: those of a lane, of keys 0 and 1 of each token."""
    lane, count = cute.arch.lane_idx(), const_expr(len(sums) // 2)
    for i in cutlass.range_constexpr(max(1, count // 2)):
        # lanes 0 and 2 of a quad get the sums of the first key, 1 and 3 those of the second one
        odd, pair = lane % 2 != 0, const_expr(range(2 * i, min(2 * i + 2, count)))
        some = [exchange(sums[2 * row], sums[2 * row + 1], odd, 1) for row in pair]
        # lanes 0 and 1 get those of the first token, 2 and 3 those of the second one
        total = some[0] + cute.arch.shuffle_sync_bfly(some[0], 2)
        if const_expr(count > 1):
            total = exchange(some[0], some[1], lane // 2 % 2 != 0, 2)
        at = const_expr(first // 2 + i)
        if place.key >= rows.begin[at] and place.key < rows.end[at]:
            store(spec, rows.address[at], place.key, total * place.scale)


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
