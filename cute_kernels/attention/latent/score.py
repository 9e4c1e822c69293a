"""The `score` role of few query rows over packed latents: from rows as they are stored to V in bf16 and P.

Keys are the M side of the MMAs, and query rows the N side, of which 8 are an MMA: S^T = K Q^T and O^T = V^T P^T. A
score warp has half of the columns of 16 keys of a block, and an mma warp 64 columns of O for all keys (`mainloop`).
Score warps turn codes of e4m3 into bf16, times the factor of their row, in registers (`to_bf16`): the operand of S^T.
They also store them, for O^T.

To follow the code: `score_warp` -> `score_blocks` -> `score_block`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...device import copy, memory, mma, pipeline, to_bf16, warp
from ...device.divisor import Quotient
from ...records import RECORDS
from .. import geometry, mask, softmax
from ..barriers import NamedBarrier
from ..kv import gather, pages
from ..kv.gather import RowPageIds
from ..mask import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..softmax import SoftmaxState
from .roles import roles
from .tile_table import (
    HALVES,
    KEY_TILES,
    KEYS,
    P_STAGES,
    PIECE,
    PITCH,
    ROWS,
    SCORE_WARPS,
    STATS,
    STEP,
    VALUE_BYTES,
    WARPS,
    code_steps,
    groups,
    rotated_steps,
    steps,
)

LANES, LINE = 32, 128  # LINE: bytes
# Codes are 2^-120 times their values: factors are multiplied by 2^60, and so are Q and P. Products of codes and factors
# are then rounded as bf16 are, unless they are less than 2^-66.
RAISED, RAISED_PAIR = 2.0**60, 0x5D805D80  # in fp32, and two bf16
CHAINS = 2  # sums of products that do not wait for each other
AHEAD = 1  # loads of codes before those that are converted
ALL = (1 << KEYS) - 1


@dataclass(frozen=True)
class LatentHandoff:
    """Shared memory between score and mma. v (words, stage): rows of V, see `value_pieces`. p (words, lane, key tile,
    stage): the operand of O^T. rescale (row, stage): factors by which O is multiplied before. pipe: of these stages.
    halves (value, lane, key tile, half, 2): sums over half of the columns; ready: an mbarrier for each key tile. tops
    (row, key tile, 2): maxima of rows over 16 keys. row_max (row, STATS), row_sum (row, key tile, STATS): of the rows
    of a tile; row_max in log2 units, or -inf for a row without keys."""

    v: cute.Tensor
    p: cute.Tensor
    rescale: cute.Tensor
    pipe: pipeline.Pipeline
    halves: cute.Tensor
    ready: cute.Pointer
    tops: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def allocate(spec, smem) -> LatentHandoff:
    """Allocate `LatentHandoff`."""
    t = spec.tile
    p = cute.make_layout((2 * t.n_tiles, LANES, KEY_TILES, P_STAGES))
    each = [
        (4, LANES, KEY_TILES, HALVES, 2),
        (t.m, P_STAGES),
        (t.m, KEY_TILES, 2),
        (t.m, STATS),
        (t.m, KEY_TILES, STATS),
    ]
    halves, rescale, tops, row_max, row_sum = (smem.allocate_tensor(Float32, cute.make_layout(x), 16) for x in each)
    return LatentHandoff(
        smem.allocate_tensor(Uint32, cute.make_layout((t.n * VALUE_BYTES // 4, P_STAGES)), 128),
        smem.allocate_tensor(Uint32, p, 16),
        rescale,
        pipeline.make(smem, P_STAGES, SCORE_WARPS, WARPS),
        halves,
        pipeline.make_mbarriers(smem, KEY_TILES, HALVES),
        tops,
        row_max,
        row_sum,
    )


@dataclass(frozen=True)
class LatentFragments:
    """The registers of a score warp. Lane 4 g + t has rows 8 n + 2 t and 8 n + 2 t + 1 of MMA n. acc_s (4, n): of keys
    g and g + 8. q (2, n, MMA): the operand, row 8 n + g, of the warp's half of the columns. factors (2, group): of
    these keys and columns, as pairs of bf16. found: the slot of the warp's key lane % 16 of the next block. st, tokens:
    of the rows of which the warp has the softmax, those of the MMA with the number of its half."""

    acc_s: cute.Tensor
    q: cute.Tensor
    factors: cute.Tensor
    st: SoftmaxState
    tokens: cute.Tensor
    found: cute.Tensor


class LatentScoreState(NamedTuple):
    """The next items of the score role: kv, in k.pipe; p, in the pipeline of `LatentHandoff`; tile, of those with a
    key."""

    kv: pipeline.PipelineState
    p: Int32
    tile: Int32


def warp_of(spec, role):
    """Return the index of this warp among those of a role."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first(role)


