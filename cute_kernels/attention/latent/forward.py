"""Attention over packed latents for few query rows: host function and device entry. CTAs are persistent, and share the
keys of requests by stream-K.

| role     | warps | registers | waits for                    | signals                          |
| -------- | ----- | --------- | ---------------------------- | -------------------------------- |
| load_k   | 2     | 72        | work_pipe full, k.pipe empty | work_pipe empty, k.pipe full     |
| schedule | 1     | 72        | work_pipe empty              | work_pipe full                   |
| mma      | 8     | 216       | work_pipe full, k.pipe full  | work_pipe empty, k.pipe empty    |

- work_pipe, 4 stages: a tile (`WorkTileInfo`).
- k.pipe, `tile.stages` stages: the rows of a KV block, as they are stored. One bulk copy for each row completes it.

The mma warps meet once for each block (`mainloop`): each computes scores of 16 keys, and then a part of the columns of O
for all keys. Splits are merged by all CTAs of a tile together (`splits.merge_together`).

Shared memory: `stages` x (n x `tile_table.PITCH`), Q as the operand of the MMAs, scores and factors of
two blocks, tiles and mbarriers.
"""

from dataclasses import dataclass
from typing import Any
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from ...device import pipeline
from .. import fakes, geometry, load, splits
from ..kv import pages, rings
from ..schedule import stream_k, work
from .mainloop import mma_warp
from .roles import roles
from .tile_table import HALVES, SCORE_PITCH, groups, operands, q_words

fake_args = fakes.fake_args
LANES, BUFFERS = 32, 2  # scores of a block are written while those of another are read


@dataclass(frozen=True)
class LatentSharedStorage:
    """Shared memory of a CTA. q (words, lane): operand of the MMAs, a lane's words of an MMA side by side. scores (key,
    row, half, buffer): sums over a half of the columns. factors (key, group, buffer): of rows, in bf16."""

    k: rings.OperandSmem  # (n, bytes, stages)
    v: rings.OperandSmem  # the same
    q: cute.Tensor
    scores: cute.Tensor
    factors: cute.Tensor
    work: cute.Tensor
    work_pipe: pipeline.Pipeline
    splits: Any


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    """Launch the kernel. flat: the arguments in the order of `args.fields`."""
    a = geometry.launch_args(spec, flat)
    kv = tuple(rings.source_operand(spec, a, x) for x in operands(spec))
    geometry.launch(spec, kernel(spec, geometry.KernelParams(a, kv)), roles(spec).warps(), a, stream)


def shared(spec, plan):
    """Allocate a CTA's shared memory and initialise its pipelines."""
    smem, r, each = cutlass.utils.SmemAllocator(), roles(spec), operands(spec)
    stages = rings.allocate(spec, smem, plan, each)
    scores = cute.make_layout((SCORE_PITCH, spec.tile.m, HALVES, BUFFERS))
    factors = cute.make_layout((spec.tile.n, groups(spec.kv.record), BUFFERS))
    return LatentSharedStorage(
        q=smem.allocate_tensor(Uint32, cute.make_layout(LANES * q_words(spec)), 16),
        scores=smem.allocate_tensor(Float32, scores, 16),
        factors=smem.allocate_tensor(cutlass.BFloat16, factors, 16),
        work=work.allocate(spec, smem),
        work_pipe=work.make_pipe(spec, smem, r),
        splits=splits.allocate(spec, smem),
        **rings.join(spec, smem, each, stages, [rings.make_pipes(spec, smem, r, x) for x in each]),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Run the role of each warp. The mma warps come last."""
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        if warp < roles(spec).first("schedule"):
            load.load_kv(spec, plan, s, pages.K, warp)
        elif warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
        mma_warp(spec, plan, s)
