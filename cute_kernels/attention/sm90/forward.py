"""Attention forward for many query rows on Hopper: host part, shared memory, kernel entry.

CTAs are persistent: each computes work tiles of `tile.m` query rows until the schedule has none left. Warpgroup 0 holds
the load roles; one prepare warpgroup follows if K or V must be prepared (two with split KV and quantised K and V); each
further warpgroup has 64 rows of the tile. Start reading the computation at `mma`, then `mainloop`.

| role | warps | registers | waits for | signals |
| --- | --- | --- | --- | --- |
| load_k | `load_warps` | 32 to 72 | work_pipe full, raw_k_pipe empty | raw_k_pipe full; warp 0: work_pipe full |
| load_v | `load_warps` | as load_k | work_pipe full, raw_v_pipe, q_pipe empty | raw_v_pipe full; warp 0: q_pipe full |
| schedule | 1, split KV | as load_k | work_pipe empty | work_pipe full |
| load_scales | 1, NVFP4 | as load_k | work_pipe full, raw_k_pipe, raw_v_pipe empty | raw_k_pipe, raw_v_pipe full |
| prepare_k | 2 or 4, quantised K | 32, 64, 72, 80 | work_pipe, raw_k_pipe full, k_pipe empty | k_pipe full, raw empty |
| prepare_v | 2 or 4, 4- or 8-bit V | 32 to 80 | work_pipe, raw_v_pipe full, v_pipe empty | v_pipe full, raw empty |
| mma | 4 or 8 per 64 rows | 160, 208 to 232 | work_pipe, q_pipe, k_pipe, v_pipe full | q_pipe, k_pipe, v_pipe empty |

Every role except schedule also releases work_pipe when it has read a tile. With skip-softmax, mma also signals its
votes to load_v. Without split KV, warp 0 of load_k finds the tiles. With three mma warpgroups, prepare_v is the two
spare warps of warpgroup 0. Registers are per thread; `roles` has them for each configuration. Pipelines:

- work_pipe (2 stages, 4 with split KV): the next tile, produced while the current one is loaded; freed when read.
- q_pipe (`q_stages`): Q of each tile that sees a key, or, with packed GQA, room for it, which mma fills. Freed after
  the tile's last Q K^T, or as soon as Q is in registers.
- k_pipe, v_pipe (`stages`): one KV block each, or a piece of it (`tile.pieces`); freed when their MMA is done.
- raw_k_pipe, raw_v_pipe (`raw_stages`, or `stages` if that is 0): K and V as they are stored, from load to prepare.
  If K or V is not prepared, its raw pipe is k_pipe or v_pipe itself.

With head_dim 512, two warpgroups have the same 64 rows (`tile.o_parts`), and each has half of the columns of O, for
which it reads half of V. Both compute S or, with `tile.s_parts`, half of it each (`shared_scores`).

Quantised K and V (of another type than Q) become fp16, which holds all of their values. Q becomes fp16, too, a bf16 Q
with a power-of-two scale per row that goes into the row's score scale (`query.load_q`): in registers, in the stage that
it was loaded to, or, if it was loaded as 8 bits, in a stage beside that.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 1024-byte aligned, barriers, tiles;
if scores are shared, two stages of P (m x n), maxima and sums of rows (`shared_scores`);
if K or V is prepared, `raw_stages` of it as stored, with its scale factors; if O is promoted, its fp32 sums
(`promotion`); with skip-softmax, votes (`skip`); with split KV, the tiles of the CTA's splits (`..splits`).

Types, head dims and modifiers that the kernel has are in `supports`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipeline
from .. import fakes, geometry, load, mask_blocks, splits
from ..kv import arrivals, pages, scales, source, stage_columns
from ..prepare import StagePipelines, allocate_operands
from ..schedule import stream_k, tiles, work
from . import precision, promotion, query, shared_scores, skip
from .mma import mma
from .prepare import prepare_kv
from .roles import WARPS, has_prepare_warpgroup, roles
from .tile_table import waits_for_votes

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Sm90SharedStorage:
    """Shared memory of a CTA: stages, pipelines and state that roles share."""

    k: cute.Tensor
    v: cute.Tensor  # (n, Dvo, stages), in 8 bits (Dvo, n, stages)
    raw_k: cute.Tensor  # K as loaded; k itself if it is not prepared
    raw_v: cute.Tensor
    work: cute.Tensor
    scheduler: tiles.SchedulerSmem | None  # of load_k; None in kernels with a schedule warp
    work_pipe: pipeline.Pipeline
    k_pipe: pipeline.Pipeline
    v_pipe: pipeline.Pipeline
    raw_k_pipe: pipeline.Pipeline
    raw_v_pipe: pipeline.Pipeline
    raw_q: cute.Tensor  # Q as loaded
    q: cute.Tensor
    q_pipe: pipeline.Pipeline
    k_scales: cute.Tensor | None  # scale factors of raw stages
    v_scales: cute.Tensor | None
    o_promoted: Any = None  # (4, Dvo / 8, threads), sums of `promotion`
    skip_votes: Any = None  # `skip.SkipVotesSmem`
    splits: Any = None  # `splits.SplitSmem`
    q_row_scales: Any = None  # (m, 1): scales of rows of Q that warpgroups share
    scores: Any = None  # `shared_scores.ScoresSmem`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    """Make the kernel parameters from the flat arguments of `args` and launch the kernel on `stream`."""
    a = geometry.launch_args(spec, flat)
    t = spec.tile
    k, v = (
        source(spec).operand(x, (n, stage_columns(spec, x, dim)), raw_stages(spec, which))
        for which, (x, n, dim) in enumerate(
            ((a.kv.k, t.n, spec.padded_qk // t.pieces), (a.kv.v, t.n // t.pieces, spec.padded_vo))
        )
    )
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.padded_qk), t.q_stages, (t.m,))
    mask_blocks.launch(spec, a, stream)
    params = geometry.KernelParams(a, k, v, q, *precision.tiled_mmas(spec))
    geometry.launch(spec, kernel(spec, params), roles(spec).warps(), a, stream)


def raw_stages(spec, which):
    """Return the number of stages that K or V is loaded to."""
    return precision.is_prepared(spec, which) and spec.tile.raw_stages or spec.tile.stages


def operand_stages(spec, smem, raw, which):
    """Return the stages of K or V that MMAs read: `raw`, those that it is loaded to, unless it is prepared."""
    if not precision.is_prepared(spec, which):
        return raw
    return allocate_operands(spec, smem, precision.operand_shape(spec, which), spec.tile.stages)


def stage_pipelines(spec, smem, r, which):
    """Make the pipelines of the loaded stages and of the operand stages of K or V; one is both if it is not
    prepared."""
    prepare_warps, mma_warps = r.warps(("prepare_k", "prepare_v")[which]), r.warps("mma")
    readers = prepare_warps or mma_warps
    raw = pipeline.make(smem, raw_stages(spec, which), arrivals(spec, r), readers)
    operand = pipeline.make(smem, spec.tile.stages, prepare_warps, mma_warps) if prepare_warps else raw
    return StagePipelines(raw, operand)


def shared(spec, plan):
    """Allocate the CTA's shared memory and initialise its pipelines."""
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    raw_k = copy.allocate(smem, plan.k, plan.args.kv.k.element_type)
    raw_v = copy.allocate(smem, plan.v, plan.args.kv.v.element_type)
    k, v = (operand_stages(spec, smem, raw, which) for which, raw in enumerate((raw_k, raw_v)))
    raw_q = copy.allocate(smem, plan.q, plan.args.query.q.element_type)
    q = query.allocate(spec, smem, raw_q)
    scores = shared_scores.allocate(spec, smem)  # here, since P is aligned as Q is
    work_smem = work.allocate(spec, smem)
    work_pipe = work.make_pipe(spec, smem, r)
    k_pipes, v_pipes = (stage_pipelines(spec, smem, r, which) for which in (pages.K, pages.V))
    return Sm90SharedStorage(
        k=k,
        v=v,
        raw_k=raw_k,
        raw_v=raw_v,
        work=work_smem,
        scheduler=tiles.allocate(spec, smem),
        work_pipe=work_pipe,
        k_pipe=k_pipes.operand,
        v_pipe=v_pipes.operand,
        raw_k_pipe=k_pipes.raw,
        raw_v_pipe=v_pipes.raw,
        raw_q=raw_q,
        q=q,
        q_pipe=pipeline.make(smem, t.q_stages, 1, r.warps("mma")),
        k_scales=scales.allocate(spec, smem, spec.padded_qk, raw_stages(spec, pages.K)),
        v_scales=scales.allocate(spec, smem, spec.padded_vo, raw_stages(spec, pages.V)),
        o_promoted=promotion.allocate(spec, smem),
        skip_votes=skip.allocate(spec, smem),
        splits=splits.allocate(spec, smem),
        q_row_scales=query.allocate_row_scales(spec, smem),
        scores=scores,
    )


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    """Run the `load_v` role in one warp."""
    if const_expr(waits_for_votes(spec)):
        skip.load_v(spec, plan, s, loader)
    else:
        into = pages.LoadTarget(plan.v, s.raw_v, s.raw_v_pipe)
        load.load_kv(spec, plan, s, into, pages.V, loader, loads_q=True)


