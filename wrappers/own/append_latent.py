"""The function that a layer with latent attention (MLA) calls: norm, rotary embedding, quantisation and append of its
key, its query, and the rows of its indexer."""

from typing import Any, NamedTuple

import torch

from cute_kernels.records import INDEX, RECORDS

from ..cache_write.rotation import RotaryEmbedding
from ..host.checks import check_flag, check_number, check_one_of, check_operand, check_strided
from ..host.scalars import dequantisation_scale, real
from ..latent.call import PAGES, SLOTS, LatentCall
from ..latent.checks import E4M3, INDEXER, INDEXER_THERE, LATENT, WIDE
from ..latent.op import serve
from ..latent.views import rows_view
from .append_qkv import BlockTable, PageLists

__all__ = ["IndexerRows", "LatentCache", "LatentNorm", "LatentOutputs", "LatentQuery", "append_latent"]
_FIRST = RotaryEmbedding._fields.index("rotary_dim")  # of the fields that say how angles are computed
_ANGLES, _DEFAULTS = RotaryEmbedding._fields[_FIRST:], RotaryEmbedding()[_FIRST:]


class LatentCache(NamedTuple):
    """A paged cache of latent attention. No other library has this class.

    cache: (pages, P, bytes) or (pages, P, 1, bytes), uint8, int8 or e4m3; any page stride. record: how the row of a
    token lies in it, with its bytes:

    | record | values | bytes of a token |
    | --- | --- | --- |
    | "rows" | D and R values of the rows' dtype, which is also the cache's | 2 (D + R) |
    | "e4m3" | D and R e4m3 values, divided by `scale` | D + R |
    | "656" | 512 e4m3; fp32 scales of 128; 64 values of 16 bits, not rotated ones are 0 | 512, 16, 128 |
    | "528_fp32" | 512 e4m3; fp32 scales of 128 | 512, 16 |
    | "528" | 512 e4m3, of which 64 may be rotated; ue8m0 scales of 32 | 512, 16 |
    | "528_planar" | the same; a page has all values, then all scales | 512; 16 |
    | "584" | 448 e4m3, 64 rotated values of 16 bits; a page has these rows, then ue8m0 scales of 64 | 576; 7 and 1 |
    | "352" | 512 e2m1; 64 rotated e4m3; e4m3 scales of 16, scale s at 8 (s % 4) + s // 4 | 256, 64, 32 |
    | "288" | 512 e2m1, of which 64 may be rotated; e4m3 scales of 16 | 256, 32 |

    rotated: "rows" and "e4m3": a cache (pages, P, R) of its own for the rotated part; cache is then (pages, P, D).
    scale: "e4m3": value = stored * scale, a positive float or an fp32 tensor of one element. power_of_two: fp32 scales
    are rounded up to powers of two, as DeepSeek's and vLLM's are; False: the largest magnitude over 448.

    >>> LatentCache(torch.zeros(2, 64, 656, dtype=torch.uint8), "656").power_of_two
    True
    """

    cache: torch.Tensor
    record: str = "rows"
    rotated: torch.Tensor | None = None
    scale: Any = 1.0
    power_of_two: bool = True


class LatentNorm(NamedTuple):
    """RMS norm of the latent: x / sqrt(mean(x^2) + eps) * (weight + offset). No other library has this class.

    weight: of the rows' dtype, (D,); or (D + R,): the norm is that of the latent and the rotated part together, before
    the rotation.

    >>> LatentNorm(torch.ones(512)).eps
    1e-06
    """

    weight: torch.Tensor
    eps: float = 1e-6
    offset: float = 0.0


class LatentQuery(NamedTuple):
    """The parts of a query, which are joined. No other library has this class.

    nope: (N, Hq, D), or None; rotated: (N, Hq, R), which `rope` rotates. out: (N, Hq, D + R), of their dtype or e4m3;
    without nope it may be `rotated`. None: a new tensor of `dtype`. dtype: that of the parts (None), or e4m3. scale: an
    8-bit query is divided by it.

    >>> LatentQuery(torch.zeros(1, 16, 512), torch.zeros(1, 16, 64)).scale
    1.0
    """

    nope: torch.Tensor | None
    rotated: torch.Tensor
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    scale: Any = 1.0


