"""DeepGEMM's functions: logits of the indexer of sparse attention, for prompts (ragged) and over a paged cache.

Two versions of DeepGEMM have the `fp8_fp4_` functions with other arguments: that of commit 54e2261 and that in vLLM
0.33. The names of arguments are those of 54e2261; calls by position may follow either.
"""

from typing import Any

import torch

from ..host.checks import (
    FLAGS,
    INTEGERS,
    check_flag,
    check_integer,
    check_one_of,
    check_shape,
    check_strided,
    refuse_flag,
)
from ..host.scalars import integer
from ..indexer.logits import E4M3, PAGED, RAGGED, LogitsCall, check_out_dtype, serve
from ..latent.views import rows_view

BYTES = (torch.uint8, torch.int8, E4M3)  # dtypes of a paged cache
META_SIZE, MOST_SMS = 2, 1 << 16  # of DeepGEMM's schedule


def fp8_mqa_logits(
    q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor, clean_logits: bool = True, max_seqlen_k: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return how well each key suits each query token: fp32 logits over keys in one tensor, for prompts.

    logits[t, j] = kv[1][j] * sum over h of weights[t, h] * max(q[t, h] . kv[0][j], 0), in fp32.

    Args, upstream's order (DeepGEMM):
        q: float8_e4m3fn (T, H, D), any strides, the last 1. H is at most 64 and D is 32, 64 or 128 on a GPU. Scales of
            queries belong into the weights.
        kv: (keys, scales): float8_e4m3fn (S, D), any row stride, and fp32 (S,).
        weights: fp32 (T, H), any strides. Negative numbers and zeros are allowed.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (T,): token t sees keys [start, end). The start is clamped to
            [0, S], and the end to S; a token may see none.
        clean_logits: whether the columns of all other keys become -inf. Otherwise they are left as they are in new
            memory.
        max_seqlen_k: if it is not 0, the result has so many columns, and column 0 of a token is its first key. Keys
            beyond them are not computed.

    Returns the logits, (T, S) or (T, max_seqlen_k), in rows at multiples of 1024 bytes. The bits of a logit depend on
    its query, weights, key and scale alone. A call can be captured in a CUDA graph and replayed with other values.

    Raises before anything is launched: TypeError for a dtype; ValueError for a shape, stride, device or number;
    NotImplementedError if no kernel serves the call, as on any GPU but Hopper's.

    >>> q, k = torch.ones(2, 8, 32).to(torch.float8_e4m3fn), torch.ones(3, 32).to(torch.float8_e4m3fn)
    >>> ends = torch.tensor([1, 3]).int()
    >>> fp8_mqa_logits(q, (k, torch.ones(3)), torch.ones(2, 8), torch.zeros_like(ends), ends)
    tensor([[256., -inf, -inf],
            [256., 256., 256.]])
    """
    return serve(ragged_call(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k))


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None], kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor, cu_seq_len_k_end: torch.Tensor, clean_logits: bool | int = True,
    max_seqlen_k: int | torch.Tensor | None = 0, logits_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return logits as `fp8_mqa_logits` does, in fp32 or bf16.

    q: (queries, None), the queries of that function; with scale factors instead of None they are fp4, which raises
    NotImplementedError. logits_dtype: float32 or bfloat16. The other arguments are as in
    `fp8_mqa_logits`. DeepGEMM's function.

    The arguments are those of DeepGEMM 54e2261. The function of vLLM 0.33 ends with (cu_seq_len_k_end, max_seqlen_k,
    schedule_meta=None), and such calls are served, too: an int in the place of clean_logits is max_seqlen_k, at least
    1, and columns behind the keys of a token are not cleaned. A tensor or None may follow it in the place of
    max_seqlen_k. By its name, max_seqlen_k does not change clean_logits. Nothing reads schedule_meta.

    >>> q, k = torch.ones(1, 8, 32).to(torch.float8_e4m3fn), torch.ones(3, 32).to(torch.float8_e4m3fn)
    >>> start, end = torch.tensor([1]).int(), torch.tensor([3]).int()
    >>> fp8_fp4_mqa_logits((q, None), (k, torch.ones(3)), torch.ones(1, 8), start, end, logits_dtype=torch.bfloat16)
    tensor([[-inf, 256., 256.]], dtype=torch.bfloat16)
    >>> fp8_fp4_mqa_logits((q, None), (k, torch.ones(3)), torch.ones(1, 8), start, end, 2)  # as vLLM 0.33 calls it
    tensor([[256., 256.]])
    """
    return serve(fp4_ragged_call(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype, schedule_meta
    ))  # fmt: skip


def ragged_call(
    q: Any, kv: Any, weights: Any, cu_seq_len_k_start: Any, cu_seq_len_k_end: Any, clean_logits: Any = True,
    max_seqlen_k: Any = 0, *, logits_dtype: Any = torch.float32,
) -> LogitsCall:  # fmt: skip
    """Return the call of `fp8_mqa_logits`."""
    check_strided("q", q, 3)
    k, scales = pair("kv", kv, "(keys, scales)")
    check_strided("kv[0]", k, 2)
    check_one_of("kv[0]: dtype", k.dtype, (E4M3,))
    check_flag("clean_logits", clean_logits)
    width = check_integer("max_seqlen_k", integer(max_seqlen_k), 0)
    dtype = check_out_dtype("logits_dtype", logits_dtype)
    return LogitsCall(
        RAGGED, q, k.view(torch.uint8).unsqueeze(1), weights, cu_seq_len_k_end, width or k.shape[0], dtype,
        k_scale=scales, starts=cu_seq_len_k_start, next_n=max(q.shape[0], 1), compressed=width > 0, clean=clean_logits,
    )  # fmt: skip


def fp4_ragged_call(
    q: Any, kv: Any, weights: Any, cu_seq_len_k_start: Any, cu_seq_len_k_end: Any, clean_logits: Any,
    max_seqlen_k: Any, logits_dtype: Any, schedule_meta: Any,
) -> LogitsCall:  # fmt: skip
    """Return the call of `fp8_fp4_mqa_logits`."""
    check_hint("schedule_meta", schedule_meta)
    clean, columns = of_either_version(clean_logits, max_seqlen_k)
    return ragged_call(
        codes_of(q), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean, columns, logits_dtype=logits_dtype
    )


def of_either_version(clean_logits: Any, max_seqlen_k: Any) -> tuple[Any, Any]:
    """Return clean_logits and max_seqlen_k of DeepGEMM 54e2261, where vLLM 0.33 has max_seqlen_k and schedule_meta."""
    if isinstance(clean_logits, FLAGS):
        return clean_logits, max_seqlen_k
    columns = integer(clean_logits)
    if not isinstance(columns, INTEGERS):
        refuse_flag("clean_logits", clean_logits, " or an int, max_seqlen_k")
    default = isinstance(max_seqlen_k, int) and max_seqlen_k == 0
    check_hint("max_seqlen_k, in the place of schedule_meta", None if default else max_seqlen_k)
    return False, check_integer("max_seqlen_k, in the place of clean_logits", columns, 1)


def fp8_paged_mqa_logits(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_table: torch.Tensor, schedule_meta: torch.Tensor | None, max_context_len: int, clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return how well each key of its request suits each query token: fp32 logits over a paged cache, for decode.

    The formula is that of `fp8_mqa_logits`. A key is read once for all tokens of a request.

    Args, upstream's order (DeepGEMM):
        q: float8_e4m3fn (B, next_n, H, D), any strides that keep tokens equally far apart, the last 1. H is at most 64
            and D is 32, 64 or 128 on a GPU.
        kv_cache: uint8, int8 or float8_e4m3fn (pages, P, 1, D + 4) or (pages, P, D + 4), any P. A page has the codes of
            its P keys, then their P scales in fp32, as `indexer_k_quant_and_cache` writes them. Any page stride that is
            a multiple of 4 bytes.
        weights: fp32 (B * next_n, H), any strides.
        context_lens: int32 (B,): the keys of each request; its last token sees all of them, the one before it one less,
            and so on. Or (B, next_n): the keys that each token sees. Numbers are clamped.
        block_table: int32 (B, M), the pages of each request. Entries behind its keys are not read; a key of a page that
            does not exist counts as zeros.
        max_context_len: columns of the result. Keys beyond them are not computed.
        clean_logits: whether the columns of keys that a token does not see become -inf. Otherwise they are left as they
            are in new memory.

    Hints, which nothing reads: schedule_meta; indices, which says which rows of q belong to one request.

    Returns the logits, (B * next_n, max_context_len), in rows at multiples of 1024 bytes. Bits and graphs are as in
    `fp8_mqa_logits`, and so are errors.

    >>> cache = torch.zeros(4, 2, 1, 36, dtype=torch.uint8)
    >>> q, lens = torch.ones(1, 2, 8, 32).to(torch.float8_e4m3fn), torch.tensor([3]).int()
    >>> fp8_paged_mqa_logits(q, cache, torch.ones(2, 8), lens, torch.tensor([[3, 1]]).int(), None, 4, True)
    tensor([[0., 0., -inf, -inf],
            [0., 0., 0., -inf]])
    """
    return serve(paged_call(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices
    ))  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None], kv_cache: torch.Tensor, weights: torch.Tensor,
    context_lens: torch.Tensor, block_table: torch.Tensor, schedule_meta: torch.Tensor | None, max_context_len: int,
    clean_logits: bool | torch.Tensor | None = False, logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return logits as `fp8_paged_mqa_logits` does, in fp32 or bf16.

    q: (queries, None), the queries of that function; with scale factors instead of None they are fp4, which raises
    NotImplementedError. logits_dtype: float32 or bfloat16. The other arguments are as in
    `fp8_paged_mqa_logits`. DeepGEMM's function.

    The arguments are those of DeepGEMM 54e2261. The function of vLLM 0.33 ends with (max_context_len, indices=None),
    and such calls are served, too: a tensor or None in the place of clean_logits is indices, a hint, and columns behind
    the keys of a token are not cleaned.

    >>> cache, q = torch.zeros(4, 2, 1, 36, dtype=torch.uint8), torch.ones(1, 1, 8, 32).to(torch.float8_e4m3fn)
    >>> table, lens = torch.tensor([[3, 1]]).int(), torch.tensor([[3]]).int()
    >>> fp8_fp4_paged_mqa_logits((q, None), cache, torch.ones(1, 8), lens, table, None, 4, True)
    tensor([[0., 0., 0., -inf]])
    """
    return serve(fp4_paged_call(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype,
        indices,
    ))  # fmt: skip


def paged_call(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, schedule_meta: Any, max_context_len: Any,
    clean_logits: Any = False, indices: Any = None, *, logits_dtype: Any = torch.float32,
) -> LogitsCall:  # fmt: skip
    """Return the call of `fp8_paged_mqa_logits`."""
    check_strided("q", q, 4)
    check_hint("schedule_meta", schedule_meta)
    check_hint("indices", indices)
    check_flag("clean_logits", clean_logits)
    width = check_integer("max_context_len", integer(max_context_len), 0)
    check_strided("context_lens", context_lens)
    requests, next_n = q.shape[:2]
    if context_lens.dim() != 2:
        check_strided("context_lens", context_lens, 1)
    else:
        check_shape("context_lens", context_lens, (requests, next_n), "requests and tokens of q")
        context_lens = context_lens.reshape(-1)
    dtype = check_out_dtype("logits_dtype", logits_dtype)
    return LogitsCall(
        PAGED, q.flatten(0, 1), codes_view("kv_cache", kv_cache), weights, context_lens, width, dtype,
        table=block_table, next_n=max(next_n, 1), clean=clean_logits,
    )  # fmt: skip


def fp4_paged_call(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, schedule_meta: Any, max_context_len: Any,
    clean_logits: Any, logits_dtype: Any, indices: Any,
) -> LogitsCall:  # fmt: skip
    """Return the call of `fp8_fp4_paged_mqa_logits`."""
    if clean_logits is None or isinstance(clean_logits, torch.Tensor):  # a call as vLLM 0.33 has them
        check_hint("clean_logits, in the place of indices", clean_logits)
        clean_logits = False
    elif not isinstance(clean_logits, FLAGS):
        refuse_flag("clean_logits", clean_logits, " or indices, a torch.Tensor or None")
    return paged_call(
        codes_of(q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        indices, logits_dtype=logits_dtype,
    )  # fmt: skip


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a placeholder for the schedule of `fp8_paged_mqa_logits`, which needs none: int32 zeros (num_sms + 1, 2).

    Kernels find their work from the lengths at each launch, so that nothing becomes stale in a captured graph.
    context_lens: int32 (B,) or (B, next_n). block_kv, num_sms: at least 1. indices: a hint. DeepGEMM's function, with
    the same arguments at 54e2261 and in vLLM 0.33.

    >>> get_paged_mqa_logits_metadata(torch.tensor([100, 7]).int(), 64, 132).shape
    torch.Size([133, 2])
    """
    check_strided("context_lens", context_lens)
    check_one_of("context_lens: dtype", context_lens.dtype, (torch.int32,))
    check_integer("block_kv", integer(block_kv), 1)
    sms = check_integer("num_sms", integer(num_sms), 1)
    if sms > MOST_SMS:
        raise ValueError(f"num_sms: {sms}, must be at most {MOST_SMS}")
    check_hint("indices", indices)
    return context_lens.new_zeros((sms + 1, META_SIZE))


def check_hint(name: str, value: Any) -> None:
    """Check a tensor that nothing reads, or None."""
    if value is not None:
        check_strided(name, value)


def pair(name: str, value: Any, what: str) -> tuple[Any, Any]:
    """Return the two members of a tuple. what: they are, for the message."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: {type(value).__name__}, must be a tuple {what}")
    return value[0], value[1]


def codes_of(q: Any) -> Any:
    """Return the queries of a function that takes their scale factors, too."""
    codes, factors = pair("q", q, "(queries, scale factors or None)")
    if factors is not None:
        raise NotImplementedError(
            "q[1]: given, not supported: fp4 queries need Blackwell; must be None, with fp8 queries"
        )
    return codes


def codes_view(name: str, cache: Any) -> Any:
    """Return a paged cache as bytes, (pages, P, D + 4)."""
    view = rows_view(name, cache)
    check_one_of(f"{name}: dtype", view.dtype, BYTES)
    return view if view.dtype is torch.uint8 else view.view(torch.uint8)
