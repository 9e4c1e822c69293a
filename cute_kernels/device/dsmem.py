"""Shared memory of the other CTAs of a cluster, in words of 32 bits: it is read, each CTA writes its own."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


def address(tensor, rank):
    """Of the same tensor in CTA `rank` of the cluster. Computed where it is used: hoisted out of loops, they spill."""
    text = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    own = Uint32(tensor.iterator.toint())
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[own, Uint32(rank)])


def load(base, i, dtype=Uint32):
    """Element i, of 32 or 64 bits, behind an `address`."""
    text = f"ld.shared::cluster.u{dtype.width} {{$w0}}, [{{$r0}}];"
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=[Int32(base) + dtype.width // 8 * i])


def load_vector(base, word, into):
    """`into`, 2 or 4 words of 32 bits, from word `word` on behind an `address`; aligned to their size."""
    count = cute.size(into)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared::cluster.v{count}.u32 {{{names}}}, [{{$r0}}];"
    words = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[Int32(base) + 4 * word])
    for i in range(count):
        into[i] = words[i]


def release():
    """What this thread wrote to its own CTA's shared memory comes before what it does next, for all of the cluster. A
    relaxed arrival at the cluster's barrier that follows is a release of all that others may read there, and does not
    wait for global memory."""
    cute.arch.inline_ptx("fence.release.sync_restrict::shared::cta.cluster;", write_only_types=[], read_only_args=[])
