"""Tensor memory (TMEM) of a CTA: 128 lanes x 512 columns of 4 bytes.

Warp w reaches lanes 32 (w % 4) to 32 (w % 4) + 31. An address is lane << 16 | column.

    s = tmem.load(base + tmem.lanes(warp) + column, 32)   # tcgen05.ld: 32 columns of this thread's lane
    tmem.wait_load()                                      # before the values are used
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

COLUMNS = 512


def alloc(into: cute.Pointer):
    """Allocate all columns, and store their address to shared memory at `into`. One warp calls it."""
    text = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {COLUMNS};"
    cute.arch.inline_ptx(text, read_only_args=[into.toint()])


def dealloc(address):
    """Free the columns. The warp that allocated them calls it, after the last access."""
    cute.arch.inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")
    text = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {COLUMNS};"
    cute.arch.inline_ptx(text, read_only_args=[address])


def lanes(warp):
    """Return the lane field of the addresses of a warp, to be added to a column."""
    return warp % 4 << 21


def load(address, columns: int):
    """Load `columns` fp32 values per lane. One warp calls it; `wait_load` must precede their use."""
    names = ", ".join(f"{{$w{i}}}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [{{$r0}}];"
    return cute.arch.inline_ptx(text, write_only_types=[Float32] * columns, read_only_args=[Int32(address)])


def wait_load():
    """Wait until this thread's `load`s have completed."""
    cute.arch.inline_ptx("tcgen05.wait::ld.sync.aligned;")


def store(address, words):
    """Store one word per lane and column. One warp calls it; others see the words after `wait_store`."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{names}}};"
    cute.arch.inline_ptx(text, read_only_args=[Int32(address), *words])


def wait_store():
    """Wait until this thread's `store`s have completed."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def fence_before_thread_sync():
    """Order this thread's accesses to TMEM before the arrival or barrier that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync():
    """Order this thread's accesses to TMEM after the wait or barrier that precedes."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
