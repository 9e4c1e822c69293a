"""Measure top-k: all providers on each case, as a CUDA graph over inputs that have left the L2. The floor is the copy
rate."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from wrappers import (
    top_k,
    top_k_page_table_transform,
    top_k_per_row_decode,
    top_k_per_row_prefill,
    top_k_ragged_transform,
)  # fmt: skip

from .harness import Ceilings, Measurement, Setup, host_times, ready, rotated
from .timing import Call, Timing, exactly, interleave

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADLINE = (
    "topk-fp32-1x32768-k2048", "topk-fp32-1x131072-k2048", "topk-fp32-4x65536-k512", "topk-fp32-8x131072-k2048",
    "topk-fp32-64x2048-k512", "topk-fp32-64x16384-k2048", "topk-fp32-64x65536-k2048", "topk-bf16-64x65536-k2048",
    "topk-fp32-16x524288-k2048", "topk-fp32-32x129280-k1024", "topk-fp32-1024x65536-k2048", "topk-fp32-4096x8192-k2048",
    "topk-fp32-4096x65536-k2048",
)  # fmt: skip
SORTED = (
    "topk-sorted-fp32-1x32768-k2048", "topk-sorted-fp32-64x65536-k2048", "topk-sorted-bf16-64x65536-k2048",
    "topk-sorted-fp32-4096x8192-k2048", "topk-sorted-fp32-64x65536-k8192",
)  # fmt: skip
SWEEP = tuple(
    f"sweep-topk-fp32-{rows}x{length}-k{min(2048, length // 4)}"
    for rows, most in ((1, 20), (16, 20), (128, 18), (1024, 17))
    for length in (1 << e for e in range(10, most + 1))
)
HOST_CASE = "host-topk-fp32-1x512-k64"
OUTPUTS = "topk-fp32-64x65536-k2048"  # the case on which all functions are compared


@dataclass(frozen=True)
class TopKInputs:
    """Inputs and outputs of a case, for all functions. sorted: the values must be in descending order."""

    scores: torch.Tensor
    k: int
    sorted: bool
    lengths: torch.Tensor
    zeros: torch.Tensor
    table: torch.Tensor
    indices: torch.Tensor

    @property
    def bytes(self) -> int:
        """Return the size of the scores, read once."""
        return self.scores.numel() * self.scores.element_size()


def make(name: str, device: str, seed: int) -> TopKInputs:
    """Make N(0, 1) scores for a case 'topk-<dtype>-<rows>x<length>-k<k>' or 'topk-sorted-...'. All lengths are full."""
    found = re.search(r"-(fp32|fp16|bf16)-(\d+)x(\d+)-k(\d+)$", name)
    if not found:
        raise ValueError(f"case {name!r}: must end as topk-fp32-64x65536-k2048")
    rows, length, k = (int(x) for x in found.groups()[1:])
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.empty(rows, length, dtype=DTYPES[found[1]], device=device).normal_(generator=generator)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    pages = torch.randint(1 << 20, (rows, length // 64 + 1), generator=generator, **ints)
    full, zeros = torch.full((rows,), length, **ints), torch.zeros(rows, **ints)
    return TopKInputs(scores, k, "-sorted-" in name, full, zeros, pages, torch.full((rows, k), -7, **ints))


def per_row(i: TopKInputs, decode: bool) -> torch.Tensor:
    rows, (stride0, stride1) = i.scores.shape[0], i.scores.stride()
    if decode:
        top_k_per_row_decode(i.scores, 1, i.lengths, i.indices, rows, stride0, stride1, i.k)
    else:
        top_k_per_row_prefill(i.scores, i.zeros, i.lengths, i.indices, rows, stride0, stride1, i.k)
    return i.indices


def paged(i: TopKInputs) -> torch.Tensor:
    top_k_page_table_transform(i.scores, i.table, i.lengths, i.k, page_size=64, out_raw_indices=i.indices)
    return i.indices


def ragged(i: TopKInputs) -> torch.Tensor:
    return top_k_ragged_transform(i.scores, i.zeros, i.lengths, i.k)


def in_order(i: TopKInputs) -> torch.Tensor:
    return top_k(i.scores, i.k, sorted=True)[1]


def flashinfer(i: TopKInputs) -> torch.Tensor:
    import flashinfer as peer

    if i.sorted:
        return peer.top_k(i.scores, i.k, sorted=True)[1]
    return peer.top_k_ragged_transform(i.scores, i.zeros, i.lengths, i.k)


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch memory of vLLM's kernels."""
    return torch.zeros(1 << 20, dtype=torch.uint8, device=device)


def vllm(i: TopKInputs) -> torch.Tensor:
    """Call the kernel that vLLM 0.33 chooses for the indexer of sparse attention. Raise ValueError if it has none."""
    from vllm import _custom_ops as peer

    (rows, length), (stride0, stride1) = i.scores.shape, i.scores.stride()
    if i.sorted or i.scores.dtype != torch.float32:
        raise ValueError("vLLM selects from fp32 scores, without sorting")
    if i.k in (512, 1024, 2048):
        ops = torch.ops._C
        run = ops.cooperative_topk if rows <= 64 and stride0 % 4 == 0 else ops.persistent_topk
        run(i.scores, i.lengths, i.indices, workspace(i.scores.device), i.k, length)
    else:
        peer.top_k_per_row_decode(i.scores, 1, i.lengths, i.indices, rows, stride0, stride1, i.k)
    return i.indices


