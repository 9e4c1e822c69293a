"""FlashInfer's decode class on the CPU against loops in float64, and as vLLM and SGLang plan it."""

from functools import partial

import pytest
import torch

from tests.support.prefill_batches import HKV, HQ, WORKSPACE, Case, D, check, ints, meant
from wrappers import BatchDecodeWithPagedKVCacheWrapper as Decode
from wrappers import fast_decode_plan, get_seq_lens
from wrappers.flashinfer.wrapper_classes import batch

E4M3, HALF, BF16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
KV_LENS = (9, 2, 17, 4)
SINKS = torch.linspace(-1, 2, HQ)


def case_of(q_len=1, kv_lens=KV_LENS, **options):
    return Case(q_lens=[q_len] * len(kv_lens), kv_lens=kv_lens, **options)


def index_of(case):
    return case.page_indptr, case.indices, case.last


def planned(case, **options):
    wrapper = Decode(WORKSPACE, case.layout)
    wrapper.plan(*index_of(case), HQ, HKV, D, case.page, q_len_per_req=case.q_lens[0], **options)
    return wrapper


MODIFIERS = {
    "plain": {},
    "window": {"window_left": 3},
    "window 0": {"window_left": 0},
    "cap, scale": {"logits_soft_cap": 2.0, "sm_scale": 0.3},
    "cap off": {"logits_soft_cap": 0.0},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e3},
    "alibi": {"pos_encoding_mode": "ALIBI"},
}  # fmt: skip


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("page,layout", [(1, "NHD"), (4, "NHD"), (4, "HND"), (5, "HND")])
@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers_pages_and_layouts(name, page, layout, q_len):
    case, options = case_of(q_len, page=page, layout=layout), MODIFIERS[name]
    want = case.want(causal=True, **meant(options))
    wrapper = planned(case, **options)
    check(wrapper.run(case.q, tuple(case.cache), return_lse=True), want)
    check(wrapper.run_return_lse(case.q, torch.stack(case.cache, 1)), want)
    other = planned(case, sm_scale=9.0)
    check(other.forward_return_lse(case.q, case.cache, **options), want)
    assert torch.equal(other.forward(case.q, case.cache, **options), wrapper.run(case.q, case.cache))


def test_outputs_sinks_and_names_that_engines_read():
    case = case_of()
    wrapper = planned(case, window_left=3, sm_scale=0.2)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (3, 0.0, 0.2)
    assert wrapper.is_cuda_graph_enabled is False and wrapper.use_tensor_cores is False
    out, lse = torch.full_like(case.q, 7), torch.full((len(case.q), HQ), 7.0)
    of_plan = {"window_left": 3, "q_len_per_req": 1}
    got = wrapper.run(case.q, case.cache, out=out, lse=lse, return_lse=True, sinks=SINKS, **of_plan)
    assert got[0] is out and got[1] is lse
    check(got, case.want(causal=True, window=3, scale=0.2, sinks=SINKS))


@pytest.mark.parametrize("number", [float, lambda x: torch.tensor([x])])
def test_scales_and_e4m3_caches(number):
    """As SGLang plans: data_type is the cache's."""
    case = case_of()
    cache = [t.to(E4M3) for t in case.cache]
    wrapper = planned(case, data_type=E4M3, q_data_type=HALF)
    got = wrapper.run(case.q, cache, q_scale=number(0.5), k_scale=number(3.0), v_scale=number(0.25), return_lse=True)
    case.k, case.v = case.k.to(E4M3).double(), case.v.to(E4M3).double()
    o, lse = case.want(causal=True, scale=1.5 * D**-0.5)
    check(got, (o * 0.25, lse))


def test_types_of_outputs():
    case = case_of(dtype=BF16)
    wrapper = planned(case, q_data_type="bfloat16", o_data_type="float16")
    assert wrapper.run(case.q, case.cache).dtype == HALF
    for _ in range(2):  # the plan of a graph says no type of the output
        fast_decode_plan(wrapper, *index_of(case), HQ, HKV, D, case.page, q_data_type=BF16)
        assert wrapper.run(case.q, case.cache).dtype == HALF
    fresh = Decode(WORKSPACE)
    fast_decode_plan(fresh, *index_of(case), HQ, HKV, D, case.page, data_type=BF16)
    assert fresh.run(case.q, case.cache).dtype == BF16


def test_requests_without_pages():
    case = case_of(kv_lens=(9, 0, 4))
    o, lse = planned(case).run(case.q, case.cache, return_lse=True)
    assert not o[1].any() and (lse[1] == float("-inf")).all()
    check((o, lse), case.want(causal=True))


# ---- graphs


def buffers(batch, pages):
    return torch.zeros(batch + 1).int(), torch.full((pages,), -1).int(), torch.zeros(batch).int()


def graph_wrapper(batch, pages, **options):
    indptr, indices, last = buffers(batch, pages)
    return Decode(
        WORKSPACE, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last, **options,
    ), (indptr, indices, last)  # fmt: skip


