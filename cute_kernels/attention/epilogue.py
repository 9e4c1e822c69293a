"""Stores of the output, from registers: normalised fp32 values to 16 bits, e4m3 or NVFP4, or to the scratch of a split
tile; and the LSE. The caller must leave out rows outside the sequence."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr

from ..device import copy, nvfp4, warp
from . import block_scales, softmax
from .logits import LOG2_E
from .schedule import work
from .schedule.work import WorkTileInfo
from .spec import LSE_INF, LSE_MAX, LSE_NATURAL, LSE_OF_KEYS, SF_VEC_SIZE

INTEGERS = {1: Uint8, 2: Uint16, 4: Uint32}  # bytes -> type


@cute.jit
def sink_of(a, head: Int32):
    """Return a head's sink in natural-log units, -inf if the call has none."""
    sink = -Float32.inf
    if a.out.sink.shape[0] > 0:
        sink = a.out.sink[head]
    return sink


def output_scale(a):
    """Return the scale of the output."""
    return softmax.device_scale(a.out.out_scale, a.out.out_scale_ptr)


@cute.jit
def store_lse(a, token: Int32, head: Int32, lse: Float32, mine):
    """Store the LSE of a row, if the call wants it. mine: true in the one thread that stores it."""
    out = a.out.lse  # by itself: a branch that stores to `a` would carry all of its fields
    if mine and out.shape[0] > 0:
        if const_expr(a.out.lse_form is not None):
            lse = formed_lse(a.out.lse_form, lse)
        out[token, head] = lse


@cute.jit
def store_max(a, token: Int32, head: Int32, top: Float32, mine):
    """Store the largest logit of a row, in log2 units, if the call wants it. Only kernels that split no keys know it.
    mine: as in `store_lse`."""
    if const_expr(a.out.lse_form is not None):
        out = a.out.lse
        if mine and (a.out.lse_form & LSE_MAX) != 0:
            out[token, a.query.q.shape[1] + head] = top * const_expr(1.0 / LOG2_E)


@cute.jit
def formed_lse(form: Int32, lse: Float32):
    """Return an LSE of base 2 in the form that a call wants."""
    if (form & LSE_NATURAL) != 0:
        lse *= const_expr(1.0 / LOG2_E)
    if (form & LSE_INF) != 0 and lse == -Float32.inf:
        lse = Float32.inf
    return lse


@cute.jit
def lse_of(a, lse: Float32, top: Float32, total: Float32):
    """Return the LSE of a row that a call wants: `lse`, with the sink, or that of the keys alone. Their sum is total *
    2^top, 0 for a row without keys."""
    if const_expr(a.out.lse_form is not None):
        if (a.out.lse_form & LSE_OF_KEYS) != 0:
            lse = top + cute.math.log2(total, fastmath=True)  # of 0: -inf
    return lse


def first_piece(spec, w: WorkTileInfo, size: int):
    """Return the number, in an output row, of the first piece of `size` values that a tile has: 0, known at trace time,
    unless several tiles share the columns of O."""
    return work.o_tile(w) * (spec.tile_vo // size)


def stores_lse(spec, w: WorkTileInfo, mine):
    """Return whether a thread stores the LSE of a row: `mine`, of the tile that has the first columns of O."""
    return mine if spec.tile.o_tiles == 1 else mine & (w.o_tile == 0)


@cute.jit
def store_piece(
    spec: cutlass.Constexpr,
    a,
    token: Int32,
    head: Int32,
    piece: Int32,
    values: cute.Tensor,
    sf_lanes: cutlass.Constexpr,
    keep=True,
):
    """Store at most 16 values as the `piece`-th piece of an output row, in the type that the call asks for. sf_lanes:
    the lanes lane ^ m, for every sum m of them, have the other pieces of a block of 16 values. keep: whether the row
    has the piece; lanes without it must call, too."""
    if const_expr("nvfp4" in spec.out):
        if a.out.o_fp4.shape[0] > 0:
            store_nvfp4(a, token, head, piece, values, sf_lanes, keep)
        elif a.out.o_fp8.shape[0] > 0:
            store_elements(a.out.o_fp8[token, head, None], warp.convert8, piece, values, keep)
        else:
            store_elements(a.out.o[token, head, None], warp.convert16, piece, values, keep)
    else:
        store_elements(a.out.o[token, head, None], warp.convert16, piece, values, keep)


@cute.jit
def store_elements(row: cute.Tensor, convert: cutlass.Constexpr, piece: Int32, values: cute.Tensor, keep):
    target = cute.local_tile(row, (cute.size(values),), (piece,))
    out = cute.make_rmem_tensor(cute.size(values), target.element_type)
    convert(values, out)
    if keep:
        copy.vector(out, target)


@cute.jit
def store_nvfp4(a, token: Int32, head: Int32, piece: Int32, values: cute.Tensor, sf_lanes: cutlass.Constexpr, keep):
    n = const_expr(cute.size(values))
    # scale factor of the block, over the lanes that share it
    f = nvfp4.compute_sf(nvfp4.block_amax(values, sf_lanes), a.out.o_sf_scale)
    # codes
    target = cute.local_tile(a.out.o_fp4[token, head, None], (n // 2,), (piece,))
    out = cute.make_rmem_tensor(n // 2, target.element_type)
    each = const_expr(min(n, 8))  # codes per word
    words = cute.recast_tensor(out, INTEGERS[each // 2])
    for i in cutlass.range_constexpr(n // each):
        some = cute.make_tensor(values.iterator + i * each, cute.make_layout(each))
        words[i] = nvfp4.codes(some, f).to(INTEGERS[each // 2])
    if keep:
        copy.vector(out, target)
        # one lane per block stores the scale factor
        if cute.arch.lane_idx() & sum(sf_lanes) == 0:
            block_scales.store_sf(a, token, head, piece * n // SF_VEC_SIZE, f)


@cute.jit
def store_partial(spec: cutlass.Constexpr, a, slot: Int32, row: Int32, piece: Int32, values: cute.Tensor, lse: Float32):
    """Store values in fp32 as the `piece`-th piece of a row of a split; the first piece also stores the LSE."""
    target = a.schedule.o_partial[slot, row, None]
    copy.vector(values, cute.local_tile(target, (cute.size(values),), (piece,)))
    if piece == 0:
        target[spec.tile_vo] = lse
