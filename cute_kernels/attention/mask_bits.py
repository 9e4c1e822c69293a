"""Custom masks of bits: a bit per query token and key of a sequence, packed into bytes by the caller.

The functions are those of a kind of `custom_mask`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..device import memory, warp
from ..device.clamp import clamp
from . import mask

WORD_BYTES = 4
BATCH = 32  # tokens whose words `join_tokens` loads before it looks at one


class MaskBits(NamedTuple):
    """The custom mask of a sequence. address: of the call's mask. words: number of whole words in it. tail: the bytes
    behind them, as a word. start: the sequence's first bit."""

    address: Int64
    words: Int32
    tail: Uint32
    start: Int64


def source(a, sequence, batch_idx, tail):
    """Return the `MaskBits` of a sequence. Its first byte is clamped."""
    bits = a.mask.custom_mask
    start = clamp(a.mask.mask_starts[batch_idx], 0, bits.shape[0])
    return MaskBits(bits.iterator.toint(), bits.shape[0] // WORD_BYTES, tail, Int64(start) * 8)


@cute.jit
def tail_of(a):
    """Return the bytes behind the last whole word of the call's mask, as a word; zeros follow them. Called by one
    warp."""
    lane, tail, behind = cute.arch.lane_idx(), Uint32(0), a.mask.custom_mask.shape[0] % WORD_BYTES
    if lane < behind:
        tail = Uint32(a.mask.custom_mask[a.mask.custom_mask.shape[0] - behind + lane]) << Uint32(8 * lane)
    return cute.arch.warp_redux_sync(tail, "or")


@cute.jit
def word_at(bits: MaskBits, index: Int32):
    """Return a word of the call's mask, 0 past its end. There is no branch: with MMAs in flight, the compiler would
    wait for each of them."""
    word = memory.load_word_if(bits.address + Int64(index) * WORD_BYTES, index < bits.words)
    return bits.tail if index == bits.words else word


@cute.jit
def visible_word(spec: cutlass.Constexpr, bits: MaskBits, token: Int32, key: Int32, seqlen: mask.SeqlenInfo):
    """Return which of the keys [key, key + 32) a token sees, as bits: those of the custom mask, without the keys that
    another mask hides or that the sequence does not have."""
    # the token's first word and bit do not depend on the block
    first = bits.start + Int64(token) * seqlen.kv_len
    index = Int32(cutlass.min(first >> Int64(5), Int64(bits.words) + 1))
    shift = Int32(first & Int64(31)) + key
    index, shift = index + (shift >> 5), shift & 31
    word = word_at(bits, index) >> Uint32(shift) | warp.shift_left(word_at(bits, index + 1), 32 - shift)
    return without_hidden(spec, word, token, key, seqlen)


@cute.jit
def without_hidden(spec: cutlass.Constexpr, word: Uint32, token: Int32, key: Int32, seqlen: mask.SeqlenInfo):
    """Return the bits of the keys [key, key + 32) without those that another mask hides from a token or that the
    sequence does not have."""
    lo, hi = mask.visible(spec, token, seqlen)
    word &= ~warp.shift_left(0xFFFFFFFF, cutlass.max(hi - key, 0))
    if const_expr(spec.mask.bounded_left):
        word &= warp.shift_left(0xFFFFFFFF, cutlass.max(lo - key, 0))
    return word


def is_aligned(bits, key, seqlen):
    """Return whether one word has the bits of a token for [key, key + 32), whichever token it is."""
    return ((Int32(bits.start) + key) | seqlen.kv_len) & 31 == 0


def is_inside(bits, token, key, seqlen, aligned):
    """Return whether `load_inside` may read the bits of a token, and of those before, for [key, key + 32)."""
    first = bits.start + key + Int64(token) * seqlen.kv_len
    return (first >> Int64(5)) + 1 - Int32(aligned) < bits.words


def load_inside(bits, token, key, seqlen, aligned):
    """Load the words that have a token's bits for [key, key + 32): two, or one if they are known to be aligned. A
    caller may load those of many tokens before it looks at one (`visible_inside`)."""
    first = bits.start + key
    if aligned:
        row = bits.address + (first >> Int64(3))
        return memory.load_words(row + Int64(token) * (seqlen.kv_len >> 3), 0, 1)
    return memory.load_words(bits.address, first + Int64(token) * seqlen.kv_len >> Int64(5), 2)


def visible_inside(spec, bits, words, token, key, seqlen):
    """Return `visible_word` from the words that `load_inside` has returned."""
    word = words[0]
    if len(words) == 2:
        word = warp.shift_right_wide(words[0], words[1], Int32(bits.start) + key + token * seqlen.kv_len)
    return without_hidden(spec, word, token, key, seqlen)


@cute.jit
def join_inside(
    spec: cutlass.Constexpr,
    bits: MaskBits,
    tokens: Any,
    step: cutlass.Constexpr,
    key: Int32,
    seqlen: mask.SeqlenInfo,
    aligned: cutlass.Constexpr,
):
    """Do as `join_tokens` does for BATCH tokens from tokens[0] on; behind tokens[1], that token again. Without a
    branch, so that all loads are in flight together."""
    batch = [cutlass.min(tokens[0] + i * step, tokens[1]) for i in range(BATCH)]
    loaded = [load_inside(bits, token, key, seqlen, aligned) for token in batch]
    some, every = Uint32(0), Uint32(0xFFFFFFFF)
    for words, token in zip(loaded, batch):
        seen = visible_inside(spec, bits, words, token, key, seqlen)
        some, every = some | seen, every & seen
    return some, every


@cute.jit
def join_tokens(
    spec: cutlass.Constexpr, bits: MaskBits, tokens: Any, step: cutlass.Constexpr, key: Int32, seqlen: mask.SeqlenInfo
):
    """Return which of the keys [key, key + 32) some token sees, and which every one sees."""
    some, every = Uint32(0), Uint32(0xFFFFFFFF)
    aligned = is_aligned(bits, key, seqlen)
    for first in cutlass.range(tokens[0], tokens[1] + 1, step * BATCH, unroll=1):
        some_here, every_here = Uint32(0), Uint32(0xFFFFFFFF)
        last = cutlass.min(first + step * (BATCH - 1), tokens[1])
        if not is_inside(bits, last, key, seqlen, aligned):
            for token in cutlass.range(first, last + 1, step, unroll=1):
                seen = visible_word(spec, bits, token, key, seqlen)
                some_here |= seen
                every_here &= seen
        elif aligned:
            some_here, every_here = join_inside(spec, bits, (first, last), step, key, seqlen, True)
        else:
            some_here, every_here = join_inside(spec, bits, (first, last), step, key, seqlen, False)
        some |= some_here
        every &= every_here
    return some, every
