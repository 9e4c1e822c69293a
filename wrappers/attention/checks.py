"""Validate an attention call, in the words of the function that was called.

`validate` looks only at types, shapes, dtypes, strides and devices, never at device values. A wrong rank, shape or
stride raises ValueError, a wrong dtype TypeError; every message names the argument, its value and what is allowed.
`dispatch` says what a kernel supports; `kernel_tensors` adds the requirements of compiled code on the tensors
themselves. Outputs may share no byte with another tensor of the call. They are compared with the query and each other
at every call, and with all tensors when the plan is made or if CUTE_KERNELS_CHECK is 1.
"""

from collections.abc import Callable
from math import e, gcd, log2
from typing import Any, get_type_hints

import torch

from cute_kernels import dtypes
from cute_kernels.attention import spec
from cute_kernels.records import RECORDS

from .. import fp4
from ..host.checks import (
    FP32_LEAST,
    FP32_MOST,
    NUMBERS,
    check_apart,
    check_device,
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
    swapped,
    too_small,
)
from ..host.plain import traced
from ..host.scalars import OR_TENSOR, check_scale
from . import sharing
from .call import OPTIONAL, AttentionCall, Rope
from .optional import MOST_MASK, check_optional

SIGNATURES: dict[
    str, dict[str, str]
] = {}  # public function -> field of AttentionCall -> its name there, where it differs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES: dict[torch.dtype, str] = {  # of queries and caches -> name in specs; torch.uint8: packed NVFP4
    getattr(torch, dtypes.TORCH[name]): name for name in (*spec.CACHES, *spec.QUANTISED)
}
CACHES = {  # query -> K and V
    q: tuple(kv for name in spec.CACHES[of] for kv, kind in TYPES.items() if kind == name) for q, of in TYPES.items()
    if of in spec.CACHES
}  # fmt: skip
QUERIES = tuple(CACHES)
LATENT_QUERIES = (torch.float16, torch.bfloat16)  # and caches, if V lies in K
SECOND = ("extra_k", "extra_k_rope", "extra_slots", "extra_lens")  # fields of a second cache
EIGHT_BITS = tuple(dtype for dtype, name in TYPES.items() if dtypes.BITS[name] == 8)
HEAD_SCALES: set[str] = set()  # public functions that accept one scale per query head
OUTPUTS = (torch.float16, torch.bfloat16, E4M3)
# Bound of products that kernels divide by the query heads of a KV head (`Divisor`): query heads times these, and, if
# keys are split, the query rows that a request has for a KV head, times these
MOST_ROWS = 1 << 30
MOST_KEYS = 1 << 30  # bound of the keys of a request, which kernels count in 32 bits
TMA_BYTES = 16  # alignment of a TMA descriptor's base address and of every stride except the last

MOST_SCALE = FP32_MOST / log2(e)  # of the logits
Q_LEN = "q_len_per_req"  # the argument with the number of query tokens of each request

_TYPES = get_type_hints(AttentionCall)
FLAGS, INTEGERS = ([field for field, kind in _TYPES.items() if kind is one] for one in (bool, int))

Names = Callable[[str], str]


def names_of(call: AttentionCall) -> Names:
    """Return the function from a field of the call to the caller's name for it."""
    table = SIGNATURES.get(call.signature, {})
    return lambda field: table.get(field, field)


def validate(call: AttentionCall) -> None:
    """Raise on the first argument that does not fit."""
    name = names_of(call)
    scalars(call)
    q = check_operand(name("q"), call.q, 3, _queries(call) if call.shares_v else QUERIES, None)
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name('q')}: device {q.device}, must be cpu or cuda")
    for other, t in (_given(call, name) | _outputs_of(call, name)).items():
        check_memory(other, t, q)
    _caches(call, name)
    _kv_scales(call, name)
    _requests(call, name)
    heads = q.shape[1] if call.signature in HEAD_SCALES else 1
    for field in ("scale", "out_scale"):
        check_scale(name(field), getattr(call, field), getattr(call, f"{field}_tensor"), q.device, heads)
    check_integer(name("max_q_len"), call.max_q_len, 0)
    check_optional(call, name)
    sharing.check(call, name)
    _custom_mask(call, name)
    if call.rope is not None:
        _rotated(call, name)
    outputs(call)
    check_apart(_outputs_of(call, name), _given(call, name))