class IndexerRows(NamedTuple):
    """The rows of the indexer of sparse attention. No other library has this class.

    k: (N, 128). cache: (pages, P, 132) or (pages, P, 1, 132), uint8, int8 or e4m3: a page has P rows of 128 e4m3
    values, then P fp32 scales. places: a slot mapping; None: the places of the latent. weight, bias: of the layer norm
    of k, of its dtype, (128,); eps is added to the variance; without a bias an RMS norm; None: k is not normalised.
    rope: rotates the first values of k and q, as many as its cos_sin_cache has columns. power_of_two: scales of k are
    rounded up to powers of two.

    q: (N, Hi, 128), or None. It is rotated and quantised to e4m3 with a scale per row, a power of two, that is folded
    into the weights (N, Hi), fp32: weights_out = weights * scale * weight_scale. q_out, weights_out: tensors that
    receive them; None: new ones.

    >>> IndexerRows(torch.zeros(1, 128), torch.zeros(2, 64, 132, dtype=torch.uint8)).eps
    1e-06
    """

    k: torch.Tensor
    cache: torch.Tensor
    places: Any = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 1e-6
    rope: RotaryEmbedding | None = None
    power_of_two: bool = True
    q: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    weight_scale: float = 1.0
    q_out: torch.Tensor | None = None
    weights_out: torch.Tensor | None = None


class LatentOutputs(NamedTuple):
    """The outputs of `append_latent` that are no caches, None where there is none. No other library has this class.

    query: (N, Hq, D + R). index_q: (N, Hi, 128) e4m3. index_weights: (N, Hi) fp32.

    >>> LatentOutputs().query is None
    True
    """

    query: torch.Tensor | None = None
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None


def append_latent(
    latent: torch.Tensor | None, rotated: torch.Tensor | None, cache: LatentCache | None,
    places: "torch.Tensor | PageLists | BlockTable", norm: LatentNorm | None = None,
    rope: RotaryEmbedding | None = None, query: LatentQuery | None = None, index: IndexerRows | None = None,
    rotated_out: torch.Tensor | None = None,
) -> LatentOutputs:  # fmt: skip
    """Write rows of latent attention to a paged cache, join the parts of a query, and write the rows of an indexer; one
    launch.

    Everything is computed in fp32 and rounded once. No other library has this function.

    Args:
        latent: fp16 or bf16 (N, D), any row stride. None: the rows of the indexer alone are written; then the other
            arguments but places and index are None. D is 512, of records "584", "528" and "288" 448 (the latter two
            also take 512, all of it rotated by the caller or none), else any multiple of 16 up to 512.
        rotated: (N, R) of the same dtype, R 64, else any even number up to 64. None: the rows have no such part.
        cache: a `LatentCache`.
        places: where the rows go: a slot mapping, int32 or int64 (n,), page * P + row of the first n tokens; or
            `PageLists`; or a `BlockTable`. Its tensors are int32 or int64.
        norm: `LatentNorm` of the latent. rope: `RotaryEmbedding` of `rotated` and of the query's, with a cos_sin_cache
            of fp32 or of the rows' dtype that has R columns.
        query: `LatentQuery`. index: `IndexerRows`. rotated_out: (N, R), receives the rotated part; may be `rotated`.

    The row of a token is not written if its slot or position is negative, or past the cache or the pages of its
    request, or if the position of its rotation is negative or no row of cos_sin_cache; it is written whole or not at
    all. In the latter case its query and rotated part are not written either. No value of any tensor makes the call
    access memory outside its tensors. Values saturate; NaN stays NaN.

    Returns a `LatentOutputs`. Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride,
    device or number; NotImplementedError if no kernel serves the call.

    >>> cache = torch.zeros(1, 4, 656, dtype=torch.uint8)  # a page of 4 rows
    >>> latent, rotated = torch.ones(2, 512).bfloat16(), torch.ones(2, 64).bfloat16()
    >>> _ = append_latent(latent, rotated, LatentCache(cache, "656"), torch.tensor([3, -1]))
    >>> cache[0, :, 512:528].view(torch.float32)[3].tolist()  # the scales of the second token's row are those of 1
    [0.00390625, 0.00390625, 0.00390625, 0.00390625]
    """
    call, outputs = append_latent_call(latent, rotated, cache, places, norm, rope, query, index, rotated_out)
    serve(call)
    return outputs


