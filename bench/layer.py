"""Measure a layer of sparse attention in decode, without its projections: both rows of the new token are appended, all
keys of its request get a logit, the largest ones are chosen, and all heads attend to these. All of it is one CUDA graph
over inputs that have left the L2. The floor is that of the logits and that of the attention, one after the other."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import wrappers

from . import indexer, latent, mla, topk
from .cases.mla import SCALE, VALUES, MlaCase, MlaInputs
from .harness import Ceilings, Measurement, Setup, rotated
from .indexer import LogitsInputs
from .latent import PAGE, LatentInputs
from .timing import exactly, interleave

CASES = "dsa-layer-kv656-b64-s32768-h128", "dsa-layer-kv656-b1-s32768-h16"
INDEX_HEADS, TOP_K = 64, 2048
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the chosen slots, the output and its LSE


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a case. rows, keys: what is appended for the latent and for the indexer, to the last position of each
    request; their caches are those that `index` and `attend` read, in the same pages."""

    case: MlaCase
    index: LogitsInputs
    attend: MlaInputs
    rows: LatentInputs
    keys: LatentInputs
    chosen: torch.Tensor  # (B, K), of vLLM: chosen positions
    requests: torch.Tensor  # (B,), of vLLM: requests of tokens
    metadata: list[Any] = field(default_factory=list)  # of FlashMLA, once its first call has made it

    @property
    def bytes(self) -> int:
        """Return the bytes that the logits and the attention read."""
        return self.index.bytes + mla.key_bytes(self.case)


