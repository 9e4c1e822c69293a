"""Measure decode over latent caches (MLA): the time of each case beside its floor, the longer one of the times to read
the keys once at this run's copy rate and to do the operations at its matmul rate."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from .cases import mla as cases
from .cases.mla import MlaCase, MlaInputs
from .harness import Ceilings, Measurement, Setup, in_turns, ready, rotated
from .timing import Call, exactly, interleave

NAMES = (
    "b64-s8192-h128-p64", "b128-s4096-h128-p64", "b64-s8192-h128-p64-q2", "b128-s4096-h16-p64", "b128-s1024-h16-p64",
    "b8-s32768-h16-p64", "b1-s131072-h16-p64", "b1-s32768-h128-p64", "b128-s4096-h16-p1", "b128-s4096-h64-p64",
    "b64-s8192-h8-p64",
)  # fmt: skip
CHECKED = 3  # requests
Out = tuple[torch.Tensor, torch.Tensor]


def case_of(name: str) -> MlaCase:
    """Return the case 'b<requests>-s<keys>-h<heads>-p<rows of a page>', perhaps with '-q<query tokens>'."""
    found = re.fullmatch(r"b(\d+)-s(\d+)-h(\d+)-p(\d+)(?:-q(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like b64-s8192-h128-p64")
    batch, keys, heads, page, rows = (int(x or 1) for x in found.groups())
    return MlaCase(lens=(keys,) * batch, heads=heads, page_size=page, rows=rows)


CASES = {f"mla-decode-bf16-{name}": case_of(name) for name in NAMES}


def make(case: MlaCase, device: str, seed: int) -> MlaInputs:
    """Make the inputs of a case. All pages are used, in any order."""
    gen = torch.Generator(device).manual_seed(seed)
    batch, columns = len(case.lens), -(-case.lens[0] // case.page_size)
    cache = torch.randn(
        batch * columns, case.page_size, case.dim, generator=gen, device=device, dtype=torch.bfloat16
    )  # fmt: skip
    table = torch.randperm(batch * columns, generator=gen, device=device).view(batch, columns).int()
    q = torch.randn(batch, case.rows, case.heads, case.dim, generator=gen, device=device, dtype=torch.bfloat16)
    return MlaInputs(q, cache, table, torch.tensor(case.lens, dtype=torch.int32, device=device), None)


def ours(case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    return lambda: cases.call(case, i)


def flashmla(case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    """FlashMLA as vLLM's wheel has it. Its metadata are made once, as engines make them once for all layers."""
    from vllm.third_party.flashmla import flash_mla_interface as peer

    metadata, cache = peer.get_mla_metadata()[0], i.cache.unsqueeze(2)
    return lambda: peer.flash_mla_with_kvcache(
        i.q, cache, i.table, i.lens, cases.VALUES, metadata, softmax_scale=cases.SCALE, causal=case.causal
    )


PROVIDERS: dict[str, Callable[[MlaCase, MlaInputs], Callable[[], Out]]] = {"ours": ours, "flashmla": flashmla}


def check(case: MlaCase, i: MlaInputs, got: Out) -> str | None:
    """Return None if some requests have the exact result within the tolerance, else the reason."""
    some = sorted({0, len(case.lens) // 2, len(case.lens) - 1})[:CHECKED]
    part = MlaInputs(i.q[some], i.cache, i.table[some], i.lens[some], None)
    few = MlaCase(lens=tuple(case.lens[b] for b in some), heads=case.heads, page_size=case.page_size, rows=case.rows)
    worst = cases.error(few, (got[0][some], got[1][some]), cases.expected(few, part))
    return None if worst <= 1.0 else f"{worst:.1f} of the tolerance"


def key_bytes(case: MlaCase) -> int:
    return sum(case.lens) * case.dim * 2


def operations(case: MlaCase) -> int:
    return 2 * sum(case.lens) * case.rows * case.heads * (case.dim + cases.VALUES)


def collect(case: MlaCase, sets: list[MlaInputs], run: str, label: str) -> dict[str, Call]:
    """Return {label: the calls of a provider}, or {} if its first result is wrong."""
    first = ready(label, partial(PROVIDERS[run], case, sets[0]), partial(check, case, sets[0]))
    return {} if first is None else {label: in_turns([first, *(PROVIDERS[run](case, one) for one in sets[1:])])}


def measure(name: str, case: MlaCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case, and add the floor."""
    print(name, flush=True)
    sets = rotated(lambda seed: make(case, setup.device, seed), lambda _: key_bytes(case))
    calls: dict[str, Call] = {}
    for provider in (p for p in setup.providers if p in PROVIDERS):
        calls |= collect(case, sets, provider, provider)
    if not calls:
        return []
    if case.page_size != 64 and "ours" in calls:  # beside pages of 64 rows
        other = replace(case, page_size=64)
        calls |= collect(other, [make(other, setup.device, seed) for seed in range(len(sets))], "ours", "own-p64")
    size, work = key_bytes(case), operations(case)
    floor = exactly(max(size / top.gbps / 1e3, work / top.tflops / 1e6))
    times = interleave(calls, setup.clock, len(sets), setup.rounds) | {"floor": floor}
    return [Measurement(name, p, t, tflops=work / t.median / 1e6, gbps=size / t.median / 1e3) for p, t in times.items()]
