"""Measure decode attention: the time of each case beside the time to read its K and V at this run's copy rate."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from wrappers import trtllm_batch_decode_with_kv_cache

from .cases import attention as cases
from .cases import precision, serving
from .cases.attention import AttentionCase
from .harness import Ceilings, Measurement, Setup, host_times, in_turns, ready, rotated
from .timing import Call, exactly, interleave
from .workload import Inputs, check

HOST_CASE = "host-decode"
CASES = cases.DECODE | precision.DECODE | serving.DECODE


def ours(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return our decode call. All requests have the same number of query tokens, so it passes no offsets."""
    plain = cases.as_decode(inputs) | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": inputs["max_q_len"]}
    return lambda: trtllm_batch_decode_with_kv_cache(**plain)


def batch_invariant(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return our call with `batch_invariant`: its bits do not depend on the rest of the batch."""
    return ours(inputs | {"batch_invariant": True})


@cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return XQA's scratch and semaphores. Every launch leaves the semaphores at 0, so all calls share them, as in an
    engine."""
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    return space, torch.zeros(8 << 20, dtype=torch.uint8, device=device).view(torch.uint32)


def flashinfer(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return the call of flashinfer's XQA on the same pages."""
    if inputs["max_q_len"] > 1:
        raise ValueError("its drafts want masks")
    from flashinfer.xqa import xqa

    q, (k, v), table = inputs["query"], inputs["kv_cache"], inputs["block_tables"]
    out, lens = torch.empty_like(q), inputs["seq_lens"].view(torch.uint32)[:, None]
    scratch, heads, page_size = workspace(q.device), k.shape[1], k.shape[2]
    options = {"kv_layout": "HND", "sliding_win_size": inputs.get("window_left", -1) + 1}

    def run() -> torch.Tensor:
        xqa(q[:, None], k, v, table, lens, out[:, None], *scratch, heads, page_size, **options)
        return out

    return run


PROVIDERS: dict[str, Callable[[Inputs], Callable[[], torch.Tensor]]] = {
    "ours": ours,
    "batch-invariant": batch_invariant,
    "flashinfer": flashinfer,
}


def wider(case: AttentionCase) -> dict[str, AttentionCase]:
    """Return the same case with the next wider cache type, or with a bf16 query if the query is e4m3.

    Our own time on these cases is the comparison for low precision.
    """
    if case.dtype == "fp8":
        return {"own-bf16-query": replace(case, dtype="bf16")}
    found = {"nvfp4": "fp8", cases.TOKEN_SCALES: "fp8", cases.INT8_SCALES: cases.TOKEN_SCALES, "fp8": ""}.get(
        case.kv_dtype
    )
    return {} if found is None else {f"own-{found or 'bf16'}": replace(case, kv_dtype=found)}


def kv_bytes(case: AttentionCase) -> int:
    """Return the bytes of the keys and values that the last token sees, read once, with their scale factors."""
    row = case.head_dim_qk + case.head_dim_vo
    size = row // 2 + row // 16 if case.kv_dtype == "nvfp4" else row * (1 if case.kv_dtype else 2)
    size += 8 * (case.kv_dtype in cases.BY_TOKEN)
    seen = [n if case.window_left < 0 else min(n, case.window_left + 1) for n in case.kv_lens]
    return sum(seen) * case.heads_kv * size


def inputs_of(case: AttentionCase, device: str) -> list[Inputs]:
    """Return the input sets of a case (see `rotated`)."""
    return rotated(lambda seed: precision.make_inputs(case, device, seed), lambda _: kv_bytes(case))


def collect(sets: list[Inputs], providers: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of the providers that pass the check on the first set. Print each provider left out, with the
    reason."""
    calls: dict[str, Call] = {}
    for name in (p for p in providers if p in PROVIDERS):
        sets[0]["out"].fill_(math.nan)  # remove the previous provider's result
        first = ready(name, partial(PROVIDERS[name], sets[0]), partial(check, sets[0]))
        if first is not None:
            calls[name] = in_turns([first, *(PROVIDERS[name](inputs) for inputs in sets[1:])])
    return calls


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case, and add the floor."""
    print(case.name, flush=True)
    sets = inputs_of(case, setup.device)
    calls = collect(sets, setup.providers)
    if not calls:
        return []
    if "ours" in calls:
        calls |= collect(sets, ("batch-invariant",))
        for name, other in wider(case).items():
            own = collect([precision.make_inputs(other, setup.device, seed) for seed in range(len(sets))], ("ours",))
            calls |= {name: own["ours"]} if own else {}
    size = kv_bytes(case)
    times = interleave(calls, setup.clock, len(sets), setup.rounds) | {"floor": exactly(size / top.gbps / 1e3)}
    return [Measurement(case.name, p, t, gbps=size / t.median / 1e3) for p, t in times.items()]


def host(setup: Setup) -> list[Measurement]:
    """Measure the host time of a call on a tiny case: its kernel takes about as long as the call."""
    print(HOST_CASE, flush=True)
    case = AttentionCase(HOST_CASE, q_lens=(1,), kv_lens=(64,), lse=False)
    times = host_times(collect([cases.make_inputs(case, setup.device)], setup.providers), setup)
    return [Measurement(HOST_CASE, provider, t) for provider, t in times.items()]
