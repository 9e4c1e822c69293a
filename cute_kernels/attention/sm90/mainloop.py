"""Math role of prefill: one warpgroup per 64 rows of the tile. S = Q K^T, softmax, O += P V, store.

A warpgroup issues QK of a block together with PV of the block before, and computes the softmax of the one under the
other (`mma_one_n_block`), across tiles too (`finish_pv`). Warpgroups take turns at issuing, so that one's softmax runs
under another's MMAs.

Exponentials do not wait for the block's maxima: a row guesses that its running maximum stays what it is
(`speculate_p`), which is nearly always right, because that lags behind anyway (`softmax.update_max`). Where P comes out
too large for its type, the warp computes it again (`validate_p`). Blocks in which maxima grow as a rule, those on the
diagonal and, in 8 bits, the first ones of a tile, are computed maxima first.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ... import abi
from ...device import pipeline, warp, wgmma
from .. import geometry, logits, mask, softmax
from ..kv import pages, source
from ..logits import ScoreCols, ScoreRows
from ..prepare import dequantises, mma_dtype, scales_q_rows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import promotion, splits
from .epilogue import LANES, P_MAX_LOG2, CallScales, rescale_params, scales_of, scales_of_call, store
from .groups import ALL_BARRIER, warp_scheduler_barrier_arrive, warp_scheduler_barrier_sync, warpgroup_idx
from .query import convert_q, gather_q, load_q
from .roles import fp8, prepared, roles, scaled_rows
from .state import BlockFlags, ConsumerState, MainloopVariant, PendingPV, Sm90Fragments, Sm90TileState, registers

P_SUM_LIMIT = 0.97 * 2.0**P_MAX_LOG2  # no exponential exceeds 2^P_MAX_LOG2 where the sum of some does not reach this
E4M3_TO_MSB, MSB_MASK = 0x02020202, 0x80808080  # e4m3 is 0x7e at 448, 0x7f for NaN: plus 2, their top bit is set


def fence_before_mma(spec, which):
    """What precedes an MMA that reads a stage of K or V; one that was prepared needs nothing."""
    if not prepared(spec)[which]:
        source(spec).fence_before_mma()


def overlap_next_qk(spec):
    """Whether the first QK of a tile is issued before the epilogue of the tile before."""
    return spec.tile.q_in_regs or spec.tile.q_stages > 1


def rows_of(r: Sm90Fragments, tile: Sm90TileState):
    return ScoreRows(r.tokens, tile.w.q_start, tile.seqlen, r.slopes, r.words)


@cute.jit
def transform_scores(
    spec: cutlass.Constexpr, a, r: Sm90Fragments, tile: Sm90TileState, n_block: Int32, flags: cutlass.Constexpr
):
    """Soft cap and mask of block j in r.s, as (rows, cols)."""
    view = wgmma.rows_cols(r.s)
    mine = r.cols[0, 0][1]
    at = [8 * (c // 2) + c % 2 for c in range(spec.tile.n // LANES)]
    rows = rows_of(r, tile)
    cols = ScoreCols(n_block * spec.tile.n + mine, at, mine, LANES)
    logits.transform(spec, a, view, scales_of(r, tile.scales).score, rows, cols, flags.capped, flags.masked)
    return view


@cute.jit
def mask_and_update_max(
    spec: cutlass.Constexpr, a, r: Sm90Fragments, tile: Sm90TileState, n_block: Int32, flags: cutlass.Constexpr
):
    """Soft cap, mask and new maxima of block j in r.s."""
    view, to_log2 = transform_scores(spec, a, r, tile, n_block, flags), scales_of(r, tile.scales).reduced
    softmax.update_max(r.st, view, to_log2, LANES, tile.rescale_params, exact_max_blocks(spec) > 0)


@cute.jit
def compute_p(r: Sm90Fragments, tile: Sm90TileState, row: cutlass.Constexpr):
    """exp2 of a row of r.s."""
    softmax.exp_and_sum(r.st, wgmma.rows_cols(r.s), scales_of(r, tile.scales).reduced[row], row)


@cute.jit
def convert_p(spec: cutlass.Constexpr, r: Sm90Fragments, row: cutlass.Constexpr):
    """A row of r.s as A operand in r.p."""
    store_p(spec, r, pack_p(spec, wgmma.rows_cols(r.s)[row, None]), row)


def pack_p(spec, values):
    """Values of a row in the type of P, as words: of 8 bits four neighbours, of 16 two."""
    if fp8(spec):
        return [warp.pack_e4m3([values[i + e] for e in range(4)]) for i in range(0, cute.size(values), 4)]
    return [
        warp.pack_16bit(abi.DTYPES[mma_dtype(spec)], values[i], values[i + 1]) for i in range(0, cute.size(values), 2)
    ]


def store_p(spec, r, words, row):
    """Words of a row into r.p. In 8 bits, the operand's word i, of every 16 keys, is of four neighbours of the row's
    registers, whose keys `prepare.transpose` puts side by side."""
    into = cute.recast_tensor(r.p, Uint32)
    for i, word in enumerate(words):
        into[i // 2 * 4 + i % 2 * 2 + row if fp8(spec) else 2 * i + row] = word


class SpeculativeP(NamedTuple):
    """P of columns of a row, if the row's maximum stays what it is: words, chains of their sum, and, in 8 bits, a word
    whose bytes' top bits say which are 448 or NaN."""

    words: list
    parts: list
    full: Any


