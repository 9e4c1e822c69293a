"""Queries and keys with known scores, for skip-softmax. STEP_SCALE is the factor on the logits.

"steps": the last KEPT keys score STEP log2 units above all others; in "steps-mixed" they score below them for the last
head. "levels": in runs of LEVEL_KEYS keys, three of five runs score 2 STEP log2 units below the others. Which runs do
depends on the kind of row, that is, on the KV head and the group of LEVEL_ROWS tokens; for one of the kinds no run
does. In "levels-late", none of the last LATE keys does, and for token 0 the key SPIKE before the end scores 24 log2
units above all others, with half of STEP_SCALE. In "levels-three", the last run scores highest, and of the runs before
it every other one STEP / 2 and every other one STEP log2 units below.
"""

import math

import torch

KEPT = 512
STEP = 3.0
STEP_SCALE = STEP / 16 * math.log(2)
LEVEL_KEYS, LEVEL_ROWS, LEVELS = 128, 64, 4  # LEVELS: the number of kinds of rows
LATE, SPIKE = 44 * LEVEL_KEYS, 60 * LEVEL_KEYS


def plant_keys(data: str, k: torch.Tensor, v: torch.Tensor) -> None:
    """Change k (n, Hkv, Dqk) and v (n, Hkv, Dvo) of a request in place."""
    n = len(k)
    if data.startswith("steps"):
        k[..., 0] = 0
        k[: n - KEPT] = 0
        k[: n - KEPT, :, 0] = -4
        k[n - KEPT :] = 0
        v[: n - KEPT] += 4
    if data.startswith("levels"):
        run = torch.arange(n, device=k.device) // LEVEL_KEYS
        for d in range(LEVELS):
            k[..., d] = torch.where((run * (2 * d + 3) + d) % 5 < 2, 0.0, -8.0)[:, None]
    if data == "levels-three":
        runs = torch.arange(n, device=k.device) // LEVEL_KEYS
        from_end = (n - 1) // LEVEL_KEYS - runs
        level = torch.where(from_end == 0, 0, torch.where(from_end % 2 == 1, 2, 4))
        k[:] = 0
        k[..., :LEVELS] = -level[:, None, None].to(k)
        v[level == 4] += 4
    if data == "levels-late":
        k[max(0, n - LATE) :, :, :LEVELS] = 0.0
        k[..., LEVELS] = 0.0
        k[max(0, n - SPIKE), :, LEVELS] = 16.0


def plant_queries(data: str, q: torch.Tensor, kv_heads: int, every: int) -> None:
    """Change q (T, Hq, Dqk) of all requests in place. every: only every `every`-th head is used."""
    if data.startswith("steps"):
        q[..., 0] = 4
        if data == "steps-mixed":
            q[:, q.shape[1] // every - 1, 0] = -4
    if data.startswith("levels"):
        tokens, heads = (torch.arange(size, device=q.device) for size in q.shape[:2])
        kinds = tokens[:, None] // LEVEL_ROWS + heads // (len(heads) // kv_heads)
        q[..., :LEVELS] = 4.0 * torch.nn.functional.one_hot(kinds % LEVELS, LEVELS).to(q)
    if data == "levels-late":
        q[..., LEVELS] = 0.0
        q[0, :, LEVELS] = 16.0