def scalars(call: AttentionCall) -> None:
    """Raise on a flag or a number of a wrong type, which a plan (found by equality) or a trace would accept."""
    name = names_of(call)
    for field in FLAGS:
        check_flag(name(field), getattr(call, field))
    check_optional_flag(name("enable_pdl"), call.enable_pdl)
    for field in ("scale", "out_scale"):
        check_number(name(field), getattr(call, field), OR_TENSOR)
    if call.scale > MOST_SCALE:
        raise ValueError(
            f"{name('scale')}: {call.scale}, must be at most {MOST_SCALE:.3g}: kernels multiply it by log2(e)"
        )
    for field in INTEGERS:
        check_integer(name(field), getattr(call, field))
    _amount(name("soft_cap"), call.soft_cap)
    _amount(name("skip"), call.skip)
    if call.rope is not None:
        if not isinstance(call.rope, Rope):
            raise TypeError(f"{name('rope')}: {call.rope!r}, must be a Rope or None")
        check_number(name("rope_scale"), call.rope.scale, positive=True)
        check_number(name("rope_theta"), call.rope.theta, positive=True)


def validate_launch(call: AttentionCall) -> None:
    """Raise on the first argument that does not fit, or that compiled code cannot read."""
    validate(call)
    kernel_tensors(call)


def kernel_tensors(call: AttentionCall) -> None:
    """Raise if compiled code cannot read these tensors, or does not support this scale."""
    name = names_of(call)
    if not call.scale >= FP32_LEAST:
        raise NotImplementedError(
            f"{name('scale')}: {call.scale}, must be positive on CUDA: kernels take the row maximum before they scale"
        )
    if most_keys(call) >= MOST_KEYS:
        columns, size, form = call.requests.page_table.shape[2], call.k.shape[2], call.requests.form
        given = f"{columns} pages of {size} tokens{' per request' if form == 'table' else ''}"
        given = f"{name('k')}: {size} rows" if form == "ragged" else f"{name('page_table')}: {given}"
        raise NotImplementedError(f"{given}, must be less than {MOST_KEYS} tokens on CUDA")
    if call.custom_mask is not None and call.custom_mask.shape[0] >= MOST_MASK:
        size = call.custom_mask.shape[0]
        raise NotImplementedError(f"{name('custom_mask')}: {size} bytes, must be less than {MOST_MASK} on CUDA")
    for field in ("q", "k", "v", "out", "q_rope", "k_rope", "extra_k", "extra_k_rope"):
        t = getattr(call, field)
        record = {"k": call.record, "v": call.record, "extra_k": call.extra_record}.get(field, "")
        if isinstance(t, torch.Tensor) and record and RECORDS[record].planar:  # of which the row's stride says nothing
            _tma(name(field), t[:, :1, :1], TMA_BYTES)
        elif isinstance(t, torch.Tensor):  # rows of NVFP4 may have 8 bytes more than TMA could load
            packed = t.dtype == torch.uint8 and field != "out" and not call.record
            _tma(name(field), t, gcd(t.shape[3], TMA_BYTES) if packed else TMA_BYTES)
    for field in ("k_scales", "v_scales"):
        t = getattr(call, field)
        if t is not None and t.ndim == 4:
            _tma(name(field), t, gcd(t.shape[3], TMA_BYTES))
    if isinstance(call.out, fp4.FP4Tensor):
        out = name("out")
        check_last_stride(f"{out}.data", call.out.data)
        _tma(f"{out}.data", call.out.data, TMA_BYTES, gcd(call.out.data.shape[2], TMA_BYTES))
        if call.out.scale.data_ptr() % 4:
            raise ValueError(f"{out}.scale: address {call.out.scale.data_ptr():#x}, must be a multiple of 4 bytes")
        if call.out.scale.numel() >= MOST_MASK:
            size = call.out.scale.numel()
            raise NotImplementedError(f"{out}.scale: {size} bytes, must be less than {MOST_MASK} on CUDA")


