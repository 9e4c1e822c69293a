"""The writers of caches of latent attention: bytes of each record, places, norm, rotation and quantisation.

Every byte of a cache that no row owns keeps its first value.
"""

import math

import pytest
import torch

import wrappers
from tests.support.bad_values import contents
from tests.support.latent_rows import (
    BF16,
    BYTE,
    E4M3,
    E4M3_VALUES,
    FP16,
    HOSTS,
    POISON,
    QUARTER,
    SLOTS,
    WIDTHS,
    Paged,
    code,
    e4m3,
    encode,
    fp32,
    full,
    ints,
    power_above,
    randn,
    top,
    uneven,
)
from wrappers import (
    BlockTable,
    IndexerRows,
    LatentCache,
    LatentNorm,
    LatentOutputs,
    LatentQuery,
    PageLists,
    RotaryEmbedding,
    append_latent,
)

# ---- bytes

BYTES = [  # record, values of both parts, whether scales are powers of two
    ("rows", 512, 64, True), ("rows", 48, 10, True), ("rows", 512, 0, True), ("e4m3", 512, 64, True),
    ("656", 512, 64, True), ("656", 512, 64, False), ("528_fp32", 512, 0, True), ("528_fp32", 512, 0, False),
    ("528", 448, 64, True), ("528", 512, 0, True), ("528_planar", 448, 64, True), ("528_planar", 512, 0, True),
    ("584", 448, 64, True), ("352", 512, 64, True), ("288", 448, 64, True), ("288", 512, 0, True),
    ("132", 128, 0, True), ("132", 128, 0, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("record,latents,rotateds,power", BYTES)
def test_bytes_of_a_record(record, latents, rotateds, power, dtype):
    latent, rotated = uneven(5, latents, dtype), randn(5, rotateds, seed=1, dtype=dtype) * 3
    width = WIDTHS.get(record, (latents + rotateds) * (2 if record == "rows" else 1))
    cache, want = Paged(width), Paged(width)
    for token, slot in enumerate(SLOTS.tolist()[:3]):
        want.put(record, slot, *encode(record, latent[token].tolist(), rotated[token].tolist(), dtype, power, 0.37))
    if record == "132":
        append_latent(None, None, None, SLOTS, index=IndexerRows(latent, cache.view, power_of_two=power))
    else:
        view = cache.view.view(dtype) if record == "rows" else cache.view
        target = LatentCache(view, record, None, 0.37 if record == "e4m3" else 1.0, power)
        assert append_latent(latent, rotated if rotateds else None, target, SLOTS) == LatentOutputs()
    assert torch.equal(cache.memory, want.memory)
    assert (want.memory[:, -24:] == POISON).all() and (want.memory != POISON).any()


@pytest.mark.parametrize("record", ["656", "584", "352"])
def test_a_rotated_part_that_is_absent_is_zero(record):
    latent = uneven(5, 448 if record == "584" else 512, BF16)
    cache, want = Paged(WIDTHS[record]), Paged(WIDTHS[record])
    for token, slot in enumerate(SLOTS.tolist()[:3]):
        want.put(record, slot, *encode(record, latent[token].tolist(), [0.0] * 64, BF16))
    append_latent(latent, None, LatentCache(cache.view, record), SLOTS)
    assert torch.equal(cache.memory, want.memory)


@pytest.mark.parametrize("record", ["656", "584", "132"])
@pytest.mark.parametrize("view", [lambda t: t[:, :, None], lambda t: t.view(torch.int8), lambda t: t.view(E4M3)])
def test_views_of_a_cache(record, view):
    """A dimension of one head, and the other types of a byte."""
    latent = uneven(5, {"656": 512, "584": 448, "132": 128}[record], BF16)
    found = []
    for change in (lambda t: t, view):
        cache = Paged(WIDTHS[record])
        seen = change(cache.view)
        if record == "132":
            append_latent(None, None, None, SLOTS, index=IndexerRows(latent, seen))
        else:
            append_latent(latent, randn(5, 64), LatentCache(seen, record), SLOTS)
        found.append(cache.memory)
    assert torch.equal(*found) and (found[0] != POISON).any()


@pytest.mark.parametrize("record", ["rows", "e4m3"])
def test_a_rotated_part_with_a_cache_of_its_own(record):
    """Two views of one packed cache have the bytes of the packed one; two tensors have them apart."""
    latent, rotated, found = randn(5, 512), randn(5, 64, seed=1), []
    dtype = BF16 if record == "rows" else BYTE
    for split in (False, True):
        cache = Paged(576 * dtype.itemsize)
        whole = cache.view.view(dtype)
        target = LatentCache(whole[..., :512] if split else whole, record, whole[..., 512:] if split else None)
        target = target._replace(scale=0.5 if record == "e4m3" else 1.0)
        append_latent(latent, rotated, target, SLOTS)
        found.append(cache)
    assert torch.equal(found[0].memory, found[1].memory) and (found[0].memory != POISON).any()
    apart = Paged(512 * dtype.itemsize), Paged(64 * dtype.itemsize)
    append_latent(latent, rotated, target._replace(cache=apart[0].view.view(dtype), rotated=apart[1].view.view(dtype)),
                  SLOTS)  # fmt: skip
    assert torch.equal(torch.cat([one.view for one in apart], -1), found[0].view)
    assert all((one.memory[:, -24:] == POISON).all() for one in apart)


EXTREME = [448.0, -448.0, 463.0, 465.0, 1e3, -1e4, math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**-10, 2.0**-11, 1e-30]


@pytest.mark.parametrize("scale", [1.0, 0.5, torch.tensor([2.0]), torch.tensor(0.37)])
def test_e4m3_saturates_and_keeps_nan(scale):
    """In a cache with one scale and in a query."""
    row = torch.tensor(EXTREME + [1.0, -1.0]).bfloat16()[None]
    cache, want = torch.zeros(1, 2, 32, dtype=BYTE), e4m3(row[0].tolist(), float(scale))
    query = LatentQuery(row[None], row[None], dtype=E4M3, scale=scale)
    got = append_latent(row, row, LatentCache(cache, "e4m3", None, scale), ints(1), query=query).query
    assert bytes(cache[0, 1].tolist()) == bytes(got.view(BYTE).flatten().tolist()) == want + want
    assert {0x7E, 0xFE, 0x7F} <= set(want) and not cache[0, 0].any()


@pytest.mark.parametrize("power", [True, False])
def test_nan_and_infinity_beside_scales(power):
    """NaN is not part of a scale. Infinity saturates: its block has a finite scale."""
    latent = torch.ones(1, 512).bfloat16()
    latent[0, 3], latent[0, 130], latent[0, 256:384] = math.nan, -math.inf, math.nan
    cache = torch.zeros(1, 1, 656, dtype=BYTE)
    append_latent(latent, None, LatentCache(cache, "656", power_of_two=power), ints(0))
    scales, codes = cache[0, 0, 512:528].view(torch.float32), cache[0, 0, :512].tolist()
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert scales[0] == scales[3] == fp32(2.0**-8 if power else 1 / 448) and scales[1] > 2.0**118
    assert [i for i, byte in enumerate(codes) if byte & 0x7F == 0x7F] == [3, *range(256, 384)]
    assert codes[130] == 0xFE and codes[4] == e4m3([1.0], scales[0].item())[0]


def test_nan_and_infinity_of_e2m1():
    """A block with NaN has the scale NaN. Others saturate at 6 times 448."""
    latent = torch.ones(1, 512).bfloat16()
    latent[0, 3], latent[0, 17], latent[0, 33] = math.nan, -math.inf, 1e4
    cache = torch.zeros(1, 1, 288, dtype=BYTE)
    append_latent(latent, None, LatentCache(cache, "288"), ints(0))
    scales, codes = cache[0, 0, 256:].tolist(), cache[0, 0, :256].tolist()
    assert [scales[0] & 0x7F, *scales[1:3]] == [0x7F, 0x7E, 0x7E] and scales[3] == code(0.171875, E4M3_VALUES)
    assert codes[8] >> 4 == 0xF and codes[16] >> 4 == 0x7


# ---- places


def places_of(kind, dtype):
    """Return the same six places three ways: tokens 3 to 5 of a request, none of another, tokens 2 to 4 of a third."""
    tensors = {
        "slots": (torch.tensor([19, 4, 5, 10, 11, 20]),),
        "lists": ([0, 0, 0, 2, 2, 2], [3, 4, 5, 2, 3, 4], [4, 1, 2, 5], [0, 2, 2, 4]),
        "table": ([[4, 1, 1 << 30], [-7, 1 << 30, 0], [2, 5, -1]], [6, 0, 5], [0, 3, 3, 6]),
    }[kind]
    found = [torch.as_tensor(t).to(dtype) for t in tensors]
    return found[0] if kind == "slots" else (PageLists if kind == "lists" else BlockTable)(*found)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["slots", "lists", "table"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_agree(kind, dtype, host):
    """Positions of the rotation that are not given are those of the pages. An indexer has the places of the latent."""
    rope = RotaryEmbedding(torch.tensor([3, 4, 5, 2, 3, 4]).to(dtype), randn(6, 64, dtype=torch.float32), True)
    found = []
    for places, turn in (
        (places_of("slots", torch.int64), rope),
        (places_of(kind, dtype), rope if kind == "slots" else rope._replace(positions=None)),
    ):
        cache, keys = Paged(656, 6), Paged(132, 6)
        with HOSTS[host]():
            append_latent(randn(6, 512), randn(6, 64, seed=1), LatentCache(cache.view, "656"), places, rope=turn,
                          index=IndexerRows(randn(6, 128, seed=2), keys.view, rope=turn))  # fmt: skip
        found.append((cache, keys))
    for one, other in zip(*found):
        assert torch.equal(one.memory, other.memory)
    assert (found[0][0].view[..., 512:528] != POISON).any(-1).nonzero().tolist() == [
        [1, 0], [1, 1], [2, 2], [2, 3], [4, 3], [5, 0]]  # fmt: skip


FAR = 1 << 40
NOWHERE = {  # places of four tokens, only the last of which has a row: row 2 of page 1 of a cache of 3 pages of 4 rows
    "slots": torch.tensor([-1, 12, -(1 << 62), 6]),
    "slots far": torch.tensor([1 << 62, FAR, (1 << 32) + 6, 6]),
    "slots of 32 bits": ints(-(1 << 31), (1 << 31) - 1, 12, 6),
    "requests": PageLists(torch.tensor([-1, 1, FAR, 0]), torch.tensor([0, 0, 0, 2]), ints(1), ints(0, 1)),
    "positions": PageLists(ints(0, 0, 0, 0), torch.tensor([-1, 4, FAR, 2]), ints(1, 2), ints(0, 1)),
    "pages": PageLists(ints(0, 0, 0, 0), ints(0, 4, 8, 14), torch.tensor([-1, 3, FAR, 1]), ints(0, 4)),
    "offsets": PageLists(ints(0, 1, 1, 2), ints(0, 0, 4, 2), ints(1), torch.tensor([-9, -5, 0, FAR])),
    "no request": BlockTable(ints([1]), ints(3), ints(3, 4)),
    "columns": BlockTable(ints([1], [1]), ints(9, 3), ints(0, 3, 4)),
    "table": BlockTable(torch.tensor([[-5], [FAR], [3], [1]]), ints(3, 3, 3, 3), ints(0, 1, 2, 3, 4)),
    "negative positions": BlockTable(ints([1], [1]), ints(-1, 3), ints(0, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("record", ["656", "584"])
@pytest.mark.parametrize("name", NOWHERE)
def test_tokens_without_a_place(name, record, host):
    latent, rotated, k = randn(4, 448 if record == "584" else 512), randn(4, 64, seed=1), randn(4, 128, seed=2)
    found = []
    for rows, places in ((slice(None), NOWHERE[name]), (slice(3, 4), ints(6))):
        cache, keys = Paged(WIDTHS[record]), Paged(132)
        with HOSTS[host]():
            append_latent(latent[rows], rotated[rows], LatentCache(cache.view, record), places,
                          index=IndexerRows(k[rows], keys.view))  # fmt: skip
        found.append((cache.memory, keys.memory))
    assert all(map(torch.equal, *found)) and all((memory != POISON).any() for memory in found[0])


@pytest.mark.parametrize("host", HOSTS)
def test_positions_outside_the_table_skip_a_token(host):
    """The first three tokens are not rotated, so nothing of them is written. The next has no slot: only its query and
    its rotated part are."""
    positions = torch.tensor([-1, 9, FAR, 8, 8])
    rope = RotaryEmbedding(positions, QUARTER)
    cache, keys = Paged(656), Paged(132)
    outs = [torch.full(shape, 7.0).bfloat16() for shape in ((5, 2, 576), (5, 64))]
    codes, weights = torch.full((5, 3, 128), 7.0).to(E4M3), torch.full((5, 3), 7.0)
    with HOSTS[host]():
        append_latent(
            randn(5, 512), randn(5, 64, seed=1), LatentCache(cache.view, "656"), torch.tensor([0, 1, 2, -1, 6]),
            rope=rope, query=LatentQuery(randn(5, 2, 512, seed=2), randn(5, 2, 64, seed=3), outs[0]),
            index=IndexerRows(randn(5, 128, seed=4), keys.view, rope=rope, q=randn(5, 3, 128, seed=5),
                              weights=randn(5, 3, dtype=torch.float32), q_out=codes, weights_out=weights),
            rotated_out=outs[1],
        )  # fmt: skip
    for t in (*outs, codes.float(), weights):
        assert (t[:3] == 7.0).all() and (t[3:] != 7.0).flatten(1).any(1).all()
    assert (cache.view != POISON).any(-1).nonzero().tolist() == [[1, 2]]
    assert (keys.memory != POISON).nonzero()[:, 0].unique().tolist() == [1]
    assert 120 < (keys.memory != POISON).sum() <= 132


@pytest.mark.parametrize("host", HOSTS)
def test_fewer_slots_than_rows(host):
    """The rows behind the slots are ignored, and a call without rows writes nothing."""
    cache, want = Paged(656), Paged(656)
    with HOSTS[host]():
        append_latent(randn(5, 512), randn(5, 64), LatentCache(cache.view, "656"), SLOTS[:2])
        append_latent(randn(5, 512)[:2], randn(5, 64)[:2], LatentCache(want.view, "656"), SLOTS[:2])
        assert torch.equal(cache.memory, want.memory) and (cache.memory != POISON).any()
        query = LatentQuery(randn(0, 2, 512), randn(0, 2, 64))
        out = append_latent(randn(0, 512), randn(0, 64), LatentCache(cache.view, "656"), SLOTS[:0], query=query)
    assert out.query.shape == (0, 2, 576) and torch.equal(cache.memory, want.memory)


# ---- norm and rotation


def turned(row, cos_sin, interleaved):
    """Return a list of numbers, rotated pair by pair. cos_sin: cosines, then sines."""
    row, half = list(row), len(cos_sin) // 2
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        cos, sin = cos_sin[pair], cos_sin[pair + half]
        row[i], row[j] = row[i] * cos - row[j] * sin, row[j] * cos + row[i] * sin
    return row


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("norm", ["", "latent", "both"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table", [torch.float32, FP16])
def test_norm_and_rotation(norm, interleaved, table, host):
    """Rows against loops in float64. The rotated part of the cache is also in rotated_out."""
    latent, rotated = randn(3, 64, dtype=FP16) * 2, randn(3, 8, seed=1, dtype=FP16) * 3
    nope, pe = randn(3, 2, 64, seed=2, dtype=FP16), randn(3, 2, 8, seed=3, dtype=FP16)
    weight, positions = randn(72 if norm == "both" else 64, seed=4, dtype=FP16), torch.tensor([4, 0, 2])
    angles = randn(5, 4, seed=5, dtype=torch.float32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(table)
    cache, out = torch.zeros(1, 4, 72, dtype=FP16), torch.zeros(3, 8, dtype=FP16)
    with HOSTS[host]():
        query = append_latent(
            latent, rotated, LatentCache(cache), ints(2, 0, 3), LatentNorm(weight, 0.5, 1.0) if norm else None,
            RotaryEmbedding(positions, cos_sin, interleaved), LatentQuery(nope, pe), rotated_out=out,
        ).query  # fmt: skip
    for token, slot in enumerate((2, 0, 3)):
        row, at = torch.cat([latent[token], rotated[token]]).tolist(), cos_sin[positions[token]].tolist()
        if norm:
            count = len(weight)
            inverse = 1 / math.sqrt(sum(x * x for x in row[:count]) / count + 0.5)
            row[:count] = [x * inverse * (w + 1.0) for x, w in zip(row, weight.tolist())]
        want = torch.tensor(row[:64] + turned(row[64:], at, interleaved))
        torch.testing.assert_close(cache[0, slot].float(), want, rtol=1e-3, atol=1e-5)
        assert torch.equal(out[token], cache[0, slot, 64:])
        for head in range(2):
            assert torch.equal(query[token, head, :64], nope[token, head])
            want = torch.tensor(turned(pe[token, head].tolist(), at, interleaved))
            torch.testing.assert_close(query[token, head, 64:].float(), want, rtol=1e-3, atol=1e-5)
    assert not cache[0, 1].any()


def quarter(x, interleaved, count=64):
    """Return x with its first values turned by a quarter, which is exact."""
    x, half = x.clone(), count // 2
    first, second = (slice(0, count, 2), slice(1, count, 2)) if interleaved else (slice(0, half), slice(half, count))
    cos, sin, old = 0.0, 1.0, x.clone()
    x[..., first] = old[..., first] * cos - old[..., second] * sin  # of zeros the sign is that of the sum
    x[..., second] = old[..., second] * cos + old[..., first] * sin
    return x


ROTATED_RECORDS = ["rows", "e4m3", "656", "528", "528_planar", "584", "352", "288"]


@pytest.mark.parametrize("record", ROTATED_RECORDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_record_rotates(record, interleaved):
    """A rotated part has the bytes of one that the caller has rotated."""
    latent, rotated = randn(5, 448 if record in ("528", "528_planar", "584", "288") else 512), randn(5, 64, seed=1)
    dtype, found = (BF16 if record == "rows" else BYTE), []
    for rope, pe in (
        (RotaryEmbedding(torch.zeros(5).long(), QUARTER, interleaved), rotated), (None, quarter(rotated, interleaved)),
    ):  # fmt: skip
        cache = Paged(WIDTHS.get(record, 576 * dtype.itemsize))
        append_latent(latent, pe, LatentCache(cache.view.view(dtype), record), SLOTS, rope=rope)
        found.append(cache.memory)
    assert torch.equal(*found) and (found[0] != POISON).any()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_in_place(interleaved, host):
    """The query without nope, and the key's rotated part, in views of wider tensors."""
    wide, pe = randn(5, 80), randn(5, 3, 96, seed=1)
    before = wide.clone(), pe.clone()
    rotated, q, cache = wide[:, 8:72], pe[..., 16:80], Paged(1152)
    with HOSTS[host]():
        out = append_latent(
            randn(5, 512), rotated, LatentCache(cache.view.view(BF16)), SLOTS,
            rope=RotaryEmbedding(torch.zeros(5).int(), QUARTER, interleaved), query=LatentQuery(None, q, q),
            rotated_out=rotated,
        ).query  # fmt: skip
    assert out is q
    for whole, old, part in ((wide, before[0], slice(8, 72)), (pe, before[1], slice(16, 80))):
        want = old.clone()
        want[..., part] = quarter(old[..., part], interleaved)
        assert torch.equal(whole, want)
    assert torch.equal(cache.view.view(BF16)[1, 1, 512:], rotated[0])


@pytest.mark.parametrize("host", HOSTS)
def test_outputs_of_a_query(host):
    """A new tensor or the given one, in the type of the parts or in e4m3, divided by a number or a tensor."""
    nope, pe = randn(5, 2, 512) * 9, randn(5, 2, 64, seed=1) * 9
    joined = torch.cat([nope, quarter(pe, True)], -1)
    given = {"latent": randn(5, 512), "rotated": randn(5, 64), "places": SLOTS,
             "rope": RotaryEmbedding(ints(0, 8, 1, 2, 3), QUARTER, True)}  # fmt: skip
    for scale in (0.37, torch.tensor([0.37]), None):
        want = joined if scale is None else torch.tensor([*e4m3(joined.flatten().tolist(), 0.37)], dtype=BYTE)
        for own in (False, True):
            dtype = BF16 if scale is None else E4M3
            out = torch.zeros(5, 2, 600).to(dtype)[..., 8:584] if own else None
            query = LatentQuery(nope, pe, out, None if own else dtype, 1.0 if scale is None else scale)
            with HOSTS[host]():
                got = append_latent(cache=LatentCache(Paged(656).view, "656"), query=query, **given).query
            assert got.dtype == dtype and got.shape == (5, 2, 576) and (got is out) == own
            assert torch.equal(got, want) if scale is None else torch.equal(got.view(BYTE).flatten(), want)


# ---- the indexer


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("power", [True, False])
def test_norm_and_rotation_of_an_indexer(norm, interleaved, power, host):
    """Numbers are chosen such that all of it is exact: k is 0 or 2, its mean 1, its variance 1, its mean square 2."""
    k = 2.0 * torch.tensor([[i * j % 17 % 2 for i in range(64)] for j in (3, 5, 6)])
    k = torch.cat([k, 2.0 - k], 1)
    weight, bias = torch.arange(1.0, 129.0), torch.arange(128.0).flip(0) / 8
    rope = RotaryEmbedding(torch.zeros(3).long(), QUARTER, interleaved)
    cache, want = Paged(132), Paged(132)
    rows = IndexerRows(k.half(), cache.view, None, weight.half(), bias.half() if norm == "layer" else None,
                       3.0 if norm == "layer" else 2.0, rope, power)  # fmt: skip
    with HOSTS[host]():
        append_latent(None, None, None, ints(5, 11, 0), index=rows)
    value = (k - 1) / 2 * weight + bias if norm == "layer" else k / 2 * weight
    for row, slot in zip(quarter(value, interleaved).tolist(), (5, 11, 0)):
        want.put("132", slot, *encode("132", row, [], FP16, power))
    assert torch.equal(cache.memory, want.memory)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("own", [False, True])
def test_query_of_an_indexer(width, own, host):
    """A scale per row, a power of two, is folded into the weights, which may be negative or 0. Rows may be 0."""
    q, weights = uneven(5, 512, BF16).view(5, 4, 128), randn(5, 4, seed=1, dtype=torch.float32)
    weights[4, 3] = 0.0
    table = torch.cat([torch.zeros(1, width // 2), torch.ones(1, width // 2)], 1)
    outs = {"q_out": torch.zeros(5, 4, 128).to(E4M3), "weights_out": torch.zeros(5, 4)} if own else {}
    index = IndexerRows(
        randn(5, 128, seed=2), Paged(132).view, rope=RotaryEmbedding(ints(*[0] * 5), table, True), power_of_two=False,
        q=q, weights=weights, weight_scale=0.125, **outs,
    )  # fmt: skip
    with HOSTS[host]():
        query, codes, folded = append_latent(None, None, None, SLOTS, index=index)
    assert query is None and codes.dtype == E4M3 and folded.dtype == torch.float32
    assert not own or codes is outs["q_out"] and folded is outs["weights_out"]
    least = set()
    for token in range(5):
        for head in range(4):
            row = quarter(q[token, head], True, width).tolist()
            scale = power_above(fp32(max(top(row), fp32(1e-10)) / 448))
            least.add(scale)
            assert bytes(codes[token, head].view(BYTE).tolist()) == e4m3(row, scale)
            assert folded[token, head] == weights[token, head] * scale * 0.125
    assert 2.0**-42 in least and len(least) > 5


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("own", [True, False])
def test_one_launch_is_two(own, host):
    """Rows of an indexer in the launch of the latent have the bytes of a launch of their own, and so has the latent.
    own: the indexer has places of its own, and the key is rotated."""
    one, two = full(), full()
    if not own:
        for given in (one, two):
            given |= {"index": given["index"]._replace(places=None), "rope": None}
    with HOSTS[host]() as machine:
        together = append_latent(**one)
        if machine:
            assert len(machine.launches) == 1
        apart = append_latent(**two | {"index": None})
        alone = append_latent(None, None, None, two["places"], index=two["index"])
    assert contents(one) == contents(two) != contents(full())
    assert apart.index_q is apart.index_weights is alone.query is None
    assert torch.equal(together.query, apart.query) and together.query is one["query"].out
    assert together.index_q is one["index"].q_out and alone.index_weights is two["index"].weights_out


# ---- functions of other libraries


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_concat_and_cache_mla(name, dtype, host):
    """The names of vLLM's formats, with a rotated part that may have a head, or no columns."""
    record, width = {"fp8": ("e4m3", 576), "fp8_e4m3": ("e4m3", 576), "fp8_ds_mla": ("656", 656),
                     "nvfp4_ds_mla": ("352", 352)}.get(name, ("rows", 1152))  # fmt: skip
    kind = FP16 if name == "float16" else BF16
    latent, rotated, scale = uneven(6, 512, kind), randn(6, 64, seed=1, dtype=kind), torch.tensor([0.37])
    for pe in (rotated, rotated[:, None], rotated[:, :0]):
        wide = width - (64 - pe.shape[-1]) * {"rows": 2, "e4m3": 1}.get(record, 0)
        found, want = Paged(wide), Paged(wide)
        view, other = (one.view.view(kind) if record == "rows" else one.view for one in (found, want))
        target = LatentCache(other, record, None, scale if record == "e4m3" else 1.0)
        with HOSTS[host]():
            wrappers.concat_and_cache_mla(latent, pe, view, SLOTS.to(dtype), name, scale)
        append_latent(latent, pe.flatten(1) if pe.shape[-1] else None, target, SLOTS)
        assert torch.equal(found.memory, want.memory) and (want.memory != POISON).any()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("name,record,width", [
    ("auto", "rows", 1152), ("fp8", "e4m3", 576), ("fp8_ds_mla", "656", 656),
])  # fmt: skip
def test_concat_and_cache_mla_rope_fused(name, record, width, neox, host):
    """Queries and keys are rotated in place, those of tokens without a slot too."""
    latent, rotated, q = randn(5, 512), randn(5, 64, seed=1), randn(5, 3, 64, seed=2)
    own_rotated, own_q, table = rotated.clone()[:, None], q.clone(), randn(9, 64, seed=3, dtype=torch.float32)
    found, want, positions = Paged(width), Paged(width), torch.tensor([8, 0, 3, 4, 9])
    view, other = (one.view.view(BF16) if record == "rows" else one.view for one in (found, want))
    with HOSTS[host]():
        wrappers.concat_and_cache_mla_rope_fused(
            positions, own_q, own_rotated, latent, table, neox, SLOTS, view, name, torch.tensor([0.5])
        )
    before = q.clone()
    append_latent(
        latent, rotated, LatentCache(other, record, None, 0.5 if record == "e4m3" else 1.0), SLOTS,
        rope=RotaryEmbedding(positions, table, not neox), query=LatentQuery(None, q, q), rotated_out=rotated,
    )  # fmt: skip
    assert torch.equal(found.memory, want.memory) and (want.memory != POISON).any()
    assert torch.equal(own_q, q) and torch.equal(own_rotated[:, 0], rotated)
    assert (q != before).flatten(1).any(1).tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("host", HOSTS)
def test_concat_mla_q(host):
    """Parts in any strides; an output of e4m3 has the scale 1."""
    nope, pe = randn(2, 5, 512).transpose(0, 1), randn(5, 2, 100, seed=1)[..., 20:84]
    out, codes = torch.zeros(5, 2, 600).bfloat16()[..., 12:588], torch.zeros(5, 2, 576).to(E4M3)
    with HOSTS[host]():
        wrappers.concat_mla_q(nope, pe, out)
        wrappers.concat_mla_q(nope, pe, codes)
    want = torch.cat([nope, pe], -1)
    assert torch.equal(out, want)
    assert bytes(codes.view(BYTE).flatten().tolist()) == e4m3(want.flatten().tolist())


@pytest.mark.parametrize("host", HOSTS)
def test_concat_mla_q_leaves_more_heads_alone(host):
    """vLLM writes queries to a workspace whose heads are padded."""
    nope, pe, out = randn(5, 2, 512), randn(5, 2, 64, seed=1), torch.full((5, 64, 576), 7.0).bfloat16()
    with HOSTS[host]():
        wrappers.concat_mla_q(nope, pe, out)
    assert torch.equal(out[:, :2], torch.cat([nope, pe], -1)) and (out[:, 2:] == 7).all()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["ue8m0", "fp8_e4m3"])
def test_indexer_k_quant_and_cache(name, dtype, host):
    k, found, want = uneven(5, 128, FP16), Paged(132), Paged(132)
    with HOSTS[host]():
        wrappers.indexer_k_quant_and_cache(k, found.view[:, :, None], SLOTS.to(dtype), 128, name)
    append_latent(None, None, None, SLOTS, index=IndexerRows(k, want.view, power_of_two=name == "ue8m0"))
    assert torch.equal(found.memory, want.memory) and (want.memory != POISON).any()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cached", [BF16, E4M3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_paged_mla_kv_cache(cached, dtype, host):
    """Two tensors, or two views of one packed cache."""
    latent, rotated, lists = randn(6, 512) * 99, randn(6, 64, seed=1) * 99, places_of("lists", dtype)
    packed, want = (Paged(576 * cached.itemsize, 6) for _ in range(2))
    view = packed.view.view(cached)
    apart = torch.zeros(6, 4, 512).to(cached), torch.zeros(6, 4, 64).to(cached)
    for ckv, kpe in ((view[..., :512], view[..., 512:]), apart):
        with HOSTS[host]():
            wrappers.append_paged_mla_kv_cache(
                latent, rotated, lists.batch_indices, lists.positions, ckv, kpe, lists.kv_indices, lists.kv_indptr,
                torch.tensor([2, 0, 1]).to(dtype),
            )  # fmt: skip
    record = "e4m3" if cached == E4M3 else "rows"
    append_latent(latent, rotated, LatentCache(want.view.view(cached), record), places_of("slots", torch.int64))
    assert torch.equal(packed.memory, want.memory) and (want.memory != POISON).any()
    rows = torch.cat([t.view(BYTE) for t in apart], -1).flatten(0, 1)[[19, 4, 5, 10, 11, 20]]
    assert torch.equal(rows, want.view.flatten(0, 1)[[19, 4, 5, 10, 11, 20]])