# ours: the function that writes least. torch: writes values and 64-bit indices, unsorted, which is faster. In sorted
# cases every provider writes values and 64-bit indices.
PROVIDERS: dict[str, Callable[[TopKInputs], torch.Tensor]] = {
    "ours": lambda i: in_order(i) if i.sorted else ragged(i),
    "torch": lambda i: torch.topk(i.scores, i.k, sorted=i.sorted).indices,
    "flashinfer": flashinfer,
    "vllm": vllm,
}
FUNCTIONS: dict[str, Callable[[TopKInputs], torch.Tensor]] = {
    "top_k_ragged_transform": ragged,
    "top_k_page_table_transform": paged,
    "top_k": lambda i: top_k(i.scores, i.k)[1],
    "top_k-sorted": in_order,
    "top_k_per_row_prefill": lambda i: per_row(i, False),
    "top_k_per_row_decode": lambda i: per_row(i, True),
}


def check(inputs: TopKInputs, indices: torch.Tensor) -> str | None:
    """Return None if the indices are distinct and name the k largest scores (in descending order for sorted cases),
    else the reason."""
    order = indices.long().sort(1).values
    if bool((order[:, 1:] == order[:, :-1]).any()):
        return "an index comes twice"
    if int(order.min()) < 0 or int(order.max()) >= inputs.scores.shape[1]:
        return "an index lies outside the row"
    got, want = (
        inputs.scores.gather(1, i).sort(1).values for i in (order, torch.topk(inputs.scores, inputs.k).indices)
    )
    if not torch.equal(got, want):
        return "not the largest scores"
    found = inputs.scores.gather(1, indices.long())
    return "not in descending order" if inputs.sorted and bool((found[:, 1:] > found[:, :-1]).any()) else None


def graph(run: Callable[[Any], object], sets: list[Any]) -> Call:
    """Capture one call on each of the sets as a CUDA graph, and return its replay, which keeps the sets."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in sets:
            run(i)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in sets:
            run(i)

    def replay(_: int, held: list[Any] = sets) -> None:  # the next capture gives memory that is free back to the driver
        captured.replay()

    return replay


def every(run: Callable[[Any], object], sets: list[Any], _: int) -> None:
    for i in sets:
        run(i)


def collect(
    sets: list[Any], functions: dict[str, Callable[[Any], Any]], setup: Setup, check: Callable[..., str | None] = check
) -> dict[str, Call]:
    """Return the calls, on all sets, of the functions that pass the check. Print each function left out, with the
    reason."""
    calls: dict[str, Call] = {}
    for name, run in functions.items():
        if ready(name, partial(partial, run, sets[0]), partial(check, sets[0])):
            calls[name] = graph(run, sets) if setup.device == "cuda" else partial(every, run, sets)
    return calls


def inputs_of(name: str, device: str) -> list[TopKInputs]:
    """Return the input sets of a case (see `rotated`)."""
    return rotated(lambda seed: make(name, device, seed), lambda inputs: inputs.bytes)


def per_call(timing: Timing, sets: int) -> Timing:
    return Timing(timing.median / sets, timing.p10 / sets, timing.p90 / sets)


def measure(name: str, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case. The floor is the time to read the scores once at this run's copy rate."""
    return beside_floor(name, inputs_of(name, setup.device), PROVIDERS, check, top, setup)


def beside_floor(
    name: str, sets: list[Any], providers: dict[str, Any], check: Callable[..., str | None], top: Ceilings, setup: Setup
) -> list[Measurement]:  # fmt: skip
    """Measure the chosen providers on the sets of a case, and add the floor: the time for a set's bytes at this run's
    copy rate."""
    print(name, flush=True)
    calls = collect(sets, {p: providers[p] for p in setup.providers if p in providers}, setup, check)
    if not calls:
        return []
    size, floor = sets[0].bytes, sets[0].bytes / top.gbps / 1e3
    times = {p: per_call(t, len(sets)) for p, t in interleave(calls, setup.clock, 1, setup.rounds).items()}
    found = [Measurement(name, p, t, gbps=size / t.median / 1e3) for p, t in times.items()]
    return [*found, Measurement(name, "floor", exactly(floor), gbps=top.gbps)]


def outputs(name: str, setup: Setup) -> list[Measurement]:
    """Measure the cost of the functions' outputs: all our functions on one case, each as a case of its own."""
    print(f"outputs of {name}", flush=True)
    sets = inputs_of(name, setup.device)
    times = interleave(collect(sets, FUNCTIONS, setup), setup.clock, 1, setup.rounds)
    return [Measurement(f"outputs-{f}-{name}", "ours", per_call(t, len(sets))) for f, t in times.items()]


def host(setup: Setup) -> list[Measurement]:
    """Measure the host time of a call: for ours, that of the slowest function."""
    print(HOST_CASE, flush=True)
    inputs = make(HOST_CASE, setup.device, 0)
    functions = {f"ours/{name}": run for name, run in FUNCTIONS.items() if name != "top_k-sorted"}
    calls: dict[str, Call] = {
        n: partial(every, run, [inputs]) for n, run in (functions | {"torch": PROVIDERS["torch"]}).items()
    }
    times = host_times(calls, setup)
    found = [Measurement(HOST_CASE, "torch", times.pop("torch"))]
    slowest = max(times, key=lambda name: times[name].median)
    return [
        *found,
        Measurement(HOST_CASE, "ours", times[slowest], note=f"{slowest.partition('/')[2]}, the slowest function"),
    ]
