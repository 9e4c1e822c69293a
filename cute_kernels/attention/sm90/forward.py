"""Hopper attention forward: host part and device entry.

Roles: the warps of warpgroup 0 load (`load`, 32-72 registers a thread), two feed K, two Q and V; each further
warpgroup computes 64 rows of the tile (`math`, 160-232 registers). CTAs are persistent.

With spec.split, for decoding, the tiles of a CTA may be parts of tiles (`schedule`), which the CTA that finishes the
last one merges (`combine`); one warp feeds K, one V, one schedules, one copies scale factors; all warps of one to
three warpgroups compute the same few rows on different keys (`decode`, 152-248 registers).

Pipelines: work_pipe, 2 stages (split: 4), loader 0 of K, or the scheduling warp, -> all: the next tile, published while
the current one is loaded, freed when read, by `decode` when the tile is done. q_pipe (not split), `tile.q_stages`
stages, load -> math: Q of a tile that has a visible key (packed: unused, math gathers Q); freed when the last QK of the
tile is done, or once Q is in registers.
k_pipe and v_pipe, `tile.stages` stages, load -> math: a KV block each, with the scale factors of an NVFP4 cache, which
cp.async copies; freed when its MMA is done.

Shared memory: `q_stages` x Q (m x Dqk) (not split), `stages` x (K (n x Dqk) + V (n x Dvo)) as stored, 1024-byte
aligned, their scale factors, `decode.Meeting` (split), barriers and Work.

Refused (see `supports`): other dtypes and head dims, quantised caches unless split, KV that is not paged by TMA.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import abi
from ...device import copy, pipe, wgmma
from .. import kv, schedule
from ..args import AttentionArgs
from . import decode
from .load import load
from .math import math

REGISTERS = {2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread
SPLIT_REGISTERS = {1: (72, 248), 2: (72, 216), 3: (56, 152)}


def fake_args(spec) -> AttentionArgs:
    dt = abi.DTYPES[spec.dtype]
    qk, vo = spec.head_dim_qk, spec.head_dim_vo
    wide: Any = {"align": 16, "stride_divisibility": 8}
    raw: Any = {"align": 16, "stride_divisibility": 16}
    cached = abi.DTYPES[{"": spec.dtype, "e4m3": "e4m3", "nvfp4": "uint8"}[spec.kv.dtype]]
    cache = lambda dim: abi.tensor(cached, (None, None, None, dim), **(raw if spec.kv.dtype else wide))  # noqa: E731
    packed = 2 if spec.kv.dtype == "nvfp4" else 1
    scales = lambda count: abi.tensor(  # noqa: E731
        cutlass.Uint8, (None, None, None, count), align=gcd(count, 16), stride_divisibility=gcd(count, 16)
    )
    return AttentionArgs(
        q=abi.tensor(dt, (None, None, qk), **wide),
        k=cache(qk // packed),
        v=cache(vo // packed),
        o=abi.tensor(dt, (None, None, vo), **wide),
        lse=abi.tensor(cutlass.Float32, (None, None), align=4, last_stride_one=False),
        cu_seqlens_q=abi.tensor(cutlass.Int32, (None,), align=4),
        kv_lens=abi.tensor(cutlass.Int32, (None,), align=4),
        page_table=abi.tensor(cutlass.Int32, (None, 2, None), align=4),
        tickets=abi.tensor(cutlass.Int32, (None,), align=4),
        sink=abi.tensor(cutlass.Float32, (None,), align=4),
        scale=abi.tensor(cutlass.Float32, (None,), align=4),
        out_scale=abi.tensor(cutlass.Float32, (None,), align=4),
        k_scales=scales(qk // 16),
        v_scales=scales(vo // 16),
        o8=abi.tensor(cutlass.Uint8, (None, None, vo), **raw),
        drafts=abi.tensor(cutlass.Int32, (None, None), align=4),
        part=abi.tensor(cutlass.Float32, (None, None, vo + 4), align=16, stride_divisibility=4),
        scale_log2=Float32(1.0),
        out_factor=Float32(1.0),
        soft_cap=Float32(0.0),
        skip=Float32(0.0),
        window_left=Int32(0),
        chunk=Int32(0),
        interleaved=Int32(0),
        grid=Int32(1),
        ticket=Int32(0),
        enable_pdl=Int32(0),
    )


@dataclass(frozen=True)
class Plan:
    """Everything the host part makes for the kernel; without split also how to load and multiply Q."""

    args: AttentionArgs
    k: copy.Operand
    v: copy.Operand
    q: copy.Operand | None = None
    mma_qk: cute.TiledMma | None = None
    mma_pv: cute.TiledMma | None = None


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    k: cute.Tensor
    v: cute.Tensor
    work: cute.Tensor
    work_pipe: pipe.Pipe
    k_pipe: pipe.Pipe
    v_pipe: pipe.Pipe
    q: cute.Tensor | None = None
    q_pipe: pipe.Pipe | None = None
    k_scales: cute.Tensor | None = None
    v_scales: cute.Tensor | None = None
    merge: decode.Meeting | None = None


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = AttentionArgs(*flat)
    t, dt = spec.tile, abi.DTYPES[spec.dtype]
    rows = lambda x, mode: cute.make_tensor(x.iterator, cute.select(x.layout, mode=mode))  # noqa: E731
    cached = [copy.operand(rows(x, [2, 3, 1, 0]), (t.n, x.shape[3]), t.stages, kv.boxes(t.n)) for x in (a.k, a.v)]
    plan = Plan(a, *cached)
    if const_expr(not spec.split):
        q = copy.operand(rows(a.q, [0, 2, 1]), (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
        mma_qk = wgmma.mma_nt(dt, t.warpgroups, t.n, t.q_registers)
        plan = Plan(a, *cached, q, mma_qk, wgmma.mma_nn(dt, t.warpgroups, spec.head_dim_vo))
    kernel(spec, plan).launch(
        grid=[a.grid, 1, 1],
        block=[128 * (spec.tile.warpgroups + 1), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.enable_pdl,
    )


def shared(spec, plan):
    smem, warps, stages = cutlass.utils.SmemAllocator(), 4 * spec.tile.warpgroups, spec.tile.stages
    allocate = smem.allocate_tensor
    packed = spec.kv.dtype == "nvfp4"
    fills = kv.loaders(spec) + (32 if packed else 0)  # lanes that copy scale factors arrive too
    common = {
        "k": copy.allocate(smem, plan.k, plan.args.k.element_type),
        "v": copy.allocate(smem, plan.v, plan.args.v.element_type),
        "work": allocate(Int32, cute.make_layout((schedule.FIELDS, schedule.stages(spec)))),
        "work_pipe": pipe.make(smem, schedule.stages(spec), 1, warps + 2 * kv.loaders(spec) + (1 if packed else 0)),
        "k_pipe": pipe.make(smem, stages, fills, warps),
        "v_pipe": pipe.make(smem, stages, fills, warps),
    }
    if not spec.split:
        q = copy.allocate(smem, plan.q, plan.args.q.element_type)
        return Shared(**common, q=q, q_pipe=pipe.make(smem, spec.tile.q_stages, 1, warps))
    if packed:
        for name, dim in (("k_scales", spec.head_dim_qk), ("v_scales", spec.head_dim_vo)):
            shape, stride = (spec.tile.n, dim // 16, stages), (dim // 16, 1, spec.tile.n * dim // 16)
            common[name] = allocate(cutlass.Uint8, cute.make_layout(shape, stride=stride), 16)
    return Shared(**common, merge=decode.meeting(spec, smem))


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Plan):
    s = shared(spec, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    few, many = const_expr(SPLIT_REGISTERS if spec.split else REGISTERS)[spec.tile.warpgroups]
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 4:
        cute.arch.setmaxregister_decrease(few)
        load(spec, plan, s)
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(many)
        if const_expr(spec.split):
            decode.math(spec, plan, s)
        else:
            math(spec, plan, s)
