"""`flash_attn_with_kvcache` with cache_leftpad against float64: what is seen, what is written, and hostile values."""

import pytest
import torch

from tests.attention.test_flash_attn_rotary import tables, turned
from tests.conftest import ARCH
from tests.sim.workloads import simulated
from tests.support.flash_attn_batches import E4M3, HALF, HKV, HQ, LSE, NAN, SINKS, D, check, ints, oracle
from tests.support.host_work import torch_kernels
from wrappers import flash_attn_with_kvcache

ROWS, LEFT, LENS, ENTRIES = 24, (3, 0, 8, 17), (20, 9, 8, 24), (2, 4, 0, 1)
BATCH = len(LENS)
MOST = 2**31 - 1


def made(queries=2, entries=False, dtype=HALF, left=LEFT, lens=LENS):
    """Return arguments of a call, and the keys and values that each request sees. All other rows hold NaN."""
    draw = torch.Generator().manual_seed(queries)
    count = BATCH + 1 if entries else BATCH
    q = torch.randn(BATCH, queries, HQ, D, generator=draw).half()
    caches = [torch.full((count, ROWS, HKV, D), NAN).to(dtype) for _ in range(2)]
    seen = []
    for b, (first, end) in enumerate(zip(left, lens)):
        parts = [torch.randn(end - first, HKV, D, generator=draw).to(dtype) for _ in caches]
        for cache, part in zip(caches, parts):
            cache[ENTRIES[b] if entries else b, first:end] = part
        seen.append(parts)
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": ints(*lens)}
    given |= {"cache_leftpad": ints(*left)} | LSE
    return given | ({"cache_batch_idx": ints(*ENTRIES)} if entries else {}), seen


def wanted(q, seen, **options):
    found = [oracle(rows, k.double(), v.double(), **options) for rows, (k, v) in zip(q, seen)]
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])


