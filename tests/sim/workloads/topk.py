"""Small problems for top-k kernels, called through the public functions."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from ptxsim.runner import RunResult

from bench.cases import topk as cases
from bench.cases.topk import DECODE, PAGE_TABLE, PREFILL, RAGGED, TOP_K, TopKCase
from cute_kernels.topk import dispatch, radix
from cute_kernels.topk.spec import DTYPES, SortSpec, TopKSpec
from wrappers import TopKTieBreak, reference
from wrappers.host import machine

from .common import Outcome, SimulatedMachine, bits, outcome

SMALL, LARGE = TopKTieBreak.SMALL, TopKTieBreak.LARGE
SMS = 132  # of the simulated GPU, for dispatch


@dataclass(frozen=True)
class TopKScenario:
    """Calls, one after the other on the same plans; each must give the bits of the brute-force result. spec: the
    kernel that serves them; None for the kernel that dispatch chooses. times: launches of each call on the same
    memory."""

    name: str
    calls: tuple[TopKCase, ...]
    spec: TopKSpec | SortSpec | None = None
    times: int = 1


def kernel(name: str) -> TopKSpec:
    """Return the shipped spec with this name."""
    return next(plan for dtype in DTYPES for plan in dispatch.specs(dtype) if plan.name == name)


class SortingMachine(SimulatedMachine):
    """A machine that selects rows in torch and sorts them with a simulated kernel."""

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., None]:
        return reference.top_k_rows if op != dispatch.SORT else super().kernel(op, spec, arch)


def topk_cases(spec: TopKSpec | SortSpec, thorough: bool = False) -> list[TopKScenario]:
    """Return problems that a shipped kernel can run."""
    return sorted_cases(spec) if isinstance(spec, SortSpec) else selected_cases(spec)


def sorted_cases(spec: SortSpec) -> list[TopKScenario]:
    """Return two cases for a sort kernel: values of every pattern, with few and many equal ones, in rows that fill
    the CTA, a part of a warp, or one slot; k equals the row's length or is smaller."""
    most, part = spec.capacity, spec.capacity // 2 + 77
    data = ("special", "normal", "constant", "relu", "filler")
    first = [
        TopKCase(TOP_K, spec.dtype, 1, most, most, "all bits", sorted=True),
        TopKCase(TOP_K, spec.dtype, 1, 40, 1, "special", sorted=True),
    ]
    second = [
        TopKCase(TOP_K, spec.dtype, 5 if spec.items < 8 else 2, part + 301, part, data, sorted=True, tie_break=LARGE),
        TopKCase(TOP_K, spec.dtype, 1, 2000, 2000, "nine bits", sorted=True),
        TopKCase(TOP_K, spec.dtype, 2, 33, 33, ("nan", "-inf"), sorted=True),
    ]
    return [TopKScenario("full rows", tuple(first)), TopKScenario("parts of rows", tuple(second))]


