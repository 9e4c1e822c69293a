"""`sparse_paged_attention`: its CPU path beside a loop in float64, the kernels that serve it, what it refuses."""

import math

import pytest
import torch

from cute_kernels import archs
from wrappers import explain, sparse_paged_attention, trtllm_batch_decode_with_kv_cache

PAGES, SIZE, HEADS, KV_HEADS, DIM = 6, 8, 4, 2, 64
NOBODY = (-1, -(2**31), 2**31 - 1, PAGES * SIZE, PAGES * SIZE + 1)  # indices that are no key
NAN_PAGE = 3  # a page of NaN, of which no index is chosen


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(tokens=3, dtype=torch.float32):
    gen = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, HEADS, DIM, generator=gen).to(dtype).bfloat16()
    k, v = torch.randn(2, PAGES, SIZE, KV_HEADS, DIM, generator=gen).bfloat16()
    k[NAN_PAGE], v[NAN_PAGE] = math.nan, math.nan
    return {"q": q, "kv_cache": (k, v)}


def by_loop(q, kv_cache, indices, counts=None, sinks=None):
    """Return out and the LSE in base 2, in float64."""
    k, v = (x.flatten(0, 1).double() for x in kv_cache)
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(len(q)):
        row = t * len(indices) // len(q)
        chosen = indices[row, : indices.shape[1] if counts is None else int(counts[row])].tolist()
        keys = [i for i in chosen if 0 <= i < len(k)]
        for h in range(HEADS):
            own = h * KV_HEADS // HEADS
            logits = q[t, h].double() @ k[keys, own].T * DIM**-0.5
            every = logits if sinks is None else torch.cat([logits, sinks[h : h + 1].double()])
            if len(every):
                lse[t, h] = torch.logsumexp(every, 0)
                out[t, h] = (logits - lse[t, h]).exp() @ v[keys, own]
    return out, lse / math.log(2)


def check(given, **options):
    out, lse = sparse_paged_attention(**given, **options, return_lse=True)
    want, want_lse = by_loop(**given, **{name: value for name, value in options.items() if name == "sinks"})
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def drawn(rows, columns, seed=0):
    """Return indices, of which some are no key, and none is in the page of NaN."""
    gen = torch.Generator().manual_seed(seed)
    found = torch.randint(PAGES * SIZE, (rows, columns), generator=gen)
    none = torch.tensor(NOBODY)[torch.randint(len(NOBODY), (rows, columns), generator=gen)]
    hidden = (torch.rand(rows, columns, generator=gen) < 0.3) | (found // SIZE == NAN_PAGE)
    return torch.where(hidden, none, found).int()


def test_holes_are_hidden_wherever_they_are():
    check(inputs(5) | {"indices": drawn(5, 40)})


def test_entries_that_do_not_count_are_not_read():
    indices = drawn(4, 20)
    indices[:, 13:] = NAN_PAGE * SIZE
    check(inputs(4) | {"indices": indices, "counts": ints(13, 0, 5, 13)})


def test_the_tokens_of_a_request_share_a_row():
    given = inputs(6) | {"indices": drawn(2, 30), "counts": ints(30, 11)}
    check(given)
    each = {name: given[name].repeat_interleave(3, 0) for name in ("indices", "counts")}
    assert torch.equal(sparse_paged_attention(**given), sparse_paged_attention(**given | each))


def test_a_key_that_comes_twice_counts_twice():
    check(inputs(2) | {"indices": ints(5, 5, 9, 0, 0, 0).view(2, 3)})


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
def test_rows_without_keys(sinks):
    given = inputs(3) | {"indices": torch.tensor([NOBODY, NOBODY, (3, *NOBODY[1:])]).int(), "counts": ints(5, 0, 5)}
    check(given, sinks=sinks)
    out, lse = sparse_paged_attention(**given, sinks=sinks, return_lse=True)
    assert not out[:2].any()
    assert (lse[:2] == (-math.inf if sinks is None else sinks / math.log(2))).all()


def test_all_keys_of_a_table_are_dense_decode():
    given, table = inputs(2), ints(4, 0, 1, 5, 2, 1).view(2, 3)
    indices = (table[:, :, None] * SIZE + torch.arange(SIZE)).flatten(1).int()
    want = trtllm_batch_decode_with_kv_cache(
        given["q"], given["kv_cache"], None, table, ints(24, 20), None, DIM**-0.5, kv_layout="NHD"
    )
    got = sparse_paged_attention(**given, indices=indices, counts=ints(24, 20))
    torch.testing.assert_close(got, want, rtol=0, atol=2**-8)


def test_layouts_and_pages_with_a_stride():
    given = inputs(3) | {"indices": drawn(3, 16)}
    want = sparse_paged_attention(**given)
    k, v = given["kv_cache"]
    wide = torch.full((PAGES, 2, SIZE + 3, KV_HEADS, DIM), math.nan).bfloat16()
    wide[:, 0, :SIZE], wide[:, 1, :SIZE] = k, v
    assert torch.equal(sparse_paged_attention(**given | {"kv_cache": wide[:, :, :SIZE]}), want)
    swapped = tuple(x.transpose(1, 2).contiguous() for x in (k, v))
    assert torch.equal(sparse_paged_attention(**given | {"kv_cache": swapped}, kv_layout="HND"), want)


@pytest.mark.parametrize("arch", archs.NAMES)
@pytest.mark.parametrize("rows", [8, 16])
def test_a_kernel_with_slots_serves_it(arch, rows):
    q, k = torch.zeros(3, rows, 128).bfloat16(), torch.zeros(PAGES, SIZE, 1, 128).bfloat16()
    said = explain(function=sparse_paged_attention, arch=arch, q=q, kv_cache=(k, k), indices=drawn(3, 40))
    assert said.runs.startswith("attention.decode bf16_d128_full_cap_skip_slots") and f"r{rows}" in said.runs


BAD = (
    ({"indices": torch.zeros(2, 4).int()}, ValueError, r"q: shape \(3, 4, 64\), must have the same number of tokens"),
    ({"indices": torch.zeros(3, 4).long()}, TypeError, r"indices: dtype torch.int64, must be torch.int32"),
    ({"counts": ints(1, 2)}, ValueError, r"counts: shape \(2,\), must be \(3,\)"),
    ({"counts": ints(1, 2, -1)}, ValueError, r"counts: -1 in entry 2, must be at least 0"),
    ({"kv_cache": (torch.zeros(6, 8, 2, 64).bfloat16(), torch.zeros(5, 8, 2, 64).bfloat16())}, ValueError,
     r"kv_cache: K \(6, 2, 8, 64\) and V \(5, 2, 8, 64\) may differ in head_dim only"),
    ({"kv_cache": torch.zeros(6, 2, 8, 2, 32, dtype=torch.uint8)}, NotImplementedError,
     r"kv_cache: dtype torch.uint8, not supported"),
    ({"kv_cache": torch.zeros(6, 2, 8, 3, 64).bfloat16()}, ValueError, r"q: 4 heads, must be a multiple"),
    ({"bmm1_scale": math.nan}, ValueError, r"bmm1_scale: nan, must be finite"),
    ({"batch_invariant": 1}, TypeError, r"batch_invariant: 1, must be"),
)  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD)
def test_refusals(change, error, message):
    given = inputs(3) | {"indices": drawn(3, 16)}
    with pytest.raises(error, match=f"^{message}"):
        sparse_paged_attention(**given | change)
