"""The dynamic persistent tile scheduler: whole tiles, one CTA each, in LPT (longest processing time first) order.

Dynamic: a CTA starts with the tile of its own index and draws later ones from an atomic counter, so that all CTAs end
together for any lengths. Which CTA computes a tile does not affect the result. The last draw of a launch resets the
counter: no state passes from launch to launch.

LPT between sequences: those with more keys come first, by buckets of powers of two (`length_bucket`), so that the last
tiles are short; in a bucket, in batch order. Tiles with PackGQA, which mostly wait for memory, are interleaved evenly
with the others, which mostly multiply (`interleave`).

LPT and L2 swizzle within a sequence (`lpt_order`): heads are divided into sections, such that K and V of a section fit
in the L2 cache together (`l2_section`). In a section, the last m_block, the longest under a causal mask, comes first,
and all heads of the section work on an m_block before the next one. The last section may exceed the L2 cache: it keeps
at least WAVES * CTAs / tiles of the heads (`whole_sections`), which is WAVES waves of CTAs if the launch has only this
sequence. With fewer heads, its long tiles would start last and end after all others.

To follow the code: warp 0 of load_k (`load.load_kv`) calls `begin` once, then `produce_next` for each tile:
`next_index` draws a tile's number from the counter, and `find` (number -> tile) calls `search`, unless the launch has
one sequence, and `lpt_order` (m_block and head), unless all heads are one section. `search` calls `interleave` and
`locate` (the sequence). A CTA has nothing to compute before its first tile is found, so `find` divides only where it
must: the host has computed what follows from shapes (`geometry.LaunchGeometry`). Every role reads the tile with
`work.consume`. Three numbers are told apart: t, of a tile among the CTA's; launch_tile, in the order of the launch;
seq_tile, within its sequence.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64, const_expr

from ...device import warp
from ...device.divisor import Divisor
from .. import geometry, mask, mask_blocks
from ..geometry import Sequence
from . import policy, work
from .work import WorkTileInfo

SHORT_KV_LEN = 2048  # keys
WAVES = 2
RATIO_ONE = 1 << 31  # the ratio 1.0 in fixed point


class TileSequence(NamedTuple):
    """A sequence as the scheduler sees it: its `geometry.Sequence`, and what follows from it. pack_gqa: 1 if its rows
    are packed. bucket: -1 if it has no tiles, and past the last sequence."""

    sequence: Sequence
    pack_gqa: Int32
    bucket: Int32
    num_tiles: Int32


class SearchCursor(NamedTuple):
    """Where the search for the next tile of a kind (PackGQA or not) begins: at `first_batch_idx`, among the sequences
    of `bucket`; `tiles_before` tiles of the kind come before. lower_bucket: the highest lower bucket seen so far, -1 if
    none."""

    bucket: Int32
    first_batch_idx: Int32
    tiles_before: Int32
    lower_bucket: Int32


class SchedulerSmem(NamedTuple):
    """State of the scheduling warp, which has no registers for it. launch (2,): number of tiles, ratio of packed ones.
    cursors (4, 2): the `SearchCursor` of each kind."""

    launch: cute.Tensor
    cursors: cute.Tensor


def allocate(spec, smem) -> SchedulerSmem | None:
    """Allocate the scheduler's shared memory; return None in kernels with a schedule warp (`stream_k`)."""
    if policy.schedule_warps(spec) > 0:
        return None
    launch, fields = cute.make_layout(2), cute.make_layout((len(SearchCursor._fields), 2))
    return SchedulerSmem(smem.allocate_tensor(Int32, launch, 16), smem.allocate_tensor(Int32, fields, 16))


def whole_sections(heads, section, ctas, tiles):
    """Return the number of sections before the last one, which has at least WAVES * ctas / tiles of the heads. tiles:
    number of tiles of the launch."""
    last = (WAVES * ctas * heads + tiles - 1) // tiles
    return cutlass.max(0, heads - last) // section


