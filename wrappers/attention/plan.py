"""Make the launch plan of an attention call from its static properties, and launch calls by their plans.

Host time: if the dtypes, shapes (except the token count) and optional arguments of a call were seen before, the call is
one dictionary lookup and the compiled call, which itself checks rank, dtype, device, alignment and strides. Nothing
here synchronises or reads device values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any

import torch

from cute_kernels.attention import args, dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import PACK_GQA_MAX_GROUP, PACK_GQA_MAX_Q

from .. import fp4, machine, overlap, reference, scratch
from ..checks import INF, check_number, checking
from ..fp4 import FP4Tensor
from ..reference import LOG2E
from . import checks, values
from .call import AttentionCall
from .rope import rotated

NO_WINDOW = 1 << 30  # window_left for a call without a window, if the kernel supports windows
MOST_TILES = 1 << 31  # bound of the tiles of a prefill launch, whatever the offsets
CHUNK = 4096  # keys of a split in the batch-invariant mode, rounded down to whole KV blocks
WIDE = {"bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", checks.E4M3: "e4m3", checks.E5M2: "e5m2", torch.uint8: "nvfp4",
    "nvfp4": "nvfp4",
}  # fmt: skip
FIELDS = {  # field of KernelRequest -> field of AttentionCall
    "arch": "q", "kv": "k", "page_size": "k", "source": "k", "head_dim": "q", "out": "out_dtype",
    "alibi": "alibi_slopes",
}  # fmt: skip
_Tensor = torch.Tensor  # module globals: each saves an attribute look-up, 20 ns
_empty, _empty_like = torch.empty, torch.empty_like


def request_of(call: AttentionCall) -> KernelRequest:
    """Return the kernel request of a valid call."""
    rows = min(call.max_q_len, call.q.shape[0])
    if call.requests.cu_seqlens_q is not None:  # plans depend only on the next power of two
        rows = 1 << max(rows - 1, 0).bit_length()
    ragged, masked = call.requests.form == "ragged", call.custom_mask is not None
    return KernelRequest(
        q=TYPES[call.q.dtype],
        kv=TYPES[call.k.dtype],
        out=TYPES[call.result_dtype],
        head_dim_qk=call.q.shape[2],
        head_dim_vo=call.dim_vo,
        page_size=0 if ragged else call.k.shape[2],
        qhead_per_kvhead=call.q.shape[1] // call.k.shape[1],
        rows=rows,
        phase=call.phase,
        causal=bool(call.causal) and not masked,
        window=call.window_left >= 0,
        drafts=call.drafts is not None,
        soft_cap=bool(call.soft_cap),
        skip=bool(call.skip),
        interleaved=bool(call.interleaved),
        batch_invariant=bool(call.batch_invariant),
        source="ragged" if ragged else "paged",
        custom_mask=masked,
        alibi=call.alibi_slopes is not None,
        head_scales=any(t is not None and t.numel() > 1 for t in (call.scale_tensor, call.out_scale_tensor)),
    )


class ArgSlots:
    """The position of each argument in a kernel's launch, by name. Slots: a look-up takes a fifth of a dict's time."""

    __slots__ = tuple(name for block in args.BLOCKS for name in block._fields)

    def __init__(self, spec: Any) -> None:
        for index, name in enumerate(args.fields(spec)):
            setattr(self, name, index)


@dataclass(slots=True, eq=False)
class LaunchPlan:
    """A compiled kernel and all that a launch needs beyond the call's own tensors.

    flat: the kernel's arguments, for those that the call does not set. An optional argument is an empty tensor there,
    in the form that the kernel converts fastest. slots: the positions of the arguments in flat.
    """

    fn: Callable[..., None]  # the compiled kernel
    flat: list[Any]
    slots: Any  # an ArgSlots
    device: torch.device
    single_device: bool  # it is the only device of the process
    dtype: torch.dtype | str  # of the output
    out_is_16bit: bool  # the output has 16 bits
    like_query: bool  # the output has the query's dtype and head_dim: empty_like is 1 us cheaper than empty
    dim_vo: int
    token_bytes: int  # bytes of a token of the query or of the output, the larger of both, if they are contiguous
    pack_factor: int  # rows of a token: the GQA group if it is packed into rows for all requests, else 1
    num_tile_heads: int
    tile_m: int  # the largest number of query rows of a tile
    sms: int
    stream_k: bool  # CTAs share the keys of a request
    counters_per_split: int  # of a tile
    split_keys: int  # keys of a split if splits do not depend on the batch, else 0
    checked: bool  # values are read and checked before a launch
    offsets: Any = None  # (B + 1,) int32, offsets of requests of equal length, in the form of `HostMachine.argument`

    def set_optional_args(self, flat: list[Any], call: AttentionCall) -> None:
        """Set the arguments that most calls do not have."""
        slots = self.slots
        if call.soft_cap:
            flat[slots.soft_cap] = float(call.soft_cap)
        if call.skip:
            flat[slots.skip_threshold] = log2(call.skip)
        if call.drafts is not None:
            flat[slots.tree_mask] = call.drafts
        scale, out_scale = call.scale_tensor, call.out_scale_tensor
        if scale is not None:
            flat[slots.softmax_scale_ptr] = scale if scale.ndim == 1 else scale.reshape(-1)
        if out_scale is not None:
            flat[slots.out_scale_ptr] = out_scale if out_scale.ndim == 1 else out_scale.reshape(-1)
        if call.k_scales is not None and call.v_scales is not None:
            flat[slots.k_scales], flat[slots.v_scales] = (
                call.k_scales.view(torch.uint8),
                call.v_scales.view(torch.uint8),
            )
        if call.enable_pdl is not None:
            flat[slots.enable_pdl] = 1 if call.enable_pdl else 0
        if call.custom_mask is not None:
            if call.custom_mask.shape[0] >= checks.MOST_MASK:
                raise ValueError("custom_mask")
            flat[slots.custom_mask], flat[slots.mask_starts] = call.custom_mask, call.mask_starts
        if call.alibi_slopes is not None:
            flat[slots.alibi_slopes] = call.alibi_slopes

    def lse_apart(self, lse: torch.Tensor, q: torch.Tensor, out: Any) -> bool:
        """Return whether lse shares no byte with the query, the given output or another element of itself."""
        if not lse.is_contiguous() and overlap.folded(lse):
            return False
        if out.__class__ is FP4Tensor:
            return not any(overlap.overlap(lse, t) for t in (q, out.data, out.scale))
        return not overlap.overlap(lse, q) and (out is None or not overlap.overlap(lse, out))

    def new_output(self, q: torch.Tensor) -> Any:
        if self.like_query and q.is_contiguous():
            return _empty_like(q)
        shape = q.shape[0], q.shape[1], self.dim_vo
        if isinstance(self.dtype, str):
            return fp4.empty(shape, self.device)
        return _empty(shape, dtype=self.dtype, device=self.device)

    def given_fp4(self, q: torch.Tensor, out: FP4Tensor) -> FP4Tensor:
        """Return the caller's NVFP4 output with the shape of the call, after a check that it overlaps nothing."""
        o = FP4Tensor(out.data, out.scale, out.scale_start_index, (q.shape[0], q.shape[1], self.dim_vo))
        pairs = (o.data, q), (o.scale, q), (o.data, o.scale)
        if overlap.folded(o.data) or any(overlap.overlap(a, b) for a, b in pairs):
            raise ValueError("out")
        return o

    def pass_quantised(self, flat: list[Any], o: Any, sf_scale: float | None) -> None:
        """Set the arguments of an output with less than 16 bits. sf_scale: the forward scale of an NVFP4 output."""
        slots = self.slots
        if isinstance(o, torch.Tensor):
            flat[slots.o_fp8] = o.view(torch.uint8)
            return
        if sf_scale.__class__ is not float or not 0 < sf_scale < INF:
            check_number("out_sf_scale", sf_scale, positive=True)
        flat[slots.o_fp4], flat[slots.o_sf] = o.data, o.scale.view(torch.uint8).view(-1)
        flat[slots.o_sf_start], flat[slots.o_sf_scale] = o.scale_start_index, float(sf_scale)  # type: ignore[arg-type]

    def equal_offsets(self, batch: int, length: int, capturing: bool) -> Any:
        """Return int32 (batch + 1,), the offsets of requests with `length` query tokens each.

        A tensor that is kept is written before any other launch sees it and never freed: launches on other streams may
        read it, and so may those of graphs, in which a kernel would write a tensor of their own at each replay. Memory
        of a graph is not kept.
        """
        if self.offsets is not None:
            return self.offsets
        here, device = machine.current, self.device
        make = partial(torch.arange, 0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        if capturing or len(here.offsets) >= here.max_plans:
            return make()
        made = here.argument(scratch.kept(make, device, wait=True))
        self.offsets = found = here.offsets.setdefault((device, batch, length), made)
        return found


def plan_for(call: AttentionCall, arch: str, sms: int) -> LaunchPlan:
    """Return the plan of a valid call; NotImplementedError if no kernel serves it."""
    request = request_of(call)
    try:
        op, spec = dispatch.select(request, arch)
    except dispatch.UnsupportedRequest as error:
        field = FIELDS.get(error.field, error.field)
        if field == "head_scales":
            field = "out_scale" if call.scale_tensor is None or call.scale_tensor.numel() == 1 else "scale"
        name = checks.names_of(call)(field)
        raise NotImplementedError(f"{name}: no attention kernel: {error}") from None
    checks.kernel_tensors(call)
    here, device, heads = machine.current, call.q.device, call.q.shape[1]
    fn = here.kernel(op, spec, arch)
    packs = (
        spec.schedule == "stream_k" or request.rows <= PACK_GQA_MAX_Q and request.qhead_per_kvhead <= PACK_GQA_MAX_GROUP
    )
    group = request.qhead_per_kvhead if packs else 1
    blocks = CHUNK // spec.tile.n if call.batch_invariant else 0

    def empty(dtype: torch.dtype, *shape: int) -> Any:
        return here.argument(torch.empty(0, *shape, dtype=dtype, device=device))

    fp32, int32 = torch.float32, torch.int32
    default: dict[str, Any] = {
        "kv_starts": empty(int32),
        "v_scales_interleaved": int(request.interleaved),
        "window_left": NO_WINDOW,
        "causal": int(request.causal),
        "tree_mask": empty(int32, 1),
        "softmax_scale_ptr": empty(fp32),
        "soft_cap": 0.0,
        "skip_threshold": -INF,
        "o": empty(WIDE[spec.out[0]], heads, request.head_dim_vo),
        "lse": empty(fp32, heads),
        "sink": empty(fp32),
        "out_scale_ptr": empty(fp32),
        "o_fp8": empty(torch.uint8, heads, request.head_dim_vo),
        "o_fp4": empty(torch.uint8, heads, request.head_dim_vo // 2),
        "o_sf": empty(torch.uint8),
        "o_sf_start": 0,
        "o_sf_scale": 1.0,
        "grid": sms,
        "counters": empty(int32),
        "counter_base": 0,
        "enable_pdl": 1,
        "blocks_per_split": blocks,
    }
    names, dtype = args.fields(spec), call.result_dtype
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else 0  # a packed output is compared separately
    return LaunchPlan(
        fn=fn,
        flat=[default.get(name) for name in names],
        slots=ArgSlots(spec),
        device=device,
        single_device=here.device_count() == 1,
        dtype=dtype,
        out_is_16bit=dtype in WIDE.values(),
        like_query=request.head_dim_vo == call.q.shape[2] and dtype == call.q.dtype,
        dim_vo=request.head_dim_vo,
        token_bytes=heads * max(call.q.shape[2] * call.q.element_size(), request.head_dim_vo * size),
        pack_factor=group,
        num_tile_heads=heads // group,
        tile_m=spec.tile.m,
        sms=sms,
        stream_k=spec.schedule == "stream_k",
        counters_per_split=spec.tile.counters_per_split,
        split_keys=blocks * spec.tile.n if spec.schedule == "stream_k" else 0,
        checked=checking(),
    )


def run(call: AttentionCall) -> Any:
    """Run a call that nothing traces and nobody has checked, and return the result of its public function."""
    (
        _, phase, q, k, v, requests, max_q_len, scale, scale_tensor, out_scale, out_scale_tensor, causal, window_left,
        soft_cap, sinks, k_scales, v_scales, interleaved, drafts, skip, out, out_dtype, out_sf_scale, _, return_lse,
        batch_invariant, enable_pdl, custom_mask, mask_starts, alibi_slopes, rope,
    ) = call  # fmt: skip
    here = machine.current
    page_table, kv_lens, offsets, batch, shape_id, _, kv_starts, form = requests
    if (scale.__class__ is not float or out_scale.__class__ is not float or window_left.__class__ is not int
            or max_q_len.__class__ is not int or causal.__class__ is not bool or interleaved.__class__ is not bool
            or batch_invariant.__class__ is not bool or return_lse.__class__ is not bool
            or enable_pdl is not None and enable_pdl.__class__ is not bool
            or soft_cap is not None and soft_cap.__class__ is not float
            or skip is not None and skip.__class__ is not float):  # fmt: skip
        checks.scalars(call)
    try:
        tokens, heads, dim = q.shape
        rows = max_q_len if max_q_len < tokens else tokens
        rows = (rows - 1).bit_length() if rows > 0 else rows
        k_shape, v_shape = (k.shape, v.shape) if form != "ragged" else (_rowless(k), _rowless(v))
        rare = custom_mask is not None or alibi_slopes is not None or rope is not None
        key = (
            phase, q.get_device(), q.dtype, heads, dim, k.dtype, k_shape, v_shape, shape_id,
            (tokens, max_q_len) if offsets is None else rows, causal, window_left >= 0,
            None if soft_cap is None else soft_cap and (1 if 0 < soft_cap < INF else -1),
            None if skip is None else skip and (1 if 0 < skip < INF else -1),
            None if sinks is None else sinks.numel(), None if drafts is None else drafts.shape[1], interleaved,
            None if k_scales is None else (k_scales.dtype, k_scales.shape),
            None if v_scales is None else (v_scales.dtype, v_scales.shape),
            None if out is None else out.dtype, out_dtype, out_sf_scale is None, batch_invariant,
            None if scale_tensor is None else scale_tensor.numel(),
            None if out_scale_tensor is None else out_scale_tensor.numel(), _rare_key(call) if rare else None,
        )  # fmt: skip
        plan = here.plans.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        why = checks.reason(call)
        if why is None:
            raise
        raise why from None
    if plan is None:
        checks.validate(call)
        found = here.device_info(q.device)
        if found is None:
            return run_reference(call)
        plan = plan_for(call, *found)
        here.keep(key, plan)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):  # only the current device can be asked whether its stream captures
            return run(call)
    try:
        flat, slots, lse = plan.flat.copy(), plan.slots, call.lse
        o: Any = out
        if o is None or o.__class__ is FP4Tensor:
            o = plan.new_output(q) if o is None else plan.given_fp4(q, o)
        elif o.shape != (tokens, heads, plan.dim_vo) or not (whole := o.is_contiguous()) and overlap.folded(o):
            raise ValueError("out")
        else:
            apart, size = o.data_ptr() - q.data_ptr(), tokens * plan.token_bytes
            reach = size if apart < 0 or q.is_contiguous() else _most(q)
            if (-size < apart < reach or not whole) and overlap.overlap(o, q):
                raise ValueError("out")
        if lse is not None:
            if lse.shape != (tokens, heads) or not plan.lse_apart(lse, q, out):
                raise ValueError("lse")
            flat[slots.lse] = lse
        elif return_lse:
            flat[slots.lse] = lse = _empty((tokens, heads), dtype=torch.float32, device=plan.device)
        result = (o, lse) if return_lse else o
        if not 0 < scale < INF or not -INF < out_scale < INF:
            raise ValueError("scale")
        capturing = here.is_capturing()
        if plan.checked and not capturing:
            checks.validate(call)
            values.check(call, positive=True)
        if not tokens or not heads or not batch:
            return result
        if kv_starts is not None:
            _check_rows(call)
            flat[slots.kv_starts] = kv_starts
        if rope is not None and k.shape[0]:  # without pages there are no keys to rotate
            turned = rotated(call)
            q, k, page_table = turned.q, turned.k, turned.requests.page_table
        flat[slots.q], flat[slots.k], flat[slots.v] = q, k, v
        flat[slots.kv_lens], flat[slots.page_table] = kv_lens, page_table
        flat[slots.softmax_scale_log2], flat[slots.out_scale] = scale * LOG2E, out_scale + 0.0
        if plan.out_is_16bit:
            flat[slots.o] = o
        else:
            plan.pass_quantised(flat, o, out_sf_scale)
        if window_left >= 0:
            flat[slots.window_left] = min(window_left, NO_WINDOW)
        if sinks is not None:
            flat[slots.sink] = sinks
        if (soft_cap or scale_tensor is not None or out_scale_tensor is not None or k_scales is not None
                or drafts is not None or skip or enable_pdl is not None or rare):  # fmt: skip
            plan.set_optional_args(flat, call)
        flat[slots.cu_seqlens_q] = plan.equal_offsets(batch, max_q_len, capturing) if offsets is None else offsets
        pack_factor = plan.pack_factor
        tiles = plan.num_tile_heads * (tokens * pack_factor // plan.tile_m + batch)
        if not plan.stream_k:
            if batch * heads * (tokens // plan.tile_m + 1) >= MOST_TILES:
                raise _too_many_tiles(call, batch)
            flat[slots.grid] = tiles if tiles < plan.sms else plan.sms
            flat[slots.counters], flat[slots.counter_base] = scratch.launch_counter(plan.device, capturing)
        elif tokens * pack_factor * pack_factor >= checks.MOST_ROWS:
            raise ValueError("q")
        elif plan.split_keys:
            splits = tiles * (-(-checks.most_keys(call) // plan.split_keys) or 1)
            flat[slots.o_partial], flat[slots.counters] = scratch.new_split_scratch(plan, splits, splits)
        else:
            shared = scratch.split_scratch(plan, capturing)
            flat[slots.o_partial], flat[slots.counters], flat[slots.counter_base] = shared
        plan.fn(*flat)
        return result
    except Exception:
        why = checks.reason(call)  # names the argument that was refused
        if why is None:
            raise
        raise why from None


def _rare_key(call: AttentionCall) -> tuple[Any, ...]:
    """Return the plan's key for arguments that most calls do not have."""
    if call.rope is not None:
        checks.scalars(call)
    starts = None if call.custom_mask is None or call.mask_starts is None else call.mask_starts.numel()
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.numel()
    return call.custom_mask is None, starts, slopes, call.rope is None


def _rowless(t: torch.Tensor) -> tuple[int, int]:
    """Return the plan's key for K or V without pages, the rows of which vary from step to step."""
    _, heads, _, dim = t.shape
    return heads, dim


def _check_rows(call: AttentionCall) -> None:
    """Raise on a property of CSR or ragged requests that is not part of their plan's key."""
    rows, r = call.k.shape[2], call.requests
    if rows * (r.page_table.shape[2] or 1) >= checks.MOST_KEYS or r.form == "ragged" and rows != call.v.shape[2]:
        raise ValueError("k")


def _most(q: torch.Tensor) -> int:
    """Return an upper bound of the number of bytes from a query's first byte to its last."""
    (tokens, heads, dim), (token, head, _) = q.shape, q.stride()
    return 2 * (tokens * token + heads * head + dim)


def _too_many_tiles(call: AttentionCall, batch: int) -> NotImplementedError:
    tokens, heads, _ = call.q.shape
    need = f"must be less than {MOST_TILES} tiles on CUDA, counted as if each request owned all tokens"
    return NotImplementedError(
        f"{checks.names_of(call)('q')}: {tokens} tokens of {heads} heads, {batch} requests, {need}"
    )


def run_reference(call: AttentionCall) -> Any:
    """Compute a valid call in fp32 torch on its own device, and write out and lse; meta tensors are only allocated.

    Skip-softmax skips nothing here.
    """
    if not call.q.is_meta:
        values.check(call)
    out, lse = outputs(call)
    if not call.q.is_meta:
        with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
            o, found = reference.paged_attention(call)
            reference.store(o, out, call.out_sf_scale)
            if lse is not None:
                lse.copy_(found)
    return (out, lse) if call.return_lse else out


def outputs(call: AttentionCall) -> tuple[Any, torch.Tensor | None]:
    """Return (out, lse) of a call, new unless the caller gave them; lse is None if nobody asks for it."""
    out: Any = call.out
    shape, dtype, lse = (call.q.shape[0], call.q.shape[1], call.dim_vo), call.result_dtype, call.lse
    if isinstance(out, FP4Tensor):
        out = FP4Tensor(out.data, out.scale, out.scale_start_index, shape)
    elif out is None:
        out = fp4.empty(shape, call.q.device) if isinstance(dtype, str) else call.q.new_empty(shape, dtype=dtype)
    if lse is None and call.return_lse:
        lse = call.q.new_empty(shape[:2], dtype=torch.float32)
    return out, lse
