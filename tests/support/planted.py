"""A small kernel for planted bugs: it gathers pages by TMA, adds one, and stores by threads and by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels import abi
from cute_kernels.device import copy, pipeline

PAGE = 32  # rows per page, of 64 columns


@dataclass(frozen=True)
class Plan:
    load: copy.TmaOperand
    store: copy.TmaBox
    table: cute.Tensor
    out: cute.Tensor
    length: Int32


def fake_args() -> list[Any]:
    wide: Any = {"align": 16, "stride_divisibility": 8}
    pool = abi.tensor(BFloat16, (None, None, 64), **wide)
    return [
        pool,
        abi.tensor(BFloat16, (None, None, 64), **wide),
        abi.tensor(Int32, (None,), align=4),
        abi.tensor(BFloat16, (None, 64), **wide),
        Int32(0),
        Int32(1),
    ]


@cute.jit
def forward(bug: cutlass.Constexpr, stream, pool, copied, table, out, length, grid):
    """Launch the kernel. pool, copied (pages, PAGE, 64); table (pages in use,); out (length, 64)."""
    rows_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 2, 0]))  # noqa: E731
    load = copy.operand(rows_first(pool), (PAGE, 64), 1, (PAGE,))
    target = rows_first(copied)
    layout = cute.select(load.layout, mode=[0, 1])
    atom, gmem = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), target, layout, (PAGE, 64))
    plan = Plan(load, copy.TmaBox(atom, gmem, PAGE, 64), table, out, length)
    kernel(bug, plan).launch(grid=[grid, 1, 1], block=[128, 1, 1], stream=stream)


@cute.kernel
def kernel(bug: cutlass.Constexpr, plan: Plan):
    smem = cutlass.utils.SmemAllocator()
    s = copy.allocate(smem, plan.load, BFloat16)
    p = pipeline.make(smem, 1, 2 if bug == "arrival" else 1, 1)
    cute.arch.mbarrier_init_fence()
    if bug != "barrier":
        cute.arch.barrier()
    j, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        pipeline.producer_acquire_tx(p, 0, plan.load.bytes + (16 if bug == "bytes" else 0))
        b = plan.load.boxes[0]
        target, source = copy.partition(b, s, b.gmem)
        page = plan.table[j + (1 if bug == "page" else 0)]
        cute.copy(b.atom, source[None, 0, 0, page], target[None, 0, 0, 0], tma_bar_ptr=p.full)
    if bug != "wait":
        pipeline.consumer_wait(p, 0)
    row, first = tid // 4, tid % 4 * 16
    for c in cutlass.range_constexpr(16):
        value = BFloat16(s[row, first + c, 0].to(Float32) + 1.0)
        s[row, first + c, 0] = value
        if cutlass.const_expr(bug == "ragged"):
            plan.out[j * PAGE + row, first + c] = value
        elif j * PAGE + row < plan.length:
            plan.out[j * PAGE + row, first + c] = value
    if bug != "fence":
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        source, target = copy.partition(plan.store, s, plan.store.gmem)
        cute.copy(plan.store.atom, source[None, 0, 0, 0], target[None, 0, 0, j])
        cute.arch.cp_async_bulk_commit_group()
        if bug != "early":
            cute.arch.cp_async_bulk_wait_group(0, read=True)
