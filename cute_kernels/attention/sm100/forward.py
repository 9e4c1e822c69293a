"""Prefill on Blackwell, and decode of many rows: host part and device entry.

A tile is 256 rows, two halves of 128, or one half. Groups (`roles.groups`) are warpgroups of softmax, each with an S
and an O in tensor memory: of a half each, or of one half's KV blocks in turn; then each has a maximum and a sum of its
own, and `correction` adds up both at the tile's end. Tiles of head_dim 256 have one group. Roles (`roles`), in the
order of warps: 4 or 8 softmax, a thread a row (`softmax`); 4 rescale O where its maximum has grown, normalise and store
it (`correction`); 1 issues all MMAs (`mma`); 1 loads K, publishes the tiles; 1 loads V, 1 Q
(`query`). CTAs are persistent, one an SM. Quantised K and V, of another type than Q, become fp16, which holds all of
their values, and so does Q, bf16 in units of its own a row, by 4 warps more (`prepare`): there the one of V loads Q
too, the next copies scale factors.

Where CTAs share the keys of requests (`schedule.stream_k`), the warp of Q publishes, `correction` stores what the CTA
found of a tile that is not its own alone, and the warps of softmax merge it with others' (`splits`).

Tensor memory, columns: two slots of S from 0 and 128 on, one of each group, or of one group's blocks in turn; O of
group g from 256 + 128 g on; P, 16 bits, two a column, in the second half of its S, all of which is in registers by
then.

Pipelines: work_pipe, 2 or 4 stages, loader of K or of Q -> all: the next tile. q_pipe, `tile.q_stages` stages, k_pipe
and v_pipe, `tile.stages` stages, load -> multiply: freed when the MMAs that read them are done. Signals, of each group
(scores, early and late of each slot): scores (multiply -> softmax), S of a block is there; grown (softmax -> correct),
what O is owed is there, in shared memory, and read (correct -> softmax); early (softmax, correct -> multiply), much of
P is there, and O has been rescaled; late (softmax -> multiply), all of P. Of each half: done (multiply -> correct), O
is complete, of a tile, or, where there is one group, of each block; stored (correct -> multiply), it may be
overwritten. Where stages are prepared, load -> prepare by raw_k_pipe and raw_v_pipe, `tile.raw_stages` stages, prepare
-> multiply by k_pipe and v_pipe; Q is there by q_pipe for those who prepare it, and by ready_pipe, two stages that
nobody frees, for multiply, and, with its units, for softmax.

What orders accesses to O: the MMAs of a group are issued in turn, P V of a block in front of Q K^T of its next, so that
S of a block says that O of the block before is complete; where one group has both slots, done.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ... import abi
from ...device import copy, pipeline, tmem
from .. import fakes, load, splits
from ..args import AttentionArgs, pack
from ..kv import arrivals, pages, scales, source
from ..prepare import dequantises, operand_stages, scales_q_rows
from ..schedule import tiles, work
from ..spec import BITS
from . import skip_votes
from .correction import correction
from .mma import mma
from .prepare import prepare_kv
from .query import load_q, schedule_and_load_q
from .roles import ROWS, SLOTS, WARPS, groups, roles
from .softmax import softmax

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Sm100KernelParams:
    """Everything the host part makes for the kernel."""

    args: AttentionArgs
    k: Any  # operands of the source of K and V
    v: Any
    q: copy.TmaOperand


@dataclass(frozen=True)
class Sm100SharedStorage:
    """Shared memory of a CTA. Pointers: signals."""

    raw_q: cute.Tensor  # as it was loaded
    q: cute.Tensor
    raw_k: cute.Tensor  # as it was loaded; where nothing is prepared, k
    raw_v: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    work: cute.Tensor
    scheduler: tiles.SchedulerSmem | None
    sm_stats: cute.Tensor  # (ROWS, groups, 2): factor on O; at a tile's end, sum and maximum in log2 units
    tmem_ptr: cute.Tensor  # (1,): address of tensor memory
    work_pipe: pipeline.Pipeline
    q_pipe: pipeline.Pipeline
    raw_k_pipe: pipeline.Pipeline
    raw_v_pipe: pipeline.Pipeline
    k_pipe: pipeline.Pipeline
    v_pipe: pipeline.Pipeline
    s_full: cute.Pointer
    sm_stats_full: cute.Pointer
    sm_stats_empty: cute.Pointer
    p_full_o_rescaled: cute.Pointer
    p_last_split: cute.Pointer
    o_full: cute.Pointer
    o_empty: cute.Pointer
    skip_votes: Any = None  # of `skip`
    q_ready_pipe: Any = None
    q_row_scales: Any = None  # (m, 2): of rows of Q
    k_scales: Any = None  # of raw stages
    v_scales: Any = None
    splits: Any = None  # `splits.SplitSmem`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    t = spec.tile
    k, v = (source(spec).operand(x, (t.n, x.shape[3]), t.raw_stages or t.stages) for x in (a.kv.k, a.kv.v))
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
    kernel(spec, Sm100KernelParams(a, k, v, q)).launch(
        grid=[a.schedule.grid, 1, 1],
        block=[32 * roles(spec).warps(), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.schedule.enable_pdl,
    )


def shared(spec, plan):
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    kv, raw = plan.args.kv, t.raw_stages or t.stages
    q = raw_q = copy.allocate(smem, plan.q, abi.DTYPES[spec.q])
    raw_k, raw_v = copy.allocate(smem, plan.k, kv.k.element_type), copy.allocate(smem, plan.v, kv.v.element_type)
    k, v = raw_k, raw_v
    if dequantises(spec):
        k, v = (operand_stages(spec, smem, (t.n, dim), t.stages) for dim in spec.dims)
        if BITS[spec.q] < 16:  # else in place
            q = operand_stages(spec, smem, (t.m, spec.head_dim_qk), t.q_stages)
    published = work.allocate(spec, smem)
    sm_stats = smem.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, groups(spec), 2)), 16)
    tmem_ptr = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
    mbarriers = lambda arrivals: pipeline.make_mbarriers(smem, SLOTS, arrivals)  # noqa: E731
    pipes = [pipeline.make(smem, raw, arrivals(spec, r), r.warps(f"prepare_{x}") or 1) for x in "kv"]
    operands = [pipeline.make(smem, t.stages, r.warps(f"prepare_{x}"), 1) for x in "kv"] if dequantises(spec) else pipes
    return Sm100SharedStorage(
        raw_q=raw_q,
        q=q,
        raw_k=raw_k,
        raw_v=raw_v,
        k=k,
        v=v,
        work=published,
        scheduler=None if work.is_split_kv(spec) else tiles.allocate(smem),
        sm_stats=sm_stats,
        tmem_ptr=tmem_ptr,
        work_pipe=pipeline.make(smem, work.STAGES[spec.schedule], 1, r.warps() - r.warps("idle")),
        q_pipe=pipeline.make(smem, t.q_stages, 1, 1),
        raw_k_pipe=pipes[pages.K],
        raw_v_pipe=pipes[pages.V],
        k_pipe=operands[pages.K],
        v_pipe=operands[pages.V],
        s_full=mbarriers(1),
        sm_stats_full=mbarriers(WARPS),
        sm_stats_empty=mbarriers(WARPS),
        p_full_o_rescaled=mbarriers(2 * WARPS),
        p_last_split=mbarriers(WARPS),
        o_full=mbarriers(1),
        o_empty=mbarriers(WARPS),
        skip_votes=skip_votes.allocate(smem, groups(spec)) if spec.logits.skip else None,
        q_ready_pipe=pipeline.make(smem, 2, WARPS, 1) if dequantises(spec) else None,
        q_row_scales=smem.allocate_tensor(cutlass.Float32, cute.make_layout((t.m, 2)), 16)
        if scales_q_rows(spec)
        else None,
        k_scales=scales.allocate(spec, smem, spec.head_dim_qk, raw),
        v_scales=scales.allocate(spec, smem, spec.head_dim_vo, raw),
        splits=splits.allocate(spec, smem),
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Sm100KernelParams):
    s = shared(spec, plan)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
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
        cute.arch.setmaxregister_decrease(roles(spec).registers("mma"))
        if warp == roles(spec).first("mma"):
            mma(spec, plan, s)
        elif warp == roles(spec).first("load_k"):
            into = load.LoadTarget(plan.k, s.raw_k, s.raw_k_pipe)
            load.load_kv(spec, plan, s, into, pages.K, Int32(0), produces_tiles=not work.is_split_kv(spec))
        elif warp == roles(spec).first("load_v"):
            into = load.LoadTarget(plan.v, s.raw_v, s.raw_v_pipe)
            load.load_kv(spec, plan, s, into, pages.V, Int32(0), loads_q=const_expr(dequantises(spec)))
        elif const_expr(work.is_split_kv(spec)):
            schedule_and_load_q(spec, plan, s)
        elif const_expr(not dequantises(spec)):
            load_q(spec, plan, s)
        elif const_expr(spec.kv.block_scaled):
            load.load_scales(spec, plan, s, (s.raw_k_pipe, s.raw_v_pipe))
        cute.arch.griddepcontrol_launch_dependents()
    elif const_expr(dequantises(spec)):
        cute.arch.setmaxregister_decrease(roles(spec).registers("prepare_k"))
        if warp < roles(spec).first("prepare_v"):
            prepare_kv(spec, plan, s, pages.K, warp - roles(spec).first("prepare_k"))
        else:
            prepare_kv(spec, plan, s, pages.V, warp - roles(spec).first("prepare_v"))
    tmem.fence_before_thread_sync()
    cute.arch.barrier()
    tmem.fence_after_thread_sync()
    if warp == roles(spec).first("mma"):
        tmem.dealloc(s.tmem_ptr[0])
