"""The rule of skip-softmax: a KV block is left out where it hardly counts.

For a row, that is where exp(m_j - m) < threshold / kv_len: m_j is the row's maximum in the block, m its maximum over
the keys that were kept before. Each op decides for rows together (`decode.mainloop`, `sm90.skip`, `sm100.skip`).
"""

import cutlass.cute as cute
from cutlass import Float32


def log2_threshold(a, kv_len):
    """Return log2(threshold / kv_len) of a sequence. The argument is log2 of the threshold."""
    return a.logits.skip_threshold - cute.math.log2(Float32(kv_len), fastmath=True)


@cute.jit
def is_negligible(block_max, kept_max, to_log2, threshold):
    """Return whether a row's keys in a block hardly count, or it has none there. block_max, kept_max: maxima that
    `to_log2` brings to log2 units. threshold: `log2_threshold`."""
    return block_max == -Float32.inf or (block_max - kept_max) * to_log2 < threshold
