"""The `mma` role: from a CTA's tiles to O and the LSE.

Keys are the M side of the MMAs, and query rows the N side, of which 8 are an MMA: S^T = K Q^T and O^T = V^T P^T. A warp
has half of the columns of 16 keys of a block, of which it computes the scores, and 64 columns of O for all keys. Warps
hand over scores alone: each adds up both halves and has a softmax of all keys, so that they meet once for each block.
Codes of e4m3 become bf16 in registers, where they are used (`to_bf16`), and are multiplied by the factor of their row
there.

To follow the code: `mma_warp` -> `compute_tile` -> `add_block` -> `softmax_of_block`, `Scores`, `Values`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...device import copy, memory, mma, pipeline, to_bf16, warp
from ...device.divisor import Quotient
from ...records import RECORDS
from .. import epilogue, geometry, mask, softmax, splits
from ..barriers import NamedBarrier
from ..kv import gather, pages
from ..kv.gather import RowPageIds
from ..mask import ScoreCols, ScoreRows
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..softmax import SoftmaxState
from .roles import roles
from .tile_table import HALVES, KEY_TILES, KEYS, PIECE, PITCH, ROWS, SCORE_PITCH, STEP, WARPS, groups

LANES = 32
COLUMNS = 64  # of O that a warp has
MMAS = COLUMNS // STEP
# Codes are 2^-120 times their values: factors are multiplied by 2^60, and so are Q and P. Products of codes and factors
# are then rounded as bf16 are, unless they are less than 2^-66.
RAISED, RAISED_PAIR = 2.0**60, 0x5D805D80  # in fp32, and two bf16
CHAINS = 2  # sums of products that do not wait for each other
ALL = (1 << KEYS) - 1


@dataclass(frozen=True)
class LatentFragments:
    """The registers of a warp, of lane 4 g + t. acc_o (4, MMA, n): of columns 2 g and 2 g + 1 of 16, and rows 8 n + 2 t
    and 8 n + 2 t + 1. acc_s (4, n): of keys g and g + 8, and the same rows. factors (2, group): of these keys, for the
    warp's half of the columns, as pairs of bf16. p (2, key tile, n), st: of row 8 n + g. tokens: of rows 8 n + 2 t and
    8 n + 2 t + 1. found: the slot of the warp's key lane % 16 of the next block."""

    acc_o: cute.Tensor
    acc_s: cute.Tensor
    factors: cute.Tensor
    p: cute.Tensor
    st: SoftmaxState
    tokens: cute.Tensor
    found: cute.Tensor


class MmaState(NamedTuple):
    """The next block, in k.pipe, and the number of splits that the CTA has stored."""

    kv: pipeline.PipelineState
    partials: Int32


