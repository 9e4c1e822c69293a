"""Two Triton kernels and the PTX that Triton 3.8.0 makes of them, which lies beside this file.

`python kernels.py` writes the PTX anew; it needs Triton and no GPU. Debug sections, comments and empty lines are
cut off.
"""

import re
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).resolve().parent
TILE = {"BM": 64, "BN": 64, "BK": 32}


@triton.jit
def softmax(x, y, stride, columns, BLOCK: tl.constexpr):
    """Write the softmax of row `program_id` of x to y."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride + at
    values = tl.load(x + row, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row, powers / tl.sum(powers, axis=0), mask=at < columns)


@triton.jit
def matmul(a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Write a tile of c = a b, with asynchronous copies through shared memory."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * sa + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * sb + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * sc + n[None, :], total.to(tl.float16), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def tma_matmul(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same by tensor descriptors of a, b and c."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.float16))


def write(name, function, arch, signature, constants):
    """Compile a kernel and write its PTX."""
    names = {**signature, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(names.values()) if kind in ("*fp16", "i32")}
    source = ASTSource(fn=function, signature=names, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    ptx = made.asm["ptx"].partition("\t.file\t")[0]
    for number, file in re.findall(r'\t\.file\t(\d+) "(?:[^"]*/)?([^"]*)"', made.asm["ptx"]):
        ptx += f'\t.file\t{number} "{file}"\n'
    code = [line for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    first = f"// Triton {triton.__version__}, {made.metadata.shared} B of shared memory"
    (HERE / f"{name}.ptx").write_text("\n".join([first, *code, ""]))


def main():
    halves = dict.fromkeys(("a", "b", "c"), "*fp16")
    numbers = dict.fromkeys(("M", "N", "K", "sa", "sb", "sc"), "i32")
    rows = {"x": "*fp32", "y": "*fp32", "stride": "i32", "columns": "i32"}
    write("softmax", softmax, 90, rows, {"BLOCK": 512})
    for arch in (80, 90, 100):
        write(f"matmul_sm{arch}", matmul, arch, halves | numbers, TILE)
    boxes = {"a": "tensordesc<fp16[64,32]>", "b": "tensordesc<fp16[32,64]>", "c": "tensordesc<fp16[64,64]>"}
    write("tma_matmul_sm90", tma_matmul, 90, boxes | {"K": "i32"}, TILE)


if __name__ == "__main__":
    main()
