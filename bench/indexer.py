"""Measure the indexer of sparse attention: logits, and the selection of keys in one call, each as a CUDA graph over
inputs that have left the L2. The floor is the longer one of the times for the bytes at the copy rate and for the
operations at the rate of a matmul of the queries' type, both of the run."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import wrappers

from .harness import Ceilings, Measurement, Setup, rotated
from .timing import exactly, interleave
from .topk import collect, per_call

PREFILL = tuple(
    f"indexer-prefill-t{t}-s{s}-h{h}" for t, s, h in ((4096, 32768, 64), (2048, 131072, 64), (4096, 32768, 32))
)
DECODE = (
    *(f"indexer-decode-b{b}-s{s}-h64" for b, s in ((64, 32768), (128, 8192), (1, 131072), (1, 32768))),
    "indexer-decode-b64-s32768-h64-q2", "indexer-decode-b64-s32768-h64-q4", "indexer-decode-b64-s32768-h32",
)  # fmt: skip
SELECT = ("dsa-select-b64-s32768-h64-k2048", "dsa-select-b1-s131072-h64-k2048")
SEGMENT = ("dsa-select-bf16-t4096-s32768-h32-k2048",)
CASES = (*PREFILL, *DECODE, *SELECT, *SEGMENT)
DIM, PAGE, CHECKED, TOLERANCE = 128, 64, 5, 1e-5
KEY_BYTES, LOGIT_BYTES = DIM + 4, 4
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LogitsInputs:
    """Inputs of a case. q (requests or tokens, next_n, H, D). paged: keys lie in pages, else they are those of a
    prompt that ends with them, in e4m3 or, for `dsa_indexer_topk`, in bf16, which has one segment. k: keys that a token
    chooses, 0 if logits are measured."""

    paged: bool
    q: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor  # (pages, PAGE, 1, KEY_BYTES)
    keys: torch.Tensor  # (S, D), of prompts
    scales: torch.Tensor
    lens: torch.Tensor  # (B, next_n)
    table: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    q_ends: torch.Tensor  # (2,), of the segment, as k_ends
    k_ends: torch.Tensor
    k: int
    schedule: list[torch.Tensor] = field(default_factory=list)  # of DeepGEMM, once its first call has made it

    @property
    def pairs(self) -> int:
        """Return the number of logits that are computed."""
        if self.paged:
            return int(self.lens.sum())
        tokens, keys = self.q.shape[0], self.keys.shape[0]
        return tokens * keys - tokens * (tokens - 1) // 2

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written."""
        keys = self.table.shape[0] * self.table.shape[1] * PAGE if self.paged else self.keys.shape[0]
        key_bytes = KEY_BYTES if self.q.dtype is E4M3 else 2 * DIM
        return keys * key_bytes + self.q.nbytes + (0 if self.k else self.pairs * LOGIT_BYTES)

    @property
    def operations(self) -> int:
        return self.pairs * self.q.shape[2] * 2 * DIM


def make(name: str, device: str, seed: int) -> LogitsInputs:
    """Make the inputs of a case 'indexer-prefill-t<tokens>-s<keys>-h<heads>', 'indexer-decode-b<requests>-s<keys>-
    h<heads>[-q<tokens>]', 'dsa-select-b<requests>-s<keys>-h<heads>-k<chosen>' or 'dsa-select-bf16-t<tokens>-s<keys>-
    h<heads>-k<chosen>'."""
    kinds = "indexer-prefill-t|dsa-select-bf16-t|indexer-decode-b|dsa-select-b"
    found = re.fullmatch(rf"({kinds})(\d+)-s(\d+)-h(\d+)(?:-q(\d+))?(?:-k(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like indexer-prefill-t4096-s32768-h64 or {DECODE[0]}")
    paged, kind = not found[1].endswith("-t"), torch.bfloat16 if "bf16" in found[1] else E4M3
    count, keys, heads, next_n, k = (int(x or 0) for x in found.groups()[1:])
    next_n = max(next_n, 1)
    gen = torch.Generator(device).manual_seed(seed)
    q = torch.randn(count, next_n, heads, DIM, generator=gen, device=device).to(kind)
    weights = torch.randn(count * next_n, heads, generator=gen, device=device)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    pages = count * keys // PAGE if paged else 0
    cache = torch.empty(pages, PAGE * KEY_BYTES, dtype=torch.uint8, device=device)
    for part in cache.split(4096):
        part[:, : PAGE * DIM] = (
            torch.randn(len(part), PAGE * DIM, generator=gen, device=device).to(E4M3).view(torch.uint8)
        )
        part[:, PAGE * DIM :] = torch.rand(len(part), PAGE, generator=gen, device=device).view(torch.uint8)
    rows = 0 if paged else keys
    table = torch.randperm(pages, generator=gen, device=device).int()
    return LogitsInputs(
        paged,
        q,
        weights,
        cache.view(pages, PAGE, 1, KEY_BYTES),
        torch.randn(rows, DIM, generator=gen, device=device).to(kind),
        torch.rand(rows, generator=gen, device=device) if kind is E4M3 else torch.ones(rows, device=device),
        (keys - next_n + 1 + torch.arange(next_n, **ints)).expand(count, -1).contiguous(),
        table.view(count, -1) if paged else table.view(0, 0),
        torch.zeros(count, **ints),
        keys - count + 1 + torch.arange(count, **ints),
        torch.tensor([0, count], **ints),
        torch.tensor([0, rows], **ints),
        k,
    )


