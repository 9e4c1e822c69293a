"""Roles of tiles in which one warpgroup computes the scores of 64 rows, and two others O (`tile.scores_apart`).

With V in K, a stage is 64 keys of 576 columns, and Q takes as much: two stages have room. `mainloop` holds two at a
time, the one of which it issues Q K^T and the one of P V, so nothing would be loaded meanwhile. Here each block is
computed from Q K^T to P V before the next one, and the other stage is loaded under it. The warpgroups do not repeat
Q K^T, as they do in `mainloop` where two have the same rows.

| role | threads | waits for | signals |
| --- | --- | --- | --- |
| score | 128 | work_pipe, q_pipe, k.pipe full; scores.pipe empty | work_pipe, q_pipe empty; scores.pipe full |
| mma | 256 | work_pipe, scores.pipe full; scores.multiplied | work_pipe, scores.pipe, k.pipe empty |
| prefetch | 64, packed records | work_pipe, k.pipe full | work_pipe, k.pipe empty |

k.pipe is one pipeline, or one for each group of columns (`pages.column_groups`): each group is loaded as soon as P V
has read the one that lay there, and Q K^T begins with the first group. In a cluster, score also signals
scores.multiplied behind each Q K^T, for which mma waits between the halves of P V (`yields_to_qk`).

Packed records are converted by the mma role (`kv.packed`), before its MMAs of the block above: it also waits for
k.pipe empty, and signals k.pipe full. `prefetch`, in the load warpgroup, fetches their rows into the L2 before.

scores.pipe has one stage: P of a block, the factors by which O is multiplied before, and, behind the last block of a
tile, sums and maxima of its rows. `score` computes the next block's scores while P is multiplied by V.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import layout, memory, pipeline, warp, wgmma
from ...device.gather import NO_ROW, copy_rows
from .. import geometry, mask, mask_blocks
from .. import softmax as online
from ..barriers import NamedBarrier
from ..kv import gather, packed, pages, source
from ..schedule import work
from ..schedule.work import WorkTileInfo
from ..spec import LSE_MAX
from . import precision, splits
from .epilogue import LANES, scales_of_call
from .groups import o_part, rows_barrier
from .mainloop import recomputed_qk
from .query import release_q
from .roles import roles
from .softmax import compute_p, convert_p, mask_and_update_max
from .state import BlockFlags, Sm90Fragments, Sm90TileState

STEPS = 4  # of an MMA in a box of 64 columns
QUARTER = 2.0  # in log2 units


@dataclass(frozen=True)
class ScoreHandoff:
    """Shared memory between score and mma. p (m, n, 1): P of a block. pipe: of one stage. multiplied: barriers that
    say of even and of odd blocks that Q K^T has ended (`yields_to_qk`). factor (m,): of rows. row_max, row_sum (m, 2):
    of rows of a tile with an even and with an odd number; row_max in log2 units, or -inf for a row without keys. mma
    has read those of a tile before it frees the first block of the next one."""

    p: cute.Tensor
    pipe: pipeline.Pipeline
    multiplied: cute.Pointer
    factor: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def allocate(spec, smem):
    """Allocate `ScoreHandoff`."""
    t = spec.tile
    kind = layout.smem_layout((t.m, t.n), 1, precision.of(spec).mma_type)
    p = smem.allocate_tensor(precision.of(spec).mma_type, kind.outer, 1024, kind.inner)
    rows = [smem.allocate_tensor(Float32, cute.make_layout(shape), 16) for shape in (t.m, (t.m, 2), (t.m, 2))]
    pipe = pipeline.make(smem, 1, roles(spec).warps("score"), roles(spec).warps("mma"))
    return ScoreHandoff(p, pipe, pipeline.make_mbarriers(smem, 2, roles(spec).warps("score")), *rows)


def yields_to_qk(spec):
    """Return whether the second half of P V of a block comes behind Q K^T of the next one, if that is loaded. Before
    it, Q K^T would take as long as both, and the tensor cores would have nothing to do under the softmax. With rows of
    one CTA, memory bounds the kernel, and a stage should be freed early."""
    return spec.tile.cluster > 1


class ScoreState(NamedTuple):
    """The next items of the score role: kv, in k.pipe; p, in scores.pipe; q, in q_pipe."""

    kv: pipeline.PipelineState
    p: Int32
    q: Int32


def score_fragments(spec, plan, s) -> Sm90Fragments:
    """Make the fragments of the score role."""
    t, tid = spec.tile, cute.arch.thread_idx()[0] % 128
    qk = plan.mma_qk.get_slice(0)
    acc_s = cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.n)), Float32)
    rows = cute.size(wgmma.rows_cols(acc_s), mode=[0])
    coords = plan.mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((t.m, t.n)))
    return Sm90Fragments(
        None,
        None,
        None,
        acc_s,
        None,
        cute.make_rmem_tensor_like(wgmma.as_operand_a(acc_s), precision.of(spec).mma_type),
        online.make(rows),
        cute.make_rmem_tensor(rows, Int32),
        wgmma.rows_cols(coords),
        scales_of_call(spec, plan.args),
        words=make_words(spec, rows) if gather.has_slots(spec) else None,
        limits=cute.make_rmem_tensor(rows, Float32),
    )


def make_words(spec, rows):
    """Make the words of the keys of a block that exist: of all rows or, where tokens share their keys, of each row."""
    count = spec.tile.n // 32
    return cute.make_rmem_tensor((rows, count) if spec.kv.union else count, Uint32)


# The score role: one iteration per tile, an inner one per KV block, highest block first.
@cute.jit
def score(spec: cutlass.Constexpr, plan, s):
    """Run the score role in its warpgroup."""
    r = score_fragments(spec, plan, s)
    has_slots = const_expr(gather.has_slots(spec))
    slots = gather.page_ids_of(spec, plan.kv[pages.K], spec.tile.n // 32) if has_slots else None
    chosen_by = cute.make_rmem_tensor(spec.tile.n // 32, Uint32) if const_expr(spec.kv.union) else None

    def score_tile(w, _, at):
        if w.n_block_max > w.n_block_min:
            seqlen = mask.seqlen_info(spec, plan.args, w.sequence)
            params = exact_if_wanted(plan.args, precision.rescale_params(spec, w.sequence.kv_len))
            tile = Sm90TileState(r, w, seqlen, params, slots=slots, chosen_by=chosen_by)
            if const_expr(not spec.logits.soft_cap):
                at = score_blocks(spec, plan, s, tile, at, False)
            elif plan.args.logits.soft_cap > 0.0:
                at = score_blocks(spec, plan, s, tile, at, True)
            else:
                at = score_blocks(spec, plan, s, tile, at, False)
        return at

    work.for_each_tile(spec, s, score_tile, ScoreState(pipeline.initial_state(), Int32(0), Int32(0)))


def exact_if_wanted(a, params: online.RescaleParams) -> online.RescaleParams:
    """Return the parameters with which maxima do not lag behind, if the call wants the largest logits."""
    exact = (a.out.lse_form & LSE_MAX) != 0
    return params._replace(rescale_threshold=warp.select(exact, Float32(0.0), params.rescale_threshold))


@cute.jit
def score_blocks(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ScoreState, capped: cutlass.Constexpr
) -> ScoreState:
    """Compute P of the blocks of a tile. Return the state behind it."""
    lowest, last = tile.w.n_block_min, tile.w.n_block_max - 1
    look_up_slots(spec, plan, tile, last)
    pipeline.consumer_wait(s.q_pipe, at.q)
    gather_q(spec, s, tile.w, plan.args)
    init_rows(spec, tile)
    at = score_block(spec, plan, s, tile, at, last, BlockFlags(capped, True, True))
    segments = mask.segments(spec, lowest, last, tile.w.n_block_full_min, tile.w.n_block_full_max, 0, capped)
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        for position in cutlass.range(segment.n_block_max - 1, segment.n_block_min - 1, -1, unroll=1):
            at = score_block(spec, plan, s, tile, at, position, flags)
    release_q(spec, s, at.q)
    return at._replace(q=at.q + 1)


def set_limits(tile: Sm90TileState):
    """Set by how much the maximum of each row may grow before row_max follows: by no more than for all rows, and only
    until P of the largest key would exceed a quarter of the row's sum so far. So a key that has most of a row has a P
    of 1, which bf16 represents exactly. In rows without such a key, O is rescaled as rarely as with the limit alone."""
    st, limits, most = tile.r.st, tile.r.limits, tile.rescale_params.rescale_threshold
    for k in range(cute.size(limits)):
        total = cute.arch.warp_reduction_sum(st.row_sum[k], threads_in_group=LANES)
        limits[k] = cute.arch.fmin(cute.arch.fmax(cute.math.log2(total, fastmath=True) - QUARTER, 0.0), most)


@cute.jit
def look_up_slots(spec: cutlass.Constexpr, plan, tile: Sm90TileState, n_block: Int32):
    """Look up which rows of the cache are the keys of a block, if the token has chosen them one by one."""
    if const_expr(gather.has_slots(spec)):
        look_up_block(spec, tile, slots_of(plan, tile.w), n_block)


def slots_of(plan, w: WorkTileInfo) -> pages.SequencePages:
    """Return the slots of the keys of a tile."""
    return pages.of_sequence(plan.args, w.batch_idx, pages.K, w.sequence.extra)


@cute.jit
def look_up_block(spec: cutlass.Constexpr, tile: Sm90TileState, of: pages.SequencePages, n_block: Int32):
    """Look up which rows of the cache are the keys of a block, and which tokens have chosen them."""
    gather.look_up_rows(spec, tile.slots, of, tile.w.sequence.kv_len, n_block * spec.tile.n)
    if const_expr(spec.kv.union):
        gather.look_up_tokens(tile.chosen_by, of, tile.w.sequence.kv_len, n_block * spec.tile.n)


@cute.jit
def find_keys(spec: cutlass.Constexpr, plan, tile: Sm90TileState, n_block: Int32):
    """Find which keys of a block exist, from what `look_up_block` has read."""
    r = tile.r
    found = gather.present(spec, plan.kv[pages.K], tile.slots, n_block, tile.w.sequence.extra)
    if const_expr(spec.kv.union):
        for row in cutlass.range_constexpr(cute.size(r.tokens)):
            # the 8 rows of a warp at `row` have one token: a token has a multiple of 8 rows
            own = gather.chosen_by(tile.chosen_by, cute.arch.make_warp_uniform(r.tokens[row]))
            for i in cutlass.range_constexpr(cute.size(found)):
                r.words[row, i] = found[i] & own[i]
    else:
        for i in cutlass.range_constexpr(cute.size(found)):
            r.words[i] = found[i]


@cute.jit
def gather_q(spec: cutlass.Constexpr, s, w: WorkTileInfo, a):
    """Copy the 64 rows of Q, (token, head) pairs, into the stage. Rows past the sequence become zeros. Called by all
    warps that compute scores."""
    copy_q(spec, s, w, a)
    complete_q(spec)


@cute.jit
def complete_q(spec: cutlass.Constexpr):
    """Wait until all of Q has been copied."""
    if const_expr(spec.q == spec.smem_q):
        cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    if const_expr(spec.tile.scores_apart):
        cute.arch.barrier(barrier_id=NamedBarrier.SCORES, number_of_threads=128)
    else:
        rows_barrier(spec)


@cute.jit
def copy_q(spec: cutlass.Constexpr, s, w: WorkTileInfo, a):
    """Begin to copy this warp's rows of Q."""
    role = const_expr("score" if spec.tile.scores_apart else "mma")
    own, lane = const_expr(spec.tile.m // roles(spec).warps(role)), cute.arch.lane_idx()  # rows of a warp
    first = (cute.arch.warp_idx() - roles(spec).first(role)) * own
    if const_expr(spec.tile.alternates):
        first = warp.opaque(first)  # no registers hold addresses of Q from tile to tile
    parts = [x for x in (a.query.q, a.query.q_rope) if x is not None]
    row, starts = w.m_block * spec.tile.m + first + lane, [cute.make_rmem_tensor(1, Int64) for _ in parts]
    exists = row < geometry.num_rows(w.sequence.q_len, w.pack_factor)
    for x, start in zip(parts, starts, strict=True):
        start[0] = Int64(NO_ROW)
        if exists:
            token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
            start[0] = memory.row_of(x, token, geometry.head_of(row, w.head_idx, geometry.pack_divisor(w)))
    stored = const_expr([x.shape[2] for x in parts])
    if const_expr(spec.q == spec.smem_q):
        copy_rows(stored, own, starts, s.q[None, None, 0], first)
        cute.arch.cp_async_commit_group()
    else:
        packed.convert_rows(spec.tile.m, stored, own, starts, s.q[None, None, 0].iterator.toint(), first)


@cute.jit
def init_rows(spec: cutlass.Constexpr, tile: Sm90TileState):
    """Begin a tile: row_max = -inf, row_sum = 0; the token of each of this thread's rows."""
    r = tile.r
    online.reset(r.st, online.NO_KEY_MAX)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = tile.w.m_block * spec.tile.m + r.cols[k, 0][0]
        r.tokens[k] = geometry.token_of(row, geometry.pack_divisor(tile.w))


@cute.jit
def score_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ScoreState, position: Int32, flags: cutlass.Constexpr
) -> ScoreState:
    """Compute S = Q K^T of the block at a position, and its P, into shared memory. Return the state behind it."""
    r, a = tile.r, plan.args
    n_block = mask_blocks.n_block_at(spec, a, tile.w, position)
    if const_expr(gather.has_slots(spec)):
        find_keys(spec, plan, tile, n_block)
        look_up_slots(spec, plan, tile, n_block - 1)
    else:
        set_limits(tile)  # while K is loaded
    issue_qk(spec, plan, s, r, at.kv)
    if const_expr(gather.has_slots(spec)):
        set_limits(tile)
    warpgroup.wait_group(0)
    if const_expr(yields_to_qk(spec)):
        pipeline.mbarrier_arrive(s.scores.multiplied + at.p % 2)
    # softmax
    mask_and_update_max(spec, a, tile, n_block, flags)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(tile, row)
        convert_p(spec, r, row)
    if const_expr(flags.is_first and source(spec).PARTIAL_TAIL):
        zero_tail(spec, s, tile.seqlen.kv_len - n_block * spec.tile.n, at)
    # P, and what mma has to know of the rows
    pipeline.producer_acquire(s.scores.pipe, at.p)
    copy_p = wgmma.mma_nt(precision.of(spec).mma_type, 1, spec.tile.n, True)
    wgmma.store_a(copy_p, r.p, s.scores.p[None, None, 0], cute.arch.thread_idx()[0] % 128)
    store_rows(s, r, at.q % 2, position == tile.w.n_block_min)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()  # all lanes have written before one of them arrives
    pipeline.producer_commit(s.scores.pipe, at.p)
    return at._replace(kv=pipeline.next_item(s.k.pipe, at.kv), p=at.p + 1)


