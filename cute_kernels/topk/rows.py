"""The window of a row, and the slice of it that a CTA holds."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..device import copy, l2
from ..device.clamp import clamp
from . import keys
from .args import ABSOLUTE, DECODE, ENDS, LENGTHS
from .spec import BITS

GRAIN = 128  # slices of a row begin at multiples of this many keys
WORDS = 4  # per vector of 16 bytes


def slices(n, cluster):
    """Return the number of keys per slice; the last slice of a row may have fewer."""
    return (n + cluster * GRAIN - 1) // (cluster * GRAIN) * GRAIN


class RowWindow(NamedTuple):
    """Elements [start, start + n) of a row; all of them lie inside the row."""

    start: Int32
    n: Int32


@dataclass(frozen=True)
class RowSlice:
    """The keys [low, end) of a window, `count` in number.

    words: the row's memory as aligned vectors, (WORDS, vectors); element j of the slice is element j + shift of
    it. vectors: how many hold elements of the slice."""

    row: Int32
    start: Int32
    n: Int32
    low: Int32
    count: Int32
    end: Int32
    shift: Int32
    vectors: Int32
    words: cute.Tensor


@cute.jit
def bounds(a, row: Int32) -> RowWindow:
    """Read the window of a row, clamped to the row. Only this function reads starts and lengths, which may hold
    anything."""
    limit = a.scores.shape[1]
    start, n = Int32(0), Int32(0)
    if a.starts.shape[0] > 0:
        start = clamp(a.starts[row], 0, limit)
    n = limit - start
    if a.window == LENGTHS:
        n = a.lengths[row]
    elif a.window == ENDS or a.window == ABSOLUTE:
        n = clamp(a.lengths[row], 0, limit) - start
    elif a.window == DECODE:
        n = cutlass.max(a.lengths[row // a.next_n], 0) - a.next_n + row % a.next_n + 1
    return RowWindow(start, clamp(n, 0, limit - start))


def slice_of(spec, a, row, window: RowWindow, rank):
    """Return the slice of CTA `rank` of a window."""
    start, n = window
    size = BITS[spec.dtype] // 8
    per = slices(n, spec.cluster)
    low = cutlass.min(rank * per, n)
    count = cutlass.min(per, n - low)
    stride = a.scores.stride[0]
    address = a.scores.iterator.toint() + (Int64(row) * stride + start + low) * size
    shift = (address % 16).to(Int32) // size
    pointer = cute.make_ptr(Uint32, address - (shift * size), cute.AddressSpace.gmem, assumed_align=16)
    vectors = (count + shift + 16 // size - 1) // (16 // size)
    words = cute.make_tensor(pointer, cute.make_layout((WORDS, vectors), stride=(1, WORDS)))
    return RowSlice(row, start, n, low, count, low + count, shift, vectors, words)


@cute.jit
def prefetch(s: RowSlice, first: Int32, count: Int32):
    """Prefetch vectors [first, first + count) of a slice into L2, except its first and its last one, which may reach
    beyond it."""
    begin = cutlass.max(first, 1)
    size = cutlass.min(first + count, s.vectors - 1) - begin
    if (cute.arch.thread_idx()[0] == 0) & (size > 0):
        l2.prefetch(s.words.iterator.toint() + Int64(begin) * (WORDS * 4), size * (WORDS * 4))


@cute.jit
def fetch(spec: cutlass.Constexpr, s: RowSlice, v: Int32, into: cute.Tensor):
    """Load vector v of a slice into registers. Elements beyond the slice are not read; they become filler."""
    bits = const_expr(BITS[spec.dtype])
    per = const_expr(keys.per_word(spec))
    first = v * (WORDS * per) - s.shift
    if first >= 0 and first + WORDS * per <= s.count:
        copy.vector(s.words[None, v], into)
    else:
        narrow = s.words
        if const_expr(bits == 16):
            pointer = cute.recast_ptr(s.words.iterator, dtype=cutlass.Uint16)
            narrow = cute.make_tensor(pointer, cute.make_layout((8, s.vectors), stride=(1, 8)))
        for w in cutlass.range_constexpr(WORDS):
            word = Uint32(keys.FILLER)
            for e in cutlass.range_constexpr(per):
                j = first + w * per + e
                if j >= 0 and j < s.count:
                    hole = const_expr((keys.FILLER >> (32 - bits)) << (bits * e))
                    word = (word & Uint32(~hole & keys.FILLER)) | (narrow[w * per + e, v].to(Uint32) << (bits * e))
            into[w] = word
