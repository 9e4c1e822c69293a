"""A benchmark case of attention: its inputs, the least work that prefill must do for it, and a quick check of a
result."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from wrappers import FP4Tensor, fp4, nvfp4_dequantize, reference

from .cases.attention import MANY_KEYS

Inputs = dict[str, Any]  # keyword arguments of wrappers.trtllm_batch_context_with_kv_cache
CHECK_ROWS = 48  # query rows per request that are checked
E4M3 = torch.float8_e4m3fn
TOLERANCE = 1e-2, 1e-2  # for bf16 and N(0, 1) data: rtol, and atol if at most MANY_KEYS keys have weight
FP8_TOLERANCE = 4e-2, 6e-2  # for e4m3 queries; their probabilities are e4m3 too
E4M3_TOLERANCE = 5e-2, 7e-2  # for e4m3 outputs
NVFP4_ERROR = 0.3  # RMS error of an NVFP4 output, relative to the standard deviation of its row


@dataclass(frozen=True)
class BatchShape:
    """The shape of a batch. The query tokens of a request are its last tokens. window: keys before a token that it
    sees, -1 for all."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_vo: int
    causal: bool
    window: int = -1

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def equal(self) -> bool:
        """Return whether all requests have the same length and all their tokens are queries."""
        return len({*self.q_lens, *self.kv_lens}) == 1

    @property
    def length(self) -> int:
        """Return the common length of the requests. Raise ValueError if they are not equal."""
        if not self.equal:
            new, all_ = (f"{min(lens)} to {max(lens)}" for lens in (self.q_lens, self.kv_lens))
            raise ValueError(f"requests: {new} query tokens of {all_} tokens, must be the same in all")
        return self.q_lens[0]

    @property
    def flops(self) -> float:
        """Return the operations of both matrix products. With a causal mask, half of a request's query x query part is
        left out, and with a window all keys before it."""
        pairs = sum(m * (n - m / 2 if self.causal else n) for m, n in zip(self.q_lens, self.kv_lens))
        if self.window >= 0:
            pairs -= sum(max(0, i - self.window) for m, n in zip(self.q_lens, self.kv_lens) for i in range(n - m, n))
        return 2 * self.heads_q * (self.dim_qk + self.dim_vo) * pairs

    @property
    def bytes(self) -> int:
        """Return the bytes of Q, K and V, read once, and of O, written once, at two bytes per element."""
        rows = self.heads_q * sum(self.q_lens) + self.heads_kv * sum(self.kv_lens)
        return 2 * rows * (self.dim_qk + self.dim_vo)


def shape_of(inputs: Inputs) -> BatchShape:
    """Return the shape of a call from its inputs. Waits for the device."""
    query, (k, v), starts = inputs["query"], pages(inputs), inputs["cum_seq_lens_q"]
    q_lens, kv_lens = (starts[1:] - starts[:-1]).tolist(), inputs["seq_lens"].tolist()
    dim_vo = v.shape[3] * (2 if v.dtype == torch.uint8 else 1)
    heads, masks = (query.shape[1], k.shape[1]), (inputs.get("causal", True), inputs.get("window_left", -1))
    return BatchShape(tuple(q_lens), tuple(kv_lens), *heads, query.shape[2], dim_vo, *masks)


def pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K and V pages as views (pages, heads, page size, head_dim) of the cache."""
    cache = inputs["kv_cache"]
    k, v = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, -1])
    if inputs.get("kv_layout", "HND") == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return k, v


def tokens(inputs: Inputs, request: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first keys and values of a request, (length, heads, head_dim), in the stored dtype; NVFP4 as fp32."""
    table = inputs["block_tables"][request]
    rows = (table[0], table[1]) if table.ndim == 2 else (table, table)
    k, v = (reference.gather(pool, row, length) for pool, row in zip(pages(inputs), rows))
    scales = inputs.get("kv_block_scales")
    if scales is None:
        return k, v
    if scales[0].dtype is torch.float32:
        views = pages(inputs | {"kv_cache": tuple(t.unsqueeze(-1) for t in scales)})
        of_k, of_v = (reference.gather(pool, row, length) for pool, row in zip(views, rows))
        return k.float() * of_k, v.float() * of_v
    factors = (reference.gather(pool, row, length) for pool, row in zip(pages(inputs | {"kv_cache": scales}), rows))
    dequantised = [nvfp4_dequantize(values, f) for values, f in zip((k, v), factors)]
    return dequantised[0], dequantised[1]


