"""Make the launch plan of an attention call from its static properties, and launch calls by their plans.

A call has a key: its options, and the dtypes and shapes of its tensors except the number of tokens (`key_of`). If the
key was seen before, the call is a dictionary look-up, the tensors put in their places (`LaunchPlan.bind`), and the
compiled call (`LaunchPlan.launch`), which itself checks rank, dtype, device, alignment and strides. Nothing here
synchronises or reads device values. `bound` has launches that keep their plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any, NamedTuple, cast

import torch

from cute_kernels.attention import args, dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.schedule import policy
from cute_kernels.attention.spec import MASK_LIST_HEADER, PACK_GQA_MAX_GROUP, PACK_GQA_MAX_Q

from .. import fp4, reference
from ..fp4 import FP4Tensor
from ..host import machine, overlap, scratch
from ..host.checks import INF, checking, raise_reason
from ..reference import LOG2E
from . import checks, launch_size, values
from .call import OPTIONAL, OPTIONS, AttentionCall
from .optional import OPTIONAL_TENSORS, bounds, per_token
from .rope import rotated
from .sharing import SharedKeys

MOST_TILES = 1 << 31  # bound of the tiles of a launch with whole tiles, whatever the offsets
MOST_M_TILES = 64  # `ScheduleArgs.m_tiles`
WHOLE = 1 << 26  # KV blocks of a split of a call over latent rows that must not split keys: more than there are
CHUNK = 4096  # keys of a split in the batch-invariant mode, rounded down to whole KV blocks
WIDE = {"bf16": torch.bfloat16, "fp16": torch.float16}
TYPES: dict[Any, str] = {**checks.TYPES, "nvfp4": "nvfp4"}
FIELDS = {  # field of KernelRequest -> field of AttentionCall
    "arch": "q", "kv": "k", "page_size": "k", "source": "k", "head_dim": "q", "out": "out_dtype", "rows": "q",
    "alibi": "alibi_slopes", "kv_scales": "scales",
}  # fmt: skip
_Tensor = torch.Tensor  # module globals: each saves an attribute look-up, 20 ns
_empty, _empty_like = torch.empty, torch.empty_like


_FACTS = tuple(t.fact for t in OPTIONAL_TENSORS.values())


def key_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return all that the plan of a call depends on. Raises if an argument is not what it must be."""
    first: Any = call[: OPTIONS.start]
    signature, q, k, v, r, most = first
    tokens, heads, dim = q.shape
    if r.cu_seqlens_q is None:
        rows: Any = tokens, most
    elif most <= 0:
        rows = most
    else:  # the power of two above the longest query; a single token is known to be all of its request
        rows = "single" if tokens == 1 else (max(min(most, tokens), 1) - 1).bit_length()
    if r.form == "table" or r.form == "slots":
        caches: Any = k.shape, v.shape
    elif r.form == "csr":
        caches = k.shape, v.shape, _keys(call)
    else:
        caches = k.shape[1], k.shape[3], v.shape[1], v.shape[3], _keys(call)
    out, at = call.out, 0
    facts: tuple[Any, ...] = ()
    optional: Any = call[OPTIONAL]
    for t in optional:
        if t is not None:
            facts = *facts, at, _FACTS[at](t)
        at += 1
    return (
        call[OPTIONS], signature, q.get_device(), q.dtype, heads, dim, k.dtype, caches, r.shape_id, rows,
        None if out is None else out.dtype, facts,
    )  # fmt: skip


def _keys(call: AttentionCall) -> int:
    """Return an upper bound of the keys of a request, or of their mean if requests have no table.

    It is a power of two unless there is a table.
    """
    r, rows = call.requests, call.k.shape[2]
    if r.form in ("table", "slots"):
        return checks.most_keys(call)
    mean = (rows if r.form == "ragged" else rows * r.page_table.shape[2]) // max(r.batch, 1)
    return 1 << max(mean - 1, 0).bit_length()


def _visible_keys(call: AttentionCall, rows: int) -> int:
    """Return an upper bound of the keys that the tokens of a request see, of which there are at most `rows`. The mask
    must be causal: otherwise a window has no end."""
    windows = [width for width in (call.window_left + 1, call.chunk) if width > 0]
    return min([KernelRequest.visible_keys, *(width + rows for width in windows)])


