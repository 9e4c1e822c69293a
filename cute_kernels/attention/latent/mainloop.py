"""The `mma` role: from a CTA's tiles to O and the LSE.

Keys are the M side of the MMAs, and query rows the N side, of which 8 are an MMA: S^T = K Q^T and O^T = V^T P^T. A warp
has 16 keys of a block, of which it computes the scores, and then 64 columns of O for all keys of the block. Codes of
e4m3 become bf16 in registers, where they are used (`to_bf16`), and are multiplied by the factor of their row there.

To follow the code: `mma_warp` -> `add_block` -> `compute_scores`, `update_rows`, `add_values`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...device import copy, memory, mma, pipeline, to_bf16, warp
from ...device.divisor import Quotient
from ...device.warp import fma
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
from .tile_table import KEYS, PIECE, PITCH, ROWS, STEP, WARPS, groups, rotated_steps

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
    """The registers of a warp. Lane 4 g + t has rows 8 n + 2 t and 8 n + 2 t + 1 of MMA n. acc_o (4, MMA, n): of columns
    2 g and 2 g + 1 of 16. acc_s (4, n): of keys g and g + 8. factors (2, group): of these keys, as
    pairs of bf16. found: the slot of
    the warp's key lane % 16 of the next block."""

    acc_o: cute.Tensor
    acc_s: cute.Tensor
    factors: cute.Tensor
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


