"""The seam of custom masks: for each query token and key of a sequence, the caller says whether the key is seen.

`mask_blocks` looks at the mask once before the attention kernel runs, and the tile leaves out hidden blocks. For the
blocks that are partly hidden, the kernel finds which keys a token sees (`visible_word`) while their scores are
computed, and sets hidden scores to -inf (`apply`, `apply_words`). These words have all masks of the call, so
`mask.apply` has nothing to do.

Each kind of mask (`spec.CUSTOM_MASKS`) is a module with these functions:

- `source(a, sequence, batch_idx, tail)` returns what the words of a sequence follow from.
- `visible_word(spec, source, token, key, seqlen)` returns which of the keys [key, key + 32) a token sees, as bits.
- `parts_of_block(spec)` returns into how many parts `mask_blocks` divides a block. `SHARES` warps look at a part, each
  with other tokens.
- `state_of_part(spec, source, tokens, part, hi, seqlen)` returns the `mask_state` of a part, counted from block 0, for
  every SHARES-th token from tokens[0] to tokens[1]; 0 for blocks from `hi` on.
- `tail_of(a)` returns a word that `mask_blocks` finds once and passes to `source`. Called by one warp.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from ..device import warp
from . import mask, mask_bits, mask_ranges

KINDS: dict[str, Any] = {"bits": mask_bits, "ranges": mask_ranges}


def of(spec):
    """Return the module of the custom mask of `spec`."""
    return KINDS[spec.mask.custom]


@cute.jit
def apply(s: cute.Tensor, r: cutlass.Constexpr, rows: mask.ScoreRows, cols: mask.ScoreCols):
    """Apply a custom mask to row r of s: set it to -inf where the bit of column at[c] + lane_col is 0.

    lane_col must be less than 8, and at[c] + lane_col in the same 32 columns as at[c]. Lane i of the `lanes` neighbours
    that share the row has the bits of columns 32 i to 32 i + 31.
    """
    lane, at, lanes = cute.arch.lane_idx(), const_expr(cols.at), const_expr(cols.lanes)
    words, first = range(at[-1] // 32 + 1), lane // lanes * lanes
    mine = [cute.arch.shuffle_sync(rows.words[r], first + i) >> Uint32(cols.lane_col) for i in words]
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        bit = mine[const_expr(at[c] // 32)] & const_expr(1 << at[c] % 32)
        s[r, c] = warp.select(bit == 0, -Float32.inf, s[r, c])


def apply_present(s: cute.Tensor, words: cute.Tensor, cols: mask.ScoreCols):
    """Set all rows of s to -inf where the bit of column at[c] + lane_col is 0, in `words` of 32 columns that all lanes
    have. lane_col: as in `apply`."""
    hide([s[r, None] for r in range(cute.size(s, mode=[0]))], words, cols)


def apply_chosen(s: cute.Tensor, words: cute.Tensor, cols: mask.ScoreCols):
    """Do what `apply_present` does with words of each row, (rows, words)."""
    for r in range(cute.size(s, mode=[0])):
        hide([s[r, None]], words[r, None], cols)


@cute.jit
def hide(rows: cutlass.Constexpr, words: cute.Tensor, cols: mask.ScoreCols):
    """Do what `apply_present` does with rows of s."""
    every = words[0]
    for i in cutlass.range_constexpr(1, cute.size(words)):
        every &= words[i]
    if every != 0xFFFFFFFF:
        mine = [words[i] >> Uint32(cols.lane_col) for i in range(cute.size(words))]
        for c in cutlass.range_constexpr(len(cols.at)):
            hidden = mine[const_expr(cols.at[c] // 32)] & const_expr(1 << cols.at[c] % 32) == 0
            for row in rows:
                row[c] = warp.select(hidden, -Float32.inf, row[c])


@cute.jit
def apply_words(s: cute.Tensor, words: cute.Tensor):
    """Apply a custom mask to the one row of s (1, cols), of which the thread has all columns. words: 32 columns
    each."""
    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
        bit = words[const_expr(c // 32)] & const_expr(1 << c % 32)
        s[0, c] = warp.select(bit == 0, -Float32.inf, s[0, c])
