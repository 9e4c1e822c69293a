"""Measure decode over latent caches (MLA), in which rows see all keys of their request (mla-decode) or have chosen them
(dsa-decode), and prompts of which each token chooses rows of a tensor (dsa-prefill): the time of each case beside its
floor, the longer one of the times to read the keys once at this run's copy rate and to do the operations at its matmul
rate. Peers are named by --providers: flashmla and flash-attn-3, both of vLLM's wheel."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .cases import mla as cases
from .cases.mla import MlaCase, MlaInputs
from .harness import Ceilings, Measurement, Setup, ready, rotated
from .timing import Call, exactly, interleave
from .topk import every, graph, per_call

NAMES = (
    "b64-s8192-h128-p64", "b128-s4096-h128-p64", "b64-s8192-h128-p64-q2", "b128-s4096-h16-p64", "b128-s1024-h16-p64",
    "b8-s32768-h16-p64", "b1-s131072-h16-p64", "b1-s32768-h128-p64", "b128-s4096-h16-p1", "b128-s4096-h64-p64",
    "b64-s8192-h8-p64",
)  # fmt: skip
PACKED_NAMES = ("fp8-b128-s8192-h16-p64", "kv656-b128-s8192-h16-p64")
CHOSEN_NAMES = (
    *(f"kv656-b{n}-h128-k2048" for n in (128, 64, 32, 8, 1)), "kv656-b64-h128-k2048-q2", "kv656-b64-h64-k2048",
    "kv656-b128-h64-k2048", "kv656-b128-h16-k2048", "kv656-b128-h8-k2048", "kv656-b8-h16-k2048", "kv656-b1-h16-k2048",
    "bf16-b128-h16-k2048", "bf16-b64-h128-k2048", "bf16-b8-h16-k2048", "bf16-b1-h16-k2048",
    "kv584-b64-h128-k512-w128", "kv584-b64-h64-k1024-w128", "kv352-b128-h16-k2048",
    "kv656any-b128-h16-k2048", "kv656-b64-h16-k2048",
)  # fmt: skip
PROMPT_NAMES = (
    *(f"bf16-t4096-s32768-h{heads}-k2048" for heads in (128, 64, 16)), "bf16-t512-s32768-h128-k2048",
    "bf16-d512-t4096-s16384-h128-k640", *(f"kv656-t4096-s32768-h{heads}-k2048" for heads in (128, 64, 16)),
    "fp8-t4096-s32768-h16-k2048", "kv584-d512-t4096-s16384-h128-k640",
    *(f"bf16-t4096-s32768-h16-k2048-a{percentage}" for percentage in (90, 75, 50, 0)),
    "bf16-t4096-s32768-h8-k2048-a75", "kv656-t4096-s32768-h16-k2048-a75",
)  # fmt: skip
INEXACT = "kv656any"  # factors are any positive numbers, as vLLM before 0.33 wrote them
RECORDS_OF = {"bf16": "", "fp8": "e4m3", **{f"kv{size}": str(size) for size in (656, 352, 584)}, INEXACT: "656"}
PADDED_HEADS = 64  # FlashMLA's sparse decode takes as many, or twice
WRITTEN = 1 << 16  # rows of a cache that are made at a time
CHECKED = 3  # requests
Out = tuple[torch.Tensor, torch.Tensor]


def case_of(name: str) -> MlaCase:
    """Return the case '<cache>-b<requests>-s<keys>-h<heads>-p<rows of a page>', perhaps with '-q<query tokens>'."""
    found = re.fullmatch(r"(\w+)-b(\d+)-s(\d+)-h(\d+)-p(\d+)(?:-q(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like bf16-b64-s8192-h128-p64")
    batch, keys, heads, page, rows = (int(x or 1) for x in found.groups()[1:])
    return MlaCase(
        lens=(keys,) * batch, heads=heads, page_size=page, rows=rows, record=RECORDS_OF[found[1]], exact=True
    )


def chosen_case(name: str) -> MlaCase:
    """Return the case '<cache>-b<requests>-h<heads>-k<keys that a row chooses>', perhaps with '-w<keys>', a window in a
    cache of its own, beside which the others are in a second one, and with '-q<query tokens>'."""
    found = re.fullmatch(r"(\w+)-b(\d+)-h(\d+)-k(\d+)(?:-w(\d+))?(?:-q(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like kv656-b64-h128-k2048")
    batch, heads, keys, window, rows = (int(x or 0) for x in found.groups()[1:])
    record = RECORDS_OF[found[1]]
    return MlaCase(
        lens=(max(2 * keys, LEAST_ROWS // batch),) * batch, heads=heads, rows=max(rows, 1), record=record,
        dim=512 if window else 576, chosen=window or keys, second=keys if window else 0,
        second_record=record if window else "", exact=found[1] != INEXACT,
    )  # fmt: skip


def prompt_case(name: str) -> MlaCase:
    """Return the case '<cache>[-d<columns>]-t<tokens>-s<rows>-h<heads>-k<rows that a token chooses>', perhaps with
    '-a<percentage of these that it has in common with the token before>'."""
    found = re.fullmatch(r"(\w+?)(?:-d(\d+))?-t(\d+)-s(\d+)-h(\d+)-k(\d+)(?:-a(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like {PROMPT_NAMES[0]}")
    dim, tokens, rows, heads, keys = (int(x or 576) for x in found.groups()[1:6])
    record, alike = RECORDS_OF[found[1]], -1 if found[7] is None else int(found[7])
    return MlaCase(
        "sparse_fwd", lens=(rows,), heads=heads, rows=tokens, dim=dim, chosen=keys, record=record, alike=alike,
        exact=True,
    )  # fmt: skip


LEAST_ROWS = 1 << 18  # of a cache from which keys are chosen: more than the L2 cache holds
CASES = {f"mla-decode-{name}": case_of(name) for name in (*(f"bf16-{name}" for name in NAMES), *PACKED_NAMES)}
CASES |= {f"dsa-decode-{name}": chosen_case(name) for name in CHOSEN_NAMES}
CASES |= {f"dsa-prefill-{name}": prompt_case(name) for name in PROMPT_NAMES}


def make(case: MlaCase, device: str, seed: int) -> MlaInputs:
    """Make the inputs of a case. All pages are used, in any order."""
    gen = torch.Generator(device).manual_seed(seed)
    batch, columns = len(case.lens), -(-case.lens[0] // case.page_size)
    cache = cases.empty_cache(case, batch * columns, device)
    rows = torch.arange(batch * columns * case.page_size, device=device)
    for some in rows.split(WRITTEN):
        keys = torch.randn(len(some), case.dim, generator=gen, device=device)
        cases.put(case.record, cache, some // case.page_size, some % case.page_size, keys, gen, case.exact)
    table = torch.randperm(batch * columns, generator=gen, device=device).view(batch, columns).int()
    q = torch.randn(batch, case.rows, case.heads, case.dim, generator=gen, device=device, dtype=torch.bfloat16)
    inputs = MlaInputs(q, cache, table, torch.tensor(case.lens, dtype=torch.int32, device=device), None)
    if case.chosen:
        shape = batch, case.rows, case.chosen
        slots = torch.randint(len(rows), shape, generator=gen, device=device)
        if case.alike >= 0:
            slots = neighbours(case, torch.randperm(len(rows), generator=gen, device=device))[None]
        inputs = inputs._replace(slots=slots.int())
    if case.second:
        other = replace(case, chosen=case.second, second=0, record=case.second_record)
        inputs = inputs._replace(second=make(other, device, seed + 1))
    return inputs


def neighbours(case: MlaCase, order: torch.Tensor) -> torch.Tensor:
    """Return the rows that the tokens of a prompt choose, ascending: a window of an order of all rows, which moves on
    from token to token."""
    moves, each = case.chosen * (100 - case.alike) // 100, torch.arange(case.chosen, device=order.device)
    tokens = torch.arange(case.rows, device=order.device)[:, None]
    return order[(tokens * moves + each) % len(order)].sort(-1).values


def ours(case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    def call() -> Out:
        out, lse, *_ = cases.call(case, i)
        return out, lse

    return call


def served(provider: str, case: MlaCase) -> bool:
    """Return whether a provider has a kernel for a case on Hopper. FlashMLA: over 16 bits all keys and prompts, else
    keys that rows choose. FlashAttention: over 16 bits, with rotated columns."""
    if provider == "flash-attn-3":
        return not case.record and case.dim > cases.VALUES
    if provider == "flashmla":
        chosen = case.chosen and case.function != "sparse_fwd"
        return case.record in ("656", "584") if chosen else not case.record
    return True


def flashmla(case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    """FlashMLA as vLLM's wheel has it. Its metadata are made once, as engines make them once for all layers."""
    from vllm.third_party.flashmla import flash_mla_interface as peer

    if case.function == "sparse_fwd":
        return flashmla_prompt(peer, case, i)
    metadata, cache = peer.get_mla_metadata()[0], i.cache.unsqueeze(2)
    if case.chosen:
        return flashmla_sparse(peer, case, i)
    return lambda: peer.flash_mla_with_kvcache(
        i.q, cache, i.table, i.lens, cases.VALUES, metadata, softmax_scale=cases.SCALE, causal=case.causal
    )


