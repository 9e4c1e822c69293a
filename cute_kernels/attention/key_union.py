"""The union of the keys that neighbouring tokens have chosen, made by a kernel that runs before attention.

Tokens that follow one another choose mostly the same keys. A tile that has the rows of several tokens and walks the
union of their keys gathers a key once for all of them. `kernel` writes the union of each sequence, which consists of
`union_size` consecutive tokens: to `union_slots` the slots, and to `union_tokens` a byte per slot, of which bit t says
that token t of the sequence has chosen it. Attention sets the other scores to -inf (`sm90.scoring.find_keys`).

A CTA makes a union. It has a byte of shared memory for each of up to ROWS rows of the cache, and a round for each such
range between the lowest and the highest slot that the tokens have chosen:

| phase | threads | writes |
| --- | --- | --- |
| `clear` | 16 bytes each | zeros |
| `mark` | all read the lists of all tokens | the bits of the tokens, by atomics |
| `append` | 16 bytes per lane | the rows that have a bit, in ascending order |
| `append_repeated` | a warp per token, if any row repeats | a token's repeated slots |

A slot that a token has chosen twice counts twice: the second one finds its bit set, and gets an entry of its own behind
the others of its range, with the bit of this token alone. Which of two equal entries `mark` meets first is a matter of
chance, but not how many entries are repeated. So `append_repeated` marks the range once more, with a warp that reads
the list of a token in order. The union therefore depends on the lists alone, and has at most as many entries as they.
Numbers that are no slot of the cache, and those behind the ones that count, are left out.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from ..device import copy, warp
from . import geometry
from .operands import K
from .spec import UNION_TOKENS

WARPS = 16
THREADS = 32 * WARPS
CTAS_PER_SM = 3
ROWS = 1 << 16  # rows of the cache that a round looks at: a byte of shared memory each
LANE_WORDS = 4  # words of bytes that a lane reads at once
STEP = 32 * 4 * LANE_WORDS  # rows that a warp reads at once
BATCH = 4  # slots that a thread loads before it looks at one
NO_SLOT = (1 << 31) - 1


class UnionSmem(NamedTuple):
    """Shared memory of a CTA. tokens (LANE_WORDS, ROWS / 16): words, a byte per row of the range. repeated: slots of
    each token that repeat an earlier one. low, high, counts: a number per warp."""

    tokens: cute.Tensor
    repeated: cute.Tensor
    low: cute.Tensor
    high: cute.Tensor
    counts: cute.Tensor


class TokenGroup(NamedTuple):
    """The tokens of a sequence. index: of the sequence. first: its first token in the batch. count: its tokens. rows:
    of the cache."""

    index: Int32
    first: Int32
    count: Int32
    rows: Int64


class SlotRange(NamedTuple):
    """Rows of the cache: `count`, at most ROWS, from `first` on."""

    first: Int32
    count: Int32


def allocate() -> UnionSmem:
    smem = cutlass.utils.SmemAllocator()
    words = smem.allocate_tensor(Uint32, cute.make_layout((LANE_WORDS, ROWS // (4 * LANE_WORDS))), 16)
    each = [smem.allocate_tensor(Int32, cute.make_layout(n), 16) for n in (UNION_TOKENS, WARPS, WARPS, WARPS)]
    return UnionSmem(words, *each)


@cute.jit
def load_slots(a, token: Int32, first: Int32, keys: Int32, slots: cute.Tensor):
    """Load this thread's slots of a token, entries first, first + THREADS, and so on; -1 from entry `keys` on."""
    for i in cutlass.range_constexpr(cute.size(slots)):
        at = first + THREADS * i
        slots[i] = Int32(-1)
        if at < keys:
            slots[i] = a.kv.page_table[token, K, at]


@cute.jit
def bounds(a, s: UnionSmem, group: TokenGroup):
    """Return the lowest and the highest slot that some token has chosen; (NO_SLOT, -1) if there is none."""
    low, high, slots = Int32(NO_SLOT), Int32(-1), cute.make_rmem_tensor(BATCH, Int32)
    for t in cutlass.range(group.count, unroll=1):
        keys = geometry.slots_that_count(a, group.first + t)
        for first in cutlass.range(cute.arch.thread_idx()[0], keys, THREADS * BATCH, unroll=1):
            load_slots(a, group.first + t, first, keys, slots)
            for i in cutlass.range_constexpr(BATCH):
                if slots[i] >= 0 and Int64(slots[i]) < group.rows:
                    low, high = cutlass.min(low, slots[i]), cutlass.max(high, slots[i])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    own, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    if lane == 0:
        s.low[own], s.high[own] = low, high
    cute.arch.barrier()
    low, high = s.low[lane % WARPS], s.high[lane % WARPS]
    return cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")


