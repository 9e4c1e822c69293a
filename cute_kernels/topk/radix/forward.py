"""Exact top-k of rows by radix selection: host part and device entry.

The CTAs of a cluster share a row; each has a slice of it. There are no roles: all threads of a CTA work on each phase.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| `passes.reset` | all | | CTA barrier at its end | zeros: `local`, `pool`, `counts` |
| entry | all | starts, lengths, offsets | `griddepcontrol.wait`: previous grid | `target`; `launch_dependents` |
| `copy_all`, if n <= k | all | `staged` | CTA barriers | all indices in order, then padding: done |
| `load_slice`, if held | a vector each | its slice of the scores | | `keys`; counts bins in `local` |
| `gather_candidates`, if streamed | a chunk per warp | a sample, its slice | CTA barriers | `keys`, `index`, `local` |
| `select.search` | some bins each | `local` or `total` of all CTAs | cluster barrier | `found`: bin of the k-th key |
| `passes.refine` | a vector each | `keys` | cluster barriers per split | `local`; `counts[1]`: keys above the bin |
| `passes.mark` | groups per warp | `keys`; all `local[bin]` | cluster barrier | `bits`, `table`, `list` or `ties` |
| `write.resolve_ties` | 4 or 8 per tie | `list` of all CTAs, or `ties` | CTA barriers | `pool`, `bits`, `counts[1]` |
| `write.write_selected` | some bits each | `bits`; all `counts[1]`; scores | two cluster barriers | `staged`, outputs |

- A slice is read once, kept in shared memory, and counted in bins of keys on the way.
- `search` finds the bin of the row's k-th largest key, the boundary. `refine` splits it, from shared memory, until it
  holds at most TIE_LIST keys, or only keys that are all selected, or only equal keys.
- `mark` makes one bit per key: set at the boundary and above. The keys at the boundary (ties) are listed and ranked,
  lower indices first (`last_ties`: higher first), and lose their bits if they are not selected. More than TIE_LIST
  equal keys are counted in index order instead. The bits, in order, are the output. If slices are streamed, the same
  rule chooses among the candidates, and `last_ties` decides whether later equal keys still are some (`filter.compact`).
- Cycles on an H200 for 64 rows of 65536 fp32 scores, of 21 K: 9.8 K read and count, 2.3 K search, 3.9 K marks, 0.6 K
  lists, 1 K ranks, 0.9 K prefix sums, 1.2 K compaction of indices, 0.7 K output.

A CTA writes only its own shared memory and reads that of the others. So its arrivals at the cluster's barrier need no
fence that waits for global memory (`scope.cluster_barrier`).

Shared memory: `keys` (capacity and two groups) with their `index` if slices are streamed (see `filter`); `staged`, over
`keys`; `local`, and `bits` and `ties`, which lie over `local` if a CTA has the row alone; `list` and `pool`; a few
words of scratch.

Refused (see `supports`): slices that do not fit."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64, const_expr

from ... import abi
from .. import emit, rows, scope, select
from ..args import ABSOLUTE, TopKArgs
from ..spec import BINS, BITS, MAX_PULL_CLUSTER
from . import TIE_LIST, ctas_per_sm, filter, num_positions, passes, write


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
        page_size=Int32(1),
        k=Int32(1),
        last_ties=Int32(0),
        enable_pdl=Int32(0),
    )._asdict()


@dataclass(frozen=True)
class RadixSharedStorage:
    """Shared memory of a CTA."""

    keys: cute.Tensor  # (WORDS, vectors) floats
    index: cute.Tensor  # (positions,) index in the window of each candidate; (1,) if a slice is held whole
    local: cute.Tensor  # (BINS,) histogram of this CTA
    total: cute.Tensor  # (BINS / cluster,) this CTA's share of the row's histogram, if cluster > MAX_PULL_CLUSTER
    bits: cute.Tensor  # (positions / 32,) selected keys; over `local` if no other CTA reads it, as are `ties`
    staged: cute.Tensor  # indices of the selected keys, in order; over `keys`
    ties: cute.Tensor  # (positions / 32 at least,) keys at the boundary
    list: cute.Tensor  # (TIE_LIST,) this CTA's keys at the boundary, 64 bits with their positions
    pool: cute.Tensor  # (TIE_LIST,) those of the row, then zeros; `list` itself if a CTA has the row alone
    counts: cute.Tensor  # (4,) keys of this CTA: [0] in `list`, [1] above the boundary or selected from `list`
    table: cute.Tensor  # (16,) a count per CTA of the row
    target: cute.Tensor  # (4,) row and first entry of the page table, offset of indices, start of the window
    scratch: cute.Tensor  # (64,)
    found: cute.Tensor  # (4,)


def allocate(spec) -> RadixSharedStorage:
    smem = cutlass.utils.SmemAllocator()

    def words(count, dtype=Uint32, align=16):
        return smem.allocate_tensor(dtype, cute.make_layout(count), align)

    count = num_positions(spec)
    held = cute.make_layout((rows.WORDS, count // passes.keys_per_vector(spec)))
    buffer = smem.allocate_tensor(Uint32, held, 16)
    alone, marks = spec.cluster == 1, count // 32
    bits = words(max(2 * marks, BINS) if alone else 2 * marks)
    local = cute.make_tensor(bits.iterator, cute.make_layout(BINS)) if alone else words(BINS)
    entries = smem.allocate_tensor(Uint64, cute.make_layout(TIE_LIST), 16)
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
    # Work that reads no global memory comes before the wait for the previous grid. With the early read of the target it
    # saved 0.2 us.
    passes.reset(spec, s)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    row = cute.arch.block_idx()[0] // spec.cluster
    target = emit.target(a, row)  # early, to hide the latency of global memory
    window = rows.bounds(a, row)
    if cute.arch.thread_idx()[0] == 0:
        s.target[0], s.target[1], s.target[2] = target
        s.target[3] = window.start
        if a.window == ABSOLUTE:
            s.target[2] = window.start
    x = rows.slice_of(spec, a, row, window, scope.rank(spec))
    if window.n <= a.k:
        copy_all(spec, a, s, x)
    else:
        select_top_k(spec, a, s, x)


@cute.jit
def copy_all(spec: cutlass.Constexpr, a, s: RadixSharedStorage, x: rows.RowSlice):
    """Write a row of at most k elements: all of them in order, then padding."""
    room = const_expr(cute.size(s.staged))
    for begin in cutlass.range(0, x.count, room, unroll=1):
        count = cutlass.min(x.count - begin, room)
        for i in cutlass.range(cute.arch.thread_idx()[0], count, spec.threads, unroll=1):
            s.staged[i] = x.low + begin + i
        cute.arch.barrier()
        emit.write_outputs(spec, a, s, x, x.low + begin, count)
        cute.arch.barrier()
    if scope.rank(spec) == 0:
        emit.pad(spec, a, x.row, x.n)


@cute.jit
def select_top_k(spec: cutlass.Constexpr, a, s: RadixSharedStorage, x: rows.RowSlice):
    """Select and write the k largest elements of a row of more than k."""
    # Each phase needs the result of the one before, so barriers separate them. Only `gather_candidates` or `load_slice`
    # reads the slice in global memory; the later phases work in shared memory (except for the output of values):
    #   1. fill shared memory and count bins, on the way   2. find the bin of the k-th key, the boundary
    #   3. split the bin until few keys are left in it     4. mark the keys at the boundary and above, one bit per key
    #   5. clear the bits of the ties that lose            6. write the elements of the set bits, in index order
    # Bits and prefix sums instead of a list of winners give the order of indices for 1 %: slots taken from an atomic
    # counter would save 0.11 of 12.13 us on 64 rows of 65536.
    if const_expr(spec.stream):
        kept, found = filter.gather_candidates(spec, a, s, x)
        x = filter.kept_slice(spec, x, kept)
    else:
        passes.load_slice(spec, s, x)
        found = select.search(spec, s, a.k)
    boundary = passes.refine(spec, s, x, found)
    passes.mark(spec, a, s, x, boundary)
    write.write_selected(spec, a, s, x, write.resolve_ties(spec, a, s, x, boundary))
