"""The function on real data: attention of a real transformer layer on real text, from a paged KV cache.

    python -m tools.demo            (or: make demo)

Without a GPU: the kernel of this layer is built for Hopper and its resources printed; the same public call runs the
reference on the CPU. With one: the kernel runs. Either is held against torch SDPA.
"""

import argparse
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_kernels import cli, manifest, places
from cute_kernels.attention import dispatch
from cute_kernels.attention.problem import Problem

from . import demo_data

PAGE = 16
HEAD_DIM = 64  # the least a kernel has; the layer's 32 are padded with zeros
PROBLEM = Problem("fp16", "fp16", "fp16", HEAD_DIM, HEAD_DIM, PAGE, group=1, causal=False)
ARCH = "sm_90a"
TOLERANCE = 2e-3  # rtol = atol: fp16 output of values up to about 4
COPIES = 64  # of the text's requests, for a batch large enough to time


@dataclass(frozen=True)
class Batch:
    """One layer's Q, K, V, padded, and the requests' lengths (every token is a query)."""

    q: torch.Tensor  # (T, heads, 64)
    k: torch.Tensor
    v: torch.Tensor
    lengths: list[int]
    scale: float

    @property
    def flops(self) -> float:
        return sum(4.0 * self.q.shape[1] * n * n * HEAD_DIM for n in self.lengths)

    def repeat(self, copies: int) -> "Batch":
        q, k, v = (t.repeat(copies, 1, 1) for t in (self.q, self.k, self.v))
        return Batch(q, k, v, self.lengths * copies, self.scale)

    def to(self, device: str) -> "Batch":
        return Batch(self.q.to(device), self.k.to(device), self.v.to(device), self.lengths, self.scale)


def batch_of(data: dict[str, np.ndarray]) -> Batch:
    """The data padded to a head dimension that a kernel has."""
    pad = HEAD_DIM - data["q"].shape[-1]
    q, k, v = (torch.nn.functional.pad(torch.from_numpy(data[name]), (0, pad)) for name in ("q", "k", "v"))
    return Batch(q, k, v, data["lengths"].tolist(), demo_data.head_scale(data))


def paged(batch: Batch) -> dict[str, Any]:
    """Arguments of the public function: K and V scattered over pages in random order, what is unused holds NaN."""
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


def expected(batch: Batch) -> torch.Tensor:
    """torch's attention, request by request, in fp32 from the same fp16 values."""
    parts = (t.float().transpose(0, 1) for t in (batch.q, batch.k, batch.v))
    q, k, v = (t.split(batch.lengths, dim=1) for t in parts)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = [sdpa(a, b, c, scale=batch.scale) for a, b, c in zip(q, k, v)]
    return torch.cat(rows, dim=1).transpose(0, 1)


def compare(out: torch.Tensor, batch: Batch) -> tuple[float, float]:
    """(largest absolute error, relative error ||out - want|| / ||want||); AssertionError past the tolerance."""
    want = expected(batch)
    torch.testing.assert_close(out.float(), want, rtol=TOLERANCE, atol=TOLERANCE)
    difference = out.float() - want
    return float(difference.abs().max()), float(difference.norm() / want.norm())


def kernel_name() -> str:
    """The kernel that serves the demo's call."""
    return dispatch.select(PROBLEM, ARCH)[1].name


def out() -> Path:
    """Where the demo's bundle is built, and found."""
    return places.bundle_folders(ARCH)[0]


def build() -> bool:
    """Build the one kernel the demo needs into the bundle; False where the DSL, the compiler, is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return False
    for verb in (["build", "--only", kernel_name()], ["verify"]):
        command = [sys.executable, "-m", "cute_kernels", *verb, "--arch", ARCH, "--out", str(out())]
        subprocess.run(command, check=True, cwd=demo_data.ROOT)
    return True


def resources() -> str:
    """What the bundle says of the demo's kernel."""
    name = kernel_name()
    entry = next(k for k in manifest.read(out()).kernels if k["name"] == name)
    return f"kernel {name}: {cli.summary(entry)}"


def run_cpu(batch: Batch) -> str:
    """The public call on CPU tensors."""
    from wrappers import trtllm_batch_context_with_kv_cache

    worst, relative = compare(trtllm_batch_context_with_kv_cache(**paged(batch)), batch)
    return f"CPU reference agrees with torch SDPA: max error {worst:.1e}, relative {relative:.1e}"


def run_gpu(batch: Batch) -> list[str]:
    """The public call on CUDA tensors: error on the text, speed on COPIES of it."""
    from bench.timing import CudaClock, interleave
    from wrappers import trtllm_batch_context_with_kv_cache

    def error(some: Batch, kwargs: dict[str, Any]) -> str:
        worst, relative = compare(trtllm_batch_context_with_kv_cache(**kwargs), some)
        return f"max error {worst:.1e}, relative {relative:.1e}"

    gpu = torch.cuda.get_device_name()
    small, large = batch.to("cuda"), batch.repeat(COPIES).to("cuda")
    lines = [f"kernel on {gpu} agrees with torch SDPA: {error(small, paged(small))}"]
    kwargs = paged(large)
    lines.append(f"  {COPIES} copies of the text: {error(large, kwargs)}")
    run = {"ours": lambda i: trtllm_batch_context_with_kv_cache(**kwargs)}
    time = interleave(run, CudaClock(), 1)["ours"].median
    rate = large.flops / time / 1e6
    lines.append(
        f"  {time:.0f} us for {len(large.q)} tokens, {rate:.0f} TFLOP/s, half of them on zeros that pad the head"
    )
    return lines


def main() -> None:
    argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0]).parse_args()
    data, origin = demo_data.load()
    batch = batch_of(data)
    heads, shown = batch.q.shape[1], " + ".join(map(str, batch.lengths))
    built = build()
    print(f"\ndata: {origin}\n      {shown} tokens, {heads} heads, KV in shuffled pages of {PAGE}")
    print(resources() if built else "no CuTe DSL here: no kernel was built")
    print(run_cpu(batch))
    if torch.cuda.is_available():
        print("\n".join(run_gpu(batch)))
    else:
        print("no GPU here: the kernel was compiled, not run")


if __name__ == "__main__":
    main()