@cute.jit
def clear(s: UnionSmem, count: Int32):
    """Clear the bytes of `count` rows, and those behind them that `append` reads."""
    zeros = cute.make_rmem_tensor(LANE_WORDS, Uint32)
    zeros.fill(0)
    vectors = (count + STEP - 1) // STEP * (STEP // (4 * LANE_WORDS))
    for i in cutlass.range(cute.arch.thread_idx()[0], vectors, THREADS, unroll=1):
        copy.vector(zeros, s.tokens[None, i])


@cute.jit
def set_bit(s: UnionSmem, rows: SlotRange, slot: Int32, t: Int32):
    """Set the bit of token t in the byte of a slot, unless this is not in the range. Return whether it was set."""
    before, row = Uint32(0), slot - rows.first
    if slot >= rows.first and row < rows.count:
        bit = warp.shift_left(1, 8 * (row & 3) + t)
        before = cute.arch.atomic_or(s.tokens.iterator + (row >> 2), bit, sem="relaxed", scope="cta") & bit
    return before != 0


@cute.jit
def mark(a, s: UnionSmem, group: TokenGroup, rows: SlotRange):
    """Set the bits of all tokens, and count the slots of each that find theirs set."""
    slots = cute.make_rmem_tensor(BATCH, Int32)
    for t in cutlass.range(group.count, unroll=1):
        keys = geometry.slots_that_count(a, group.first + t)
        for first in cutlass.range(0, keys, THREADS * BATCH, unroll=1):
            load_slots(a, group.first + t, first + cute.arch.thread_idx()[0], keys, slots)
            for i in cutlass.range_constexpr(BATCH):
                repeats = cute.arch.vote_ballot_sync(set_bit(s, rows, slots[i], t))
                if repeats != 0 and cute.arch.lane_idx() == 0:
                    more = cute.arch.popc(Uint32(repeats)).to(Int32)
                    cute.arch.atomic_add(s.repeated.iterator + t, more, sem="relaxed", scope="cta")


def chosen_bytes(words):
    """Return a word per word, the top bit of each byte of which says whether the byte is not 0."""
    low = 0x7F7F7F7F
    return [((words[i] & low) + low | words[i]) & 0x80808080 for i in range(LANE_WORDS)]