def key_tile(spec):
    """Return which 16 keys of a block a score warp has."""
    return warp_of(spec, "score") % KEY_TILES


def half_of(spec):
    """Return which half of the columns of K a score warp has."""
    return warp_of(spec, "score") // KEY_TILES


def groups_of_half(spec):
    """Return the number of factors of a half of the columns of a row; 1 if there are none."""
    return max(groups(spec.kv.record) // HALVES, 1)


# The score role: one iteration per tile, an inner one per KV block, highest block first.
#   waits for   k.pipe (the rows of the block), a free stage of `LatentHandoff`, the other score warps
#   computes    V in bf16 and half of the sums of S^T of 16 keys, then, of 8 rows, maxima over all keys, and P
#   releases    the rows of the block, as soon as they are converted
@cute.jit
def score_warp(spec: cutlass.Constexpr, plan, s):
    """Run the role in one warp."""
    rmem, n = cute.make_rmem_tensor, const_expr(spec.tile.n_tiles)
    r = LatentFragments(
        rmem((4, n), Float32),
        rmem((2, n, steps(spec)), Uint32),
        rmem((2, groups_of_half(spec)), Uint32),
        softmax.make(2),
        rmem(2, Int32),
        rmem(1, Int32),
    )

    def score_tile(w, _, at):
        return score_blocks(spec, plan, s, r, w, at)

    work.for_each_tile(spec, s, score_tile, LatentScoreState(pipeline.initial_state(), Int32(0), Int32(0)))


@cute.jit
def score_blocks(
    spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, at: LatentScoreState
) -> LatentScoreState:
    """Compute P of the blocks of a tile. Return the state behind it."""
    a = plan.args
    softmax.reset(r.st, 0.0)
    r.factors.fill(RAISED_PAIR)
    if w.n_block_max > w.n_block_min:
        load_q(spec, a, r, w)
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            row = w.m_block * spec.tile.m + own_row(spec, k)
            r.tokens[k] = geometry.token_of(row, geometry.pack_divisor(w))
        look_up(spec, plan, r, w, w.n_block_max - 1)
        scale = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
        for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            at = score_block(spec, plan, s, r, w, at, n_block, scale)
        at = at._replace(tile=at.tile + 1)
    return at


def row_of(k):
    """Return the row of the tile that is this lane's k-th."""
    return ROWS * (k // 2) + 2 * (cute.arch.lane_idx() % 4) + k % 2


def own_row(spec, k):
    """Return the row of the tile that is the k-th of this lane's of which a score warp has the softmax."""
    return ROWS * half_of(spec) + row_of(k)


# Q: a lane has the words of the B operand of its rows. Those of columns with codes have the order in which a word of
# codes becomes two: the first half of a lane's four columns, then the second.


@cute.jit
def load_q(spec: cutlass.Constexpr, a, r: LatentFragments, w: WorkTileInfo):
    """Make the operand of S^T from Q. Rows past the sequence become zeros."""
    half, own, more = half_of(spec), const_expr(code_steps(spec)), const_expr(rotated_steps(spec))
    r.q.fill(0)
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        row = w.m_block * spec.tile.m + ROWS * n + cute.arch.lane_idx() // 4
        if row < geometry.num_rows(w.sequence.q_len, w.pack_factor):
            token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
            head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
            load_steps(a.query.q, token, head, half * own, r.q[None, n, None], 0, own, False)
            if const_expr(more > 0):
                plain = const_expr(RECORDS[spec.kv.record].packed)
                load_steps(a.query.q_rope, token, head, half * more, r.q[None, n, None], own, more, plain)


def load_steps(q, token, head, source, into, first, count, plain):
    """Load this lane's words of `count` MMAs, from number `first` on. source: the number of the first one in the
    tensor. plain: K has 16 bits there."""
    t, bits = cute.arch.lane_idx() % 4, q.element_type.width
    base = memory.row_of(q, token, head) + source * (STEP * bits // 8)
    for i in range(count):
        at = base + i * (STEP * bits // 8)
        if plain:
            words = [memory.load_words(at + 4 * t + 16 * part, 0, 1)[0] for part in range(2)]
        elif bits == 16:
            words = [to_bf16.multiply(word, RAISED_PAIR) for word in memory.load_words(at + 8 * t, 0, 2)]
        else:
            codes = to_bf16.e4m3_words(memory.load_words(at + 4 * t, 0, 1)[0])
            exact = [to_bf16.multiply(word, to_bf16.EXACT["e4m3"]) for word in codes]
            words = [to_bf16.multiply(word, RAISED_PAIR) for word in exact]
        for part in range(2):
            into[part, first + i] = words[part]


@cute.jit
def look_up(spec: cutlass.Constexpr, plan, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Look up the slot of the warp's key lane % 16 of a block."""
    if const_expr(gather.has_slots(spec)):
        of, op = pages.of_sequence(plan.args, w.batch_idx, pages.K), plan.kv[pages.K]
        page_ids = RowPageIds(r.found, Quotient(op.gmem[0].shape[2], *op.page_size))
        row = n_block * spec.tile.n + KEYS * key_tile(spec) + cute.arch.lane_idx() % KEYS
        r.found[0] = gather.page_of_row(spec, page_ids, of, w.sequence.kv_len, row)


@cute.jit
def present(a, r: LatentFragments):
    """Return which of the warp's keys exist, as bits."""
    slot, rows = r.found[0], Int64(a.kv.k.shape[0]) * a.kv.k.shape[2]
    return Uint32(cute.arch.vote_ballot_sync(slot >= 0 and Int64(slot) < rows)) & ALL


def stage_of(spec, s, kv):
    """Return the address of the rows of a block."""
    return s.k.raw.iterator.toint() + kv.index * (spec.tile.n * PITCH[spec.kv.record])


@cute.jit
def score_block(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: LatentFragments,
    w: WorkTileInfo,
    at: LatentScoreState,
    n_block: Int32,
    scale: Float32,
) -> LatentScoreState:
    """Compute P of a block into shared memory. Return the state behind it."""
    own, exist = key_tile(spec), Uint32(ALL)
    if const_expr(gather.has_slots(spec)):
        exist = present(plan.args, r)
        look_up(spec, plan, r, w, n_block - 1)
    half, to = half_of(spec), pipeline.stage(s.scores.pipe, at.p)
    pipeline.producer_acquire(s.scores.pipe, at.p)
    pipeline.consumer_wait(s.k.pipe, at.kv)
    rows = stage_of(spec, s, at.kv) + own * const_expr(KEYS * PITCH[spec.kv.record])
    load_factors(spec, r, rows, half)
    compute_scores(spec, s, r, rows, half, to)
    pipeline.consumer_release_if(s.k.pipe, at.kv, True)
    exchange_halves(spec, s, r, at.p)
    if half < spec.tile.n_tiles:
        if const_expr(gather.has_slots(spec)):
            hide_missing(r, exist)
        else:
            hide_unseen(spec, plan.args, r, w, n_block)
        update_rows(spec, s, r, scale, at.p % 2)
        store_p(spec, s, r, to)
        if n_block == w.n_block_min:
            store_stats(spec, s, r, at.tile % STATS)
    cute.arch.sync_warp()  # all lanes have written before one of them arrives
    pipeline.producer_commit(s.scores.pipe, at.p)
    return at._replace(kv=pipeline.next_item(s.k.pipe, at.kv), p=at.p + 1)


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * PITCH[spec.kv.record] + lane // KEYS * PIECE


def value_pieces(s, stage, key, which, first):
    """Return the addresses of pieces of 16 bytes of a row of V in bf16: of an MMA the one or the other of its two
    (`which`), `first` or the one behind, and of the next three MMAs. Those of the four MMAs behind are `LINE` bytes
    further. A piece is moved by the number of its row, so that eight rows are in different banks. The first piece of an
    MMA has its columns 4 i and 4 i + 1, and the second one the others."""
    base = s.scores.v[None, stage].iterator.toint() + key * VALUE_BYTES + first * PIECE
    return [base + PIECE * (2 * (i ^ key % 8 // 2) + (which ^ key % 2)) for i in range(LINE // (2 * PIECE))]


@cute.jit
def compute_scores(spec: cutlass.Constexpr, s, r: LatentFragments, rows: Int32, half: Int32, stage: Int32):
    """Compute S^T of the warp's keys, the rows of which begin at an address, over its half of the columns. Store those
    of V."""
    form, n_tiles = const_expr(RECORDS[spec.kv.record]), const_expr(spec.tile.n_tiles)
    per_group = const_expr(code_steps(spec) // groups_of_half(spec))
    acc = cute.make_rmem_tensor((4, n_tiles, CHAINS), Float32)
    acc.fill(0.0)
    base = rows + lane_piece(spec)
    codes = base + half * const_expr(PIECE * code_steps(spec))
    key = KEYS * key_tile(spec) + cute.arch.lane_idx() % KEYS
    which = cute.arch.lane_idx() // KEYS
    values = value_pieces(s, stage, key, which, half * const_expr(2 * code_steps(spec)))
    words = [warp.ldmatrix_x4(codes + 2 * PIECE * i) for i in range(AHEAD)]
    for i in cutlass.range_constexpr(code_steps(spec) // 2):
        if const_expr(i + AHEAD < code_steps(spec) // 2):
            words.append(warp.ldmatrix_x4(codes + 2 * PIECE * (i + AHEAD)))
        for part in cutlass.range_constexpr(2):
            step = const_expr(2 * i + part)
            a = of_codes(r, words[i], part, step // per_group)
            warp.stmatrix_x4(values[step % 4] + const_expr(step // 4 * LINE), a)
            multiply(spec, acc, r, step, a)
    behind = const_expr(code_steps(spec))
    for first in cutlass.range_constexpr(0, rotated_steps(spec), 2):
        if const_expr(form.packed):
            at = base + half * const_expr(2 * PIECE * rotated_steps(spec))
            for step in cutlass.range_constexpr(first, first + 2):
                words = warp.ldmatrix_x4(at + const_expr(form.rotated_at + 2 * PIECE * step))
                multiply(spec, acc, r, behind + step, words)
        else:
            at = base + half * const_expr(PIECE * rotated_steps(spec))
            words = warp.ldmatrix_x4(at + const_expr(spec.head_dim_vo + PIECE * first))
            for part in cutlass.range_constexpr(2):
                multiply(spec, acc, r, behind + first + part, of_codes(r, words, part, 0))
    for n in cutlass.range_constexpr(n_tiles):
        for e in cutlass.range_constexpr(4):
            r.acc_s[e, n] = softmax.join_chains([acc[e, n, chain] for chain in range(CHAINS)], softmax.add)


def of_codes(r, words, part, group):
    """Return the operand A of an MMA. words: codes of two. group: of the factors of their columns."""
    keys = [to_bf16.e4m3_words(words[2 * part + e]) for e in range(2)]
    return [to_bf16.multiply(keys[e][k], r.factors[e, group]) for k in range(2) for e in range(2)]


def multiply(spec, acc, r, step, a):
    """Add the products of an MMA of K Q^T."""
    for n in range(spec.tile.n_tiles):
        q = [r.q[part, n, step] for part in range(2)]
        mma.issue("bf16", acc, 4 * (n + spec.tile.n_tiles * (step % CHAINS)), a, q)


@cute.jit
def exchange_halves(spec: cutlass.Constexpr, s, r: LatentFragments, item: Int32):
    """Add the sums over the other half of the columns to the scores of the rows of which the warp has the softmax,
    which become the first ones."""
    half, lane, own, buffer = half_of(spec), cute.arch.lane_idx(), key_tile(spec), item % 2
    given, values = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
    for e in cutlass.range_constexpr(4):
        given[e] = r.acc_s[e, 0]
        if const_expr(spec.tile.n_tiles > 1):
            given[e] = warp.select(half == 0, r.acc_s[e, 1], r.acc_s[e, 0])
            r.acc_s[e, 0] = warp.select(half == 0, r.acc_s[e, 0], r.acc_s[e, 1])
    copy.vector(given, s.scores.halves[None, lane, own, half, buffer])
    cute.arch.sync_warp()  # all lanes have written before one of them arrives
    pipeline.mbarrier_arrive(s.scores.ready + own)
    pipeline.mbarrier_wait(s.scores.ready + own, item)
    copy.vector(s.scores.halves[None, lane, own, 1 - half, buffer], values)
    for e in cutlass.range_constexpr(4):
        r.acc_s[e, 0] += values[e]


# Factors: of a row and 128 columns, in bf16, as FlashMLA rounds them


def load_factors(spec, r: LatentFragments, rows, half):
    """Load the factors of keys g and g + 8 for the warp's half of the columns."""
    if RECORDS[spec.kv.record].packed:
        for e in range(2):
            for group, factor in enumerate(stored_factors(spec, rows, cute.arch.lane_idx() // 4 + 8 * e, half)):
                r.factors[e, group] = warp.pack_16bit(cutlass.BFloat16, factor, factor)


def stored_factors(spec, rows, key, half):
    """Return the factors of a row for a half of its columns, times `RAISED`."""
    count = groups_of_half(spec)
    at = rows + key * PITCH[spec.kv.record] + RECORDS[spec.kv.record].factors_at + half * (4 * count)
    return [warp.from_bits(word) * RAISED for word in mma.load(at, count)]


@cute.jit
def hide_missing(r: LatentFragments, exist):
    """Set the scores of slots that do not exist to -inf."""
    if exist != ALL:
        for e in cutlass.range_constexpr(2):
            missing = exist & (Uint32(1) << Uint32(cute.arch.lane_idx() // 4 + 8 * e)) == 0
            for k in cutlass.range_constexpr(2):
                r.acc_s[2 * e + k, 0] = warp.select(missing, -Float32.inf, r.acc_s[2 * e + k, 0])


@cute.jit
def hide_unseen(spec: cutlass.Constexpr, a, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Set the scores of keys that a row's token does not see to -inf."""
    if n_block >= w.n_block_full_max or n_block < w.n_block_full_min:
        seqlen = mask.seqlen_info(spec, a, w.sequence)
        rows = ScoreRows(r.tokens, w.sequence.q_start, seqlen, None)
        first = n_block * spec.tile.n + KEYS * key_tile(spec) + cute.arch.lane_idx() // 4
        mask.apply(spec, own_scores(r), rows, ScoreCols(first, [0, 8]))


def own_scores(r: LatentFragments):
    """View the scores of the rows of which the warp has the softmax, as (rows, keys)."""
    return cute.make_tensor(r.acc_s.iterator, cute.make_layout((2, 2)))


@cute.jit
def update_rows(spec: cutlass.Constexpr, s, r: LatentFragments, scale: Float32, buffer: Int32):
    """Bring the maxima of rows up to date with all warps' keys, rescale the sums of rows, and turn scores into
    exponentials."""
    view, st = own_scores(r), r.st
    for k in cutlass.range_constexpr(2):
        top = warp.reduce_across_quads(cute.arch.fmax(view[k, 0], view[k, 1]), cute.arch.fmax)
        if cute.arch.lane_idx() < 4:
            s.scores.tops[own_row(spec, k), key_tile(spec), buffer] = top
    cute.arch.barrier(barrier_id=NamedBarrier.SCORES + half_of(spec), number_of_threads=LANES * KEY_TILES)
    for k in cutlass.range_constexpr(2):
        old, top = st.row_max[k], st.row_max[k]
        for other in cutlass.range_constexpr(KEY_TILES):
            top = cute.arch.fmax(top, s.scores.tops[own_row(spec, k), other, buffer])
        st.row_max[k] = top
        st.row_max_scaled[k] = Float32(0.0) if top == -Float32.inf else top * scale
        st.acc_scale[k] = Float32(1.0) if top == old else softmax.exp2_scaled(old, scale, st.row_max_scaled[k])
        st.row_sum[k] = st.row_sum[k] * st.acc_scale[k]
        softmax.exp_and_sum(st, view, scale, st.row_max_scaled[k], k)


@cute.jit
def store_p(spec: cutlass.Constexpr, s, r: LatentFragments, stage: Int32):
    """Store P of the warp's keys and rows as the operand of O^T, and the factors of O."""
    own, half, lane = key_tile(spec), half_of(spec), cute.arch.lane_idx()
    for e in cutlass.range_constexpr(2):
        word = warp.pack_16bit(cutlass.BFloat16, *(r.acc_s[2 * e + k, 0] * RAISED for k in range(2)))
        s.scores.p[2 * half + e, lane, own, stage] = mma.transpose(word)
    if own == 0 and lane < 4:
        for k in cutlass.range_constexpr(2):
            s.scores.rescale[own_row(spec, k), stage] = r.st.acc_scale[k]


@cute.jit
def store_stats(spec: cutlass.Constexpr, s, r: LatentFragments, tile: Int32):
    """Store the maxima and the sums of the rows of a tile."""
    own = key_tile(spec)
    for k in cutlass.range_constexpr(2):
        total = warp.reduce_across_quads(r.st.row_sum[k], softmax.add)
        if cute.arch.lane_idx() < 4:
            s.scores.row_sum[own_row(spec, k), own, tile] = total
            if own == 0:
                top = -Float32.inf if r.st.row_max[k] == -Float32.inf else r.st.row_max_scaled[k]
                s.scores.row_max[own_row(spec, k), tile] = top
