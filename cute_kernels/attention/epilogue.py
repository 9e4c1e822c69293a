"""Where a row of the output goes: fp32 values, normalised, to 16 bits, e4m3, NVFP4 or a part of a split tile; and its
LSE. Straight from registers; rows outside the request are left alone."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr

from ..device import copy, warp
from . import nvfp4, softmax
from .spec import SF_VEC_SIZE

INTEGERS = {1: Uint8, 2: Uint16, 4: Uint32}  # by their bytes


@cute.jit
def sink_of(a, head: Int32):
    """A head's sink, natural-log units, -inf where the call has none."""
    sink = -Float32.inf
    if a.out.sink.shape[0] > 0:
        sink = a.out.sink[head]
    return sink


def output_scale(a):
    """The factor on the output."""
    return softmax.device_scale(a.out.out_scale, a.out.out_scale_ptr)


@cute.jit
def store_lse(a, token: Int32, head: Int32, lse: Float32, mine):
    """LSE of a row, by the thread that it is the business of (`mine`), where the call wants it."""
    out = a.out.lse  # alone: a branch that stores to `a` carries all that it holds
    if mine and out.shape[0] > 0:
        out[token, head] = lse


@cute.jit
def store_piece(
    spec: cutlass.Constexpr,
    a,
    token: Int32,
    head: Int32,
    piece: Int32,
    values: cute.Tensor,
    sf_lanes: cutlass.Constexpr,
):
    """At most 16 values as piece number `piece` of a row of the output, in the type that the call asks for. sf_lanes:
    lanes lane ^ m, m being any sum of them, have the other pieces of a block of 16 values."""
    if const_expr("nvfp4" in spec.out):
        if a.out.o_fp4.shape[0] > 0:
            store_nvfp4(a, token, head, piece, values, sf_lanes)
        elif a.out.o_fp8.shape[0] > 0:
            store_e4m3(a, token, head, piece, values)
        else:
            store_16bit(a, token, head, piece, values)
    else:
        store_16bit(a, token, head, piece, values)


@cute.jit
def store_16bit(a, token: Int32, head: Int32, piece: Int32, values: cute.Tensor):
    target = cute.local_tile(a.out.o[token, head, None], (cute.size(values),), (piece,))
    out = cute.make_rmem_tensor(cute.size(values), target.element_type)
    warp.convert16(values, out)
    copy.vector(out, target)


@cute.jit
def store_e4m3(a, token: Int32, head: Int32, piece: Int32, values: cute.Tensor):
    n = cute.size(values)
    target = cute.local_tile(a.out.o_fp8[token, head, None], (n,), (piece,))
    out = cute.make_rmem_tensor(n, target.element_type)
    warp.convert8(values, out)
    copy.vector(out, target)


@cute.jit
def store_nvfp4(a, token: Int32, head: Int32, piece: Int32, values: cute.Tensor, sf_lanes: cutlass.Constexpr):
    n = const_expr(cute.size(values))
    f = nvfp4.compute_sf(nvfp4.block_amax(values, sf_lanes), a.out.o_sf_scale)
    target = cute.local_tile(a.out.o_fp4[token, head, None], (n // 2,), (piece,))
    out = cute.make_rmem_tensor(n // 2, target.element_type)
    each = const_expr(min(n, 8))  # that a word has
    words = cute.recast_tensor(out, INTEGERS[each // 2])
    for i in cutlass.range_constexpr(n // each):
        some = cute.make_tensor(values.iterator + i * each, cute.make_layout(each))
        words[i] = nvfp4.codes(some, f).to(INTEGERS[each // 2])
    copy.vector(out, target)
    if cute.arch.lane_idx() & sum(sf_lanes) == 0:
        nvfp4.store_sf(a, token, head, piece * n // SF_VEC_SIZE, f)


@cute.jit
def store_partial(spec: cutlass.Constexpr, a, slot: Int32, row: Int32, piece: Int32, values: cute.Tensor, lse: Float32):
    """Few values as piece number `piece` of a row of a part of a tile, in fp32; LSE with the first."""
    target = a.schedule.o_partial[slot, row, None]
    copy.vector(values, cute.local_tile(target, (cute.size(values),), (piece,)))
    if piece == 0:
        target[spec.head_dim_vo] = lse
