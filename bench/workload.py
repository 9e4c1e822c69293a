"""A benchmark case of prefill attention: its inputs, what it costs at least, and a quick check of a result."""

import math
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]  # keyword arguments of wrappers.trtllm_batch_context_with_kv_cache
CHECK_ROWS = 48  # query rows checked of each of CHECK_HEADS heads, first and last among them
CHECK_HEADS = 4
TOLERANCE = 1e-2  # rtol = atol for bf16 and N(0, 1) data


@dataclass(frozen=True)
class Shape:
    """A batch of requests of one length, all tokens of which are queries."""

    batch: int
    length: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of both matrix products; causal counts half the work."""
        full = 4 * self.batch * self.heads_q * self.length**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def bytes(self) -> int:
        """Q, K and V read once and O written once, two bytes an element."""
        return 2 * self.batch * self.length * self.head_dim * (2 * self.heads_q + 2 * self.heads_kv)


def shape_of(inputs: Inputs) -> Shape:
    """Facts of the inputs; ValueError where requests differ (the contiguous peers take equal lengths only)."""
    query = inputs["query"]
    batch, length = inputs["batch_size"], inputs["max_q_len"]
    k = pages(inputs)[0]
    if query.shape[0] != batch * length or inputs["max_kv_len"] != length:
        raise ValueError("the benchmark compares with contiguous attention: every request has q_len = kv_len = max")
    return Shape(batch, length, query.shape[1], k.shape[1], query.shape[2], inputs.get("causal", True))


def pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pages as (pages, heads, page size, head_dim), views of the cache."""
    cache = inputs["kv_cache"]
    k, v = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, -1])
    if inputs.get("kv_layout", "HND") == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return k, v


def contiguous(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as contiguous (batch, length, heads, head_dim): what the peers read."""
    shape = shape_of(inputs)
    tables = inputs["block_tables"]
    k_table, v_table = (tables[:, 0], tables[:, 1]) if tables.ndim == 3 else (tables, tables)

    def gather(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        used = table[:, : math.ceil(shape.length / cache.shape[2])].long()
        rows = cache[used].transpose(2, 3).flatten(1, 2)  # (b, pages, h, p, d) -> (b, pages * p, h, d)
        return rows[:, : shape.length].contiguous()

    k, v = (gather(c, t) for c, t in zip(pages(inputs), (k_table, v_table)))
    return inputs["query"].unflatten(0, (shape.batch, shape.length)).contiguous(), k, v


def check(inputs: Inputs, out: torch.Tensor, seed: int = 0) -> str | None:
    """None where `out` (tokens, heads, head_dim) agrees with fp32 attention on a sample of rows, else what is wrong.

    All elements are held to be finite; the sample is CHECK_ROWS rows of CHECK_HEADS (request, head) pairs.
    """
    shape = shape_of(inputs)
    if tuple(out.shape) != (shape.batch * shape.length, shape.heads_q, shape.head_dim):
        return f"shape {tuple(out.shape)}"
    if not bool(out.isfinite().all()):
        return "not finite"
    q, k, v = contiguous(inputs)
    rows = out.unflatten(0, (shape.batch, shape.length))
    pick = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(CHECK_HEADS):
        b, h = (int(torch.randint(n, (1,), generator=pick)) for n in (shape.batch, shape.heads_q))
        index = torch.randint(shape.length, (CHECK_ROWS,), generator=pick)
        index[0], index[-1] = 0, shape.length - 1
        index = index.to(q.device)
        hk = h * shape.heads_kv // shape.heads_q
        logits = float(inputs["bmm1_scale"]) * (q[b, index, h].float() @ k[b, :, hk].float().T)
        if shape.causal:
            keys = torch.arange(shape.length, device=q.device)
            logits.masked_fill_(keys > index[:, None], -math.inf)
        want = float(inputs["bmm2_scale"]) * (logits.softmax(-1) @ v[b, :, hk].float())
        excess = (rows[b, index, h].float() - want).abs() - TOLERANCE * want.abs()
        worst = max(worst, float(excess.max()))
    return None if worst <= TOLERANCE else f"off by {worst:.3g}, allowed {TOLERANCE}"
