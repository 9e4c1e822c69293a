"""The `score` role of few query rows over latents: from rows as they are stored to P.

Keys are the M side of the MMAs, and query rows the N side, of which 8 are an MMA: S^T = K Q^T and O^T = V^T P^T. A
score warp has 16 keys of a block, and an mma warp 64 columns of O for all keys (`mainloop`). Two groups of score warps
have blocks in turn, so that the chain of a block, from its keys to P, runs beside that of the next one. Maxima pass
from group to group, and each has sums of its own, which meet at the end of a tile. `precision` makes operands of the
rows. Where two caches have different records, the blocks of each have a loop of their own.

To follow the code: `score_warp` -> `score_tile` -> `score_block`.
"""

from dataclasses import dataclass
from functools import cache, reduce
from itertools import groupby
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import memory, mma, pipeline, warp
from .. import geometry, mask, quant, softmax
from ..barriers import NamedBarrier
from ..kv import gather, pages
from ..kv.gather import RowPageIds
from ..kv.record_rows import BOX
from ..mask import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..softmax import SoftmaxState
from . import keys, precision
from .precision import LANES, MMAS
from .roles import roles
from .tile_table import KEYS, P_STAGES, ROWS, SCORE_WARPS, STATS, WARPS, factors, q_words, records, row_pitch

CHAINS = 2  # sums of products that do not wait for each other, if no factors multiply them
LARGEST_Q = 14  # the power of two near which rows of Q in fp16 have their largest value
ALL = (1 << KEYS) - 1


@dataclass(frozen=True)
class LatentHandoff:
    """Shared memory between score and mma. p (words, lane, key tile, stage): the operand of O^T. factors (key, index,
    stage): of rows, in bf16, in the order in which they are stored. rescale (row, stage): factors by which O is
    multiplied before. inexact (warp, stage): not 0 if some factor of the warp's keys is no power of two. pipe: of these
    stages. tops (row, warp, 2): maxima of rows over the keys of a score warp, and before that of rows of Q. undo (row):
    factors of the scores of rows of Q in fp16. row_max (row, STATS), row_sum (row, warp, group, STATS): of the rows of
    a tile; row_max in log2 units, or -inf for a row without keys. Group 0 here is the one with the last block. last
    (row, STATS): the factor of the other one's sums."""

    p: cute.Tensor
    factors: cute.Tensor
    rescale: cute.Tensor
    inexact: cute.Tensor
    pipe: pipeline.Pipeline
    tops: cute.Tensor
    undo: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    last: cute.Tensor


def allocate(spec, smem) -> LatentHandoff:
    """Allocate `LatentHandoff`."""
    t = spec.tile
    p = cute.make_layout((2 * t.n_tiles, LANES, SCORE_WARPS, P_STAGES))
    each = [(t.m, P_STAGES), (t.m, SCORE_WARPS, 2), (t.m,), (t.m, STATS), (t.m, SCORE_WARPS, t.groups, STATS)]
    each.append((t.m, STATS))
    rescale, tops, undo, row_max, row_sum, last = (smem.allocate_tensor(Float32, cute.make_layout(x), 16) for x in each)
    return LatentHandoff(
        smem.allocate_tensor(Uint32, p, 16),
        smem.allocate_tensor(cutlass.Uint16, cute.make_layout((t.n, factors(spec), P_STAGES)), 16),
        rescale,
        smem.allocate_tensor(Uint32, cute.make_layout((SCORE_WARPS, P_STAGES)), 16),
        pipeline.make(smem, P_STAGES, SCORE_WARPS, WARPS),
        tops,
        undo,
        row_max,
        row_sum,
        last,
    )


@dataclass(frozen=True)
class LatentFragments:
    """The registers of a score warp. Lane 4 g + t has rows 8 n + 2 t and 8 n + 2 t + 1 of MMA n. acc_s (4, n): of keys
    g and g + 8. before, after: the maxima of rows before a block and with it. found: the slot of the warp's key
    lane % 16 of its next block. scale: of the logits, in log2 units."""

    acc_s: cute.Tensor
    st: SoftmaxState
    before: cute.Tensor
    after: cute.Tensor
    tokens: cute.Tensor
    found: cute.Tensor
    scale: cute.Tensor


class LatentScoreState(NamedTuple):
    """The next items of the score role, whichever group has them: kv, in k.pipe and in the pipeline of `LatentHandoff`;
    tile, of those with a key."""

    kv: Int32
    tile: Int32


def warp_of(spec, role):
    """Return the index of this warp among those of a role."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first(role)


def group_of(spec):
    """Return the number of this score warp's group."""
    return warp_of(spec, "score") // SCORE_WARPS


