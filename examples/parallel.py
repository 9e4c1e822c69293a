"""Decode of a long request on several GPUs with torch.distributed: each rank has some of the heads, or some of the
keys.

    python -m examples.parallel                                       # the CPU: 2 processes, gloo, 2048 keys
    torchrun --nproc-per-node 4 -m examples.parallel --device cuda    # one GPU per rank, NCCL, 2^20 keys

Tensor parallel: each rank has some of the heads, with their part of the cache; the outputs are gathered. Context
parallel: each rank has some of the keys and all heads; outputs and LSE are gathered in one message and merged by
`merge_states`. On GPUs a step is a CUDA graph that includes NCCL's part. The program prints, for 1, 2, 4, ... of the
ranks, the time of a step and the largest error against a single rank. --keys sets the number of keys, --ranks the
number of processes (if torchrun does not start them).
"""

import argparse
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from wrappers import merge_states, trtllm_batch_decode_with_kv_cache

PAGE = 64
CPU = dict(keys=2048, heads=(8, 4), dim=64, dtype=torch.bfloat16)
CUDA = dict(keys=1 << 20, heads=(64, 8), dim=128, dtype=torch.float8_e4m3fn)
PARTS = 8  # parts of the keys, each from its own seed, so that a rank can make its part alone
STEPS = {"cpu": 3, "cuda": 20}


class Cache(NamedTuple):
    """The cache of one request. kv: (2, pages, heads, PAGE, D), K and V."""

    kv: torch.Tensor
    table: torch.Tensor  # (1, pages) int32
    lens: torch.Tensor  # (1,) int32


class Attention(NamedTuple):
    out: torch.Tensor  # (1, heads, D)
    lse: torch.Tensor  # (1, heads), base 2


def query(sizes: argparse.Namespace) -> torch.Tensor:
    gen = torch.Generator().manual_seed(PARTS)
    return torch.randn(1, sizes.heads[0], sizes.dim, generator=gen).bfloat16().to(sizes.device)


def cache(sizes: argparse.Namespace, parts: range, heads: slice = slice(None)) -> Cache:
    """Return the keys of some parts, for some of their KV heads."""
    made, pages = [], sizes.keys // PAGE // PARTS
    for part in parts:
        gen = torch.Generator(sizes.device).manual_seed(part)
        shape = 2, pages, sizes.heads[1], PAGE, sizes.dim
        made.append(torch.randn(shape, generator=gen, device=sizes.device, dtype=torch.bfloat16).to(sizes.dtype))
    kv = torch.cat(made, 1)[:, :, heads]
    table = torch.arange(kv.shape[1], dtype=torch.int32, device=sizes.device)[None]
    return Cache(kv, table, torch.tensor([kv.shape[1] * PAGE], dtype=torch.int32, device=sizes.device))


def attend(q: torch.Tensor, held: Cache) -> Attention:
    found = trtllm_batch_decode_with_kv_cache(
        q, (held.kv[0], held.kv[1]), None, held.table, held.lens, None, q.shape[2] ** -0.5, return_lse=True
    )
    return Attention(*found)


def gathered(t: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Gather t from all ranks: (ranks, *t.shape)."""
    found = t.new_empty(ranks * t.shape[0], *t.shape[1:])
    dist.all_gather_into_tensor(found, t.contiguous(), group)
    return found.unflatten(0, (ranks, -1))


def by_heads(sizes: argparse.Namespace, group: dist.ProcessGroup, ranks: int, rank: int) -> Callable[[], torch.Tensor]:
    """Return a tensor-parallel step. It returns (1, Hq, D)."""
    share = [n // ranks for n in sizes.heads]
    mine = [slice(rank * n, (rank + 1) * n) for n in share]
    q, held = query(sizes)[:, mine[0]], cache(sizes, range(PARTS), mine[1])
    return lambda: gathered(attend(q, held).out[0], group, ranks).flatten(0, 1)[None]


def by_keys(sizes: argparse.Namespace, group: dist.ProcessGroup, ranks: int, rank: int) -> Callable[[], torch.Tensor]:
    """Return a context-parallel step. It returns (1, Hq, D)."""
    each = PARTS // ranks
    q, held = query(sizes), cache(sizes, range(rank * each, (rank + 1) * each))

    def step() -> torch.Tensor:
        out, lse = (found[0] for found in attend(q, held))
        both = gathered(torch.cat((out, lse[:, None].view(out.dtype)), 1), group, ranks)  # a float as two 16-bit values
        outs, sums = both[..., : sizes.dim].contiguous(), both[..., sizes.dim :].contiguous().view(lse.dtype)
        return merge_states(outs[None], sums[None, ..., 0])[0]

    return step


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture the step as a CUDA graph."""
    step()  # allocations and kernels of the first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread calls CUDA meanwhile
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def microseconds(step: Callable[[], torch.Tensor], device: str) -> float:
    """Return the median time of STEPS steps, after two that do not count. A step ends when the device has finished its
    work."""
    times = []
    for _ in range(STEPS[device.split(":")[0]] + 2):
        begin = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[2:]) * 1e6


def work(rank: int, ranks: int, sizes: argparse.Namespace, address: str) -> None:
    """Run one rank: take part in groups of 1, 2, 4, ... ranks. The first rank prints."""
    if sizes.device == "cpu":
        torch.set_num_threads(1)  # the processes share the cores
    else:
        sizes.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    backend, device = ("gloo", None) if sizes.device == "cpu" else ("nccl", torch.device(sizes.device))
    timeout = timedelta(minutes=5)
    dist.init_process_group(backend, address, timeout, rank=rank, world_size=ranks, device_id=device)
    want = attend(query(sizes), cache(sizes, range(PARTS))).out.float() if rank == 0 else None
    count, step = 1, None
    while count <= ranks:
        group = dist.new_group(range(count))
        for name, make in (("tensor parallel", by_heads), ("context parallel", by_keys)):
            if rank < count:
                step = make(sizes, group, count, rank)
                step = step if sizes.device == "cpu" else captured(step)
                out, us = step(), microseconds(step, sizes.device)
                if want is not None:
                    error = float((out.float() - want).abs().max())
                    print(f"{count} ranks, {name:17}{us:10.1f} us, error {error:.1e}", flush=True)
            step = None  # at its end NCCL waits for graphs that hold its calls
            dist.barrier()
        count *= 2
    dist.destroy_process_group()


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keys", type=int, help=f"cpu: {CPU['keys']}, cuda: {CUDA['keys']}")
    parser.add_argument("--ranks", type=int, default=2, help="processes, a power of two up to 8; default: 2")
    args = parser.parse_args(argv)
    defaults = CPU if args.device == "cpu" else CUDA
    sizes = argparse.Namespace(**{**defaults, "keys": args.keys or defaults["keys"]}, device=args.device)
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if ranks not in (1, 2, 4, 8) or sizes.keys % (PAGE * PARTS) or ranks > sizes.heads[1]:
        parser.error(f"--ranks must be 1, 2, 4 or 8 and at most {sizes.heads[1]}, --keys a multiple of {PAGE * PARTS}")
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]), ranks, sizes, "env://")
    else:
        print(f"{sizes.keys} keys, {sizes.heads[0]} heads over {sizes.heads[1]} of K and V, {sizes.dtype}", flush=True)
        torch.multiprocessing.spawn(work, (ranks, sizes, free_address()), ranks)


if __name__ == "__main__":
    main()
