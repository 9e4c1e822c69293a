"""Measure rows written to the caches of latent attention (MLA) and of its indexer, and rows gathered from them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import wrappers
from cute_kernels.records import INDEX, RECORDS, ROWS
from wrappers import reference
from wrappers.host import machine

TOKENS = (65536, 64)
KINDS = {"bf16": ROWS, "fp8": "e4m3", **{f"kv{name}": name for name in RECORDS if name.isdigit() and name != INDEX}}
GATHERED = ("bf16", "fp8", "kv656", "kv584", "kv352", "kv288")  # kinds
CASES = (
    *(f"mla-append-{kind}-n{TOKENS[0]}" for kind in KINDS),
    *(f"mla-append-{kind}-n{TOKENS[1]}" for kind in KINDS),
    *(f"indexer-append-n{n}" for n in TOKENS),
)
GATHERS = (*(f"mla-gather-{kind}-n{TOKENS[0]}" for kind in GATHERED), f"indexer-gather-n{TOKENS[0]}")
VLLM = {"bf16": "auto", "fp8": "fp8", "kv656": "fp8_ds_mla"}  # kinds that its operator has on Hopper
PAGE, LATENT, ROTATED, SCALE, CHECKED = 64, 512, 64, 0.5, 48
REQUESTS = 8


@dataclass(frozen=True)
class LatentInputs:
    """Inputs and the cache of a case. kind: of the latent, a key of `KINDS`; "index": the indexer's."""

    kind: str
    kv: torch.Tensor
    pe: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor  # of fp8, as vLLM takes it

    @property
    def record(self) -> str:
        return INDEX if self.kind == "index" else KINDS[self.kind]

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written, without those of the slots."""
        size = self.cache.shape[2] * self.cache.element_size()
        return (self.kv.numel() + self.pe.numel()) * 2 + len(self.kv) * size


def make(name: str, device: str, seed: int) -> LatentInputs:
    """Make the inputs of a case 'mla-append-<kind>-n<tokens>' or 'indexer-append-n<tokens>'; slots are in any order."""
    found = re.fullmatch(r"(?:mla-append-(\w+)|indexer-append)-n(\d+)", name)
    if not found or found[1] is not None and found[1] not in KINDS:
        raise ValueError(f"case {name!r}: must look like mla-append-kv656-n64 or indexer-append-n64")
    kind, tokens = found[1] or "index", int(found[2])
    form = RECORDS[INDEX if kind == "index" else KINDS[kind]]
    latent = 128 if kind == "index" else LATENT - (ROTATED if form.rotated_as == "codes" or form.latent == 448 else 0)
    rotated = 0 if kind == "index" else ROTATED
    gen = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(tokens, latent + rotated, generator=gen, device=device, dtype=torch.bfloat16)
    pages = 2 * -(-tokens // PAGE)
    slots = torch.randperm(pages * PAGE, generator=gen, device=device)[:tokens]
    dtype = torch.bfloat16 if kind == "bf16" else torch.uint8
    cache = torch.zeros(pages, PAGE, form.token_bytes or latent + rotated, dtype=dtype, device=device)
    scale = torch.full((1,), SCALE, device=device)
    return LatentInputs(kind, rows[:, :latent], rows[:, latent:], cache, slots, scale)


def ours(i: LatentInputs) -> None:
    """vLLM's operators where they have the record, else `append_latent`."""
    if i.kind == "index":
        wrappers.indexer_k_quant_and_cache(i.kv, i.cache, i.slots, 128, "ue8m0")
    elif i.kind in VLLM:
        wrappers.concat_and_cache_mla(i.kv, i.pe, i.cache, i.slots, VLLM[i.kind], i.scale)
    else:
        wrappers.append_latent(i.kv, i.pe, wrappers.LatentCache(i.cache, i.record), i.slots)


def vllm(i: LatentInputs) -> None:
    from vllm import _custom_ops as peer

    if i.kind == "index":
        peer.indexer_k_quant_and_cache(i.kv, i.cache, i.slots, 128, "ue8m0")
    elif i.kind in VLLM:
        peer.concat_and_cache_mla(i.kv, i.pe, i.cache, i.slots, VLLM[i.kind], i.scale)
    else:
        raise NotImplementedError("no operator for this record on Hopper")


PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": ours, "vllm": vllm}


def check(i: LatentInputs, _: Any) -> str | None:
    """Return None if the rows of some tokens are what the reference on the CPU writes, else the reason."""
    token = torch.linspace(0, len(i.slots) - 1, min(CHECKED, len(i.slots)), device=i.kv.device).long()
    cache = torch.zeros(1, len(token), i.cache.shape[2], dtype=i.cache.dtype)
    small = LatentInputs(i.kind, i.kv[token].cpu(), i.pe[token].cpu(), cache, torch.arange(len(token)), i.scale.cpu())
    with machine.override(machine.HostMachine()):
        ours(small)
    got, want = (reference.latent_values(i.record, c.view(torch.uint8), scale=SCALE) for c in (i.cache, cache))
    page, row = i.slots[token] // PAGE, i.slots[token] % PAGE
    same = torch.equal(got[page, row].cpu(), want[0])
    return None if same else "other rows than the reference"


