"""Parts of tiles whose keys CTAs share (`schedule.stream_k`): which a CTA has, and the merge of a tile by the CTA that
finishes its last part. What a part holds the architecture's epilogue stores.

A CTA has parts of two tiles at most. They are merged behind its last tile: with the loops of a merge among those of
tiles, the compiler keeps descriptors of MMAs in no uniform registers, which costs Hopper 70 of 730 instructions a
block.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import combine, geometry
from .schedule import work
from .schedule.work import WorkTileInfo

MAX_SPLITS_PER_CTA = 2  # parts of a CTA
STORED_BARRIER, MERGE_BARRIER = 3, 4


class SplitSmem(NamedTuple):
    """Shared memory. tiles: (words, MAX_SPLITS_PER_CTA) of the `WorkTileInfo` of each part; last:
    (MAX_SPLITS_PER_CTA,), whether it was its tile's last."""

    tiles: cute.Tensor
    last: cute.Tensor


def allocate(spec, smem):
    """The `SplitSmem`; None in other kernels."""
    if not work.is_split_kv(spec):
        return None
    tiles = smem.allocate_tensor(Int32, cute.make_layout((work.fields(spec), MAX_SPLITS_PER_CTA)))
    return SplitSmem(tiles, smem.allocate_tensor(Int32, cute.make_layout(MAX_SPLITS_PER_CTA)))


@cute.jit
def record(board: SplitSmem, w: WorkTileInfo, number: Int32, tid: Int32):
    """Thread 0: the CTA's part `number` is of this tile."""
    if tid == 0:
        for i, word in enumerate(work.flatten(w)):
            board.tiles[i, cutlass.min(number, MAX_SPLITS_PER_CTA - 1)] = (
                word  # more only where lengths change during a launch
            )


def barrier(warps: int):
    """Warps that store parts, or note or merge them, behind the CTA's last tile."""
    cute.arch.barrier(barrier_id=STORED_BARRIER, number_of_threads=32 * warps)


def work_of_split(spec, board: SplitSmem, i):
    """WorkTileInfo of a part."""
    return work.of_words(spec, [board.tiles[k, i] for k in range(work.fields(spec))])


@cute.jit
def merge(
    spec: cutlass.Constexpr,
    a,
    board: SplitSmem,
    count: Int32,
    tid: Int32,
    warps: cutlass.Constexpr,
    rows_per_warp: cutlass.Constexpr,
):
    """So many warps, behind `meet`: merge those tiles of the CTA's parts, of which there are `count`, that no other CTA
    has still to add to. rows_per_warp: rows of a warp at a time."""
    number = cute.arch.make_warp_uniform(tid // 32)
    count = cutlass.min(count, MAX_SPLITS_PER_CTA)
    if tid < count:
        split = work_of_split(spec, board, tid).split
        board.last[tid] = combine.count_split(a, split.first, split.num_splits)
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=32 * warps)
    for i in cutlass.range(count, unroll=1):
        if board.last[i] != 0:
            w = work_of_split(spec, board, i)
            rows = geometry.num_rows(w.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
            end = cutlass.min(rows, spec.tile.m)
            for first in cutlass.range(rows_per_warp * number, end, rows_per_warp * warps, unroll=1):
                combine.merge_rows(spec, a, w, first, rows, rows_per_warp)
