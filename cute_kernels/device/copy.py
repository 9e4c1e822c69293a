"""TMA operands (copy atom, global tensor, shared-memory layout), and vectorised copies.

The stages of an operand, from the host to the copy:

    k = copy.operand(rows, (128, head_dim), stages, (128,))      # host: boxes of 128 rows
    smem_k = copy.allocate(smem, k, dtype)                       # device: (rows, cols, stages), swizzled
    s, g = copy.partition(k.boxes[0], smem_k, k.boxes[0].gmem)   # views for cute.copy(box.atom, g[...], s[...])
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .layout import smem_layout, width

SWIZZLE_BYTES = 128  # the widest row of a box
LINE_BYTES = 128  # per line of a dense operand


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
    rest: tuple[TmaBox, ...] = ()  # as boxes, of a tensor with the columns of a stage behind those of the first one


@dataclass(frozen=True)
class DenseOperand(TmaOperand):
    """An operand with contiguous rows in shared memory: they have no padding and no swizzle. If the rows are contiguous
    in global memory too, TMA can copy them as lines of LINE_BYTES, whatever the length of a row. Lines are faster,
    because TMA takes as long for a row of 32 bytes as for a row of 128 bytes."""

    line_boxes: tuple[TmaBox, ...] = ()  # the same bytes as those of `boxes`, as lines
    line_layout: Any = None  # cute.Layout: (lines, LINE_BYTES, stages) in shared memory
    as_lines: Any = 0  # cutlass.Int32: whether the rows are contiguous in global memory


def make_box(t, rows, cols, multicast=False):
    """Return the box of `rows` rows of t (rows, cols or fewer, ...), with a stride of 1 along cols.

    The box is as wide as the widest swizzle allows: at most SWIZZLE_BYTES. multicast: a copy writes to several CTAs of
    a cluster."""
    bits = t.element_type.width
    shape = rows, width(cols * bits // 8) * 8 // bits
    layout = cute.select(smem_layout(shape, 1, t.element_type), mode=[0, 1])
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    atom, gmem = cpasync.make_tiled_tma_atom(op, t, layout, shape)
    return TmaBox(atom, gmem, *shape)


def operand(t, shape, stages, rows, rest=None, multicast=False):
    """Return the operand that fills stages of `shape` (rows, cols) from t (rows, cols or fewer, ...): TMA fills columns
    that t does not have with zeros.

    rows: heights of the boxes, ascending. rest: None, or a tensor with the columns behind those of t, which then has a
    whole number of boxes of them. multicast: as in `make_box`."""
    layout = smem_layout(shape, stages, t.element_type)
    size = cute.size_in_bytes(t.element_type, cute.select(layout, mode=[0, 1]))
    boxes, more = ([make_box(x, r, shape[1], multicast) for r in rows] if x is not None else [] for x in (t, rest))
    return TmaOperand(tuple(boxes), layout, size, tuple(more))


def make_dense_box(t, rows, cols):
    """Return the box of `rows` rows of t (rows, cols, ...), as wide as t, without a swizzle."""
    layout = cute.make_layout((rows, cols), stride=(cols, 1))
    atom, gmem = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, layout, (rows, cols))
    return TmaBox(atom, gmem, rows, cols)


def dense_operand(t, shape, stages, rows):
    """Return the `DenseOperand` that fills stages of `shape` (rows, cols) from t (rows, cols, ...) of 8 bits.

    cols: a multiple of 16. rows: heights of the boxes, ascending, multiples of 8, so that boxes consist of whole lines.
    Whoever copies lines must make sure that t, too, has a multiple of 8 rows."""
    n, cols = shape
    layout = cute.make_layout((n, cols, stages), stride=(cols, 1, n * cols))
    line_layout = cute.make_layout((n * cols // LINE_BYTES, LINE_BYTES, stages), stride=(LINE_BYTES, 1, n * cols))
    count = cutlass.max(t.shape[0] * cols // LINE_BYTES, 1)  # TMA needs a row, also if t is too short for a line
    lines = cute.make_layout((count, LINE_BYTES, *t.shape[2:]), stride=(LINE_BYTES, 1, *t.stride[2:]))
    line_boxes = (make_dense_box(cute.make_tensor(t.iterator, lines), r * cols // LINE_BYTES, LINE_BYTES) for r in rows)
    boxes = (make_dense_box(t, r, cols) for r in rows)
    as_lines = cutlass.Int32(t.stride[0] == cols)
    return DenseOperand(tuple(boxes), layout, n * cols, (), tuple(line_boxes), line_layout, as_lines)


def partition(b: TmaBox, smem, gmem):
    """Return views for `cute.copy`: (smem[box, row tile, col tile, stage], gmem[box, row tile, col tile, ...])."""
    s = cute.local_tile(smem, (b.rows, b.cols), (None,) * cute.rank(smem))
    g = cute.local_tile(gmem, (b.rows, b.cols), (None,) * cute.rank(gmem))
    return cpasync.tma_partition(b.atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))


def allocate(smem, op: TmaOperand, dtype):
    """Allocate the stages of an operand in shared memory, aligned to 1024 bytes as a swizzle of 128 bytes needs."""
    if not isinstance(op.layout, cute.ComposedLayout):
        return smem.allocate_tensor(dtype, op.layout, 1024)
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
