"""The `mma` role of few query rows over latents: from rows as they are stored, and P, to O and the LSE.

To follow the code: `mma_warp` -> `compute_tile` -> `add_blocks` -> `add_columns` -> `add_block`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy, mma, pipeline, warp
from .. import epilogue, geometry, softmax, splits, stripes
from ..kv.record_rows import BOX, BYTES
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import precision, values
from .precision import LANES, MMAS
from .roles import roles
from .score import blocks_of, row_of, warp_of
from .tile_table import KEYS, SCORE_WARPS, STATS, STEP, WARPS, records, row_pitch
from .values import ValueRows


class LatentOutputState(NamedTuple):
    """The next items of the mma role: kv, in k.pipe; p, in the pipeline of `LatentHandoff`; tile, of those with a key.
    partials: the splits that the CTA has stored."""

    kv: pipeline.PipelineState
    p: Int32
    tile: Int32
    partials: Int32


# The mma role: one iteration per tile, an inner one per KV block.
#   waits for   P of the block
#   computes    O^T += V^T P^T of 64 columns
#   releases    P and the rows of the block
@cute.jit
def mma_warp(spec: cutlass.Constexpr, plan, s):
    """Run the role in one warp."""
    acc_o = cute.make_rmem_tensor((4, MMAS, spec.tile.n_tiles), Float32)

    def one_tile(w, _, at):
        return compute_tile(spec, plan.args, s, acc_o, w, at)

    state = LatentOutputState(pipeline.initial_state(), Int32(0), Int32(0), Int32(0))
    at = work.for_each_tile(spec, s, one_tile, state)
    splits.barrier(WARPS)
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    stripes.merge(spec, plan.args, s.splits, at.partials, tid, WARPS)


@cute.jit
def compute_tile(
    spec: cutlass.Constexpr, a, s, acc_o: cute.Tensor, w: WorkTileInfo, at: LatentOutputState
) -> LatentOutputState:
    """Compute and store a tile. Return the state behind it."""
    acc_o.fill(0.0)
    for i in cutlass.range_constexpr(len(records(spec))):
        at = add_blocks(spec, s, acc_o, w, at, const_expr(len(records(spec)) - 1 - i), const_expr(i > 0))
    store(spec, a, s, acc_o, w, at.tile % STATS)
    if w.n_block_max > w.n_block_min:
        at = at._replace(tile=at.tile + 1)
    if w.split.slot >= 0:
        splits.record(s.splits, w, at.partials, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma"))
        at = at._replace(partials=at.partials + 1)
    return at


@cute.jit
def add_blocks(
    spec: cutlass.Constexpr, s, acc_o: cute.Tensor, w: WorkTileInfo, at: LatentOutputState, which: cutlass.Constexpr,
    begun: cutlass.Constexpr,
) -> LatentOutputState:  # fmt: skip
    """Add the products of all blocks that have rows of a record. begun: O has those of other blocks. Return the state
    behind them. The warp's columns are all of one section of V, of which there are one or two."""
    sections = const_expr(precision.sections_of(spec, which, spec.head_dim_vo))
    if const_expr(len(sections) == 1):
        at = add_columns(spec, s, acc_o, w, at, which, sections[0], begun)
    else:
        if warp_of(spec, "mma") < sections[1].first:
            at = add_columns(spec, s, acc_o, w, at, which, sections[0], begun)
        else:
            at = add_columns(spec, s, acc_o, w, at, which, sections[1], begun)
    return at


@cute.jit
def add_columns(
    spec: cutlass.Constexpr, s, acc_o: cute.Tensor, w: WorkTileInfo, at: LatentOutputState, which: cutlass.Constexpr,
    section: cutlass.Constexpr, begun: cutlass.Constexpr,
) -> LatentOutputState:  # fmt: skip
    """Do the work of `add_blocks` for columns of a section."""
    first, last = blocks_of(spec, w, which)
    if const_expr(begun):
        values.exchange(acc_o, section.code, True)
    for _ in cutlass.range(first, last, unroll=1):
        add_block(spec, s, acc_o, at, which, section)
        at = at._replace(kv=pipeline.next_item(s.k.pipe, at.kv), p=at.p + 1)
    values.exchange(acc_o, section.code, False)
    return at


