"""The demo's calls of latent attention (MLA): decode over all keys, and over the keys that an indexer selects.

A row of the latent cache is the layer's input, padded with zeros, and is key and value of all heads. The layer has no
indexer, so one is made of it: its queries and keys are the absorbed queries and the inputs, less their mean, along the
128 principal directions of the inputs. Its logits stand for those of the heads, and are largest where these are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import demo_data
from .demo_kernels import INDEX_DIM, WIDTH
from .demo_kernels import LATENT_PAGE as PAGE
from .demo_steps import DemoStep, compare, page_table, relative

KEPT = 64  # number of keys that a token attends to in sparse attention
LARGEST = 448.0  # the largest e4m3 value
TOLERANCE = 1.2e-2  # rtol = atol: bf16 weights and output of values up to about 8
ABSORBED = 6e-3  # relative error against attention with Q and K of each head: absorbed queries are rounded to bf16
ROUNDING = 2.0**-11  # of the indexer's logits, in units of the magnitudes that they consist of, for one head


@dataclass(frozen=True)
class LatentBatch:
    """The last token of each request, as a query, and the tokens of all requests as keys."""

    queries: torch.Tensor  # (requests, heads, 512) bf16
    latents: torch.Tensor  # (T, 512) bf16
    index_q: torch.Tensor  # (requests, heads, 128) e4m3
    index_weights: torch.Tensor  # (requests, heads) fp32, the scales of the queries included
    index_k: torch.Tensor  # (T, 128) e4m3
    index_scales: torch.Tensor  # (T, 1) fp32
    shares: torch.Tensor  # (heads, T) fp32: weights of the layer's own attention, from Q and K of each head
    lengths: list[int]
    scale: float

    def to(self, device: str) -> "LatentBatch":
        moved = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return LatentBatch(**moved, lengths=self.lengths, scale=self.scale)


def e4m3(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, fp32 scale of each row)."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-4) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn), scale


def batch_of(data: dict[str, np.ndarray]) -> LatentBatch:
    hidden, absorbed, q, k = (torch.from_numpy(data[name]).float() for name in ("hidden", "absorbed", "q", "k"))
    mean = hidden.mean(0)
    directions = torch.linalg.svd(hidden - mean, full_matrices=False).Vh[:INDEX_DIM].T
    index_q, q_scales = e4m3(absorbed @ directions)
    index_k, k_scales = e4m3((hidden - mean) @ directions)
    lengths, scale = data["lengths"].tolist(), demo_data.head_scale(data)
    own = zip(q.split(lengths), k.split(lengths))
    shares = [torch.einsum("hd,khd->hk", a[-1], b).mul(scale).softmax(1) for a, b in own]
    pad = WIDTH - hidden.shape[1]
    queries, latents = (torch.nn.functional.pad(t, (0, pad)).bfloat16() for t in (absorbed, hidden))
    return LatentBatch(
        queries, latents, index_q, q_scales.squeeze(-1) * INDEX_DIM**-0.5, index_k, k_scales,
        torch.cat(shares, dim=1), lengths, scale,
    )  # fmt: skip


def placed(batch: LatentBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (page table, lengths, cache of latent rows, the slot of each token), with NaN in unused rows."""
    table, slots = page_table(batch.lengths, PAGE, batch.latents.device)
    lens = torch.tensor(batch.lengths, dtype=torch.int32, device=table.device)
    cache = batch.latents.new_full((int(table.max()) + 1, PAGE, 1, WIDTH), float("nan"))
    cache.view(-1, WIDTH)[slots] = batch.latents
    return table, lens, cache, slots


