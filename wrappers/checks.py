"""Validation of `trtllm_batch_context_with_kv_cache`: the cold half of the wrapper.

`validate` looks only at types, shapes, dtypes, strides and devices, never at device values. Rank, shape and stride
raise ValueError, dtype TypeError, unsupported combinations NotImplementedError; every message names the argument, its
value and what is allowed. `kernel_request` adds what holds only where a compiled kernel runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.problem import Problem as Request

from . import fp4
from .reference import PagedProblem

MOST_ROWS = 1 << 30  # query rows of a KV head times heads of its group, in decoding: `cute_kernels.device.divisor`
KERNEL_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
E4M3 = torch.float8_e4m3fn
KV_DTYPES = {E4M3: "e4m3", torch.uint8: "nvfp4"}  # of kernels that split, beside the query's
PAGE_SIZES = tuple(1 << i for i in range(3, 9))
TMA_BYTES = 16  # alignment of a TMA descriptor's base address and of every stride but the last


class UnknownName(KeyError, ValueError):
    """An unknown enum string; callers of FlashInfer catch KeyError, everyone else ValueError."""

    __str__ = ValueError.__str__


class Call(NamedTuple):
    """The public function's arguments as given."""

    query: Any
    kv_cache: Any
    workspace_buffer: Any
    block_tables: Any
    seq_lens: Any
    max_q_len: Any
    max_kv_len: Any
    bmm1_scale: Any
    bmm2_scale: Any
    batch_size: Any
    cum_seq_lens_q: Any
    cum_seq_lens_kv: Any
    window_left: Any = -1
    out: Any = None
    out_dtype: Any = None
    o_sf_scale: Any = None
    o_sf_vec_size: Any = None
    kv_layout: Any = "HND"
    enable_pdl: Any = None
    sinks: Any = None
    kv_block_scales: Any = None
    skip_softmax_threshold_scale_factor: Any = None
    uses_shared_paged_kv_idx: Any = True
    kv_cache_sf: Any = None
    causal: Any = True
    lse: Any = None
    return_lse: Any = False
    multi_ctas_kv_counter_buffer: Any = None
    use_fp16_softmax: Any = None
    uses_spcompress: Any = None
    logits_soft_cap: Any = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Call":
        """From a mapping that may hold more, such as `locals()`."""
        return cls(*(values[name] for name in cls._fields))


@dataclass(frozen=True)
class Checked:
    """A valid call: the problem in one layout, and where the result goes (None: to be allocated)."""

    problem: PagedProblem
    out: "torch.Tensor | fp4.FP4Tensor | None"
    out_dtype: "torch.dtype | str"
    lse: torch.Tensor | None
    return_lse: bool
    o_sf_scale: float | None
    max_q_len: int
    skips: bool


def validate(call: Call) -> Checked:
    """The call in normal form; raises on the first argument that does not fit."""
    q = _tensor("query", call.query, 3, None)
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"query: device {q.device}, must be cpu or cuda")
    check_one_of("query: dtype", q.dtype, (torch.bfloat16, torch.float16, E4M3))
    check_last_stride("query", q)
    k, v = _split("kv_cache", call.kv_cache, call.kv_layout, q.device)
    if call.kv_block_scales is not None and call.kv_cache_sf is not None:
        raise ValueError("kv_cache_sf: alias of kv_block_scales, only one of the two may be given")
    name = "kv_cache_sf" if call.kv_cache_sf is not None else "kv_block_scales"
    scales = call.kv_cache_sf if call.kv_cache_sf is not None else call.kv_block_scales
    k_scales, v_scales = _block_scales(name, scales, k, v, call.kv_layout)
    _heads(q, k, v)
    table, kv_lens, cu_seqlens_q = _batch(call, q)
    _hints(call)
    dim_vo = v.shape[-1] * (2 if v.dtype == torch.uint8 else 1)
    out_dtype = _output(call, q, dim_vo)
    return Checked(
        PagedProblem(
            q,
            k,
            v,
            table,
            kv_lens,
            cu_seqlens_q,
            check_scale("bmm1_scale", call.bmm1_scale, q.device),
            check_scale("bmm2_scale", call.bmm2_scale, q.device),
            bool(call.causal),
            check_integer("window_left", call.window_left),
            _soft_cap(call.logits_soft_cap),
            _per_head("sinks", call.sinks, q),
            k_scales,
            v_scales,
        ),
        call.out,
        out_dtype,
        _lse(call.lse, q),
        bool(call.return_lse),
        None if call.o_sf_scale is None else float(call.o_sf_scale),
        check_integer("max_q_len", call.max_q_len, 0),
        bool(call.skip_softmax_threshold_scale_factor),
    )