@cute.jit
def issue_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, kv, in_reverse: cutlass.Constexpr = False):
    """Wait for K of a block, item `kv` of k.pipe, and issue acc_s = Q K^T. in_reverse: take the groups of columns in
    reverse order."""
    groups, (q, k) = const_expr(pages.column_groups(spec)), recomputed_qk(spec, plan, s, pipeline.stage(s.k.pipe, kv))
    order = const_expr(tuple(range(len(groups)))[:: -1 if in_reverse else 1])
    for n in cutlass.range_constexpr(len(order)):
        i = const_expr(order[n])
        pipeline.consumer_wait(s.k.pipes[i], kv)
        source(spec).fence_before_mma()
        steps = const_expr(tuple(STEPS * box + j for box in groups[i] for j in range(STEPS)))
        wgmma.issue(plan.mma_qk, r.acc_s, q, k, n == 0, some=wgmma.Instructions(steps))


@cute.jit
def store_rows(s, r: Sm90Fragments, tile: Int32, is_last):
    """Store the factors of this warp's rows and, behind the last block of a tile, their maxima and sums. tile: its
    number, of two."""
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = r.cols[k, 0][0]
        if is_last:
            total = cute.arch.warp_reduction_sum(r.st.row_sum[k], threads_in_group=LANES)
            if cute.arch.lane_idx() % LANES == 0:
                s.scores.row_sum[row, tile] = total
                s.scores.row_max[row, tile] = (
                    -Float32.inf if r.st.row_max[k] == -Float32.inf else r.st.row_max_scaled[k]
                )
        if cute.arch.lane_idx() % LANES == 0:
            s.scores.factor[row] = r.st.acc_scale[k]


