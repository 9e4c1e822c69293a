"""Prefill on Hopper: host part and device entry.

Roles (`roles`): the warps of warpgroup 0 load, `tile.load_warps` feed K, one of which also publishes the tiles, as many
Q and V, one copies scale factors; warpgroup 1 prepares stages that no MMA can read as they were loaded, if there are
any: it dequantises K and V, two warps each, or transposes V, which the spare warps of warpgroup 0 do where three
warpgroups compute; each further warpgroup computes 64 rows of the tile (`mainloop`). CTAs are persistent.

Where CTAs share the keys of requests (`schedule.stream_k`), a warp of the first warpgroup schedules, and `splits` has
what a CTA found of a tile that is not its own alone.

Pipelines: work_pipe, 2 stages, loader 0 of K -> all: the next tile, published while the current one is loaded, freed
when read. q_pipe, `tile.q_stages` stages, load -> math: Q of a tile that has a visible key, or, packed, room for it,
which math fills; freed when the last QK of the tile is done, or once Q is in registers. k_pipe and v_pipe,
`tile.stages` stages, load -> math: a KV block each; freed when its MMA is done. Where V, or K, is prepared, load ->
prepare by raw_v_pipe, prepare -> math by v_pipe; `tile.raw_stages` of the former.

Quantised K and V (of another type than Q) become fp16, which holds all of their values; so does Q, bf16 in units of its
own a row (`query.load_q`), which go into the row's score scale: in registers, or where it was loaded to, or beside that
where it was loaded as 8 bits.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 1024-byte aligned, barriers and
WorkTileInfo; where K or V is prepared, `raw_stages` as they are stored too, with their scale factors, and where O is
promoted, its fp32 sums (`promotion`).

Refused (see `supports`): other types and head dims.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ... import abi
from ...device import copy, layout, pipeline, wgmma
from .. import fakes, load, splits
from ..args import AttentionArgs, pack
from ..kv import arrivals, pages, scales, source
from ..prepare import dequantises, mma_dtype, operand_stages
from ..schedule import stream_k, tiles, work
from . import promotion, skip
from .mainloop import DENSE, mma
from .prepare import prepare_kv
from .roles import WARPS, fp8, has_prepare_warpgroup, prepared, roles

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Sm90KernelParams:
    """Everything the host part makes for the kernel."""

    args: AttentionArgs
    k: Any  # operands of the source of K and V
    v: Any
    q: copy.TmaOperand
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma


@dataclass(frozen=True)
class Sm90SharedStorage:
    """Shared memory of a CTA."""

    k: cute.Tensor
    v: cute.Tensor  # fp8: (Dvo, n, stages), see `prepare`
    raw_k: cute.Tensor  # as it was loaded; where nothing is prepared, k
    raw_v: cute.Tensor
    work: cute.Tensor
    scheduler: tiles.SchedulerSmem | None
    work_pipe: pipeline.Pipeline
    k_pipe: pipeline.Pipeline
    v_pipe: pipeline.Pipeline
    raw_k_pipe: pipeline.Pipeline
    raw_v_pipe: pipeline.Pipeline
    raw_q: cute.Tensor  # as it was loaded
    q: cute.Tensor
    q_pipe: pipeline.Pipeline
    k_scales: cute.Tensor | None  # of raw stages
    v_scales: cute.Tensor | None
    o_promoted: Any = None  # (4, Dvo / 8, threads): what `promotion.promote` adds to
    skip_votes: Any = None  # of `skip`
    splits: Any = None  # `splits.SplitSmem`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    t, dt = spec.tile, abi.DTYPES[mma_dtype(spec)]
    k, v = (
        source(spec).operand(x, (t.n, x.shape[3]), count)
        for x, count in zip((a.kv.k, a.kv.v), loaded(spec), strict=True)
    )
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
    mma_qk = wgmma.mma_nt(dt, t.warpgroups, t.n, t.q_in_regs)
    if const_expr(fp8(spec)):
        mma_pv = wgmma.mma_nt(dt, t.warpgroups, spec.head_dim_vo, True)
    else:
        mma_pv = wgmma.mma_nn(dt, t.warpgroups, spec.head_dim_vo)
    kernel(spec, Sm90KernelParams(a, k, v, q, mma_qk, mma_pv)).launch(
        grid=[a.schedule.grid, 1, 1],
        block=[32 * roles(spec).warps(), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.schedule.enable_pdl,
    )


def loaded(spec):
    """Stages of (K, V) as they are stored."""
    t = spec.tile
    return [t.raw_stages if made and t.raw_stages else t.stages for made in prepared(spec)]


def operand_q(spec, smem, raw_q):
    """Where an MMA finds Q: where it was loaded to, if that has the size."""
    dt, shape = abi.DTYPES[mma_dtype(spec)], (spec.tile.m, spec.head_dim_qk)
    if spec.q == mma_dtype(spec) or spec.tile.q_in_regs:
        return raw_q
    if raw_q.element_type.width < dt.width:
        return operand_stages(spec, smem, shape, spec.tile.q_stages)
    kind = layout.smem_layout(shape, spec.tile.q_stages, dt)
    return cute.make_tensor(cute.recast_ptr(raw_q.iterator, kind.inner, dt), kind.outer)


def shared(spec, plan):
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    count, mma_warps, (raw_k_count, raw_v_count) = work.STAGES[spec.schedule], r.warps("mma"), loaded(spec)
    raw_k = k = copy.allocate(smem, plan.k, plan.args.kv.k.element_type)
    raw_v = v = copy.allocate(smem, plan.v, plan.args.kv.v.element_type)
    if prepared(spec)[pages.K]:
        k = operand_stages(spec, smem, (t.n, spec.head_dim_qk), t.stages)
    if prepared(spec)[pages.V]:
        shape = (spec.head_dim_vo, t.n) if fp8(spec) else (t.n, spec.head_dim_vo)
        v = operand_stages(spec, smem, shape, t.stages)
    raw_q = copy.allocate(smem, plan.q, plan.args.query.q.element_type)
    q = operand_q(spec, smem, raw_q)
    published = work.allocate(spec, smem)
    work_pipe = pipeline.make(smem, count, 1, r.warps() - r.warps("idle", "schedule"))
    raw_k_pipe = k_pipe = pipeline.make(smem, raw_k_count, arrivals(spec, r), r.warps("prepare_k") or mma_warps)
    if prepared(spec)[pages.K]:
        k_pipe = pipeline.make(smem, t.stages, r.warps("prepare_k"), mma_warps)
    raw_v_pipe = v_pipe = pipeline.make(smem, raw_v_count, arrivals(spec, r), r.warps("prepare_v") or mma_warps)
    if prepared(spec)[pages.V]:
        v_pipe = pipeline.make(smem, t.stages, r.warps("prepare_v"), mma_warps)
    return Sm90SharedStorage(
        k=k,
        v=v,
        raw_k=raw_k,
        raw_v=raw_v,
        work=published,
        scheduler=None if work.is_split_kv(spec) else tiles.allocate(smem),
        work_pipe=work_pipe,
        k_pipe=k_pipe,
        v_pipe=v_pipe,
        raw_k_pipe=raw_k_pipe,
        raw_v_pipe=raw_v_pipe,
        raw_q=raw_q,
        q=q,
        q_pipe=pipeline.make(smem, t.q_stages, 1, mma_warps),
        k_scales=scales.allocate(spec, smem, spec.head_dim_qk, raw_k_count),
        v_scales=scales.allocate(spec, smem, spec.head_dim_vo, raw_v_count),
        o_promoted=promotion.allocate(spec, smem) if t.promote_interval else None,
        skip_votes=skip.allocate(spec, smem),
        splits=splits.allocate(spec, smem),
    )


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    if const_expr(skip.waits_for_votes(spec)):
        skip.load_v(spec, plan, s, loader)
    else:
        into = load.LoadTarget(plan.v, s.raw_v, s.raw_v_pipe)
        load.load_kv(spec, plan, s, into, pages.V, loader, loads_q=True)


@cute.jit
def serve(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """The warps of the first warpgroup."""
    if warp < roles(spec).first("load_v"):
        into = load.LoadTarget(plan.k, s.raw_k, s.raw_k_pipe)
        load.load_kv(spec, plan, s, into, pages.K, warp, produces_tiles=not work.is_split_kv(spec))
    elif const_expr(work.is_split_kv(spec)):
        if warp < roles(spec).first("load_v") + roles(spec).warps("load_v"):
            load_v(spec, plan, s, warp - roles(spec).first("load_v"))
        elif warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(spec.kv.block_scaled):
            load.load_scales(spec, plan, s, (s.raw_k_pipe, s.raw_v_pipe))
    elif const_expr(not any(prepared(spec))):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif warp < roles(spec).first("load_v") + roles(spec).warps("load_v"):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif const_expr(not dequantises(spec)):
        if const_expr(not has_prepare_warpgroup(spec)):
            prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif const_expr(spec.kv.block_scaled):
        if warp == roles(spec).first("load_scales"):
            load.load_scales(spec, plan, s, (s.raw_k_pipe, s.raw_v_pipe))


@cute.jit
def prepare(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """The warps of the warpgroup that prepares."""
    if const_expr(not dequantises(spec)):
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif warp < roles(spec).first("prepare_v"):
        prepare_kv(spec, plan, s, pages.K, warp - roles(spec).first("prepare_k"))
    else:
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))


@cute.jit
def compute(spec: cutlass.Constexpr, plan, s):
    """The warps of the last warpgroups."""
    cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
    mma(spec, plan, s, skip.SKIPPING if const_expr(spec.logits.skip) else DENSE)


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Sm90KernelParams):
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < WARPS:  # the first warpgroup
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        serve(spec, plan, s, warp)
        cute.arch.griddepcontrol_launch_dependents()
    elif const_expr(not has_prepare_warpgroup(spec)):
        compute(spec, plan, s)
    elif warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("prepare_v"))
        prepare(spec, plan, s, warp)
    else:
        compute(spec, plan, s)
