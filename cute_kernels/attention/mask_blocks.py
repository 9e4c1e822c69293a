"""The KV blocks that a tile visits under a custom mask, found on the device by a kernel that runs before attention.

Without a custom mask, a tile visits a range of blocks that follows from lengths. A custom mask may hide any blocks, so
`kernel` reads the bits once and writes a list for each tile (of all heads): the blocks in which some row sees some key.
Blocks that need no mask, because every row sees every key, come first, and the masked ones behind them. The roles of
the attention kernel then count positions in the list, from the highest to 0, where they otherwise count blocks:
`n_block_at` turns a position into a block. With 8,192 causal tokens given as bits, half of the blocks are left out, and
all but one of a tile's need no mask.

A row of `mask_blocks`, the scratch memory of the lists, belongs to a tile (`list_row`). It has the number of listed
blocks, the number of those that need no mask, a word of the mask (`tail_of` of its kind), then N entries. The
unmasked blocks begin at entry 0, ascending. The masked ones begin at entry N - 1, and each next higher block is one
entry further in front. N is at least the number of blocks of a sequence, so the two never meet.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import warp
from ..device.clamp import clamp
from ..device.divisor import Divisor, divide
from . import custom_mask, geometry, mask
from .spec import MASK_LIST_HEADER, PACK_GQA_MAX_GROUP, PACK_GQA_MAX_Q

# Warps of a CTA: neighbouring lanes read neighbouring words of a token, so a warp reads several blocks at once; SETS
# warps read other blocks, and SHARES warps the same blocks of other tokens.
SHARES, SETS = 2, 8
WARPS = SHARES * SETS
TAIL = 2  # the word of `custom_mask.tail_of`
WORD = 32  # keys per word of the mask
SEEN, HIDDEN = 1, 2  # bits of a word's state: some token sees some key of it; some does not. Blocks have those of words


class ListedBlocks(NamedTuple):
    """The list of a tile: its row of `mask_blocks`, the number of its blocks, and of those that need no mask."""

    row: Int32
    count: Int32
    num_full: Int32


def most_rows(a):
    """Return the most rows that a token has in tiles of some sequence: those of its KV head if it may be packed."""
    group = geometry.qhead_per_kvhead(a)
    return 1 + cutlass.min(cutlass.max(PACK_GQA_MAX_GROUP + 1 - group, 0), 1) * (group - 1)


def first_row(spec, a, q_start, batch_idx):
    """Return the row of the first tile of a sequence. It leaves room for as many tiles as the tokens before can have,
    so that tiles share no row, and reads no other sequence."""
    return q_start * most_rows(a) // spec.tile.m_choices[0] + batch_idx


def list_row(spec, a, q_start, batch_idx, m_block):
    """Return the row of a tile, clamped: sequences that overlap, which no caller may pass, may name the same rows."""
    return clamp(first_row(spec, a, q_start, batch_idx) + m_block, 0, a.mask.mask_blocks.shape[0] - 1)


def listed_blocks(spec, a, q_start, batch_idx, m_block):
    """Return the `ListedBlocks` of a tile, for the scheduler."""
    row, entries = list_row(spec, a, q_start, batch_idx, m_block), a.mask.mask_blocks.shape[1] - MASK_LIST_HEADER
    count = clamp(a.mask.mask_blocks[row, 0], 0, entries)
    return ListedBlocks(row, count, clamp(a.mask.mask_blocks[row, 1], 0, count))


def n_block_at(spec, a, w, position):
    """Return the KV block that a tile visits at a position: the position itself, unless there is a custom mask. The
    block is clamped to those of the sequence; a position below 0 gives any of them."""
    if not spec.mask.custom:
        return position
    num_full, entries = w.n_block_full_max, a.mask.mask_blocks.shape[1] - MASK_LIST_HEADER
    masked = cutlass.min(cutlass.max(position - num_full + 1, 0), 1)  # 1 behind the full blocks, else 0
    entry = position + masked * (entries - 1 + num_full - 2 * position)
    found = a.mask.mask_blocks[w.list_row, MASK_LIST_HEADER + clamp(entry, 0, entries - 1)]
    return clamp(found, 0, cutlass.max((w.sequence.kv_len + spec.tile.n - 1) // spec.tile.n - 1, 0))


def mask_source(spec, a, w):
    """Return what the words of the custom mask follow from, for the sequence of a tile."""
    tail = Uint32(a.mask.mask_blocks[w.list_row, TAIL])
    return custom_mask.of(spec).source(a, w.sequence, w.batch_idx, tail)


def num_m_blocks(spec, a, q_len):
    """Return the number of tiles of a sequence of q_len tokens, of all heads."""
    rows = geometry.num_rows(q_len, geometry.pack_factor(spec, a, q_len))
    m = geometry.tile_m(spec, rows)
    return divide(rows + m - 1, m)


@cute.jit
def find_sequence(spec: cutlass.Constexpr, a, row: Int32):
    """Return the last sequence that `row` belongs to, -1 if there is none. Called by one warp."""
    found = Int32(-1)
    for b in cutlass.range(cute.arch.lane_idx(), geometry.batch_size(a), 32, unroll=1):
        sequence = geometry.load_sequence(a, b)
        first = first_row(spec, a, sequence.q_start, b)
        if row >= first and row < first + num_m_blocks(spec, a, sequence.q_len):
            found = b
    return cute.arch.warp_redux_sync(found, "max")


@cute.jit
def find_tile(spec: cutlass.Constexpr, a, tile: Int32):
    """Return the sequence of the tile with this number in the launch, -1 if there is none, its number in the sequence,
    and the launch's number of tiles. Lane i counts the tiles of the sequences i, i + 32 and so on. Called by one
    warp."""
    lane, batch_size, count = cute.arch.lane_idx(), geometry.batch_size(a), Int32(0)
    for b in cutlass.range(lane, batch_size, 32, unroll=1):
        count += num_m_blocks(spec, a, geometry.load_sequence(a, b).q_len)
    upto = warp.prefix_sum(count)
    # the sequence, among those of the lane that has the tile
    batch_idx, m_block, rest = Int32(-1), Int32(0), tile - upto + count
    for b in cutlass.range(lane, batch_size, 32, unroll=1):
        count = num_m_blocks(spec, a, geometry.load_sequence(a, b).q_len)
        if rest >= 0 and rest < count:
            batch_idx, m_block = b, rest
        rest -= count
    batch_idx, m_block = (cute.arch.warp_redux_sync(x, "max") for x in (batch_idx, m_block))
    return batch_idx, m_block, cute.arch.shuffle_sync(upto, 31)


def words_of_block(spec):
    """Return the number of words that a token has in a block."""
    return (spec.tile.n + WORD - 1) // WORD


@cute.jit
def state_of_word(spec: cutlass.Constexpr, source: Any, tokens: Any, word: Int32, hi: Int32, seqlen: mask.SeqlenInfo):
    """Return the state of a word of the tile, for every SHARES-th token from tokens[0] to tokens[1]. word: its number,
    counted from the word of block 0. Blocks from `hi` on have none."""
    words = const_expr(words_of_block(spec))
    tail = const_expr(spec.tile.n % WORD or WORD)  # columns of a block's last word
    n_block, column, inside = divide(word, words), word % words, Uint32(0xFFFFFFFF)
    if column == words - 1:
        inside = Uint32((1 << tail) - 1)
    some, every = Uint32(0), Uint32(0xFFFFFFFF)
    if n_block < hi:
        key = n_block * spec.tile.n + column * WORD
        some, every = custom_mask.of(spec).join_tokens(spec, source, tokens, SHARES, key, seqlen)
    state = Int32(0)
    if some & inside != 0:
        state = Int32(SEEN)
    if ~every & inside != 0:
        state |= HIDDEN
    return state


@cute.jit
def state_of_block(spec: cutlass.Constexpr, states: cute.Tensor, block: Int32):
    """Return the state of a block of this round, 0 past its end. states: (share, set and lane of a word)."""
    state, words = Int32(0), const_expr(words_of_block(spec))
    per_warp = const_expr(32 // words)
    if block < per_warp * SETS:
        first = block // per_warp * 32 + block % per_warp * words
        for share in cutlass.range_constexpr(SHARES):
            for column in cutlass.range_constexpr(words):
                state |= states[share, first + column]
    return state


@cute.jit
def list_blocks(spec: cutlass.Constexpr, a, states: cute.Tensor, batch_idx: Int32, m_block: Int32, tail: Uint32):
    """Write the list of a tile. Called by all warps of the CTA: a round finds the states of as many blocks as the warps
    read at once, and warp 0 appends them."""
    warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    sequence = geometry.load_sequence(a, batch_idx)
    row, seqlen = first_row(spec, a, sequence.q_start, batch_idx) + m_block, mask.seqlen_info(spec, a, sequence)
    # the lists of sequences that overlap may have the same row: that of the last sequence stays
    writes = False
    if warp_idx == 0 and row < a.mask.mask_blocks.shape[0]:
        writes = find_sequence(spec, a, row) == batch_idx
    pack_factor = geometry.pack_factor(spec, a, sequence.q_len)
    magic = geometry.pack_magic(cutlass.min(pack_factor - 1, 1), a.launch.group_magic)
    m = geometry.tile_m(spec, geometry.num_rows(sequence.q_len, pack_factor))
    tokens = geometry.tile_tokens(m_block, m, sequence.q_len, Divisor(pack_factor, magic))
    lo, hi = mask.kv_range(spec, tokens[0], tokens[1], seqlen)
    entries = a.mask.mask_blocks.shape[1] - MASK_LIST_HEADER
    hi, source = cutlass.min(hi, entries), custom_mask.of(spec).source(a, sequence, batch_idx, tail)
    out, num_full, num_masked = cute.domain_offset((row, 0), a.mask.mask_blocks), Int32(0), Int32(0)
    per_warp = const_expr(32 // words_of_block(spec))
    share, mine = warp_idx % SHARES, warp_idx // SHARES
    for first in cutlass.range(lo, hi, per_warp * SETS, unroll=1):
        # the states of the words of this round
        state, word = Int32(0), (first + mine * per_warp) * words_of_block(spec) + lane
        if lane < per_warp * words_of_block(spec):
            state = state_of_word(spec, source, (tokens[0] + share, tokens[1]), word, hi, seqlen)
        states[share, mine * 32 + lane] = state
        cute.arch.barrier()
        # append the blocks that some token sees
        if writes:
            before = (Uint32(1) << Uint32(lane)) - Uint32(1)
            for piece in cutlass.range(0, per_warp * SETS, 32, unroll=1):
                state, n_block = state_of_block(spec, states, piece + lane), first + piece + lane
                full = cute.arch.vote_ballot_sync(state == SEEN)
                masked = cute.arch.vote_ballot_sync(state == SEEN | HIDDEN)
                if state == SEEN:
                    out[0, MASK_LIST_HEADER + num_full + cute.arch.popc(Uint32(full) & before).to(Int32)] = n_block
                if state == SEEN | HIDDEN:
                    back = num_masked + cute.arch.popc(Uint32(masked) & before).to(Int32)
                    out[0, MASK_LIST_HEADER + entries - 1 - back] = n_block
                num_full += cute.arch.popc(Uint32(full)).to(Int32)
                num_masked += cute.arch.popc(Uint32(masked)).to(Int32)
        cute.arch.barrier()
    if writes and lane == 0:
        out[0, 0], out[0, 1], out[0, TAIL] = num_full + num_masked, num_full, Int32(tail)


@cute.kernel
def kernel(spec: cutlass.Constexpr, a):
    """Write the list of the tile with this CTA's number. If sequences overlap, the launch may have more tiles than
    CTAs: the CTA then also writes the lists of the tiles a grid size, two grid sizes and so on behind it."""
    smem = cutlass.utils.SmemAllocator()
    states = smem.allocate_tensor(Int32, cute.make_layout((SHARES, 32 * SETS), stride=(32 * SETS, 1)), 16)
    cute.arch.griddepcontrol_wait()  # with PDL: the previous kernel may write lengths and bits
    cute.arch.griddepcontrol_launch_dependents()  # the attention kernel waits for the end of this one
    number, total, tail = cute.arch.block_idx()[0], Int32(0), custom_mask.of(spec).tail_of(a)
    searching = True
    while searching:
        batch_idx, m_block, total = find_tile(spec, a, number)
        if batch_idx >= 0:
            list_blocks(spec, a, states, batch_idx, m_block, tail)
        number += cute.arch.grid_dim()[0]
        searching = number < total


def num_tiles(spec, a):
    """Return the most tiles that sequences which do not overlap can have."""
    tokens, batch = a.query.q.shape[0], geometry.batch_size(a)
    packed = cutlass.min(tokens, PACK_GQA_MAX_Q * batch)  # tokens of packed tiles
    return (tokens + packed * (most_rows(a) - 1)) // spec.tile.m_choices[0] + batch


kernel.set_name_prefix("attention_mask_blocks", remove_cutlass_symbol=True, keep_mangled_name=False)


def launch(spec, a, stream):
    """Launch the kernel that writes the lists, in specs with a custom mask. Called on the host."""
    if spec.mask.custom:
        kernel(spec, a).launch(
            grid=[num_tiles(spec, a), 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=a.schedule.enable_pdl,
            # 64 registers a thread: two CTAs fit on an SM. Left alone, ptxas takes 40 and waits for words one by one.
            max_number_threads=[1024, 1, 1],
            min_blocks_per_mp=1,
        )
