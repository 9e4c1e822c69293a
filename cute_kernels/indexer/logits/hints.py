"""Fetch into the L2 what a CTA will read, while the previous kernel may still run: the lengths, the page table and the
first keys of its share.

They may change until that kernel has ended, so that nothing depends on what is read here but these prefetches: a share
is found again from what the previous kernel has left.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import l2, warp
from ...device.divisor import Quotient
from ...device.uncached import UncachedTensor
from . import KEYS, schedule

LANES = 32  # requests, at most, and blocks that are fetched


@cute.jit
def prefetch(spec: cutlass.Constexpr, plan):
    """Fetch the first blocks of the CTA's share, those of its first tile. Called by one warp."""
    a, lane = plan.args, cute.arch.lane_idx()
    tiles = schedule.num_tiles(spec, a)
    if a.boxes != 0 and a.table.shape[0] > 0 and tiles <= LANES:
        fresh = a._replace(**{name: UncachedTensor(getattr(a, name)) for name in ("starts", "ends", "table")})
        first, mine = Int32(0), Int32(0)
        if lane < tiles:
            first, mine = schedule.blocks_of(spec, fresh, schedule.tile_at(spec, a, lane))
        # the first tile of the share
        before = warp.prefix_sum(mine)
        begin, end = schedule.bounds(cute.arch.shuffle_sync(before, LANES - 1))
        before -= mine
        here = before <= begin and begin < before + mine
        owner = cute.arch.vote_ballot_sync(here)
        if begin < end and owner != 0:
            number = cute.arch.popc((owner & -owner) - 1)
            first, before, mine = (cute.arch.shuffle_sync(x, number) for x in (first, before, mine))
            block = begin - before + lane
            if block < cutlass.min(mine, end - before):
                fetch(spec, fresh, plan, schedule.tile_at(spec, a, number).request, first + block)


@cute.jit
def fetch(spec: cutlass.Constexpr, a, plan, request: Int32, block: Int32):
    """Fetch a block of keys of a request, and its scales, if its page exists."""
    size = Quotient(a.k.shape[1], *plan.page_size)
    column = block * KEYS // size
    row, page = block * KEYS - column * size.value, a.table[request, column]
    if page >= 0 and page < a.k.shape[0]:
        address = a.k.iterator.toint() + Int64(page) * a.k.stride[0]
        l2.prefetch(address + Int64(row) * spec.row_bytes, Int32(const_expr(KEYS * spec.row_bytes)))
        l2.prefetch(address + Int64(a.k.shape[1]) * spec.row_bytes + 4 * row, Int32(4 * KEYS))
