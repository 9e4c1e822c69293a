"""Explain which kernel serves a call, and where it is found, without making the call."""

from collections.abc import Callable
from dataclasses import dataclass
from re import fullmatch
from types import FunctionType
from typing import Any, NoReturn

import torch

from cute_kernels import archs
from cute_kernels.attention import dispatch
from cute_kernels.topk import dispatch as topk_dispatch

from ..attention import checks, plan
from ..attention import op as attention_op
from ..attention.call import AttentionCall
from ..flash_attn import api as flash_attn
from ..flashinfer import engines, single_decode, topk, trtllm, xqa
from ..flashinfer import single_prefill as single
from ..host import machine, runtime
from ..host.checks import check_integer, listed
from ..host.scalars import integer
from ..topk import checks as topk_checks
from ..topk import op as topk_op
from ..topk import plan as topk_plan
from ..vllm import topk as vllm_topk

FUNCTIONS: tuple[FunctionType, ...] = (
    trtllm.trtllm_batch_context_with_kv_cache, trtllm.trtllm_batch_decode_with_kv_cache, xqa.xqa,
    engines.xqa_batch_decode_with_kv_cache, engines.trtllm_fmha_v2_prefill, single.single_prefill_with_kv_cache,
    single_decode.single_decode_with_kv_cache, flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func,
    flash_attn.flash_attn_with_kvcache, topk.top_k, topk.top_k_page_table_transform, topk.top_k_ragged_transform,
    vllm_topk.top_k_per_row_prefill, vllm_topk.top_k_per_row_decode, vllm_topk.persistent_topk,
    vllm_topk.cooperative_topk,
)  # type: ignore[assignment]  # fmt: skip
# Functions with queries or results of another shape than the call's: a bound call cannot take their queries
RESHAPED = (
    xqa.xqa,
    flash_attn.flash_attn_func,
    flash_attn.flash_attn_with_kvcache,
    single_decode.single_decode_with_kv_cache,
)
OVER: dict[Any, Any] = {  # function -> the one that it calls as its last step
    engines.xqa_batch_decode_with_kv_cache: trtllm.trtllm_batch_decode_with_kv_cache,
    engines.trtllm_fmha_v2_prefill: trtllm.trtllm_batch_context_with_kv_cache,
    vllm_topk.cooperative_topk: vllm_topk.persistent_topk,
}


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: the kernel that serves a call, and the reason why each other kernel does not.

    runs: the kernel, or the reference; None if nothing serves the call. refused: (kernel, reason) pairs. found: where
    the kernel is: the folder of a bundle; "to be compiled at its first call"; or that no bundle here has it, and the
    command that builds it; None if no kernel runs. No other library has this class.

    >>> print(Explanation("reference (torch)", (("topk.radix", "device cpu, must be a CUDA device"),)))
    runs: reference (torch)
    refused: topk.radix: device cpu, must be a CUDA device
    """

    runs: str | None
    refused: tuple[tuple[str, str], ...]
    found: str | None = None

    def __str__(self) -> str:
        lines = [f"runs: {self.runs or 'nothing'}", *([f"found: {self.found}"] if self.found else [])]
        return "\n".join([*lines, *(f"refused: {name}: {why}" for name, why in self.refused)])


class _Asked(Exception):
    """Carries the call that a public function would serve."""


def _ask(*asked: Any) -> NoReturn:
    raise _Asked(*asked)


def _ask_last(*arguments: Any) -> NoReturn:
    """Replace `layers.keep`, of which the call is the last argument."""
    raise _Asked(arguments[-1])


def _nothing(*_: Any) -> None:
    """Replace `layers.repeat`: find no launch."""


def _unchanged(call: Any, _: Any) -> Any:
    """Replace `append`: write nothing to a cache."""
    return call


def _asking(function: Any) -> FunctionType:
    """Return a copy of a public function that raises `_Asked` instead of serving its call and appends nothing."""
    scope = function.__globals__ | {"serve": _ask, "append": _unchanged, "repeat": _nothing, "keep": _ask_last}
    if function in OVER:
        scope[OVER[function].__name__] = _asking(OVER[function])
    asks = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    asks.__kwdefaults__ = function.__kwdefaults__
    return asks


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the call that a public function makes of these arguments, unchecked: an `AttentionCall` or a `TopKCall`.

    The function's own code runs, with its last step, `serve`, replaced: that costs calls nothing, and nothing is
    launched or written.
    """
    if function not in FUNCTIONS:
        names = listed(f.__name__ for f in FUNCTIONS)
        raise TypeError(f"function: {getattr(function, '__name__', repr(function))}, must be one of {names}")
    return arguments_of_serve(function, *args, **kwargs)[0]


