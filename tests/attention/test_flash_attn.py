"""FlashAttention's functions on the CPU against attention in float64; new keys, kernels, clients."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from tests.support.flash_attn_batches import (
    BATCH,
    BF16,
    E4M3,
    EQUAL,
    HALF,
    HKV,
    HQ,
    INF,
    LSE,
    NAN,
    SINKS,
    Batch,
    D,
    appended,
    check,
    equal,
    ints,
    low,
    oracle,
)
from wrappers import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from wrappers.attention import plan
from wrappers.flash_attn import api as flash_attn
from wrappers.host import machine, scratch
from wrappers.own.registry import call_of

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
        mixed = (k, turned[1]), (turned[0], v)  # batch and rows have one stride in one of the two
        for cache, size in (((k, v), page), *((c, page if n == 1 else rows) for c in (turned, *mixed))):
            cache = [t[3 - n :] for t in cache]
            got = flash_attn_with_kvcache(q[3 - n :], *cache, cache_seqlens=lens[3 - n :], causal=True, **LSE)
            found = [oracle(*part, causal=True) for part in zip(
                q[3 - n :], *([row[:m] for row, m in zip(t, lens[3 - n :].tolist())] for t in cache))]  # fmt: skip
            check(got, tuple(map(torch.stack, zip(*found))))
            p = call_of(flash_attn_with_kvcache, q[3 - n :], *cache, cache_seqlens=lens[3 - n :])
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


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("length", [1, 3])
def test_caches_without_rows(length, batch):
    """Output 0 and LSE -inf, or the sink's logit, whatever the batch, the strides and the form are."""
    q, starts = torch.randn(batch, length, HQ, D).half(), ints(*range(0, batch * length + 1, length))
    whole = torch.randn(max(batch, 3), 4, HKV, D).half()
    forms = [
        (partial(flash_attn_varlen_func, q.flatten(0, 1), t, t, starts, starts * 0, length, 0), (HQ, batch * length))
        for t in (whole[0, :0], whole[:0, 0])
    ]
    for empty in (whole[:batch, :0], whole[:batch, :0].clone()):
        forms.append((partial(flash_attn_func, q, empty, empty), (batch, HQ, length)))
        forms.append((partial(flash_attn_with_kvcache, q, empty, empty), (batch, HQ, length)))
    entries = partial(flash_attn_with_kvcache, q, whole[:, :0], whole[:, :0], cache_batch_idx=ints(*range(batch)))
    forms.append((entries, (batch, HQ, length)))
    for found, shape in forms:
        for options, want in (
            ({}, -INF),
            ({"causal": True, "num_splits": 1}, -INF),
            ({"sinks": SINKS}, SINKS[:, None]),
        ):
            o, lse = found(**options, **LSE)
            assert not o.any() and o.shape == (q if len(shape) == 3 else q.flatten(0, 1)).shape
            assert lse.shape == shape
            torch.testing.assert_close(lse, torch.as_tensor(want).expand(shape))


# ---- new keys


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


def test_explain_appends_nothing():
    given, *_ = appended("equal")
    before = given["k_cache"].clone()
    said = explain(function=flash_attn_with_kvcache, arch="sm_90a", **given)
    assert said.runs.startswith("attention.decode fp16_d64")
    assert torch.equal(given["k_cache"], before)


# ---- 8 bits


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


def test_what_asks_for_split_keys():
    many = Batch(q_lens=(33, 1), kv_lens=(40, 3))

    def split(**options):
        return call_of(
            flash_attn_varlen_func, many.q, *many.paged, many.q_starts, max_seqlen_q=many.max_q,
            seqused_k=many.lens, block_table=many.table, **options,
        ).split_kv  # fmt: skip

    assert split() == split(causal=True, num_splits=32) == "auto" and split(num_splits=1) == "never"
    for bound in (None, torch.tensor(1)):  # not read: all rows may be of one request
        p = call_of(flash_attn_varlen_func, many.q, many.k, many.v, many.q_starts, many.k_starts, bound, causal=True)
        assert p.max_q_len == 34
    for rows in (1, 2):  # a single row sees all keys, so a causal kernel serves it
        p = call_of(flash_attn_with_kvcache, equal(EQUAL.q)[:, :rows], *EQUAL.dense)
        assert not p.causal and p.requests.cu_seqlens_q is None and p.max_q_len == rows
        assert plan.request_of(p).causal == (rows == 1)


