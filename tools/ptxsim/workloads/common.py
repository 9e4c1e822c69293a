"""What a simulated kernel computes: public functions on the simulator, compared with the reference."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cute_kernels.attention.args import fields
from wrappers import attention, scratch, topk

from .. import launcher
from ..faults import Fault
from ..run import Result

SMS = 2  # of the simulated GPU: CTAs of a persistent grid


@dataclass(frozen=True)
class Outcome:
    """error: largest difference to the reference over its tolerance, at most 1 is right. bits: digest of the output."""

    error: float
    bits: str
    seconds: float
    result: Result


@contextmanager
def simulated(arch: str, results: list[Result], sms: int = SMS, only: Any = None, **how: Any) -> Iterator[None]:
    """Public functions take CPU tensors to compiled kernels, which the simulator runs; how: as `run.run` takes it.
    only: the kernel that they must choose. A launch finds NaN in its scratch, and zeros in its counters, which it must
    leave behind too."""

    def kernel(op: str, spec: Any, arch: str) -> Callable[..., None]:
        if only not in (None, spec):
            raise ValueError(f"the call is served by {spec.name}, not by {only.name if only else only}")
        function = launcher.function(op, spec, arch, results, **how)

        def launch(*args: Any) -> None:
            counters, parts = scratch_of(op, spec, args)
            for part in parts:
                part.fill_(math.nan)
            check_zero(counters, "before")
            function(*args)
            check_zero(counters, "behind")

        return launch

    with (
        mock.patch.multiple(scratch, _tickets={}, _kept={}, _is_capturing=lambda: False, _raw_stream=lambda index: 0),
        mock.patch.multiple(attention, _plans={}),
        mock.patch.multiple(topk, _plans={}),
        mock.patch.multiple(
            attention.runtime, kernel=kernel, machine=lambda device: (arch, sms), argument=lambda tensor: tensor
        ),
    ):
        yield


def scratch_of(op: str, spec: Any, args: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(counters, scratch) of a launch."""
    if not op.startswith("attention"):
        return [], []
    named = dict(zip(fields(spec), args, strict=True))
    return [named["counters"]], [named[name] for name in ("o_partial",) if name in named]


def check_zero(counters: list[torch.Tensor], when: str) -> None:
    for counter in counters:
        if counter.any():
            index = int(counter.nonzero()[0])
            raise Fault(f"{when} the launch counter {index} is {int(counter[index])}, not 0")


def distance(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float, atol: "float | torch.Tensor | None" = None
) -> float:
    """Largest |got - expected| / (atol + tolerance |expected|), atol: tolerance where None; infinite where a NaN or
    infinity differs."""
    got, expected = got.double(), expected.double()
    equal = (got == expected) | (got.isnan() & expected.isnan())
    ratio = (got - expected).abs() / ((tolerance if atol is None else atol) + tolerance * expected.abs())
    ratio = torch.where(equal, 0.0, ratio.nan_to_num(math.inf, math.inf))
    return float(ratio.max()) if ratio.numel() else 0.0
