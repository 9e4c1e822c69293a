"""Run by test_umma.py for sm_100a: compile a product as CUTLASS's helpers set it up.

Prints, for each case on the command line (type, n, k, major of B), the integers in its PTX that are descriptors of
operands or of the instruction.
"""

import re
import sys
import tempfile

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

M = 128
TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN}
MAJORS = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}


@cute.kernel
def kernel(mma: cute.TiledMma, dtype: cutlass.Constexpr, n: cutlass.Constexpr, k: cutlass.Constexpr):
    smem = cutlass.utils.SmemAllocator()
    layouts = [make(mma, (M, n, k), dtype, 1) for make in (helpers.make_smem_layout_a, helpers.make_smem_layout_b)]
    a, b = (smem.allocate_tensor(dtype, x.outer, 1024, x.inner) for x in layouts)
    address = smem.allocate_array(Int32, 1)
    cute.arch.alloc_tmem(512, address)
    left, right = mma.make_fragment_A(a), mma.make_fragment_B(b)
    shape = mma.make_fragment_C(mma.partition_shape_C((M, n))).layout
    acc = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, address), shape)
    mma.set(tcgen05.Field.ACCUMULATE, True)
    for i in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(mma, acc, left[None, None, i, 0], right[None, None, i, 0], acc)


@cute.jit
def host(dtype: cutlass.Constexpr, n: cutlass.Constexpr, k: cutlass.Constexpr, major: cutlass.Constexpr):
    one, of_b = tcgen05.CtaGroup.ONE, const_expr(MAJORS[major])
    mma = helpers.make_trivial_tiled_mma(dtype, dtype, OperandMajorMode.K, of_b, Float32, one, (M, n))
    kernel(mma, dtype, n, k).launch(grid=[1, 1, 1], block=[128, 1, 1])


if __name__ == "__main__":
    for case in sys.argv[1:]:
        dtype, n, k, major = case.split(",")
        with tempfile.TemporaryDirectory() as folder:
            options = f"--keep-ptx --dump-dir {folder}"
            ptx = cute.compile(host, TYPES[dtype], int(n), int(k), major, options=options).__ptx__
        found = {int(x) % 2**64 for x in re.findall(r"(?<![\w%$])-?\d{8,20}\b", ptx)}
        print(case, *sorted(x for x in found if x >> 61 or 1 << 27 <= x < 1 << 28))
