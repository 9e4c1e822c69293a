"""Measure how fast rows of a tensor can be gathered into shared memory, by a kernel that does nothing else:
`python -m bench.gather_rate` prints TB/s for rows in random order, on the GPU it runs on.

It is the floor of attention over keys that tokens choose. A CTA has a token after the other, and a stage of shared
memory a block of 64 of its rows; a stage is filled again as soon as its rows have arrived. Rows are copied in bulk
(`cp.async.bulk`), a row a copy, or by pieces of 16 bytes (`cp.async`), as the kernels do.
"""

import argparse
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr
from cutlass.cute.runtime import from_dlpack

from cute_kernels.attention.kv.bulk import copy_row
from cute_kernels.device import pipeline

TOKENS, KEYS, ROWS = 4096, 2048, 64  # ROWS: of a stage
SIZES = (1152, 656, 576)  # bytes of a row
CACHES = (8192, 32768, 131072)  # rows
LANES, PIECE = 32, 16
FORMS = ("bulk", "pieces")


@cute.jit
def load_bulk(row: cutlass.Constexpr, pipe, item: Int32, target: Int32, address: Int64):
    """Copy this lane's row. Called by one warp for 32 rows of a stage."""
    barrier = pipeline.full_barrier(pipe, item)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, LANES * row)
    for i in cutlass.range_constexpr(LANES):
        start = cute.arch.shuffle_sync(address, i)
        with cute.arch.elect_one():
            copy_row(target + i * row, start, row, barrier.toint())


@cute.jit
def load_pieces(row: cutlass.Constexpr, pipe, item: Int32, target: Int32, address: Int64):
    """Copy 32 rows by 16 bytes a lane, of which this lane has the address of one. Called by one warp."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(LANES):
        start = cute.arch.shuffle_sync(address, i)
        for at in cutlass.range_constexpr(0, row, LANES * PIECE):
            if at + lane * PIECE < row:
                args = [target + i * row + at + lane * PIECE, start + at + lane * PIECE]
                cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=args)
    cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(pipe, item))


@cute.kernel
def gather_kernel(
    rows: cute.Tensor, indices: cute.Tensor, row: cutlass.Constexpr, stages: cutlass.Constexpr,
    bulk: cutlass.Constexpr,
):  # fmt: skip
    """Gather the rows of tokens blockIdx, blockIdx + gridDim, ... Warp 0 waits for stages; the others load 32 rows each
    of every other item."""
    smem, warp, lane = cutlass.utils.SmemAllocator(), cute.arch.warp_idx(), cute.arch.lane_idx()
    kept = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(stages * ROWS * row), 128)
    pipe = pipeline.make(smem, stages, ROWS // LANES * (1 if bulk else LANES), 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    item, blocks = Int32(0), const_expr(KEYS // ROWS)
    for token in cutlass.range(cute.arch.block_idx()[0], TOKENS, cute.arch.grid_dim()[0], unroll=1):
        for block in cutlass.range(blocks, unroll=1):
            if warp == 0:
                pipeline.consumer_wait(pipe, item)
                cute.arch.sync_warp()
                pipeline.consumer_release(pipe, item)
            elif (warp - 1) // (ROWS // LANES) == item % const_expr(2):
                half = (warp - 1) % const_expr(ROWS // LANES)
                index = indices[token, block * ROWS + half * LANES + lane]
                address = rows.iterator.toint() + Int64(index) * row
                target = kept.iterator.toint() + ((item % stages) * ROWS + half * LANES) * row
                pipeline.producer_acquire(pipe, item)
                if const_expr(bulk):
                    load_bulk(row, pipe, item, target, address)
                else:
                    load_pieces(row, pipe, item, target, address)
            item += 1


@cute.jit
def launch(
    rows: cute.Tensor, indices: cute.Tensor, row: cutlass.Constexpr, stages: cutlass.Constexpr, bulk: cutlass.Constexpr,
    ctas: Int32, stream,
):  # fmt: skip
    """Launch the kernel."""
    size = const_expr(stages * ROWS * row + 1024)
    kernel = gather_kernel(rows, indices, row, stages, bulk)
    kernel.launch(grid=[ctas, 1, 1], block=[LANES * 5, 1, 1], smem=size, stream=stream)


def caller(rows: torch.Tensor, indices: torch.Tensor, form: str, stages: int) -> Callable[[], Any]:
    """Return a call that gathers all rows once."""
    import cuda.bindings.driver as cuda

    row, ctas = rows.shape[1], torch.cuda.get_device_properties(rows.device).multi_processor_count
    given = from_dlpack(rows), from_dlpack(indices)
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    compiled = cute.compile(launch, *given, row, stages, form == "bulk", ctas, stream)
    return lambda: compiled(*given, ctas, stream)


def rate(row: int, count: int, form: str, stages: int) -> float:
    """Return the TB/s of a gather of `KEYS` random rows for each of `TOKENS` tokens, from a cache of `count` rows."""
    gen = torch.Generator("cuda").manual_seed(count)
    rows = torch.empty(count, row, dtype=torch.uint8, device="cuda").random_(generator=gen)
    indices = torch.randint(count, (TOKENS, KEYS), generator=gen, device="cuda", dtype=torch.int32)
    call, times = caller(rows, indices, form, stages), []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return TOKENS * KEYS * row / sorted(times)[len(times) // 2] * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gather_rate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=CACHES, help="rows of the caches")
    caches = parser.parse_args().rows
    for form in FORMS:
        for row in SIZES:
            for stages in sorted({2, 200_000 // (ROWS * row)}):
                found = ", ".join(f"{count}: {rate(row, count, form, stages):.2f}" for count in caches)
                print(f"{form}, rows of {row} bytes, {stages} stages; TB/s by rows of the cache: {found}", flush=True)


if __name__ == "__main__":
    main()
