"""Stable radix sort of rows of (value, index) pairs, in place, descending: host part and device entry.

A CTA sorts a row; a warp holds 32 * items neighbouring pairs. The sort key is the distance of a key below the row's
greatest, ascending, DIGIT bits per pass from the lowest on. The range of the keys gives the number of passes: for
normal data one for bf16 and three for fp32, for equal values none. There are no roles: all threads of a CTA work on
each phase.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | | `griddepcontrol.wait`: the selection | `launch_dependents` |
| load | `items` pairs each | values, indices | | distances in registers; `index` |
| `bounds` | all | `scratch` | CTA barrier | least and greatest key |
| pass: `rank_in_warp` | per warp | distances | `bar.warp.sync` | `counts` of the warp; ranks in registers |
| pass: prefix sum | one per digit | all `counts` | two CTA barriers | `counts`: first slot per digit and warp |
| pass: scatter | `items` pairs each | `counts`, `index` | CTA barrier | `dist` and `index` at their slots |
| pass: gather | `items` pairs each | `dist` | CTA barrier | distances in registers |
| store | `items` pairs each | `index` | | values, indices |

A pass takes 314 instructions per thread (items = 4), 152 of them for the ranks, and four CTA barriers.

Every CTA waits for the grid before it, so a kernel behind this one may rely on both.

Refused (see `supports`): rows that do not fit."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ... import abi
from .. import keys, select
from ..args import SortArgs
from ..spec import BITS
from . import DIGIT, DIGITS, ctas_per_sm

PAD_DIST = 0xFFFFFFFF  # distance of the padding in the last warp: behind all pairs of a row


def fake_args(spec) -> dict[str, Any]:
    size = BITS[spec.dtype] // 8
    return SortArgs(
        values=abi.tensor(abi.DTYPES[spec.dtype], (None, None), align=size),
        indices=abi.tensor(cutlass.Int64, (None, None), align=8),
        enable_pdl=Int32(0),
    )._asdict()


@dataclass(frozen=True)
class SortSharedStorage:
    """Shared memory of a CTA."""

    dist: cute.Tensor  # (capacity,) distances of keys below the greatest one
    index: cute.Tensor  # (capacity,)
    counts: cute.Tensor  # (DIGITS, warps) pairs per digit and warp, then the slot of the first of them
    scratch: cute.Tensor  # (64,)


def allocate(spec) -> SortSharedStorage:
    smem = cutlass.utils.SmemAllocator()

    def words(layout, dtype=Int32):
        return smem.allocate_tensor(dtype, cute.make_layout(layout), 16)

    return SortSharedStorage(
        dist=words(spec.capacity, Uint32),
        index=words(spec.capacity),
        counts=words((DIGITS, spec.threads // 32)),
        scratch=words(64),
    )


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = SortArgs(*flat)
    kernel(spec, a).launch(
        grid=[a.values.shape[0], 1, 1],
        block=[spec.threads, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=100,
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: SortArgs):
    s = allocate(spec)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    row, count, bits = cute.arch.block_idx()[0], a.values.shape[1], const_expr(BITS[spec.dtype])
    values, indices = keys.bit_patterns(a.values, bits)[row, None], a.indices[row, None]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first = warp * (32 * spec.items) + lane
    dist = cute.make_rmem_tensor(spec.items, Uint32)
    least, greatest = Uint32(PAD_DIST), Uint32(0)
    # load the pairs: keys in registers, indices in shared memory
    for i in cutlass.range_constexpr(spec.items):
        p, index = first + 32 * i, Int32(0)
        if p < count:
            dist[i] = keys.to_key(values[p].to(Uint32) << (32 - bits)) >> (32 - bits)
            index = Int32(indices[p])
            least, greatest = cutlass.min(least, dist[i]), cutlass.max(greatest, dist[i])
        s.index[p] = index
    least, greatest = bounds(spec, s, least, greatest)
    # distances below the greatest key
    for i in cutlass.range_constexpr(spec.items):
        dist[i] = greatest - dist[i] if first + 32 * i < count else Uint32(PAD_DIST)
    # A pass per digit, from the lowest on: each is stable, so the last one leaves the pairs sorted by all digits.
    # Reads: the distances in registers, in order: pair `first + 32 * i` is element i of this lane.
    # Waits for: four CTA barriers per pass, behind the counts, inside the prefix sum, before and after the scatter.
    # Writes: s.dist and s.index, at the slots of this pass; then the distances in registers, in the new order.
    # Order: the number of passes depends on the data, the range of distances: 24 bits and three passes for N(0, 1) in
    #   fp32, one pass for bf16, none for equal values. Bitonic sort of 2048 pairs would need 66 passes.
    for shift in cutlass.range(0, 32 - Int32(cute.arch.clz(greatest - least)), DIGIT, unroll=1):
        sort_by_digit(spec, s, dist, Uint32(shift), first - lane < count)
    # store the pairs
    for i in cutlass.range_constexpr(spec.items):
        p = first + 32 * i
        if p < count:
            values[p] = (keys.from_key((greatest - dist[i]) << (32 - bits)) >> (32 - bits)).to(values.element_type)
            indices[p] = Int64(s.index[p])


@cute.jit
def bounds(spec: cutlass.Constexpr, s: SortSharedStorage, least: Uint32, greatest: Uint32):
    """Return the least and the greatest of all threads' bounds. Contains a CTA barrier."""
    warp, lane, warps = cute.arch.warp_idx(), cute.arch.lane_idx(), const_expr(spec.threads // 32)
    least, greatest = cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(greatest, "max")
    if lane == 0:
        s.scratch[warp], s.scratch[32 + warp] = Int32(least), Int32(greatest)
    cute.arch.barrier()
    if lane < warps:
        least, greatest = Uint32(s.scratch[lane]), Uint32(s.scratch[32 + lane])
    return cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(greatest, "max")


@cute.jit
def sort_by_digit(
    spec: cutlass.Constexpr, s: SortSharedStorage, dist: cute.Tensor, shift: Uint32, active: cutlass.Boolean
):
    """Sort the CTA's pairs, distances in `dist` and s.index, stably by bits [shift, shift + DIGIT) of the distances.

    active: this warp has pairs."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first, tid = warp * (32 * spec.items) + lane, cute.arch.thread_idx()[0]
    counts = s.counts[None, warp]
    # count the digits of this warp, and rank its pairs among those with their digit
    for i in cutlass.range_constexpr(DIGITS // 32):
        counts[i * 32 + lane] = Int32(0)
    rank = cute.make_rmem_tensor(spec.items, Uint32)
    if active:
        rank_in_warp(spec, counts, dist, shift, rank)
    cute.arch.barrier()
    # sum over smaller digits (a thread per digit), then over the warps before: the first slot per digit and warp
    mine = Int32(0)
    if tid < DIGITS:
        for w in cutlass.range_constexpr(spec.threads // 32):
            mine += s.counts[tid, w]
    slot, _ = select.cta_prefix_sum(spec, mine, s.scratch)
    if tid < DIGITS:
        for w in cutlass.range_constexpr(spec.threads // 32):
            here = s.counts[tid, w]
            s.counts[tid, w] = slot
            slot += here
    # read the indices before others overwrite them
    index = cute.make_rmem_tensor(spec.items, Int32)
    for i in cutlass.range_constexpr(spec.items):
        index[i] = s.index[first + 32 * i]
    cute.arch.barrier()
    # scatter: write the pairs to their slots
    if active:
        for i in cutlass.range_constexpr(spec.items):
            rank[i] += Uint32(counts[digit(dist[i], shift)])
        for i in cutlass.range_constexpr(spec.items):
            s.dist[rank[i]], s.index[rank[i]] = dist[i], index[i]
    cute.arch.barrier()
    # gather: read the distances back, in order; the indices stay in shared memory
    if active:
        for i in cutlass.range_constexpr(spec.items):
            dist[i] = s.dist[first + 32 * i]


def digit(dist, shift):
    return Int32((dist >> shift) & (DIGITS - 1))


@cute.jit
def rank_in_warp(spec: cutlass.Constexpr, counts: cute.Tensor, dist: cute.Tensor, shift: Uint32, rank: cute.Tensor):
    """Write to `rank` the rank of each of a warp's pairs among those with its digit, and count the pairs in counts
    (DIGITS,).

    The counts must be zero before."""
    before_me = (Uint32(1) << Uint32(cute.arch.lane_idx())) - 1
    # the lanes with the same digit, by ballots
    for i in cutlass.range_constexpr(spec.items):
        rank[i] = match_digit(digit(dist[i], shift))
    cute.arch.sync_warp()
    # rank: pairs with this digit in earlier rows of lanes, then in lower lanes; the lowest lane counts them
    for i in cutlass.range_constexpr(spec.items):
        peers, d = rank[i], digit(dist[i], shift)
        lower = cute.arch.popc(peers & before_me)
        before = counts[d]
        cute.arch.sync_warp()
        if lower == 0:
            counts[d] = before + Int32(cute.arch.popc(peers))
        cute.arch.sync_warp()
        rank[i] = Uint32(before) + lower


def match_digit(d):
    """Return the lanes with this lane's digit, as bits."""
    peers = Uint32(0xFFFFFFFF)
    for b in range(DIGIT):
        peers = peers & match_bit(d, 1 << b)
    return peers


def match_bit(x, bit):
    """Return the lanes, as bits, in which x agrees with this lane's x in the bit of the mask `bit`.

    In PTX: the compiler makes five or six instructions of the DSL's own ballot and selection, not four."""
    text = "{ .reg .pred p; .reg .b32 t, u; and.b32 t, {$r0}, {$r1}; setp.ne.b32 p, t, 0; selp.b32 u, 0, -1, p; "
    text += "vote.sync.ballot.b32 t, p, -1; xor.b32 {$w0}, t, u; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, Int32(bit)])
