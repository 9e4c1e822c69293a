"""Bind a call of a public function, for a layer that repeats it at every step."""

from collections.abc import Callable
from typing import Any

from ..attention.bound import BoundCall
from ..cache_write.bound import BoundAppend
from ..flash_attn.api import CachedCall
from ..flash_attn.gather import NAME as GATHERED
from ..topk.bound import BoundTopK
from .append_qkv import QueryOutput
from .registry import CACHE_WRITE, TOP_K, arguments_of, made_by, row_of


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bind a call of a public function: an object with a `run` that repeats it with other queries, scores or rows.

    The arguments are checked and put in their places once, and nothing is launched. Then `run(q, out=None,
    lse=None)`, `run(scores, out=None)` of top-k, or `run(q, k, v, places=None, positions=None, out=None)` of
    functions that write a cache, where None stands for the slots, the positions and the output of the call that was
    bound, sets these and launches, in less host time than the function takes. It takes and returns what the function
    does, and raises as the function does: the query of flash_attn_func, for example, has four dimensions, and q of
    append_paged_kv_cache is None. Tensors that the call holds, such as the cache, the page table and lengths, are
    read at each launch, so their values may change in place, and a CUDA graph may capture `run`. Their memory is
    bound, too: a tensor that gets other memory (`t.set_(...)`, `t.data = ...`) needs a new call of `bind`. Values that
    the function computes before its launch are computed once, when the call is bound: scales on the host, products
    of scales, sinks in fp32, masks in another form, lengths that are differences of offsets, lengths of requests
    that rows of compact queries take over (sparse_mla_top_k with cum_seq_lens_q). With another number of
    tokens than that of the call, `run` takes the time of the function.

    args, kwargs: the arguments of the call. function: a public function of attention, of top-k, or one that appends
    rows to a cache.
    Raises TypeError for a function that is not public; NotImplementedError for a public one of which no tensor stays
    from call to call (`apply_rope`, `merge_state`), for flash_attn_with_kvcache with k, which has two launches, or with
    cache_leftpad, of which the host makes a table at each call, and with gather_kv_indices. No other library has this
    function.

    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> layer = bind(trtllm_batch_decode_with_kv_cache, q, cache, None, table, lens, None, 64**-0.5)
    >>> layer.run(q + 1.0).shape
    torch.Size([2, 8, 64])
    """
    row = row_of(function, "bind", binds=True)
    if kwargs.get(GATHERED) is not None:
        need = "rows are made of it at each call"
        raise NotImplementedError(f"{GATHERED}: given, not supported by bind, must be None: {need}")
    made = made_by(function, *args, **kwargs)
    if row.family == TOP_K:
        return BoundTopK(made)
    given = arguments_of(function, *args, **kwargs)
    if row.family == CACHE_WRITE:
        (call, kv, sf), out = made, given.get("out")
        return BoundAppend(call, kv, sf, out.out if isinstance(out, QueryOutput) else None)
    if isinstance(made, CachedCall):
        if made.new is not None:
            need = "append_qkv writes new keys, and is bound on its own"
            raise NotImplementedError(f"k: {type(given['k']).__name__}, not supported by bind, must be None: {need}")
        if made.padding is not None:
            need = "the host makes a table of it at each call"
            raise NotImplementedError(f"cache_leftpad: given, not supported by bind, must be None: {need}")
        made = made.attention
    return BoundCall(made, row.reshaping, None if row.output is None else given[row.output])
