"""What a simulated kernel computes: public functions on the simulator, compared with the reference."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from wrappers import attention, scratch, topk

from .. import launcher
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
    only: the kernel that they must choose."""

    def kernel(op: str, spec: Any, arch: str) -> Callable[..., None]:
        if only not in (None, spec):
            raise ValueError(f"the call is served by {spec.name}, not by {only.name if only else only}")
        return launcher.function(op, spec, arch, results, **how)

    with (
        mock.patch.multiple(scratch, _tickets={}, _kept={}, _is_capturing=lambda: False, _raw_stream=lambda index: 0),
        mock.patch.multiple(attention, _plans={}),
        mock.patch.multiple(topk, _plans={}),
        mock.patch.multiple(
            attention.runtime, kernel=kernel, machine=lambda device: (arch, sms), argument=lambda tensor: tensor
        ),
    ):
        yield


def distance(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Largest |got - expected| / (tolerance + tolerance |expected|); infinite where a NaN or infinity differs."""
    got, expected = got.double(), expected.double()
    equal = (got == expected) | (got.isnan() & expected.isnan())
    ratio = (got - expected).abs() / (tolerance + tolerance * expected.abs())
    ratio = torch.where(equal, 0.0, ratio.nan_to_num(math.inf, math.inf))
    return float(ratio.max()) if ratio.numel() else 0.0
