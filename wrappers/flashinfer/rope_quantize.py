"""Rotate Q and K and quantise them to fp8, as FlashInfer's `rope` does, by the kernel that writes caches.

A call is one launch, or two; the functions say when. Everything else is as in `rope`: what is rotated, which tokens are
not written, and the errors. `rope_latent` has the calls of a K without heads.
"""

from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.args import INTERLEAVED
from cute_kernels.cache_write.rows import ROTATED

from ..attention.views import sides
from ..cache_write.call import PAGES, ROWS, CacheWriteCall, QueryTransform
from ..cache_write.checks import FP8, ROPE_FP8, ROPE_FP8_MLA, ROPE_FP8_PAGED, WIDE
from ..cache_write.parts import Operands, calls_of, joined
from ..host.checks import (
    FP32_LEAST,
    UnknownName,
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_operand,
    check_optional_flag,
    check_shape,
    check_strided,
    listed,
)
from ..host.scalars import integer, real
from ..latent.call import LatentCall
from ..latent.checks import MLA_ROPE, MLA_ROPE_PAGED
from . import rope_latent
from .page import CACHE
from .rope import Pair, check_served, checked_table
from .rope_latent import LatentParts, serve

__all__ = ["mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"]
BACKENDS = ("cuda", "cutile")  # upstream's; a hint here
# The calls of the rotated parts and of the others, or one of all.
PartCalls = tuple[CacheWriteCall | LatentCall, CacheWriteCall | None]


def _quantised(value: Any, outputs: dict[str, Any]) -> torch.dtype:
    """Return the dtype of a call's outputs: the one that is asked for, that of the first output, or e4m3."""
    if value is None:
        for name, out in outputs.items():
            if out is not None:
                check_one_of(f"{name}: dtype", check_strided(name, out).dtype, FP8)
                return out.dtype
        return FP8[0]
    if not isinstance(value, torch.dtype) or value not in FP8:
        raise TypeError(f"quantize_dtype: {value!r}, must be one of {listed(FP8)}")
    return value


def _divisor(name: str, scale: Any) -> float:
    """Return the number by which the kernel divides, for one by which upstream multiplies."""
    scale = real(scale)
    check_number(name, scale, positive=True)
    if scale > 1 / FP32_LEAST:
        raise ValueError(f"{name}: {scale}, must be at most {1 / FP32_LEAST:.3g}: kernels divide by its reciprocal")
    return 1.0 / scale


def _split(side: str, rope: Any, nope: Any, ndim: int) -> Pair:
    """Return both parts of Q or K as (N, heads, ...); a part that is None has no elements. side: "q" or "k". ndim: 2 if
    there are no heads."""
    name, owner = f"{side}_nope", f"that of {side}_rope"
    check_operand(f"{side}_rope", rope, ndim, WIDE, None)
    if nope is None:
        nope = rope[..., :0]
    else:
        check_operand(name, nope, ndim, WIDE, rope.device, owner)
        if nope.dtype != rope.dtype:
            raise TypeError(f"{name}: dtype {nope.dtype}, must be {owner}, {rope.dtype}")
        check_shape(name, nope, (*rope.shape[:-1], nope.shape[-1]), f"rows and heads of {side}_rope")
    return (rope, nope) if ndim == 3 else (rope.unsqueeze(1), nope.unsqueeze(1))


class Parts(NamedTuple):
    """The parts of Q and K, each (N, heads, R or M)."""

    q: torch.Tensor
    q_nope: torch.Tensor
    k: torch.Tensor
    k_nope: torch.Tensor


def _parts(q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, table: Any) -> Parts:
    """Return the parts of Q and K, after a check of their ranks and last dimensions."""
    ndim = 2 if isinstance(k_rope, torch.Tensor) and k_rope.ndim == 2 else 3
    parts = Parts(*_split("q", q_rope, q_nope, 3), *_split("k", k_rope, k_nope, ndim))
    rotated, rest = parts.q.shape[2], parts.q_nope.shape[2]
    for name, dim in (("q_rope", rotated), ("q_nope", rest)):
        check_served(name, dim)
    if parts.k_nope.shape[2] != rest:
        for name, t, other in (("q_nope", q_nope, "k_nope"), ("k_nope", k_nope, "q_nope")):
            if t is None:
                raise ValueError(f"{name}: None, required with {other}")
        raise ValueError(f"k_nope: shape {tuple(k_nope.shape)}, must have the last dimension of q_nope, {rest}")
    if rotated % ROTATED:
        raise NotImplementedError(f"q_rope: shape {tuple(q_rope.shape)}, columns must be a multiple of {ROTATED}")
    if checked_table(table, rotated, "q_rope").shape[1] != rotated:
        raise ValueError(f"cos_sin_cache: shape {tuple(table.shape)}, must have the {rotated} columns of q_rope")
    return parts


