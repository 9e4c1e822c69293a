"""Exact top-k of rows by radix selection: host part and device entry.

A row is shared by the CTAs of a cluster, a slice each. Roles: all threads do the same. A slice is read once, its keys
stay in shared memory (`capacity` 0: it is read again in each pass). Passes over the digits of the keys, highest first,
find the digit of the k-th largest key from a histogram of the whole row, until the keys of one bin are just those still
needed or no digit is left. Then each warp counts what its part holds above the boundary and at it, and writes its share
in index order; of equal keys at the boundary the lowest indices get in, or the highest (`last_ties`).

Shared memory: keys (capacity + a vector), two histograms of BINS, STAGED indices, a few words of scratch.

Refused (see `supports`): slices that do not fit.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ... import abi
from .. import emit, keys, rows, scope, select
from ..args import TopKArgs
from ..spec import BITS
from . import passes, write


def fake_args(spec) -> TopKArgs:
    dtype, size = abi.DTYPES[spec.dtype], BITS[spec.dtype] // 8
    ints: Any = {"align": 4}
    per_row = lambda: abi.tensor(cutlass.Int32, (None,), **ints)  # noqa: E731
    wide = lambda dtype, align: abi.tensor(dtype, (None, None), align=align)  # noqa: E731
    return TopKArgs(
        scores=wide(dtype, size),
        starts=per_row(),
        lengths=per_row(),
        out=wide(cutlass.Int32, 4),
        raw=wide(cutlass.Int32, 4),
        values=wide(dtype, size),
        indices=wide(cutlass.Int64, 8),
        table=wide(cutlass.Int32, 4),
        row_to_batch=per_row(),
        table_starts=per_row(),
        offsets=per_row(),
        window=Int32(0),
        next_n=Int32(1),
        page_shift=Int32(0),
        k=Int32(1),
        last_ties=Int32(0),
        enable_pdl=Int32(0),
    )


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    keys: cute.Tensor  # (WORDS, vectors)
    local: cute.Tensor  # (BINS,) of this CTA
    total: cute.Tensor  # (BINS,) of the row; `local` itself where a CTA has the row alone
    staged: cute.Tensor  # (STAGED,) indices of what was selected, in order
    scratch: cute.Tensor  # (warps,)
    found: cute.Tensor  # (3,)
    counts: cute.Tensor  # (cluster, 2)


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = TopKArgs(*flat)
    kernel(spec, a).launch(
        grid=[a.scores.shape[0] * spec.cluster, 1, 1],
        block=[spec.threads, 1, 1],
        cluster=[spec.cluster, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: TopKArgs):
    smem = cutlass.utils.SmemAllocator()
    vectors = const_expr(spec.capacity * BITS[spec.dtype] // 128 + 1 if spec.capacity else 1)
    local = smem.allocate_tensor(Uint32, cute.make_layout(keys.BINS))
    s = Shared(
        smem.allocate_tensor(Uint32, cute.make_layout((rows.WORDS, vectors)), 16),
        local,
        local if const_expr(spec.cluster == 1) else smem.allocate_tensor(Uint32, cute.make_layout(keys.BINS)),
        smem.allocate_tensor(Int32, cute.make_layout(write.STAGED)),
        smem.allocate_tensor(Int32, cute.make_layout(32)),
        smem.allocate_tensor(Int32, cute.make_layout(3), 16),
        smem.allocate_tensor(Int32, cute.make_layout((spec.cluster, 2), stride=(2, 1)), 16),
    )
    cute.arch.griddepcontrol_wait()
    row = cute.arch.block_idx()[0] // spec.cluster
    rank = cute.arch.block_idx()[0] % spec.cluster
    start, n = rows.bounds(a, row)
    x = rows.cut(spec, a, row, start, n, rank)
    if n <= a.k:
        copy(spec, a, s, x, rank)
    else:
        pick(spec, a, s, x, rank)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def copy(spec: cutlass.Constexpr, a, s: Shared, x: rows.Slice, rank: Int32):
    """A row of at most k elements: all of them in order, then padding."""
    for begin in cutlass.range(0, x.count, write.STAGED, unroll=1):
        count = cutlass.min(x.count - begin, write.STAGED)
        for i in cutlass.range(cute.arch.thread_idx()[0], count, spec.threads, unroll=1):
            s.staged[i] = x.low + begin + i
        cute.arch.barrier()
        emit.place(spec, a, s, x, x.low + begin, count)
        cute.arch.barrier()
    if rank == 0:
        emit.pad(spec, a, x.row, x.n)


@cute.jit
def pick(spec: cutlass.Constexpr, a, s: Shared, x: rows.Slice, rank: Int32):
    """A row of more than k elements."""
    digits = const_expr(keys.DIGITS[BITS[spec.dtype]])
    prefix, low, need, here = Uint32(0), Int32(0), a.k, Int32(-1)
    for p in cutlass.range_constexpr(len(digits)):
        if here != need:
            shift, width = digits[p]
            select.clear(spec, s.local)
            cute.arch.barrier()
            passes.tally(spec, s, x, (shift, width, prefix), p == 0)
            scope.totals(spec, s.local, s.total)
            digit, here, need = select.search(spec, s.total, need, s.scratch, s.found)
            prefix, low = (prefix << width) | Uint32(digit), Int32(shift)
    write.write(spec, a, s, x, (rank, prefix, low, need))
