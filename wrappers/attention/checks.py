"""Validation of an attention problem, in the words of the function that was called.

`validate` looks only at types, shapes, dtypes, strides and devices, never at device values. Rank, shape and stride
raise ValueError, dtype TypeError; every message names the argument, its value and what is allowed. What a kernel can do
is said by `dispatch`; `kernel_tensors` adds what compiled code wants of the tensors themselves. Outputs may share no
byte with another tensor of the call: they are compared with the query and each other at every call, with all tensors
at a call's first form, or where CUTE_KERNELS_CHECK is 1.
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import fp4
from ..checks import (
    INF,
    NUMBERS,
    check_apart,
    check_flag,
    check_integer,
    check_last_stride,
    check_memory,
    check_number,
    check_one_of,
    check_operand,
    check_optional_flag,
    check_shape,
    check_strided,
    listed,
)
from ..scalars import OR_TENSOR, check_scale
from .problem import Problem, Rope

SIGNATURES: dict[str, dict[str, str]] = {}  # public function -> field of Problem -> its name there, where it differs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUERIES = (torch.bfloat16, torch.float16, E4M3, E5M2)
CACHES = {  # query -> K and V; torch.uint8: packed NVFP4
    torch.bfloat16: (torch.bfloat16, E4M3, E5M2, torch.uint8),
    torch.float16: (torch.float16, E4M3, E5M2, torch.uint8),
    E4M3: (E4M3, E5M2, torch.uint8),
    E5M2: (E5M2,),
}
HEAD_SCALES: set[str] = set()  # public functions whose factors may be one a query head
OUTPUTS = (torch.float16, torch.bfloat16, E4M3)
MOST_ROWS = 1 << 30  # query rows of a KV head times heads of its group, in decoding: `cute_kernels.device.divisor`
MOST_KEYS = 1 << 30  # of a request, which kernels count in 32 bits
MOST_MASK = 1 << 31  # bytes of a custom mask, or of an output's scale factors, likewise
TMA_BYTES = 16  # alignment of a TMA descriptor's base address and of every stride but the last

Names = Callable[[str], str]


def names_of(p: Problem) -> Names:
    """What the caller calls a field."""
    table = SIGNATURES.get(p.signature, {})
    return lambda field: table.get(field, field)


def validate(p: Problem) -> None:
    """Raises on the first argument that does not fit."""
    name = names_of(p)
    scalars(p)
    q = check_operand(name("q"), p.q, 3, QUERIES, None)
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name('q')}: device {q.device}, must be cpu or cuda")
    for other, t in (_given(p, name) | _outputs_of(p, name)).items():
        check_memory(other, t, q)
    _caches(p, name)
    _block_scales(p, name)
    _requests(p, name)
    heads = q.shape[1] if p.signature in HEAD_SCALES else 1
    for field in ("scale", "out_scale"):
        check_scale(name(field), getattr(p, field), getattr(p, f"{field}_tensor"), q.device, heads)
    check_integer(name("max_q_len"), p.max_q_len, 0)
    if p.sinks is not None:
        sinks = check_operand(name("sinks"), p.sinks, 1, (torch.float32,), q.device)
        check_shape(name("sinks"), sinks, (q.shape[1],), "one value a query head")
    _custom_mask(p, name)
    if p.alibi_slopes is not None:
        slopes = check_operand(name("alibi_slopes"), p.alibi_slopes, 1, (torch.float32,), q.device)
        check_shape(name("alibi_slopes"), slopes, (q.shape[1],), "one slope a query head")
    if p.rope is not None:
        _rotated(p, name)
    outputs(p)
    check_apart(_outputs_of(p, name), _given(p, name))


def scalars(p: Problem) -> None:
    """Raises on a flag or a number of another kind: what a plan, found by equality, or a trace would let pass."""
    name = names_of(p)
    for field in ("causal", "interleaved", "batch_invariant", "return_lse"):
        check_flag(name(field), getattr(p, field))
    check_optional_flag(name("enable_pdl"), p.enable_pdl)
    for field in ("scale", "out_scale"):
        check_number(name(field), getattr(p, field), OR_TENSOR)
    check_integer(name("window_left"), p.window_left)
    check_integer(name("max_q_len"), p.max_q_len)
    _amount(name("soft_cap"), p.soft_cap)
    _amount(name("skip"), p.skip)
    if p.rope is not None:
        if not isinstance(p.rope, Rope):
            raise TypeError(f"{name('rope')}: {p.rope!r}, must be a Rope or None")
        check_number(name("rope_scale"), p.rope.scale, positive=True)
        check_number(name("rope_theta"), p.rope.theta, positive=True)


def reason(p: Problem) -> Exception | None:
    """What is wrong with a call that failed, if anything is."""
    try:
        validate(p)
        kernel_tensors(p)
    except (TypeError, ValueError, NotImplementedError) as found:
        return found
    return None


def kernel_tensors(p: Problem) -> None:
    """Raises where compiled code cannot read these tensors, or not with these factors."""
    name = names_of(p)
    if not p.scale > 0:
        raise NotImplementedError(
            f"{name('scale')}: {p.scale}; CUDA kernels take the maximum before they scale: positive only"
        )
    (tokens, heads), group = p.q.shape[:2], p.q.shape[1] // p.k.shape[1]
    if p.phase == "decode" and tokens * group * group >= MOST_ROWS:
        raise NotImplementedError(
            f"{name('q')}: {tokens} tokens of {heads} heads, {group} a KV head; a CUDA kernel of decode divides "
            f"exactly where tokens x {group} x {group} is below {MOST_ROWS}"
        )
    if most_keys(p) >= MOST_KEYS:
        columns, size, form = p.requests.page_table.shape[2], p.k.shape[2], p.requests.form
        most = f"{columns} pages of {size} tokens{' a request' if form == 'table' else ''}"
        most = f"{name('k')}: {size} rows" if form == "ragged" else f"{name('page_table')}: {most}"
        raise NotImplementedError(f"{most}; a CUDA kernel counts less than {MOST_KEYS} tokens")
    if p.custom_mask is not None and p.custom_mask.shape[0] >= MOST_MASK:
        size = p.custom_mask.shape[0]
        raise NotImplementedError(f"{name('custom_mask')}: {size} bytes; a CUDA kernel counts less than {MOST_MASK}")
    for field in ("q", "k", "v", "out"):
        t = getattr(p, field)
        if isinstance(t, torch.Tensor):
            _tma(name(field), t, TMA_BYTES)
    for field in ("k_scales", "v_scales"):
        t = getattr(p, field)
        if t is not None:
            _tma(name(field), t, t.shape[3] if t.shape[3] in (4, 8, 16) else 4)
    if isinstance(p.out, fp4.FP4Tensor):
        of = name("out")
        check_last_stride(f"{of}.data", p.out.data)
        _tma(f"{of}.data", p.out.data, TMA_BYTES)
        if p.out.scale.data_ptr() % 4:
            raise ValueError(f"{of}.scale: address {p.out.scale.data_ptr():#x}, must be a multiple of 4 bytes")
        if p.out.scale.numel() >= MOST_MASK:
            size = p.out.scale.numel()
            raise NotImplementedError(f"{of}.scale: {size} bytes; a CUDA kernel counts less than {MOST_MASK}")


def most_keys(p: Problem) -> int:
    """A bound of a request's keys, from the shapes of a valid problem."""
    size = p.k.shape[2]
    return size if p.requests.form == "ragged" else size * p.requests.page_table.shape[2]