@cute.jit
def zero_tail(spec: cutlass.Constexpr, s, valid: Int32, at: ScoreState):
    """Zero the rows of V past the last key, which hold whatever their page holds: 0 * NaN is NaN."""
    if valid < spec.tile.n and source(spec).has_partial_tail(spec.tile.n, valid):
        # Q K^T of the other warps may still read them
        cute.arch.barrier(barrier_id=NamedBarrier.SCORES, number_of_threads=128)
        v = precision.first_columns(s.v.smem, spec.padded_vo)
        source(spec).zero_tail(spec, v[None, None, at.kv.index], valid, cute.arch.thread_idx()[0] % 128, 128)


class OutputState(NamedTuple):
    """The next items of the mma role: kv, in k.pipe; p, in scores.pipe; tile, of those with a key. partials: the
    splits that the CTA has stored."""

    kv: pipeline.PipelineState
    p: Int32
    tile: Int32
    partials: Int32


def o_fragments(spec, plan, s) -> Sm90Fragments:
    """Make the fragments of a warpgroup that has a part of the columns of O: V, O, and the state of its rows."""
    t, tid = spec.tile, cute.arch.thread_idx()[0] % 128
    pv = plan.mma_pv.get_slice(0)
    acc_o = cute.make_rmem_tensor(pv.partition_shape_C((t.m, spec.padded_vo // t.o_parts)), Float32)
    rows = cute.size(wgmma.rows_cols(acc_o), mode=[0])
    coords = plan.mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((t.m, t.n)))
    return Sm90Fragments(
        None,
        None,
        plan.mma_pv.make_fragment_B(pv.partition_B(precision.v_operand(spec, s.v.smem))),
        None,
        acc_o,
        None,
        online.make(rows),
        None,
        wgmma.rows_cols(coords),
        scales_of_call(spec, plan.args),
    )


def output_fragments(spec, plan, s) -> Sm90Fragments:
    """Make the fragments of the mma role."""
    p = plan.mma_pv.get_slice(0).partition_A(s.scores.p)
    return replace(o_fragments(spec, plan, s), shared_p=plan.mma_pv.make_fragment_A(p))


# The mma role: one iteration per tile, an inner one per KV block.
@cute.jit
def output(spec: cutlass.Constexpr, plan, s, epilogue: cutlass.Constexpr):
    """Run the mma role in one of its warpgroups, which has a part of the columns of O. epilogue: stores a tile."""
    r = output_fragments(spec, plan, s)

    assert not spec.kv.record or roles(spec).warps("mma") * packed.GROUP == spec.tile.n
    rows = packed.allocate(spec, plan.kv[pages.K]) if const_expr(spec.kv.record) else None

    def one_tile(w, _, at):
        return output_tile(spec, plan, s, r, rows, w, at, epilogue)

    state = OutputState(pipeline.initial_state(), Int32(0), Int32(0), Int32(0))
    state = work.for_each_tile(spec, s, one_tile, state)
    if const_expr(s.splits is not None):
        splits.merge(spec, plan.args, s, state.partials)


@cute.jit
def output_tile(
    spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, rows: cutlass.Constexpr, w: WorkTileInfo, at: OutputState,
    epilogue: cutlass.Constexpr,
) -> OutputState:  # fmt: skip
    """Compute O of a tile, and store it. Return the state behind it."""
    if w.n_block_max > w.n_block_min:
        clear(r)
        if const_expr(spec.kv.record):
            begin_keys(spec, plan, s, rows, w, at.kv)
        for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            following = pipeline.next_item(s.v.pipe, at.kv)
            if const_expr(spec.kv.record):
                if position > w.n_block_min:
                    convert_keys(spec, plan, s, rows, w, position - 1, following)
            at = add_block(spec, plan, s, OutputTile(r, w, rows), at, position, following)._replace(kv=following)
        read_rows(s, r, at.tile % 2)
        at = at._replace(tile=at.tile + 1, partials=epilogue(spec, plan.args, s, r, w, False, at.partials))
    else:
        at = at._replace(partials=epilogue(spec, plan.args, s, r, w, True, at.partials))
    return at


def clear(r: Sm90Fragments):
    """Begin a tile: O = 0."""
    r.acc_o.fill(0.0)


@cute.jit
def begin_keys(spec: cutlass.Constexpr, plan, s, rows: cutlass.Constexpr, w: WorkTileInfo, kv: pipeline.PipelineState):
    """Load and convert this warp's rows of the first block of a tile, and load those of the next one. rows:
    `packed.NextRows`."""
    tile = tile_rows(spec, plan, w)
    packed.begin(spec, rows, tile, w.n_block_max - 1)
    convert_keys(spec, plan, s, rows, w, w.n_block_max - 1, kv)
    packed.advance(spec, rows, tile, w.n_block_max - 1)


@cute.jit
def convert_keys(
    spec: cutlass.Constexpr, plan, s, rows: cutlass.Constexpr, w: WorkTileInfo, n_block: Int32,
    kv: pipeline.PipelineState,
):  # fmt: skip
    """Convert this warp's rows of a block, which are loaded, into its stage."""
    tile = tile_rows(spec, plan, w)
    packed.load_late(spec, rows, tile, n_block)
    pipeline.producer_acquire(s.k.pipe, kv)
    packed.convert(spec, rows, tile, n_block, s.k.smem[None, None, kv.index])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    pipeline.producer_commit(s.k.pipe, kv)


def tile_rows(spec, plan, w: WorkTileInfo):
    """Return the rows of a tile that this warp converts."""
    of = pages.of_sequence(plan.args, w.batch_idx, pages.K, w.sequence.extra)
    return packed.TileRows(of, w.sequence.kv_len, w.n_block_min, warp_of_mma(spec))


def warp_of_mma(spec):
    """Return the index of this warp in the mma role."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("mma")


@dataclass(frozen=True)
class OutputTile:
    """The work tile of which the mma role computes O, with its fragments r. rows: `packed.NextRows`, or None."""

    r: Sm90Fragments
    w: WorkTileInfo
    rows: Any


@cute.jit
def add_block(
    spec: cutlass.Constexpr, plan, s, tile: OutputTile, at: OutputState, position: Int32,
    following: pipeline.PipelineState,
) -> OutputState:  # fmt: skip
    """Compute O += P V of the block at a position. The state behind it still has the stage of the block. following: the
    item of the block behind it in k.pipe. Packed rows of the block after that are loaded meanwhile: their loads fill
    the queue of the load unit, in which a warp would wait for as long as P V takes."""
    r, w = tile.r, tile.w
    pipeline.consumer_wait(s.scores.pipe, at.p)
    for k in cutlass.range_constexpr(cute.size(r.st.acc_scale)):
        r.st.acc_scale[k] = s.scores.factor[r.cols[k, 0][0]]
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    p, v = r.shared_p[None, None, None, 0], r.v[None, None, None, at.kv.index]
    groups, halves = const_expr(len(pages.column_groups(spec))), const_expr(cute.size(r.acc_o, mode=[2]))
    if const_expr(groups == 1):
        wgmma.issue(plan.mma_pv, r.acc_o, p, v, False, o_part(spec))
        if const_expr(spec.kv.record):  # without a branch around it: one among MMAs may let the compiler wait for them
            packed.advance(spec, tile.rows, tile_rows(spec, plan, w), position - 1)
    else:  # each half of the columns is freed when it has been read
        for half in cutlass.range_constexpr(halves):
            wgmma.issue(plan.mma_pv, r.acc_o, p, v, False, o_part(spec), some=wgmma.Instructions(columns=(half,)))
            if const_expr(half == 0 and groups > halves):
                release_keys(spec, s, 0, at.kv)
            if const_expr(half == 0 and yields_to_qk(spec)):
                warpgroup.wait_group(0)
                release_keys(spec, s, groups - halves, at.kv)
                if position > w.n_block_min:
                    yield_to_qk(spec, s, at.p, following)
        if const_expr(not yields_to_qk(spec)):
            warpgroup.wait_group(1)
            release_keys(spec, s, groups - halves, at.kv)
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.scores.pipe, at.p)
    release_keys(spec, s, groups - 1, at.kv)
    return at._replace(p=at.p + 1)


@cute.jit
def yield_to_qk(spec: cutlass.Constexpr, s, p: Int32, following: pipeline.PipelineState):
    """Wait until Q K^T of the block behind item p of scores.pipe has ended, unless its keys are still on their way."""
    if pipeline.consumer_try_wait(s.k.pipes[-1], following):
        pipeline.mbarrier_wait(s.scores.multiplied + (p + 1) % 2, (p + 1) // 2)


@cute.jit
def release_keys(spec: cutlass.Constexpr, s, group: cutlass.Constexpr, kv: pipeline.PipelineState):
    """Free a group of columns of a block, in all CTAs that load a part of it (one warp)."""
    if const_expr(spec.tile.cluster == 1):
        pipeline.consumer_release(s.v.pipes[group], kv)
    else:
        pipeline.cluster_release(s.v.pipes[group], kv, spec.tile.cluster)


@cute.jit
def read_rows(s, r: Sm90Fragments, tile: Int32):
    """Read the maxima and the sums that `store_rows` has stored of this thread's rows."""
    for k in cutlass.range_constexpr(cute.size(r.st.row_max)):
        row = r.cols[k, 0][0]
        total = s.scores.row_sum[row, tile]
        r.st.row_sum[k] = total if cute.arch.lane_idx() % LANES == 0 else Float32(0.0)
        r.st.row_max[k] = s.scores.row_max[row, tile]
        r.st.row_max_scaled[k] = s.scores.row_max[row, tile]
