"""Plans of FlashInfer's prefill family: their life, names and positions, devices of which nothing is read, graphs."""

import copy
import itertools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.fake_machine import FakeMachine
from tests.support.prefill_batches import (
    BF16,
    HALF,
    HKV,
    HQ,
    INF,
    KV_LENS,
    NAN,
    Q_LENS,
    WORKSPACE,
    Case,
    D,
    check,
    ints,
    oracle,
)
from wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    packbits,
    segment_packbits,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from wrappers.flashinfer import values
from wrappers.host import machine

# ---- plan and run


KINDS = {
    "paged": BatchPrefillWithPagedKVCacheWrapper, "ragged": BatchPrefillWithRaggedKVCacheWrapper,
    "decode": BatchDecodeWithPagedKVCacheWrapper,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_run_needs_a_plan(kind):
    case = Case()
    args = (case.k, case.v) if kind == "ragged" else (tuple(case.cache),)
    for call in ("run", "run_return_lse", "forward", "forward_return_lse"):
        with pytest.raises(RuntimeError, match="call plan before run"):
            getattr(KINDS[kind](WORKSPACE), call)(case.q, *args)


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
    kept = paged._planned_options
    assert (kept["alibi_slopes"], kept["rope"], paged._planned.mask) == (None, None, None)


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
    want, facts = wrapper.run(*run), wrapper._planned.requests.shape_id
    wrapper._planned = wrapper._planned._replace(requests=wrapper._planned.requests._replace(shape_id=10**9))
    for other in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
        assert other._planned.requests.shape_id == facts
        assert torch.equal(other.run(*run), want)
    assert copy.deepcopy(type(wrapper)(WORKSPACE))._planned is None


@pytest.mark.parametrize("form", ["paged", "ragged"])
def test_a_plan_that_has_run_may_be_copied_and_sent(foreign, here, form):
    """A launch is kept with memory that no copy can have: a copy makes its own at its first run."""
    case = Case()
    wrapper = getattr(case, form)(causal=True)
    run = (case.q, tuple(case.cache)) if form == "paged" else (case.q, *case.rows())
    want = wrapper.run(*run)
    assert wrapper._bound is not None
    for other in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper), copy.copy(wrapper)):
        assert other._bound is None
        assert torch.equal(other.run(*run), want) and torch.equal(other.run(*run), want)
        assert other._bound is not None and other._bound[0] is not wrapper._bound[0]


@pytest.mark.parametrize("form", ["paged", "ragged", "decode"])
def test_a_second_plan_ends_the_launch_of_the_first(here, form):
    """Though the tensors of its run are those of the first one's: the batch may be another one, or a modifier."""
    case, other = (Case(q_lens=(1,) * 6, kv_lens=lens) for lens in ((5, 4, 7, 9, 1, 2), (2, 1, 9, 7, 4, 5)))
    run = (case.q, *case.rows()) if form == "ragged" else (case.q, tuple(pool.nan_to_num() for pool in case.cache))

    def plan(wrapper, batch, **options):
        index = {"paged": batch.index, "ragged": (batch.qo_indptr, batch.kv_indptr), "decode": batch.index[1:]}[form]
        wrapper.plan(*index, HQ, HKV, D, *(() if form == "ragged" else (batch.page,)), q_data_type=HALF, **options)
        return wrapper

    made, before = KINDS[form], None
    wrapper = plan(made(WORKSPACE), case)
    for batch, options in ((case, {}), (other, {}), (other, {"window_left": 2}), (case, {"sm_scale": 3.0}), (case, {})):
        plan(wrapper, batch, **options)
        want = plan(made(WORKSPACE), batch, **options).run(*run)
        assert torch.equal(wrapper.run(*run), want) and torch.equal(wrapper.run(*run), want)
        assert wrapper._bound is not None and (before is None or not torch.equal(want, before))
        before = want


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
    with pytest.raises(ValueError, match="out: .* overlaps the memory of custom_mask, must not overlap it"):
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


def test_forward_puts_modifiers_in_the_place_of_planned_ones():
    case, cache = Case(), None
    cache = tuple(case.cache)
    options = dict(causal=True, window_left=2, logits_soft_cap=4.0, sm_scale=0.3)
    paged, ragged = case.paged(pos_encoding_mode="ALIBI"), case.ragged(sm_scale=9.0)
    want = case.paged(**options).run_return_lse(case.q, cache)
    assert all(map(torch.equal, paged.forward_return_lse(case.q, cache, **options, k_scale=1.0, v_scale=1.0), want))
    assert torch.equal(ragged.forward(case.q, case.k, case.v, True, "NONE", False, 2, 4.0, 0.3), want[0])
    assert paged._window_left == 2 and paged._planned_options["alibi_slopes"] is None
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
        problems.append((planned.mask, r.shape_id, [r.cu_seqlens_q, r.kv_starts, r.page_table, r.kv_lens]))
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
        with pytest.raises(ValueError, match=f"{name}_buf: NoneType, must be a tensor if use_cuda_graph is True"):
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