def make(name: str, device: str, seed: int) -> LayerInputs:
    """Make the inputs of a case 'dsa-layer-kv656-b<requests>-s<keys>-h<heads>', perhaps with '-k<chosen>'."""
    found = re.fullmatch(r"dsa-layer-kv656-b(\d+)-s(\d+)-h(\d+)(?:-k(\d+))?", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like {CASES[0]}")
    batch, keys, heads, top_k = (int(x or TOP_K) for x in found.groups())
    index = indexer.make(f"dsa-select-b{batch}-s{keys}-h{INDEX_HEADS}-k{top_k}", device, seed)
    case = MlaCase(lens=(keys,) * batch, heads=heads, record="656", chosen=top_k)
    attend = mla.make(case, device, seed)._replace(table=index.table)
    gen = torch.Generator(device).manual_seed(seed)
    slots = index.table[:, -1].long() * PAGE + (keys - 1) % PAGE
    scale = torch.ones(1, device=device)

    def appended(kind: str, latent_values: int, rotated_values: int, cache: torch.Tensor) -> LatentInputs:
        both = latent_values + rotated_values
        values = torch.randn(batch, both, generator=gen, device=device, dtype=torch.bfloat16)
        return LatentInputs(kind, values[:, :latent_values], values[:, latent_values:], cache, slots, scale)

    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return LayerInputs(
        case, index, attend, appended("kv656", latent.LATENT, latent.ROTATED, attend.cache),
        appended("index", indexer.DIM, 0, index.cache.squeeze(2)), torch.full((batch, top_k), -1, **ints),
        torch.arange(batch, **ints),
    )  # fmt: skip


def ours(i: LayerInputs) -> Result:
    wrappers.append_latent(
        i.rows.kv, i.rows.pe, wrappers.LatentCache(i.rows.cache, i.rows.record), i.rows.slots,
        index=wrappers.IndexerRows(i.keys.kv, i.keys.cache),
    )  # fmt: skip
    slots = indexer.ours(i.index)
    out, lse, *_ = mla.cases.call(i.case, i.attend._replace(slots=slots))
    return slots, out, lse


def vllm(i: LayerInputs) -> Result:
    """Call the operators of vLLM 0.33 as its layers do in decode: those of `SparseAttnIndexer`, and those of
    `FlashMLASparseImpl`, which pads heads in each layer. The schedules of DeepGEMM and FlashMLA are made outside of the
    time that counts, because all layers share them. Positions are not reset to -1 before the selection: a fused kernel
    of vLLM does that."""
    import vllm.third_party.deep_gemm as deep_gemm
    from vllm.third_party.flashmla import flash_mla_interface as flashmla
    from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index as to_slots

    latent.vllm(i.rows)
    latent.vllm(i.keys)
    scores = indexer.logits(deep_gemm, i.index)
    topk.vllm(topk.TopKInputs(
        scores, i.index.k, False, i.index.lens.view(-1), i.index.starts, i.index.table, i.chosen
    ))  # fmt: skip
    slots, _ = to_slots(
        i.requests, i.index.table, i.chosen, BLOCK_SIZE=PAGE, NUM_TOPK_TOKENS=i.index.k, return_valid_counts=True
    )
    q, heads = i.attend.q, i.case.heads
    if heads < mla.PADDED_HEADS:
        q = q.new_zeros(*q.shape[:2], mla.PADDED_HEADS, q.shape[3])
        q[:, :, :heads] = i.attend.q
    if not i.metadata:
        i.metadata.append(flashmla.get_mla_metadata()[0])
    out, lse = flashmla.flash_mla_with_kvcache(
        q, i.attend.cache.unsqueeze(2), None, None, VALUES, i.metadata[0], softmax_scale=SCALE, is_fp8_kvcache=True,
        indices=slots.unsqueeze(1),
    )  # fmt: skip
    return slots, out[:, :, :heads], lse[:, :heads]


PROVIDERS: dict[str, Callable[[LayerInputs], Result]] = {"ours": ours, "vllm": vllm}


def check(i: LayerInputs, got: Result) -> str | None:
    """Return None if the appended rows are those of the reference, and if, for some requests, the chosen keys have the
    largest logits and the output is that of attention to these keys, else the reason."""
    slots, out, lse = got
    for what in (i.rows, i.keys):
        pages, rows = what.slots // PAGE, what.slots % PAGE
        held = torch.arange(len(pages), device=pages.device) * PAGE + rows
        small = LatentInputs(what.kind, what.kv, what.pe, what.cache[pages], held, what.scale)
        if wrong := latent.check(small, None):
            return f"{what.kind}: {wrong}"
    if wrong := indexer.check(i.index, slots.view(len(slots), 1, -1)):
        return wrong
    some = sorted({0, len(slots) // 2, len(slots) - 1})
    own = slots.view(len(slots), -1)[some].long().flatten()
    rows = i.attend.cache.flatten(0, 1)[own].view(-1, 1, i.attend.cache.shape[2])  # in a cache with pages of one row
    few = mla.replace(i.case, lens=(0,) * len(some), page_size=1)
    part = i.attend._replace(
        q=i.attend.q[some], cache=rows, slots=torch.arange(len(own), device=own.device).view(len(some), 1, -1)
    )
    worst = mla.cases.error(few, (out[some], lse[some]), mla.cases.expected(few, part))
    return None if worst <= 1.0 else f"attention: {worst:.1f} of the tolerance"


def measure(name: str, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure the chosen providers on a case, and add the floor."""
    print(name, flush=True)
    sets: Any = rotated(lambda seed: make(name, setup.device, seed), lambda inputs: inputs.bytes)
    calls = topk.collect(sets, {p: PROVIDERS[p] for p in setup.providers if p in PROVIDERS}, setup, check)
    if not calls:
        return []
    first = sets[0]
    floor = max(first.index.bytes / top.gbps / 1e3, first.index.operations / max(top.fp8_tflops, 1.0) / 1e6)
    floor += max(mla.key_bytes(first.case) / top.gbps / 1e3, mla.operations(first.case) / top.tflops / 1e6)
    times = {p: topk.per_call(t, len(sets)) for p, t in interleave(calls, setup.clock, 1, setup.rounds).items()}
    found = [Measurement(name, p, t, gbps=first.bytes / t.median / 1e3) for p, t in times.items()]
    return [*found, Measurement(name, "floor", exactly(floor), gbps=first.bytes / floor / 1e3)]
