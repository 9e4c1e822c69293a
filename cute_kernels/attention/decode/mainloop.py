"""Math role of decode: few query rows, so that memory and the conversion of what it delivers set the pace.

A warp computes 8 rows of the tile, or 16, with `mma.sync`, on keys of its own: `WarpTileState`. Keys are the rows of
the MMA, and then columns of V, so that query rows need no padding to 16: S^T = K Q^T and O^T = V^T P^T. It has a
softmax of its own; the warps of a row meet once, at the end of a tile (`reduce`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ... import abi
from ...device import mma, pipeline, warp
from ...device.divisor import Divisor
from ...device.layout import swizzle
from .. import combine, geometry, logits, mask, quant, softmax
from ..logits import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..spec import SF_VEC_SIZE
from . import operands, reduce
from .layout import CachedRow, keys, num_n_tiles, num_v_offsets, reduction_passes, row_of_warp, warps_per_group
from .operands import KeyCursor
from .roles import roles


@dataclass(frozen=True)
class DecodeFragments:
    """Fragments of a warp. Per group of 8 query rows ("half"): the lane holds Q of row g, and scores and O of rows 2 t
    and 2 t + 1."""

    pack_factor: Any  # as a divisor
    q: cute.Tensor  # (words of a row: element 2 w of k, half)
    o: cute.Tensor  # (2 rows x 2 columns x pairs of columns, half)
    st: softmax.SoftmaxState
    tokens: cute.Tensor
    score_to_log2: cute.Tensor  # of a row's scores as they are multiplied
    to_log2: cute.Tensor  # of what the softmax reduces
    k_offsets: cute.Tensor  # offsets of this lane's pieces of rows of K
    v_offsets: cute.Tensor  # of V: keys 2 t, 2 t + 1, where these are swizzled differently
    sf_offsets: cute.Tensor  # of the scale factors: of K; of V, key 2 t; from there to key 2 t + 1; to the next block


@dataclass(frozen=True)
class WarpTileState:
    """What a warp has of the tile at hand: query rows [group * rows_per_warp, ...), and of the groups of `keys` every
    `shares`-th, from `share` on."""

    w: WorkTileInfo
    seqlen: mask.SeqlenInfo
    warp_idx: Int32  # of the warp among those that compute
    first_row: Int32  # row of the request, that the tile begins with
    rows: Int32  # of the request
    rows_left: Int32  # of these in the tile
    row_group: Int32
    key_share: Int32
    key_shares: Int32
    num_unmasked_keys: Int32  # keys from w.n_block_full_min on, whose scores are neither masked nor capped nor skipped


def registers(spec, a):
    """Fragments of a warp, with the offsets that never change."""
    rmem = cute.make_rmem_tensor
    lane = cute.arch.lane_idx()
    g, t = lane // 4, lane % 4
    k, v = CachedRow.of(spec, spec.head_dim_qk), CachedRow.of(spec, spec.head_dim_vo)
    pieces, rows = max(1, k.width // 64), 2 * num_n_tiles(spec)
    r = DecodeFragments(
        Divisor(geometry.qhead_per_kvhead(a)),
        rmem((spec.head_dim_qk // 8, num_n_tiles(spec)), Uint32),
        rmem((spec.head_dim_vo // 4, num_n_tiles(spec)), Float32),
        softmax.make(rows),
        rmem(rows, Int32),
        *(rmem(rows, Float32) for _ in range(2)),
        *(rmem(count, Int32) for count in (pieces, num_v_offsets(spec), 4)),
    )
    for i in range(pieces):
        r.k_offsets[i] = swizzle(k.width, g, t * (k.width // 4) + 16 * i)
    for i in range(num_v_offsets(spec)):
        r.v_offsets[i] = swizzle(v.width, 2 * t + i, g * (v.width // 8))
    if spec.kv.block_scaled:
        set_scale_offsets(spec, a, r, g, t)
    return r


def set_scale_offsets(spec, a, r: DecodeFragments, g, t):
    """Offsets of the scale factors that a lane reads."""
    r.sf_offsets[0] = g * (spec.head_dim_qk // SF_VEC_SIZE) + t * (spec.head_dim_qk // 64)
    size, inter = spec.head_dim_vo // SF_VEC_SIZE, a.kv.v_scales_interleaved
    linear, interleaved = 2 * t * size + g * size // 8, t // 2 * 4 * size + g * size // 8 * 4 + 2 * t % 4
    r.sf_offsets[1] = linear + inter * (interleaved - linear)
    r.sf_offsets[2] = size + inter * (1 - size)
    r.sf_offsets[3] = 1 + 3 * inter


@cute.jit
def warp_tile(spec: cutlass.Constexpr, a, r: DecodeFragments, w: WorkTileInfo):
    rows = geometry.num_rows(w.q_len, r.pack_factor)
    m = geometry.tile_m(spec, rows)
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("mma")
    seqlen, shares = mask.seqlen_info(spec, a, w.q_len, w.kv_len), warps_per_group(spec, m)
    group = number * (m // spec.tile.rows_per_warp) // spec.tile.warps
    first = w.m_block * m
    num_unmasked_keys = cutlass.max(w.n_block_full_max - w.n_block_full_min, 0) * spec.tile.n
    if a.logits.soft_cap > 0.0 or a.logits.skip_threshold != -Float32.inf:
        num_unmasked_keys = Int32(0)
    left, share = cutlass.min(rows - first, m), number - group * shares
    return WarpTileState(w, seqlen, number, first, rows, left, group, share, shares, num_unmasked_keys)


def prefetches_q(spec):
    """Whether Q of a tile is fetched before O of the tile before is out of registers, which hides the latency."""
    return spec.head_dim_qk * num_n_tiles(spec) <= 128


def rows_view(fragment):
    """(2 rows of each half, columns) of accumulators: of rows 2 t and 2 t + 1 what row g, row g + 8 of each MMA has."""
    size, count = cute.size(fragment, mode=[0]), cute.size(fragment, mode=[1])
    layout = cute.make_layout(((2, count), (2, size // 4)), stride=((1, size), (2, 4)))
    return cute.make_tensor(fragment.iterator, layout)


@cute.jit
def can_skip(view: cute.Tensor, r: DecodeFragments, tile: WarpTileState, log2_threshold: Float32):
    """Skip-softmax: whether each row of this warp finds all these keys below its maximum so far by the threshold."""
    votes = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        below = softmax.row_can_skip(r.st, view, r.to_log2, k, log2_threshold)
        votes = votes and (below or r.tokens[k] >= tile.w.q_len)
    return cute.arch.vote_all_sync(votes)


@cute.jit
def transform_logits(
    spec: cutlass.Constexpr, a, r: DecodeFragments, tile: WarpTileState, key: Int32, scores: cute.Tensor
):
    """Soft cap and mask on the scores of the keys that begin with `key`. Returns whether V of these keys is needed; if
    not, their scores are set to -inf."""
    view, wanted, n = rows_view(scores), True, spec.tile.n
    masked = key >= tile.w.n_block_full_max * n or key < tile.w.n_block_full_min * n
    rows = ScoreRows(r.tokens, tile.w.q_start, tile.seqlen)
    cols = ScoreCols(key + cute.arch.lane_idx() // 4, [8 * j for j in range(keys(spec) // 8)])
    logits.transform(spec, a, view, r.score_to_log2, rows, cols, a.logits.soft_cap > 0.0, masked)
    if a.logits.skip_threshold != -Float32.inf:
        log2_threshold = a.logits.skip_threshold - cute.math.log2(Float32(tile.w.kv_len), fastmath=True)
        wanted = not can_skip(view, r, tile, log2_threshold)
        if not wanted:
            operands.fill(spec, scores, -Float32.inf)
    return wanted


@cute.jit
def probabilities(spec: cutlass.Constexpr, r: DecodeFragments, scores: cute.Tensor, p: cute.Tensor):
    """Scores to words of P."""
    view = rows_view(scores)
    softmax.update_max_and_rescale(r.st, view, rows_view(r.o), r.to_log2, spec.tile.blackwell)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        softmax.exp_and_sum(r.st, view, r.to_log2[k], k)
    warp.convert16(scores, cute.recast_tensor(p, abi.DTYPES[quant.mma_sync_dtype(spec)]))
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = mma.transpose(p[i])


@cute.jit
def previous_keys(spec: cutlass.Constexpr, s, tile: WarpTileState, k: KeyCursor):
    """The warp's next keys, those that come before these."""
    block, row = k.block, k.row - tile.key_shares * keys(spec)
    if row < 0:
        block, row = pipeline.advance_cursor(s.k_pipe, block), row + spec.tile.n
    return KeyCursor(block, row, k.key - tile.key_shares * keys(spec))


