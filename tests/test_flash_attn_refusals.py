"""What FlashAttention's functions refuse, and that nothing is written before."""

import pytest
import torch

from tests.flash_attn_batches import BATCH, E4M3, EQUAL, HALF, HKV, HQ, INF, SINKS, D, appended, equal, ints, starts_of
from wrappers import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

# ---- before anything is written


TABLE = torch.zeros(64, 32, dtype=HALF)
BAD_APPENDS = {
    "softcap: -1.0": {"softcap": -1.0},
    "k: None|k: NoneType": {"k": None},
    "v: NoneType": {"v": None},
    "cache_seqlens: None, required if k is given": {"cache_seqlens": None},
    "k: shape": {"k": torch.zeros(3, 2, HKV, 32, dtype=HALF)},
    "v: shape": {"v": torch.zeros(3, 1, HKV, D, dtype=HALF)},
    "k: dtype torch.float32, must be that of k_cache": {"k": torch.zeros(3, 2, HKV, D)},
    "cache_seqlens \\+ new keys: 102 of request 1, must be in": {"cache_seqlens": ints(5, 100, 0)},
    "block_table: -3 in column 0 of request 0": {"block_table": torch.full((3, 5), -3, dtype=torch.int32)},
    "out: dtype": {"out": torch.zeros(3, 2, HQ, D)},
    "window_size": {"window_size": (1, 1), "causal": False},
    "rotary_seqlens: Tensor, not supported": {"rotary_seqlens": ints(1, 1, 1)},
    "cache_leftpad: given with block_table, not supported": {"cache_leftpad": ints(1, 1, 1)},
    "rotary_sin: None, rotary_cos and rotary_sin must be given together": {"rotary_cos": TABLE},
    "rotary_cos: shape \\(64,\\), must have 2 dimensions": {"rotary_cos": TABLE[:, 0], "rotary_sin": TABLE},
    "rotary_cos: shape \\(19, 32\\), must have at least 20 rows": {"rotary_cos": TABLE[:19], "rotary_sin": TABLE},
    "rotary_cos: dtype torch.float32, must be one of torch.float16": {
        "rotary_cos": TABLE.float(), "rotary_sin": TABLE.float()},
    "rotary_sin: shape \\(64, 24\\), must be \\(64, 32\\)": {"rotary_cos": TABLE, "rotary_sin": TABLE[:, :24]},
    "rotary_cos: shape \\(64, 20\\), must be \\(at least 1, a multiple of 8 up to half head_dim 64": {
        "rotary_cos": TABLE[:, :20], "rotary_sin": TABLE[:, :20]},
    "rotary_cos: strides \\(34, 1\\), rows must begin at multiples of 8 bytes": {
        "rotary_cos": torch.zeros(64, 34, dtype=HALF)[:, :32], "rotary_sin": TABLE},
    "rotary_interleaved: 1, must be True or False": {"rotary_interleaved": 1},
    "rotary_cos: queries that all stand at one position are not supported": {
        "rotary_cos": TABLE, "rotary_sin": TABLE, "causal": False},
    "k: None.*|rotary_cos: given without k": {"k": None, "v": None, "rotary_cos": TABLE, "rotary_sin": TABLE},
    "s_aux: shape": {"s_aux": torch.zeros(3)},
    "k: shape .*, must have 3 dimensions": {"cu_seqlens_k_new": ints(0, 2, 4, 6)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_APPENDS)
def test_nothing_is_written_before_a_refusal(message):
    given, *_ = appended("equal")
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^({message})"):
        flash_attn_with_kvcache(**given | BAD_APPENDS[message])
    assert torch.equal(given["k_cache"], before[0]) and torch.equal(given["v_cache"], before[1])


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


def test_grad_is_refused_before_anything_is_written():
    given, *_ = appended("equal")
    before = given["k_cache"].clone()
    for name in ("q", "k", "v"):
        with pytest.raises(RuntimeError, match=f"^{name}: requires grad"):
            flash_attn_with_kvcache(**given | {name: given[name].clone().requires_grad_()})
    assert torch.equal(given["k_cache"], before)


# ---- by name, type, shape and value


def table_call(change):
    given = {
        "q": BATCH.q, "k": BATCH.paged[0], "v": BATCH.paged[1], "cu_seqlens_q": BATCH.q_starts, "causal": True,
        "max_seqlen_q": 3, "seqused_k": BATCH.lens, "block_table": BATCH.table,
    }  # fmt: skip
    return flash_attn_varlen_func(**given | change)


def row_call(change):
    given = {"q": BATCH.q, "k": BATCH.k, "v": BATCH.v, "cu_seqlens_q": BATCH.q_starts, "cu_seqlens_k": BATCH.k_starts}
    return flash_attn_varlen_func(**given | change)


def cache_call(change):
    given = {"q": equal(EQUAL.q), "k_cache": EQUAL.dense[0], "v_cache": EQUAL.dense[1], "cache_seqlens": EQUAL.lens}
    return flash_attn_with_kvcache(**given | change)


def plain_call(change):
    q = equal(EQUAL.q)
    return flash_attn_func(**{"q": q, "k": q[:, :, :HKV], "v": q[:, :, :HKV]} | change)


REQUEST = torch.rand(4, HKV)
LOW = {"k": BATCH.paged[0].to(E4M3), "v": BATCH.paged[1].to(E4M3)}
REFUSALS = [
    (table_call, {"cu_seqlens_q": 3}, TypeError, "cu_seqlens_q: int, must be a torch.Tensor"),  # vLLM's order
    (table_call, {"cu_seqlens_q": BATCH.q_starts.long()}, TypeError, "cu_seqlens_q: dtype torch.int64"),
    (table_call, {"cu_seqlens_q": BATCH.q_starts[:3]}, ValueError, "cu_seqlens_q: shape .3,., must be .5,."),
    (table_call, {"q": BATCH.q[0]}, ValueError, "q: shape .* must have 3 dimensions"),
    (table_call, {"q": BATCH.q.float()}, TypeError, "q: dtype torch.float32"),
    (table_call, {"k": BATCH.k}, ValueError, "k, v .K.: shape .* must have 4 dimensions"),
    (table_call, {"seqused_k": BATCH.lens.long()}, TypeError, "seqused_k: dtype torch.int64"),
    (table_call, {"seqused_k": ints(9, 4, 99, 1)}, ValueError, "seqused_k: 99 of request 2"),
    (table_call, {"seqused_k": None}, TypeError, "cu_seqlens_k: NoneType, must be a torch.Tensor"),
    (table_call, {"seqused_k": None, "cu_seqlens_k": starts_of((9, 4, 99, 1))}, ValueError, "cu_seqlens_k: 99 of req"),
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
    (table_call, LOW | {"k_descale": REQUEST}, NotImplementedError, "k_descale: shape .* of strides .2, 1., one per r"),
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
    (cache_call, {"cache_batch_idx": ints(0, 1)}, ValueError, "cache_batch_idx: shape .2,., must be .3,."),
    (cache_call, {"block_table": EQUAL.table, "cache_batch_idx": ints(0, 1, 2)}, ValueError,
     "cache_batch_idx: given, must be None with block_table"),
    (cache_call, {"cache_leftpad": EQUAL.lens + 1}, ValueError, "cache_leftpad: 10 of request 0, must be in .0, 9."),
    (plain_call, {"cache_leftpad": EQUAL.lens}, NotImplementedError, "cache_leftpad: Tensor, not supported"),
    (row_call, {"cache_leftpad": BATCH.lens}, NotImplementedError, "cache_leftpad: Tensor, not supported"),
    (cache_call, {"attention_chunk": -1}, ValueError, "attention_chunk: -1, must be"),
    (cache_call, {"qv": EQUAL.q}, NotImplementedError, "qv: Tensor, not supported"),
    (cache_call, {"out": torch.empty(4, 3, HQ, D).half()[:3, :2]}, ValueError, "out: strides .*, the first must be 2"),
    (plain_call, {"k": EQUAL.k}, ValueError, "k: shape .* must have 4 dimensions"),
    (plain_call, {"k": equal(EQUAL.q)[:2]}, ValueError, "v: shape .*, must be .2,"),
    (plain_call, {"unknown": 1}, TypeError, "flash_attn_func.. got an unexpected keyword argument 'unknown'"),
]  # fmt: skip


@pytest.mark.parametrize("call,change,error,message", REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(call, change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(change)


def test_what_refusals_change_is_served():
    for call in (table_call, row_call, cache_call, plain_call):
        call({})
