"""Small problems for kernels that write rows, called through the public functions and compared with the reference."""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from ptxsim.runner import RunResult

from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from cute_kernels.cache_write.spec import CacheWriteSpec
from wrappers.cache_write import plan
from wrappers.host.machine import HostMachine, override

from .common import SMS, Outcome, SimulatedMachine, outcome
from .prepared import PreparedScenario, dequantize_cases, gather_cases, key_append_cases, run_prepared


@dataclass(frozen=True)
class CacheWriteScenario:
    """Calls, one after the other. Rows that are copied or quantised, without a norm or rotation, must give the bits of
    the reference; all bytes that no row is written to must stay equal. threads: as `plan.THREADS`; with 1, a group of
    lanes has all rows of a token, as if there were many tokens."""

    name: str
    calls: tuple[CacheWriteCase, ...]
    threads: int = plan.THREADS


def cache_write_cases(spec: CacheWriteSpec, thorough: bool = False) -> list[CacheWriteScenario | PreparedScenario]:
    """Return problems that a kernel can run."""
    if spec.dequantises:
        return [*dequantize_cases()]
    if spec.gather:
        return [*gather_cases()]
    base = CacheWriteCase(spec.dtype, spec.cache)
    if spec.by_token:
        return [*with_row_scales(replace(base, scales="rows"))]
    if spec.cache == "nvfp4":
        base = replace(base, page_size=8)
    if spec.transform:
        return [*transformed(base), *([] if spec.quantised else key_append_cases())]
    return [*appended(base)]


OPERANDS = ("k", "v", "kv 0", "kv 1")  # of all calls that write a cache


def appended(base: CacheWriteCase) -> list[CacheWriteScenario]:
    odd = {base.dtype: (72, 50), "nvfp4": (112, 48)}.get(base.cache, (40, 72))
    first = [
        base,
        replace(base, shift=1, tokens=5),
        replace(base, cache_shift=4, tokens=5),
        replace(base, layout="HND", stacked=False, index=torch.int64, scales="heads", interleaved_sf=True, tokens=17),
        replace(base, stacked=False, page_size=5, pages=9, fewer_v=4, scales="tensor", data="special", dims=odd),
    ]
    second = [
        replace(base, places="lists", page_size=1, pages=23, stacked=False, beside=True, tokens=13),
        replace(base, places="lists", index=torch.int64, mixed=0b0101, hostile=True, tokens=33),
        replace(base, hostile=True, index=torch.int64, dims=(576, 576), heads=(0, 1)),
        replace(base, places="table", mixed=0b001, hostile=True, tokens=33, page_size=4),
        replace(base, places="table", index=torch.int64, mixed=0b010, scales="tensor", interleaved_sf=True,
                layout="HND", tokens=17),
        replace(base, shift=1, places="lists", tokens=17, index=torch.int64, mixed=0b0011),
    ]  # fmt: skip
    first += [replace(base, alone=name, stacked=False, tokens=2) for name in OPERANDS]
    if base.dtype == "uint8":
        first = [replace(case, data="normal") for case in first]
    return [CacheWriteScenario("slots", tuple(first), 1), CacheWriteScenario("lists", tuple(second))]


def transformed(base: CacheWriteCase) -> list[CacheWriteScenario]:
    base = replace(base, heads=(4, 2), tokens=7)
    q8 = base.cache != base.dtype
    first = [
        replace(base, norm="shared", rope="angles", q8=q8, scales="heads"),
        replace(base, norm="heads", rope="cache", interleaved=True, rotary_dim=64, places="lists", stacked=False,
                index=torch.int64, mixed=0b01010),
        replace(base, dims=(96, 64), stacked=False, rope="cache", rotary_dim=80, norm="k", layout="HND", heads=(3, 3)),
    ]  # fmt: skip
    second = [
        replace(base, dims=(512, 512), heads=(1, 1), rope="llama31", places="table", norm="shared"),
        replace(base, dims=(256, 256), rope="angles", rotary_dim=16, hostile=True, places="lists", in_place=True),
        replace(base, dims=(64, 64), heads=(0, 2), rope="cache", hostile=True, tokens=31, index=torch.int64, mixed=0b1),
        replace(base, dims=(48, 48), heads=(2, 2), q8=q8, scales="tensor"),
        replace(base, norm="shared", rope="angles", heads=(2, 2), q8=q8, scales="tensor"),
        replace(base, shift=1, heads=(2, 2), tokens=3),
        replace(base, cache_shift=4, heads=(2, 2), tokens=3),
        replace(base, pages=0, rope="angles", interleaved=True, tokens=2),
        replace(
            base, shift=1, norm="heads", rope="cache", q8=q8, places="table", interleaved_sf=True, index=torch.int64
        ),
    ]
    one = replace(base, heads=(2, 1), norm="shared", q8=q8, stacked=False, tokens=2)
    second += [replace(one, alone=name) for name in (*OPERANDS, "q", "out", "q_weight", "k_weight")]
    second += rotated(base)
    return [CacheWriteScenario("norm and rotation", tuple(first)), CacheWriteScenario("places", tuple(second), 1)]