def test_as_vllm_plans():
    """plan once, then fast_decode_plan of host tensors; what a graph reads stays where it is."""
    wrapper, held = graph_wrapper(4, 20, backend="fa2")
    for number, lens in enumerate((KV_LENS, (1, 30, 2, 5))):
        case = case_of(kv_lens=lens)
        indptr, indices, last = index_of(case)
        assert get_seq_lens(indptr, last, case.page).tolist() == list(lens)
        names = {"indptr": indptr, "indices": indices, "last_page_len": last, "num_qo_heads": HQ, "num_kv_heads": HKV}
        names |= {"head_dim": D, "page_size": case.page, "pos_encoding_mode": "NONE", "window_left": -1}
        names |= {"logits_soft_cap": None, "q_data_type": HALF, "kv_data_type": HALF, "sm_scale": 0.2}
        names |= {"non_blocking": True, "fixed_split_size": -1, "disable_split_kv": False, "q_len_per_req": 1}
        if number:
            fast_decode_plan(wrapper, **names)
        else:
            wrapper.plan(**names, o_data_type=HALF, data_type=None, block_tables=None, seq_lens=ints(lens))
        assert [t.data_ptr() for t in (wrapper._planned.requests.kv_starts, wrapper._planned.requests.kv_lens)] == [
            held[0].data_ptr(), held[2].data_ptr()
        ]  # fmt: skip
        check(wrapper.run(case.q, case.cache, return_lse=True), case.want(causal=True, scale=0.2))


def test_as_sglang_plans():
    """It writes to the buffers itself, with one row a page, and puts fast_decode_plan in the place of begin_forward."""
    wrapper, (indptr, indices, last) = graph_wrapper(4, 60)
    last.fill_(1)
    for number, lens in enumerate((KV_LENS, (1, 30, 2, 5))):
        case = case_of(kv_lens=lens, page=1)
        starts = indptr[:5]
        starts[1:] = ints(lens).cumsum(0)
        wrapper._paged_kv_indices_buf[: len(case.indices)] = case.indices
        options = {"data_type": HALF, "q_data_type": HALF, "non_blocking": True, "fixed_split_size": None}
        if number:
            options["global_override_indptr_cpu"] = starts.clone()
        wrapper.begin_forward(starts, wrapper._paged_kv_indices_buf, last[:4], HQ, HKV, D, 1, **options)
        wrapper.begin_forward = partial(fast_decode_plan, wrapper)
        assert wrapper.begin_forward.func == fast_decode_plan
        pools = [t.view(-1, HKV, D) for t in case.cache]  # rows without the dimension of a page
        o = wrapper.forward(case.q, tuple(pools), sm_scale=0.2, logits_soft_cap=3.0, k_scale=None, v_scale=None)
        torch.testing.assert_close(
            o.double(), case.want(causal=True, scale=0.2, cap=3.0)[0], rtol=2e-3, atol=2e-3
        )  # fmt: skip


def test_graph_mode_keeps_shapes():
    wrapper, held = graph_wrapper(4, 12)
    case = case_of()
    wrapper.plan(*index_of(case), HQ, HKV, D, case.page)
    before = [t.clone() for t in held]
    with pytest.raises(ValueError, match="^indptr: a batch of 2, must be that of the buffers, 4"):
        wrapper.plan(ints([0, 1, 2]), ints([0, 1]), ints([1, 1]), HQ, HKV, D, case.page)
    with pytest.raises(ValueError, match="^indices: 13 elements, must fit in paged_kv_indices_buffer, of 12"):
        wrapper.plan(ints([0, 1, 2, 3, 4]), ints(range(13)), ints([1] * 4), HQ, HKV, D, case.page)
    with pytest.raises(ValueError, match="^q_len_per_req: 2, must be that of the first plan, 1"):
        wrapper.plan(*index_of(case), HQ, HKV, D, case.page, q_len_per_req=2)
    assert all(map(torch.equal, held, before))
    check(wrapper.run(case.q, case.cache, return_lse=True), case.want(causal=True))


def test_plan_reads_no_value_of_a_device():
    case = case_of()
    meta = [t.to("meta") for t in index_of(case)]
    wrapper = Decode(torch.empty(0, device="meta"))
    for index in (meta, index_of(case), [case.page_indptr, *meta[1:]]):
        wrapper.plan(*index, HQ, HKV, D, case.page)
        assert all(t.is_meta for t in (wrapper._planned.requests.page_table, wrapper._planned.requests.kv_starts))
    pools = tuple(t.to("meta") for t in case.cache)
    assert wrapper.run(case.q.to("meta"), pools, return_lse=True)[1].shape == (4, HQ)


# ---- what a kernel gets


def test_splits_ask_for_bits_that_do_not_depend_on_the_batch(monkeypatch):
    case, seen = case_of(), []
    monkeypatch.setattr(batch, "serve", seen.append)
    for options in ({}, {"fixed_split_size": -1}, {"fixed_split_size": 64}, {"disable_split_kv": True}):
        planned(case, **options).run(case.q, case.cache)
    assert [p.split_kv for p in seen] == ["auto", "auto", "fixed", "fixed"]
    assert all(p.causal and p.requests.cu_seqlens_q is None for p in seen)