OPTIONS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window, sinks": ({"causal": True, "window_size": (3, 0), "sinks": SINKS, "softcap": 2.0},
                      {"causal": True, "window": (3, 0), "sinks": SINKS, "cap": 2.0}),
    "one split": ({"num_splits": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("entries", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_begin_behind_the_padding(name, entries, launched):
    options, meant = OPTIONS[name]
    for queries in (1, 5):
        given, seen = made(queries, entries)
        check(flash_attn_with_kvcache(**given, **options), wanted(given["q"], seen, **meant))
    if launched is not None:
        assert launched[-1].kv_lens.tolist() == [end - first for first, end in zip(LEFT, LENS)]
        assert launched[-1].kv_lens.dtype == torch.int32


def test_packed_queries_and_8_bits(launched):
    for dtype, tolerance in ((HALF, 2e-3), (E4M3, 2e-3)):
        given, seen = made(dtype=dtype)
        q, starts = given["q"].flatten(0, 1)[:6], ints(0, 3, 3, 4, 6)
        packed = given | {"q": q, "cu_seqlens_q": starts, "max_seqlen_q": 3}
        parts = [oracle(rows, k.double(), v.double(), causal=True) for rows, (k, v) in zip(q.split((3, 0, 1, 2)), seen)]
        want = torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)
        check(flash_attn_with_kvcache(**packed, causal=True), want, tolerance)


@pytest.mark.parametrize("lens", [None, ROWS, 18])
def test_lengths_of_one_number(lens, here):
    end = ROWS if lens is None else lens
    given, seen = made(left=(3, 0, 8, 17), lens=(end,) * BATCH)
    check(flash_attn_with_kvcache(**given | {"cache_seqlens": lens}), wanted(given["q"], seen))


def test_no_padding_is_no_change():
    given, _ = made(left=(0,) * BATCH)
    got = flash_attn_with_kvcache(**given)
    assert all(map(torch.equal, got, flash_attn_with_kvcache(**given | {"cache_leftpad": None})))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("entries", [False, True])
def test_new_keys(launched, entries, rotary):
    """They go to row cache_seqlens, and rotary positions count from row 0, as in FlashAttention."""
    end = tuple(n + 2 for n in LENS[:-1]) + (21,)
    given, seen = made(2, entries, lens=end)
    old = [n - 2 for n in end]
    new = [torch.stack([parts[i][-2:] for parts in seen]) for i in range(2)]
    for b, n in enumerate(old):
        for cache in (given["k_cache"], given["v_cache"]):
            cache[ENTRIES[b] if entries else b, n : n + 2] = NAN
    before = [given[name].clone() for name in ("k_cache", "v_cache")]
    given |= {"k": new[0], "v": new[1], "cache_seqlens": ints(*old), "causal": True}
    q = given["q"].double()
    if rotary:
        cos, sin = tables(32)
        given |= {"rotary_cos": cos, "rotary_sin": sin}
        at = [torch.arange(n, n + 2) for n in old]
        q = torch.stack([turned(rows, p, cos, sin, True) for rows, p in zip(q, at)])
        for parts, p in zip(seen, at):
            parts[0] = parts[0].double()
            parts[0][-2:] = turned(parts[0][-2:], p, cos, sin, True)
    check(flash_attn_with_kvcache(**given), wanted(q, seen, causal=True), 4e-3)
    for cache, was, which in zip((given["k_cache"], given["v_cache"]), before, range(2)):
        for b, n in enumerate(old):
            entry = ENTRIES[b] if entries else b
            rows = cache[entry, n : n + 2].double()
            torch.testing.assert_close(rows, seen[b][which][-2:].double(), rtol=2**-10, atol=2**-12)
            cache[entry, n : n + 2] = NAN
        torch.testing.assert_close(cache, was, rtol=0, atol=0, equal_nan=True)
    if launched is not None:
        assert len(launched) == 2
        assert launched[1].kv_lens.tolist() == [n - first for n, first in zip(end, LEFT)]


HOSTILE = (-(2**31), -(2**31) + 1, -25, -1, 0, 7, 23, 24, 25, 48, MOST - 1, MOST)


def test_hostile_values_reach_no_row_of_another_request(here):
    """Each request's values are its number, so that any other row in the mean would show."""
    q = torch.zeros(BATCH, 1, HQ, D).half()
    k = torch.zeros(BATCH, ROWS, HKV, D).half()
    v = torch.arange(1, BATCH + 1).half()[:, None, None, None].expand(k.shape).clone()
    for first in HOSTILE:
        for end in HOSTILE:
            given = {"cache_seqlens": ints(*[end] * BATCH), "cache_leftpad": ints(*[first] * BATCH)}
            o = flash_attn_with_kvcache(q, k, v, **given)
            keys = min(max(end, 0), ROWS) - min(max(first, 0), ROWS)
            want = v[:, :1, :1].expand(-1, -1, HQ, -1) if keys > 0 else torch.zeros_like(q)
            torch.testing.assert_close(o, want)
    assert len(here.launches) == len(HOSTILE) ** 2


def test_hostile_values_with_new_keys(here):
    """Only request 1 has values of 0."""
    q, new = torch.zeros(BATCH, 1, HQ, D).half(), torch.full((BATCH, 1, HKV, D), 9.0).half()
    new_v = new.clone()
    new_v[1] = 0
    for first in HOSTILE:
        for end in HOSTILE:
            k, v = torch.zeros(BATCH, ROWS, HKV, D).half(), torch.full((BATCH, ROWS, HKV, D), 9.0).half()
            v[1] = 0
            given = {"cache_seqlens": ints(5, end, 5, 5), "cache_leftpad": ints(0, first, 5, 6)}
            o = flash_attn_with_kvcache(q, k, v, new, new_v, **given)
            assert (k[1] == 9).any(-1).any(-1).nonzero().flatten().tolist() == ([end] if 0 <= end < ROWS else [])
            assert (o[[0, 2]] == 9).all() and not o[[1, 3]].any()


def test_values_that_are_checked():
    given, _ = made()
    for change, message in (
        ({"cache_leftpad": ints(3, 0, 9, 17)}, r"cache_leftpad: 9 of request 2, must be in \[0, 8\], cache_seqlens of"),
        ({"cache_leftpad": ints(3, -1, 8, 17)}, r"cache_leftpad: -1 of request 1, must be in \[0, 9\]"),
        ({"cache_seqlens": ints(20, 9, 8, 25)}, r"cache_seqlens: 25 of request 3, must be in \[0, 24\], the rows of k"),
        ({"cache_seqlens": ints(20, -1, 8, 24)}, r"cache_seqlens: -1 of request 1, must be in \[0, 24\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            flash_attn_with_kvcache(**given | change)


BAD = {
    "cache_leftpad: int, must be a torch.Tensor": {"cache_leftpad": 3},
    "cache_leftpad: dtype torch.int64": {"cache_leftpad": ints(*LEFT).long()},
    r"cache_leftpad: shape \(3,\), must be \(4,\)": {"cache_leftpad": ints(*LEFT)[:3]},
    r"cache_leftpad: shape \(4, 1\), must have 1 dimension": {"cache_leftpad": ints(*LEFT)[:, None]},
    r"cache_leftpad: strides \(2,\), the last must be 1": {"cache_leftpad": torch.zeros(8, dtype=torch.int32)[::2]},
    "cache_leftpad: device meta, must be that of k_cache": {"cache_leftpad": ints(*LEFT).to("meta")},
    "cache_leftpad: given with page_table, not supported": {"page_table": ints(0, 1, 2, 3)[:, None]},
    "cache_leftpad: given with block_table, not supported": {"block_table": ints(0, 1, 2, 3)[:, None]},
    "k_cache: strides .*, with cache_leftpad the first must be 24 times the second": {
        "k_cache": torch.zeros(BATCH, ROWS + 8, HKV, D).half()[:, :ROWS]},
    "v_cache: strides .*, with cache_leftpad the first must be 24 times the second": {
        "v_cache": torch.zeros(1, ROWS, HKV, D).half().expand(BATCH, -1, -1, -1)},
    r"cache_leftpad: 5 of request 1, must be in \[0, 4\]": {
        "cache_leftpad": ints(0, 5, 0, 0), "cache_seqlens": ints(4, 4, 4, 4)},
    "softcap: -1.0": {"softcap": -1.0},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_nothing_is_written_before_a_refusal(message):
    new = torch.ones(BATCH, 2, HKV, D).half()
    caches = {name: torch.zeros(BATCH, ROWS, HKV, D).half() for name in ("k_cache", "v_cache")}
    given = {"q": torch.zeros(BATCH, 2, HQ, D).half(), "k": new, "v": new, "cache_leftpad": ints(3, 0, 8, 17)}
    given |= {"cache_seqlens": ints(20, 9, 8, 20)} | caches | BAD[message]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{message}"):
        flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any() and not given["v_cache"].any()


@pytest.mark.parametrize("appends", [False, True])
def test_no_value_of_a_device_is_read(appends):
    """Of meta tensors, every read raises."""
    given, _ = made(entries=True)
    if appends:
        new = torch.zeros(BATCH, 2, HKV, D).half()
        given |= {"k": new, "v": new, "causal": True}
    o, lse = flash_attn_with_kvcache(**{n: t.to("meta") if torch.is_tensor(t) else t for n, t in given.items()})
    assert o.is_meta and o.shape == given["q"].shape and lse.is_meta


@pytest.mark.parametrize("appends", [False, True])
def test_a_step_is_four_torch_kernels(quiet, appends):
    given, _ = made(1)
    del given["return_softmax_lse"]
    if appends:
        new = torch.zeros(BATCH, 1, HKV, D).half()
        given |= {"k": new, "v": new, "cache_seqlens": ints(3, 3, 8, 17)}
    found = torch_kernels(lambda: flash_attn_with_kvcache(**given))
    assert sorted(found) == ["add", "clamp", "clamp", "sub"]


def test_a_capture_keeps_nothing(here):
    given, seen = made(1)
    for here.capturing in (False, True, False):
        check(flash_attn_with_kvcache(**given), wanted(given["q"], seen))
    tables = {launch.page_table.data_ptr() for launch in here.launches}
    assert len(tables) == 3  # each call has a table of its own: later values must not change what a graph reads


@pytest.mark.kernels
@pytest.mark.parametrize("queries", [1, 2])
def test_in_the_simulator(queries):
    """With hostile values too: a request whose keys are clamped to its rows sees all of them, or none."""
    given, seen = made(queries, dtype=torch.bfloat16)
    given["q"] = given["q"].bfloat16()
    with simulated(ARCH, []):
        check(flash_attn_with_kvcache(**given, causal=True), wanted(given["q"], seen, causal=True), 1e-2)
        for cache in (given["k_cache"], given["v_cache"]):
            cache.nan_to_num_()
        hostile = {"cache_leftpad": ints(-9, MOST, -MOST - 1, 25), "cache_seqlens": ints(99, MOST, MOST, -1)}
        o, lse = flash_attn_with_kvcache(**given | hostile, causal=True)
    whole = wanted(given["q"], list(zip(given["k_cache"], given["v_cache"])), causal=True)
    for b in (0, 2):
        torch.testing.assert_close(o[b].double(), whole[0][b], rtol=1e-2, atol=1e-2)
    assert not o[[1, 3]].any() and (lse[[1, 3]] == -torch.inf).all()
