"""Explain which kernel serves a call, and where it is found, without making the call."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from re import fullmatch
from typing import Any, NamedTuple

import torch

from cute_kernels import archs
from cute_kernels.attention import dispatch
from cute_kernels.cache_write import dispatch as cache_dispatch
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.indexer import dispatch as indexer_dispatch
from cute_kernels.latent import dispatch as latent_dispatch
from cute_kernels.merge_states import dispatch as merge_dispatch
from cute_kernels.topk import dispatch as topk_dispatch

from ..attention import checks, plan
from ..attention import op as attention_op
from ..attention.call import AttentionCall
from ..cache_write import checks as cache_checks
from ..cache_write import plan as cache_plan
from ..cache_write import quantize
from ..cache_write.call import CacheWriteCall
from ..flashinfer.trtllm import trtllm_batch_context_with_kv_cache
from ..host import machine, runtime
from ..host.checks import check_integer
from ..host.scalars import integer
from ..indexer import logits
from ..latent import checks as latent_checks
from ..latent import gather as latent_gather
from ..latent import plan as latent_plan
from ..latent.call import LatentCall
from ..merge import checks as merge_checks
from ..merge import plan as merge_plan
from ..merge.checks import MergeCall
from ..topk import checks as topk_checks
from ..topk import op as topk_op
from ..topk import plan as topk_plan
from ..topk.checks import TopKCall
from .registry import (
    ATTENTION,
    CACHE_WRITE,
    INDEXER,
    LATENT,
    LATENT_READ,
    MERGING,
    QUANTIZATION,
    TOP_K,
    call_of,
    row_of,
)


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


def explain(
    *args: Any, function: Callable[..., Any] = trtllm_batch_context_with_kv_cache, arch: str | None = None,
    sms: int | None = None, **kwargs: Any,
) -> Explanation:  # fmt: skip
    """Return which kernel would serve a call of a public function, and where it is found.

    Raises as the function does on bad arguments. Launches no kernel of this package; writes, loads and compiles
    nothing. torch operations that the function does before its kernel do run: xqa's product of two scale tensors,
    copies of a mask with gaps and of two-dimensional seq_lens.

    args, kwargs: the arguments of the call. function: the function that is called, any public one with a kernel. The
    answer for flash_attn_with_kvcache is that of its attention.
    arch, sms: the GPU's architecture, such as "sm_90a", and its number of SMs, on which top-k's choice depends. With
    arch, the tensors may be on the CPU. None: those of the tensors' device; without such a device, sms is that of an
    H200, B200 or B300. No other library has this function.

    >>> explain(torch.zeros(64, 65536), 2048, function=top_k, arch="sm_90a").runs
    'topk.radix fp32_c2t512_n46080'
    """
    row = row_of(function, "explain")
    try:
        asked = call_of(function, *args, **kwargs)
    except TypeError as error:
        if function is trtllm_batch_context_with_kv_cache and " missing " in str(error):
            raise TypeError(f"{error}; function= names another function than this, the default") from None
        raise
    family = FAMILIES[OF_CALL.get(type(asked), row.family)]
    asked, device = family.checked(asked)
    known, count = machine.current.device_info(device) or (None, None)
    if arch is not None and (not isinstance(arch, str) or not fullmatch(r"sm_[0-9]+[af]?", arch)):
        raise (ValueError if isinstance(arch, str) else TypeError)(
            f"arch: {arch!r}, must be a name such as 'sm_90a', or None"
        )
    if sms is not None:
        sms = check_integer("sms", integer(sms), 1)
    arch = known if arch is None else arch
    if arch is None:
        why = f"device {device}, must be a CUDA device"
        return Explanation(family.reference, tuple((op, why) for op in family.kernels))
    if sms is None and count is not None and arch == known:
        sms = count
    elif sms is None:  # every op refuses an architecture without a row, whatever its SMs
        sms = archs.of(arch).sms if arch in archs.NAMES else 1
    answers = family.answers(asked, arch, sms)
    refused = tuple((op, str(reason)) for op, reason in dispatch.refusals(answers))
    for op, spec, reason in answers:
        if reason is None and spec is None:
            return Explanation(op, refused)
        if reason is None:
            return Explanation(f"{op} {spec.name}", refused, runtime.where(op, spec, arch))
    return Explanation(None, refused)


class ExplainedFamily(NamedTuple):
    """The answers of a family to `explain`.

    kernels: its ops. reference: what runs without a GPU. checked: call -> the call after a check, and its device.
    answers: (call, arch, SMs) -> (op, spec, reason why it refuses or None) of every op. Without a spec, the op is the
    name of what serves calls that no kernel takes.
    """

    kernels: Iterable[str]
    reference: str
    checked: Callable[[Any], tuple[Any, torch.device]]
    answers: Callable[[Any, str, int], list[tuple[str, Any, Any]]]


def _checked_attention(call: AttentionCall) -> tuple[AttentionCall, torch.device]:
    if torch.is_grad_enabled():
        attention_op.refuse_grad(call)
    checks.validate(call)
    return call, call.q.device


def _checked_top_k(call: TopKCall) -> tuple[TopKCall, torch.device]:
    if torch.is_grad_enabled():
        topk_op.refuse_grad(call)
    call = topk_checks.with_ints(call)
    topk_checks.validate(call)
    return call, call.scores.device


def _checked_cache_write(call: CacheWriteCall) -> tuple[CacheWriteCall, torch.device]:
    cache_checks.validate(call)
    return call, call.k.device


def _attention(call: AttentionCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
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


def _top_k(call: TopKCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    return [*topk_dispatch.explain(topk_plan.request_of(call, sms), arch)]


def _cache_write(call: CacheWriteCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    spec, dim = cache_plan.spec_of(call), max(call.k.shape[2], call.v.shape[2])
    request = CacheWriteRequest(
        spec.dtype, spec.cache, spec.transform, dim, cache_plan.rotated(call), scales=spec.scales
    )
    return [*cache_dispatch.explain(request, arch)]


def _checked_merge(call: MergeCall) -> tuple[MergeCall, torch.device]:
    merge_checks.validate(call)
    return call, call.v.device


def _merging(call: MergeCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    return [*merge_dispatch.explain(merge_plan.request_of(call), arch)]


def _checked_latent(call: LatentCall) -> tuple[LatentCall, torch.device]:
    latent_checks.validate(call)
    return call, latent_checks.first_of(call).device


def _latent(call: LatentCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    return [*latent_dispatch.explain(latent_plan.request_of(call), arch)]


def _checked_gather(call: latent_gather.GatherCall) -> tuple[Any, torch.device]:
    latent_gather.validate(call)
    return call, call.cache.device


def _gather(call: latent_gather.GatherCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    return [*latent_dispatch.explain(latent_gather.request_of(call), arch)]


def _checked_logits(call: logits.LogitsCall) -> tuple[Any, torch.device]:
    logits.validate(call)
    return call, call.q.device


def _logits(call: logits.LogitsCall, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    return [*indexer_dispatch.explain(logits.request_of(call), arch)]


def _quantization(call: Any, arch: str, sms: int) -> list[tuple[str, Any, Any]]:
    if isinstance(call, quantize.QuantizeCall) and call.x.dtype not in quantize.DTYPES:
        return [(TORCH, None, None)]
    return [*cache_dispatch.explain(quantize.request_of(call), arch)]


# The families of calls that a function of another family may make, as its arguments say
OF_CALL = {CacheWriteCall: CACHE_WRITE, LatentCall: LATENT, TopKCall: TOP_K}
TORCH = "reference (torch)"
FAMILIES = {
    ATTENTION: ExplainedFamily(dispatch.OPS, "reference (torch, fp32)", _checked_attention, _attention),
    TOP_K: ExplainedFamily(topk_dispatch.KERNELS, TORCH, _checked_top_k, _top_k),
    CACHE_WRITE: ExplainedFamily(cache_dispatch.KERNELS, TORCH, _checked_cache_write, _cache_write),
    MERGING: ExplainedFamily(merge_dispatch.KERNELS, TORCH, _checked_merge, _merging),
    LATENT: ExplainedFamily(latent_dispatch.KERNELS, TORCH, _checked_latent, _latent),
    LATENT_READ: ExplainedFamily(latent_dispatch.READERS, TORCH, _checked_gather, _gather),
    INDEXER: ExplainedFamily(indexer_dispatch.KERNELS, TORCH, _checked_logits, _logits),
    QUANTIZATION: ExplainedFamily(cache_dispatch.KERNELS, TORCH, lambda call: (call, call[0].device), _quantization),
}