def test_no_kernel_is_said_by_name(launches):
    case = case_of(page=8)
    q, cache = case.q.to(torch.float8_e5m2), tuple(t.to(torch.float8_e5m2) for t in case.cache)
    wrapper = planned(case, q_data_type=torch.float8_e5m2, o_data_type=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="^q: no attention kernel: .*e5m2"):
        wrapper.run(q, cache)
    assert not launches


# ---- refusals

PLANS = {
    "indptr: Tensor|indptr: dtype torch.int64": {"indptr": torch.zeros(5, dtype=torch.int64)},
    "last_page_len: 3 elements, must be 4: a batch of 4, from indptr": {"last_page_len": ints([1, 1, 1])},
    "indices: 2 elements, must be at least 10, the last of indptr": {"indices": ints([0, 1])},
    "indptr.2.: 1, must be at least 3, the entry before it": {"indptr": ints([0, 3, 1, 5, 6])},
    "num_qo_heads: 5, must be a multiple of num_kv_heads, 2": {"num_qo_heads": 5},
    "page_size: 0, must be at least 1": {"page_size": 0},
    "q_len_per_req: 0, must be at least 1": {"q_len_per_req": 0},
    "q_data_type: torch.float32": {"q_data_type": "float32"},
    "kv_data_type: torch.bfloat16": {"data_type": BF16},
    "pos_encoding_mode: 'ROPE'": {"pos_encoding_mode": "ROPE"},
    "window_right: 2, not supported, must be 0": {"window_right": 2},
    "is_causal: True, not supported, must be None": {"is_causal": True},
    "is_causal: 1, must be True or False": {"is_causal": 1},
    "disable_split_kv: None, must be True or False": {"disable_split_kv": None},
    "fixed_split_size: 1.5, must be an int": {"fixed_split_size": 1.5},
    "sm_scale: inf, must be finite": {"sm_scale": float("inf")},
}


@pytest.mark.parametrize("message", PLANS)
def test_bad_plans(message):
    case = case_of()
    given = dict(zip(("indptr", "indices", "last_page_len"), index_of(case)))
    given |= {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "page_size": case.page}
    wrapper = planned(case)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^({message})"):
        wrapper.plan(**given | PLANS[message])
    check(wrapper.run(case.q, case.cache, return_lse=True), case.want(causal=True))  # the plan before
    wrapper.plan(**given)


def runs(case):
    q, (k, v) = case.q, case.cache
    return {
        "q: 3 tokens, must be 4 x 1, the requests of plan x q_len_per_req": {"q": q[:3]},
        "q: 8 tokens, must be 4 x 1": {"q": torch.cat([q, q])},
        "q.dtype: torch.bfloat16, must be plan's q_data_type": {"q": q.bfloat16()},
        "paged_kv_cache: 2 .rows per page., must be plan's page_size, 4": {"paged_kv_cache": (k[:, :2], v[:, :2])},
        "paged_kv_cache.dtype: torch.bfloat16, must be": {"paged_kv_cache": (k.bfloat16(), v.bfloat16())},
        "window_left: 3, must be None or plan's, -1": {"window_left": 3},
        "q_len_per_req: 2, must be None or plan's, 1": {"q_len_per_req": 2},
        "sinks: shape": {"sinks": SINKS[:2]},
        "out: shape": {"out": q[:2].clone()},
        "k_scale: dtype torch.float64": {"k_scale": torch.ones(1).double()},
        "return_lse: 1, must be True or False": {"return_lse": 1},
    }


@pytest.mark.parametrize("message", runs(case_of()))
def test_bad_runs(message):
    case = case_of()
    given = {"q": case.q, "paged_kv_cache": case.cache} | runs(case)[message]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        planned(case).run(**given)


def test_bad_values():
    case = case_of()
    wrapper = Decode(WORKSPACE)
    bad = {"indices: 99 in entry 0, of request 0": (case.page_indptr, case.indices * 0 + 99, case.last)}
    bad["last_page_len: 5 of request 1"] = case.page_indptr, case.indices, ints([1, 5, 1, 1])
    for message, index in bad.items():
        wrapper.plan(*index, HQ, HKV, D, case.page)
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.run(case.q, case.cache)


def test_bad_constructors():
    with pytest.raises(NotImplementedError, match="^jit_args: list, must be None"):
        Decode(WORKSPACE, jit_args=[1])
    with pytest.raises(ValueError, match="^paged_kv_indptr_buffer: NoneType, must be a tensor if use_cuda_graph"):
        Decode(WORKSPACE, use_cuda_graph=True)
    indptr, indices, last = buffers(4, 9)
    with pytest.raises(ValueError, match="^paged_kv_last_page_len_buffer: 3 elements, must be 4: a batch of 4, from"):
        Decode(WORKSPACE, "NHD", True, False, indptr, indices, last[:3])
    with pytest.raises(KeyError, match="^kv_layout: 'DHN'"):
        Decode(WORKSPACE, "DHN")
    with pytest.raises(RuntimeError, match="^BatchDecodeWithPagedKVCacheWrapper: call plan before run"):
        Decode(WORKSPACE).run(torch.zeros(1, HQ, D).half(), torch.zeros(1, 2, 4, HKV, D).half())
