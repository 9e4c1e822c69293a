"""Small problems for every shipped top-k kernel."""

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.cases import attention as cases
from cute_kernels.topk.args import ENDS, LENGTHS, TopKArgs
from cute_kernels.topk.spec import TopKSpec
from wrappers import reference

from .. import launcher
from .common import Outcome


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
