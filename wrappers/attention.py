"""Attention over a paged KV cache: `attend` runs a checked or known call of any public signature as reference (CPU) or
compiled kernel (CUDA).

Host time: a call whose signature (dtypes, shapes but the token count, flags) was seen before is one dict lookup, the
views it cannot avoid and the compiled call, which itself checks rank, dtype, device, alignment and strides. Everything
else, detailed messages too, is `checks`. Nothing here synchronises or reads device values.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log2
from typing import Any, NamedTuple

import torch

from cute_kernels.attention import args, dispatch
from cute_kernels.attention.decode import FEW_ROWS
from cute_kernels.attention.sm90 import PACK_ROWS

from . import checks, fp4, machine, reference, scratch
from .checks import Call, Checked
from .fp4 import FP4Tensor
from .reference import LOG2E

NO_WINDOW = 1 << 30  # window_left of a call without a window, where the kernel has one
CHUNK = 4096  # keys of a part of a request in the invariant mode, rounded down to KV blocks
INF = float("inf")
AS_IS, SWAPPED, STACKED_HND, STACKED_NHD = range(4)  # how caches become (pages, Hkv, P, D): 2 * stacked + NHD
_Tensor = torch.Tensor  # module globals: an attribute look-up saved is 20 ns
_empty, _empty_like = torch.empty, torch.empty_like


class Plan(NamedTuple):
    """What a signature decides. The tensors are empty and stand for absent arguments."""

    fn: Callable[..., Any]  # the compiled kernel
    fields: tuple[str, ...]
    causal: int
    dim_vo: int
    dtype: torch.dtype  # of the output
    device: torch.device
    alone: bool  # the only device of the process
    like_query: bool  # the output has the query's dtype and head_dim: empty_like is 1 us cheaper than empty
    layout: int
    scales_layout: int  # of the scale factors of a NVFP4 cache, -1 for others
    host_scales: bool  # neither scale is a tensor
    out8: bool  # e4m3 output
    tile_rows: int  # most query rows of a tile
    tile_keys: int
    row_factor: int  # rows of a token: the GQA group where it is packed into rows
    tile_heads: int
    sms: int
    split: bool
    no_lse: torch.Tensor  # (0, Hq) fp32
    no_sink: torch.Tensor  # (0,) fp32
    no_scale: torch.Tensor  # (0,) fp32
    no_tickets: torch.Tensor  # (0,) int32
    no_scales: tuple[torch.Tensor, torch.Tensor]  # (0, 1, 1, D / 16) uint8, of K and V
    no_out: torch.Tensor  # (0, Hq, Dvo), the query's dtype
    no_out8: torch.Tensor  # (0, Hq, Dvo) uint8
    no_drafts: torch.Tensor  # (0, 1) int32
    no_part: torch.Tensor  # (0, 1, Dvo + 4) fp32


class Mode(NamedTuple):
    """What a public function adds to the arguments of `attend`. split: a request's keys are shared among CTAs, for few
    query rows. scale, out_scale: factors on bmm1_scale and bmm2_scale, whether these are floats or tensors. drafts:
    int32 (T, W), bit t of a token's row: it sees draft t. interleaved: V's scale factors are, 4 tokens each. invariant:
    a request's bits do not depend on the rest of its batch."""

    split: bool = False
    scale: float = 1.0
    out_scale: float = 1.0
    drafts: torch.Tensor | None = None
    interleaved: bool = False
    invariant: bool = False


CONTEXT = Mode()


class Step(NamedTuple):
    """The index tensors of a call, and what they mean for it. The last one is kept: all layers of a model pass the same
    objects in a step, and looking at them anew costs 3 us."""

    block_tables: Any
    seq_lens: Any
    cum_seq_lens_q: Any
    shape: torch.Size  # of block_tables; with the address, notices an object that was resized or given other storage
    address: int
    facts: tuple[Any, ...]  # all that a plan depends on
    both: Any  # block_tables (B, M) as (B, 2, M), K and V on the same entries
    int32_lens: Any  # seq_lens viewed as int32


_step = Step(None, None, None, torch.Size(), 0, (), None, None)