def make_fragments(spec) -> LatentFragments:
    """Allocate the registers of a warp."""
    rmem, n = cute.make_rmem_tensor, spec.tile.n_tiles
    return LatentFragments(
        rmem((4, MMAS, n), Float32),
        rmem((4, n), Float32),
        rmem((2, groups(spec.kv.record)), Uint32),
        softmax.make(2 * n),
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


# One iteration per KV block, highest block first.
#   waits for   k.pipe (the rows of the block), and twice for the other warps
#   computes    S^T of 16 keys, the maxima of rows over all warps, P times each factor, and then a part of O^T
#   releases    the stage behind P V
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
        if const_expr(gather.has_slots(spec)):
            look_up(spec, plan, r, w, w.n_block_max - 1)
        scale = softmax.device_scale(a.logits.softmax_scale_log2, a.logits.softmax_scale_ptr)
        meet()
        for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            add_block(spec, plan, s, r, w, at.kv, n_block, scale)
            at = at._replace(kv=pipeline.next_item(s.k.pipe, at.kv))
    return at._replace(partials=store(spec, a, s, r, w, at.partials))


def row_of(k):
    """Return the row of the tile that is this lane's k-th."""
    return ROWS * (k // 2) + 2 * (cute.arch.lane_idx() % 4) + k % 2


# Q: a lane's words of the B operand of an MMA lie side by side. Those of columns with codes have the order in which a
# word of codes becomes two: the first half of a lane's four columns, then the second.


@cute.jit
def load_q(spec: cutlass.Constexpr, a, s, w: WorkTileInfo):
    """Make the operand of S^T from Q. Rows past the sequence become zeros."""
    lane, own, count = cute.arch.lane_idx(), warp_of(spec), const_expr(spec.head_dim_qk // STEP)
    g, t, latent = lane // 4, lane % 4, const_expr(spec.head_dim_vo // STEP)
    for n in cutlass.range_constexpr(spec.tile.n_tiles):
        row = w.m_block * spec.tile.m + ROWS * n + g
        exists = row < geometry.num_rows(w.sequence.q_len, w.pack_factor)
        token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        for i in cutlass.range_constexpr(-(-latent // WARPS)):
            load_step(spec, a.query.q, token, head, exists, s, n, own + WARPS * i, Int32(0), False)
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
    of, op = pages.of_sequence(plan.args, w.batch_idx, pages.K), plan.kv[pages.K]
    page_ids = RowPageIds(r.found, Quotient(op.gmem[0].shape[2], *op.page_size))
    row = n_block * spec.tile.n + KEYS * warp_of(spec) + cute.arch.lane_idx() % KEYS
    r.found[0] = gather.page_of_row(spec, page_ids, of, w.sequence.kv_len, row)


@cute.jit
def present(a, r: LatentFragments):
    """Return which of the warp's keys exist, as bits."""
    slot, rows = r.found[0], Int64(a.kv.k.shape[0]) * a.kv.k.shape[2]
    return Uint32(cute.arch.vote_ballot_sync(slot >= 0 and Int64(slot) < rows)) & ALL


@cute.jit
def add_block(
    spec: cutlass.Constexpr, plan, s, r: LatentFragments, w: WorkTileInfo, kv: pipeline.PipelineState, n_block: Int32,
    scale: Float32,
):  # fmt: skip
    """Add the keys of a block to O."""
    a, own = plan.args, warp_of(spec)
    exist = Uint32(ALL)
    if const_expr(gather.has_slots(spec)):
        exist = present(a, r)
        look_up(spec, plan, r, w, n_block - 1)
    stage = s.k.raw.iterator.toint() + kv.index * const_expr(spec.tile.n * PITCH[spec.kv.record])
    pipeline.consumer_wait(s.k.pipe, kv)
    rows = stage + own * const_expr(KEYS * PITCH[spec.kv.record])
    load_factors(spec, r, rows)
    compute_scores(spec, s, r, rows)
    if const_expr(gather.has_slots(spec)):
        hide_missing(spec, r, exist)
    else:
        hide_unseen(spec, a, r, w, n_block)
    exchange_maxima(spec, s, r, own)
    meet()
    update_rows(spec, s, r, scale)
    store_p(spec, s, r, own)
    store_factors(spec, s, rows, own)
    meet()
    add_values(spec, s, r, stage, own)
    pipeline.consumer_release_if(s.k.pipe, kv, True)


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * PITCH[spec.kv.record] + lane // KEYS * PIECE


@cute.jit
def compute_scores(spec: cutlass.Constexpr, s, r: LatentFragments, rows: Int32):
    """Compute S^T of the warp's keys, the rows of which begin at an address."""
    form, n_tiles = const_expr(RECORDS[spec.kv.record]), const_expr(spec.tile.n_tiles)
    of_codes = const_expr(spec.head_dim_qk // STEP - rotated_steps(spec))
    per_group, acc = const_expr(of_codes // groups(spec.kv.record)), cute.make_rmem_tensor((4, n_tiles, CHAINS), Float32)
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
def store_factors(spec: cutlass.Constexpr, s, rows: Int32, own: Int32):
    """Store the factors of the warp's keys for the other warps."""
    lane = cute.arch.lane_idx()
    if const_expr(RECORDS[spec.kv.record].packed):
        if lane < KEYS:
            for group, factor in enumerate(stored_factors(spec, rows, lane)):
                s.factors[own * KEYS + lane, group] = factor.to(cutlass.BFloat16)


def stored_factors(spec, rows, key):
    """Return the factors of a row, times `RAISED`."""
    at = rows + key * PITCH[spec.kv.record] + RECORDS[spec.kv.record].factors_at
    return [warp.from_bits(word) * RAISED for word in mma.load(at, groups(spec.kv.record))]


def factors_of(spec, s, group, key):
    """Return the factors of a lane's four keys of 16, which begin at `key`, as two pairs."""
    if not RECORDS[spec.kv.record].packed:
        return [Uint32(RAISED_PAIR)] * 2
    at = s.factors.iterator.toint() + 2 * (group * (WARPS * KEYS) + 2 * (cute.arch.lane_idx() % 4)) + 2 * key
    return [mma.load(at + 16 * half, 1)[0] for half in range(2)]


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
        first = n_block * spec.tile.n + KEYS * warp_of(spec) + cute.arch.lane_idx() // 4
        mask.apply(spec, rows_view(r.acc_s), rows, ScoreCols(first, [0, 8]))


def rows_view(acc_s):
    """View scores as (rows, keys)."""
    count = cute.size(acc_s, mode=[1])
    return cute.make_tensor(acc_s.iterator, cute.make_layout(((2, count), 2), stride=((1, 4), 2)))


@cute.jit
def exchange_maxima(spec: cutlass.Constexpr, s, r: LatentFragments, own: Int32):
    """Store the maxima of rows over the warp's keys."""
    view = rows_view(r.acc_s)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = warp.reduce_across_quads(cute.arch.fmax(view[k, 0], view[k, 1]), cute.arch.fmax)
        if cute.arch.lane_idx() < 4:
            s.tops[row_of(k), own] = top


@cute.jit
def update_rows(spec: cutlass.Constexpr, s, r: LatentFragments, scale: Float32):
    """Bring the maxima of rows up to date with all warps' keys, rescale O and the sums of rows, and turn scores into
    exponentials."""
    view, grown, st = rows_view(r.acc_s), False, r.st
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        old, top = st.row_max[k], st.row_max[k]
        for other in cutlass.range_constexpr(WARPS):
            top = cute.arch.fmax(top, s.tops[row_of(k), other])
        st.row_max[k] = top
        st.row_max_scaled[k] = Float32(0.0) if top == -Float32.inf else top * scale
        st.acc_scale[k] = Float32(1.0) if top == old else softmax.exp2_scaled(old, scale, st.row_max_scaled[k])
        grown = grown or top != old
        st.row_sum[k] = st.row_sum[k] * st.acc_scale[k]
        softmax.exp_and_sum(st, view, scale, st.row_max_scaled[k], k)
    if cute.arch.vote_any_sync(grown):
        for n in cutlass.range_constexpr(spec.tile.n_tiles):
            for i in cutlass.range_constexpr(MMAS):
                for e in cutlass.range_constexpr(4):
                    r.acc_o[e, i, n] = r.acc_o[e, i, n] * st.acc_scale[2 * n + e % 2]


@cute.jit
def store_p(spec: cutlass.Constexpr, s, r: LatentFragments, own: Int32):
    """Store P of the warp's keys as the operand of O^T."""
    n_tiles = const_expr(spec.tile.n_tiles)
    for n in cutlass.range_constexpr(n_tiles):
        for e in cutlass.range_constexpr(2):
            word = warp.pack_16bit(cutlass.BFloat16, *(r.acc_s[2 * e + k, n] * RAISED for k in range(2)))
            s.p[(own * LANES + cute.arch.lane_idx()) * (2 * n_tiles) + 2 * n + e] = mma.transpose(word)


@cute.jit
def add_values(spec: cutlass.Constexpr, s, r: LatentFragments, stage: Int32, own: Int32):
    """Compute O^T += V^T P^T of all keys of a block for the warp's columns."""
    n_tiles, group = const_expr(spec.tile.n_tiles), own // const_expr(WARPS // groups(spec.kv.record))
    base = stage + own * COLUMNS + lane_piece(spec)
    p = s.p.iterator.toint() + cute.arch.lane_idx() * const_expr(8 * n_tiles)
    for k in cutlass.range_constexpr(WARPS):
        words = mma.load(p + const_expr(k * LANES * 8 * n_tiles), const_expr(2 * n_tiles))
        factors = factors_of(spec, s, group, KEYS * k)
        for i in cutlass.range_constexpr(0, MMAS, 2):
            v = warp.ldmatrix_x4_trans(base + const_expr(k * KEYS * PITCH[spec.kv.record] + PIECE * i))
            for half in cutlass.range_constexpr(2):
                keys = [to_bf16.e4m3_words(v[2 * half + e], (0, 2, 1, 3)) for e in range(2)]
                a = [to_bf16.multiply(keys[e][part], factors[e]) for e in range(2) for part in range(2)]
                for n in cutlass.range_constexpr(n_tiles):
                    at = const_expr(4 * (i + half + MMAS * n))
                    mma.issue("bf16", r.acc_o, at, a, words[2 * n : 2 * n + 2])


@cute.jit
def store(spec: cutlass.Constexpr, a, s, r: LatentFragments, w: WorkTileInfo, partials: Int32) -> Int32:
    """Add up the sums of rows over all warps, and store O and the LSE, or the CTA's split. Return the number of splits
    that the CTA has stored."""
    own, lane = warp_of(spec), cute.arch.lane_idx()
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        total = warp.reduce_across_quads(r.st.row_sum[k], softmax.add)
        if lane < 4:
            s.sums[row_of(k), own] = total
    meet()
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row, total = row_of(k), Float32(0.0)
        for other in cutlass.range_constexpr(WARPS):
            total += s.sums[row, other]
        top = -Float32.inf if r.st.row_max[k] == -Float32.inf else r.st.row_max_scaled[k]
        if row < left:
            store_row(spec, a, r, w, k, row, top, total, own)
    if w.split.slot >= 0:
        splits.record(s.splits, w, partials, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma"))
        partials += 1
    meet()  # the sums are read
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
