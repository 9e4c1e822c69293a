"""Skip-softmax: a KV block that hardly counts for the 128 rows of a half costs Q K^T and its maxima alone.

The rule is Hopper's (`sm90.skip`), of the rows of a half: it leaves a block out where every row that has keys in it
finds exp(m_j - m) < threshold / kv_len, m_j the block's exact maximum of the row, m the one of the blocks before that
were not left out. The first block of a tile never is. The four warps vote; who multiplies reads the votes behind the
signals that they send all the same, and issues no P V. V of every block is fetched.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import softmax
from . import skip_votes
from .roles import ROWS, WARPS

BARRIER = 1  # + half: its 128 threads


class SkipRule(NamedTuple):
    """Of a thread. log2_threshold: log2 of threshold / kv_len. kept_max: (1,), exact maximum of its row so far."""

    log2_threshold: Float32
    kept_max: cute.Tensor


def rule(spec, a, kv_len) -> Any:
    """Of a tile; None in other kernels."""
    if not spec.logits.skip:
        return None
    log2_threshold = a.logits.skip_threshold - cute.math.log2(Float32(kv_len), fastmath=True)
    return SkipRule(log2_threshold, cute.make_rmem_tensor(1, Float32))


class SkipDecision(NamedTuple):
    """top: (1, 1), the row's maximum in the block at hand. out: whether the half leaves it out."""

    block_max: cute.Tensor
    skips: Int32


@cute.jit
def vote(s, r, rows, of: SkipRule, half: Int32, turn: Int32):
    """The `SkipDecision` at a block, whose scores are in r.s. turn: its number among the half's."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    top = cute.make_rmem_tensor((1, 1), Float32)
    top[0] = softmax.reduce(r.s[0, None], cute.arch.fmax)
    below = top[0] == -Float32.inf or (top[0] - of.kept_max[0]) * r.reduced[0] < of.log2_threshold
    mine = skip_votes.of(s.skip_votes, half, turn)
    skip_votes.cast(mine, warp, below or r.tokens[0] >= rows.seqlen.q_len)
    cute.arch.barrier(barrier_id=BARRIER + half, number_of_threads=ROWS)
    return SkipDecision(top, skip_votes.all_of(mine))


def is_skipped(s, half, turn: Int32):
    """Who multiplies, behind the half's signals of a block: whether it left it out."""
    return skip_votes.all_of(skip_votes.of(s.skip_votes, half, turn))
