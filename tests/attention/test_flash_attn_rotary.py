"""`flash_attn_with_kvcache` with rotary tables against float64; its launches, and torch kernels beside them."""

import re

import pytest
import torch

from tests.conftest import ARCH
from tests.sim.workloads import simulated
from tests.support.flash_attn_batches import BF16, E4M3, HALF, HKV, HQ, D, appended, check, ints, oracle
from tests.support.host_work import torch_kernels
from wrappers import flash_attn_with_kvcache

ROOM = 64  # positions of the tables


def tables(dim, dtype=HALF):
    angle = torch.rand(ROOM, dim // 2, generator=torch.Generator().manual_seed(dim)) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x, positions, cos, sin, interleaved):
    """Rows (n, H, D) in float64, rotated at their positions."""
    x, half = x.double().clone(), cos.shape[1]
    pairs = [(slice(0, 2 * half, 2), slice(1, 2 * half, 2)), (slice(0, half), slice(half, 2 * half))]
    a, b = pairs[0 if interleaved else 1]
    c, s = (t[positions].double()[:, None] for t in (cos, sin))
    x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return x


def rotated_batch(whole, old, counts, cos, sin, interleaved):
    """Rotate the last rows of K, and all of Q, of a batch that holds what the call must see."""
    for b, (had, has, count) in enumerate(zip(old, whole.kv_lens, counts)):
        first, at = sum(whole.kv_lens[:b]), torch.arange(had, has)
        rows = whole.k[first + had : first + has]
        rows.copy_(turned(rows, at, cos, sin, interleaved))
        q = whole.q[sum(counts[:b]) :][:count]
        q.copy_(turned(q, torch.arange(had, had + count), cos, sin, interleaved))


@pytest.mark.parametrize("form", ["equal", "packed", "entries"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [D, 16])
def test_new_keys_and_queries_are_rotated(form, interleaved, dim, launched):
    given, whole, old = appended(form)
    counts = (3, 0, 1) if form == "packed" else (2, 2, 2)
    if form == "packed":
        given["cu_seqlens_k_new"] = given["cu_seqlens_q"]
    cos, sin = tables(dim)
    before, v, q = given["k_cache"].clone(), given["v"].clone(), given["q"].clone()
    o, lse = flash_attn_with_kvcache(**given, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    assert torch.equal(given["q"], q) and torch.equal(given["v"], v)
    whole.q = whole.q.flatten(0, -3).clone()
    rotated_batch(whole, old, counts, cos, sin, interleaved)
    if form != "packed":
        o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    check((o, lse.contiguous()), whole.want(causal=True), 4e-3)
    assert (given["k_cache"] != before).any(-1).any(-1).sum() == sum(counts)
    for b, (had, has) in enumerate(zip(old, whole.kv_lens)):
        rows = whole.k.split(whole.kv_lens)[b]
        for t in range(had, has):  # rounded once: at most one step of fp16 away
            found = given["k_cache"][b, t] if form == "entries" else given["k_cache"][whole.table[b, t // 4], t % 4]
            torch.testing.assert_close(found, rows[t], rtol=2**-10, atol=2**-12)
    if launched is not None:
        assert len(launched) == 2
        assert torch.equal(launched[1].kv_lens, whole.lens)


def test_the_default_rotates_neighbours():
    given, *_ = appended("equal")
    again, *_ = appended("equal")
    cos, sin = tables(D)
    one = flash_attn_with_kvcache(**given, rotary_cos=cos, rotary_sin=sin)[0]
    two = flash_attn_with_kvcache(**again, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=True)[0]
    assert torch.equal(one, two) and torch.equal(given["k_cache"], again["k_cache"])


def test_other_numbers_of_queries_than_of_new_keys(here):
    """Row i of a request stands at cache_seqlens + i, as in FlashAttention. Q has a launch of its own."""
    given, whole, old = appended("equal")
    cos, sin = tables(D)
    given["q"] = given["q"][:, :1]
    o, _ = flash_attn_with_kvcache(**given, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    assert len(here.launches) == 3
    for b, (had, has) in enumerate(zip(old, whole.kv_lens)):
        q = turned(given["q"][b], torch.tensor([had]), cos, sin, False)
        k = whole.k.split(whole.kv_lens)[b].double()
        k[had:] = turned(k[had:], torch.arange(had, has), cos, sin, False)
        want, _ = oracle(q, k, whole.v.split(whole.kv_lens)[b], causal=True)
        torch.testing.assert_close(o[b].double(), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("lens", [5, ints(5, 5, 5)])
def test_lengths_of_one_number_and_of_tensors(dtype, lens, here):
    cos, sin = tables(32, dtype)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 1, n, D, generator=draw).to(dtype) for n in (HQ, HKV, HKV))
    caches = [torch.randn(3, 16, HKV, D, generator=draw).to(dtype) for _ in range(2)]
    o = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lens, rotary_cos=cos, rotary_sin=sin)
    assert here.launches[1].kv_lens.tolist() == [6] * 3
    for b in range(3):
        assert torch.equal(caches[1][b, 5], v[b, 0])
        row = turned(q[b], torch.tensor([5]), cos, sin, True)
        want, _ = oracle(row, caches[0][b, :6], caches[1][b, :6])
        torch.testing.assert_close(o[b].double(), want, rtol=2e-2, atol=2e-2)


def test_rows_without_a_place_are_not_written(here):
    """Padding of a graph: length -1, table -1. Its lengths become what attention reads as no keys."""
    given, *_ = appended("equal")
    lens, table = given["cache_seqlens"], given["block_table"].clone()
    given["q"], given["k"], given["v"] = (given[name][:, :1] for name in ("q", "k", "v"))
    lens[1], table[1] = -1, -1
    before, (cos, sin) = given["k_cache"].clone(), tables(D)
    o, _ = flash_attn_with_kvcache(**given | {"block_table": table}, rotary_cos=cos, rotary_sin=sin)
    assert ((given["k_cache"] != before).any(-1).any(-1).sum()) == 2
    assert here.launches[1].kv_lens.tolist() == [6, 0, 12] and not o[1].any()


def test_eight_bits_are_appended_and_not_rotated(here):
    given, *_ = appended("equal")
    low = given | {name: given[name].to(E4M3) for name in ("k", "v", "k_cache", "v_cache")}
    flash_attn_with_kvcache(**low)
    assert len(here.launches) == 2
    cos, sin = tables(D)
    with pytest.raises(NotImplementedError, match="^rotary_cos: given with q torch.float16, k_cache torch.float8"):
        flash_attn_with_kvcache(**low, rotary_cos=cos, rotary_sin=sin)
    assert len(here.launches) == 2


@pytest.mark.kernels
@pytest.mark.parametrize("form", ["equal", "packed"])
def test_in_the_simulator(form):
    """Attention reads the number of keys that the launch before it writes, to memory that held anything. In bf16, for
    which other tests compile the kernels."""
    given, again = (
        {name: t.to(BF16) if getattr(t, "dtype", None) == HALF else t for name, t in appended(form)[0].items()}
        for _ in range(2)
    )
    if form == "packed":
        for one in (given, again):
            one["cu_seqlens_k_new"] = one["cu_seqlens_q"]
    rotary = dict(zip(("rotary_cos", "rotary_sin"), tables(32, BF16)))
    with simulated(ARCH, []):
        got = flash_attn_with_kvcache(**given, **rotary)
    for found, want in zip(got, flash_attn_with_kvcache(**again, **rotary)):
        torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(given["k_cache"], again["k_cache"], rtol=2**-7, atol=2**-9)
    assert torch.equal(given["v_cache"], again["v_cache"])


def test_nothing_new():
    """No new row: the call attends to what is there."""
    given, *_ = appended("equal")
    given = given | {"k": given["k"][:, :0], "v": given["v"][:, :0], "cache_seqlens": ints(5, 3, 11)}
    before, (cos, sin) = given["k_cache"].clone(), tables(D)
    want = flash_attn_with_kvcache(**given | {"k": None, "v": None})
    assert all(map(torch.equal, flash_attn_with_kvcache(**given), want))
    rotated = flash_attn_with_kvcache(**given, rotary_cos=cos, rotary_sin=sin)[0]
    assert torch.equal(given["k_cache"], before) and not torch.equal(rotated, want[0]) and rotated.isfinite().all()


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_a_decode_step_is_two_launches(quiet, paged, rotary):
    """And no torch kernel runs beside them; one would be seen."""
    q, k = torch.zeros(2, 1, HQ, D).half(), torch.zeros(2, 1, HKV, D).half()
    cache = torch.zeros(8, 16, HKV, D).half() if paged else torch.zeros(2, 32, HKV, D).half()
    given = {"block_table": ints(0, 1, 2, 3).view(2, 2)} if paged else {}
    if rotary:
        given |= dict(zip(("rotary_cos", "rotary_sin"), tables(D)))
    lens = ints(3, 7)

    def step():
        flash_attn_with_kvcache(q, cache, other, k, k, cache_seqlens=lens, **given)

    other = torch.zeros_like(cache)
    assert not torch_kernels(step)
    assert quiet.count == 4  # two steps
    assert torch_kernels(lambda: (step(), lens + 1)) == ["add"]


@pytest.mark.parametrize("change, error, text", [
    ({"causal": False}, NotImplementedError, "^rotary_cos: queries that all stand at one position"),
    ({"rotary_cos": tables(D)[0][:4]}, ValueError, "^rotary_cos: shape .4, .*, must have at least"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_tables_are_checked_in_a_trace_too(change, error, text, how, fresh_compiler):
    given, _, _ = appended("equal")
    cos, sin = tables(D)
    call = given | {"rotary_cos": cos, "rotary_sin": sin, "causal": True} | change
    step = lambda call: flash_attn_with_kvcache(**call)  # noqa: E731
    step = torch.compile(step, backend="eager", fullgraph=True) if how == "compiled" else step
    with pytest.raises(error if how == "eager" else Exception) as found:  # dynamo has an error of its own
        step(call)
    assert how == "compiled" or re.search(text, str(found.value))