def unpaged(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of all requests as rows without pages, (tokens, heads, head_dim)."""
    found = [tokens(inputs, request, length) for request, length in enumerate(inputs["seq_lens"].tolist())]
    return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])


def contiguous(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q, K and V of equal requests as contiguous (batch, length, heads, head_dim)."""
    shape = shape_of(inputs)
    q, k, v = (t.unflatten(0, (shape.batch, shape.length)) for t in (inputs["query"], *unpaged(inputs)))
    return q.contiguous(), k, v


def csr(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len) of the inputs' block table."""
    lens, table = inputs["seq_lens"], inputs["block_tables"]
    page = pages(inputs)[0].shape[2]
    counts = (lens + page - 1) // page
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist())])
    return inputs["cum_seq_lens_q"], starts, indices, lens - (counts - 1) * page


def tolerance(inputs: Inputs, out: torch.Tensor) -> tuple[float, float]:
    """Return rtol and atol of an output, by its dtype and the query's. With 16-bit queries, caches of any dtype are
    exact."""
    if out.dtype == E4M3:
        return E4M3_TOLERANCE
    return FP8_TOLERANCE if inputs["query"].dtype == E4M3 else TOLERANCE


def rows_of(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of t as fp32. Torch does not index e4m3 on the CPU, so the rows are selected as bytes."""
    return t.view(torch.uint8)[index].view(t.dtype).float() if t.dtype == E4M3 else t[index].float()


def check(
    inputs: Inputs, out: torch.Tensor | FP4Tensor, seed: int = 0, slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Compare `out` (tokens, heads, head_dim) with fp32 attention on a sample of rows. Return None if it agrees, else
    the error.

    The sample has CHECK_ROWS query rows, including the first and the last, of all heads of the first request, the last,
    the shortest, the longest and one other. All elements must be finite. Outputs over many keys are small, and the
    tolerance shrinks with them. If the inputs have a skip-softmax threshold, a kernel may leave out keys with a
    probability below that share of the row's largest: no tile size or order of blocks leaves out others. slopes: of
    ALiBi, one per head. mask: bool (query rows, keys) of each request, in place of the causal mask. All rows see a key.
    """
    query, scale, factor = inputs["query"], float(inputs["bmm1_scale"]), float(inputs["bmm2_scale"])
    starts, lens = inputs["cum_seq_lens_q"].tolist(), inputs["seq_lens"].tolist()
    packed = isinstance(out, FP4Tensor)
    got = fp4.load(out, inputs["o_sf_scale"]) if isinstance(out, FP4Tensor) else out
    rtol, atol = tolerance(inputs, got)
    pick, worst = torch.Generator().manual_seed(seed), 0.0
    chosen = {0, len(lens) - 1, lens.index(min(lens)), lens.index(max(lens))}
    for b in sorted(chosen | {int(torch.randint(len(lens), (1,), generator=pick))}):
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
        if mask is not None:
            logits.masked_fill_(~mask[index][:, None, None], -math.inf)
        elif inputs.get("causal", True):
            logits.masked_fill_((keys > (length - count + index)[:, None])[:, None, None], -math.inf)
        if (window := inputs.get("window_left", -1)) >= 0:
            logits.masked_fill_((keys < (length - count + index - window)[:, None])[:, None, None], -math.inf)
        p = logits.softmax(-1)
        want = factor * torch.einsum("rhgn,nhd->rhgd", p, v)
        # for N(0, 1) data the sum of squares is e over the number of keys
        few = (p.square().sum(-1, keepdim=True) * (MANY_KEYS / math.e)).clamp(max=1).sqrt()
        allowed = rtol * want.abs() + atol * abs(factor) * few
        if inputs.get("skip_softmax_threshold_scale_factor"):
            allowed += _left_out(p, v, want, inputs["skip_softmax_threshold_scale_factor"] / length, factor)
        want, allowed = want.flatten(1, 2), allowed.flatten(1, 2)
        error = rows_of(got, starts[b] + index) - want
        if packed:  # compared per row
            error, allowed = error.flatten(1).square().mean(1).sqrt(), NVFP4_ERROR * want.flatten(1).std(1)
        worst = max(worst, float((error.abs() / allowed).nan_to_num(math.inf).max()))
    if not bool(got.float().isfinite().all()):
        return "not finite"
    return None if worst <= 1 else f"off by {worst:.3g} times what is allowed"


def _left_out(p: torch.Tensor, v: torch.Tensor, want: torch.Tensor, threshold: float, factor: float) -> torch.Tensor:
    """Bound the change of `want` when keys with a probability below threshold times the largest are left out."""
    weak = p.masked_fill(p >= 1.01 * threshold * p.amax(-1, keepdim=True), 0)  # a kernel's logits round differently
    lost = weak.sum(-1, keepdim=True)
    return (abs(factor) * torch.einsum("rhgn,nhd->rhgd", weak, v.abs()) + lost * want.abs()) / (1 - lost)