def _outputs(side: str, parts: Any, given: tuple[Any, Any], dtype: torch.dtype, headless: bool = False) -> Pair:
    """Return the outputs of both parts of Q or K, each given or new; headless: without the dimension of heads.

    If both are new and the parts lie behind each other, so do the outputs."""
    rope, nope = (part.squeeze(1) for part in parts) if headless else parts
    if given[0] is None and given[1] is None and nope.shape[-1] and joined(rope, nope) is not None:
        rotated, rest = rope.shape[-1], nope.shape[-1]
        whole = torch.empty((*rope.shape[:-1], rotated + rest), dtype=dtype, device=rope.device)
        return whole[..., :rotated], whole[..., rotated:]
    found = []
    for name, part, out in zip((f"{side}_rope", f"{side}_nope"), (rope, nope), given):
        if out is None:
            out = torch.empty(part.shape, dtype=dtype, device=part.device)
        else:
            check_operand(f"{name}_out", out, part.ndim, (dtype,), part.device, f"that of {name}")
            check_shape(f"{name}_out", out, tuple(part.shape), f"the shape of {name}")
        found.append(out)
    return found[0], found[1]


def rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool = True, quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None, q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None, enable_pdl: bool = False, backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate parts of Q and K and quantise these and the other parts to fp8; return them in the order of the outputs.

    The call is one launch if there are no parts `nope`, or if in each of Q, K and their outputs the rows of `nope` lie
    behind those of `rope`, as in views x[..., :R] and x[..., R:] of one tensor, with R + M up to 512. It is one launch,
    too, under the conditions of `mla_rope_quantize_fp8`. Otherwise, and under torch.compile, a second launch writes
    `nope`. Nothing is copied.

    Args:
        q_rope, k_rope: fp16 or bf16 (N, Hq, R) and (N, H, R), or (N, R) for a K without heads (MLA); of one dtype, any
            strides, the last 1. R a multiple of 16 up to 512.
        q_nope, k_nope: (N, Hq, M) and (N, H, M) or (N, M), M up to 512; both may be None.
        cos_sin_cache: fp32 (L, R), cosines then sines of R / 2 pairs at each position; rows begin at multiples of 16
            bytes. pos_ids: int32 or int64 (N,). is_neox: pairs are halves, not neighbours.
        quantize_dtype: e4m3 or e5m2. None: that of the first output that is given, else e4m3.
        quant_scale_q, quant_scale_kv: positive numbers by which values are multiplied. The kernel divides by their
            reciprocals in fp32. Values saturate; NaN stays NaN.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: outputs of the parts' shapes, the last stride 1. None: new ones,
            which may be views of one tensor for Q, or for K, if both are new.

    A hint: enable_pdl, backend. The rotated parts of a token whose position is no row of cos_sin_cache are not written;
    if one launch writes both parts, neither are the others.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or backend, NotImplementedError for an
    R or M that no kernel serves. FlashInfer's function.

    >>> table = torch.tensor([[0.0] * 8 + [1.0] * 8])  # a quarter of a turn at position 0
    >>> x, zero = torch.arange(24.0).half().view(1, 1, 24), torch.tensor([0])
    >>> parts = rope_quantize_fp8(x[..., :16], x[..., :16], x[..., 16:], x[..., 16:], table, zero, quant_scale_q=0.5)
    >>> [part[0, 0, 0].item() for part in parts]  # of Q, of K, and the parts that are not rotated
    [-4.0, -8.0, 8.0, 16.0]
    """
    (first, second), outputs = quantize_call(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl, backend,
    )  # fmt: skip
    serve(first, second)
    return outputs


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool = True, quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None, q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None, enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate parts of Q and of a K without heads (MLA), and quantise these and the other parts to fp8; return them in
    the order of the outputs.

    It is `rope_quantize_fp8` with k_rope (N, R) and k_nope (N, M). To e4m3, with R up to 64 and M a multiple of 16, the
    call is one launch if the outputs of Q are both new, or views x[..., M:] and x[..., :M] of one tensor (N, Hq, M + R)
    in that order, as the kernels of MLA read a query; new ones are such views. All arguments, results and errors are as
    in `rope_quantize_fp8`. A K with heads raises ValueError. FlashInfer's function.

    >>> table = torch.tensor([[0.0] * 8 + [1.0] * 8])  # a quarter of a turn at position 0
    >>> q, k, zero = torch.ones(1, 2, 16).half(), torch.arange(16.0).half().view(1, 16), torch.tensor([0])
    >>> parts = mla_rope_quantize_fp8(q, k, q, k, table, zero, quant_scale_kv=0.5)
    >>> parts[1][0, :3].tolist(), parts[3][0, :3].tolist()
    ([-4.0, -4.5, -5.0], [0.0, 0.5, 1.0])
    """
    (first, second), outputs = mla_quantize_call(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip
    serve(first, second)
    return outputs


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    v: torch.Tensor | None, cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor, positions: torch.Tensor, is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0,
    page_size: int = 16, kv_layout: str = "NHD", q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None, enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate parts of Q and K, quantise Q, K and V to fp8, write K and V to a paged cache, and return both parts of Q.

    A row of K in the cache is its part `rope`, then its part `nope`. If K has no heads (MLA), `nope` is the latent,
    which is V, too, and each part has a cache. The call is one launch if there are no parts `nope`, or under the
    conditions of `rope_quantize_fp8` or, without heads, of `mla_rope_quantize_fp8`; else two.

    Args:
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
            q_rope_out, q_nope_out, enable_pdl: as in `rope_quantize_fp8`. pos_ids are positions in cos_sin_cache.
        v: (N, H, D), of q's dtype; None if K has no heads.
        paged_kv_cache: (k, v), each of quantize_dtype, (pages, P, H, R + M) and (pages, P, H, D) "NHD", or
            (pages, H, P, ...) "HND"; without heads (ckv, kpe), (pages, P, M) and (pages, P, R). Any strides, the last
            1.
        kv_indices, kv_indptr, batch_indices, positions: the places of K and V, as in `append_paged_kv_cache`.
        page_size: P.

    K and V of a token are not written if its request or position has no place in the cache, such as those of padding
    with request -1; Q is. If the position of its rotation is no row of cos_sin_cache, neither V nor the rotated parts
    of Q and K are written; if one launch writes both parts, nothing is. Errors: TypeError for a dtype, ValueError for a
    shape, stride, device or number, NotImplementedError for an R or M that no kernel serves; an unknown kv_layout is
    both a KeyError and a ValueError. FlashInfer's function.

    >>> table = torch.tensor([[0.0] * 8 + [1.0] * 8])
    >>> x, zero = torch.arange(16.0).half().view(1, 1, 16), torch.tensor([0])
    >>> k, v = torch.zeros(2, 1, 16, 1, 16).to(torch.float8_e4m3fn)  # a page of 16 rows
    >>> where = zero, torch.tensor([0, 1]), zero, torch.tensor([3])  # page 0 is request 0's; row 3 of it
    >>> q, _ = rope_quantize_fp8_append_paged_kv_cache(x, x, None, None, x, table, zero, (k, v), *where)
    >>> q[0, 0, 0].item(), k[0, 3, 0, 0].item(), v[0, 3, 0, :4].tolist()
    (-8.0, -8.0, [0.0, 1.0, 2.0, 3.0])
    """
    (first, second), outputs = quantize_append_call(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, kv_indptr,
        batch_indices, positions, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv, page_size, kv_layout,
        q_rope_out, q_nope_out, enable_pdl,
    )  # fmt: skip
    serve(first, second)
    return outputs


def _by_pos_ids(table: torch.Tensor, is_neox: bool, pos_ids: Any, q_scale: float) -> QueryTransform:
    """Return a rotation by a table, without operands."""
    flags = 0 if is_neox else INTERLEAVED
    return QueryTransform(None, None, table, flags, check_strided("pos_ids", pos_ids, 1), q_scale=q_scale)


def _fp8_cache(cache: Any, layout: Any, dtype: torch.dtype, page_size: Any) -> Pair:
    """Return K and V of a cache of a dtype and page size."""
    found = sides(CACHE, cache, layout)
    for side, t in zip("KV", found):
        if check_strided(f"{CACHE} ({side})", t, 4).dtype != dtype:
            raise TypeError(f"{CACHE} ({side}): dtype {t.dtype}, must be quantize_dtype, {dtype}")
    size = found[0].shape[1 if layout == "NHD" else 2]
    if check_integer("page_size", integer(page_size), 1) != size:
        raise ValueError(f"page_size: {page_size}, must be that of {CACHE}, {size}")
    return found


def quantize_call(
    q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, cos_sin_cache: Any, pos_ids: Any, is_neox: Any,
    quantize_dtype: Any, quant_scale_q: Any, quant_scale_kv: Any, q_rope_out: Any, k_rope_out: Any, q_nope_out: Any,
    k_nope_out: Any, enable_pdl: Any, backend: Any,
) -> tuple[PartCalls, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return the calls of `rope_quantize_fp8` and its outputs."""
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    check_flag("is_neox", is_neox)
    check_optional_flag("enable_pdl", enable_pdl)
    scales = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    parts = _parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache)
    outputs = {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out, "k_rope_out": k_rope_out, "k_nope_out": k_nope_out}
    dtype = _quantised(quantize_dtype, outputs)
    headless = k_rope.ndim == 2
    rows = _latent_rows(parts, k_rope, k_nope, dtype) if headless else None
    if rows is not None and q_rope_out is None and q_nope_out is None:
        q_rope_out, q_nope_out = rope_latent.new_query(rows, dtype)
    else:
        q_rope_out, q_nope_out = _outputs("q", parts[:2], (q_rope_out, q_nope_out), dtype)
    k_rope_out, k_nope_out = _outputs("k", parts[2:], (k_rope_out, k_nope_out), dtype, headless)
    results = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    if rows is not None:
        latent = rope_latent.latent_call(
            MLA_ROPE, rows, (q_rope_out, q_nope_out), (k_nope_out[None], k_rope_out[None]), scales, places=ROWS,
            rope_table=cos_sin_cache, interleaved=not is_neox, rope_positions=check_strided("pos_ids", pos_ids, 1),
        )  # fmt: skip
        if latent is not None:
            return (latent, None), results
    transform = _by_pos_ids(cos_sin_cache, is_neox, pos_ids, scales[0])
    call = CacheWriteCall(
        ROPE_FP8, None, None, None, None, True, ROWS, k_scale=scales[1], v_scale=scales[1], transform=transform
    )
    k_outs = [t.unsqueeze(1)[None] if headless else t[None] for t in (k_rope_out, k_nope_out)]
    rope = Operands(parts.q, q_rope_out, parts.k, k_outs[0])
    nope = Operands(parts.q_nope, q_nope_out, parts.k_nope, k_outs[1])
    return calls_of(call, rope, nope if nope.q.shape[2] else None), results


