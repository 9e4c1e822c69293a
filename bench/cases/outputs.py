"""Problems with outputs known to the last bit of fp32, and hence to the byte after quantisation: every logit is 0, and
all keys of a request, a power of two of them, have the same value."""

from typing import NamedTuple

import torch

from wrappers import fp4
from wrappers.attention.call import SEPARATE, AttentionCall, new_sequences

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
PAGE = 16
TIES = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # ties between codes, under a block scale of 1
FACTOR = 0.375  # multiplies the output; keeps the ties
SCALE = 32.0  # with this forward scale some block scales saturate, are denormal or, with 16-bit caches, 0
POISON = 0x7F  # NaN when read as a block scale


class KnownOutput(NamedTuple):
    """A problem without outputs, and its expected o (T, Hq, D) in fp32."""

    problem: AttentionCall
    o: torch.Tensor


def blocks_of(dim: int, heads: int, requests: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values for all kinds of blocks of 16, exact in dtype: (requests, heads, dim) fp32."""
    gen = torch.Generator().manual_seed(dim + heads)
    v = torch.randn(requests * heads * dim // fp4.BLOCK, fp4.BLOCK, generator=gen)
    ties = torch.tensor(TIES)
    v[0::4] = torch.cat([ties, -ties])
    v[1::8] *= 400.0
    v[5::8] *= 2.0 ** torch.randint(-9, 6, v[5::8].shape, generator=gen)
    v[2::8] *= 2.0**-9
    v[6::8] *= 2.0**-14
    v = fp4.e4m3(v).float() if dtype == torch.float8_e4m3fn else v.to(dtype).float()
    return v.view(requests, heads, dim) + 0.0  # no negative zeros: sums that start from 0 give none


def known(
    phase: str, dtype: str, dim: int, heads: tuple[int, int], kv_dtype: str = "", lengths: tuple[int, ...] = (1,),
    device: torch.device | str = "cpu",
) -> KnownOutput:  # fmt: skip
    """Return a problem with a known output.

    lengths: keys of the requests, powers of two or 0. A prefill request has three query tokens that see all keys; a
    decode request has one. heads: (query heads, KV heads).
    """
    tokens, (heads_q, heads_kv), batch = 3 if phase == "prefill" else 1, heads, len(lengths)
    cached = TYPES[kv_dtype or dtype]
    rows = blocks_of(dim, heads_kv, batch, cached)
    counts = [-(-n // PAGE) for n in lengths]
    table = torch.zeros(batch, 2, max(counts), dtype=torch.int32)
    pages: list[torch.Tensor] = []
    for request, count in enumerate(counts):
        table[request, :, :count] = torch.arange(len(pages), len(pages) + count)
        pages += [rows[request]] * count
    v = torch.stack(pages)[:, :, None].expand(-1, -1, PAGE, -1).to(cached).contiguous()
    offsets = torch.arange(batch + 1, dtype=torch.int32) * tokens
    q = torch.zeros(batch * tokens, heads_q, dim).to(TYPES[dtype])
    o = rows.repeat_interleave(tokens, 0).repeat_interleave(heads_q // heads_kv, 1)
    o[torch.tensor(lengths).repeat_interleave(tokens) == 0] = 0.0
    requests = new_sequences(table.to(device), torch.tensor(lengths).int().to(device), offsets.to(device), SEPARATE)
    q, v, o = (t.to(device) for t in (q, v, o))
    k = torch.zeros(v.shape, device=device).to(cached)
    signature = f"trtllm_batch_{'context' if phase == 'prefill' else 'decode'}_with_kv_cache"
    problem = AttentionCall(
        signature, q, k, v, requests, tokens, scale=1.0, out_scale=FACTOR, causal=phase != "prefill"
    )  # fmt: skip
    return KnownOutput(problem, o * FACTOR)


def poisoned(shape: tuple[int, ...], start: int, device: torch.device | str = "cpu", every: int = 1) -> fp4.FP4Tensor:
    """Return an NVFP4 output (T, Hq, D) with all bytes POISON. Its block scales begin at row `start`.

    every: the output has every second, third, ... head of its memory.
    """
    tokens, heads, dim = shape
    data = torch.full((tokens, heads * every, dim // 2), POISON, dtype=torch.uint8, device=device)
    columns = fp4.round_up(heads * dim // fp4.BLOCK, fp4.SCALE_TILE[1])
    size = fp4.round_up(start + tokens, fp4.SCALE_TILE[0]), columns
    scale = torch.full(size, POISON, dtype=torch.uint8, device=device)
    return fp4.FP4Tensor(data[:, ::every], scale.view(torch.float8_e4m3fn), start)


def rounded(o: torch.Tensor, dtype: str) -> float | torch.Tensor:
    """Return a bound on the rounding error of a quantised output."""
    if dtype == "fp8":
        return 2.0**-4 * o.abs()
    if dtype != "nvfp4":
        return 0.0
    # half the step between the codes 4 and 6, for blocks with their maximum in between
    return o.unflatten(-1, (-1, fp4.BLOCK)).abs().amax(-1).repeat_interleave(fp4.BLOCK, -1) / 5


def bytes_of(t: fp4.FP4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, block scales with all padding), both uint8."""
    return t.data, t.scale.view(torch.uint8)


def quantised(o: torch.Tensor, start: int) -> fp4.FP4Tensor:
    """Return the bytes that a kernel must write to `poisoned(o.shape, start)`, with SCALE."""
    want = poisoned(tuple(o.shape), start, o.device)
    fp4.store(o, want, SCALE)
    return want
