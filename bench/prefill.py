"""Measure prefill attention: every case with every provider that runs on this machine, and the best variant of each."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .cases.attention import AttentionCase, make_inputs
from .harness import Ceilings, Measurement, Setup, host_times, in_turns, no_row, ready, reason, rotated
from .providers import PROVIDERS
from .timing import Call, Timing, exactly, interleave
from .workload import BatchShape, Inputs, check, shape_of

SWEEP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SWEEP_TOKENS = 32768  # the batch size is SWEEP_TOKENS over the length
HOST_CASE = "host-prefill"


def sweep_cases() -> dict[str, AttentionCase]:
    """Return causal and full cases of SWEEP_TOKENS tokens at each of SWEEP_LENGTHS: 32x8 heads, D128, pages of 64."""
    found = {}
    for causal in (True, False):
        for length in SWEEP_LENGTHS:
            batch = SWEEP_TOKENS // length
            name = f"sweep-bf16-{'causal' if causal else 'full'}-b{batch}-s{length}-h32x8-d128-p64"
            found[name] = case_of(name, (length,) * batch, causal)
    return found


def host_case() -> AttentionCase:
    """Return a call for which the kernel takes about as long as its launch."""
    return case_of(HOST_CASE, (128,), True)


def case_of(name: str, lens: tuple[int, ...], causal: bool) -> AttentionCase:
    return AttentionCase(name, "bf16", lens, lens, 32, 8, 128, 128, 64, causal=causal, lse=False)


def best(times: Mapping[str, Timing]) -> dict[str, tuple[Timing, str]]:
    """Return the fastest variant of each provider with its name."""
    found: dict[str, tuple[Timing, str]] = {}
    for label, timing in times.items():
        provider, _, variant = label.partition("/")
        if provider not in found or timing.median < found[provider][0].median:
            found[provider] = (timing, variant)
    return found


def inputs_of(case: AttentionCase, device: str) -> list[Inputs]:
    """Return the input sets of a case (see `rotated`)."""
    return rotated(lambda seed: make_inputs(case, device, seed), lambda inputs: shape_of(inputs).bytes)


def check_rows(inputs: Inputs, rows: Callable[[Any], torch.Tensor], result: Any) -> str | None:
    return check(inputs, rows(result))


def collect(sets: list[Inputs], providers: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of all variants that pass the check, keyed "provider" or "provider/variant". Print each provider
    left out, with the reason."""
    calls: dict[str, Call] = {}
    for provider in providers:
        try:
            variants = [PROVIDERS[provider](inputs) for inputs in sets]
        except Exception as error:  # not installed, or it refuses the shape with an error of its own
            no_row(provider, reason(error))
            continue
        for name, (run, rows) in variants[0].items():
            label = f"{provider}/{name}" if name else provider
            if ready(label, partial(partial, run), partial(check_rows, sets[0], rows)):
                calls[label] = in_turns([v[name][0] for v in variants])
    return calls


def results(name: str, shape: BatchShape, times: Mapping[str, tuple[Timing, str]]) -> list[Measurement]:
    """Return one row per provider. Each provider must have computed the whole case."""
    return [
        Measurement(name, provider, t, shape.flops / t.median / 1e6, shape.bytes / t.median / 1e3, variant)
        for provider, (t, variant) in times.items()
    ]


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case. The floor is the number of operations over the matmul rate of this run."""
    print(case.name, flush=True)
    sets = inputs_of(case, setup.device)
    shape = shape_of(sets[0])
    calls = collect(sets, setup.providers)
    if not calls:
        return []
    times = best(interleave(calls, setup.clock, len(sets), setup.rounds))
    return results(case.name, shape, times | {"floor": (exactly(shape.flops / top.tflops / 1e6), "")})


def host(case: AttentionCase, setup: Setup) -> list[Measurement]:
    """Measure the host time of a call. The variant with the least host time counts."""
    print(case.name, flush=True)
    times = best(host_times(collect([make_inputs(case, setup.device, 0)], setup.providers), setup))
    return [Measurement(case.name, provider, t, note=variant) for provider, (t, variant) in times.items()]
