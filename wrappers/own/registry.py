"""The public functions that `explain` and `bind` take: one row each, with the function that makes its call."""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from ..attention.bound import Reshaping
from ..attention.call import AttentionCall
from ..flash_attn import api as flash_attn
from ..flashinfer import engines, page, single_decode, topk, trtllm, xqa
from ..flashinfer import single_prefill as single
from ..host.checks import listed
from ..vllm import topk as vllm_topk
from . import append_qkv

ATTENTION, TOP_K, CACHE_WRITE = "attention", "top-k", "cache writing"  # families
PREFILL, DECODE, FLASH_ATTENTION, SELECTION, CACHES = "prefill", "decode", "flash-attention", "top-k", "caches"
FAMILY_OF = {  # page of the reference -> the family of its functions
    PREFILL: ATTENTION, DECODE: ATTENTION, FLASH_ATTENTION: ATTENTION, SELECTION: TOP_K, CACHES: CACHE_WRITE,
}  # fmt: skip


class PublicFunction(NamedTuple):
    """A public function, and the way to its call.

    make: takes arguments of the function by their names, all that the call depends on, and returns the call unchecked:
    an `AttentionCall`, a `CachedCall`, a `TopKCall`, or what `cache_write.op.serve` takes. page: where
    `tools.reference` documents it. reshaping: how its queries and results differ from those of the call, None if they
    do not. output: its argument that receives the result, if one must be given. The room of its module is the library
    that has the signature.
    """

    function: Callable[..., Any]
    make: Callable[..., Any]
    page: str
    reshaping: Reshaping | None = None
    output: str | None = None

    @property
    def family(self) -> str:
        return FAMILY_OF[self.page]


def _return_lse_call(args: Any, kwargs: Any) -> AttentionCall:
    """Return the call of `single_prefill_with_kv_cache_return_lse`."""
    return made_by(single.single_prefill_with_kv_cache, *args, **kwargs | {"return_lse": True})


_SHAPED = Reshaping(flash_attn.bound_rows, flash_attn.shaped)
FUNCTIONS: tuple[PublicFunction, ...] = (
    PublicFunction(trtllm.trtllm_batch_context_with_kv_cache, trtllm.context_call, PREFILL),
    PublicFunction(trtllm.trtllm_batch_decode_with_kv_cache, trtllm.decode_call, DECODE),
    PublicFunction(
        xqa.xqa, xqa.xqa_call, DECODE, Reshaping(xqa.bound_rows, xqa.shaped), output="output"
    ),
    PublicFunction(engines.xqa_batch_decode_with_kv_cache, engines.xqa_batch_call, DECODE),
    PublicFunction(engines.trtllm_fmha_v2_prefill, engines.fmha_call, PREFILL),
    PublicFunction(single.single_prefill_with_kv_cache, single.single_prefill_call, PREFILL),
    PublicFunction(single.single_prefill_with_kv_cache_return_lse, _return_lse_call, PREFILL),
    PublicFunction(
        single_decode.single_decode_with_kv_cache, single_decode.single_decode_call, DECODE,
        Reshaping(single_decode.bound_rows, single_decode.shaped),
    ),
    PublicFunction(flash_attn.flash_attn_varlen_func, flash_attn.varlen_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(flash_attn.flash_attn_with_kvcache, flash_attn.kvcache_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(flash_attn.flash_attn_func, flash_attn.func_call, FLASH_ATTENTION, _SHAPED),
    PublicFunction(topk.top_k, topk.top_k_call, SELECTION),
    PublicFunction(topk.top_k_page_table_transform, topk.page_table_call, SELECTION),
    PublicFunction(topk.top_k_ragged_transform, topk.ragged_call, SELECTION),
    PublicFunction(vllm_topk.top_k_per_row_prefill, vllm_topk.row_prefill_call, SELECTION),
    PublicFunction(vllm_topk.top_k_per_row_decode, vllm_topk.row_decode_call, SELECTION),
    PublicFunction(vllm_topk.persistent_topk, vllm_topk.persistent_call, SELECTION),
    PublicFunction(vllm_topk.cooperative_topk, vllm_topk.persistent_call, SELECTION),
    PublicFunction(append_qkv.append_qkv, append_qkv.append_call, CACHES),
    PublicFunction(page.append_paged_kv_cache, page.append_paged_call, CACHES),
    PublicFunction(page.nvfp4_quantize_append_paged_kv_cache, page.nvfp4_append_call, CACHES),
    PublicFunction(
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, page.nvfp4_slots_call, CACHES
    ),
)  # fmt: skip


def row_of(function: Any) -> PublicFunction:
    """Return the row of a public function. Raises TypeError for another one."""
    for row in FUNCTIONS:
        if row.function is function:
            return row
    names = listed(row.function.__name__ for row in FUNCTIONS)
    raise TypeError(f"function: {getattr(function, '__name__', repr(function))}, must be one of {names}")


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, with those that have their default value."""
    try:
        given = signature(function).bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # raises Python's own error: its body does not begin
        raise
    given.apply_defaults()
    return given.arguments


def made_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the call that a public function makes of these arguments, unchecked. Nothing is launched or written."""
    make, given = row_of(function).make, arguments_of(function, *args, **kwargs)
    return make(**{name: given[name] for name in signature(make).parameters})


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the `AttentionCall`, `TopKCall` or `CacheWriteCall` of a public function: see `made_by`.

    That of flash_attn_with_kvcache is its attention, before new keys are appended.
    """
    made = made_by(function, *args, **kwargs)
    if isinstance(made, flash_attn.CachedCall):
        return made.attention
    return made[0] if row_of(function).family == CACHE_WRITE else made
