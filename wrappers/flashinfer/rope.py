"""Rotate Q and K, as FlashInfer's `rope` does, by the kernel that writes caches. `rope_quantize` also quantises them.

A call is one launch. Nothing waits for the device, and all functions can be captured in a CUDA graph. Rows are computed
in fp32 and rounded once.

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

from typing import Any

import torch

from cute_kernels.cache_write.args import FROM_FIRST
from cute_kernels.cache_write.rows import MAX_TRANSFORMED, ROTATED

from ..cache_write.call import ROWS, CacheWriteCall, QueryTransform
from ..cache_write.checks import ROPE, ROPE_CACHED
from ..cache_write.op import serve
from ..cache_write.parts import without_v
from ..cache_write.rotation import RotaryEmbedding, rope_table
from ..host.checks import check_flag, check_integer, check_number, check_strided
from ..host.scalars import integer, real

__all__ = [
    "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
]  # fmt: skip
Pair = tuple[torch.Tensor, torch.Tensor]


def _angles(
    q: Any, k: Any, rotary_dim: Any, interleave: Any, scale: Any, theta: Any, llama31: Any = None
) -> RotaryEmbedding:  # fmt: skip
    """Return a rotation by angles, without positions, after a check of its numbers and of the ranks of Q and K."""
    head_dim = check_strided("q", q, 3).shape[2]
    check_strided("k", k, 3)
    check_served("q", head_dim)
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


def check_served(name: str, dim: int) -> None:
    """Check that a kernel rotates rows of `dim` elements."""
    if dim > MAX_TRANSFORMED:
        raise NotImplementedError(f"{name}: head_dim {dim}, must be at most {MAX_TRANSFORMED}")


def _rotation(
    function: str, q: torch.Tensor, k: torch.Tensor, rope: RotaryEmbedding, inplace: bool, requests: Any = (None, None)
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call that rotates Q and K (N, heads, D), of one dtype, and its output for K. requests: the first token
    of each request and its position, unless the rotation has positions."""
    q_out, k_out = q, k
    if not inplace:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    table, flags = rope_table(rope, k)
    if requests[0] is not None:
        flags |= FROM_FIRST
    transform = QueryTransform(q, q_out, table, flags, rope.positions)
    call = CacheWriteCall(function, k, None, None, None, True, ROWS, cu_seqlens=requests[0], kv_lens=requests[1])
    return without_v(call._replace(k_cache=k_out[None], transform=transform)), k_out


def serve_rotation(call: CacheWriteCall, k_out: torch.Tensor) -> Pair:
    """Run a call of `_rotation` and return rotated Q and K."""
    serve(call)
    return call.transform.q_out, k_out  # type: ignore[union-attr]


def requests_call(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any, interleave: Any, rope_scale: Any, rope_theta: Any, *,
    llama31: Any = None, inplace: bool = False,
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call of `apply_rope` and its output for K."""
    rope = _angles(q, k, rotary_dim, interleave, rope_scale, rope_theta, llama31)
    requests = check_strided("indptr", indptr, 1), check_strided("offsets", offsets, 1)
    return _rotation(ROPE, q, k, rope, inplace, requests)


def positions_call(
    q: Any, k: Any, pos_ids: Any, rotary_dim: Any, interleave: Any, rope_scale: Any, rope_theta: Any, *,
    llama31: Any = None, inplace: bool = False,
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call of `apply_rope_pos_ids` and its output for K."""
    rope = _angles(q, k, rotary_dim, interleave, rope_scale, rope_theta, llama31)
    return _rotation(ROPE, q, k, rope._replace(positions=check_strided("pos_ids", pos_ids, 1)), inplace)


def llama31_requests_call(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any, interleave: Any, rope_scale: Any, rope_theta: Any,
    low_freq_factor: Any, high_freq_factor: Any, old_context_len: Any, *, inplace: bool = False,
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call of `apply_llama31_rope` and its output for K."""
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    return requests_call(
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, llama31=llama31, inplace=inplace
    )


def llama31_positions_call(
    q: Any, k: Any, pos_ids: Any, rotary_dim: Any, interleave: Any, rope_scale: Any, rope_theta: Any,
    low_freq_factor: Any, high_freq_factor: Any, old_context_len: Any, *, inplace: bool = False,
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call of `apply_llama31_rope_pos_ids` and its output for K."""
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    return positions_call(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, llama31=llama31, inplace=inplace
    )


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
    return serve_rotation(*requests_call(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta))


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
    serve_rotation(*requests_call(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, inplace=True))


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
    return serve_rotation(*positions_call(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta))


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
    serve_rotation(*positions_call(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, inplace=True))


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
    return serve_rotation(*llama31_requests_call(
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len,
    ))  # fmt: skip


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
    serve_rotation(*llama31_requests_call(
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len, inplace=True,
    ))  # fmt: skip


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
    return serve_rotation(*llama31_positions_call(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len,
    ))  # fmt: skip


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
    serve_rotation(*llama31_positions_call(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len, inplace=True,
    ))  # fmt: skip


def checked_table(table: Any, dim: int, owner: str) -> torch.Tensor:
    """Return a table of cosines and sines, after a check of its columns against the elements of a row."""
    rotated = check_strided("cos_sin_cache", table, 2).shape[1]
    if not 0 < rotated <= dim:
        raise ValueError(f"cos_sin_cache: shape {tuple(table.shape)}, must have 1 to {dim} columns ({owner})")
    if rotated % ROTATED:
        raise NotImplementedError(f"cos_sin_cache: shape {tuple(table.shape)}, columns must be a multiple of {ROTATED}")
    return table


def table_call(
    positions: Any, query: Any, key: Any, head_size: Any, cos_sin_cache: Any, is_neox: Any, *, inplace: bool = False
) -> tuple[CacheWriteCall, torch.Tensor]:  # fmt: skip
    """Return the call of `apply_rope_with_cos_sin_cache` and its output for K, (N, H, head_size)."""
    size = check_integer("head_size", integer(head_size), 1)
    heads = []
    for name, t in (("query", query), ("key", key)):
        if check_strided(name, t, 2).shape[1] % size:
            shape = tuple(t.shape)
            raise ValueError(f"{name}: shape {shape}, the last dimension must be a multiple of head_size {size}")
        heads.append(t.unflatten(1, (t.shape[1] // size, size)))
    check_served("head_size", size)
    check_flag("is_neox", is_neox)
    positions = check_strided("positions", positions, 1)
    rope = RotaryEmbedding(positions, checked_table(cos_sin_cache, size, "head_size"), not is_neox)
    return _rotation(ROPE_CACHED, heads[0], heads[1], rope, inplace)


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
    q, k = serve_rotation(*table_call(positions, query, key, head_size, cos_sin_cache, is_neox))
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
    serve_rotation(*table_call(positions, query, key, head_size, cos_sin_cache, is_neox, inplace=True))
