"""Run the kernels on real data: attention of a real transformer layer on real text, from a paged KV cache, and a top-k.

    python -m tools.demo            (or: make demo)

Three calls: prefill of the text, decode of each request's last token, and top-k of the keys that this token scores
highest. They run on the GPU if there is one. Otherwise the same compiled Hopper kernels run in the simulator, on some
of the heads. The results are compared with plain torch and drawn.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_kernels import cli, manifest, paths
from cute_kernels.attention import dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.topk import dispatch as topk_dispatch
from cute_kernels.topk.request import TopKKernelRequest

from . import demo_data

PAGE = 16
HEAD_DIM = 64  # the smallest head_dim of the kernels; the layer's 32 are padded with zeros
PREFILL = KernelRequest("fp16", "fp16", "fp16", HEAD_DIM, HEAD_DIM, PAGE, qhead_per_kvhead=1, causal=False)
DECODE = KernelRequest("fp16", "fp16", "fp16", HEAD_DIM, HEAD_DIM, PAGE, qhead_per_kvhead=1, rows=1)
ARCH = "sm_90a"
TOLERANCE = 2e-3  # rtol = atol: fp16 output of values up to about 4
COPIES = 64  # copies of the text's requests, for a batch large enough to time
SIMULATED = 2  # number of heads that the simulator computes
K = 8  # number of keys that top-k selects
PICTURE = demo_data.ROOT / "build" / "demo.png"
NEXT = """\
next: python -m examples.serve          continuous batching of a small decoder on one pool of pages
      python -m examples.sparse         attention to the keys that a top-k selects
      python -m tests.sim bf16_d128_causal       any kernel in the simulator, in four modes
      cute-kernels list                 what was built; README says how to call it"""


@dataclass(frozen=True)
class LayerBatch:
    """Q, K and V of one layer, padded, and the requests' lengths. Every token is a query."""

    q: torch.Tensor  # (T, heads, 64)
    k: torch.Tensor
    v: torch.Tensor
    lengths: list[int]
    scale: float

    @property
    def flops(self) -> float:
        return sum(4.0 * self.q.shape[1] * n * n * HEAD_DIM for n in self.lengths)

    @property
    def last(self) -> torch.Tensor:
        """Return the row of each request's last token."""
        return torch.tensor(self.lengths, device=self.q.device).cumsum(0) - 1

    def of_heads(self, heads: int) -> "LayerBatch":
        q, k, v = (t[:, :heads].contiguous() for t in (self.q, self.k, self.v))
        return LayerBatch(q, k, v, self.lengths, self.scale)

    def repeat(self, copies: int) -> "LayerBatch":
        q, k, v = (t.repeat(copies, 1, 1) for t in (self.q, self.k, self.v))
        return LayerBatch(q, k, v, self.lengths * copies, self.scale)

    def to(self, device: str) -> "LayerBatch":
        return LayerBatch(self.q.to(device), self.k.to(device), self.v.to(device), self.lengths, self.scale)


def batch_of(data: dict[str, np.ndarray]) -> LayerBatch:
    """Pad the data to a head dimension that the kernels support."""
    pad = HEAD_DIM - data["q"].shape[-1]
    q, k, v = (torch.nn.functional.pad(torch.from_numpy(data[name]), (0, pad)) for name in ("q", "k", "v"))
    return LayerBatch(q, k, v, data["lengths"].tolist(), demo_data.head_scale(data))