def most_keys(call: AttentionCall) -> int:
    """Return an upper bound of the keys of a request, from the shapes of a valid call."""
    size, form = call.k.shape[2], call.requests.form
    if form == "slots":
        extra = 0 if call.extra_slots is None else call.extra_slots.shape[1] + spec.EXTRA_UNIT
        return call.requests.page_table.shape[2] * sharing.tokens(call) + extra
    return size if form == "ragged" else size * call.requests.page_table.shape[2]


def check_tensor(name: str, value: Any, ndim: int, device: torch.device) -> torch.Tensor:
    check_strided(name, value, ndim)
    check_device(name, value, device, "the query's")
    return value


def drafts_of(mask: Any, lead: tuple[int, ...], most: Any, most_name: str, device: torch.device) -> torch.Tensor:
    """Return a mask of drafts, uint16 (*lead, W) for at most `most` drafts per request, as int32 (tokens, W / 2)."""
    check_integer(most_name, most, 0)
    check_strided("mask", mask)
    check_one_of("mask: dtype", mask.dtype, (torch.uint16,))
    missing = most_name == Q_LEN and mask.dim() == 3 and mask.shape[0] == lead[0] and most < mask.shape[1]
    why = f"the query's rows, two words per 32 of {most_name}"
    hint = f"; pass {Q_LEN}={mask.shape[1]}" if missing else ""
    check_shape("mask", mask, (*lead, (most + 31) // 32 * 2), why, hint)
    if device.type in ("cpu", "cuda"):
        check_device("mask", mask, device, "the query's")
    words = mask.contiguous().reshape(-1)
    if traced(words) or words.storage_offset() % 2:  # torch views no pairs of words from the second word of a pair on
        words = words.clone()
    return words.view(torch.int32).reshape(-1, (most + 31) // 32)


def _amount(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: {value!r}, must be a float or None")
    if value != 0 and not FP32_LEAST <= value <= FP32_MOST:
        need = f"must be None, 0 (off) or positive and finite in float32{too_small(value)}"
        raise ValueError(f"{name}: {value}, {need}")


def _tma(name: str, t: torch.Tensor, size: int, row_size: int = 0) -> None:
    """Raise unless the address is a multiple of `size` bytes, and strides are of `row_size`; 0: of `size`, too."""
    if t.data_ptr() % size:
        raise ValueError(f"{name}: address {t.data_ptr():#x}, must be a multiple of {size} bytes")
    size = row_size or size
    multiple = size // t.element_size()
    if any(stride % multiple for stride, extent in zip(t.stride()[:-1], t.shape) if extent > 1):
        need = f"all except the last must be multiples of {multiple}, since kernels copy {size} aligned bytes at a time"
        raise ValueError(f"{name}: strides {t.stride()} (logical order), {need}")


def _caches(call: AttentionCall, name: Names) -> None:
    """Check K and V, and that they fit the query, all in logical order."""
    q, kv = call.q, name("kv")
    k, v = (check_tensor(name(field), getattr(call, field), 4, q.device) for field in ("k", "v"))
    if call.record:
        _records(call, name)
        return
    if k.dtype != v.dtype:
        raise TypeError(f"{kv}: K is {k.dtype} and V {v.dtype}, must be the same")
    check_last_stride(name("k"), k)
    check_last_stride(name("v"), v)
    check_one_of(f"{kv}: with query {q.dtype}, dtype", k.dtype, (q.dtype,) if call.shares_v else CACHES[q.dtype])
    _rope_columns(call, name)
    _second_cache(call, name)
    packed = 2 if k.dtype == torch.uint8 else 1
    _, kv_heads, page_size, dim = k.shape
    ragged = call.requests.form == "ragged"
    if v.shape[1:3] != k.shape[1:3] or (k.shape[0] == 0) != (v.shape[0] == 0):
        may = "the last dimension only" if ragged else "pages, of which both or neither have any, and head_dim only"
        raise ValueError(f"{kv}: K {tuple(k.shape)} and V {tuple(v.shape)} may differ in {may}")
    if dim * packed != q.shape[2]:
        raise ValueError(f"{kv}: K has head_dim {dim * packed}, must be the query's, {q.shape[2]}")
    if page_size == 0 and not ragged or (kv_heads == 0 and q.shape[1] > 0):
        raise ValueError(f"{kv}: shape {tuple(k.shape)}, must have at least one head and one row per page")
    if kv_heads and q.shape[1] % kv_heads:
        fits = not ragged and name("page_table") != "k" and page_size > 0 and q.shape[1] % page_size == 0
        hint = swapped(fits, kv_heads, page_size, name("kv_layout"))
        raise ValueError(f"{name('q')}: {q.shape[1]} heads, must be a multiple of {kv}'s {kv_heads}{hint}")


def _queries(call: AttentionCall) -> tuple[torch.dtype, ...]:
    """Return the dtypes of queries of a call in which V lies in K."""
    return (*LATENT_QUERIES, E4M3) if call.record else LATENT_QUERIES


def _records(call: AttentionCall, name: Names) -> None:
    """Check a cache of packed records, and a second one, and that they fit the query."""
    columns = call.dim_qk
    packed = any(RECORDS[record].packed for record in (call.record, call.extra_record) if record)
    known = (torch.bfloat16,) if packed else (torch.bfloat16, E4M3)
    if call.q.dtype not in known:
        need = f"must be {' or '.join(map(str, known))} over a cache of record {call.record}"
        raise NotImplementedError(f"{name('q')}: dtype {call.q.dtype}, {need}: not supported")
    _rope_columns(call, name)
    _second_cache(call, name)
    second = (("extra_k", call.extra_record),) if call.extra_k is not None else ()
    for field, record in (("k", call.record), *second):
        form, k = RECORDS[record], getattr(call, field)
        check_last_stride(name(field), k)
        if not form.packed:
            check_one_of(f"{name(field)}: in record {record}, dtype", k.dtype, (E4M3,))
            if k.shape[3] != call.q.shape[2]:
                raise ValueError(f"{name(field)}: shape {tuple(k.shape)}, must end with {call.q.shape[2]}, as q does")
            continue
        check_one_of(f"{name(field)}: in record {record}, dtype", k.dtype, (torch.uint8,))
        if form.planar and k.stride(2) != form.token_bytes:
            need = f"rows of a page must be {form.token_bytes} apart: it has all values, then all factors"
            raise ValueError(f"{name(field)}: strides {k.stride()} (logical order), {need}")
        if k.shape[3] != form.token_bytes or columns != form.columns:
            found = f"{name(field)}: rows of {k.shape[3]} bytes, and {columns} columns of {name('q')}"
            raise ValueError(f"{found}, must be {form.token_bytes} and {form.columns} in record {record}")
    _, kv_heads, page_size, _ = call.k.shape
    if kv_heads != 1 or not page_size:
        raise ValueError(f"{name('k')}: shape {tuple(call.k.shape)}, must have one head and at least one row per page")


def _rope_columns(call: AttentionCall, name: Names) -> None:
    """Check the columns of Q and K behind those that V has, too: both or neither are given."""
    given = [field for field in ("q_rope", "k_rope") if getattr(call, field) is not None]
    if not given:
        return
    if call.record and RECORDS[call.record].packed and given == ["q_rope"]:  # rows of K have all columns
        q = check_operand(name("q_rope"), call.q_rope, 3, (call.q.dtype,), call.q.device)
        check_shape(name("q_rope"), q, (*call.q.shape[:2], q.shape[2]), f"tokens and heads of {name('q')}")
        return
    if not call.shares_v or len(given) == 1:
        other = "shares_v" if len(given) == 2 else "k_rope" if given == ["q_rope"] else "q_rope"
        raise ValueError(f"{name(given[0])}: given, must be None without {name(other)}")
    q, k = (check_operand(name(field), getattr(call, field), n, (dtype,), call.q.device)
            for field, n, dtype in (("q_rope", 3, call.q.dtype), ("k_rope", 4, call.k.dtype)))  # fmt: skip
    check_shape(name("q_rope"), q, (*call.q.shape[:2], q.shape[2]), f"tokens and heads of {name('q')}")
    check_shape(name("k_rope"), k, (*call.k.shape[:3], q.shape[2]), f"that of {name('k')}, columns of {name('q_rope')}")


def _second_cache(call: AttentionCall, name: Names) -> None:
    """Check a second cache and its slots, which are given together; it has rows like those of the first one."""
    needed = ("extra_k", "extra_slots", "extra_lens", *(("extra_k_rope",) if call.k_rope is not None else ()))
    given = [field for field in SECOND if getattr(call, field) is not None]
    if not given:
        return
    missing = [field for field in needed if field not in given]
    if missing or len(given) > len(needed) or call.requests.form != "slots":
        other = missing[0] if missing else "page_table"
        raise ValueError(f"{name(given[0])}: given, must be None without {name(other)}")
    device, (_, heads, _, dim), r = call.q.device, call.k.shape, call.requests
    k = check_operand(name("extra_k"), call.extra_k, 4, (call.k.dtype,), device)
    columns = k.shape[3] if call.record else dim
    check_shape(name("extra_k"), k, (k.shape[0], heads, k.shape[2], columns), f"heads and columns of {name('k')}")
    if call.extra_k_rope is not None and call.k_rope is not None:
        rope = check_operand(name("extra_k_rope"), call.extra_k_rope, 4, (call.k.dtype,), device)
        check_shape(name("extra_k_rope"), rope, (*k.shape[:3], call.k_rope.shape[3]), f"that of {name('k_rope')}")
    if not k.shape[2]:
        raise ValueError(f"{name('extra_k')}: shape {tuple(k.shape)}, must have at least one row per page")
    slots = check_operand(name("extra_slots"), call.extra_slots, 2, (torch.int32,), device)
    check_shape(name("extra_slots"), slots, (r.batch, slots.shape[1]), "one row per token, slots")
    lens = check_operand(name("extra_lens"), call.extra_lens, 1, (torch.int32,), device)
    check_shape(name("extra_lens"), lens, tuple(r.kv_lens.shape), f"that of {name('kv_lens')}")


def _kv_scales(call: AttentionCall, name: Names) -> None:
    """Check the scale factors of K and V, which packed caches must have, and caches of 8 bits may have."""
    both, dtype = name("scales"), call.k.dtype
    if call.k_scales is None or dtype not in (torch.uint8, *EIGHT_BITS) or call.record:
        if call.k_scales is not None or dtype == torch.uint8 and not call.record:
            given = f"K is {type(call.k_scales).__name__}, must be None"
            need = "None, required" if call.k_scales is None else given
            raise ValueError(f"{both}: {need} if {name('kv')} is {dtype} (NVFP4 caches are torch.uint8)")
        if call.interleaved:
            raise ValueError(f"{name('interleaved')}: True, must be False if the cache has no scale factors")
        return
    packed = dtype == torch.uint8
    types: tuple[torch.dtype, ...] = (torch.float32,)
    why = "logical HND: one fp32 factor per token and head"
    if packed:
        types, why = fp4.SCALE_TYPES, "logical HND: one e4m3 scale per 16 elements"
    k, v = (
        check_tensor(name(field), getattr(call, field), 4 if packed else 3, call.q.device)
        for field in ("k_scales", "v_scales")
    )
    k, v = (fp4.as_e4m3(k), fp4.as_e4m3(v)) if packed else (k, v)
    if k.dtype != v.dtype:
        raise TypeError(f"{both}: K is {k.dtype} and V {v.dtype}, must be the same")
    for field, scales, data in (("k_scales", k, call.k), ("v_scales", v, call.v)):
        if packed:
            check_last_stride(name(field), scales)
        check_one_of(f"{name(field)}: dtype", scales.dtype, types)
        shape = (*data.shape[:3], data.shape[3] * 2 // fp4.BLOCK) if packed else tuple(data.shape[:3])
        check_shape(name(field), scales, shape, why)
    if call.interleaved and not packed:
        raise ValueError(f"{name('interleaved')}: True, must be False with one factor per token and head")
    if call.interleaved and (call.requests.form == "ragged" or v.shape[2] % 4):
        rows = "without pages" if call.requests.form == "ragged" else f"with pages of {v.shape[2]} rows"
        why = "the layout interleaves 4 rows of a page, and 4 must divide its rows"
        raise ValueError(f"{name('interleaved')}: True, must be False {rows}: {why}")


def _requests(call: AttentionCall, name: Names) -> None:
    r, device, counted = call.requests, call.q.device, "kv_lens"
    if r.form == "table":
        if call.signature == "xqa" and isinstance(r.kv_lens, torch.Tensor) and r.kv_lens.ndim != 1:
            check_shape(name("kv_lens"), r.kv_lens, (*r.page_table.shape[:1], 1), "batch, 1")
        batch = check_operand(name("kv_lens"), r.kv_lens, 1, (torch.int32, torch.uint32), device).shape[0]
    elif r.form == "slots":
        batch = check_strided(name("page_table"), r.page_table).shape[0]
        lens = check_operand(name("kv_lens"), r.kv_lens, 1, (torch.int32,), device)
        if lens.shape[0] == 0 and batch or lens.shape[0] and batch % lens.shape[0]:
            raise ValueError(f"{name('kv_lens')}: shape {tuple(lens.shape)}, must have an entry for each request")
    else:
        starts, counted = check_operand(name("kv_starts"), r.kv_starts, 1, (torch.int32,), device), "kv_starts"
        batch = starts.shape[0] - 1
        if batch < 0:
            raise ValueError(f"{name('kv_starts')}: shape (0,), must have batch_size + 1 entries")
    if r.form == "csr":
        last = check_operand(name("kv_lens"), r.kv_lens, 1, (torch.int32,), device)
        check_shape(name("kv_lens"), last, (batch,), f"one entry per request, one less than {name('kv_starts')}")
    if r.cu_seqlens_q is None:
        check_integer(name("max_q_len"), call.max_q_len, 1)
        if call.q.shape[0] != batch * call.max_q_len:
            tokens = f"{batch} x {call.max_q_len}"
            both = f"{name(counted)}, {name('max_q_len')}"
            length, rest = divmod(call.q.shape[0], batch) if batch else (0, 0)
            hint = f"; pass {name('max_q_len')}={length}" if name("max_q_len") == Q_LEN and length and not rest else ""
            raise ValueError(f"{name('q')}: {call.q.shape[0]} tokens, must be {tokens} ({both}){hint}")
    else:
        offsets = check_operand(name("cu_seqlens_q"), r.cu_seqlens_q, 1, (torch.int32,), device)
        check_shape(name("cu_seqlens_q"), offsets, (batch + 1,), "batch_size + 1")
    if r.form != "ragged":
        table = check_operand(name("page_table"), r.page_table, 3, (torch.int32,), device)
        rows = 1 if r.form == "csr" else batch
        if table.stride(1):
            check_shape(name("page_table"), table, (rows, 2, table.shape[2]), "requests, K and V, pages")
        else:  # the caller's table has no dimension of K and V
            check_shape(name("page_table"), table[:, 0], (rows, table.shape[2]), "requests, pages")


def _custom_mask(call: AttentionCall, name: Names) -> None:
    """Check the mask's bits and their starts, which must be given together."""
    if call.custom_mask is None:
        if call.mask_starts is not None:
            raise ValueError(f"{name('mask_starts')}: given, must be None without {name('custom_mask')}")
        return
    check_operand(name("custom_mask"), call.custom_mask, 1, (torch.uint8,), call.q.device)
    starts = check_operand(name("mask_starts"), call.mask_starts, 1, (torch.int32,), call.q.device)
    check_shape(name("mask_starts"), starts, (call.requests.batch + 1,), "batch_size + 1")


def _rotated(call: AttentionCall, name: Names) -> None:
    """Check a call with rotary embedding: Q and K need 16 bits and an even head_dim."""
    if call.q.dtype not in (torch.float16, torch.bfloat16) or call.k.dtype != call.q.dtype:
        types = f"query {call.q.dtype}, K {call.k.dtype}"
        raise TypeError(f"{name('rope')}: {types}, must both be {torch.float16} or {torch.bfloat16}")
    if call.q.shape[2] % 2:
        raise ValueError(f"{name('rope')}: head_dim {call.q.shape[2]}, must be even")


def outputs(call: AttentionCall) -> None:
    """Raise on lse, and on out, out_dtype and out_sf_scale against each other. A trace calls this too."""
    name, q, out = names_of(call), call.q, call.out
    if call.lse is not None:
        lse = check_tensor(name("lse"), call.lse, 2, q.device)
        check_one_of(f"{name('lse')}: dtype", lse.dtype, (torch.float32,))
        check_shape(name("lse"), lse, (q.shape[0], call.lse_columns), "tokens, query heads")
    if out is not None and not isinstance(out, (torch.Tensor, fp4.FP4Tensor)):
        raise TypeError(f"{name('out')}: {type(out).__name__}, must be a torch.Tensor or FP4Tensor")
    dtype = call.result_dtype
    if isinstance(dtype, str) and dtype != "nvfp4":
        raise ValueError(f"{name('out_dtype')}: {dtype!r}, must be a torch.dtype or 'nvfp4'")
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"{name('out_dtype')}: {dtype!r}, must be a torch.dtype or 'nvfp4'")
    shape = (q.shape[0], q.shape[1], call.dim_vo)
    if dtype == "nvfp4":
        _nvfp4_output(call, name, shape)
        return
    if dtype not in OUTPUTS:
        what = f"{name('out')}: dtype" if call.out_dtype is None and out is not None else f"{name('out_dtype')}:"
        default = " (the query's, by default)" if call.out_dtype is None and out is None else ""
        raise ValueError(f"{what} {dtype}{default}, must be one of {listed(OUTPUTS)} or 'nvfp4'")
    if call.out_sf_scale is not None:
        raise ValueError(f"{name('out_sf_scale')}: {call.out_sf_scale!r}, must be None unless the output is nvfp4")
    if out is not None:
        given = check_operand(name("out"), out, 3, (dtype,), q.device)
        check_shape(name("out"), given, shape, "tokens, query heads, V's head_dim")


def _nvfp4_output(call: AttentionCall, name: Names, shape: tuple[int, int, int]) -> None:
    out, device = call.out, call.q.device
    check_number(name("out_sf_scale"), call.out_sf_scale, " if the output is nvfp4", positive=True)
    if shape[1] * shape[2] % fp4.BLOCK or shape[2] % 2:
        need = f"must have a multiple of {fp4.BLOCK} elements and an even head_dim for nvfp4"
        raise ValueError(f"{name('out')}: rows of {shape[1:]} elements, {need}")
    if out is None:
        return
    if not isinstance(out, fp4.FP4Tensor):
        raise ValueError(f"{name('out')}: a {out.dtype} tensor, must be an FP4Tensor if {name('out_dtype')} is 'nvfp4'")
    data = check_tensor(f"{name('out')}.data", out.data, 3, device)
    check_shape(f"{name('out')}.data", data, (*shape[:2], shape[2] // 2), "two values per byte")
    scale = check_tensor(f"{name('out')}.scale", out.scale, 2, device)
    columns = fp4.round_up(shape[1] * shape[2] // fp4.BLOCK, fp4.SCALE_TILE[1])
    why = "one column per 16 elements of a row, rounded up to 4"
    check_shape(f"{name('out')}.scale", scale, (scale.shape[0], columns), why)
    if not scale.is_contiguous():
        raise ValueError(f"{name('out')}.scale: strides {scale.stride()}, must be contiguous")


TENSORS = ("q", "k", "v", *AttentionCall._fields[OPTIONAL])  # fields of AttentionCall
TABLES = ("page_table", "kv_lens", "cu_seqlens_q", "kv_starts")  # fields of SequenceBatch


def _given(call: AttentionCall, name: Names) -> dict[str, Any]:
    """Return the tensors that are read, by name; if two have one name, the later one gets its field's name too."""
    given: dict[str, Any] = {}
    for source, fields in ((call, TENSORS), (call.requests, TABLES)):
        for field in fields:
            argument = name(field.removesuffix("_tensor"))
            given[f"{argument} ({field})" if argument in given else argument] = getattr(source, field)
    return given


def _outputs_of(call: AttentionCall, name: Names) -> dict[str, Any]:
    """Return the tensors that the caller gave to be written, by name."""
    outputs = {name("out"): call.out, name("lse"): call.lse}
    if isinstance(call.out, fp4.FP4Tensor):
        outputs |= {name("out"): None, f"{name('out')}.data": call.out.data, f"{name('out')}.scale": call.out.scale}
    return {argument: t for argument, t in outputs.items() if t is not None}
