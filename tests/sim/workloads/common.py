"""Run public functions on simulated kernels and compare their results with the reference."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from ptxsim.faults import Fault
from ptxsim.runner import RunResult

from bench.cases.choice import by_function
from cute_kernels.attention.args import fields
from wrappers.host.machine import HostMachine, override

from .. import launcher

INTEGERS = {  # arguments of type int32
    *("cu_seqlens_q", "kv_lens", "page_table", "kv_starts", "counters", "tree_mask", "mask_starts", "mask_blocks"),
    *("union_slots", "union_lens"),
}
SCRATCH = "o_partial", "mask_blocks", "union_slots", "union_tokens", "union_lens"
GARBAGE = 0x7F7F7F7F  # in integer scratch
SMS = 2  # of the simulated GPU: CTAs of a persistent grid


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. error: largest difference from the reference over its tolerance, at most 1 is right.
    bits: digest of the output."""

    error: float
    bits: str
    result: RunResult


class SimulatedMachine(HostMachine):
    """A GPU of `sms` SMs for CPU tensors; the simulator runs its kernels. how: arguments of `run.run`. only: the
    kernel that calls must choose. A launch finds NaN or garbage in its scratch and zeros in its counters. It must leave
    the counters zero."""

    max_counters = 1 << 14  # a launch takes few, and the bytes of all are hashed and looked at

    def __init__(self, arch: str, results: list[RunResult], sms: int, only: Any, how: dict[str, Any]):
        super().__init__()
        self.known, self.results, self.only, self.how = (arch, sms), results, only, how

    def device_info(self, device: torch.device) -> tuple[str, int]:
        return self.known

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., None]:
        if self.only not in (None, spec):
            raise ValueError(f"the call is served by {spec.name}, not by {self.only.name}")
        function = launcher.function(op, spec, arch, self.results, **self.how)

        def launch(*args: Any) -> None:
            counters, parts = scratch_of(op, spec, args)
            for part in parts:
                part.fill_(math.nan if part.is_floating_point() else GARBAGE >> 32 - 8 * part.element_size())
            check_zero(counters, "before")
            function(*args)
            check_zero(counters, "after")

        return launch

    is_host = staticmethod(lambda tensor: False)
    argument = staticmethod(lambda tensor: tensor)
    is_capturing = staticmethod(lambda: False)
    raw_stream = staticmethod(lambda index: 0)
    device_count = staticmethod(lambda: 1)


@contextmanager
def simulated(
    arch: str, results: list[RunResult], sms: int = SMS, only: Any = None, **how: Any
) -> Iterator[SimulatedMachine]:
    """Take public functions on CPU tensors to compiled kernels, which the simulator runs. The function chooses the
    kernel, see `choice`. The arguments are those of `SimulatedMachine`."""
    with override(SimulatedMachine(arch, results, sms, only, how)) as machine, by_function():
        yield machine  # type: ignore[misc]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    return hashlib.sha256(b"".join(bits(t).numpy().tobytes() for t in tensors if t is not None)).hexdigest()


def outcome(
    calls: Iterable[Any], run: Callable[[Any], tuple[float, Iterable[torch.Tensor | None]]], launches: list[RunResult]
) -> Outcome:
    """Run calls one after the other. run: returns the error and the results of a call. launches: get a result each."""
    error, found, whole = 0.0, [], RunResult()
    for call in calls:
        worst, results = run(call)
        error = max(error, worst)
        found.append(digest(results))
    for launch in launches:
        whole.add(launch)
    return Outcome(error, " ".join(found), whole)


def scratch_of(op: str, spec: Any, args: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (counters, scratch) of a launch. Index tensors must have the ABI's type, since the simulator sees only
    bytes."""
    if not op.startswith("attention"):
        return [], []
    named = dict(zip(fields(spec), args, strict=True))
    for name in INTEGERS & named.keys():
        if named[name].dtype != torch.int32:
            raise Fault(f"{name}: {named[name].dtype}, must be torch.int32")
    return [named["counters"]], [named[name] for name in SCRATCH if name in named]


def check_zero(counters: list[torch.Tensor], when: str) -> None:
    for counter in counters:
        if counter.any():
            index = int(counter.nonzero()[0])
            raise Fault(f"{when} the launch counter {index} is {int(counter[index])}, not 0")


def distance(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float, atol: "float | torch.Tensor | None" = None
) -> float:
    """Return the largest |got - expected| / (atol + tolerance |expected|). atol defaults to the tolerance; the
    result is infinite if a NaN or infinity differs."""
    got, expected = got.double(), expected.double()
    equal = (got == expected) | (got.isnan() & expected.isnan())
    ratio = (got - expected).abs() / ((tolerance if atol is None else atol) + tolerance * expected.abs())
    ratio = torch.where(equal, 0.0, ratio.nan_to_num(math.inf, math.inf))
    return float(ratio.max()) if ratio.numel() else 0.0
