"""Custom masks of ranges: a token sees what the causal mask shows it and, in addition, an inclusive range of keys.

Either part has a window of its own: keys too far before the token's position are not seen. The functions are those of a
kind of `custom_mask`. The range of a token is read where a word is made, two integers from the caches; nothing of the
mask is stored per key.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import warp
from ..device.clamp import clamp
from . import mask
from .mask_state import HIDDEN, SEEN

SHARES = 16  # warps that look at the same blocks: few blocks, many tokens


class TokenRanges(NamedTuple):
    """The ranges of a sequence. ranges: (T, 2), of all tokens. start: the sequence's first token. causal_left,
    range_left: keys before the token's position that each part shows, 2^30 for all."""

    ranges: cute.Tensor
    start: Int32
    causal_left: Int32
    range_left: Int32


def tail_of(a):
    """Return 0: `source` needs no word of `mask_blocks`."""
    return Uint32(0)


def source(a, sequence, batch_idx, tail):
    """Return the `TokenRanges` of a sequence."""
    return TokenRanges(a.mask.ranges, sequence.q_start, a.mask.window_left, a.mask.range_left)


def visible(causal_left, range_left, position, kv_len, first, last):
    """Return the two ranges [lo, hi) of keys that a token at `position` sees, each empty if hi <= lo.

    first, last: the token's own range, inclusive, of any values."""
    causal = position - causal_left, cutlass.min(position + 1, kv_len)
    own = cutlass.max(first, position - range_left), clamp(last, -1, kv_len - 1) + 1
    return causal, own


def word_of(keys, key):
    """Return the bits of the keys [lo, hi) in a word of the keys [key, key + 32)."""
    lo, hi = keys
    below_hi = ~warp.shift_left(0xFFFFFFFF, cutlass.max(hi - key, 0))
    return below_hi & warp.shift_left(0xFFFFFFFF, cutlass.max(lo - key, 0))


def ranges_of(source, token, seqlen):
    """Return `visible` of a token. A row past the sequence's last token has the range of some token."""
    row = cutlass.min(source.start + token, source.ranges.shape[0] - 1)
    first, last = source.ranges[row, 0], source.ranges[row, 1]
    position = token + seqlen.kv_len - seqlen.q_len
    return visible(source.causal_left, source.range_left, position, seqlen.kv_len, first, last)


def visible_word(spec, source, token, key, seqlen):
    """Return which of the keys [key, key + 32) a token sees, as bits."""
    causal, own = ranges_of(source, token, seqlen)
    return word_of(causal, key) | word_of(own, key)


def common_keys(keys, other):
    """Return the range of keys that two ranges [lo, hi) have in common."""
    return cutlass.max(keys[0], other[0]), cutlass.min(keys[1], other[1])


def count_of(keys):
    """Return the number of keys in a range [lo, hi)."""
    return cutlass.max(keys[1] - keys[0], 0)


def parts_of_block(spec):
    """Return 1: ranges are compared with whole blocks."""
    return 1


@cute.jit
def state_of_part(
    spec: cutlass.Constexpr, source: TokenRanges, tokens: Any, n_block: Int32, hi: Int32, seqlen: mask.SeqlenInfo
):
    """Return the state of a block of the tile, from the most and the fewest of its keys that a token sees."""
    n = const_expr(spec.tile.n)
    block, most, fewest = (n_block * n, n_block * n + n), Int32(0), Int32(n)
    if n_block < hi:
        for token in cutlass.range(tokens[0], tokens[1] + 1, SHARES, unroll=4):
            causal, own = (common_keys(keys, block) for keys in ranges_of(source, token, seqlen))
            count = count_of(causal) + count_of(own) - count_of(common_keys(causal, own))
            most, fewest = cutlass.max(most, count), cutlass.min(fewest, count)
    state = Int32(0)
    if most > 0:
        state = Int32(SEEN)
    if fewest < n:
        state |= HIDDEN
    return state
