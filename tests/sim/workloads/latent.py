"""Small problems for kernels of latent caches, called through `append_latent` and compared with the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from ptxsim.runner import RunResult

from bench.cases import latent as cases
from bench.cases import latent_read as reads
from bench.cases.latent import LatentCase, of_record
from bench.cases.latent_read import ReadCase
from cute_kernels.latent import read, write
from cute_kernels.latent.spec import LatentSpec, ReadSpec
from cute_kernels.records import BYTES, INDEX, ROWS
from wrappers.host.machine import HostMachine, override

from .common import Outcome, SimulatedMachine, outcome

FEW_SMS = 2


@dataclass(frozen=True)
class LatentScenario:
    """Calls, one after the other. All bytes that no row is written to must stay equal."""

    name: str
    calls: tuple[LatentCase | ReadCase, ...]


def read_cases(spec: ReadSpec) -> list[LatentScenario]:
    """Return problems of a kernel that reads rows."""
    raw, dtype = spec.dtype == "uint8", "bf16" if spec.dtype == "uint8" else spec.dtype
    record = ROWS if spec.record == BYTES else spec.record
    function = reads.INDEXER if record == INDEX else reads.COPY if raw else reads.OWN
    base = ReadCase(function, record, dtype, data="special")
    found = [
        base,
        replace(base, starts=not raw or record == ROWS, gap=528, lens=(0, 30, 3), page_size=3, int32=True, mixed=0b101),
        replace(base, hostile=True, shift=1, lens=(3, 9), page_size=1, fp32_scales=True),
        replace(base, lens=(70,), page_size=64),
    ]  # fmt: skip
    if record in (ROWS, "e4m3"):
        found += [replace(base, wide=1100, gap=6, lens=(3,)),
                  replace(base, wide=80, starts=True, hostile=True, mixed=0b001)]  # fmt: skip
    if record == "656":
        found.append(replace(base, function=reads.UPCONVERT, lens=(0, 4, 5)))
    return [LatentScenario("gathered", tuple(found))]


def latent_cases(spec: LatentSpec | ReadSpec, thorough: bool = False) -> list[LatentScenario]:
    """Return problems that a kernel can run."""
    if isinstance(spec, ReadSpec):
        return read_cases(spec)
    base = of_record(spec.record, dtype=spec.dtype)
    if spec.index or spec.joined:
        both = replace(base, index=3, norm="both", rope="fp32", heads=2 * spec.joined, tokens=19, pages=6)
        plain = replace(base, index=0, tokens=35, pages=10)
        return [LatentScenario("indexer", (
            both, plain, replace(plain, power_of_two=False),
            *(replace(plain, alone=name, tokens=4) for name in ("latent", "cache")),
            replace(base, index=1, rope="fp32", interleaved=True, tokens=3),
            replace(base, index=0, hostile=True, interleaved=True, rope="rows", norm="latent", int32=True,
                    mixed=0b110000),
            replace(base, index=2, places="table", tokens=12, power_of_two=False, shift=1, heads=spec.joined, q8=True),
            replace(base, index=1, places="lists", data="special", gap=528),
        ))]  # fmt: skip
    rotated = {"rotated": 0} if spec.record == "528_fp32" else {}
    first = [
        replace(base, data="special", heads=2),
        replace(base, data="special", hostile=True),
        replace(base, gap=528, tokens=19, int32=True, power_of_two=False, scale_tensor=True),
        replace(base, places="lists", int32=True, mixed=0b0101, gap=528, tokens=13, page_size=3, pages=6),
        replace(base, hostile=True, places="lists", shift=1, power_of_two=False, mixed=0b0011),
        replace(base, hostile=True, shift=1, heads=1, q8=True),
    ]
    first += [replace(base, alone=name, tokens=4) for name in ("latent", "rotated", "cache")]
    second = [
        replace(base, norm="latent", rope="" if rotated else "fp32", heads=0 if rotated else 2, places="table",
                mixed=0b001),
        replace(base, norm="both", rope="" if rotated else "rows", interleaved=True, hostile=True, int32=True,
                mixed=0b1, heads=0 if rotated else 1, q8=True, scale_tensor=True),
        replace(base, rope="" if rotated else "fp32", positions=False, places="table", tokens=10, mixed=0b010,
                in_place=base.rotated > 0 and not cases.RECORDS[spec.record].rotated_as),
    ]  # fmt: skip
    if spec.record in (ROWS, "e4m3"):
        second += [
            replace(base, latent=128, rotated=34, apart=True, places="lists", scale_tensor=True),
            replace(base, latent=16, rotated=0), replace(base, apart=True),
            replace(base, apart=True, alone="rotated cache", tokens=4),
            replace(base, rope="rows", heads=3, nope=False, in_place=True),
        ]  # fmt: skip
    if spec.record == "e4m3":
        quantised = replace(base, apart=True, rope="fp32", heads=2, q8=True)
        second += [replace(quantised, pages=1, page_size=9, places="rows"), replace(quantised, places="lists")]
    return [LatentScenario("copied", tuple(first)), LatentScenario("norm and rotation", tuple(second))]


def latent_structures(shipped: list[LatentSpec | ReadSpec]) -> list[LatentSpec | ReadSpec]:
    """Return one kernel per structure: a record is one, to write and to read."""
    return [spec for spec in shipped if spec.dtype != "fp16"]


def latent_features() -> list[LatentScenario]:
    """Return the covering set: keys without a rotated part, and pages of one row."""
    return [
        LatentScenario("no rotated part", (of_record("656", rotated=0), of_record("528", latent=512, rotated=0))),
        LatentScenario(
            "pages of one row", (of_record("584", page_size=1, pages=11), of_record("352", page_size=1, pages=11))
        ),
    ]


@contextmanager
def few_ctas() -> Iterator[None]:
    """Launch one CTA an SM in the block, so that warps write several rows, as those of large launches do."""
    waves = write.WAVES, read.WAVES
    write.WAVES = read.WAVES = 1
    try:
        yield
    finally:
        write.WAVES, read.WAVES = waves


def run_latent(spec: LatentSpec | ReadSpec | None, case: LatentScenario, arch: str, **how: Any) -> Outcome:
    launches: list[RunResult] = []
    simulated = SimulatedMachine(arch, launches, FEW_SMS, spec, how)

    def run(call: LatentCase | ReadCase) -> tuple[float, list[torch.Tensor]]:
        if isinstance(call, ReadCase):
            return run_read(call)
        got, want = (cases.make_inputs(call) for _ in range(2))
        with override(HostMachine()):
            cases.run(want)
        with override(simulated), few_ctas():
            cases.run_case(call, got)
        wrong = cases.difference(call, got, want)
        return float("inf") if wrong else 0.0, list(cases.written(got).values())

    def run_read(call: ReadCase) -> tuple[float, list[torch.Tensor]]:
        got, want = (reads.make_inputs(call) for _ in range(2))
        with override(HostMachine()):
            reads.run(call, want)
        with override(simulated), few_ctas():
            reads.run(call, got)
        return float("inf") if reads.difference(got, want) else 0.0, list(reads.outputs(got).values())

    return outcome(case.calls, run, launches)
