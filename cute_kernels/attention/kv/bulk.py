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
        stage = first + LANES * c * pitch
        if const_expr(len(starts) == 1):
            copy_rows([size], [starts[0][c]], stage, pitch, barrier.toint())
        elif are_joined(op.gmem):
            copy_rows([size], [starts[0][c]], stage, pitch, barrier.toint())
        else:
            copy_rows([x.shape[3] for x in op.gmem], [each[c] for each in starts], stage, pitch, barrier.toint())
        if starts[0][c] < 0:
            for byte in cutlass.range(0, size, PIECE, unroll=1):
                mma.store(first + (LANES * c + cute.arch.lane_idx()) * pitch + byte, [Uint32(0)] * 4)
    cute.arch.sync_warp()  # the zeros are written before one lane arrives
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * size)


def are_joined(parts):
    """Return whether the second of two tensors has the columns behind those of the first one in each row of memory."""
    x, y = parts
    apart = y.iterator.toint() - x.iterator.toint() == x.shape[3]
    return apart & (x.stride[0] == y.stride[0]) & (x.stride[2] == y.stride[2])


@cute.jit
def copy_rows(
    sizes: cutlass.Constexpr, starts: cutlass.Constexpr, stage: Int32, pitch: cutlass.Constexpr, barrier: Int32
):
    """Copy 32 rows, of which a lane has the addresses of all parts. One lane starts all copies: the hardware takes
    their addresses from uniform registers, so that lanes would take turns. sizes: bytes of the parts."""
    for row in cutlass.range(0, LANES, AT_ONCE, unroll=1):
        for part in cutlass.range_constexpr(len(sizes)):
            some = [cute.arch.shuffle_sync(starts[part], row + i) for i in range(AT_ONCE)]
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(AT_ONCE):
                    if some[i] >= 0:
                        target = stage + (row + i) * pitch + const_expr(sum(sizes[:part]))
                        copy_row(target, some[i], sizes[part], barrier)


def copy_row(target, source, size, barrier):
    """Start a bulk copy of `size` bytes, a multiple of 16, to shared memory; it completes at an mbarrier."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
    cute.arch.inline_ptx(f"{text}{size}, [{{$r2}}];", read_only_args=[target, source, barrier])


def fence_before_mma():
    """Do nothing: the mbarrier makes the copies visible."""
