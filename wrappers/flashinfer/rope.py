"""Rotate Q and K, and quantise them, as FlashInfer's `rope` does, by the kernel that writes caches.

A call is one launch; the functions that quantise say when they need two. Nothing waits for the device, and all
functions can be captured in a CUDA graph. Rows are computed in fp32 and rounded once.

The pairs of the first R elements of a row are rotated, the others are copied. Pair i is (i, i + R / 2), or (2 i, 2 i +
1) if rows are interleaved. It turns by position * theta^(-2 i / R) / scale, or by an angle of which cos_sin_cache holds
the cosine and the sine. Angles of positions below 2^24 are exact to fp32. R must be a multiple of 16, and a row has at
most 512 elements.

A token whose position is negative, or no row of cos_sin_cache, is not written: its rows in a new output are undefined.
No value of any tensor makes a call access memory outside its tensors.

All functions raise before anything is written: TypeError for a type or dtype; ValueError for a shape, stride, device or
number, and for memory that an output shares with another tensor; NotImplementedError for what no kernel serves;
RuntimeError for a tensor that requires grad, in grad mode.
"""

from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.args import FROM_FIRST, INTERLEAVED
from cute_kernels.cache_write.rows import MAX_TRANSFORMED, ROTATED

from ..attention.views import sides
from ..cache_write.call import PAGES, ROWS, CacheWriteCall, QueryTransform
from ..cache_write.checks import FP8, ROPE, ROPE_CACHED, ROPE_FP8, ROPE_FP8_PAGED, WIDE
from ..cache_write.op import serve
from ..cache_write.parts import Operands, joined, serve_parts, without_v
from ..cache_write.rotation import RotaryEmbedding, rope_table
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
from .page import CACHE

__all__ = [
    "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache",
]  # fmt: skip
BACKENDS = ("cuda", "cutile")  # upstream's; a hint here
Pair = tuple[torch.Tensor, torch.Tensor]


# ---- rows of 16 bits


def _angles(
    q: Any, k: Any, rotary_dim: Any, interleave: Any, scale: Any, theta: Any, llama31: Any = None
) -> RotaryEmbedding:  # fmt: skip
    """Return a rotation by angles, without positions, after a check of its numbers and of the ranks of Q and K."""
    head_dim = check_strided("q", q, 3).shape[2]
    check_strided("k", k, 3)
    _served("q", head_dim)
    if rotary_dim is not None:
        rotary_dim = check_integer("rotary_dim", integer(rotary_dim), 1)
        if rotary_dim > head_dim:
            raise ValueError(f"rotary_dim: {rotary_dim}, must be at most head_dim {head_dim} of q")
    if (rotary_dim or head_dim) % ROTATED:
        whole = f"head_dim {head_dim} of q" if rotary_dim is None else rotary_dim
        raise NotImplementedError(f"rotary_dim: {whole}, must be a multiple of {ROTATED}")
    check_flag("interleave", interleave)
    scale, theta = real(scale), real(theta)
    check_number("rope_scale", scale, positive=True)
    check_number("rope_theta", theta, positive=True)
    if llama31 is not None:
        low, high, length = map(real, llama31)
        check_number("low_freq_factor", low, positive=True)
        check_number("high_freq_factor", high, positive=True)
        check_number("old_context_len", length, positive=True)
        if low == high:
            raise ValueError(f"high_freq_factor: {high}, must differ from low_freq_factor")
        llama31 = low, high, length
    return RotaryEmbedding(None, None, interleave, rotary_dim, scale, theta, llama31)


def _served(name: str, dim: int) -> None:
    if dim > MAX_TRANSFORMED:
        raise NotImplementedError(f"{name}: head_dim {dim}, must be at most {MAX_TRANSFORMED}")


def _rotate(
    function: str, q: torch.Tensor, k: torch.Tensor, rope: RotaryEmbedding, inplace: bool, requests: Any = (None, None)
) -> Pair:  # fmt: skip
    """Rotate Q and K (N, heads, D), of one dtype, and return the results. requests: the first token of each request and
    its position, unless the rotation has positions."""
    q_out, k_out = q, k
    if not inplace:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    table, flags = rope_table(rope, k)
    if requests[0] is not None:
        flags |= FROM_FIRST
    transform = QueryTransform(q, q_out, table, flags, rope.positions)
    call = CacheWriteCall(function, k, None, None, None, True, ROWS, cu_seqlens=requests[0], kv_lens=requests[1])
    serve(without_v(call._replace(k_cache=k_out[None], transform=transform)))
    return q_out, k_out


