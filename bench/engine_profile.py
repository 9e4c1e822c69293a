"""Where a decode step of vLLM spends its time: `python -m bench.engine_profile CASE PROVIDER`.

The engine runs in this process. All requests of a load generate 2 tokens, and then 66, with their prompts in the prefix
cache: the kernels of a step take the difference, over 64. Times are sums of kernels by the part of the model that they
belong to, which their names tell. The rest of a step, which takes as long as the median request waits for a token, is
gaps, in which the GPU waits; gaps are negative if kernels run beside each other."""

import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cases.engine import CASES, EngineCase
from .engine_worker import BACKENDS, RunningEngine, Vllm, timed, write_config

STEPS = 64
PARTS = {  # in this order: names of attention kernels contain those of the libraries that they are made with
    "cache write": "cache_write|reshape_and_cache",
    "attention": "attention_|flash|unified_attention|fmha|paged",
    "experts": "moe|expert",
    "GEMM": "gemm|nvjet|cutlass|cublas|splitk|gemv|matmul",
    "norm": "norm",
    "rotary embedding": "rotary|rope",
    "activation": "silu|gelu|act_and_mul",
}


def part_of(kernel: str) -> str:
    """Return the part of a model that a kernel belongs to."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def kernel_times(events: Any) -> dict[str, float]:
    """Return the microseconds of each kernel by its name. events: of torch.profiler, `key_averages()`."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        found[event.key] += event.self_device_time_total
    return {name: us for name, us in found.items() if us}


def step_of(short: dict[str, float], long: dict[str, float], steps: int) -> dict[str, float]:
    """Return the microseconds of a step by part, from those of all kernels in a short and in a long run."""
    parts: dict[str, float] = defaultdict(float)
    for name in long.keys() | short.keys():
        parts[part_of(name)] += (long.get(name, 0.0) - short.get(name, 0.0)) / steps
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def profile(engine: RunningEngine, case: EngineCase) -> dict[str, float]:
    """Return the microseconds of a decode step by part, gaps included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    prompts = case.prompts(2, case.lengths(0))
    for _ in range(2):  # fills the prefix cache; compiles what is compiled at a first use
        engine.generate(prompts, 2, False)
    kernels = []
    for outputs in (2, 2 + STEPS):
        with profiler(activities=[ProfilerActivity.CUDA]) as traced:
            engine.generate(prompts, outputs, False)
        kernels.append(kernel_times(traced.key_averages()))
    found = step_of(kernels[0], kernels[1], STEPS)
    longer = replace(case, outputs=2 + STEPS)
    step = statistics.median(1e3 * timed(engine, longer, 2)["tpot_p50_ms"] for _ in range(3))
    return found | {"gaps": step - sum(found.values())}


def main() -> None:
    name, provider = sys.argv[1:]
    case = replace(CASES[name], cached=True)
    if case.engine != "vllm":
        raise SystemExit(f"{name}: its engine is {case.engine}, must be vllm: only its kernels run in this process")
    with tempfile.TemporaryDirectory() as folder:
        write_config(case, Path(folder))
        found = profile(Vllm(case, BACKENDS["vllm"][provider], Path(folder)), case)
    print(f"{name}, {provider}: a decode step takes {sum(found.values()):.0f} us")
    for part, us in found.items():
        print(f"  {part:18} {us:9.1f} us  {us / sum(found.values()):6.1%}")
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind


if __name__ == "__main__":
    main()