def request_of(call: AttentionCall, sms: int = 132) -> KernelRequest:
    """Return the kernel request of a valid call on a GPU of `sms` SMs."""
    rows, kv_heads = min(call.max_q_len, call.q.shape[0]), call.k.shape[1]
    equal = call.requests.cu_seqlens_q is None
    if not equal:  # plans depend only on the next power of two
        rows = 1 << max(rows - 1, 0).bit_length()
    single = call.q.shape[0] == 1 or equal and call.max_q_len == 1  # the last row of its request sees all keys
    form, masked = call.requests.form, call.custom
    ragged = form == "ragged"
    causal = (call.causal or single) and not masked and form != "slots"
    found = KernelRequest(
        q=TYPES[call.q.dtype],
        kv="bf16" if call.record else TYPES[call.k.dtype],
        out=TYPES[call.result_dtype],
        kv_scales=call.kv_scales,
        head_dim_qk=call.dim_qk,
        head_dim_vo=call.dim_vo,
        page_size=0 if ragged else call.k.shape[2],
        qhead_per_kvhead=call.q.shape[1] // kv_heads,
        rows=rows,
        kv_heads=kv_heads * call.requests.batch,
        keys=_keys(call),
        sms=sms,
        split_kv=call.split_kv,
        causal=causal,
        window=call.window_left >= 0,
        chunk=call.chunk > 0,
        prefix=call.prefix_lens is not None and causal and not single,
        visible_keys=_visible_keys(call, rows) if causal else KernelRequest.visible_keys,
        drafts=call.drafts is not None,
        soft_cap=bool(call.soft_cap),
        skip=bool(call.skip),
        interleaved=bool(call.interleaved),
        source=form if form in ("ragged", "slots") else "paged",
        custom_mask=masked,
        alibi=call.alibi_slopes is not None,
        head_scales=any(t is not None and t.numel() > 1 for t in (call.scale_tensor, call.out_scale_tensor)),
        shares_v=call.shares_v,
        extra=call.extra_k is not None,
        record=call.record,
        extra_record=call.extra_record,
    )
    shared = SharedKeys.of(call)
    return found if shared is None else shared.request(found)


