"""Measures prefill attention: every case, every provider that runs here, ceilings of the machine in the same run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from .cases.attention import AttentionCase, make_inputs
from .providers import PROVIDERS, Unavailable
from .results import Environment, Row, with_ratios
from .timing import Call, Clock, CudaClock, HostClock, Timing, input_sets, interleave
from .workload import Inputs, check, shape_of

L2_BYTES = 50 << 20  # of Hopper; torch reports 60 MB on an H200
MATMUL = 8192
COPY_BYTES = 2 << 30
SWEEP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SWEEP_TOKENS = 32768  # the batch shrinks as the length grows
HOST_CASE = "host-prefill"


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in this run: bf16 matmul in TFLOP/s, device copy in GB/s read and written."""

    tflops: float
    gbps: float


@dataclass(frozen=True)
class Result:
    """One provider on one case."""

    case: str
    provider: str
    timing: Timing
    tflops: float | None = None
    gbps: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Setup:
    """How a run measures. The tests put a fake clock and the CPU here."""

    providers: tuple[str, ...] = tuple(PROVIDERS)
    rounds: int = 15
    device: str = "cuda"
    clock: Clock = field(default_factory=CudaClock)
    host_clock: Clock = field(default_factory=lambda: HostClock(torch.cuda.synchronize))


def sweep_cases() -> dict[str, AttentionCase]:
    """Causal and full attention of SWEEP_TOKENS tokens in requests of growing length: 32x8 heads, D128, pages of 64."""
    found = {}
    for causal in (True, False):
        for length in SWEEP_LENGTHS:
            batch = SWEEP_TOKENS // length
            name = f"sweep-bf16-{'causal' if causal else 'full'}-b{batch}-s{length}-h32x8-d128-p64"
            found[name] = case_of(name, (length,) * batch, causal)
    return found


def host_case() -> AttentionCase:
    """A call whose kernel takes about as long as its launch."""
    return case_of(HOST_CASE, (128,), True)


def case_of(name: str, lens: tuple[int, ...], causal: bool) -> AttentionCase:
    return AttentionCase(name, "bf16", lens, lens, 32, 8, 128, 128, 64, causal=causal, lse=False)


def ceilings(setup: Setup) -> tuple[Ceilings, list[Result]]:
    """Matmul of random data (zeros run faster than any real data) and a copy between two large buffers."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "ceiling-matmul-bf16": lambda i: torch.mm(a, b, out=c),
        "ceiling-copy": lambda i: target.copy_(source),
    }
    times = interleave(calls, setup.clock, 1, setup.rounds)
    matmul, copy = times["ceiling-matmul-bf16"], times["ceiling-copy"]
    found = Ceilings(2 * MATMUL**3 / matmul.median / 1e6, 2 * COPY_BYTES / copy.median / 1e3)
    return found, [
        Result("ceiling-matmul-bf16", "torch", matmul, tflops=found.tflops),
        Result("ceiling-copy", "torch", copy, gbps=found.gbps),
    ]


def prepare(name: str, sets: list[Inputs]) -> tuple[dict[str, Call], list[str]]:
    """Calls of the variants of one provider that pass the check, and why others did not."""
    variants = [PROVIDERS[name](inputs) for inputs in sets]
    calls: dict[str, Call] = {}
    refused = []
    for variant, (run, rows) in variants[0].items():
        label = f"{name}/{variant}" if variant else name
        try:
            wrong = check(sets[0], rows(run()))
        except Exception as error:  # a peer may refuse a shape in its own way: the reason is printed, no row written
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if wrong:
            refused.append(f"{label}: {wrong}")
        else:
            runs = [v[variant][0] for v in variants]
            calls[label] = partial(lambda runs, i: runs[i](), runs)
    return calls, refused


def best(times: Mapping[str, Timing]) -> dict[str, tuple[Timing, str]]:
    """The fastest variant of each provider, and its name."""
    found: dict[str, tuple[Timing, str]] = {}
    for label, timing in times.items():
        provider, _, variant = label.partition("/")
        if provider not in found or timing.median < found[provider][0].median:
            found[provider] = (timing, variant)
    return found


def inputs_of(case: AttentionCase, device: str) -> list[Inputs]:
    """As many input sets as leave none of them in the L2 when its turn comes again."""
    first = make_inputs(case, device, 0)
    count = input_sets(shape_of(first).bytes, L2_BYTES)
    return [first, *(make_inputs(case, device, seed) for seed in range(1, count))]


def collect(sets: list[Inputs], providers: tuple[str, ...]) -> dict[str, Call]:
    """Calls of all providers; prints who is left out and why."""
    calls: dict[str, Call] = {}
    for provider in providers:
        try:
            ready, refused = prepare(provider, sets)
        except Unavailable as error:
            ready, refused = {}, [str(error)]
        calls |= ready
        for line in refused:
            print(f"  no row: {line}", flush=True)
    return calls


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Result]:
    """All providers on one case, and the floor: the operations over the matmul rate of this run."""
    name = case.name
    print(name, flush=True)
    sets = inputs_of(case, setup.device)
    shape = shape_of(sets[0])
    calls = collect(sets, setup.providers)
    if not calls:
        return []
    times = best(interleave(calls, setup.clock, len(sets), setup.rounds))
    found = [
        Result(name, provider, t, shape.flops / t.median / 1e6, shape.bytes / t.median / 1e3, variant)
        for provider, (t, variant) in times.items()
    ]
    floor = shape.flops / top.tflops / 1e6
    return [*found, Result(name, "floor", Timing(floor, floor, floor), top.tflops, shape.bytes / floor / 1e3)]


def host(case: AttentionCase, setup: Setup) -> list[Result]:
    """Host time of a call on a tiny case, whose kernel takes less time than the call: the GPU's queue stays short."""
    print(case.name, flush=True)
    calls = collect([make_inputs(case, setup.device, 0)], setup.providers)
    if not calls:
        return []
    # target_us makes a sample of 250 calls of 8 us; the best variant is chosen as on the GPU
    times = best(interleave(calls, setup.host_clock, 1, rounds=20, warmup=10, target_us=2000))
    return [Result(case.name, provider, t, note=variant) for provider, (t, variant) in times.items()]


def rows_of(results: list[Result], env: Environment) -> list[Row]:
    """Rows of the csv."""
    return with_ratios(env.row(r.case, r.provider, r.timing.median, tflops=r.tflops, gbps=r.gbps) for r in results)


def table(results: list[Result], rows: list[Row], top: Ceilings) -> str:
    """What a person reads: a line a case and provider."""
    lines = [
        f"matmul {top.tflops:.0f} TFLOP/s, copy {top.gbps:.0f} GB/s",
        f"{'case':46} {'provider':13} {'us':>9} {'spread':>7} {'TFLOP/s':>8} {'of mm':>6} {'ratio':>6}  variant",
    ]
    for r, row in zip(results, rows):
        rate = f"{r.tflops:8.0f} {r.tflops / top.tflops:6.1%}" if r.tflops else f"{'':8} {'':6}"
        ratio = f"{row.ratio_to_ours:6.3f}" if row.ratio_to_ours else f"{'':6}"
        time = f"{r.timing.median:9.1f} {r.timing.spread:7.1%}"
        lines.append(f"{r.case:46} {r.provider:13} {time} {rate} {ratio}  {r.note}".rstrip())
    return "\n".join(lines)
