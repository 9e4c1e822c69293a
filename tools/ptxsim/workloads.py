"""Small problems for every shipped kernel: the public function runs on the simulator, compared with the reference.

Each variant is ragged, fills unused memory and outputs with NaN, and takes another page size, layout and modifier, so
that together they reach each path of a kernel.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cute_kernels.attention.spec import AttentionSpec
from tests import cases
from tests.cases import AttentionCase
from wrappers import prefill

from . import launcher
from .run import Result

SMS = 2  # of the simulated GPU: CTAs of a persistent grid


@dataclass(frozen=True)
class Outcome:
    """error: largest difference to the reference over its tolerance, at most 1 is right. bits: digest of the output."""

    error: float
    bits: str
    seconds: float
    result: Result


@contextmanager
def simulated(arch: str, results: list[Result], **how: Any) -> Iterator[None]:
    """Public functions take CPU tensors to compiled kernels, which the simulator runs; how: as `run.run` takes it."""

    def kernel(op: str, spec: Any, arch: str) -> Callable[..., None]:
        return launcher.function(op, spec, arch, results, **how)

    with mock.patch.multiple(
        prefill,
        _machine=lambda device: (arch, SMS),
        _plans={},
        _tickets={},
        _is_capturing=lambda: False,
        _raw_stream=lambda index: 0,
    ), mock.patch.object(prefill.runtime, "kernel", kernel):  # fmt: skip
        yield


def attention_cases(spec: AttentionSpec, thorough: bool = False) -> list[AttentionCase]:
    """Cases whose kernel is `spec`. thorough: every box size, and lengths with which every pipeline wraps around."""
    common: dict[str, Any] = {
        "dtype": spec.dtype,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        "causal": spec.mask.causal,
        "soft_cap": 12.0 if spec.soft_cap else 0.0,
    }
    window = 75 if spec.mask.window else -1
    other = -1 if spec.soft_cap or spec.pack_gqa else window  # a kernel with a window serves calls without one
    heads: dict[str, Any]
    if spec.pack_gqa:
        heads = {"heads_q": 6, "heads_kv": 2}
        first, second = (5, 0, 33), (2, 1, 21)
    else:
        heads = {"heads_q": 2, "heads_kv": 2}
        first, second = (3, 0, 150), (9, 1, 197)
    page_size = 16 if spec.dtype == "bf16" else 8  # with 64 below, every size of TMA box
    stacked = "stacked" if spec.head_dim_qk == spec.head_dim_vo else "tuple"
    cases = [
        AttentionCase("ragged", q_lens=first, kv_lens=(19, 7, 290), page_size=page_size, sink=True, window_left=window,
                      layout="NHD", strided_q=True, **heads, **common),
        AttentionCase("short", q_lens=second, kv_lens=(256, 0, 140), page_size=64, lse=False, cache=stacked,
                      window_left=other, **heads, **common),
    ]  # fmt: skip
    if not thorough:
        return cases
    more: dict[str, Any] = dict(q_lens=first, kv_lens=(1000, 0, 700), window_left=-1 if other < 0 else 600)
    return [*cases, *(AttentionCase(f"page {p}", page_size=p, **more, **heads, **common) for p in (8, 16, 64))]


def run_attention(spec: AttentionSpec, case: AttentionCase, arch: str, **how: Any) -> Outcome:
    inputs = cases.make_inputs(case)
    expected, expected_lse = cases.reference_of(inputs)
    results: list[Result] = []
    start = time.perf_counter()
    with simulated(arch, results, **how):
        got = prefill.trtllm_batch_context_with_kv_cache(**inputs)
    seconds = time.perf_counter() - start
    out, lse = got if case.lse else (got, None)
    error = distance(out, expected, case.tolerance)
    if lse is not None:
        error = max(error, distance(lse, expected_lse, cases.LSE_TOLERANCE))
    bits = hashlib.sha256(out.view(torch.int16).contiguous().numpy().tobytes()).hexdigest()
    return Outcome(error, bits, seconds, results[0])


def distance(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Largest |got - expected| / (tolerance + tolerance |expected|); infinite where a NaN or infinity differs."""
    got, expected = got.double(), expected.double()
    equal = (got == expected) | (got.isnan() & expected.isnan())
    ratio = (got - expected).abs() / (tolerance + tolerance * expected.abs())
    ratio = torch.where(equal, 0.0, ratio.nan_to_num(math.inf, math.inf))
    return float(ratio.max()) if ratio.numel() else 0.0


CASES: dict[str, Callable[..., list[Any]]] = {"attention": attention_cases}  # by operator family
RUN: dict[str, Callable[..., Outcome]] = {"attention": run_attention}
