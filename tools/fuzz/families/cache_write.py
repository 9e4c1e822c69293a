"""Rows written to caches, and RoPE functions: drawn calls, and the judgement of all memory after them."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

import wrappers
from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from wrappers import KVCacheTarget, PageLists

from ..call import Call, Options, Refused, Results, Work, case_of, changed_fields
from ..memory import extracted
from . import rows

COPIES = (("bf16", "bf16"), ("fp16", "fp16"), ("uint8", "uint8"))
QUANTISED = (("bf16", "e4m3"), ("fp16", "e4m3"), ("bf16", "nvfp4"), ("fp16", "nvfp4"))
WIDE = (*COPIES[:2], *QUANTISED)
LISTED, SLOTTED = (
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
)
DEVIATIONS = 3.0  # of the number of rounded values, see `cases.difference`
FIELDS = {"q": "q", "k": "k", "query": "q", "key": "k"}


def _sized(case: CacheWriteCase) -> CacheWriteCase:
    """Return the case with pages for all tokens."""
    size = -(-case.page_size // 4) * 4 if case.interleaved_sf else case.page_size
    return replace(case, page_size=size, pages=max(3, 3 * -(-case.tokens // size)))


def _append(rng: Random) -> tuple[CacheWriteCase, dict[str, Any]]:
    transforms = rng.random() < 0.5
    dtype, cache = rng.choice(WIDE if transforms else COPIES + QUANTISED)
    step = 16 if cache == "nvfp4" or transforms else 1
    dim = -(-rng.choice((64, 64, 128, 128, 256, 16, 80, 192, 512 if transforms else 576, rng.randint(1, 300))) // step)
    dim, interleaved = dim * step, cache == "nvfp4" and rng.random() < 0.3
    heads = rng.choice(((32, 8), (5, 1), (0, 3), (1, 1), (8, 2))) if transforms else (0, rng.choice((1, 2, 3, 8)))
    other = dim if rng.random() < 0.7 or transforms else -(-rng.randint(1, 300) // step) * step
    case = CacheWriteCase(
        dtype, cache, rng.choice((1, 2, 7, 31, 64)), heads, (dim, other), rng.choice((1, 3, 5, 16, 64, 256)),
        layout=rng.choice(("NHD", "HND")), stacked=other == dim and rng.random() < 0.6, beside=rng.random() < 0.3,
        places=rng.choice(("slots", "lists", "table")), index=torch.int32, hostile=rng.random() < 0.2,
        scales=rng.choice(("float", "tensor", "heads")), interleaved_sf=interleaved, shift=rng.choice((0, 0, 0, 1, 4)),
        data=rng.choice(("normal", "normal", "special")) if dtype != "uint8" and not transforms else "normal",
    )  # fmt: skip
    if transforms:
        case = replace(
            case, norm=rng.choice(("", "shared", "heads", "k")), rope=rng.choice(("", "angles", "llama31", "cache")),
            interleaved=rng.random() < 0.5, rotary_dim=rng.choice((None, 16, dim)), in_place=rng.random() < 0.2,
            q8=cache in ("e4m3", "nvfp4") and rng.random() < 0.3, hostile=False,
        )  # fmt: skip
        if case.in_place:
            case = replace(case, q8=False)
    extra: dict[str, Any] = {"wide": True} if rng.random() < 0.4 else {}
    if cache == "nvfp4" and not transforms and case.places != "table" and case.scales != "heads" and not interleaved:
        extra["flashinfer"] = rng.random() < 0.6
    return _sized(case), extra


def _rotate(rng: Random) -> tuple[CacheWriteCase, dict[str, Any]]:
    dtype, kind = rng.choice(("bf16", "fp16")), rng.choice(("angles", "llama31", "cache", "fp8"))
    dim = rng.choice((64, 128, 192, 256, 16, 80, 512))
    case = CacheWriteCase(
        dtype, "e4m3" if kind == "fp8" else dtype, rng.choice((3, 7, 31, 64)), rng.choice(((8, 2), (5, 1), (32, 8))),
        (dim, dim), places="rows" if kind in ("cache", "fp8") else rng.choice(("rows", "requests")),
        rope="cache" if kind == "fp8" else kind, interleaved=rng.random() < 0.5,
        rotary_dim=rng.choice((None, 16, dim)) if kind != "fp8" else rng.choice((16, max(16, dim // 32 * 16))),
        stacked=rng.random() < 0.7, hostile=rng.random() < 0.2, shift=rng.choice((0, 0, 1)),
    )  # fmt: skip
    if kind == "fp8" and case.rotary_dim == dim:
        case = replace(case, rotary_dim=16, dims=(64, 64))
    return case, {"wide": rng.random() < 0.4, "fresh": kind != "fp8" and rng.random() < 0.5}


def draw(family: str, rng: Random, options: Options) -> Call:
    case, extra = _append(rng) if rng.random() < 0.65 else _rotate(rng)
    mode = rng.choices(("eager", "graph", "threads", "bind"), (72, 14, 8, 6))[0]
    function = cases.function_of(case).__name__
    if extra.get("flashinfer"):
        function = SLOTTED if case.places == "slots" else LISTED
    elif extra.get("fresh"):
        function = function.removesuffix("_inplace")
    if mode == "bind" and (function != "append_qkv" or case.places != "slots" or case.in_place):
        mode = "eager"
    if mode == "graph" and extra.get("fresh"):
        mode = "eager"
    if mode == "threads" and function != "append_paged_kv_cache" and case.in_place:
        mode = "eager"
    fields = changed_fields(case, "index")
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", fields, {k: v for k, v in extra.items() if v})


def case_from(call: Call) -> CacheWriteCase:
    return case_of(CacheWriteCase, call, index=torch.int64 if call.extra.get("wide") else torch.int32)


def _flashinfer(call: Call, a: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of FlashInfer's functions that quantise rows to NVFP4."""
    target, places = a["cache"], a["places"]
    found = {"append_key": a["k"], "append_value": a["v"], "paged_kv_cache": target.kv, "kv_cache_sf": target.sf}
    found |= {"k_scale": target.k_scale, "v_scale": target.v_scale, "kv_layout": target.layout}
    if call.function == SLOTTED:
        return found | {"slot_mapping": places}
    last = torch.ones(len(places.kv_indptr) - 1, dtype=places.kv_indptr.dtype)
    return found | places._asdict() | {"kv_last_page_len": last}


