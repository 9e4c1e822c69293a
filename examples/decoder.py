"""A decoder transformer with random weights; its attention uses the two paged functions. `serve` uses this model."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from wrappers import (
    KVCacheTarget,
    append_qkv,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)

VOCABULARY, DIM, THETA = 4096, 64, 1e4  # DIM: head_dim


class Batch(NamedTuple):
    """Positions of a step's T tokens, which belong to R requests. Rows [0, decodes) are requests of one token."""

    row: torch.Tensor  # (T,) row of `tokens`
    position: torch.Tensor  # (T,)
    slot: torch.Tensor  # (T,) slot in the cache: page * P + row of the page
    last: torch.Tensor  # (S,) of T: the last known tokens, followed by sampling
    table: torch.Tensor  # (R, pages) int32
    lens: torch.Tensor  # (R,) int32: number of keys
    starts: torch.Tensor  # (R - decodes + 1,) int32: starts of the chunks in rows [decodes, T)
    decodes: int
    longest: int


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """Write K and V (T, Hkv, D) to their slots of kv (2, pages, P, Hkv, D). Return the output (T, Hq, D) for Q."""
    q, k, v = (t.to(kv.dtype) for t in (q, k, v))
    cache, scale, d = (kv[0], kv[1]), DIM**-0.5, batch.decodes
    append_qkv(None, k, v, KVCacheTarget(cache), batch.slot)
    out, table, lens = torch.empty_like(q), batch.table, batch.lens
    if d:
        trtllm_batch_decode_with_kv_cache(
            q[:d], cache, None, table[:d], lens[:d], None, scale, out=out[:d], kv_layout="NHD"
        )
    if d < len(lens):
        trtllm_batch_context_with_kv_cache(
            q[d:], cache, None, table[d:], lens[d:], batch.longest, None, scale, 1.0, len(lens) - d, batch.starts, None,
            out=out[d:], kv_layout="NHD",
        )  # fmt: skip
    return out


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = [heads, kv_heads, kv_heads]
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        wide = {"qkv": (width, sum(self.heads) * DIM), "o": (heads * DIM, width)}
        wide |= {"up": (width, 6 * width), "down": (3 * width, width)}
        linear = ({name: nn.Linear(*shape, bias=False) for name, shape in wide.items()} for _ in range(layers))
        self.layers = nn.ModuleList(map(nn.ModuleDict, linear))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Return the logits (S, vocabulary) after the tokens `batch.last`."""
        angles = batch.position[:, None, None] * THETA ** (-torch.arange(0, DIM, 2, device=ids.device) / DIM)
        rope, x = torch.polar(torch.ones_like(angles), angles), self.embedding(ids)
        norm, layers = x.shape[1:], zip(self.layers, kv)
        layer: Any
        for layer, cache in layers:
            q, k, v = layer["qkv"](rms_norm(x, norm)).unflatten(-1, (-1, DIM)).split(self.heads, 1)
            out = attention(rotate(q, rope), rotate(k, rope), v, batch, cache)
            x = x + layer["o"](out.flatten(1).to(x.dtype))
            gate, up = layer["up"](rms_norm(x, norm)).chunk(2, -1)
            x = x + layer["down"](silu(gate) * up)
        return self.head(rms_norm(x[batch.last], norm))


def rotate(t: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Apply rotate-half RoPE to t (T, heads, D) with rope (T, 1, D / 2)."""
    turned = torch.complex(*t.float().chunk(2, -1)) * rope
    return torch.cat([turned.real, turned.imag], -1).to(t.dtype)
