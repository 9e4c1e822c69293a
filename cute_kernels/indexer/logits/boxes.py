"""Blocks of keys as boxes of TMA: where a page has a whole number of blocks, and rows and pages lie at multiples of 16
bytes (`IndexerArgs.boxes`), one copy takes the keys of a block, and another one their scales.

A page that does not exist lies outside the tensors, so that TMA fills its boxes with zeros. A box may have keys behind
the end of a request: nobody stores their logits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ... import abi
from ...device import copy, pipeline, warp
from . import KEYS

ALIGN = 16  # bytes, of the addresses and strides that TMA takes


@dataclass(frozen=True)
class KeyBoxes:
    """keys: (rows of a page, D, pages). scales: (pages, rows of a page). Without a page table there is one page."""

    keys: copy.TmaBox
    scales: copy.TmaBox


def make(spec, a) -> KeyBoxes:
    """Make the descriptors of a launch. Called on the host.

    If `a.boxes` is 0, nobody uses them: then addresses and strides, which may be any, are rounded to what TMA takes."""
    kind, paged, page_stride = abi.DTYPES[spec.keys], a.table.shape[0] > 0, Int64(a.k.stride[0])
    address, own = a.k.iterator.toint(), a.k_scale.iterator.toint()
    scales = warp.select(paged, address + Int64(a.k.shape[1]) * spec.row_bytes, own)
    rows = cutlass.max(warp.select(paged, Int32(a.k.shape[1]), Int32(a.k.shape[0])), 1)
    pages = cutlass.max(warp.select(paged, Int32(a.k.shape[0]), Int32(1)), 1)
    row_stride = warp.select(paged, Int64(spec.row_bytes), page_stride)
    k = cute.make_layout((rows, spec.dim, pages), stride=(steps(row_stride, kind), 1, steps(page_stride, kind)))
    k_scale = cute.make_layout((pages, rows), stride=(steps(page_stride, Float32), 1))
    return KeyBoxes(
        copy.make_box(cute.make_tensor(aligned(address, kind), k), KEYS, spec.dim),
        copy.make_dense_box(cute.make_tensor(aligned(scales, Float32), k_scale), 1, KEYS),
    )


def aligned(address: Int64, dtype):
    """Return a pointer to an address, rounded to a multiple of ALIGN that is not 0."""
    rounded = cutlass.max(address // ALIGN, Int64(1)) * ALIGN
    return cute.make_ptr(dtype, rounded, cute.AddressSpace.gmem, assumed_align=ALIGN)


def steps(stride: Int64, dtype):
    """Return a stride in elements, of bytes that are rounded to a multiple of ALIGN, at least one."""
    each = ALIGN * 8 // dtype.width
    return cute.assume(cutlass.max(stride // ALIGN, Int64(1)) * each, divby=each)


def prefetch(boxes: KeyBoxes):
    """Fetch the descriptors before the first copies need them. Called by one warp."""
    for box in (boxes.keys, boxes.scales):
        cpasync.prefetch_descriptor(box.atom)


def bytes_of_block(spec):
    """Return the bytes of the boxes of a block."""
    return KEYS * (spec.row_bytes + Float32.width // 8)


@cute.jit
def copy_block(spec: cutlass.Constexpr, a, boxes: KeyBoxes, s, page: Int32, row: Int32, item: Int32):
    """Copy a block of keys to its stage of k_pipe, from row `row` of a page on; without a page table, from key `page`
    on. Called by one warp, each lane of which arrives at the full barrier."""
    if a.table.shape[0] == 0:
        page, row = Int32(0), page
    full, stage = pipeline.full_barrier(s.k_pipe, item), pipeline.stage(s.k_pipe, item)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, const_expr(bytes_of_block(spec)))
    else:
        cute.arch.mbarrier_arrive(full)
    into, keys = copy.partition(boxes.keys, s.k, boxes.keys.gmem)
    for column in cutlass.range_constexpr(cute.size(into, mode=[2])):
        cute.copy_atom_call(
            boxes.keys.atom, keys[None, row // KEYS, column, page], into[None, 0, column, stage], tma_bar_ptr=full
        )
    to = cute.make_tensor(s.k_scale.iterator, cute.make_layout((1, *s.k_scale.shape), stride=(0, *s.k_scale.stride)))
    into, scales = copy.partition(boxes.scales, to, boxes.scales.gmem)
    cute.copy_atom_call(
        boxes.scales.atom, scales[None, page, row // KEYS], into[None, 0, 0, stage], tma_bar_ptr=full
    )  # fmt: skip
