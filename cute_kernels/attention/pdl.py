"""Lengths and offsets as they are while the launch before may still write them (programmatic dependent launch). What is
computed of them is a guess, until they are looked at again behind `griddepcontrol.wait`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

PROLOGUE_BARRIER = 1  # of the warps that guess


def has_prologue(spec):
    """Whether a CTA finds its first work while the launch before may still run."""
    return spec.tile.pdl_prologue


def prologue_threads(spec):
    """Of the warp that schedules and those that load K and V."""
    return 32 * (1 + 2 * spec.tile.load_warps)


@dataclass(frozen=True)
class UncachedTensor:
    """An int32 tensor of global memory, read past the L1, where lines stay that the launch before changes."""

    tensor: cute.Tensor

    @property
    def shape(self):
        return self.tensor.shape

    def __getitem__(self, at):
        where = self.tensor.iterator + cute.crd2idx(at, self.tensor.layout)
        return cute.arch.load(where.llvm_ptr, Int32, cop="cg")


def uncached_args(spec, a):
    """The arguments of a launch, whose lengths and offsets are `UncachedTensor` where its CTAs guess."""
    if not has_prologue(spec):
        return a
    query = a.query._replace(cu_seqlens_q=UncachedTensor(a.query.cu_seqlens_q))
    lens, starts = UncachedTensor(a.kv.kv_lens), UncachedTensor(a.kv.kv_starts)
    return a._replace(query=query, kv=a.kv._replace(kv_lens=lens, kv_starts=starts))