def kernel_request(c: Checked, split: bool = False, invariant: bool = False) -> Request:
    """What the call asks of a compiled kernel; raises where no kernel can ever read these tensors."""
    p = c.problem
    if p.q.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"query: {p.q.dtype} has no CUDA kernel yet; {listed(KERNEL_DTYPES)} have")
    for name, dtype, more in (("kv_cache", p.k.dtype, KV_DTYPES), ("out_dtype", c.out_dtype, (E4M3,))):
        allowed = (p.q.dtype, *more) if split else (p.q.dtype,)
        if dtype not in allowed:
            what = "decode" if split else "prefill"
            raise NotImplementedError(f"{name}: {dtype} has no CUDA kernel of {what} yet; {listed(allowed)} have")
    if c.skips and not split:
        raise NotImplementedError("skip_softmax_threshold_scale_factor: no CUDA kernel of prefill has it, None or 0")
    if isinstance(p.scale, float) and not p.scale > 0:
        raise NotImplementedError(
            f"bmm1_scale: {p.scale}; CUDA kernels take the maximum before they scale: positive only"
        )
    (tokens, heads), group = p.q.shape[:2], p.q.shape[1] // p.k.shape[1]
    if split and tokens * group * group >= MOST_ROWS:
        raise NotImplementedError(
            f"query: {tokens} tokens of {heads} heads, {group} a KV head; a CUDA kernel of decode divides exactly "
            f"where tokens x {group} x {group} is below {MOST_ROWS}"
        )
    page_size = p.k.shape[2]
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"kv_cache: page size {page_size}; CUDA kernels have {listed(PAGE_SIZES)}")
    for name, t in (("query", p.q), ("kv_cache (K)", p.k), ("kv_cache (V)", p.v), ("out", c.out)):
        if isinstance(t, torch.Tensor):
            _tma(name, t)
    for name, t in (("kv_cache_sf (K)", p.k_scales), ("kv_cache_sf (V)", p.v_scales)):
        if t is not None:
            _tma(name, t, t.shape[3] if t.shape[3] in (4, 8, 16) else 4)
    q = KERNEL_DTYPES[p.q.dtype]
    return Request(
        q=q,
        kv=KV_DTYPES.get(p.k.dtype, q),
        out="e4m3" if c.out_dtype == E4M3 else q,
        head_dim_qk=p.q.shape[2],
        head_dim_vo=p.v.shape[3] * (1 if p.v_scales is None else 2),
        page_size=page_size,
        group=group,
        causal=p.causal,
        window=p.window_left >= 0,
        soft_cap=p.soft_cap > 0,
        rows=1 if invariant else min(c.max_q_len, p.q.shape[0]),  # other requests' tokens count
        phase="decode" if split else "prefill",
    )


def listed(values: Any) -> str:
    return ", ".join(str(v) for v in values)


def check_one_of(what: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise TypeError(f"{what} {value}, must be one of {listed(allowed)}")


def _tensor(name: str, value: Any, ndim: int, device: torch.device | None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}, must be a torch.Tensor")
    if value.ndim != ndim:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, must have {ndim} dimensions")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: device {value.device}, must be the query's, {device}")
    return value


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, must be {shape} ({why})")


def check_last_stride(name: str, t: torch.Tensor) -> None:
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"{name}: stride {t.stride()}, the last must be 1")


def _tma(name: str, t: torch.Tensor, size: int = TMA_BYTES) -> None:
    if t.data_ptr() % size:
        raise ValueError(f"{name}: address {t.data_ptr():#x}, must be a multiple of {size} bytes")
    unit = size // t.element_size()
    if any(stride % unit for stride in t.stride()[:-1]):
        raise ValueError(f"{name}: strides {t.stride()} (logical order), all but the last must be multiples of {unit}")


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r}, must be an int")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, must be at least {least}")
    return value


