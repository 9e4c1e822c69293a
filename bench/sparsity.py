"""Compute the share of KV blocks that the rule of skip-softmax (`skipping`) leaves out of long requests, and the factor
that leaves out a given share. The block maxima are computed once for all factors.

Kernels may have other tiles and blocks, and then another share: ROWS x KEYS is the tile of most prefill kernels on
Hopper.
"""

import math

import torch

from . import workload
from .skipping import HOPPER, wanted
from .skipping import ROWS as ROWS_OF

ROWS = ROWS_OF[HOPPER]  # query rows of a tile
KEYS = 128  # keys of a block
CHUNK = 2048  # query rows per chunk; its logits take 256 MiB at 32768 keys


def block_maxima(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool = True, rows: int = ROWS, keys: int = KEYS
) -> torch.Tensor:
    """Return the largest scaled logit of each query row in each block of one head.

    q (m, D) and k (n, D) of any floating dtype -> fp32 (blocks, tiles, rows); -inf if the row sees no key of the block,
    and in rows past the last. Query row i stands at position i + n - m. CHUNK x n logits are in memory at a time.

    >>> block_maxima(torch.ones(2, 1), torch.tensor([[3.0], [1.0]]), 1.0, rows=2, keys=1).tolist()
    [[[3.0, 3.0]], [[-inf, 1.0]]]
    """
    m, n = len(q), len(k)
    blocks, tiles, key = -(-n // keys), -(-m // rows), torch.arange(n, device=k.device)
    found = torch.full((tiles * rows, blocks), -math.inf, device=q.device)
    k = k.float()
    for begin in range(0, m, CHUNK):
        chunk = slice(begin, min(begin + CHUNK, m))
        last = chunk.stop + n - m if causal else n
        logits = scale * (q[chunk].float() @ k[:last].T)
        if causal:
            position = torch.arange(chunk.start, chunk.stop, device=k.device) + (n - m)
            logits.masked_fill_(key[:last] > position[:, None], -math.inf)
        padded = torch.nn.functional.pad(logits, (0, -last % keys), value=-math.inf)
        found[chunk, : -(-last // keys)] = padded.unflatten(1, (-1, keys)).amax(-1)
    return found.view(tiles, rows, blocks).permute(2, 0, 1).contiguous()


def left_out(maxima: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return which blocks the rule leaves out, bool (blocks, tiles).

    maxima: (blocks, tiles, rows) from `block_maxima`. threshold: the factor over the number of keys, 0 for none. A
    block in which a tile sees no key is not left out.

    >>> left_out(torch.tensor([[[0.0]], [[-9.0]], [[-1.0]]]), 0.01).flatten().tolist()
    [False, True, False]
    """
    top = torch.full_like(maxima[0], -math.inf)
    found = torch.empty(maxima.shape[:2], dtype=torch.bool, device=maxima.device)
    least = math.log(threshold) if threshold > 0 else -math.inf
    for block in range(len(maxima) - 1, -1, -1):
        now = maxima[block]
        want = wanted(now, top)
        found[block] = (want < least) & (want > -math.inf)
        top = torch.where(found[block, :, None], top, torch.maximum(top, now))
    return found


def share(maxima: torch.Tensor, threshold: float) -> float:
    """Return the share of blocks left out, among the blocks in which a tile sees a key."""
    seen = (maxima > -math.inf).any(-1)
    return float(left_out(maxima, threshold).sum() / seen.sum())


def factor_of(target: float, maxima: torch.Tensor, keys: int, steps: int = 24) -> float:
    """Return the factor with which the rule leaves out about `target` of the blocks of requests of `keys` keys.

    Bisects the factor's logarithm, up to `keys` (a threshold of 1).
    """
    low, high = math.log(1e-6 * keys), math.log(keys)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if share(maxima, math.exp(middle) / keys) < target else (low, middle)
    return math.exp((low + high) / 2)


def maxima_of(inputs: workload.Inputs) -> torch.Tensor:
    """Return `block_maxima` of all query heads of a call of one request: (blocks, heads * tiles, ROWS)."""
    shape, query = workload.shape_of(inputs), inputs["query"]
    k, _ = workload.tokens(inputs, 0, shape.length)
    group, scale = shape.heads_q // shape.heads_kv, float(inputs["bmm1_scale"])
    heads = (block_maxima(query[:, h], k[:, h // group], scale, shape.causal) for h in range(shape.heads_q))
    return torch.cat(list(heads), 1)