def release_if_last(spec, ring, tile: WarpTileState, k: KeyCursor):
    """Frees the stage, if these are this warp's last keys of it."""
    pipeline.consumer_release_cursor(ring, k.block, k.row < tile.key_shares * keys(spec))


@cute.jit
def mainloop(spec: cutlass.Constexpr, a, s, r: DecodeFragments, tile: WarpTileState, cursor: Int32):
    """O of this warp's keys of all KV blocks, from `cursor` of the pipes on; the cursor behind. P V of some keys is
    issued behind Q K of the next ones, whose latency it hides. Rarely needed code is kept outside the inner loop, so
    that the loop fits the instruction cache."""
    softmax.reset(r.st, 0.0)
    operands.fill(spec, r.o, 0.0)
    scores = cute.make_rmem_tensor((keys(spec) // 4, num_n_tiles(spec)), Float32)
    p = cute.make_rmem_tensor((keys(spec) // 8, num_n_tiles(spec)), Uint32)
    v = operands.allocate_v(spec)
    row, end = spec.tile.n - (tile.key_shares - tile.key_share) * keys(spec), tile.w.n_block_min * spec.tile.n
    k = KeyCursor(cursor, row, (tile.w.n_block_max - 1) * spec.tile.n + row)
    while k.key >= cutlass.max(end, tile.w.kv_len):  # no arithmetic past kv_len
        for ring in (s.k_pipe, s.v_pipe):
            pipeline.consumer_wait_cursor(ring, k.block)
            release_if_last(spec, ring, tile, k)
        k = previous_keys(spec, s, tile, k)
    before = KeyCursor(k.block, Int32(spec.tile.n), k.key)  # row = n: release_if_last does nothing for this cursor
    scored, wanted, more = False, False, k.key >= end
    while more:
        if scored:
            wanted = transform_logits(spec, a, r, tile, before.key, scores)
        unmasked = True
        while unmasked:
            k_there, v_there = (
                pipeline.consumer_try_wait(s.k_pipe, k.block),
                pipeline.consumer_try_wait(s.v_pipe, before.block),
            )
            if scored:
                probabilities(spec, r, scores, p)
            if k.key >= end:
                pipeline.consumer_wait_cursor(s.k_pipe, k.block, k_there)
                operands.issue_qk(spec, s, r, scores, pipeline.cursor_stage(k.block), k.row)
                release_if_last(spec, s.k_pipe, tile, k)
            pipeline.consumer_wait_cursor(s.v_pipe, before.block, v_there)
            if wanted:
                for b in cutlass.range_constexpr(CachedRow.of(spec, spec.head_dim_vo).chunks):
                    operands.load_v(spec, s, r, tile, before, b, v)
                    operands.issue_pv(spec, r, p, b, v)
            release_if_last(spec, s.v_pipe, tile, before)
            before = k
            k = previous_keys(spec, s, tile, k)
            scored = before.key >= end
            wanted = scored
            # one comparison: keys before n_block_full_min wrap
            unmasked = scored & (
                Uint32(before.key - tile.w.n_block_full_min * spec.tile.n) < Uint32(tile.num_unmasked_keys)
            )
        more = scored
    return before.block


@cute.jit
def mma_warp(spec: cutlass.Constexpr, plan, s):
    a = plan.args
    r = registers(spec, a)
    softmax_scale_log2 = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
    cursor, t, turn = Int32(0), Int32(0), Int32(0)
    words = cute.make_rmem_tensor((spec.head_dim_qk // 8, num_n_tiles(spec)), Uint32)
    w = work.consumer_wait(spec, s, t)
    tile = warp_tile(spec, a, r, w)
    if w.is_valid != 0:
        operands.fetch_q(spec, a, r, tile, words)
        operands.set_q(spec, a, r, tile, words, softmax_scale_log2)
    while w.is_valid != 0:
        cursor = mainloop(spec, a, s, r, tile, cursor)
        w = work.consumer_wait(spec, s, t + 1)
        next_tile = warp_tile(spec, a, r, w)
        if const_expr(prefetches_q(spec)) and w.is_valid != 0:
            operands.fetch_q(spec, a, r, next_tile, words)
        for i in cutlass.range_constexpr(len(reduction_passes(spec))):
            reduce.store(spec, s, r, tile, turn, reduction_passes(spec)[i])
            if const_expr(i + 1 == len(reduction_passes(spec))) and w.is_valid != 0:
                if const_expr(not prefetches_q(spec)):
                    operands.fetch_q(spec, a, r, next_tile, words)
                operands.set_q(spec, a, r, next_tile, words, softmax_scale_log2)  # while other warps still compute
            reduce.merge(spec, a, s, r, tile, turn, reduction_passes(spec)[i])
            turn += 1
        if tile.w.split.slot >= 0 and row_of_warp(spec, tile.warp_idx, 0) < tile.rows_left:
            done = work.consumer_wait(spec, s, t)  # again, instead of in registers all the time
            if combine.is_last(a, done.split.first * spec.tile.warps + tile.warp_idx, done.split.num_splits):
                combine.merge(spec, a, done, r.pack_factor, tile.rows_left, row_of_warp, tile.warp_idx)
        pipeline.consumer_release(s.work_pipe, t)
        tile = next_tile
        t += 1