def selected_cases(spec: TopKSpec) -> list[TopKScenario]:
    """Return two cases for a selection kernel: all functions, both tie breaks, and every way to settle ties, on rows
    that give every CTA of a cluster keys, the last slice ragged. If slices are streamed, also a row with more
    candidates than there is room for."""
    width, k, dtype = min(spec.capacity * spec.cluster, 2500 + 200 * spec.cluster) - 3, 300, spec.dtype
    first = [
        TopKCase(PAGE_TABLE, dtype, 2, width, k, ("shelf", "special"), (width + 9, width - 70), page_size=48,
                 batch_map=True, width_table=width // 16 - 9),
        TopKCase(PAGE_TABLE, dtype, 2, width, k, "low bits", (width, k), starts=(-7, 900)),
        TopKCase(TOP_K, dtype, 1, width, k, "256 ties"),
    ]  # fmt: skip
    second = [
        TopKCase(RAGGED, dtype, 2, width, k, ("filler", "257 ties"), (width, width - 17), starts=(3, -2), shift=1,
                 pad=4, tie_break=LARGE),
        TopKCase(PREFILL, dtype, 1, width, k, "coarse", (width - 9,), starts=(5,), shift=3),
        TopKCase(DECODE, dtype, 2, width, k, "huge", (width,), next_n=2),
    ]  # fmt: skip
    if spec.stream:
        room = (spec.capacity + 700) * spec.cluster
        second.append(TopKCase(RAGGED, dtype, 1, room, k, "constant", tie_break=LARGE))
    return [TopKScenario("first ties", tuple(first)), TopKScenario("last ties", tuple(second))]


def topk_structures(shipped: list[TopKSpec | SortSpec]) -> list[TopKSpec | SortSpec]:
    """Return one kernel per structure: one CTA; clusters in which threads add up all histograms and clusters that
    merge them; rows held and streamed; both widths of keys and both sizes of a CTA; both widths of keys for
    sorting."""
    names = (
        "fp32_c1t256_n8192", "bf16_c1t512_n32768", "fp32_c3t512_n46080", "bf16_c4t512_n92160", "fp32_c16t512_n16384",
        "bf16_c1t512_s6144", "fp32_c2t512_s6144", "bf16_c8t512_s6144", "fp32_t512i4", "bf16_t512i4",
    )  # fmt: skip
    return [spec for spec in shipped if spec.name in names]


@contextmanager
def forced(spec: TopKSpec | SortSpec | None) -> Iterator[None]:
    """Make public functions select, or sort, with `spec`. Dispatch gives large kernels only to large problems; here
    they run small ones, since a simulated key costs a million times as long as a real one."""
    if spec is None:
        yield
        return
    sorts = isinstance(spec, SortSpec)
    chosen = (lambda problem, arch: spec) if sorts else lambda problem, arch: (next(iter(dispatch.KERNELS)), spec)
    with mock.patch.object(dispatch, "sort_spec" if sorts else "select", chosen):
        yield


def run_topk(spec: TopKSpec | SortSpec | None, case: TopKScenario, arch: str, **how: Any) -> Outcome:
    launches: list[RunResult] = []
    spec = spec or case.spec
    kind = SortingMachine if isinstance(spec, SortSpec) else SimulatedMachine

    def run(call: TopKCase) -> tuple[float, list[torch.Tensor]]:
        inputs, right, results = cases.make_inputs(call), True, []
        before = {name: bits(t).clone() for name, t in inputs.items() if checked(name, t)}
        expected = cases.brute(call.function, inputs)
        for _ in range(case.times):
            got = cases.call(call.function, inputs)
            try:
                cases.same(got, expected)
            except AssertionError:
                right = False
            right &= all(torch.equal(bits(inputs[name]), t) for name, t in before.items())
            right &= all(intact(inputs[name]) for name in cases.OUTPUTS[call.function] if name in inputs)
            results += [got[name].clone() for name in sorted(got)]
        return 0.0 if right else math.inf, results

    with machine.override(kind(arch, launches, SMS, None, how)), forced(spec):
        return outcome(case.calls, run, launches)


def checked(name: str, value: Any) -> bool:
    """Return whether an argument is a tensor that no call may change, and small enough to compare."""
    return (
        isinstance(value, torch.Tensor)
        and name not in ("out", "out_raw_indices", "indices")
        and value.untyped_storage().nbytes() < cases.LARGE
    )


def intact(output: torch.Tensor) -> bool:
    """Return whether the memory before, between and after the rows of an output of `make_inputs` is unchanged; for a
    large output only its ends are checked."""
    around = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage())
    if len(around) < cases.LARGE:
        around = around.clone()
        around.as_strided(output.shape, output.stride(), output.storage_offset()).fill_(cases.POISON)
        return bool((around == cases.POISON).all())
    k = output.shape[1]
    return bool((around[:k] == cases.POISON).all() and (around[-k:] == cases.POISON).all())


def topk_features() -> list[TopKScenario]:
    """Return the covering set: the guarantees of the functions, each on a kernel for which it matters."""
    return [
        *patterns(),
        *ties(),
        *bounds(),
        *pages(),
        *streams(),
        *memory(),
        TopKScenario("plans", tuple(plans())),
    ]


def patterns() -> list[TopKScenario]:
    """Return cases with every kind of bit pattern, both tie breaks, with the values themselves and without."""
    found = []
    for name in ("fp32_c1t256_n8192", "bf16_c4t512_n92160", "fp16_c2t512_n92160"):
        plan = kernel(name)
        call = TopKCase(TOP_K, plan.dtype, 4, 2700, 300)
        special = ("special", "all bits", "tiny", "negative")
        calls = [replace(call, data=special, sorted=True), replace(call, data=special[::-1], tie_break=LARGE)]
        calls.append(TopKCase(RAGGED, plan.dtype, 4, 2700, 300, ("nan", "relu", "huge", "filler"), shift=5, pad=1))
        calls.append(TopKCase(RAGGED, plan.dtype, 1, 2700, 900, "seam"))
        calls.append(TopKCase(RAGGED, plan.dtype, 1, 500, 400, "huge"))  # few ties in the bin of filler
        found.append(TopKScenario(f"patterns {plan.dtype}", tuple(calls), plan))
    return found