def logits(module: Any, i: LogitsInputs) -> torch.Tensor:
    """Call a module's functions, ours or DeepGEMM's, as vLLM 0.33 does: the logits of a prompt begin with the first key
    that a token sees, and nothing is cleaned."""
    if not i.paged:
        return module.fp8_fp4_mqa_logits(
            (i.q[:, 0], None), (i.keys, i.scales), i.weights, i.starts, i.ends, len(i.keys)
        )  # fmt: skip
    columns = i.table.shape[1] * PAGE
    if module is not wrappers and not i.schedule:  # engines make it once for all layers, so it is not measured
        i.schedule.append(module.get_paged_mqa_logits_metadata(i.lens, PAGE, slots(module, i)))
    plan = None if module is wrappers else i.schedule[0]
    return module.fp8_fp4_paged_mqa_logits((i.q, None), i.cache, i.weights, i.lens, i.table, plan, columns)


def slots(module: Any, i: LogitsInputs) -> int:
    """Return the number of slots in DeepGEMM's schedule: one per SM, or one per pair of SMs on Hopper, where two CTAs
    share the keys for four tokens."""
    paired = i.q.shape[1] == 4 and torch.cuda.get_device_capability(i.q.device)[0] == 9
    return module.get_num_sms() // (2 if paired else 1)


def ours(i: LogitsInputs) -> torch.Tensor:
    if i.k and not i.paged:
        return wrappers.dsa_indexer_topk(
            i.q[:, 0], i.keys, i.weights, i.q_ends, i.k_ends, top_k=i.k, softmax_scale=1.0
        )[0]  # fmt: skip
    if i.k:
        return wrappers.select_slots(i.q, i.cache, i.weights, i.lens, i.table, i.k)
    return logits(wrappers, i)


def deep_gemm(i: LogitsInputs) -> torch.Tensor:
    """DeepGEMM's logits, with its schedule. It chooses no keys."""
    import vllm.third_party.deep_gemm as peer

    if i.k:
        raise NotImplementedError("no function chooses keys")
    return logits(peer, i)


def own_logits(i: LogitsInputs) -> torch.Tensor:
    """Our logits alone, beside a selection."""
    if not i.k or not i.paged:
        raise NotImplementedError("the case itself" if not i.k else "no function returns logits of bf16")
    return logits(wrappers, i)


PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": ours, "deep-gemm": deep_gemm, "own-logits": own_logits}


def wanted(i: LogitsInputs, token: int, dtype: torch.dtype = torch.float32, magnitudes: bool = False) -> torch.Tensor:
    """Return the logits of a token, computed in a dtype. magnitudes: the sums of the magnitudes that they consist
    of."""
    request, n = divmod(token, i.q.shape[1])
    if i.paged:
        flat = i.cache.view(len(i.cache), -1)[i.table[request].long()]
        keys, scales = (
            flat[:, : PAGE * DIM].reshape(-1, DIM).view(E4M3),
            flat[:, PAGE * DIM :].reshape(-1).view(torch.float32),
        )
        end = int(i.lens[request, n])
    else:
        keys, scales, end = i.keys, i.scales, int(i.ends[token])
    q, k, weights = (x.float().to(dtype) for x in (i.q[request, n], keys[:end], i.weights[token]))
    if magnitudes:
        q, k, weights = q.abs(), k.abs(), weights.abs()
    return ((q @ k.T).relu() * weights[:, None]).sum(0) * scales[:end]


def check(i: LogitsInputs, got: torch.Tensor) -> str | None:
    """Return None if some rows are what fp32 gives, by DeepGEMM's measure of difference, else the reason. The logits of
    chosen slots must be the largest ones."""
    tokens = i.q.shape[0] * i.q.shape[1]
    for token in torch.linspace(0, tokens - 1, CHECKED).long().tolist():
        want = wanted(i, token).double()
        if got.dtype == torch.int32 and not i.paged:
            found, want = want[got[token].long()].sort().values, want.topk(i.k).values.sort().values
        elif got.dtype == torch.int32:
            pages = i.table[token // i.q.shape[1]].long()
            place = torch.full((len(i.cache),), -1, device=pages.device).scatter(
                0, pages, torch.arange(len(pages), device=pages.device)
            )
            slots = got.view(tokens, -1)[token].long()
            found = want[place[slots // PAGE] * PAGE + slots % PAGE].sort().values
            want = want.topk(i.k).values.sort().values
        else:
            found = got[token, : len(want)].double()
        apart = 1 - 2 * (found * want).sum() / (found.square() + want.square()).sum()
        if not float(apart) < TOLERANCE:
            return f"token {token} differs by {float(apart):.1e}"
    return None


def measure(name: str, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure the chosen providers on a case, and add the floor."""
    print(name, flush=True)
    sets: Any = rotated(lambda seed: make(name, setup.device, seed), lambda inputs: inputs.bytes)
    calls = collect(sets, {p: PROVIDERS[p] for p in setup.providers if p in PROVIDERS}, setup, check)
    if not calls:
        return []
    size, operations = sets[0].bytes, sets[0].operations
    tflops = max(top.fp8_tflops, 1.0) if sets[0].q.dtype is E4M3 else top.tflops
    floor = max(size / top.gbps / 1e3, operations / tflops / 1e6)
    times = {p: per_call(t, len(sets)) for p, t in interleave(calls, setup.clock, 1, setup.rounds).items()}
    found = [Measurement(name, p, t, operations / t.median / 1e6, size / t.median / 1e3) for p, t in times.items()]
    return [*found, Measurement(name, "floor", exactly(floor), tflops, top.gbps)]
