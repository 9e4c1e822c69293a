"""TMA operands (copy atom, global tensor, shared-memory layout), and vectorised copies.

The stages of an operand, from the host to the copy:

    k = copy.operand(rows, (128, head_dim), stages, (128,))      # host: boxes of 128 rows
    smem_k = copy.allocate(smem, k, dtype)                       # device: (rows, cols, stages), swizzled
    s, g = copy.partition(k.boxes[0], smem_k, k.boxes[0].gmem)   # views for cute.copy(box.atom, g[...], s[...])
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .layout import smem_layout, width

SWIZZLE_BYTES = 128  # the widest row of a box


@dataclass(frozen=True)
class TmaBox:
    """A TMA box of (rows, cols): one `cp.async.bulk.tensor` copies it."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # TMA coordinates: (rows, cols, ...)
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr


@dataclass(frozen=True)
class TmaOperand:
    """A tensor that TMA copies to the stages of a pipeline, tile by tile, in boxes of one or several heights
    (ascending)."""

    boxes: tuple[TmaBox, ...]
    layout: cute.ComposedLayout  # (rows, cols, stages) in shared memory
    bytes: cutlass.Constexpr  # of one stage


def make_box(t, rows, cols):
    """Return the box of `rows` rows of t (rows, cols or fewer, ...), with a stride of 1 along cols.

    The box is as wide as the widest swizzle allows: at most SWIZZLE_BYTES."""
    bits = t.element_type.width
    shape = rows, width(cols * bits // 8) * 8 // bits
    layout = cute.select(smem_layout(shape, 1, t.element_type), mode=[0, 1])
    atom, gmem = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, layout, shape)
    return TmaBox(atom, gmem, *shape)


def operand(t, shape, stages, rows):
    """Return the operand that fills stages of `shape` (rows, cols) from t (rows, cols or fewer, ...): TMA fills columns
    that t does not have with zeros.

    rows: heights of the boxes, ascending."""
    layout = smem_layout(shape, stages, t.element_type)
    size = cute.size_in_bytes(t.element_type, cute.select(layout, mode=[0, 1]))
    return TmaOperand(tuple(make_box(t, r, shape[1]) for r in rows), layout, size)


def partition(b: TmaBox, smem, gmem):
    """Return views for `cute.copy`: (smem[box, row tile, col tile, stage], gmem[box, row tile, col tile, ...])."""
    s = cute.local_tile(smem, (b.rows, b.cols), (None,) * cute.rank(smem))
    g = cute.local_tile(gmem, (b.rows, b.cols), (None,) * cute.rank(gmem))
    return cpasync.tma_partition(b.atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))


def allocate(smem, op: TmaOperand, dtype):
    """Allocate the stages of an operand in shared memory, aligned to 1024 bytes as a swizzle of 128 bytes needs."""
    return smem.allocate_tensor(dtype, op.layout.outer, 1024, op.layout.inner)


def vector(src, dst):
    """Copy src to dst as `cute.autovec_copy` does.

    Up to 16 bytes, which must be contiguous and aligned, are one copy atom: it traces a tenth of the operations."""
    n = cute.size(src)
    if n * src.element_type.width > 128:
        return cute.autovec_copy(src, dst)
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), src.element_type, num_bits_per_copy=n * src.element_type.width
    )
    src, dst = (x if isinstance(x.shape, tuple) else cute.make_tensor(x.iterator, (n,)) for x in (src, dst))
    cute.copy_atom_call(atom, src, dst)
