"""Exact top-k of rows by radix selection: host part and device entry.

A row is shared by the CTAs of a cluster, a slice each. Roles: all threads do the same. A slice is read once, its keys
stay in shared memory (`capacity` 0: it is read again in each pass). Passes over the digits of the keys, highest first,
find the digit of the k-th largest key from a histogram of the whole row, until the keys of one bin are just those still
needed or no digit is left. Then each warp counts what its part holds above the boundary and at it, and writes its share
in index order; of equal keys at the boundary the lowest indices get in, or the highest (`last_ties`).

Shared memory: keys (capacity + a vector), two histograms of BINS, a few words of scratch.

Refused (see `supports`): slices that do not fit.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ... import abi
from ...device.warp import prefix_sum
from .. import emit, keys, rows, scope, select
from ..args import TopKArgs
from ..spec import BITS


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


UNROLL = 4  # vectors that a thread has in flight


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    keys: cute.Tensor  # (WORDS, vectors)
    local: cute.Tensor  # (BINS,) of this CTA
    total: cute.Tensor  # (BINS,) of the row; `local` itself where a CTA has the row alone
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
        smem.allocate_tensor(Int32, cute.make_layout(32)),
        smem.allocate_tensor(Int32, cute.make_layout(3), 16),
        smem.allocate_tensor(Int32, cute.make_layout((spec.cluster, 2), stride=(2, 1)), 16),
    )
    cute.arch.griddepcontrol_wait()
    row = cute.arch.block_idx()[0] // spec.cluster
    rank = cute.arch.block_idx()[0] % spec.cluster
    start, n = rows.bounds(a, row)
    if n <= a.k:
        copy(spec, a, (row, rank, start, n))
    else:
        pick(spec, a, s, rows.cut(spec, a, row, start, n, rank), rank)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def copy(spec: cutlass.Constexpr, a, at):
    """A row of at most k elements: all of them in order, then padding."""
    row, rank, start, n = at
    for i in cutlass.range(rank * spec.threads + cute.arch.thread_idx()[0], a.k, spec.threads * spec.cluster, unroll=1):
        if i < n:
            key = Uint32(0)
            if a.values.shape[0] > 0:
                bits = const_expr(BITS[spec.dtype])
                word = keys.raw(a.scores, bits)[row, start + i].to(Uint32)
                key = keys.part(keys.encode(word, bits), 0, bits)
            emit.place(spec, a, row, i, i, key)
        else:
            emit.nothing(a, row, i)


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
            tally(spec, s, x, (shift, width, prefix), p == 0)
            scope.totals(spec, s.local, s.total)
            digit, here, need = select.search(spec, s.total, need, s.scratch, s.found)
            prefix, low = (prefix << width) | Uint32(digit), Int32(shift)
    write(spec, a, s, x, (rank, prefix, low, need))


@cute.jit
def hold(spec: cutlass.Constexpr, s: Shared, x: rows.Slice, v: Int32, words: cute.Tensor):
    """The keys of vector v, from where they are kept."""
    if const_expr(spec.capacity > 0):
        cute.autovec_copy(s.keys[None, v], words)
    else:
        rows.fetch(spec, x, v, words)


@cute.jit
def tally(spec: cutlass.Constexpr, s: Shared, x: rows.Slice, digit, first: cutlass.Constexpr):
    """Count the digits of this CTA's keys into s.local: of all of them, which are read and kept (`first`), or of those
    whose higher bits are the prefix. digit = (shift, bits, prefix)."""
    tid = cute.arch.thread_idx()[0]
    words = cute.make_rmem_tensor((rows.WORDS, UNROLL), Uint32)
    for base in cutlass.range(tid, x.vectors, spec.threads * UNROLL, unroll=1):
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < x.vectors:
                if const_expr(first):
                    rows.fetch(spec, x, v, words[None, u])
                else:
                    hold(spec, s, x, v, words[None, u])
        for u in cutlass.range_constexpr(UNROLL):
            v = base + u * spec.threads
            if v < x.vectors:
                if const_expr(first and spec.capacity > 0):
                    cute.autovec_copy(words[None, u], s.keys[None, v])
                count(spec, s, x, (v, words[None, u]), digit, first)


@cute.jit
def count(spec: cutlass.Constexpr, s: Shared, x: rows.Slice, at, digit, everything: cutlass.Constexpr):
    v, words = at
    shift, width, prefix = digit
    bits, per = const_expr(BITS[spec.dtype]), const_expr(keys.per_word(spec))
    for w in cutlass.range_constexpr(rows.WORDS):
        for e in cutlass.range_constexpr(per):
            key = keys.part(words[w], e, bits)
            j = (v * rows.WORDS + w) * per + e - x.shift
            counts = j >= 0 and j < x.count
            if const_expr(not everything):
                counts = counts and (key >> (shift + width)) == prefix
            if counts:
                bin_ = (key >> shift) & ((1 << width) - 1)
                cute.arch.atomic_add(s.local.iterator + Int32(bin_), Uint32(1), sem="relaxed", scope="cta")


@cute.jit
def classify(spec: cutlass.Constexpr, x: rows.Slice, at, boundary, out: cute.Tensor):
    """out (2, keys of a vector): which keys of a vector lie above the boundary, and which at it."""
    v, words = at
    prefix, low = boundary
    bits, per = const_expr(BITS[spec.dtype]), const_expr(keys.per_word(spec))
    for w in cutlass.range_constexpr(rows.WORDS):
        for e in cutlass.range_constexpr(per):
            key = keys.part(words[w], e, bits) >> low.to(Uint32)
            j = (v * rows.WORDS + w) * per + e - x.shift
            inside = j >= 0 and j < x.count
            out[0, w * per + e] = Int32(inside and key > prefix)
            out[1, w * per + e] = Int32(inside and key == prefix)


@cute.jit
def write(spec: cutlass.Constexpr, a, s: Shared, x: rows.Slice, boundary):
    """Write this CTA's share of the row, in index order."""
    rank, prefix, low, need = boundary
    warps, per = const_expr(spec.threads // 32), const_expr(rows.WORDS * keys.per_word(spec))
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    part = (x.vectors + warps - 1) // warps
    first, last = warp * part, cutlass.min(warp * part + part, x.vectors)
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    which = cute.make_rmem_tensor((2, per), Int32)
    above, equal = Int32(0), Int32(0)
    for v in cutlass.range(first + lane, last, 32, unroll=1):
        hold(spec, s, x, v, words)
        classify(spec, x, (v, words), (prefix, low), which)
        for e in cutlass.range_constexpr(per):
            above += which[0, e]
            equal += which[1, e]
    above = cute.arch.shuffle_sync(prefix_sum(above), 31)
    equal = cute.arch.shuffle_sync(prefix_sum(equal), 31)
    above_before, above_all = select.before(above, s.scratch, warps)
    cute.arch.barrier()
    equal_before, equal_all = select.before(equal, s.scratch, warps)
    scope.publish(spec, s.counts, above_all, equal_all)
    position, skip, take = share(spec, a, s, rank, need)
    for step in cutlass.range((last - first + 31) // 32, unroll=1):
        v = first + step * 32 + lane
        which.fill(0)
        if v < last:
            hold(spec, s, x, v, words)
            classify(spec, x, (v, words), (prefix, low), which)
        above_here, equal_here = Int32(0), Int32(0)
        for e in cutlass.range_constexpr(per):
            above_here += which[0, e]
            equal_here += which[1, e]
        above_sum, equal_sum = prefix_sum(above_here), prefix_sum(equal_here)
        ups, ties = above_before + above_sum - above_here, equal_before + equal_sum - equal_here
        for e in cutlass.range_constexpr(per):
            index = x.low + v * per + e - x.shift
            chosen = which[0, e] != 0 or (which[1, e] != 0 and ties >= skip and ties < skip + take)
            if chosen:
                at = position + ups + rows.clamp(ties - skip, 0, take)
                key = keys.part(words[e // keys.per_word(spec)], e % keys.per_word(spec), BITS[spec.dtype])
                emit.place(spec, a, x.row, at, index, key)
            ups += which[0, e]
            ties += which[1, e]
        above_before += cute.arch.shuffle_sync(above_sum, 31)
        equal_before += cute.arch.shuffle_sync(equal_sum, 31)


@cute.jit
def share(spec: cutlass.Constexpr, a, s: Shared, rank: Int32, need: Int32):
    """(first output position of this CTA, boundary keys of it that do not get in before those that do, how many do)."""
    position, before, everything = Int32(0), Int32(0), Int32(0)
    for c in cutlass.range_constexpr(spec.cluster):
        everything += s.counts[c, 1]
    skipped = Int32(0)  # boundary keys of the row that come before the first that gets in
    if a.last_ties != 0:
        skipped = everything - need
    for c in cutlass.range_constexpr(spec.cluster):
        if c < rank:
            position += s.counts[c, 0]
            before += s.counts[c, 1]
    position += rows.clamp(before - skipped, 0, need)
    mine = s.counts[rank, 1]
    skip = rows.clamp(skipped - before, 0, mine)
    take = rows.clamp(need - rows.clamp(before - skipped, 0, need), 0, mine - skip)
    return position, skip, take