def mla_quantize_call(
    q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, cos_sin_cache: Any, pos_ids: Any, is_neox: Any,
    quantize_dtype: Any, quant_scale_q: Any, quant_scale_kv: Any, q_rope_out: Any, k_rope_out: Any, q_nope_out: Any,
    k_nope_out: Any, enable_pdl: Any,
) -> tuple[PartCalls, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return the calls of `mla_rope_quantize_fp8` and its outputs."""
    check_strided("k_rope", k_rope, 2)
    return quantize_call(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl, BACKENDS[0],
    )  # fmt: skip


def quantize_append_call(
    q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, v: Any, cos_sin_cache: Any, pos_ids: Any,
    paged_kv_cache: Any, kv_indices: Any, kv_indptr: Any, batch_indices: Any, positions: Any, is_neox: Any,
    quantize_dtype: Any, quant_scale_q: Any, quant_scale_kv: Any, page_size: Any, kv_layout: Any, q_rope_out: Any,
    q_nope_out: Any, enable_pdl: Any,
) -> tuple[PartCalls, Pair]:  # fmt: skip
    """Return the calls of `rope_quantize_fp8_append_paged_kv_cache` and its outputs."""
    check_flag("is_neox", is_neox)
    check_optional_flag("enable_pdl", enable_pdl)
    scales = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    parts = _parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache)
    rotated, rest = parts.q.shape[2], parts.q_nope.shape[2]
    dtype = _quantised(quantize_dtype, {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out})
    places = {"kv_indices": kv_indices, "kv_indptr": kv_indptr, "batch_indices": batch_indices, "positions": positions}
    if k_rope.ndim == 2:
        if v is not None:
            found = f"shape {tuple(v.shape)}" if isinstance(v, torch.Tensor) else repr(v)
            raise ValueError(f"v: {found}, must be None with a K without heads, of which k_nope is V")
        caches = rope_latent.cache_parts(CACHE, paged_kv_cache, kv_layout, (rest, rotated), dtype, page_size)
        rows = _latent_rows(parts, k_rope, k_nope, dtype)
        if rows is not None and q_rope_out is None and q_nope_out is None:
            outputs = rope_latent.new_query(rows, dtype)
        else:
            outputs = _outputs("q", parts[:2], (q_rope_out, q_nope_out), dtype)
        transform = _by_pos_ids(cos_sin_cache, is_neox, pos_ids, scales[0])
        return _latent_calls(parts, rows, outputs, caches, places, transform, scales[1]), outputs
    k_cache, v_cache = _fp8_cache(paged_kv_cache, kv_layout, dtype, page_size)
    if k_cache.shape[3] != rotated + rest:
        shape = tuple(k_cache.shape)
        raise ValueError(f"{CACHE} (K): shape {shape}, the last dimension must be {rotated + rest}, that of K's parts")
    q_out, nope_out = _outputs("q", parts[:2], (q_rope_out, q_nope_out), dtype)
    transform = _by_pos_ids(cos_sin_cache, is_neox, pos_ids, scales[0])
    call = CacheWriteCall(
        ROPE_FP8_PAGED, None, check_strided("v", v, 3), None, v_cache, kv_layout == "NHD", PAGES, k_scale=scales[1],
        v_scale=scales[1], transform=transform, **places,
    )  # fmt: skip
    rope = Operands(parts.q, q_out, parts.k, k_cache[..., :rotated])
    nope = Operands(parts.q_nope, nope_out, parts.k_nope, k_cache[..., rotated:])
    return calls_of(call, rope, nope if rest else None), (q_out, nope_out)


def _latent_rows(parts: Parts, k_rope: torch.Tensor, k_nope: Any, dtype: torch.dtype) -> LatentParts | None:
    """Return the parts with a K without heads, None if the kernel of latent attention does not serve them."""
    if not parts.q_nope.shape[2]:
        return None
    rows = LatentParts(parts.q, parts.q_nope, k_rope, k_nope)
    return rows if rope_latent.has_kernel(rows, dtype) else None


def _latent_calls(
    parts: Parts, rows: LatentParts | None, outputs: Pair, caches: Pair, places: dict[str, Any],
    transform: QueryTransform, k_scale: float,
) -> PartCalls:  # fmt: skip
    """Return the calls of `rope_quantize_fp8_append_paged_kv_cache` for a K without heads.

    rows: of `_latent_rows`. caches: of the latent and of the rotated part. transform: the rotation, and Q's scale.
    k_scale: by which K is divided."""
    check_strided("kv_indptr", places["kv_indptr"], 1)
    if rows is not None:
        latent = rope_latent.latent_call(
            MLA_ROPE_PAGED, rows, outputs, caches, (transform.q_scale, k_scale), places=PAGES,
            rope_table=transform.rope_table, interleaved=bool(transform.rope & INTERLEAVED),
            rope_positions=transform.rope_positions, **places,
        )  # fmt: skip
        if latent is not None:
            return latent, None
    call = CacheWriteCall(
        ROPE_FP8_MLA, None, None, None, None, True, PAGES, k_scale=k_scale, v_scale=k_scale, transform=transform,
        **places,
    )  # fmt: skip
    ckv, kpe = (cache.unsqueeze(2) for cache in caches)
    rope = Operands(parts.q, outputs[0], parts.k, kpe)
    if not parts.q_nope.shape[2]:
        return calls_of(call, rope, None)
    nope = Operands(parts.q_nope, outputs[1], parts.k_nope[:, :0], ckv[:, :, :0])  # K's is V of the first call
    return calls_of(call._replace(v=parts.k_nope, v_cache=ckv), rope, nope)
