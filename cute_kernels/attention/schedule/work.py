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
    count: Int32
    first: Int32


class WorkTileInfo(NamedTuple):
    """A tile, and what every role needs to know of its request. KV blocks: [lo, hi) have a key that a row of the tile
    sees (none where hi <= lo), [full_lo, full_hi) need no mask. split: with schedule "stream_k". Of kernels whose
    tiles say so (`knows_rows`), per_token: rows that a token has, see `geometry`; factor: what makes a `Divisor` of
    these."""

    valid: Int32
    m_block: Int32
    head: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    batch: Int32
    lo: Int32
    hi: Int32
    full_lo: Int32
    full_hi: Int32
    split: Any = None
    per_token: Any = None
    factor: Any = None


COMMON = WorkTileInfo._fields.index("split")  # words of a tile with any schedule


def parts(spec):
    """Whether a tile may be shared among CTAs."""
    return spec.schedule == "stream_k"


def fields(spec):
    """Words of a published tile."""
    return COMMON + parts(spec) * len(SplitInfo._fields) + spec.tile.knows_rows * 2


def allocate(spec, smem):
    """Shared memory of published tiles, each aligned to what a thread stores at once."""
    return smem.allocate_tensor(Int32, cute.make_layout(((fields(spec) + 3) // 4 * 4, STAGES[spec.schedule])), 16)


def flatten(w: WorkTileInfo):
    return (*w[:COMMON], *(w.split or ()), *(() if w.per_token is None else (w.per_token, w.factor)))


@cute.jit
def publish(s, t: Int32, w: WorkTileInfo):
    """One warp: tells the others the CTA's t-th tile, as soon as there is room."""
    pipeline.wait_empty(s.work_pipe, t)
    write(s, t, w)
    announce(s, t)


@cute.jit
def write(s, t: Int32, w: WorkTileInfo):
    """One warp, where there is room: the CTA's t-th tile, of which the others do not know yet."""
    words = s.work
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(flatten(w)):
            words[i, pipeline.stage(s.work_pipe, t)] = value


@cute.jit
def announce(s, t: Int32):
    """One warp: tells the others the tile that it has written."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(pipeline.full(s.work_pipe, t))
    cute.arch.sync_warp()


def of_words(spec, words):
    """The WorkTileInfo that `flatten` gave."""
    w, rest = WorkTileInfo(*words[:COMMON]), words[COMMON:]
    if parts(spec):
        w, rest = w._replace(split=SplitInfo(*rest[:3])), rest[3:]
    return w._replace(per_token=rest[0], factor=rest[1]) if rest else w


def peek(spec, s, t: Int32):
    """One warp: WorkTileInfo of the CTA's t-th tile, until it is released."""
    pipeline.wait_full(s.work_pipe, t)
    stage = pipeline.stage(s.work_pipe, t)
    return of_words(spec, [cute.arch.make_warp_uniform(s.work[i, stage]) for i in range(fields(spec))])


def consume(spec, s, t: Int32):
    """One warp: WorkTileInfo of the CTA's t-th tile, which it will not read again."""
    w = peek(spec, s, t)
    cute.arch.sync_warp()  # all lanes have read before one of them arrives
    pipeline.release(s.work_pipe, t)
    return w
