"""The softmax warpgroups: S -> P, one thread per row.

A group (warpgroup) has a half of a tile of 256 rows, every other KV block of a tile of 128 rows, or, with head_dim 256,
all blocks of a tile of 128 rows. From the role to the exponentials: `softmax` -> `softmax_step` -> `exp2_block`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import exp2, pipeline, tmem, warp
from .. import geometry, logits, mask, mask_blocks, splits
from .. import softmax as online
from ..mask import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import precision, skip
from .correction import SoftmaxStats, acc_scale_index
from .mma_utils import S
from .roles import ROWS, SLOTS, WARPS, groups, is_static, pingpong_groups, roles, tile_q_stage

LOAD_COLUMNS = 32  # columns of S per load instruction
CHAINS = 4  # independent chains, each of pairs, in a row's sum
EX2_EMU_FREQ = 16  # of so many columns, the last `tile.ex2_emu` do without the special function unit
MERGE_ROWS = 8  # rows of a split tile that a warp merges at a time: 16 spilled 16 bytes


@dataclass(frozen=True)
class Sm100Fragments:
    """Registers of a thread, which has one row: each tensor is (1,), except s."""

    s: cute.Tensor  # (1, n): scores, then P
    st: online.SoftmaxState
    tokens: cute.Tensor  # the row's query token
    score: cute.Tensor  # scale from raw scores to log2 units
    reduced: cute.Tensor  # scale from scores, or capped scores, to log2 units
    slopes: Any = None  # ALiBi slope
    words: Any = None  # (n / 32,): words of the custom mask for the block at hand


class ThreadCoord(NamedTuple):
    """The thread's group and row of the half; for the block at hand, the slot of S, how many of the group's blocks had
    that slot before (the phase of its barriers), and the address of S in tensor memory."""

    group: Int32
    row: Int32
    slot: Int32
    use: Int32
    s: Int32


class Sm100TileState(NamedTuple):
    """The tile at hand, with the thread's fragments r. capped: whether the call has a soft cap. mask_source: of
    the custom mask (`custom_mask`), if there is one. Blocks from n_block_full_min to n_block_full_max - 1 need no
    mask."""

    r: Sm100Fragments
    coord: ThreadCoord
    rows: ScoreRows
    capped: Any
    mask_source: Any
    n_block_full_min: Int32
    n_block_full_max: Int32
    skip_rule: Any = None  # `skip.SkipRule`


class SoftmaxCounters(NamedTuple):
    """Counters of the group: iterations, in each of which it had a block or passed, and tiles that have keys."""

    num_blocks: Int32
    num_tiles: Int32


class SoftmaxRoleState(NamedTuple):
    """State of the role between two tiles. num_partials: number of splits that the CTA has had."""

    num_partials: Int32
    counters: SoftmaxCounters


def thread_coord(spec, s) -> ThreadCoord:
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("softmax")
    group = number // WARPS
    row = number % WARPS * 32 + cute.arch.lane_idx()
    return ThreadCoord(group, row, group, Int32(0), s.tmem_ptr[0] + tmem.lanes(number) + (S + group * ROWS))


def coord_at(spec, x: ThreadCoord, blocks) -> ThreadCoord:
    """Return the coordinates at the group's block number `blocks`. x: those at its first block."""
    if groups(spec) == SLOTS:
        return x._replace(use=blocks)
    slot = blocks % SLOTS
    return x._replace(slot=slot, use=blocks // SLOTS, s=x.s + slot * ROWS)


def make_fragments(spec) -> Sm100Fragments:
    one = lambda dtype: cute.make_rmem_tensor(1, dtype)  # noqa: E731
    scores = cute.make_rmem_tensor((1, spec.tile.n), Float32)
    slopes = one(Float32) if spec.logits.alibi else None
    words = cute.make_rmem_tensor(spec.tile.n // 32, Uint32) if spec.mask.custom else None
    return Sm100Fragments(scores, online.make(1), one(Int32), one(Float32), one(Float32), slopes, words)


@cute.jit
def load_s(spec: cutlass.Constexpr, r: Sm100Fragments, x: ThreadCoord):
    """Load the thread's row of S from tensor memory to r.s."""
    for c in cutlass.range_constexpr(0, spec.tile.n, LOAD_COLUMNS):
        values = tmem.load(x.s + c, LOAD_COLUMNS)
        for e in cutlass.range_constexpr(LOAD_COLUMNS):
            r.s[0, c + e] = values[e]
    tmem.wait_load()


@cute.jit
def send_acc_scale(spec: cutlass.Constexpr, s, x: ThreadCoord, scale: Float32):
    """Send a block's factor on the row of O to correction, through shared memory."""
    s.sm_stats[acc_scale_index(spec, x.group, x.row, x.slot)] = scale
    cute.arch.sync_warp()
    pipeline.mbarrier_arrive(s.acc_scale_full + x.slot)


@cute.jit
def send_row_stats(s, x: ThreadCoord, stats: SoftmaxStats):
    """Send the row's stats to correction at the tile's end, in place of the factors on O, which it has read."""
    s.sm_stats[x.row, x.group, 0], s.sm_stats[x.row, x.group, 1] = stats.row_sum, stats.row_max
    cute.arch.sync_warp()
    pipeline.mbarrier_arrive(s.row_stats_full + x.group)


def pack_p(spec, r: Sm100Fragments, columns):
    """Return P of `columns` in the MMA's type, packed into 32-bit words."""
    return precision.of(spec).pack_p([r.s[0, c] for c in columns])


def sum_p(spec, r: Sm100Fragments):
    """Return the sum of the row's P in the block, added in `CHAINS` chains of pairs."""
    parts = [(r.s[0, c], r.s[0, c + 1]) for c in range(0, 2 * CHAINS, 2)]
    for c in range(2 * CHAINS, spec.tile.n, 2):
        k = c // 2 % CHAINS
        parts[k] = cute.arch.add_packed_f32x2(parts[k], (r.s[0, c], r.s[0, c + 1]))
    while len(parts) > 1:
        parts = [cute.arch.add_packed_f32x2(*pair) for pair in zip(parts[::2], parts[1::2])]
    return parts[0][0] + parts[0][1]


class SoftmaxFlags(NamedTuple):
    """Facts about a block at trace time. masked: some row may not see some key; is_first: the group's first block of
    the tile."""

    masked: bool
    is_first: bool = False


@cute.jit
def softmax_step(
    spec: cutlass.Constexpr, a, s, x: Sm100TileState, at: SoftmaxCounters, n_block: Int32, flags: cutlass.Constexpr
):
    """Turn S of a KV block into P, or skip the block. Return the counters of the next block."""
    # prefetch the custom mask while S is computed
    if const_expr(flags.masked):
        logits.fetch_mask(spec, x.rows, x.mask_source, n_block * spec.tile.n, 1)
    x, r = x._replace(coord=coord_at(spec, x.coord, at.num_blocks)), x.r
    # wait for S = Q @ K^T and load it
    pipeline.mbarrier_wait(s.s_full + x.coord.slot, x.coord.use)
    tmem.fence_after_thread_sync()
    load_s(spec, r, x.coord)
    # ALiBi, soft cap, masks
    cols = ScoreCols(n_block * spec.tile.n, list(range(spec.tile.n)))
    logits.transform(spec, a, r.s, x.rows, cols, x.capped, flags.masked)
    if const_expr(spec.logits.skip and not flags.is_first):
        block_max, skips = skip.vote(s, r, x.rows, x.skip_rule, x.coord.group, at.num_blocks)
        if skips != 0:
            skip_block(spec, s, x.coord)
        else:
            x.skip_rule.kept_max[0] = cute.arch.fmax(x.skip_rule.kept_max[0], block_max[0])
            exp2_block(spec, s, x, block_max, flags.masked)
    else:
        exp2_block(spec, s, x, r.s, flags.masked)
        if const_expr(spec.logits.skip):
            x.skip_rule.kept_max[0] = r.st.row_max[0]  # exact after one block
    return SoftmaxCounters(at.num_blocks + 1, at.num_tiles)


@cute.jit
def skip_block(spec: cutlass.Constexpr, s, x: ThreadCoord):
    """Send all signals of a block that the group skips or does not have: O stays as it is."""
    send_acc_scale(spec, s, x, Float32(1.0))
    tmem.fence_before_thread_sync()
    pipeline.mbarrier_arrive(s.p_full_o_rescaled + x.slot)
    pipeline.mbarrier_arrive(s.p_last_split + x.slot)
    pipeline.mbarrier_wait(s.p_full_o_rescaled + x.slot, x.use)


@cute.jit
def exp2_block(spec: cutlass.Constexpr, s, tile: Sm100TileState, scores: cute.Tensor, masked: cutlass.Constexpr):
    """Compute P of the block in r.s, store it to tensor memory, and update row_max and row_sum. scores: (1, columns)
    with the block's maximum: r.s, or the maximum itself if the vote on skipping has found it."""
    x, r = tile.coord, tile.r
    # row_max; its growth goes to correction first, which rescales O while P is computed
    online.update_max(r.st, scores, r.reduced, 1, precision.rescale_params(spec), precision.exact_max(spec))
    send_acc_scale(spec, s, x, r.st.acc_scale[0])
    # P = exp2(S * scale - row_max), stored in parts; the mma warp is told of all but the last, then of the last
    count = const_expr(precision.p_splits(spec))
    columns = const_expr(spec.tile.n // count)
    scale, shift = (r.reduced[0],) * 2, (-r.st.row_max_scaled[0],) * 2
    for k in cutlass.range_constexpr(count):
        for c in cutlass.range_constexpr(k * columns, (k + 1) * columns, 2):
            logs = cute.arch.fma_packed_f32x2((r.s[0, c], r.s[0, c + 1]), scale, shift)
            if const_expr(not masked and c % EX2_EMU_FREQ >= EX2_EMU_FREQ - spec.tile.ex2_emu):
                r.s[0, c], r.s[0, c + 1] = exp2.pair(logs)
            else:
                r.s[0, c] = cute.math.exp2(logs[0], fastmath=True)
                r.s[0, c + 1] = cute.math.exp2(logs[1], fastmath=True)
        words = pack_p(spec, r, range(k * columns, (k + 1) * columns))
        tmem.store(x.s + (precision.p_column(spec) + k * len(words)), words)
        if const_expr(k + 1 in (precision.p_early_splits(spec), count)):
            tmem.wait_store()
            tmem.fence_before_thread_sync()
            pipeline.mbarrier_arrive((s.p_last_split if k + 1 == count else s.p_full_o_rescaled) + x.slot)
    # wait until correction has read the factor on O; besides, ptxas moves no instruction across a wait: without one,
    # parts of the sum delay P (1,045 cycles instead of 825 until the MMAs may begin)
    pipeline.mbarrier_wait(s.p_full_o_rescaled + x.slot, x.use)
    # row_sum
    sum_of_p = sum_p(spec, r)
    if const_expr(not masked and spec.tile.ex2_emu > 0):
        # an emulated exponential of NaN is the largest fp32 number (P is 448, or infinity in 16 bits): the sum is NaN
        sum_of_p = sum_of_p if sum_of_p < exp2.HUGE else Float32(float("nan"))
    r.st.row_sum[0] += sum_of_p


@cute.jit
def begin_tile(
    spec: cutlass.Constexpr,
    a,
    s,
    r: Sm100Fragments,
    coord: ThreadCoord,
    w: WorkTileInfo,
    at: SoftmaxCounters,
    capped,
):
    """Reset the thread's row for tile `w`: its token, scales and softmax state. Return the tile's state."""
    seqlen = mask.seqlen_info(spec, a, w.sequence)
    rows = ScoreRows(r.tokens, w.sequence.q_start, seqlen, r.score, r.slopes, r.words)
    source = mask_blocks.mask_source(spec, a, w) if const_expr(spec.mask.custom) else None
    skip_rule = skip.rule(spec, a, w.sequence.kv_len)
    half = coord.group * (tile_q_stage(spec, w) - 1)
    first, last = geometry.tile_tokens(tile_q_stage(spec, w) * w.m_block + half, ROWS, w.sequence.q_len, w.pack_factor)
    n_block_full_min, n_block_full_max = w.n_block_full_min, w.n_block_full_max
    if const_expr(not spec.mask.custom):
        n_block_full_min, n_block_full_max = mask.full_range(spec, first, last, rows.seqlen)
    row = (tile_q_stage(spec, w) * w.m_block + half) * ROWS + coord.row
    head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
    # opaque: otherwise ptxas keeps all values that the token is made of in registers, and spills 32 bytes
    r.tokens[0] = warp.opaque(geometry.token_of(row, geometry.pack_divisor(w)))
    r.score[0] = (
        a.logits.softmax_scale_log2
        * online.head_scale(a.logits.softmax_scale_ptr, head)
        * precision.of(spec).dequant_scale
    )
    if const_expr(s.q_row_scales is not None):
        tile = at.num_tiles
        pipeline.consumer_wait(s.q_ready_pipe, tile)
        r.score[0] *= s.q_row_scales[half * ROWS + coord.row, pipeline.stage(s.q_ready_pipe, tile)]
    r.reduced[0] = r.score[0]
    if const_expr(spec.logits.alibi):
        r.slopes[0] = logits.slope_of(a, head, r.score[0])
    if const_expr(spec.logits.soft_cap):
        r.reduced[0] = logits.capped_to_log2(a.logits.soft_cap) if capped else r.score[0]
    online.reset(r.st, online.NO_KEY_MAX)
    return Sm100TileState(r, coord, rows, capped, source, n_block_full_min, n_block_full_max, skip_rule)


@cute.jit
def softmax(spec: cutlass.Constexpr, plan, s):
    """Compute P and the row statistics of all tiles of the CTA. The softmax warpgroups."""
    # Per block (`softmax_step`): wait for S, mask it, find row_max and send the factor on O to correction; store P in
    # parts, with an arrival for all but the last and one for the last; then add P to row_sum. The factor goes first
    # because P @ V waits for the rescaled O as it waits for P.
    # Per tile, send row_sum and row_max, by which correction normalises O.
    #
    # Blocks run from high to low. The group's first block is masked; the others are cut into segments, so
    # that full blocks have a loop without predicates: 496 instead of 599 instructions per block of 128 x 128.
    # Splits are merged behind the last tile, by these warps: they have the registers for it.
    a, r, coord, capped = plan.args, make_fragments(spec), thread_coord(spec, s), False
    if const_expr(spec.logits.soft_cap):
        capped = a.logits.soft_cap > 0.0

    def softmax_tile(w, _, state):
        count, at = state
        if const_expr(w.split is not None):
            # this CTA has a part of the tile: remember it for the merge
            if w.split.slot >= 0:
                splits.record(s.splits, w, count, cute.arch.thread_idx()[0])
                count += 1
        if w.n_block_max > w.n_block_min:
            x, n_block_at = begin_tile(spec, a, s, r, coord, w, at, capped), partial(mask_blocks.n_block_at, spec, a, w)
            n = pingpong_groups(spec, w)
            # wait until correction has read the statistics of the tile before: the factors on O overwrite them
            pipeline.mbarrier_wait(s.row_stats_empty + coord.group, at.num_tiles - 1)
            # the group's first block of the tile: group 0 the tile's first, group 1 of two that alternate the second
            own = w.n_block_max - 1
            if const_expr(is_static(n, 1)):
                at = softmax_step(spec, a, s, x, at, n_block_at(own), SoftmaxFlags(True, True))
            else:
                own -= (n - 1) * coord.group
                if own >= w.n_block_min:
                    at = softmax_step(spec, a, s, x, at, n_block_at(own), SoftmaxFlags(True, True))
            # its other blocks: masked on the right, full, masked on the left by a window
            for segment in mask.segments(spec, w.n_block_min, own, x.n_block_full_min, x.n_block_full_max):
                flags, begin, end = SoftmaxFlags(segment.masked), segment.n_block_max - 1, segment.n_block_min
                step = pingpong_groups(spec, w)  # n, computed again: n itself would be live across the first block
                if const_expr(is_static(step, 1)):
                    for position in cutlass.range(begin, end - 1, -1, unroll=1):
                        at = softmax_step(spec, a, s, x, at, n_block_at(position), flags)
                else:
                    position = begin - ((own - begin) & (step - 1))
                    while position >= end:
                        at = softmax_step(spec, a, s, x, at, n_block_at(position), flags)
                        position -= step
            # an odd number of blocks: in the last iteration group 1 has none
            if const_expr(not is_static(n, 1)):
                if (w.n_block_max - w.n_block_min) & (n - 1) & coord.group != 0:
                    mine = coord_at(spec, coord, at.num_blocks)
                    pipeline.mbarrier_wait(s.s_full + mine.slot, mine.use)
                    skip_block(spec, s, mine)
                    at = SoftmaxCounters(at.num_blocks + 1, at.num_tiles)
            # send row_sum and row_max
            row_max = -Float32.inf if r.st.row_max[0] == -Float32.inf else r.st.row_max_scaled[0]
            send_row_stats(s, coord, SoftmaxStats(r.st.row_sum[0], row_max))
            at = SoftmaxCounters(at.num_blocks, at.num_tiles + 1)
        return SoftmaxRoleState(count, at)

    start = SoftmaxRoleState(Int32(0), SoftmaxCounters(Int32(0), Int32(0)))
    count = work.for_each_tile(spec, s, softmax_tile, start, carries_tile=True).num_partials
    # merge the splits
    if const_expr(s.splits is not None):
        threads, tid = const_expr(roles(spec).warps("softmax")), cute.arch.thread_idx()[0]
        splits.barrier(roles(spec).warps("softmax", "correction"))
        splits.merge(spec, a, s.splits, count, tid, threads, MERGE_ROWS)
