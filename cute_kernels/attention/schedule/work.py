"""The pipe of tiles: one warp of a CTA finds a tile and publishes it, all others read it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...device import pipe, warp
from .. import geometry

STAGES = {"tiles": 2, "stream_k": 4}  # published and not released: one worked on, one loaded; decoding's stay longer


class Split(NamedTuple):
    """slot: where the part of a tile goes, whole tiles have -1; count: parts of the tile; first: the CTA, or with
    blocks_per_split the slot, of the first part."""

    slot: Int32
    count: Int32
    first: Int32


class Work(NamedTuple):
    """A tile, and what every role needs to know of its request. KV blocks: [lo, hi) have a key that a row of the tile
    sees (none where hi <= lo), [full_lo, full_hi) need no mask. split: with schedule "stream_k"."""

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


class RequestTiles(NamedTuple):
    """Zeros past the last request."""

    q_start: Int32
    q_len: Int32
    tiles: Int32
    each: Int32  # units of a tile


class Search(NamedTuple):
    """Where a search for a later unit may begin: a request, and the units of the requests before it."""

    request: Int32
    before: Int32


class Found(NamedTuple):
    """The request that a unit belongs to. valid: 0 past the last unit. index: the unit's, in the request."""

    valid: Int32
    request: Int32
    index: Int32
    q_start: Int32
    q_len: Int32
    each: Int32


def fields(spec):
    """Words of a published tile."""
    return len(Work._fields) - 1 + (len(Split._fields) if spec.schedule == "stream_k" else 0)


def allocate(spec, smem):
    """Shared memory of published tiles, each aligned to what a thread stores at once."""
    return smem.allocate_tensor(Int32, cute.make_layout(((fields(spec) + 3) // 4 * 4, STAGES[spec.schedule])), 16)


def flatten(w: Work):
    return (*w[:-1], *(w.split or ()))


@cute.jit
def locate(spec: cutlass.Constexpr, a, unit: Int32, search: Search, request_tiles: cutlass.Constexpr):
    """One warp: (Found, the next Search), 32 requests at a time from search.request on. request_tiles(spec, a, b): of
    request b."""
    lane, batch = cute.arch.lane_idx(), geometry.batch(a)
    start, before = search.request, search.before
    q_start, q_len, tiles, each, upto = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    searching = start < batch
    while searching:
        q_start, q_len, tiles, each = request_tiles(spec, a, start + lane)
        upto = warp.prefix_sum(tiles * each)
        total = cute.arch.shuffle_sync(upto, 31)
        searching = unit >= before + total
        if searching:
            before += total
            start += 32
            searching = start < batch
    index = unit - before
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= index))
    valid = Int32(0)
    if owner < 32 and start + owner < batch:
        valid = Int32(1)
    index -= cute.arch.shuffle_sync(upto - tiles * each, owner)
    q_start, q_len = cute.arch.shuffle_sync(q_start, owner), cute.arch.shuffle_sync(q_len, owner)
    each = cute.arch.shuffle_sync(each, owner)
    return Found(valid, start + owner, index, q_start, q_len, each), Search(start, before)


@cute.jit
def publish(s, t: Int32, w: Work):
    """One warp: tells the others the CTA's t-th tile, as soon as there is room."""
    pipe.wait_empty(s.work_pipe, t)
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(flatten(w)):
            s.work[i, pipe.stage(s.work_pipe, t)] = value
        cute.arch.mbarrier_arrive(pipe.full(s.work_pipe, t))
    cute.arch.sync_warp()


def peek(spec, s, t: Int32):
    """One warp: Work of the CTA's t-th tile, until it is released."""
    pipe.wait_full(s.work_pipe, t)
    stage = pipe.stage(s.work_pipe, t)
    values = [cute.arch.make_warp_uniform(s.work[i, stage]) for i in range(fields(spec))]
    count = len(Work._fields) - 1
    return Work(*values[:count])._replace(split=Split(*values[count:]) if values[count:] else None)


def consume(spec, s, t: Int32):
    """One warp: Work of the CTA's t-th tile, which it will not read again."""
    w = peek(spec, s, t)
    cute.arch.sync_warp()  # all lanes have read before one of them arrives
    pipe.release(s.work_pipe, t)
    return w
