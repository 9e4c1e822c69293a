"""Attention forward for many query rows on Hopper: host part, shared memory, kernel entry.

CTAs are persistent: each computes work tiles of `tile.m` query rows until the schedule has none left. Warpgroup 0 holds
the load roles; one prepare warpgroup follows if K or V must be prepared (two with split KV and quantised K and V); each
further warpgroup has 64 rows of the tile. Start reading the computation at `mma`, then `mainloop`.

| role | warps | registers | waits for | signals |
| --- | --- | --- | --- | --- |
| load_k | `load_warps` | 32 to 72 | work_pipe full, k.raw_pipe empty | k.raw_pipe full; warp 0: work_pipe full |
| load_v | `load_warps` | as load_k | work_pipe full, v.raw_pipe, q_pipe empty | v.raw_pipe full; warp 0: q_pipe full |
| schedule | 1, split KV | as load_k | work_pipe empty | work_pipe full |
| load_scales | 1, if any | as load_k | work_pipe full, k.raw_pipe, v.raw_pipe empty | k.raw_pipe, v.raw_pipe full |
| prepare_k | 2 or 4, quantised K | 32, 64, 72, 80 | work_pipe, k.raw_pipe full, k.pipe empty | k.pipe full, raw empty |
| prepare_v | 2 or 4, 4- or 8-bit V | 32 to 80 | work_pipe, v.raw_pipe full, v.pipe empty | v.pipe full, raw empty |
| mma | 4 or 8 per 64 rows | 160, 208 to 232 | work_pipe, q_pipe, k.pipe, v.pipe full | q_pipe, k.pipe, v.pipe empty |

Every role except schedule also releases work_pipe when it has read a tile. With skip-softmax, mma also signals its
votes to load_v. Without split KV, warp 0 of load_k finds the tiles. With three mma warpgroups, prepare_v is the two
spare warps of warpgroup 0. Registers are per thread; `roles` has them for each configuration. Pipelines:

- work_pipe (2 stages, 4 with split KV): the next tile, produced while the current one is loaded; freed when read.
- q_pipe (`q_stages`): Q of each tile that sees a key, or, with packed GQA, room for it, which mma fills. Freed after
  the tile's last Q K^T, or as soon as Q is in registers.
- k.pipe, v.pipe (`stages`): one KV block each, or a piece of it (`tile.pieces`); freed when their MMA is done.
- k.raw_pipe, v.raw_pipe (`raw_stages`, or `stages` if that is 0): K and V as they are stored, from load to prepare.
  If K or V is not prepared, its raw pipe is k.pipe or v.pipe itself.

With head_dim 512, two warpgroups have the same 64 rows (`tile.o_parts`), and each has half of the columns of O, for
which it reads half of V. Both compute S or, with `tile.s_parts`, half of it each (`shared_scores`). If V lies in K, a
warpgroup of its own computes S for them (`tile.scores_apart`, `scoring`), or, over rows of 16 bits by slots, both
compute it in turn (`tile.alternates`, `alternating`): these files have the tables of their roles. If
tokens share the keys that they have chosen, another kernel makes the unions of these before (`key_union`).

Quantised K and V (of another type than Q) become fp16, which holds all of their values. Q becomes fp16, too, a bf16 Q
with a power-of-two scale per row that goes into the row's score scale (`query.load_q`): in registers, in the stage that
it was loaded to, or, if it was loaded as 8 bits, in a stage beside that.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 1024-byte aligned, barriers, tiles;
if scores are shared, two stages of P (m x n), maxima and sums of rows (`shared_scores`); if V lies in K, P of one or
two blocks, maxima and sums of rows (`scoring`, `turns`);
if K or V is prepared, `raw_stages` of it as stored, with its scale factors; if O is promoted, its fp32 sums
(`promotion`); with skip-softmax, votes (`skip`); with split KV, the tiles of the CTA's splits (`..splits`).

Types, head dims and modifiers that the kernel has are in `supports`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from .. import fakes, geometry, key_union, load, mask_blocks, splits
from ..kv import packed, pages, rings
from ..schedule import stream_k, tiles, work
from . import precision, promotion, query, scoring, shared_scores, skip, turns
from .mma import mma
from .prepare import prepare_kv
from .roles import WARPS, has_prepare_warpgroup, roles
from .tile_table import waits_for_votes

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Sm90SharedStorage:
    """Shared memory of a CTA: stages, pipelines and state that roles share."""

    k: rings.OperandSmem  # (n, Dqk, stages)
    v: rings.OperandSmem  # (n, Dvo, stages), in 8 bits (Dvo, n, stages)
    work: cute.Tensor
    scheduler: tiles.SchedulerSmem | None  # of load_k; None in kernels with a schedule warp
    work_pipe: pipeline.Pipeline
    raw_q: cute.Tensor  # Q as loaded
    q: cute.Tensor
    q_pipe: pipeline.Pipeline
    o_promoted: Any = None  # (4, Dvo / 8, threads), sums of `promotion`
    skip_votes: Any = None  # `skip.SkipVotesSmem`
    splits: Any = None  # `splits.SplitSmem`
    q_row_scales: Any = None  # (m, 1): scales of rows of Q that warpgroups share
    scores: Any = None  # `shared_scores.ScoresSmem`, `scoring.ScoreHandoff` or `turns.TurnSmem`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    """Make the kernel parameters from the flat arguments of `args` and launch the kernel on `stream`."""
    a = geometry.launch_args(spec, flat)
    kv = tuple(rings.source_operand(spec, a, x) for x in precision.operands(spec))
    q = query.operand(spec, a)
    mask_blocks.launch(spec, a, stream)
    key_union.launch(spec, a, stream)
    params = geometry.KernelParams(a, kv, q, *precision.tiled_mmas(spec))
    geometry.launch(spec, kernel(spec, params), roles(spec).warps(), a, stream)


def shared(spec, plan):
    """Allocate the CTA's shared memory and initialise its pipelines."""
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    operands = precision.operands(spec)
    stages = rings.allocate(spec, smem, plan, operands)
    raw_q = query.allocate_raw(spec, smem, plan)
    q = query.allocate(spec, smem, raw_q)
    # here, since P is aligned as Q is
    scores = scores_module(spec).allocate(spec, smem)
    work_smem = work.allocate(spec, smem)
    work_pipe = work.make_pipe(spec, smem, r)
    pipes = [rings.make_pipes(spec, smem, r, x) for x in operands]
    return Sm90SharedStorage(
        work=work_smem,
        scheduler=tiles.allocate(spec, smem),
        work_pipe=work_pipe,
        raw_q=raw_q,
        q=q,
        q_pipe=pipeline.make(smem, t.q_stages, 1, r.warps("score") or r.warps("mma")),
        **rings.join(spec, smem, operands, stages, pipes),
        o_promoted=promotion.allocate(spec, smem),
        skip_votes=skip.allocate(spec, smem),
        splits=splits.allocate(spec, smem),
        q_row_scales=query.allocate_row_scales(spec, smem),
        scores=scores,
    )


