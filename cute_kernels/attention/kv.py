"""Where KV block j comes from. A source is a function that fills one stage with the rows of a block."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device import copy, pipe

LOADERS = 2  # warps that fill a stage together: issuing a TMA takes a warp about 100 cycles


@cute.jit
def paged(spec: cutlass.Constexpr, op: copy.Operand, smem: cute.Tensor, p: pipe.Pipe, pages: cute.Tensor, at):
    """One of `LOADERS` warps: its boxes of the rows [j n, (j + 1) n) of a KV head, into item i's stage.

    pages (M,): page ids of the request. at = (loader, i, j, head, kv_len). Lane c looks up the page of box c. Boxes past
    kv_len are fetched from a page past the pool, which TMA fills with zeros; their table entries are never read.
    """
    loader, i, j, head, kv_len = at
    box, n = spec.kv.box, spec.tile.n
    page_size, pool = op.gmem.shape[0], op.gmem.shape[3]
    row = j * n + cute.arch.lane_idx() * box
    page, inside = Int32(pool), Int32(0)
    if row < kv_len and cute.arch.lane_idx() < n // box:
        page = pages[row // page_size]
        inside = row % page_size // box
    s, g = copy.boxes(op, smem, op.gmem, box)
    boxes = n // box
    pipe.fill(p, i, op.bytes // boxes * ((boxes - loader + LOADERS - 1) // LOADERS))
    # A coordinate that the compiler knows to be warp-uniform costs one move to a uniform register, any other a loop.
    stage, full = cute.arch.make_warp_uniform(pipe.slot(p, i)), p.full
    head = cute.arch.make_warp_uniform(head)
    for c in cutlass.range_constexpr(0, boxes, LOADERS):
        mine = c + loader
        page_c, inside_c = cute.arch.shuffle_sync(page, mine), cute.arch.shuffle_sync(inside, mine)
        if const_expr(c + LOADERS <= boxes) or mine < boxes:
            for d in cutlass.range_constexpr(cute.size(s, mode=[2])):
                dst = s[None, mine, d, stage]
                cute.copy(op.atom, g[None, inside_c, d, head, page_c], dst, tma_bar_ptr=full + stage)


SOURCE = {"paged": paged}


@cute.jit
def zero_tail(spec: cutlass.Constexpr, stage: cute.Tensor, valid: Int32, threads: cutlass.Constexpr):
    """Zero the rows [valid, next box) of a V stage: the rows past kv_len that share a box, and so a page, with valid
    rows, hold whatever the page held, and 0 * NaN is NaN. The `threads` math threads share it; a proxy fence and a barrier follow."""
    vec = 8  # 16-bit elements of a 16-byte store
    per_row = spec.head_dim_vo // vec
    tid = cute.arch.thread_idx()[0] - 128
    zeros = cute.make_rmem_tensor(vec, stage.element_type)
    zeros.fill(0.0)
    rows = (valid + spec.kv.box - 1) // spec.kv.box * spec.kv.box - valid
    for i in cutlass.range(tid, rows * per_row, threads, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(stage, (1, vec), (valid + i // per_row, i % per_row))[0, None])
