"""What FlashAttention's functions, FlashInfer's prefill classes and its function of one request refuse, by
the caller's names, and that nothing is written before."""

import re

import pytest
import torch

from tests.support import flash_attn_batches as flash
from tests.support.bad_values import contents
from tests.support.flash_attn_batches import BATCH, EQUAL, SINKS, appended, equal, starts_of
from tests.support.prefill_batches import BF16, E4M3, HALF, HKV, HQ, INF, NAN, WORKSPACE, Case, D, ints
from wrappers import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    single_prefill_with_kv_cache,
)

REFUSED = TypeError, ValueError, NotImplementedError


# ---- good calls: each returns (function, arguments)


def append_call():
    return flash_attn_with_kvcache, appended("equal")[0]


def table_call():
    return flash_attn_varlen_func, {
        "q": BATCH.q, "k": BATCH.paged[0], "v": BATCH.paged[1], "cu_seqlens_q": BATCH.q_starts, "causal": True,
        "max_seqlen_q": 3, "seqused_k": BATCH.lens, "block_table": BATCH.table,
    }  # fmt: skip


def row_call():
    given = {"q": BATCH.q, "k": BATCH.k, "v": BATCH.v, "cu_seqlens_q": BATCH.q_starts, "cu_seqlens_k": BATCH.k_starts}
    return flash_attn_varlen_func, given


def cache_call():
    given = {"q": equal(EQUAL.q), "k_cache": EQUAL.dense[0], "v_cache": EQUAL.dense[1], "cache_seqlens": EQUAL.lens}
    return flash_attn_with_kvcache, given


def plain_call():
    q = equal(EQUAL.q)
    return flash_attn_func, {"q": q, "k": q[:, :, :HKV], "v": q[:, :, :HKV]}


def plan_call():
    given = dict(zip(BatchPrefillWithPagedKVCacheWrapper._NAMES, CASE.index))
    given |= dict(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=D, page_size=4)
    return BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).plan, given


def paged_call():
    return (lambda q, cache, **options: CASE.paged().run(q, cache, **options)), {"q": CASE.q, "cache": CASE.cache}


def ragged_call():
    return CASE.ragged().run, {"q": CASE.q, "k": CASE.k, "v": CASE.v}


def single_call():
    return single_prefill_with_kv_cache, {"q": Q, "k": K, "v": V}


# ---- what is refused: (good call, the arguments that change, error, how the message begins)

