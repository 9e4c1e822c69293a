"""Distributed shared memory (DSMEM): reads of the shared memory of other CTAs of the cluster, in words of 32 bits.

Each CTA writes only its own shared memory. A CTA publishes what it wrote, and reads what others wrote, like this:

    dsmem.fence_release()                               # order this thread's writes before its arrival
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()                            # acquire: the other CTAs' writes are visible
    count = dsmem.load(dsmem.address(counts, rank), i)  # counts[i] of CTA `rank`
"""

import cutlass.cute as cute
from cutlass import Int32, Uint32


def address(tensor, rank):
    """Return the `shared::cluster` address of `tensor` in CTA `rank` (PTX `mapa`).

    Compute it next to its use: addresses that are hoisted out of loops spill."""
    text = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    own = Uint32(tensor.iterator.toint())
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[own, Uint32(rank)])


def load(base, i, dtype=Uint32):
    """Load element i, of 32 or 64 bits, behind an `address`."""
    text = f"ld.shared::cluster.u{dtype.width} {{$w0}}, [{{$r0}}];"
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=[Int32(base) + dtype.width // 8 * i])


def load_vector(base, word, into):
    """Load 2 or 4 words of 32 bits into `into`, starting at word `word` behind an `address`.

    Their address must be aligned to their size."""
    count = cute.size(into)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared::cluster.v{count}.u32 {{{names}}}, [{{$r0}}];"
    words = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[Int32(base) + 4 * word])
    for i in range(count):
        into[i] = words[i]


def fence_release():
    """Order this thread's writes to its own CTA's shared memory before its next operations, at cluster scope.

    A relaxed arrival at the cluster's barrier after this fence is a release of all data that other CTAs may read
    there. A releasing `barrier.cluster.arrive` would also wait for global memory: it compiles to MEMBAR.ALL.GPU,
    200 to 500 cycles."""
    cute.arch.inline_ptx("fence.release.sync_restrict::shared::cta.cluster;", write_only_types=[], read_only_args=[])
