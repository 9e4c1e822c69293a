"""Exact top-k of rows by radix selection: host part and device entry.

A row is shared by the CTAs of a cluster, a slice each. Roles: all threads do the same. A slice is read once, kept in
shared memory, and counted in bins of keys on the way. The bin that holds the k-th largest key of the row is split, from
shared memory, until LIST keys at most are left in it, or those needed, or keys that are all equal. One more pass makes
a bit a key: set at the boundary and above. The few keys at the boundary are listed and ranked, with lower indices first
(`last_ties`: higher), and those that do not get in lose their bits; equal ones in greater number are counted in index
order. The bits, in order, are what is written.

A CTA writes only its own shared memory and reads that of the others: so its arrivals at the cluster's barrier need no
fence that waits for memory (`scope.cluster_barrier`).

Shared memory: keys (capacity + two groups), with their indices where a slice is streamed (see `filter`), then what is
written, over the keys; bins of the CTA, then, where it is alone, over them, the bits of marks and of ties; lists of the
keys at the boundary, its own and the row's; a few words of scratch.

Refused (see `supports`): slices that do not fit.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ... import abi
from .. import emit, rows, scope, select
from ..args import TopKArgs
from ..spec import BINS, BITS, MAX_PULL_CLUSTER
from . import LIST, ctas_per_sm, filter, passes, places, write


def fake_args(spec) -> dict[str, Any]:
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
    )._asdict()


@dataclass(frozen=True)
class RadixSharedStorage:
    """Shared memory of a CTA."""

    keys: cute.Tensor  # (WORDS, vectors) of floats
    index: cute.Tensor  # (places,) in the window, of candidates; (1,) where a slice is held whole
    local: cute.Tensor  # (BINS,) of this CTA
    total: cute.Tensor  # (BINS / cluster,) of the row, this CTA's share, in clusters larger than MAX_PULL_CLUSTER
    bits: cute.Tensor  # (places / 32,) over the bins, where no other CTA reads them; ties too
    staged: cute.Tensor  # indices of what was selected, in order; over `keys`
    ties: cute.Tensor  # (places / 32 at least,)
    list: cute.Tensor  # (LIST,) this CTA's keys at the boundary, 64 bits with their places
    pool: cute.Tensor  # (LIST,) the row's, then zeros; `list` itself where a CTA is alone
    counts: cute.Tensor  # (4,) keys of this CTA in `list`; above the boundary, or chosen from `list`
    table: cute.Tensor  # (16,) counts of the row's CTAs
    target: cute.Tensor  # (4,) row and first entry of the page table, offset of indices, start of the window
    scratch: cute.Tensor  # (64,)
    found: cute.Tensor  # (4,)


def allocate(spec) -> RadixSharedStorage:
    smem = cutlass.utils.SmemAllocator()

    def words(count, dtype=Uint32, align=16):
        return smem.allocate_tensor(dtype, cute.make_layout(count), align)

    count = places(spec)
    held = cute.make_layout((rows.WORDS, count // passes.lanes(spec)))
    buffer = smem.allocate_tensor(Uint32, held, 16)
    alone, marks = spec.cluster == 1, count // 32
    bits = words(max(2 * marks, BINS) if alone else 2 * marks)
    local = cute.make_tensor(bits.iterator, cute.make_layout(BINS)) if alone else words(BINS)
    entries = smem.allocate_tensor(Uint64, cute.make_layout(LIST), 16)
    return RadixSharedStorage(
        keys=buffer,
        index=words(count if spec.stream else 1, Int32),
        local=local,
        total=words(BINS // spec.cluster) if spec.cluster > MAX_PULL_CLUSTER else local,
        bits=cute.make_tensor(bits.iterator, cute.make_layout(marks)),
        staged=cute.make_tensor(cute.recast_ptr(buffer.iterator, dtype=Int32), cute.make_layout(cute.size(buffer))),
        ties=cute.make_tensor(bits.iterator + marks, cute.make_layout(cute.size(bits) - marks)),
        list=entries,
        pool=entries if alone else smem.allocate_tensor(Uint64, entries.layout, 16),
        counts=words(4, Int32),
        table=words(16, Int32),
        target=words(4, Int32),
        scratch=words(64, Int32),
        found=words(4, Int32),
    )


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = TopKArgs(*flat)
    kernel(spec, a).launch(
        grid=[a.scores.shape[0] * spec.cluster, 1, 1],
        block=[spec.threads, 1, 1],
        cluster=[spec.cluster, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=100,
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: TopKArgs):
    s = allocate(spec)
    passes.prepare(spec, s)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    row = cute.arch.block_idx()[0] // spec.cluster
    target = emit.target(a, row)  # early: reading memory takes long
    window = rows.bounds(a, row)
    if cute.arch.thread_idx()[0] == 0:
        s.target[0], s.target[1], s.target[2] = target
        s.target[3] = window.start
    x = rows.slice_of(spec, a, row, window, scope.rank(spec))
    if window.n <= a.k:
        copy(spec, a, s, x)
    else:
        pick(spec, a, s, x)


@cute.jit
def copy(spec: cutlass.Constexpr, a, s: RadixSharedStorage, x: rows.RowSlice):
    """A row of at most k elements: all of them in order, then padding."""
    room = const_expr(cute.size(s.staged))
    for begin in cutlass.range(0, x.count, room, unroll=1):
        count = cutlass.min(x.count - begin, room)
        for i in cutlass.range(cute.arch.thread_idx()[0], count, spec.threads, unroll=1):
            s.staged[i] = x.low + begin + i
        cute.arch.barrier()
        emit.place(spec, a, s, x, x.low + begin, count)
        cute.arch.barrier()
    if scope.rank(spec) == 0:
        emit.pad(spec, a, x.row, x.n)


@cute.jit
def pick(spec: cutlass.Constexpr, a, s: RadixSharedStorage, x: rows.RowSlice):
    """A row of more than k elements."""
    if const_expr(spec.stream):
        kept, found = filter.gather(spec, a, s, x)
        x = filter.held(spec, x, kept)
    else:
        passes.load_slice(spec, s, x)
        found = select.search(spec, s, a.k)
    boundary = passes.refine(spec, s, x, found)
    passes.mark(spec, a, s, x, boundary)
    write.expand(spec, a, s, x, write.resolve_ties(spec, a, s, x, boundary))
