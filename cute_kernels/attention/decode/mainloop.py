"""The `mma` role of decode: from a CTA's tiles to O and the LSE.

With few query rows, loads and the conversion of K and V as stored set the pace, not the MMA. A warp computes 8 or 16
query rows with `mma.sync` on keys of its own and has a softmax of its own. The keys are the M side of the MMA, so that
query rows need no padding to 16: S^T = K @ Q^T and O^T = V^T @ P^T. The warps that share query rows meet once per tile,
when they add up their O (`reduce`).

To follow the code: `mma_warp` (one iteration per tile) -> `mainloop` (one iteration per group of keys) ->
`fragments.gemm_qk` and `fragments.gemm_pv`. The mask: `mainloop` -> `transform_logits` -> `logits.transform` ->
`mask.apply`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import mma, pipeline, warp
from ...device.layout import swizzle
from .. import combine, geometry, logits, mask, precision, skip_rule, softmax
from ..mask import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..spec import SF_VEC_SIZE
from . import chosen, fragments, reduce, row_scales
from .fragments import KeyCursor
from .layout import (
    CachedRow,
    is_dense,
    keys,
    num_n_tiles,
    num_v_offsets,
    q_words,
    reduction_passes,
    row_of_warp,
    sf_per_quarter,
    warps_per_group,
)
from .roles import roles


@dataclass(frozen=True)
class DecodeFragments:
    """The registers of a warp. It has one n tile of the MMA per 8 query rows. In each, lane 4 g + t holds Q of row g,
    and scores and O of rows 2 t and 2 t + 1."""

    pack_factor: Any  # rows per token, as a divisor
    q: cute.Tensor  # (words of a row: element 2 w of k, n tile)
    acc_o: cute.Tensor  # (2 rows x 2 columns x pairs of columns, n tile)
    st: softmax.SoftmaxState
    tokens: cute.Tensor
    score_to_log2: cute.Tensor  # per row: factor of raw scores
    to_log2: cute.Tensor  # per row: factor of the scores that the softmax reads (after the soft cap)
    k_offsets: cute.Tensor  # offsets of this lane's pieces in a row of K
    v_offsets: cute.Tensor  # offsets in V of keys 2 t and 2 t + 1, which may be swizzled differently
    # scale factors of blocks: of K; of V, key 2 t; from there to key 2 t + 1; to the next block
    sf_offsets: cute.Tensor
    row_scales: Any = None  # a `row_scales.KeyFactors`, if rows of K and V have factors
    chosen: Any = None  # a `chosen.ChosenKeys`, if a token chooses its keys one by one


@dataclass(frozen=True)
class WarpTileState:
    """A warp's part of the current tile: query rows [row_group * rows_per_warp, ...), and, of the groups of
    `layout.keys` keys in a KV block, numbers key_share, key_share + key_shares, ..., visited from high to low."""

    w: WorkTileInfo
    seqlen: mask.SeqlenInfo
    warp_idx: Int32  # of the warp in the mma role
    first_row: Int32  # first row of the tile, counted in the sequence
    rows: Int32  # rows of the sequence
    rows_left: Int32  # rows of the tile that exist
    row_group: Int32
    key_share: Int32
    key_shares: Int32
    num_unmasked_keys: Int32  # keys from w.n_block_full_min on with no mask, soft cap or skip test


def make_fragments(spec, plan):
    """Allocate a warp's fragments and set the offsets that never change."""
    a, rmem = plan.args, cute.make_rmem_tensor
    lane = cute.arch.lane_idx()
    g, t = lane // 4, lane % 4
    k, v = CachedRow.of_k(spec), CachedRow.of_v(spec)
    pieces, rows = max(1, k.width // 64) + (k.tail > 0), 2 * num_n_tiles(spec)
    r = DecodeFragments(
        geometry.group_divisor(a),
        rmem((q_words(spec), num_n_tiles(spec)), Uint32),
        rmem((spec.padded_vo // 4, num_n_tiles(spec)), Float32),
        softmax.make(rows),
        rmem(rows, Int32),
        rmem(rows, Float32),
        rmem(rows, Float32),
        rmem(pieces, Int32),
        rmem(num_v_offsets(spec), Int32),
        rmem(4, Int32),
        row_scales.make(spec),
        chosen.make(spec, plan),
    )
    if is_dense(spec):
        set_dense_offsets(r, k, v, g, t)
    else:
        for i in range(pieces):
            r.k_offsets[i] = swizzle(k.width, g, t * (k.width // 4) + 16 * i)
        for i in range(num_v_offsets(spec)):
            r.v_offsets[i] = swizzle(v.width, 2 * t + i, g * (v.width // 8))
    if a.kv.v_scales_interleaved is not None:
        set_sf_offsets(spec, a, r, g, t)
    return r


def set_dense_offsets(r: DecodeFragments, k: CachedRow, v: CachedRow, g, t):
    """Set the offsets of what lane 4 g + t reads of dense rows: of K in a chunk and in the tail, of V in a chunk and in
    the last chunk. Eighths that the last chunk lacks are those before them: their columns of O are not stored."""
    each = v.width // 8
    r.k_offsets[0] = g * k.pitch + t * (k.width // 4)
    if k.tail:
        r.k_offsets[1] = g * k.pitch + t * (k.tail // 4)
    r.v_offsets[0] = 2 * t * v.pitch + g * each
    if v.valid < v.width:
        r.v_offsets[1] = 2 * t * v.pitch + cutlass.min(g * each, v.valid - each)


def set_sf_offsets(spec, a, r: DecodeFragments, g, t):
    """Set the offsets of the scale factors that lane 4 g + t reads."""
    k = CachedRow.of_k(spec)
    r.sf_offsets[0] = g * (spec.padded_qk // SF_VEC_SIZE) + t * sf_per_quarter(k)
    size, inter = spec.padded_vo // SF_VEC_SIZE, a.kv.v_scales_interleaved
    linear, interleaved = 2 * t * size + g * size // 8, t // 2 * 4 * size + g * size // 8 * 4 + 2 * t % 4
    r.sf_offsets[1] = linear + inter * (interleaved - linear)
    r.sf_offsets[2] = size + inter * (1 - size)
    r.sf_offsets[3] = 1 + 3 * inter


@cute.jit
def warp_tile(spec: cutlass.Constexpr, a, r: DecodeFragments, w: WorkTileInfo):
    """Return this warp's `WarpTileState` of a tile."""
    rows = geometry.num_rows(w.sequence.q_len, r.pack_factor)
    m = geometry.tile_m(spec, rows)
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("mma")
    seqlen, shares = mask.seqlen_info(spec, a, w.sequence), warps_per_group(spec, m)
    group = number * (m // spec.tile.rows_per_warp) // spec.tile.warps
    first = w.m_block * m
    num_unmasked_keys = cutlass.max(w.n_block_full_max - w.n_block_full_min, 0) * spec.tile.n
    if chosen.has_slots(spec) or a.logits.soft_cap > 0.0 or a.logits.skip_threshold != -Float32.inf:
        num_unmasked_keys = Int32(0)
    left, share = cutlass.min(rows - first, m), number - group * shares
    return WarpTileState(w, seqlen, number, first, rows, left, group, share, shares, num_unmasked_keys)


def prefetches_q(spec):
    """Return whether Q of the next tile is fetched before O of this tile has left the registers, which hides the
    latency."""
    return spec.padded_qk * num_n_tiles(spec) <= 128


def rows_view(fragment):
    """View an accumulator as (rows, columns): rows 2 t and 2 t + 1 of each n tile; a column is row g or g + 8 of an
    MMA."""
    size, count = cute.size(fragment, mode=[0]), cute.size(fragment, mode=[1])
    layout = cute.make_layout(((2, count), (2, size // 4)), stride=((1, size), (2, 4)))
    return cute.make_tensor(fragment.iterator, layout)


@cute.jit
def can_skip(view: cute.Tensor, r: DecodeFragments, tile: WarpTileState, log2_threshold: Float32):
    """Skip-softmax: return whether the scores of these keys are below the running maximum by the threshold in every row
    of this warp."""
    votes = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        below = softmax.row_can_skip(r.st, view, r.to_log2, k, log2_threshold)
        votes = votes and (below or r.tokens[k] >= tile.w.sequence.q_len)
    return cute.arch.vote_all_sync(votes)


@cute.jit
def transform_logits(
    spec: cutlass.Constexpr, a, r: DecodeFragments, tile: WarpTileState, key: Int32, acc_s: cute.Tensor
):
    """Apply the soft cap and the mask to the scores of the keys that begin with `key`. Return whether V of these keys
    is needed; if not (skip-softmax), set their scores to -inf."""
    view, needs_pv, n = rows_view(acc_s), True, spec.tile.n
    masked = key >= tile.w.n_block_full_max * n or key < tile.w.n_block_full_min * n
    rows = ScoreRows(r.tokens, tile.w.sequence.q_start, tile.seqlen, r.score_to_log2, words=chosen.present(spec, r))
    lane_col = cute.arch.lane_idx() // 4
    cols = ScoreCols(key + lane_col, [8 * j for j in range(keys(spec) // 8)], lane_col)
    logits.transform(spec, a, view, rows, cols, a.logits.soft_cap > 0.0, masked)
    if a.logits.skip_threshold != -Float32.inf:
        log2_threshold = skip_rule.log2_threshold(a, tile.w.sequence.kv_len)
        needs_pv = not can_skip(view, r, tile, log2_threshold)
        if not needs_pv:
            fragments.fill(spec, acc_s, -Float32.inf)
    return needs_pv


@cute.jit
def online_softmax(spec: cutlass.Constexpr, r: DecodeFragments, acc_s: cute.Tensor, p: cute.Tensor):
    """Turn scores into P, words of pairs in the B operand's layout; update row_max and row_sum, and rescale O if a row
    maximum has grown."""
    view = rows_view(acc_s)
    softmax.update_max_and_rescale(r.st, view, rows_view(r.acc_o), r.to_log2, spec.tile.blackwell)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        softmax.exp_and_sum(r.st, view, r.to_log2[k], r.st.row_max_scaled[k], k)
    warp.convert16(acc_s, cute.recast_tensor(p, precision.of_mma_sync(spec).mma_type))
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = mma.transpose(p[i])


@cute.jit
def previous_keys(spec: cutlass.Constexpr, s, tile: WarpTileState, k: KeyCursor):
    """Return the cursor of the keys that this warp computes next: those before `k`, as keys are visited from high to
    low."""
    block, row = k.block, k.row - tile.key_shares * keys(spec)
    if row < 0:
        block, row = pipeline.next_item(s.k.pipe, block), row + spec.tile.n
    return KeyCursor(block, row, k.key - tile.key_shares * keys(spec))


def release_if_last(spec, pipe, tile: WarpTileState, k: KeyCursor):
    """Release the stage if these are this warp's last keys in it."""
    pipeline.consumer_release_if(pipe, k.block, k.row < tile.key_shares * keys(spec))


# The KV loop of one warp and one tile. An iteration handles two groups of the warp's keys: `prev`, which has scores
# already, and `cur`, the next one.
#   waits for   k.pipe before S^T of `cur`, v.pipe before O^T of `prev`; both are tested early, which hides the latency
#               of the answer
#   computes    softmax(prev), then S^T = K @ Q^T of `cur`, then O^T += V^T @ P^T of `prev`: the MMAs of PV are issued
#               behind those of the next QK^T and hide their latency
#   releases    a K or V stage after this warp's last keys in it
# With slots, those of `cur` are looked up before the softmax of `prev`, and hide scores a pass later (`chosen`).
# The outer loop holds the code that few keys need (soft cap, mask, skip-softmax), so that the inner loop fits the
# instruction cache; the inner loop runs for as long as the keys need none of it.
@cute.jit
def mainloop(spec: cutlass.Constexpr, a, s, r: DecodeFragments, tile: WarpTileState, first: pipeline.PackedState):
    """Compute O, row_max and row_sum of this warp's keys. first: item of the tile's first block in k.pipe and v.pipe.
    Return the item of the next tile's first block."""
    softmax.reset(r.st, 0.0)
    fragments.fill(spec, r.acc_o, 0.0)
    row_scales.reset(r)
    acc_s = cute.make_rmem_tensor((keys(spec) // 4, num_n_tiles(spec)), Float32)
    p = cute.make_rmem_tensor((keys(spec) // 8, num_n_tiles(spec)), Uint32)
    v = fragments.allocate_v(spec, s)
    row = spec.tile.n - (tile.key_shares - tile.key_share) * keys(spec)  # the warp's last keys of a block
    first_key = tile.w.n_block_min * spec.tile.n  # of the tile's lowest block: the warp ends when `cur` is below it
    cur = KeyCursor(first, row, (tile.w.n_block_max - 1) * spec.tile.n + row)
    # pass over keys past kv_len without arithmetic
    while cur.key >= cutlass.max(first_key, tile.w.sequence.kv_len):
        for pipe in (s.k.pipe, s.v.pipe):
            pipeline.consumer_wait(pipe, cur.block)
            release_if_last(spec, pipe, tile, cur)
        cur = previous_keys(spec, s, tile, cur)
    # `prev` has no keys yet, so the first pass only issues Q K^T. row = n: release_if_last does nothing
    prev = KeyCursor(cur.block, Int32(spec.tile.n), cur.key)
    has_scores, needs_pv, more = False, False, cur.key >= first_key
    while more:
        if has_scores:
            # soft cap, mask, skip-softmax
            needs_pv = transform_logits(spec, a, r, tile, prev.key, acc_s)
        unmasked = True  # at least one pass
        while unmasked:
            k_ready = pipeline.consumer_try_wait(s.k.pipe, cur.block)
            v_ready = pipeline.consumer_try_wait(s.v.pipe, prev.block)
            chosen.look_up(spec, a, r, tile.w, cur.key)
            if has_scores:
                # P = exp2(S - row_max), rescale O
                online_softmax(spec, r, acc_s, p)
            if cur.key >= first_key:
                # S^T = K @ Q^T
                pipeline.consumer_wait(s.k.pipe, cur.block, k_ready)
                fragments.gemm_qk(spec, s, r, acc_s, pipeline.stage(s.k.pipe, cur.block), cur.row)
                row_scales.load_k(spec, s, r, pipeline.stage(s.k.pipe, cur.block), cur.row)
                # release the K stage
                release_if_last(spec, s.k.pipe, tile, cur)
            # V of `prev`; the first pass, without P V, waits for V of its block a pass early, and releases nothing
            pipeline.consumer_wait(s.v.pipe, prev.block, v_ready)
            if needs_pv:
                row_scales.scale_p(spec, s, r, tile, prev, p)
                # O^T += V^T @ P^T, one chunk of columns at a time
                for b in cutlass.range_constexpr(CachedRow.of_v(spec).chunks):
                    fragments.load_v(spec, s, r, tile, prev, b, v)
                    fragments.gemm_pv(spec, r, p, b, v)
            row_scales.scale_scores(r, rows_view(acc_s))
            # release the V stage
            release_if_last(spec, s.v.pipe, tile, prev)
            prev = cur
            cur = previous_keys(spec, s, tile, cur)
            has_scores = prev.key >= first_key
            needs_pv = has_scores
            # one comparison: keys before n_block_full_min wrap
            unmasked = has_scores & (
                Uint32(prev.key - tile.w.n_block_full_min * spec.tile.n) < Uint32(tile.num_unmasked_keys)
            )
        more = has_scores
    row_scales.finish(r)
    return prev.block


# The mma role: one iteration per tile.
#   waits for   work_pipe (the tile), k.pipe and v.pipe (in `mainloop`), s.merge.ready (the other warps' O)
#   computes    O of this warp's keys, then, in passes, the sum over the warps that share rows (`reduce`); a split tile
#               goes to scratch, and the last warp with the same rows merges its splits (`combine`)
#   releases    the tile in work_pipe when its output is stored
# Q of the next tile is fetched before the reduction of this one if registers allow (`prefetches_q`), and becomes the
# MMA's operand in the last pass, while other warps still compute. A merge reads the tile from work_pipe again, which
# keeps it out of the registers of the mainloop. This loop is its own, not `work.for_each_tile`: it reads the next tile
# in the middle of an iteration and holds a stage until the tile's output is stored.
@cute.jit
def mma_warp(spec: cutlass.Constexpr, plan, s):
    """Run the mma role of one warp."""
    a = plan.args
    r = make_fragments(spec, plan)
    softmax_scale_log2 = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
    block, t, turn = pipeline.PackedState(Int32(0)), Int32(0), Int32(0)
    words = cute.make_rmem_tensor((q_words(spec), num_n_tiles(spec)), Uint32)
    w = work.consumer_wait(spec, s, t)
    tile = warp_tile(spec, a, r, w)
    if w.is_valid != 0:
        # Q of the first tile
        fragments.fetch_q(spec, a, r, tile, words)
        fragments.set_q(spec, a, r, tile, words, softmax_scale_log2)
    while w.is_valid != 0:
        # O, row_max and row_sum of this warp's keys
        block = mainloop(spec, a, s, r, tile, block)
        # the next tile and its Q
        w = work.consumer_wait(spec, s, t + 1)
        next_tile = warp_tile(spec, a, r, w)
        if const_expr(prefetches_q(spec)) and w.is_valid != 0:
            fragments.fetch_q(spec, a, r, next_tile, words)
        # reduce O over the warps that share rows, and store it
        for i in cutlass.range_constexpr(len(reduction_passes(spec))):
            reduce.store(spec, s, r, tile, turn, reduction_passes(spec)[i])
            if const_expr(i + 1 == len(reduction_passes(spec))) and w.is_valid != 0:
                if const_expr(not prefetches_q(spec)):
                    fragments.fetch_q(spec, a, r, next_tile, words)
                fragments.set_q(spec, a, r, next_tile, words, softmax_scale_log2)  # while other warps still compute
            reduce.merge(spec, a, s, r, tile, turn, reduction_passes(spec)[i])
            turn += 1
        # merge the tile's splits if this was the last of them
        if tile.w.split.slot >= 0 and row_of_warp(spec, tile.warp_idx, 0) < tile.rows_left:
            done = work.consumer_wait(spec, s, t)  # again, instead of in registers all the time
            if combine.is_last(a, done.split.first * spec.tile.warps + tile.warp_idx, done.split.num_splits):
                combine.merge(spec, a, done, r.pack_factor, tile.rows_left, row_of_warp, tile.warp_idx)
        # release the tile
        pipeline.consumer_release(s.work_pipe, t)
        tile = next_tile
        t += 1