# ---- gathers


@dataclass(frozen=True)
class GatherInputs:
    """A cache of `REQUESTS` requests in any order of pages, and the outputs. kind: as in `LatentInputs`."""

    kind: str
    cache: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    requests: torch.Tensor  # of rows
    out: torch.Tensor
    scales: torch.Tensor  # of an indexer's rows
    scale: torch.Tensor

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written, without those of the page table."""
        rows = len(self.out) * self.cache.shape[2] * self.cache.element_size()
        return rows + self.out.numel() * self.out.element_size() + self.scales.numel()


def make_gather(name: str, device: str, seed: int) -> GatherInputs:
    """Make the inputs of a case 'mla-gather-<kind>-n<rows>' or 'indexer-gather-n<rows>'."""
    found = re.fullmatch(r"(?:mla-gather-(\w+)|indexer-gather)-n(\d+)", name)
    if not found or found[1] is not None and found[1] not in GATHERED:
        raise ValueError(f"case {name!r}: must look like mla-gather-kv656-n65536 or indexer-gather-n65536")
    i = make(name.replace("gather", "append"), device, seed)
    ours(i)
    rows, pages = int(found[2]), i.cache.shape[0]
    gen = torch.Generator(device).manual_seed(seed)
    table = torch.randperm(pages, generator=gen, device=device)[: rows // PAGE].view(REQUESTS, -1).int()
    starts = torch.arange(REQUESTS + 1, device=device, dtype=torch.int32) * (rows // REQUESTS)
    requests = torch.arange(rows, device=device, dtype=torch.int32) // (rows // REQUESTS)
    form, index = RECORDS[i.record], i.kind == "index"
    width = 128 if index else form.latent + (0 if form.rotated_as == "codes" else form.rotated) or LATENT + ROTATED
    out = torch.zeros(rows, width, dtype=torch.uint8 if index else torch.bfloat16, device=device)
    scales = torch.zeros(rows if index else 0, 4, dtype=torch.uint8, device=device)
    return GatherInputs(i.kind, i.cache, table, starts, requests, out, scales, i.scale)


def gathered(i: GatherInputs, to: Any) -> torch.Tensor:
    """Call vLLM's operators, ours or its own, where they have the record, else `gather_latent`."""
    if i.kind == "index":
        to.cp_gather_indexer_k_quant_cache(i.cache, i.out, i.scales, i.table, i.starts)
    elif i.kind == "kv656":
        to.cp_gather_and_upconvert_fp8_kv_cache(i.cache, i.out, i.table, i.starts[:-1], REQUESTS)
    elif i.kind in ("bf16", "fp8"):
        rows = len(i.out)
        to.gather_and_maybe_dequant_cache(
            i.cache, i.out, i.table, i.starts, i.requests, rows, VLLM[i.kind], i.scale
        )  # fmt: skip
    elif to is wrappers:
        wrappers.gather_latent(wrappers.LatentCache(i.cache, KINDS[i.kind]), i.table, i.starts, i.out)
    else:
        raise NotImplementedError("no operator for this record on Hopper")
    return i.out


def vllm_gather(i: GatherInputs) -> torch.Tensor:
    from vllm import _custom_ops as peer

    return gathered(i, peer)


GATHER_PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": lambda i: gathered(i, wrappers), "vllm": vllm_gather}


def check_gather(i: GatherInputs, got: torch.Tensor) -> str | None:
    """Return None if some rows are what the reference gathers, else the reason."""
    row = torch.linspace(0, len(i.out) - 1, CHECKED, device=i.out.device).long()
    each = len(i.out) // REQUESTS
    page, at = i.table[row // each, row % each // PAGE], row % each % PAGE
    if i.kind == "index":
        want = i.cache[page.long()].flatten(1)[:, : PAGE * 128].unflatten(1, (PAGE, 128))
    else:
        record = KINDS[i.kind]
        want = reference.latent_values(record, i.cache[page.long()].contiguous().view(torch.uint8), scale=SCALE)
    want = want[torch.arange(CHECKED, device=at.device), at].to(got.dtype)
    return None if torch.equal(got[row], want) else "other rows than the reference"


def layer(i: LatentInputs) -> Callable[[], Any]:
    """Return the call of a layer: norm, rotation of key and query, and the query of 16 heads."""
    tokens, device = len(i.kv), i.kv.device
    norm, table = wrappers.LatentNorm(torch.ones_like(i.kv[0])), torch.zeros(tokens, ROTATED, device=device)
    rope = wrappers.RotaryEmbedding(torch.arange(tokens, device=device), table, True)
    nope, turned = (torch.zeros(tokens, 16, n, dtype=i.kv.dtype, device=device) for n in (LATENT, ROTATED))
    cache, query = wrappers.LatentCache(i.cache, i.record), wrappers.LatentQuery(nope, turned)
    return lambda: wrappers.append_latent(i.kv, i.pe, cache, i.slots, norm, rope, query)