def ties() -> list[TopKScenario]:
    """Return cases with thousands of equal keys at the boundary, and with as many as are listed one by one; few or
    nearly all of them are selected."""
    found = []
    for name in ("fp32_c1t256_n8192", "fp32_c3t512_n46080", "bf16_c4t512_n92160", "fp32_c16t512_n16384"):
        plan = kernel(name)
        width, above = 3000, 3000 // 32
        data = ("256 ties", "257 ties", "257 in a bin", "shelf")
        some = (0, 1, 130, 256, 257) if plan.cluster == 1 else (130, 256, 257)
        calls = [
            TopKCase(RAGGED, plan.dtype, 4, width, above + more, data, tie_break=which)
            for more, which in product(some, (SMALL, LARGE))
        ]
        calls += [TopKCase(RAGGED, plan.dtype, 1, width, 1200, "shelf", tie_break=which) for which in (SMALL, LARGE)]
        calls += [TopKCase(RAGGED, plan.dtype, 1, 260, 200, "filler", shift=1)]  # fewer ties than are listed
        found.append(TopKScenario(f"ties {name}", tuple(calls), plan))
    return found


def bounds() -> list[TopKScenario]:
    """Return cases with windows of any bounds, for every function; k against the length of the window; slices that
    fill a CTA."""
    low, high = cases.INT_MIN, cases.INT_MAX
    wild = (low, -1, 0, 1, 255, 256, 257, high, 900, 8192)
    starts = (100, low, -5, high, 3, 700, 40, -1, 899, 1)
    calls = [
        TopKCase(RAGGED, "fp32", 10, 900, 256, "normal", wild),
        TopKCase(RAGGED, "fp32", 10, 900, 256, "normal", wild, starts=starts, shift=2, pad=3),
        TopKCase(PREFILL, "fp32", 10, 900, 256, "normal", wild, starts=starts, pad_out=5),
        TopKCase(DECODE, "fp32", 9, 900, 256, "normal", (low, high, 257), next_n=3),
        TopKCase(DECODE, "fp32", 6, 900, 256, "normal", (1, 902), next_n=3),
        TopKCase(DECODE, "fp32", 6, 900, 256, "normal", (low, 257, high, 900, 1, 600), next_n=3, each_row=True),
        TopKCase(DECODE, "fp32", 4, 900, 900, "normal", (899, 900, -1, 300)),
        TopKCase(PREFILL, "fp32", 3, 900, 256, "normal", (900, 600, 257), starts=(0, 1, 2), stride=3, pad=1),
        *(TopKCase(TOP_K, "fp32", 1, 900, k) for k in (1, 2, 899, 900)),
        TopKCase(RAGGED, "fp32", 2, 5, 900, "special", (5, 3)),
        TopKCase(RAGGED, "fp32", 4, 7000, 256, "normal", (1540, 2569, 3590, 6666), starts=(0, 1, 2, 3)),
    ]
    full = [
        ("fp32_c1t256_n8192", 8192, (1, 4100, 8191, 8192)),
        ("bf16_c1t256_n16384", 16384, (12000, 16383, 16384)),
        ("fp32_c16t512_n16384", 262144, (2048,)),
        ("fp16_c2t512_n92160", 184320, (3,)),
    ]
    found = [TopKScenario("bounds", tuple(calls), kernel("fp32_c1t256_n8192"))]
    cluster = tuple(replace(call, dtype="bf16") for call in calls[1:5])
    half = replace(calls[-1], dtype="fp16", width=12000, lengths=(2565, 4650, 6677, 11111))
    found.append(TopKScenario("bounds of 16 bits", (half,), kernel("fp16_c1t256_n16384")))
    found.append(TopKScenario("bounds of a cluster", cluster, kernel("bf16_c4t512_n92160")))
    for name, width, ks in full:
        dtype = name[:4]
        calls = [TopKCase(TOP_K, dtype, 1, width, k, "normal" if k < width // 2 else "special") for k in ks]
        found.append(TopKScenario(f"full {name}", tuple(calls), kernel(name)))
    return found


def pages() -> list[TopKScenario]:
    """Return cases with page tables: page sizes, missing rows and columns, entries that are negative or wrap around."""
    call = TopKCase(PAGE_TABLE, "fp32", 6, 900, 200, "normal", (900, 800, 201, 150, 0, 900), shift=1, pad_out=3)
    other = (2, 0, -1, 7, cases.INT_MIN, 1)
    first = (0, 3, -2, cases.INT_MAX, cases.INT_MIN, 5)
    calls = [
        replace(call),
        replace(call, given=False, tie_break=LARGE),
        replace(call, starts=(0, 100, -5, 9, 1, 899)),
        replace(call, starts=(0, 100, -5, 9, 1, 899), table_starts=first),
        replace(call, batch_map=other, width_table=300),
        replace(call, page_size=4, batch_map=other, starts=(0, 7, 0, 0, 0, 0), table_starts=first),
        replace(call, page_size=65, width_table=9),
        replace(call, page_size=1 << 30),
        replace(call, k=901, page_size=2),
    ]
    large = replace(call, dtype="bf16", page_size=16, batch_map=True)
    return [
        TopKScenario("pages", tuple(calls), kernel("fp32_c1t256_n8192")),
        TopKScenario("pages of a cluster", (large, replace(large, tie_break=LARGE)), kernel("bf16_c4t512_n92160")),
    ]


def streams() -> list[TopKScenario]:
    """Return cases with candidates: a sample that misleads either way, more candidates than there is room for, the
    largest k."""
    found = []
    for name in ("fp32_c1t512_s6144", "bf16_c1t512_s6144"):
        plan = kernel(name)
        most, call = radix.max_k(plan), TopKCase(RAGGED, plan.dtype, 2, 11000, 1000)
        sets = {
            "sample misleads": [
                replace(call, data=("sample too high", "sample too low")),
                replace(call, data="sample too high", k=120, rows=1),  # candidates are few less than k
                replace(call, data=("normal", "constant"), k=1),
            ],
            "last ties": [replace(call, data=("filler", "sample too low"), k=2000, tie_break=LARGE, shift=1)],
            "largest k": [
                TopKCase(TOP_K, plan.dtype, 2, 7800, most, ("special", "constant")),
                TopKCase(RAGGED, plan.dtype, 2, 7800, most, "special", (most, most + 1), starts=(3, 0)),
            ],
            "largest k, last ties": [
                TopKCase(TOP_K, plan.dtype, 1, 7800, most, data, tie_break=LARGE) for data in ("ascending", "constant")
            ],
        }
        found += [TopKScenario(f"candidates {name}, {what}", tuple(calls), plan) for what, calls in sets.items()]
    for name, width in (("fp32_c2t512_s6144", 24000), ("bf16_c8t512_s6144", 70000)):
        plan = kernel(name)
        data = ("cluster's sample too high", "cluster's sample too low")
        call = TopKCase(RAGGED, plan.dtype, 2, width, 1500, data)
        calls = [call, replace(call, data="constant", rows=1), replace(call, data="filler", rows=1, tie_break=LARGE)]
        found.append(TopKScenario(f"candidates {name}", tuple(calls), plan))
    return found


def memory() -> list[TopKScenario]:
    """Return cases with offsets beyond 2^31 bytes of rows, windows and tables; a second launch on the same memory;
    many rows."""
    far = TopKCase(RAGGED, "fp32", 3, 700, 64, "normal", (700, 690, 700), pad=(1 << 29) + 1)
    hollow = TopKCase(RAGGED, "fp32", 1, (1 << 29) + 700, 64, hollow=1 << 29, lengths=(699,), starts=((1 << 29) + 1,))
    table = TopKCase(PAGE_TABLE, "fp32", 3, 700, 64, batch_map=(2, 1, 0), pad_table=(1 << 29) + 1)
    output = TopKCase(PREFILL, "fp32", 3, 700, 64, pad_out=(1 << 29) + 1)
    again = TopKCase(PAGE_TABLE, "fp32", 2, 900, 64, ("shelf", "257 ties"), page_size=4)
    return [
        TopKScenario("far rows", (far, hollow, table, output), kernel("fp32_c1t256_n8192")),
        TopKScenario(
            "far rows of 16 bits", (replace(far, dtype="bf16", pad=(1 << 30) + 1),), kernel("bf16_c4t512_n92160")
        ),
        TopKScenario("two launches", (again,), kernel("fp32_c3t512_n46080"), times=2),
        TopKScenario("two launches, streamed", (again,), kernel("fp32_c1t512_s6144"), times=2),
    ]


def plans() -> Iterator[TopKCase]:
    """Yield calls that differ in one parameter from a base: each must run as asked, on the kernel that dispatch
    chooses."""
    for function in cases.FUNCTIONS:
        base = TopKCase(function, "fp32", 2, 600, 40, "coarse", next_n=2 if function == DECODE else 1)
        changes: list[dict[str, Any]] = [{}, {"k": 41}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"pad": 1}, {"rows": 4}]
        changes += (
            [{"width": 601}, {"shift": 1}, {"next_n": 1}] if function == DECODE else [{"width": 601}, {"shift": 1}]
        )
        changes += [{"stride": 2}] if function in cases.PER_ROW else [{"tie_break": LARGE}]
        if function == PAGE_TABLE:
            changes += [{"page_size": 2}, {"starts": True}, {"batch_map": True}, {"given": False}, {"width_table": 20}]
        for change in changes:
            yield replace(base, **change)