def warp_of(spec):
    """Return the index of this warp among those of the role."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("mma")


def half_of(spec):
    """Return which half of the columns of K this warp has."""
    return warp_of(spec) // KEY_TILES


def groups_of_half(spec):
    """Return the number of factors of a half of the columns of a row; 1 if there are none."""
    return max(groups(spec.kv.record) // HALVES, 1)


def code_steps(spec):
    """Return the MMAs of a half of the columns of V."""
    return spec.head_dim_vo // STEP // HALVES


def rotated_steps(spec):
    """Return the MMAs of a half of the other columns."""
    return (spec.head_dim_qk - spec.head_dim_vo) // STEP // HALVES


def steps(spec):
    """Return the MMAs of a half of the columns of K."""
    return code_steps(spec) + rotated_steps(spec)


def make_fragments(spec) -> LatentFragments:
    """Allocate the registers of a warp."""
    rmem, n = cute.make_rmem_tensor, spec.tile.n_tiles
    return LatentFragments(
        rmem((4, MMAS, n), Float32),
        rmem((4, n), Float32),
        rmem((2, groups_of_half(spec)), Uint32),
        rmem((2, KEY_TILES, n), Uint32),
        softmax.make(n),
        rmem(2 * n, Int32),
        rmem(1, Int32),
    )


def meet():
    """Wait for all warps of the role."""
    cute.arch.barrier(barrier_id=NamedBarrier.MMA, number_of_threads=LANES * WARPS)


@cute.jit
def mma_warp(spec: cutlass.Constexpr, plan, s):
    """Run the role in one warp."""
    r = make_fragments(spec)

    def one_tile(w, _, at):
        return compute_tile(spec, plan, s, r, w, at)

    at = work.for_each_tile(spec, s, one_tile, MmaState(pipeline.initial_state(), Int32(0)))
    splits.barrier(WARPS)
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    splits.merge_together(spec, plan.args, s.splits, at.partials, tid, WARPS)


# One iteration per KV block, highest block first, with the scores of the block below.
#   waits for   k.pipe (the rows of the block below), and once for the other warps (its scores)
#   computes    P of the block from its scores, then O^T += V^T P^T, and S^T of the block below
#   releases    the stage of the block
@cute.jit
def compute_tile(spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, at: MmaState) -> MmaState:
    """Compute and store a tile. Return the state behind it."""
    a = plan.args
    softmax.reset(r.st, 0.0)
    r.acc_o.fill(0.0)
    r.factors.fill(RAISED_PAIR)
    if w.n_block_max > w.n_block_min:
        load_q(spec, a, s, w)
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            r.tokens[k] = geometry.token_of(w.m_block * spec.tile.m + row_of(k), geometry.pack_divisor(w))
        look_up(spec, plan, r, w, w.n_block_max - 1)
        scale = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
        meet()
        add_block(spec, plan, s, r, w, at.kv, w.n_block_max - 1, scale, has_values=False)
        for n_block in cutlass.range(w.n_block_max - 2, w.n_block_min - 1, -1, unroll=1):
            add_block(spec, plan, s, r, w, at.kv, n_block, scale)
            at = at._replace(kv=pipeline.next_item(s.k.pipe, at.kv))
        add_block(spec, plan, s, r, w, at.kv, w.n_block_min - 1, scale, has_scores=False)
        at = at._replace(kv=pipeline.next_item(s.k.pipe, at.kv))
    return at._replace(partials=store(spec, a, s, r, w, at.partials))


def row_of(k):
    """Return the row of the tile that is the k-th of this lane's in O."""
    return ROWS * (k // 2) + 2 * (cute.arch.lane_idx() % 4) + k % 2


# Q: a lane's words of the B operand of an MMA lie side by side, those of a half of the columns behind those of the
# other. Those of columns with codes have the order in which a word of codes becomes two: the first half of a lane's
# four columns, then the second.


@cute.jit
def load_q(spec: cutlass.Constexpr, a, s, w: WorkTileInfo):
    """Make the operand of S^T from Q. Rows past the sequence become zeros."""
    own, half, per_half = warp_of(spec) % KEY_TILES, half_of(spec), const_expr(code_steps(spec))
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        row = w.m_block * spec.tile.m + ROWS * n + cute.arch.lane_idx() // 4
        exists = row < geometry.num_rows(w.sequence.q_len, w.pack_factor)
        token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        first = half * const_expr(steps(spec))
        for i in cutlass.range_constexpr(per_half // KEY_TILES):
            step = own + KEY_TILES * i
            load_step(spec, a.query.q, token, head, exists, s, n, half * per_half + step, first + step, False)
        if const_expr(rotated_steps(spec) > 0):
            if own < const_expr(rotated_steps(spec)):
                plain, source = const_expr(RECORDS[spec.kv.record].packed), half * const_expr(rotated_steps(spec)) + own
                load_step(spec, a.query.q_rope, token, head, exists, s, n, source, first + per_half + own, plain)


@cute.jit
def load_step(
    spec: cutlass.Constexpr, q: cute.Tensor, token: Int32, head: Int32, exists, s, n: cutlass.Constexpr, source: Int32,
    step: Int32, plain: cutlass.Constexpr,
):  # fmt: skip
    """Load this lane's words of an MMA. source: its number in the tensor. plain: K has 16 bits there."""
    t, words = cute.arch.lane_idx() % 4, cute.make_rmem_tensor(2, Uint32)
    words.fill(0)
    if exists:
        base = memory.row_of(q, token, head) + source * const_expr(STEP * q.element_type.width // 8)
        if const_expr(plain):
            for part in cutlass.range_constexpr(2):
                words[part] = memory.load_words(base + 4 * t + 16 * part, 0, 1)[0]
        elif const_expr(q.element_type.width == 16):
            loaded = memory.load_words(base + 8 * t, 0, 2)
            for part in cutlass.range_constexpr(2):
                words[part] = to_bf16.multiply(loaded[part], RAISED_PAIR)
        else:
            loaded = to_bf16.e4m3_words(memory.load_words(base + 4 * t, 0, 1)[0])
            for part in cutlass.range_constexpr(2):
                exact = to_bf16.multiply(loaded[part], to_bf16.EXACT["e4m3"])
                words[part] = to_bf16.multiply(exact, RAISED_PAIR)
    at = (step * LANES + cute.arch.lane_idx()) * const_expr(2 * spec.tile.n_tiles) + 2 * n
    for part in cutlass.range_constexpr(2):
        s.q[at + part] = words[part]


@cute.jit
def look_up(spec: cutlass.Constexpr, plan, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Look up the slot of the warp's key lane % 16 of a block."""
    if const_expr(gather.has_slots(spec)):
        of, op = pages.of_sequence(plan.args, w.batch_idx, pages.K), plan.kv[pages.K]
        page_ids = RowPageIds(r.found, Quotient(op.gmem[0].shape[2], *op.page_size))
        row = n_block * spec.tile.n + first_key(spec) + cute.arch.lane_idx() % KEYS
        r.found[0] = gather.page_of_row(spec, page_ids, of, w.sequence.kv_len, row)


def first_key(spec):
    """Return the warp's first key of a block."""
    return warp_of(spec) % KEY_TILES * KEYS


@cute.jit
def add_block(
    spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, kv: pipeline.PipelineState, n_block: Int32,
    scale: Float32, has_values: cutlass.Constexpr = True, has_scores: cutlass.Constexpr = True,
):  # fmt: skip
    """Add the keys of the block at `kv` to O, and compute the scores of the block behind it, `n_block`. has_values:
    False: there is no block before the first one, which is at `kv`. has_scores: False: there is no block behind."""
    pitch, following = const_expr(spec.tile.n * PITCH[spec.kv.record]), kv
    if const_expr(has_values):
        following = pipeline.next_item(s.k.pipe, kv)
        softmax_of_block(spec, s, r, kv.index % 2, scale)
    if const_expr(has_scores):
        exist = Uint32(ALL)
        if const_expr(gather.has_slots(spec)):
            exist = present(plan.args, r)
            look_up(spec, plan, r, w, n_block - 1)
        pipeline.consumer_wait(s.k.pipe, following)
    base = s.k.raw.iterator.toint()
    scores = Scores(spec, s, r, base + following.index * pitch, has_scores)
    values = Values(spec, s, r, base + kv.index * pitch, kv.index % 2, has_values)
    # MMAs of both products in turn, so that neither waits for its own
    for i in cutlass.range_constexpr(max(scores.units, values.units)):
        scores.add(i)
        values.add(i)
    if const_expr(has_values):
        pipeline.consumer_release_if(s.k.pipe, kv, True)
    if const_expr(has_scores):
        scores.finish()
        if half_of(spec) == 0:
            if const_expr(gather.has_slots(spec)):
                hide_missing(spec, r, exist)
            else:
                hide_unseen(spec, plan.args, r, w, n_block)
        store_scores(spec, s, r, following.index % 2)
        store_factors(spec, s, base + following.index * pitch, following.index % 2)
        meet()


@cute.jit
def present(a, r: LatentFragments):
    """Return which of the warp's keys exist, as bits."""
    slot, rows = r.found[0], Int64(a.kv.k.shape[0]) * a.kv.k.shape[2]
    return Uint32(cute.arch.vote_ballot_sync(slot >= 0 and Int64(slot) < rows)) & ALL


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * PITCH[spec.kv.record] + lane // KEYS * PIECE


class Scores:
    """S^T of the warp's keys and its half of their columns, in units of two MMAs. Used while a kernel is traced."""

    def __init__(self, spec, s, r: LatentFragments, stage, exists):
        self.spec, self.s, self.r = spec, s, r
        self.form, self.n_tiles = RECORDS[spec.kv.record], spec.tile.n_tiles
        self.units = steps(spec) // 2 if exists else 0
        if not exists:
            return
        half, rows = half_of(spec), stage + first_key(spec) * PITCH[spec.kv.record]
        self.acc = [[Float32(0.0)] * (4 * self.n_tiles) for _ in range(CHAINS)]
        self.base = rows + lane_piece(spec)
        self.codes = self.base + half * (PIECE * code_steps(spec))
        self.q = s.q.iterator.toint() + (half * (steps(spec) * LANES) + cute.arch.lane_idx()) * (8 * self.n_tiles)
        self.half = half
        load_factors(spec, r, rows, half)

    def add(self, unit):
        """Add the products of a unit."""
        if unit >= self.units:
            return
        first = 2 * unit
        rotated = first - code_steps(self.spec)
        if rotated >= 0 and self.form.packed:
            for part in range(2):
                width = 2 * PIECE
                at = self.form.rotated_at + width * (rotated + part)
                words = warp.ldmatrix_x4(self.base + self.half * (width * rotated_steps(self.spec)) + at)
                self.multiply(first + part, words)
            return
        if rotated >= 0:
            at = self.base + self.half * (PIECE * rotated_steps(self.spec)) + (self.spec.head_dim_vo + PIECE * rotated)
        else:
            at = self.codes + PIECE * first
        words, group = warp.ldmatrix_x4(at), max(first, 0) * groups_of_half(self.spec) // max(code_steps(self.spec), 1)
        group = min(group, groups_of_half(self.spec) - 1)
        for part in range(2):
            keys = [to_bf16.e4m3_words(words[2 * part + e]) for e in range(2)]
            a = [to_bf16.multiply(keys[e][k], self.r.factors[e, group]) for k in range(2) for e in range(2)]
            self.multiply(first + part, a)

    def multiply(self, step, a):
        """Add the products of an MMA."""
        q, chain = mma.load(self.q + step * (LANES * 8 * self.n_tiles), 2 * self.n_tiles), self.acc[step % CHAINS]
        for n in range(self.n_tiles):
            mma.issue("bf16", chain, 4 * n, a, q[2 * n : 2 * n + 2])

    def finish(self):
        """Add up the chains."""
        for n in range(self.n_tiles):
            for e in range(4):
                self.r.acc_s[e, n] = softmax.join_chains([chain[4 * n + e] for chain in self.acc], softmax.add)


class Values:
    """O^T += V^T P^T of all keys of a block for the warp's columns, in units of 16 keys and 32 columns. Used while a
    kernel is traced."""

    def __init__(self, spec, s, r: LatentFragments, stage, buffer, exists):
        self.spec, self.r = spec, r
        self.units = KEY_TILES * MMAS // 2 if exists else 0
        if not exists:
            return
        own = warp_of(spec)
        self.base = stage + own * COLUMNS + lane_piece(spec)
        self.packed = RECORDS[spec.kv.record].packed
        if self.packed:
            group = own // (WARPS // groups(spec.kv.record))
            first = 2 * ((buffer * groups(spec.kv.record) + group) * spec.tile.n + 2 * (cute.arch.lane_idx() % 4))
            self.factors = s.factors.iterator.toint() + first

    def add(self, unit):
        """Add the products of a unit."""
        if unit >= self.units:
            return
        tile, i = unit // (MMAS // 2), unit % (MMAS // 2) * 2
        if i == 0:
            self.factor = [Uint32(RAISED_PAIR)] * 2
            if self.packed:
                self.factor = [mma.load(self.factors + 2 * (KEYS * tile + 8 * e), 1)[0] for e in range(2)]
        v = warp.ldmatrix_x4_trans(self.base + KEYS * tile * PITCH[self.spec.kv.record] + PIECE * i)
        for part in range(2):
            keys = [to_bf16.e4m3_words(v[2 * part + e], (0, 2, 1, 3)) for e in range(2)]
            a = [to_bf16.multiply(keys[e][k], self.factor[e]) for e in range(2) for k in range(2)]
            for n in range(self.spec.tile.n_tiles):
                p = [self.r.p[e, tile, n] for e in range(2)]
                mma.issue("bf16", self.r.acc_o, 4 * (i + part + MMAS * n), a, p)


# Factors: of a row and 128 columns, in bf16, as FlashMLA rounds them


def load_factors(spec, r: LatentFragments, rows, half):
    """Load the factors of keys g and g + 8 for the warp's half of the columns."""
    if RECORDS[spec.kv.record].packed:
        for e in range(2):
            for group, factor in enumerate(stored_factors(spec, rows, cute.arch.lane_idx() // 4 + 8 * e, half)):
                r.factors[e, group] = warp.pack_16bit(cutlass.BFloat16, factor, factor)


@cute.jit
def store_factors(spec: cutlass.Constexpr, s, stage: Int32, buffer: Int32):
    """Store the factors of the warp's keys and columns for the other warps."""
    lane, half = cute.arch.lane_idx(), half_of(spec)
    if const_expr(RECORDS[spec.kv.record].packed):
        if lane < KEYS:
            key = first_key(spec) + lane
            for i, factor in enumerate(stored_factors(spec, stage, key, half)):
                group = half * const_expr(groups_of_half(spec)) + i
                s.factors[key, group, buffer] = factor.to(cutlass.BFloat16)


def stored_factors(spec, rows, key, half):
    """Return the factors of a row for a half of its columns, times `RAISED`."""
    count = groups_of_half(spec)
    at = rows + key * PITCH[spec.kv.record] + RECORDS[spec.kv.record].factors_at + half * (4 * count)
    return [warp.from_bits(word) * RAISED for word in mma.load(at, count)]


@cute.jit
def hide_missing(spec: cutlass.Constexpr, r: LatentFragments, exist):
    """Set the scores of slots that do not exist to -inf."""
    if exist != ALL:
        for e in cutlass.range_constexpr(2):
            missing = exist & (Uint32(1) << Uint32(cute.arch.lane_idx() // 4 + 8 * e)) == 0
            for n in cutlass.range_constexpr(spec.tile.n_tiles):
                for k in cutlass.range_constexpr(2):
                    r.acc_s[2 * e + k, n] = warp.select(missing, -Float32.inf, r.acc_s[2 * e + k, n])


@cute.jit
def hide_unseen(spec: cutlass.Constexpr, a, r: LatentFragments, w: WorkTileInfo, n_block: Int32):
    """Set the scores of keys that a row's token does not see to -inf."""
    if n_block >= w.n_block_full_max or n_block < w.n_block_full_min:
        seqlen = mask.seqlen_info(spec, a, w.sequence)
        rows = ScoreRows(r.tokens, w.sequence.q_start, seqlen, None)
        first = n_block * spec.tile.n + first_key(spec) + cute.arch.lane_idx() // 4
        mask.apply(spec, rows_view(r.acc_s), rows, ScoreCols(first, [0, 8]))


def rows_view(acc_s):
    """View scores as (rows, keys)."""
    count = cute.size(acc_s, mode=[1])
    return cute.make_tensor(acc_s.iterator, cute.make_layout(((2, count), 2), stride=((1, 4), 2)))


@cute.jit
def store_scores(spec: cutlass.Constexpr, s, r: LatentFragments, buffer: Int32):
    """Store the scores of the warp's keys, which are sums over half of the columns."""
    view, key = rows_view(r.acc_s), first_key(spec) + cute.arch.lane_idx() // 4
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        for e in cutlass.range_constexpr(2):
            s.scores[key + 8 * e, row_of(k), half_of(spec), buffer] = view[k, e]


@cute.jit
def softmax_of_block(spec: cutlass.Constexpr, s, r: LatentFragments, buffer: Int32, scale: Float32):
    """Compute P of all keys of a block, bring the maxima and sums of rows up to date, and rescale O."""
    st, m, t, grown = r.st, const_expr(spec.tile.m), cute.arch.lane_idx() % 4, False
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        row = ROWS * n + cute.arch.lane_idx() // 4
        at = s.scores.iterator.toint() + 4 * ((buffer * (HALVES * m) + row) * SCORE_PITCH + 2 * t)
        values = cute.make_rmem_tensor(4 * KEY_TILES, Float32)
        for i in cutlass.range_constexpr(2 * KEY_TILES):  # keys 8 i + 2 t and the next one
            both = [mma.load(at + const_expr(32 * i + 4 * half * m * SCORE_PITCH), 2) for half in range(HALVES)]
            for e in cutlass.range_constexpr(2):
                values[2 * i + e] = warp.from_bits(both[0][e]) + warp.from_bits(both[1][e])
        top = cute.arch.warp_reduction_max(softmax.reduce(values, cute.arch.fmax), threads_in_group=4)
        old = st.row_max[n]
        top = cute.arch.fmax(old, top)
        st.row_max[n] = top
        st.row_max_scaled[n] = Float32(0.0) if top == -Float32.inf else top * scale
        st.acc_scale[n] = Float32(1.0) if top == old else softmax.exp2_scaled(old, scale, st.row_max_scaled[n])
        grown = grown or top != old
        for i in cutlass.range_constexpr(4 * KEY_TILES):
            values[i] = softmax.exp2_scaled(values[i], scale, st.row_max_scaled[n])
        st.row_sum[n] = fma_sum(st.row_sum[n], st.acc_scale[n], softmax.reduce(values, softmax.add))
        for i in cutlass.range_constexpr(2 * KEY_TILES):
            pair = [values[2 * i + e] * RAISED for e in range(2)]
            r.p[i % 2, i // 2, n] = warp.pack_16bit(cutlass.BFloat16, *pair)
    if cute.arch.vote_any_sync(grown):
        for n in cutlass.range_constexpr(spec.tile.n_tiles):
            for e in cutlass.range_constexpr(2):
                factor = cute.arch.shuffle_sync(st.acc_scale[n], 4 * (2 * t + e))
                for i in cutlass.range_constexpr(MMAS):
                    for c in cutlass.range_constexpr(2):
                        r.acc_o[2 * c + e, i, n] = r.acc_o[2 * c + e, i, n] * factor


def fma_sum(total, factor, more):
    """Return total * factor + more."""
    return warp.fma(total, factor, more)


@cute.jit
def store(spec: cutlass.Constexpr, a, s, r: LatentFragments, w: WorkTileInfo, partials: Int32) -> Int32:
    """Store O and the LSE, or the CTA's split. Return the number of splits that the CTA has stored."""
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row, n, source = row_of(k), const_expr(k // 2), 4 * (row_of(k) % ROWS)
        sums = cute.arch.warp_reduction_sum(r.st.row_sum[n], threads_in_group=4)
        own = -Float32.inf if r.st.row_max[n] == -Float32.inf else r.st.row_max_scaled[n]
        top, total = (cute.arch.shuffle_sync(x, source) for x in (own, sums))
        if row < left:
            store_row(spec, a, r, w, k, row, top, total, warp_of(spec))
    if w.split.slot >= 0:
        splits.record(s.splits, w, partials, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma"))
        partials += 1
    return partials


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, r: LatentFragments, w: WorkTileInfo, k: cutlass.Constexpr, row: Int32, top: Float32,
    total: Float32, own: Int32,
):  # fmt: skip
    """Store this lane's columns of a row."""
    at, pack, first = w.m_block * spec.tile.m + row, geometry.pack_divisor(w), own * COLUMNS
    token, head = w.sequence.q_start + geometry.token_of(at, pack), geometry.head_of(at, w.head_idx, pack)
    split = w.split.slot >= 0
    sink = epilogue.sink_of(a, head)
    normal = softmax.normalizer(top, total, -Float32.inf if split else sink)
    scale = normal.inv_row_sum
    if not split:
        scale *= epilogue.output_scale(a)
    pair, g = cute.make_rmem_tensor(2, Float32), cute.arch.lane_idx() // 4
    for i in cutlass.range_constexpr(MMAS):
        for e in cutlass.range_constexpr(2):
            pair[e] = r.acc_o[2 * e + k % 2, i, k // 2] * scale
        piece = (first + STEP * i) // 2 + g
        if split:
            copy.vector(pair, cute.local_tile(a.schedule.o_partial[w.split.slot, row, None], (2,), (piece,)))
        else:
            epilogue.store_elements(a.out.o[token, head, None], warp.convert16, piece, pair, True)
    mine = own == 0 and g == 0
    if split:
        if mine:
            a.schedule.o_partial[w.split.slot, row, spec.head_dim_vo] = normal.lse
    else:
        epilogue.store_lse(a, token, head, epilogue.lse_of(a, normal.lse, top, total), mine)