def _by_requests(q: Any, k: Any, indptr: Any, offsets: Any, inplace: bool, *angles: Any) -> Pair:
    rope = _angles(q, k, *angles)
    requests = check_strided("indptr", indptr, 1), check_strided("offsets", offsets, 1)
    return _rotate(ROPE, q, k, rope, inplace, requests)


def _by_positions(q: Any, k: Any, pos_ids: Any, inplace: bool, *angles: Any) -> Pair:
    rope = _angles(q, k, *angles)
    return _rotate(ROPE, q, k, rope._replace(positions=check_strided("pos_ids", pos_ids, 1)), inplace)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return Q and K, rotated, where a request's tokens lie one behind another from a given position on.

    Args:
        q, k: fp16 or bf16 (N, Hq, D) and (N, H, D), of one dtype, any strides, the last 1, such as views of one packed
            tensor. D at most 512.
        indptr: int32 or int64 (B + 1,), the first token of each request, rising. offsets: int32 or int64 (B,), the
            position of that token: token i of request b is at offsets[b] + i - indptr[b].
        rotary_dim: elements of a row that are rotated, a multiple of 16 (None: D). interleave: pairs are neighbours.
            rope_scale: positions are divided by it. rope_theta: see the module.

    Returns new, contiguous tensors of the shapes of q and k. Tokens of no request are undefined in them, and so are
    those of a request with a negative offset. Errors: TypeError for a dtype, ValueError for a shape, stride, device or
    number, NotImplementedError for a rotary_dim or head_dim that no kernel serves. FlashInfer's function.

    >>> x = torch.ones(3, 1, 16).half()  # requests of 2 tokens and of one
    >>> q, k = apply_rope(x, x, torch.tensor([0, 2, 3]), torch.tensor([0, 5]))
    >>> q[:, 0, 0]  # cos(p) - sin(p) at positions 0, 1 and 5
    tensor([ 1.0000, -0.3013,  1.2422], dtype=torch.float16)
    """
    return _by_requests(q, k, indptr, offsets, False, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Rotate Q and K in place, as `apply_rope` does.

    q and k have no common element. The arguments and errors are as in `apply_rope`. Tokens of no request, and of one
    with a negative offset, keep their values. FlashInfer's function.

    >>> x = torch.ones(2, 2, 16).half()
    >>> apply_rope_inplace(x[:, :1], x[:, 1:], torch.tensor([0, 2]), torch.tensor([0]))
    >>> x[:, 1, 0]
    tensor([ 1.0000, -0.3013], dtype=torch.float16)
    """
    _by_requests(q, k, indptr, offsets, True, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return Q and K, rotated to the position of each token.

    pos_ids: int32 or int64 (N,). Tokens with a negative one are undefined in the result. Everything else is as in
    `apply_rope`. FlashInfer's function.

    >>> x = torch.ones(2, 1, 16).half()
    >>> q, k = apply_rope_pos_ids(x, x, torch.tensor([5, 0]))
    >>> k[:, 0, 0]
    tensor([1.2422, 1.0000], dtype=torch.float16)
    """
    return _by_positions(q, k, pos_ids, False, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids_inplace(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Rotate Q and K in place, to the position of each token, as `apply_rope_pos_ids` does.

    Positions are as in `apply_rope_pos_ids`; tokens with a negative one keep their values. Everything else is as in
    `apply_rope_inplace`. FlashInfer's function.

    >>> q, k = torch.ones(2, 3, 16).half(), torch.ones(2, 1, 16).half()
    >>> apply_rope_pos_ids_inplace(q, k, torch.tensor([-1, 1]))
    >>> q[:, 0, 0]
    tensor([ 1.0000, -0.3013], dtype=torch.float16)
    """
    _by_positions(q, k, pos_ids, True, rotary_dim, interleave, rope_scale, rope_theta)


def apply_llama31_rope(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1,
    high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return Q and K, rotated by Llama 3.1's angles, where a request's tokens lie one behind another.

    rope_scale divides the frequencies that turn less than low_freq_factor times in old_context_len positions, none that
    turn more than high_freq_factor times, and those between by a linear blend of both. The three are positive, and the
    factors differ. Everything else is as in `apply_rope`. FlashInfer's function.

    >>> x = torch.ones(1, 1, 16).half()
    >>> q, k = apply_llama31_rope(x, x, torch.tensor([0, 1]), torch.tensor([1]))
    >>> q[0, 0, :2]
    tensor([-0.3013,  0.7886], dtype=torch.float16)
    """
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    return _by_requests(q, k, indptr, offsets, False, rotary_dim, interleave, rope_scale, rope_theta, llama31)


def apply_llama31_rope_inplace(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1,
    high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Rotate Q and K in place by Llama 3.1's angles, which are as in `apply_llama31_rope`.

    Everything else is as in `apply_rope_inplace`. FlashInfer's function.

    >>> q, k = torch.ones(1, 3, 16).half(), torch.ones(1, 1, 16).half()
    >>> apply_llama31_rope_inplace(q, k, torch.tensor([0, 1]), torch.tensor([1]))
    >>> k[0, 0, :2]
    tensor([-0.3013,  0.7886], dtype=torch.float16)
    """
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    _by_requests(q, k, indptr, offsets, True, rotary_dim, interleave, rope_scale, rope_theta, llama31)


def apply_llama31_rope_pos_ids(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return Q and K, rotated by Llama 3.1's angles to the position of each token.

    The angles are as in `apply_llama31_rope`; everything else is as in `apply_rope_pos_ids`. FlashInfer's function.

    >>> x = torch.ones(2, 1, 16).half()
    >>> q, k = apply_llama31_rope_pos_ids(x, x, torch.tensor([1, 0]))
    >>> k[:, 0, 1]
    tensor([0.7886, 1.0000], dtype=torch.float16)
    """
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    return _by_positions(q, k, pos_ids, False, rotary_dim, interleave, rope_scale, rope_theta, llama31)


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Rotate Q and K in place by Llama 3.1's angles, to the position of each token.

    The angles are as in `apply_llama31_rope`; everything else is as in `apply_rope_pos_ids_inplace`. FlashInfer's
    function.

    >>> q, k = torch.ones(2, 3, 16).half(), torch.ones(2, 1, 16).half()
    >>> apply_llama31_rope_pos_ids_inplace(q, k, torch.tensor([1, 0]))
    >>> q[:, 2, 1]
    tensor([0.7886, 1.0000], dtype=torch.float16)
    """
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    _by_positions(q, k, pos_ids, True, rotary_dim, interleave, rope_scale, rope_theta, llama31)


def _table(table: Any, dim: int, owner: str) -> torch.Tensor:
    """Return a table of cosines and sines, after a check of its columns against the elements of a row."""
    rotated = check_strided("cos_sin_cache", table, 2).shape[1]
    if not 0 < rotated <= dim:
        raise ValueError(f"cos_sin_cache: shape {tuple(table.shape)}, must have 1 to {dim} columns ({owner})")
    if rotated % ROTATED:
        raise NotImplementedError(f"cos_sin_cache: shape {tuple(table.shape)}, columns must be a multiple of {ROTATED}")
    return table


def _by_table(
    positions: Any, query: Any, key: Any, head_size: Any, table: Any, is_neox: Any, inplace: bool
) -> Pair:  # fmt: skip
    size = check_integer("head_size", integer(head_size), 1)
    heads = []
    for name, t in (("query", query), ("key", key)):
        if check_strided(name, t, 2).shape[1] % size:
            shape = tuple(t.shape)
            raise ValueError(f"{name}: shape {shape}, the last dimension must be a multiple of head_size {size}")
        heads.append(t.unflatten(1, (t.shape[1] // size, size)))
    _served("head_size", size)
    check_flag("is_neox", is_neox)
    positions = check_strided("positions", positions, 1)
    rope = RotaryEmbedding(positions, _table(table, size, "head_size"), not is_neox)
    return _rotate(ROPE_CACHED, heads[0], heads[1], rope, inplace)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return Q and K, rotated by the cosines and sines that a table holds for each position.

    Args:
        positions: int32 or int64 (N,).
        query, key: fp16 or bf16 (N, Hq * head_size) and (N, H * head_size), of one dtype, any strides, the last 1.
        head_size: elements of a head, at most 512.
        cos_sin_cache: fp32 (L, R), cosines then sines of R / 2 pairs at each position, R a multiple of 16 up to
            head_size; rows begin at multiples of 16 bytes.
        is_neox: pairs are halves (i, i + R / 2), not neighbours.

    Returns new, contiguous tensors of the shapes of query and key. Tokens whose position is no row of the table are
    undefined in them. Errors: TypeError for a dtype, ValueError for a shape, stride, device or number,
    NotImplementedError for an R or head_size that no kernel serves. FlashInfer's function.

    >>> table = torch.tensor([[1.0] * 8 + [0.0] * 8, [0.0] * 8 + [1.0] * 8])  # no turn, and a quarter of one
    >>> x = torch.arange(32.0).half().expand(2, 32)
    >>> q, k = apply_rope_with_cos_sin_cache(torch.tensor([0, 1]), x, x, 16, table)
    >>> q[:, [0, 8, 16]].tolist()
    [[0.0, 8.0, 16.0], [-8.0, 0.0, -24.0]]
    """
    q, k = _by_table(positions, query, key, head_size, cos_sin_cache, is_neox, False)
    return q.flatten(1), k.flatten(1)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:  # fmt: skip
    """Rotate Q and K in place, as `apply_rope_with_cos_sin_cache` does.

    query and key have no common element. The arguments and errors are as in `apply_rope_with_cos_sin_cache`. Tokens
    whose position is no row of the table keep their values. FlashInfer's function.

    >>> table = torch.tensor([[1.0] * 8 + [0.0] * 8, [0.0] * 8 + [1.0] * 8])
    >>> q, k = torch.arange(16.0).half().repeat(2, 1), torch.ones(2, 16).half()
    >>> apply_rope_with_cos_sin_cache_inplace(torch.tensor([1, 2]), q, k, 16, table)
    >>> q[:, [0, 8]].tolist()
    [[-8.0, 0.0], [0.0, 8.0]]
    """
    _by_table(positions, query, key, head_size, cos_sin_cache, is_neox, True)


# ---- quantisation


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
        _served(name, dim)
    if parts.k_nope.shape[2] != rest:
        for name, t, other in (("q_nope", q_nope, "k_nope"), ("k_nope", k_nope, "q_nope")):
            if t is None:
                raise ValueError(f"{name}: None, required with {other}")
        raise ValueError(f"k_nope: shape {tuple(k_nope.shape)}, must have the last dimension of q_nope, {rest}")
    if rotated % ROTATED:
        raise NotImplementedError(f"q_rope: shape {tuple(q_rope.shape)}, columns must be a multiple of {ROTATED}")
    if _table(table, rotated, "q_rope").shape[1] != rotated:
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
    behind those of `rope`, as in views x[..., :R] and x[..., R:] of one tensor, with R + M up to 512. Otherwise, and
    under torch.compile, a second launch writes `nope`. Nothing is copied.

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
            which are views of one tensor for Q, or for K, if both are new and the parts lie behind each other.

    A hint: enable_pdl, backend. The rotated parts of a token whose position is no row of cos_sin_cache are not written.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or backend, NotImplementedError for an
    R or M that no kernel serves. FlashInfer's function.

    >>> table = torch.tensor([[0.0] * 8 + [1.0] * 8])  # a quarter of a turn at position 0
    >>> x, zero = torch.arange(24.0).half().view(1, 1, 24), torch.tensor([0])
    >>> parts = rope_quantize_fp8(x[..., :16], x[..., :16], x[..., 16:], x[..., 16:], table, zero, quant_scale_q=0.5)
    >>> [part[0, 0, 0].item() for part in parts]  # of Q, of K, and the parts that are not rotated
    [-4.0, -8.0, 8.0, 16.0]
    """
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    check_flag("is_neox", is_neox)
    check_optional_flag("enable_pdl", enable_pdl)
    scales = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    parts = _parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache)
    outputs = {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out, "k_rope_out": k_rope_out, "k_nope_out": k_nope_out}
    dtype = _quantised(quantize_dtype, outputs)
    headless = k_rope.ndim == 2
    q_rope_out, q_nope_out = _outputs("q", parts[:2], (q_rope_out, q_nope_out), dtype)
    k_rope_out, k_nope_out = _outputs("k", parts[2:], (k_rope_out, k_nope_out), dtype, headless)
    transform = _by_pos_ids(cos_sin_cache, is_neox, pos_ids, scales[0])
    call = CacheWriteCall(
        ROPE_FP8, None, None, None, None, True, ROWS, k_scale=scales[1], v_scale=scales[1], transform=transform
    )
    k_outs = [t.unsqueeze(1)[None] if headless else t[None] for t in (k_rope_out, k_nope_out)]
    rope = Operands(parts.q, q_rope_out, parts.k, k_outs[0])
    nope = Operands(parts.q_nope, q_nope_out, parts.k_nope, k_outs[1])
    serve_parts(call, rope, nope if nope.q.shape[2] else None)
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


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

    A row of K in the cache is its part `rope`, then its part `nope`. The call is one launch under the conditions of
    `rope_quantize_fp8`, else two.

    Args:
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
            q_rope_out, q_nope_out, enable_pdl: as in `rope_quantize_fp8`. K must have heads: its form of MLA raises
            NotImplementedError. pos_ids are positions in cos_sin_cache.
        v: (N, H, D), of q's dtype.
        paged_kv_cache: (k, v), each of quantize_dtype, (pages, P, H, R + M) and (pages, P, H, D) "NHD", or
            (pages, H, P, ...) "HND"; any strides, the last 1.
        kv_indices, kv_indptr, batch_indices, positions: the places of K and V, as in `append_paged_kv_cache`.
        page_size: P.

    K and V of a token are not written if its request or position has no place in the cache, such as those of padding
    with request -1; Q is. If the position of its rotation is no row of cos_sin_cache, neither V nor the rotated parts
    of Q and K are written. Errors: TypeError for a dtype, ValueError for a shape, stride, device or number,
    NotImplementedError for MLA's form and for an R or M that no kernel serves; an unknown kv_layout is both a KeyError
    and a ValueError. FlashInfer's function.

    >>> table = torch.tensor([[0.0] * 8 + [1.0] * 8])
    >>> x, zero = torch.arange(16.0).half().view(1, 1, 16), torch.tensor([0])
    >>> k, v = torch.zeros(2, 1, 16, 1, 16).to(torch.float8_e4m3fn)  # a page of 16 rows
    >>> where = zero, torch.tensor([0, 1]), zero, torch.tensor([3])  # page 0 is request 0's; row 3 of it
    >>> q, _ = rope_quantize_fp8_append_paged_kv_cache(x, x, None, None, x, table, zero, (k, v), *where)
    >>> q[0, 0, 0].item(), k[0, 3, 0, 0].item(), v[0, 3, 0, :4].tolist()
    (-8.0, -8.0, [0.0, 1.0, 2.0, 3.0])
    """
    if isinstance(k_rope, torch.Tensor) and k_rope.ndim == 2:
        raise NotImplementedError(f"k_rope: shape {tuple(k_rope.shape)}, must have heads: MLA's form is not supported")
    check_flag("is_neox", is_neox)
    check_optional_flag("enable_pdl", enable_pdl)
    scales = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    parts = _parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache)
    rotated, rest = parts.q.shape[2], parts.q_nope.shape[2]
    dtype = _quantised(quantize_dtype, {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out})
    k_cache, v_cache = _fp8_cache(paged_kv_cache, kv_layout, dtype, page_size)
    if k_cache.shape[3] != rotated + rest:
        shape = tuple(k_cache.shape)
        raise ValueError(f"{CACHE} (K): shape {shape}, the last dimension must be {rotated + rest}, that of K's parts")
    q_out, nope_out = _outputs("q", parts[:2], (q_rope_out, q_nope_out), dtype)
    transform = _by_pos_ids(cos_sin_cache, is_neox, pos_ids, scales[0])
    call = CacheWriteCall(
        ROPE_FP8_PAGED, None, check_strided("v", v, 3), None, v_cache, kv_layout == "NHD", PAGES, None,
        batch_indices, positions, None, kv_indices, kv_indptr,
        k_scale=scales[1], v_scale=scales[1], transform=transform,
    )  # fmt: skip
    rope = Operands(parts.q, q_out, parts.k, k_cache[..., :rotated])
    nope = Operands(parts.q_nope, nope_out, parts.k_nope, k_cache[..., rotated:])
    serve_parts(call, rope, nope if rest else None)
    return q_out, nope_out


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
