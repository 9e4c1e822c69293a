"""Skip-softmax: a KV block that hardly counts for the 128 rows of a half costs Q @ K^T and its row maxima only.

The rule is that of Hopper (`sm90.skip`), for the rows of a half: a block is skipped if every row that has keys in it
finds exp(m_j - m) < threshold / kv_len. m_j is the row's exact maximum in the block, m the maximum over the blocks
before that were not skipped. The first block of a tile is never skipped. The four warps of a softmax warpgroup vote
(22 instructions more per block) and send the signals of every block all the same. The mma warp reads the votes behind
these signals and does not issue P @ V of a skipped block. V of every block is loaded.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import skip_rule, softmax
from ..barriers import NamedBarrier
from . import skip_votes
from .roles import ROWS, WARPS


class SkipRule(NamedTuple):
    """The rule for a thread's row. log2_threshold: log2(threshold / kv_len). kept_max: (1,), the row's exact maximum
    over the blocks that were not skipped."""

    log2_threshold: Float32
    kept_max: cute.Tensor


def rule(spec, a, kv_len) -> Any:
    """Return the `SkipRule` of a tile, or None if the kernel skips no blocks."""
    if not spec.logits.skip:
        return None
    return SkipRule(skip_rule.log2_threshold(a, kv_len), cute.make_rmem_tensor(1, Float32))


class SkipDecision(NamedTuple):
    """A decision about a block. block_max: (1, 1), the row's maximum in the block. skips: whether the half skips it."""

    block_max: cute.Tensor
    skips: Int32


@cute.jit
def vote(s, r, rows, rule: SkipRule, half: Int32, block: Int32):
    """Vote on a block with its scores in r.s, and return the decision. One warpgroup. block: its number among the
    half's blocks."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    block_max = cute.make_rmem_tensor((1, 1), Float32)
    block_max[0] = softmax.reduce(r.s[0, None], cute.arch.fmax)
    is_small = skip_rule.is_negligible(block_max[0], rule.kept_max[0], r.reduced[0], rule.log2_threshold)
    votes = skip_votes.of_block(s.skip_votes, half, block)
    skip_votes.cast(votes, warp, is_small or r.tokens[0] >= rows.seqlen.q_len)
    cute.arch.barrier(barrier_id=NamedBarrier.VOTES + half, number_of_threads=ROWS)
    return SkipDecision(block_max, skip_votes.all_agree(votes))


def is_skipped(s, half, block: Int32):
    """Return whether the half skipped a block. The mma warp, after the half's signals of the block."""
    return skip_votes.all_agree(skip_votes.of_block(s.skip_votes, half, block))
