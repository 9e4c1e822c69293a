"""Tensor memory of a CTA: 128 lanes x 512 columns of 4 bytes. Warp w reaches lanes 32 (w % 4) to 32 (w % 4) + 31; an
address is lane << 16 | column."""

import cutlass.cute as cute
from cutlass import Float32, Int32

COLUMNS = 512


def alloc(into: cute.Pointer):
    """One warp: all columns; their address to shared memory."""
    text = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {COLUMNS};"
    cute.arch.inline_ptx(text, read_only_args=[into.toint()])


def dealloc(address):
    """The warp that allocated, when nobody uses it any more."""
    cute.arch.inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")
    text = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {COLUMNS};"
    cute.arch.inline_ptx(text, read_only_args=[address])


def lanes(warp):
    """What a warp adds to a column to make an address."""
    return warp % 4 << 21


def load(address, columns: int):
    """One warp: fp32 values of its lanes, not to be used before `wait_load`."""
    names = ", ".join(f"{{$w{i}}}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [{{$r0}}];"
    return cute.arch.inline_ptx(text, write_only_types=[Float32] * columns, read_only_args=[Int32(address)])


def wait_load():
    cute.arch.inline_ptx("tcgen05.wait::ld.sync.aligned;")


def store(address, words):
    """One warp: a word a lane and column; visible to others after `wait_store`."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{names}}};"
    cute.arch.inline_ptx(text, read_only_args=[Int32(address), *words])


def wait_store():
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def fence_before_thread_sync():
    """Between accesses to tensor memory and the arrival that tells others of them."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync():
    """Between a wait for others and accesses to what they have touched."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
