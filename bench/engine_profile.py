"""The kernels of an engine's steps: `python -m bench.engine_profile CASE PROVIDER STEPS` prints one line of JSON.

vLLM runs in this process, and torch's profiler sees its kernels, also those in CUDA graphs. The first profile has the
steps until each request has one token; what a second one has more, divided by STEPS, is a decode step.
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from .cases.engine import CASES
from .engine import Run, Workers, exit_on_sigterm, refuse_others
from .engine_backends import BACKENDS
from .engine_worker import finish, start
from .results import Environment, ProfileRow

STEPS = 32  # decode steps of a profile
OURS = re.compile(r"(attention|latent|indexer|topk|cache_write|merge_states)_\w+__")  # names of our kernels begin so
SHOWN = 16  # kernels of each phase that are printed
NAME = 120  # characters of a kernel's name
Kernels = dict[str, tuple[float, float]]  # name -> (launches, microseconds)


def kernels(engine: Any, prompts: list[list[int]], outputs: int) -> Kernels:
    """Return the kernels of a pass."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.generate(prompts, outputs, False)
        torch.cuda.synchronize()
    return summed((e.name, e.time_range.elapsed_us()) for e in seen.events() if e.device_type.name == "CUDA")


def summed(events: Iterable[tuple[str, float]]) -> Kernels:
    """Return the sums of events. events: names of kernels, and microseconds."""
    found: Kernels = {}
    for name, time in events:
        launches, total = found.get(name[:NAME], (0.0, 0.0))
        found[name[:NAME]] = launches + 1, total + time
    return found


def step(short: Kernels, long: Kernels, steps: int) -> Kernels:
    """Return the kernels of one of the steps that `long` has more than `short`."""
    more = {}
    for name, (launches, time) in long.items():
        before, earlier = short.get(name, (0.0, 0.0))
        if launches > before:
            more[name] = (launches - before) / steps, (time - earlier) / steps
    return more


def main() -> None:
    name, provider, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        engine, case = start(name, provider, Path(folder))
        prompts = case.prompts(2, case.lengths(0))
        for _ in range(2):  # the first pass fills the prefix cache and compiles what is compiled late
            answers = engine.generate(prompts, 1 + steps, False)
        short, long = (kernels(engine, prompts, outputs) for outputs in (1, 1 + steps))
        decode_us = 1e6 * fmean(a.last_s / steps for a in answers)
        phases = {"prompts": short, "decode": step(short, long, steps)}
    finish({"phases": phases, "decode_us": decode_us}, engine)


def measure(name: str, providers: tuple[str, ...], env: Environment, run: Run | None = None) -> Iterator[ProfileRow]:
    """Yield the rows of a case, and print the longest kernels of each phase."""
    case, run = CASES[name], run or Workers(module=__name__)
    if case.engine != "vllm" or case.gpus > 1:
        raise NotImplementedError(f"{name}: only vLLM on one GPU can be profiled, where its kernels run in the process")
    refuse_others(providers, BACKENDS[case.engine])
    with exit_on_sigterm():
        for provider in providers:
            result = run(name, provider, STEPS)
            if result is None:
                continue
            print(f"  {provider}: a decode step takes {result['decode_us']:.0f} us without the profiler", flush=True)
            for phase, found in result["phases"].items():
                rows = [
                    env.make(ProfileRow, case=name, provider=provider, phase=phase, kernel=kernel,
                        ours=float(bool(OURS.match(kernel))), launches=launches, time_us=time,
                    )
                    for kernel, (launches, time) in sorted(found.items(), key=lambda item: -item[1][1])
                ]  # fmt: skip
                print("\n".join(table(phase, rows)), flush=True)
                yield from rows


def table(phase: str, rows: list[ProfileRow]) -> Iterator[str]:
    """Yield the lines of a table: the longest kernels first, ours marked."""
    total, ours = (sum(r.time_us for r in own) for own in (rows, [r for r in rows if r.ours]))
    yield f"  {phase}: {total:.1f} us of kernels, {ours / max(total, 1e-9):.1%} of them of ours (*)"
    for r in rows[:SHOWN]:
        share, mark = r.time_us / total, "*" if r.ours else " "
        yield f"    {r.time_us:10.1f} us {share:6.1%} {r.launches:8.1f} x {mark} {r.kernel}"


if __name__ == "__main__":
    main()
