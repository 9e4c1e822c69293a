"""Stable radix sort of rows of (value, index), in place, descending: host part and device entry.

A CTA sorts a row, of whose pairs a warp holds 32 * items neighbours. What is sorted is the distance of
each key below the row's greatest, ascending, DIGIT bits a pass from the lowest on. Their range says how many passes: of
normal data one of bf16 and three of fp32, of equal values none.

A pass: a warp finds equal digits among its lanes by ballots, and counts its pairs of each digit. Sums of the counts
over smaller digits, and over the warps before, give the place of its first pair of each digit. All pairs are written to
their places in shared memory, and read from there in order.

Every CTA waits for the launch before it, so that a launch behind this one may rely on both.

Refused (see `supports`): rows that do not fit.
"""

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

LAST = 0xFFFFFFFF  # behind all pairs of a row: the distance of what fills its last warp


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

    far: cute.Tensor  # (capacity,) distances of keys below the greatest
    index: cute.Tensor  # (capacity,)
    counts: cute.Tensor  # (DIGITS, warps) pairs of a digit in a warp, then the place of the first of them
    scratch: cute.Tensor  # (64,)


def allocate(spec) -> SortSharedStorage:
    smem = cutlass.utils.SmemAllocator()

    def words(layout, dtype=Int32):
        return smem.allocate_tensor(dtype, cute.make_layout(layout), 16)

    return SortSharedStorage(
        far=words(spec.capacity, Uint32),
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
    far = cute.make_rmem_tensor(spec.items, Uint32)
    least, greatest = Uint32(LAST), Uint32(0)
    for i in cutlass.range_constexpr(spec.items):
        p, index = first + 32 * i, Int32(0)
        if p < count:
            far[i] = keys.to_key(values[p].to(Uint32) << (32 - bits)) >> (32 - bits)
            index = Int32(indices[p])
            least, greatest = cutlass.min(least, far[i]), cutlass.max(greatest, far[i])
        s.index[p] = index
    least, greatest = bounds(spec, s, least, greatest)
    for i in cutlass.range_constexpr(spec.items):
        far[i] = greatest - far[i] if first + 32 * i < count else Uint32(LAST)
    for shift in cutlass.range(0, 32 - Int32(cute.arch.clz(greatest - least)), DIGIT, unroll=1):
        sort_by_digit(spec, s, far, Uint32(shift), first - lane < count)
    for i in cutlass.range_constexpr(spec.items):
        p = first + 32 * i
        if p < count:
            values[p] = (keys.from_key((greatest - far[i]) << (32 - bits)) >> (32 - bits)).to(values.element_type)
            indices[p] = Int64(s.index[p])


@cute.jit
def bounds(spec: cutlass.Constexpr, s: SortSharedStorage, least: Uint32, greatest: Uint32):
    """The least and the greatest of all threads' bounds. Contains a CTA barrier."""
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
    spec: cutlass.Constexpr, s: SortSharedStorage, far: cute.Tensor, shift: Uint32, active: cutlass.Boolean
):
    """Sort the CTA's pairs, distances in `far` and s.index, by bits [shift, shift + DIGIT) of the distances, stably.
    active: this warp has pairs."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first, tid = warp * (32 * spec.items) + lane, cute.arch.thread_idx()[0]
    counts = s.counts[None, warp]
    for i in cutlass.range_constexpr(DIGITS // 32):
        counts[i * 32 + lane] = Int32(0)
    rank = cute.make_rmem_tensor(spec.items, Uint32)
    if active:
        rank_in_warp(spec, counts, far, shift, rank)
    cute.arch.barrier()
    mine = Int32(0)
    if tid < DIGITS:
        for w in cutlass.range_constexpr(spec.threads // 32):
            mine += s.counts[tid, w]
    place, _ = select.cta_prefix_sum(spec, mine, s.scratch)
    if tid < DIGITS:
        for w in cutlass.range_constexpr(spec.threads // 32):
            here = s.counts[tid, w]
            s.counts[tid, w] = place
            place += here
    index = cute.make_rmem_tensor(spec.items, Int32)
    for i in cutlass.range_constexpr(spec.items):
        index[i] = s.index[first + 32 * i]
    cute.arch.barrier()
    if active:
        for i in cutlass.range_constexpr(spec.items):
            rank[i] += Uint32(counts[digit(far[i], shift)])
        for i in cutlass.range_constexpr(spec.items):
            s.far[rank[i]], s.index[rank[i]] = far[i], index[i]
    cute.arch.barrier()
    if active:
        for i in cutlass.range_constexpr(spec.items):
            far[i] = s.far[first + 32 * i]


def digit(far, shift):
    return Int32((far >> shift) & (DIGITS - 1))


@cute.jit
def rank_in_warp(spec: cutlass.Constexpr, counts: cute.Tensor, far: cute.Tensor, shift: Uint32, rank: cute.Tensor):
    """Write the rank of each of a warp's pairs among those of its digit, in order, and count them in counts
    (DIGITS,), zeros before."""
    before_me = (Uint32(1) << Uint32(cute.arch.lane_idx())) - 1
    for i in cutlass.range_constexpr(spec.items):
        rank[i] = equals(digit(far[i], shift))
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(spec.items):
        peers, d = rank[i], digit(far[i], shift)
        lower = cute.arch.popc(peers & before_me)
        before = counts[d]
        cute.arch.sync_warp()
        if lower == 0:
            counts[d] = before + Int32(cute.arch.popc(peers))
        cute.arch.sync_warp()
        rank[i] = Uint32(before) + lower


def equals(d):
    """The lanes whose digit is this lane's, as bits."""
    peers = Uint32(0xFFFFFFFF)
    for b in range(DIGIT):
        peers = peers & alike(d, 1 << b)
    return peers


def alike(x, bit):
    """The lanes, as bits, in whose word x the bit of the mask `bit` is as in this lane's. In PTX: of the DSL's own
    ballot and selection the compiler makes five or six instructions, not four."""
    text = "{ .reg .pred p; .reg .b32 t, u; and.b32 t, {$r0}, {$r1}; setp.ne.b32 p, t, 0; selp.b32 u, 0, -1, p; "
    text += "vote.sync.ballot.b32 t, p, -1; xor.b32 {$w0}, t, u; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, Int32(bit)])
