"""KV blocks of packed rows of latent attention, as they are stored: one bulk copy for each row, from any page or slot.

A row that does not exist becomes zeros.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import mma, pipeline
from ...device.divisor import quotient_params
from . import gather, pages
from .gather import GatherOperand, RowPageIds
from .gather import page_id_cache as page_id_cache
from .gather import prefetch_pages as prefetch_pages
from .pages import KVBlock, LoadTarget

LANES, AT_ONCE = 32, 8  # rows that a warp looks up, and that it copies, at a time
PIECE = 16  # bytes


def operand(spec, parts, shape, stages):
    """Make the operand of tensors (pages, Hkv, P, bytes). shape: (n, bytes from a row to the next) of a stage."""
    n, pitch = shape
    layout = cute.make_layout((n, pitch, stages), stride=(pitch, 1, n * pitch))
    return GatherOperand(parts, layout, quotient_params(cutlass.max(parts[0].shape[2], 1)))


@cute.jit
def fill(
    spec: cutlass.Constexpr, into: LoadTarget, page_ids: RowPageIds, sequence_pages: pages.SequencePages, at: KVBlock
):
    """Copy the rows of a block into the item's stage, and look up those of the next block. Called by each of the
    `tile.load_warps` warps, for its share of the rows."""
    op, smem, ring = into
    own, pitch = const_expr(spec.tile.n // spec.tile.load_warps), const_expr(cute.size(smem, mode=[1]))
    starts = [cute.make_rmem_tensor(const_expr(own // LANES), Int64) for _ in op.gmem]
    gather.set_addresses(spec, starts, op.gmem, page_ids, at)
    prefetch_pages(spec, page_ids, sequence_pages, at._replace(n_block=at.next_n_block))
    rows, size = Int32(0), const_expr(sum(x.shape[3] for x in op.gmem))
    for c in cutlass.range_constexpr(own // LANES):
        rows += cute.arch.popc(cute.arch.vote_ballot_sync(starts[0][c] >= 0))
    pipeline.producer_acquire(ring, at.item)
    cute.arch.fence_proxy("async.shared", space="cta")  # behind zeros that lie where rows are copied to
    first = smem.iterator.toint() + (pipeline.stage(ring, at.item) * spec.tile.n + at.loader * own) * pitch
    barrier = pipeline.full_barrier(ring, at.item)
    for c in cutlass.range_constexpr(own // LANES):
        copy_rows(op.gmem, [each[c] for each in starts], first + LANES * c * pitch, pitch, barrier.toint())
        if starts[0][c] < 0:
            for byte in cutlass.range(0, size, PIECE, unroll=1):
                mma.store(first + (LANES * c + cute.arch.lane_idx()) * pitch + byte, [Uint32(0)] * 4)
    cute.arch.sync_warp()  # the zeros are written before one lane arrives
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * size)


@cute.jit
def copy_rows(parts: Any, starts: cutlass.Constexpr, stage: Int32, pitch: cutlass.Constexpr, barrier: Int32):
    """Copy 32 rows, of which a lane has the addresses in each tensor. One lane starts all copies: the hardware takes
    their addresses from uniform registers, so that lanes would take turns."""
    for row in cutlass.range(0, LANES, AT_ONCE, unroll=1):
        for part in cutlass.range_constexpr(len(parts)):
            some, size = [cute.arch.shuffle_sync(starts[part], row + i) for i in range(AT_ONCE)], parts[part].shape[3]
            before = const_expr(sum(x.shape[3] for x in parts[:part]))
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(AT_ONCE):
                    if some[i] >= 0:
                        copy_row(stage + (row + i) * pitch + before, some[i], size, barrier)


def copy_row(target, source, size, barrier):
    """Start a bulk copy of `size` bytes, a multiple of 16, to shared memory; it completes at an mbarrier."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
    cute.arch.inline_ptx(f"{text}{size}, [{{$r2}}];", read_only_args=[target, source, barrier])


def fence_before_mma():
    """Do nothing: the mbarrier makes the copies visible."""
