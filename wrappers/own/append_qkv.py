"""The function that an engine's layer calls: norm, rotary embedding, quantisation and append in one launch."""

from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.rows import ROTATED

from ..attention.views import scale_sides, sides
from ..cache_write.call import PAGES, SLOTS, CacheWriteCall, QueryTransform
from ..cache_write.checks import QKV, SINGLE, STORED, WIDE, of_rows, query_dtypes
from ..cache_write.op import serve
from ..cache_write.rotation import RotaryEmbedding, rope_table
from ..host.checks import (
    FP32_LEAST,
    FP32_MOST,
    UnknownName,
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_strided,
)
from ..host.scalars import dequantisation_scale, integer, real

__all__ = [
    "BlockTable", "KVCacheTarget", "PageLists", "QueryOutput", "RMSNorm", "RotaryEmbedding", "append_qkv",
]  # fmt: skip


class KVCacheTarget(NamedTuple):
    """A paged KV cache, and how rows are quantised for it. No other library has this class.

    kv: (k, v), each (pages, P, H, D) "NHD" or (pages, H, P, D) "HND", or one tensor (pages, 2, ...): of the rows'
    dtype, e4m3, e5m2 or int8; or uint8 for packed NVFP4, last dimension D / 2. sf: scale factors of NVFP4 in the same
    layout, e4m3 or its bytes in uint8, last dimension D / 16; or, of e4m3, e5m2 or int8, fp32, one scale per token and
    head, without the last dimension: each row is divided by its largest magnitude over that of the type, which is
    stored. k_scale, v_scale: dequantisation scales, value = stored * scale: a positive float or an fp32 tensor of one
    element or of one per head; 1.0 if rows are not quantised, or have scales of their own. v_sf_interleaved: V's
    factors of 4 rows lie block by block, as Blackwell kernels read them.

    >>> KVCacheTarget(torch.zeros(2, 2, 16, 1, 64)).layout
    'NHD'
    """

    kv: Any
    layout: str = "NHD"
    sf: Any = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    v_sf_interleaved: bool = False


class PageLists(NamedTuple):
    """Places of tokens in page lists. The fields are as in `append_paged_kv_cache`. No other library has this class.

    >>> PageLists(*(torch.zeros(1, dtype=torch.int32) for _ in range(4))).kv_indptr.tolist()
    [0]
    """

    batch_indices: torch.Tensor  # (N,)
    positions: torch.Tensor  # (N,)
    kv_indices: torch.Tensor  # (M,)
    kv_indptr: torch.Tensor  # (B + 1,)


class BlockTable(NamedTuple):
    """Places of tokens in a block table: the tokens of a request are the last of its keys. No other library has this
    class.

    block_table: (B, M), the pages of each request. seq_lens: (B,), keys of each request, with these tokens.
    cu_seqlens_q: (B + 1,), the first token of each request.

    >>> BlockTable(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([3]), torch.tensor([0, 1])).seq_lens.tolist()
    [3]
    """

    block_table: torch.Tensor  # (B, M)
    seq_lens: torch.Tensor  # (B,), with these tokens
    cu_seqlens_q: torch.Tensor  # (B + 1,), first token of each request


class RMSNorm(NamedTuple):
    """RMS norm of Q and K per head: x / sqrt(mean(x^2) + eps) * (weight + offset). No other library has this class.

    q_weight, k_weight: of the rows' dtype, contiguous, (D,) or (heads, D); None: that operand has no norm. offset: 1.0
    for Gemma.

    >>> RMSNorm(torch.ones(64), torch.ones(64)).eps
    1e-06
    """

    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0


class QueryOutput(NamedTuple):
    """Where Q is written. No other library has this class.

    out: of q's shape; may be q. None: a new tensor of `dtype`. dtype: q's (None), or e4m3 or e5m2 with an fp8 cache of
    that dtype, e4m3 with an NVFP4 cache. scale: an 8-bit Q is divided by it; 1.0 for others.

    >>> QueryOutput(dtype=torch.float8_e4m3fn).scale
    1.0
    """

    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    scale: Any = 1.0