def speculate_p(spec, r, tile, row, cols, before=None) -> SpeculativeP:
    """The `SpeculativeP` of a row of r.s, which stays. before: that of the columns in front."""
    scores, scale = wgmma.rows_cols(r.s)[row, None], scales_of(r, tile.scales).reduced[row]
    values = cute.make_rmem_tensor(len(cols), Float32)
    for i, col in enumerate(cols):
        values[i] = softmax.exp2_scaled(scores[col], scale, r.st.row_max_scaled[row])
    words = pack_p(spec, values)
    parts, full = (
        softmax.reduce_chains(values, softmax.add, before and before.parts),
        before.full if before else Uint32(0),
    )
    if fp8(spec):
        for word in words:
            full = full | (word + Uint32(E4M3_TO_MSB))
    return SpeculativeP(words, parts, full)


@cute.jit
def validate_p(spec: cutlass.Constexpr, r: Sm90Fragments, tile: Sm90TileState, totals, full):
    """Guesses come true; but where P of a row of the warp may be out of its span, they are forgotten, and P is made
    anew."""
    if const_expr(fp8(spec)):
        again = (full & Uint32(MSB_MASK)) != 0
    else:
        again = totals[0] >= P_SUM_LIMIT or totals[1] >= P_SUM_LIMIT
    if cute.arch.vote_any_sync(again):
        softmax.update_max(
            r.st, wgmma.rows_cols(r.s), scales_of(r, tile.scales).reduced, LANES, tile.rescale_params, False
        )
        for row in cutlass.range_constexpr(cute.size(r.tokens)):
            compute_p(r, tile, row)
            convert_p(spec, r, row)
        rescale(spec, r)
    else:
        for row in cutlass.range_constexpr(cute.size(r.tokens)):
            r.st.row_sum[row] += totals[row]


@cute.jit
def wait_first_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, w: WorkTileInfo, at: ConsumerState):
    """Wait for what the first QK of a tile needs: its Q and K of its last block."""
    pipeline.consumer_wait(s.q_pipe, at.q)
    if w.pack_factor > 1:
        gather_q(spec, s, w, plan.args, pipeline.stage(s.q_pipe, at.q))
    if const_expr(spec.tile.q_in_regs):
        load_q(spec, plan.mma_qk, s, r, r.q, pipeline.stage(s.q_pipe, at.q))
        cute.arch.sync_warp()  # all lanes have read before one of them arrives
        pipeline.consumer_release(s.q_pipe, at.q)
    elif const_expr(dequantises(spec) and spec.q != mma_dtype(spec)):
        convert_q(spec, s, r, pipeline.stage(s.q_pipe, at.q))
    pipeline.consumer_wait(s.k_pipe, at.kv)
    fence_before_mma(spec, pages.K)


