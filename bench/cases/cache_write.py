"""Cases of rows written to caches, and their inputs, shared by tests, benchmarks and tools."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import wrappers
from wrappers.cache_write.rotation import RotaryEmbedding
from wrappers.own.append_qkv import BlockTable, KVCacheTarget, PageLists, QueryOutput, RMSNorm, append_qkv

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "nvfp4": torch.uint8, "uint8": torch.uint8,
}  # fmt: skip
OTHER = {torch.int32: torch.int64, torch.int64: torch.int32}
FAR = (1 << 31) - 1
EXTREME = (-(1 << 31), -(1 << 30), -1, 1 << 30, FAR)
SLACK = 2.0**-19  # error of a rotated value over the largest one: sin.approx and cos.approx are right to 2^-21
POISON = 0x7F  # every byte of a cache before a call: NaN in 8 bits and in fp16, 3e38 in bf16
LARGE = 6e4  # above all values of a case, and below poison


@dataclass(frozen=True)
class CacheWriteCase:
    """One call. dtype: of the rows. cache: of the cache; equal to dtype for copies. heads: of Q and of K and V; no
    Q: 0. dims: of K and of V. page_size, pages: of the cache; fewer_v: pages that V's lacks, if K and V are two
    tensors. layout: "NHD" or "HND". stacked: K and V are one tensor; else they are side by side in one row of a
    wider tensor if `beside` is set, or two tensors. places: "slots", "lists" or "table"; or, for FlashInfer's RoPE
    functions, "rows" or, with the positions of requests, "requests": Q and K are rotated in place, or quantised,
    where `stacked` puts the rotated part of a row and the rest in one tensor. index: dtype of index tensors.
    mixed: bit i says that index tensor i, in the order of the fields of its class, has the other dtype; bit 4 is for
    the positions of the rotation. hostile: some values of index tensors are extreme. scales: "float", "tensor" or
    "heads"; or "rows", which the call finds and stores in fp32. norm: weights "" for none, "shared", "heads", or "k"
    for K alone. rope: "", "angles", "llama31" or "cache". q8: Q is written in 8 bits. in_place: Q is written over
    itself. data: "normal", or "special" with infinities, NaN, extremes, and rows of zeros and of tiny values. shift:
    elements by which rows, caches and weights are off an aligned address, cache_shift: caches. alone: the operand that
    is off by an element while all others are aligned: "q", "k", "v", "kv 0" or "kv 1" (the caches), "out", "q_weight"
    or "k_weight".
    """

    dtype: str = "bf16"
    cache: str = "bf16"
    tokens: int = 9
    heads: tuple[int, int] = (0, 2)
    dims: tuple[int, int] = (128, 128)
    page_size: int = 16
    pages: int = 5
    fewer_v: int = 0
    layout: str = "NHD"
    stacked: bool = True
    beside: bool = False
    places: str = "slots"
    index: torch.dtype = torch.int32
    mixed: int = 0
    hostile: bool = False
    scales: str = "float"
    interleaved_sf: bool = False
    norm: str = ""
    rope: str = ""
    interleaved: bool = False
    rotary_dim: int | None = None
    q8: bool = False
    in_place: bool = False
    shift: int = 0
    cache_shift: int = 0
    alone: str = ""
    data: str = "normal"

    def index_of(self, number: int) -> torch.dtype:
        """Return the dtype of an index tensor, by its number in `mixed`."""
        return OTHER[self.index] if self.mixed >> number & 1 else self.index


def poisoned(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    size = dtype.itemsize
    return torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device=device).view(dtype)


def make_rows(case: CacheWriteCase, gen: torch.Generator) -> list[torch.Tensor]:
    """Return Q, K and V, views of one packed tensor."""
    (hq, h), (dk, dv) = case.heads, case.dims
    width = [hq * dk, h * dk, h * dv]
    x = torch.randn(case.tokens, sum(width) + 16 + case.shift, generator=gen, device=gen.device)
    if case.data == "special":
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-8, 3e4, 450.0, 0.017])
        picked = torch.randint(len(values), x.shape, generator=gen, device=gen.device)
        x = torch.where(torch.rand(x.shape, generator=gen, device=gen.device) < 0.3, values.to(x.device)[picked], x)
        x[:1], x[2:3] = 0.0, 2.0**-119  # over the largest number of 8 bits, this is no normal number
    dtype = DTYPES[case.dtype]
    packed = (x * 100).to(torch.uint8) if dtype == torch.uint8 else x.to(dtype)
    parts = packed[:, case.shift : case.shift + sum(width)].split(width, 1)
    return [part.unflatten(1, (n, -1)) if n else part.view(len(part), 0, d) for part, n, d in
            zip(parts, (hq, h, h), (dk, dk, dv))]  # fmt: skip


def make_cache(case: CacheWriteCase, dims: tuple[int, int], dtype: torch.dtype, device: Any) -> Any:
    """Return a poisoned cache in the case's form, inside a larger tensor."""
    inner = (case.page_size, case.heads[1]) if case.layout == "NHD" else (case.heads[1], case.page_size)
    pages, shift = case.pages + 2, case.shift + case.cache_shift
    if case.stacked and dims[0] == dims[1]:
        return poisoned(pages, 2, *inner, dims[0] + shift, dtype=dtype, device=device)[1:-1, ..., shift:]
    if case.beside:
        both = poisoned(pages, *inner, sum(dims), dtype=dtype, device=device)[1:-1]
        return both.split(dims, -1)
    counts = pages, pages - case.fewer_v
    whole = [poisoned(n, *inner, dim + shift, dtype=dtype, device=device) for n, dim in zip(counts, dims)]
    return tuple(t[1:-1, ..., shift:] for t in whole)


