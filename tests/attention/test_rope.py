"""`wrappers.attention.rope`: rotated Q and K against float64, in every form of requests, with values that make no
sense, and without a look at any."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from cute_kernels.cache_write.spec import CacheWriteSpec
from tests.support.emulated import emulation
from tests.support.fake_machine import FakeMachine
from tests.support.host_work import Seen, torch_kernels
from tests.support.prefill_batches import Case
from wrappers import reference
from wrappers.attention import rope
from wrappers.attention.call import AttentionCall, Rope, SequenceBatch
from wrappers.host import machine
from wrappers.reference.gather_rows import key_counts

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a rounding, relative
FP32 = 2.0**-24
HUGE, NAN = (1 << 31) - 1, float("nan")
FORMS = ("table", "csr", "ragged")


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def exact(x, position, by):
    """One row (H, D) in float64, as complex numbers: (rotated, what fp32 may add to its error)."""
    half = x.shape[-1] // 2
    f = torch.tensor([by.theta ** (-2 * d / (2 * half)) / by.scale for d in range(half)], dtype=torch.float64)
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = z * torch.polar(torch.ones_like(f), position * f)
    # an angle below a turn is rounded three times (2 pi, too), its sine is right to 2 ulp, three operations follow
    error = z.abs() * (3 * 2 * math.pi + 4 + 3) * FP32
    return torch.cat([turned.real, turned.imag], -1), torch.cat([error, error], -1)


def assert_rotated(found, x, position, by):
    right, error = exact(x, position, by)
    assert found.dtype == x.dtype
    bound = error + (right.abs() + error) * UNIT[x.dtype] + 2.0**-25  # of fp16's least numbers
    assert ((found.double() - right).abs() <= bound).all(), (position, (found.double() - right).abs().max())


def problem(q, k, requests, v=None, by=Rope(), most=4, **fields):  # noqa: B008
    return AttentionCall(
        "trtllm_batch_context_with_kv_cache", q, k, k if v is None else v, requests, most,
        scale=q.shape[2] ** -0.5, rope=by, **fields,
    )  # fmt: skip


def make(form, layout="HND", size=5, dim=16, dtype=torch.bfloat16, by=Rope()):  # noqa: B008
    """Three requests: 3 queries and 2 pages, none and 1 page, more queries than keys. Slots that are not used hold NaN.
    -> (problem, [(page, slot) of each key] of each request)."""
    offsets, counts, heads = ints(0, 3, 3, 7), (size + 2, 1, 2), 2
    pages = ((6, 1, 3)[: -(-counts[0] // size)], (4,), (0, 2)[: -(-2 // size)])
    keys = [[(ids[j // size], j % size) for j in range(n)] for ids, n in zip(pages, counts)]
    if form == "ragged":
        starts = ints(0, *torch.tensor(counts).cumsum(0))
        keys = [[(0, j) for j in range(a, b)] for a, b in zip(starts, starts[1:])]
        pool = random(1, heads, int(starts[-1]) + 2, dim, dtype=dtype, seed=1)
        requests = SequenceBatch(torch.empty(1, 2, 0, dtype=torch.int32), ints(), offsets, 3, None, False, starts, form)
    else:
        pool = random(8, heads, size, dim, dtype=dtype, seed=1)
        used = {place for request in keys for place in request}
        for page, slot in ((a, b) for a in range(8) for b in range(size) if (a, b) not in used):
            pool[page, :, slot] = NAN
        rest = {} if form == "table" else {"kv_starts": ints(0, *torch.tensor([len(i) for i in pages]).cumsum(0))}
        if form == "table":
            table, lens = torch.full((3, 2, 4), -1, dtype=torch.int32), ints(*counts)
            for request, ids in enumerate(pages):
                table[request, :, : len(ids)] = ints(*ids)
        else:
            table, lens = ints(*sum(pages, ()), 5, HUGE).expand(1, 2, -1), ints(*((n - 1) % size + 1 for n in counts))
        requests = SequenceBatch(table, lens, offsets, 3, None, form=form, **rest)
    if layout == "NHD":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    return problem(random(7, 4, dim, dtype=dtype), pool, requests, by=by), keys


def places(p, request, count):
    """(page, slot) of the first keys of a request, as the page table of a problem says."""
    r = p.requests
    first = 0 if r.kv_starts is None else int(r.kv_starts[request])
    if r.form == "ragged":
        return [(0, first + j) for j in range(count)]
    row = r.page_table[request if r.form == "table" else 0, 0, first:].tolist()
    return [(row[j // p.k.shape[2]], j % p.k.shape[2]) for j in range(count)]


def assert_problem_rotated(p, keys):
    new = rope.rotated(p)
    assert new.rope is None and new.v is p.v and new.requests.kv_lens is p.requests.kv_lens
    offsets = p.requests.cu_seqlens_q.tolist()
    for request, mine in enumerate(keys):
        begin, end = offsets[request : request + 2]
        for i, row in enumerate(range(begin, end)):
            assert_rotated(new.q[row], p.q[row], i + len(mine) - (end - begin), p.rope)
        for j, (old, at) in enumerate(zip(mine, places(new, request, len(mine)))):
            assert_rotated(new.k[at[0], :, at[1]], p.k[old[0], :, old[1]], j, p.rope)
    assert new.k.transpose(1, 2).is_contiguous()
    if p.requests.form != "ragged":
        assert torch.equal(new.requests.page_table[:, 1], p.requests.page_table[:, 1])
        assert new.k.shape == (p.requests.page_table[:, 0].numel(), *p.k.shape[1:])
        assert new.requests.page_table.shape == p.requests.page_table.shape


def single(q, k, count, by):
    """One request over one page, with `count` keys."""
    requests = SequenceBatch(torch.zeros(1, 2, 1, dtype=torch.int32), ints(count), ints(0, len(q)), 1, None)
    return problem(q, k, requests, by=by, most=len(q))


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("by", [Rope(), Rope(8.0, 5e5), Rope(0.5, 1.0)], ids=str)
def test_positions_up_to_131072(dtype, by):
    """Where fp32 angles are off by 2^-8 radians, which rounding to bf16 just hides, and to fp16 does not."""
    q, k = random(1, 2, 16, dtype=dtype), random(1, 1, 131_073, 16, dtype=dtype)
    for other in (by._replace(scale=2 * by.scale), by._replace(theta=2 * by.theta)):  # whose turns are kept
        rope.rotated(single(q, k[:, :, :4], 0, other))
    new = rope.rotated(single(q, k, 131_073, by))
    assert new.q.is_contiguous()
    assert_rotated(new.q[0], q[0], 131_072, by)
    for position in (0, 1, 2047, 4096, 65537, 131071, 131072):
        assert_rotated(new.k[0, :, position], k[0, :, position], position, by)
    few = random(3, 2, 16, dtype=dtype)
    found = rope.rotated(single(few, k[:, :, :4], 0, by)).q
    for row in range(3):
        assert_rotated(found[row], few[row], row - 3, by)


def test_pairs_are_halves():
    """By hand: dimension d turns with d + D / 2, the first by one radian at position 2."""
    x = torch.zeros(1, 1, 16, dtype=torch.float16)
    x[0, 0, 0] = x[0, 0, 9] = 1
    angle = torch.tensor([1.0, 16.0 ** (-1 / 8)], dtype=torch.float64)
    cos, sin, right = angle.cos(), angle.sin(), torch.zeros(16).half()
    right[0], right[8], right[1], right[9] = cos[0], sin[0], -sin[1], cos[1]
    found = rope.rotated(single(x, torch.zeros(1, 1, 4, 16).half(), 3, Rope(2.0, 16.0)))
    assert torch.equal(found.q[0, 0], right)


@pytest.mark.parametrize("form, size", [("table", 1), ("table", 5), ("csr", 1), ("csr", 5), ("csr", 16), ("ragged", 1)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_every_key_and_query_stands_at_its_position(form, size, layout):
    assert_problem_rotated(*make(form, layout, size, dtype=torch.float16, by=Rope(2.0, 500.0)))


def test_queries_and_keys_of_packed_tensors():
    """Q, K and V in one tensor (rows, heads, D), read in place."""
    p, keys = make("ragged")
    rows = p.k.shape[2]
    packed = random(rows, 4 + 2 + 2, 16)
    q, k, v = packed[:7, :4], packed[:, 4:6].transpose(0, 1)[None], packed[:, 6:].transpose(0, 1)[None]
    before = packed.clone()
    assert_problem_rotated(p._replace(q=q, k=k, v=v), keys)
    assert torch.equal(packed, before)


def test_a_page_of_two_requests_is_rotated_for_each():
    requests = SequenceBatch(
        ints(2, 2, 2).expand(1, 2, 3), ints(4, 4), ints(0, 1, 2), 2, None, False, ints(0, 1, 3), "csr"
    )
    p = problem(random(2, 2, 16), random(3, 2, 4, 16), requests)
    assert_problem_rotated(p, [[(2, j) for j in range(4)], [(2, j % 4) for j in range(8)]])


def test_requests_of_equal_length():
    p, keys = make("table")
    p = p._replace(q=random(6, 4, 16), max_q_len=2, requests=p.requests._replace(cu_seqlens_q=None))
    found = rope.rotated(p).q
    for row in range(6):
        assert_rotated(found[row], p.q[row], row % 2 + len(keys[row // 2]) - 2, p.rope)


def test_entries_outside_the_pool_stay_outside():
    p, _ = make("table")
    p.requests.page_table[0, 0, :3] = ints(-7, 8, HUGE)
    p.requests.page_table[1, 0, 2] = 7
    table = rope.rotated(p).requests.page_table[:, 0]
    entries = torch.arange(12).view(3, 4)
    inside = (p.requests.page_table[:, 0] >= 0) & (p.requests.page_table[:, 0] < 8)
    assert torch.equal(table, entries.where(inside, -1).int()) and inside.sum() == 3


@pytest.mark.parametrize("values", [(HUGE, -HUGE, 3, -1), (-5, 2, HUGE, 1), (9, 7, 5, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_hostile_values_give_finite_rows(form, values):
    """Offsets, lengths and starts of any value: shapes hold, and all rows that are written stay finite."""
    p, _ = make(form)
    r = p.requests
    lens = ints(*values)[: r.kv_lens.shape[0]]
    starts = None if r.kv_starts is None else ints(*values)
    p = p._replace(
        k=torch.ones_like(p.k), requests=r._replace(kv_lens=lens, kv_starts=starts, cu_seqlens_q=ints(*values))
    )
    out = rope.new_tensors(p)
    out.q.fill_(NAN)
    out.k.fill_(7)
    rope.rotate(p, p.rope, out)
    assert out.q.isfinite().all() and ((out.k == 7) | (out.k.abs() < 1.5)).all()


@pytest.mark.parametrize("form", FORMS)
def test_offsets_are_clamped(form):
    """What lies before the first row or entry, or behind the last row, is what lies there."""
    p, keys = make(form)
    right = rope.rotated(p)
    p.requests.cu_seqlens_q[0], p.requests.cu_seqlens_q[-1] = -5, HUGE
    if form != "table":
        p.requests.kv_starts[0] = -5
    found = rope.rotated(p)
    assert torch.equal(found.q, right.q)
    starts = p.requests.kv_starts
    for request, mine in enumerate(keys):
        if starts is not None:
            starts[0] = 0
        for at in places(right, request, len(mine)):
            assert torch.equal(found.k[at[0], :, at[1]], right.k[at[0], :, at[1]])


@pytest.mark.parametrize("form", FORMS)
def test_only_keys_are_written(form):
    """Rows behind the keys of a request keep what the memory held; so do pages that the cache lacks."""
    p, keys = make(form)
    if form != "ragged":
        p.requests.page_table[0, 0, 0] = 8
        keys[0] = keys[0][p.k.shape[2] :]
    out = rope.new_tensors(p)
    out.k.fill_(7)
    rope.rotate(p, p.rope, out)
    assert (out.k != 7).any(-1).any(-1).sum() == sum(map(len, keys))


def test_falling_offsets_leave_rows_to_an_owner():
    """Rows of requests 0 and 2, the last of which overlaps the first: each stands as one that owns it says."""
    p, keys = make("table")
    p = p._replace(requests=p.requests._replace(cu_seqlens_q=ints(0, 5, 3, 7)))
    found = rope.rotated(p).q
    for row in range(7):
        first, request = (0, 0) if row < 5 else (3, 2)
        count = (5, 0, 4)[request]
        assert_rotated(found[row], p.q[row], row - first + len(keys[request]) - count, p.rope)


def test_lengths_are_clamped():
    """A length past the table is what that holds, a last page has at most its rows, a request without pages none."""

    def counts(p):
        ragged = p.requests.form == "ragged"
        none, size = ints(), 1 if ragged else p.k.shape[2]
        starts = none if p.requests.kv_starts is None else p.requests.kv_starts
        entries = p.k.shape[2] if ragged else p.requests.page_table.shape[2]
        a = SimpleNamespace(kv_indptr=starts, kv_lens=p.requests.kv_lens, tables=p.requests.page_table, k_cache=p.k)
        return key_counts(a, size, entries).tolist()

    p, _ = make("table")
    assert counts(p._replace(requests=p.requests._replace(kv_lens=ints(HUGE, -1, 3)))) == [20, 0, 3]
    p, _ = make("csr")
    r = p.requests._replace(kv_lens=ints(HUGE, 3, -9), kv_starts=ints(0, 2, 2, 4))
    assert counts(p._replace(requests=r)) == [10, 0, 5]
    p, _ = make("ragged")
    r = p.requests._replace(kv_starts=ints(-4, 3, 2, HUGE))
    assert counts(p._replace(requests=r)) == [3, 0, p.k.shape[2] - 2]


@pytest.mark.parametrize("form", ["paged", "ragged"])
def test_a_prefill_is_two_launches(form):
    """And no torch kernel runs beside them, once the turns per position are known."""
    case, launches = Case(), []
    wrapper = getattr(case, form)(causal=True, pos_encoding_mode="ROPE_LLAMA")
    given = (case.k, case.v) if form == "ragged" else (tuple(case.cache),)
    with machine.override(FakeMachine(lambda op, spec: lambda *flat: launches.append(op))):
        assert not torch_kernels(lambda: wrapper.run(case.q, *given))
    assert launches == ["cache_write.rows", "attention.sm90"] * 2


def test_a_graph_uses_known_turns(here):
    p, _ = make("table")
    for here.capturing in (True, False, True):
        rope.rotated(p)
    first, known, last = (launch["rope_table"] for launch in here.launches)
    assert known is last and first is not known and torch.equal(first, known)


def test_head_dims_that_no_kernel_rotates(here):
    p, _ = make("table", dim=24)
    with pytest.raises(NotImplementedError, match="^pos_encoding_mode: 'ROPE_LLAMA': .*rotated elements 24"):
        rope.rotated(p)


@pytest.mark.parametrize("form, size", [("table", 5), ("csr", 1), ("ragged", 1)])
def test_one_launch(form, size):
    """It gets the tensors as they are, and gives what the reference gives."""
    p, keys = make(form, size=size)
    with emulation() as here:
        assert_problem_rotated(p, keys)
        assert_problem_rotated(p, keys)
    first, second = here.launches
    assert first["q"] is p.q and first["kv_lens"] is p.requests.kv_lens or form == "ragged"
    assert first["rope_table"] is second["rope_table"] and first["k_groups"] == 4
    assert here.specs == [CacheWriteSpec("bf16", "bf16", True, True)]


def test_nothing_to_rotate():
    p, _ = make("table")
    assert rope.rotated(p._replace(rope=None)).q is p.q
    none = rope.rotated(p._replace(k=p.k[:0]))
    assert none.k.shape[0] == 0 and none.rope is None
    r = p.requests
    assert rope.rotated(p._replace(requests=r._replace(page_table=r.page_table[:, :, :0]))).k.shape[0] == 0
    empty = r._replace(page_table=r.page_table[:0], kv_lens=ints(), cu_seqlens_q=ints(0), batch=0)
    assert rope.rotated(p._replace(q=p.q[:0], requests=empty)).rope is None
    assert rope.rotated(p._replace(q=p.q[:0])).q.shape == (0, 4, 16)


@pytest.mark.parametrize("field, dtype, says", [
    ("q", torch.float8_e4m3fn, "float8_e4m3fn query"), ("k", torch.float8_e4m3fn, "float8_e4m3fn key"),
    ("k", torch.uint8, "NVFP4 key"),
])  # fmt: skip
def test_values_of_8_bits_are_refused(field, dtype, says):
    p, _ = make("table")
    with pytest.raises(NotImplementedError, match=f"pos_encoding_mode: 'ROPE_LLAMA' with a {says}"):
        rope.rotated(p._replace(**{field: getattr(p, field).view(torch.uint8).view(dtype)}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_attention_is_that_of_the_reference(form, dtype):
    """Which rotates by itself. The two may round a value differently where it lies between two: rarely, by a step."""
    p, keys = make(form, size=16, dtype=dtype, by=Rope(4.0, 1000.0))
    places_used = [place for request in keys for place in request]
    v = torch.zeros_like(p.k) if form == "ragged" else torch.full_like(p.k, NAN)
    for place, row in zip(places_used, random(len(places_used), 2, 16, dtype=dtype, seed=2)):
        v[place[0], :, place[1]] = row
    p = p._replace(v=v, window_left=6, return_lse=True, max_q_len=4)
    for right, found in zip(reference.paged_attention(p), reference.paged_attention(rope.rotated(p))):
        torch.testing.assert_close(found, right, rtol=0, atol=UNIT[dtype])
    plain = reference.paged_attention(p._replace(rope=None))[0]
    assert (plain - reference.paged_attention(p)[0]).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_nothing_looks_at_values(form):
    """Tensors without values are enough: an operation that would wait for the device asks for a value, or for a shape
    that depends on one, and raises; a copy from the device or to it would show the host."""

    def bare(x):
        return x.to("meta") if torch.is_tensor(x) else x

    p, _ = make(form)
    right = rope.rotated(p)
    p = p._replace(requests=SequenceBatch(*map(bare, p.requests)), **{name: bare(getattr(p, name)) for name in "qkv"})
    with Seen() as seen:
        new = rope.rotated(p)
    for x, y in ((new.q, right.q), (new.k, right.k), (new.requests.page_table, right.requests.page_table)):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    assert {x.device.type for x in tree_leaves((seen.calls, new)) if torch.is_tensor(x)} == {"meta"}
    assert "new_empty" in seen.names()
    for looks in (lambda: new.q[0, 0, 0].item(), lambda: new.q.nonzero(), lambda: new.q[new.q > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):  # the proof sees what it forbids
            looks()
