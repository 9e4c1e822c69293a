"""Batches of the prefill family in every form, and an independent oracle."""

import itertools

import torch

from wrappers import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    segment_packbits,
)

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
Q_LENS, KV_LENS = (3, 0, 7, 1, 2, 4), (5, 4, 7, 9, 0, 2)  # some requests lack rows or keys, one has more rows than keys
HQ, HKV, D = 6, 2, 64  # HQ is no power of two
WORKSPACE = torch.empty(0)


def ints(numbers):
    return torch.tensor(list(numbers), dtype=torch.int32)


def starts_of(lens):
    return ints(itertools.accumulate(lens, initial=0))


# ---- an independent oracle: one row and one head at a time, fp64


def rotated(x, first, scale, theta):
    """Apply RoPE to x (rows, heads, D) at positions from `first` on; each pair (d, d + D / 2) is one complex number."""
    half = x.shape[2] // 2
    at = torch.arange(first, first + len(x), dtype=torch.float64)
    angle = at[:, None] / scale * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    pairs *= torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def slope(h, heads):
    whole = 2 ** (heads.bit_length() - 1)
    return 2 ** (-8 * (h + 1) / whole) if h < whole else 2 ** (-4 * (2 * (h - whole) + 1) / whole)


def oracle(q, k, v, *, causal=False, scale=None, window=-1, cap=0.0, mask=None, sinks=None, mode="NONE",
           rope=(1.0, 1e4)):  # fmt: skip
    """Return o and lse in fp64."""
    (m, heads, dim), n = q.shape, len(k)
    o, lse = torch.zeros(m, heads, v.shape[2], dtype=torch.float64), torch.full((m, heads), -INF, dtype=torch.float64)
    if mode == "ROPE_LLAMA":
        q, k = rotated(q, n - m, *rope), rotated(k, 0, *rope)
    for i, h in itertools.product(range(m), range(heads)):
        position = i + n - m
        kept = [j for j in range(n) if (mask[i, j] if mask is not None else not causal or j <= position)]
        kept = [j for j in kept if window < 0 or j >= position - window]
        group = h // (heads // k.shape[1])
        s = k[kept, group].double() @ q[i, h].double() * (dim**-0.5 if scale is None else scale)
        if mode == "ALIBI":
            s = s + slope(h, heads) * (torch.tensor(kept, dtype=torch.float64) - i)
        if cap > 0:
            s = cap * torch.tanh(s / cap)
        every = s if sinks is None else torch.cat([s, sinks[h, None].double()])
        lse[i, h] = torch.logsumexp(every, 0) / torch.log(torch.tensor(2.0, dtype=torch.float64))
        o[i, h] = torch.exp(s - torch.logsumexp(every, 0)) @ v[kept, group].double()
    return o, lse


def meant(options):
    """Return the options of `oracle` that are those of a plan."""
    names = {"window_left": "window", "logits_soft_cap": "cap", "sm_scale": "scale", "pos_encoding_mode": "mode"}
    rope = options.get("rope_scale", 1.0), options.get("rope_theta", 1e4)
    return {names.get(k, k): v for k, v in options.items() if not k.startswith("rope")} | {"rope": rope}


class Case:
    """A batch of requests in all forms. Slots of the pool that no request uses hold NaN."""

    def __init__(self, page=4, layout="NHD", dtype=HALF, q_lens=Q_LENS, kv_lens=KV_LENS, dim_vo=D, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.q_lens, self.kv_lens, self.page, self.layout = q_lens, kv_lens, page, layout
        self.q = torch.randn(sum(q_lens), HQ, D, generator=draw).to(dtype)
        self.k = torch.randn(sum(kv_lens), HKV, D, generator=draw).to(dtype)
        self.v = torch.randn(sum(kv_lens), HKV, dim_vo, generator=draw).to(dtype)
        counts = [-(-n // page) for n in kv_lens]
        pages = torch.randperm(sum(counts) + 2, generator=draw)[: sum(counts)]
        self.qo_indptr, self.kv_indptr, self.page_indptr = map(starts_of, (q_lens, kv_lens, counts))
        self.indices = pages.int()
        self.last = ints(n - (c - 1) * page if c else 3 for n, c in zip(kv_lens, counts))
        self.cache = []
        for rows in (self.k, self.v):
            pool = torch.full((len(pages) + 2, page, HKV, rows.shape[2]), NAN, dtype=dtype)
            for r, n in enumerate(kv_lens):
                for t in range(n):
                    at = pages[int(self.page_indptr[r]) + t // page]
                    pool[at, t % page] = rows[int(self.kv_indptr[r]) + t]
            self.cache.append(pool if layout == "NHD" else pool.transpose(1, 2).contiguous())
        self.masks = [torch.rand(m, n, generator=draw) < 0.6 for m, n in zip(q_lens, kv_lens)]
        self.custom_mask = torch.cat([torch.ones(0, dtype=torch.bool), *(m.flatten() for m in self.masks)])
        bits = starts_of(m.numel() for m in self.masks)
        self.packed, self.mask_starts = segment_packbits(self.custom_mask, bits, "little")
        self.index = (self.qo_indptr, self.page_indptr, self.indices, self.last)
        self.options = dict(q_data_type=dtype, head_dim_vo=dim_vo)

    def requests(self):
        """Return q, k, v and mask of each request."""
        q, k, v = self.q.split(self.q_lens), self.k.split(self.kv_lens), self.v.split(self.kv_lens)
        return zip(q, k, v, self.masks)

    def want(self, masked=False, **options):
        found = [oracle(q, k, v, mask=mask if masked else None, **options) for q, k, v, mask in self.requests()]
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])

    def paged(self, kind=BatchPrefillWithPagedKVCacheWrapper, **options):
        wrapper = kind(WORKSPACE, self.layout)
        wrapper.plan(*self.index, HQ, HKV, D, self.page, **self.options | options)
        return wrapper

    def ragged(self, **options):
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, self.layout)
        wrapper.plan(self.qo_indptr, self.kv_indptr, HQ, HKV, D, **self.options | options)
        return wrapper

    def rows(self):
        return (self.k, self.v) if self.layout == "NHD" else (self.k.transpose(0, 1), self.v.transpose(0, 1))


def check(got, want, tolerance=2e-3):
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-3)
