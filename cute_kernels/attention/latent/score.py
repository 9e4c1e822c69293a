"""The `score` role of few query rows over packed latents: from rows as they are stored to P.

Keys are the M side of the MMAs, and query rows the N side, of which 8 are an MMA: S^T = K Q^T and O^T = V^T P^T. A
score warp has 16 keys of a block, and an mma warp 64 columns of O for all keys (`mainloop`). Both turn codes of e4m3
into bf16 in registers (`to_bf16`), and multiply them by the factor of their row there: an instruction of conversion
takes as long as one that moves a converted value through shared memory.

To follow the code: `score_warp` -> `score_blocks` -> `score_block`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...device import memory, mma, pipeline, to_bf16, warp
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
from .tile_table import KEYS, P_STAGES, PIECE, PITCH, ROWS, SCORE_WARPS, STATS, STEP, WARPS, groups, rotated_steps

LANES = 32
# Codes are 2^-120 times their values: factors are multiplied by 2^60, and so are Q and P. Products of codes and factors
# are then rounded as bf16 are, unless they are less than 2^-66.
RAISED, RAISED_PAIR = 2.0**60, 0x5D805D80  # in fp32, and two bf16
CHAINS = 2  # sums of products that do not wait for each other
ALL = (1 << KEYS) - 1


@dataclass(frozen=True)
class LatentHandoff:
    """Shared memory between score and mma. p (words, lane, key tile, stage): the operand of O^T. factors (key, group,
    stage): of rows, in bf16. rescale (row, stage): factors by which O is multiplied before. pipe: of these stages.
    tops (row, warp, 2): maxima of rows over the keys of a score warp. row_max (row, STATS), row_sum (row, warp, STATS):
    of the rows of a tile; row_max in log2 units, or -inf for a row without keys."""

    p: cute.Tensor
    factors: cute.Tensor
    rescale: cute.Tensor
    pipe: pipeline.Pipeline
    tops: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def allocate(spec, smem) -> LatentHandoff:
    """Allocate `LatentHandoff`."""
    t = spec.tile
    p = cute.make_layout((2 * t.n_tiles, LANES, SCORE_WARPS, P_STAGES))
    each = [(t.m, P_STAGES), (t.m, SCORE_WARPS, 2), (t.m, STATS), (t.m, SCORE_WARPS, STATS)]
    rescale, tops, row_max, row_sum = (smem.allocate_tensor(Float32, cute.make_layout(x), 16) for x in each)
    return LatentHandoff(
        smem.allocate_tensor(Uint32, p, 16),
        smem.allocate_tensor(cutlass.BFloat16, cute.make_layout((t.n, groups(spec.kv.record), P_STAGES)), 16),
        rescale,
        pipeline.make(smem, P_STAGES, SCORE_WARPS, WARPS),
        tops,
        row_max,
        row_sum,
    )


@dataclass(frozen=True)
class LatentFragments:
    """The registers of a score warp. Lane 4 g + t has rows 8 n + 2 t and 8 n + 2 t + 1 of MMA n. acc_s (4, n): of keys
    g and g + 8. factors (2, group): of these keys, as pairs of bf16. found: the slot of the warp's key lane % 16 of the
    next block."""

    acc_s: cute.Tensor
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


def meet():
    """Wait for all score warps."""
    cute.arch.barrier(barrier_id=NamedBarrier.SCORES, number_of_threads=LANES * SCORE_WARPS)


# The score role: one iteration per tile, an inner one per KV block, highest block first.
#   waits for   k.pipe (the rows of the block), the other score warps (maxima), and a free stage of P
#   computes    S^T of 16 keys, the maxima of rows over all keys of the block, P
#   signals     the stage of P; mma frees the rows behind it
@cute.jit
def score_warp(spec: cutlass.Constexpr, plan, s):
    """Run the role in one warp."""
    rmem, n = cute.make_rmem_tensor, const_expr(spec.tile.n_tiles)
    r = LatentFragments(
        rmem((4, n), Float32),
        rmem((2, groups(spec.kv.record)), Uint32),
        softmax.make(2 * n),
        rmem(2 * n, Int32),
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
        load_q(spec, a, s, w)
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            r.tokens[k] = geometry.token_of(w.m_block * spec.tile.m + row_of(k), geometry.pack_divisor(w))
        look_up(spec, plan, r, w, w.n_block_max - 1)
        scale = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
        meet()
        for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            at = score_block(spec, plan, s, r, w, at, n_block, scale)
        at = at._replace(tile=at.tile + 1)
    return at


def row_of(k):
    """Return the row of the tile that is this lane's k-th."""
    return ROWS * (k // 2) + 2 * (cute.arch.lane_idx() % 4) + k % 2


# Q: a lane's words of the B operand of an MMA lie side by side. Those of columns with codes have the order in which a
# word of codes becomes two: the first half of a lane's four columns, then the second.


@cute.jit
def load_q(spec: cutlass.Constexpr, a, s, w: WorkTileInfo):
    """Make the operand of S^T from Q. Rows past the sequence become zeros."""
    lane, own, count = cute.arch.lane_idx(), warp_of(spec, "score"), const_expr(spec.head_dim_qk // STEP)
    g, latent = lane // 4, const_expr(spec.head_dim_vo // STEP)
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        row = w.m_block * spec.tile.m + ROWS * n + g
        exists = row < geometry.num_rows(w.sequence.q_len, w.pack_factor)
        token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        for i in cutlass.range_constexpr(latent // SCORE_WARPS):
            load_step(spec, a.query.q, token, head, exists, s, n, own + SCORE_WARPS * i, Int32(0), False)
        if const_expr(count > latent):
            if own < count - latent:
                plain = const_expr(rotated_steps(spec) > 0)
                load_step(spec, a.query.q_rope, token, head, exists, s, n, own + latent, Int32(latent), plain)


@cute.jit
def load_step(
    spec: cutlass.Constexpr, q: cute.Tensor, token: Int32, head: Int32, exists, s, n: cutlass.Constexpr, step: Int32,
    first: Int32, plain: cutlass.Constexpr,
):  # fmt: skip
    """Load this lane's words of an MMA. first: the MMA of the tensor's first column. plain: K has 16 bits there."""
    t, words = cute.arch.lane_idx() % 4, cute.make_rmem_tensor(2, Uint32)
    words.fill(0)
    if exists:
        base = memory.row_of(q, token, head) + (step - first) * const_expr(STEP * q.element_type.width // 8)
        if const_expr(plain):
            for half in cutlass.range_constexpr(2):
                words[half] = memory.load_words(base + 4 * t + 16 * half, 0, 1)[0]
        elif const_expr(q.element_type.width == 16):
            loaded = memory.load_words(base + 8 * t, 0, 2)
            for half in cutlass.range_constexpr(2):
                words[half] = to_bf16.multiply(loaded[half], RAISED_PAIR)
        else:
            loaded = to_bf16.e4m3_words(memory.load_words(base + 4 * t, 0, 1)[0])
            for half in cutlass.range_constexpr(2):
                exact = to_bf16.multiply(loaded[half], to_bf16.EXACT["e4m3"])
                words[half] = to_bf16.multiply(exact, RAISED_PAIR)
    at = (step * LANES + cute.arch.lane_idx()) * const_expr(2 * spec.tile.n_tiles) + 2 * n
    for half in cutlass.range_constexpr(2):
        s.q[at + half] = words[half]


@cute.jit
def look_up(spec: cutlass.Constexpr, plan, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Look up the slot of the warp's key lane % 16 of a block."""
    if const_expr(gather.has_slots(spec)):
        of, op = pages.of_sequence(plan.args, w.batch_idx, pages.K), plan.kv[pages.K]
        page_ids = RowPageIds(r.found, Quotient(op.gmem[0].shape[2], *op.page_size))
        row = n_block * spec.tile.n + KEYS * warp_of(spec, "score") + cute.arch.lane_idx() % KEYS
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
    own, exist = warp_of(spec, "score"), Uint32(ALL)
    if const_expr(gather.has_slots(spec)):
        exist = present(plan.args, r)
        look_up(spec, plan, r, w, n_block - 1)
    pipeline.consumer_wait(s.k.pipe, at.kv)
    rows = stage_of(spec, s, at.kv) + own * const_expr(KEYS * PITCH[spec.kv.record])
    load_factors(spec, r, rows)
    compute_scores(spec, s, r, rows)
    if const_expr(gather.has_slots(spec)):
        hide_missing(spec, r, exist)
    else:
        hide_unseen(spec, plan.args, r, w, n_block)
    update_rows(spec, s, r, scale, at.p % 2)
    stage = pipeline.stage(s.scores.pipe, at.p)
    pipeline.producer_acquire(s.scores.pipe, at.p)
    store_p(spec, s, r, stage)
    store_factors(spec, s, rows, stage)
    if n_block == w.n_block_min:
        store_stats(spec, s, r, at.tile % STATS)
    cute.arch.sync_warp()  # all lanes have written before one of them arrives
    pipeline.producer_commit(s.scores.pipe, at.p)
    return at._replace(kv=pipeline.next_item(s.k.pipe, at.kv), p=at.p + 1)


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * PITCH[spec.kv.record] + lane // KEYS * PIECE


@cute.jit
def compute_scores(spec: cutlass.Constexpr, s, r: LatentFragments, rows: Int32):
    """Compute S^T of the warp's keys, the rows of which begin at an address."""
    form, n_tiles = const_expr(RECORDS[spec.kv.record]), const_expr(spec.tile.n_tiles)
    of_codes = const_expr(spec.head_dim_qk // STEP - rotated_steps(spec))
    per_group = const_expr(of_codes // groups(spec.kv.record))
    acc = cute.make_rmem_tensor((4, n_tiles, CHAINS), Float32)
    acc.fill(0.0)
    base = rows + lane_piece(spec)
    for i in cutlass.range_constexpr(of_codes // CHAINS // 2):
        for chain in cutlass.range_constexpr(CHAINS):
            step = const_expr(chain * (of_codes // CHAINS) + 2 * i)
            words = warp.ldmatrix_x4(base + PIECE * step)
            for half in cutlass.range_constexpr(2):
                keys = [to_bf16.e4m3_words(words[2 * half + e]) for e in range(2)]
                group = const_expr((step + half) // per_group)
                a = [to_bf16.multiply(keys[e][part], r.factors[e, group]) for part in range(2) for e in range(2)]
                multiply(spec, s, acc, chain, step + half, a)
    for step in cutlass.range_constexpr(rotated_steps(spec)):
        words = warp.ldmatrix_x4(base + const_expr(form.rotated_at + 2 * PIECE * step))
        multiply(spec, s, acc, const_expr(step % CHAINS), const_expr(of_codes + step), words)
    for n in cutlass.range_constexpr(n_tiles):
        for e in cutlass.range_constexpr(4):
            r.acc_s[e, n] = softmax.join_chains([acc[e, n, chain] for chain in range(CHAINS)], softmax.add)


def multiply(spec, s, acc, chain, step, a):
    """Add the products of an MMA of K Q^T to a chain of sums."""
    n_tiles = spec.tile.n_tiles
    at = s.q.iterator.toint() + (step * LANES + cute.arch.lane_idx()) * (8 * n_tiles)
    q = mma.load(at, 2 * n_tiles)
    for n in range(n_tiles):
        mma.issue("bf16", acc, 4 * (n + n_tiles * chain), a, q[2 * n : 2 * n + 2])


# Factors: of a row and 128 columns, in bf16, as FlashMLA rounds them


@cute.jit
def load_factors(spec: cutlass.Constexpr, r: LatentFragments, rows: Int32):
    """Load the factors of keys g and g + 8."""
    if const_expr(RECORDS[spec.kv.record].packed):
        for e in cutlass.range_constexpr(2):
            for group, factor in enumerate(stored_factors(spec, rows, cute.arch.lane_idx() // 4 + 8 * e)):
                r.factors[e, group] = warp.pack_16bit(cutlass.BFloat16, factor, factor)


@cute.jit
def store_factors(spec: cutlass.Constexpr, s, rows: Int32, stage: Int32):
    """Store the factors of the warp's keys for the other warps."""
    lane = cute.arch.lane_idx()
    if const_expr(RECORDS[spec.kv.record].packed):
        if lane < KEYS:
            for group, factor in enumerate(stored_factors(spec, rows, lane)):
                s.scores.factors[KEYS * warp_of(spec, "score") + lane, group, stage] = factor.to(cutlass.BFloat16)


def stored_factors(spec, rows, key):
    """Return the factors of a row, times `RAISED`."""
    at = rows + key * PITCH[spec.kv.record] + RECORDS[spec.kv.record].factors_at
    return [warp.from_bits(word) * RAISED for word in mma.load(at, groups(spec.kv.record))]


@cute.jit
def hide_missing(spec: cutlass.Constexpr, r: LatentFragments, exist):
    """Set the scores of slots that do not exist to -inf."""
    g, count = cute.arch.lane_idx() // 4, const_expr(spec.tile.n_tiles)
    if exist != ALL:
        for e in cutlass.range_constexpr(2):
            missing = exist & (Uint32(1) << Uint32(g + 8 * e)) == 0
            for n in cutlass.range_constexpr(count):
                for k in cutlass.range_constexpr(2):
                    r.acc_s[2 * e + k, n] = warp.select(missing, -Float32.inf, r.acc_s[2 * e + k, n])


@cute.jit
def hide_unseen(spec: cutlass.Constexpr, a, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Set the scores of keys that a row's token does not see to -inf."""
    if n_block >= w.n_block_full_max or n_block < w.n_block_full_min:
        seqlen = mask.seqlen_info(spec, a, w.sequence)
        rows = ScoreRows(r.tokens, w.sequence.q_start, seqlen, None)
        first = n_block * spec.tile.n + KEYS * warp_of(spec, "score") + cute.arch.lane_idx() // 4
        mask.apply(spec, rows_view(r.acc_s), rows, ScoreCols(first, [0, 8]))


def rows_view(acc_s):
    """View scores as (rows, keys)."""
    count = cute.size(acc_s, mode=[1])
    return cute.make_tensor(acc_s.iterator, cute.make_layout(((2, count), 2), stride=((1, 4), 2)))


@cute.jit
def update_rows(spec: cutlass.Constexpr, s, r: LatentFragments, scale: Float32, buffer: Int32):
    """Bring the maxima of rows up to date with all warps' keys, rescale the sums of rows, and turn scores into
    exponentials."""
    view, st = rows_view(r.acc_s), r.st
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = warp.reduce_across_quads(cute.arch.fmax(view[k, 0], view[k, 1]), cute.arch.fmax)
        if cute.arch.lane_idx() < 4:
            s.scores.tops[row_of(k), warp_of(spec, "score"), buffer] = top
    meet()
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        old, top = st.row_max[k], st.row_max[k]
        for other in cutlass.range_constexpr(SCORE_WARPS):
            top = cute.arch.fmax(top, s.scores.tops[row_of(k), other, buffer])
        st.row_max[k] = top
        st.row_max_scaled[k] = Float32(0.0) if top == -Float32.inf else top * scale
        st.acc_scale[k] = Float32(1.0) if top == old else softmax.exp2_scaled(old, scale, st.row_max_scaled[k])
        st.row_sum[k] = st.row_sum[k] * st.acc_scale[k]
        softmax.exp_and_sum(st, view, scale, st.row_max_scaled[k], k)


@cute.jit
def store_p(spec: cutlass.Constexpr, s, r: LatentFragments, stage: Int32):
    """Store P of the warp's keys as the operand of O^T, and the factors of O."""
    own, lane = warp_of(spec, "score"), cute.arch.lane_idx()
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        for e in cutlass.range_constexpr(2):
            word = warp.pack_16bit(cutlass.BFloat16, *(r.acc_s[2 * e + k, n] * RAISED for k in range(2)))
            s.scores.p[2 * n + e, lane, own, stage] = mma.transpose(word)
    if own == 0 and lane < 4:
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            s.scores.rescale[row_of(k), stage] = r.st.acc_scale[k]


@cute.jit
def store_stats(spec: cutlass.Constexpr, s, r: LatentFragments, tile: Int32):
    """Store the maxima and the sums of the rows of a tile."""
    own = warp_of(spec, "score")
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        total = warp.reduce_across_quads(r.st.row_sum[k], softmax.add)
        if cute.arch.lane_idx() < 4:
            s.scores.row_sum[row_of(k), own, tile] = total
            if own == 0:
                top = -Float32.inf if r.st.row_max[k] == -Float32.inf else r.st.row_max_scaled[k]
                s.scores.row_max[row_of(k), tile] = top
