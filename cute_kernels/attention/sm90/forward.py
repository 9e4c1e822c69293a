"""Prefill on Hopper: host part and device entry.

Roles (`roles`): the warps of warpgroup 0 load, two feed K, one of which also publishes the tiles, two Q and V; each
further warpgroup computes 64 rows of the tile (`math`). CTAs are persistent.

Pipelines: work_pipe, 2 stages, loader 0 of K -> all: the next tile, published while the current one is loaded, freed
when read. q_pipe, `tile.q_stages` stages, load -> math: Q of a tile that has a visible key (packed: unused, math
gathers Q); freed when the last QK of the tile is done, or once Q is in registers. k_pipe and v_pipe, `tile.stages`
stages, load -> math: a KV block each; freed when its MMA is done.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 1024-byte aligned, barriers and Work.

Refused (see `supports`): other types and head dims, quantised caches, skip-softmax.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from ... import abi
from ...device import copy, pipe, wgmma
from .. import fakes, load
from ..args import Args, pack
from ..kv import arrivals, pages, source
from ..schedule import work
from .math import math
from .roles import roles

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
    v: cute.Tensor
    work: cute.Tensor
    work_pipe: pipe.Pipe
    k_pipe: pipe.Pipe
    v_pipe: pipe.Pipe
    q: cute.Tensor
    q_pipe: pipe.Pipe


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    t, dt = spec.tile, abi.DTYPES[spec.q]
    k, v = (source(spec).operand(x, (t.n, x.shape[3]), t.stages) for x in (a.kv.k, a.kv.v))
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
    mma_qk = wgmma.mma_nt(dt, t.warpgroups, t.n, t.q_in_regs)
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
    return Shared(
        k=copy.allocate(smem, plan.k, plan.args.kv.k.element_type),
        v=copy.allocate(smem, plan.v, plan.args.kv.v.element_type),
        work=work.allocate(spec, smem),
        work_pipe=pipe.make(smem, count, 1, r.warps("load_k", "load_v", "math")),
        k_pipe=pipe.make(smem, t.stages, arrivals(spec, r), math_warps),
        v_pipe=pipe.make(smem, t.stages, arrivals(spec, r), math_warps),
        q=copy.allocate(smem, plan.q, plan.args.query.q.element_type),
        q_pipe=pipe.make(smem, t.q_stages, 1, math_warps),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Plan):
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("math"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        if warp < roles(spec).first("load_v"):
            load.load_kv(spec, plan, s, pages.K, warp, publishes=True)
        else:
            load.load_kv(spec, plan, s, pages.V, warp - roles(spec).first("load_v"), loads_q=not spec.pack_gqa)
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("math"))
        math(spec, plan, s)