def attend(mode: Mode, *call: Any) -> Any:
    """`trtllm_batch_context_with_kv_cache`, all its arguments in order and unchecked, as `mode` says."""
    (
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left, out, out_dtype, o_sf_scale, o_sf_vec_size,
        kv_layout, enable_pdl, sinks, kv_block_scales, skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx, kv_cache_sf, causal, lse, return_lse, multi_ctas_kv_counter_buffer,
        use_fp16_softmax, uses_spcompress, logits_soft_cap,
    ) = call  # fmt: skip
    try:
        cache: Any = kv_cache
        stacked = isinstance(cache, _Tensor)
        k, v = (cache, cache) if stacked else cache
        tokens, heads, dim = query.shape
        step, cap = _step, logits_soft_cap or 0.0
        if (block_tables is not step.block_tables or cum_seq_lens_q is not step.cum_seq_lens_q or
                seq_lens is not step.seq_lens or block_tables.shape != step.shape
                or block_tables.data_ptr() != step.address):  # fmt: skip
            step = _new_step(block_tables, seq_lens, cum_seq_lens_q)
        skip = skip_softmax_threshold_scale_factor or 0.0
        factors: Any = kv_cache_sf if kv_block_scales is None else kv_block_scales
        k_factors: Any = None
        v_factors: Any = None
        facts: Any = None
        if factors is not None:
            k_factors, v_factors = (factors, factors) if isinstance(factors, _Tensor) else factors
            facts = isinstance(factors, _Tensor), k_factors.dtype, k_factors.shape, v_factors.shape
        rare = (use_fp16_softmax or uses_spcompress or o_sf_scale is not None or o_sf_vec_size is not None
                or factors is not kv_block_scales and kv_block_scales is not None
                or kv_cache_sf is not None and factors is not kv_cache_sf)  # fmt: skip
        key = (
            query.get_device(), query.dtype, heads, dim, stacked, k.dtype, k.shape, v.shape, kv_layout, step.facts,
            uses_shared_paged_kv_idx, batch_size, type(bmm1_scale), type(bmm2_scale), out_dtype, causal,
            None if out is None else out.dtype, None if sinks is None else sinks.shape, window_left >= 0, not rare,
            cap and (1 if 0 < cap < INF else -1), max_q_len >= 0,
            _rows(max_q_len if max_q_len < tokens else tokens, mode), mode.split, facts,
            skip and (1 if skip > 0 else -1),
        )  # fmt: skip
        plan = machine.current.plans.get(key)
    except (AttributeError, TypeError, ValueError):
        checks.validate(Call(*call))
        raise
    if plan is None:
        checked = checks.validate(Call(*call))
        found = machine.current.facts(checked.problem.q.device)
        if found is None:
            return run_reference(checked, mode)
        nhd = kv_layout == "NHD"
        plan = _add_plan(key, checked, found, (2 * stacked + nhd, 2 * facts[0] + nhd if facts else -1), mode)
    if not plan.alone and machine.current.current_device() != plan.device.index:
        return _on_device(plan.device, mode, Call(*call))
    try:
        o: Any = out
        if o is None:
            like = plan.like_query and query.is_contiguous()
            o = _empty_like(query) if like else _empty(
                (tokens, heads, plan.dim_vo), dtype=plan.dtype, device=plan.device)  # fmt: skip
        elif o.shape != (tokens, heads, plan.dim_vo):
            raise ValueError("out")
        log: Any = lse
        if log is None:
            log = _empty((tokens, heads), dtype=torch.float32, device=plan.device) if return_lse else plan.no_lse
        elif log.shape != (tokens, heads):
            raise ValueError("lse")
        if plan.layout:
            k, v = _logical(k, v, plan.layout)
        if plan.host_scales:
            scale = out_scale = plan.no_scale
            scale_log2, out_factor = bmm1_scale * mode.scale * LOG2E, bmm2_scale * mode.out_scale
        else:
            scale, scale_log2 = _factor(bmm1_scale, mode.scale * LOG2E, plan)
            out_scale, out_factor = _factor(bmm2_scale, mode.out_scale, plan)
        if not scale_log2 > 0:
            raise ValueError("bmm1_scale")
        if plan.scales_layout >= 0:
            k_factors, v_factors = _logical(k_factors, v_factors, plan.scales_layout)
            k_factors, v_factors = k_factors.view(torch.uint8), v_factors.view(torch.uint8)
        else:
            k_factors, v_factors = plan.no_scales
        tiles = plan.tile_heads * (tokens * plan.row_factor // plan.tile_rows + batch_size)
        if tokens and heads and batch_size:
            part, tickets, ticket, chunk = plan.no_part, plan.no_tickets, -1, 0
            grid = tiles if tiles < plan.sms else plan.sms
            if not plan.split:
                tickets, ticket = scratch.ticket(plan.device)
            elif tokens * plan.row_factor * plan.row_factor >= checks.MOST_ROWS:
                raise ValueError("query")
            elif mode.invariant:
                chunk = CHUNK // plan.tile_keys
                most = -(-block_tables.shape[-1] * k.shape[2] // (chunk * plan.tile_keys))  # parts of a request
                grid, ticket, (part, tickets) = plan.sms, 0, scratch.new_parts(plan, tiles * most, tiles * most)
            else:
                grid, (part, tickets, ticket) = plan.sms, scratch.parts(plan)
            o16, o8 = (plan.no_out, o.view(torch.uint8)) if plan.out8 else (o, plan.no_out8)
            values = {
                "q": query, "cu_seqlens_q": cum_seq_lens_q, "k": k, "v": v, "kv_lens": step.int32_lens,
                "page_table": step.both if uses_shared_paged_kv_idx else block_tables, "k_scales": k_factors,
                "v_scales": v_factors, "v_scales_interleaved": int(mode.interleaved),
                "window_left": window_left if 0 <= window_left < NO_WINDOW else NO_WINDOW, "causal": plan.causal,
                "draft_mask": plan.no_drafts if mode.drafts is None else mode.drafts, "scale_log2": scale_log2,
                "scale": scale, "soft_cap": cap, "skip_threshold": log2(skip) if skip else -INF, "o": o16, "lse": log,
                "sink": plan.no_sink if sinks is None else sinks, "out_factor": out_factor, "out_scale": out_scale,
                "o_fp8": o8, "grid": grid, "counters": tickets, "counter_base": ticket,
                "enable_pdl": 1 if enable_pdl is None or enable_pdl else 0, "o_partial": part,
                "blocks_per_split": chunk}  # fmt: skip
            plan.fn(*[values[name] for name in plan.fields])
    except Exception:
        checks.kernel_request(checks.validate(Call(*call)), mode.split)  # says which argument was refused
        raise
    return (o, log) if return_lse else o


def _logical(k: torch.Tensor, v: torch.Tensor, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as (pages, Hkv, P, D) views, one torch operation each."""
    if layout == AS_IS:
        return k, v
    if layout == SWAPPED:
        return k.transpose(1, 2), v.transpose(1, 2)
    pages, both, a, b, dim = k.shape
    s_page, s_v, s_a, s_b, s_dim = k.stride()
    size, stride = (pages, a, b, dim), (s_page, s_a, s_b, s_dim)
    if layout == STACKED_NHD:
        size, stride = (pages, b, a, dim), (s_page, s_b, s_a, s_dim)
    return k.as_strided(size, stride), k.as_strided(size, stride, k.storage_offset() + (both - 1) * s_v)


def _new_step(block_tables: torch.Tensor, seq_lens: torch.Tensor, cum_seq_lens_q: torch.Tensor) -> Step:
    """Any tensors: what does not fit gives facts that no plan has."""
    global _step
    both = lens = None
    if block_tables.dim() == 2:
        (batch, width), (row, entry) = block_tables.shape, block_tables.stride()
        both = block_tables.as_strided((batch, 2, width), (row, 0, entry))
    if seq_lens.dtype in (torch.int32, torch.uint32):
        lens = seq_lens if seq_lens.dtype == torch.int32 else seq_lens.view(torch.int32)
    facts = (block_tables.shape, seq_lens.dtype, seq_lens.shape, cum_seq_lens_q.shape)
    _step = Step(block_tables, seq_lens, cum_seq_lens_q, block_tables.shape, block_tables.data_ptr(), facts, both, lens)
    return _step


def _factor(value: float | torch.Tensor, unit: float, plan: Plan) -> tuple[torch.Tensor, float]:
    """(device factor or empty, host factor) of a scale."""
    if isinstance(value, _Tensor):
        return value.reshape(1), unit
    return plan.no_scale, value * unit


def _on_device(device: torch.device, mode: Mode, call: Call) -> Any:
    """The call again with `device` current: whether a stream captures is asked of the current device only."""
    with machine.current.on(device):
        return attend(mode, *call)


def _rows(most: int, mode: Mode) -> int:
    """What a plan depends on of the most query tokens that a request has."""
    if not mode.split:
        return most <= PACK_ROWS
    return -1 if mode.invariant else min(most, FEW_ROWS + 1)


def _add_plan(key: tuple[Any, ...], c: Checked, facts: tuple[str, int], layouts: tuple[int, int], mode: Mode) -> Plan:
    """The plan of a valid call, entered under its key; NotImplementedError where no kernel serves it."""
    p, (arch, sms) = c.problem, facts
    op, spec = dispatch.select(checks.kernel_request(c, mode.split, mode.invariant), arch)
    fn = machine.current.kernel(op, spec, arch)
    device, heads = p.q.device, p.q.shape[1]
    dim_vo = p.v.shape[3] * (1 if p.v_scales is None else 2)
    empty8 = partial(torch.empty, dtype=torch.uint8, device=device)
    group = heads // p.k.shape[1] if spec.pack_gqa else 1
    assert isinstance(c.out_dtype, torch.dtype)
    plan = Plan(
        fn=fn,
        fields=args.fields(spec),
        causal=int(p.causal),
        dim_vo=dim_vo,
        dtype=c.out_dtype,
        device=device,
        alone=machine.current.device_count() == 1,
        like_query=dim_vo == p.q.shape[2] and c.out_dtype == p.q.dtype,
        layout=layouts[0],
        scales_layout=layouts[1],
        host_scales=isinstance(p.scale, float) and isinstance(p.out_scale, float),
        out8=c.out_dtype == torch.float8_e4m3fn,
        tile_rows=spec.tile.m,
        tile_keys=spec.tile.n,
        row_factor=group,
        tile_heads=heads // group,
        sms=sms,
        split=mode.split,
        no_lse=torch.empty(0, heads, dtype=torch.float32, device=device),
        no_sink=torch.empty(0, dtype=torch.float32, device=device),
        no_scale=torch.empty(0, dtype=torch.float32, device=device),
        no_tickets=torch.empty(0, dtype=torch.int32, device=device),
        no_scales=(empty8(0, 1, 1, p.q.shape[2] // 16), empty8(0, 1, 1, dim_vo // 16)),
        no_out=torch.empty(0, heads, dim_vo, dtype=p.q.dtype, device=device),
        no_out8=empty8(0, heads, dim_vo),
        no_drafts=torch.empty(0, 1, dtype=torch.int32, device=device),
        no_part=torch.empty(0, 1, dim_vo + 4, dtype=torch.float32, device=device),
    )
    machine.current.keep(key, plan)
    return plan


def run_reference(c: Checked, mode: Mode = CONTEXT) -> Any:
    """The checked call in fp32 torch on its own device, written to out and lse; what the public function returns.
    Skip-softmax leaves out nothing."""
    p = replace(c.problem, drafts=mode.drafts, v_scales_interleaved=mode.interleaved)
    p = replace(p, scale=p.scale * mode.scale, out_scale=p.out_scale * mode.out_scale)
    o, lse = reference.paged_attention(p)
    out = c.out
    if isinstance(out, FP4Tensor):
        out = FP4Tensor(out.data, out.scale, out.scale_start_index, tuple(o.shape))
    elif out is None and c.out_dtype == "nvfp4":
        out = fp4.empty(tuple(o.shape), o.device)
    elif out is None:
        assert isinstance(c.out_dtype, torch.dtype)
        out = torch.empty(o.shape, dtype=c.out_dtype, device=o.device)
    reference.store(o, out, c.o_sf_scale)
    if c.lse is not None:
        c.lse.copy_(lse)
        lse = c.lse
    return (out, lse) if c.return_lse else out
