"""The pipeline of tiles, work_pipe: one warp of a CTA finds a tile and produces it, all other warps read it.

The loop of a role over the tiles is `for_each_tile`. Only the mma roles of Hopper and of decode have loops of their
own: they read a tile before they have finished the tile before it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from ..geometry import sequence_fields, sequence_of
from . import policy


class SplitInfo(NamedTuple):
    """One split of a tile. slot: index in o_partial, -1 for a whole tile. num_splits: splits of the tile. first: the
    `worker` of the first split or, with blocks_per_split, the unit."""

    slot: Int32
    num_splits: Int32
    first: Int32


class WorkTileInfo(NamedTuple):
    """A tile, or this CTA's rows of one that a cluster computes, and the `geometry.Sequence` that it belongs to.

    The KV blocks [n_block_min, n_block_max) have a key that a row of the tile sees (none if the range is empty); those
    of [n_block_full_min, n_block_full_max) need no mask. split: a `SplitInfo`, or None in kernels
    without split tiles (`policy.is_split_kv`).
    list_row: with a custom mask, the tile's row of `mask_blocks`. Blocks are then positions in that list, from 0 on.
    pack_factor: rows per token, see `geometry`, and pack_magic, its magic number for `Divisor`: only in kernels with
    `tile.per_tile_pack_gqa`. o_tile: which part of the columns of O the tile has, only in kernels with several
    `tile.o_tiles`.
    """

    is_valid: Int32
    m_block: Int32
    head_idx: Int32
    sequence: Any
    batch_idx: Int32
    n_block_min: Int32
    n_block_max: Int32
    n_block_full_min: Int32
    n_block_full_max: Int32
    split: Any = None
    list_row: Any = None
    pack_factor: Any = None
    pack_magic: Any = None
    o_tile: Any = None


def worker(spec):
    """Return the index of this CTA among those that get tiles of their own: the CTA's or, if those of a cluster compute
    a tile together, the cluster's."""
    return cute.arch.block_idx()[0] if spec.tile.cluster == 1 else cute.arch.cluster_idx()[0]


def workers(spec):
    """Return the number of CTAs, or of clusters, of the launch."""
    return cute.arch.grid_dim()[0] if spec.tile.cluster == 1 else cute.arch.cluster_dim()[0]


def own(spec, index):
    """Return the index of this CTA's part of what a cluster has at `index`: parts of a cluster are neighbours."""
    return index if spec.tile.cluster == 1 else index * spec.tile.cluster + cute.arch.block_idx_in_cluster()


SEQUENCE = WorkTileInfo._fields.index("sequence")  # the words before it are one field each
COMMON = WorkTileInfo._fields.index("split") - 1  # words of every kernel's tiles, except those of the sequence


def fields(spec):
    """Return the number of 32-bit words of a tile in shared memory."""
    optional = (
        policy.is_split_kv(spec) * len(SplitInfo._fields) + bool(spec.mask.custom) + spec.tile.per_tile_pack_gqa * 2
    )
    return COMMON + len(sequence_fields(spec)) + optional + (spec.tile.o_tiles > 1)


def allocate(spec, smem):
    """Allocate the stages of work_pipe, each aligned to 16 bytes, which a thread stores at once."""
    return smem.allocate_tensor(Int32, cute.make_layout(((fields(spec) + 3) // 4 * 4, policy.work_stages(spec))), 16)


def make_pipe(spec, smem, roles):
    """Allocate and initialise work_pipe. Every warp reads the tiles, except those of the roles schedule and idle."""
    return pipeline.make(smem, policy.work_stages(spec), 1, roles.warps() - roles.warps("idle", "schedule"))


def flatten(w: WorkTileInfo):
    """Return the words of a tile."""
    common, optional = w[: WorkTileInfo._fields.index("split")], w[WorkTileInfo._fields.index("split") + 1 :]
    sequence = (value for value in w.sequence if value is not None)
    words = (*common[:SEQUENCE], *sequence, *common[SEQUENCE + 1 :])
    return (*words, *(w.split or ()), *(x for x in optional if x is not None))


@cute.jit
def produce(s, t: Int32, w: WorkTileInfo):
    """Wait for a free stage, then produce the CTA's t-th tile. Called by one warp."""
    pipeline.producer_acquire(s.work_pipe, t)
    producer_write(s, t, w)
    producer_commit(s, t)


@cute.jit
def producer_write(s, t: Int32, w: WorkTileInfo):
    """Write the CTA's t-th tile to its stage, which must be free. Called by one warp; `producer_commit` follows."""
    words = s.work
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(flatten(w)):
            words[i, pipeline.stage(s.work_pipe, t)] = value


@cute.jit
def producer_commit(s, t: Int32):
    """Signal the other warps that the tile is written. Called by one warp."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(pipeline.full_barrier(s.work_pipe, t))
    cute.arch.sync_warp()


def of_words(spec, words):
    """Return the tile with these words, the inverse of `flatten`."""
    count = len(sequence_fields(spec))
    behind, own = SEQUENCE + count, COMMON + count
    common = [*words[:SEQUENCE], sequence_of(spec, words[SEQUENCE:behind]), *words[behind:own]]
    w = WorkTileInfo(*common)
    rest = words[own:]
    if policy.is_split_kv(spec):
        w, rest = w._replace(split=SplitInfo(*rest[:3])), rest[3:]
    if spec.mask.custom:
        w, rest = w._replace(list_row=rest[0]), rest[1:]
    if spec.tile.per_tile_pack_gqa:
        w, rest = w._replace(pack_factor=rest[0], pack_magic=rest[1]), rest[2:]
    return w._replace(o_tile=rest[0]) if rest else w


def o_tile(w: WorkTileInfo):
    """Return which part of the columns of O a tile has: 0, known at trace time, if it has all."""
    return 0 if w.o_tile is None else w.o_tile


def consumer_wait(spec, s, t: Int32):
    """Wait for the CTA's t-th tile and return it. Called by one warp, which releases the stage later."""
    pipeline.consumer_wait(s.work_pipe, t)
    stage = pipeline.stage(s.work_pipe, t)
    return of_words(spec, [cute.arch.make_warp_uniform(s.work[i, stage]) for i in range(fields(spec))])


def consume(spec, s, t: Int32):
    """Wait for the CTA's t-th tile, return it and release its stage. Called by one warp."""
    w = consumer_wait(spec, s, t)
    cute.arch.sync_warp()  # all lanes have read before one of them arrives
    pipeline.consumer_release(s.work_pipe, t)
    return w


@cute.jit
def for_each_tile(spec, s, body: cutlass.Constexpr, state, carries_tile: cutlass.Constexpr = False):
    """Run the loop of a role: read the CTA's tiles up to the invalid one and call `state = body(w, t, state)` for each.

    w: the tile. t: its number. state: the state of the role between two tiles, an Int32 or a NamedTuple. Each tile's
    stage is released when the tile is read. carries_tile: read the next tile at the end of an iteration, in code of its
    own, instead of at the beginning of the next iteration. Called by each warp of the role. Return the last state."""
    t = Int32(0)
    if const_expr(carries_tile):
        w = consume(spec, s, t)
        while w.is_valid != 0:
            state = body(w, t, state)
            t += 1
            w = consume(spec, s, t)
    else:
        more = Int32(1)
        while more != 0:
            w = consume(spec, s, t)
            more = w.is_valid
            if w.is_valid != 0:
                state = body(w, t, state)
            t += 1
    return state