def scores_module(spec):
    """Return the module that has the shared memory of scores."""
    if spec.tile.alternates:
        return turns
    return scoring if spec.tile.scores_apart else shared_scores


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    """Run the `load_v` role in one warp."""
    if const_expr(waits_for_votes(spec)):
        skip.load_v(spec, plan, s, loader)
    else:
        load.load_kv(spec, plan, s, pages.V, loader, loads_q=True)


def behind_load_v(spec):
    """Return the first warp behind those of load_v."""
    return roles(spec).first("load_v") + roles(spec).warps("load_v")


@cute.jit
def load_warpgroup(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """Run the role of a warp of warpgroup 0, in the order of `roles`."""
    produces_tiles = s.scheduler is not None
    if const_expr(spec.kv.shares_v):
        if warp < roles(spec).warps("load_k"):
            if const_expr(spec.kv.record):
                load.reserve_q(spec, plan, s)
            else:
                load.load_kv(spec, plan, s, pages.K, warp, produces_tiles=produces_tiles, loads_q=True)
        elif const_expr(roles(spec).warps("schedule") > 0):
            if warp == roles(spec).first("schedule"):
                stream_k.schedule_warp(spec, plan.args, s)
            elif const_expr(roles(spec).warps("prefetch") > 0):
                packed.prefetch(spec, plan, s, warp - roles(spec).first("prefetch"))
    elif warp < roles(spec).first("load_v"):
        load.load_kv(spec, plan, s, pages.K, warp, produces_tiles=produces_tiles)
    elif const_expr(behind_load_v(spec) == WARPS):  # no other role
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif warp < behind_load_v(spec):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif const_expr(roles(spec).warps("schedule") > 0):
        if warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(roles(spec).warps("load_scales") > 0):
            load.load_scales(spec, plan, s)
    elif const_expr(roles(spec).first("prepare_v") < WARPS):
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif const_expr(roles(spec).warps("load_scales") > 0):
        if warp == roles(spec).first("load_scales"):
            load.load_scales(spec, plan, s)


@cute.jit
def prepare_warpgroup(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """Run the role of a warp of the prepare warpgroups."""
    if const_expr(roles(spec).warps("prepare_k") == 0):
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    elif warp < roles(spec).first("prepare_v"):
        prepare_kv(spec, plan, s, pages.K, warp - roles(spec).first("prepare_k"))
    else:
        prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))


@cute.jit
def cluster_barrier(spec: cutlass.Constexpr):
    """Synchronise all threads of the CTA, or of its cluster."""
    if const_expr(spec.tile.cluster == 1):
        cute.arch.barrier()
    else:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Set up shared memory, then run each warp's role with the registers of its warpgroup."""
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cluster_barrier(spec)
    cute.arch.griddepcontrol_wait()  # with PDL: roles read what the previous kernel wrote
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < WARPS:
        # load
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        load_warpgroup(spec, plan, s, warp)
        cute.arch.griddepcontrol_launch_dependents()
    elif const_expr(spec.tile.scores_apart):
        if warp < roles(spec).first("mma"):
            cute.arch.setmaxregister_decrease(roles(spec).registers("score"))
            scoring.score(spec, plan, s)
        else:
            mma(spec, plan, s)
    elif const_expr(not has_prepare_warpgroup(spec)):
        mma(spec, plan, s)  # sets its own registers
    elif warp < roles(spec).first("mma"):
        # prepare
        cute.arch.setmaxregister_decrease(roles(spec).registers("prepare_v"))
        prepare_warpgroup(spec, plan, s, warp)
    else:
        mma(spec, plan, s)
    if const_expr(spec.tile.cluster > 1):  # the other CTAs may still write to this one's shared memory
        cluster_barrier(spec)
