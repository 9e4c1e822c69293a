"""Rows written to caches in a second, independent implementation: token by token, on the CPU."""

import math
from typing import Any

import torch

from bench.cases.cache_write import DTYPES, CacheWriteCase
from wrappers import BlockTable, PageLists, RotaryEmbedding

from ..plain import E2M1

FAR = (1 << 31) - 1
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Places = list[tuple[int, int, int]]  # of each token: page (negative: none), row, position


class Ambiguous(Exception):
    """Two tokens have one place, and either may be written last."""


def numbers(t: torch.Tensor) -> list[int]:
    """Return index values as a kernel reads them: clamped to [-1, 2^31 - 1]."""
    return [min(max(x, -1), FAR) for x in t.flatten().tolist()]


def places_of(places: Any, tokens: int, pages: int, size: int) -> Places:
    """Return where K and V of each token go, and the token's position among the keys of its request."""
    found: Places = []
    if isinstance(places, torch.Tensor):
        slots = [*numbers(places), *([-1] * tokens)][:tokens]
        found = [(s // size, s % size, -1) for s in slots]
    elif isinstance(places, PageLists):
        requests, positions, ids, starts = map(numbers, places)
        starts = [min(max(x, 0), len(ids)) for x in starts]
        for r, at in zip(requests, positions):
            page = -1
            if 0 <= r < len(starts) - 1 and at >= 0 and at // size < starts[r + 1] - starts[r]:
                page = ids[starts[r] + at // size]
            found.append((page, at % size, at))
    else:
        assert isinstance(places, BlockTable)
        table, lens, starts = places.block_table, numbers(places.seq_lens), numbers(places.cu_seqlens_q)
        for t in range(tokens):
            # the first request that ends behind the token
            r = next((b for b in range(len(lens)) if starts[b + 1] > t), -1)
            page, at = -1, -1
            if r >= 0 and t >= starts[r]:
                at = lens[r] - (starts[r + 1] - t)
                if at >= 0 and at // size < table.shape[1]:
                    page = min(max(int(table[r, at // size]), -1), FAR)
            found.append((page, at % size, at))
    found = [(page if 0 <= page < pages else -1, row, at) for page, row, at in found]
    used = [(page, row) for page, row, _ in found if page >= 0]
    if len(used) != len(set(used)):
        raise Ambiguous
    return found


# ---- rotations and norms


def frequencies(rope: RotaryEmbedding, dim: int) -> torch.Tensor:
    """Return radians per position of each pair, fp64 (R / 2,)."""
    size = rope.rotary_dim or dim
    rate = rope.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if rope.llama31 is None:
        return rate / rope.scale
    low, high, length = rope.llama31
    share = ((length * rate / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - share) * rate / rope.scale + share * rate


def rotation(rope: RotaryEmbedding, dim: int, position: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (cosines, sines) of a position; None if tokens there are not rotated."""
    if rope.cos_sin_cache is not None:
        table = rope.cos_sin_cache
        return tuple(table[position].chunk(2)) if 0 <= position < len(table) else None  # type: ignore[return-value]
    if position < 0:
        return None
    angle = float(torch.tensor(float(position))) * frequencies(rope, dim)  # fp32 holds the position
    return angle.cos().float(), angle.sin().float()


def turned(x: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Return x (H, D) fp32 with its first R elements rotated."""
    cos, sin = at
    half, out = len(cos), x.clone()
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    out[:, one], out[:, two] = x[:, one] * cos - x[:, two] * sin, x[:, two] * cos + x[:, one] * sin
    return out


def normed(x: torch.Tensor, weight: torch.Tensor | None, norm: Any) -> torch.Tensor:
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (weight.float() + norm.offset)


# ---- quantisation


def fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of x, saturated; every NaN becomes 0x7F."""
    most = FP8[dtype]
    bytes_ = x.clamp(-most, most).nan_to_num().to(dtype).view(torch.uint8)
    return bytes_.masked_fill(x.isnan(), 0x7F)


def nvfp4(x: torch.Tensor, factor: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes (..., D / 2), bytes of the block scales (..., D / 16)).

    factor: the forward scale, one number or (H, 1).
    """
    wide = factor[..., None] if isinstance(factor, torch.Tensor) else factor
    blocks = x.float().unflatten(-1, (-1, 16))
    top = blocks.abs().amax(-1) * factor / 6
    sf = fp8(top, torch.float8_e4m3fn)
    scale = sf.view(torch.float8_e4m3fn).float()[..., None]
    value = blocks * wide / scale
    grid = torch.tensor(E2M1)
    apart = (value.abs().nan_to_num(6.0, 6.0)[..., None] - grid).abs()
    least = apart.amin(-1, keepdim=True)
    tied = apart == least  # a tie goes to the even code
    even = torch.arange(8) % 2 == 0
    code = torch.where(tied.sum(-1) > 1, (tied & even).int().argmax(-1), tied.int().argmax(-1))
    code = code + 8 * (value.signbit() & ~value.isnan()).long()
    code = torch.where(scale == 0, 0, code).flatten(-2).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, sf


def each_head(scale: Any, heads: int, inverse: bool = False) -> torch.Tensor:
    """Return a scale as fp32 (H, 1). inverse: its reciprocal."""
    if isinstance(scale, torch.Tensor):
        found = 1.0 / scale.flatten() if inverse else scale.flatten()
        return found.expand(heads)[:, None] if len(found) == 1 else found[:, None]
    return torch.full((heads, 1), 1.0 / scale if inverse else scale, dtype=torch.float32)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor without fp8, which torch does not index on the CPU."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def store(case: CacheWriteCase, target: Any, side: int, rows: torch.Tensor, page: int, row: int) -> None:
    """Write the rows (H, D) of a token to one side of a cache."""
    cache = target.kv[:, side] if isinstance(target.kv, torch.Tensor) else target.kv[side]
    heads, scale = len(rows), (target.k_scale, target.v_scale)[side]
    at = (page, row) if target.layout == "NHD" else (page, slice(None), row)
    if case.cache == case.dtype:
        _bytes(cache)[at] = rows.to(cache.dtype) if rows.dtype != torch.uint8 else rows
    elif case.cache != "nvfp4":
        _bytes(cache)[at] = fp8(rows.float() / each_head(scale, heads), cache.dtype)
    else:
        codes, factors = nvfp4(rows, each_head(scale, heads, True))
        _bytes(cache)[at] = codes
        sf = _bytes(target.sf[:, side] if isinstance(target.sf, torch.Tensor) else target.sf[side])
        if side and target.v_sf_interleaved:
            flat = sf if target.layout == "HND" else sf.transpose(1, 2)
            for block in range(factors.shape[1]):
                element = row // 4 * 4 * factors.shape[1] + 4 * block + row % 4
                flat[page, :, element // factors.shape[1], element % factors.shape[1]] = factors[:, block]
        else:
            sf[at] = factors


def append(case: CacheWriteCase, a: dict[str, Any]) -> None:
    """Do what `append_qkv` does with its arguments. `out` must have a tensor if there is Q."""
    given: list[Any] = [a.get(name) for name in ("q", "k", "v", "cache", "norm", "rope")]
    q, k, v, target, norm, rope = given
    first = target.kv[:, 0] if isinstance(target.kv, torch.Tensor) else target.kv[0]
    size = first.shape[1] if target.layout == "NHD" else first.shape[2]
    found = places_of(a["places"], len(k), len(first), size)
    positions = [at for _, _, at in found]
    if rope is not None and rope.positions is not None:
        positions = [*numbers(rope.positions), *([-1] * len(k))][: len(k)]
    for t, (page, row, _) in enumerate(found):
        at = None if rope is None else rotation(rope, k.shape[2], positions[t])
        if rope is not None and at is None:
            continue
        sides: list[Any] = []
        for x, weight in ((q, norm and norm.q_weight), (k, norm and norm.k_weight)):
            if x is None or not (norm or rope):
                sides.append(None if x is None else x[t])
                continue
            values = normed(x[t].float(), weight, norm)
            sides.append(values if at is None else turned(values, at, rope.interleaved))
        if q is not None:
            out = a["out"].out
            eight = out.element_size() == 1
            values = fp8(sides[0].float() / each_head(a["out"].scale, len(sides[0])), out.dtype) if eight else sides[0]
            _bytes(out)[t] = values.to(_bytes(out).dtype)
        if page >= 0:
            store(case, target, 0, sides[1], page, row)
            store(case, target, 1, v[t], page, row)


def rotate(case: CacheWriteCase, a: dict[str, Any], inplace: bool = True) -> list[bool]:
    """Do what a RoPE function does with its arguments, and return which tokens are rotated."""
    if "query" in a:
        dim = a["head_size"]
        q, k = (a[name].unflatten(1, (-1, dim)) for name in ("query", "key"))
        rope = RotaryEmbedding(cos_sin_cache=a["cos_sin_cache"], interleaved=not a["is_neox"])
    else:
        q, k = a["q"], a["k"]
        rope = RotaryEmbedding(interleaved=a["interleave"], rotary_dim=a["rotary_dim"])
        if case.rope == "llama31":
            rope = rope._replace(scale=8.0, theta=5e5, llama31=(1.0, 4.0, 8192))
    positions = rope_positions(a, len(q))
    for t, position in enumerate(positions):
        at = rotation(rope, q.shape[2], position)
        if at is None:
            continue
        for x in (q, k):
            x[t] = turned(x[t].float(), at, rope.interleaved).to(x.dtype)
    return [rotation(rope, q.shape[2], position) is not None for position in positions]


def rope_positions(a: dict[str, Any], tokens: int) -> list[int]:
    """Return the position of each token of a RoPE function; -1 for none."""
    given = a.get("pos_ids", a.get("positions"))
    if given is not None:
        return numbers(given)
    starts, offsets, found = numbers(a["indptr"]), numbers(a["offsets"]), []
    for t in range(tokens):
        r = next((b for b in range(len(offsets)) if starts[b + 1] > t), -1)
        inside = r >= 0 and t >= starts[r] and offsets[r] >= 0
        at = offsets[r] + t - starts[r] if inside else -1
        found.append(at if at <= FAR else -1)
    return found


def quantise(case: CacheWriteCase, a: dict[str, Any]) -> None:
    """Do what `rope_quantize_fp8` does with its arguments, all outputs being given."""
    rope = RotaryEmbedding(cos_sin_cache=a["cos_sin_cache"], interleaved=not a["is_neox"])
    for t, position in enumerate(numbers(a["pos_ids"])):
        at = rotation(rope, a["cos_sin_cache"].shape[1], position)
        for side, scale in (("q", a["quant_scale_q"]), ("k", a["quant_scale_kv"])):
            # parts in tensors of their own are written by two launches, of which the second rotates nothing
            for part in ("rope", "nope") if at is not None else () if case.stacked else ("nope",):
                x, out = a[f"{side}_{part}"][t].float(), a[f"{side}_{part}_out"]
                values = turned(x, at, rope.interleaved) if part == "rope" and at is not None else x
                _bytes(out)[t] = fp8(values * torch.tensor(scale, dtype=torch.float32), DTYPES[case.cache])
