"""Rows appended to paged caches against a loop over them, and read back by attention."""

import pytest
import torch

import wrappers
from tests.support.host_work import WAITS, Seen
from wrappers import fp4
from wrappers.flashinfer import page, quantization
from wrappers.reference import dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, DIM = 2, 32
FAR = (1 << 31) - 1, -(1 << 31)
INDPTR = [0, 3, 3, 4, 9]
INDICES = [5, 2, 7, 1, 0, 3, 9, 11, 4, 6, 8]  # two more than requests have
LAST = [2, 0, 1, 3]
PAGES = 12


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def data(*shape, dtype=torch.bfloat16, seed=0):
    """Values that all differ in bits as far as a type has them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * 100).to(dtype) if dtype == torch.uint8 else x.to(dtype)


def bits(t):
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int16)


def stored(form, layout, size, dtype):
    """A cache in one of its forms, and (k, v) views (pages, P, Hkv, D) of it."""
    inner = (size, HEADS) if layout == "NHD" else (HEADS, size)
    if form == "stacked":
        given = bits(data(PAGES, 2, *inner, DIM, dtype=dtype, seed=1)).view(dtype)
        k, v = given[:, 0], given[:, 1]
    elif form == "pair":
        given = k, v = data(PAGES, *inner, DIM, dtype=dtype, seed=1), data(PAGES + 2, *inner, DIM // 2, dtype=dtype)
    else:  # K and V side by side in the last dimension of a wider pool
        pool = data(PAGES, 3, *inner, 2 * DIM, dtype=dtype, seed=1)[:, 1]
        given = k, v = pool[..., :DIM], pool[..., DIM:]
    return given, *((k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2)))


def loop(cache, rows, requests, positions, indptr=INDPTR, indices=INDICES, pages=PAGES):
    """What the cache holds then; rows that have no slot go nowhere."""
    wanted, size = bits(cache).clone(), cache.shape[1]
    for row, b, position in zip(bits(rows), requests, positions):
        if 0 <= b < len(indptr) - 1 and 0 <= position:
            column = indptr[b] + position // size
            if column < min(indptr[b + 1], len(indices)) and 0 <= indices[column] < pages:
                wanted[indices[column], position % size] = row
    return wanted


def append(
    rows, requests, positions, cache, layout="NHD", indices=INDICES, indptr=INDPTR, last=LAST, index=torch.int32
):
    tables = (ints(t, index) for t in (indices, indptr, last))
    page.append_paged_kv_cache(*rows, ints(requests, index), ints(positions, index), cache, *tables, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2, torch.uint8])
@pytest.mark.parametrize("form,layout,size", [
    ("stacked", "NHD", 16), ("stacked", "HND", 5), ("pair", "NHD", 1), ("pair", "HND", 16), ("wide", "NHD", 5),
    ("wide", "HND", 1),
])  # fmt: skip
def test_rows_are_written_and_nothing_else(form, layout, size, dtype):
    given, k, v = stored(form, layout, size, dtype)
    every = [(b, p) for b in range(4) for p in range((INDPTR[b + 1] - INDPTR[b]) * size)]
    picked = [every[i] for i in torch.randperm(len(every), generator=torch.Generator().manual_seed(size))[:7]]
    requests, positions = zip(*picked, (-1, 0), (0, -1), (4, 0), (1, 0), (0, 3 * size), (*FAR,), (3, FAR[0]))
    rows = data(14, HEADS, DIM, dtype=dtype, seed=3), data(14, 2 * HEADS, v.shape[3], dtype=dtype)[:, ::2]
    wanted = [loop(cache, new, requests, positions) for cache, new in zip((k, v), rows)]
    beside = v[PAGES:].clone()
    append(rows, requests, positions, given, layout, index=torch.int64 if size == 5 else torch.int32)
    assert bits(k).equal(wanted[0]) and bits(v).equal(wanted[1]) and bits(v[PAGES:]).equal(bits(beside))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_row_need_no_dimension(layout):
    rows = data(3, HEADS, DIM), data(3, HEADS, DIM, seed=1)
    pair = data(PAGES, HEADS, DIM, seed=2), data(PAGES, HEADS, DIM, seed=3)
    both = torch.stack(pair, 1)
    wanted = [loop(cache[:, None], new, [0, 2, 3], [1, 0, 4])[:, 0] for cache, new in zip(pair, rows)]
    append(rows, [0, 2, 3], [1, 0, 4], pair, layout)
    append(rows, [0, 2, 3], [1, 0, 4], both, layout)
    for side in (0, 1):
        assert bits(pair[side]).equal(wanted[side]) and bits(both[:, side]).equal(wanted[side])


@pytest.mark.parametrize("indices", [[-1, 99, *FAR, -7, 12, 500, 3, 5], [3], [], [12] * 9])
@pytest.mark.parametrize("indptr", [INDPTR, [5, 3, 1, 0, -4], [*FAR, 0, *FAR], [-3, 2, 1 << 20, 4, 5]])
def test_hostile_tables_touch_nothing_else(indptr, indices):
    held = len(indices)
    whole = data(PAGES + 4, 2, 4, HEADS, DIM, seed=4)
    before, cache = whole.clone(), whole[2:-2]
    clamped = [min(max(x, 0), held) for x in indptr]
    requests, positions = [0, 0, 1, 2, 3, 3, 3, *FAR], [0, 9, 1, 3, 2, FAR[0], FAR[1], 0, 1]
    rows = data(9, HEADS, DIM, seed=5), data(9, HEADS, DIM, seed=6)
    wanted = [loop(cache[:, s], rows[s], requests, positions, clamped, indices) for s in (0, 1)]
    append(rows, requests, positions, cache, indptr=indptr, indices=indices)
    assert all(bits(cache[:, s]).equal(wanted[s]) for s in (0, 1))
    assert whole[:2].equal(before[:2]) and whole[-2:].equal(before[-2:])


def test_far_positions_of_64_bits():
    cache = data(PAGES, 2, 1, HEADS, DIM)
    before, far = cache.clone(), [(1 << 63) - 1, -(1 << 63), 1 << 62]
    append((data(3, HEADS, DIM),) * 2, [2, 2, 2], far, cache, index=torch.int64)
    append((data(3, HEADS, DIM),) * 2, far, [0, 0, 0], cache, index=torch.int64)
    append((data(3, HEADS, DIM),) * 2, [0, 2, 3], [0, 0, 0], cache, indptr=far + far[:2], index=torch.int64)
    append((data(1, HEADS, DIM),) * 2, [0], [0], cache, indices=far[:2], indptr=[0, 2], last=[1], index=torch.int64)
    assert cache.equal(before)


def test_calls_without_rows_requests_or_pages():
    cache, rows = data(PAGES, 2, 4, HEADS, DIM), (data(2, HEADS, DIM),) * 2
    before = cache.clone()
    append([r[:0] for r in rows], [], [], cache)
    append(rows, [0, 0], [0, 1], cache, indptr=[0], last=[])
    append(rows, [0, 0], [0, 1], cache[:0])
    assert cache.equal(before)


def test_lengths_and_positions():
    lens = page.get_seq_lens(ints(INDPTR), ints(LAST), 16)
    assert lens.tolist() == [34, 0, 1, 67] and lens.dtype == torch.int32
    assert page.get_seq_lens(ints([0, 2, 1, 1, 3]), ints([99, 5, 5, -4]), 16).tolist() == [32, 0, 0, 16]
    starts = ints([0, 4, 4, 5, 11])
    requests, positions = page.get_batch_indices_positions(starts, lens, 13)
    assert requests.tolist() == [0] * 4 + [2] + [3] * 6 + [-1] * 2
    assert positions.tolist() == [30, 31, 32, 33, 0, 61, 62, 63, 64, 65, 66, 0, 0]
    assert requests.dtype == positions.dtype == torch.int32
    outputs = torch.full((2, 13), 7, dtype=torch.int32)
    found = page.get_batch_indices_positions(starts.long(), lens.long(), 13, *outputs)
    assert found[0].equal(requests) and found[1].equal(positions)
    assert outputs.equal(torch.stack([requests, positions])) and found[0].data_ptr() == outputs.data_ptr()
    assert [t.tolist() for t in page.get_batch_indices_positions(starts[:1], lens[:0], 2)] == [[-1, -1], [0, 0]]
    assert page.get_batch_indices_positions(ints([2, 4]), ints([9]), 5)[0].tolist() == [-1, -1, 0, 0, -1]
    for hostile in ([*FAR, 0, *FAR], [9, 7, 5, 3, 1]):
        page.get_batch_indices_positions(ints(hostile), lens, 13)


def dense_attention(q, k, v, scale):
    return dense.attention(q, k, v, scale=scale, soft_cap=0.0)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_attention_reads_what_was_appended(dtype):
    """Two steps of appending, then the context function over the table, against dense attention of the rows."""
    lens, size = [13, 0, 5, 22], 8
    pages = [-(-n // size) for n in lens]
    indptr = ints([0, 2, 2, 3, 6])
    assert indptr.diff().tolist() == pages
    indices, last = ints([4, 0, 7, 2, 8, 1]), ints([5, 0, 5, 6])
    cache = torch.zeros(9, 2, size, HEADS, DIM).to(dtype)
    kv_lens = page.get_seq_lens(indptr, last, size)
    assert kv_lens.tolist() == lens
    keys = [(data(n, HEADS, DIM, dtype=dtype, seed=n), data(n, HEADS, DIM, dtype=dtype, seed=n + 50)) for n in lens]
    for part, held in ((slice(None, -3), [max(n - 3, 0) for n in lens]), (slice(-3, None), lens)):
        new = [(k[part], v[part]) for k, v in keys]
        starts = ints([0, *(len(k) for k, _ in new)]).cumsum(0)
        nnz = int(starts[-1]) + 2  # padding
        requests, positions = page.get_batch_indices_positions(starts, ints(held), nnz)
        rows = [torch.cat([bits(t[side]) for t in new] + [bits(cache[0, 0, :2])]).view(dtype) for side in (0, 1)]
        page.append_paged_kv_cache(*rows, requests, positions, cache, indices, indptr, last)
    q_lens = [3, 0, 2, 4]
    q = data(9, 2 * HEADS, DIM, seed=9)
    table = torch.zeros(4, 3, dtype=torch.int32)
    for b in range(4):
        table[b, : pages[b]] = indices[indptr[b] : indptr[b + 1]]
    out = wrappers.trtllm_batch_context_with_kv_cache(
        q, cache, None, table, kv_lens, 4, 24, 0.2, 1.0, 4, ints([0, 3, 3, 5, 9]), None, kv_layout="NHD",
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    for rows, (k, v) in zip(zip(q.split(q_lens), out.split(q_lens)), keys):
        if len(rows[0]):
            torch.testing.assert_close(rows[1], dense_attention(rows[0], k, v, 0.2).bfloat16())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tensors", [True, False])
def test_nvfp4_rows(layout, tensors):
    """Quantised here, or before."""
    inner = (4, HEADS) if layout == "NHD" else (HEADS, 4)
    caches = [torch.full((PAGES, 2, *inner, DIM // n), 9, dtype=torch.uint8) for n in (2, 16)]
    caches[1] = caches[1].view(E4M3)
    again = [bits(t).clone().view(t.dtype) for t in caches]
    k, v = data(5, HEADS, DIM), 3 * data(5, HEADS, DIM, seed=1)
    where = [0, 3, 3, -1, 2], [11, 0, 19, 0, 1]
    tables, (requests, positions) = tuple(map(ints, (INDICES, INDPTR, LAST))), map(ints, where)
    scales = [torch.tensor([s]) if tensors else s for s in (0.5, 0.25)]
    page.nvfp4_quantize_append_paged_kv_cache(k, v, requests, positions, *caches, *tables, *scales, layout)
    packed = [fp4.nvfp4_quantize(rows, 1 / scale) for rows, scale in ((k, 0.5), (v, 0.25))]
    for cache, rows in zip(again, zip(*packed)):
        append(rows, *where, tuple(cache.unbind(1)), layout)
    assert all(bits(a).equal(bits(b)) for a, b in zip(caches, again))
    as_nhd = [t if layout == "NHD" else t.transpose(2, 3) for t in caches]
    for side, scale, rows in ((0, 0.5, k), (1, 0.25, v)):
        codes, sf = as_nhd[0][INDICES[2], side, 3], bits(as_nhd[1])[INDICES[2], side, 3].view(E4M3)
        value = fp4.nvfp4_dequantize(codes, sf, 1 / scale)
        assert (value - rows[0].float()).abs().max() < rows[0].float().abs().max() / 6
        assert bits(as_nhd[1])[INDICES[3], side, 2:].eq(9).all()  # not written


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_nvfp4_rows_of_slots(layout, dtype):
    """Rows without a slot are not written, nor are those behind the last slot; a slot past the cache is none."""
    inner = (4, HEADS) if layout == "NHD" else (HEADS, 4)
    codes, factors = (torch.full((PAGES, 2, *inner, DIM // n), 9, dtype=torch.uint8) for n in (2, 16))
    k, v, slots = data(6, HEADS, DIM), data(6, HEADS, DIM, seed=1), [4 * PAGES - 1, -1, 6, 4 * PAGES, 0]
    function = page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    where = torch.tensor(slots, dtype=dtype)
    both = factors[:, 0].view(E4M3), factors[:, 1].view(E4M3)
    function(k, v, where, codes, both, 0.5, torch.tensor([0.25]), layout)
    for side, rows, scale in ((0, k, 0.5), (1, v, 0.25)):
        want = fp4.nvfp4_quantize(rows, 1 / scale)
        for cache, packed in zip((codes, factors), want):
            held = cache[:, side] if layout == "NHD" else cache[:, side].transpose(1, 2)
            held, seen = held.reshape(4 * PAGES, HEADS, -1), [s for s in slots if 0 <= s < 4 * PAGES]
            for row, slot in enumerate(slots):
                assert slot not in seen or torch.equal(held[slot], bits(packed[row]))
            assert sorted(seen) == held.ne(9).any(-1).any(-1).nonzero().flatten().tolist()
    before = codes.clone()
    with pytest.raises(ValueError, match="append_value: 4 rows, must be at least the 5 of slot_mapping"):
        function(k, v[:4], where, codes, factors.view(E4M3), 1.0, 1.0, layout)
    assert torch.equal(codes, before)


def test_no_value_is_read_by_the_host():
    tables, where = tuple(map(ints, (INDICES, INDPTR, LAST))), tuple(map(ints, ([0, 2, 9], [0, 3, 4])))
    rows, cache = (data(3, HEADS, DIM), data(3, HEADS, DIM)), data(PAGES, 2, 4, HEADS, DIM)
    packed, factors = (torch.zeros(PAGES, 2, 4, HEADS, DIM // n, dtype=torch.uint8) for n in (2, 16))
    scale, v, s = torch.ones(1), torch.ones(3, HEADS, DIM), torch.ones(3, HEADS)
    flags, states, lse = torch.ones(12) > 0, torch.stack([v, v], 1), torch.stack([s, s], 1)
    with Seen() as seen:
        page.append_paged_kv_cache(*rows, *where, cache, *tables)
        page.nvfp4_quantize_append_paged_kv_cache(*rows, *where, packed, factors.view(E4M3), *tables, scale, scale)
        slots = packed, factors.view(E4M3), scale, scale
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*rows, where[1], *slots)
        page.get_batch_indices_positions(tables[1], page.get_seq_lens(tables[1], tables[2], 4), 14)
        wrappers.merge_state(v, s, v, s)
        wrappers.merge_state_in_place(v, s, v.clone(), s.clone(), torch.ones(3) > 0)
        wrappers.merge_states(states, lse)
        wrappers.packbits(flags)
        quantization.pack_segments(flags, tables[1], tables[1], 9, torch.empty(9, dtype=torch.uint8))
    assert len(seen.names()) > 20 and WAITS.isdisjoint(seen.names())
    for name, (_, args, _) in zip(seen.names(), seen.calls):
        assert name not in ("index", "index_put", "index_put_") or all(
            t is None or t.dtype == torch.int64 for t in args[1]
        ), name
    with seen:
        cache[tables[0].argmax()]
    assert "_local_scalar_dense" in seen.names()