def before_own(spec, item):
    """Return how many blocks, from that of an item on, come before one of this group. Groups have items in turn."""
    return (item + group_of(spec)) % spec.tile.groups if spec.tile.groups > 1 else 0


def warp_in_group(spec):
    """Return the index of this score warp in its group."""
    return warp_of(spec, "score") % SCORE_WARPS


def threads(spec):
    """Return the number of score threads."""
    return LANES * SCORE_WARPS * spec.tile.groups


def meet(spec):
    """Wait for all score warps."""
    cute.arch.barrier(barrier_id=NamedBarrier.SCORES, number_of_threads=threads(spec))


def meet_group(spec):
    """Wait for the score warps of this group."""
    cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + group_of(spec), number_of_threads=LANES * SCORE_WARPS)


# The score role: one iteration per tile, an inner one per KV block, highest block first.
#   waits for   k.pipe (the rows of the block), the score warps of its group and of the block before (maxima), and a
#               free stage of P
#   computes    S^T of 16 keys, the maxima of rows over all keys of the block, P
#   signals     the stage of P; mma frees the rows behind it
@cute.jit
def score_warp(spec: cutlass.Constexpr, plan, s):
    """Run the role in one warp."""
    rmem, n = cute.make_rmem_tensor, const_expr(spec.tile.n_tiles)
    r = LatentFragments(
        rmem((4, n), Float32),
        softmax.make(2 * n),
        rmem(2 * n, Float32),
        rmem(2 * n, Float32),
        rmem(2 * n, Int32),
        rmem(1, Int32),
        rmem(1, Float32),
    )

    def one_tile(w, _, at):
        return score_tile(spec, plan, s, r, w, at)

    work.for_each_tile(spec, s, one_tile, LatentScoreState(Int32(0), Int32(0)))


@cute.jit
def score_tile(
    spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, at: LatentScoreState
) -> LatentScoreState:
    """Compute P of the blocks of a tile. Return the state behind it."""
    a = plan.args
    softmax.reset(r.st, 0.0)
    if w.n_block_max > w.n_block_min:
        meet(spec)  # all have read Q of the tile before
        if group_of(spec) == 0:
            load_q(spec, a, s, w)
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            r.tokens[k] = geometry.token_of(w.m_block * spec.tile.m + row_of(k), geometry.pack_divisor(w))
        look_up(spec, plan, r, w, w.n_block_max - 1 - before_own(spec, at.kv))
        r.scale[0] = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
        meet(spec)
        for i in cutlass.range_constexpr(len(records(spec))):
            which = const_expr(len(records(spec)) - 1 - i)
            first, last = blocks_of(spec, w, which)
            begin = last - 1 - before_own(spec, at.kv + w.n_block_max - last)
            for n_block in cutlass.range(begin, first - 1, const_expr(-spec.tile.groups), unroll=1):
                score_block(spec, plan, s, r, w, at, n_block, which)
        at = LatentScoreState(at.kv + w.n_block_max - w.n_block_min, at.tile + 1)
    return at


def blocks_of(spec, w: WorkTileInfo, which):
    """Return the first block of a tile that has rows of a record, and the one behind the last of them. Blocks of the
    second cache are the last ones of the tile, and come first."""
    if len(records(spec)) == 1:
        return w.n_block_min, w.n_block_max
    border = geometry.extra_start(w.sequence.extra) // spec.tile.n
    if which > 0:
        return cutlass.max(w.n_block_min, border), w.n_block_max
    return w.n_block_min, cutlass.min(w.n_block_max, border)


