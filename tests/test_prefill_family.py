"""FlashInfer's prefill family on the reference: the classes' plans and runs, the function of one request."""

import copy
import itertools
import pickle
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_machine import FakeMachine
from wrappers import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    machine,
    nvfp4_dequantize,
    nvfp4_quantize,
    packbits,
    segment_packbits,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from wrappers.prefill import paged, ragged, single, values

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
Q_LENS, KV_LENS = (3, 0, 7, 1, 2, 4), (5, 4, 7, 9, 0, 2)  # without rows, without keys, more rows than keys
HQ, HKV, D = 6, 2, 64  # heads that are no power of two
WORKSPACE = torch.empty(0)


def ints(numbers):
    return torch.tensor(list(numbers), dtype=torch.int32)


def starts_of(lens):
    return ints(itertools.accumulate(lens, initial=0))


# ---- an oracle of its own: one row and one head at a time, fp64


def rotated(x, first, scale, theta):
    """x (rows, heads, D) at positions from first on; a complex number for each pair (d, d + D / 2)."""
    half = x.shape[2] // 2
    at = torch.arange(first, first + len(x), dtype=torch.float64)
    angle = at[:, None] / scale * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    pairs *= torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def slope(h, heads):
    whole = 2 ** (heads.bit_length() - 1)
    return 2 ** (-8 * (h + 1) / whole) if h < whole else 2 ** (-4 * (2 * (h - whole) + 1) / whole)


def oracle(q, k, v, *, causal=False, scale=None, window=-1, cap=0.0, mask=None, sinks=None, mode="NONE",
           rope=(1.0, 1e4)):  # fmt: skip
    """o and lse, fp64."""
    (m, heads, dim), n = q.shape, len(k)
    o, lse = torch.zeros(m, heads, v.shape[2], dtype=torch.float64), torch.full((m, heads), -INF, dtype=torch.float64)
    if mode == "ROPE_LLAMA":
        q, k = rotated(q, n - m, *rope), rotated(k, 0, *rope)
    for i, h in itertools.product(range(m), range(heads)):
        position = i + n - m
        kept = [j for j in range(n) if (mask[i, j] if mask is not None else not causal or j <= position)]
        kept = [j for j in kept if window < 0 or j >= position - window]
        group = h // (heads // k.shape[1])
        s = k[kept, group].double() @ q[i, h].double() * (dim**-0.5 if scale is None else scale)
        if mode == "ALIBI":
            s = s + slope(h, heads) * (torch.tensor(kept, dtype=torch.float64) - i)
        if cap > 0:
            s = cap * torch.tanh(s / cap)
        every = s if sinks is None else torch.cat([s, sinks[h, None].double()])
        lse[i, h] = torch.logsumexp(every, 0) / torch.log(torch.tensor(2.0, dtype=torch.float64))
        o[i, h] = torch.exp(s - torch.logsumexp(every, 0)) @ v[kept, group].double()
    return o, lse


class Case:
    """A batch of requests in all forms. Slots of the pool that no request uses hold NaN."""

    def __init__(self, page=4, layout="NHD", dtype=HALF, q_lens=Q_LENS, kv_lens=KV_LENS, dim_vo=D, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.q_lens, self.kv_lens, self.page, self.layout = q_lens, kv_lens, page, layout
        self.q = torch.randn(sum(q_lens), HQ, D, generator=draw).to(dtype)
        self.k = torch.randn(sum(kv_lens), HKV, D, generator=draw).to(dtype)
        self.v = torch.randn(sum(kv_lens), HKV, dim_vo, generator=draw).to(dtype)
        counts = [-(-n // page) for n in kv_lens]
        pages = torch.randperm(sum(counts) + 2, generator=draw)[: sum(counts)]
        self.qo_indptr, self.kv_indptr, self.page_indptr = map(starts_of, (q_lens, kv_lens, counts))
        self.indices = pages.int()
        self.last = ints(n - (c - 1) * page if c else 3 for n, c in zip(kv_lens, counts))
        self.cache = []
        for rows in (self.k, self.v):
            pool = torch.full((len(pages) + 2, page, HKV, rows.shape[2]), NAN, dtype=dtype)
            for r, n in enumerate(kv_lens):
                for t in range(n):
                    at = pages[int(self.page_indptr[r]) + t // page]
                    pool[at, t % page] = rows[int(self.kv_indptr[r]) + t]
            self.cache.append(pool if layout == "NHD" else pool.transpose(1, 2).contiguous())
        self.masks = [torch.rand(m, n, generator=draw) < 0.6 for m, n in zip(q_lens, kv_lens)]
        self.custom_mask = torch.cat([torch.ones(0, dtype=torch.bool), *(m.flatten() for m in self.masks)])
        bits = starts_of(m.numel() for m in self.masks)
        self.packed, self.mask_starts = segment_packbits(self.custom_mask, bits, "little")
        self.index = (self.qo_indptr, self.page_indptr, self.indices, self.last)
        self.options = dict(q_data_type=dtype, head_dim_vo=dim_vo)

    def requests(self):
        """q, k, v, mask of each."""
        q, k, v = self.q.split(self.q_lens), self.k.split(self.kv_lens), self.v.split(self.kv_lens)
        return zip(q, k, v, self.masks)

    def want(self, masked=False, **options):
        found = [oracle(q, k, v, mask=mask if masked else None, **options) for q, k, v, mask in self.requests()]
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])

    def paged(self, kind=BatchPrefillWithPagedKVCacheWrapper, **options):
        wrapper = kind(WORKSPACE, self.layout)
        wrapper.plan(*self.index, HQ, HKV, D, self.page, **self.options | options)
        return wrapper

    def ragged(self, **options):
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, self.layout)
        wrapper.plan(self.qo_indptr, self.kv_indptr, HQ, HKV, D, **self.options | options)
        return wrapper

    def rows(self):
        return (self.k, self.v) if self.layout == "NHD" else (self.k.transpose(0, 1), self.v.transpose(0, 1))


def check(got, want, tolerance=2e-3):
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-3)


# ---- results

MODIFIERS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_left=2),
    "causal-window-0": dict(causal=True, window_left=0),
    "cap-scale": dict(causal=True, logits_soft_cap=2.0, sm_scale=0.3),
    "cap-off": dict(logits_soft_cap=-1.0),
    "mask": dict(masked=True),
    "mask-window": dict(masked=True, causal=True, window_left=3),
    "alibi": dict(pos_encoding_mode="ALIBI"),
    "alibi-cap-causal": dict(pos_encoding_mode="ALIBI", logits_soft_cap=1.5, causal=True),
    "rope": dict(pos_encoding_mode="ROPE_LLAMA"),
    "rope-mask-cap": dict(
        pos_encoding_mode="ROPE_LLAMA", rope_scale=4.0, rope_theta=500.0, logits_soft_cap=5.0, masked=True
    ),
}  # fmt: skip


