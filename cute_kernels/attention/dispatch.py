"""Which kernel serves a request. Plain Python: runs where no DSL is installed."""

from functools import cache
from typing import Any, NamedTuple

from . import decode, sm90, sm100
from .request import KernelRequest, Refusal

# In the order in which they are asked.
OPS = {"attention.sm90": sm90, "attention.sm100": sm100, "attention.decode": decode}


class Answer(NamedTuple):
    """What an op says of a request: the spec that it would run, and None or why it refuses."""

    op: str
    spec: Any
    reason: Refusal | None


class UnsupportedRequest(NotImplementedError):
    """No op serves a request. field: of the request, or "arch", that the op meant for such problems, and for the
    architecture if there is one, refused."""

    def __init__(self, answers: tuple[Answer, ...]):
        super().__init__("; ".join(f"{op}: {reason}" for op, _, reason in answers))
        fields = [reason.field for _, _, reason in answers if reason and reason.field != "phase"]
        self.field = next((field for field in fields if field != "arch"), "arch")


def refusal(module: Any, request: KernelRequest, spec: Any, arch: str) -> Refusal | None:
    """None where an op serves a request with a spec, else the reason why not."""
    if request.phase not in module.PHASES:
        return Refusal("phase", f"{request.phase}: serves {' and '.join(module.PHASES)}")
    if arch not in module.ARCHS:
        return Refusal("arch", f"{arch}: needs {' or '.join(module.ARCHS)}")
    if request.source == "ragged" and spec.kv.block_scaled:
        return Refusal("source", "ragged: block-scaled caches have pages")
    return module.supports(spec)


@cache
def explain(request: KernelRequest, arch: str) -> tuple[Answer, ...]:
    """Every op's answer."""
    found = []
    for op, module in OPS.items():
        spec: Any = module.candidate(request, arch)
        found.append(Answer(op, spec, refusal(module, request, spec, arch)))
    return tuple(found)


def select(request: KernelRequest, arch: str) -> tuple[str, Any]:
    """(op, spec) of the kernel that serves the request; `UnsupportedRequest` names what every op refused."""
    answers = explain(request, arch)
    for op, spec, reason in answers:
        if reason is None:
            return op, spec
    raise UnsupportedRequest(answers)


def shipped(arch: str) -> list[tuple[str, Any]]:
    """All (op, spec) that a bundle of `arch` holds."""
    return [(op, spec) for op, module in OPS.items() for spec in module.shipped(arch)]
