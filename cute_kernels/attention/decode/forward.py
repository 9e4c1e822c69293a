"""Decode: host function and device entry. CTAs are persistent; each gets the same number of KV blocks (stream-K).
Some calls have two CTAs on an SM (`tile_table.TileKey.work`), others one.

| role        | warps            | registers | waits for                        | signals                            |
| ----------- | ---------------- | --------- | -------------------------------- | ---------------------------------- |
| load_k      | load_warps (1)   | 72 (56)   | work_pipe full, k.pipe empty     | work_pipe empty, k.pipe full (TMA) |
| load_v      | load_warps (1)   | 72 (56)   | work_pipe full, v.pipe empty     | work_pipe empty, v.pipe full (TMA) |
| schedule    | 1                | 72 (56)   | work_pipe empty                  | work_pipe full                     |
| load_scales | 1 (if any), idle | 72 (56)   | work_pipe full, k.pipe, v.pipe   | work_pipe empty, k.pipe and v.pipe |
|             | in other kernels |           | empty                            | full (cp.async)                    |
| mma         | 4, 8 or 12       | 248, 216  | work_pipe full, k.pipe full,     | k.pipe empty, v.pipe empty,        |
|             |                  | (152)     | v.pipe full, s.merge.ready       | s.merge.ready, work_pipe empty     |

`load_warps` is 1 in all decode tiles. Registers are per thread (`roles.REGISTERS`); those in parentheses go with 12 mma
warps. With two CTAs on an SM, each has 4 mma warps of 200 registers, and 56 for the others. All mma warps compute the
same few query rows on different keys, or groups of them do if a tile has more rows than a warp (`mainloop`).

Pipelines (`device.pipeline`):
- work_pipe, 4 stages: a tile (`WorkTileInfo`). The load roles release it as soon as they have read it, mma when the
  tile's output is stored.
- k.pipe, v.pipe, `tile.stages` stages: a KV block in its storage type. TMA completes it; with pages of any size and for
  scale factors, each lane arrives once for its cp.async. Each mma warp releases it after its last keys in the block.
- s.merge.ready, 1 stage: O of the mma warps that share rows (`reduce`).

With programmatic dependent launch (`pdl`), the schedule warp finds the CTA's first tile while the previous kernel
still runs; load_k and load_v look up its first pages as soon as that kernel has ended. The mma warps that finish the
last split of a tile merge its splits (`combine`).

Shared memory: `stages` x (K (n x Dqk) + V (n x Dvo)) in their storage type, 1024-byte aligned, their scale factors,
`reduce.ReduceSmem`, mbarriers and tiles. `supports` says what the kernel refuses.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import copy, pipeline
from .. import fakes, geometry, load
from ..kv import pages, rings, tma
from ..schedule import stream_k, work
from . import reduce
from .layout import is_dense, operands
from .mainloop import mma_warp
from .roles import roles

fake_args = fakes.fake_args


@dataclass(frozen=True)
class DecodeSharedStorage:
    """Shared memory of a CTA."""

    k: rings.OperandSmem  # (n, Dqk, stages)
    v: rings.OperandSmem  # (n, Dvo, stages)
    work: cute.Tensor  # (words of a tile, stages of work_pipe)
    prologue_work: cute.Tensor  # words of a `load.PrologueWork`
    work_pipe: pipeline.Pipeline
    merge: reduce.ReduceSmem


def source_operand(spec, a, x):
    """Make the operand of the source, which loads the operand `x`."""
    if is_dense(spec):
        return tma.operand(spec, rings.cached(a, x), (x.rows, x.columns), x.stages, copy.dense_operand)
    return rings.source_operand(spec, a, x)


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    """Launch the kernel. flat: the arguments in the order of `args.fields`."""
    a = geometry.launch_args(spec, flat)
    kv = tuple(source_operand(spec, a, x) for x in operands(spec))
    geometry.launch(spec, kernel(spec, geometry.KernelParams(a, kv)), roles(spec).warps(), a, stream)


def shared(spec, plan):
    """Allocate a CTA's shared memory and initialise its pipelines."""
    smem, r, each = cutlass.utils.SmemAllocator(), roles(spec), operands(spec)
    stages = rings.allocate(spec, smem, plan, each)
    return DecodeSharedStorage(
        work=work.allocate(spec, smem),
        prologue_work=smem.allocate_tensor(Int32, cute.make_layout(3)),
        work_pipe=work.make_pipe(spec, smem, r),
        **rings.join(spec, smem, each, stages, [rings.make_pipes(spec, smem, r, x) for x in each]),
        merge=reduce.allocate(spec, smem),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Run the role of each warp. The mma warps come last."""
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("mma"):
        # the other roles; the next kernel may start its CTAs
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        cute.arch.griddepcontrol_launch_dependents()
        # load_k, load_v and the schedule warp begin while the previous kernel still runs
        if warp > roles(spec).first("schedule"):
            cute.arch.griddepcontrol_wait()
        if warp < roles(spec).first("load_v"):
            # load_k
            load.load_kv(spec, plan, s, pages.K, warp)
        elif warp < roles(spec).first("schedule"):
            # load_v
            load.load_kv(spec, plan, s, pages.V, warp - roles(spec).first("load_v"))
        elif warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(roles(spec).warps("load_scales") > 0):
            load.load_scales(spec, plan, s)
    else:
        # mma
        cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
        cute.arch.griddepcontrol_wait()
        mma_warp(spec, plan, s)
