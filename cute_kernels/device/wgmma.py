"""Warpgroup MMA (`wgmma`): operands, issue, and register views of accumulators.

One S = Q @ K^T:

    mma = wgmma.mma_nt(BFloat16, warpgroups, n)
    wgmma.issue(mma, acc_s, q, k, zero=True)   # committed as one group
    cute.nvgpu.warpgroup.wait_group(0)
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from . import warp
from .layout import smem_layout


def mma_nt(dtype, warpgroups, n, a_in_registers=False):
    """Return the tiled MMA of C(m, n) += A(m, k) B(n, k), both K-major; A in shared memory or registers, B in shared
    memory."""
    k, src = OperandMajorMode.K, source(a_in_registers)
    return hh.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, (warpgroups, 1, 1), (64, n), src)


def mma_nn(dtype, warpgroups, n, a_in_registers=True):
    """Return the tiled MMA of C(m, n) += A(m, k) B(k, n): A in registers or, K-major, in shared memory; B row-major in
    shared memory."""
    k, mn, src = OperandMajorMode.K, OperandMajorMode.MN, source(a_in_registers)
    return hh.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, (warpgroups, 1, 1), (64, n), src)


def chosen(numbers, count):
    """Return the numbers that are chosen of `count`, all if there are none."""
    return numbers or tuple(range(count))


def source(registers):
    return warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM


@cute.jit
def load_a(mma: cute.TiledMma, smem: cute.Tensor, regs: cute.Tensor, thread: Int32):
    """Load this thread's fragment of a register A operand from smem (m, k), K-major, by `ldmatrix`."""
    atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), smem.element_type)
    tiled = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    cute.copy(atom, tiled.partition_S(smem), tiled.retile(regs))


@cute.jit
def store_a(mma: cute.TiledMma, regs: cute.Tensor, smem: cute.Tensor, thread: Int32):
    """Store a 16-bit fragment in the layout of `load_a` back to shared memory, by `stmatrix`."""
    atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), smem.element_type)
    tiled = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    cute.copy(atom, tiled.retile(regs), tiled.partition_D(smem))


class Instructions(NamedTuple):
    """Some instructions of a product: those of these steps of K, and of these columns, each as numbers; none for
    all."""

    steps: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


ALL = Instructions()


@cute.jit
def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: cutlass.Constexpr,
    part=0,
    first: cutlass.Constexpr = 0,
    some: cutlass.Constexpr = ALL,
):
    """Issue acc (+)= a b over all of K that b has, committed as one group; do not wait for it.

    acc: the accumulator of neighbouring columns, those of one or several instructions. zero: overwrite acc. part: which
    such columns of b. first: the step of a that multiplies the first one of b. some: the instructions that are
    issued."""
    assert cute.size(acc, mode=[1]) == 1
    atom = cute.make_mma_atom(mma.op)  # a local atom: setting a field of a struct member in a loop breaks dominance
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    warpgroup.fence()
    count = const_expr(cute.size(acc, mode=[2]))
    ks, ns = chosen(some.steps, cute.size(b.shape[2])), chosen(some.columns, count)
    for i in cutlass.range_constexpr(len(ks)):
        for j in cutlass.range_constexpr(len(ns)):
            c = acc[None, 0, ns[j]]
            cute.mma_atom_call(atom, c, a[None, 0, first + ks[i]], b[None, count * part + ns[j], ks[i]], c)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def recomputed(smem: cute.Tensor):
    """Return stages (rows, cols, stages) with an address that the compiler does not trace back to another one, so that
    it keeps no descriptors of them in registers across a loop."""
    rows, cols, stages = (cute.size(smem, mode=[i]) for i in range(3))
    kind = smem_layout((rows, cols), stages, smem.element_type)
    address = cute.make_ptr(
        cutlass.Uint8, warp.opaque(smem.iterator.toint()), cute.AddressSpace.smem, assumed_align=1024
    )
    return cute.make_tensor(cute.recast_ptr(address, kind.inner, smem.element_type), kind.outer)


def rows_cols(acc):
    """Return the ((2, 2, V), M, N) accumulator as a (rows, cols) view."""
    s, d = acc.layout.shape, acc.layout.stride
    shape = ((s[0][1], s[1]), (s[0][0], s[0][2], s[2]))
    stride = ((d[0][1], d[1]), (d[0][0], d[0][2], d[2]))
    return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))


def as_operand_a(acc):
    """Return the ((2, 2, V), M, N) accumulator as the ((2, 2, 2), M, (V/2, N)) fragment of a 16-bit A operand."""
    lay = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    s, d = lay.shape, lay.stride
    shape = ((s[0][0], s[0][1], s[0][2][0]), s[1], (s[0][2][1], s[2]))
    stride = ((d[0][0], d[0][1], d[0][2][0]), d[1], (d[0][2][1], d[2]))
    return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))
