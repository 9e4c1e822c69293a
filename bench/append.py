"""Measure rows written to caches, and merged states: all providers on each case, as a CUDA graph over inputs that have
left the L2. The floor is the time to read and write the bytes at the copy rate of the run."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

import wrappers
from wrappers import KVCacheTarget, PageLists, QueryOutput, RMSNorm, RotaryEmbedding, append_qkv, fp4
from wrappers.host import machine

from . import latent, merging
from .harness import Ceilings, Measurement, Setup, host_times, rotated
from .timing import Call
from .topk import beside_floor, every

SHAPE = "h32x8-d128-p16"
CASES = (
    *(f"append-{kind}-n{n}-{SHAPE}" for n in (65536, 64) for kind in ("bf16", "fp8", "nvfp4")),
    *(f"append-{kind}-n{n}-{SHAPE}" for n in (65536, 64) for kind in ("rope-bf16", "normrope-bf16", "normrope-fp8")),
    "append-normrope-nvfp4-n65536-h32x8-d128-p16",
    "nvfp4-quantize-n65536-h8-d128",
    "nvfp4-dequantize-n65536-h8-d128",
    *merging.CASES,
    *latent.CASES,
    *latent.GATHERS,
)
HOST_CASE = f"append-bf16-n64-{SHAPE}"
MERGED = {"merge_states": "merge-states-n64-s4-h32-d128", "merge_state": "merge-state-n64-h32-d128"}
WRITTEN = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}  # bytes per element of a cache
SCALE = 0.5  # of quantised caches
TOKENS_PER_REQUEST = 1024
THETA = 1e6
CHECKED = 48  # tokens of which the rows are compared


@dataclass(frozen=True)
class AppendInputs:
    """Inputs and outputs of a case. kind: "bf16", "fp8" or "nvfp4". transform: "", "rope" or "normrope"; then Q has
    rows. caches: (k, v), NHD; factors: of NVFP4."""

    kind: str
    transform: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    factors: tuple[torch.Tensor, torch.Tensor] | None
    lists: PageLists
    last: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor  # (positions, D) fp32: cosines, sines
    weights: torch.Tensor
    out: torch.Tensor = field(repr=False)

    @cached_property
    def layer(self) -> tuple[KVCacheTarget, RMSNorm | None, RotaryEmbedding, QueryOutput]:
        """Return the arguments of `append_qkv` that a layer keeps from step to step."""
        scale = 1.0 if self.kind == "bf16" else SCALE
        target = KVCacheTarget(self.caches, "NHD", self.factors, scale, scale)
        norm = RMSNorm(self.weights, self.weights) if self.transform == "normrope" else None
        return target, norm, RotaryEmbedding(self.positions, self.table), QueryOutput(self.out)

    @cached_property
    def scale(self) -> torch.Tensor:
        """Return the scale of a quantised cache as vLLM takes it."""
        return torch.full((1,), SCALE if self.kind == "fp8" else 1.0, device=self.k.device)

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written."""
        rows = self.k.numel() + self.v.numel()
        queries = self.q.numel() * 4 if self.transform else 0
        return int(rows * (2 + WRITTEN[self.kind])) + queries


