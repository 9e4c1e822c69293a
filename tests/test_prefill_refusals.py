"""What the classes of FlashInfer's prefill family and the function of one request refuse, by the caller's names."""

import pytest
import torch

from tests.prefill_batches import BF16, E4M3, HALF, HKV, HQ, INF, NAN, WORKSPACE, Case, D, ints
from wrappers import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)

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
    "custom_mask: shape (9, 9), must be (N,): query rows x keys": (ValueError, dict(custom_mask=torch.ones(9, 9))),
    "custom_mask: shape (1, 81), must be (N,)": (ValueError, dict(custom_mask=torch.ones(1, 81))),
    "packed_custom_mask: shape (12, 1), must have 1 dim": (
        ValueError, dict(packed_custom_mask=torch.zeros(12, 1, dtype=torch.uint8)),
    ),
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
    "q: 32 (elements per head), must be plan's head_dim, 64": (ValueError, lambda c: (c.q[..., :32], c.cache), {}),
    "q: shape (17, 384), must have 3": (ValueError, lambda c: (c.q.flatten(1), c.cache), {}),
    "q: list, must be a torch.Tensor": (TypeError, lambda c: ([1], c.cache), {}),
    "paged_kv_cache: torch.bfloat16 (dtype), must be plan's kv_data_type": (
        ValueError, lambda c: (c.q, [t.bfloat16() for t in c.cache]), {},
    ),
    "paged_kv_cache: 2 (rows per page), must be plan's page_size, 4": (
        ValueError, lambda c: (c.q, [t[:, :2] for t in c.cache]), {},
    ),
    "paged_kv_cache: 1 (heads), must be plan's num_kv_heads, 2": (
        ValueError, lambda c: (c.q, [t[:, :, :1] for t in c.cache]), {},
    ),
    "paged_kv_cache: 32 (elements per head), must be plan's head_dim_vo, 64": (
        ValueError, lambda c: (c.q, (c.cache[0], c.cache[1][..., :32])), {},
    ),
    "paged_kv_cache: shape (11, 4, 2, 64), must have 5": (ValueError, lambda c: (c.q, c.cache[0]), {}),
    "q_scale: shape (2,), must have one element, or be (6,), one per query head": (
        ValueError, lambda c: (c.q, c.cache), dict(q_scale=A_HEAD),
    ),
    "k_scale: shape (6,), must have one element, or be (2,), one per KV head": (
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
    "q_scale: nan, must be finite": (ValueError, lambda c: (c.q, c.cache), dict(q_scale=torch.tensor(NAN))),
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
        ("k: 26 rows, must be at least the last of plan's kv_indptr, 27", ValueError, dict(k=case.k[1:], v=case.v[1:])),
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
        ("q: 6 rows, must be at most the 5 rows of k", ValueError, dict(q=q.repeat(2, 1, 1), causal=True)),
        ("custom_mask: 12 elements, must be 15", ValueError, dict(custom_mask=m[:, :4])),
        *(
            (
                f"custom_mask: shape {shape}, must be (3, 5) (query rows, keys; or (15,))",
                ValueError,
                {"custom_mask": m.reshape(shape)},
            )
            for shape in ((5, 3), (1, 15), (15, 1), (3, 5, 1))
        ),
        ("packed_custom_mask: 1 elements, must be 2", ValueError, dict(packed_custom_mask=BYTES[:1])),
        ("scale_k: another name of k_scale", ValueError, dict(k_scale=1.0, scale_k=1.0)),
        ("v_scale: shape (6,)", ValueError, dict(scale_v=torch.ones(HQ))),
        ("q: 6 heads, must be a multiple of k, v's 4", ValueError, dict(k=k.repeat(1, 2, 1), v=v.repeat(1, 2, 1))),
        (
            "q: 6 heads, must be a multiple of k, v's 4",
            ValueError,
            dict(k=k.repeat(1, 2, 1), v=v.repeat(1, 2, 1), q_scale=torch.ones(6), k_scale=torch.ones(4)),
        ),
        ("kv_cache_sf: K is Tensor, must be None", ValueError, dict(kv_cache_sf=(k, v))),
        ("kv_cache_sf (V): NoneType", TypeError, dict(kv_cache_sf=(k, None))),
        (
            "o_dtype: torch.float8_e5m2 (the query's, by default), must be one of",
            ValueError,
            dict(zip("qkv", (t.to(torch.float8_e5m2) for t in (q, k, v)))),
        ),
    ):
        with pytest.raises(error) as found:
            single_prefill_with_kv_cache(**dict(q=q, k=k, v=v) | change)
        assert str(found.value).startswith(message), str(found.value)


def test_grad_is_refused():
    case = Case()
    with pytest.raises(RuntimeError, match="q: requires grad"):
        case.ragged().run(case.q.requires_grad_(), case.k, case.v)
