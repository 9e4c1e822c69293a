"""Hopper attention forward: host part and device entry.

Roles: the warps of warpgroup 0 load (`load`, 32-80 registers a thread), two feed K, two Q and V; each further
warpgroup computes 64 rows of the tile (`math`, 160-248 registers). CTAs are persistent.

With spec.split the tiles of a CTA may be parts of tiles (`schedule`), and a second launch merges these (`combine`).

Pipelines: work_pipe, 2 stages, loader 0 -> all: the next tile, published while the current one is loaded, freed when
read. q_pipe, `tile.q_stages` stages, load -> math: Q of a tile that has a visible key (packed: unused, math gathers Q);
freed when the last QK of the tile is done, or once Q is in registers. k_pipe and v_pipe, `tile.stages` stages,
load -> math: a KV block each, freed when its MMA is done.

Shared memory: `q_stages` x Q (m x Dqk), `stages` x (K (n x Dqk) + V (n x Dvo)), 16-bit, 1024-byte aligned, plus
barriers and Work.

Refused (see `supports`): other dtypes and head dims, KV that is not paged by TMA.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import abi
from ...device import copy, pipe, wgmma
from .. import combine, kv, schedule
from ..args import AttentionArgs
from .load import load
from .math import math

REGISTERS = {1: (80, 248), 2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread


def fake_args(spec) -> AttentionArgs:
    dt = abi.DTYPES[spec.dtype]
    qk, vo = spec.head_dim_qk, spec.head_dim_vo
    wide: Any = {"align": 16, "stride_divisibility": 8}
    return AttentionArgs(
        q=abi.tensor(dt, (None, None, qk), **wide),
        k=abi.tensor(dt, (None, None, None, qk), **wide),
        v=abi.tensor(dt, (None, None, None, vo), **wide),
        o=abi.tensor(dt, (None, None, vo), **wide),
        lse=abi.tensor(cutlass.Float32, (None, None), align=4, last_stride_one=False),
        cu_seqlens_q=abi.tensor(cutlass.Int32, (None,), align=4),
        kv_lens=abi.tensor(cutlass.Int32, (None,), align=4),
        page_table=abi.tensor(cutlass.Int32, (None, 2, None), align=4),
        tickets=abi.tensor(cutlass.Int32, (None,), align=4),
        sink=abi.tensor(cutlass.Float32, (None,), align=4),
        scale=abi.tensor(cutlass.Float32, (None,), align=4),
        out_scale=abi.tensor(cutlass.Float32, (None,), align=4),
        part_o=abi.tensor(cutlass.Float32, (None, None, vo), align=16, stride_divisibility=4),
        part_lse=abi.tensor(cutlass.Float32, (None, None), align=4),
        scale_log2=Float32(1.0),
        out_factor=Float32(1.0),
        soft_cap=Float32(0.0),
        window_left=Int32(0),
        grid=Int32(1),
        ticket=Int32(0),
        enable_pdl=Int32(0),
    )


@dataclass(frozen=True)
class Plan:
    """Everything the host part makes for the kernel."""

    q: copy.Operand
    k: copy.Operand
    v: copy.Operand
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    args: AttentionArgs


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    work: cute.Tensor
    work_pipe: pipe.Pipe
    q_pipe: pipe.Pipe
    k_pipe: pipe.Pipe
    v_pipe: pipe.Pipe


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = AttentionArgs(*flat)
    t, dt = spec.tile, abi.DTYPES[spec.dtype]
    rows = lambda x, mode: cute.make_tensor(x.iterator, cute.select(x.layout, mode=mode))  # noqa: E731
    plan = Plan(
        copy.operand(rows(a.q, [0, 2, 1]), (t.m, spec.head_dim_qk), t.q_stages, (t.m,)),
        copy.operand(rows(a.k, [2, 3, 1, 0]), (t.n, spec.head_dim_qk), t.stages, kv.boxes(t.n)),
        copy.operand(rows(a.v, [2, 3, 1, 0]), (t.n, spec.head_dim_vo), t.stages, kv.boxes(t.n)),
        wgmma.mma_nt(dt, t.warpgroups, t.n, t.q_registers),
        wgmma.mma_nn(dt, t.warpgroups, spec.head_dim_vo),
        a,
    )
    kernel(spec, plan).launch(
        grid=[a.grid, 1, 1],
        block=[128 * (t.warpgroups + 1), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.enable_pdl,
    )
    if const_expr(spec.split):
        combine.kernel(spec, a).launch(
            grid=[a.grid, 1, 1], block=[combine.THREADS, 1, 1], stream=stream, use_pdl=a.enable_pdl
        )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Plan):
    dt = abi.DTYPES[spec.dtype]
    smem = cutlass.utils.SmemAllocator()
    warps = spec.tile.warpgroups * 4
    s = Shared(
        copy.allocate(smem, plan.q, dt),
        copy.allocate(smem, plan.k, dt),
        copy.allocate(smem, plan.v, dt),
        smem.allocate_tensor(Int32, cute.make_layout((schedule.FIELDS, schedule.STAGES))),
        pipe.make(smem, schedule.STAGES, 1, warps + 2 * kv.LOADERS),
        pipe.make(smem, spec.tile.q_stages, 1, warps),
        pipe.make(smem, spec.tile.stages, kv.LOADERS, warps),
        pipe.make(smem, spec.tile.stages, kv.LOADERS, warps),
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    cute.arch.griddepcontrol_wait()
    few, many = REGISTERS[spec.tile.warpgroups]
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 4:
        cute.arch.setmaxregister_decrease(few)
        load(spec, plan, s)
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(many)
        math(spec, plan, s)
