"""The named barriers of all attention kernels. Each has ids of its own, so that code of several owners can meet in one
kernel. Id 0 is that of `cute.arch.barrier()`, which all threads of a CTA pass."""

from enum import IntEnum

IDS = 16  # of a CTA, by hardware


class NamedBarrier(IntEnum):
    """The first id of each barrier; `COUNTS` says how many it has."""

    WARP_SCHEDULER = 1  # + index of the warpgroup whose turn it is to issue MMAs (sm90)
    WARPGROUP = 4  # + index of the mma warpgroup: its 128 threads (sm90)
    MMA = 7  # all mma threads (sm90)
    SPLITS_STORED = 8  # the warps that store, record or merge splits: all splits of the CTA are stored
    SPLITS_COUNTED = 9  # the same warps: the splits are counted, so that it is known which tiles to merge
    PROLOGUE = 10  # the warps with a prologue (`pdl`)
    VOTES = 11  # + half of the tile: the votes of its 128 threads on a block (sm100)


COUNTS = {NamedBarrier.WARP_SCHEDULER: 3, NamedBarrier.WARPGROUP: 3, NamedBarrier.VOTES: 2}  # ids, if not one
