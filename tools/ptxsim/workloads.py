"""Small problems for every shipped kernel: the public function runs on the simulator, compared with the reference.

Each variant is ragged, fills unused memory and outputs with NaN, and takes another page size, layout and modifier, so
that together they reach each path of a kernel.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from cute_kernels.attention import sm90
from cute_kernels.attention.spec import FEW_ROWS, AttentionSpec
from cute_kernels.topk.args import ENDS, LENGTHS, TopKArgs
from cute_kernels.topk.spec import TopKSpec
from tests import cases
from tests.cases import AttentionCase
from wrappers import attention, decode, prefill, reference, scratch

from . import launcher
from .run import Result

SMS = 2  # of the simulated GPU: CTAs of a persistent grid
SPLIT_SMS = 7  # where they share the keys of a request


@dataclass(frozen=True)
class Outcome:
    """error: largest difference to the reference over its tolerance, at most 1 is right. bits: digest of the output."""

    error: float
    bits: str
    seconds: float
    result: Result


@contextmanager
def simulated(
    arch: str, results: list[Result], sms: int = SMS, only: AttentionSpec | None = None, **how: Any
) -> Iterator[None]:
    """Public functions take CPU tensors to compiled kernels, which the simulator runs; how: as `run.run` takes it.
    only: the kernel that they must choose."""

    def kernel(op: str, spec: Any, arch: str) -> Callable[..., None]:
        if only not in (None, spec):
            raise ValueError(f"the call is served by {spec.name}, not by {only.name if only else only}")
        return launcher.function(op, spec, arch, results, **how)

    with (
        mock.patch.multiple(scratch, _tickets={}, _kept={}, _is_capturing=lambda: False, _raw_stream=lambda index: 0),
        mock.patch.multiple(attention, _plans={}),
        mock.patch.multiple(attention.runtime, kernel=kernel, machine=lambda device: (arch, sms)),
    ):
        yield


def narrow(spec: AttentionSpec) -> bool:
    """Whether calls with many rows have another kernel, unless they ask for `batch_invariant`."""
    return spec.split and not spec.wide and spec.head_dim_qk in sm90.WIDE_DIMS


def attention_cases(spec: AttentionSpec, thorough: bool = False) -> list[AttentionCase]:
    """Cases whose kernel is `spec`. thorough: every box size, and lengths with which every pipeline wraps around."""
    common: dict[str, Any] = {
        "dtype": spec.dtype,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        "causal": spec.mask.causal,
        "soft_cap": 12.0 if spec.soft_cap else 0.0,
        "kv_dtype": {"e4m3": "fp8"}.get(spec.kv.dtype, spec.kv.dtype),
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
    if narrow(spec):
        second = (1, 2, 1)
    page_size = 16 if spec.dtype == "bf16" else 8  # with 64 below, every size of TMA box
    stacked = "stacked" if spec.head_dim_qk == spec.head_dim_vo else "tuple"
    cases = [
        AttentionCase("ragged", q_lens=first, kv_lens=(19, 7, 290), page_size=page_size, sink=True, window_left=window,
                      layout="NHD", strided_q=True, **heads, **common),
        AttentionCase("short", q_lens=second, kv_lens=(256, 0, 140), page_size=64, lse=False, cache=stacked,
                      window_left=other, **heads, **common),
    ]  # fmt: skip
    if spec.split:  # every soft cap is an argument
        cases[1] = replace(cases[1], soft_cap=12.0)
    if not thorough:
        return cases
    more: dict[str, Any] = dict(q_lens=first, kv_lens=(1000, 0, 700), window_left=-1 if other < 0 else 600)
    return [*cases, *(AttentionCase(f"page {p}", page_size=p, **more, **heads, **common) for p in (8, 16, 64))]


def run_attention(spec: AttentionSpec, case: AttentionCase, arch: str, **how: Any) -> Outcome:
    inputs = cases.make_inputs(case)
    expected, expected_lse = cases.reference_of(inputs)
    results: list[Result] = []
    start = time.perf_counter()
    with simulated(arch, results, SPLIT_SMS if spec.split else SMS, spec, **how):
        if spec.split:
            many = max(case.q_lens) * case.heads_q // case.heads_kv > FEW_ROWS
            got = decode.trtllm_batch_decode_with_kv_cache(
                **cases.as_decode(inputs), batch_invariant=many and narrow(spec)
            )
        else:
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


@dataclass(frozen=True)
class TopKCase:
    """Rows of `length` scores whose bounds are ragged. plateaus: most scores are equal; then the last ties get in, rows
    end where `lengths` says, begin at `starts`, and indices get an offset; else they go through a page table."""

    name: str
    length: int
    k: int
    plateaus: bool = False


def topk_cases(spec: TopKSpec, thorough: bool = False) -> list[TopKCase]:
    """Cases that a kernel of `spec` can run: every CTA of a cluster has keys, the last slice is ragged. Plateaus are
    more than a small cluster that streams its slices has room for."""
    length = min(spec.capacity * spec.cluster, 2500 + 200 * spec.cluster) - 3
    if spec.stream and spec.cluster <= 2:
        length = 2 * (spec.capacity + 900) * spec.cluster - 3
    return [TopKCase("pages", length, 300), TopKCase("plateaus", length // 2, 70, True)]


def topk_args(spec: TopKSpec, case: TopKCase) -> TopKArgs:
    """Rows of a wider, misaligned tensor whose other elements are NaN; outputs poisoned."""
    generator = torch.Generator().manual_seed(0)
    rows, k, dtype = 3, case.k, cases.DTYPES.get(spec.dtype, torch.float32)
    buffer = torch.full((rows, case.length + 5), math.nan)
    buffer[:, 1 : 1 + case.length] = torch.randn(rows, case.length, generator=generator)
    if case.plateaus:
        buffer = buffer.clamp(min=0.8)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    none, blank = ints(), lambda dtype: torch.full((rows, k), -7).to(dtype)  # noqa: E731
    values = torch.empty(0, k, dtype=dtype) if case.plateaus else blank(dtype)  # only where no row is padded
    table = torch.randint(0, 1000, (2, case.length // 16 + 2), generator=generator, dtype=torch.int32)
    pages = (
        (table, ints(1, 0, 1), ints(1, 0, 0), none)
        if not case.plateaus
        else (ints()[None][:0], none, none, ints(5, 0, -9))
    )
    starts, lengths = (
        (none, ints(k, case.length + 9, k + 1))
        if not case.plateaus
        else (ints(-3, 17, 400), ints(case.length, case.length - 1, 300))
    )
    return TopKArgs(
        buffer.to(dtype)[:, 1 : 1 + case.length], starts, lengths, blank(torch.int32), blank(torch.int32), values,
        blank(torch.int64), *pages, ENDS if case.plateaus else LENGTHS, 1, 0 if case.plateaus else 4, k,
        int(case.plateaus), 1,
    )  # fmt: skip


def run_topk(spec: TopKSpec, case: TopKCase, arch: str, **how: Any) -> Outcome:
    args, expected = topk_args(spec, case), topk_args(spec, case)
    reference.top_k_rows(*expected)
    start = time.perf_counter()
    result = launcher.simulate("topk.radix", spec, args, arch, **how)
    seconds = time.perf_counter() - start
    got = [t.view(torch.int16) if t.element_size() == 2 else t for t in args[3:7]]
    want = [t.view(torch.int16) if t.element_size() == 2 else t for t in expected[3:7]]
    equal = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want))
    bits = hashlib.sha256(b"".join(t.numpy().tobytes() for t in got)).hexdigest()
    return Outcome(0.0 if equal else math.inf, bits, seconds, result)


CASES: dict[str, Callable[..., list[Any]]] = {"attention": attention_cases, "topk": topk_cases}  # by operator family
RUN: dict[str, Callable[..., Outcome]] = {"attention": run_attention, "topk": run_topk}