def _split(name: str, value: Any, layout: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as logical (pages, Hkv, P, D) views."""
    if layout not in ("HND", "NHD"):
        raise UnknownName(f"kv_layout: {layout!r}, must be 'HND' or 'NHD'")
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name}: a tuple of {len(value)}, must be (k, v)")
        k, v = (_tensor(f"{name} ({which})", t, 4, device) for which, t in zip("KV", value, strict=True))
    else:
        both = _tensor(name, value, 5, device)
        if both.shape[1] not in (1, 2):
            raise ValueError(f"{name}: shape {tuple(both.shape)}, the second dimension must be 1 or 2")
        k, v = both[:, 0], both[:, -1]
    if k.dtype != v.dtype:
        raise TypeError(f"{name}: K is {k.dtype} and V {v.dtype}, must be the same")
    for which, t in (("K", k), ("V", v)):
        check_last_stride(f"{name} ({which})", t)
    return (k, v) if layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))


def _block_scales(
    name: str, value: Any, k: torch.Tensor, v: torch.Tensor, layout: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """NVFP4 scales as logical (pages, Hkv, P, D / 16) views, present exactly where the cache is packed."""
    if (k.dtype == torch.uint8) != (value is not None):
        need = "required" if value is None else "must be None"
        raise ValueError(f"{name}: {need} where kv_cache is {k.dtype} (NVFP4 caches are torch.uint8)")
    if value is None:
        return None, None
    k_scales, v_scales = _split(name, value, layout, k.device)
    for which, scales, data in (("K", k_scales, k), ("V", v_scales, v)):
        check_one_of(f"{name} ({which}): dtype", scales.dtype, (E4M3,))
        shape = (*data.shape[:3], data.shape[3] * 2 // fp4.BLOCK)
        check_shape(f"{name} ({which}, logical HND)", scales, shape, "one e4m3 scale per 16 elements")
    return k_scales, v_scales


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Agreement of query and caches, all in logical order."""
    allowed = (q.dtype, E4M3, torch.uint8)
    check_one_of(f"kv_cache: with query {q.dtype}, dtype", k.dtype, allowed)
    packed = 2 if k.dtype == torch.uint8 else 1
    pages, kv_heads, page_size, dim = k.shape
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"kv_cache: K {tuple(k.shape)} and V {tuple(v.shape)} may differ in the last dimension only")
    if dim * packed != q.shape[2]:
        raise ValueError(f"kv_cache: K has head_dim {dim * packed}, must be the query's, {q.shape[2]}")
    if page_size == 0 or (kv_heads == 0 and q.shape[1] > 0):
        raise ValueError(f"kv_cache: shape {tuple(k.shape)}, needs at least one head and one row a page")
    if kv_heads and q.shape[1] % kv_heads:
        raise ValueError(f"query: {q.shape[1]} heads, must be a multiple of kv_cache's {kv_heads}")


