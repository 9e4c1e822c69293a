"""Measure batches as engines launch them: prompt chunks together with decode tokens, and chunks over long contexts."""

import math
from collections.abc import Callable
from functools import partial

import torch

from wrappers import trtllm_batch_context_with_kv_cache

from . import decode, prefill
from .cases import serving as cases
from .cases.attention import AttentionCase
from .harness import Ceilings, Measurement, Setup, in_turns, ready
from .timing import Call, Timing, exactly, interleave
from .workload import Inputs, check, shape_of

CASES = cases.SERVE | cases.SWEEP_SERVE


def context(inputs: Inputs) -> Callable[[], torch.Tensor]:
    return lambda: trtllm_batch_context_with_kv_cache(**inputs)


PARTS = {"own-prefill": context, "own-decode": decode.ours}  # provider -> function that makes the call of its requests


def part(inputs: Inputs, first: int, last: int) -> Inputs:
    """Return the call of requests [first, last) alone, on views of the batch's query, output and block table."""
    starts = inputs["cum_seq_lens_q"][first : last + 1]
    kv_starts = inputs["cum_seq_lens_kv"][first : last + 1]
    rows, requests = slice(int(starts[0]), int(starts[-1])), slice(first, last)
    return inputs | {
        "query": inputs["query"][rows],
        "out": inputs["out"][rows],
        "block_tables": inputs["block_tables"][requests],
        "seq_lens": inputs["seq_lens"][requests],
        "cum_seq_lens_q": starts - starts[0],
        "cum_seq_lens_kv": kv_starts - kv_starts[0],
        "max_q_len": int(starts.diff().max()),
        "max_kv_len": int(kv_starts.diff().max()),
        "batch_size": last - first,
    }


def parts(inputs: Inputs) -> dict[str, Inputs]:
    """Split a mixed batch by provider: requests with several query tokens (they come first) and requests with one.

    Return {} if all requests are of one kind.
    """
    q_lens = shape_of(inputs).q_lens
    prompts = sum(m > 1 for m in q_lens)
    if prompts in (0, len(q_lens)):
        return {}
    return dict(zip(PARTS, (part(inputs, 0, prompts), part(inputs, prompts, len(q_lens)))))


def collect(sets: list[Inputs]) -> dict[str, Call]:
    """Return the calls of both parts if both pass the check, else {}."""
    own, calls = [parts(inputs) for inputs in sets], dict[str, Call]()
    for name, inputs in own[0].items():
        inputs["out"].fill_(math.nan)  # remove the previous call's result
        if ready(name, partial(PARTS[name], inputs), partial(check, inputs)):
            calls[name] = in_turns([PARTS[name](each[name]) for each in own])
    return calls if calls.keys() == PARTS.keys() else {}


def total(times: list[Timing]) -> Timing:
    return Timing(*(sum(getattr(t, name) for t in times) for name in ("median", "p10", "p90")))


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all prefill providers on one case. A mixed batch is also measured as two calls, one per kind of request;
    "own-parts" is the sum of their times.

    The floor is the longer of two times: the operations over this run's matmul rate, the bytes over its copy rate.
    """
    print(case.name, flush=True)
    sets = prefill.inputs_of(case, setup.device)
    shape = shape_of(sets[0])
    calls = prefill.collect(sets, setup.providers)
    if not calls:
        return []
    own = collect(sets) if "ours" in calls else {}
    times = interleave(calls | own, setup.clock, len(sets), setup.rounds)
    apart = {name: times.pop(name) for name in own}
    whole = prefill.best(times) | ({"own-parts": (total(list(apart.values())), "")} if apart else {})
    floor = max(shape.flops / top.tflops / 1e6, shape.bytes / top.gbps / 1e3)
    found = prefill.results(case.name, shape, whole | {"floor": (exactly(floor), "")})
    return found + [Measurement(case.name, name, t) for name, t in apart.items()]
