"""Minimal kernels that show which synchronisation racecheck understands: warps exchange words through shared memory.

In each turn, every thread writes one word, all threads wait for all, every thread reads a word of each warp, and all
wait before the next turn writes. `VARIANTS` differ in how they wait; "elect" is the way decode's warps add up O
(`reduce`).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels import abi
from cute_kernels.device import pipeline

WARPS = 8  # warps that exchange words; variant "roles" has as many again, which do nothing
THREADS = 32 * WARPS


class Variant(NamedTuple):
    """A kind of synchronisation. arrivals: on each mbarrier, per turn. races: a race must be reported, because order is
    missing."""

    what: str
    arrivals: int = WARPS
    races: bool = False


VARIANTS = {
    "bar": Variant("bar.sync of all threads instead of mbarriers"),
    "all": Variant("every lane arrives", THREADS),
    "lane": Variant("syncwarp, then lane 0 arrives for its warp"),
    "elect": Variant("syncwarp, then an elected lane arrives for its warp"),
    "apart": Variant("elect, with shuffles and global loads between arrival and wait"),
    "roles": Variant("elect, beside as many warps that do nothing and give up registers"),
    "peeled": Variant("elect; the first try of a wait stands before its loop, as ptxas places it in large kernels"),
    "many": Variant("elect, with 64 other mbarriers initialised"),
    "owner": Variant("lane 0 writes its warp's words itself and arrives"),
    "same": Variant("elect; also, the lanes of a warp write one value to one word"),
    "unsynced": Variant("elect without the syncwarp: lanes are not ordered before the one that arrives", races=True),
    "unread": Variant("elect, without a wait before reading: read/write races", races=True),
    "unfreed": Variant("elect, without a wait before the next turn writes: write/read races", races=True),
}


def fake_args():
    """Return fake arguments: given (THREADS,) int32, out (THREADS,) int32, turns."""
    return [abi.tensor(Int32, (None,), align=4), abi.tensor(Int32, (None,), align=4), Int32(1)]


@cute.jit
def forward(variant: cutlass.Constexpr, stream, given, out, turns):
    threads = 2 * THREADS if const_expr(variant == "roles") else THREADS
    handover(variant, given, out, turns).launch(grid=[1, 1, 1], block=[threads, 1, 1], stream=stream)


@cute.jit
def wait(variant: cutlass.Constexpr, barrier, phase: Int32):
    """Wait until a phase of the mbarrier has completed."""
    if const_expr(variant == "peeled"):
        if not cute.arch.mbarrier_try_wait(barrier, phase):
            cute.arch.mbarrier_wait(barrier, phase)
    else:
        cute.arch.mbarrier_wait(barrier, phase)


@cute.jit
def arrive(variant: cutlass.Constexpr, barrier):
    """Signal a warp's arrival, after its lanes have read or written."""
    if const_expr(variant == "all"):
        cute.arch.mbarrier_arrive(barrier)
    elif const_expr(variant == "lane"):
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)
    else:
        if const_expr(variant != "unsynced"):
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)


@cute.jit
def write(variant: cutlass.Constexpr, words: cute.Tensor, ready: pipeline.Pipeline, tid: Int32, value: Int32):
    """Write this thread's word and arrive on the barrier."""
    if const_expr(variant == "owner"):
        mine = cute.make_rmem_tensor(32, Int32)
        for i in cutlass.range_constexpr(32):
            mine[i] = cute.arch.shuffle_sync(value, i)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(32):
                words[tid + i] = mine[i]
            cute.arch.mbarrier_arrive(ready.full)
    else:
        words[tid] = value
        if const_expr(variant == "same"):
            words[THREADS + tid // 32] = cute.arch.shuffle_sync(value, 0)
        if const_expr(variant == "bar"):
            cute.arch.barrier()
        else:
            arrive(variant, ready.full)


@cute.jit
def turns_of(
    variant: cutlass.Constexpr, words: cute.Tensor, ready: pipeline.Pipeline, given: cute.Tensor, turns: Int32
):
    """Return the sum over all turns of the words that a thread reads."""
    tid, total = cute.arch.thread_idx()[0] % THREADS, Int32(0)
    for turn in cutlass.range(turns, unroll=1):
        if const_expr(variant not in ("bar", "unfreed")):
            wait(variant, ready.full + 1, pipeline.phase(ready, turn) ^ 1)
        write(variant, words, ready, tid, given[tid] + turn)
        if const_expr(variant == "apart"):
            total += cute.arch.shuffle_sync_bfly(given[(tid + turn + 1) % THREADS], 4)
        if const_expr(variant not in ("bar", "unread")):
            wait(variant, ready.full, pipeline.phase(ready, turn))
        for w in cutlass.range_constexpr(WARPS):
            total += words[(tid + 32 * w) % THREADS]
        if const_expr(variant == "same"):
            total += words[THREADS + (tid // 32 + 1) % WARPS]
        if const_expr(variant == "bar"):
            cute.arch.barrier()
        else:
            arrive(variant if variant != "owner" else "elect", ready.full + 1)
    return total


@cute.kernel
def handover(variant: cutlass.Constexpr, given: cute.Tensor, out: cute.Tensor, turns: Int32):
    smem = cutlass.utils.SmemAllocator()
    words = smem.allocate_tensor(Int32, cute.make_layout(THREADS + WARPS), 16)
    count = const_expr(VARIANTS[variant].arrivals)
    ready = pipeline.make(smem, 1, WARPS if const_expr(variant == "owner") else count, count)
    if const_expr(variant == "many"):
        pipeline.make(smem, 32, 1, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if const_expr(variant == "roles"):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPS:
            cute.arch.setmaxregister_decrease(24)
        else:
            cute.arch.setmaxregister_increase(152)
            out[cute.arch.thread_idx()[0] - THREADS] = turns_of(variant, words, ready, given, turns)
    else:
        out[cute.arch.thread_idx()[0]] = turns_of(variant, words, ready, given, turns)
