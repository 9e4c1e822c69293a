"""Which blocks of which tiles a CTA computes: an equal share of all of them, in order.

A tile is up to `spec.rows` tokens of a request, and its blocks are those of 64 keys that one of them sees, counted from
key 0. Each CTA adds up the blocks of all tiles and finds its share by itself, so that nothing is planned before the
launch. The bits of a logit do not depend on the CTA that computes it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import warp
from ...device.clamp import clamp
from ...device.divisor import divide
from . import KEYS
from .roles import roles, threads


class LogitsBarrier(IntEnum):
    """The ids of the kernel's named barriers. SHARE: `members` meet while they find the share of the CTA."""

    SHARE = 1


class Window(NamedTuple):
    """The keys [begin, end) that a token sees; begin == end == 0 if it sees none."""

    begin: Int32
    end: Int32


class Tile(NamedTuple):
    """Tokens [first, first + rows) of the call, of one request."""

    request: Int32
    first: Int32
    rows: Int32


class BlockShare(NamedTuple):
    """The blocks of a CTA: `count` of them, from block number `skip` of a tile on."""

    tile: Int32
    skip: Int32
    count: Int32


@dataclass(frozen=True)
class ShareSmem:
    """Shared memory in which a CTA finds its share. sums: of blocks, per warp. share: `BlockShare`."""

    sums: cute.Tensor
    share: cute.Tensor


def allocate(spec, smem):
    """Allocate `ShareSmem`."""
    sums, share = (
        smem.allocate_tensor(Int32, cute.make_layout(n), 16) for n in (members(spec) // 32, len(BlockShare._fields))
    )
    return ShareSmem(sums, share)


def members(spec) -> int:
    """Return the threads that find the share: all, except those of the `clean` role, which needs none."""
    return threads(spec) - 32 * roles(spec).warps("clean")


def tiles_of_request(spec, a):
    """Return the tiles that a request has."""
    return divide(a.next_n + spec.rows - 1, spec.rows)


def num_tiles(spec, a):
    """Return the number of all tiles."""
    return divide(cutlass.max(a.q.shape[0], 0), a.next_n) * tiles_of_request(spec, a)


def tile_at(spec, a, number) -> Tile:
    """Return the tile with a number."""
    each = tiles_of_request(spec, a)
    request = divide(number, each)
    token = (number - request * each) * spec.rows
    return Tile(request, request * a.next_n + token, cutlass.min(Int32(spec.rows), a.next_n - token))


@cute.jit
def num_keys(a):
    """Return the keys that a request may have; so few that numbers of keys some blocks behind the last one fit."""
    keys = a.k.shape[0]
    if a.table.shape[0] > 0:  # their product may not fit
        keys = Int32(cutlass.min(Int64(a.table.shape[1]) * a.k.shape[1], Int64(0x7FFFFC00)))
    return keys


@cute.jit
def window(a, tile: Tile, row: Int32) -> Window:
    """Return the keys that a token of a tile sees, all of which exist and have a column."""
    begin, end, token = Int32(0), Int32(0), tile.first + row
    if row < tile.rows:
        if a.ends.shape[0] == a.q.shape[0]:
            end = a.ends[token]
        else:
            end = a.ends[tile.request]
            if a.causal != 0:
                end = cutlass.max(end, 0) - (a.next_n - 1) + (token - tile.request * a.next_n)
        keys, columns = num_keys(a), a.out.shape[1]
        if a.starts.shape[0] > 0:
            begin = clamp(a.starts[token], 0, keys)
        last = columns
        if a.compressed != 0:
            last = Int32(cutlass.min(Int64(begin) + columns, Int64(keys)))
        end = cutlass.min(cutlass.min(end, keys), last)
        if begin >= end:
            begin, end = Int32(0), Int32(0)
    return Window(begin, end)


@cute.jit
def blocks_of(spec: cutlass.Constexpr, a, tile: Tile):
    """Return (the first block, the number of blocks) that tokens of a tile see."""
    begin, end = Int32(0x7FFFFFFF), Int32(0)
    for row in cutlass.range_constexpr(spec.rows):
        seen = window(a, tile, Int32(row))
        if seen.begin < seen.end:
            begin, end = cutlass.min(begin, seen.begin), cutlass.max(end, seen.end)
    first, count = Int32(0), Int32(0)
    if begin < end:
        first = begin // KEYS
        count = (end - 1) // KEYS + 1 - first
    return first, count


def bounds(total):
    """Return the blocks [begin, end) of this CTA, of `total` of all CTAs."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    each = divide(total, ctas)
    more = total - each * ctas  # CTAs that have one more
    return tuple(n * each + cutlass.min(n, more) for n in (cta, cta + 1))


@cute.jit
def find_share(spec: cutlass.Constexpr, a, s: ShareSmem):
    """Find the blocks of this CTA. Called by `members` of its threads."""
    # From the number of the warp: if the compiler knows that it is uniform, it keeps descriptors in uniform registers.
    member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    member = warp.select(member > const_expr(roles(spec).first("clean")), member - 1, member)
    tid, tiles = 32 * member + cute.arch.lane_idx(), num_tiles(spec, a)
    each = divide(tiles + const_expr(members(spec) - 1), Int32(members(spec)))
    first = tid * each
    last, mine = cutlass.min(first + each, tiles), Int32(0)
    for number in cutlass.range(first, last, unroll=1):
        mine += blocks_of(spec, a, tile_at(spec, a, number))[1]
    # the sum of all threads before
    before = warp.prefix_sum(mine)
    if cute.arch.lane_idx() == 31:
        s.sums[tid // 32] = before
    if tid == 0:
        s.share.fill(0)
    cute.arch.barrier(barrier_id=LogitsBarrier.SHARE, number_of_threads=const_expr(members(spec)))
    total = Int32(0)
    before -= mine
    for i in cutlass.range_constexpr(members(spec) // 32):
        if i < tid // 32:
            before += s.sums[i]
        total += s.sums[i]
    begin, end = bounds(total)
    if begin < end and before <= begin and begin < before + mine:
        number, count = first, blocks_of(spec, a, tile_at(spec, a, first))[1]
        while before + count <= begin:
            before += count
            number += 1
            count = blocks_of(spec, a, tile_at(spec, a, number))[1]
        s.share[0], s.share[1], s.share[2] = number, begin - before, end - begin
    cute.arch.barrier(barrier_id=LogitsBarrier.SHARE, number_of_threads=const_expr(members(spec)))


def share_of(s: ShareSmem) -> BlockShare:
    """Return the share that was found."""
    return BlockShare(*(cute.arch.make_warp_uniform(s.share[i]) for i in range(len(BlockShare._fields))))
