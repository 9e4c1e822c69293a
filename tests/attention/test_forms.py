"""Requests in CSR and ragged form, custom masks, ALiBi and RoPE: the reference against loops over rows in float64, what
is refused, and what a launch gets."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_machine import FakeMachine
from wrappers import fp4, reference
from wrappers.attention import checks, op, optional, values
from wrappers.attention import plan as attention_plan
from wrappers.attention.bound import bound
from wrappers.attention.call import (
    SEPARATE,
    AttentionCall,
    Rope,
    SequenceBatch,
    csr_sequences,
    new_sequences,
    ragged_sequences,
)
from wrappers.host import machine
from wrappers.reference import dense

LOG2E = math.log2(math.e)
FORMS = ("table", "csr", "ragged")
BF16 = torch.bfloat16


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def starts_of(counts):
    return ints(*np.cumsum([0, *counts]).tolist())


# ---- requests, given one by one, and stored in each form


def dense_requests(lens, heads=(4, 2), dims=(16, 16), seed=0):
    """(q, k, v) of each request of `lens`, pairs of query and key rows, bf16."""
    gen = torch.Generator().manual_seed(seed)
    shapes = [((m, heads[0], dims[0]), (n, heads[1], dims[0]), (n, heads[1], dims[1])) for m, n in lens]
    return [tuple(torch.randn(*shape, generator=gen).to(BF16) for shape in three) for three in shapes]


def paged(rows, size, seed):
    """A pool (pages, H, size, D) that holds each request's rows, with page ids of each; NaN in all other rows."""
    counts = [-(-len(t) // size) for t in rows]
    ids = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).int()
    pool = torch.full((len(ids), rows[0].shape[1] if rows else 1, size, rows[0].shape[2] if rows else 16), math.nan)
    pool, found = pool.to(BF16), []
    for t, count in zip(rows, counts, strict=True):
        mine, ids = ids[:count], ids[count:]
        for i, row in enumerate(t):
            pool[int(mine[i // size]), :, i % size] = row
        found.append(mine)
    return pool, found


def problem(three, form="csr", size=3, **fields):
    """A problem of these requests. K and V have pools of their own, whose ids differ but in CSR form."""
    q, k, v = (list(t) for t in zip(*three, strict=True))
    offsets = starts_of(map(len, q))
    if form == "ragged":
        requests = ragged_sequences(offsets, starts_of(map(len, k)))
        pools = [torch.cat(t).transpose(0, 1)[None] for t in (k, v)]
    else:
        seeds = (1, 1 if form == "csr" else 2)
        (k_pool, k_ids), (v_pool, v_ids) = (paged(t, size, seed) for t, seed in zip((k, v), seeds, strict=True))
        pools = [k_pool, torch.cat([v_pool, torch.full_like(v_pool[:2], math.nan)])]
        if form == "csr":
            last = ints(*((len(t) - 1) % size + 1 if len(t) else 99 for t in k))
            requests = csr_sequences(offsets, starts_of(map(len, k_ids)), torch.cat(k_ids), last)
        else:
            table = torch.full((len(k), 2, max(map(len, k_ids)) + 1), -7, dtype=torch.int32)
            for b, both in enumerate(zip(k_ids, v_ids, strict=True)):
                for which, ids in enumerate(both):
                    table[b, which, : len(ids)] = ids
            requests = new_sequences(table, ints(*map(len, k)), offsets, SEPARATE)
    p = AttentionCall("", torch.cat(q), *pools, requests, max(map(len, q)), scale=0.5)
    return p._replace(**fields)


def packed(masks):
    """Bits of bool (m, n) masks, least significant first, each from a byte of its own, and where they begin."""
    parts, begins = [np.zeros(1, np.uint8)], [1]  # a byte that nobody has
    for mask in masks:
        parts.append(np.packbits(mask.numpy().reshape(-1), bitorder="little"))
        begins.append(begins[-1] + len(parts[-1]))
    return torch.from_numpy(np.concatenate(parts)), ints(*begins)


def turned(x, positions, rope):
    """x (rows, heads, D) times exp(i angle), in complex numbers of two float64."""
    half = x.shape[2] // 2
    z = x[..., :half].double().numpy() + 1j * x[..., half:].double().numpy()
    angle = np.asarray(positions)[:, None] * rope.theta ** (-np.arange(half) / half) / rope.scale
    z = z * np.exp(1j * angle)[:, None]
    return torch.from_numpy(np.concatenate([z.real, z.imag], -1)).to(x.dtype)


def brute(three, p, masks=None):
    """(o, lse), a softmax at a time in float64."""
    outs, lses = [], []
    for b, (q, k, v) in enumerate(three):
        m, n, group = len(q), len(k), q.shape[1] // k.shape[1]
        if p.rope is not None:
            q, k = turned(q, range(n - m, n), p.rope), turned(k, range(n), p.rope)
        o, lse = np.zeros((m, q.shape[1], v.shape[2])), np.full((m, q.shape[1]), -np.inf)
        for i in range(m):
            at = i + n - m
            for h in range(q.shape[1]):
                logits, kept = [], []
                for j in range(n):
                    seen = bool(masks[b][i, j]) if masks is not None else j <= at or not p.causal
                    if not seen or 0 <= p.window_left < at - j:
                        continue
                    s = float(q[i, h].double() @ k[j, h // group].double()) * p.scale
                    if p.alibi_slopes is not None:
                        s += float(p.alibi_slopes[h]) * (j - i)
                    if p.soft_cap:
                        s = p.soft_cap * math.tanh(s / p.soft_cap)
                    logits.append(s)
                    kept.append(j)
                sink = -math.inf if p.sinks is None else float(p.sinks[h])
                top = max([sink, *logits])
                if top == -math.inf:
                    continue
                weights = np.exp(np.array(logits) - top)
                total = weights.sum() + math.exp(sink - top)
                if kept:
                    o[i, h] = weights @ v[kept, h // group].double().numpy() / total * p.out_scale
                lse[i, h] = (top + math.log(total)) * LOG2E
        outs.append(torch.from_numpy(o).float())
        lses.append(torch.from_numpy(lse).float())
    return torch.cat(outs), torch.cat(lses)


def close(got, want, tolerance=3e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@settings(max_examples=120)
@given(
    form=st.sampled_from(FORMS), size=st.sampled_from([1, 2, 3, 5, 16]),
    lens=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (3, 1), (4, 2)]), dims=st.sampled_from([(8, 8), (6, 4)]), causal=st.booleans(),
    window=st.integers(-1, 6), cap=st.sampled_from([None, 0.7, 5.0]), sink=st.booleans(), mask=st.booleans(),
    slopes=st.booleans(), rope=st.sampled_from([None, None, Rope(), Rope(4.0, 50.0)]), seed=st.integers(0, 99),
    block=st.integers(1, 40),
)  # fmt: skip
def test_equals_brute_force(
    form, size, lens, heads, dims, causal, window, cap, sink, mask, slopes, rope, seed, block
):  # fmt: skip
    three = dense_requests(lens, heads, dims, seed)
    gen = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {"causal": causal, "window_left": window, "soft_cap": cap, "rope": rope, "out_scale": 2.0}
    masks = [torch.rand(m, n, generator=gen) < 0.6 for m, n in lens] if mask else None
    if masks is not None:
        fields["custom_mask"], fields["mask_starts"] = packed(masks)
    if sink:
        fields["sinks"] = torch.randn(heads[0], generator=gen)
    if slopes:
        fields["alibi_slopes"] = torch.rand(heads[0], generator=gen)
    p = problem(three, form, size, **fields)
    values.check(p)  # they all make sense
    checks.validate(p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "BLOCK", block)  # several query blocks even at these sizes
        got = reference.paged_attention(p)
    close(got, brute(three, p, masks), 3e-5 if rope is None else 1e-2)  # rounding to bf16 may go either way


@pytest.mark.parametrize("first,rope", [(0, Rope()), (-3, Rope()), (90_000, Rope(2.0, 1e6))])
def test_rotation(first, rope):
    x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0))
    close([dense.rotate(x, first, *rope)], [turned(x, range(first, first + 5), rope)], 1e-6)
    assert dense.rotate(x.half(), first, *rope).dtype == torch.float16


def test_alibi_counts_from_the_row_not_from_its_position():
    """O is the same without a cap, LSE is not."""
    three = dense_requests([(2, 7)])
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.0])
    o, lse = reference.paged_attention(problem(three, alibi_slopes=slopes))
    q, k, v = (t.float() for t in three[0])
    distance = torch.arange(7) - (torch.arange(2) + 5)[:, None]
    s = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(2, 1)) * 0.5 + slopes[:, None, None] * distance
    s = s.masked_fill(distance > 0, -math.inf)
    want = torch.einsum("hmn,nhd->mhd", s.softmax(-1), v.repeat_interleave(2, 1))
    close([o, lse], [want, (s.logsumexp(-1).T + slopes * 5) * LOG2E])


@pytest.mark.parametrize("form", ["csr", "ragged"])
def test_nvfp4(form):
    three = dense_requests([(2, 5), (1, 9)], dims=(32, 32))
    p = problem(three, form, 4)
    (k, ks), (v, vs) = (fp4.nvfp4_quantize(t.nan_to_num().float(), 1.0) for t in (p.k, p.v))
    want = reference.paged_attention(p._replace(k=fp4.nvfp4_dequantize(k, ks), v=fp4.nvfp4_dequantize(v, vs)))
    got = reference.paged_attention(p._replace(k=k, v=v, k_scales=ks, v_scales=vs))
    close(got, want, 1e-6)
    checks.validate(p._replace(k=k, v=v, k_scales=ks, v_scales=vs))


# ---- values

THREE = dense_requests([(3, 7), (2, 4)])
SPAN = 5  # entries of the CSR form in pages of 3


def listed(form="csr", **change):
    """A plain problem, with fields of it or of its requests changed."""
    p = problem(THREE, form)
    requests = {name: change.pop(name) for name in [*change] if name in SequenceBatch._fields}
    return p._replace(requests=p.requests._replace(**requests), **change)


MASK = {"custom_mask": torch.full((6,), 255, dtype=torch.uint8), "mask_starts": ints(0, 3, 6)}


def test_bytes_past_the_mask_hide():
    """Of the first request, 21 bits, 16 are there; of the second, none."""
    p = listed(custom_mask=torch.full((2,), 255, dtype=torch.uint8), mask_starts=ints(0, 3, 5))
    masks = [torch.arange(21).view(3, 7) < 16, torch.zeros(2, 4, dtype=torch.bool)]
    close(reference.paged_attention(p), brute(THREE, p, masks))
    o, lse = reference.paged_attention(p._replace(custom_mask=p.custom_mask[:0]))
    assert not o.any() and (lse == -math.inf).all()


def test_pages_outside_their_pool_are_zeros():
    table = torch.stack([ints(0, 1, 2, 3, 4), ints(0, 1, 2, 3, 4)])[None]
    k, v = torch.ones(5, 2, 3, 16, dtype=BF16), torch.ones(7, 2, 3, 16, dtype=BF16)
    p = listed(k=k, v=v, page_table=table)
    near, _ = reference.paged_attention(p)
    assert torch.equal(near, torch.ones_like(near))
    table[0, 1, 4] = 6  # a page that V's pool has, K's has not
    assert torch.equal(reference.paged_attention(p)[0], near)
    values.check(p)
    table[0, 1, 3:] = 7
    assert not reference.paged_attention(p)[0][3:].any()
    with pytest.raises(ValueError, match=r"^page_table: 7 in entry 3, of request 1 \(V\), must be in \[0, 7\)"):
        values.check(p)


BAD_VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "far": ("csr", {"kv_starts": ints(0, 3, 6)}, r"kv_starts\[2\]: 6 of request 1, must be in \[3, 5\]: from the "
            r"entry before it to the number of entries of page_table"),
    "falling": ("csr", {"kv_starts": ints(0, 3, 2)}, r"kv_starts\[2\]: 2 of request 1, must be in \[3, 5\]"),
    "negative": ("ragged", {"kv_starts": ints(-1, 3, 5)}, r"kv_starts\[0\]: -1 of request 0, must be in \[0, 11\]: "
                 r"from the entry before it to the number of rows of k"),
    "last": ("csr", {"kv_lens": ints(1, 4)}, r"kv_lens: 4 of request 1, must be in \[0, 3\]: rows of a page"),
    "queries": ("ragged", {"cu_seqlens_q": ints(0, 3, 6)}, r"cu_seqlens_q\[2\]: 6 of request 1, must be in \[3, 5\]"),
    "page": ("csr", {"page_table": ints(0, 1, 2, 3, -1).as_strided((1, 2, 5), (0, 0, 1))},
             r"page_table: -1 in entry 4, of request 1 \(K\), must be in \[0, 7\)"),
    "mask": ("csr", MASK | {"mask_starts": ints(0, 6, 9)}, r"mask_starts: 6 of request 1, must be in \[0, 5\]: its "
             r"bits take 1 of the 6 bytes of custom_mask"),
    "short mask": ("ragged", MASK | {"custom_mask": torch.zeros(2, dtype=torch.uint8)},
                   r"mask_starts: 0 of request 0, must be in \[0, -1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_are_refused_on_the_cpu_and_where_they_are_checked(name, monkeypatch):
    form, change, message = BAD_VALUES[name]
    p = listed(form, **change)
    with pytest.raises(ValueError, match=f"^{message}"):
        op.serve(p)
    with machine.override(FakeMachine(lambda op, spec: lambda *flat: None)):
        monkeypatch.setattr(attention_plan, "checking", lambda: True)
        with pytest.raises(ValueError, match=f"^{message}"):
            op.serve(p)


def test_values_that_nobody_reads():
    """The last page of a request without pages, and ids of entries before the window and past the requests."""
    far = ints(1 << 30, 0, 1, 2, 99).as_strided((1, 2, 5), (0, 0, 1))
    starts, rows = ints(0, 0, 4), ints(0, 3, 5)
    values.check(listed(kv_starts=starts, kv_lens=ints(77, 3), page_table=far, cu_seqlens_q=rows, window_left=2))
    with pytest.raises(ValueError, match=f"^page_table: {1 << 30} in entry 0, of request 1"):
        values.check(listed(kv_starts=starts, kv_lens=ints(77, 3), page_table=far, cu_seqlens_q=rows, window_left=8))


# ---- forms and types


BAD: dict[str, tuple[Any, type, str]] = {
    "starts' type": (lambda: listed(kv_starts=ints(0, 3, 5).long()), TypeError, "kv_starts: dtype torch.int64, must"),
    "starts' rank": (lambda: listed(kv_starts=ints(0, 3, 5)[None]), ValueError, r"kv_starts: shape \(1, 3\)"),
    "no starts": (lambda: listed("ragged", kv_starts=ints()), ValueError, r"kv_starts: shape \(0,\)"),
    "starts' stride": (lambda: listed(kv_starts=ints(0, 0, 3, 3, 5)[::2]), ValueError, r"kv_starts: strides \(2,\)"),
    "device": (lambda: listed(kv_starts=ints(0, 3, 5).to("meta")), ValueError, "kv_starts: device meta, must be the"),
    "last": (lambda: listed(kv_lens=ints(1)), ValueError, r"kv_lens: shape \(1,\), must be \(2,\)"),
    "last's type": (lambda: listed(kv_lens=ints(1, 1).long()), TypeError, "kv_lens: dtype torch.int64"),
    "offsets": (lambda: listed("ragged", cu_seqlens_q=ints(0, 5)), ValueError, r"cu_seqlens_q: shape \(2,\), must be"),
    "table": (lambda: listed(page_table=ints(1, 2).view(2, 1, 1)), ValueError, r"page_table: shape \(2, 1, 1\)"),
    "rows": (lambda: listed("ragged", v=listed("ragged").v[:, :, :5]), ValueError, "kv: K .* the last dimension only"),
    "pools": (lambda: listed(v=listed().v[:0]), ValueError, "kv: K .* may differ in pages, of which both or neither"),
    "page": (lambda: listed(v=listed().v[:, :, :2]), ValueError, "kv: K .* may differ in pages"),
    "mask's type": (lambda: listed(**MASK | {"custom_mask": torch.ones(6, dtype=torch.bool)}), TypeError,
                    "custom_mask: dtype torch.bool, must be torch.uint8"),
    "mask's rank": (lambda: listed(**MASK | {"custom_mask": MASK["custom_mask"][None]}), ValueError,
                    r"custom_mask: shape \(1, 6\), must have 1 dimensions"),
    "no mask starts": (lambda: listed(custom_mask=MASK["custom_mask"]), TypeError, "mask_starts: NoneType, must be"),
    "mask starts": (lambda: listed(**MASK | {"mask_starts": ints(0, 3)}), ValueError, r"mask_starts: shape \(2,\)"),
    "no mask": (lambda: listed(mask_starts=MASK["mask_starts"]), ValueError, "mask_starts: given, must be None"),
    "drafts": (lambda: listed(drafts=torch.zeros(5, 1, dtype=torch.int32), **MASK), ValueError, "drafts: given"),
    "slopes": (lambda: listed(alibi_slopes=torch.ones(2)), ValueError, r"alibi_slopes: shape \(2,\), must be \(4,\)"),
    "slopes' type": (lambda: listed(alibi_slopes=torch.ones(4).half()), TypeError, "alibi_slopes: dtype torch.float16"),
    "rope": (lambda: listed(rope=(1.0, 1e4)), TypeError, r"rope: \(1.0, 10000.0\), must be a Rope or None"),
    "scale": (lambda: listed(rope=Rope(0.0)), ValueError, "rope_scale: 0.0, must be positive"),
    "theta": (lambda: listed(rope=Rope(1.0, math.nan)), ValueError, "rope_theta: nan, must be positive"),
    "type of theta": (lambda: listed(rope=Rope(1.0, True)), TypeError, "rope_theta: True, must be a float"),
    "e4m3 K": (lambda: listed(rope=Rope(), k=listed().k.to(checks.E4M3), v=listed().v.to(checks.E4M3)), TypeError,
               "rope: query torch.bfloat16, K torch.float8_e4m3fn, must both be"),
    "odd": (lambda: problem(dense_requests([(1, 2)], dims=(7, 8)), rope=Rope()), ValueError, "rope: head_dim 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    make, error, message = BAD[name]
    with pytest.raises(error, match=f"^{message}"):
        op.serve(make())


def test_interleaved_scales_need_pages_of_whole_fours():
    three = dense_requests([(1, 8)], dims=(64, 64))
    for form, size, message in (
        ("csr", 6, "True, must be False with pages of 6 rows"),
        ("ragged", 4, "True, must be False without pages"),
    ):
        p = problem(three, form, size)
        (k, ks), (v, vs) = (fp4.nvfp4_quantize(t.nan_to_num().float(), 1.0) for t in (p.k, p.v))
        bad = p._replace(k=k, v=v, k_scales=ks, v_scales=vs, interleaved=True)
        with pytest.raises(ValueError, match=f"^interleaved: {message}"):
            checks.validate(bad)


def test_indices_of_another_rank():
    with pytest.raises(ValueError, match=r"^paged_kv_indices: shape \(1, 2\), must have 1 dimension"):
        csr_sequences(ints(0, 1), ints(0, 2), ints(1, 2)[None], ints(1))


NO_TENSORS = {
    "indices": lambda: csr_sequences(ints(0, 3, 5), ints(0, 3, 5), [1, 2], ints(1, 1)),
    "starts": lambda: csr_sequences(ints(0, 3, 5), None, ints(1, 2), ints(1, 1)),
    "last": lambda: csr_sequences(ints(0, 3, 5), ints(0, 3, 5), ints(1, 2), 3),
    "offsets": lambda: ragged_sequences("5", ints(0, 3, 5)),
    "rows": lambda: ragged_sequences(ints(0, 3, 5), 7),
}
NAMES = {
    "indices": "page_table", "starts": "kv_starts", "last": "kv_lens", "offsets": "cu_seqlens_q", "rows": "kv_starts",
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_named(name):
    form = "ragged" if name in ("offsets", "rows") else "csr"
    with pytest.raises(TypeError, match=f"^{NAMES[name]}: .*, must be a torch.Tensor"):
        op.serve(problem(THREE, form)._replace(requests=NO_TENSORS[name]()))


def test_slopes_that_require_grad_are_refused():
    p = listed(alibi_slopes=torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="^alibi_slopes: requires grad"):
        op.serve(p)
    with torch.no_grad():
        assert op.serve(p).shape == (5, 4, 16)


@pytest.mark.parametrize("field", ["custom_mask", "mask_starts", "alibi_slopes", "kv_starts"])
def test_outputs_are_apart_from_every_tensor(field):
    lse = torch.zeros(5, 4)
    inside = {
        "custom_mask": lse.view(torch.uint8).flatten()[8:14], "mask_starts": lse.view(torch.int32).flatten()[:3],
        "alibi_slopes": lse[2], "kv_starts": lse.view(torch.int32).flatten()[4:7],
    }[field]  # fmt: skip
    p = listed(**(MASK if "mask" in field else {}) | {field: inside}, lse=lse)
    with pytest.raises(ValueError, match=f"^lse: shape .* overlaps the memory of {field}"):
        op.serve(p)


# ---- what a trace records

EVERYTHING: dict[str, Any] = MASK | {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "rope": Rope(2.0, 100.0)}


@pytest.mark.parametrize("form", FORMS)
def test_the_operator_has_every_field(form):
    fields = EVERYTHING | {"soft_cap": 3.0, "window_left": 5, "sinks": torch.ones(4), "return_lse": True}
    p = problem(THREE, form, **fields)
    want = op.serve(p)
    got = op.serve(p._replace(requests=p.requests._replace(shape_id=None)))
    assert all(map(torch.equal, got, want)) and want[0].any()
    out, lse = (torch.zeros_like(t) for t in want)
    given = p._asdict() | p.requests._asdict() | {"out": out, "lse": lse}
    given |= {"out_block_scales": None, "out_block_start": 0}
    flat = tuple(given[name] for name in op.FIELDS)
    torch.library.opcheck(torch.ops.cute_kernels.attention.default, flat, test_utils=("test_schema", "test_faketensor"))


def test_requests_of_a_trace_have_no_facts():
    made = csr_sequences(ints(0, 1), ints(0, 1), ints(0), ints(1), plain=False)
    assert made.shape_id is None and made.batch == 1
    assert ragged_sequences(ints(0, 1), ints(0, 1), False).shape_id is None


# ---- plans and launches


CALLS: dict[str, dict[str, Any]] = {
    "plain": {}, "mask": MASK, "slopes": {"alibi_slopes": EVERYTHING["alibi_slopes"]}, "full": {"causal": False},
    "all": MASK | {"alibi_slopes": EVERYTHING["alibi_slopes"], "window_left": 4, "soft_cap": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_launch_gets_every_field(form, launches):
    for name in (*CALLS, *CALLS):  # new calls, then known ones
        p = problem(THREE, form, **CALLS[name])
        got = op.serve(p)
        want, _ = reference.paged_attention(p)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    assert len(launches) == 2 * len(CALLS) and len(machine.current.plans) == len(CALLS)


def test_a_mask_that_begins_inside_a_word_is_copied_at_each_launch(launches):
    p = problem(THREE, "csr", **CALLS["mask"])
    room = torch.zeros(len(p.custom_mask) + 1, dtype=torch.uint8)
    inside = p._replace(custom_mask=room[1:])
    for mask in (p.custom_mask, 255 - p.custom_mask):
        room[1:] = mask
        want = reference.paged_attention(p._replace(custom_mask=mask))[0]
        torch.testing.assert_close(op.serve(inside).float(), want, rtol=1e-2, atol=1e-2)
        assert launches[-1].custom_mask.data_ptr() % 4 == 0
    assert bound(p) is not None and bound(inside) is None


@pytest.mark.parametrize("form", ["csr", "ragged"])
def test_a_plan_does_not_depend_on_how_many_keys_there_are(form, launches):
    """Nor on the bytes of a mask. Only the power of two above the mean number of keys is part of a plan."""
    pool = torch.randn(40, 2, 3, 16).to(BF16)
    for lens in ([(3, 70), (2, 40)], [(3, 100), (2, 1)], [(1, 0), (4, 91)]):
        three = dense_requests(lens)
        fields = dict(zip(("custom_mask", "mask_starts"), packed([torch.ones(m, n) > 0 for m, n in lens])))
        p = problem(three, form, **fields)
        if form == "csr":
            p = p._replace(k=pool, v=pool[:39])
        torch.testing.assert_close(op.serve(p).float(), reference.paged_attention(p)[0], rtol=1e-2, atol=1e-2)
    assert len(launches) == 3 and len(machine.current.plans) == 1


def test_facts():
    def of(form, **change):
        return attention_plan.request_of(listed(form, **change))

    assert (of("csr").source, of("csr").page_size, of("table").source) == ("paged", 3, "paged")
    assert (of("ragged").source, of("ragged").page_size) == ("ragged", 0)
    assert of("csr").causal and not of("csr").custom_mask and not of("csr").alibi
    assert of("csr", **MASK).custom_mask and not of("csr", **MASK).causal
    assert of("ragged", alibi_slopes=torch.ones(4)).alibi and of("csr", rope=Rope()) == of("csr")


def test_bounds_that_vary_under_a_plan(launches, monkeypatch):
    many = torch.zeros(1, 2, 1, 16, dtype=BF16).expand(2, 2, 1 << 28, 16)
    requests = csr_sequences(ints(0, 5), ints(0, 0), ints(0, 0, 0), ints(0))
    p = listed()._replace(k=many, v=many, requests=requests)
    op.serve(p)
    longer = csr_sequences(ints(0, 5), ints(0, 0), ints(0, 0, 0, 0), ints(0))
    with pytest.raises(NotImplementedError, match="^page_table: 4 pages of 268435456 tokens, must be less than"):
        op.serve(p._replace(requests=longer))
    p = listed("ragged")
    op.serve(p)
    rows = p.k[:, :, :1].expand(1, 2, 1 << 30, 16)
    with pytest.raises(NotImplementedError, match="^k: 1073741824 rows, must be less than"):
        op.serve(p._replace(k=rows, v=rows))
    with pytest.raises(ValueError, match="^kv: K .* may differ in the last dimension only"):
        op.serve(p._replace(v=p.v[:, :, :5]))
    p = listed(**MASK)
    op.serve(p)
    monkeypatch.setattr(optional, "MOST_MASK", 6)
    with pytest.raises(NotImplementedError, match="^custom_mask: 6 bytes, must be less than 6 on CUDA"):
        op.serve(p)
    assert len(launches) == 3


def test_rope_is_done_before_a_launch(launches, monkeypatch):
    asked = []

    def rotated(p, offsets):
        asked.append(p)
        table = p.requests.page_table + 0
        return p._replace(rope=None, q=-p.q, k=p.k + 0, requests=p.requests._replace(page_table=table))

    monkeypatch.setattr(attention_plan, "rotated", rotated)
    for form in FORMS:
        p = problem(THREE, form, rope=Rope(), **MASK)
        for _ in range(2):
            op.serve(p)
            a = launches[-1]
            assert asked[-1] is p and torch.equal(a.q, -p.q) and a.v is p.v and a.custom_mask is p.custom_mask
            assert a.k is not p.k and a.page_table is not p.requests.page_table
        with pytest.raises(ValueError, match="^rope_theta: -1.0"):
            op.serve(p._replace(rope=Rope(1.0, -1.0)))
    assert len(asked) == 6
    op.serve(listed(k=listed().k[:0], v=listed().v[:0], rope=Rope()))  # no keys: nothing to rotate
    assert len(asked) == 6 and len(launches) == 7


EMPTY = {
    "csr, no pages": lambda: csr_sequences(ints(0, 3, 5), ints(0, 0, 0), ints(), ints(0, 0)),
    "csr, no requests": lambda: csr_sequences(ints(0), ints(0), ints(), ints()),
    "ragged, no requests": lambda: ragged_sequences(ints(0), ints(0)),
    "ragged, no keys": lambda: ragged_sequences(ints(0, 3, 5), ints(4, 4, 4)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_attend_to(name, launched):
    requests = EMPTY[name]()
    p = problem(THREE, name.split(",")[0])._replace(requests=requests)
    out = op.serve(p._replace(out=torch.zeros(5, 4, 16, dtype=BF16)))
    assert out.shape == (5, 4, 16) and not out.any()
    assert launched is None or len(launched) == (requests.batch > 0)
    none = p._replace(q=p.q[:0], requests=requests._replace(cu_seqlens_q=requests.cu_seqlens_q * 0))
    assert op.serve(none).shape == (0, 4, 16)
