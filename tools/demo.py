"""Run the kernels on real data: attention of a real transformer layer on real text, from paged caches, and selections.

    python -m tools.demo            (or: make demo)

Five steps: prefill of the text; decode of each request's last token; top-k of the keys that this token scores highest;
decode of the same token by latent attention (MLA); and sparse attention to the keys that an indexer selects. They run
on the GPU if there is one. Otherwise the same compiled Hopper kernels run in the simulator; those of attention with K
and V, on some of the heads. The results are compared with plain torch and drawn.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cute_kernels import cli, manifest, paths
from cute_kernels.attention import dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.indexer import dispatch as indexer_dispatch
from cute_kernels.indexer.request import IndexerRequest
from cute_kernels.topk import dispatch as topk_dispatch
from cute_kernels.topk.request import TopKKernelRequest

from . import demo_data, demo_latent, demo_steps
from .demo_latent import WIDTH
from .demo_picture import draw
from .demo_steps import HEAD_DIM, PAGE, DemoStep, K, LayerBatch, compare, expected, paged

PREFILL = KernelRequest("fp16", "fp16", "fp16", HEAD_DIM, HEAD_DIM, PAGE, qhead_per_kvhead=1, causal=False)
DECODE = replace(PREFILL, causal=True, rows=1)
LATENT = KernelRequest("bf16", "bf16", "bf16", WIDTH, WIDTH, demo_latent.PAGE, demo_data.HEADS, rows=1, shares_v=True)
ARCH = "sm_90a"
COPIES = 64  # copies of the text's requests, for a batch large enough to time
SIMULATED = 1  # number of heads of K and V that the simulator computes
NEXT = """\
next: python -m examples.serve          continuous batching of a small decoder on one pool of pages
      python -m examples.sparse         attention to the keys that a top-k selects
      python -m tests.sim bf16_d128_causal       any kernel in the simulator, in four modes
      cute-kernels list                 what was built; README says how to call it"""


def kernels() -> list[str]:
    """Return the names of the kernels that serve the calls, each once."""
    requests = PREFILL, DECODE, LATENT, replace(LATENT, source="slots", causal=False)
    found = [dispatch.select(request, ARCH) for request in requests]
    rows = TopKKernelRequest("fp32", SIMULATED, demo_data.LENGTHS[0], K)  # it also serves sparse attention
    index = IndexerRequest(demo_data.HEADS, demo_latent.INDEX_DIM)
    more = topk_dispatch.select(rows, ARCH), indexer_dispatch.select(index, ARCH)
    return [spec.name for _, spec in (*found, *more)]


def out() -> Path:
    """Return the folder of the demo's bundle."""
    return paths.bundle_folders(ARCH)[0]


def build() -> bool:
    """Build the kernels into the bundle. Return False if the DSL (the compiler) is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return False
    wanted = [word for name in kernels() for word in ("--only", f"*/{name}")]
    for verb in (["build", *wanted], ["verify"]):
        command = [sys.executable, "-m", "cute_kernels", *verb, "--arch", ARCH, "--out", str(out())]
        subprocess.run(command, check=True, cwd=demo_data.ROOT)
    return True


def resources() -> str:
    """Return the kernels' summaries from the bundle."""
    known = {entry["name"]: entry for entry in manifest.read(out()).kernels}
    return "\n".join(f"kernel {name}: {cli.summary(known[name])}" for name in kernels())


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
    argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0]).parse_args()
    data, origin = demo_data.load()
    batch, latent = demo_steps.batch_of(data), demo_latent.batch_of(data)
    heads, shown = batch.q.shape[1], " + ".join(map(str, batch.lengths))
    print(f"data: {origin}\n      {shown} tokens, {heads} heads, caches in shuffled pages", flush=True)
    built = build()
    print(resources() if built else "no CuTe DSL here: no kernel was built, calls run the reference in plain torch")
    where, around = "reference", nullcontext
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