CASE = Case()
Q, K, V, M = next(iter(CASE.requests()))
BYTES, LONG, A_HEAD = torch.ones(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), torch.ones(HKV)
TABLE, REQUEST = torch.zeros(64, 32, dtype=HALF), torch.rand(4, HKV)
LOW = {"k": BATCH.paged[0].to(E4M3), "v": BATCH.paged[1].to(E4M3)}
PREFILL = [
    (plan_call, dict(head_dim=None), TypeError, "head_dim: None"),
    (plan_call, dict(head_dim_qk=64), ValueError, "head_dim_qk: another name of head_dim"),
    (plan_call, dict(num_qo_heads=5), ValueError, "num_qo_heads: 5, must be a multiple of num_kv_heads, 2"),
    (plan_call, dict(num_kv_heads=0), ValueError, "num_kv_heads: 0, must be at least 1"),
    (plan_call, dict(page_size=0), ValueError, "page_size: 0, must be at least 1"),
    (plan_call, dict(page_size=None), TypeError, "page_size: None"),
    (plan_call, dict(qo_indptr=[0, 1]), TypeError, "qo_indptr: list, must be a torch.Tensor"),
    (plan_call, dict(qo_indptr=LONG), TypeError, "qo_indptr: dtype torch.int64"),
    (plan_call, dict(qo_indptr=ints([])), ValueError, "qo_indptr: shape (0,)"),
    (plan_call, dict(paged_kv_indptr=ints([0, 1])), ValueError, "paged_kv_indptr: 2 elements, must be 7"),
    (plan_call, dict(paged_kv_indices=ints([0, 1])[None]), ValueError, "paged_kv_indices: shape (1, 2)"),
    (plan_call, dict(paged_kv_last_page_len=ints([1, 1])), ValueError,
     "paged_kv_last_page_len: 2 elements, must be 6"),
    (plan_call, dict(paged_kv_last_page_len=ints([1] * 6).to("meta")), ValueError,
     "paged_kv_last_page_len: device meta"),
    (plan_call, dict(custom_mask=torch.ones(82)), ValueError, "custom_mask: 82 elements, must be 81"),
    (plan_call, dict(custom_mask=torch.ones(9, 9)), ValueError,
     "custom_mask: shape (9, 9), must be (N,): query rows x keys"),
    (plan_call, dict(custom_mask=torch.ones(1, 81)), ValueError, "custom_mask: shape (1, 81), must be (N,)"),
    (plan_call, dict(packed_custom_mask=torch.zeros(12, 1, dtype=torch.uint8)), ValueError,
     "packed_custom_mask: shape (12, 1), must have 1 dim"),
    (plan_call, dict(packed_custom_mask=BYTES), ValueError, "packed_custom_mask: 3 elements, must be 12"),
    (plan_call, dict(packed_custom_mask=BYTES.bool()), TypeError, "packed_custom_mask: dtype torch.bool"),
    (plan_call, dict(custom_mask=torch.ones(81, device="meta")), ValueError, "custom_mask: device meta"),
    (plan_call, dict(causal=1), TypeError, "causal: 1, must be True or False"),
    (plan_call, dict(pos_encoding_mode="ROPE"), KeyError,
     "pos_encoding_mode: 'ROPE', must be one of NONE, ROPE_LLAMA, ALIBI"),
    (plan_call, dict(sm_scale=NAN), ValueError, "sm_scale: nan, must be finite"),
    (plan_call, dict(sm_scale="1"), TypeError, "sm_scale: '1', must be a float"),
    (plan_call, dict(window_left=1.5), TypeError, "window_left: 1.5, must be an int"),
    (plan_call, dict(logits_soft_cap=INF), ValueError, "logits_soft_cap: inf"),
    (plan_call, dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=0), ValueError, "rope_theta: 0.0, must be positive"),
    (plan_call, dict(q_data_type="half_float"), KeyError, "q_data_type: 'half_float'"),
    (plan_call, dict(q_data_type=16), TypeError, "q_data_type: 16"),
    (plan_call, dict(q_data_type="float32"), TypeError, "q_data_type: torch.float32"),
    (plan_call, dict(kv_data_type=BF16), TypeError, "kv_data_type: torch.bfloat16"),
    (plan_call, dict(q_data_type="float8_e5m2", kv_data_type=E4M3, o_data_type=HALF), TypeError,
     "kv_data_type: torch.float8_e4m3fn, must be torch.float8_e5m2"),
    (plan_call, dict(q_data_type=E4M3, kv_data_type=HALF), TypeError,
     "kv_data_type: torch.float16, must be one of torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, "
     "torch.uint8"),
    (plan_call, dict(q_data_type="float8_e5m2"), TypeError, "o_data_type: torch.float8_e5m2, must be one of"),
    (plan_call, dict(pos_encoding_mode="ROPE_LLAMA", kv_data_type=E4M3), NotImplementedError,
     "pos_encoding_mode: ROPE_LLAMA with"),
    (plan_call, dict(token_pos_in_items_len=3), NotImplementedError, "token_pos_in_items_len: int"),
    (plan_call, dict(prefix_len_ptr=LONG), NotImplementedError, "prefix_len_ptr: Tensor"),
    (plan_call, dict(max_token_per_sequence="x"), TypeError, "max_token_per_sequence: 'x'"),
    (plan_call, dict(max_token_per_sequence=-3), ValueError, "max_token_per_sequence: -3, must be at least 0"),
    (plan_call, dict(o_data_type="float32"), TypeError, "o_data_type: torch.float32, must be one of"),
    (plan_call, dict(rope_scale="x"), TypeError, "rope_scale: 'x', must be a float"),
    (plan_call, dict(qo_indptr=ints([0, 5, 3, 10, 11, 13, 17])), ValueError, "qo_indptr[2]: 3, must be at least 5"),
    (plan_call, dict(qo_indptr=ints([-3, 3, 3, 10, 11, 13, 17])), ValueError, "qo_indptr[0]: -3, must be at least 0"),
    (plan_call, dict(paged_kv_indptr=ints([3, 2, 4, 4, 4, 4, 4])), ValueError,
     "paged_kv_indptr[1]: 2, must be at least 3"),
    (plan_call, dict(paged_kv_indices=ints(range(8))), ValueError,
     "paged_kv_indices: 8 elements, must be at least 9, the last of paged_kv_indptr"),
    (paged_call, dict(q=CASE.q[1:]), ValueError, "q: 16 (rows), must be plan's last of qo_indptr, 17"),
    (paged_call, dict(q=CASE.q.bfloat16()), ValueError, "q.dtype: torch.bfloat16, must be plan's q_data_type"),
    (paged_call, dict(q=CASE.q[:, :4]), ValueError, "q: 4 (heads), must be plan's num_qo_heads, 6"),
    (paged_call, dict(q=CASE.q[..., :32]), ValueError, "q: 32 (elements per head), must be plan's head_dim, 64"),
    (paged_call, dict(q=CASE.q.flatten(1)), ValueError, "q: shape (17, 384), must have 3"),
    (paged_call, dict(q=[1]), TypeError, "q: list, must be a torch.Tensor"),
    (paged_call, dict(cache=tuple(t.bfloat16() for t in CASE.cache)), ValueError,
     "paged_kv_cache.dtype: torch.bfloat16, must be plan's kv_data_type"),
    (paged_call, dict(cache=tuple(t[:, :2] for t in CASE.cache)), ValueError,
     "paged_kv_cache: 2 (rows per page), must be plan's page_size, 4"),
    (paged_call, dict(cache=tuple(t[:, :, :1] for t in CASE.cache)), ValueError,
     "paged_kv_cache: 1 (heads), must be plan's num_kv_heads, 2"),
    (paged_call, dict(cache=(CASE.cache[0], CASE.cache[1][..., :32])), ValueError,
     "paged_kv_cache: 32 (elements per head), must be plan's head_dim_vo, 64"),
    (paged_call, dict(cache=CASE.cache[0]), ValueError, "paged_kv_cache: shape (11, 4, 2, 64), must have 5"),
    (paged_call, dict(q_scale=A_HEAD), ValueError,
     "q_scale: shape (2,), must have one element, or be (6,), one per query head"),
    (paged_call, dict(k_scale=torch.ones(HQ)), ValueError,
     "k_scale: shape (6,), must have one element, or be (2,), one per KV head"),
    (paged_call, dict(v_scale=A_HEAD[:, None]), ValueError, "v_scale: shape (2, 1), must have one element"),
    (paged_call, dict(v_scale=torch.tensor([1.0, NAN])), ValueError, "v_scale: nan of query head 3, must be finite"),
    (paged_call, dict(q_scale=1.0, k_scale=1.0, v_scale=1.0, return_lse=1.0), ValueError,
     "scale_q: another name of q_scale"),
    (paged_call, dict(kv_cache_sf=(A_HEAD, A_HEAD), kv_block_scales=(A_HEAD, A_HEAD)), ValueError,
     "kv_block_scales: another name of kv_cache_sf"),
    (paged_call, dict(v_scales_interleaved=True), ValueError, "v_scales_interleaved: True, must be False"),
    (paged_call, dict(q_scale=torch.ones(1).double()), TypeError, "q_scale: dtype torch.float64"),
    (paged_call, dict(k_scale=torch.ones(1, device="meta")), ValueError, "k_scale: device meta"),
    (paged_call, dict(v_scale="2"), TypeError, "v_scale: '2', must be a float"),
    (paged_call, dict(k_scale=NAN), ValueError, "k_scale: nan, must be finite"),
    (paged_call, dict(q_scale=INF), ValueError, "q_scale: inf, must be finite"),
    (paged_call, dict(q_scale=torch.tensor(NAN)), ValueError, "q_scale: nan, must be finite"),
    (paged_call, dict(window_left=5), ValueError, "window_left: 5, must be None or plan's, -1"),
    (paged_call, dict(sinks=A_HEAD), ValueError, "sinks: shape (2,)"),
    (paged_call, dict(out=torch.empty(17, HQ, D).bfloat16()), TypeError, "out: dtype torch.bfloat16"),
    (paged_call, dict(out=torch.empty(1, HQ, D).half()), ValueError, "out: shape (1, 6, 64)"),
    (paged_call, dict(lse=torch.empty(17, 1)), ValueError, "lse: shape (17, 1)"),
    (paged_call, dict(return_lse=1), TypeError, "return_lse: 1, must be"),
    (paged_call, dict(use_fp16_softmax=True), NotImplementedError, "use_fp16_softmax: bool"),
    (ragged_call, dict(k=CASE.k[0]), ValueError, "k: shape"),
    (ragged_call, dict(q=CASE.q[:1]), ValueError, "q: 1 (rows)"),
    (ragged_call, dict(k=CASE.k[:, :1], v=CASE.v[:, :1]), ValueError, "k, v: 1 (heads)"),
    (ragged_call, dict(kv_cache_sf=LONG), TypeError, "kv_cache_sf: Tensor, must be (k, v)"),
    (ragged_call, dict(kv_cache_sf=(CASE.k, CASE.v)), ValueError, "kv_cache_sf: K is Tensor, must be None"),
    (ragged_call, dict(k=CASE.k[1:], v=CASE.v[1:]), ValueError,
     "k: 26 rows, must be at least the last of plan's kv_indptr, 27"),
    (ragged_call, dict(o_scale=2.0), NotImplementedError, "o_scale: float"),
    (ragged_call, dict(o_scale=torch.ones(2)), NotImplementedError, "o_scale: Tensor"),
    (ragged_call, dict(k_scale=torch.ones(3)), ValueError, "k_scale: shape (3,)"),
    (ragged_call, dict(scale_v=1.0, v_scale=1.0), ValueError, "scale_v: another name of v_scale"),
    (single_call, dict(q=None), TypeError, "q: NoneType"),
    (single_call, dict(k=K.flatten(1)), ValueError, "k: shape (5, 128)"),
    (single_call, dict(q=Q.repeat(2, 1, 1), causal=True), ValueError, "q: 6 rows, must be at most the 5 rows of k"),
    (single_call, dict(custom_mask=M[:, :4]), ValueError, "custom_mask: 12 elements, must be 15"),
    *((single_call, dict(custom_mask=M.reshape(shape)), ValueError,
       f"custom_mask: shape {shape}, must be (3, 5) (query rows, keys; or (15,))")
      for shape in ((5, 3), (1, 15), (15, 1), (3, 5, 1))),
    (single_call, dict(packed_custom_mask=BYTES[:1]), ValueError, "packed_custom_mask: 1 elements, must be 2"),
    (single_call, dict(k_scale=1.0, scale_k=1.0), ValueError, "scale_k: another name of k_scale"),
    (single_call, dict(scale_v=torch.ones(HQ)), ValueError, "v_scale: shape (6,)"),
    (single_call, dict(k=K.repeat(1, 2, 1), v=V.repeat(1, 2, 1)), ValueError,
     "q: 6 heads, must be a multiple of k, v's 4"),
    (single_call,
     dict(k=K.repeat(1, 2, 1), v=V.repeat(1, 2, 1), q_scale=torch.ones(6), k_scale=torch.ones(4)),
     ValueError, "q: 6 heads, must be a multiple of k, v's 4"),
    (single_call, dict(kv_cache_sf=(K, V)), ValueError, "kv_cache_sf: K is Tensor, must be None"),
    (single_call, dict(kv_cache_sf=(K, None)), TypeError, "kv_cache_sf (V): NoneType"),
    (single_call, dict(zip("qkv", (t.to(torch.float8_e5m2) for t in (Q, K, V)))), ValueError,
     "o_dtype: torch.float8_e5m2 (the query's, by default), must be one of"),
]  # fmt: skip
FLASH = [  # messages are regular expressions
    (append_call, {"softcap": -1.0}, REFUSED, "softcap: -1.0"),
    (append_call, {"k": None}, REFUSED, "k: None|k: NoneType"),
    (append_call, {"v": None}, REFUSED, "v: NoneType"),
    (append_call, {"cache_seqlens": None}, REFUSED, "cache_seqlens: None, required if k is given"),
    (append_call, {"k": torch.zeros(3, 2, HKV, 32, dtype=HALF)}, REFUSED, "k: shape"),
    (append_call, {"v": torch.zeros(3, 1, HKV, D, dtype=HALF)}, REFUSED, "v: shape"),
    (append_call, {"k": torch.zeros(3, 2, HKV, D)}, REFUSED, "k: dtype torch.float32, must be that of k_cache"),
    (append_call, {"cache_seqlens": flash.ints(5, 100, 0)}, REFUSED,
     "cache_seqlens \\+ new keys: 102 of request 1, must be in"),
    (append_call, {"block_table": torch.full((3, 5), -3, dtype=torch.int32)}, REFUSED,
     "block_table: -3 in column 0 of request 0"),
    (append_call, {"out": torch.zeros(3, 2, flash.HQ, D)}, REFUSED, "out: dtype"),
    (append_call, {"window_size": (1, 1), "causal": False}, REFUSED, "window_size"),
    (append_call, {"rotary_seqlens": flash.ints(1, 1, 1)}, REFUSED, "rotary_seqlens: Tensor, not supported"),
    (append_call, {"cache_leftpad": flash.ints(1, 1, 1)}, REFUSED,
     "cache_leftpad: given with block_table, not supported"),
    (append_call, {"rotary_cos": TABLE}, REFUSED,
     "rotary_sin: None, rotary_cos and rotary_sin must be given together"),
    (append_call, {"rotary_cos": TABLE[:, 0], "rotary_sin": TABLE}, REFUSED,
     "rotary_cos: shape \\(64,\\), must have 2 dimensions"),
    (append_call, {"rotary_cos": TABLE[:19], "rotary_sin": TABLE}, REFUSED,
     "rotary_cos: shape \\(19, 32\\), must have at least 20 rows"),
    (append_call, { "rotary_cos": TABLE.float(), "rotary_sin": TABLE.float()}, REFUSED,
     "rotary_cos: dtype torch.float32, must be torch.float16"),
    (append_call, {"rotary_cos": TABLE, "rotary_sin": TABLE[:, :24]}, REFUSED,
     "rotary_sin: shape \\(64, 24\\), must be \\(64, 32\\)"),
    (append_call, { "rotary_cos": TABLE[:, :20], "rotary_sin": TABLE[:, :20]}, REFUSED,
     "rotary_cos: shape \\(64, 20\\), must be \\(at least 1, a multiple of 8 up to half head_dim 64"),
    (append_call, { "rotary_cos": torch.zeros(64, 34, dtype=HALF)[:, :32], "rotary_sin": TABLE}, REFUSED,
     "rotary_cos: strides \\(34, 1\\), rows must begin at multiples of 8 bytes"),
    (append_call, {"rotary_interleaved": 1}, REFUSED, "rotary_interleaved: 1, must be True or False"),
    (append_call, { "rotary_cos": TABLE, "rotary_sin": TABLE, "causal": False}, REFUSED,
     "rotary_cos: queries that all stand at one position are not supported"),
    (append_call, {"k": None, "v": None, "rotary_cos": TABLE, "rotary_sin": TABLE}, REFUSED,
     "k: None.*|rotary_cos: given without k"),
    (append_call, {"s_aux": torch.zeros(3)}, REFUSED, "s_aux: shape"),
    (append_call, {"cu_seqlens_k_new": flash.ints(0, 2, 4, 6)}, REFUSED, "k: shape .*, must have 3 dimensions"),
    (table_call, {"cu_seqlens_q": 3}, TypeError, "cu_seqlens_q: int, must be a torch.Tensor"),
    (table_call, {"cu_seqlens_q": BATCH.q_starts.long()}, TypeError, "cu_seqlens_q: dtype torch.int64"),
    (table_call, {"cu_seqlens_q": BATCH.q_starts[:3]}, ValueError, "cu_seqlens_q: shape .3,., must be .5,."),
    (table_call, {"q": BATCH.q[0]}, ValueError, "q: shape .* must have 3 dimensions"),
    (table_call, {"q": BATCH.q.float()}, TypeError, "q: dtype torch.float32"),
    (table_call, {"k": BATCH.k}, ValueError, "k, v .K.: shape .* must have 4 dimensions"),
    (table_call, {"seqused_k": BATCH.lens.long()}, TypeError, "seqused_k: dtype torch.int64"),
    (table_call, {"seqused_k": flash.ints(9, 4, 99, 1)}, ValueError, "seqused_k: 99 of request 2"),
    (table_call, {"seqused_k": None}, TypeError, "cu_seqlens_k: NoneType, must be a torch.Tensor"),
    (table_call, {"seqused_k": None, "cu_seqlens_k": starts_of((9, 4, 99, 1))}, ValueError,
     "cu_seqlens_k: 99 of req"),
    (table_call, {"page_table": BATCH.table}, ValueError, "page_table: another name of block_table, only one"),
    (table_call, {"block_table": BATCH.table[0]}, ValueError, "block_table: shape .*, must have 2 dimensions"),
    (table_call, {"block_table": None, "page_table": BATCH.table.long()}, TypeError, "page_table: dtype torch.int64"),
    (table_call, {"block_table": None, "page_table": BATCH.table + 99}, ValueError, "page_table: .* in column 0"),
    (table_call, {"block_table": None}, NotImplementedError, "seqused_k: given without block_table, not supported"),
    (table_call, {"window_size": (4, 4), "causal": False}, NotImplementedError, "window_size: .4, 4., a window"),
    (table_call, {"window_size": 4}, TypeError, "window_size: 4, must be .left, right."),
    (table_call, {"window_size": (4.0, 0)}, TypeError, "window_size: 4.0, must be an int"),
    (table_call, {"causal": None}, TypeError, "causal: None, must be True or False"),
    (table_call, {"causal": torch.tensor([True] * 4)}, TypeError, "causal: tensor.*, must be True or False"),
    (table_call, {"softcap": -1.0}, ValueError, "softcap: -1.0, must be None, 0"),
    (table_call, {"softmax_scale": "1"}, TypeError, "softmax_scale: '1', must be a float"),
    (table_call, {"softmax_scale": INF}, ValueError, "softmax_scale: inf, must be finite"),
    (table_call, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q: -1, must be at least 0"),
    (table_call, {"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q: 3.0, must be an int"),
    (table_call, {"return_softmax_lse": 1}, TypeError, "return_softmax_lse: 1, must be True or False"),
    (table_call, {"s_aux": SINKS, "sinks": SINKS}, ValueError, "sinks: another name of s_aux"),
    (table_call, {"sinks": SINKS.double()}, TypeError, "sinks: dtype torch.float64"),
    (table_call, {"sinks": SINKS[:2]}, ValueError, "sinks: shape .2,., must be .4,."),
    (table_call, LOW | {"k_descale": REQUEST}, NotImplementedError,
     "k_descale: shape .* of strides .2, 1., one per r"),
    (table_call, {"k_descale": REQUEST[:, :1]}, ValueError, "k_descale: shape .4, 1., must be .4, 2."),
    (table_call, {"v_descale": REQUEST.half()}, TypeError, "v_descale: dtype torch.float16"),
    (table_call, {"q_descale": 0.5}, TypeError, "q_descale: float, must be a torch.Tensor"),
    (table_call, {"out": BATCH.q}, ValueError, "out: shape .* overlaps the memory of q"),
    (table_call, {"out": BATCH.q[:2]}, ValueError, "out: shape .2, 4, 64."),
    (table_call, {"num_splits": -1}, ValueError, "num_splits: -1, must be at least 0"),
    (table_call, {"num_splits": None}, TypeError, "num_splits: None, must be an int"),
    (table_call, {"dropout_p": 0.1}, NotImplementedError, "dropout_p: 0.1, not supported, must be 0.0"),
    (table_call, {"alibi_slopes": SINKS}, NotImplementedError, "alibi_slopes: Tensor, not supported, must be None"),
    (table_call, {"cp_world_size": 2}, NotImplementedError, "cp_world_size: 2, not supported, must be 1"),
    (table_call, {"mask_mod": len}, NotImplementedError, "mask_mod: builtin_function.*, not supported"),
    (table_call, {"return_attn_probs": True}, NotImplementedError, "return_attn_probs: True, not supported"),
    (table_call, {"seqused_q": BATCH.lens}, NotImplementedError, "seqused_q: Tensor, not supported"),
    (table_call, {"num_split": 1}, TypeError, "flash_attn_varlen_func.. got an unexpected keyword argument"),
    (row_call, {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k: NoneType"),
    (row_call, {"cu_seqlens_k": starts_of((9, 4, 17, 2))}, ValueError, "cu_seqlens_k.4.: 32 of request 3"),
    (row_call, {"cu_seqlens_q": starts_of((3, 0, 1, 9))}, ValueError, "cu_seqlens_q.4.: 13 of request 3"),
    (row_call, {"k": BATCH.paged[0]}, ValueError, "k: shape .* must have 3 dimensions"),
    (row_call, {"v": BATCH.v[:5]}, ValueError, "k, v: K .* and V .* may differ in the last dimension only"),
    (row_call, {"k": BATCH.k.to(E4M3)}, TypeError, "k, v: K is .* and V .*, must be the same"),
    (row_call, {"k": BATCH.k[..., :32], "v": BATCH.v[..., :32]}, ValueError, "k, v: K has head_dim 32"),
    (cache_call, {"q": EQUAL.q}, ValueError, "q: shape .* must have 4 dimensions"),
    (cache_call, {"q": equal(EQUAL.q)[:2]}, ValueError, "k_cache: shape .3,.*, must have the 2 requests of q"),
    (cache_call, {"v_cache": EQUAL.dense[1][:2]}, ValueError, "v_cache: shape .2,"),
    (cache_call, {"cache_seqlens": 99}, ValueError, "cache_seqlens: 99, must be at most 24"),
    (cache_call, {"cache_seqlens": -1}, ValueError, "cache_seqlens: -1, must be at least 0"),
    (cache_call, {"cache_seqlens": 2.0}, TypeError, "cache_seqlens: 2.0, must be an int"),
    (cache_call, {"cache_seqlens": EQUAL.lens[:2]}, ValueError, "cache_seqlens: shape .2,., must be .3,."),
    (cache_call, {"cache_seqlens": EQUAL.lens + 20}, ValueError, "cache_seqlens: 29 of request 0"),
    (cache_call, {"cache_batch_idx": flash.ints(0, 1)}, ValueError, "cache_batch_idx: shape .2,., must be .3,."),
    (cache_call, {"block_table": EQUAL.table, "cache_batch_idx": flash.ints(0, 1, 2)}, ValueError,
     "cache_batch_idx: given, must be None with block_table"),
    (cache_call, {"cache_leftpad": EQUAL.lens + 1}, ValueError, "cache_leftpad: 10 of request 0, must be in .0, 9."),
    (plain_call, {"cache_leftpad": EQUAL.lens}, NotImplementedError, "cache_leftpad: Tensor, not supported"),
    (row_call, {"cache_leftpad": BATCH.lens}, NotImplementedError, "cache_leftpad: Tensor, not supported"),
    (cache_call, {"attention_chunk": -1}, ValueError, "attention_chunk: -1, must be"),
    (cache_call, {"qv": EQUAL.q}, ValueError, "qv: shape .* must have 4 dimensions"),
    (cache_call, {"out": torch.empty(4, 3, flash.HQ, D).half()[:3, :2]}, ValueError,
     "out: strides .*, the first must be 2"),
    (plain_call, {"k": EQUAL.k}, ValueError, "k: shape .* must have 4 dimensions"),
    (plain_call, {"k": equal(EQUAL.q)[:2]}, ValueError, "v: shape .*, must be .2,"),
    (plain_call, {"unknown": 1}, TypeError, "flash_attn_func.. got an unexpected keyword argument 'unknown'"),
]  # fmt: skip
REFUSALS = [*((*row[:3], re.escape(row[3])) for row in PREFILL), *FLASH]


@pytest.mark.parametrize("call,change,error,message", REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(call, change, error, message):
    function, good = call()
    given = good | change
    before = contents(given)
    with pytest.raises(error) as found:
        function(**given)
    assert re.match(message, str(found.value).strip('"')), str(found.value)
    assert contents(given) == before


@pytest.mark.parametrize("call", dict.fromkeys(row[0] for row in REFUSALS))
def test_what_refusals_change_is_served(call):
    function, good = call()
    function(**good)


def test_nothing_is_written_where_no_kernel_serves(launches):
    given, *_ = appended("equal")
    narrow = {name: given[name][..., :40].contiguous() for name in ("q", "k", "v", "k_cache", "v_cache")}
    for change, message in (
        ({"softmax_scale": -1.0}, "softmax_scale: -1.0, must be positive on CUDA"),
        (narrow, "q: no attention kernel"),
    ):
        bad = given | change
        before = bad["k_cache"].clone()
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            flash_attn_with_kvcache(**bad)
        assert torch.equal(bad["k_cache"], before) and not launches
    flash_attn_with_kvcache(**given)
    assert len(launches) == 2  # rows, then attention


def test_caches_that_would_be_read_while_they_are_written():
    given, *_ = appended("equal")
    given["k"] = given["k_cache"].view(-1, HKV, D)[:6].view(3, 2, HKV, D)
    with pytest.raises(ValueError, match="^k_cache: shape .* overlaps the memory of k, must not overlap it"):
        flash_attn_with_kvcache(**given)


def test_grad_is_refused():
    for call, names in ((append_call, "qkv"), (ragged_call, "q")):
        for name in names:
            function, good = call()
            before = contents(good)
            with pytest.raises(RuntimeError, match=f"^{name}: requires grad"):
                function(**good | {name: good[name].clone().requires_grad_()})
            assert contents(good) == before


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
