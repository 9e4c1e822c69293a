"""Attention over latents for few query rows: host function and device entry. CTAs are persistent, and share the
keys of requests by stream-K.

| role     | warps | registers | waits for                                | signals                                   |
| -------- | ----- | --------- | ---------------------------------------- | ----------------------------------------- |
| load_k   | 3     | 32 (56)   | work_pipe full, k.pipe empty             | work_pipe empty, k.pipe full              |
| schedule | 1     | 32 (56)   | work_pipe empty                          | work_pipe full                            |
| score    | 8 (4) | 96 (168)  | work_pipe, k.pipe full, scores.pipe empty| work_pipe empty, scores.pipe full         |
| mma      | 8     | 128 (144) | work_pipe, scores.pipe full              | work_pipe, scores.pipe, k.pipe empty      |

The score warps are two groups, which have blocks in turn. In parentheses: rows of 16 bits, of which shared memory holds
two stages and a second group would have nothing to do.

- work_pipe, 4 stages: a tile (`WorkTileInfo`).
- k.pipe, `tile.stages` stages: the rows of a KV block, as they are stored. One bulk copy for each row completes it.
- scores.pipe, 2 stages: P of a block, with the factors of its rows and those of O (`score.LatentHandoff`).

Splits are merged by the mma warps of all CTAs of a tile together (`stripes`).

Shared memory: `stages` x (n x `tile_table.row_pitch`), Q as the operand of the MMAs, `LatentHandoff`, tiles and
mbarriers.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...device import pipeline
from .. import fakes, geometry, load, splits
from ..kv import pages, rings
from ..schedule import stream_k, work
from . import mainloop, score
from .precision import LANES
from .roles import grows_behind_load, roles
from .tile_table import operands, q_words, records

fake_args = fakes.fake_args


@dataclass(frozen=True)
class LatentSharedStorage:
    """Shared memory of a CTA. q (words, lane, record): operand of the MMAs, a lane's words of an MMA side by side."""

    k: rings.OperandSmem  # (n, bytes, stages)
    v: rings.OperandSmem  # the same
    q: cute.Tensor
    scores: score.LatentHandoff
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
    return LatentSharedStorage(
        q=smem.allocate_tensor(Uint32, cute.make_layout(LANES * q_words(spec) * len(records(spec))), 16),
        scores=score.allocate(spec, smem),
        work=work.allocate(spec, smem),
        work_pipe=work.make_pipe(spec, smem, r),
        splits=splits.allocate(spec, smem),
        **rings.join(spec, smem, each, stages, [rings.make_pipes(spec, smem, r, x) for x in each]),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Run the role of each warp. The mma warps come last."""
    assert grows_behind_load(spec), "the roles call setmaxregister_decrease and setmaxregister_increase"
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < roles(spec).first("score"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("load_k"))
        if warp < roles(spec).first("schedule"):
            load.load_kv(spec, plan, s, pages.K, warp)
        elif warp == roles(spec).first("schedule"):
            stream_k.schedule_warp(spec, plan.args, s)
        cute.arch.griddepcontrol_launch_dependents()
    elif warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_increase(roles(spec).registers("score"))
        score.score_warp(spec, plan, s)
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
        mainloop.mma_warp(spec, plan, s)