def test_launches(launches):
    """What a kernel gets: lengths and table as they are, the scale, the window."""
    batch = Batch(page=8)
    batch.tabled(causal=True, window_size=(2, 2), softmax_scale=0.5, sinks=SINKS)
    one = launches[-1]
    assert one.q.data_ptr() == batch.q.data_ptr() and one.kv_lens.data_ptr() == batch.lens.data_ptr()
    assert one.page_table.data_ptr() == batch.table.data_ptr() and one.window_left == 2
    assert math.isclose(one.softmax_scale_log2, 0.5 / math.log(2)) and torch.equal(one.sink, SINKS)
    many = Batch(q_lens=(70, 2), kv_lens=(75, 40), page=8)
    many.cached(causal=True)
    assert len(launches) == 2 and launches[-1].q.data_ptr() == many.q.data_ptr()
    p = call_of(flash_attn_varlen_func, batch.q, batch.k, batch.v, batch.q_starts, batch.k_starts)
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


# ---- constants that describe requests of one length

DENSE = dict(zip("qkv", (equal(EQUAL.q), *(t.nan_to_num() for t in EQUAL.dense))))


def described(launch):
    return {name: getattr(launch, name) for name in ("page_table", "kv_lens", "cu_seqlens_q")}


@pytest.mark.parametrize("batch,rows,page", [(1, 64, 64), (3, 128, 64), (5, 96, 32), (2, 7, 7), (33, 24, 8)])
@pytest.mark.parametrize("queries", [1, 70])
def test_descriptions_of_equal_requests(here, batch, rows, page, queries):
    q, k = torch.zeros(batch, queries, HQ, D).half(), torch.zeros(batch, rows, HKV, D).half()
    for _ in range(3):
        flash_attn_func(q, k, k)
        found = described(here.launches[-1])
        table = torch.arange(batch * rows // page, dtype=torch.int32).view(batch, 1, -1).expand(-1, 2, -1)
        assert torch.equal(found["page_table"], table) and found["page_table"].dtype == torch.int32
        assert found["kv_lens"].tolist() == [rows] * batch
        assert found["cu_seqlens_q"].tolist() == [*range(0, (batch + 1) * queries, queries)]
    assert len({t.data_ptr() for launch in here.launches for t in described(launch).values()}) == 3


def pointers(launch):
    return {name: t.data_ptr() for name, t in described(launch).items()}


def test_a_graph_has_constants_of_its_own(here):
    """A graph may be replayed on any stream, and its memory is not kept."""
    for here.capturing in (True, False, False, True):
        flash_attn_func(**DENSE)
        assert bool(here.constants) == (len(here.launches) > 1)
    first, kept, again, last = map(pointers, here.launches)
    assert kept == again and all(kept[name] not in (first[name], last[name]) for name in ("page_table", "kv_lens"))
    assert kept["cu_seqlens_q"] == last["cu_seqlens_q"] != first["cu_seqlens_q"]  # their plan waited for the write
    for name, t in described(here.launches[1]).items():
        assert all(torch.equal(described(launch)[name], t) for launch in here.launches)


def test_streams_have_constants_of_their_own(here):
    """A launch on another stream could come before the writes, and the host does not wait for them."""
    seen = {}
    for here.stream in (0, 7, 0, 7, scratch.PER_THREAD_STREAM, scratch.PER_THREAD_STREAM):
        flash_attn_func(**DENSE)
        seen.setdefault(here.stream, []).append(pointers(here.launches[-1]))
    assert seen[0][0] == seen[0][1] and seen[7][0] == seen[7][1]
    every = [seen[0][0], seen[7][0], *seen[scratch.PER_THREAD_STREAM]]
    assert all(len({found[name] for found in every}) == 4 for name in ("page_table", "kv_lens"))
    assert len({found["cu_seqlens_q"] for found in every}) == 1
    assert len(here.waits) == 2, "once for counters, once for offsets"


def test_constants_stop_growing_and_are_never_dropped(here, monkeypatch):
    flash_attn_func(**DENSE)
    before = dict(here.constants)
    monkeypatch.setattr(here, "max_plans", len(before))
    flash_attn_func(**{name: t[:2] for name, t in DENSE.items()})
    assert here.constants.keys() == before.keys()
    assert here.launches[-1].kv_lens.tolist() == here.launches[0].kv_lens.tolist()[:2]
    flash_attn_func(**DENSE)
    assert all(here.constants[key] is t for key, t in before.items())


def both(q, k, v):
    return flash_attn_func(q, k, v), flash_attn_with_kvcache(q, k, v, cache_seqlens=5)


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_traced_calls_neither_keep_nor_use_constants(known, fresh_compiler):
    with machine.override(machine.HostMachine()) as here:
        want = both(*DENSE.values()) if known else None
        before = dict(here.constants)
        assert bool(before) == known
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(t) for name, t in DENSE.items()}
            assert all(isinstance(o, FakeTensor) for o in both(*fakes.values()))
        got = torch.compile(both, fullgraph=True, backend="eager")(*DENSE.values())
        assert here.constants == before
        want = want or both(*DENSE.values())
        assert all(map(torch.equal, got, want))


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