class MaskLists(NamedTuple):
    """The size of the lists of KV blocks that a launch with a custom mask makes, see `attention.mask_blocks`.

    group: rows of a token in tiles with PackGQA. tile_m: the least number of rows of a tile. tile_n: keys of a block.
    """

    group: int
    tile_m: int
    tile_n: int

    def empty(self, call: AttentionCall, q: torch.Tensor) -> torch.Tensor:
        """Return int32 (rows, MASK_LIST_HEADER + blocks of the longest possible request), uninitialised."""
        rows, keys = q.shape[0] * self.group // self.tile_m + call.requests.batch, checks.most_keys(call)
        return _empty((rows, MASK_LIST_HEADER + -(-keys // self.tile_n)), dtype=torch.int32, device=q.device)


class ArgSlots:
    """The position of each argument in a kernel's launch, by name. Slots: a look-up takes a fifth of a dict's time."""

    __slots__ = tuple(name for block in args.BLOCKS for name in block._fields)

    def __init__(self, spec: Any) -> None:
        for index, name in enumerate(args.fields(spec)):
            setattr(self, name, index)


@dataclass(slots=True, eq=False)
class LaunchPlan:
    """A compiled kernel and all that a launch needs beyond the call's own tensors.

    flat: the kernel's arguments; those that are tensors of a call are empty there, in the form that the kernel converts
    fastest. slots: the positions of the arguments in flat. optional: (field of the call, slot, view) of each optional
    tensor that the calls of this plan have.
    """

    fn: Callable[..., None]  # the compiled kernel
    flat: list[Any]
    slots: Any  # an ArgSlots
    optional: tuple[tuple[str, int, Any], ...]
    per_token: tuple[str, ...]  # fields of optional tensors with a row per token
    types: tuple[type, ...]  # of the options: 1, 1.0 and True are equal, hence so are keys
    device: torch.device
    single_device: bool  # it is the only device of the process
    dtype: torch.dtype | str  # of the output
    out_is_16bit: bool  # the output has 16 bits
    like_query: bool  # the output has the query's dtype and head_dim: empty_like is 1 us cheaper than empty
    return_lse: bool
    heads: int
    lse_columns: int
    dim_vo: int
    batch: int
    token_bytes: int  # bytes of a token of the query or of the output, the larger of both, if they are contiguous
    pack_factor: int  # rows of a token: the GQA group if it is packed into rows for all requests, else 1
    num_tile_heads: int
    o_tiles: int  # tiles that share the columns of the output of a row
    tile_m: int  # the largest number of query rows of a tile
    cluster: int  # CTAs that compute a tile together
    most_ctas: int  # CTAs, or clusters, of a launch: those that are on the GPU at a time
    stream_k: bool  # CTAs share the keys of a request
    counters_per_split: int  # of a tile
    split_keys: int  # keys of a split if splits do not depend on the batch, else 0
    checked: bool  # values are read and checked before a launch
    lists: MaskLists | None = None  # with a custom mask
    shared: SharedKeys | None = None  # with tokens that share keys, which then are the sequences of a batch
    offsets: Any = None  # (B + 1,) int32, offsets of requests of equal length, in the form of `HostMachine.argument`

    def bind(self, call: AttentionCall, capturing: bool) -> list[Any]:
        """Return the arguments of a launch with the call's tensors, except the query, the outputs and the schedule."""
        flat, slots, r = self.flat.copy(), self.slots, call.requests
        flat[slots.k], flat[slots.v] = call.k, call.v
        flat[slots.kv_lens], flat[slots.page_table] = r.kv_lens, r.page_table
        if r.kv_starts is not None:
            _check_rows(call)
            flat[slots.kv_starts] = r.kv_starts
        if self.shared is not None:
            flat[slots.cu_seqlens_q] = self.equal_offsets(self.batch, self.shared.size, capturing)
        elif r.cu_seqlens_q is None:
            flat[slots.cu_seqlens_q] = self.equal_offsets(r.batch, call.max_q_len, capturing)
        else:
            flat[slots.cu_seqlens_q] = r.cu_seqlens_q
        for field, slot, view in self.optional:
            t = getattr(call, field)
            flat[slot] = t if view is None else view(t)
        for field in self.per_token:
            if getattr(call, field).shape[0] != call.q.shape[0]:
                rows = f"{getattr(call, field).shape[0]} rows, must be the query's {call.q.shape[0]}"
                raise ValueError(f"{checks.names_of(call)(field)}: {rows}")
        return flat

    def launch(self, flat: list[Any], call: AttentionCall, q: Any, out: Any, lse: Any, capturing: bool) -> Any:
        """Launch a call that is bound to flat, and return its result.

        q, out, lse: replace those of the call.
        """
        slots, tokens = self.slots, q.shape[0]
        o = self.new_output(q) if out is None else self.given_output(call, q, out)
        if lse is not None:
            if lse.shape != (tokens, self.lse_columns) or not self.lse_apart(lse, q, out):
                raise _refused(call, "lse", lse, (tokens, self.lse_columns))
            flat[slots.lse] = lse
        elif self.return_lse:
            flat[slots.lse] = lse = _empty((tokens, self.lse_columns), dtype=torch.float32, device=self.device)
        result = (o, lse) if self.return_lse else o
        if self.checked and not capturing:
            checks.validate(call)
            values.check(call, positive=True)
        if not tokens or not self.heads or not self.batch:
            return result
        if call.rope is not None and call.k.shape[0]:  # without pages there are no keys to rotate
            turned = rotated(call, flat[slots.cu_seqlens_q])
            q, flat[slots.k], flat[slots.page_table] = turned.q, turned.k, turned.requests.page_table
        flat[slots.q] = q
        if self.out_is_16bit:
            flat[slots.o] = o
        else:
            self.pass_quantised(flat, o)
        self.schedule(flat, call, q, capturing)
        self.fn(*flat)
        return result

    def schedule(self, flat: list[Any], call: AttentionCall, q: torch.Tensor, capturing: bool) -> None:
        """Set the arguments of the tile scheduler or of split keys. q: replaces that of the call."""
        slots, factor, tokens = self.slots, self.pack_factor, q.shape[0]
        if self.shared is not None:
            for name, t in self.shared.scratch(self.device).items():
                flat[getattr(slots, name)] = t
        tiles = self.num_tile_heads * self.o_tiles * (tokens * factor // self.tile_m + self.batch)
        if not self.stream_k:
            if self.batch * self.heads * self.o_tiles * (tokens // self.tile_m + 1) >= MOST_TILES:
                raise _too_many_tiles(call._replace(q=q), self.batch)
            flat[slots.grid] = tiles if tiles < self.most_ctas else self.most_ctas
            flat[slots.counters], flat[slots.counter_base] = scratch.launch_counter(self.device, capturing)
            if self.lists is not None:
                flat[slots.mask_blocks] = self.lists.empty(call, q)
        elif tokens * factor * factor >= checks.MOST_ROWS and self.has_too_many_rows(call, tokens):
            raise _too_many_rows(call, f"{tokens} tokens of {self.heads} heads", "tokens of a request x {0} x {0}")
        elif self.split_keys:
            splits = tiles * self.cluster * (-(-checks.most_keys(call) // self.split_keys) or 1)
            splits = 1 if call.shares_v else splits  # its tiles are whole
            flat[slots.o_partial], flat[slots.counters] = scratch.new_split_scratch(self, splits, splits)
        else:
            shared = scratch.split_scratch(self, capturing)
            flat[slots.o_partial], flat[slots.counters], flat[slots.counter_base] = shared

    def has_too_many_rows(self, call: AttentionCall, tokens: int) -> bool:
        """Return whether a request may have more rows than kernels divide exactly. If only the device knows how many
        tokens each request has, one may have all `tokens`."""
        if self.shared is not None:
            tokens = self.shared.size
        elif call.requests.cu_seqlens_q is None:
            tokens = call.max_q_len
        return tokens * self.pack_factor**2 >= checks.MOST_ROWS

    def given_output(self, call: AttentionCall, q: torch.Tensor, out: Any) -> Any:
        """Return the caller's output with the shape of the call, after a check that it overlaps nothing."""
        if out.__class__ is FP4Tensor:
            return self.given_fp4(call, q, out)
        shape = q.shape[0], self.heads, self.dim_vo
        if out.shape != shape or not (whole := out.is_contiguous()) and overlap.folded(out):
            raise _refused(call, "out", out, shape)
        apart, size = out.data_ptr() - q.data_ptr(), q.shape[0] * self.token_bytes
        reach = size if apart < 0 or q.is_contiguous() else _most(q)
        if (-size < apart < reach or not whole) and overlap.overlap(out, q):
            raise _refused(call, "out", out, shape)
        if call.q_rope is not None and overlap.overlap(out, call.q_rope):
            raise _refused(call, "out", out, shape)
        return out

    def lse_apart(self, lse: torch.Tensor, q: torch.Tensor, out: Any) -> bool:
        """Return whether lse shares no byte with the query, the given output or another element of itself."""
        if not lse.is_contiguous() and overlap.folded(lse):
            return False
        if out.__class__ is FP4Tensor:
            return not any(overlap.overlap(lse, t) for t in (q, out.data, out.scale))
        start, size = lse.data_ptr(), lse.nbytes
        for t in (q,) if out is None else (q, out):
            apart = t.data_ptr() - start
            behind = self.token_bytes * q.shape[0] if t.is_contiguous() else _most(t)
            if -behind < apart < size and overlap.overlap(lse, t):
                return False
        return True

    def new_output(self, q: torch.Tensor) -> Any:
        if self.like_query and q.is_contiguous():
            return _empty_like(q)
        shape = q.shape[0], q.shape[1], self.dim_vo
        if isinstance(self.dtype, str):
            return fp4.empty(shape, self.device)
        return _empty(shape, dtype=self.dtype, device=self.device)

    def given_fp4(self, call: AttentionCall, q: torch.Tensor, out: FP4Tensor) -> FP4Tensor:
        """Return the caller's NVFP4 output with the shape of the call, after a check that it overlaps nothing."""
        o = FP4Tensor(out.data, out.scale, out.scale_start_index, (q.shape[0], q.shape[1], self.dim_vo))
        pairs = (o.data, q), (o.scale, q), (o.data, o.scale)
        if overlap.folded(o.data) or any(overlap.overlap(a, b) for a, b in pairs):
            raise _refused(call, "out", o.data, (*o.data.shape[:2], self.dim_vo // 2))
        return o

    def pass_quantised(self, flat: list[Any], o: Any) -> None:
        """Set the arguments of an output with less than 16 bits."""
        slots = self.slots
        if isinstance(o, torch.Tensor):
            flat[slots.o_fp8] = o.view(torch.uint8)
            return
        flat[slots.o_fp4], flat[slots.o_sf] = o.data, o.scale.view(torch.uint8).view(-1)
        flat[slots.o_sf_start] = o.scale_start_index

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
    request = request_of(call, sms)
    try:
        op, spec = dispatch.select(request, arch)
    except dispatch.UnsupportedRequest as error:
        field = FIELDS.get(error.field, error.field)
        if field == "head_scales":
            field = "out_scale" if call.scale_tensor is None or call.scale_tensor.numel() == 1 else "scale"
        name = checks.names_of(call)(field)
        raise NotImplementedError(f"{name}: no attention kernel: {error}") from None
    checks.kernel_tensors(call)
    if call.q.shape[1] * request.qhead_per_kvhead >= checks.MOST_ROWS:
        raise _too_many_rows(call, f"{call.q.shape[1]} heads", "their product")
    here, heads, slots = machine.current, call.q.shape[1], ArgSlots(spec)
    stream_k, few = policy.is_split_kv(spec), request.rows <= PACK_GQA_MAX_Q
    packs = policy.packs_all_tiles(spec) or few and request.qhead_per_kvhead <= PACK_GQA_MAX_GROUP
    group = request.qhead_per_kvhead if packs else 1
    blocks = CHUNK // spec.tile.n if call.split_kv != "auto" else 0
    blocks = WHOLE if call.shares_v and blocks else blocks
    most_ctas = sms * spec.tile.ctas_per_sm // spec.tile.cluster
    dtype, options = call.result_dtype, cast(tuple[Any, ...], call[OPTIONS])
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else 0  # a packed output is compared separately
    shared = SharedKeys.of(call)
    if not request.prefix:  # tokens see all keys, those of the prefix among them
        call = call._replace(prefix_lens=None)
    optional = _present(call, slots)
    return LaunchPlan(
        fn=here.kernel(op, spec, arch),
        flat=_defaults(call, request, spec, most_ctas, blocks),
        slots=slots,
        optional=optional,
        per_token=per_token(field for field, _, _ in optional),
        types=tuple(map(type, options)),
        device=call.q.device,
        single_device=here.device_count() == 1,
        dtype=dtype,
        out_is_16bit=dtype in WIDE.values(),
        like_query=request.head_dim_vo == call.q.shape[2] and dtype == call.q.dtype,
        return_lse=call.return_lse,
        heads=heads,
        lse_columns=call.lse_columns,
        dim_vo=request.head_dim_vo,
        batch=call.requests.batch if shared is None else shared.groups,
        token_bytes=heads * max(call.q.shape[2] * call.q.element_size(), request.head_dim_vo * size),
        pack_factor=group,
        num_tile_heads=heads // group,
        o_tiles=spec.tile.o_tiles,
        tile_m=spec.tile.m_choices[-1],
        cluster=spec.tile.cluster,
        most_ctas=most_ctas,
        stream_k=stream_k,
        counters_per_split=spec.tile.counters_per_split,
        split_keys=blocks * spec.tile.n if stream_k else 0,
        checked=checking(),
        lists=mask_lists(request, spec) if spec.mask.custom else None,
        shared=shared,
    )


def mask_lists(request: KernelRequest, spec: Any) -> MaskLists:
    """Return the `MaskLists` of the launches of a plan. Lengths on the device decide which tiles are packed."""
    group = request.qhead_per_kvhead if request.qhead_per_kvhead <= PACK_GQA_MAX_GROUP else 1
    return MaskLists(group, spec.tile.m_choices[0], spec.tile.n)


def _present(call: AttentionCall, slots: ArgSlots) -> tuple[tuple[str, int, Any], ...]:
    """Return `LaunchPlan.optional` of a call."""
    found = []
    for field, t in OPTIONAL_TENSORS.items():
        if getattr(call, field) is not None:
            found.append((field, getattr(slots, t.argument), t.view))
    return tuple(found)


def _defaults(call: AttentionCall, request: KernelRequest, spec: Any, most_ctas: int, blocks: int) -> list[Any]:
    """Return the arguments of a launch: the call's options, and empty tensors for those that it lacks."""
    empty, heads = partial(machine.current.empty, call.q.device), call.q.shape[1]
    fp32, int32 = torch.float32, torch.int32
    whole_ctas, whole_tiles = launch_size.whole_shares(request, spec, most_ctas, blocks)
    default: dict[str, Any] = {
        "kv_starts": empty(int32),
        "v_scales_interleaved": int(request.interleaved),
        **bounds(call),
        "causal": int(request.causal),
        "tree_mask": empty(int32, 1),
        "softmax_scale_log2": call.scale * LOG2E,
        "softmax_scale_ptr": empty(fp32),
        "soft_cap": float(call.soft_cap or 0.0),
        "skip_threshold": log2(call.skip) if call.skip else -INF,
        "o": empty(WIDE[spec.out[0]], heads, request.head_dim_vo),
        "lse": empty(fp32, heads),
        "sink": empty(fp32),
        "out_scale": call.out_scale + 0.0,
        "out_scale_ptr": empty(fp32),
        "o_fp8": empty(torch.uint8, heads, request.head_dim_vo),
        "o_fp4": empty(torch.uint8, heads, request.head_dim_vo // 2),
        "o_sf": empty(torch.uint8),
        "o_sf_start": 0,
        "o_sf_scale": float(call.out_sf_scale or 1.0),
        "lse_form": call.lse_form,
        "grid": launch_size.ctas(request, spec, most_ctas, blocks),
        "counters": empty(int32),
        "counter_base": 0,
        "enable_pdl": int(call.enable_pdl is not False),
        "blocks_per_split": blocks,
        "whole_ctas": whole_ctas,
        "whole_tiles": whole_tiles,
        "union_size": request.rows,
        "m_tiles": max(1, min(-(-request.packed_rows // spec.tile.m_choices[-1]), MOST_M_TILES)),
    }
    return [default.get(name) for name in args.fields(spec)]


def plan_of(call: AttentionCall) -> LaunchPlan | None:
    """Return the plan of a call that nobody has checked, made if its key is new; None: the reference runs it."""
    here = machine.current
    try:
        if call.max_q_len.__class__ is not int:
            checks.scalars(call)
        key = key_of(call)
        plan = here.plans.get(key)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        raise_reason(checks.validate_launch, call)
        raise
    if plan is None or plan.types != tuple(map(type, key[0])):
        checks.validate(call)
        found = here.device_info(call.q.device)
        if found is None:
            return None
        plan = plan_for(call, *found)
        here.keep(key, plan)
    return plan


def run(call: AttentionCall) -> Any:
    """Run a call that nothing traces and nobody has checked, and return the result of its public function."""
    here, plan = machine.current, plan_of(call)
    if plan is None:
        return run_reference(call)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):  # only the current device can be asked whether its stream captures
            return run(call)
    try:
        capturing = here.is_capturing()
        return plan.launch(plan.bind(call, capturing), call, call.q, call.out, call.lse, capturing)
    except Exception:
        raise_reason(checks.validate_launch, call)
        raise


def _check_rows(call: AttentionCall) -> None:
    """Raise on a property of CSR or ragged requests that is not part of their plan's key."""
    rows, r, name = call.k.shape[2], call.requests, checks.names_of(call)
    if r.form == "ragged" and rows != call.v.shape[2]:
        raise ValueError(f"{name('kv')}: K has {rows} rows and V {call.v.shape[2]}, must be equal")
    if rows * (r.page_table.shape[2] or 1) >= checks.MOST_KEYS:
        raise NotImplementedError(f"{name('k')}: {rows} rows, must be less than {checks.MOST_KEYS} tokens on CUDA")


def _refused(call: AttentionCall, field: str, t: torch.Tensor, shape: tuple[int, ...]) -> ValueError:
    """Return the error for an output of the launch that does not fit. shape: the shape that the output must have."""
    own = "must not overlap the query, another output or itself"
    layout = f"shape {tuple(t.shape)}, strides {t.stride()}"
    return ValueError(f"{checks.names_of(call)(field)}: {layout}, must be of shape {shape}, and {own}")


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


def _too_many_rows(call: AttentionCall, given: str, factors: str) -> NotImplementedError:
    """Return the error of a call with too many of what is given. factors: of the product that is bounded."""
    group = call.q.shape[1] // call.k.shape[1]
    need = f"{factors.format(group)} must be below {checks.MOST_ROWS} on CUDA, up to which kernels divide exactly"
    return NotImplementedError(f"{checks.names_of(call)('q')}: {given}, {group} per KV head; {need}")


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
                lse.copy_(reference.formed_lse(call, found))
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
        lse = call.q.new_empty((shape[0], call.lse_columns), dtype=torch.float32)
    return out, lse
