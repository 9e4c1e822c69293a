"""Decode: host part and device entry.

Roles (`roles`): one warp feeds K, one V, one schedules, one copies scale factors; all warps of one to three warpgroups
compute the same few rows on different keys (`mainloop`). CTAs are persistent; their tiles may be parts of tiles
(`schedule.stream_k`), which the warps that finish the last one merge (`combine`). What a CTA begins with is guessed
while the launch before may still run (`pdl`).

Pipelines: work_pipe, 4 stages, the scheduling warp -> all: the next tile, freed when read, by `mma` when the tile is
done. k_pipe and v_pipe, `tile.stages` stages, load -> math: a KV block each, with the scale factors of an NVFP4 cache,
which cp.async copies; freed when its keys are multiplied.

Shared memory: `stages` x (K (n x Dqk) + V (n x Dvo)) as stored, 1024-byte aligned, their scale factors,
`reduce.ReduceSmem`, barriers and WorkTileInfo.

Refused (see `supports`): head dims that differ, full attention.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipeline
from .. import fakes, load
from ..args import AttentionArgs, pack
from ..kv import arrivals, pages, scales, source
from ..schedule import stream_k, work
from . import reduce
from .mainloop import mma_warp
from .roles import roles

fake_args = fakes.fake_args


@dataclass(frozen=True)
class DecodeKernelParams:
    """Everything the host part makes for the kernel."""

    args: AttentionArgs
    k: Any  # operands of the source of K and V
    v: Any


@dataclass(frozen=True)
class DecodeSharedStorage:
    """Shared memory of a CTA."""

    k: cute.Tensor
    v: cute.Tensor
    work: cute.Tensor
    prologue_work: cute.Tensor  # words of a `load.PrologueWork`
    work_pipe: pipeline.Pipeline
    k_pipe: pipeline.Pipeline
    v_pipe: pipeline.Pipeline
    k_scales: cute.Tensor | None
    v_scales: cute.Tensor | None
    merge: reduce.ReduceSmem


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a, t = pack(spec, flat), spec.tile
    k, v = (source(spec).operand(x, (t.n, x.shape[3]), t.stages) for x in (a.kv.k, a.kv.v))
    kernel(spec, DecodeKernelParams(a, k, v)).launch(
        grid=[a.schedule.grid, 1, 1],
        block=[32 * roles(spec).warps(), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.schedule.enable_pdl,
    )


def shared(spec, plan):
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    count = work.STAGES[spec.schedule]
    return DecodeSharedStorage(
        k=copy.allocate(smem, plan.k, plan.args.kv.k.element_type),
        v=copy.allocate(smem, plan.v, plan.args.kv.v.element_type),
        work=work.allocate(spec, smem),
        prologue_work=smem.allocate_tensor(Int32, cute.make_layout(3)),
        work_pipe=pipeline.make(smem, count, r.warps("schedule"), r.warps("load_k", "load_v", "load_scales", "mma")),
        k_pipe=pipeline.make(smem, t.stages, arrivals(spec, r), r.warps("mma")),
        v_pipe=pipeline.make(smem, t.stages, arrivals(spec, r), r.warps("mma")),
        k_scales=scales.allocate(spec, smem, spec.head_dim_qk, t.stages),
        v_scales=scales.allocate(spec, smem, spec.head_dim_vo, t.stages),
        merge=reduce.allocate(spec, smem),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: DecodeKernelParams):
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        cute.arch.griddepcontrol_launch_dependents()
        if warp > roles(spec).first("schedule"):  # loads and the schedule warp begin while the launch before still runs
            cute.arch.griddepcontrol_wait()
        if warp < roles(spec).first("load_v"):
            load.load_kv(spec, plan, s, load.LoadTarget(plan.k, s.k, s.k_pipe), pages.K, warp)
        elif warp < roles(spec).first("schedule"):
            into = load.LoadTarget(plan.v, s.v, s.v_pipe)
            load.load_kv(spec, plan, s, into, pages.V, warp - roles(spec).first("load_v"))
        elif warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(roles(spec).warps("load_scales") > 0):
            load.load_scales(spec, plan, s, (s.k_pipe, s.v_pipe))
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
        cute.arch.griddepcontrol_wait()
        mma_warp(spec, plan, s)