def arguments_of_serve(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return what a public function hands to its last step, `serve`; see `call_of`."""
    try:
        _asking(function)(*args, **kwargs)
    except _Asked as found:
        return found.args
    raise AssertionError(f"{function.__name__} does not end in serve")


def explain(
    *args: Any, function: Callable[..., Any] = trtllm.trtllm_batch_context_with_kv_cache, arch: str | None = None,
    sms: int | None = None, **kwargs: Any,
) -> Explanation:  # fmt: skip
    """Return which kernel would serve a call of a public function of attention or top-k, and where it is found.

    Raises as the function does on bad arguments. Launches no kernel of this package; writes, loads and compiles
    nothing. torch operations that the function does before its kernel do run: xqa's product of two scale tensors,
    copies of a mask with gaps and of two-dimensional seq_lens.

    args, kwargs: the arguments of the call. function: the function that is called.
    arch, sms: the GPU's architecture, such as "sm_90a", and its number of SMs, on which top-k's choice depends. With
    arch, the tensors may be on the CPU. None: those of the tensors' device; without such a device, sms is that of an
    H200, B200 or B300. No other library has this function.

    >>> explain(torch.zeros(64, 65536), 2048, function=top_k, arch="sm_90a").runs
    'topk.radix fp32_c2t512_n46080'
    """
    try:
        asked = call_of(function, *args, **kwargs)
    except TypeError as error:
        if function is trtllm.trtllm_batch_context_with_kv_cache and " missing " in str(error):
            raise TypeError(f"{error}; function= names another function than this, the default") from None
        raise
    attention = isinstance(asked, AttentionCall)
    if torch.is_grad_enabled():
        (attention_op if attention else topk_op).refuse_grad(asked)
    if attention:
        checks.validate(asked)
        device = asked.q.device
    else:
        asked = topk_checks.with_ints(asked)
        topk_checks.validate(asked)
        device = asked.scores.device
    known, count = machine.current.device_info(device) or (None, None)
    if arch is not None and (not isinstance(arch, str) or not fullmatch(r"sm_[0-9]+[af]?", arch)):
        raise (ValueError if isinstance(arch, str) else TypeError)(
            f"arch: {arch!r}, must be a name such as 'sm_90a', or None"
        )
    if sms is not None:
        sms = check_integer("sms", integer(sms), 1)
    arch = known if arch is None else arch
    if arch is None:
        ops = dispatch.OPS if attention else topk_dispatch.KERNELS
        name = "reference (torch, fp32)" if attention else "reference (torch)"
        return Explanation(name, tuple((op, f"device {device}, must be a CUDA device") for op in ops))
    if sms is None and count is not None and arch == known:
        sms = count
    elif sms is None:  # every op refuses an architecture without a row, whatever its SMs
        sms = archs.of(arch).sms if arch in archs.NAMES else 1
    if attention:
        answers = _attention(asked, arch, sms)
    else:
        answers = [*topk_dispatch.explain(topk_plan.request_of(asked, sms), arch)]
    refused = tuple((op, str(reason)) for op, reason in dispatch.refusals(answers))
    for op, spec, reason in answers:
        if reason is None:
            return Explanation(f"{op} {spec.name}", refused, runtime.where(op, spec, arch))
    return Explanation(None, refused)


def _attention(call: AttentionCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    """Return (op, spec, reason why it refuses or None) of every attention op."""
    answers = []
    for op, spec, reason in dispatch.explain(plan.request_of(call, sms), arch):
        why: Any = reason
        if reason is None:
            try:
                checks.kernel_tensors(call)
            except NotImplementedError as error:
                why = error
        answers.append((op, spec, why))
    return answers
