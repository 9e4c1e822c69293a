"""Make the launch plan of an attention call from its static properties, and launch calls by their plans.

Host time: if the dtypes, shapes (except the token count) and optional arguments of a call were seen before, the call is
one dictionary lookup and the compiled call, which itself checks rank, dtype, device, alignment and strides. Nothing
here synchronises or reads device values.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
FIELDS = {  # fact -> field of AttentionCall
    "arch": "q", "kv": "k", "page_size": "k", "source": "k", "head_dim": "q", "out": "out_dtype",
    "alibi": "alibi_slopes",
}  # fmt: skip
_Tensor = torch.Tensor  # module globals: each saves an attribute look-up, 20 ns
_empty, _empty_like = torch.empty, torch.empty_like


def facts_of(p: AttentionCall) -> KernelRequest:
    """Return the kernel request of a valid call."""
    rows = min(p.max_q_len, p.q.shape[0])
    if p.requests.cu_seqlens_q is not None:  # plans depend only on the next power of two
        rows = 1 << max(rows - 1, 0).bit_length()
    ragged, masked = p.requests.form == "ragged", p.custom_mask is not None
    return KernelRequest(
        q=TYPES[p.q.dtype],
        kv=TYPES[p.k.dtype],
        out=TYPES[p.result_dtype],
        head_dim_qk=p.q.shape[2],
        head_dim_vo=p.dim_vo,
        page_size=0 if ragged else p.k.shape[2],
        group=p.q.shape[1] // p.k.shape[1],
        rows=rows,
        phase=p.phase,
        causal=bool(p.causal) and not masked,
        window=p.window_left >= 0,
        drafts=p.drafts is not None,
        soft_cap=bool(p.soft_cap),
        skip=bool(p.skip),
        interleaved=bool(p.interleaved),
        batch_invariant=bool(p.batch_invariant),
        source="ragged" if ragged else "paged",
        custom_mask=masked,
        alibi=p.alibi_slopes is not None,
        head_scales=any(t is not None and t.numel() > 1 for t in (p.scale_tensor, p.out_scale_tensor)),
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
    in the form that the kernel converts fastest. at: the positions of the arguments in flat.
    """

    fn: Callable[..., None]  # the compiled kernel
    flat: list[Any]
    at: Any  # an ArgSlots
    device: torch.device
    alone: bool  # it is the only device of the process
    dtype: torch.dtype | str  # of the output
    wide: bool  # the output has 16 bits
    like_query: bool  # the output has the query's dtype and head_dim: empty_like is 1 us cheaper than empty
    dim_vo: int
    token_bytes: int  # bytes of a token of the query or of the output, the larger of both, if they are contiguous
    pack_factor: int  # rows of a token: the GQA group if it is packed into rows for all requests, else 1
    tile_heads: int
    tile_rows: int  # the largest number of query rows of a tile
    sms: int
    stream_k: bool  # CTAs share the keys of a request
    counters_per_split: int  # of a tile
    split_keys: int  # keys of a split if splits do not depend on the batch, else 0
    checked: bool  # values are read and checked before a launch
    offsets: Any = None  # (B + 1,) int32, offsets of requests of equal length, in the form of `HostMachine.argument`

    def modify(self, flat: list[Any], p: AttentionCall) -> None:
        """Set the arguments that most calls do not have."""
        at = self.at
        if p.soft_cap:
            flat[at.soft_cap] = float(p.soft_cap)
        if p.skip:
            flat[at.skip_threshold] = log2(p.skip)
        if p.drafts is not None:
            flat[at.tree_mask] = p.drafts
        scale, out_scale = p.scale_tensor, p.out_scale_tensor
        if scale is not None:
            flat[at.softmax_scale_ptr] = scale if scale.ndim == 1 else scale.reshape(-1)
        if out_scale is not None:
            flat[at.out_scale_ptr] = out_scale if out_scale.ndim == 1 else out_scale.reshape(-1)
        if p.k_scales is not None and p.v_scales is not None:
            flat[at.k_scales], flat[at.v_scales] = p.k_scales.view(torch.uint8), p.v_scales.view(torch.uint8)
        if p.enable_pdl is not None:
            flat[at.enable_pdl] = 1 if p.enable_pdl else 0
        if p.custom_mask is not None:
            if p.custom_mask.shape[0] >= checks.MOST_MASK:
                raise ValueError("custom_mask")
            flat[at.custom_mask], flat[at.mask_starts] = p.custom_mask, p.mask_starts
        if p.alibi_slopes is not None:
            flat[at.alibi_slopes] = p.alibi_slopes

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
        at = self.at
        if isinstance(o, torch.Tensor):
            flat[at.o_fp8] = o.view(torch.uint8)
            return
        if sf_scale.__class__ is not float or not 0 < sf_scale < INF:
            check_number("out_sf_scale", sf_scale, positive=True)
        flat[at.o_fp4], flat[at.o_sf] = o.data, o.scale.view(torch.uint8).view(-1)
        flat[at.o_sf_start], flat[at.o_sf_scale] = o.scale_start_index, float(sf_scale)  # type: ignore[arg-type]

    def equal_offsets(self, batch: int, length: int, capturing: bool) -> Any:
        """Return int32 (batch + 1,), the offsets of requests with `length` query tokens each.

        A tensor that is kept is written before any other launch sees it and never freed: launches on other streams may
        read it, and so may those of graphs, in which a kernel would write a tensor of their own at each replay. Memory
        of a graph is not kept.
        """
        if self.offsets is not None:
            return self.offsets
        here = machine.current
        made = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=self.device)
        if not capturing and len(here.offsets) < here.max_plans:
            here.synchronize(self.device)
            self.offsets = made = here.offsets.setdefault((self.device, batch, length), here.argument(made))
        return made


