"""Custom masks of ranges: a token sees what the causal mask shows it and, in addition, an inclusive range of keys.

Either part has a window of its own: keys too far before the token's position are not seen. The functions are those of a
kind of `custom_mask`. The range of a token is read where a word is made, two integers from the caches; nothing of the
mask is stored per key.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..device import warp
from ..device.clamp import clamp
from . import mask


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


def visible_word(spec, source, token, key, seqlen):
    """Return which of the keys [key, key + 32) a token sees, as bits. A row past the sequence's last token has the
    range of some token."""
    row = cutlass.min(source.start + token, source.ranges.shape[0] - 1)
    first, last = source.ranges[row, 0], source.ranges[row, 1]
    position = token + seqlen.kv_len - seqlen.q_len
    causal, own = visible(source.causal_left, source.range_left, position, seqlen.kv_len, first, last)
    return word_of(causal, key) | word_of(own, key)


@cute.jit
def join_tokens(
    spec: cutlass.Constexpr,
    source: TokenRanges,
    tokens: Any,
    step: cutlass.Constexpr,
    key: Int32,
    seqlen: mask.SeqlenInfo,
):
    """Return which of the keys [key, key + 32) some token sees, and which every one sees."""
    some, every = Uint32(0), Uint32(0xFFFFFFFF)
    for token in cutlass.range(tokens[0], tokens[1] + 1, step, unroll=8):
        seen = visible_word(spec, source, token, key, seqlen)
        some |= seen
        every &= seen
    return some, every
