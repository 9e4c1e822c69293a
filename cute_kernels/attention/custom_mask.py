"""The custom mask: a bit per query token and key of a sequence, packed into bytes by the caller.

`mask_blocks` has read the bits once before the attention kernel runs, and the tile leaves out hidden blocks. The kernel
reads the bits of the blocks that are partly hidden (`visible_word`), while their scores are computed, and sets hidden
scores to -inf (`apply`, `apply_words`). The words that it applies have all masks of the call, so `mask.apply` has
nothing to do.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..device import memory, warp
from . import geometry, mask

WORD_BYTES = 4


class MaskBits(NamedTuple):
    """The custom mask of a sequence. address: of the call's mask. words: number of whole words in it. tail: the bytes
    behind them, as a word. start: the sequence's first bit."""

    address: Int64
    words: Int32
    tail: Uint32
    start: Int64


def mask_bits(a, batch_idx, tail):
    """Return the `MaskBits` of a sequence."""
    bits = a.mask.custom_mask
    start = Int64(geometry.mask_start(a, batch_idx)) * 8
    return MaskBits(bits.iterator.toint(), bits.shape[0] // WORD_BYTES, tail, start)


@cute.jit
def tail_of(a):
    """Return the bytes behind the last whole word of the call's mask, as a word; zeros follow them."""
    count, tail = a.mask.custom_mask.shape[0], Uint32(0)
    for e in cutlass.range(count // WORD_BYTES * WORD_BYTES, count, unroll=1):
        tail |= Uint32(a.mask.custom_mask[e]) << Uint32(e % WORD_BYTES * 8)
    return tail


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
    lo, hi = mask.visible(spec, token, seqlen)
    word &= ~warp.shift_left(0xFFFFFFFF, cutlass.max(hi - key, 0))
    if const_expr(spec.mask.bounded_left):
        word &= warp.shift_left(0xFFFFFFFF, cutlass.max(lo - key, 0))
    return word


@cute.jit
def apply(
    s: cute.Tensor,
    r: cutlass.Constexpr,
    word: Uint32,
    cols: cutlass.Constexpr,
    lane_col: Int32,
    lanes: cutlass.Constexpr,
):
    """Apply a custom mask to row r of s: set it to -inf where the bit of column cols[c] + lane_col is 0.

    cols: static. lane_col: the column offset of this lane, less than 8; cols[c] + lane_col must be in the same 32
    columns as cols[c]. word: lane i of the `lanes` neighbours that share the row has the bits of columns 32 i to
    32 i + 31.
    """
    lane = cute.arch.lane_idx()
    mine = [
        cute.arch.shuffle_sync(word, lane // lanes * lanes + i) >> Uint32(lane_col) for i in range(cols[-1] // 32 + 1)
    ]
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        bit = mine[const_expr(cols[c] // 32)] & const_expr(1 << cols[c] % 32)
        s[r, c] = warp.select(bit == 0, -Float32.inf, s[r, c])


@cute.jit
def apply_words(s: cute.Tensor, words: cute.Tensor):
    """Apply a custom mask to the one row of s (1, cols), of which the thread has all columns. words: 32 columns
    each."""
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        bit = words[const_expr(c // 32)] & const_expr(1 << c % 32)
        s[0, c] = warp.select(bit == 0, -Float32.inf, s[0, c])