def index_cache(batch: LatentBatch, slots: torch.Tensor, pages: int) -> torch.Tensor:
    """Return the indexer's cache: a page holds the codes of its keys, then their scales."""
    memory = torch.full((pages, PAGE * (INDEX_DIM + 4)), 0xFF, dtype=torch.uint8, device=slots.device)  # NaN
    codes, scales = memory.split([PAGE * INDEX_DIM, PAGE * 4], dim=1)
    codes.unflatten(1, (PAGE, INDEX_DIM))[slots // PAGE, slots % PAGE] = batch.index_k.view(torch.uint8)
    scales.unflatten(1, (PAGE, 4))[slots // PAGE, slots % PAGE] = batch.index_scales.view(torch.uint8)
    return memory.view(pages, PAGE, 1, INDEX_DIM + 4)


def attend(batch: LatentBatch) -> torch.Tensor:
    """Compute attention of each request's last token to all of its keys, (requests, heads, 512)."""
    from wrappers import flash_mla_with_kvcache

    table, lens, cache, _ = placed(batch)
    query = batch.queries[:, None]
    return flash_mla_with_kvcache(query, cache, table, lens, WIDTH, softmax_scale=batch.scale)[0][:, 0]


def attend_to_selected(batch: LatentBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Select KEPT keys of each request by the indexer's logits, and attend to them. Return the result, and the slots of
    the selected keys, (requests, 1, KEPT), -1 where a request has fewer."""
    from wrappers import flash_mla_with_kvcache, select_slots

    table, lens, cache, slots = placed(batch)
    keys = index_cache(batch, slots, len(cache))
    chosen = select_slots(batch.index_q[:, None], keys, batch.index_weights, lens, table, KEPT)
    out, _ = flash_mla_with_kvcache(
        batch.queries[:, None], cache, None, None, WIDTH, softmax_scale=batch.scale, indices=chosen
    )
    return out[:, 0], chosen


def tokens_at(batch: LatentBatch, chosen: torch.Tensor) -> torch.Tensor:
    """Return the rows in the batch of the tokens in the slots `chosen`, (requests, KEPT), and -1 for a slot of -1."""
    _, _, cache, slots = placed(batch)
    tokens = torch.full((len(cache) * PAGE + 1,), -1, device=slots.device)  # the last one for a slot of -1
    tokens[slots] = torch.arange(len(slots), device=slots.device)
    assert chosen.min() >= -1 and chosen.max() < len(tokens) - 1, f"slots {chosen}"
    return tokens[chosen[:, 0].long()]


def rows_of(batch: LatentBatch) -> list[slice]:
    """Return the rows of each request's tokens."""
    ends = np.cumsum(batch.lengths).tolist()
    return [slice(end - n, end) for end, n in zip(ends, batch.lengths)]


def over(batch: LatentBatch, rows: list[Any]) -> torch.Tensor:
    """Compute attention of each request's query to these rows with torch, in fp32 from the same bf16 values."""
    found = []
    for query, its in zip(batch.queries.float(), rows):
        latents = batch.latents[its].float()
        found.append((query @ latents.T * batch.scale).softmax(1) @ latents)
    return torch.stack(found)


def check_all(out: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Compare with latent attention in torch, and with the layer's own attention, from Q and K of each head."""
    same, own = want
    found = relative(out, own)
    assert found <= ABSORBED, f"relative error to attention with Q and K of each head: {found:.1e}"
    return f"{compare(out, same, TOLERANCE)}; to attention with Q and K of each head, {found:.1e}"


def own_attention(batch: LatentBatch) -> torch.Tensor:
    """Return the inputs weighted by the layer's own attention, before the map to values."""
    rows = rows_of(batch)
    return torch.stack([batch.shares[:, its] @ batch.latents[its].float() for its in rows])


def index_logits(batch: LatentBatch, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the indexer's logits of a request's keys by torch, the sums of the magnitudes that they consist of)."""
    its = rows_of(batch)[request]
    q, k, weights = batch.index_q[request].float(), batch.index_k[its].float(), batch.index_weights[request]
    logits = (q @ k.T).relu() * weights[:, None]
    magnitudes = q.abs() @ k.abs().T * weights.abs()[:, None]
    return tuple(part.sum(0) * batch.index_scales[its, 0] for part in (logits, magnitudes))  # type: ignore[return-value]


def check_selected(got: tuple[torch.Tensor, torch.Tensor], batch: LatentBatch) -> str:
    """Compare the selection with torch's logits, and the result with attention in torch to the selected keys."""
    out, rows = got[0], tokens_at(batch, got[1])
    for request, (its, chosen) in enumerate(zip(rows_of(batch), rows)):
        logits, magnitudes = index_logits(batch, request)
        count = min(KEPT, len(logits))
        keys = chosen[:count] - its.start
        assert chosen[count:].eq(-1).all() and torch.equal(keys, keys.unique()), f"request {request}: keys {keys}"
        assert keys[0] >= 0 and keys[-1] < len(logits), f"request {request}: keys {keys}"
        least, slack = logits.topk(count).values[-1], ROUNDING * magnitudes.max()
        assert logits[keys].min() >= least - slack, f"request {request}: torch selects keys with larger logits"
    said = compare(out, over(batch, [chosen[chosen >= 0] for chosen in rows]), TOLERANCE)
    first = rows_of(batch)[0]
    held = float(batch.shares[:, rows[0]].sum(1).mean())
    best = float(batch.shares[:, first].sum(0).topk(KEPT).values.sum()) / len(batch.shares)
    kept = f"{KEPT} of {batch.lengths[0]} keys hold {held:.0%} of the attention, the best {KEPT} hold {best:.0%}"
    return f"{said}; {kept}"


STEPS = (
    DemoStep("MLA", attend, lambda batch: (over(batch, rows_of(batch)), own_attention(batch)), check_all),
    DemoStep("sparse", attend_to_selected, lambda batch: batch, check_selected),
)
