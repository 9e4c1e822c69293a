"""Measure rows written to the caches of latent attention (MLA) and of its indexer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import wrappers
from cute_kernels.latent.records import INDEX, RECORDS, ROWS
from wrappers import reference
from wrappers.host import machine

TOKENS = (65536, 64)
KINDS = {"bf16": ROWS, "fp8": "e4m3", **{f"kv{name}": name for name in RECORDS if name.isdigit() and name != INDEX}}
CASES = (
    *(f"mla-append-{kind}-n{TOKENS[0]}" for kind in KINDS),
    *(f"mla-append-{kind}-n{TOKENS[1]}" for kind in KINDS),
    *(f"indexer-append-n{n}" for n in TOKENS),
)
VLLM = {"bf16": "auto", "fp8": "fp8", "kv656": "fp8_ds_mla"}  # kinds that its operator has on Hopper
PAGE, LATENT, ROTATED, SCALE, CHECKED = 64, 512, 64, 0.5, 48


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
