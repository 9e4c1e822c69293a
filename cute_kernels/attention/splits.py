"""Split tiles of prefill (`schedule.stream_k`): the splits that a CTA has computed, and the merge of a tile by the CTA
that stores its last split. The architecture's epilogue stores the splits themselves.

A CTA has splits of at most two tiles. It merges them after its last tile: with the loops of a merge inside the loop
over tiles, the compiler does not keep MMA descriptors in uniform registers, which costs Hopper 70 of 730 instructions
per block.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import combine, geometry
from .barriers import NamedBarrier
from .schedule import policy, work
from .schedule.work import WorkTileInfo

MAX_SPLITS_PER_CTA = 2


class SplitSmem(NamedTuple):
    """The CTA's splits in shared memory. tiles: (words, MAX_SPLITS_PER_CTA), the `WorkTileInfo` of each split. last:
    (MAX_SPLITS_PER_CTA,), 1 if it was the last split of its tile; in `stripes`, the number of the CTA's stripe."""

    tiles: cute.Tensor
    last: cute.Tensor


def allocate(spec, smem):
    """Allocate the `SplitSmem`; return None in kernels without split tiles."""
    if not policy.is_split_kv(spec):
        return None
    tiles = smem.allocate_tensor(Int32, cute.make_layout((work.fields(spec), MAX_SPLITS_PER_CTA)))
    return SplitSmem(tiles, smem.allocate_tensor(Int32, cute.make_layout(MAX_SPLITS_PER_CTA)))


@cute.jit
def record(smem: SplitSmem, w: WorkTileInfo, number: Int32, tid: Int32):
    """Record the tile of the CTA's split `number`. Only thread 0 writes."""
    if tid == 0:
        # a CTA has more splits only if lengths change during a launch
        for i, word in enumerate(work.flatten(w)):
            smem.tiles[i, cutlass.min(number, MAX_SPLITS_PER_CTA - 1)] = word


def barrier(warps: int):
    """Synchronise the warps that store, record or merge splits, after the CTA's last tile."""
    cute.arch.barrier(barrier_id=NamedBarrier.SPLITS_STORED, number_of_threads=32 * warps)


def work_of_split(spec, smem: SplitSmem, i):
    """Return the `WorkTileInfo` of the CTA's i-th split."""
    return work.of_words(spec, [smem.tiles[k, i] for k in range(work.fields(spec))])


# The combine step of prefill: the last thing that the warps which store splits do, after `barrier`.
#   waits for   all splits of this CTA to be stored (`barrier`, by the caller)
#   computes    one thread per split counts it (`combine.count_split`); for each tile that this CTA finished, the warps
#               share its rows (`combine.merge_rows`)
# Nothing waits for other CTAs: the one that counts the last split of a tile merges it.
@cute.jit
def merge(
    spec: cutlass.Constexpr,
    a,
    smem: SplitSmem,
    count: Int32,
    tid: Int32,
    warps: cutlass.Constexpr,
    rows_per_warp: cutlass.Constexpr,
):
    """Merge those tiles of the CTA's `count` splits to which no other CTA has a split still to add. Called by `warps`
    warps, after `barrier`. rows_per_warp: rows that a warp merges at a time."""
    number = cute.arch.make_warp_uniform(tid // 32)
    count = cutlass.min(count, MAX_SPLITS_PER_CTA)
    # count the splits
    if tid < count:
        split = work_of_split(spec, smem, tid).split
        smem.last[tid] = combine.count_split(a, split.first, split.num_splits)
    cute.arch.barrier(barrier_id=NamedBarrier.SPLITS_COUNTED, number_of_threads=32 * warps)
    # merge the tiles that this CTA finished
    for i in cutlass.range(count, unroll=1):
        if smem.last[i] != 0:
            w = work_of_split(spec, smem, i)
            rows = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
            end = cutlass.min(rows, spec.tile.m)
            for first in cutlass.range(rows_per_warp * number, end, rows_per_warp * warps, unroll=1):
                combine.merge_rows(spec, a, w, first, rows, rows_per_warp)