def oracle_options(options):
    names = {"window_left": "window", "logits_soft_cap": "cap", "sm_scale": "scale", "pos_encoding_mode": "mode"}
    rope = options.get("rope_scale", 1.0), options.get("rope_theta", 1e4)
    return {names.get(k, k): v for k, v in options.items() if not k.startswith("rope")} | {"rope": rope}


@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers_of_batches_and_of_single_requests(name):
    """Against the oracle; paged, ragged and single agree to the bit, masks in both forms too."""
    case, options = Case(), dict(MODIFIERS[name])
    want = case.want(**oracle_options(options))
    masked = options.pop("masked", False)
    mask = {"custom_mask": case.custom_mask} if masked else {}
    paged = case.paged(**options, **mask).run_return_lse(case.q, tuple(case.cache))
    check(paged, want)
    ragged = case.ragged(**options, **mask).run_return_lse(case.q, case.k, case.v)
    assert all(map(torch.equal, paged, ragged))
    if masked:
        packed = {"packed_custom_mask": case.packed, "custom_mask": ~case.custom_mask}
        for o in (case.paged(**options, **packed).run(case.q, tuple(case.cache)),
                  case.ragged(**options, **packed).run(case.q, case.k, case.v)):  # fmt: skip
            assert torch.equal(o, paged[0])
    for r, (q, k, v, m) in enumerate(case.requests()):
        if options.get("causal") and not masked and len(q) > len(k):
            continue
        own = {"custom_mask": m} if masked else {}
        single = single_prefill_with_kv_cache_return_lse(q, k, v, **own, **options)
        rows = slice(int(case.qo_indptr[r]), int(case.qo_indptr[r + 1]))
        assert torch.equal(single[0], paged[0][rows]) and torch.equal(single[1], paged[1][rows])


@pytest.mark.parametrize("page", [1, 2, 3, 5, 7, 8, 16, 24, 64, 127, 300])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_sizes_layouts_and_forms_of_caches(page, layout):
    """A tuple, one tensor, views with strides and pages of their own: the same bits as ragged."""
    case = Case(page, layout)
    paged, ragged = case.paged(causal=True), case.ragged(causal=True)
    want = ragged.run_return_lse(case.q, *case.rows())
    k, v = case.cache
    wide = torch.full((len(v) + 3, 3, *v.shape[1:-1], 2 * D), NAN, dtype=v.dtype)
    wide[: len(v), 1, ..., D:] = v
    forms = [(k, v), torch.stack([k, v], 1), (k, wide[:, 1, ..., D:])]
    if page == 1:
        at = 1 if layout == "NHD" else 2
        forms += [(k.squeeze(at), v.squeeze(at)), torch.stack([k, v], 1).squeeze(at + 1)]
    for cache in forms:
        assert all(map(torch.equal, paged.run(case.q, cache, return_lse=True), want))
    packed = torch.cat([case.q, case.q], 1)[:, HQ:]  # a view of packed heads
    assert torch.equal(paged.run(packed, (k, v)), want[0])


def test_head_dims_of_k_and_v_differ():
    case = Case(dim_vo=128)
    want = case.want(causal=True)
    check(case.paged(causal=True).run_return_lse(case.q, tuple(case.cache)), want)
    check(case.ragged(causal=True).run_return_lse(case.q, case.k, case.v), want)


def test_bf16_and_names_of_dtypes():
    case = Case(dtype=BF16)
    wrapper = case.paged(q_data_type="bfloat16", kv_data_type="bfloat16", o_data_type="float16")
    o = wrapper.run(case.q, tuple(case.cache))
    assert o.dtype == HALF
    check((o, case.ragged().run_return_lse(case.q, case.k, case.v)[1]), case.want(), 1e-2)


def test_e4m3_caches_with_scales():
    case = Case()
    k, v = (t.nan_to_num(0.0).to(E4M3) for t in case.cache)
    case.k, case.v = case.k.to(E4M3).to(HALF), case.v.to(E4M3).to(HALF)
    o, lse = case.want(scale=2 * D**-0.5)
    wrapper = case.paged(kv_data_type=E4M3)
    check(wrapper.run(case.q, (k, v), 2.0, 0.5, True), (o / 2, lse))


def test_nvfp4_caches():
    """As the context function computes with them."""
    case = Case(page=8)
    k, v = (nvfp4_quantize(t.nan_to_num(0.0), 1.0) for t in case.cache)
    wrapper = case.paged(kv_data_type=torch.uint8, causal=True)
    got = wrapper.run(case.q, (k[0], v[0]), kv_cache_sf=(k[1], v[1]))
    want = case.paged(causal=True).run(case.q, tuple(nvfp4_dequantize(*t).half() for t in (k, v)))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="kv_cache_sf: None, required"):
        wrapper.run(case.q, (k[0], v[0]))


@pytest.mark.parametrize("number", [float, int, torch.tensor, lambda x: torch.tensor([x])])
def test_scales_by_position_and_name_as_numbers_and_tensors(number):
    case = Case()
    o, lse = case.want(scale=6 * D**-0.5)
    paged, ragged, cache = case.paged(), case.ragged(), tuple(case.cache)
    three, four = (number(x) if number in (float, int) else number(float(x)) for x in (3, 4))
    want = o * 4, lse
    check(paged.run(case.q, cache, 6.0, four, return_lse=True), want, 4e-3)
    check(paged.run(case.q, cache, q_scale=2, k_scale=three, v_scale=four, return_lse=True), want, 4e-3)
    check(paged.run(case.q, cache, q_scale=three, k_scale=torch.tensor(2.0), v_scale=four, return_lse=True), want, 4e-3)
    check(ragged.run(case.q, case.k, case.v, True, q_scale=2.0, k_scale=three, v_scale=four), want, 4e-3)
    q, k, v, _ = next(iter(case.requests()))
    a = single_prefill_with_kv_cache(q, k, v, q_scale=2.0, k_scale=three, v_scale=four)
    assert torch.equal(a, single_prefill_with_kv_cache(q, k, v, scale_q=2.0, scale_k=three, scale_v=four))
    assert torch.equal(a, paged.run(case.q, cache, q_scale=2.0, k_scale=three, v_scale=four)[: len(q)])


def test_sinks_by_class_and_by_name():
    case, sinks = Case(), torch.linspace(-1, 4, HQ)
    want = case.want(causal=True, sinks=sinks, scale=0.2)
    wrapper, cache = case.paged(BatchAttentionWithAttentionSinkWrapper, causal=True, sm_scale=7.0), tuple(case.cache)
    check(wrapper.run(case.q, cache, sinks, 0.2, return_lse=True), want)
    check(wrapper.run(case.q, cache, sinks, 0.1, k_scale=2.0, return_lse=True), want)
    assert wrapper._sm_scale == 7.0  # a run changes no plan
    again = case.paged(causal=True, sm_scale=0.2)
    check(again.run(case.q, cache, sinks=sinks, return_lse=True), want)
    assert torch.equal(wrapper.run(case.q, cache), case.paged(causal=True, sm_scale=7.0).run(case.q, cache))


def test_sink_constructor_takes_what_engines_pass():
    hints = dict(backend="fa2", q_data_type=BF16, kv_data_type=BF16, o_data_type=BF16, head_dim_qk=64, head_dim_vo=64)
    BatchAttentionWithAttentionSinkWrapper(WORKSPACE, "NHD", **hints, window_left=5, custom_mask_buf=None)


# ---- the documentation's examples, at smaller sizes


def test_documented_example_of_paged():
    num_layers, num_qo_heads, num_kv_heads, head_dim, max_num_pages, page_size = 2, 8, 2, 64, 128, 16
    workspace_buffer = torch.empty(1024, dtype=torch.uint8)
    prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32)
    paged_kv_indices = torch.arange(max_num_pages).int()
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half()
    kv_cache_at_layer = torch.randn(
        num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16
    )
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, num_qo_heads, head_dim])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)


def test_documented_example_of_ragged():
    num_layers, num_qo_heads, num_kv_heads, head_dim = 2, 8, 2, 64
    workspace_buffer = torch.empty(1024, dtype=torch.uint8)
    prefill_wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half()
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half()
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half()
    prefill_wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, num_qo_heads, head_dim])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask)
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)
    assert outputs_custom_mask[0].shape == torch.Size([100, num_qo_heads, head_dim])


# ---- plan and run


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_run_needs_a_plan(kind):
    case = Case()
    of = {"paged": BatchPrefillWithPagedKVCacheWrapper, "ragged": BatchPrefillWithRaggedKVCacheWrapper}[kind]
    args = (tuple(case.cache),) if kind == "paged" else (case.k, case.v)
    for call in ("run", "run_return_lse", "forward", "forward_return_lse"):
        with pytest.raises(RuntimeError, match="call plan before run"):
            getattr(of(WORKSPACE), call)(case.q, *args)


def test_a_second_plan_leaves_nothing_of_the_first():
    """Whatever was planned before, masks, modifiers, dtypes, batches: run as of a new wrapper."""
    first, second = Case(), Case(page=3, dtype=BF16, q_lens=(2, 1), kv_lens=(4, 8), seed=1)
    extreme = dict(causal=True, window_left=1, logits_soft_cap=1.0, sm_scale=3.0, pos_encoding_mode="ALIBI")
    paged, ragged = first.paged(**extreme, custom_mask=first.custom_mask), first.ragged(custom_mask=first.custom_mask)
    paged.plan(*second.index, HQ, HKV, D, 3, **second.options)
    ragged.plan(second.qo_indptr, second.kv_indptr, HQ, HKV, D, **second.options)
    want = second.want()
    check(paged.run_return_lse(second.q, tuple(second.cache)), want, 1e-2)
    check(ragged.run_return_lse(second.q, second.k, second.v), want, 1e-2)
    fresh = second.paged()
    assert vars(paged).keys() == vars(fresh).keys()
    assert (paged._alibi, paged._rope, paged._planned.mask) == (None, None, None)


def test_a_plan_that_raises_leaves_the_one_before():
    case = Case()
    wrapper, cache = case.paged(causal=True), tuple(case.cache)
    before = vars(wrapper).copy()
    for bad in (dict(custom_mask=case.custom_mask[1:]), dict(pos_encoding_mode="NO"), dict(q_data_type="float12")):
        with pytest.raises(ValueError):
            wrapper.plan(*case.index, HQ, HKV, D, 9, **bad)
    assert vars(wrapper) == before
    check(wrapper.run_return_lse(case.q, cache), case.want(causal=True))


@pytest.mark.parametrize("form", ["paged", "ragged"])
def test_a_plan_may_be_copied_and_sent(form):
    """Its number of facts is its process's: what comes from another one gets its own."""
    case = Case()
    wrapper = getattr(case, form)(causal=True)
    run = (case.q, tuple(case.cache)) if form == "paged" else (case.q, *case.rows())
    want, facts = wrapper.run(*run), wrapper._planned.requests.facts
    wrapper._planned = wrapper._planned._replace(requests=wrapper._planned.requests._replace(facts=10**9))
    for other in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
        assert other._planned.requests.facts == facts
        assert torch.equal(other.run(*run), want)
    assert copy.deepcopy(type(wrapper)(WORKSPACE))._planned is None


def test_a_plan_cannot_be_captured():
    case = Case()
    wrapper = case.paged()
    wrapper.device = torch.device("cuda")
    with machine.override(FakeMachine(lambda op, spec: None)) as fake:
        fake.capturing = True
        with pytest.raises(RuntimeError, match="plan cannot be captured"):
            wrapper.plan(*case.index, HQ, HKV, D, 4)


def test_outputs_apart_from_masks():
    """Bits and their starts have one name: each is looked at."""
    case = Case()
    memory = torch.zeros(case.q.numel() * 2 + 64, dtype=torch.uint8)
    out = memory[: case.q.numel() * 2].view(HALF).view(case.q.shape)
    packed = memory[case.q.numel() * 2 - 4 :][: len(case.packed)].copy_(case.packed)
    with pytest.raises(ValueError, match="out: .* overlaps the memory of custom_mask, must be apart"):
        case.paged(packed_custom_mask=packed).run(case.q, tuple(case.cache), out=out)


def test_fake_keys_are_refused():
    """Also where other fields have the name: starts are made of k's rows."""
    q = torch.zeros(2, HQ, D).half()
    with FakeTensorMode():
        k = torch.zeros(4, HKV, D).half()
    with pytest.raises(TypeError, match="^k: a FakeTensor"):
        single_prefill_with_kv_cache(q, k, k)


def test_names_that_engines_read_back():
    case = Case()
    wrapper = case.paged(causal=True, sm_scale=0.25, window_left=7)
    assert (wrapper._causal, wrapper._window_left, wrapper._sm_scale, wrapper._logits_soft_cap) == (True, 7, 0.25, 0.0)
    wrapper = case.ragged(logits_soft_cap=30.0)
    assert (wrapper._causal, wrapper._window_left, wrapper._sm_scale, wrapper._logits_soft_cap) == (False, -1, None, 30)


def test_later_names_and_hints():
    """vLLM's call of plan and run, by keywords."""
    case = Case()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="auto", jit_args=[1], jit_kwargs={})
    qo_indptr, page_indptr, indices, last = case.index
    wrapper.plan(
        qo_indptr=qo_indptr, paged_kv_indptr=page_indptr, paged_kv_indices=indices, paged_kv_last_page_len=last,
        seq_lens=ints(KV_LENS), num_qo_heads=HQ, num_kv_heads=HKV, head_dim_qk=D, head_dim_vo=D, page_size=4,
        causal=True, sm_scale=0.1, window_left=-1, logits_soft_cap=None, q_data_type=HALF, kv_data_type=HALF,
        o_data_type=HALF, fixed_split_size=-1, disable_split_kv=True, use_fp16_qk_reduction=True, non_blocking=True,
        block_tables=None, seq_lens_q=None, max_token_per_sequence=7, max_sequence_kv=9, token_pos_in_items_len=0,
    )  # fmt: skip
    out, lse = torch.empty_like(case.q), torch.empty(len(case.q), HQ)
    got = wrapper.run(
        case.q, tuple(case.cache), q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out, lse=lse, return_lse=True,
        enable_pdl=False, window_left=-1, kv_cache_sf=None,
    )  # fmt: skip
    assert got[0] is out and got[1] is lse
    check(got, case.want(causal=True, scale=0.1))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(qo_indptr, case.kv_indptr, HQ, HKV, head_dim_qk=D, causal=True, sm_scale=0.1, non_blocking=False)
    assert torch.equal(ragged.run(case.q, case.k, case.v, enable_pdl=True), out)


def test_positions_are_those_of_the_documentation():
    case = Case()
    q, k, v, m = next(iter(case.requests()))
    rope = ("ROPE_LLAMA", False, 0.2, 4, 3.0, 2.0, 100.0)
    names = ("pos_encoding_mode", "allow_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale",
             "rope_theta")  # fmt: skip
    named = dict(zip(names, rope))
    single = single_prefill_with_kv_cache(q, k, v, m, None, False, "NHD", *rope, True, "fa3")
    want = oracle(q, k, v, mask=m, scale=0.2, window=4, cap=3.0, mode="ROPE_LLAMA", rope=(2.0, 100.0))
    check(single, want)
    paged, ragged = case.paged(**named, causal=True), case.ragged(**named, causal=True)
    by_position = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", False, *[None] * 6, "fa2")
    by_position.plan(*case.index, HQ, HKV, D, 4, None, None, True, *rope, "float16", None, True)
    cache = tuple(case.cache)
    assert torch.equal(paged.run(case.q, cache), by_position.run(case.q, cache, None, None, False))
    by_position = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", False, None, None, None, None, "auto")
    rope = ("ROPE_LLAMA", False, 4, 3.0, 0.2, 2.0, 100.0)
    by_position.plan(case.qo_indptr, case.kv_indptr, HQ, HKV, D, None, None, True, *rope, "float16", None)
    assert torch.equal(ragged.run(case.q, case.k, case.v), by_position.run(case.q, case.k, case.v, False))


def test_forward_puts_modifiers_in_the_place_of_planned_ones():
    case, cache = Case(), None
    cache = tuple(case.cache)
    options = dict(causal=True, window_left=2, logits_soft_cap=4.0, sm_scale=0.3)
    paged, ragged = case.paged(pos_encoding_mode="ALIBI"), case.ragged(sm_scale=9.0)
    want = case.paged(**options).run_return_lse(case.q, cache)
    assert all(map(torch.equal, paged.forward_return_lse(case.q, cache, **options, k_scale=1.0, v_scale=1.0), want))
    assert torch.equal(ragged.forward(case.q, case.k, case.v, True, "NONE", False, 2, 4.0, 0.3), want[0])
    assert paged._window_left == 2 and paged._alibi is None
    masked = case.paged(custom_mask=case.custom_mask)
    assert torch.equal(masked.run(case.q, cache), masked.forward(case.q, cache, causal=True))  # a mask stays
    masked.end_forward()
    masked.begin_forward(*case.index, HQ, HKV, D, 4)
    check(masked.run_return_lse(case.q, cache), case.want())


def test_workspaces_hold_nothing():
    case = Case()
    wrapper = case.paged(causal=True)
    for size in (0, 3, 1 << 20):
        wrapper.reset_workspace_buffer(torch.full((size,), 255, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
        check(wrapper.run_return_lse(case.q, tuple(case.cache)), case.want(causal=True))
    with pytest.raises(ValueError, match="float_workspace_buffer: device meta"):
        wrapper.reset_workspace_buffer(torch.empty(1, device="meta"), None)
    with pytest.raises(TypeError, match="int_workspace_buffer: int"):
        wrapper.reset_workspace_buffer(WORKSPACE, 8)


@pytest.mark.parametrize("q_lens", [(), (0,), (0, 0)])
def test_nothing_to_do(q_lens):
    case = Case(q_lens=q_lens, kv_lens=tuple(3 for _ in q_lens))
    o, lse = case.paged(causal=True).run_return_lse(case.q, tuple(case.cache))
    assert o.shape == (0, HQ, D) and lse.shape == (0, HQ)
    assert case.ragged(custom_mask=case.custom_mask).run(case.q, case.k, case.v).shape == (0, HQ, D)
    k = torch.randn(3, HKV, D).half()
    assert single_prefill_with_kv_cache(case.q, k, k, causal=True).shape == (0, HQ, D)
    o, lse = single_prefill_with_kv_cache_return_lse(torch.randn(2, HQ, D).half(), k[:0], k[:0])
    assert not o.any() and (lse == -INF).all()


def test_single_in_hnd_and_other_output_types():
    case = Case()
    q, k, v, m = next(iter(case.requests()))
    want = oracle(q, k, v, mask=m)
    got = single_prefill_with_kv_cache(
        q, k.transpose(0, 1), v.transpose(0, 1), packed_custom_mask=packbits(m.flatten(), "little"),
        kv_layout="HND", return_lse=True, o_dtype="bfloat16", use_fp16_qk_reduction=True,
    )  # fmt: skip
    assert got[0].dtype == BF16
    check(got, want, 1e-2)


def test_numbers_of_a_mask_are_true_but_zero():
    case = Case()
    want = case.paged(custom_mask=case.custom_mask).run(case.q, tuple(case.cache))
    numbers = torch.where(case.custom_mask, torch.full_like(case.custom_mask, NAN, dtype=torch.float32), 0.0)
    assert torch.equal(case.paged(custom_mask=numbers).run(case.q, tuple(case.cache)), want)


def test_plan_is_cheap():
    """20 us on a quiet machine; the best of some here, since others share it."""
    case = Case()
    wrapper, times = case.paged(), []
    for _ in range(200):
        start = time.perf_counter()
        wrapper.plan(*case.index, HQ, HKV, D, 4, causal=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 30e-6


def test_bounds_of_query_lengths():
    case = Case()
    assert case.paged()._planned.max_q_len == max(Q_LENS)
    assert case.paged(max_token_per_sequence=64)._planned.max_q_len == 64
    many = ints(range(0, 2000, 5))
    assert (values.last_of("x", many), values.longest(many)) == (1995, 5)
    assert (values.last_of("x", many[:1]), values.longest(many[:1])) == (0, 0)
    for bad in (many.flip(0), torch.cat([many[:200], many]), many - 1):
        with pytest.raises(ValueError, match="x.[0-9]+.: .* must be at least"):
            values.last_of("x", bad)


# ---- plans of which the host knows nothing: tensors of a device, which "meta" stands for, and reads nothing


def test_plan_reads_no_value_of_a_device():
    case = Case()
    meta = [t.to("meta") for t in case.index]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="meta"))
    for index in (meta, case.index, [case.qo_indptr, *meta[1:]]):
        for mask in ({}, {"custom_mask": case.custom_mask.to("meta")}, {"packed_custom_mask": case.packed}):
            wrapper.plan(*index, HQ, HKV, D, 4, causal=True, **mask)
            planned = wrapper._planned
            assert planned.rows == (None if index is meta else sum(Q_LENS))
            held = [planned.requests.page_table, planned.requests.kv_starts, planned.requests.cu_seqlens_q]
            assert all(t.is_meta for t in held) and (planned.mask is None or planned.mask.is_meta)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device="meta"))
    ragged.plan(meta[0], case.kv_indptr, HQ, HKV, D, custom_mask=case.custom_mask)
    assert ragged._planned.mask.shape == ((case.custom_mask.numel() + 7) // 8 + len(Q_LENS),)


def test_copies_from_the_host_are_views_of_one():
    a, b, there = ints([1, 2]), ints([3, 4, 5]), torch.empty(2, dtype=torch.int32, device="meta")
    first, kept, second = values.moved((a, there, b), torch.device("meta"))
    assert kept is there and first.shape == (2,) and second.shape == (3,) and first._base is second._base
    assert values.moved((a, b), torch.device("cpu"))[0] is a


def test_masks_whose_offsets_the_host_does_not_know():
    """Packed to a bound of their size, from offsets that the device computes; one that is too short hides keys."""
    case = Case()
    wrapper, device = case.paged(), torch.device("cpu")
    at = values.offsets_of(case.qo_indptr, wrapper._keys(case.index, case.page))
    assert torch.equal(at.bytes, case.mask_starts.long())
    mask = values.mask_of(case.custom_mask, None, device)
    size = mask.size(len(Q_LENS))
    assert size >= len(case.packed)
    assert torch.equal(mask.pack(at, size), torch.nn.functional.pad(case.packed, (0, size - len(case.packed))))
    short = values.mask_of(case.custom_mask[:40], None, device).pack(at, size)
    whole = torch.where(torch.arange(81) < 40, case.custom_mask, False)
    assert torch.equal(short[: len(case.packed)], segment_packbits(whole, at.elements, "little")[0])


# ---- buffers of captured graphs


def graph_of(case, pages=16, mask=64, rows=None):
    batch = len(case.q_lens)
    buffers = [torch.full((n,), -7, dtype=torch.int32) for n in (batch + 1, batch + 1, pages, batch)]
    bits, starts = torch.full((mask,), 255, dtype=torch.uint8), torch.full((batch + 1,), -7, dtype=torch.int32)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, bits, starts)
    return wrapper, buffers, bits, starts


def test_graph_mode_copies_into_the_buffers():
    """A problem that run made, as a captured launch holds it, is right for a later plan: same tensors, new values."""
    case, later = Case(), Case(seed=3, q_lens=(4, 1, 2, 0, 9, 1), kv_lens=(2, 6, 3, 3, 11, 1))
    wrapper, buffers, bits, starts = graph_of(case)
    assert wrapper.is_cuda_graph_enabled
    problems = []
    for masked, now in itertools.product((False, True), (case, later)):
        mask = {"custom_mask": now.custom_mask} if masked else {}
        behind = buffers[2].clone()
        wrapper.plan(*now.index, HQ, HKV, D, 4, **now.options, **mask)
        check(wrapper.run_return_lse(now.q, tuple(now.cache)), now.want(masked))
        planned = wrapper._planned
        r = planned.requests
        problems.append((planned.mask, r.facts, [r.cu_seqlens_q, r.kv_starts, r.page_table, r.kv_lens]))
        for t, buffer in zip(problems[-1][2], (buffers[0], buffers[1], buffers[2], buffers[3])):
            assert t.data_ptr() == buffer.data_ptr() and t.shape[-1] == buffer.shape[0]
        assert torch.equal(buffers[2], torch.cat([now.indices, behind[len(now.indices) :]]))  # no more is written
        if masked:
            assert planned.mask is bits and planned.mask_starts is starts
            assert torch.equal(bits[: len(now.packed)], now.packed) and torch.equal(starts, now.mask_starts)
        else:
            assert planned.mask is None
    assert len({facts for _, facts, _ in problems}) == 1


def test_graph_mode_takes_packed_masks():
    case = Case()
    wrapper, _, bits, starts = graph_of(case, mask=len(Case().packed))
    wrapper.plan(*case.index, HQ, HKV, D, 4, packed_custom_mask=case.packed)
    check(wrapper.run_return_lse(case.q, tuple(case.cache)), case.want(True))
    assert torch.equal(bits, case.packed)


def test_graph_mode_of_ragged():
    case, later = Case(), Case(seed=3, q_lens=(4, 1, 2, 0, 9, 1), kv_lens=(2, 6, 3, 3, 11, 1))
    *buffers, starts = (torch.zeros(7, dtype=torch.int32) for _ in range(3))
    bits = torch.zeros(64, dtype=torch.uint8)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, bits, mask_indptr_buf=starts)
    for now in (case, later):
        wrapper.plan(now.qo_indptr, now.kv_indptr, HQ, HKV, D, custom_mask=now.custom_mask)
        check(wrapper.run_return_lse(now.q, now.k, now.v), now.want(True))
        assert torch.equal(buffers[0], now.qo_indptr) and torch.equal(buffers[1], now.kv_indptr)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q_lens=(1,), kv_lens=(2,)), "qo_indptr: a batch of 1, must be that of the buffers, 6"),
        (dict(kv_lens=(64, 9, 0, 0, 0, 1)), "paged_kv_indices: 20 elements, must fit in paged_kv_indices_buf, of 16"),
        (dict(q_lens=(18, 0, 0, 0, 0, 0)), "qo_indptr: 18 query rows, must be at most 17"),
    ],
    ids=["batch", "pages", "rows"],
)
def test_graph_mode_refuses_what_does_not_fit(change, message):
    case, other = Case(), Case(**change)
    wrapper, buffers, _, _ = graph_of(case)
    wrapper.plan(*case.index, HQ, HKV, D, 4)
    held = [b.clone() for b in buffers]
    with pytest.raises(ValueError, match=message):
        wrapper.plan(*other.index, HQ, HKV, D, 4)
    assert all(map(torch.equal, held, buffers))
    check(wrapper.run_return_lse(case.q, tuple(case.cache)), case.want())


def test_graph_mode_needs_buffers():
    case = Case()
    _, buffers, bits, starts = graph_of(case)
    for i, name in enumerate(BatchPrefillWithPagedKVCacheWrapper._NAMES):
        given = [*buffers]
        given[i] = None
        with pytest.raises(ValueError, match=f"{name}_buf: NoneType, must be a tensor where use_cuda_graph is True"):
            BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *given)
    for i, need in ((1, 7), (3, 6)):
        given = [*buffers]
        given[i] = torch.zeros(5, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"_buf: 5 elements, must be {need}"):
            BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *given)
    with pytest.raises(ValueError, match="kv_indptr_buf: 3 elements, must be 7"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, buffers[0], ints([0, 1, 2]))
    with pytest.raises(TypeError, match="qo_indptr_buf: dtype torch.int64"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, buffers[0].long(), buffers[1])
    with pytest.raises(ValueError, match="qk_indptr_buf: 5 elements"):
        BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, bits, starts[:5])
    for mask, name in (((None, starts), "custom_mask_buf: None"), ((bits, None), "qk_indptr_buf: None"),
                       ((bits[:3], starts), "custom_mask_buf: 3 bytes, must be at least")):  # fmt: skip
        wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, *mask)
        with pytest.raises(ValueError, match=name):
            wrapper.plan(*case.index, HQ, HKV, D, 4, custom_mask=case.custom_mask)


# ---- refusals, by the caller's names

BYTES = torch.ones(3, dtype=torch.uint8)
LONG = torch.zeros(2, dtype=torch.int64)
BAD_PLANS = {
    "head_dim: None": (TypeError, dict(head_dim=None)),
    "head_dim_qk: another name of head_dim": (ValueError, dict(head_dim_qk=64)),
    "num_qo_heads: 5, must be a multiple of num_kv_heads, 2": (ValueError, dict(num_qo_heads=5)),
    "num_kv_heads: 0, must be at least 1": (ValueError, dict(num_kv_heads=0)),
    "page_size: 0, must be at least 1": (ValueError, dict(page_size=0)),
    "page_size: None": (TypeError, dict(page_size=None)),
    "qo_indptr: list, must be a torch.Tensor": (TypeError, dict(qo_indptr=[0, 1])),
    "qo_indptr: dtype torch.int64": (TypeError, dict(qo_indptr=LONG)),
    "qo_indptr: shape (0,)": (ValueError, dict(qo_indptr=ints([]))),
    "paged_kv_indptr: 2 elements, must be 7": (ValueError, dict(paged_kv_indptr=ints([0, 1]))),
    "paged_kv_indices: shape (1, 2)": (ValueError, dict(paged_kv_indices=ints([0, 1])[None])),
    "paged_kv_last_page_len: 2 elements, must be 6": (ValueError, dict(paged_kv_last_page_len=ints([1, 1]))),
    "paged_kv_last_page_len: device meta": (ValueError, dict(paged_kv_last_page_len=ints([1] * 6).to("meta"))),
    "custom_mask: 82 elements, must be 81": (ValueError, dict(custom_mask=torch.ones(82))),
    "packed_custom_mask: 3 elements, must be 12": (ValueError, dict(packed_custom_mask=BYTES)),
    "packed_custom_mask: dtype torch.bool": (TypeError, dict(packed_custom_mask=BYTES.bool())),
    "custom_mask: device meta": (ValueError, dict(custom_mask=torch.ones(81, device="meta"))),
    "causal: 1, must be True or False": (TypeError, dict(causal=1)),
    "pos_encoding_mode: 'ROPE', must be one of NONE, ROPE_LLAMA, ALIBI": (KeyError, dict(pos_encoding_mode="ROPE")),
    "sm_scale: nan, must be finite": (ValueError, dict(sm_scale=NAN)),
    "sm_scale: '1', must be a float": (TypeError, dict(sm_scale="1")),
    "window_left: 1.5, must be an int": (TypeError, dict(window_left=1.5)),
    "logits_soft_cap: inf": (ValueError, dict(logits_soft_cap=INF)),
    "rope_theta: 0.0, must be positive": (ValueError, dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=0)),
    "q_data_type: 'half_float'": (KeyError, dict(q_data_type="half_float")),
    "q_data_type: 16": (TypeError, dict(q_data_type=16)),
    "q_data_type: torch.float32": (TypeError, dict(q_data_type="float32")),
    "kv_data_type: torch.bfloat16": (TypeError, dict(kv_data_type=BF16)),
    "kv_data_type: torch.float8_e4m3fn, must be one of torch.float8_e5m2": (
        TypeError, dict(q_data_type="float8_e5m2", kv_data_type=E4M3, o_data_type=HALF),
    ),
    "kv_data_type: torch.float16, must be one of torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8": (
        TypeError, dict(q_data_type=E4M3, kv_data_type=HALF),
    ),
    "o_data_type: torch.float8_e5m2, must be one of": (TypeError, dict(q_data_type="float8_e5m2")),
    "pos_encoding_mode: ROPE_LLAMA with": (
        NotImplementedError, dict(pos_encoding_mode="ROPE_LLAMA", kv_data_type=E4M3),
    ),
    "token_pos_in_items_len: int": (NotImplementedError, dict(token_pos_in_items_len=3)),
    "prefix_len_ptr: Tensor": (NotImplementedError, dict(prefix_len_ptr=LONG)),
    "max_token_per_sequence: 'x'": (TypeError, dict(max_token_per_sequence="x")),
    "max_token_per_sequence: -3, must be at least 0": (ValueError, dict(max_token_per_sequence=-3)),
    "o_data_type: torch.float32, must be one of": (TypeError, dict(o_data_type="float32")),
    "rope_scale: 'x', must be a float": (TypeError, dict(rope_scale="x")),
    "qo_indptr[2]: 3, must be at least 5": (ValueError, dict(qo_indptr=ints([0, 5, 3, 10, 11, 13, 17]))),
    "qo_indptr[0]: -3, must be at least 0": (ValueError, dict(qo_indptr=ints([-3, 3, 3, 10, 11, 13, 17]))),
    "paged_kv_indptr[1]: 2, must be at least 3": (ValueError, dict(paged_kv_indptr=ints([3, 2, 4, 4, 4, 4, 4]))),
    "paged_kv_indices: 8 elements, must be at least 9, the last of paged_kv_indptr": (
        ValueError, dict(paged_kv_indices=ints(range(8))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_PLANS)
def test_bad_plans(message):
    case, (error, change) = Case(), BAD_PLANS[message]
    names = BatchPrefillWithPagedKVCacheWrapper._NAMES
    good = dict(zip(names, case.index)) | dict(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=D, page_size=4)
    with pytest.raises(error) as found:
        BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).plan(**good | change)
    assert str(found.value).startswith(message), str(found.value)


def test_unknown_names_are_key_errors_and_value_errors():
    q = torch.zeros(1, HQ, D).half()
    for error in (KeyError, ValueError):
        with pytest.raises(error):
            BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "DNH")
        with pytest.raises(error):
            BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, backend="fa9")
        with pytest.raises(error):
            single_prefill_with_kv_cache(q, q, q, kv_layout="hnd")
        with pytest.raises(error):
            single_prefill_with_kv_cache(q, q, q, pos_encoding_mode="none")
    with pytest.raises(TypeError, match="float_workspace_buffer: NoneType"):
        BatchPrefillWithPagedKVCacheWrapper(None)
    with pytest.raises(TypeError, match="use_cuda_graph: 'False', must be True or False"):
        BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", "False")


A_HEAD = torch.ones(HKV)
BAD_RUNS = {
    "q: 16 (rows), must be plan's last of qo_indptr, 17": (ValueError, lambda c: (c.q[1:], c.cache), {}),
    "q: torch.bfloat16 (dtype), must be plan's q_data_type": (ValueError, lambda c: (c.q.bfloat16(), c.cache), {}),
    "q: 4 (heads), must be plan's num_qo_heads, 6": (ValueError, lambda c: (c.q[:, :4], c.cache), {}),
    "q: 32 (elements a head), must be plan's head_dim, 64": (ValueError, lambda c: (c.q[..., :32], c.cache), {}),
    "q: shape (17, 384), must have 3": (ValueError, lambda c: (c.q.flatten(1), c.cache), {}),
    "q: list, must be a torch.Tensor": (TypeError, lambda c: ([1], c.cache), {}),
    "paged_kv_cache: torch.bfloat16 (dtype), must be plan's kv_data_type": (
        ValueError, lambda c: (c.q, [t.bfloat16() for t in c.cache]), {},
    ),
    "paged_kv_cache: 2 (rows a page), must be plan's page_size, 4": (
        ValueError, lambda c: (c.q, [t[:, :2] for t in c.cache]), {},
    ),
    "paged_kv_cache: 1 (heads), must be plan's num_kv_heads, 2": (
        ValueError, lambda c: (c.q, [t[:, :, :1] for t in c.cache]), {},
    ),
    "paged_kv_cache: 32 (elements a head), must be plan's head_dim_vo, 64": (
        ValueError, lambda c: (c.q, (c.cache[0], c.cache[1][..., :32])), {},
    ),
    "paged_kv_cache: shape (11, 4, 2, 64), must have 5": (ValueError, lambda c: (c.q, c.cache[0]), {}),
    "q_scale: shape (2,), must have one element, or be (6,), one a query head": (
        ValueError, lambda c: (c.q, c.cache), dict(q_scale=A_HEAD),
    ),
    "k_scale: shape (6,), must have one element, or be (2,), one a KV head": (
        ValueError, lambda c: (c.q, c.cache), dict(k_scale=torch.ones(HQ)),
    ),
    "v_scale: shape (2, 1), must have one element": (
        ValueError, lambda c: (c.q, c.cache), dict(v_scale=A_HEAD[:, None]),
    ),
    "v_scale: nan of query head 3, must be finite": (
        ValueError, lambda c: (c.q, c.cache), dict(v_scale=torch.tensor([1.0, NAN])),
    ),
    "scale_q: another name of q_scale": (
        ValueError, lambda c: (c.q, c.cache), dict(q_scale=1.0, k_scale=1.0, v_scale=1.0, return_lse=1.0),
    ),
    "kv_block_scales: another name of kv_cache_sf": (
        ValueError, lambda c: (c.q, c.cache), dict(kv_cache_sf=(A_HEAD, A_HEAD), kv_block_scales=(A_HEAD, A_HEAD)),
    ),
    "v_scales_interleaved: True, must be False": (
        ValueError, lambda c: (c.q, c.cache), dict(v_scales_interleaved=True),
    ),
    "q_scale: dtype torch.float64": (TypeError, lambda c: (c.q, c.cache), dict(q_scale=torch.ones(1).double())),
    "k_scale: device meta": (ValueError, lambda c: (c.q, c.cache), dict(k_scale=torch.ones(1, device="meta"))),
    "v_scale: '2', must be a float": (TypeError, lambda c: (c.q, c.cache), dict(v_scale="2")),
    "k_scale: nan, must be finite": (ValueError, lambda c: (c.q, c.cache), dict(k_scale=NAN)),
    "q_scale: inf, must be finite": (ValueError, lambda c: (c.q, c.cache), dict(q_scale=INF)),
    "sm_scale x q_scale x k_scale: nan": (ValueError, lambda c: (c.q, c.cache), dict(k_scale=torch.tensor(NAN))),
    "window_left: 5, must be None or plan's, -1": (ValueError, lambda c: (c.q, c.cache), dict(window_left=5)),
    "sinks: shape (2,)": (ValueError, lambda c: (c.q, c.cache), dict(sinks=A_HEAD)),
    "out: dtype torch.bfloat16": (TypeError, lambda c: (c.q, c.cache), dict(out=torch.empty(17, HQ, D).bfloat16())),
    "out: shape (1, 6, 64)": (ValueError, lambda c: (c.q, c.cache), dict(out=torch.empty(1, HQ, D).half())),
    "lse: shape (17, 1)": (ValueError, lambda c: (c.q, c.cache), dict(lse=torch.empty(17, 1))),
    "return_lse: 1, must be": (TypeError, lambda c: (c.q, c.cache), dict(return_lse=1)),
    "use_fp16_softmax: bool": (NotImplementedError, lambda c: (c.q, c.cache), dict(use_fp16_softmax=True)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_RUNS)
def test_bad_runs(message):
    case, (error, of, options) = Case(), BAD_RUNS[message]
    q, cache = of(case)
    with pytest.raises(error) as found:
        case.paged().run(q, tuple(cache) if isinstance(cache, list) else cache, **options)
    assert str(found.value).startswith(message), str(found.value)


def test_bad_runs_of_ragged_and_single():
    case = Case()
    ragged = case.ragged()
    for message, error, change in (
        ("k: shape", ValueError, dict(k=case.k[0])),
        ("q: 1 (rows)", ValueError, dict(q=case.q[:1])),
        ("k, v: 1 (heads)", ValueError, dict(k=case.k[:, :1], v=case.v[:, :1])),
        ("kv_cache_sf: Tensor, must be (k, v)", TypeError, dict(kv_cache_sf=LONG)),
        ("kv_cache_sf: K is Tensor, must be None", ValueError, dict(kv_cache_sf=(case.k, case.v))),
        ("k: 26 rows, must be at least plan's last of kv_indptr, 27", ValueError, dict(k=case.k[1:], v=case.v[1:])),
        ("o_scale: float", NotImplementedError, dict(o_scale=2.0)),
        ("o_scale: Tensor", NotImplementedError, dict(o_scale=torch.ones(2))),
        ("k_scale: shape (3,)", ValueError, dict(k_scale=torch.ones(3))),
        ("scale_v: another name of v_scale", ValueError, dict(scale_v=1.0, v_scale=1.0)),
    ):
        with pytest.raises(error) as found:
            ragged.run(**dict(q=case.q, k=case.k, v=case.v) | change)
        assert str(found.value).startswith(message), str(found.value)
    q, k, v, m = next(iter(case.requests()))
    for message, error, change in (
        ("q: NoneType", TypeError, dict(q=None)),
        ("k: shape (5, 128)", ValueError, dict(k=k.flatten(1))),
        ("q: 6 rows, must be at most the 5 of k", ValueError, dict(q=q.repeat(2, 1, 1), causal=True)),
        ("custom_mask: 12 elements, must be 15", ValueError, dict(custom_mask=m[:, :4])),
        ("packed_custom_mask: 1 elements, must be 2", ValueError, dict(packed_custom_mask=BYTES[:1])),
        ("scale_k: another name of k_scale", ValueError, dict(k_scale=1.0, scale_k=1.0)),
        ("v_scale: shape (6,)", ValueError, dict(scale_v=torch.ones(HQ))),
        ("q: 6 heads, must be a multiple of k, v's 4", ValueError, dict(k=k.repeat(1, 2, 1), v=v.repeat(1, 2, 1))),
        ("q: 6 heads, must be a multiple of k, v's 4", ValueError,
         dict(k=k.repeat(1, 2, 1), v=v.repeat(1, 2, 1), q_scale=torch.ones(6), k_scale=torch.ones(4))),
        ("kv_cache_sf: K is Tensor, must be None", ValueError, dict(kv_cache_sf=(k, v))),
        ("kv_cache_sf (V): NoneType", TypeError, dict(kv_cache_sf=(k, None))),
        ("o_dtype: torch.float8_e5m2, the query's, must be one of", ValueError,
         dict(zip("qkv", (t.to(torch.float8_e5m2) for t in (q, k, v))))),
    ):
        with pytest.raises(error) as found:
            single_prefill_with_kv_cache(**dict(q=q, k=k, v=v) | change)
        assert str(found.value).startswith(message), str(found.value)


def test_grad_is_refused():
    case = Case()
    with pytest.raises(RuntimeError, match="q: requires grad"):
        case.ragged().run(case.q.requires_grad_(), case.k, case.v)


# ---- the rest of the host


def test_slopes_are_kept_a_device_and_number_of_heads():
    for heads in (1, 2, 6, 8, 12):
        made = values.alibi_slopes(heads, torch.device("cpu"))
        torch.testing.assert_close(made, torch.tensor([slope(h, heads) for h in range(heads)]))
        assert values.alibi_slopes(heads, torch.device("cpu")) is made


def test_runs_pass_tensors_on_as_they_are(monkeypatch):
    """Nothing copies the query, K, V, index tensors or masks that lie where they are needed."""
    case = Case()
    for module in (paged, ragged, single):
        monkeypatch.setattr(module, "serve", lambda p: p)
    problems = [
        case.paged(packed_custom_mask=case.packed).run(case.q, tuple(case.cache)),
        case.ragged(packed_custom_mask=case.packed).run(case.q, case.k, case.v),
    ]
    of_ragged = (case.k, case.v), (case.qo_indptr, case.kv_indptr)
    for p, ((k, v), index) in zip(problems, ((case.cache, case.index), of_ragged)):
        r = p.requests
        held = {t.data_ptr() for t in (r.page_table, r.kv_lens, r.cu_seqlens_q, r.kv_starts) if t.numel()}
        assert held == {t.data_ptr() for t in index}
        assert (p.q.data_ptr(), p.k.data_ptr(), p.v.data_ptr()) == (case.q.data_ptr(), k.data_ptr(), v.data_ptr())
        assert p.custom_mask.data_ptr() == case.packed.data_ptr()
    p = single_prefill_with_kv_cache(case.q, case.k, case.v)
    assert (p.k.data_ptr(), p.v.data_ptr(), p.max_q_len) == (case.k.data_ptr(), case.v.data_ptr(), len(case.q))


def test_torch_compile_holds_runs_in_one_graph():
    case = Case()
    of_paged, of_ragged = case.paged(causal=True, custom_mask=case.custom_mask), case.ragged(window_left=2)

    def step(q, k, v, cache):
        o = of_paged.run(q, cache, k_scale=2.0), of_ragged.run(q, k, v)
        return *o, single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode="ALIBI")

    args = case.q, case.k, case.v, tuple(case.cache)
    got = torch.compile(step, fullgraph=True, backend="eager")(*args)
    assert all(map(torch.equal, got, step(*args)))


OF_PAGED = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
OF_RAGGED = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)


def test_torch_compile_keeps_its_graph_for_later_plans():
    """Of other lengths: one graph of static sizes, one of dynamic ones. Numbers of globals are constants of a graph."""

    def step(q, cache, k, v):
        return OF_PAGED.run(q, cache), OF_RAGGED.run(q, k, v)

    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for more in range(2, 7):
        case = Case(q_lens=[more, 2 * more], kv_lens=[3 * more, 4 * more])
        OF_PAGED.plan(*case.index, HQ, HKV, D, 4, causal=True)
        OF_RAGGED.plan(case.qo_indptr, case.kv_indptr, HQ, HKV, D, causal=True)
        args = case.q, tuple(case.cache), case.k, case.v
        assert all(map(torch.equal, compiled(*args), step(*args)))
    assert counter.frame_count == 2
