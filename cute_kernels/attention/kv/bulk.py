"""KV blocks of packed rows of latent attention, as they are stored: one bulk copy for each row, from any page or slot.

A row that does not exist becomes zeros.
"""

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
    """Copy the rows of a block into the item's stage, and look up those of the next block. Called by one warp."""
    op, smem, ring = into
    count = const_expr(cute.size(page_ids.page))
    starts = [cute.make_rmem_tensor(count, Int64) for _ in op.gmem]
    gather.set_addresses(spec, starts, op.gmem, page_ids, at)
    prefetch_pages(spec, page_ids, sequence_pages, at._replace(n_block=at.next_n_block))
    rows, sizes = Int32(0), const_expr([x.shape[3] for x in op.gmem])
    for c in cutlass.range_constexpr(count):
        rows += cute.arch.popc(cute.arch.vote_ballot_sync(starts[0][c] >= 0))
    pipeline.producer_acquire(ring, at.item)
    cute.arch.fence_proxy("async.shared", space="cta")  # zeros that lie where rows are copied to
    pitch, stage = const_expr(cute.size(smem, mode=[1])), pipeline.stage(ring, at.item)
    first = smem.iterator.toint() + stage * const_expr(spec.tile.n * pitch) + cute.arch.lane_idx() * pitch
    barrier = pipeline.full_barrier(ring, at.item).toint()
    for c in cutlass.range_constexpr(count):
        if starts[0][c] >= 0:
            for part in cutlass.range_constexpr(len(sizes)):
                before = const_expr(32 * c * pitch + sum(sizes[:part]))
                copy_row(first + before, starts[part][c], sizes[part], barrier)
    if rows < spec.tile.n:
        for c in cutlass.range_constexpr(count):
            if starts[0][c] < 0:
                for byte in cutlass.range(0, const_expr(sum(sizes)), PIECE, unroll=1):
                    mma.store(first + const_expr(32 * c * pitch) + byte, [Uint32(0)] * 4)
    cute.arch.sync_warp()  # the zeros are written before one lane arrives
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(
            pipeline.full_barrier(ring, at.item), rows * const_expr(sum(sizes))
        )


def copy_row(target, source, size, barrier):
    """Start a bulk copy of `size` bytes, a multiple of 16, to shared memory; it completes at an mbarrier."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
    cute.arch.inline_ptx(f"{text}{size}, [{{$r2}}];", read_only_args=[target, source, barrier])


def fence_before_mma():
    """Do nothing: the mbarrier makes the copies visible."""
