"""Reads of global memory past the L1 cache."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class UncachedTensor:
    """An int32 tensor in global memory that is read past the L1 cache, which may hold lines that the previous kernel
    has changed since."""

    tensor: cute.Tensor

    @property
    def shape(self):
        return self.tensor.shape

    def __getitem__(self, at):
        where = self.tensor.iterator + cute.crd2idx(at, self.tensor.layout)
        return cute.arch.load(where.llvm_ptr, Int32, cop="cg")