def append_latent_call(
    latent: Any, rotated: Any, cache: Any, places: Any, norm: Any, rope: Any, query: Any, index: Any,
    rotated_out: Any,
) -> tuple[LatentCall, LatentOutputs]:  # fmt: skip
    """Return the call of `append_latent`, and its outputs."""
    if latent is None and index is not None:
        others = (("rotated", rotated), ("cache", cache), ("norm", norm), ("rope", rope), ("query", query),
                  ("rotated_out", rotated_out))  # fmt: skip
        for name, value in others:
            if value is not None:
                raise ValueError(f"{name}: {type(value).__name__}, must be None without latent")
        check_class("index", index, IndexerRows)
        call, index_q, index_weights = index_call(index, places_of("places", places), INDEXER_THERE)
        return call, LatentOutputs(None, index_q, index_weights)
    if cache.__class__ is not LatentCache:
        raise TypeError(f"cache: {type(cache).__name__}, must be a LatentCache")
    check_class("norm", norm, LatentNorm)
    check_class("query", query, LatentQuery)
    check_class("index", index, IndexerRows)
    record = cache.record
    if not isinstance(record, str) or record == INDEX or record not in RECORDS:
        allowed = ", ".join(name for name in RECORDS if name != INDEX)
        raise ValueError(f"cache.record: {record!r}, must be one of {allowed}")
    check_flag("cache.power_of_two", cache.power_of_two)
    found = places_of("places", places)
    scale, scale_ptr = dequantisation_scale("cache.scale", cache.scale, latent, "latent", False)
    if record != "e4m3" and (scale != 1.0 or scale_ptr is not None):
        check_unscaled("cache.scale", scale, scale_ptr, f"with record {record}")
    given = found | _rope(rope, "rope")
    if norm is not None:
        given["weight"] = check_strided("norm.weight", norm.weight, 1)
        given["norm_eps"], given["norm_offset"] = epsilon("norm.eps", norm.eps), real(norm.offset)
        if norm.offset != 0.0:
            check_number("norm.offset", given["norm_offset"])
    out = index_q = index_weights = None
    if query is not None:
        out = query_output(query, latent)
        q_scale, q_scale_ptr = dequantisation_scale("query.scale", query.scale, latent, "latent", False)
        if (q_scale != 1.0 or q_scale_ptr is not None) and getattr(out, "dtype", E4M3) != E4M3:
            check_unscaled("query.scale", q_scale, q_scale_ptr, "for a query of 16 bits")
        given["q"], given["q_pe"], given["q_out"] = query.nope, query.rotated, out
        given["q_scale"], given["q_scale_ptr"] = q_scale, q_scale_ptr
    if index is not None:
        given["index"], index_q, index_weights = index_call(index, found, INDEXER)
    call = LatentCall(
        LATENT, cache.record, latent, rotated, rows_view("cache.cache", cache.cache),
        pe_cache=None if cache.rotated is None else rows_view("cache.rotated", cache.rotated), scale=scale,
        scale_ptr=scale_ptr, power_of_two=cache.power_of_two, pe_out=rotated_out, **given,
    )  # fmt: skip
    return call, LatentOutputs(out, index_q, index_weights)


def places_of(name: str, places: Any) -> dict[str, Any]:
    """Return the fields of a call that say where rows go."""
    if isinstance(places, torch.Tensor):
        return {"places": SLOTS, "slots": places}
    if isinstance(places, PageLists):
        if places.kv_indptr is None:
            check_strided(f"{name}.kv_indptr", None)
        return {"places": PAGES} | places._asdict()
    if isinstance(places, BlockTable):
        table, lens, starts = places
        return {"places": PAGES, "page_table": table, "kv_lens": lens, "cu_seqlens": starts}
    raise TypeError(f"{name}: {type(places).__name__}, must be a torch.Tensor, PageLists or BlockTable")