def _arguments(call: Call, case: CacheWriteCase, seed: int) -> dict[str, Any]:
    a = cases.make_inputs(case, "cpu", seed)
    if call.extra.get("flashinfer"):
        if "cache" not in a or case.cache != "nvfp4" or isinstance(a["places"], PageLists) != (call.function == LISTED):
            raise Refused("a case of another function")
        return _flashinfer(call, a)
    return a


def _as_append(call: Call, a: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `append_qkv` for those of FlashInfer's functions that write a cache."""
    if call.function == "append_qkv":
        return a
    found = {"k": a["append_key"], "v": a["append_value"]}
    if "kv_cache_sf" in a:
        found["cache"] = KVCacheTarget(
            a["paged_kv_cache"], a["kv_layout"], a["kv_cache_sf"], a["k_scale"], a["v_scale"]
        )
    else:
        found["cache"] = KVCacheTarget(a["paged_kv_cache"], a["kv_layout"])
    if "slot_mapping" in a:
        return found | {"places": a["slot_mapping"]}
    return found | {"places": PageLists(a["batch_indices"], a["positions"], a["kv_indices"], a["kv_indptr"])}


def _written(call: Call, a: Any) -> list[torch.Tensor]:
    """Return the tensors that a call may write."""
    if "cache" in a or "paged_kv_cache" in a:
        target = _as_append(call, a)["cache"]
        found = cases.tensors_of([target.kv, target.sf])
        return found + ([a["out"].out] if a.get("out") is not None else [])
    if "cos_sin_cache" in a and "pos_ids" in a:
        return [t for name, t in a.items() if name.endswith("_out")]
    return [] if call.extra.get("fresh") else [a[name] for name in FIELDS if name in a]


def build(call: Call, device: torch.device) -> Work:
    case, function = case_from(call), getattr(wrappers, call.function)
    name = cases.function_of(case).__name__
    if call.function not in (name, name.removesuffix("_inplace")) and not call.extra.get("flashinfer"):
        raise Refused(f"a case of {name}")
    variants = [_arguments(call, case, call.seed + i) for i in range(2 if call.mode == "graph" else 1)]
    wanted, rotated = [], []
    for a in variants:
        want = cases.copied(a, "cpu")
        try:
            if "cos_sin_cache" in a and "pos_ids" in a:
                rows.quantise(case, want)
            elif "cache" in a or "paged_kv_cache" in a:
                rows.append(case, _as_append(call, want))
            else:
                rotated.append(rows.rotate(case, want))
        except rows.Ambiguous:
            raise Refused("two tokens have one place") from None
        wanted.append(want)
    fresh = bool(call.extra.get("fresh"))
    on = torch.tensor(rotated[0], device=device) if rotated else torch.empty(0)

    def run(tree: Any) -> Results:
        if call.mode == "bind":
            layer = wrappers.bind(function, **tree)
            layer.run(tree["q"], tree["k"], tree["v"])
            returned = layer.run(tree["q"], tree["k"], tree["v"])
        else:
            returned = function(**tree)
        # rows of tokens that are not rotated are undefined
        return (
            {name: t.where(on[:, None, None] if t.dim() == 3 else on[:, None], 0.0) for name, t in zip("qk", returned)}
            if fresh
            else {}
        )

    def judge(variant: int, tree: Any, results: Results) -> str:
        want = wanted[variant]
        if not fresh:
            error = cases.difference(case, extracted(variants[variant], tree), want, DEVIATIONS)
            return f"the memory after the call is off by {error:.3g} times the tolerance" if error > 1 else ""
        for name in [name for name in FIELDS if name in want]:
            a, b = results[FIELDS[name]].cpu()[on.cpu()].contiguous(), want[name][on.cpu()].contiguous()
            slack = cases.SLACK * (16 if case.hostile else 1)
            if a.numel() and int(cases.apart(a.view(torch.uint8), b.view(torch.uint8), b.dtype, slack).max()) > 1:
                return f"{name}: a rotated value is more than one step off"
        return ""

    return Work(variants, run, lambda tree: _written(call, tree), judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    case, found = case_from(call), []
    found += [replace(case, tokens=n) for n in (case.tokens // 2, case.tokens - 1) if 3 <= n < case.tokens]
    (hq, h), (dk, dv) = case.heads, case.dims
    if h > 1:
        found.append(replace(case, heads=(hq // h, 1)))
    if hq > h:
        found.append(replace(case, heads=(h, h)))
    step = 16
    if dk > step and dk == dv:
        found.append(
            replace(case, dims=(dk // 2 // step * step or step,) * 2, rotary_dim=None if not case.rotary_dim else 16)
        )
    return [changed_fields(one, "index") for one in found]