def make(name: str, device: str, seed: int) -> AppendInputs:
    """Make the inputs of a case 'append-[rope-|normrope-]<kind>-n<tokens>-h<Hq>x<H>-d<D>-p<P>'. Requests of 1024
    tokens are written from their first key on; of few tokens, each has a request of its own."""
    found = re.fullmatch(r"append-(?:(rope|normrope)-)?(bf16|fp8|nvfp4)-n(\d+)-h(\d+)x(\d+)-d(\d+)-p(\d+)", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like append-rope-bf16-n64-{SHAPE}")
    kind = found[2]
    tokens, hq, h, dim, size = (int(x) for x in found.groups()[2:])
    gen = torch.Generator(device).manual_seed(seed)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    each = TOKENS_PER_REQUEST if tokens >= TOKENS_PER_REQUEST else 1
    columns, batch = -(-each // size), -(-tokens // each)
    token = torch.arange(tokens, device=device)
    within = token % each if each > 1 else torch.randint(size, (tokens,), generator=gen, device=device)
    pages = torch.randperm(batch * columns, generator=gen, device=device)
    slots = pages[token // each * columns + within // size] * size + within % size
    lists = PageLists(
        (token // each).int(), within.int(), pages.int(), torch.arange(batch + 1, **ints) * columns
    )  # fmt: skip
    packed = torch.randn(tokens, (hq + 2 * h) * dim, generator=gen, device=device, dtype=torch.bfloat16)
    q, k, v = (t.unflatten(1, (-1, dim)) for t in packed.split([hq * dim, h * dim, h * dim], 1))
    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}[kind]
    width = dim // 2 if kind == "nvfp4" else dim

    def cache(columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(len(pages), 2, size, h, columns, dtype=torch.uint8, device=device)
        return whole.view(dtype)[:, 0], whole.view(dtype)[:, 1]

    angles = torch.arange(TOKENS_PER_REQUEST + size, device=device)[:, None] * THETA ** (
        -torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim
    )
    return AppendInputs(
        kind, found[1] or "", q, k, v, cache(width * dtype.itemsize, dtype),
        cache(dim // 16, torch.float8_e4m3fn) if kind == "nvfp4" else None, lists,
        torch.full((batch,), size, **ints), slots, within, torch.cat([angles.cos(), angles.sin()], 1).float(),
        torch.rand(dim, generator=gen, device=device).bfloat16() + 0.5,
        torch.empty_like(q, memory_format=torch.contiguous_format),
    )  # fmt: skip


def by_lists(i: AppendInputs) -> None:
    wrappers.append_paged_kv_cache(i.k, i.v, *i.lists[:2], i.caches, *i.lists[2:], i.last)


def by_slots(i: AppendInputs) -> torch.Tensor | None:
    """Return Q, if the case transforms it."""
    target, norm, rope, out = i.layer
    if not i.transform:
        return append_qkv(None, i.k, i.v, target, i.slots)
    return append_qkv(i.q, i.k, i.v, target, i.slots, norm, rope, out)


def bound_by_slots(i: AppendInputs) -> Callable[[], Any]:
    """Return a bound launch of `append_qkv` that gets its rows and slots at each run."""
    target, norm, rope, out = i.layer
    layer = wrappers.bind(append_qkv, i.q, i.k, i.v, target, i.slots, norm, rope, out)
    return lambda: layer.run(i.q, i.k, i.v, i.slots, i.positions)


def nvfp4_by_slots(i: AppendInputs) -> None:
    assert i.factors is not None
    wrappers.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        i.k, i.v, i.slots, i.caches, i.factors, SCALE, SCALE
    )  # fmt: skip


def ours(i: AppendInputs) -> torch.Tensor | None:
    """FlashInfer's functions where they do what the case asks for, else `append_qkv`."""
    if i.transform or i.kind == "fp8":
        return by_slots(i)
    (by_lists if i.kind == "bf16" else nvfp4_by_slots)(i)
    return None


def flashinfer(i: AppendInputs) -> torch.Tensor | None:
    import flashinfer as peer

    if i.kind != "bf16" or i.transform == "normrope":
        raise NotImplementedError("no function in one or two launches")
    k, out = i.k, None
    if i.transform:
        flat = i.q.flatten(1), i.k.flatten(1)
        out, k = peer.rope.apply_rope_with_cos_sin_cache(i.positions, *flat, i.k.shape[2], i.table, True)
        out, k = out.view(i.out.shape), k.view(i.k.shape)
    peer.append_paged_kv_cache(k, i.v, *i.lists[:2], i.caches, *i.lists[2:], i.last)
    return out


def vllm(i: AppendInputs) -> None:
    from vllm import _custom_ops as peer

    if i.kind == "nvfp4" or i.transform:
        raise NotImplementedError("no function in one launch")
    k, v = (t.view(torch.uint8) if i.kind == "fp8" else t for t in i.caches)
    kind = "fp8" if i.kind == "fp8" else "auto"
    peer.reshape_and_cache_flash(i.k, i.v, k, v, i.slots, kind, i.scale, i.scale)


PROVIDERS: dict[str, Callable[[Any], Any]] = {"ours": ours, "flashinfer": flashinfer, "vllm": vllm}


def check(i: AppendInputs, out: torch.Tensor | None) -> str | None:
    """Return None if the rows of some tokens, and of Q in `out`, are what the reference on the CPU writes, else the
    reason."""
    token = torch.linspace(0, len(i.slots) - 1, min(CHECKED, len(i.slots)), device=i.k.device).long()
    size = i.caches[0].shape[1]
    page, row = i.slots[token] // size, i.slots[token] % size

    def small(pair: Any) -> Any:
        return pair and tuple(torch.zeros(1, len(token), *t.shape[2:], dtype=torch.uint8).to(t.dtype) for t in pair)

    def picked(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.uint8)[page, row].cpu().view(t.dtype) if t.element_size() == 1 else t[page, row].cpu()

    wanted = AppendInputs(
        i.kind, i.transform, i.q[token].cpu(), i.k[token].cpu(), i.v[token].cpu(), small(i.caches), small(i.factors),
        i.lists, i.last, torch.arange(len(token)), i.positions[token].cpu(), i.table.cpu(), i.weights.cpu(),
        torch.empty(len(token), *i.out.shape[1:], dtype=i.out.dtype),
    )  # fmt: skip
    with machine.override(machine.HostMachine()):
        by_slots(wanted)
    pairs = [(picked(got), want[0]) for got, want in zip(i.caches, wanted.caches, strict=True)]
    if i.factors is not None and wanted.factors is not None:
        for got, want in zip(i.factors, wanted.factors, strict=True):
            pairs.append((picked(got).float(), want[0].float()))
    if i.transform:
        assert out is not None
        pairs.append((out[token].cpu(), wanted.out))
    exact = not i.transform
    for got, want in pairs:
        apart = got.view(torch.uint8) != want.view(torch.uint8) if got.dtype == want.dtype else got != want
        if exact and bool(apart.any()):
            return "other rows than the reference"
        if float(apart.float().mean()) > 0.05:  # roundings of rotated values
            return "far from the reference"
    return None


@dataclass(frozen=True)
class QuantizeInputs:
    """x of `nvfp4_quantize`."""

    x: torch.Tensor

    @property
    def bytes(self) -> int:
        return int(self.x.numel() * (2 + WRITTEN["nvfp4"]))


@dataclass(frozen=True)
class DequantizeInputs:
    """Arguments of `nvfp4_dequantize`."""

    data: torch.Tensor
    scales: torch.Tensor

    @property
    def bytes(self) -> int:
        return int(2 * self.data.numel() * (4 + WRITTEN["nvfp4"]))


def make_quantize(name: str, device: str, seed: int) -> QuantizeInputs:
    """Make x of a case 'nvfp4-quantize-n<tokens>-h<heads>-d<D>', or of 'nvfp4-dequantize-...', which dequantises it."""
    found = re.fullmatch(r"nvfp4-(?:de)?quantize-n(\d+)-h(\d+)-d(\d+)", name)
    if not found:
        raise ValueError(f"case {name!r}: must look like nvfp4-quantize-n65536-h8-d128")
    gen = torch.Generator(device).manual_seed(seed)
    shape = [int(x) for x in found.groups()]
    return QuantizeInputs(torch.randn(*shape, generator=gen, device=device, dtype=torch.bfloat16))


def make_dequantize(name: str, device: str, seed: int) -> DequantizeInputs:
    """Make the codes and factors of a case 'nvfp4-dequantize-n<tokens>-h<heads>-d<D>'."""
    return DequantizeInputs(*wrappers.nvfp4_quantize(make_quantize(name, device, seed).x))


def check_quantize(i: QuantizeInputs, got: Any) -> str | None:
    wanted = fp4.nvfp4_quantize(i.x[:CHECKED].cpu())
    same = all(
        torch.equal(a[:CHECKED].cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, wanted, strict=True)
    )
    return None if same else "other bits than the reference"


def check_dequantize(i: DequantizeInputs, got: torch.Tensor) -> str | None:
    wanted = fp4.nvfp4_dequantize(i.data[:CHECKED].cpu(), i.scales[:CHECKED].cpu(), SCALE)
    return None if torch.equal(got[:CHECKED].cpu(), wanted) else "other values than the reference"


def flashinfer_quantize(i: QuantizeInputs) -> Any:
    import flashinfer as peer

    one = torch.ones(1, device=i.x.device)
    data, sf = peer.nvfp4_quantize(i.x.flatten(0, 1), one, sfLayout=peer.SfLayout.layout_linear)
    return data.view(*i.x.shape[:-1], -1), sf.view(*i.x.shape[:-1], -1)


QUANTIZERS: dict[str, Callable[[Any], Any]] = {
    "ours": lambda i: wrappers.nvfp4_quantize(i.x),
    "flashinfer": flashinfer_quantize,
}
DEQUANTIZERS: dict[str, Callable[[Any], Any]] = {"ours": lambda i: wrappers.nvfp4_dequantize(i.data, i.scales, SCALE)}


def parts_of(name: str) -> tuple[Callable[..., Any], dict[str, Callable[[Any], Any]], Callable[..., str | None]]:
    """Return (maker of inputs, providers, check of a provider's result) of a case."""
    if name.startswith("nvfp4-quantize"):
        return make_quantize, QUANTIZERS, check_quantize
    if name.startswith("nvfp4-dequantize"):
        return make_dequantize, DEQUANTIZERS, check_dequantize
    if name in latent.CASES:
        return latent.make, latent.PROVIDERS, latent.check
    if name in latent.GATHERS:
        return latent.make_gather, latent.GATHER_PROVIDERS, latent.check_gather
    if name.startswith("merge-"):
        return merging.make, merging.PROVIDERS, merging.check
    return make, PROVIDERS, check


def measure(name: str, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure all providers on one case. The floor is the time to move its bytes at this run's copy rate."""
    maker, providers, checker = parts_of(name)
    sets: Any = rotated(lambda seed: maker(name, setup.device, seed), lambda inputs: inputs.bytes)
    return beside_floor(name, sets, providers, checker, top, setup)


def host(setup: Setup) -> list[Measurement]:
    """Measure the host time of our functions on a decode step; each is a case of its own."""
    print(f"host times of {HOST_CASE}", flush=True)
    names = {
        "append_paged_kv_cache": (by_lists, HOST_CASE),
        "append_qkv": (by_slots, HOST_CASE.replace("bf16", "normrope-fp8")),
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": (nvfp4_by_slots, HOST_CASE.replace("bf16", "nvfp4")),
    }
    calls: dict[str, Call] = {
        name: partial(every, run, [make(case, setup.device, 0)]) for name, (run, case) in names.items()
    }
    bound = bound_by_slots(make(HOST_CASE.replace("bf16", "normrope-fp8"), setup.device, 0))
    calls["append_qkv-bound"] = partial(every, lambda _: bound(), [None])
    rows = latent.make("mla-append-kv656-n64", setup.device, 0)
    layer = latent.layer(rows)
    calls["append_latent"] = partial(every, lambda _: layer(), [None])
    calls["concat_and_cache_mla"] = partial(every, latent.ours, [rows])
    for function, case in MERGED.items():
        calls[function] = partial(every, merging.ours, [merging.make(case, setup.device, 0)])
    return [Measurement(f"host-{name}", "ours", timing) for name, timing in host_times(calls, setup).items()]
