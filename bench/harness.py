"""Shared parts of all benchmarks: ceilings of the machine in the same run, providers that may be measured, and results
as csv rows and as a printed table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .results import Environment, ResultRow, with_ratios
from .timing import Call, CallClock, CudaClock, HostClock, Timing, input_sets, interleave

T = TypeVar("T")
L2_BYTES = 50 << 20  # L2 size of Hopper; torch reports 60 MB on an H200
MATMUL = 8192
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Ceilings:
    """Rates of this machine in this run: bf16 matmul in TFLOP/s, device copy in GB/s (read plus written), and e4m3
    matmul in TFLOP/s (0 if torch has none for the device)."""

    tflops: float
    gbps: float
    fp8_tflops: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """The time of one provider on one case."""

    case: str
    provider: str
    timing: Timing
    tflops: float | None = None
    gbps: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Setup:
    """Settings of a run. The tests pass a fake clock and the CPU."""

    providers: tuple[str, ...]
    rounds: int = 15
    device: str = "cuda"
    clock: CallClock = field(default_factory=CudaClock)
    host_clock: CallClock = field(default_factory=lambda: HostClock(torch.cuda.synchronize))


def ceilings(setup: Setup) -> tuple[Ceilings, list[Measurement]]:
    """Measure a matmul of random data (zeros run faster than any real data) and a copy between two large buffers."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "ceiling-matmul-bf16": lambda i: torch.mm(a, b, out=c),
        "ceiling-copy": lambda i: target.copy_(source),
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        x, y, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        calls["ceiling-matmul-fp8"] = lambda i: torch._scaled_mm(
            x, y.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    times = interleave(calls, setup.clock, 1, setup.rounds)
    rates = {name: 2 * MATMUL**3 / t.median / 1e6 for name, t in times.items() if "matmul" in name}
    copy = times["ceiling-copy"]
    found = Ceilings(
        rates["ceiling-matmul-bf16"], 2 * COPY_BYTES / copy.median / 1e3, rates.get("ceiling-matmul-fp8", 0.0)
    )
    rows = [Measurement(name, "torch", times[name], tflops=rate) for name, rate in rates.items()]
    return found, [*rows, Measurement("ceiling-copy", "torch", copy, gbps=found.gbps)]


def rotated(make: Callable[[int], T], size: Callable[[T], int]) -> list[T]:
    """Make input sets: make(seed) has size(set) bytes. There are enough sets that none is still in the L2 when its turn
    comes again."""
    first = make(0)
    return [first, *(make(seed) for seed in range(1, input_sets(size(first), L2_BYTES)))]


def no_row(name: str, reason: str) -> None:
    print(f"  no row: {name}: {reason}", flush=True)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def ready(name: str, make: Callable[[], Callable[[], T]], check: Callable[[T], str | None]) -> Callable[[], T] | None:
    """Return the call that make() returns if its result passes the check. Otherwise print the reason and return
    None."""
    try:
        run = make()
        wrong = check(run())
    except Exception as error:  # a peer may refuse a shape in its own way
        wrong = reason(error)
    if wrong:
        no_row(name, wrong)
    return None if wrong else run


def calls_of(name: str, make: Callable[[], Callable[[], T]], check: Callable[[T], str | None]) -> dict[str, Call]:
    """Return {name: the call} if it is `ready`, else {}."""
    run = ready(name, make, check)
    return {} if run is None else {name: in_turns([run])}


def in_turns(runs: Sequence[Callable[[], object]]) -> Call:
    """Return a call that runs runs[i] on input set i."""
    return lambda i: runs[i]()


def host_times(calls: Mapping[str, Call], setup: Setup) -> dict[str, Timing]:
    """Measure host times on a tiny case: its kernel takes less time than the call, so the GPU's queue stays short."""
    return interleave(calls, setup.host_clock, 1, rounds=20, warmup=10, target_us=2000) if calls else {}


def rows_of(results: list[Measurement], env: Environment) -> list[ResultRow]:
    """Return the results as csv rows."""
    return with_ratios(env.row(r.case, r.provider, r.timing.median, tflops=r.tflops, gbps=r.gbps) for r in results)


def table(results: list[Measurement], rows: list[ResultRow], top: Ceilings) -> str:
    """Return the printed table: one line per case and provider. The column "of mm" is the share of the case's floor
    rate."""
    floors = {r.case: r.tflops for r in results if r.provider == "floor" and r.tflops}
    lines = [
        f"matmul {top.tflops:.0f} TFLOP/s, copy {top.gbps:.0f} GB/s",
        f"{'case':46} {'provider':13} {'us':>9} {'spread':>7} {'TFLOP/s':>8} {'of mm':>6} {'ratio':>6}  variant",
    ]
    for r, row in zip(results, rows):
        rate = f"{r.tflops:8.0f} {r.tflops / floors.get(r.case, top.tflops):6.1%}" if r.tflops else f"{'':8} {'':6}"
        ratio = f"{row.ratio_to_ours:6.3f}" if row.ratio_to_ours else f"{'':6}"
        time = f"{r.timing.median:9.1f} {r.timing.spread:7.1%}"
        lines.append(f"{r.case:46} {r.provider:13} {time} {rate} {ratio}  {r.note}".rstrip())
    return "\n".join(lines)
