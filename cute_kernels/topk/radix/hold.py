"""Slices of 16-bit keys that are held. Memory does not bound them, counting does: one atomic a key, on bins in random
banks. So the slice is copied without registers, all of it at once, and keys below a floor are counted in one bin, the
one below it: atomics on one word are one.

The floor is the bin of a rank in a sample: the vectors that arrive first, lines at equal distances. The result does not
depend on it: a CTA with a floor adds LOST to the bin below, and where the row's boundary turns out to lie in such a
bin, or lower, all keys are counted anew."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .. import keys, rows, scope, select
from ..spec import BITS
from . import GROUP, passes
from .passes import lanes

LINE = 8  # vectors that are neighbours, 128 bytes
LEAST = 4  # rounds of copies that are worth a sample, the first of them
LOST = 1 << 24  # more than the keys of any row


def serves(spec):
    """An SM holds several of the smaller CTAs, which wait for each other anyway."""
    return BITS[spec.dtype] == 16 and not spec.stream and spec.threads == 512


def rounds(spec, x):
    """Vectors of a thread."""
    return (passes.groups(spec, x) * (GROUP // lanes(spec)) + spec.threads - 1) // spec.threads


def vector(spec, x, r):
    """This thread's vector of round r: 8 threads have a line, and every round has lines from all of the slice."""
    tid = cute.arch.thread_idx()[0]
    return tid // LINE * (rounds(spec, x) * LINE) + tid % LINE + r * LINE


@cute.jit
def gather(spec: cutlass.Constexpr, a, s, x: rows.Slice) -> select.Found:
    """Fill shared memory with the slice, and find the bin of the row's k-th key."""
    end = rounds(spec, x)
    half = (end + 1) // 2
    for part in ((0, 1), (1, half), (half, end)):
        copy(spec, s, x, *part)
        cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(2)
    count(spec, s, x, Int32(0), Int32(1), Int32(0))
    floor = Int32(0)
    if end >= LEAST:
        floor = sample(spec, a, s, x)
    lost = cutlass.max(floor - 1, 0)
    cute.arch.cp_async_wait_group(1)
    count(spec, s, x, Int32(1), half, lost)
    cute.arch.cp_async_wait_group(0)
    count(spec, s, x, half, end, lost)
    if cute.arch.thread_idx()[0] == 0:
        select.add(s.local, lost, Int32(LOST) if floor > 0 else x.count - passes.groups(spec, x) * GROUP)
    b, here, need, total = select.search(spec, s, a.k)
    if here >= LOST:
        scope.release_bins(spec)
        select.clear(spec, s.local)
        cute.arch.barrier()
        passes.count(spec, s, x)
        b, here, need, total = select.search(spec, s, a.k)
    return select.Found(b, here, need, total)


@cute.jit
def copy(spec: cutlass.Constexpr, s, x: rows.Slice, begin, end):
    """Begin to copy this thread's vectors of rounds [begin, end); those that reach beyond the slice are then there."""
    vectors = passes.groups(spec, x) * (GROUP // lanes(spec))
    for r in cutlass.range(begin, end, unroll=1):
        v = vector(spec, x, r)
        if v < vectors:
            if rows.inside(spec, x, v):
                source = x.words.iterator.toint() + Int64(v) * (rows.WORDS * 4)
                target = s.keys.iterator.toint() + v * (rows.WORDS * 4)
                text = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
                cute.arch.inline_ptx(text, write_only_types=[], read_only_args=[target, source])
            else:
                words = cute.make_rmem_tensor(rows.WORDS, Uint32)
                rows.fetch(spec, x, v, words)
                cute.autovec_copy(words, s.keys[None, v])


@cute.jit
def count(spec: cutlass.Constexpr, s, x: rows.Slice, begin: Int32, end: Int32, least: Int32):
    """Count the bins of this thread's keys of rounds [begin, end) into s.local, those below `least` into that."""
    vectors, both = passes.groups(spec, x) * (GROUP // lanes(spec)), keys.both(least)
    words = cute.make_rmem_tensor(rows.WORDS, Uint32)
    for r in cutlass.range(begin, end, unroll=1):
        v = vector(spec, x, r)
        if v < vectors:
            cute.autovec_copy(s.keys[None, v], words)
            passes.count_vector(spec, s, words, both)


@cute.jit
def sample(spec: cutlass.Constexpr, a, s, x: rows.Slice):
    """The floor: five standard deviations beyond the rank expected of the row's k-th key if all k largest keys were in
    this slice; 0, all bins, where the sample is too small."""
    size = const_expr(spec.threads * lanes(spec))
    mean = Float32(a.k) / Float32(x.count) * Float32(size)
    rank, floor = Int32(mean + 5.0 * cute.math.sqrt(mean)) + 5, Int32(0)
    if rank < size:
        floor = select.search(const_expr(replace(spec, cluster=1)), s, rank).bin
    return floor
