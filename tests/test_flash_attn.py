"""FlashAttention's functions on the CPU against attention in float64, written here; what they refuse, and when."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.test_prefill_wrapper import here, launches  # noqa: F401 - fixtures
from wrappers import explain, flash_attn, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from wrappers.explanation import problem_of

HALF, INF, NAN = torch.float16, float("inf"), float("nan")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HQ, HKV, D = 4, 2, 64
LSE = {"return_softmax_lse": True}


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def starts_of(lens):
    return ints(0, *lens).cumsum(0).int()


def oracle(q, k, v, causal=False, window=(-1, -1), cap=0.0, scale=None, sinks=None):
    """o (m, Hq, Dv), lse (Hq, m) of one request, float64: natural logarithms."""
    (m, heads, dim), n = q.shape, len(k)
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q.double(), k) * (dim**-0.5 if scale is None else scale)
    s = cap * torch.tanh(s / cap) if cap else s
    at, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    left, right = window[0], 0 if causal else window[1]
    seen = (key >= at - left if left >= 0 else key >= 0) & (key <= at + right if right >= 0 else key >= 0)
    s = s.masked_fill(~seen, -INF)
    sink = torch.full((heads, m, 1), -INF) if sinks is None else sinks.double()[:, None, None].expand(-1, m, 1)
    lse = torch.cat([s, sink], 2).logsumexp(2)
    weights = (s - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hmn,nhd->mhd", weights, v), lse


class Batch:
    """Requests as rows, as pages of a table and as a cache with an entry a request; free slots hold NaN."""

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
        self.table = torch.where(used, ids, -7)  # behind a request's last page

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
    """Keyword arguments of a good call, by a function's name."""
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
OPTIONS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3, "causal": True}, {"scale": 0.3, "causal": True}),
    "cap": ({"softcap": 1.5}, {"cap": 1.5}),
    "cap none": ({"softcap": None, "window_size": None}, {}),
    "left": ({"window_size": (2, -1)}, {"window": (2, -1)}),
    "left, causal": ({"window_size": [2, 5], "causal": True}, {"window": (2, 5), "causal": True}),
    "left, right 0": ({"window_size": (2, 0)}, {"window": (2, 0)}),
    "right 0": ({"window_size": (None, 0)}, {"causal": True}),
    "window none": ({"window_size": (None, None)}, {}),
    "sinks": ({"s_aux": SINKS, "causal": True}, {"sinks": SINKS, "causal": True}),
    "all": ({"sinks": SINKS, "causal": True, "window_size": (3, 0), "softcap": 2.0},
            {"sinks": SINKS, "causal": True, "window": (3, 0), "cap": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("form", ["ragged", "tabled", "cached", "entries"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_every_form(form, name):
    given, meant = OPTIONS[name]
    want = BATCH.want(**meant)
    check(getattr(BATCH, form)(**given, **LSE), want)
    out = getattr(BATCH, form)(**given)
    torch.testing.assert_close(out.double(), want[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("dim_v", [32, D])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_page_sizes_head_dims_and_dtypes(page, dim_v, dtype):
    batch = Batch(q_lens=(70, 2), kv_lens=(75, 40), page=page, dtype=dtype, dim_v=dim_v)
    want = batch.want(causal=True)
    for found in (batch.ragged, batch.tabled, batch.cached, batch.entries):
        check(found(causal=True, **LSE), want, 2e-3 if dtype is HALF else 2e-2)


def test_names_of_tables_and_of_lengths():
    want = BATCH.want()
    for table in ("block_table", "page_table"):
        check(BATCH.tabled(table, return_lse=True), want)
        check(BATCH.cached(table, return_lse=True), want)
    check(BATCH.tabled(seqused_k=None, cu_seqlens_k=BATCH.k_starts, **LSE), want)  # FlashAttention 2
    check(BATCH.tabled(cu_seqlens_k=BATCH.k_starts * 0, **LSE), want)  # seqused_k says the lengths


def test_rows_without_keys_and_of_no_request():
    batch = Batch(q_lens=(2, 3), kv_lens=(0, 1))
    for found in (batch.ragged, batch.tabled, batch.cached, batch.entries):
        o, lse = found(causal=True, **LSE)
        assert not o[:4].any() and (lse[:, :4] == -INF).all() and (lse[:, 4] > -INF).all()
        o, lse = found(causal=True, sinks=SINKS, **LSE)
        assert not o[:4].any()
        torch.testing.assert_close(lse[:, :4], SINKS[:, None].expand(-1, 4))
    padded = torch.cat([BATCH.q, torch.full((3, HQ, D), NAN, dtype=HALF)])  # as in a graph
    o = flash_attn_varlen_func(padded, BATCH.k, BATCH.v, BATCH.q_starts, BATCH.k_starts, 3, 17)
    torch.testing.assert_close(o[: len(BATCH.q)].double(), BATCH.want()[0], rtol=2e-3, atol=2e-3)


def test_outputs_are_written_in_place():
    wide = torch.full((len(BATCH.q) + 2, HQ, 2 * D), 7.0, dtype=HALF)
    for found in (BATCH.ragged, BATCH.tabled, BATCH.cached, BATCH.entries):
        out = wide[1:-1, :, D:]
        got = found(out=out, causal=True)
        assert got is out
        torch.testing.assert_close(out.double(), BATCH.want(causal=True)[0], rtol=2e-3, atol=2e-3)
        assert (wide[..., :D] == 7).all() and (wide[0] == 7).all() and (wide[-1] == 7).all()
        wide.fill_(7.0)


@pytest.mark.parametrize("name", ["s_aux", "sinks", "learnable_sink"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF, BF16])
def test_sinks_of_every_name_and_dtype(name, dtype):
    sinks = SINKS.to(dtype)
    check(BATCH.ragged(**{name: sinks}, **LSE), BATCH.want(sinks=sinks))
    check(BATCH.cached(**{name: sinks}, **LSE), BATCH.want(sinks=sinks))


@pytest.mark.parametrize("bound", [None, 0, 3, 1 << 20, torch.tensor(1)])
def test_bounds_of_query_lengths_change_nothing(bound):
    for causal in (False, True):
        want = BATCH.want(causal=causal)
        check(BATCH.tabled(max_seqlen_q=bound, causal=causal, **LSE), want)
        check(BATCH.cached(max_seqlen_q=bound, causal=causal, **LSE), want)


HINTS = {
    "pack_gqa": True, "scheduler_metadata": ints(1), "sm_margin": 4, "deterministic": True,
    "fa_version": 3, "ver": 4, "max_seqlen_k": 1, "min_seqlen_k": 3, "seqlen_k_per_split": 7,
    "disable_scheduler_metadata": True, "rotary_interleaved": False,
}  # fmt: skip


def test_hints_and_neutral_values_change_nothing():
    assert HINTS.keys() == flash_attn.HINTS
    assert all(torch.equal(BATCH.cached(num_splits=n), BATCH.cached()) for n in (0, 1, 32))
    neutral = flash_attn.REFUSED | dict.fromkeys(flash_attn.REFUSED) | {"dropout_p": 0.0, "cp_world_size": 1}
    for found in (BATCH.cached, BATCH.entries):
        assert torch.equal(found(**HINTS, **neutral), found())
    del HINTS["max_seqlen_k"]
    assert torch.equal(BATCH.ragged(**HINTS, **flash_attn.REFUSED), BATCH.ragged())


# ---- queries of one length, caches without a table


EQUAL = Batch(q_lens=(2, 2, 2), kv_lens=(9, 4, 17))


def equal(rows):
    return rows.unflatten(0, (3, 2))


@pytest.mark.parametrize("name", OPTIONS)
def test_queries_of_one_length(name):
    """lse is (B, Hq, S)."""
    given, meant = OPTIONS[name]
    o, lse = EQUAL.want(**meant)
    want = equal(o), lse.unflatten(1, (3, 2)).transpose(0, 1)
    q = equal(EQUAL.q)
    for cache, table in ((EQUAL.paged, EQUAL.table), (EQUAL.dense, None)):
        for query in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):
            got = flash_attn_with_kvcache(query, *cache, cache_seqlens=EQUAL.lens, block_table=table, **given, **LSE)
            check(got, want)
    out = torch.empty(3, 4, HQ, D, dtype=HALF)[:, ::2]
    got, _ = flash_attn_with_kvcache(q, *EQUAL.dense, cache_seqlens=EQUAL.lens, out=out, **given, **LSE)
    assert got is out
    check((out, want[1].float().contiguous()), want)


@pytest.mark.parametrize("rows,page", [(64, 64), (96, 32), (48, 16), (24, 8), (20, 20), (7, 7)])
def test_caches_without_a_table_are_pages(rows, page):
    """Of a size that TMA fetches, where one divides the rows; whatever the strides are, no bytes are copied."""
    draw = torch.Generator().manual_seed(rows)
    q, whole = (torch.randn(*shape, D, generator=draw).half() for shape in ((3, 2, HQ), (3, rows, 2 * HKV)))
    lens = ints(rows, 0, rows // 2)
    k, v = whole[:, :, :HKV], whole[:, :, HKV:]
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    for n in (3, 2, 1):
        for cache, size in (((k, v), page), (turned, page if n == 1 else rows)):
            cache = [t[3 - n :] for t in cache]
            got = flash_attn_with_kvcache(q[3 - n :], *cache, cache_seqlens=lens[3 - n :], causal=True, **LSE)
            found = [oracle(*part, causal=True) for part in zip(
                q[3 - n :], *([row[:m] for row, m in zip(t, lens[3 - n :].tolist())] for t in cache))]  # fmt: skip
            check(got, tuple(map(torch.stack, zip(*found))))
            p = problem_of(flash_attn_with_kvcache, q[3 - n :], *cache, cache_seqlens=lens[3 - n :])
            assert p.k.shape[2] == size
            assert p.k.untyped_storage().data_ptr() == cache[0].untyped_storage().data_ptr()


def test_entries_of_a_cache_and_lengths():
    q = equal(EQUAL.q)[:2]
    k, v = (t[:, :4] for t in EQUAL.dense)  # 4 keys each
    index = ints(2, 0)
    want = [torch.stack(t) for t in zip(*(oracle(q[i], k[e], v[e], causal=True) for i, e in enumerate((2, 0))))]
    for lens in (4, ints(4, 4), None):
        check(flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_batch_idx=index, causal=True, **LSE), want)
    short = [torch.stack(t) for t in zip(*(oracle(q[i], k[i, :3], v[i, :3]) for i in range(2)))]
    check(flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=3, **LSE), short)


def test_requests_of_one_length():
    q, (k, v) = equal(EQUAL.q), (t[:, :4] for t in EQUAL.dense)
    for options in ({}, {"causal": True}, {"causal": True, "sinks": SINKS, "window_size": (1, 0)}):
        meant = {{"window_size": "window"}.get(name, name): value for name, value in options.items()}
        want = [torch.stack(t) for t in zip(*(oracle(*part, **meant) for part in zip(q, k, v)))]
        check(flash_attn_func(q, k, v, **options, **LSE), want)
        out = torch.empty_like(q)
        assert flash_attn_func(q, k, v, out=out, **options) is out
        check((out, want[1].float()), want)


# ---- new keys


def appended(form, page=4):
    """(arguments of a call that appends, what it must give, the rows of each request after it)."""
    counts = (2, 2, 2) if form in ("equal", "entries") else (3, 0, 1)
    old = (5, 0, 11)
    whole = Batch(q_lens=counts, kv_lens=tuple(a + b for a, b in zip(old, counts)), page=page)
    cut = [[part[len(part) - n :] for part, n in zip(t.split(whole.kv_lens), counts)] for t in (whole.k, whole.v)]
    for pool in (*whole.paged, *whole.dense):  # nothing new is there yet
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


@pytest.mark.parametrize("form", ["equal", "packed", "entries"])
def test_new_keys_are_written_and_seen(form):
    given, whole, old = appended(form)
    caches = given["k_cache"], given["v_cache"]
    before = [t.clone() for t in caches]
    o, lse = flash_attn_with_kvcache(**given)
    if form != "packed":
        o, lse, whole.q = o.flatten(0, 1), lse.transpose(0, 1).flatten(1), whole.q.flatten(0, 1)
    check((o, lse.contiguous()), whole.want(causal=True))
    changed = [(a != b).any(-1).any(-1).sum() for a, b in zip(caches, before)]
    assert changed == [sum(whole.kv_lens) - sum(old)] * 2
    again = given | {"k": None, "v": None, "cache_seqlens": whole.lens}  # the cache holds them
    o2, lse2 = flash_attn_with_kvcache(**again)
    assert torch.equal(o2.view_as(o), o)


def test_new_keys_of_an_e4m3_cache():
    given, whole, _ = appended("equal")
    given |= {name: given[name].to(E4M3) for name in ("k", "v", "k_cache", "v_cache")}
    o, lse = flash_attn_with_kvcache(**given)
    whole.q, whole.k, whole.v = whole.q.flatten(0, 1), whole.k.to(E4M3), whole.v.to(E4M3)
    check((o.flatten(0, 1), lse.transpose(0, 1).flatten(1).contiguous()), whole.want(causal=True))


def test_rows_without_a_place_are_not_written():
    """A request of a graph's padding: its length is -1, its table holds -1."""
    given, whole, _ = appended("equal")
    lens, table = given["cache_seqlens"], given["block_table"].clone()
    given["q"], given["k"], given["v"] = (given[name][:, :1] for name in ("q", "k", "v"))
    lens[1], table[1] = -1, -1
    before = given["k_cache"].clone()
    flash_attn_with_kvcache(**given | {"block_table": table})
    assert ((given["k_cache"] != before).any(-1).any(-1).sum()) == 2


BAD_APPENDS = {
    "softcap: -1.0": {"softcap": -1.0},
    "k: None|k: NoneType": {"k": None},
    "v: NoneType": {"v": None},
    "cache_seqlens: None, required where k is given": {"cache_seqlens": None},
    "k: shape": {"k": torch.zeros(3, 2, HKV, 32, dtype=HALF)},
    "v: shape": {"v": torch.zeros(3, 1, HKV, D, dtype=HALF)},
    "k: dtype torch.float32, must be that of k_cache": {"k": torch.zeros(3, 2, HKV, D)},
    "cache_seqlens \\+ new keys: 102 of request 1, must be in": {"cache_seqlens": ints(5, 100, 0)},
    "block_table: -3 in column 0 of request 0": {"block_table": torch.full((3, 5), -3, dtype=torch.int32)},
    "out: dtype": {"out": torch.zeros(3, 2, HQ, D)},
    "window_size": {"window_size": (1, 1), "causal": False},
    "rotary_cos: Tensor, not supported": {"rotary_cos": torch.zeros(4)},
    "s_aux: shape": {"s_aux": torch.zeros(3)},
    "k: shape .*, must have 3 dimensions": {"cu_seqlens_k_new": ints(0, 2, 4, 6)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_APPENDS)
def test_nothing_is_written_before_a_refusal(message):
    given, *_ = appended("equal")
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^({message})"):
        flash_attn_with_kvcache(**given | BAD_APPENDS[message])
    assert torch.equal(given["k_cache"], before[0]) and torch.equal(given["v_cache"], before[1])


def test_nothing_is_written_where_no_kernel_serves(launches):  # noqa: F811
    given, *_ = appended("equal")
    narrow = {name: given[name][..., :32].contiguous() for name in ("q", "k", "v", "k_cache", "v_cache")}
    for change, message in ({"softmax_scale": -1.0}, "softmax_scale: -1.0; CUDA"), (narrow, "q: no attention kernel"):
        bad = given | change
        before = bad["k_cache"].clone()
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            flash_attn_with_kvcache(**bad)
        assert torch.equal(bad["k_cache"], before) and not launches
    flash_attn_with_kvcache(**given)
    assert len(launches) == 1


def test_caches_that_would_be_read_while_they_are_written():
    given, *_ = appended("equal")
    given["k"] = given["k_cache"].view(-1, HKV, D)[:6].view(3, 2, HKV, D)
    with pytest.raises(ValueError, match="^k_cache: shape .* overlaps the memory of k, must be apart"):
        flash_attn_with_kvcache(**given)


def test_grad_is_refused_before_anything_is_written():
    given, *_ = appended("equal")
    before = given["k_cache"].clone()
    for name in ("q", "k", "v"):
        with pytest.raises(RuntimeError, match=f"^{name}: requires grad"):
            flash_attn_with_kvcache(**given | {name: given[name].clone().requires_grad_()})
    assert torch.equal(given["k_cache"], before)


def test_explain_appends_nothing():
    given, *_ = appended("equal")
    before = given["k_cache"].clone()
    said = explain(function=flash_attn_with_kvcache, arch="sm_90a", **given)
    assert said.runs.startswith("attention.decode fp16_d64")
    assert torch.equal(given["k_cache"], before)


# ---- 8 bits


def low(batch):
    for name in ("q", "k", "v"):
        setattr(batch, name, getattr(batch, name).to(E4M3))
    batch.paged, batch.dense = ([t.to(E4M3) for t in pools] for pools in (batch.paged, batch.dense))
    return batch


def scaled(batch, q=1.0, k=1.0, v=1.0):
    """A batch of what the values of another stand for. q, k, v: factors, or one a KV head."""
    real = SimpleNamespace(q_lens=batch.q_lens, kv_lens=batch.kv_lens)
    factors = [torch.as_tensor(x).double().expand(HKV)[:, None] for x in (q, k, v)]
    real.q = batch.q.double() * factors[0].repeat_interleave(HQ // HKV, 0)
    real.k, real.v = batch.k.double() * factors[1], batch.v.double() * factors[2]
    return real


@pytest.mark.parametrize("form", ["ragged", "tabled", "cached", "entries"])
@pytest.mark.parametrize("a_head", [False, True])
def test_descales(form, a_head):
    batch = low(Batch(page=8))
    factors = [torch.tensor(x if a_head else x[:1]) for x in ((0.5, 2.0), (1.5, 0.7), (3.0, 0.25))]
    descales = [x.expand(len(batch.q_lens), HKV) for x in factors]
    names = ("q_descale", "k_descale", "v_descale")
    got = getattr(batch, form)(**dict(zip(names, descales)), causal=True, **LSE)
    assert got[0].dtype == BF16
    check(got, Batch.want(scaled(batch, *factors), causal=True), 2e-2)
    out = torch.empty_like(got[0], dtype=HALF)
    if not a_head:
        assert getattr(batch, form)(**dict(zip(names, factors)), causal=True, out=out) is out
        torch.testing.assert_close(out.float(), got[0].float(), rtol=1e-2, atol=1e-2)


def test_descales_of_16_bits_are_not_applied():
    """Each goes with its own tensor, as in FlashAttention 3."""
    half = torch.full((1, 1), 0.5).expand(4, HKV)
    three = {"q_descale": half, "k_descale": half, "v_descale": half}
    assert torch.equal(BATCH.ragged(**three), BATCH.ragged())
    assert torch.equal(BATCH.ragged(k_descale=torch.rand(4, HKV)), BATCH.ragged())
    batch = low(Batch(page=8))
    batch.q = batch.q.half()
    check(batch.tabled(**three, **LSE), Batch.want(scaled(batch, 1.0, 0.5, 0.5)))


def test_a_descale_a_request_of_one():
    batch = low(Batch(q_lens=(3,), kv_lens=(9,), page=8))
    check(batch.tabled(k_descale=torch.tensor([[0.5, 2.0]]), **LSE), Batch.want(scaled(batch, k=[0.5, 2.0])), 2e-2)


# ---- kernels


def test_phases():
    """Few rows of a causal call go to decode, whose CTAs share keys; more, and full attention, to prefill."""

    def phase(batch, **options):
        return problem_of(
            flash_attn_varlen_func, batch.q, *batch.paged, batch.q_starts, max_seqlen_q=batch.max_q,
            seqused_k=batch.lens, block_table=batch.table, **options,
        ).phase  # fmt: skip

    few, many = Batch(q_lens=(32, 1), kv_lens=(40, 3)), Batch(q_lens=(33, 1), kv_lens=(40, 3))
    assert phase(few, causal=True) == phase(few, window_size=(9, 0)) == "decode"
    assert phase(few, causal=True, num_splits=32) == "decode" != phase(few, causal=True, num_splits=1)
    assert phase(few) == phase(many, causal=True) == phase(few, window_size=(9, -1)) == "prefill"
    for bound in (None, torch.tensor(1)):  # not read: all rows may be of one request
        p = problem_of(flash_attn_varlen_func, many.q, many.k, many.v, many.q_starts, many.k_starts, bound, causal=True)
        assert p.max_q_len == 34
    one = problem_of(flash_attn_with_kvcache, equal(EQUAL.q)[:, :1], *EQUAL.dense)
    assert one.phase == "decode" and one.causal and one.requests.cu_seqlens_q is None and one.max_q_len == 1
    two = problem_of(flash_attn_with_kvcache, equal(EQUAL.q), *EQUAL.dense)
    assert two.phase == "prefill" and two.requests.cu_seqlens_q.tolist() == [0, 2, 4, 6]


def test_launches(launches):  # noqa: F811
    """What a kernel gets: lengths and table as they are, the scale, the window."""
    batch = Batch(page=8)
    batch.tabled(causal=True, window_size=(2, 2), softmax_scale=0.5, sinks=SINKS)
    one = launches[-1]
    assert one.q.data_ptr() == batch.q.data_ptr() and one.kv_lens.data_ptr() == batch.lens.data_ptr()
    assert one.page_table.data_ptr() == batch.table.data_ptr() and one.window_left == 2
    assert math.isclose(one.scale_log2, 0.5 / math.log(2)) and torch.equal(one.sink, SINKS)
    many = Batch(q_lens=(70, 2), kv_lens=(75, 40), page=8)
    many.cached(causal=True)
    assert len(launches) == 2 and launches[-1].q.data_ptr() == many.q.data_ptr()
    p = problem_of(flash_attn_varlen_func, batch.q, batch.k, batch.v, batch.q_starts, batch.k_starts)
    assert p.requests.kv_starts is batch.k_starts and p.k.data_ptr() == batch.k.data_ptr()


def test_no_value_of_a_device_is_read():
    """Of meta tensors, every read raises."""

    def there(given):
        return {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in given.items()}

    for form in ("equal", "packed", "entries"):
        given, *_ = appended(form)
        o, lse = flash_attn_with_kvcache(**there(given))
        assert o.is_meta and o.shape == given["q"].shape and lse.is_meta
    batch, sinks = low(Batch(page=8)), SINKS.half()
    given = {"q": batch.q, "k": batch.k, "v": batch.v, "cu_seqlens_q": batch.q_starts, "cu_seqlens_k": batch.k_starts}
    given |= {"max_seqlen_q": torch.tensor(3), "max_seqlen_k": torch.tensor(17), "s_aux": sinks}
    one = torch.ones(1, HKV, device="meta")
    descales = {"k_descale": one.expand(4, HKV), "v_descale": one[:, :1]}
    assert flash_attn_varlen_func(**there(given), **descales, **LSE)[1].shape == (HQ, 6)
    paged = {"k": batch.paged[0], "v": batch.paged[1], "block_table": batch.table}
    assert flash_attn_varlen_func(**there(given | paged), **descales).dtype == BF16


def test_torch_compile_holds_calls_in_one_graph():
    given, whole, _ = appended("equal")
    caches = given.pop("k_cache"), given.pop("v_cache")
    kept = [t.clone() for t in caches]

    def step(q, k_cache, v_cache, k, v):
        rest = {name: t for name, t in given.items() if name not in ("q", "k", "v")}
        o, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **rest)
        return o, lse, flash_attn_varlen_func(BATCH.q, BATCH.k, BATCH.v, BATCH.q_starts, BATCH.k_starts, causal=True)

    args = given["q"], *caches, given["k"], given["v"]
    got = torch.compile(step, fullgraph=True, backend="eager")(*args)
    want = step(given["q"], *kept, given["k"], given["v"])
    assert all(map(torch.equal, got, want)) and all(map(torch.equal, caches, kept))


# ---- what clients call


def test_as_vllm_calls_it():
    """K and V in one tensor, (blocks, Hkv, P, 2 D); descales of one element each; an output of more rows."""
    batch = Batch(page=16)
    pool = torch.cat([t.transpose(1, 2) for t in batch.paged], -1)
    k, v = pool.transpose(1, 2).split(D, dim=-1)
    output = torch.full((9, HQ, D), 7.0, dtype=HALF)
    one = torch.tensor(0.5).expand(4, HKV)
    given = {"cu_seqlens_q": batch.q_starts, "max_seqlen_q": 3, "seqused_k": batch.lens, "max_seqlen_k": 17}
    given |= {"softmax_scale": 0.2, "causal": True, "alibi_slopes": None, "window_size": [4, 0], "softcap": 0.0}
    given |= {"block_table": batch.table, "scheduler_metadata": None, "fa_version": 3, "dynamic_causal": None}
    given |= {"q_descale": one, "k_descale": one, "v_descale": one, "num_splits": 0, "s_aux": SINKS.half()}
    got = flash_attn_varlen_func(q=batch.q, k=k, v=v, out=output[:6], mask_mod=None, aux_tensors=None, **given)
    want = batch.want(scale=0.2, causal=True, window=(4, 0), sinks=SINKS.half())[0]
    assert got.data_ptr() == output.data_ptr() and (output[6:] == 7).all()
    torch.testing.assert_close(output[:6].double(), want, rtol=2e-3, atol=2e-3)


def test_as_sglang_calls_it():
    """cu_seqlens_k_new without k; pages of one row; the LSE transposed for a merge."""
    batch = Batch(page=1)
    given = {"page_table": batch.table, "cache_seqlens": batch.lens, "cu_seqlens_q": batch.q_starts}
    given |= {"cu_seqlens_k_new": batch.k_starts, "max_seqlen_q": 3, "softmax_scale": 0.2, "causal": False, "ver": 3}
    given |= {"window_size": (-1, -1), "softcap": 0.0, "return_softmax_lse": True, "num_splits": 0, "out": None}
    o, lse, *rest = flash_attn_with_kvcache(q=batch.q, k_cache=batch.paged[0], v_cache=batch.paged[1], **given)
    assert not rest
    check((o, lse.T.contiguous().T.contiguous()), batch.want(scale=0.2))


@pytest.mark.parametrize("sliding", [None, 4])
def test_as_transformers_calls_it(monkeypatch, sliding):
    """Its own code around the functions: packed rows, and decoding from a paged cache that the call writes."""
    client = pytest.importorskip("transformers.modeling_flash_attention_utils")
    given = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, client._pad_input, client._unpad_input
    monkeypatch.setattr(client, "_lazy_imports", lambda *args, **kwargs: given)
    monkeypatch.setattr(client, "_loaded_implementation", None)
    call = partial(client._flash_attention_forward, attn_implementation="ours", is_causal=True, softmax_scale=0.2)
    options = {"sliding_window": sliding, "s_aux": SINKS.half()}
    meant = {"causal": True, "scale": 0.2, "sinks": SINKS.half(), "window": (-1 if sliding is None else 3, 0)}
    rows = {"cu_seq_lens_q": BATCH.q_starts, "cu_seq_lens_k": BATCH.k_starts, "max_length_k": torch.tensor(17)}
    q, k, v = BATCH.q[None], BATCH.k[None], BATCH.v[None]
    o = call(q, k, v, None, query_length=6, max_length_q=torch.tensor(3), **rows, **options)
    torch.testing.assert_close(o[0].double(), BATCH.want(**meant)[0], rtol=2e-3, atol=2e-3)
    batch = Batch(q_lens=(1, 1, 1), kv_lens=(9, 4, 17))
    last = [torch.stack([part[-1] for part in t.split(batch.kv_lens)])[None] for t in (batch.k, batch.v)]
    for pool, new in zip(batch.paged, last):
        for b, n in enumerate(batch.kv_lens):
            assert torch.equal(pool[batch.table[b, (n - 1) // 4], (n - 1) % 4], new[0, b])
            pool[batch.table[b, (n - 1) // 4], (n - 1) % 4] = 0
    pages = {"block_table": batch.table, "k_cache": batch.paged[0], "v_cache": batch.paged[1]}
    rows = {"cu_seq_lens_q": batch.q_starts, "cu_seq_lens_k": batch.k_starts, "max_length_q": 1, "max_length_k": 17}
    o = call(batch.q[None], *last, None, query_length=3, **rows, **pages, **options)
    meant["window"] = (-1, 0)  # transformers sees three keys here, fewer than the window, and passes none
    torch.testing.assert_close(o[0].double(), batch.want(**meant)[0], rtol=2e-3, atol=2e-3)
    equals = EQUAL.q.unflatten(0, (3, 2))
    o = call(equals, *(t[:, :4] for t in EQUAL.dense), None, query_length=2, **options)
    meant["window"] = (-1, 0)
    want = [oracle(*part, **meant)[0] for part in zip(equals, *(t[:, :4] for t in EQUAL.dense))]
    torch.testing.assert_close(o.double(), torch.stack(want), rtol=2e-3, atol=2e-3)


# ---- refusals


def table_call(change):
    given = {
        "q": BATCH.q, "k": BATCH.paged[0], "v": BATCH.paged[1], "cu_seqlens_q": BATCH.q_starts, "causal": True,
        "max_seqlen_q": 3, "seqused_k": BATCH.lens, "block_table": BATCH.table,
    }  # fmt: skip
    return flash_attn_varlen_func(**given | change)


def row_call(change):
    given = {"q": BATCH.q, "k": BATCH.k, "v": BATCH.v, "cu_seqlens_q": BATCH.q_starts, "cu_seqlens_k": BATCH.k_starts}
    return flash_attn_varlen_func(**given | change)


def cache_call(change):
    given = {"q": equal(EQUAL.q), "k_cache": EQUAL.dense[0], "v_cache": EQUAL.dense[1], "cache_seqlens": EQUAL.lens}
    return flash_attn_with_kvcache(**given | change)


def plain_call(change):
    q = equal(EQUAL.q)
    return flash_attn_func(**{"q": q, "k": q[:, :, :HKV], "v": q[:, :, :HKV]} | change)


REQUEST = torch.rand(4, HKV)
LOW = {"k": BATCH.paged[0].to(E4M3), "v": BATCH.paged[1].to(E4M3)}
REFUSALS = [
    (table_call, {"cu_seqlens_q": 3}, TypeError, "cu_seqlens_q: int, must be a torch.Tensor"),  # vLLM's order
    (table_call, {"cu_seqlens_q": BATCH.q_starts.long()}, TypeError, "cu_seqlens_q: dtype torch.int64"),
    (table_call, {"cu_seqlens_q": BATCH.q_starts[:3]}, ValueError, "cu_seqlens_q: shape .3,., must be .5,."),
    (table_call, {"q": BATCH.q[0]}, ValueError, "q: shape .* must have 3 dimensions"),
    (table_call, {"q": BATCH.q.float()}, TypeError, "q: dtype torch.float32"),
    (table_call, {"k": BATCH.k}, ValueError, "k, v .K.: shape .* must have 4 dimensions"),
    (table_call, {"seqused_k": BATCH.lens.long()}, TypeError, "seqused_k: dtype torch.int64"),
    (table_call, {"seqused_k": ints(9, 4, 99, 1)}, ValueError, "seqused_k: 99 of request 2"),
    (table_call, {"seqused_k": None}, TypeError, "cu_seqlens_k: NoneType, must be a torch.Tensor"),
    (table_call, {"seqused_k": None, "cu_seqlens_k": starts_of((9, 4, 99, 1))}, ValueError, "cu_seqlens_k: 99 of req"),
    (table_call, {"page_table": BATCH.table}, ValueError, "page_table: another name of block_table, only one"),
    (table_call, {"block_table": BATCH.table[0]}, ValueError, "block_table: shape .*, must have 2 dimensions"),
    (table_call, {"block_table": None, "page_table": BATCH.table.long()}, TypeError, "page_table: dtype torch.int64"),
    (table_call, {"block_table": None, "page_table": BATCH.table + 99}, ValueError, "page_table: .* in column 0"),
    (table_call, {"block_table": None}, NotImplementedError, "seqused_k: given without block_table, not supported"),
    (table_call, {"window_size": (4, 4), "causal": False}, NotImplementedError, "window_size: .4, 4., later keys"),
    (table_call, {"window_size": 4}, TypeError, "window_size: 4, must be .left, right."),
    (table_call, {"window_size": (4.0, 0)}, TypeError, "window_size: 4.0, must be an int"),
    (table_call, {"causal": None}, TypeError, "causal: None, must be True or False"),
    (table_call, {"causal": torch.tensor([True] * 4)}, TypeError, "causal: tensor.*, must be True or False"),
    (table_call, {"softcap": -1.0}, ValueError, "softcap: -1.0, must be None, 0"),
    (table_call, {"softmax_scale": "1"}, TypeError, "softmax_scale: '1', must be a float"),
    (table_call, {"softmax_scale": INF}, ValueError, "softmax_scale: inf, must be finite"),
    (table_call, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q: -1, must be at least 0"),
    (table_call, {"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q: 3.0, must be an int"),
    (table_call, {"return_softmax_lse": 1}, TypeError, "return_softmax_lse: 1, must be True or False"),
    (table_call, {"s_aux": SINKS, "sinks": SINKS}, ValueError, "sinks: another name of s_aux"),
    (table_call, {"sinks": SINKS.double()}, TypeError, "sinks: dtype torch.float64"),
    (table_call, {"sinks": SINKS[:2]}, ValueError, "sinks: shape .2,., must be .4,."),
    (table_call, LOW | {"k_descale": REQUEST}, NotImplementedError, "k_descale: shape .* of strides .2, 1., one a req"),
    (table_call, {"k_descale": REQUEST[:, :1]}, ValueError, "k_descale: shape .4, 1., must be .4, 2."),
    (table_call, {"v_descale": REQUEST.half()}, TypeError, "v_descale: dtype torch.float16"),
    (table_call, {"q_descale": 0.5}, TypeError, "q_descale: float, must be a torch.Tensor"),
    (table_call, {"out": BATCH.q}, ValueError, "out: shape .* overlaps the memory of q"),
    (table_call, {"out": BATCH.q[:2]}, ValueError, "out: shape .2, 4, 64."),
    (table_call, {"num_splits": -1}, ValueError, "num_splits: -1, must be at least 0"),
    (table_call, {"num_splits": None}, TypeError, "num_splits: None, must be an int"),
    (table_call, {"dropout_p": 0.1}, NotImplementedError, "dropout_p: 0.1, not supported, must be 0.0"),
    (table_call, {"alibi_slopes": SINKS}, NotImplementedError, "alibi_slopes: Tensor, not supported, must be None"),
    (table_call, {"cp_world_size": 2}, NotImplementedError, "cp_world_size: 2, not supported, must be 1"),
    (table_call, {"mask_mod": len}, NotImplementedError, "mask_mod: builtin_function.*, not supported"),
    (table_call, {"return_attn_probs": True}, NotImplementedError, "return_attn_probs: True, not supported"),
    (table_call, {"seqused_q": BATCH.lens}, NotImplementedError, "seqused_q: Tensor, not supported"),
    (table_call, {"num_split": 1}, TypeError, "flash_attn_varlen_func.. got an unexpected keyword argument"),
    (row_call, {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k: NoneType"),
    (row_call, {"cu_seqlens_k": starts_of((9, 4, 17, 2))}, ValueError, "cu_seqlens_k.4.: 32 of request 3"),
    (row_call, {"cu_seqlens_q": starts_of((3, 0, 1, 9))}, ValueError, "cu_seqlens_q.4.: 13 of request 3"),
    (row_call, {"k": BATCH.paged[0]}, ValueError, "k: shape .* must have 3 dimensions"),
    (row_call, {"v": BATCH.v[:5]}, ValueError, "k, v: K .* and V .* may differ in the last dimension only"),
    (row_call, {"k": BATCH.k.to(E4M3)}, TypeError, "k, v: K is .* and V .*, must be the same"),
    (row_call, {"k": BATCH.k[..., :32], "v": BATCH.v[..., :32]}, ValueError, "k, v: K has head_dim 32"),
    (cache_call, {"q": EQUAL.q}, ValueError, "q: shape .* must have 4 dimensions"),
    (cache_call, {"q": equal(EQUAL.q)[:2]}, ValueError, "k_cache: shape .3,.*, must have the 2 requests of q"),
    (cache_call, {"v_cache": EQUAL.dense[1][:2]}, ValueError, "v_cache: shape .2,"),
    (cache_call, {"cache_seqlens": 99}, ValueError, "cache_seqlens: 99, must be at most 24"),
    (cache_call, {"cache_seqlens": -1}, ValueError, "cache_seqlens: -1, must be at least 0"),
    (cache_call, {"cache_seqlens": 2.0}, TypeError, "cache_seqlens: 2.0, must be an int"),
    (cache_call, {"cache_seqlens": EQUAL.lens[:2]}, ValueError, "cache_seqlens: shape .2,., must be .3,."),
    (cache_call, {"cache_seqlens": EQUAL.lens + 20}, ValueError, "cache_seqlens: 29 of request 0"),
    (cache_call, {"cache_batch_idx": ints(0, 1)}, ValueError, "cache_batch_idx: shape .2,., must be .3,."),
    (cache_call, {"block_table": EQUAL.table, "cache_batch_idx": ints(0, 1, 2)}, ValueError,
     "cache_batch_idx: given, must be None with block_table"),
    (cache_call, {"cache_leftpad": EQUAL.lens}, NotImplementedError, "cache_leftpad: Tensor, not supported"),
    (cache_call, {"attention_chunk": 16}, NotImplementedError, "attention_chunk: 16, not supported, must be 0"),
    (cache_call, {"qv": EQUAL.q}, NotImplementedError, "qv: Tensor, not supported"),
    (cache_call, {"out": torch.empty(4, 3, HQ, D).half()[:3, :2]}, ValueError, "out: strides .*, the first must be 2"),
    (plain_call, {"k": EQUAL.k}, ValueError, "k: shape .* must have 4 dimensions"),
    (plain_call, {"k": equal(EQUAL.q)[:2]}, ValueError, "v: shape .*, must be .2,"),
    (plain_call, {"unknown": 1}, TypeError, "flash_attn_func.. got an unexpected keyword argument 'unknown'"),
]  # fmt: skip


@pytest.mark.parametrize("call,change,error,message", REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(call, change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(change)


def test_what_refusals_change_is_served():
    for call in (table_call, row_call, cache_call, plain_call):
        call({})
