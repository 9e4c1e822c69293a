"""The choice of the kernel that serves a request. Plain Python: it runs without the DSL."""

from functools import cache
from typing import Any, NamedTuple

from . import decode, sm90, sm100
from .request import KernelRequest, Refusal

# in the order in which they are asked
OPS = {"attention.sm90": sm90, "attention.sm100": sm100, "attention.decode": decode}


class Answer(NamedTuple):
    """An op's answer to a request: the spec that it would run, and None or the reason why it refuses."""

    op: str
    spec: Any
    reason: Refusal | None


class UnsupportedRequest(NotImplementedError):
    """No op serves a request. field: the field of the request that was refused, "phase" aside; "arch" only if no other
    field was."""

    def __init__(self, answers: tuple[Answer, ...]):
        super().__init__("; ".join(f"{op}: {reason}" for op, _, reason in answers))
        fields = [reason.field for _, _, reason in answers if reason and reason.field != "phase"]
        self.field = next((field for field in fields if field != "arch"), "arch")


def refusal(module: Any, request: KernelRequest, spec: Any, arch: str) -> Refusal | None:
    """Return None if an op serves a request with a spec, else the reason why not."""
    if request.phase not in module.PHASES:
        return Refusal("phase", f"{request.phase}: serves {' and '.join(module.PHASES)}")
    if arch not in module.ARCHS:
        return Refusal("arch", f"{arch}: needs {' or '.join(module.ARCHS)}")
    if request.source == "ragged" and spec.kv.block_scaled:
        return Refusal("source", "ragged: block-scaled caches have pages")
    return module.supports(spec)


@cache
def explain(request: KernelRequest, arch: str) -> tuple[Answer, ...]:
    """Return every op's answer, in the order of `OPS`."""
    found = []
    for op, module in OPS.items():
        spec: Any = module.candidate(request, arch)
        found.append(Answer(op, spec, refusal(module, request, spec, arch)))
    return tuple(found)


def select(request: KernelRequest, arch: str) -> tuple[str, Any]:
    """Return (op, spec) of the kernel that serves the request. Raise `UnsupportedRequest`, which names every op's
    reason, if there is none."""
    answers = explain(request, arch)
    for op, spec, reason in answers:
        if reason is None:
            return op, spec
    raise UnsupportedRequest(answers)


def shipped(arch: str) -> list[tuple[str, Any]]:
    """Return all (op, spec) of a bundle for `arch`."""
    return [(op, spec) for op, module in OPS.items() for spec in module.shipped(arch)]
