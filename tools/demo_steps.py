"""The demo's calls of attention and top-k: their inputs, and what plain torch computes for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from . import demo_data
from .demo_kernels import HEAD_DIM, PAGE, K

TOLERANCE = 2e-3  # rtol = atol: fp16 output of values up to about 4


class DemoStep(NamedTuple):
    """A call, torch's result for it, and the check that compares the two."""

    name: str
    call: Callable[[Any], Any]
    want: Callable[[Any], Any]
    check: Callable[[Any, Any], str]


@dataclass(frozen=True)
class LayerBatch:
    """Q, K and V of one layer, padded, and the requests' lengths. Every token is a query."""

    q: torch.Tensor  # (T, heads, 64)
    k: torch.Tensor
    v: torch.Tensor
    lengths: list[int]
    scale: float

    @property
    def flops(self) -> float:
        return sum(4.0 * self.q.shape[1] * n * n * HEAD_DIM for n in self.lengths)

    @property
    def last(self) -> torch.Tensor:
        """Return the row of each request's last token."""
        return torch.tensor(self.lengths, device=self.q.device).cumsum(0) - 1

    def of_heads(self, heads: int) -> "LayerBatch":
        q, k, v = (t[:, :heads].contiguous() for t in (self.q, self.k, self.v))
        return LayerBatch(q, k, v, self.lengths, self.scale)

    def repeat(self, copies: int) -> "LayerBatch":
        q, k, v = (t.repeat(copies, 1, 1) for t in (self.q, self.k, self.v))
        return LayerBatch(q, k, v, self.lengths * copies, self.scale)

    def to(self, device: str) -> "LayerBatch":
        return LayerBatch(self.q.to(device), self.k.to(device), self.v.to(device), self.lengths, self.scale)


def batch_of(data: dict[str, np.ndarray]) -> LayerBatch:
    """Pad the data to a head dimension that the kernels support."""
    pad = HEAD_DIM - data["q"].shape[-1]
    q, k, v = (torch.nn.functional.pad(torch.from_numpy(data[name]), (0, pad)) for name in ("q", "k", "v"))
    return LayerBatch(q, k, v, data["lengths"].tolist(), demo_data.head_scale(data))


def page_table(lengths: list[int], size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal pages of `size` tokens to requests, in random order. Return (their table, int32 (requests, pages), -1 where
    a request has no more; the slot of each token in the cache, page * size + row)."""
    used = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(0))
    table = torch.full((len(used), max(used)), -1, dtype=torch.int32, device=device)
    slots = []
    for row, pages, n in zip(table, order.split(used), lengths):
        row[: len(pages)] = pages.to(table)
        slots.append((pages[:, None] * size + torch.arange(size)).flatten()[:n])
    return table, torch.cat(slots).to(device)


def paged(batch: LayerBatch) -> dict[str, Any]:
    """Return the arguments of the prefill function: K and V scattered over pages in random order, NaN in unused
    memory."""
    device, heads = batch.q.device, batch.q.shape[1]
    table, slots = page_table(batch.lengths, PAGE, device)
    pages = int(table.max()) + 1
    cache = torch.full((2, pages, heads, PAGE, HEAD_DIM), float("nan"), dtype=batch.q.dtype, device=device)
    for side, rows in zip(cache, (batch.k, batch.v)):
        side[slots // PAGE, :, slots % PAGE] = rows
    starts = torch.tensor([0, *np.cumsum(batch.lengths)], dtype=torch.int32, device=device)
    return {
        "query": batch.q,
        "kv_cache": (cache[0], cache[1]),
        "workspace_buffer": torch.zeros(1, dtype=torch.uint8, device=device),
        "block_tables": table,
        "seq_lens": torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        "max_q_len": max(batch.lengths),
        "max_kv_len": max(batch.lengths),
        "bmm1_scale": batch.scale,
        "bmm2_scale": 1.0,
        "batch_size": len(batch.lengths),
        "cum_seq_lens_q": starts,
        "cum_seq_lens_kv": starts,
        "causal": False,
    }


def expected(batch: LayerBatch) -> torch.Tensor:
    """Compute attention with torch, request by request, in fp32 from the same fp16 values."""
    parts = (t.float().transpose(0, 1) for t in (batch.q, batch.k, batch.v))
    q, k, v = (t.split(batch.lengths, dim=1) for t in parts)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = [sdpa(a, b, c, scale=batch.scale) for a, b, c in zip(q, k, v)]
    return torch.cat(rows, dim=1).transpose(0, 1)


def compare(out: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> str:
    """Describe the errors against torch's result. Raise AssertionError if they exceed the tolerance, rtol = atol, or
    are NaN. (`torch.testing.assert_close` imports two seconds of torch.)"""
    errors = (out.float() - want).abs()
    beyond = ~(errors <= tolerance * (1 + want.abs()))
    said = f"max error {float(errors.max()):.1e}, relative {relative(out, want):.1e}"
    assert not beyond.any(), f"{said}: {int(beyond.sum())} of {beyond.numel()} values are beyond {tolerance}"
    return said


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.float() - want).norm() / want.norm())


def prefill(batch: LayerBatch) -> torch.Tensor:
    from wrappers import trtllm_batch_context_with_kv_cache

    return trtllm_batch_context_with_kv_cache(**paged(batch))


def decode(batch: LayerBatch) -> torch.Tensor:
    """Compute attention of each request's last token."""
    from wrappers import trtllm_batch_decode_with_kv_cache

    given = paged(batch)
    return trtllm_batch_decode_with_kv_cache(
        batch.q[batch.last], given["kv_cache"], given["workspace_buffer"], given["block_tables"], given["seq_lens"],
        given["max_kv_len"], batch.scale,
    )  # fmt: skip


def scores(batch: LayerBatch) -> torch.Tensor:
    """Return the logits of the first request's last token on its keys, (heads, keys) fp32."""
    n = batch.lengths[0]
    return torch.einsum("hd,khd->hk", batch.q[n - 1].float(), batch.k[:n].float()).contiguous()


def select(batch: LayerBatch) -> torch.Tensor:
    """Return the K keys with the highest scores, (heads, K), in ascending order."""
    from wrappers import top_k_ragged_transform

    found = scores(batch)
    ints = torch.full((len(found),), found.shape[1], dtype=torch.int32, device=found.device)
    return top_k_ragged_transform(found, torch.zeros_like(ints), ints, K)


def same_keys(found: torch.Tensor, want: torch.Tensor) -> str:
    assert torch.equal(found.long(), want), f"keys {found.tolist()}, torch selects {want.tolist()}"
    return f"the same {K} keys of each head"


STEPS = (
    DemoStep("prefill", prefill, expected, compare),
    DemoStep("decode", decode, lambda batch: expected(batch)[batch.last], compare),
    DemoStep("top-k", select, lambda batch: scores(batch).topk(K, dim=1).indices.sort(1).values, same_keys),
)
