"""Prefill on Hopper: host part and device entry.

Roles (`roles`): the warps of warpgroup 0 load, `tile.loaders` feed K, one of which also publishes the tiles, as many Q
and V, and the others prepare stages that no MMA can read as they were loaded; each further warpgroup computes 64 rows
of the tile (`math`). CTAs are persistent.

Pipelines: work_pipe, 2 stages, loader 0 of K -> all: the next tile, published while the current one is loaded, freed
when read. q_pipe, `tile.q_stages` stages, load -> math: Q of a tile that has a visible key (packed: unused, math
gathers Q); freed when the last QK of the tile is done, or once Q is in registers. k_pipe and v_pipe, `tile.stages`
stages, load -> math: a KV block each; freed when its MMA is done. Where V is prepared, load -> prepare by raw_v_pipe,
prepare -> math by v_pipe, as many stages each.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 1024-byte aligned, barriers and Work;
where V is prepared, as much again for V, and where O is promoted, its fp32 sums (`sums`).

Refused (see `supports`): other types and head dims.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ... import abi
from ...device import copy, layout, pipe, wgmma
from .. import fakes, load
from ..args import Args, pack
from ..kv import arrivals, pages, source
from ..schedule import work
from . import skip, sums
from .math import DENSE, math
from .prepare import prepare_kv
from .roles import fp8, operand, prepared, roles

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Plan:
    """Everything the host part makes for the kernel."""

    args: Args
    k: Any  # operands of the source of K and V
    v: Any
    q: copy.Operand
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    k: cute.Tensor
    v: cute.Tensor  # fp8: (Dvo, n, stages), see `prepare`
    raw_v: cute.Tensor  # as it was loaded; where nothing is prepared, v
    work: cute.Tensor
    work_pipe: pipe.Pipe
    k_pipe: pipe.Pipe
    v_pipe: pipe.Pipe
    raw_v_pipe: pipe.Pipe
    q: cute.Tensor
    q_pipe: pipe.Pipe
    o_sums: Any = None  # (4, Dvo / 8, threads): what `math.promote` adds to
    votes: Any = None  # of `skip`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    t, dt = spec.tile, abi.DTYPES[operand(spec)]
    k, v = (source(spec).operand(x, (t.n, x.shape[3]), t.stages) for x in (a.kv.k, a.kv.v))
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
    mma_qk = wgmma.mma_nt(dt, t.warpgroups, t.n, t.q_in_regs)
    if const_expr(fp8(spec)):
        mma_pv = wgmma.mma_nt(dt, t.warpgroups, spec.head_dim_vo, True)
    else:
        mma_pv = wgmma.mma_nn(dt, t.warpgroups, spec.head_dim_vo)
    kernel(spec, Plan(a, k, v, q, mma_qk, mma_pv)).launch(
        grid=[a.schedule.grid, 1, 1],
        block=[32 * roles(spec).warps(), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.schedule.enable_pdl,
    )


def shared(spec, plan):
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    count, math_warps = work.STAGES[spec.schedule], r.warps("math")
    k = copy.allocate(smem, plan.k, plan.args.kv.k.element_type)
    raw_v = v = copy.allocate(smem, plan.v, plan.args.kv.v.element_type)
    if prepared(spec)[pages.V]:
        kind = layout.smem_layout((spec.head_dim_vo, t.n), t.stages, abi.DTYPES[operand(spec)])
        v = smem.allocate_tensor(abi.DTYPES[operand(spec)], kind.outer, 1024, kind.inner)
    published = work.allocate(spec, smem)
    work_pipe = pipe.make(smem, count, 1, r.warps("load_k", "load_v", "prepare", "math"))
    k_pipe = pipe.make(smem, t.stages, arrivals(spec, r), math_warps)
    raw_v_pipe = v_pipe = pipe.make(smem, t.stages, arrivals(spec, r), r.warps("prepare") or math_warps)
    if prepared(spec)[pages.V]:
        v_pipe = pipe.make(smem, t.stages, r.warps("prepare"), math_warps)
    return Shared(
        k=k,
        v=v,
        raw_v=raw_v,
        work=published,
        work_pipe=work_pipe,
        k_pipe=k_pipe,
        v_pipe=v_pipe,
        raw_v_pipe=raw_v_pipe,
        q=copy.allocate(smem, plan.q, plan.args.query.q.element_type),
        q_pipe=pipe.make(smem, t.q_stages, 1, math_warps),
        o_sums=sums.allocate(spec, smem) if t.promote else None,
        votes=skip.allocate(spec, smem),
    )


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    if const_expr(skip.waits_for_votes(spec)):
        skip.load_v(spec, plan, s, loader)
    else:
        into = load.Stages(plan.v, s.raw_v, s.raw_v_pipe)
        load.load_kv(spec, plan, s, into, pages.V, loader, loads_q=not spec.pack_gqa)


@cute.jit
def serve(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """The warps that do not compute."""
    if warp < roles(spec).first("load_v"):
        load.load_kv(spec, plan, s, load.Stages(plan.k, s.k, s.k_pipe), pages.K, warp, publishes=True)
    elif const_expr(not any(prepared(spec))):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    elif warp < roles(spec).first("prepare"):
        load_v(spec, plan, s, warp - roles(spec).first("load_v"))
    else:
        prepare_kv(spec, plan, s, warp - roles(spec).first("prepare"))


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Plan):
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("math"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        serve(spec, plan, s, warp)
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("math"))
        math(spec, plan, s, skip.SKIPPING if const_expr(spec.logits.skip) else DENSE)
