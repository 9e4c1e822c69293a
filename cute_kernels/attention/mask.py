"""The masks: causal, sliding window, chunks, prefix and tree (draft tokens). Custom masks are in `custom_mask`.

- `visible` defines the causal mask with its window, chunks and prefix: the keys that a token sees. All else follows
  from it; what a tree hides among the draft tokens, `apply_tree` masks.
- `kv_range` says which KV blocks a tile visits, `full_range` which of these need no mask. The schedulers (`schedule`)
  call both for each tile; the softmax of sm100 calls `full_range` again, for its half of a tile, and `mask_blocks`
  calls `kv_range` to list the blocks of a custom mask.
- `segments` cuts a tile's blocks, from the highest to the lowest, for kernels that have one loop with the mask and one
  without.
- `apply` writes -inf into the scores of a block: here the causal mask happens. Every mainloop calls `logits.transform`,
  which calls `apply`.

Everything before `apply` is plain arithmetic on ints or traced values. Tokens and keys are counted within a sequence;
token i is at position i + kv_len - q_len (bottom-right alignment). Every kernel processes the blocks of a tile from the
highest to the lowest: the first block of a tile is its highest one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device import warp


@dataclass(frozen=True)
class SeqlenInfo:
    """The lengths of a sequence and the values of its mask.

    non_causal: 1 if tokens see all keys; read if spec.mask.causal is "value". tree: 1 if the query tokens are draft
    tokens with a tree mask instead of the causal one; read if spec.mask.tree. chunk: positions per chunk;
    read if spec.mask.chunk. prefix: keys that all tokens see, read if spec.mask.prefix.
    """

    q_len: Int32
    kv_len: Int32
    window_left: Int32
    non_causal: Int32 = 0  # type: ignore[assignment]
    tree: Int32 = 0  # type: ignore[assignment]
    chunk: Int32 = 0  # type: ignore[assignment]
    prefix: Int32 = 0  # type: ignore[assignment]


class ScoreRows(NamedTuple):
    """The rows of a thread's view of scores (rows, cols). tokens: per row, in the sequence. start: the sequence's first
    query token in the batch. to_log2: per row, the factor of scores before the soft cap. slopes: of ALiBi, in units of
    raw scores. words: of the custom mask, per row (`logits.fetch_mask`). offsets: where the softmax adds a number per
    row and block to the scores, that number, in units of raw scores (`logits.add_bias`)."""

    tokens: cute.Tensor
    start: Int32
    seqlen: SeqlenInfo
    to_log2: Any
    slopes: Any = None
    words: Any = None
    offsets: Any = None


@dataclass(frozen=True)
class ScoreCols:
    """The columns of a thread's view of scores: keys first + at[c]. at: static numbers. lane_col: the column offset of
    this lane, which `first` includes. lanes: number of neighbouring lanes that share a row."""

    first: Int32
    at: cutlass.Constexpr
    lane_col: Int32 = 0  # type: ignore[assignment]
    lanes: cutlass.Constexpr = 1


def seqlen_info(spec, a, sequence):
    """Return the `SeqlenInfo` of a `geometry.Sequence`. If the call's mask of bits is empty (0 bytes), kv_len is 0: no
    token sees a key, and no kernel reads the mask."""
    kv_len = sequence.kv_len
    if spec.mask.custom == "bits":
        kv_len *= cutlass.min(a.mask.custom_mask.shape[0], 1)
    return SeqlenInfo(
        sequence.q_len,
        kv_len,
        a.mask.window_left if spec.mask.window else 0,
        1 - a.mask.causal if spec.mask.causal == "value" else 0,
        cutlass.min(a.mask.tree_mask.shape[0], 1) if spec.mask.tree else 0,
        a.mask.chunk if spec.mask.chunk else 0,
        sequence.prefix if spec.mask.prefix else 0,
    )


def visible(spec, token, seqlen: SeqlenInfo):
    """Return the range [lo, hi) of keys that `token` sees, or may see under a tree mask; empty if hi <= lo."""
    position = token + seqlen.kv_len - seqlen.q_len
    lo, hi = 0, seqlen.kv_len
    if spec.mask.causal != "never":
        causal_hi = position + 1
        if spec.mask.causal == "value":
            causal_hi = cutlass.max(causal_hi, seqlen.non_causal * seqlen.kv_len)
        if spec.mask.prefix:
            causal_hi = cutlass.max(causal_hi, seqlen.prefix)
        if spec.mask.tree:
            causal_hi = cutlass.max(causal_hi, seqlen.tree * seqlen.kv_len)
        hi = cutlass.min(hi, causal_hi)
    if spec.mask.window:
        lo = cutlass.max(lo, position - seqlen.window_left)
    if spec.mask.chunk:  # the first key of the position's own chunk
        lo = cutlass.max(lo, cutlass.max(position, 0) // seqlen.chunk * seqlen.chunk)
    return lo, hi


def kv_range(spec, first, last, seqlen: SeqlenInfo):
    """Return the range [lo, hi) of KV blocks that the tokens first..last visit; empty (hi <= lo) if they see no key."""
    t = spec.tile.n
    lo, hi = visible(spec, first, seqlen)[0], visible(spec, last, seqlen)[1]
    return lo // t, (cutlass.max(hi, 0) + t - 1) // t


def full_range(spec, first, last, seqlen: SeqlenInfo):
    """Return the range [lo, hi) of KV blocks in which each of the tokens first..last sees every key; it may be empty,
    hi < lo."""
    t = spec.tile.n
    lo, hi = visible(spec, last, seqlen)[0], visible(spec, first, seqlen)[1]
    if spec.mask.tree:
        hi = cutlass.min(hi, seqlen.kv_len - seqlen.tree * seqlen.q_len)
    return (lo + t - 1) // t, cutlass.max(hi, 0) // t


class Segment(NamedTuple):
    """KV blocks of a tile that are processed by the same code. The two flags are known at trace time."""

    n_block_min: Any  # the lowest block
    n_block_max: Any  # the highest block + 1
    masked: bool  # the mask must be applied: some row may not see some key
    is_first: bool  # processed before the other segments: sm90 then updates row_max before the exponentials


def segments(
    spec, n_block_min, n_block_max, n_block_full_min, n_block_full_max, exact_max_blocks=0, merge_left_segment=False
):
    """Cut [n_block_min, n_block_max) into segments, from high blocks to low; return only those that may hold a block.

    The first segment has the `exact_max_blocks` highest blocks, a number that may be known at run time only, and all
    blocks masked on the right (causal). Then come the full blocks, then those masked on the left (window).
    merge_left_segment: with a window, full blocks take the code of those masked on the left.

    A caller loops over the segments at trace time. It writes its loop over blocks once; the loop is compiled once per
    segment, for full blocks without the mask. The range must not contain the tile's highest block, which callers
    process before, with the mask: without a causal mask, it is the only block that can be masked on the right (kv_len).
    """
    has_exact = not isinstance(exact_max_blocks, int) or exact_max_blocks > 0
    mid = cutlass.max(n_block_min, cutlass.min(n_block_max - exact_max_blocks, n_block_full_max))
    if spec.mask.custom:  # positions in the tile's list (`mask_blocks`); masked blocks are the highest ones
        exact = cutlass.max(mid, n_block_max - exact_max_blocks)
        rest = Segment(mid, exact, True, False), Segment(n_block_min, mid, False, False)
        return (Segment(exact, n_block_max, True, True), *rest) if has_exact else rest
    left = cutlass.max(n_block_min, cutlass.min(mid, n_block_full_min))
    right = spec.mask.causal != "never" or spec.mask.tree
    first = Segment(mid, n_block_max, right or spec.mask.bounded_left, True)
    if merge_left_segment and spec.mask.bounded_left:
        return first, Segment(n_block_min, mid, True, False)
    cut = []
    if right or has_exact:
        cut.append(first)
    cut.append(Segment(left, mid, False, False))  # full blocks
    if spec.mask.bounded_left:
        cut.append(Segment(n_block_min, left, True, False))
    return tuple(cut)


@cute.jit
def apply(spec: cutlass.Constexpr, s: cute.Tensor, rows: ScoreRows, cols: ScoreCols):
    """Set s (rows, cols) to -inf where the row's token does not see the key of the column, as `visible` says."""
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        # the visible keys of the row, as columns
        lo, hi = visible(spec, rows.tokens[r], rows.seqlen)
        lo, hi = lo - cols.first, hi - cols.first
        # the thread has a whole row (sm100): one word of bits masks 32 consecutive columns
        if const_expr(list(cols.at) == list(range(len(cols.at)))):
            row = s[r, None]
            for k in cutlass.range_constexpr(0, cute.size(row), 32):
                hidden = warp.shift_left(0xFFFFFFFF, cutlass.max(hi - k, 0))
                if const_expr(spec.mask.bounded_left):
                    hidden |= ~warp.shift_left(0xFFFFFFFF, cutlass.max(lo - k, 0))
                for c in cutlass.range_constexpr(32):
                    row[k + c] = -Float32.inf if hidden & const_expr(1 << c) != 0 else row[k + c]
        # the row is spread over lanes (the WGMMA layout of sm90; decode): one comparison per column
        else:
            for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                out = cols.at[c] >= hi
                if const_expr(spec.mask.bounded_left):
                    out = out or cols.at[c] < lo
                s[r, c] = warp.select(out, -Float32.inf, s[r, c])


@cute.jit
def apply_tree(s: cute.Tensor, bits: cute.Tensor, rows: ScoreRows, cols: ScoreCols):
    """Apply the tree mask: set s to -inf for draft token t of the sequence if bit t of bits[token of the row] is 0.
    Keys that are not draft tokens do not change, nor do rows past the sequence's q_len tokens."""
    tokens, q_len = rows.tokens, rows.seqlen.q_len
    first_draft = cols.first - (rows.seqlen.kv_len - q_len)
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
            draft = first_draft + cols.at[c]
            if draft >= 0 and draft < 32 * bits.shape[1] and tokens[r] < q_len:
                if (bits[tokens[r], draft // 32] >> (draft % 32)) & 1 == 0:
                    s[r, c] = -Float32.inf
