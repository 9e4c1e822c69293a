"""A benchmark case of attention: its inputs, what one of prefill costs at least, and a quick check of a result."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from wrappers import FP4Tensor, fp4, nvfp4_dequantize, reference

from .cases.attention import MANY_KEYS

Inputs = dict[str, Any]  # keyword arguments of wrappers.trtllm_batch_context_with_kv_cache
CHECK_ROWS = 48  # query rows checked of a request
E4M3 = torch.float8_e4m3fn
TOLERANCE = 1e-2, 1e-2  # rtol, and atol where no more than MANY_KEYS keys weigh, of bf16 and N(0, 1) data
FP8_TOLERANCE = 4e-2, 6e-2  # of e4m3 queries, whose probabilities are e4m3 too
E4M3_TOLERANCE = 5e-2, 7e-2  # of e4m3 outputs
NVFP4_ERROR = 0.3  # RMS of an NVFP4 output's error, of the standard deviation of the row


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


def tokens(inputs: Inputs, request: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first keys and values of a request, (length, heads, head_dim): as they are stored, NVFP4 as fp32."""
    table = inputs["block_tables"][request]
    rows = (table[0], table[1]) if table.ndim == 2 else (table, table)
    k, v = (reference.gather(pool, row, length) for pool, row in zip(pages(inputs), rows))
    scales = inputs.get("kv_block_scales")
    if scales is None:
        return k, v
    factors = (reference.gather(pool, row, length) for pool, row in zip(pages(inputs | {"kv_cache": scales}), rows))
    dequantised = [nvfp4_dequantize(values, f) for values, f in zip((k, v), factors)]
    return dequantised[0], dequantised[1]


def contiguous(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as contiguous (batch, length, heads, head_dim): what the peers read."""
    shape = shape_of(inputs)
    found = [tokens(inputs, request, shape.length) for request in range(shape.batch)]
    q = inputs["query"].unflatten(0, (shape.batch, shape.length)).contiguous()
    return q, torch.stack([k for k, _ in found]), torch.stack([v for _, v in found])


def tolerance(inputs: Inputs, out: torch.Tensor) -> tuple[float, float]:
    """rtol and atol of an output, by its type and the query's. Of 16-bit queries, caches of any type are exact."""
    if out.dtype == E4M3:
        return E4M3_TOLERANCE
    return FP8_TOLERANCE if inputs["query"].dtype == E4M3 else TOLERANCE


def rows_of(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of t as fp32; torch indexes no e4m3 on the CPU."""
    return t.view(torch.uint8)[index].view(t.dtype).float() if t.dtype == E4M3 else t[index].float()


def check(
    inputs: Inputs, out: torch.Tensor | FP4Tensor, seed: int = 0, slopes: torch.Tensor | None = None
) -> str | None:
    """None where `out` (tokens, heads, head_dim) agrees with fp32 attention on a sample of rows, else what is wrong.

    All elements are held to be finite; the sample is CHECK_ROWS query rows, the first and the last among them, of all
    heads of the first request, the last and one other. Outputs of many keys are small, and so is what is allowed.
    Where the inputs have a threshold of skip-softmax, keys may be left out whose probability is below that share of the
    row's largest: no tiles or order of blocks leaves out others.
    slopes: of ALiBi, a head's.
    """
    query, scale, factor = inputs["query"], float(inputs["bmm1_scale"]), float(inputs["bmm2_scale"])
    starts, lens = inputs["cum_seq_lens_q"].tolist(), inputs["seq_lens"].tolist()
    packed = isinstance(out, FP4Tensor)
    got = fp4.load(out, inputs["o_sf_scale"]) if isinstance(out, FP4Tensor) else out
    rtol, atol = tolerance(inputs, got)
    pick, worst = torch.Generator().manual_seed(seed), 0.0
    for b in {0, len(lens) - 1, int(torch.randint(len(lens), (1,), generator=pick))}:
        count, length = starts[b + 1] - starts[b], lens[b]
        k, v = (t.float() for t in tokens(inputs, b, length))
        if tuple(got.shape) != (*query.shape[:2], v.shape[2]):
            return f"shape {tuple(got.shape)}"
        index = torch.randint(count, (min(count, CHECK_ROWS),), generator=pick)
        index[0], index[-1] = 0, count - 1
        index = index.to(query.device)
        q = rows_of(query, starts[b] + index).unflatten(1, (k.shape[1], -1))
        logits = scale * torch.einsum("rhgd,nhd->rhgn", q, k)
        keys = torch.arange(length, device=query.device)
        if slopes is not None:
            logits += slopes.view(*logits.shape[1:3], 1) * (keys - index[:, None])[:, None, None]
        if inputs.get("causal", True):
            logits.masked_fill_((keys > (length - count + index)[:, None])[:, None, None], -math.inf)
        p = logits.softmax(-1)
        want = factor * torch.einsum("rhgn,nhd->rhgd", p, v)
        # of N(0, 1) data the sum of squares is e over the number of keys
        few = (p.square().sum(-1, keepdim=True) * (MANY_KEYS / math.e)).clamp(max=1).sqrt()
        allowed = rtol * want.abs() + atol * abs(factor) * few
        if inputs.get("skip_softmax_threshold_scale_factor"):
            allowed += _left_out(p, v, want, inputs["skip_softmax_threshold_scale_factor"] / length, factor)
        want, allowed = want.flatten(1, 2), allowed.flatten(1, 2)
        error = rows_of(got, starts[b] + index) - want
        if packed:  # a row at a time
            error, allowed = error.flatten(1).square().mean(1).sqrt(), NVFP4_ERROR * want.flatten(1).std(1)
        worst = max(worst, float((error.abs() / allowed).nan_to_num(math.inf).max()))
    if not bool(got.float().isfinite().all()):
        return "not finite"
    return None if worst <= 1 else f"off by {worst:.3g} times what is allowed"


def _left_out(p: torch.Tensor, v: torch.Tensor, want: torch.Tensor, threshold: float, factor: float) -> torch.Tensor:
    """How far an output may be from `want` without keys whose probability is below threshold times the largest."""
    weak = p.masked_fill(p >= 1.01 * threshold * p.amax(-1, keepdim=True), 0)  # a kernel's logits are rounded otherwise
    lost = weak.sum(-1, keepdim=True)
    return (abs(factor) * torch.einsum("rhgn,nhd->rhgd", weak, v.abs()) + lost * want.abs()) / (1 - lost)