def _batch(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page table (B, 2, M), kv lengths (B,), query offsets (B + 1,)."""
    kv_lens = _tensor("seq_lens", call.seq_lens, 1, q.device)
    check_one_of("seq_lens: dtype", kv_lens.dtype, (torch.int32, torch.uint32))
    check_last_stride("seq_lens", kv_lens)
    batch = kv_lens.shape[0]
    if check_integer("batch_size", call.batch_size, 0) != batch:
        raise ValueError(f"batch_size: {call.batch_size}, seq_lens has {batch} entries")
    offsets = _tensor("cum_seq_lens_q", call.cum_seq_lens_q, 1, q.device)
    check_one_of("cum_seq_lens_q: dtype", offsets.dtype, (torch.int32,))
    check_shape("cum_seq_lens_q", offsets, (batch + 1,), "batch_size + 1")
    check_last_stride("cum_seq_lens_q", offsets)
    shared = bool(call.uses_shared_paged_kv_idx)
    table = _tensor("block_tables", call.block_tables, 2 if shared else 3, q.device)
    check_one_of("block_tables: dtype", table.dtype, (torch.int32,))
    width = table.shape[-1]
    check_shape("block_tables", table, (batch, width) if shared else (batch, 2, width), f"{shared=} page indices")
    check_last_stride("block_tables", table)
    return table.unsqueeze(1).expand(-1, 2, -1) if shared else table, kv_lens, offsets


def _hints(call: Call) -> None:
    """Refuse hints that ask for other semantics."""
    factor = call.skip_softmax_threshold_scale_factor
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
        raise TypeError(f"skip_softmax_threshold_scale_factor: {factor!r}, must be a float or None")
    if factor is not None and not 0 <= factor < math.inf:
        raise ValueError(f"skip_softmax_threshold_scale_factor: {factor}, must be None or at least 0, and finite")
    if call.use_fp16_softmax:
        raise NotImplementedError("use_fp16_softmax: the softmax is computed in fp32, must be None or False")
    if call.uses_spcompress:
        raise NotImplementedError("uses_spcompress: not supported, must be None or False")


def check_scale(name: str, value: Any, device: torch.device) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        check_one_of(f"{name}: dtype", value.dtype, (torch.float32,))
        if value.numel() != 1:
            raise ValueError(f"{name}: shape {tuple(value.shape)}, must have one element")
        if value.device != device:
            raise ValueError(f"{name}: device {value.device}, must be the query's, {device}")
        return value.reshape(1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r}, must be a float or a float32 tensor of one element")
    return float(value)


def _soft_cap(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"logits_soft_cap: {value!r}, must be a float or None")
    if not 0 <= value < math.inf:
        raise ValueError(f"logits_soft_cap: {value}, must be None, 0 (off) or positive and finite")
    return float(value)


def _per_head(name: str, value: Any, q: torch.Tensor) -> torch.Tensor | None:
    if value is None:
        return None
    t = _tensor(name, value, 1, q.device)
    check_one_of(f"{name}: dtype", t.dtype, (torch.float32,))
    check_shape(name, t, (q.shape[1],), "one value a query head")
    check_last_stride(name, t)
    return t


def _lse(value: Any, q: torch.Tensor) -> torch.Tensor | None:
    if value is None:
        return None
    t = _tensor("lse", value, 2, q.device)
    check_one_of("lse: dtype", t.dtype, (torch.float32,))
    check_shape("lse", t, (q.shape[0], q.shape[1]), "tokens, query heads")
    return t


def output_dtype(call: Call) -> "torch.dtype | str":
    """out_dtype, else out's dtype, else the query's."""
    if call.out_dtype is not None:
        return call.out_dtype
    return call.query.dtype if call.out is None else call.out.dtype


def _output(call: Call, q: torch.Tensor, dim_vo: int) -> "torch.dtype | str":
    """The output's dtype after checking out, out_dtype, o_sf_scale and o_sf_vec_size against each other."""
    if call.out is not None and not isinstance(call.out, (torch.Tensor, fp4.FP4Tensor)):
        raise TypeError(f"out: {type(call.out).__name__}, must be a torch.Tensor or FP4Tensor")
    dtype = output_dtype(call)
    if isinstance(dtype, str) and dtype != "nvfp4":
        raise ValueError(f"out_dtype: {dtype!r}, the only string is 'nvfp4'")
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"out_dtype: {dtype!r}, must be a torch.dtype or 'nvfp4'")
    shape = (q.shape[0], q.shape[1], dim_vo)
    if dtype == "nvfp4":
        _nvfp4_output(call, shape, q.device)
        return dtype
    allowed = tuple(dict.fromkeys((q.dtype, torch.float16, torch.bfloat16, E4M3)))
    if dtype not in allowed:
        raise ValueError(f"out_dtype: {dtype}, must be one of {listed(allowed)} or 'nvfp4'")
    if call.o_sf_scale is not None:
        raise ValueError(f"o_sf_scale: {call.o_sf_scale}, must be None unless the output is nvfp4")
    if call.o_sf_vec_size is not None:
        raise ValueError(f"o_sf_vec_size: {call.o_sf_vec_size}, must be None unless the output is nvfp4")
    if call.out is not None:
        out = _tensor("out", call.out, 3, q.device)
        check_one_of("out: dtype", out.dtype, (dtype,))
        check_shape("out", out, shape, "tokens, query heads, V's head_dim")
        check_last_stride("out", out)
    return dtype


def _nvfp4_output(call: Call, shape: tuple[int, int, int], device: torch.device) -> None:
    if isinstance(call.o_sf_scale, bool) or not isinstance(call.o_sf_scale, (int, float)):
        raise TypeError(f"o_sf_scale: {call.o_sf_scale!r}, nvfp4 output needs a float")
    if not 0 < call.o_sf_scale < math.inf:
        raise ValueError(f"o_sf_scale: {call.o_sf_scale}, must be positive and finite")
    if call.o_sf_vec_size not in (None, fp4.BLOCK):
        raise ValueError(f"o_sf_vec_size: {call.o_sf_vec_size}, must be None or {fp4.BLOCK}")
    if shape[1] * shape[2] % fp4.BLOCK or shape[2] % 2:
        raise ValueError(f"out: rows of {shape[1:]} elements, nvfp4 needs a multiple of {fp4.BLOCK}")
    if call.out is None:
        return
    if not isinstance(call.out, fp4.FP4Tensor):
        raise ValueError(f"out: a {call.out.dtype} tensor, out_dtype 'nvfp4' needs an FP4Tensor")
    data = _tensor("out.data", call.out.data, 3, device)
    check_shape("out.data", data, (*shape[:2], shape[2] // 2), "two values a byte")
    scale = _tensor("out.scale", call.out.scale, 2, device)
    columns = fp4.round_up(shape[1] * shape[2] // fp4.BLOCK, fp4.SCALE_TILE[1])
    check_shape("out.scale", scale, (scale.shape[0], columns), "one column per 16 elements of a row, rounded up to 4")
    if not scale.is_contiguous():
        raise ValueError(f"out.scale: strides {scale.stride()}, must be contiguous")