def plan_for(p: AttentionCall, arch: str, sms: int) -> LaunchPlan:
    """Return the plan of a valid call; NotImplementedError if no kernel serves it."""
    facts = facts_of(p)
    try:
        op, spec = dispatch.select(facts, arch)
    except dispatch.UnsupportedRequest as error:
        field = FIELDS.get(error.field, error.field)
        if field == "head_scales":
            field = "out_scale" if p.scale_tensor is None or p.scale_tensor.numel() == 1 else "scale"
        name = checks.names_of(p)(field)
        raise NotImplementedError(f"{name}: no attention kernel: {error}") from None
    checks.kernel_tensors(p)
    here, device, heads = machine.current, p.q.device, p.q.shape[1]
    fn = here.kernel(op, spec, arch)
    packs = spec.schedule == "stream_k" or facts.rows <= PACK_GQA_MAX_Q and facts.group <= PACK_GQA_MAX_GROUP
    group = facts.group if packs else 1
    blocks = CHUNK // spec.tile.n if p.batch_invariant else 0

    def empty(dtype: torch.dtype, *shape: int) -> Any:
        return here.argument(torch.empty(0, *shape, dtype=dtype, device=device))

    fp32, int32 = torch.float32, torch.int32
    default: dict[str, Any] = {
        "kv_starts": empty(int32),
        "v_scales_interleaved": int(facts.interleaved),
        "window_left": NO_WINDOW,
        "causal": int(facts.causal),
        "tree_mask": empty(int32, 1),
        "softmax_scale_ptr": empty(fp32),
        "soft_cap": 0.0,
        "skip_threshold": -INF,
        "o": empty(WIDE[spec.out[0]], heads, facts.head_dim_vo),
        "lse": empty(fp32, heads),
        "sink": empty(fp32),
        "out_scale_ptr": empty(fp32),
        "o_fp8": empty(torch.uint8, heads, facts.head_dim_vo),
        "o_fp4": empty(torch.uint8, heads, facts.head_dim_vo // 2),
        "o_sf": empty(torch.uint8),
        "o_sf_start": 0,
        "o_sf_scale": 1.0,
        "grid": sms,
        "counters": empty(int32),
        "counter_base": 0,
        "enable_pdl": 1,
        "blocks_per_split": blocks,
    }
    names, dtype = args.fields(spec), p.result_dtype
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else 0  # a packed output is compared separately
    return LaunchPlan(
        fn=fn,
        flat=[default.get(name) for name in names],
        at=ArgSlots(spec),
        device=device,
        alone=here.device_count() == 1,
        dtype=dtype,
        wide=dtype in WIDE.values(),
        like_query=facts.head_dim_vo == p.q.shape[2] and dtype == p.q.dtype,
        dim_vo=facts.head_dim_vo,
        token_bytes=heads * max(p.q.shape[2] * p.q.element_size(), facts.head_dim_vo * size),
        pack_factor=group,
        tile_heads=heads // group,
        tile_rows=spec.tile.m,
        sms=sms,
        stream_k=spec.schedule == "stream_k",
        counters_per_split=spec.tile.counters_per_split,
        split_keys=blocks * spec.tile.n if spec.schedule == "stream_k" else 0,
        checked=checking(),
    )


def run(p: AttentionCall) -> Any:
    """Run a call that nothing traces and nobody has checked, and return the result of its public function."""
    (
        _, phase, q, k, v, requests, max_q_len, scale, scale_tensor, out_scale, out_scale_tensor, causal, window_left,
        soft_cap, sinks, k_scales, v_scales, interleaved, drafts, skip, out, out_dtype, out_sf_scale, _, return_lse,
        batch_invariant, enable_pdl, custom_mask, mask_starts, alibi_slopes, rope,
    ) = p  # fmt: skip
    here = machine.current
    page_table, kv_lens, offsets, batch, facts, _, kv_starts, form = requests
    if (scale.__class__ is not float or out_scale.__class__ is not float or window_left.__class__ is not int
            or max_q_len.__class__ is not int or causal.__class__ is not bool or interleaved.__class__ is not bool
            or batch_invariant.__class__ is not bool or return_lse.__class__ is not bool
            or enable_pdl is not None and enable_pdl.__class__ is not bool
            or soft_cap is not None and soft_cap.__class__ is not float
            or skip is not None and skip.__class__ is not float):  # fmt: skip
        checks.scalars(p)
    try:
        tokens, heads, dim = q.shape
        rows = max_q_len if max_q_len < tokens else tokens
        rows = (rows - 1).bit_length() if rows > 0 else rows
        k_shape, v_shape = (k.shape, v.shape) if form != "ragged" else (_rowless(k), _rowless(v))
        rare = custom_mask is not None or alibi_slopes is not None or rope is not None
        key = (
            phase, q.get_device(), q.dtype, heads, dim, k.dtype, k_shape, v_shape, facts,
            (tokens, max_q_len) if offsets is None else rows, causal, window_left >= 0,
            None if soft_cap is None else soft_cap and (1 if 0 < soft_cap < INF else -1),
            None if skip is None else skip and (1 if 0 < skip < INF else -1),
            None if sinks is None else sinks.numel(), None if drafts is None else drafts.shape[1], interleaved,
            None if k_scales is None else (k_scales.dtype, k_scales.shape),
            None if v_scales is None else (v_scales.dtype, v_scales.shape),
            None if out is None else out.dtype, out_dtype, out_sf_scale is None, batch_invariant,
            None if scale_tensor is None else scale_tensor.numel(),
            None if out_scale_tensor is None else out_scale_tensor.numel(), _rare_facts(p) if rare else None,
        )  # fmt: skip
        plan = here.plans.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        why = checks.reason(p)
        if why is None:
            raise
        raise why from None
    if plan is None:
        checks.validate(p)
        found = here.facts(q.device)
        if found is None:
            return run_reference(p)
        plan = plan_for(p, *found)
        here.keep(key, plan)
    if not plan.alone and here.current_device() != plan.device.index:
        with here.on(plan.device):  # only the current device can be asked whether its stream captures
            return run(p)
    try:
        flat, at, lse = plan.flat.copy(), plan.at, p.lse
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
            flat[at.lse] = lse
        elif return_lse:
            flat[at.lse] = lse = _empty((tokens, heads), dtype=torch.float32, device=plan.device)
        result = (o, lse) if return_lse else o
        if not 0 < scale < INF or not -INF < out_scale < INF:
            raise ValueError("scale")
        capturing = here.is_capturing()
        if plan.checked and not capturing:
            checks.validate(p)
            values.check(p, positive=True)
        if not tokens or not heads or not batch:
            return result
        if kv_starts is not None:
            _check_rows(p)
            flat[at.kv_starts] = kv_starts
        if rope is not None and k.shape[0]:  # without pages there are no keys to rotate
            call = rotated(p)
            q, k, page_table = call.q, call.k, call.requests.page_table
        flat[at.q], flat[at.k], flat[at.v], flat[at.kv_lens], flat[at.page_table] = q, k, v, kv_lens, page_table
        flat[at.softmax_scale_log2], flat[at.out_scale] = scale * LOG2E, out_scale + 0.0
        if plan.wide:
            flat[at.o] = o
        else:
            plan.pass_quantised(flat, o, out_sf_scale)
        if window_left >= 0:
            flat[at.window_left] = min(window_left, NO_WINDOW)
        if sinks is not None:
            flat[at.sink] = sinks
        if (soft_cap or scale_tensor is not None or out_scale_tensor is not None or k_scales is not None
                or drafts is not None or skip or enable_pdl is not None or rare):  # fmt: skip
            plan.modify(flat, p)
        flat[at.cu_seqlens_q] = plan.equal_offsets(batch, max_q_len, capturing) if offsets is None else offsets
        pack_factor, tile_heads = plan.pack_factor, plan.tile_heads
        full = tokens * pack_factor // plan.tile_rows
        tiles = tile_heads * (full + batch)
        if not plan.stream_k:
            if batch * heads * (tokens // plan.tile_rows + 1) >= MOST_TILES:
                raise _too_many_tiles(p, batch)
            flat[at.grid] = tiles if tiles < plan.sms else plan.sms
            flat[at.counters], flat[at.counter_base] = scratch.launch_counter(plan.device, capturing)
        elif tokens * pack_factor * pack_factor >= checks.MOST_ROWS:
            raise ValueError("q")
        elif plan.split_keys:
            num_splits = -(-checks.most_keys(p) // plan.split_keys) or 1  # of a request
            flat[at.o_partial], flat[at.counters] = scratch.new_splits(plan, tiles * num_splits, tiles * num_splits)
        else:
            flat[at.o_partial], flat[at.counters], flat[at.counter_base] = scratch.splits(plan, capturing)
        plan.fn(*flat)
        return result
    except Exception:
        why = checks.reason(p)  # names the argument that was refused
        if why is None:
            raise
        raise why from None


def _rare_facts(p: AttentionCall) -> tuple[Any, ...]:
    """Return the plan's key for arguments that most calls do not have."""
    if p.rope is not None:
        checks.scalars(p)
    starts = None if p.custom_mask is None or p.mask_starts is None else p.mask_starts.numel()
    slopes = None if p.alibi_slopes is None else p.alibi_slopes.numel()
    return p.custom_mask is None, starts, slopes, p.rope is None


def _rowless(t: torch.Tensor) -> tuple[int, int]:
    """Return the plan's key for K or V without pages, the rows of which vary from step to step."""
    _, heads, _, dim = t.shape
    return heads, dim


def _check_rows(p: AttentionCall) -> None:
    """Raise on a property of CSR or ragged requests that is not part of their plan's key."""
    rows, r = p.k.shape[2], p.requests
    if rows * (r.page_table.shape[2] or 1) >= checks.MOST_KEYS or r.form == "ragged" and rows != p.v.shape[2]:
        raise ValueError("k")


def _most(q: torch.Tensor) -> int:
    """Return an upper bound of the number of bytes from a query's first byte to its last."""
    (tokens, heads, dim), (token, head, _) = q.shape, q.stride()
    return 2 * (tokens * token + heads * head + dim)


def _too_many_tiles(p: AttentionCall, batch: int) -> NotImplementedError:
    tokens, heads, _ = p.q.shape
    need = f"must be less than {MOST_TILES} tiles on CUDA, counted as if each request owned all tokens"
    return NotImplementedError(f"{checks.names_of(p)('q')}: {tokens} tokens of {heads} heads, {batch} requests, {need}")


def run_reference(p: AttentionCall) -> Any:
    """Compute a valid call in fp32 torch on its own device, and write out and lse; meta tensors are only allocated.

    Skip-softmax skips nothing here.
    """
    if not p.q.is_meta:
        values.check(p)
    out, lse = outputs(p)
    if not p.q.is_meta:
        with torch.no_grad(), torch.autocast(p.q.device.type, enabled=False):
            o, found = reference.paged_attention(p)
            reference.store(o, out, p.out_sf_scale)
            if lse is not None:
                lse.copy_(found)
    return (out, lse) if p.return_lse else out


def outputs(p: AttentionCall) -> tuple[Any, torch.Tensor | None]:
    """Return (out, lse) of a call, new unless the caller gave them; lse is None if nobody asks for it."""
    out: Any = p.out
    shape, dtype, lse = (p.q.shape[0], p.q.shape[1], p.dim_vo), p.result_dtype, p.lse
    if isinstance(out, FP4Tensor):
        out = FP4Tensor(out.data, out.scale, out.scale_start_index, shape)
    elif out is None:
        out = fp4.empty(shape, p.q.device) if isinstance(dtype, str) else p.q.new_empty(shape, dtype=dtype)
    if lse is None and p.return_lse:
        lse = p.q.new_empty(shape[:2], dtype=torch.float32)
    return out, lse