def behind_load_v(spec):
    """Return the first warp behind those of load_v."""
    return roles(spec).first("load_v") + roles(spec).warps("load_v")


@cute.jit
def load_warpgroup(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """Run the role of a warp of warpgroup 0, in the order of `roles`."""
    if warp < roles(spec).first("load_v"):
        into = pages.LoadTarget(plan.k, s.raw_k, s.raw_k_pipe)
        load.load_kv(spec, plan, s, into, pages.K, warp, produces_tiles=s.scheduler is not None)
    elif const_expr(behind_load_v(spec) == WARPS):  # no other role
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif warp < behind_load_v(spec):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif const_expr(roles(spec).warps("schedule") > 0):
        if warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(roles(spec).warps("load_scales") > 0):
            load.load_scales(spec, plan, s, (s.raw_k_pipe, s.raw_v_pipe))
    elif const_expr(roles(spec).first("prepare_v") < WARPS):
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif const_expr(roles(spec).warps("load_scales") > 0):
        if warp == roles(spec).first("load_scales"):
            load.load_scales(spec, plan, s, (s.raw_k_pipe, s.raw_v_pipe))


@cute.jit
def prepare_warpgroup(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """Run the role of a warp of the prepare warpgroups."""
    if const_expr(roles(spec).warps("prepare_k") == 0):
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif warp < roles(spec).first("prepare_v"):
        prepare_kv(spec, plan, s, pages.K, warp - roles(spec).first("prepare_k"))
    else:
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Set up shared memory, then run each warp's role with the registers of its warpgroup."""
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()  # with PDL: roles read what the previous kernel wrote
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < WARPS:
        # load
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        load_warpgroup(spec, plan, s, warp)
        cute.arch.griddepcontrol_launch_dependents()
    elif const_expr(not has_prepare_warpgroup(spec)):
        mma(spec, plan, s)  # sets its own registers
    elif warp < roles(spec).first("mma"):
        # prepare
        cute.arch.setmaxregister_decrease(roles(spec).registers("prepare_v"))
        prepare_warpgroup(spec, plan, s, warp)
    else:
        mma(spec, plan, s)
