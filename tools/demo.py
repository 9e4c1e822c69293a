"""Run the kernels on real data: attention of a real transformer layer on real text, from paged caches, and selections.

    python -m tools.demo            (or: make demo)

Five steps: prefill of the text; decode of each request's last token; top-k of the keys that this token scores highest;
decode of the same token by latent attention (MLA); and sparse attention to the keys that an indexer selects. They run
on the GPU if there is one. Otherwise the same compiled Hopper kernels run in the simulator; those of attention with K
and V, on some of the heads. The results are compared with plain torch and drawn.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import demo_data, demo_latent, demo_steps
from .demo_kernels import ARCH, SIMULATED, build, resources
from .demo_picture import draw
from .demo_steps import DemoStep, LayerBatch, compare, expected, paged

COPIES = 64  # copies of the text's requests, for a batch large enough to time
NEXT = """\
next: python -m examples.serve          continuous batching of a small decoder on one pool of pages
      python -m examples.sparse         attention to the keys that a top-k selects
      python -m tests.sim bf16_d128_causal       any kernel in the simulator, in four modes
      cute-kernels list                 what was built; README says how to call it"""


def run(
    steps: Iterable[DemoStep], batch: Any, where: str, around: Callable[[], Any] = nullcontext
) -> list[Any]:  # fmt: skip
    """Run and check the steps, each inside a context `around()`, and print their results."""
    results = []
    for step in steps:
        begin = time.perf_counter()
        with around():
            results.append(step.call(batch))
        seconds = time.perf_counter() - begin
        said = step.check(results[-1], step.want(batch))
        print(f"{step.name:8} {where}, {seconds:.1f} s, agrees with torch: {said}", flush=True)
    return results


def simulator() -> AbstractContextManager[Any]:
    """Return a context in which calls on CPU tensors run compiled kernels in the simulator."""
    from tests.sim.workloads.common import simulated

    return simulated(ARCH, [], sms=4)


def speed(batch: LayerBatch) -> str:
    """Time prefill of COPIES copies of the text on the GPU."""
    from bench.timing import CudaClock, interleave
    from wrappers import trtllm_batch_context_with_kv_cache

    kwargs = paged(batch)
    said = compare(trtllm_batch_context_with_kv_cache(**kwargs), expected(batch))
    us = interleave({"ours": lambda i: trtllm_batch_context_with_kv_cache(**kwargs)}, CudaClock(), 1)["ours"].median
    rate = batch.flops / us / 1e6
    return f"{COPIES} copies of the text: {said}; {us:.0f} us for {len(batch.q)} tokens, {rate:.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--built", action="store_true", help="tools.demo_kernels has built the kernels just now")
    given = parser.parse_args()
    data, origin = demo_data.load()
    batch, latent = demo_steps.batch_of(data), demo_latent.batch_of(data)
    heads, shown = batch.q.shape[1], " + ".join(map(str, batch.lengths))
    print(f"data: {origin}\n      {shown} tokens, {heads} heads, caches in shuffled pages", flush=True)
    built = given.built or build()
    print(resources() if built else "no CuTe DSL here: no kernel was built, calls run the reference in plain torch")
    where = "reference"
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if torch.cuda.is_available():
        batch, latent, where = batch.to("cuda"), latent.to("cuda"), f"on {torch.cuda.get_device_name()}"
    elif built:
        print(f"no GPU here: the simulator runs the kernels' PTX, for {SIMULATED} of {heads} heads of K and V")
        batch, where, around = batch.of_heads(SIMULATED), "kernel in the simulator", simulator
    results = run(demo_steps.STEPS, batch, where, around), run(demo_latent.STEPS, latent, where, around)
    if torch.cuda.is_available():
        print(speed(batch.repeat(COPIES)))
    print(draw(batch, latent, *results))
    print(NEXT)


if __name__ == "__main__":
    main()
