"""vLLM's operators that write the caches of latent attention (MLA) and of its indexer.

Each is one launch of the kernel behind `append_latent`, and its docstring says what all of them promise. vLLM's names,
positions and layouts are kept; values are rounded once, from fp32, where vLLM's fused operator rounds cosines, sines,
each product and their sum to the model's type, and then quantises them.
"""

from typing import Any

import torch

from ..host.checks import UnknownName, check_flag, check_integer, check_operand, check_strided, listed
from ..host.scalars import dequantisation_scale, integer
from ..latent.call import LatentCall
from ..latent.checks import CONCAT, CONCAT_Q, FUSED, INDEX_CACHE, WIDE
from ..latent.op import serve
from ..latent.views import rows_view

RECORDS = {  # kv_cache_dtype -> record
    **dict.fromkeys(("auto", "bfloat16", "float16"), "rows"), **dict.fromkeys(("fp8", "fp8_e4m3"), "e4m3"),
    "fp8_ds_mla": "656", "nvfp4_ds_mla": "352",
}  # fmt: skip
UE8M0, EXPONENTS = "ue8m0", "mxfp8"


def record_of(value: Any) -> str:
    if not isinstance(value, str) or value not in RECORDS:
        raise UnknownName(f"kv_cache_dtype: {value!r}, must be one of {listed(RECORDS)}")
    return RECORDS[value]


def _part(t: Any) -> Any:
    """Return rows (N, R); they may have a dimension of one head."""
    if isinstance(t, torch.Tensor) and t.ndim == 3 and t.shape[1] == 1:
        return t.select(1, 0)
    return check_strided("k_pe", t, 2)


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str,
    scale: torch.Tensor, skip_scale: bool = False,
) -> None:  # fmt: skip
    """Write rows of latent attention to slots of a paged cache.

    Args:
        kv_c: fp16 or bf16 (N, 512); k_pe: (N, 64), (N, 1, 64), or (N, 0) for models without a rotated part; any row
            strides. N may exceed the slots; the rows behind them are ignored.
        kv_cache: (pages, P, 576) of kv_c's dtype; or bytes: (pages, P, 576) for fp8, (pages, P, 656) for fp8_ds_mla,
            (pages, P, 352) for nvfp4_ds_mla. Any P and page stride.
        slot_mapping: int32 or int64 (n,), page * P + row. A slot that is negative or past the cache is skipped.
        kv_cache_dtype: "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla".
        scale: fp32, one element: fp8 values are divided by it. skip_scale: True raises NotImplementedError.

    The scales of fp8_ds_mla are powers of two, as vLLM 0.33 writes them. Raises before anything is written: TypeError
    for a dtype; ValueError for a shape, stride, device or number; an unknown kv_cache_dtype is both a KeyError and a
    ValueError. vLLM's operator.

    >>> cache, slots = torch.zeros(2, 64, 656, dtype=torch.uint8), torch.tensor([70, -1])
    >>> concat_and_cache_mla(
    ...     torch.ones(2, 512).half(), torch.ones(2, 64).half(), cache, slots, "fp8_ds_mla", torch.ones(1)
    ... )
    >>> cache.any(-1).nonzero().tolist()
    [[1, 6]]
    """
    serve(concat_call(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale))


