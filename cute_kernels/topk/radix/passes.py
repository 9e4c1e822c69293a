"""Passes over the keys of a CTA: read them, count digits, find what lies above a boundary and at it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .. import keys, rows
from ..spec import BITS

UNROLL = 4  # vectors that a thread has in flight


def lanes(spec):
    """Keys of a vector."""
    return rows.WORDS * keys.per_word(spec)


def key_of(spec, words, e):
    """Key e of a vector."""
    return keys.part(words[e // keys.per_word(spec)], e % keys.per_word(spec), BITS[spec.dtype])


def span(prefix, low):
    """(least, greatest) key whose bits from `low` up are the prefix."""
    least = prefix << low
    return least, least + ((Uint32(1) << low) - 1)


@cute.jit
def hold(spec: cutlass.Constexpr, s, x: rows.Slice, v: Int32, words: cute.Tensor):
    """The keys of vector v, from where they are kept."""
    if const_expr(spec.capacity > 0):
        cute.autovec_copy(s.keys[None, v], words)
    else:
        rows.fetch(spec, x, v, words)


@cute.jit
def tally(spec: cutlass.Constexpr, s, x: rows.Slice, digit, first: cutlass.Constexpr):
    """Count a digit of this CTA's keys into s.local: of all of them, which are read and kept (`first`), or of those
    whose higher bits are the prefix. digit = (shift, bits, prefix); a barrier follows.

    What vectors hold beyond the slice is key 0: it is counted with the others and then taken off.
    """
    tid = cute.arch.thread_idx()[0]
    shift, width, prefix = digit
    least, greatest = Uint32(0), Uint32(0)
    if const_expr(not first):
        least, greatest = span(prefix, shift + width)
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
                for e in cutlass.range_constexpr(lanes(spec)):
                    key = key_of(spec, words[None, u], e)
                    if const_expr(first):
                        add(s.local, key >> shift, 1)
                    elif key >= least and key <= greatest:
                        add(s.local, (key >> shift) & ((1 << width) - 1), 1)
    if tid == 0 and least == 0:
        add(s.local, Uint32(0), x.count - x.vectors * lanes(spec))


@cute.jit
def add(bins: cute.Tensor, b: Uint32, amount):
    cute.arch.atomic_add(bins.iterator + Int32(b), Uint32(amount), sem="relaxed", scope="cta")


@cute.jit
def classify(spec: cutlass.Constexpr, x: rows.Slice, v: Int32, words: cute.Tensor, boundary):
    """(bit e: key e of vector v lies above the boundary, bit e: at it). boundary = (least, greatest) key at it."""
    least, greatest = boundary
    above, equal = Int32(0), Int32(0)
    for e in cutlass.range_constexpr(lanes(spec)):
        key = key_of(spec, words, e)
        if key > greatest:
            above = above | (1 << e)
        elif key >= least:
            equal = equal | (1 << e)
    if equal != 0:  # key 0 beyond the slice may be among them
        begin = rows.clamp(x.shift - v * lanes(spec), 0, lanes(spec))
        end = rows.clamp(x.count + x.shift - v * lanes(spec), 0, lanes(spec))
        equal = equal & ((1 << end) - (1 << begin))
    return above, equal
