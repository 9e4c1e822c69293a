"""Shared memory of the other CTAs of a cluster, in words of 32 bits."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


def address(tensor, rank):
    """Of the same tensor in CTA `rank` of the cluster. Computed where it is used: hoisted out of loops, they spill."""
    text = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    own = Uint32(tensor.iterator.toint())
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[own, Uint32(rank)])


def load(base, word):
    """32 bits at word `word` behind an `address`."""
    text = "ld.shared::cluster.u32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[Int32(base) + 4 * word])


def load_vector(base, word, into):
    """`into`, 2 or 4 words of 32 bits, from word `word` on behind an `address`; aligned to their size."""
    count = cute.size(into)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared::cluster.v{count}.u32 {{{names}}}, [{{$r0}}];"
    words = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[Int32(base) + 4 * word])
    for i in range(count):
        into[i] = words[i]


def store(base, word, value):
    text = "st.shared::cluster.u32 [{$r0}], {$r1};"
    cute.arch.inline_ptx(text, write_only_types=[], read_only_args=[Int32(base) + 4 * word, Uint32(value)])


def add(base, word, value):
    """Add to 32 bits at word `word` behind an `address`, as one step."""
    text = "red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};"
    cute.arch.inline_ptx(text, write_only_types=[], read_only_args=[Int32(base) + 4 * word, Uint32(value)])
