"""Bind a call of a public function, for a layer that repeats it at every step."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from ..attention.bound import BoundCall
from ..attention.call import AttentionCall
from ..cache_write.bound import BoundAppend
from ..flash_attn.api import flash_attn_varlen_func
from ..host.checks import listed
from ..topk.bound import BoundTopK
from . import explanation
from .append_qkv import QueryOutput, append_qkv

FUNCTIONS: tuple[Any, ...] = (*(f for f in explanation.FUNCTIONS if f not in explanation.RESHAPED), append_qkv)


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bind a call of a public function: an object with a `run` that repeats it with other queries, scores or rows.

    The arguments are checked and put in their places once, and nothing is launched. Then `run(q, out=None,
    lse=None)`, `run(scores, out=None)` of top-k, or `run(q, k, v, places=None, positions=None, out=None)` of
    append_qkv, where None stands for the slots, the positions and the output of the call that was bound, sets these
    and launches, in less host time than the function takes. It returns what the function returns, and raises as the
    function does. Tensors that the call holds, such as the cache, the page table and lengths, are read at each
    launch, so their values may change in place, and a CUDA graph may capture `run`. Their memory is bound, too: a
    tensor that gets other memory (`t.set_(...)`, `t.data = ...`) needs a new call of `bind`. A scale on the host is
    read when the call is bound. With another number of tokens than that of the call, `run` takes the time of the
    function.

    args, kwargs: the arguments of the call.
    function: trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache,
    trtllm_fmha_v2_prefill, single_prefill_with_kv_cache, flash_attn_varlen_func without its LSE, append_qkv, or one of
    top-k.
    Raises TypeError for another function; NotImplementedError for a call with work on the host at each launch:
    flash_attn_varlen_func with its LSE. No other library has this function.

    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> layer = bind(trtllm_batch_decode_with_kv_cache, q, cache, None, table, lens, None, 64**-0.5)
    >>> layer.run(q + 1.0).shape
    torch.Size([2, 8, 64])
    """
    if function not in FUNCTIONS:
        names = listed(f.__name__ for f in FUNCTIONS)
        raise TypeError(f"function: {getattr(function, '__name__', repr(function))}, must be one of {names}")
    if function is append_qkv:
        given = signature(function).bind(*args, **kwargs).arguments.get("out")
        call, kv, sf = explanation.arguments_of_serve(function, *args, **kwargs)
        return BoundAppend(call, kv, sf, given.out if isinstance(given, QueryOutput) else None)
    call = explanation.call_of(function, *args, **kwargs)
    if not isinstance(call, AttentionCall):
        return BoundTopK(call)
    if function is flash_attn_varlen_func and call.return_lse:
        raise NotImplementedError("return_lse: True, not supported by bind, must be False: the host transposes the LSE")
    return BoundCall(call)