def _rope(rope: RotaryEmbedding | None, name: str) -> dict[str, Any]:
    """Return the fields of a call that say how rows are rotated."""
    if rope is None:
        return {}
    check_class(name, rope, RotaryEmbedding)
    check_flag(f"{name}.interleaved", rope.interleaved)
    if rope.cos_sin_cache is None:
        raise NotImplementedError(
            f"{name}.cos_sin_cache: None, must be a table: rows of latent attention have no angles"
        )
    for field, value, wanted in zip(_ANGLES, rope[_FIRST:], _DEFAULTS):
        if value is not wanted and (isinstance(value, torch.Tensor) or value != wanted):
            found = type(value).__name__ if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{name}.{field}: {found}, must be {wanted} with {name}.cos_sin_cache")
    return {"rope_table": rope.cos_sin_cache, "interleaved": rope.interleaved, "rope_positions": rope.positions}


def check_class(name: str, value: Any, wanted: type) -> None:
    """Check for an instance of a class, or None."""
    if value is not None and value.__class__ is not wanted:
        article = "an" if wanted.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name}: {type(value).__name__}, must be {article} {wanted.__name__} or None")


def check_unscaled(name: str, number: Any, tensor: torch.Tensor | None, where: str) -> None:
    """Refuse a scale that nothing would read."""
    if tensor is not None or number != 1.0:
        raise ValueError(f"{name}: {'a tensor' if tensor is not None else number}, must be 1.0 {where}")


def epsilon(name: str, value: Any) -> Any:
    """Return the number that a norm adds to the mean of squares."""
    number = real(value)
    if number.__class__ is not float or not 0.0 <= number <= 1.0:
        check_number(name, number)
    if number < 0:
        raise ValueError(f"{name}: {number}, must be at least 0")
    return number


def query_output(query: LatentQuery, latent: torch.Tensor) -> Any:
    """Return the output of a query, a new tensor unless one is given."""
    nope, rotated, out, dtype, _ = query
    if out is None or rotated is None:
        check_strided("query.rotated", rotated, 3)
        if nope is not None:
            check_strided("query.nope", nope, 3)
    if dtype is not None:
        check_one_of("query.dtype", dtype, (latent.dtype, E4M3))
    if out is not None:
        if dtype is not None and getattr(out, "dtype", dtype) != dtype:
            raise TypeError(f"query.dtype: {dtype}, must be None or that of query.out, {out.dtype}")
        return out
    width = rotated.shape[2] + (0 if nope is None else nope.shape[2])
    return torch.empty((*rotated.shape[:2], width), dtype=dtype or rotated.dtype, device=rotated.device)


def index_call(index: IndexerRows, places: dict[str, Any], function: str) -> tuple[LatentCall, Any, Any]:
    """Return the call of the rows of an indexer, and its outputs. places, function: of one without own places."""
    check_flag("index.power_of_two", index.power_of_two)
    check_operand("index.k", index.k, 2, WIDE, None)
    found = places
    if index.places is not None:
        found, function = {"places": SLOTS, "slots": check_strided("index.places", index.places, 1)}, INDEXER
    eps, weight_scale = epsilon("index.eps", index.eps), real(index.weight_scale)
    check_number("index.weight_scale", weight_scale)
    call = LatentCall(
        function, "132", index.k, None, rows_view("index.cache", index.cache), weight=index.weight, bias=index.bias,
        norm_eps=eps, power_of_two=index.power_of_two, **found, **_rope(index.rope, "index.rope"),
    )  # fmt: skip
    q, weights, q_out, weights_out = index.q, index.weights, index.q_out, index.weights_out
    if q is None:
        for name, value in (("weights", weights), ("q_out", q_out), ("weights_out", weights_out)):
            if value is not None:
                raise ValueError(f"index.{name}: given, must be None without index.q")
        check_unscaled("index.weight_scale", weight_scale, None, "without index.q")
        return call, None, None
    check_strided("index.q", q, 3)
    check_strided("index.weights", weights, 2)
    q_out = torch.empty(q.shape, dtype=E4M3, device=q.device) if q_out is None else q_out
    weights_out = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if weights_out is None else weights_out
    call = call._replace(
        q=q, q_pe=q[..., :0], q_out=q_out, weights=weights, weights_out=weights_out,
        weight_scale=weight_scale,
    )  # fmt: skip
    return call, q_out, weights_out