@cute.jit
def load_bytes(s: UnionSmem, row: Int32, words: cute.Tensor):
    """Load this lane's bytes of the STEP rows from `row` on, and return how many of them are not 0."""
    copy.vector(s.tokens[None, row // (4 * LANE_WORDS) + cute.arch.lane_idx()], words)
    return sum(cute.arch.popc(x).to(Int32) for x in chosen_bytes(words))


@cute.jit
def store_entry(a, group: TokenGroup, entry: Int32, slot: Int32, tokens: Uint32):
    """Store an entry of the union."""
    a.kv.union_slots[group.index, entry] = slot
    a.kv.union_tokens[group.index, entry] = tokens.to(Uint8)


@cute.jit
def append(a, s: UnionSmem, group: TokenGroup, rows: SlotRange, length: Int32):
    """Append the rows of the range that have a bit to the union, which has `length` entries. Return its length. All
    threads call it: it contains a CTA barrier."""
    words, own = cute.make_rmem_tensor(LANE_WORDS, Uint32), Int32(0)
    # the rows of this warp, and how many of them have a bit
    share = (rows.count + WARPS * STEP - 1) // (WARPS * STEP) * STEP
    begin = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * share
    end = cutlass.min(begin + share, rows.count)
    for first in cutlass.range(begin, end, STEP, unroll=1):
        own += load_bytes(s, first, words)
    before, total = warp.sum_before_warp(cute.arch.warp_redux_sync(own, "add"), s.counts, WARPS)
    # their entries
    before += length
    for first in cutlass.range(begin, end, STEP, unroll=1):
        own = load_bytes(s, first, words)
        upto = warp.prefix_sum(own)
        entry, row = before + upto - own, rows.first + first + 4 * LANE_WORDS * cute.arch.lane_idx()
        for i in cutlass.range_constexpr(LANE_WORDS):
            for byte in cutlass.range_constexpr(4):
                tokens = (words[i] >> Uint32(8 * byte)) & Uint32(0xFF)
                if tokens != 0:
                    store_entry(a, group, entry, row + 4 * i + byte, tokens)
                    entry += 1
        before += cute.arch.shuffle_sync(upto, 31)
    return length + total


@cute.jit
def append_repeated(a, s: UnionSmem, group: TokenGroup, rows: SlotRange, length: Int32):
    """Append the slots of the range that repeat an earlier one of their token, in the order of tokens and of their
    lists. The bytes of the range must be 0. Called by all warps, of which each has a token."""
    t, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    if t < group.count:
        entry, below = length, (Uint32(1) << Uint32(lane)) - Uint32(1)
        for other in cutlass.range(t, unroll=1):
            entry += s.repeated[other]
        keys, slots = geometry.slots_that_count(a, group.first + t), cute.make_rmem_tensor(1, Int32)
        for first in cutlass.range(0, keys, 32, unroll=1):
            load_slots(a, group.first + t, first + lane, keys, slots)
            found = Uint32(cute.arch.vote_ballot_sync(set_bit(s, rows, slots[0], t)))
            if found != 0:
                # of equal slots, all repeat an earlier one or, if one did not find the bit, all but the first
                same = cute.arch.match_sync(0xFFFFFFFF, slots[0], "any")
                inside = slots[0] >= rows.first and slots[0] - rows.first < rows.count
                repeats = inside and ((same & ~found) == 0 or (same & below) != 0)
                votes = Uint32(cute.arch.vote_ballot_sync(repeats))
                if repeats:
                    at = entry + cute.arch.popc(votes & below).to(Int32)
                    store_entry(a, group, at, slots[0], Uint32(1) << Uint32(t))
                entry += cute.arch.popc(votes).to(Int32)
            cute.arch.sync_warp()  # the bits of these slots are set before those of the next ones


@cute.kernel
def kernel(spec: cutlass.Constexpr, a):
    """Write the union of the sequence with this CTA's number."""
    s, thread = allocate(), cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()  # with PDL: the previous kernel may write slots and lengths
    cute.arch.griddepcontrol_launch_dependents()  # the attention kernel waits for the end of this one
    index, rows = cute.arch.block_idx()[0], Int64(a.kv.k.shape[0]) * a.kv.k.shape[2]
    first = index * a.kv.union_size
    count = cutlass.min(a.kv.union_size, a.kv.page_table.shape[0] - first)
    group, length = TokenGroup(index, first, count, rows), Int32(0)
    low, high = bounds(a, s, group)
    rounds = (high - low) // ROWS + 1 if high >= low else Int32(0)
    for i in cutlass.range(rounds, unroll=1):
        start = low + i * ROWS
        part = SlotRange(start, cutlass.min(high - start, ROWS - 1) + 1)
        if thread < UNION_TOKENS:
            s.repeated[thread] = Int32(0)
        clear(s, part.count)
        cute.arch.barrier()
        mark(a, s, group, part)
        cute.arch.barrier()
        length = append(a, s, group, part, length)
        repeated = Int32(0)
        for t in cutlass.range_constexpr(UNION_TOKENS):
            repeated += s.repeated[t]
        cute.arch.barrier()  # all warps have read the bytes
        if repeated > 0:
            clear(s, part.count)
            cute.arch.barrier()
            append_repeated(a, s, group, part, length)
            length += repeated
            cute.arch.barrier()
    if thread == 0:
        a.kv.union_lens[index] = length


kernel.set_name_prefix("attention_key_union", remove_cutlass_symbol=True, keep_mangled_name=False)


def launch(spec, a, stream):
    """Launch the kernel that makes the unions, in specs with some. Called on the host."""
    if spec.kv.union:
        kernel(spec, a).launch(
            grid=[geometry.batch_size(a), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=a.schedule.enable_pdl,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )
