"""FlashInfer's prefill family on the reference: what the classes and the function of one request compute."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.support.prefill_batches import BF16, HALF, HKV, HQ, NAN, WORKSPACE, Case, D, check, meant, slope
from wrappers import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from wrappers.flashinfer import single_prefill as single
from wrappers.flashinfer import values
from wrappers.flashinfer.wrapper_classes import batch

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


@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers_of_batches_and_of_single_requests(name):
    """Against the oracle; paged, ragged and single agree to the bit, masks in both forms too."""
    case, options = Case(), dict(MODIFIERS[name])
    want = case.want(**meant(options))
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


# ---- the rest of the host


def test_slopes_are_kept_a_device_and_number_of_heads():
    for heads in (1, 2, 6, 8, 12):
        made = values.alibi_slopes(heads, torch.device("cpu"))
        torch.testing.assert_close(made, torch.tensor([slope(h, heads) for h in range(heads)]))
        assert values.alibi_slopes(heads, torch.device("cpu")) is made


def test_runs_pass_tensors_on_as_they_are(monkeypatch):
    """Nothing copies the query, K, V, index tensors or masks that lie where they are needed."""
    case = Case()
    for module in (batch, single):
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


OF_PAGED = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
OF_RAGGED = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)


@pytest.mark.slow
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
