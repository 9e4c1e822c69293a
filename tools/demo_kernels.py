"""The demo's sizes, and its kernels: which serve its calls, and how they are built.

It needs no torch, so that `make demo` compiles while torch is still being installed.

    python -m tools.demo_kernels        build them, or find them built
"""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cute_kernels import cli, manifest, paths
from cute_kernels.attention import dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.indexer import dispatch as indexer_dispatch
from cute_kernels.indexer.request import IndexerRequest
from cute_kernels.topk import dispatch as topk_dispatch
from cute_kernels.topk.request import TopKKernelRequest

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_90a"
LENGTHS = (384, 197, 64)  # tokens of each request
HEADS = 12
SIMULATED = 1  # number of heads of K and V that the simulator computes
HEAD_DIM, PAGE = 64, 16  # the smallest head_dim of the kernels; the layer's 32 are padded with zeros
K = 8  # number of keys that top-k selects
WIDTH, LATENT_PAGE = 512, 64  # columns of a latent row, of which the layer's input fills 384
INDEX_DIM = 128  # columns of the indexer's queries and keys

PREFILL = KernelRequest("fp16", "fp16", "fp16", HEAD_DIM, HEAD_DIM, PAGE, qhead_per_kvhead=1, causal=False)
DECODE = replace(PREFILL, causal=True, rows=1)
LATENT = KernelRequest("bf16", "bf16", "bf16", WIDTH, WIDTH, LATENT_PAGE, HEADS, rows=1, shares_v=True)
SPARSE = replace(LATENT, source="slots", causal=False)
TOP_K = TopKKernelRequest("fp32", SIMULATED, LENGTHS[0], K)  # its kernel also selects for sparse attention
INDEX = IndexerRequest(HEADS, INDEX_DIM)


def kernels() -> list[str]:
    """Return the names of the kernels that serve the calls, each once."""
    found = [dispatch.select(request, ARCH) for request in (PREFILL, DECODE, LATENT, SPARSE)]
    others = topk_dispatch.select(TOP_K, ARCH), indexer_dispatch.select(INDEX, ARCH)
    return [spec.name for _, spec in (*found, *others)]


def out() -> Path:
    """Return the folder of the demo's bundle."""
    return paths.bundle_folders(ARCH)[0]


def build() -> bool:
    """Build the kernels into the bundle. Return False if the DSL (the compiler) is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return False
    wanted = [word for name in kernels() for word in ("--only", f"*/{name}")]
    command = [sys.executable, "-m", "cute_kernels", "build", *wanted, "--arch", ARCH, "--out", str(out())]
    subprocess.run(command, check=True, cwd=ROOT)
    return True


def resources() -> str:
    """Return the kernels' summaries from the bundle."""
    known = {entry["name"]: entry for entry in manifest.read(out()).kernels}
    return "\n".join(f"kernel {name}: {cli.summary(known[name])}" for name in kernels())


if __name__ == "__main__":
    build()
