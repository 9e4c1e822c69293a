"""What a type checker knows of the results of calls: mypy reads this file with the product, and nobody runs it.

A flag without a value or False gives the output, True gives (output, lse); see `tools.stubs`.
"""

from typing import Any

from torch import Tensor
from typing_extensions import assert_type

import wrappers
from wrappers import flash_attn_func as dense
from wrappers import flash_attn_varlen_func as varlen
from wrappers import flash_attn_with_kvcache as cached
from wrappers import single_decode_with_kv_cache as single_decode
from wrappers import single_prefill_with_kv_cache as single
from wrappers import trtllm_batch_context_with_kv_cache as context
from wrappers import trtllm_batch_decode_with_kv_cache as decode_of

Pair = tuple[Tensor, Tensor]


def functions(t: Tensor, flag: bool, fp4: wrappers.FP4Tensor) -> None:
    assert_type(context(t, t, t, t, t, 1, None, 1.0, 1.0, 1, t, None), Tensor)
    assert_type(context(t, t, t, t, t, 1, None, 1.0, 1.0, 1, t, None, return_lse=True), Pair)
    assert_type(context(t, t, t, t, t, 1, None, 1.0, 1.0, 1, t, None, return_lse=flag), Any)
    assert_type(context(t, t, t, t, t, 1, None, 1.0, 1.0, 1, t, None, out=fp4), Any)
    assert_type(context(t, t, t, t, t, 1, None, 1.0, 1.0, 1, t, None, out=t), Tensor)
    assert_type(decode_of(t, t, t, t, t, None), Tensor)
    assert_type(decode_of(t, (t, t), None, t, t, 9, return_lse=True), Pair)
    assert_type(single(t, t, t), Tensor)
    assert_type(single(t, t, t, return_lse=True), Pair)
    assert_type(single(t, t, t, t, t, flag, "NHD", "NONE", flag, 1.0, -1, None, 1.0, 1e4, True), Pair)
    assert_type(single_decode(t, t, t, window_left=3), Tensor)
    assert_type(single_decode(t, t, t, return_lse=True), Pair)
    assert_type(varlen(t, t, t, t, causal=True, fa_version=3), Tensor)
    assert_type(varlen(t, t, t, t, return_softmax_lse=True), Pair)
    assert_type(cached(t, t, t, return_lse=True), Pair)
    assert_type(dense(t, t, t), Tensor)
    assert_type(dense(t, t, t, return_softmax_lse=flag), Any)


def classes(t: Tensor, flag: bool) -> None:
    paged = wrappers.BatchPrefillWithPagedKVCacheWrapper(t)
    sinks = wrappers.BatchAttentionWithAttentionSinkWrapper(t)
    ragged = wrappers.BatchPrefillWithRaggedKVCacheWrapper(t)
    decode = wrappers.BatchDecodeWithPagedKVCacheWrapper(t)
    ranged = wrappers.BatchPrefillWithCausalBidirectionalRangesWrapper(t)
    assert_type(paged.run(t, (t, t)), Tensor)
    assert_type(paged.run(t, t, return_lse=True), Pair)
    assert_type(paged.run(t, t, None, 1.0, True), Pair)
    assert_type(paged.forward(t, t, causal=True), Tensor)
    assert_type(sinks.run(t, t, t, 1.0), Tensor)
    assert_type(sinks.run(t, t, t, 1.0, return_lse=True, k_scale=t), Pair)
    assert_type(ragged.run(t, t, t), Tensor)
    assert_type(ragged.run(t, t, t, True), Pair)
    assert_type(decode.run(t, t), Tensor)
    assert_type(decode.run(t, t, return_lse=True), Pair)
    assert_type(ranged.run(t, t, t, return_lse=True), Pair)