def flashmla_sparse(peer: Any, case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    """The same with keys that rows choose, for which it pads heads; as engines do, outside of the time that counts."""
    metadata, q = peer.get_mla_metadata()[0], i.q
    if case.heads < PADDED_HEADS:
        q = torch.nn.functional.pad(q, (0, 0, 0, PADDED_HEADS - case.heads))
    second: dict[str, Any] = {}
    if i.second is not None:
        second = {"extra_k_cache": i.second.cache.unsqueeze(2), "extra_indices_in_kvcache": i.second.slots}

    def run() -> Out:
        out, lse = peer.flash_mla_with_kvcache(
            q, i.cache.unsqueeze(2), None, None, cases.VALUES, metadata, softmax_scale=cases.SCALE,
            is_fp8_kvcache=True, indices=i.slots, **second,
        )  # fmt: skip
        return out[:, :, : case.heads], lse[:, : case.heads]

    return run


def flashmla_prompt(peer: Any, case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    """FlashMLA's sparse prefill, which pads heads itself."""
    assert i.slots is not None
    q, kv, rows = i.q[0], i.cache.flatten(0, 1).unsqueeze(1), i.slots[0].unsqueeze(1)

    def run() -> Out:
        out, _, lse = peer.flash_mla_sparse_fwd(q, kv, rows, cases.SCALE)
        return out[None], lse.T[None]

    return run


def flash_attn(case: MlaCase, i: MlaInputs) -> Callable[[], Out]:
    """FlashAttention 3 as vLLM's wheel has it, with q_v. Keys that a row chooses are pages of one token, of which each
    row is a request, as vLLM's FLASH_ATTN_MLA_SPARSE calls it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func as peer

    flat, cache, table, lens, rows = i.q.flatten(0, 1), i.cache, i.table, i.lens, case.rows
    if i.slots is not None:
        cache, table, rows = cache.reshape(-1, 1, case.dim), i.slots.flatten(0, 1), 1
        lens = torch.full((len(flat),), case.chosen, dtype=torch.int32, device=flat.device)
    parts = cases.VALUES, case.dim - cases.VALUES
    latent, rotated = (t.contiguous() for t in flat.split(parts, -1))
    v, k = cache.unsqueeze(2).split(parts, -1)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=flat.device) * rows

    def run() -> Out:
        out, lse = peer(
            q=rotated, k=k, v=v, q_v=latent, cu_seqlens_q=starts, max_seqlen_q=rows, seqused_k=lens,
            max_seqlen_k=case.chosen or max(case.lens), block_table=table, softmax_scale=cases.SCALE, causal=True,
            return_softmax_lse=True, fa_version=3,
        )  # fmt: skip
        return out.view(*i.q.shape[:3], cases.VALUES), lse.unflatten(1, i.q.shape[:2]).transpose(0, 1)

    return run


PROVIDERS: dict[str, Callable[[MlaCase, MlaInputs], Callable[[], Out]]] = {
    "ours": ours, "flashmla": flashmla, "flash-attn-3": flash_attn,
}  # fmt: skip


def own_others(case: MlaCase) -> dict[str, MlaCase]:
    """Return the cases that ours is measured on beside one: over pages of 64 rows, prompts over 16 bits, records of 656
    bytes. Prompts of which tokens choose the keys of their neighbours: sharing them."""
    found = {"own-p64": replace(case, page_size=64)} if case.page_size != 64 else {}
    if case.record and case.function == "sparse_fwd":
        found["own-bf16"] = replace(case, record="")
    if case.record == "352" or (case.record == "656" and not case.exact):
        found["own-kv656"] = replace(case, record="656", exact=True)
    if case.alike >= 0:
        found["own-shared"] = replace(case, share=True)
    return found


def check(case: MlaCase, i: MlaInputs, got: Out) -> str | None:
    """Return None if some requests, or some tokens of a prompt, have the exact result within the tolerance, else the
    reason."""
    if case.function == "sparse_fwd":
        assert i.slots is not None
        tokens = torch.linspace(0, case.rows - 1, CHECKED).long().to(i.q.device)
        few, part = replace(case, rows=CHECKED), i._replace(q=i.q[:, tokens], slots=i.slots[:, tokens])
        worst = cases.error(few, (got[0][:, tokens], got[1][:, :, tokens]), cases.expected(few, part))
        return None if worst <= 1.0 else f"{worst:.1f} of the tolerance"
    some = sorted({0, len(case.lens) // 2, len(case.lens) - 1})[:CHECKED]
    few = replace(case, lens=tuple(case.lens[b] for b in some))
    part = part_of(i, some)
    worst = cases.error(few, (got[0][some], got[1][some]), cases.expected(few, part))
    return None if worst <= 1.0 else f"{worst:.1f} of the tolerance"


def part_of(i: MlaInputs, some: list[int]) -> MlaInputs:
    """Return the inputs of some requests."""
    slots, second = (None if i.slots is None else i.slots[some]), (i.second and part_of(i.second, some))
    return i._replace(q=i.q[some], table=i.table[some], lens=i.lens[some], slots=slots, second=second)


def keys_of(case: MlaCase) -> tuple[int, int]:
    """Return the keys that are read of both caches: each row reads those that it chooses, a request its own once."""
    rows = len(case.lens) * case.rows
    return (rows * case.chosen, rows * case.second) if case.chosen else (sum(case.lens), 0)


def key_bytes(case: MlaCase) -> int:
    if case.function == "sparse_fwd":  # the rows stay in the L2 cache, once they are read
        return sum(case.lens) * cases.row_bytes(case.record, case.dim)
    of_both = zip((case.record, case.second_record), keys_of(case), strict=True)
    return sum(keys * cases.row_bytes(record, case.dim) for record, keys in of_both)


def operations(case: MlaCase) -> int:
    rows = 1 if case.chosen else case.rows
    return 2 * sum(keys_of(case)) * rows * case.heads * (case.dim + cases.VALUES)


def collect(case: MlaCase, sets: list[MlaInputs], run: str, label: str, device: str) -> dict[str, Call]:
    """Return {label: the calls of a provider on all sets, a CUDA graph}, or {} if its first result is wrong."""
    first = ready(label, partial(PROVIDERS[run], case, sets[0]), partial(check, case, sets[0]))
    if first is None:
        return {}
    runs = [first, *(PROVIDERS[run](case, one) for one in sets[1:])]
    every(called, runs, 0)  # a peer plans in its first call
    return {label: graph(called, runs) if device == "cuda" else partial(every, called, runs)}


def called(run: Callable[[], Out]) -> Out:
    return run()


def measure(name: str, case: MlaCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case, and add the floor."""
    print(name, flush=True)
    sets = rotated(lambda seed: make(case, setup.device, seed), lambda _: key_bytes(case))
    calls: dict[str, Call] = {}
    for provider in (p for p in setup.providers if p in PROVIDERS and served(p, case)):
        calls |= collect(case, sets, provider, provider, setup.device)
    if not calls:
        return []
    for label, other in own_others(case).items() if "ours" in calls else ():
        inputs = [make(other, setup.device, seed) for seed in range(len(sets))]
        calls |= collect(other, inputs, "ours", label, setup.device)
    size, work = key_bytes(case), operations(case)
    floor = exactly(max(size / top.gbps / 1e3, work / top.tflops / 1e6))
    times = {p: per_call(t, len(sets)) for p, t in interleave(calls, setup.clock, 1, setup.rounds).items()}
    times["floor"] = floor
    return [Measurement(name, p, t, tflops=work / t.median / 1e6, gbps=size / t.median / 1e3) for p, t in times.items()]
