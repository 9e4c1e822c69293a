"""Attention forward for many query rows on Blackwell (tcgen05): host part, shared memory, kernel entry.

CTAs are persistent, one per SM. A tile has 256 query rows in two halves of 128 (FlashAttention 4: q_stage = 2), or one
half. A group is a softmax warpgroup with an S and an O of its own in tensor memory: each half has a group, or two
groups alternate over the KV blocks of the only half and `correction` combines their O; with head_dim 256 there is one
group. Start reading the computation at `mma.mma` and `softmax.softmax`; barriers have FlashAttention 4's names.

| role | warps | registers | waits for | signals |
| --- | --- | --- | --- | --- |
| softmax | 4 per group | 184, 160, 240, 208 | s_full, p_full_o_rescaled, | acc_scale_full, p_full_o_rescaled, |
| | | | row_stats_empty | p_last_split, row_stats_full |
| correction | 4 | 88, 64, 160, 104 | acc_scale_full, row_stats_full, o_full | row_stats_empty, p_full_o_rescaled |
| mma | 1 | 56, 48, 96, 96 | q_pipe or q_ready_pipe, k.pipe, v.pipe full; | s_full, o_full; q, k, v.pipe empty |
| | | | p_full_o_rescaled, p_last_split | |
| load_k | 1 | as mma | k.raw_pipe, work_pipe empty | k.raw_pipe full, work_pipe full |
| load_v | 1 | as mma | v.raw_pipe empty | v.raw_pipe full |
| load_q | 1 or none | as mma | q_pipe empty; split KV: work_pipe empty | q_pipe full; split KV: work_pipe full |
| load_scales | 1, if any | as mma | k.raw_pipe, v.raw_pipe empty; | k.raw_pipe, v.raw_pipe full; |
| | | | split KV: work_pipe empty | split KV: work_pipe full |
| schedule | 1 or none | as mma | work_pipe empty | work_pipe full |
| prepare_k | 2 or none | 48, 96 | q_pipe, k.raw_pipe full, k.pipe empty | q_ready_pipe, k.pipe full, k.raw_pipe empty |
| prepare_v | 2 or none | 48, 96 | q_pipe, v.raw_pipe full, v.pipe empty | q_ready_pipe, v.pipe full, v.raw_pipe empty |

- Registers are per thread, for 2 groups, 2 groups over quantised caches, 1 group, 1 group over quantised caches.
- Every role except schedule and idle also waits for work_pipe full and releases it when it has read a tile.
- Only over quantised caches, a prepare warpgroup (prepare_k, prepare_v) converts K, V and Q to fp16, and mma waits for
  q_ready_pipe instead of q_pipe. load_v then loads Q, and in place of load_q there is load_scales, schedule or an idle
  warp. If Q is bf16, softmax also waits for q_ready_pipe, for the scales of its rows.
- With split KV, load_q, load_scales or schedule finds the tiles instead of load_k (`.schedule`), correction stores the
  partial results of split tiles, and softmax merges them behind the last tile (`splits`).

Pipelines, a full and an empty mbarrier per stage:

- work_pipe (2 stages, 4 with split KV): the next tile; freed when read.
- q_pipe (`q_stages`): Q of each tile that has keys; freed when the MMAs of its last Q @ K^T are done.
- k.pipe, v.pipe (`stages`): one KV block each; freed when the MMAs that read it are done.
- k.raw_pipe, v.raw_pipe (`raw_stages`, or `stages` if that is 0): K and V as stored, from load to prepare. If nothing
  is prepared, they are k.pipe and v.pipe themselves.
- q_ready_pipe (2 stages): Q as fp16, from prepare to mma, and its row scales to softmax. No role frees its stages. With
  `q_stages` = 1, as over all quantised caches, 2 stages suffice: Q of tile t + 2 (of those with keys) is loaded only
  when the last Q @ K^T of tile t + 1 is done, which mma issues after it has waited for all P of tile t; softmax reads
  the row scales of a tile before it computes P. With `q_stages` = 2, this would not hold for row scales.

Barriers without stages, two of each, for the slots of S (s_full, acc_scale_full, p_full_o_rescaled, p_last_split) or
the groups:

- s_full (mma -> softmax): S of a block is complete.
- acc_scale_full (softmax -> correction): the factor on O for a block. p_full_o_rescaled says that it has been read.
- row_stats_full (softmax -> correction), row_stats_empty (back): row_sum and row_max of a tile.
- p_full_o_rescaled (softmax and correction -> mma, softmax): all parts of P but the last are stored, and O is rescaled.
  For a tile's first block it says that O of the tile before is stored: the same warps of correction did that.
- p_last_split (softmax -> mma): the last part of P is stored.
- o_full (mma -> correction): O is complete, per tile, or, with one group, per block.

Order of accesses to O: the MMAs of a group are in order, P @ V of a block in front of Q @ K^T of its next, so that
s_full of a block says that O of the block before is complete. If one group has both slots, o_full says it.

Tensor memory, 512 columns: slots of S at 0 and 128; O of group g at 256 + 128 g; P in the last columns of its S (half
of them in 16 bits, a quarter in e4m3), which softmax has in registers by then.

Shared memory: Q (`q_stages` x m x Dqk), K and V as loaded and, if prepared, as fp16 (n x Dqk, n x Dvo per stage), each
1024-byte aligned; tiles, sm_stats, barriers; with quantised caches scale factors and row scales; with skip-softmax
votes (`skip`); with split KV the tiles of the CTA's splits (`..splits`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ... import abi
from ...device import copy, pipeline, tmem
from .. import fakes, geometry, load, mask_blocks, splits
from ..kv import pages, rings
from ..schedule import stream_k, tiles, work
from . import precision, skip_votes
from .correction import correction
from .mma import mma
from .prepare import prepare_kv
from .query import load_q
from .roles import ROWS, SLOTS, WARPS, groups, roles
from .schedule import schedule_and_load_q, schedule_and_load_scales
from .softmax import softmax

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Sm100SharedStorage:
    """Shared memory of a CTA. A pointer is to the first of two mbarriers."""

    raw_q: cute.Tensor  # as loaded; q itself, unless 8-bit Q is converted
    q: cute.Tensor
    k: rings.OperandSmem  # (n, Dqk, stages)
    v: rings.OperandSmem  # (n, Dvo, stages)
    work: cute.Tensor
    scheduler: tiles.SchedulerSmem | None  # of load_k; None if load_q finds the tiles
    sm_stats: cute.Tensor  # (ROWS, groups, 2): factors on O, at a tile's end `correction.SoftmaxStats`
    tmem_ptr: cute.Tensor  # (1,): address of the CTA's tensor memory
    work_pipe: pipeline.Pipeline
    q_pipe: pipeline.Pipeline
    s_full: cute.Pointer
    acc_scale_full: cute.Pointer
    row_stats_full: cute.Pointer
    row_stats_empty: cute.Pointer
    p_full_o_rescaled: cute.Pointer
    p_last_split: cute.Pointer
    o_full: cute.Pointer
    skip_votes: Any = None  # `skip_votes.allocate`
    q_ready_pipe: Any = None
    q_row_scales: Any = None  # (m, 2): scales of rows of Q, by stage of q_ready_pipe
    splits: Any = None  # `splits.SplitSmem`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    """Make the TMA operands and launch the kernel. flat: the arguments of `args.AttentionArgs`, in order."""
    a = geometry.launch_args(spec, flat)
    t = spec.tile
    kv = tuple(rings.source_operand(spec, a, x) for x in precision.operands(spec))
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.padded_qk), t.q_stages, (t.m,))
    mask_blocks.launch(spec, a, stream)
    geometry.launch(spec, kernel(spec, geometry.KernelParams(a, kv, q)), roles(spec).warps(), a, stream)


def shared(spec, plan):
    """Allocate the shared memory and initialise the barriers."""
    smem, r, t, p = cutlass.utils.SmemAllocator(), roles(spec), spec.tile, precision.of(spec)
    each = precision.operands(spec)
    q = raw_q = copy.allocate(smem, plan.q, abi.DTYPES[spec.q])
    stages = rings.allocate(spec, smem, plan, each)
    if p.widens_q:
        q = rings.allocate_stages(spec, smem, (t.m, spec.padded_qk), t.q_stages)
    work_smem = work.allocate(spec, smem)
    sm_stats = smem.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, groups(spec), 2)), 16)
    tmem_ptr = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
    mbarriers = lambda arrivals: pipeline.make_mbarriers(smem, SLOTS, arrivals)  # noqa: E731
    raw_pipes = [rings.make_raw_pipe(spec, smem, r, x) for x in each]
    pipes = [(rings.make_pipe(smem, r, x, raw), raw) for x, raw in zip(each, raw_pipes, strict=True)]
    return Sm100SharedStorage(
        raw_q=raw_q,
        q=q,
        work=work_smem,
        scheduler=tiles.allocate(spec, smem),
        sm_stats=sm_stats,
        tmem_ptr=tmem_ptr,
        work_pipe=work.make_pipe(spec, smem, r),
        q_pipe=pipeline.make(smem, t.q_stages, 1, 1),
        s_full=mbarriers(1),
        acc_scale_full=mbarriers(WARPS),
        row_stats_full=mbarriers(WARPS),
        row_stats_empty=mbarriers(WARPS),
        p_full_o_rescaled=mbarriers(2 * WARPS),
        p_last_split=mbarriers(WARPS),
        o_full=mbarriers(1),
        skip_votes=skip_votes.allocate(smem, groups(spec)) if spec.logits.skip else None,
        q_ready_pipe=pipeline.make(smem, 2, WARPS, 1) if p.converts_kv else None,
        q_row_scales=smem.allocate_tensor(cutlass.Float32, cute.make_layout((t.m, 2)), 16) if p.scales_q_rows else None,
        **rings.join(spec, smem, each, stages, pipes),
        splits=splits.allocate(spec, smem),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: geometry.KernelParams):
    """Run the roles: each warp takes the registers of its role and serves all tiles of the CTA."""
    s = shared(spec, plan)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    # allocate tensor memory, initialise barriers, and wait until the previous kernel has ended
    if warp == roles(spec).first("mma"):
        tmem.alloc(s.tmem_ptr.iterator)
    cute.arch.mbarrier_init_fence()
    tmem.fence_before_thread_sync()
    cute.arch.barrier()
    tmem.fence_after_thread_sync()
    cute.arch.griddepcontrol_wait()
    if warp < roles(spec).first("correction"):
        cute.arch.setmaxregister_increase(roles(spec).registers("softmax"))
        softmax(spec, plan, s)
    elif warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("correction"))
        correction(spec, plan, s)
    elif warp < roles(spec).first("load_k") // WARPS * WARPS + WARPS:
        # the warpgroup of mma and loads
        cute.arch.setmaxregister_decrease(roles(spec).registers("mma"))
        if warp == roles(spec).first("mma"):
            mma(spec, plan, s)
        elif warp == roles(spec).first("load_k"):
            load.load_kv(spec, plan, s, pages.K, Int32(0), produces_tiles=s.scheduler is not None)
        elif warp == roles(spec).first("load_v"):
            load.load_kv(spec, plan, s, pages.V, Int32(0), loads_q=roles(spec).warps("load_q") == 0)
        elif const_expr(roles(spec).warps("schedule") > 0):
            stream_k.schedule_warp(spec, plan.args, s)
        elif const_expr(roles(spec).warps("load_q") > 0):
            (load_q if const_expr(s.scheduler is not None) else schedule_and_load_q)(spec, plan, s)
        elif const_expr(roles(spec).warps("load_scales") > 0):
            load_scales = load.load_scales if const_expr(s.scheduler is not None) else schedule_and_load_scales
            load_scales(spec, plan, s)
        cute.arch.griddepcontrol_launch_dependents()
    elif const_expr(roles(spec).warps("prepare_k") > 0):
        cute.arch.setmaxregister_decrease(roles(spec).registers("prepare_k"))
        if warp < roles(spec).first("prepare_v"):
            prepare_kv(spec, plan, s, pages.K, warp - roles(spec).first("prepare_k"))
        else:
            prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    # free tensor memory, which no warp uses any more
    tmem.fence_before_thread_sync()
    cute.arch.barrier()
    tmem.fence_after_thread_sync()
    if warp == roles(spec).first("mma"):
        tmem.dealloc(s.tmem_ptr[0])