def lpt_order(seq_tile, m_blocks, heads, section, whole):
    """Return (m_block, head) of tile `seq_tile` of a sequence. section: heads per section. whole: number of sections
    before the last one."""
    section_idx = cutlass.min(seq_tile // (m_blocks * section), whole)
    rest = seq_tile - section_idx * m_blocks * section
    is_whole = cutlass.min(1, whole - section_idx)  # 1 before the last section, 0 in it
    width = is_whole * section + (1 - is_whole) * (heads - whole * section)
    return m_blocks - 1 - rest // width, section_idx * section + rest % width


def l2_section(kv_len, row_bytes, kv_heads, heads_per_kv, l2_bytes):
    """Return the number of heads per section: the KV heads that fit in l2_bytes, times the tile heads per KV head."""
    fit = cutlass.max(1, l2_bytes // cutlass.max(1, kv_len * row_bytes))
    return cutlass.min(fit, kv_heads) * heads_per_kv


def packed_ratio(packed, total):
    """Return packed / total in units of 1 / RATIO_ONE, rounded up; 0 < packed < total."""
    return Uint32((Uint64(packed) * Uint64(RATIO_ONE) + Uint64(total - 1)) // Uint64(total))


def interleave(tile, ratio):
    """Return how many of the first `tile` tiles are packed, where `ratio` of all tiles are (`packed_ratio`): for `tile`
    = all tiles, exactly the number of packed ones."""
    return Int32(Uint64(Uint32(tile)) * Uint64(ratio) >> Uint64(31))


@cute.jit
def length_bucket(kv_len: Int32):
    """Return the bucket of a length: one per power of two, higher for more keys. Short sequences, which do not decide
    when a launch ends, share one: a search reads all sequences once per bucket."""
    return warp.bits(Float32(cutlass.max(kv_len, SHORT_KV_LEN))) >> 23


@cute.jit
def load_sequence(spec: cutlass.Constexpr, a, b: Int32):
    """Return sequence b."""
    sequence, pack_gqa, bucket, count = geometry.no_sequence(spec), Int32(0), Int32(-1), Int32(0)
    if b < geometry.batch_size(a):
        sequence = geometry.load_sequence(a, b)
        pack_factor = geometry.pack_factor(spec, a, sequence.q_len)
        pack_gqa = cutlass.min(pack_factor - 1, 1)
        rows = geometry.num_rows(sequence.q_len, pack_factor)
        m = geometry.tile_m(spec, rows)
        count = (rows + m - 1) // m * geometry.num_tile_heads(a, pack_gqa)
        if const_expr(spec.tile.o_tiles > 1):
            count *= spec.tile.o_tiles
        if count > 0:
            bucket = length_bucket(sequence.kv_len)
    return TileSequence(sequence, pack_gqa, bucket, count)


def no_sequence(spec):
    """Return a sequence without tiles."""
    return TileSequence(geometry.no_sequence(spec), *(Int32(0),) * 3)


@cute.jit
def save_cursor(smem: SchedulerSmem, pack_gqa, cursor: SearchCursor):
    """Save the cursor of one kind of tiles. Called by one warp."""
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(cursor):
            smem.cursors[i, pack_gqa] = value
    cute.arch.sync_warp()


@cute.jit
def begin(spec: cutlass.Constexpr, a, smem: SchedulerSmem):
    """Count the tiles of the launch and set up the cursors: reads all sequences, if there are several. Called by one
    warp."""
    if geometry.batch_size(a) > 1:
        begin_search(spec, a, smem)


@cute.jit
def begin_search(spec: cutlass.Constexpr, a, smem: SchedulerSmem):
    """Do the work of `begin` for several sequences."""
    count, packed_tiles, top, top_packed = Int32(0), Int32(0), Int32(-1), Int32(-1)
    for b in cutlass.range(cute.arch.lane_idx(), geometry.batch_size(a), 32, unroll=1):
        sequence = load_sequence(spec, a, b)
        count += sequence.num_tiles
        if sequence.pack_gqa != 0:
            packed_tiles += sequence.num_tiles
            top_packed = cutlass.max(top_packed, sequence.bucket)
        else:
            top = cutlass.max(top, sequence.bucket)
    # the launch's tiles and the highest bucket of each kind
    count, packed_tiles = cute.arch.warp_redux_sync(count, "add"), cute.arch.warp_redux_sync(packed_tiles, "add")
    top, top_packed = cute.arch.warp_redux_sync(top, "max"), cute.arch.warp_redux_sync(top_packed, "max")
    ratio = Uint32(0)
    if packed_tiles == count:
        ratio = Uint32(RATIO_ONE)
    elif packed_tiles > 0:
        ratio = packed_ratio(packed_tiles, count)
    if cute.arch.lane_idx() == 0:
        smem.launch[0], smem.launch[1] = count, ratio.to(Int32)
    for pack_gqa, bucket in enumerate((top, top_packed)):
        save_cursor(smem, pack_gqa, SearchCursor(bucket, Int32(0), Int32(0), Int32(-1)))


@cute.jit
def locate(spec: cutlass.Constexpr, a, pack_gqa: Int32, kind_tile: Int32, cursor: SearchCursor):
    """Find tile number `kind_tile` of a kind, reading 32 sequences at a time. Called by one warp.

    Return (the tile's number in its sequence; the `TileSequence`; batch_idx, which is batch_size if the lengths have
    changed since `begin`; the next `SearchCursor`).
    """
    lane, batch_size = cute.arch.lane_idx(), geometry.batch_size(a)
    bucket, first, before, lower = cursor
    sequence, mine, upto, searching = no_sequence(spec), Int32(0), Int32(0), True
    while searching:
        sequence = load_sequence(spec, a, first + lane)
        mine = Int32(0)
        if sequence.pack_gqa == pack_gqa:
            if sequence.bucket == bucket:
                mine = sequence.num_tiles
            elif sequence.bucket < bucket:
                lower = cutlass.max(lower, sequence.bucket)
        upto = warp.prefix_sum(mine)
        # go on to the next 32 sequences, or to the next lower bucket
        passed = cute.arch.shuffle_sync(upto, 31)
        searching = kind_tile >= before + passed
        if searching:
            before += passed
            first += 32
            if first >= batch_size:
                bucket, first, lower = cute.arch.warp_redux_sync(lower, "max"), Int32(0), Int32(-1)
                searching = bucket >= 0
    # the lane that has the tile
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= kind_tile - before))
    seq_tile = kind_tile - before - cute.arch.shuffle_sync(upto - mine, owner)
    found = warp.shuffle_record(sequence, owner)
    batch_idx = first + owner if owner < 32 else batch_size
    return seq_tile, found, batch_idx, SearchCursor(bucket, first, before, cute.arch.warp_redux_sync(lower, "max"))


@cute.jit
def search(spec: cutlass.Constexpr, a, launch_tile: Int32, smem: SchedulerSmem):
    """Find tile `launch_tile` among the tiles of several sequences. Called by one warp.

    Return (the launch's number of tiles; 1 if it has this tile, else 0; the tile's number in its sequence; the
    `TileSequence`; batch_idx).
    """
    is_valid, seq_tile, batch, sequence = Int32(0), Int32(0), Int32(0), no_sequence(spec)
    num_tiles, ratio = smem.launch[0], smem.launch[1].to(Uint32)
    if launch_tile < num_tiles:
        is_valid, packed_before = Int32(1), interleave(launch_tile, ratio)
        pack_gqa = interleave(launch_tile + 1, ratio) - packed_before
        # the tile's number among those of its kind: packed_before if packed, else launch_tile - packed_before
        kind_tile = launch_tile - packed_before + pack_gqa * (2 * packed_before - launch_tile)
        cursor = SearchCursor(*(smem.cursors[i, pack_gqa] for i in range(len(SearchCursor._fields))))
        seq_tile, sequence, batch, cursor = locate(spec, a, pack_gqa, kind_tile, cursor)
        save_cursor(smem, pack_gqa, cursor)
        if batch >= geometry.batch_size(a):
            is_valid = Int32(0)
    return num_tiles, is_valid, seq_tile, sequence, batch


@cute.jit
def next_index(a, t: Int32):
    """Return the number, in the launch, of this CTA's t-th tile. Called by one warp. The first is the CTA's own index;
    later ones come from the launch's counter, which hands out as many numbers as the launch has tiles. Without a
    counter, tiles are assigned statically, with a stride of the grid."""
    ctas = cute.arch.grid_dim()[0]
    launch_tile = t * ctas + cute.arch.block_idx()[0]
    if t > 0 and a.schedule.counter_base >= 0:
        got = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = (a.schedule.counters.iterator + a.schedule.counter_base).llvm_ptr
            got = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        launch_tile = ctas + cute.arch.shuffle_sync(got, 0)
    return launch_tile


@cute.jit
def find(spec: cutlass.Constexpr, a, launch_tile: Int32, smem: SchedulerSmem):
    """Return the `WorkTileInfo` of tile `launch_tile` of the launch, and the launch's number of tiles. Called by one
    warp."""
    is_valid, m_block, head, batch, seq_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    sequence, num_tiles = no_sequence(spec), Int32(0)
    # tile of the launch -> sequence
    if geometry.batch_size(a) == 1:
        # the only sequence
        sequence, seq_tile = load_sequence(spec, a, Int32(0)), launch_tile
        num_tiles = sequence.num_tiles
        if launch_tile < num_tiles:
            is_valid = Int32(1)
    else:
        num_tiles, is_valid, seq_tile, sequence, batch = search(spec, a, launch_tile, smem)
    own = sequence.sequence
    pack_factor = geometry.pack_factor(spec, a, own.q_len)
    rows = geometry.num_rows(own.q_len, pack_factor)
    m = geometry.tile_m(spec, rows)
    # tile of the sequence -> (o_tile, m_block, head); tiles of the same rows are neighbours, so that L2 holds their K
    o_tile = None
    if const_expr(spec.tile.o_tiles > 1):
        o_tile, seq_tile = seq_tile % spec.tile.o_tiles, seq_tile // spec.tile.o_tiles
    if is_valid != 0:
        m_blocks, heads = (rows + m - 1) // m, geometry.tile_heads_quotient(a, sequence.pack_gqa)
        # all heads are one section
        m_block, head = m_blocks - 1 - seq_tile // heads, seq_tile % heads
        if own.kv_len > a.launch.l2_keys:
            each = geometry.qhead_per_kvhead(a) + 1 - pack_factor  # tile heads per KV head
            row_bytes = geometry.kv_row_bytes(spec)
            section = l2_section(own.kv_len, row_bytes, a.kv.k.shape[1], each, spec.tile.l2_bytes)
            if section < heads.value:
                whole = whole_sections(heads.value, section, cute.arch.grid_dim()[0], num_tiles)
                m_block, head = lpt_order(seq_tile, m_blocks, heads.value, section, whole)
    seqlen = mask.seqlen_info(spec, a, own)
    magic = geometry.pack_magic(sequence.pack_gqa, a.launch.group_magic)
    first, last = geometry.tile_tokens(m_block, m, own.q_len, Divisor(pack_factor, magic))
    blocks = (*mask.kv_range(spec, first, last, seqlen), *mask.full_range(spec, first, last, seqlen))
    w = WorkTileInfo(is_valid, m_block, head, own, batch, *blocks)
    if const_expr(spec.mask.custom):
        row, count, num_full = mask_blocks.listed_blocks(spec, a, own.q_start, batch, m_block)
        w = w._replace(n_block_min=Int32(0), n_block_max=count, list_row=row)
        w = w._replace(n_block_full_min=Int32(0), n_block_full_max=num_full)
    return w._replace(pack_factor=pack_factor, pack_magic=magic, o_tile=o_tile), num_tiles


@cute.jit
def produce_next(spec: cutlass.Constexpr, a, s, t: Int32):
    """Find the CTA's t-th tile and produce it. Called by one warp. A tile that is not valid ends every role's loop."""
    launch_tile = next_index(a, t)
    w, num_tiles = find(spec, a, launch_tile, s.scheduler)
    counters = a.schedule.counters
    if w.is_valid == 0 and t > 0 and a.schedule.counter_base >= 0:
        if cute.arch.lane_idx() == 0 and launch_tile == cute.arch.grid_dim()[0] + num_tiles - 1:
            counters[a.schedule.counter_base] = 0  # this was the launch's last draw
    work.produce(s, t, w)