def with_row_scales(base: CacheWriteCase) -> list[CacheWriteScenario]:
    """Return calls that find a scale for each row: of rows that are quantised alone, normalised, or rotated."""
    plain = [
        base,
        replace(base, shift=1, tokens=5),
        replace(base, layout="HND", stacked=False, index=torch.int64, tokens=17),
        replace(base, stacked=False, page_size=5, pages=9, fewer_v=4, dims=(40, 72), data="special"),
        replace(base, places="lists", page_size=1, pages=23, stacked=False, beside=True, tokens=13),
        replace(base, places="table", hostile=True, tokens=33, page_size=4, dims=(512, 512), heads=(0, 1)),
    ]
    both = transformed(base)
    turned = [replace(x, calls=tuple(replace(call, scales="rows") for call in x.calls)) for x in both]
    return [CacheWriteScenario("rows", tuple(plain), 1), *turned]


def rotated(base: CacheWriteCase) -> list[CacheWriteCase]:
    """Return calls of FlashInfer's RoPE functions: K goes to a tensor of its own, or over itself."""
    base = replace(base, places="rows", heads=(3, 2), stacked=False)
    if base.cache == base.dtype:
        by_requests = replace(base, places="requests", rope="angles")
        return [
            by_requests,
            replace(by_requests, rope="llama31", index=torch.int64, mixed=0b1, hostile=True, interleaved=True,
                    tokens=19),
            replace(base, rope="cache", dims=(80, 80), rotary_dim=48, hostile=True),
        ]  # fmt: skip
    if base.cache == "nvfp4" or base.scales == "rows":
        return []
    return [
        replace(base, rope="cache", rotary_dim=64, stacked=True, index=torch.int64),
        replace(base, rope="cache", dims=(96, 96), rotary_dim=32, interleaved=True, hostile=True),
    ]


def cache_write_structures(shipped: list[CacheWriteSpec]) -> list[CacheWriteSpec]:
    """Return one kernel per structure: bytes and rows that are copied, both kinds of quantisation, transforms, and the
    kernel that dequantises."""
    found = [spec for spec in shipped if spec.dtype in ("bf16", "nvfp4") or not spec.quantised and not spec.transform]
    return [spec for spec in found if spec.dtype != "fp16"]


def cache_write_features() -> list[CacheWriteScenario]:
    """Return the covering set: each type of a cache with e5m2, many heads and tokens, special values."""
    base = CacheWriteCase()
    kinds = [replace(base, cache=cache, data="special", tokens=20) for cache in ("e4m3", "e5m2", "nvfp4")]
    many = replace(base, tokens=40, heads=(16, 8), norm="shared", rope="angles", pages=9)
    e5m2 = replace(many, cache="e5m2", tokens=5, q8=True)
    return [
        CacheWriteScenario("special values", tuple(kinds)),
        CacheWriteScenario("many rows", (many, e5m2)),
        CacheWriteScenario("types of plans", tuple(plans())),
    ]


def plans() -> list[CacheWriteCase]:
    """Return calls that differ in one property from a base: each must run as asked."""
    base = CacheWriteCase(tokens=5, dims=(32, 32))
    changes: tuple[Any, ...] = (
        {}, {"tokens": 6}, {"dtype": "fp16", "cache": "fp16"}, {"dims": (48, 32), "stacked": False}, {"page_size": 4},
        {"layout": "HND"}, {"index": torch.int64}, {"places": "lists"}, {"places": "table"}, {"cache": "e4m3"},
        {"cache": "e4m3", "scales": "heads"}, {"cache": "e4m3", "scales": "tensor"}, {"cache": "nvfp4"},
        {"cache": "nvfp4", "interleaved_sf": True}, {"heads": (2, 2)}, {"heads": (2, 2), "norm": "shared"},
        {"heads": (2, 2), "rope": "angles"}, {"heads": (2, 2), "rope": "angles", "interleaved": True},
        {"heads": (2, 2), "rope": "llama31"}, {"heads": (2, 2), "rope": "cache"}, {"norm": "k"},
        {"heads": (2, 2), "rope": "angles", "places": "rows"},
        {"heads": (2, 2), "rope": "angles", "places": "requests"},
    )  # fmt: skip
    return [replace(base, **change) for change in changes]


def run_cache_write(
    spec: CacheWriteSpec | None, case: CacheWriteScenario | PreparedScenario, arch: str, **how: Any
) -> Outcome:
    if isinstance(case, PreparedScenario):
        assert spec is not None
        return run_prepared(spec, case, arch, **how)
    launches: list[RunResult] = []
    simulated = SimulatedMachine(arch, launches, SMS, spec, how)

    def run(call: CacheWriteCase) -> tuple[float, list[torch.Tensor]]:
        inputs = cases.make_inputs(call)
        expected = cases.copied(inputs, "cpu")
        function = cases.function_of(call)
        with override(HostMachine()):
            function(**expected)
        with override(simulated), mock.patch.object(plan, "THREADS", case.threads):
            function(**inputs)
        return cases.difference(call, inputs, expected), cases.storages(inputs)

    return outcome(case.calls, run, launches)
