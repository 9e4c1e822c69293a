"""Batches in every form that FlashAttention's functions take, and attention in float64 for comparison."""

import torch

from wrappers import flash_attn_varlen_func, flash_attn_with_kvcache

HALF, INF, NAN = torch.float16, float("inf"), float("nan")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HQ, HKV, D = 4, 2, 64
LSE = {"return_softmax_lse": True}


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def starts_of(lens):
    return ints(0, *lens).cumsum(0).int()


def oracle(q, k, v, causal=False, window=(-1, -1), cap=0.0, scale=None, sinks=None, slopes=None, chunk=0):
    """Return o (m, Hq, Dv) and lse (Hq, m) of one request in float64, with natural logarithms. slopes: of ALiBi. chunk:
    positions in a chunk; a token sees no key of another one."""
    (m, heads, dim), n = q.shape, len(k)
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q.double(), k) * (dim**-0.5 if scale is None else scale)
    at, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    s = s if slopes is None else s - slopes.double()[:, None, None] * (at - key)
    s = cap * torch.tanh(s / cap) if cap else s
    left, right = window[0], 0 if causal else window[1]
    seen = (key >= at - left if left >= 0 else key >= 0) & (key <= at + right if right >= 0 else key >= 0)
    seen = seen & (key // chunk == at // chunk) if chunk else seen
    s = s.masked_fill(~seen, -INF)
    sink = torch.full((heads, m, 1), -INF) if sinks is None else sinks.double()[:, None, None].expand(-1, m, 1)
    lse = torch.cat([s, sink], 2).logsumexp(2)
    weights = (s - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hmn,nhd->mhd", weights, v), lse


class Batch:
    """Requests as packed rows, as pages of a table and as a cache with one entry per request. Free slots hold NaN."""

    def __init__(self, q_lens=(3, 0, 1, 2), kv_lens=(9, 4, 17, 1), page=4, dtype=HALF, dim_v=D, heads=(HQ, HKV)):
        draw = torch.Generator().manual_seed(len(q_lens) + page)
        self.q_lens, self.kv_lens, batch = q_lens, kv_lens, len(q_lens)
        self.q = torch.randn(sum(q_lens), heads[0], D, generator=draw).to(dtype)
        self.k = torch.randn(sum(kv_lens), heads[1], D, generator=draw).to(dtype)
        self.v = torch.randn(sum(kv_lens), heads[1], dim_v, generator=draw).to(dtype)
        self.q_starts, self.k_starts, self.lens = starts_of(q_lens), starts_of(kv_lens), ints(*kv_lens)
        self.max_q, self.max_k = max(q_lens), max(kv_lens)
        width = -(-self.max_k // page) + 1
        ids = torch.randperm(batch * width, generator=draw).int().view(batch, width)
        self.paged, self.dense = [], []
        for rows in (self.k, self.v):
            dense = torch.full((batch, width * page, *rows.shape[1:]), NAN).to(dtype)
            for entry, part in zip(dense, rows.split(kv_lens)):
                entry[: len(part)] = part
            pool = torch.empty_like(dense).view(batch * width, page, *rows.shape[1:])
            pool[ids.flatten().long()] = dense.view_as(pool)
            self.paged.append(pool)
            self.dense.append(dense)
        used = torch.arange(width) * page < self.lens[:, None]
        self.table = torch.where(used, ids, -7)  # entries after a request's last page

    def want(self, **options):
        parts = zip(self.q.split(self.q_lens), self.k.split(self.kv_lens), self.v.split(self.kv_lens))
        found = [oracle(*part, **options) for part in parts]
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)

    def ragged(self, **options):
        return flash_attn_varlen_func(
            self.q, self.k, self.v, self.q_starts, self.k_starts, self.max_q, self.max_k, **options
        )

    def tabled(self, table="block_table", **options):
        given = {table: self.table, "seqused_k": self.lens, "max_seqlen_q": self.max_q, "max_seqlen_k": self.max_k}
        return flash_attn_varlen_func(
            q=self.q, k=self.paged[0], v=self.paged[1], cu_seqlens_q=self.q_starts, **given | options
        )

    def cached(self, table="page_table", **options):
        given = {table: self.table, "cache_seqlens": self.lens, "max_seqlen_q": self.max_q} | options
        return flash_attn_with_kvcache(self.q, *self.paged, cu_seqlens_q=self.q_starts, **given)

    def entries(self, **options):
        given = {"cache_seqlens": self.lens, "cu_seqlens_q": self.q_starts, "max_seqlen_q": self.max_q} | options
        return flash_attn_with_kvcache(self.q, *self.dense, **given)


def check(got, want, tolerance=2e-3):
    o, lse = got
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == want[1].shape
    torch.testing.assert_close(o.double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-3, atol=1e-3)


def good_call(function):
    """Return keyword arguments of a valid call of a function."""
    batch = Batch(q_lens=(2, 2), kv_lens=(20, 9), page=16, dtype=BF16)
    if function == "flash_attn_varlen_func":
        return {
            "q": batch.q, "k": batch.paged[0], "v": batch.paged[1], "cu_seqlens_q": batch.q_starts, "max_seqlen_q": 2,
            "seqused_k": batch.lens, "block_table": batch.table, "causal": True,
        }  # fmt: skip
    q = batch.q.unflatten(0, (2, 2))
    if function == "flash_attn_func":
        return {"q": q, "k": batch.dense[0][:, :1].expand(-1, 16, -1, -1).clone(), "v": batch.dense[1][:, :16].clone()}
    new = torch.ones(2, 2, HKV, D, dtype=BF16)
    cache = dict(zip(("k_cache", "v_cache"), batch.paged))
    return {"q": q, "k": new, "v": new, "cache_seqlens": batch.lens, "block_table": batch.table} | cache


BATCH = Batch()
SINKS = torch.linspace(-2, 2, HQ)
EQUAL = Batch(q_lens=(2, 2, 2), kv_lens=(9, 4, 17))


def equal(rows):
    return rows.unflatten(0, (3, 2))


def appended(form, page=4, dtype=HALF):
    """Return (arguments of a call that appends, the batch it must give, the rows of each request before it)."""
    counts = (2, 2, 2) if form in ("equal", "entries") else (3, 0, 1)
    old = (5, 0, 11)
    whole = Batch(q_lens=counts, kv_lens=tuple(a + b for a, b in zip(old, counts)), page=page, dtype=dtype)
    cut = [[part[len(part) - n :] for part, n in zip(t.split(whole.kv_lens), counts)] for t in (whole.k, whole.v)]
    for pool in (*whole.paged, *whole.dense):  # remove the rows that the call appends
        pool.nan_to_num_(nan=0.0)
    for b, (had, has) in enumerate(zip(old, whole.kv_lens)):
        for t in range(had, has):
            for pool, dense in zip(whole.paged, whole.dense):
                pool[whole.table[b, t // page], t % page] = dense[b, t] = 0
    k, v = (torch.stack(t) if form in ("equal", "entries") else torch.cat(t) for t in cut)
    given = {"cache_seqlens": ints(*old), "causal": True, "k": k, "v": v} | LSE
    if form == "entries":
        cache = whole.dense
    else:
        cache, given["block_table"] = whole.paged, whole.table
    if form == "packed":
        given |= {"cu_seqlens_q": whole.q_starts, "cu_seqlens_k_new": whole.q_starts, "max_seqlen_q": 3}
    else:
        whole.q = whole.q.unflatten(0, (3, 2))
    given |= {"q": whole.q, "k_cache": cache[0], "v_cache": cache[1]}
    return given, whole, old


def low(batch):
    for name in ("q", "k", "v"):
        setattr(batch, name, getattr(batch, name).to(E4M3))
    batch.paged, batch.dense = ([t.to(E4M3) for t in pools] for pools in (batch.paged, batch.dense))
    return batch