def row_of(k):
    """Return the row of the tile that is this lane's k-th."""
    return ROWS * (k // 2) + 2 * (cute.arch.lane_idx() % 4) + k % 2


# Q: a lane's words of the B operand of an MMA lie side by side. A word of codes of K becomes several words of the A
# operand (`keys.operands`), and Q has its columns in that order.


@cute.jit
def load_q(spec: cutlass.Constexpr, a, s, w: WorkTileInfo):
    """Make the operand of S^T from Q, for each record. Rows past the sequence become zeros. A warp has an MMA of each
    box of columns."""
    assert MMAS == SCORE_WARPS
    boxes, n_tiles = const_expr(spec.head_dim_qk // BOX), const_expr(spec.tile.n_tiles)
    held = cute.make_rmem_tensor((2, boxes, n_tiles), Uint32)
    powers = cute.make_rmem_tensor(n_tiles, Float32)
    powers.fill(1.0)
    for which in cutlass.range_constexpr(len(records(spec))):
        sections = const_expr(precision.sections_of(spec, which, spec.head_dim_qk))
        held.fill(0)
        for n in cutlass.range_constexpr(n_tiles):
            row = w.m_block * spec.tile.m + ROWS * n + cute.arch.lane_idx() // 4
            token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
            head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
            if row < geometry.num_rows(w.sequence.q_len, w.pack_factor):
                load_sections(spec, a, token, head, sections, held[None, None, n])
        if const_expr(which == 0 and precision.scaled_kind(spec) is not None):
            find_powers(spec, s, held, powers)
        for n in cutlass.range_constexpr(n_tiles):
            store_sections(spec, a, s, sections, held[None, None, n], powers[n], which, n)


@cute.jit
def find_powers(spec: cutlass.Constexpr, s, held: cute.Tensor, powers: cute.Tensor):
    """Find the powers of two by which rows of Q, which are bf16, become rows in fp16. Store their inverses."""
    g, first, own = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4 == 0, warp_in_group(spec)
    for n in cutlass.range_constexpr(cute.size(powers)):
        row = held[None, None, n]
        top = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(row)):
            for x in memory.widen("bf16", row[i]):
                top = cute.arch.fmax(top, cute.math.absf(x))
        top = cute.arch.warp_reduction_max(top, threads_in_group=4)
        if first:
            s.scores.tops[ROWS * n + g, own, 0] = top
    meet_group(spec)
    for n in cutlass.range_constexpr(cute.size(powers)):
        top = Float32(0.0)
        for each in cutlass.range_constexpr(SCORE_WARPS):
            top = cute.arch.fmax(top, s.scores.tops[ROWS * n + g, each, 0])
        power, inverse = quant.powers(top, LARGEST_Q)
        powers[n] = power
        if first and own == 0:
            s.scores.undo[ROWS * n + g] = inverse


def load_sections(
    spec: cutlass.Constexpr, a, token: Int32, head: Int32, sections: cutlass.Constexpr, held: cute.Tensor
):
    """Load this lane's words of a row of Q for an MMA of each box of columns. sections: of K. held (2, box)."""
    for section in sections:
        for box in range(section.first, section.first + section.boxes):
            behind = BOX * box - spec.head_dim_vo
            q, column = (a.query.q, BOX * box) if behind < 0 else (a.query.q_rope, behind)
            address = memory.row_of(q, token, head) + column * (q.element_type.width // 8)
            words = keys.query_words(section, address, q.element_type, warp_in_group(spec))
            held[0, box], held[1, box] = words


def store_sections(spec, a, s, sections, held, power, which, n):
    """Store what `load_sections` has loaded as the operand over rows of a record, for the n-th MMA."""
    count, kind = 2 * spec.tile.n_tiles, a.query.q.element_type
    for section in sections:
        for box in range(section.first, section.first + section.boxes):
            step = MMAS * box + warp_in_group(spec)
            at = which * LANES * q_words(spec) + (step * LANES + cute.arch.lane_idx()) * count + 2 * n
            for part in range(2):
                s.q[at + part] = keys.query_operand(section, kind, held[part, box], power)


@cute.jit
def look_up(spec: cutlass.Constexpr, plan, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Look up the slot of the warp's key lane % 16 of a block."""
    if const_expr(gather.has_slots(spec)):
        of = pages.of_sequence(plan.args, w.batch_idx, pages.K, w.sequence.extra)
        row = n_block * spec.tile.n + KEYS * warp_in_group(spec) + cute.arch.lane_idx() % KEYS
        r.found[0] = gather.page_of_row(spec, RowPageIds(r.found, None), of, w.sequence.kv_len, row)


def present(spec, plan, r: LatentFragments, w: WorkTileInfo, n_block):
    """Return which of the warp's keys of a block exist, as bits."""
    page_ids = RowPageIds(r.found, None)
    return gather.present(spec, plan.kv[pages.K], page_ids, n_block, w.sequence.extra)[0] & ALL


@cute.jit
def score_block(
    spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, at: LatentScoreState, n_block: Int32,
    which: cutlass.Constexpr,
):  # fmt: skip
    """Compute P of a block of this group into shared memory. which: the record of its rows."""
    own, exist, item = warp_in_group(spec), Uint32(ALL), at.kv + w.n_block_max - 1 - n_block
    if const_expr(gather.has_slots(spec)):
        exist = present(spec, plan, r, w, n_block)
        look_up(spec, plan, r, w, n_block - spec.tile.groups)
    kv = pipeline.state_of(s.k.pipe, item)
    pipeline.consumer_wait(s.k.pipe, kv)
    rows = precision.stage_of(spec, s, kv) + own * const_expr(KEYS * row_pitch(spec))
    factors = precision.sum_factors(spec, which, rows)
    inexact = precision.any_inexact(spec, which, factors)
    compute_scores(spec, s, r, rows, which, factors, inexact)
    if const_expr(gather.has_slots(spec)):
        hide_missing(spec, r, exist)
    else:
        hide_unseen(spec, plan.args, r, w, n_block)
    update_rows(spec, s, r, w, item, n_block)
    stage = pipeline.stage(s.scores.pipe, item)
    pipeline.producer_acquire(s.scores.pipe, item)
    store_p(spec, s, r, stage)
    precision.store_factors(spec, s, rows, KEYS * own, stage, which)
    if const_expr(precision.may_be_inexact(spec, which)):
        s.scores.inexact[own, stage] = Uint32(inexact)
    if n_block < w.n_block_min + spec.tile.groups:
        store_stats(spec, s, r, at.tile % STATS, n_block - w.n_block_min, w.n_block_max - w.n_block_min == 1)
    cute.arch.sync_warp()  # all lanes have written before one of them arrives
    pipeline.producer_commit(s.scores.pipe, item)


@cute.jit
def compute_scores(
    spec: cutlass.Constexpr, s, r: LatentFragments, rows, which: cutlass.Constexpr, factors: cutlass.Constexpr, inexact
):
    """Compute S^T of the warp's keys, the rows of which begin at an address. factors: `precision.sum_factors`. inexact:
    whether one is no power of two."""
    if const_expr(precision.may_be_inexact(spec, which)):
        if inexact:
            sum_sections(spec, s, r, rows, which, factors, True)
        else:
            sum_sections(spec, s, r, rows, which, factors, False)
    else:
        sum_sections(spec, s, r, rows, which, factors, False)


def sum_sections(spec, s, r: LatentFragments, rows, which, factors, rounded):
    """Do the work of `compute_scores`. rounded: K has the mantissas of factors."""
    form, n_tiles = precision.record_of(spec, which), spec.tile.n_tiles
    totals: dict[str, list[Float32]] = {}
    mantissas = cache(lambda index: [precision.mantissa(words[index]) for words in factors])
    rows = keys.KeyRows(rows, mantissas if rounded else None, precision.held_factors(spec, which, rows))
    for section in precision.sections_of(spec, which, spec.head_dim_qk):
        kind = precision.key_kind(section)
        for index, run in groupby(keys.steps(spec, which, section, rows), lambda step: step.factor):
            acc = cute.make_rmem_tensor((4, n_tiles, CHAINS if index is None else 1), Float32)
            acc.fill(0.0)
            for step in run:
                multiply(spec, s, acc, step, kind, which)
            own = None if index is None else [precision.sum_factor(form, words, index, rounded) for words in factors]
            totals[kind] = [add_chains(acc, i, own, totals.get(kind)) for i in range(4 * n_tiles)]
    scaled = precision.scaled_kind(spec)
    for i in range(4 * n_tiles):
        found = {kind: sums[i] for kind, sums in totals.items()}
        if scaled in found:
            found[scaled] = found[scaled] * s.scores.undo[row_of(2 * (i // 4) + i % 2)]
        r.acc_s[i] = reduce(softmax.add, found.values())


def add_chains(acc, i, factors, sums):
    """Return entry i of the sums so far, of which there may be none, and of the chains of `acc`, multiplied by the
    factors of keys g and g + 8, or by none."""
    chains = [acc[i + cute.size(acc, mode=[0]) * cute.size(acc, mode=[1]) * c] for c in range(cute.size(acc, mode=[2]))]
    if factors is None:
        return reduce(softmax.add, chains if sums is None else [*chains, sums[i]])
    total = None if sums is None else sums[i]
    for part in chains:
        factor = factors[i % 4 // 2]
        total = part * factor if total is None else warp.fma(part, factor, total)
    return total


def multiply(spec, s, acc, step, kind, which):
    """Add the products of an MMA of K Q^T."""
    n_tiles = spec.tile.n_tiles
    at = s.q.iterator.toint() + 4 * LANES * q_words(spec) * which
    q = mma.load(at + (step.number * LANES + cute.arch.lane_idx()) * (8 * n_tiles), 2 * n_tiles)
    chain = step.number % cute.size(acc, mode=[2])
    for n in range(n_tiles):
        mma.issue(kind, acc, 4 * (n + n_tiles * chain), step.keys, q[2 * n : 2 * n + 2])


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
        first = n_block * spec.tile.n + KEYS * warp_in_group(spec) + cute.arch.lane_idx() // 4
        mask.apply(spec, rows_view(r.acc_s), rows, ScoreCols(first, [0, 8]))


def rows_view(acc_s):
    """View scores as (rows, keys)."""
    count = cute.size(acc_s, mode=[1])
    return cute.make_tensor(acc_s.iterator, cute.make_layout(((2, count), 2), stride=((1, 4), 2)))


@cute.jit
def update_rows(spec: cutlass.Constexpr, s, r: LatentFragments, w: WorkTileInfo, item: Int32, n_block: Int32):
    """Bring the maxima of rows up to date with the block before, if another group has it, and with all keys of this
    one, rescale the sums of rows, and turn scores into exponentials."""
    view, st, scale, in_turn = rows_view(r.acc_s), r.st, r.scale[0], const_expr(spec.tile.groups > 1)
    buffer = group_of(spec) if in_turn else item % 2
    r.before.store(st.row_max.load())
    if in_turn:
        if n_block < w.n_block_max - 1:
            cute.arch.barrier(barrier_id=NamedBarrier.MAXIMA + 1 - buffer, number_of_threads=threads(spec))
            take_maxima(s, r.before, 1 - buffer)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = warp.reduce_across_quads(cute.arch.fmax(view[k, 0], view[k, 1]), cute.arch.fmax)
        if cute.arch.lane_idx() < 4:
            s.scores.tops[row_of(k), warp_in_group(spec), buffer] = top
        r.after[k] = r.before[k]
    if in_turn:
        if n_block > w.n_block_min:  # the other group has the block behind this one
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.MAXIMA + buffer, number_of_threads=threads(spec))
    meet_group(spec)
    take_maxima(s, r.after, buffer)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        old, top = st.row_max[k], r.after[k]
        st.row_max[k] = top
        st.row_max_scaled[k] = Float32(0.0) if top == -Float32.inf else top * scale
        st.acc_scale[k] = factor_between(r.before[k], top, scale, st.row_max_scaled[k])
        own = st.acc_scale[k]
        if in_turn:
            own = factor_between(old, top, scale, st.row_max_scaled[k])
        st.row_sum[k] = st.row_sum[k] * own
        softmax.exp_and_sum(st, view, scale, st.row_max_scaled[k], k)


def take_maxima(s, maxima: cute.Tensor, buffer):
    """Bring maxima up to date with those of the warps of a group."""
    for k in range(cute.size(maxima)):
        for each in range(SCORE_WARPS):
            maxima[k] = cute.arch.fmax(maxima[k], s.scores.tops[row_of(k), each, buffer])


@cute.jit
def factor_between(old: Float32, top: Float32, scale: Float32, scaled: Float32):
    """Return the factor of sums that go from an old maximum to a new one. scaled: the new one, scaled."""
    return Float32(1.0) if top == old else softmax.exp2_scaled(old, scale, scaled)


@cute.jit
def store_p(spec: cutlass.Constexpr, s, r: LatentFragments, stage: Int32):
    """Store P of the warp's keys as the operand of O^T, and the factors of O."""
    own, lane = warp_in_group(spec), cute.arch.lane_idx()
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        for e in cutlass.range_constexpr(2):
            word = precision.weight_pair(spec, r.acc_s[2 * e, n], r.acc_s[2 * e + 1, n])
            s.scores.p[2 * n + e, lane, own, stage] = mma.transpose(word)
    if own == 0 and lane < 4:
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            s.scores.rescale[row_of(k), stage] = r.st.acc_scale[k]


@cute.jit
def store_stats(spec: cutlass.Constexpr, s, r: LatentFragments, tile: Int32, which: Int32, is_only):
    """Store this group's sums of the rows of a tile, behind its last block of the tile, the `which`-th last one. Behind
    the last one of all (0), store the maxima, and the factor of the other group's sums, which are 0 if it has no block.
    """
    own = warp_in_group(spec)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        total = warp.reduce_across_quads(r.st.row_sum[k], softmax.add)
        if cute.arch.lane_idx() < 4:
            s.scores.row_sum[row_of(k), own, which, tile] = total
            if const_expr(spec.tile.groups > 1):
                if is_only:
                    s.scores.row_sum[row_of(k), own, 1, tile] = Float32(0.0)
            if own == 0 and which == 0:
                top = -Float32.inf if r.st.row_max[k] == -Float32.inf else r.st.row_max_scaled[k]
                s.scores.row_max[row_of(k), tile] = top
                s.scores.last[row_of(k), tile] = r.st.acc_scale[k]