def paged(batch: LayerBatch) -> dict[str, Any]:
    """Return the arguments of the prefill function: K and V scattered over pages in random order, NaN in unused
    memory."""
    device, heads = batch.q.device, batch.q.shape[1]
    used = [-(-n // PAGE) for n in batch.lengths]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)).to(torch.int32).to(device)
    cache = torch.full((2, sum(used), heads, PAGE, HEAD_DIM), float("nan"), dtype=batch.q.dtype, device=device)
    table = torch.full((len(used), max(used)), -1, dtype=torch.int32, device=device)
    requests = zip(order.split(used), batch.k.split(batch.lengths), batch.v.split(batch.lengths))
    for r, (pages, k, v) in enumerate(requests):
        table[r, : len(pages)] = pages
        tokens = torch.arange(len(k), device=device)
        for side, rows in zip(cache, (k, v)):
            side[pages[tokens // PAGE].long(), :, tokens % PAGE] = rows
    starts = torch.tensor([0, *np.cumsum(batch.lengths)], dtype=torch.int32, device=device)
    return {
        "query": batch.q,
        "kv_cache": (cache[0], cache[1]),
        "workspace_buffer": torch.zeros(1, dtype=torch.uint8, device=device),
        "block_tables": table,
        "seq_lens": torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        "max_q_len": max(batch.lengths),
        "max_kv_len": max(batch.lengths),
        "bmm1_scale": batch.scale,
        "bmm2_scale": 1.0,
        "batch_size": len(batch.lengths),
        "cum_seq_lens_q": starts,
        "cum_seq_lens_kv": starts,
        "causal": False,
    }


def expected(batch: LayerBatch) -> torch.Tensor:
    """Compute attention with torch, request by request, in fp32 from the same fp16 values."""
    parts = (t.float().transpose(0, 1) for t in (batch.q, batch.k, batch.v))
    q, k, v = (t.split(batch.lengths, dim=1) for t in parts)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = [sdpa(a, b, c, scale=batch.scale) for a, b, c in zip(q, k, v)]
    return torch.cat(rows, dim=1).transpose(0, 1)


def compare(out: torch.Tensor, want: torch.Tensor) -> str:
    """Describe the errors against torch's result. Raise AssertionError if they exceed the tolerance."""
    torch.testing.assert_close(out.float(), want, rtol=TOLERANCE, atol=TOLERANCE)
    difference = out.float() - want
    return f"max error {float(difference.abs().max()):.1e}, relative {float(difference.norm() / want.norm()):.1e}"


def prefill(batch: LayerBatch) -> torch.Tensor:
    from wrappers import trtllm_batch_context_with_kv_cache

    return trtllm_batch_context_with_kv_cache(**paged(batch))


def decode(batch: LayerBatch) -> torch.Tensor:
    """Compute attention of each request's last token."""
    from wrappers import trtllm_batch_decode_with_kv_cache

    given = paged(batch)
    return trtllm_batch_decode_with_kv_cache(
        batch.q[batch.last], given["kv_cache"], given["workspace_buffer"], given["block_tables"], given["seq_lens"],
        given["max_kv_len"], batch.scale,
    )  # fmt: skip


def scores(batch: LayerBatch) -> torch.Tensor:
    """Return the logits of the first request's last token on its keys, (heads, keys) fp32."""
    n = batch.lengths[0]
    return torch.einsum("hd,khd->hk", batch.q[n - 1].float(), batch.k[:n].float()).contiguous()


def select(batch: LayerBatch) -> torch.Tensor:
    """Return the K keys with the highest scores, (heads, K), in ascending order."""
    from wrappers import top_k_ragged_transform

    found = scores(batch)
    ints = torch.full((len(found),), found.shape[1], dtype=torch.int32, device=found.device)
    return top_k_ragged_transform(found, torch.zeros_like(ints), ints, K)


class DemoStep(NamedTuple):
    """A call, torch's result for it, and the check that compares the two."""

    name: str
    call: Callable[[LayerBatch], torch.Tensor]
    want: Callable[[LayerBatch], torch.Tensor]
    check: Callable[[torch.Tensor, torch.Tensor], str]


def same_keys(found: torch.Tensor, want: torch.Tensor) -> str:
    assert torch.equal(found.long(), want), f"keys {found.tolist()}, torch selects {want.tolist()}"
    return f"the same {K} keys of each head"


STEPS = (
    DemoStep("prefill", prefill, expected, compare),
    DemoStep("decode", decode, lambda batch: expected(batch)[batch.last], compare),
    DemoStep("top-k", select, lambda batch: scores(batch).topk(K, dim=1).indices.sort(1).values, same_keys),
)


def kernels() -> list[str]:
    """Return the names of the kernels that serve the three calls."""
    found = [dispatch.select(problem, ARCH) for problem in (PREFILL, DECODE)]
    rows = TopKKernelRequest("fp32", SIMULATED, demo_data.LENGTHS[0], K)
    return [spec.name for _, spec in (*found, topk_dispatch.select(rows, ARCH))]


def out() -> Path:
    """Return the folder of the demo's bundle."""
    return paths.bundle_folders(ARCH)[0]


def build() -> bool:
    """Build the kernels into the bundle. Return False if the DSL (the compiler) is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return False
    wanted = [word for name in kernels() for word in ("--only", name)]
    for verb in (["build", *wanted], ["verify"]):
        command = [sys.executable, "-m", "cute_kernels", *verb, "--arch", ARCH, "--out", str(out())]
        subprocess.run(command, check=True, cwd=demo_data.ROOT)
    return True


def resources() -> str:
    """Return the kernels' summaries from the bundle."""
    known = {entry["name"]: entry for entry in manifest.read(out()).kernels}
    return "\n".join(f"kernel {name}: {cli.summary(known[name])}" for name in kernels())


def run(batch: LayerBatch, where: str, around: Callable[[], Any] = nullcontext) -> list[torch.Tensor]:
    """Run and check all calls, each inside a context `around()`, and print their results."""
    results = []
    for step in STEPS:
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


def draw(batch: LayerBatch, results: list[torch.Tensor], path: Path = PICTURE) -> str:
    """Draw the results.

    Left: the keys that the last 64 tokens of the first request attend to, in one head, and the keys that top-k
    selected. Right: every value of the kernel's output against torch's.
    """
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    batch, (o, _, keys) = batch.to("cpu"), (t.cpu() for t in results)
    n = batch.lengths[0]
    logits = batch.q[n - 64 : n, 0].float() @ batch.k[:n, 0].float().T * batch.scale
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(2, 1), layout="constrained")
    left.imshow(logits.softmax(1).sqrt().numpy(), aspect="auto", cmap="Blues", extent=(0, n, n, n - 64))
    left.plot(keys[0].numpy() + 0.5, [n - 0.5] * K, "r^", clip_on=False, label=f"the {K} keys of highest score")
    left.set(xlabel="key", ylabel="query", title="attention of one head on real text")
    left.legend(loc="upper left")
    want = expected(batch)[:, : o.shape[1]].flatten()
    right.plot(want.numpy(), o.float().flatten().numpy(), ",", color="tab:blue")
    right.plot([want.min(), want.max()], [want.min(), want.max()], color="tab:gray", lw=0.5)
    right.set(xlabel="torch, fp32", ylabel="kernel, fp16", title=f"prefill: {len(want)} values of O")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"picture: {path}"


def main() -> None:
    argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0]).parse_args()
    data, origin = demo_data.load()
    batch = batch_of(data)
    heads, shown = batch.q.shape[1], " + ".join(map(str, batch.lengths))
    print(f"data: {origin}\n      {shown} tokens, {heads} heads, KV in shuffled pages of {PAGE}", flush=True)
    built = build()
    print(resources() if built else "no CuTe DSL here: no kernel was built, calls run the reference in plain torch")
    if torch.cuda.is_available():
        batch = batch.to("cuda")
        results = run(batch, f"on {torch.cuda.get_device_name()}")
        print(speed(batch.repeat(COPIES)))
    elif built:
        print(f"no GPU here: the simulator runs the kernels' PTX, for {SIMULATED} of {heads} heads")
        batch = batch.of_heads(SIMULATED)
        results = run(batch, "kernel in the simulator", simulator)
    else:
        results = run(batch, "reference")
    print(draw(batch, results))
    print(NEXT)


if __name__ == "__main__":
    main()