@cute.jit
def issue_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState):
    q = r.q if const_expr(spec.tile.q_in_regs) else r.q[None, None, None, pipeline.stage(s.q_pipe, at.q)]
    wgmma.issue(plan.mma_qk, r.s, q, r.k[None, None, None, pipeline.stage(s.k_pipe, at.kv)], True)


@cute.jit
def issue_first_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, w: WorkTileInfo, at: ConsumerState):
    """The first QK of a tile."""
    wait_first_qk(spec, plan, s, r, w, at)
    issue_qk(spec, plan, s, r, at)


@cute.jit
def issue_pv(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, i: pipeline.PipelineState):
    pipeline.consumer_wait(s.v_pipe, i)
    fence_before_mma(spec, pages.V)
    wgmma.issue(plan.mma_pv, r.o, r.p, r.v[None, None, None, pipeline.stage(s.v_pipe, i)], False)


@cute.jit
def first_n_block(
    spec: cutlass.Constexpr,
    a,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    i: pipeline.PipelineState,
    capped: cutlass.Constexpr,
):
    """The last KV block of a tile, item i of the pipes, its QK in flight: P is left in r.p, its PV is owed."""
    n_block = tile.w.n_block_max - 1
    logits.fetch_mask(spec, a, rows_of(r, tile), tile.mask_start, n_block * spec.tile.n, LANES)
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.k_pipe, i)
    mask_and_update_max(spec, a, r, tile, n_block, BlockFlags(capped, True, True))
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(r, tile, row)
        convert_p(spec, r, row)
    valid = tile.seqlen.kv_len - n_block * spec.tile.n
    if const_expr(source(spec).PARTIAL_TAIL and not prepared(spec)[pages.V]):
        if valid < spec.tile.n and source(spec).has_partial_tail(spec, valid):
            pipeline.consumer_wait(s.v_pipe, i)
            threads, tid = 128 * spec.tile.warpgroups, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
            source(spec).zero_tail(spec, s.v[None, None, pipeline.stage(s.v_pipe, i)], valid, tid, threads)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=threads)


