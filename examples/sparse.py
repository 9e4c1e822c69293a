"""Sparse attention in two calls: keep the keys that an indexer scores highest, and attend only to them.

    python -m examples.sparse                               # the CPU: 2048 keys, 128 kept
    python -m examples.sparse --device cuda                 # 131072 keys, 2048 kept

The first call returns the slots of the kept keys in the paged cache, and the second one attends to them. Neither plans
or copies anything to the host, so that a captured graph serves every step. The program prints times; the relative error
of the sparse output against dense attention and against exact attention over the kept keys; and the share of the
probability that the kept keys hold. --keys, --kept and --batch set the sizes.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from wrappers import sparse_paged_attention, top_k_page_table_transform, trtllm_batch_decode_with_kv_cache

PAGE = 64  # tokens per page of the cache
CPU = dict(keys=2048, kept=128, batch=2, heads=(8, 2), dim=64)
CUDA = dict(keys=131072, kept=2048, batch=4, heads=(64, 8), dim=128)


class Step(NamedTuple):
    """A decode step of B requests with one query token each."""

    q: torch.Tensor  # (B, Hq, D)
    k: torch.Tensor  # (pages, PAGE, Hkv, D), and v
    v: torch.Tensor
    pages: torch.Tensor  # (B, keys / PAGE) int32: page table
    lens: torch.Tensor  # (B,) int32
    scores: torch.Tensor  # (B, keys) fp32, the indexer's


def make_step(keys: int, batch: int, heads: tuple[int, int], dim: int, device: str) -> Step:
    """Make a step with heavy-tailed attention.

    The logits of a request are x + N(0, 1), with x = 2 Exp(1) shared by its heads: their exponentials are heavy-tailed,
    so few keys hold nearly all of the probability. The indexer sees x + N(0, 1/4), and nothing of single heads.
    """
    g = torch.Generator(device).manual_seed(0)
    (query_heads, kv_heads), pages = heads, batch * keys // PAGE

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=dtype)

    table = torch.randperm(pages, generator=g, device=device).view(batch, -1)
    x = torch.empty(batch, keys, device=device).exponential_(0.5, generator=g)
    along = torch.nn.functional.normalize(normal(batch, kv_heads, dim, dtype=torch.float32), dim=-1)
    k, v = normal(pages, PAGE, kv_heads, dim), normal(pages, PAGE, kv_heads, dim)
    for request, (ids, unit) in enumerate(zip(table, along)):  # each key has x along a direction; its query lies on it
        k[ids] += (x[request].view(-1, PAGE, 1, 1) * unit).to(k.dtype)
    q = (along * dim**0.5).repeat_interleave(query_heads // kv_heads, dim=1).to(k.dtype)
    lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
    return Step(q, k, v, table.int(), lens, x + normal(batch, keys, dtype=torch.float32) / 2)


def attend_to_all(s: Step) -> Any:
    """Return (output (B, Hq, D), LSE (B, Hq) base 2) of attention to all tokens."""
    return trtllm_batch_decode_with_kv_cache(
        s.q, (s.k, s.v), None, s.pages, s.lens, None, bmm1_scale=s.q.shape[2] ** -0.5, kv_layout="NHD", return_lse=True
    )


def select(s: Step, kept: int) -> torch.Tensor:
    """Return the slots of the kept tokens in the cache, page * PAGE + row: (B, kept) int32."""
    return top_k_page_table_transform(s.scores, s.pages, s.lens, kept, page_size=PAGE)


def attend(s: Step, slots: torch.Tensor) -> Any:
    """Return the same of attention to the tokens in these slots."""
    return sparse_paged_attention(s.q, (s.k, s.v), slots, return_lse=True)


def exact(s: Step, slots: torch.Tensor) -> torch.Tensor:
    """Compute attention over the kept tokens in plain torch: (B, Hq, D) fp32."""
    group = s.q.shape[1] // s.k.shape[2]
    k, v = (x.flatten(0, 1)[slots.long()].float().repeat_interleave(group, dim=2) for x in (s.k, s.v))
    p = torch.einsum("bhd,bkhd->bhk", s.q.float(), k).mul(s.q.shape[2] ** -0.5).softmax(-1)
    return torch.einsum("bhk,bkhd->bhd", p, v)


def microseconds(call: Callable[[], Any], device: str) -> float:
    """Return the median time of a call; on CUDA that of its graph, with other data in the L2."""
    call()
    times = []
    if device == "cpu":
        for _ in range(5):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return median(times) * 1e6
    graph, other = torch.cuda.CUDAGraph(), torch.empty(1 << 28, dtype=torch.uint8, device=device)
    with torch.cuda.graph(graph):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for first, last in events:
        other.zero_()
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return median(first.elapsed_time(last) for first, last in events) * 1e3


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name in ("keys", "kept", "batch"):
        parser.add_argument(f"--{name}", type=int, help=f"cpu: {CPU[name]}, cuda: {CUDA[name]}")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    sizes: dict[str, Any] = (CUDA if given["device"] == "cuda" else CPU) | given
    print(", ".join(f"{name} {value}" for name, value in sizes.items()))
    kept, device = sizes.pop("kept"), sizes["device"]
    if sizes["batch"] < 1 or sizes["keys"] % PAGE or not 0 < kept <= sizes["keys"]:
        parser.error(f"--keys must be a multiple of {PAGE} and at least --kept, --kept and --batch at least 1")

    s = make_step(**sizes)
    slots = select(s, kept)
    calls = {
        "dense decode": lambda: attend_to_all(s),
        "selection": lambda: select(s, kept),
        "decode of the kept": lambda: attend(s, slots),
        "selection and decode": lambda: attend(s, select(s, kept)),
    }
    (dense, all_lse), (sparse, lse) = calls["dense decode"](), calls["selection and decode"]()
    shares = (lse - all_lse).exp2()
    errors = [float((sparse - right).norm() / right.norm()) for right in (dense.float(), exact(s, slots))]
    found = {f"{name}, us": microseconds(call, device) for name, call in calls.items()}
    found |= dict(zip(("error to dense attention", "error to exact attention over the kept"), errors))
    found |= {
        "probability of the kept, mean": float(shares.mean()),
        "probability of the kept, least": float(shares.min()),
    }
    for name, value in found.items():
        print(f"{name:40}{value:12.1f}" if name.endswith("us") else f"{name:40}{value:12.5f}")
    return found


if __name__ == "__main__":
    main()