def spoil(values: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Return index values, about half of them replaced by extreme ones."""
    far = torch.tensor(EXTREME, dtype=values.dtype, device=values.device)
    picked = far[torch.randint(len(far), values.shape, generator=gen, device=gen.device)]
    return torch.where(torch.rand(values.shape, generator=gen, device=gen.device) < 0.5, picked, values)


def make_places(case: CacheWriteCase, gen: torch.Generator) -> Any:
    """Return the places of a case: no two tokens have one, unless values are hostile."""
    device, size, rows = gen.device, case.page_size, case.pages * case.page_size

    def ints(number: int, values: Any) -> torch.Tensor:
        found = torch.as_tensor(values, device=device).to(case.index_of(number))
        return spoil(found, gen) if case.hostile else found

    if case.places == "slots":
        slots = torch.randperm(rows, generator=gen, device=device)[: case.tokens]
        slots[1::4] = -1
        return ints(0, slots)
    batch = 3
    columns = case.pages // batch
    pages = torch.randperm(case.pages, generator=gen, device=device)
    if case.places == "lists":
        ends = torch.tensor([-7 if case.hostile else 0, columns, 2 * columns, FAR if case.hostile else 3 * columns])
        requests = torch.arange(case.tokens, device=device) % batch
        positions = torch.arange(case.tokens, device=device) // batch
        ends = ends.to(device).to(case.index_of(3))
        return PageLists(ints(0, requests), ints(1, positions), ints(2, pages), ends)
    table = torch.stack([pages.roll(-b * columns)[:columns] for b in range(batch)])
    counts = [case.tokens // batch] * (batch - 1) + [case.tokens - case.tokens // batch * (batch - 1)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    if case.hostile:
        starts[0], starts[-1] = -FAR, FAR
    lens = [min(columns * size, count + 3 * b) for b, count in enumerate(counts)]
    return BlockTable(ints(0, table), ints(1, lens), starts.to(device).to(case.index_of(2)))


def make_scale(case: CacheWriteCase, value: float, heads: int, gen: torch.Generator) -> Any:
    if case.scales == "float":
        return value
    count = heads if case.scales == "heads" else 1
    return value * (0.5 + torch.rand(count, generator=gen, device=gen.device))


def make_transform(case: CacheWriteCase, gen: torch.Generator) -> dict[str, Any]:
    """Return the arguments `norm`, `rope` and `out` of `append_qkv`."""
    (hq, h), dim, dtype = case.heads, case.dims[0], DTYPES[case.dtype]
    found: dict[str, Any] = {}

    def weight(heads: int) -> torch.Tensor:
        shape = (heads, dim) if case.norm == "heads" else (dim,)
        count = math.prod(shape)
        values = (1 + 0.1 * torch.randn(count + case.shift, generator=gen, device=gen.device)).to(dtype)
        return values[case.shift :].view(shape)

    if case.norm:
        offset = 1.0 if case.norm == "heads" else 0.0
        found["norm"] = RMSNorm(None if case.norm == "k" or not hq else weight(hq), weight(h), 1e-5, offset)
    if case.rope:
        high = 100 if case.rope == "cache" else 200_000
        positions = torch.randint(high, (case.tokens,), generator=gen, device=gen.device).to(case.index_of(4))
        given = None if case.places == "table" else spoil(positions, gen) if case.hostile else positions
        rope = RotaryEmbedding(given, interleaved=case.interleaved, rotary_dim=case.rotary_dim)
        if case.rope == "llama31":
            rope = rope._replace(scale=8.0, theta=5e5, llama31=(1.0, 4.0, 8192))
        if case.rope == "cache":
            count = (case.rotary_dim or dim) // 2
            table = torch.rand(high - 10, 2 * count, generator=gen, device=gen.device)  # some positions have no row
            rope = rope._replace(cos_sin_cache=table, rotary_dim=None)
        found["rope"] = rope
    if hq:
        kind = DTYPES["e5m2" if case.cache == "e5m2" else "e4m3"] if case.q8 else dtype
        out = poisoned(case.tokens, hq, dim + case.shift, dtype=kind, device=gen.device)[..., case.shift :]
        found["out"] = QueryOutput(out, None, make_scale(case, 0.25, hq, gen) if case.q8 else 1.0)
    return found


def make_requests(case: CacheWriteCase, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the first token of each request and its position; one request has no token, and the last token none."""
    third = case.tokens // 3
    starts = torch.tensor([0, third, third, case.tokens - 1], device=gen.device)
    offsets = torch.randint(200_000, (3,), generator=gen, device=gen.device).to(case.index_of(1))
    if case.hostile:  # no request is told by offsets that do not rise
        starts[0], starts[-1], offsets = -FAR, FAR, spoil(offsets, gen)
    return {"indptr": starts.to(case.index_of(0)), "offsets": offsets}


def make_rotated(case: CacheWriteCase, gen: torch.Generator) -> dict[str, Any]:
    """Return the arguments of a RoPE function."""
    q, k, _ = make_rows(case, gen)
    positions = torch.randint(100, (case.tokens,), generator=gen, device=gen.device).to(case.index)
    positions = spoil(positions, gen) if case.hostile else positions
    dim = case.rotary_dim or case.dims[0]
    table = torch.rand(90, dim, generator=gen, device=gen.device)  # some positions have no row
    if case.cache != case.dtype:
        found: dict[str, Any] = {"cos_sin_cache": table, "pos_ids": positions, "is_neox": not case.interleaved}
        for name, x in (("q", q), ("k", k)):
            out = poisoned(*x.shape, dtype=DTYPES[case.cache], device=gen.device)
            for part, within in (("rope", slice(dim)), ("nope", slice(dim, None))):
                found[f"{name}_{part}"] = x[..., within] if case.stacked else x[..., within].clone()
                found[f"{name}_{part}_out"] = out[..., within] if case.stacked else out[..., within].clone()
        return found | {"quantize_dtype": DTYPES[case.cache], "quant_scale_q": 1.7, "quant_scale_kv": 0.3}
    if case.rope == "cache":
        found = {"positions": positions, "head_size": case.dims[0], "cos_sin_cache": table}
        return found | {"query": flat_rows(q), "key": flat_rows(k), "is_neox": not case.interleaved}
    where = {"pos_ids": positions} if case.places == "rows" else make_requests(case, gen)
    return {"q": q, "k": k, **where, "rotary_dim": case.rotary_dim, "interleave": case.interleaved}


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a view (N, heads * D) of x (N, heads, D). The heads of a token must be contiguous."""
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))


def make_inputs(case: CacheWriteCase, device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of the case's function."""
    gen = torch.Generator(device).manual_seed(seed)
    if case.places in ("rows", "requests"):
        return make_rotated(case, gen)
    q, k, v = make_rows(case, gen)
    places, dtype, packed = make_places(case, gen), DTYPES[case.cache], 2 if case.cache == "nvfp4" else 1
    cache = make_cache(case, (case.dims[0] // packed, case.dims[1] // packed), dtype, gen.device)
    sf = None
    if case.cache == "nvfp4":
        sf = make_cache(case, (case.dims[0] // 16, case.dims[1] // 16), torch.uint8, gen.device)
    if case.scales == "rows":
        found = make_cache(replace(case, beside=False, shift=0, cache_shift=0), (1, 1), torch.float32, gen.device)
        sf = found[..., 0] if isinstance(found, torch.Tensor) else tuple(t[..., 0] for t in found)
    if function_of(case) is wrappers.append_paged_kv_cache:
        last = torch.ones(len(places.kv_indptr) - 1, dtype=case.index, device=gen.device)
        return dict(
            append_key=k, append_value=v, batch_indices=places.batch_indices, positions=places.positions,
            paged_kv_cache=cache, kv_indices=places.kv_indices, kv_indptr=places.kv_indptr, kv_last_page_len=last,
            kv_layout=case.layout,
        )  # fmt: skip
    quantised = case.cache != case.dtype and case.scales != "rows"
    scales = [make_scale(case, value, case.heads[1], gen) if quantised else 1.0 for value in (0.37, 0.061)]
    interleaved = case.interleaved_sf and case.cache == "nvfp4"
    target = KVCacheTarget(cache, case.layout, sf, scales[0], scales[1], interleaved)
    given = dict(q=q if case.heads[0] else None, k=k, v=v, cache=target, places=places) | make_transform(case, gen)
    if case.in_place and case.heads[0]:
        given["out"] = QueryOutput(q)
    return with_one_off(given, case.alone) if case.alone else given


def with_one_off(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of `append_qkv` with one operand (`CacheWriteCase.alone`) off an aligned address."""

    def off(t: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        return poisoned(1 + extent, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride(), 1).copy_(t)

    if name in given:
        changed = off(given[name]) if name != "out" else given[name]._replace(out=off(given[name].out))
        return given | {name: changed}
    if name.startswith("kv "):
        caches = list(given["cache"].kv)
        caches[int(name[-1])] = off(caches[int(name[-1])])
        return given | {"cache": given["cache"]._replace(kv=tuple(caches))}
    return given | {"norm": given["norm"]._replace(**{name: off(getattr(given["norm"], name))})}


def function_of(case: CacheWriteCase) -> Callable[..., Any]:
    """Return the public function of a case: rows that are copied by page lists go through FlashInfer's."""
    if case.places in ("rows", "requests"):
        if case.cache != case.dtype:
            return wrappers.rope_quantize_fp8
        if case.rope == "cache":
            return wrappers.apply_rope_with_cos_sin_cache_inplace
        kind = "apply_llama31_rope" if case.rope == "llama31" else "apply_rope"
        return getattr(wrappers, kind + ("_pos_ids" if case.places == "rows" else "") + "_inplace")
    plain = not (case.heads[0] or case.norm or case.rope) and case.cache == case.dtype
    return wrappers.append_paged_kv_cache if plain and case.places == "lists" else append_qkv


def every_code_and_factor() -> tuple[torch.Tensor, torch.Tensor]:
    """Return NVFP4 data (8192, 8) and factors (8192, 1) in uint8: each byte of two codes with each byte of a factor."""
    every = torch.arange(256).to(torch.uint8)
    return every.view(32, 8).repeat(256, 1), every.repeat_interleave(32)[:, None]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for part in parts for t in tensors_of(part)]


def copied(value: Any, device: Any) -> Any:
    """Return nested arguments with copies of their tensors on a device: of whole storages, each once, so that views of
    one tensor stay views of one tensor."""
    kept: dict[int, torch.Tensor] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in kept:
                kept[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage).clone()
            flat = kept[storage.data_ptr()].to(device)
            kept[storage.data_ptr()] = flat
            return torch.empty(0, dtype=x.dtype, device=device).set_(
                flat.untyped_storage(), x.storage_offset(), x.shape, x.stride()
            )
        if isinstance(x, dict):
            return {key: copy(part) for key, part in x.items()}
        if isinstance(x, wrappers.FP4Tensor):
            return wrappers.FP4Tensor(copy(x.data), copy(x.scale), x.scale_start_index)
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(copy, x))
        return type(x)(map(copy, x)) if isinstance(x, (tuple, list)) else x

    return copy(value)


def storages(value: Any) -> list[torch.Tensor]:
    """Return the bytes of the storages of all tensors in nested arguments, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_of(value)}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in found.values()]


def difference(case: CacheWriteCase, got: Any, want: Any, deviations: float = 0.0) -> float:
    """Return the error of all memory after a call, over the tolerance.

    All bytes must be equal. If rows are normalised or rotated, one value in a hundred may be rounded to its neighbour,
    and `deviations` standard deviations of that count more: thousands of random calls have small tensors in which a few
    more are. A rotation may change each value by `SLACK` times the largest one. Hostile cases allow 16 times as much,
    because fp32 does not hold the angles of positions from 2^24 on exactly.
    """
    transforms, error = bool(case.norm or case.rope), 0.0
    codes = tensors_of(got["cache"].kv) if transforms and case.cache == "nvfp4" else []
    packed = {t.untyped_storage().data_ptr() for t in codes}
    dtypes = {t.untyped_storage().data_ptr(): t.dtype for t in tensors_of(got)}
    for a, b in zip(storages(got), storages(want), strict=True):
        if torch.equal(a, b):
            continue
        if not transforms:
            return math.inf
        if dtypes[a.data_ptr()] == torch.float32:  # scales of rows
            x, y = a.view(torch.float32), b.view(torch.float32)
            if not torch.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True):
                return math.inf
            continue
        if a.data_ptr() in packed:
            x, y = (torch.stack([t & 7, t >> 4 & 7]).int() for t in (a, b))
            steps = (x - y).abs()
        else:
            steps = apart(a, b, dtypes[a.data_ptr()], SLACK * (16 if case.hostile else 1))
        expected = steps.numel() / 100
        error = max(error, float(steps.max()), int((steps > 0).sum()) / (expected + deviations * math.sqrt(expected)))
    return error


def apart(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, slack: float) -> torch.Tensor:
    """Return how many representable magnitudes lie between the values that two byte tensors hold.

    Values that differ by at most `slack` times the largest one that is not poison count as neighbours. uint8: e4m3
    scale factors.
    """
    bits = (torch.int16, 0x7FFF) if dtype.itemsize == 2 else (torch.uint8, 0x7F)
    x, y = (t.view(bits[0]).int() & bits[1] for t in (a, b))
    steps = (x - y).abs()
    if dtype == torch.uint8:
        return steps
    x, y = (t.view(dtype).float() for t in (a, b))
    largest = y[y.abs() < LARGE].abs().max()
    return torch.where((x - y).abs() <= slack * largest, steps.clamp(max=1), steps)
