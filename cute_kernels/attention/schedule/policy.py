"""Consequences of the schedule of a spec for the rest of a kernel. Only this folder tests the names of schedules.

This module needs no DSL, because `args` is read without it.
"""

from typing import Any

# Stages of work_pipe. With 2, one tile is computed while the next one is loaded. Stream-K has 4, because the mma warps
# of decode release a tile only when its output is stored.
WORK_STAGES = {"tiles": 2, "stream_k": 4}


def is_split_kv(spec: Any) -> bool:
    """Return whether several CTAs may share a tile, each with some of its keys. Such a kernel has scratch for partial
    results, and its tiles have a `work.SplitInfo`."""
    return bool(spec.schedule == "stream_k")


def prefers_whole_tiles(spec: Any) -> bool:
    """Return whether CTAs take whole tiles if all tiles are equal (`ScheduleArgs.whole_tiles`)."""
    return is_split_kv(spec) and bool(spec.tile.prefers_whole_tiles)


def packs_all_tiles(spec: Any) -> bool:
    """Return whether every tile is packed (PackGQA), so that a tile's head is a KV head; otherwise only tiles of
    sequences with few query tokens are."""
    return is_split_kv(spec)


def groups_heads_by_l2(spec: Any) -> bool:
    """Return whether the order of tiles depends on how many keys fit in the L2 cache."""
    return not is_split_kv(spec)


def schedule_warps(spec: Any) -> int:
    """Return the number of warps, 1 or 0, that only find tiles. With 0, a load warp finds them meanwhile."""
    return int(is_split_kv(spec))


def work_stages(spec: Any) -> int:
    """Return the number of stages of work_pipe."""
    return WORK_STAGES[spec.schedule]
