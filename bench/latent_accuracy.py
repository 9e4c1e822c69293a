"""Measure the error of latent attention, over all keys and over chosen ones, and of the indexer's logits against fp64,
beside FlashMLA and DeepGEMM of vLLM's wheel on the same values, and count the calls that repeat their bits.

The errors of attention are those of `bench.accuracy`. The error of a logit is relative to the sum of the magnitudes
that the logit consists of. The provider "own-shared" is ours with `share_keys`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

import wrappers
from wrappers import reference

from . import accuracy, harness, indexer, mla
from .accuracy import Run
from .cases import mla as cases
from .cases.mla import MlaCase, MlaInputs
from .results import AccuracyRow, DeterminismRow, Environment

PROVIDERS = ("ours", "own-shared", "flashmla", "deep-gemm")
DEVIATIONS = {"normal": 1.0, "sharp": accuracy.SHARP}  # of the logits of attention
HEADS, LENGTHS = (16, 128), (1 << 10, 1 << 15)
CHOSEN, ROWS = 2048, 1 << 13  # keys of a token, and rows of the cache per request
REQUESTS, TOKENS = 4, 64  # of decode, and of a prompt
ALIKE = 75  # percentage of its keys that a token of the prompt with shared keys has in common with the one before
PARTS = 1, 2, 3, 5, 9, 40  # of the longest request in the batch of `in_batches`
TINY = 1e-30  # instead of a sum of magnitudes that is 0


@dataclass(frozen=True)
class LatentAccuracyCase:
    """A case. call: of attention, or the name of a case of `bench.indexer`. deviation: of the logits of attention."""

    name: str
    call: MlaCase | str
    deviation: float = 1.0


class ExactResult(NamedTuple):
    """The right output of a call in float64, and how to make the call of each provider. mass: what the errors are
    relative to, instead of the RMS of the right output. stored: the RMS error that storing makes."""

    right: torch.Tensor
    dtype: torch.dtype
    calls: Mapping[str, Callable[[], Run]]
    mass: torch.Tensor | None = None
    stored: float | None = None


def all_cases() -> Iterator[LatentAccuracyCase]:
    for heads in HEADS:
        for data, deviation in DEVIATIONS.items():
            for keys in LENGTHS:
                dense = MlaCase(lens=(keys,) * REQUESTS, heads=heads)
                yield LatentAccuracyCase(f"accuracy-mla-bf16-{data}-s{keys}-h{heads}", dense, deviation)
            sparse = MlaCase(lens=(ROWS,) * REQUESTS, heads=heads, chosen=CHOSEN, record="656")
            yield LatentAccuracyCase(f"accuracy-dsa-kv656-{data}-k{CHOSEN}-h{heads}", sparse, deviation)
        alike = ALIKE if heads == HEADS[0] else -1  # keys are not shared with 128 heads
        prompt = MlaCase("sparse_fwd", lens=(ROWS,), rows=TOKENS, heads=heads, chosen=CHOSEN, alike=alike)
        yield LatentAccuracyCase(f"accuracy-dsa-prefill-bf16-k{CHOSEN}-h{heads}", prompt)
    yield LatentAccuracyCase("accuracy-indexer-prefill", f"indexer-prefill-t{TOKENS}-s{LENGTHS[1]}-h64")
    yield LatentAccuracyCase("accuracy-indexer-decode", f"indexer-decode-b{REQUESTS}-s{LENGTHS[1]}-h64")


CASES = {case.name: case for case in all_cases()}


# ---- the right output, and the calls


def make(call: MlaCase, deviation: float, device: str) -> MlaInputs:
    """Make the inputs of a call over a cache in bf16."""
    i = mla.make(replace(call, record=""), device, 0)
    return i._replace(q=i.q * (deviation / (cases.SCALE * call.dim**0.5)))


def packed(call: MlaCase, i: MlaInputs) -> MlaInputs:
    """Return the same inputs over a cache of 656-byte rows, with the scales that vLLM writes."""
    rows, cache = i.cache.flatten(0, 1), cases.empty_cache(call, len(i.cache), i.q.device)
    slots, one = torch.arange(len(rows), device=rows.device), torch.ones(1, device=rows.device)
    latent, rotated = rows.split((cases.VALUES, call.dim - cases.VALUES), -1)
    wrappers.concat_and_cache_mla(latent, rotated, cache, slots, "fp8_ds_mla", one)
    return i._replace(cache=cache)


def attention(call: MlaCase, deviation: float, device: str) -> ExactResult:
    plain, i, stored = replace(call, record=""), make(call, deviation, device), None
    right = cases.expected(plain, i).out
    if call.record:
        i, unstored = packed(call, i), right
        values = reference.latent_values(call.record, i.cache)
        right = cases.expected(plain, i._replace(cache=values)).out
        stored = accuracy.relative(right - unstored, unstored)[1]
    runs = {"ours": partial(mla.ours, call, i), "flashmla": partial(mla.flashmla, call, i)}
    runs |= {name: partial(mla.ours, other, i) for name, other in mla.own_others(call).items()}
    return ExactResult(right, i.q.dtype, {name: partial(output, run) for name, run in runs.items()}, stored=stored)


def output(make: Callable[[], Callable[[], mla.Out]]) -> Run:
    """Return a call without its LSE."""
    run = make()
    return lambda: run()[0]


def logits(name: str, device: str) -> ExactResult:
    """Return the logits of the keys that each token sees, one token after another."""
    i = indexer.make(name, device, 0)
    tokens = range(i.q.shape[0] * i.q.shape[1])
    rights = [indexer.wanted(i, token, torch.float64) for token in tokens]
    mass = torch.cat([indexer.wanted(i, token, torch.float64, magnitudes=True) for token in tokens])

    def seen(compute: Callable[[indexer.LogitsInputs], torch.Tensor]) -> Run:
        def run() -> torch.Tensor:
            return torch.cat([row[: len(right)] for row, right in zip(compute(i), rights, strict=True)])

        return run

    calls = {name: partial(seen, indexer.PROVIDERS[name]) for name in ("ours", "deep-gemm")}
    return ExactResult(torch.cat(rights), torch.float32, calls, mass)


def exact_result(case: LatentAccuracyCase, device: str) -> ExactResult:
    if isinstance(case.call, str):
        return logits(case.call, device)
    return attention(case.call, case.deviation, device)


# ---- measurements


def measure(
    case: LatentAccuracyCase, setup: harness.Setup, env: Environment
) -> tuple[list[AccuracyRow], dict[str, Run]]:
    """Return the rows of a case, and the calls that made them."""
    right, dtype, calls, mass, stored = exact_result(case, setup.device)
    rows, runs = [], dict[str, Run]()

    def add(provider: str, out: torch.Tensor) -> None:
        error, unit = out.double() - right, right
        if mass is not None:
            error, unit = error / mass.clamp(min=TINY), torch.ones_like(mass)
        rows.append(accuracy.row_of(env, case.name, provider, out, accuracy.relative(error, unit), stored))

    add("rounded", right.to(dtype))
    for name, make_run in calls.items():
        run = harness.ready(name, make_run, accuracy.finite) if name in setup.providers else None
        if run is not None:
            runs[name] = run
            add(name, run())
    return rows, runs


def in_batches(call: MlaCase, deviation: float, device: str) -> tuple[int, int]:
    """Return how many requests of a batch have the same bits alone, and the number of requests. Without
    chosen keys, the requests have different lengths."""
    call = replace(call, lens=call.lens[:1] * len(PARTS))
    i = make(call, deviation, device)
    i = packed(call, i) if call.record else i
    lens = [max(1, call.lens[0] // part) for part in PARTS]
    i = i._replace(lens=torch.tensor(lens, dtype=torch.int32, device=device))
    together = mla.ours(call, i)()[0].split(1)
    alone = [mla.ours(call, mla.part_of(i, [b]))()[0] for b in range(len(lens))]
    return sum(accuracy.digest(a) == accuracy.digest(b) for a, b in zip(together, alone)), len(lens)


def determinism(
    case: LatentAccuracyCase, runs: dict[str, Run], setup: harness.Setup, env: Environment
) -> list[DeterminismRow]:
    """Return the rows of a case: calls that repeat their bits, in a row, in decode alone and in a batch, and on another
    GPU."""
    count, call = accuracy.REPEATS, case.call
    add = partial(accuracy.counted, env, case.name)
    found = [add(name, "runs", accuracy.repeated(run, count), count) for name, run in runs.items()]
    if "ours" not in runs:
        return found
    if isinstance(call, MlaCase) and call.function == "flash_mla":
        found.append(add("ours", "batch", *in_batches(call, case.deviation, setup.device)))
        invariant = in_batches(replace(call, invariant=True), case.deviation, setup.device)
        found.append(add("ours", "batch, batch_invariant", *invariant))
    if setup.device.startswith("cuda") and torch.cuda.device_count() > 1:
        with torch.cuda.device(1):
            there = exact_result(case, "cuda:1").calls["ours"]()
            equal = accuracy.digest(there()) == accuracy.digest(runs["ours"]())
            found.append(add("ours", "devices", int(equal), 1))
    return found
