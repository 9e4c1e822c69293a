"""What serves a call, without making it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from cute_kernels.attention import dispatch

from .. import machine
from . import checks, plan, trtllm
from .problem import Problem


@dataclass(frozen=True)
class Explanation:
    """What serves a call: `runs` (None: nothing), and for each kernel that does not, why."""

    runs: str | None
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"runs: {self.runs or 'nothing'}", *(f"refused: {name}: {why}" for name, why in self.refused)]
        return "\n".join(lines)


def problem_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Problem:
    """The problem that a public function makes of these arguments, unchecked: its adapter, whose last step, `serve`, is
    another here. Nothing is launched or written."""
    found: list[Problem] = []
    assert isinstance(function, FunctionType)
    scope = function.__globals__ | {"serve": found.append}
    asks = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    asks.__kwdefaults__ = function.__kwdefaults__
    asks(*args, **kwargs)
    return found[0]


def explain(
    *args: Any,
    function: Callable[..., Any] = trtllm.trtllm_batch_context_with_kv_cache,
    arch: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Which kernel would serve a public attention function called with these arguments; raises as it does on bad ones.

    arch: of the GPU, "sm_90a"; None: of the tensors' device.
    """
    p = problem_of(function, *args, **kwargs)
    checks.validate(p)
    if arch is None:
        facts = machine.current.facts(p.q.device)
        if facts is None:
            return Explanation("reference (torch, fp32)", tuple((op, f"device {p.q.device}") for op in dispatch.OPS))
        arch = facts[0]
    answers = dispatch.explain(plan.facts_of(p), arch)
    try:
        checks.kernel_tensors(p)
    except NotImplementedError as error:
        return Explanation(None, tuple((op, str(error)) for op in dispatch.OPS))
    runs = next((f"{op} {spec.name}" for op, spec, reason in answers if reason is None), None)
    return Explanation(runs, tuple((op, str(reason)) for op, _, reason in answers if reason is not None))