def concat_call(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: Any, scale: Any, skip_scale: Any = False
) -> LatentCall:
    """Return the call of `concat_and_cache_mla`."""
    check_flag("skip_scale", skip_scale)
    if skip_scale:
        raise NotImplementedError("skip_scale: True, not supported, must be False")
    record = record_of(kv_cache_dtype)
    check_operand("kv_c", kv_c, 2, WIDE, None)
    number, tensor = dequantisation_scale("scale", scale, kv_c, "kv_c", False)
    return LatentCall(
        CONCAT, record, kv_c, _part(k_pe), rows_view("kv_cache", kv_cache), slots=slot_mapping,
        scale=number, scale_ptr=tensor,
    )  # fmt: skip


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, cos_sin_cache: torch.Tensor,
    is_neox: bool, slot_mapping: torch.Tensor, kv_cache: torch.Tensor, kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Rotate q_pe and k_pe in place, and write rows of latent attention to slots of a paged cache; one launch.

    Args:
        positions: int32 or int64 (N,), rows of cos_sin_cache, (L, 64) fp32 or of kv_c's dtype: cosines, then sines. A
            token at another position is neither rotated nor written. is_neox: pairs are halves, not neighbours.
        q_pe: (N, Hq, 64); k_pe: (N, 64) or (N, 1, 64), of kv_c's dtype, any strides, the last 1. kv_cache_scale: the
            scale of `concat_and_cache_mla`.

    The other arguments, and errors, are as in `concat_and_cache_mla`. vLLM's operator.

    >>> q, k = torch.ones(1, 2, 64).half(), torch.ones(1, 64).half()
    >>> table = torch.cat([torch.zeros(8, 32), torch.ones(8, 32)], 1)
    >>> cache, zero = torch.zeros(1, 16, 576).half(), torch.tensor([0])
    >>> latent, scale = torch.ones(1, 512).half(), torch.ones(1)
    >>> concat_and_cache_mla_rope_fused(zero, q, k, latent, table, True, zero, cache, "auto", scale)
    >>> k[0, ::32].tolist(), cache[0, 0, 512::32].tolist()  # a quarter of a turn
    ([-1.0, 1.0], [-1.0, 1.0])
    """
    serve(fused_call(
        positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale
    ))  # fmt: skip


def fused_call(
    positions: Any, q_pe: Any, k_pe: Any, kv_c: Any, cos_sin_cache: Any, is_neox: Any, slot_mapping: Any,
    kv_cache: Any, kv_cache_dtype: Any, kv_cache_scale: Any,
) -> LatentCall:  # fmt: skip
    """Return the call of `concat_and_cache_mla_rope_fused`."""
    check_flag("is_neox", is_neox)
    for name, t, ndim in (("q_pe", q_pe, 3), ("cos_sin_cache", cos_sin_cache, 2), ("positions", positions, 1)):
        check_strided(name, t, ndim)
    record = record_of(kv_cache_dtype)
    check_operand("kv_c", kv_c, 2, WIDE, None)
    number, tensor = dequantisation_scale("kv_cache_scale", kv_cache_scale, kv_c, "kv_c", False)
    pe = _part(k_pe)
    return LatentCall(
        FUSED, record, kv_c, pe, rows_view("kv_cache", kv_cache), slots=slot_mapping, scale=number, scale_ptr=tensor,
        rope_table=cos_sin_cache, interleaved=not is_neox, rope_positions=positions, q_pe=q_pe, q_out=q_pe, pe_out=pe,
    )  # fmt: skip


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Join the parts of queries of latent attention: q_out = [ql_nope, q_pe].

    ql_nope: fp16 or bf16 (N, Hq, D), D a multiple of 16 up to 512. q_pe: (N, Hq, R), R even, up to 64. q_out: (N, Hq, D
    + R), or e4m3, which vLLM's has not; it may have more heads, which are not written. All of one dtype, any strides,
    the last 1. Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride or device;
    NotImplementedError for other D and R. vLLM's operator.

    >>> out = torch.empty(1, 2, 20).half()
    >>> concat_mla_q(torch.ones(1, 2, 16).half(), torch.zeros(1, 2, 4).half(), out)
    >>> out[0, 1, 14:18].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    serve(concat_q_call(ql_nope, q_pe, q_out))


def concat_q_call(ql_nope: Any, q_pe: Any, q_out: Any) -> LatentCall:
    """Return the call of `concat_mla_q`."""
    check_operand("ql_nope", ql_nope, 3, WIDE, None)
    heads = check_strided("q_pe", q_pe, 3).shape[1]
    if check_strided("q_out", q_out, 3).shape[1] > heads:
        q_out = q_out[:, :heads]
    return LatentCall(CONCAT_Q, "rows", None, None, None, q=ql_nope, q_pe=q_pe, q_out=q_out)


def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantise keys of an indexer to e4m3, with a scale for each, and write them to slots of a paged cache.

    Args:
        k: fp16 or bf16 (N, 128), any row stride. N may exceed the slots.
        kv_cache: bytes (pages, P, 132): a page has P rows of 128 values, then P fp32 scales. Any P and page stride.
        slot_mapping: int32 or int64 (n,), page * P + row. A slot that is negative or past the cache is skipped.
        quant_block_size: 128. kv_cache_dtype: "ue8m0" rounds scales up to powers of two; another name does not, and
            "mxfp8", by which vLLM stores exponents for Blackwell instead of fp32 scales, raises NotImplementedError.

    A scale is the largest magnitude of a row, at least 1e-4, over 448. Raises before anything is written: TypeError for
    a dtype; ValueError for a shape, stride or device; NotImplementedError for another quant_block_size. vLLM's
    operator; it calls the format of the scales `kv_cache_dtype`.

    >>> cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    >>> indexer_k_quant_and_cache(torch.ones(1, 128).half(), cache, torch.tensor([65]), 128, "ue8m0")
    >>> cache[1].view(-1)[64 * 128 :].view(torch.float32)[:2].tolist()
    [0.0, 0.00390625]
    """
    serve(index_cache_call(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype))


def index_cache_call(
    k: Any, kv_cache: Any, slot_mapping: Any, quant_block_size: Any, kv_cache_dtype: Any
) -> LatentCall:
    """Return the call of `indexer_k_quant_and_cache`."""
    size = check_integer("quant_block_size", integer(quant_block_size), 1)
    if size != 128:
        raise NotImplementedError(f"quant_block_size: {size}, must be 128")
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype: {kv_cache_dtype!r}, must be a str")
    if kv_cache_dtype == EXPONENTS:
        found = f"kv_cache_dtype: {kv_cache_dtype!r}, not supported"
        raise NotImplementedError(f"{found}, must be {UE8M0!r}, or another name for scales that are not rounded")
    check_operand("k", k, 2, WIDE, None)
    return LatentCall(
        INDEX_CACHE, "132", k, None, rows_view("kv_cache", kv_cache), slots=slot_mapping,
        power_of_two=kv_cache_dtype == UE8M0,
    )  # fmt: skip