def _check_rope(rope: RotaryEmbedding, head_dim: int) -> None:
    """Check the flag and the numbers of `rope`; the tensors are checked with the call."""
    _, table, interleaved, rotary_dim, scale, theta, llama31 = rope
    if interleaved is not True and interleaved is not False:
        check_flag("rope.interleaved", interleaved)
    if table is not None:
        if not isinstance(table, torch.Tensor):
            check_strided("rope.cos_sin_cache", table, 2)
        if not (rotary_dim is None and llama31 is None and isinstance(scale, float) and isinstance(theta, float)
                and scale == 1.0 and theta == 1e4):  # fmt: skip
            _refuse_angles(rope)
        return
    dim = head_dim if rotary_dim is None else check_integer("rope.rotary_dim", integer(rotary_dim))
    if dim % ROTATED or not 0 < dim <= head_dim:
        allowed = f"must be a multiple of {ROTATED} from {ROTATED} to head_dim {head_dim}"
        raise ValueError(f"rope.rotary_dim: {rotary_dim}, {allowed}")
    _number("rope.theta", theta, True)
    _number("rope.scale", scale, True)
    if llama31 is not None:
        _check_llama31(llama31)


def _number(name: str, value: Any, positive: bool = False) -> float:
    """Return a number as a float, after a check."""
    if value.__class__ is float and FP32_LEAST <= value <= FP32_MOST:
        return value
    value = value if isinstance(value, int) else real(value)
    check_number(name, value, positive=positive)
    return float(value)


def _check_llama31(value: Any) -> None:
    """Check the numbers of Llama 3.1's rule."""
    name = "rope.llama31"
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        what = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: {what}, must be (low_freq_factor, high_freq_factor, old_context_len) or None")
    low, high, _ = (_number(f"{name}[{i}]", one, True) for i, one in enumerate(value))
    if low >= high:
        raise ValueError(f"{name}: {tuple(value)}, low_freq_factor must be below high_freq_factor")


def _refuse_angles(rope: RotaryEmbedding) -> None:
    """Raise on a number of `rope` that `cos_sin_cache` makes meaningless, unless it has its default value."""
    default = RotaryEmbedding()
    for field in ("rotary_dim", "scale", "theta", "llama31"):
        value, wanted = getattr(rope, field), getattr(default, field)
        if value is not wanted and not (value.__class__ in (int, float) and value == wanted):
            error = ValueError if value.__class__ in (int, float, tuple) else TypeError
            found = value if error is ValueError else type(value).__name__
            raise error(f"rope.{field}: {found}, must be {wanted} with rope.cos_sin_cache")


def _refuse_scale(name: str, value: Any, what: str) -> None:
    """Raise on a scale of values that are not quantised, unless it is 1."""
    if not isinstance(value, (int, float)) or value != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
        raise ValueError(f"{name}: {found}, must be 1.0: {what}")


def _refuse_scales(cache: KVCacheTarget, k: torch.Tensor, copied: bool) -> None:
    """Raise on a scale of rows that are not quantised. copied: rows of one byte may be given."""
    check_one_of("k: dtype", k.dtype, STORED if copied else WIDE)
    for field in ("k_scale", "v_scale"):
        _refuse_scale(f"cache.{field}", getattr(cache, field), f"rows of {k.dtype} are not quantised for this cache")


def _refuse_out(out: QueryOutput) -> None:
    """Raise on a field of `out` that is given, though there is no Q."""
    for field, wanted in NEW_OUTPUT._asdict().items():
        value = getattr(out, field)
        if value is not wanted and not (value.__class__ in (int, float) and value == wanted):
            found = value if isinstance(value, (int, float)) else type(value).__name__
            raise ValueError(f"out.{field}: {found}, must be {wanted} without q")