@cute.jit
def mma_one_n_block(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    n_block: Int32,
    flags: cutlass.Constexpr,
):
    """QK of block j (item at.kv + 1) and the PV owed to item at.kv in flight together; softmax of j under PV and the
    other warpgroup's MMAs. PV has ended by the time the first row is done, whose conversion then runs under the
    second's exponentials. Returns the `ConsumerState` of the next step."""
    i, next_kv, a = at.kv, pipeline.next_item(s.k_pipe, at.kv), plan.args
    pipeline.consumer_wait(s.k_pipe, next_kv)
    fence_before_mma(spec, pages.K)
    warp_scheduler_barrier_sync(spec)
    issue_qk(spec, plan, s, r, ConsumerState(next_kv, at.q))
    issue_pv(spec, plan, s, r, i)
    warp_scheduler_barrier_arrive(spec)
    logits.fetch_mask(spec, a, rows_of(r, tile), tile.mask_start, n_block * spec.tile.n, LANES)
    warpgroup.wait_group(1)
    # What the release depends on is always true (exp >= 0 >= -|scale|), but the compiler cannot know: it keeps the
    # release behind the scores, and the wait behind the release, whatever a device tensor holds.
    below = -cute.math.absf(tile.scales.reduced)
    if const_expr(flags.is_first):
        mask_and_update_max(spec, a, r, tile, n_block, flags)
        compute_p(r, tile, 0)
        pipeline.consumer_release_after(s.k_pipe, next_kv, wgmma.rows_cols(r.s)[0, 0], below)
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.v_pipe, i)
        convert_p(spec, r, 0)
        compute_p(r, tile, 1)
        convert_p(spec, r, 1)
        rescale(spec, r)
    else:
        transform_scores(spec, a, r, tile, n_block, flags)
        n = const_expr(spec.tile.n // LANES)
        cut = const_expr(n if fp8(spec) else n // 8 * 4)  # of the first row's columns: more would need more registers
        front = speculate_p(spec, r, tile, 0, range(cut))
        pipeline.consumer_release_after(s.k_pipe, next_kv, softmax.join_chains(front.parts, softmax.add), below)
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.v_pipe, i)
        # Zero, as no sum of exponentials is negative (of a row that is NaN maybe all ones: still NaN), but the compiler
        # cannot know: P is defined behind the wait, or all MMAs would be waited for one by one.
        zero = Uint32(warp.bits(r.st.row_sum[0]) >> Int32(31))
        first = speculate_p(spec, r, tile, 0, range(cut, n), front) if const_expr(cut < n) else front._replace(words=[])
        store_p(spec, r, [word | zero for word in front.words] + first.words, 0)
        second = speculate_p(spec, r, tile, 1, range(n))
        store_p(spec, r, second.words, 1)
        validate_p(
            spec,
            r,
            tile,
            [softmax.join_chains(g.parts, softmax.add) for g in (first, second)],
            first.full | second.full,
        )
    return ConsumerState(next_kv, at.q)


@cute.jit
def finish_pv(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    after: WorkTileInfo,
    at: ConsumerState,
    is_pending: cutlass.Constexpr,
):
    """The PV owed by the tile at hand, and, where Q has room for it, the first QK of the tile `after`, which then runs
    under this tile's epilogue. Past the last tile that QK multiplies what the stages happen to hold: with MMAs in
    flight across a conditional the compiler waits after each of them."""
    if const_expr(overlap_next_qk(spec)):
        if after.is_valid != 0:
            wait_first_qk(spec, plan, s, r, after, ConsumerState(pipeline.next_item(s.k_pipe, at.kv), at.q + 1))
        warp_scheduler_barrier_sync(spec)
        issue_pv(spec, plan, s, r, at.kv)
        issue_qk(spec, plan, s, r, ConsumerState(pipeline.next_item(s.k_pipe, at.kv), at.q + 1))
        warp_scheduler_barrier_arrive(spec)
        warpgroup.wait_group(1)
    else:
        issue_pv(spec, plan, s, r, at.kv)
        warpgroup.wait_group(0)
    pipeline.consumer_release(s.v_pipe, at.kv)


@cute.jit
def init_rows(spec: cutlass.Constexpr, r: Sm90Fragments, tile: Sm90TileState, a, capped: cutlass.Constexpr):
    """Tokens of this thread's rows, their scales and slopes."""
    pack_factor = geometry.pack_divisor(tile.w)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = tile.w.m_block * spec.tile.m + r.cols[k, 0][0]
        r.tokens[k] = geometry.token_of(row, pack_factor)
        if const_expr(scaled_rows(spec)):
            head = geometry.head_of(row, tile.w.head_idx, pack_factor)
            r.scales.score[k] = tile.scales.score * softmax.head_scale(a.logits.softmax_scale_ptr, head)
            if const_expr(scales_q_rows(spec)):
                r.scales.score[k] *= r.q_row_scales[k]
            if const_expr(spec.logits.soft_cap):
                r.scales.reduced[k] = tile.scales.reduced if const_expr(capped) else r.scales.score[k]
        if const_expr(spec.logits.alibi):
            head = geometry.head_of(row, tile.w.head_idx, pack_factor)
            r.slopes[k] = logits.slope_of(a, head, scales_of(r, tile.scales).score[k])


@cute.jit
def rescale(spec: cutlass.Constexpr, r: Sm90Fragments):
    """O, none of whose PV is in flight, follows the maxima."""
    softmax.rescale(r.st, wgmma.rows_cols(r.o))
    if const_expr(spec.tile.promote_interval > 0):
        promotion.rescale(r.promoted, r.st.acc_scale)


@cute.jit
def begin_tile(
    spec: cutlass.Constexpr, a, s, r: Sm90Fragments, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr
):
    """All of a tile up to its first block, whose QK is in flight and whose PV is then owed."""
    softmax.reset(r.st, softmax.NO_KEY_MAX)
    r.o.fill(0.0)
    init_rows(spec, r, tile, a, capped)
    first_n_block(spec, a, s, r, tile, at.kv, capped)
    if const_expr(spec.tile.promote_interval > 0):
        promotion.reset(spec, r.promoted)


@cute.jit
def end_tile(spec: cutlass.Constexpr, s, r: Sm90Fragments, at: ConsumerState):
    """No QK of the tile is left."""
    if const_expr(spec.tile.promote_interval > 0):
        promotion.finalize(r.promoted, r.o)
    if const_expr(not spec.tile.q_in_regs):
        pipeline.consumer_release(s.q_pipe, at.q)


def exact_max_blocks(spec):
    """Blocks of a tile, after the first, in which maxima follow: in 8 bits they would grow out of P's range later."""
    return 2 if fp8(spec) else 0


@cute.jit
def for_each_block(body: cutlass.Constexpr, state, lo: Int32, hi: Int32):
    """Blocks hi - 1 to lo: state = body(state, j)."""
    for n_block in cutlass.range(hi - 1, lo - 1, -1, unroll=1):
        state = body(state, n_block)
    return state


@cute.jit
def run_segment(spec: cutlass.Constexpr, r: Sm90Fragments, segment: mask.Segment, state, body: cutlass.Constexpr):
    """`for_each_block` through a segment; O is promoted when it is time to."""
    if const_expr(spec.tile.promote_interval == 0):
        state = for_each_block(body, state, segment.n_block_min, segment.n_block_max)
    else:
        hi = segment.n_block_max
        while hi > segment.n_block_min:
            lo = cutlass.max(segment.n_block_min, hi - r.promoted.counts[0])
            state = for_each_block(body, state, lo, hi)
            promotion.promote(spec, r.promoted, r.o, hi - lo)
            hi = lo
    return state


def first_row(spec, w):
    """Of this warpgroup, among the rows of the request."""
    return w.m_block * spec.tile.m + 64 * warpgroup_idx(spec)


@cute.jit
def drain_blocks(spec: cutlass.Constexpr, s, at: ConsumerState, count: Int32):
    """KV blocks that a warpgroup without rows leaves to the others. Returns the `ConsumerState` of the next step."""
    i = at.kv
    for _ in cutlass.range(count, unroll=1):
        next_kv = pipeline.next_item(s.k_pipe, i)
        pipeline.consumer_wait(s.k_pipe, next_kv)
        warp_scheduler_barrier_sync(spec)
        warp_scheduler_barrier_arrive(spec)
        pipeline.consumer_release(s.k_pipe, next_kv)
        pipeline.consumer_wait(s.v_pipe, i)
        pipeline.consumer_release(s.v_pipe, i)
        i = next_kv
    return ConsumerState(i, at.q)


@cute.jit
def run_tile(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    capped: cutlass.Constexpr,
):
    """The KV blocks of a tile whose first QK is in flight, up to the PV of the `PendingPV`, which it returns."""
    begin_tile(spec, plan.args, s, r, tile, at, capped)
    lo, hi = tile.w.n_block_min, tile.w.n_block_max - 1
    if const_expr(spec.tile.warpgroups > 1):
        if first_row(spec, tile.w) >= geometry.num_rows(tile.w.q_len, tile.w.pack_factor):
            lo = hi
    segments = mask.segments(
        spec, lo, hi, tile.w.n_block_full_min, tile.w.n_block_full_max, exact_max_blocks(spec), capped
    )
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        at = run_segment(spec, r, segment, at, partial(mma_one_n_block, spec, plan, s, r, tile, flags=flags))
    if const_expr(spec.tile.warpgroups > 1):
        at = drain_blocks(spec, s, at, lo - tile.w.n_block_min)
    end_tile(spec, s, r, at)
    return PendingPV(at.kv, True)


DENSE = MainloopVariant(run_tile, finish_pv, True)


@cute.jit
def epilogue(
    spec: cutlass.Constexpr,
    a,
    s,
    r: Sm90Fragments,
    w: WorkTileInfo,
    scales: CallScales,
    empty: cutlass.Constexpr,
    count: Int32,
):
    """O and LSE of a tile, or of this CTA's part of it. count: parts before. Returns how many there are then."""
    if const_expr(work.is_split_kv(spec)):
        if w.split.slot >= 0:
            splits.store_partial(spec, a, s, r, w, count, empty)
            count += 1
        else:
            store(spec, a, r, w, scales, empty)
    else:
        store(spec, a, r, w, scales, empty)
    return count


class NextTile(NamedTuple):
    """A tile, the number of the one behind it, and how many parts of tiles the CTA has stored."""

    w: WorkTileInfo
    t: Int32
    parts: Int32


@cute.jit
def next_tile(spec: cutlass.Constexpr, a, s, r: Sm90Fragments, scales: CallScales, t: Int32, count: Int32):
    """The CTA's t-th tile or the first after it that sees a key; those that see none are stored."""
    w = work.consume(spec, s, t)
    while w.is_valid != 0 and w.n_block_max <= w.n_block_min:
        count = epilogue(spec, a, s, r, w, scales, True, count)
        t += 1
        w = work.consume(spec, s, t)
    return NextTile(w, t + 1, count)


@cute.jit
def blocks_of(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    run: cutlass.Constexpr,
    capped: cutlass.Constexpr,
):
    """The KV blocks of a tile, with its first QK where that is not in flight."""
    if const_expr(not overlap_next_qk(spec)):
        issue_first_qk(spec, plan, s, r, tile.w, at)
    return run(spec, plan, s, r, tile, at, capped)


@cute.jit
def run_blocks(
    spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, tile: Sm90TileState, at: ConsumerState, loop: cutlass.Constexpr
):
    """`blocks_of`, by code of its own where scores are capped: a conditional among MMAs would wait for them."""
    run, pending_pv = loop.run_tile, PendingPV(at.kv, loop.pv_pending)
    if const_expr(not spec.logits.soft_cap):
        pending_pv = blocks_of(spec, plan, s, r, tile, at, run, False)
    elif plan.args.logits.soft_cap > 0.0:
        pending_pv = blocks_of(spec, plan, s, r, tile, at, run, True)
    else:
        pending_pv = blocks_of(spec, plan, s, r, tile, at, run, False)
    return pending_pv


@cute.jit
def mma(spec: cutlass.Constexpr, plan, s, loop: cutlass.Constexpr):
    """All tiles of the CTA."""
    a = plan.args
    r = registers(spec, plan, s)
    scales = scales_of_call(spec, a)
    finish = loop.finish_pv
    if warpgroup_idx(spec) == spec.tile.warpgroups - 1:
        warp_scheduler_barrier_arrive(spec)
    at = ConsumerState(pipeline.initial_state(), Int32(0))
    w, t, count = next_tile(spec, a, s, r, scales, Int32(0), Int32(0))
    if w.is_valid != 0:
        if const_expr(overlap_next_qk(spec)):
            issue_first_qk(spec, plan, s, r, w, at)
        while w.is_valid != 0:
            start = geometry.mask_start(a, w.batch_idx) if const_expr(spec.mask.custom) else None
            tile = Sm90TileState(
                w, mask.seqlen_info(spec, a, w.q_len, w.kv_len), scales, rescale_params(spec, w.kv_len), start
            )
            pending_pv = run_blocks(spec, plan, s, r, tile, at, loop)
            w, t, count = next_tile(spec, a, s, r, scales, t, count)
            finish(spec, plan, s, r, w, ConsumerState(pending_pv.kv, at.q), pending_pv.is_pending)
            count = epilogue(spec, a, s, r, tile.w, scales, False, count)
            at = ConsumerState(pipeline.next_item(s.k_pipe, pending_pv.kv), at.q + 1)
        warpgroup.wait_group(0)
    if const_expr(work.is_split_kv(spec)):
        splits.merge(spec, a, s, count)
