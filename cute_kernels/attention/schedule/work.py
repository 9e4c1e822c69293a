"""The pipe of tiles: one warp of a CTA finds a tile and publishes it, all others read it."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...device import pipeline

STAGES = {"tiles": 2, "stream_k": 4}  # published and not released: one worked on, one loaded; decoding's stay longer


class SplitInfo(NamedTuple):
    """slot: where the part of a tile goes, whole tiles have -1; count: parts of the tile; first: the CTA, or with
    blocks_per_split the slot, of the first part."""

    slot: Int32
    num_splits: Int32
    first: Int32


class WorkTileInfo(NamedTuple):
    """A tile, and what every role needs to know of its request. KV blocks: [lo, hi) have a key that a row of the tile
    sees (none where hi <= lo), [n_block_full_min, n_block_full_max) need no mask. split: with schedule "stream_k". Of
    kernels whose tiles say so (`per_tile_pack_gqa`), pack_factor: rows that a token has, see `geometry`; pack_magic:
    what makes a `Divisor` of these."""

    is_valid: Int32
    m_block: Int32
    head_idx: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    batch_idx: Int32
    n_block_min: Int32
    n_block_max: Int32
    n_block_full_min: Int32
    n_block_full_max: Int32
    split: Any = None
    pack_factor: Any = None
    pack_magic: Any = None


COMMON = WorkTileInfo._fields.index("split")  # words of a tile with any schedule


def is_split_kv(spec):
    """Whether a tile may be shared among CTAs."""
    return spec.schedule == "stream_k"


def fields(spec):
    """Words of a published tile."""
    return COMMON + is_split_kv(spec) * len(SplitInfo._fields) + spec.tile.per_tile_pack_gqa * 2


def allocate(spec, smem):
    """Shared memory of published tiles, each aligned to what a thread stores at once."""
    return smem.allocate_tensor(Int32, cute.make_layout(((fields(spec) + 3) // 4 * 4, STAGES[spec.schedule])), 16)


def flatten(w: WorkTileInfo):
    return (*w[:COMMON], *(w.split or ()), *(() if w.pack_factor is None else (w.pack_factor, w.pack_magic)))


@cute.jit
def produce(s, t: Int32, w: WorkTileInfo):
    """One warp: tells the others the CTA's t-th tile, as soon as there is room."""
    pipeline.producer_acquire(s.work_pipe, t)
    producer_write(s, t, w)
    producer_commit(s, t)


@cute.jit
def producer_write(s, t: Int32, w: WorkTileInfo):
    """One warp, where there is room: the CTA's t-th tile, of which the others do not know yet."""
    words = s.work
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(flatten(w)):
            words[i, pipeline.stage(s.work_pipe, t)] = value


@cute.jit
def producer_commit(s, t: Int32):
    """One warp: tells the others the tile that it has written."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(pipeline.full_barrier(s.work_pipe, t))
    cute.arch.sync_warp()


def of_words(spec, words):
    """The WorkTileInfo that `flatten` gave."""
    w, rest = WorkTileInfo(*words[:COMMON]), words[COMMON:]
    if is_split_kv(spec):
        w, rest = w._replace(split=SplitInfo(*rest[:3])), rest[3:]
    return w._replace(pack_factor=rest[0], pack_magic=rest[1]) if rest else w


def consumer_wait(spec, s, t: Int32):
    """One warp: WorkTileInfo of the CTA's t-th tile, until it is released."""
    pipeline.consumer_wait(s.work_pipe, t)
    stage = pipeline.stage(s.work_pipe, t)
    return of_words(spec, [cute.arch.make_warp_uniform(s.work[i, stage]) for i in range(fields(spec))])


def consume(spec, s, t: Int32):
    """One warp: WorkTileInfo of the CTA's t-th tile, which it will not read again."""
    w = consumer_wait(spec, s, t)
    cute.arch.sync_warp()  # all lanes have read before one of them arrives
    pipeline.consumer_release(s.work_pipe, t)
    return w
