"""The named barriers of all attention kernels. Each has ids of its own, so that code of several owners can meet in one
kernel. Id 0 is that of `cute.arch.barrier()`, which all threads of a CTA pass."""

from enum import IntEnum

IDS = 16  # of a CTA, by hardware


class NamedBarrier(IntEnum):
    """The first id of each barrier.

    WARP_SCHEDULER: an mma warpgroup of sm90 waits at the id of its index for its turn to issue MMAs, or for P of
    the other one (`sm90.turns`). WARPGROUP: the 128 threads of an mma warpgroup of sm90, or of a group of score
    warps of few rows (`latent`), meet at the id of its index. MMA: all mma threads of sm90 meet. SPLITS_STORED: the
    warps that merge splits wait until the CTA has stored its own. SPLITS_COUNTED: they wait until these are
    counted, and then know which tiles to merge. PROLOGUE: the warps that begin before the previous kernel has ended
    meet (`pdl`). VOTES: the 128 threads of a half of a tile of sm100 meet at the id of its number when they have
    voted. SCORES: all threads of a score role meet. MAXIMA: an mma warpgroup of sm90 (`sm90.turns`), or a group of
    score warps of few rows, waits at the id of the other one's index for the maxima of rows of that one.
    """

    WARP_SCHEDULER = 1
    WARPGROUP = 4
    MMA = 7
    SPLITS_STORED = 8
    SPLITS_COUNTED = 9
    PROLOGUE = 10
    VOTES = 11
    SCORES = 13
    MAXIMA = 14


# others have one id
COUNTS = {NamedBarrier.WARP_SCHEDULER: 3, NamedBarrier.WARPGROUP: 3, NamedBarrier.VOTES: 2, NamedBarrier.MAXIMA: 2}
