"""Where KV block j comes from. A source is a function that fills one stage with the rows of a block."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..device import copy, pipe

BOXES = (8, 16, 32, 64)  # rows of the TMA boxes; a fetch uses the largest that divides page and tile


def boxes(n):
    """Rows of the boxes that can fill a tile of n rows, ascending."""
    return tuple(b for b in BOXES if n % b == 0)


def shift_of(page_size):
    """log2 of a page size: pages are powers of two."""
    return cute.arch.popc(page_size - 1)


def loaders(spec):
    """Warps that fill a stage together: issuing a TMA takes a warp tens of cycles, which decoding has."""
    return 1 if spec.split else 2


@cute.jit
def paged(spec: cutlass.Constexpr, op: copy.Operand, smem: cute.Tensor, p: pipe.Pipe, pages: cute.Tensor, at):
    """One of the `loaders`: its boxes of the rows [j n, (j + 1) n) of a KV head, into item i's stage.

    pages (M,): page ids of the request. at = (loader, i, j, head, kv_len). Lane c looks up the pages of rows
    [8 c, 8 c + 8), and of those 256 rows on. Boxes past kv_len are fetched from a page past the pool, which TMA fills
    with zeros; their table entries are never read.
    """
    loader, i, j, head, kv_len = at
    least, n = op.boxes[0].rows, spec.tile.n
    page_size, pool = op.boxes[0].gmem.shape[0], op.boxes[0].gmem.shape[3]
    found, box = cute.make_rmem_tensor((n // least + 31) // 32, Int32), Int32(0)
    for c in cutlass.range_constexpr(cute.size(found)):
        inside = (32 * c + cute.arch.lane_idx()) * least
        row = j * n + inside
        found[c] = Int32(pool)
        if row < kv_len and inside < n:
            found[c] = pages[row >> shift_of(page_size)]
        if const_expr(c == 0):  # box of its page, where a page has several: 256 rows on it is the same
            box = (row & (page_size - 1)) >> const_expr(op.boxes[-1].rows.bit_length() - 1)
    for k in cutlass.range_constexpr(len(op.boxes)):
        rows, largest = op.boxes[k].rows, const_expr(k + 1 == len(op.boxes))
        if page_size >= rows and (largest or page_size == rows):
            lanes = (found, box if const_expr(largest) else None)
            fill(op.boxes[k], smem, p, (loader, i, head), lanes, (op.bytes, n, least, loaders(spec)))


@cute.jit
def fill(b: copy.Box, smem: cute.Tensor, p: pipe.Pipe, at, lanes, sizes: cutlass.Constexpr):
    """One warp of `of`: its boxes of a stage; lanes = (pages, box inside a page, None where a page is one) of each
    `least` rows."""
    (loader, i, head), (pages, box), (stage_bytes, n, least, of) = at, lanes, sizes
    count = n // b.rows
    s, g = copy.partition(b, smem, b.gmem)
    pipe.fill(p, i, stage_bytes // count * ((count - loader + of - 1) // of) if const_expr(of > 1) else stage_bytes)
    # A coordinate that the compiler knows to be warp-uniform costs one move to a uniform register, any other a loop.
    stage, head = cute.arch.make_warp_uniform(pipe.slot(p, i)), cute.arch.make_warp_uniform(head)
    for c in cutlass.range_constexpr(0, count, of):
        mine = c + loader if const_expr(of > 1) else c  # static where it can be
        lane = mine * (b.rows // least)  # its low five bits, which a shuffle looks at
        page_c = cute.arch.shuffle_sync(pages[const_expr(c * (b.rows // least) // 32)], lane)
        box_c = 0 if const_expr(box is None) else cute.arch.shuffle_sync(box, lane)
        if const_expr(c + of <= count) or mine < count:
            for d in cutlass.range_constexpr(cute.size(s, mode=[2])):
                dst = s[None, mine, d, stage]
                cute.copy(b.atom, g[None, box_c, d, head, page_c], dst, tma_bar_ptr=p.full + stage)


SOURCE = {"paged": paged}


def scale_rows(spec):
    """Neighbouring rows whose scale factors a lane fetches: of one page, so a power of two up to the smallest."""
    return min(BOXES[0], 1 << (spec.tile.n // 32).bit_length() - 1)


@cute.jit
def find_scales(spec: cutlass.Constexpr, page_size: Int32, pages: cute.Tensor, at):
    """Pages of the rows whose scale factors this lane fetches of block j; -1 past kv_len. at = (j, kv_len). Called
    ahead of the wait for a free stage, which hides the latency."""
    j, kv_len = at
    groups = const_expr(spec.tile.n // scale_rows(spec))
    found = cute.make_rmem_tensor((groups + 31) // 32, Int32)
    for c in cutlass.range_constexpr(cute.size(found)):
        group = 32 * c + cute.arch.lane_idx()
        row = j * spec.tile.n + group * scale_rows(spec)
        found[c] = Int32(-1)
        if row < kv_len and group < groups:
            found[c] = pages[row >> shift_of(page_size)]
    return found


@cute.jit
def fetch_scales(spec: cutlass.Constexpr, scales: cute.Tensor, smem: cute.Tensor, p: pipe.Pipe, pages, at):
    """One warp: NVFP4's scale factors of block j of a KV head, (n, D / 16) bytes of item i's stage, row by row: too
    short for TMA. at = (i, j, head). Rows of no page become zeros. Every lane arrives once what it copied is there."""
    i, j, head = at
    size, count = const_expr(scales.shape[3]), const_expr(scale_rows(spec))
    step = Int64(scales.stride[2])
    pipe.wait_empty(p, i)
    for c in cutlass.range_constexpr(cute.size(pages)):
        mine, page = (32 * c + cute.arch.lane_idx()) * count, pages[c]
        exists = (page >= 0) & (page < scales.shape[0])
        row = (j * spec.tile.n + mine) & (scales.shape[2] - 1)
        source = scales[page if exists else Int32(0), head, row, None].iterator.toint()
        target = smem[mine, None, pipe.slot(p, i)].iterator.toint()
        if mine < spec.tile.n:
            for e in cutlass.range_constexpr(count):
                text = f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};"
                written = Int32(size) if exists else Int32(0)
                cute.arch.inline_ptx(text, read_only_args=[target + e * size, source + e * step, written])
    cute.arch.cp_async_mbarrier_arrive_noinc(pipe.full(p, i))


@cute.jit
def zero_tail(spec: cutlass.Constexpr, stage: cute.Tensor, valid: Int32, threads: cutlass.Constexpr):
    """Zero the rows [valid, next multiple of the largest box) of a V stage: they may share a page with rows before
    kv_len, hold whatever the page held, and 0 * NaN is NaN. The `threads` math threads share the work; a proxy fence
    and a barrier follow."""
    vec = 8  # 16-bit elements of a 16-byte store
    per_row = spec.head_dim_vo // vec
    tid = cute.arch.thread_idx()[0] - 128
    zeros = cute.make_rmem_tensor(vec, stage.element_type)
    zeros.fill(0.0)
    box = boxes(spec.tile.n)[-1]
    rows = (valid + box - 1) // box * box - valid
    for i in cutlass.range(tid, rows * per_row, threads, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(stage, (1, vec), (valid + i // per_row, i % per_row))[0, None])