def check_tensor(name: str, value: Any, ndim: int, device: torch.device) -> torch.Tensor:
    check_strided(name, value, ndim)
    if value.device != device:
        raise ValueError(f"{name}: device {value.device}, must be the query's, {device}")
    return value


def drafts_of(mask: Any, lead: tuple[int, ...], most: Any, most_name: str, device: torch.device) -> torch.Tensor:
    """A mask of drafts, uint16 (*lead, W), of at most `most` drafts a request, as int32 (tokens, W / 2)."""
    check_integer(most_name, most, 0)
    check_strided("mask", mask)
    check_one_of("mask: dtype", mask.dtype, (torch.uint16,))
    why = f"rows of query tokens, two words for 32 of {most_name}"
    check_shape("mask", mask, (*lead, (most + 31) // 32 * 2), why)
    if mask.device != device and device.type in ("cpu", "cuda"):
        raise ValueError(f"mask: device {mask.device}, must be the query's, {device}")
    return mask.contiguous().view(torch.int32).reshape(-1, (most + 31) // 32)


def _amount(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: {value!r}, must be a float or None")
    if not 0 <= value < INF:
        raise ValueError(f"{name}: {value}, must be None, 0 (off) or positive and finite")


def _tma(name: str, t: torch.Tensor, size: int) -> None:
    if t.data_ptr() % size:
        raise ValueError(f"{name}: address {t.data_ptr():#x}, must be a multiple of {size} bytes")
    unit = size // t.element_size()
    if any(stride % unit for stride in t.stride()[:-1]):
        raise ValueError(f"{name}: strides {t.stride()} (logical order), all but the last must be multiples of {unit}")


def _caches(p: Problem, name: Names) -> None:
    """K and V, and their agreement with the query, all in logical order."""
    q, kv = p.q, name("kv")
    k, v = (check_tensor(name(field), getattr(p, field), 4, q.device) for field in ("k", "v"))
    if k.dtype != v.dtype:
        raise TypeError(f"{kv}: K is {k.dtype} and V {v.dtype}, must be the same")
    check_last_stride(name("k"), k)
    check_last_stride(name("v"), v)
    check_one_of(f"{kv}: with query {q.dtype}, dtype", k.dtype, CACHES[q.dtype])
    packed = 2 if k.dtype == torch.uint8 else 1
    _, kv_heads, page_size, dim = k.shape
    ragged = p.requests.form == "ragged"
    if v.shape[1:3] != k.shape[1:3] or (k.shape[0] == 0) != (v.shape[0] == 0):
        may = "the last dimension only" if ragged else "pages, of which both or neither have any, and head_dim only"
        raise ValueError(f"{kv}: K {tuple(k.shape)} and V {tuple(v.shape)} may differ in {may}")
    if dim * packed != q.shape[2]:
        raise ValueError(f"{kv}: K has head_dim {dim * packed}, must be the query's, {q.shape[2]}")
    if page_size == 0 and not ragged or (kv_heads == 0 and q.shape[1] > 0):
        raise ValueError(f"{kv}: shape {tuple(k.shape)}, needs at least one head and one row a page")
    if kv_heads and q.shape[1] % kv_heads:
        raise ValueError(f"{name('q')}: {q.shape[1]} heads, must be a multiple of {kv}'s {kv_heads}")


def _block_scales(p: Problem, name: Names) -> None:
    """NVFP4 scale factors are there exactly where the cache is packed."""
    both = name("scales")
    if (p.k.dtype == torch.uint8) != (p.k_scales is not None):
        need = "None, required" if p.k_scales is None else f"K is {type(p.k_scales).__name__}, must be None"
        raise ValueError(f"{both}: {need} where {name('kv')} is {p.k.dtype} (NVFP4 caches are torch.uint8)")
    if p.k_scales is None:
        if p.interleaved:
            raise ValueError(f"{name('interleaved')}: True, must be False where the cache has no scale factors")
        return
    k, v = (check_tensor(name(field), getattr(p, field), 4, p.q.device) for field in ("k_scales", "v_scales"))
    if k.dtype != v.dtype:
        raise TypeError(f"{both}: K is {k.dtype} and V {v.dtype}, must be the same")
    for field, scales, data in (("k_scales", k, p.k), ("v_scales", v, p.v)):
        check_last_stride(name(field), scales)
        check_one_of(f"{name(field)}: dtype", scales.dtype, (E4M3,))
        shape = (*data.shape[:3], data.shape[3] * 2 // fp4.BLOCK)
        check_shape(name(field), scales, shape, "logical HND: one e4m3 scale per 16 elements")
    if p.interleaved and (p.requests.form == "ragged" or v.shape[2] % 4):
        rows = "no pages" if p.requests.form == "ragged" else f"pages of {v.shape[2]} rows"
        raise ValueError(f"{name('interleaved')}: True, {rows}; 4 rows of a page are interleaved, must divide its rows")


def _requests(p: Problem, name: Names) -> None:
    r, device, counted = p.requests, p.q.device, "kv_lens"
    if r.form == "table":
        if p.signature == "xqa" and isinstance(r.kv_lens, torch.Tensor) and r.kv_lens.ndim != 1:
            check_shape(name("kv_lens"), r.kv_lens, (*r.page_table.shape[:1], 1), "batch, 1")
        batch = check_operand(name("kv_lens"), r.kv_lens, 1, (torch.int32, torch.uint32), device).shape[0]
    else:
        starts, counted = check_operand(name("kv_starts"), r.kv_starts, 1, (torch.int32,), device), "kv_starts"
        batch = starts.shape[0] - 1
        if batch < 0:
            raise ValueError(f"{name('kv_starts')}: shape (0,), must have batch_size + 1 entries")
    if r.form == "csr":
        last = check_operand(name("kv_lens"), r.kv_lens, 1, (torch.int32,), device)
        check_shape(name("kv_lens"), last, (batch,), f"one entry a request, one less than {name('kv_starts')}")
    if r.cu_seqlens_q is None and p.phase == "decode":
        check_integer(name("max_q_len"), p.max_q_len, 1)
        if p.q.shape[0] != batch * p.max_q_len:
            tokens = f"{batch} x {p.max_q_len}"
            both = f"{name(counted)}, {name('max_q_len')}"
            raise ValueError(f"{name('q')}: {p.q.shape[0]} tokens, must be {tokens} ({both})")
    else:
        offsets = check_operand(name("cu_seqlens_q"), r.cu_seqlens_q, 1, (torch.int32,), device)
        check_shape(name("cu_seqlens_q"), offsets, (batch + 1,), "batch_size + 1")
    if r.form != "ragged":
        table = check_operand(name("page_table"), r.page_table, 3, (torch.int32,), device)
        rows = batch if r.form == "table" else 1
        check_shape(name("page_table"), table, (rows, 2, table.shape[2]), "requests, K and V, pages")


def _custom_mask(p: Problem, name: Names) -> None:
    """The mask's bits are there exactly where their starts are."""
    if p.custom_mask is None:
        if p.mask_starts is not None:
            raise ValueError(f"{name('mask_starts')}: given, must be None without {name('custom_mask')}")
        return
    check_operand(name("custom_mask"), p.custom_mask, 1, (torch.uint8,), p.q.device)
    starts = check_operand(name("mask_starts"), p.mask_starts, 1, (torch.int32,), p.q.device)
    check_shape(name("mask_starts"), starts, (p.requests.batch + 1,), "batch_size + 1")
    if p.drafts is not None:
        raise ValueError(f"{name('drafts')}: given, must be None with {name('custom_mask')}")


def _rotated(p: Problem, name: Names) -> None:
    """Rotated are values of 16 bits, in pairs."""
    if p.q.dtype not in (torch.float16, torch.bfloat16) or p.k.dtype != p.q.dtype:
        types = f"query {p.q.dtype}, K {p.k.dtype}"
        raise TypeError(f"{name('rope')}: {types}, must both be {torch.float16} or {torch.bfloat16}")
    if p.q.shape[2] % 2:
        raise ValueError(f"{name('rope')}: head_dim {p.q.shape[2]}, must be even")


def outputs(p: Problem) -> None:
    """Raises on lse, and on out, out_dtype and out_sf_scale against each other; a trace, too, asks for it."""
    name, q, out = names_of(p), p.q, p.out
    if p.lse is not None:
        lse = check_tensor(name("lse"), p.lse, 2, q.device)
        check_one_of(f"{name('lse')}: dtype", lse.dtype, (torch.float32,))
        check_shape(name("lse"), lse, (q.shape[0], q.shape[1]), "tokens, query heads")
    if out is not None and not isinstance(out, (torch.Tensor, fp4.FP4Tensor)):
        raise TypeError(f"{name('out')}: {type(out).__name__}, must be a torch.Tensor or FP4Tensor")
    dtype = p.result_dtype
    if isinstance(dtype, str) and dtype != "nvfp4":
        raise ValueError(f"{name('out_dtype')}: {dtype!r}, the only string is 'nvfp4'")
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"{name('out_dtype')}: {dtype!r}, must be a torch.dtype or 'nvfp4'")
    shape = (q.shape[0], q.shape[1], p.dim_vo)
    if dtype == "nvfp4":
        _nvfp4_output(p, name, shape)
        return
    if dtype not in OUTPUTS:
        what = f"{name('out')}: dtype" if p.out_dtype is None and out is not None else f"{name('out_dtype')}:"
        whose = ", the query's" if p.out_dtype is None and out is None else ""
        raise ValueError(f"{what} {dtype}{whose}, must be one of {listed(OUTPUTS)} or 'nvfp4'")
    if p.out_sf_scale is not None:
        raise ValueError(f"{name('out_sf_scale')}: {p.out_sf_scale!r}, must be None unless the output is nvfp4")
    if out is not None:
        given = check_operand(name("out"), out, 3, (dtype,), q.device)
        check_shape(name("out"), given, shape, "tokens, query heads, V's head_dim")


def _nvfp4_output(p: Problem, name: Names, shape: tuple[int, int, int]) -> None:
    factor, out, device = p.out_sf_scale, p.out, p.q.device
    check_number(name("out_sf_scale"), factor, " where the output is nvfp4", positive=True)
    if shape[1] * shape[2] % fp4.BLOCK or shape[2] % 2:
        raise ValueError(f"{name('out')}: rows of {shape[1:]} elements, nvfp4 needs a multiple of {fp4.BLOCK}")
    if out is None:
        return
    if not isinstance(out, fp4.FP4Tensor):
        raise ValueError(f"{name('out')}: a {out.dtype} tensor, out_dtype 'nvfp4' needs an FP4Tensor")
    data = check_tensor(f"{name('out')}.data", out.data, 3, device)
    check_shape(f"{name('out')}.data", data, (*shape[:2], shape[2] // 2), "two values a byte")
    scale = check_tensor(f"{name('out')}.scale", out.scale, 2, device)
    columns = fp4.round_up(shape[1] * shape[2] // fp4.BLOCK, fp4.SCALE_TILE[1])
    why = "one column per 16 elements of a row, rounded up to 4"
    check_shape(f"{name('out')}.scale", scale, (scale.shape[0], columns), why)
    if not scale.is_contiguous():
        raise ValueError(f"{name('out')}.scale: strides {scale.stride()}, must be contiguous")


TENSORS = (  # of Problem
    "q", "k", "v", "k_scales", "v_scales", "sinks", "drafts", "scale_tensor", "out_scale_tensor", "custom_mask",
    "mask_starts", "alibi_slopes",
)  # fmt: skip
TABLES = ("page_table", "kv_lens", "cu_seqlens_q", "kv_starts")  # of Requests


def _given(p: Problem, name: Names) -> dict[str, Any]:
    """What is read, by its name; of several with one name, the first has it, and the others get their field's too."""
    given: dict[str, Any] = {}
    for source, fields in ((p, TENSORS), (p.requests, TABLES)):
        for field in fields:
            of = name(field.removesuffix("_tensor"))
            given[f"{of} ({field})" if of in given else of] = getattr(source, field)
    return given


def _outputs_of(p: Problem, name: Names) -> dict[str, Any]:
    """What the caller gave to be written, by its name."""
    outputs = {name("out"): p.out, name("lse"): p.lse}
    if isinstance(p.out, fp4.FP4Tensor):
        outputs |= {name("out"): None, f"{name('out')}.data": p.out.data, f"{name('out')}.scale": p.out.scale}
    return {of: t for of, t in outputs.items() if t is not None}