def _refuse_classes(cache: Any, norm: Any, rope: Any, out: Any) -> None:
    """Raise on an argument that is not of its class."""
    if not isinstance(cache, KVCacheTarget):
        raise TypeError(f"cache: {type(cache).__name__}, must be a KVCacheTarget")
    for name, value, wanted in (("norm", norm, RMSNorm), ("rope", rope, RotaryEmbedding), ("out", out, QueryOutput)):
        if value is not None and not isinstance(value, wanted):
            raise TypeError(f"{name}: {type(value).__name__}, must be a {wanted.__name__} or None")


def append_qkv(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, cache: KVCacheTarget,
    places: "torch.Tensor | PageLists | BlockTable", norm: RMSNorm | None = None, rope: RotaryEmbedding | None = None,
    out: QueryOutput | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Normalise and rotate Q and K, write K and V to a paged cache, quantised if it is, and return Q; one launch.

    Everything is computed in fp32 and rounded once. No other library has this function.

    Args:
        q, k, v: fp16 or bf16 (N, Hq, D), (N, H, D), (N, H, Dv), of one dtype, any strides, the last 1, such as views of
            one packed tensor. q may be None. D at most 512 with q, a norm or rope; a multiple of 16 for NVFP4. Without
            these, k and v may also have the cache's type of one byte.
        cache: a `KVCacheTarget`.
        places: where rows of K and V go: a slot mapping, int32 or int64 (n,), page * P + row of the first n tokens; or
            `PageLists`; or a `BlockTable`. Its tensors are int32 or int64.
        norm, rope, out: `RMSNorm`, `RotaryEmbedding`, `QueryOutput`.

    K and V of a token are not written if its slot or position is negative, or past the cache or the pages of its
    request; nor is any row of it if the position of its rotation is negative or no row of cos_sin_cache. No value of
    any tensor makes the call access memory outside its tensors. If several tokens have the same place, each of its
    elements is that of one of them. Values saturate in e4m3 and e5m2; NaN stays NaN.

    Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride, device or number;
    NotImplementedError if no kernel serves the call.

    >>> x, cache = torch.ones(2, 1, 16).half(), torch.zeros(1, 2, 4, 1, 16).half()  # 2 tokens; a page of 4 rows
    >>> rope = RotaryEmbedding(torch.tensor([0, 1]))
    >>> q = append_qkv(x, x, x, KVCacheTarget(cache), torch.tensor([3, -1]), rope=rope)
    >>> cache[0, 0, :, 0, 0].tolist(), round(q[1, 0, 0].item(), 2)  # K; and Q at position 1: cos(1) - sin(1)
    ([0.0, 0.0, 0.0, 1.0], -0.3)
    """
    call, kv, sf = append_call(q, k, v, cache, places, norm, rope, out)
    serve(call, kv, sf)
    transform = call.transform
    return None if transform is None else transform.q_out


def append_call(
    q: Any, k: Any, v: Any, cache: Any, places: Any, norm: Any, rope: Any, out: Any
) -> tuple[CacheWriteCall, Any, Any]:
    """Return the call of `append_qkv`, and its caches and scale factors as they were given: what `op.serve` takes."""
    if not (isinstance(cache, KVCacheTarget) and isinstance(norm, NORMS) and isinstance(rope, ROPES)
            and isinstance(out, OUTS)):  # fmt: skip
        _refuse_classes(cache, norm, rope, out)
    if not isinstance(k, torch.Tensor) or k.dim() != 3:
        check_strided("k", k, 3)
    kv, layout, sf, k_scale, v_scale, interleaved = cache
    if layout != "NHD" and layout != "HND":
        raise UnknownName(f"cache.layout: {layout!r}, must be 'HND' or 'NHD'")
    if interleaved is not True and interleaved is not False:
        check_flag("cache.v_sf_interleaved", interleaved)
    if interleaved and sf is None:
        raise ValueError(f"cache.v_sf_interleaved: {interleaved}, must be False without cache.sf")
    k_cache, v_cache = sides("cache.kv", kv, layout)
    k_sf, v_sf = (None, None) if sf is None else scale_sides("cache.sf", sf, layout)
    form, slots = PAGES, None
    requests: Any = (None,) * 4
    table: Any = (None,) * 3
    if isinstance(places, PageLists):
        requests = places
        if places.kv_indptr is None:
            check_strided("places.kv_indptr", None)
    elif isinstance(places, BlockTable):
        table = places
    elif isinstance(places, torch.Tensor):
        form, slots = SLOTS, places
    else:
        raise TypeError(f"places: {type(places).__name__}, must be a torch.Tensor, PageLists or BlockTable")
    by_token = of_rows(k_sf, k_cache)
    multiplies = sf is not None and not by_token
    k_number, k_ptr = dequantisation_scale("cache.k_scale", k_scale, k, "k", multiplies, True)
    v_number, v_ptr = dequantisation_scale("cache.v_scale", v_scale, k, "k", multiplies, True)
    copied = q is None and norm is None and rope is None and not by_token
    if by_token:
        for field in ("k_scale", "v_scale"):
            _refuse_scale(f"cache.{field}", getattr(cache, field), "cache.sf has a scale for each row")
        if interleaved:
            raise ValueError("cache.v_sf_interleaved: True, must be False: cache.sf has a scale for each row")
    if sf is None and (getattr(k_cache, "dtype", None) == k.dtype or k.dtype in SINGLE):
        if k_ptr is not None or v_ptr is not None or k_number != 1.0 or v_number != 1.0:
            _refuse_scales(cache, k, copied)
    transform = None
    if q is None and out is not None:
        _refuse_out(out)
    if not copied:
        transform = _transform(q, k, k_cache, norm or NO_NORM, rope, out or NEW_OUTPUT)
    call = CacheWriteCall(
        QKV, k, v, k_cache, v_cache, layout == "NHD", form, slots, requests[0], requests[1], table[0], requests[2],
        requests[3], None, table[2], table[1], k_number, v_number, k_ptr, v_ptr, k_sf, v_sf, interleaved, transform,
    )  # fmt: skip
    return call, kv, sf


def _transform(
    q: Any, k: torch.Tensor, k_cache: Any, norm: RMSNorm, rope: RotaryEmbedding | None, out: QueryOutput
) -> QueryTransform:
    """Return the transform of a call, with a new output for Q unless one is given."""
    result, dtype, scale = out
    if q is None:
        if norm.q_weight is not None:
            raise ValueError(f"norm.q_weight: {type(norm.q_weight).__name__}, must be None without q")
    elif result is None:
        if not isinstance(q, torch.Tensor):
            check_strided("q", q, 3)
        if dtype is not None and dtype not in query_dtypes(k, k_cache):
            check_one_of("k: dtype", k.dtype, WIDE)
            allowed = ", ".join(map(str, query_dtypes(k, k_cache)))
            raise TypeError(f"out.dtype: {dtype!r}, must be None or one of {allowed}")
        result = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    elif dtype is not None and isinstance(result, torch.Tensor) and dtype != result.dtype:
        raise TypeError(f"out.dtype: {dtype!r}, must be None or that of out.out, {result.dtype}")
    table, flags, positions = None, 0, None
    if rope is not None:
        _check_rope(rope, k.shape[2])
        table, flags = rope_table(rope, k)
        positions = rope.positions
    number, tensor = dequantisation_scale("out.scale", scale, k, "k", False, True)
    if (tensor is not None or number != 1.0) and getattr(result, "dtype", None) in WIDE:
        _refuse_scale("out.scale", scale, "only an 8-bit Q is divided by it")
    eps, offset = norm.eps, norm.offset
    if not (isinstance(eps, float) and isinstance(offset, float)):
        eps, offset = _number("norm.eps", eps), _number("norm.offset", offset)
    return QueryTransform(q, result, table, flags, positions, norm.q_weight, norm.k_weight, eps, offset, number, tensor)


NO_NORM, NEW_OUTPUT = RMSNorm(), QueryOutput()
NORMS, ROPES, OUTS = (RMSNorm, type(None)), (RotaryEmbedding, type(None)), (QueryOutput, type(None))