@cute.jit
def add_block(
    spec: cutlass.Constexpr, s, acc_o: cute.Tensor, at: LatentOutputState, which: cutlass.Constexpr,
    section: cutlass.Constexpr,
):  # fmt: skip
    """Compute O^T += V^T P^T of all keys of a block for the warp's columns. acc_o (4, MMA, n): of two columns of 16,
    see `values.exchange`, and rows 8 n + 2 t and 8 n + 2 t + 1."""
    box, stage = warp_of(spec, "mma"), pipeline.stage(s.scores.pipe, at.p)
    base = precision.stage_of(spec, s, at.kv) + section.at + (box - section.first) * const_expr(BYTES[section.code])
    base += values.piece(spec, section)
    first = ValueRows(base, box, 0, stage)
    p = s.scores.p[None, cute.arch.lane_idx(), None, stage].iterator.toint()
    pipeline.consumer_wait(s.scores.pipe, at.p)
    rescale(spec, s, acc_o, stage)
    if const_expr(section.factored and precision.may_be_inexact(spec, which)):
        if values.any_inexact(s, stage):
            add_products(spec, s, acc_o, first, p, which, section, True)
        else:
            add_products(spec, s, acc_o, first, p, which, section, False)
    else:
        add_products(spec, s, acc_o, first, p, which, section, False)
    cute.arch.sync_warp()
    pipeline.consumer_release(s.scores.pipe, at.p)
    pipeline.consumer_release(s.k.pipe, at.kv)


def add_products(spec, s, acc_o, first: ValueRows, p, which, section, rounded):
    """Do the work of `add_block`. first: the first rows of the block. p: the address of P. rounded: see
    `values.products`."""
    n_tiles, kind = spec.tile.n_tiles, precision.value_kind(spec)
    for tile in range(SCORE_WARPS):
        words = mma.load(p + tile * LANES * 8 * n_tiles, 2 * n_tiles)
        rows = first._replace(at=first.at + tile * KEYS * row_pitch(spec), key=KEYS * tile)
        for i, (v, weights) in enumerate(values.products(spec, s, which, section, rows, words, rounded)):
            for n in range(n_tiles):
                mma.issue(kind, acc_o, 4 * (i + MMAS * n), v, weights[2 * n : 2 * n + 2])


@cute.jit
def rescale(spec: cutlass.Constexpr, s, acc_o: cute.Tensor, stage: Int32):
    """Multiply O by the factors of a block, in warps in which some factor is not 1."""
    count, needed = const_expr(2 * spec.tile.n_tiles), False
    factors = cute.make_rmem_tensor(count, Float32)
    for k in cutlass.range_constexpr(count):
        factors[k] = s.scores.rescale[row_of(k), stage]
        needed = needed or factors[k] != 1.0
    if cute.arch.vote_any_sync(needed):
        for k in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(MMAS):
                for c in cutlass.range_constexpr(2):
                    acc_o[2 * c + k % 2, i, k // 2] = acc_o[2 * c + k % 2, i, k // 2] * factors[k]


@cute.jit
def store(spec: cutlass.Constexpr, a, s, acc_o: cute.Tensor, w: WorkTileInfo, tile: Int32):
    """Store O and the LSE, or the CTA's split."""
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(2 * spec.tile.n_tiles):
        row, total, top = row_of(k), Float32(0.0), -Float32.inf
        if w.n_block_max > w.n_block_min:
            top = s.scores.row_max[row, tile]
            for group in cutlass.range_constexpr(spec.tile.groups):
                part = Float32(0.0)
                for each in cutlass.range_constexpr(SCORE_WARPS):
                    part += s.scores.row_sum[row, each, group, tile]
                total += part if const_expr(group == 0) else part * s.scores.last[row, tile]
        if row < left:
            store_row(spec, a, acc_o, w, k, row, top, total)


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, acc_o: cute.Tensor, w: WorkTileInfo, k: cutlass.Constexpr, row: Int32, top: Float32,
    total: Float32,
):  # fmt: skip
    """Store this lane's columns of a row."""
    at, pack, own = w.m_block * spec.tile.m + row, geometry.pack_divisor(w), warp_of(spec, "mma")
    token, head = w.sequence.q_start + geometry.token_of(at, pack), geometry.head_of(at, w.head_idx, pack)
    split = w.split.slot >= 0
    sink = epilogue.sink_of(a, head)
    normal = softmax.normalizer(top, total, -Float32.inf if split else sink)
    scale = normal.inv_row_sum * const_expr(2.0 ** precision.lowered(spec))
    if not split:
        scale *= epilogue.output_scale(a)
    pair, g = cute.make_rmem_tensor(2, Float32), cute.arch.lane_idx() // 4
    for i in cutlass.range_constexpr(MMAS):
        for e in cutlass.range_constexpr(2):
            pair[e] = acc_o[2 * e + k % 2, i, k // 2] * scale
        if split:
            block = own * const_expr(BOX // STEP) + i
            target = stripes.blocks_of(spec, a, w.split.slot)[None, row % stripes.ROWS, block, row // stripes.ROWS]
            copy.vector(pair, cute.local_tile(target, (2,), (g,)))
        else:
            piece = (own * BOX + STEP * i) // 2 + g
            epilogue.store_elements(a.out.o[token, head, None], warp.convert16, piece, pair, True)
    mine = own == 0 and g == 0
    if split:
        lses = stripes.lses_of(spec, a, w.split.slot)
        if mine:
            lses[row] = normal.lse
    else:
        epilogue.store_lse(a, token, head, epilogue.lse_of(a, normal.lse, top, total), mine)
        epilogue.store_max(a, token, head, top, mine)
