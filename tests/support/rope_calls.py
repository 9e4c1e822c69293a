"""A good call of each of FlashInfer's RoPE functions, and the bad values of `test_bad_calls.py` that it accepts."""

from typing import Any, NamedTuple

import torch

from wrappers.flashinfer import rope, rope_quantize

NAMES = (*rope.__all__, *rope_quantize.__all__)
TOKENS, HEADS, KV_HEADS, DIM, ROTATED = 5, 3, 2, 48, 32
PAGE_SIZE, PAGES = 16, 3


def good_call(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return keyword arguments. Q and K are views of one packed tensor; the functions that quantise get all outputs.

    K of `mla_rope_quantize_fp8` has no heads, and its rotated part of Q is written behind the other."""
    assert name in NAMES
    gen = torch.Generator().manual_seed(0)

    def rows(heads: int, dim: int = DIM) -> torch.Tensor:
        return torch.randn(TOKENS, heads, dim, generator=gen).to(dtype)

    positions = torch.tensor([3, 0, 7, 7, 90], dtype=torch.int32)
    if not ("quantize" in name or name.startswith("apply_rope_with")):
        q, k = rows(HEADS + KV_HEADS).split([HEADS, KV_HEADS], 1)
        where = {"indptr": torch.tensor([0, 2, 2, 5]).int(), "offsets": torch.tensor([3, 9, 70]).int()}
        return {"q": q, "k": k, **({"pos_ids": positions} if "pos_ids" in name else where), "rotary_dim": ROTATED}
    table = torch.randn(128, ROTATED, generator=gen)
    if name.startswith("apply_rope_with"):
        query, key = rows(HEADS + KV_HEADS).flatten(1).split([HEADS * DIM, KV_HEADS * DIM], 1)
        return {"positions": positions, "query": query, "key": key, "head_size": DIM, "cos_sin_cache": table}
    sides = [("q", HEADS, rows(HEADS)), ("k", KV_HEADS, rows(KV_HEADS))]
    found: dict[str, Any] = {"cos_sin_cache": table, "pos_ids": positions, "quantize_dtype": torch.float8_e4m3fn}
    paged, latent = name.endswith("paged_kv_cache"), name.startswith("mla")
    parts = {"rope": slice(ROTATED), "nope": slice(ROTATED, None)}
    for side, heads, x in sides:
        out = torch.zeros(TOKENS, heads, DIM, dtype=torch.uint8).view(torch.float8_e4m3fn)
        if latent and side == "k":
            x, out = x[:, 0], out[:, 0]
        behind = {"rope": slice(DIM - ROTATED, None), "nope": slice(DIM - ROTATED)} if latent and side == "q" else parts
        for part, within in parts.items():
            found[f"{side}_{part}"] = x[..., within]
            if side == "q" or not paged:
                found[f"{side}_{part}_out"] = out[..., behind[part]]
    if not paged:
        return found | {"quant_scale_q": 0.5, "quant_scale_kv": 2.0}
    cache = torch.zeros(2, PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return found | {
        "v": rows(KV_HEADS), "paged_kv_cache": tuple(cache.unbind()),
        "kv_indices": torch.tensor([2, 0, 1], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
        "batch_indices": torch.tensor([0, 0, 1, 1, -1], dtype=torch.int32),
        "positions": torch.tensor([15, 16, 0, 1, 2], dtype=torch.int32),
    }  # fmt: skip


class LatentPair(NamedTuple):
    """The caches of a K without heads: a tuple of which each part has a name."""

    ckv: torch.Tensor
    kpe: torch.Tensor


def latent_append(**changes: Any) -> dict[str, Any]:
    """Return a call of `rope_quantize_fp8_append_paged_kv_cache` whose K has no heads, without outputs of Q."""
    given = good_call("rope_quantize_fp8_append_paged_kv_cache")
    dtype = changes.get("quantize_dtype", torch.float8_e4m3fn)
    ckv, kpe = (torch.zeros(PAGES, PAGE_SIZE, n, dtype=torch.uint8).view(dtype) for n in (DIM - ROTATED, ROTATED))
    given |= {name: given[name][:, 0] for name in ("k_rope", "k_nope")}
    given |= {"v": None, "paged_kv_cache": LatentPair(ckv, kpe)}
    return {name: t for name, t in given.items() if not name.endswith("_out")} | changes


NUMBERS = (  # arguments of these functions that are positive numbers
    "rope_scale", "rope_theta", "low_freq_factor", "high_freq_factor", "old_context_len", "quant_scale_q",
    "quant_scale_kv",
)  # fmt: skip
NONE, WIDE, TABLE = {"None"}, {"int64"}, {"a row less", "a row more"}
CACHES = {f"{side} {bad}" for side in "KV" for bad in ("no rows", "a row less", "a row more")}
_INDICES = {
    "batch_indices": WIDE, "positions": WIDE, "kv_indptr": WIDE | {"a row less", "a row more", "columns"},
    "kv_indices": WIDE | {"no rows", "a row less", "a row more", "no columns", "columns"},
}  # fmt: skip
_QUANTISED = {"pos_ids": WIDE, "cos_sin_cache": TABLE, "enable_pdl": NONE, "q_rope_out": NONE, "q_nope_out": NONE}
_CACHED = {"positions": WIDE, "cos_sin_cache": TABLE, "query": {"no columns"}, "key": {"no columns"}}  # no heads
ACCEPTED: dict[str, dict[str, set[str]]] = {  # function -> argument -> names of bad values
    **{
        f"apply_{kind}{form}{inplace}": {"rotary_dim": NONE}
        | dict.fromkeys(("pos_ids",) if form else ("indptr", "offsets"), WIDE)
        for kind in ("rope", "llama31_rope") for form in ("", "_pos_ids") for inplace in ("", "_inplace")
    },
    "apply_rope_with_cos_sin_cache": _CACHED,
    "apply_rope_with_cos_sin_cache_inplace": _CACHED,
    "rope_quantize_fp8": _QUANTISED | {"k_rope_out": NONE, "k_nope_out": NONE},
    "mla_rope_quantize_fp8": _QUANTISED | {"k_rope_out": NONE, "k_nope_out": NONE},
    "rope append, latent": _INDICES | {
        "pos_ids": WIDE, "cos_sin_cache": TABLE, "enable_pdl": NONE},
    "rope append": _QUANTISED | _INDICES | {"paged_kv_cache": CACHES},
}  # fmt: skip
